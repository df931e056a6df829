"""What the SQLite ledger does inside of one write transaction, on an open connection.

Nothing here begins or commits, and nothing is raised that must not undo what was written: the
answer to a stale writer is returned, so that the record of it stays.
"""

from __future__ import annotations

from collections import Counter

from fencepost.errors import LeaseLost, RunLost, UnknownRun
from fencepost.ledger import sqlite_rows as sql
from fencepost.ledger.api import NOTHING
from fencepost.ledger.sqlite_batches import SqliteBatches
from fencepost.ledger.sqlite_clock import FileClock
from fencepost.model.claim import (
    Change,
    Claimed,
    Decision,
    Facts,
    Standing,
    Verdict,
    Want,
    decide,
    looked_at,
    mark_of,
    passed_on,
)
from fencepost.model.claimed import begun_record, changed_record, claimed_record, left_behind
from fencepost.model.divided import MARK_TTL
from fencepost.model.ending import UNFINISHED, Settled, ended_record, in_view_of, recorded
from fencepost.model.fenced import LEASE_CHANGED, moved_from
from fencepost.model.item import Found, ItemRecord, ItemState, find, once_each
from fencepost.model.lease import Grant
from fencepost.model.named import NamedTuple
from fencepost.model.run import HANDED_OFF, LAPSED, RunEvent, RunRecord, State, legal, why_lost
from fencepost.model.slot import RunKey, parsed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from sqlite3 import Connection

    from fencepost.ledger.api import Attempt, Report
    from fencepost.ledger.planning import Due, End
    from fencepost.stores.sqlite import SqliteStore
    from fencepost.stores.sqlite_inner import Seen
    from fencepost.world.api import World

# Attempts that are kept in mind. More than an instance has under way were lost, and nobody told us.
_MOST_BEGUN = 10_000


class Scene(NamedTuple):
    """The facts of a claim, and the rows of the leases that it may take."""

    facts: Facts
    leases: dict[str, Seen]


class Ended(NamedTuple):
    """A run whose attempt has ended, and whether that freed its lease."""

    run: RunRecord
    freed: bool


class SqliteBooks:
    """The rows of one namespace, and the leases beside them."""

    def __init__(self, world: World, leases: SqliteStore) -> None:
        self._leases, self._namespace = leases, leases.namespace
        self.clock = FileClock(world.clocks)
        self._begun: dict[str, RunRecord] = {}  # what was claimed here and has not ended
        self._batches = SqliteBatches(leases, self.clock)

    def claim_free(self, db: Connection, want: Want) -> Claimed | None:
        """Claim by one statement what nothing speaks against; None if that changed nothing."""
        ttl, clock, holder = want.policy.lease, self.clock, want.holder
        terms = self._leases.terms(holder.nonce, ttl)
        asked = (self._namespace, *want.key, want.lock, *holder, want.trigger)
        clock.expect_claim(want.since, want.until)
        before = db.total_changes  # which counts what triggers do, as a row count does not
        db.execute(sql.CLAIM_FREE, (*asked, *terms[1:], want.epoch))
        if db.total_changes == before:
            return None
        token, now = clock.claimed
        run = begun_record(want, token=token, now=now)
        self._keep_in_mind(run)
        return Claimed(Verdict.GO, run, Grant(token, ttl), now=now)

    def claim_all(self, db: Connection, slots: Sequence[Due]) -> list[Claimed | None]:
        """Claim by the batch what nothing speaks against; None for each of which something does."""
        claimed = self._batches.claim(db, slots)
        for one in claimed:
            if one is not None and one.run is not None:
                self._keep_in_mind(one.run)
        return claimed

    def _keep_in_mind(self, run: RunRecord) -> None:
        self._begun[run.holder.nonce] = run
        if len(self._begun) > _MOST_BEGUN:
            del self._begun[next(iter(self._begun))]

    def _begun_by(self, attempt: Attempt) -> RunRecord | None:
        """Return the run as its claim left it, if that is in mind, and of this very attempt."""
        begun = self._begun.get(attempt.nonce)
        return begun if begun is not None and begun.token == attempt.token else None

    def claim(self, db: Connection, want: Want, *, proofs: list[int]) -> Claimed:
        """Decide, and carry the decision out. ``proofs`` of deaths are closed after the commit."""
        now = self.clock.confirmed(db)
        scene = self._scene(db, want, proofs, now=now)
        own, decision = scene.facts.own, decide(want, scene.facts, now=now)
        for other in scene.facts.others:
            if other.key in decision.superseded:
                self._supersede(db, other, want, now=now)
        if decision.verdict is Verdict.GO:
            return self._go(db, want, scene, decision, now=now)
        if decision.change is not None:
            own = self._change(db, want, own, decision.change, now=now)
        return Claimed(
            decision.verdict,
            own,
            blocker=decision.blocker,
            holder=decision.holder,
            pause=max(0.0, decision.at - now),
            fresh=decision.change is not None,
            now=now,
        )

    def _scene(self, db: Connection, want: Want, proofs: list[int], *, now: float) -> Scene:
        own = self.find(db, want.key)
        rows = db.execute(sql.FIND_LIVE, (self._namespace, want.lock)).fetchall()
        others = [run for run in map(sql.run_of, rows) if run.key != want.key]
        others.sort(key=lambda run: (run.key.slot, run.key))
        names = {*looked_at(want), *(run.lease for run in (*others, own) if run and run.lease)}
        standings, leases = {}, {}
        for name in names:
            standings[name], leases[name] = self.standing(db, name, proofs)
        job = db.execute(sql.FIND_JOB, (self._namespace, want.key.job)).fetchone()
        *why, until, pruned = ("", "", "", 0.0, -1) if job is None else job[2:]
        quarantined, paused, retired = why
        facts = Facts(
            own,
            others,
            standings,
            quarantined=bool(quarantined),
            paused=bool(paused) and not 0.0 < until <= now,
            retired=bool(retired),
            pruned=want.key.slot <= pruned,
        )
        return Scene(facts, leases)

    def standing(self, db: Connection, name: str, proofs: list[int]) -> tuple[Standing, Seen]:
        """Return how a lease stands, and its row."""
        found = self._leases.look(db, name, proofs=proofs)
        if found is None:
            return Standing(name), None
        record, seen = found
        standing = Standing(name, token=record.token)
        if seen.held:
            rest = (seen.holder, seen.token, seen.since, seen.expires_in)
            standing = Standing(name, seen.held, *rest)
        return standing, (record.token, int(record.held), record.beat)

    def _go(
        self, db: Connection, want: Want, scene: Scene, decision: Decision, *, now: float
    ) -> Claimed:
        own, change, lease = scene.facts.own, decision.change, decision.lease
        nonce, ttl = want.holder.nonce, want.policy.lease
        if decision.adopted:
            assert own is not None, "only a run that is there can be adopted"
            if not self._leases.extend(db, lease, nonce, own.token, ttl):
                return Claimed(Verdict.BUSY, own, blocker=own, now=now)  # it ended meanwhile
            return Claimed(Verdict.GO, own, Grant(own.token, ttl, adopted=True), now=now)
        assert change is not None, "whoever may go has something to change"
        self._tell_left(db, own, change, now=now)
        if own is not None and moved_from(own, lease):
            self._tell(db, own, LEASE_CHANGED, now=now, detail=own.lease)
        for other in passed_on(scene.facts, lease):
            if not self._was_told(db, other, LAPSED):
                self._tell(db, other, LAPSED, now=now, detail=str(want.key))
        if lease != want.lock:
            mark, seen = mark_of(want, scene.facts), scene.leases[want.lock]
            self._leases.give(db, want.lock, mark, MARK_TTL, seen=seen, above=0)
        above = 0 if own is None else own.token
        grant = self._leases.give(
            db, lease, want.holder, ttl, seen=scene.leases[lease], above=above
        )
        run = claimed_record(want, own, change, lease=lease, token=grant.token, now=now)
        return Claimed(Verdict.GO, self.put(db, run, before=own), grant, now=now)

    def _change(
        self, db: Connection, want: Want, own: RunRecord | None, change: Change, *, now: float
    ) -> RunRecord:
        self._tell_left(db, own, change, now=now)
        if change.quarantine:
            job = want.key.job
            db.execute(sql.QUARANTINE, (self._namespace, job, str(want.key)))
        return self.put(db, changed_record(want, own, change, now=now), before=own)

    def _supersede(self, db: Connection, run: RunRecord, want: Want, *, now: float) -> None:
        settled = Settled(State.FAILED, "superseded", error=run.error)
        ended = ended_record(run, settled, now=now)._replace(blocker=str(want.key))
        self.put(db, ended, before=run)

    # What an attempt writes.

    def beat(self, db: Connection, attempt: Attempt, ttl: float, report: Report) -> bool | RunLost:
        """Renew the lease and take the report."""
        now, key = self.clock.confirmed(db), self._key(attempt)
        found = db.execute(sql.BEAT, (now, report.done, report.total, *key)).fetchall()
        if not found:
            return self.stale(db, attempt, "beat")
        handed_off = found[0][1] == HANDED_OFF  # then only ``hand_over`` moves the end of its lease
        if not (
            handed_off or self._leases.extend(db, attempt.lease, attempt.nonce, attempt.token, ttl)
        ):
            raise LeaseLost(attempt.lease, token=attempt.token, reason="it ran out")
        self._count(db, attempt.key, report)
        return bool(found[0][0])

    def save(
        self,
        db: Connection,
        attempt: Attempt,
        checkpoint: str,
        report: Report,
        order: int | None = None,
    ) -> bool | RunLost:
        """Keep a checkpoint, unless a later one is there already."""
        now, key = self.clock.now(db), self._key(attempt)
        values = (now, report.done, report.total, *(order, checkpoint) * 3, order)
        found = db.execute(sql.SAVE, (*values, *key)).fetchall()
        if not found:
            return self.stale(db, attempt, "save")
        self._count(db, attempt.key, report)
        return bool(found[0][0])

    def begin(
        self,
        db: Connection,
        attempt: Attempt,
        scope: str,
        items: Sequence[str],
        call: str,
        *,
        repeat: bool,
    ) -> list[Found] | RunLost:
        """Begin items, each once however often it is named."""
        if not self.has(db, attempt):
            return self.stale(db, attempt, "begin")
        found = {
            item: self._begin(db, attempt, scope, item, call, repeat=repeat)
            for item in dict.fromkeys(items)
        }
        return once_each(items, found)

    def _begin(
        self, db: Connection, attempt: Attempt, scope: str, item: str, call: str, *, repeat: bool
    ) -> Found:
        at = (self._namespace, scope, item)
        begun = (attempt.token, str(attempt.key), call, self.clock.now(db))
        if db.execute(sql.BEGIN_FIRST, (*at, *begun)).rowcount:
            return Found.FIRST
        known = sql.item_of(db.execute(sql.FIND_ITEM, at).fetchone())
        found = find(
            known,
            token=attempt.token,
            call=call,
            begun_by_living=self._has_run(db, known),
            repeat=repeat,
        )
        if found.go:
            db.execute(sql.BEGIN_AGAIN, (*begun, *at))
        return found

    def _has_run(self, db: Connection, item: ItemRecord) -> bool:
        """Say whether the attempt that began an item still has its run."""
        run = self.find(db, parsed(item.run))
        return run is not None and run.state is State.RUNNING and run.token == item.token

    def end(
        self,
        db: Connection,
        attempt: Attempt,
        scope: str,
        items: Sequence[tuple[str, ItemState, str | None]],
        call: str | None = None,
    ) -> RunLost | None:
        """End items that this attempt began."""
        if not self.has(db, attempt):
            return self.stale(db, attempt, "end")
        now, ours = self.clock.now(db), (str(attempt.key), attempt.token, call)
        for item, state, error in items:
            values = (state.value, error, now, self._namespace, scope, item, *ours)
            db.execute(sql.END, values)
        return None

    def finish_for_good(
        self, db: Connection, attempt: Attempt, settled: Settled, report: Report
    ) -> RunRecord | None:
        """End the attempt in one statement, if that is all there is to it; None if it is not.

        What nobody but this attempt could change is not read again: it is as the claim left it.
        """
        begun = self._begun_by(attempt)
        if begun is None:
            return None
        now = self.clock.now(db)
        state, reason, _, result, error = settled
        done, total, *_ = report
        ended = (state._value_, reason, now, now, result, error)
        values = (*ended, done, total, *self._key(attempt))
        silent = done is None and total is None
        if silent and db.execute(sql.FINISH_SILENT, values).rowcount:
            return ended_record(begun, settled, now=now)
        rows = db.execute(sql.FINISH, values).fetchall()
        if not rows:
            return None
        cancel_at, streak, strikes, checkpoint, done, total, saves = rows[0]
        return ended_record(begun, settled, now=now)._replace(
            cancel_at=cancel_at,
            streak=streak,
            strikes=strikes,
            checkpoint=checkpoint,
            done=done,
            total=total,
            saves=saves,
        )

    def finish_all(self, db: Connection, ends: Sequence[End]) -> list[RunRecord | None]:
        """End attempts by the batch, of which that is all there is to it; None for the others."""
        ended: list[RunRecord | None] = [None] * len(ends)
        # Of an attempt that is said to have ended twice, the first word counts: one by one.
        told = Counter(end.attempt.nonce for end in ends)
        usual = [
            (number, end, begun)
            for number, end in enumerate(ends)
            if end.settled.state.terminal
            and end.report == NOTHING
            and told[end.attempt.nonce] == 1
            and (begun := self._begun_by(end.attempt)) is not None
        ]
        found = self._batches.finish(db, [(end, begun) for _, end, begun in usual])
        for (number, _, _), run in zip(usual, found, strict=True):
            ended[number] = run
        return ended

    def forget(self, nonce: str) -> None:
        """Keep nothing of an attempt in mind that has ended."""
        self._begun.pop(nonce, None)

    def finish(
        self, db: Connection, attempt: Attempt, settled: Settled, report: Report
    ) -> Ended | RunLost:
        """End the attempt; its lease is released by the file itself."""
        run = self.find(db, attempt.key)
        if run is not None and recorded(run, settled, token=attempt.token, nonce=attempt.nonce):
            return Ended(run, freed=False)
        if run is None or not _is_by(run, attempt):
            return self.stale(db, attempt, "finish")
        now, settled = self.clock.now(db), in_view_of(run, settled)
        if settled.state in UNFINISHED:
            detail = settled.error or ""
            self._tell(db, run, UNFINISHED[settled.state], now=now, detail=detail)
        self._count(db, run.key, report)
        ended = ended_record(_reported(run, report), settled, now=now)
        self.put(db, ended, before=run)
        return Ended(ended, freed=True)

    def hand_over(self, db: Connection, attempt: Attempt, ttl: float) -> RunLost | None:
        """Entrust the attempt to whoever knows its token."""
        run = self.find(db, attempt.key)
        if run is not None and run.was_ended_by(attempt.token, attempt.nonce):
            return None
        if run is None or not _is_by(run, attempt):
            return self.stale(db, attempt, "hand_over")
        if not self._leases.entrust(db, attempt.lease, attempt.nonce, attempt.token, ttl):
            raise LeaseLost(attempt.lease, token=attempt.token, reason="it ran out")
        now = self.clock.now(db)
        if not run.handed_off:
            self._tell(db, run, HANDED_OFF, now=now)
        db.execute(sql.HAND_OVER, (now, *self._key(attempt)))
        return None

    def order_stop(self, db: Connection, attempt: Attempt) -> bool:
        """Keep that the process of the attempt was ordered to stop."""
        return db.execute(sql.ORDER_STOP, self._key(attempt)).rowcount > 0

    def cancel(
        self, db: Connection, key: RunKey, operator: str, *, force: bool, only_waiting: bool
    ) -> Ended:
        """Cancel what does not run; ask what runs, or take it away."""
        before = self.find(db, key)
        if before is None:
            raise UnknownRun(str(key))
        if before.state.terminal or (only_waiting and not before.fresh):
            return Ended(before, freed=False)
        now, token = self.clock.now(db), 0
        run = before._replace(cancel_at=before.cancel_at or now)
        if run.state is State.RUNNING and not force:
            self._tell(db, run, "cancel_requested", now=now, detail=operator)
            return Ended(self.put(db, run, before=before), freed=False)
        if run.state is State.RUNNING:
            why = f"run {key} was cancelled"
            token = self._leases.revoke(db, run.lease, run.holder.nonce, operator, why)
            self._tell(db, run, "cancel_forced", now=now, detail=operator)
            run = run._replace(token=max(run.token, token))
        settled = Settled(State.CANCELLED, "cancelled", error=run.error)
        ended = self.put(db, ended_record(run, settled, now=now), before=before)
        return Ended(ended, freed=token > 0)

    # Rows.

    def find(self, db: Connection, key: RunKey) -> RunRecord | None:
        """Return a run."""
        row = db.execute(sql.FIND, (self._namespace, *key)).fetchone()
        return None if row is None else sql.run_of(row)

    def put(self, db: Connection, run: RunRecord, *, before: RunRecord | None) -> RunRecord:
        """Keep a run as it is now, if it may become that."""
        assert legal(before and before.state, run.state), f"{before} cannot become {run}"
        if before is None:
            db.execute(sql.INSERT, (self._namespace, *sql.row_of(run)))
            return run
        seen = (before.state.value, before.token, before.holder.nonce)
        values = (*sql.changes_of(run), self._namespace, *run.key, *seen)
        changed = db.execute(sql.UPDATE, values).rowcount
        assert changed == 1, "nobody else can write while we do"
        return run

    def _key(self, attempt: Attempt) -> tuple[str | int, ...]:
        """Return what finds the run of an attempt, as long as the attempt has it."""
        return (self._namespace, *attempt.key, attempt.token, attempt.nonce)

    def has(self, db: Connection, attempt: Attempt) -> bool:
        """Say whether an attempt still has its run."""
        return db.execute(sql.HAS, self._key(attempt)).fetchone() is not None

    def stale(self, db: Connection, attempt: Attempt, what: str) -> RunLost:
        """Record a write that came too late; return what to tell its writer."""
        run = self.find(db, attempt.key)
        if run is None:
            reason = "the ledger has no record"
            return RunLost(str(attempt.key), token=attempt.token, reason=reason)
        if not (what == "beat" and run.was_ended_by(attempt.token, attempt.nonce)):
            now = self.clock.now(db)
            event = RunEvent(attempt.key, now, "stale_write", attempt.token, attempt.holder, what)
            self.append(db, event)
        return RunLost(str(attempt.key), token=attempt.token, reason=why_lost(run))

    def _count(self, db: Connection, key: RunKey, report: Report) -> None:
        for name, value in report.counts:
            db.execute(sql.COUNT, (self._namespace, *key, name, report.source, value))

    def _tell_left(
        self, db: Connection, own: RunRecord | None, change: Change, *, now: float
    ) -> None:
        left = left_behind(own, change)
        if own is not None and left is not None:
            self._tell(db, own, left[0], now=now, detail=left[1])

    def _tell(
        self, db: Connection, run: RunRecord, what: str, *, now: float, detail: str = ""
    ) -> None:
        self.append(db, RunEvent(run.key, now, what, run.token, str(run.holder), detail))

    def _was_told(self, db: Connection, run: RunRecord, what: str) -> bool:
        """Say whether this was told of the attempt that has a run."""
        told = db.execute(sql.FIND_EVENTS, (self._namespace, *run.key)).fetchall()
        return any((kind, token) == (what, run.token) for _, kind, token, *_ in told)

    def append(self, db: Connection, event: RunEvent) -> None:
        """Keep an event."""
        db.execute(sql.TELL, (self._namespace, *event.key, *event[1:]))


def _is_by(run: RunRecord, attempt: Attempt) -> bool:
    """Say whether the attempt still has the run."""
    ours = (run.token, run.holder.nonce) == (attempt.token, attempt.nonce)
    return ours and run.state is State.RUNNING


def _reported(run: RunRecord, report: Report) -> RunRecord:
    if report.done is not None:
        run = run._replace(done=report.done)
    return run if report.total is None else run._replace(total=report.total)
