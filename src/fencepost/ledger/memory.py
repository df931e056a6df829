"""The reference: every ledger must be observably equal to this one, which is a few dictionaries.

It shares the lock and the leases of a ``MemoryStore``, so that a claim and its lease are one step.
"""

from __future__ import annotations

from fencepost.errors import LeaseLost, RunLost, UnknownRun
from fencepost.ledger.api import NOTHING, Attempt, LedgerAbilities, Report
from fencepost.ledger.memory_planner import MemoryPlanner
from fencepost.ledger.retention import scopes_of
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
from fencepost.model.claimed import changed_record, claimed_record, left_behind
from fencepost.model.definition import JobRecord
from fencepost.model.divided import MARK_TTL
from fencepost.model.ending import UNFINISHED, Settled, ended_record, in_view_of, recorded
from fencepost.model.fenced import LEASE_CHANGED, moved_from
from fencepost.model.item import Found, ItemRecord, ItemState, begun_by, find, once_each
from fencepost.model.run import (
    HANDED_OFF,
    LAPSED,
    STOPPING,
    RunEvent,
    RunRecord,
    State,
    legal,
    newest,
    why_lost,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from fencepost.ledger.planning import InstanceRecord, Lane, SpanRecord
    from fencepost.ledger.retention import Slot
    from fencepost.model.cohort import Cohort
    from fencepost.model.definition import Definition
    from fencepost.model.slot import RunKey
    from fencepost.stores.memory import MemoryStore
    from fencepost.world.api import World


class MemoryBooks:
    """What several ``MemoryLedger`` objects of one process share."""

    def __init__(self) -> None:
        self.runs: dict[RunKey, RunRecord] = {}
        self.items: dict[tuple[str, str], ItemRecord] = {}
        self.events: list[RunEvent] = []
        self.counts: dict[RunKey, dict[tuple[str, str], int]] = {}
        self.jobs: dict[str, JobRecord] = {}
        self.spans: dict[str, list[SpanRecord]] = {}
        self.lanes: dict[int, Lane] = {}
        self.instances: dict[str, InstanceRecord] = {}
        self.members: dict[tuple[str, str], str] = {}  # (instance, job): the digest it shares
        self.cohorts: dict[tuple[str, str], tuple[Cohort, Definition]] = {}

    def count_items(self, slot: Slot) -> int:
        """Return how many items the runs of a slot have."""
        scopes = scopes_of(key for key in self.runs if key[:3] == slot)
        return sum(scope in scopes for scope, _ in self.items)

    def forget(self, keys: Sequence[RunKey]) -> None:
        """Delete old runs with all that is theirs, and the ranges that jobs' marks have passed."""
        for job, spans in self.spans.items():
            mark = self.jobs[job].pruned if job in self.jobs else -1
            self.spans[job] = [record for record in spans if record.span.last > mark]
        for key in keys:
            del self.runs[key]
            self.counts.pop(key, None)
            known = self.jobs[key.job]
            if not key.manual:
                self.jobs[key.job] = known._replace(pruned=max(known.pruned, key.slot))
        gone, left = set(keys), {key[:3] for key in self.runs}
        self.events = [event for event in self.events if event.key not in gone]
        scopes = {scope for scope, slot in scopes_of(keys).items() if slot not in left}
        self.items = {
            place: item
            for place, item in self.items.items()
            if place[0] not in scopes or item.state is ItemState.BEGUN
        }


class MemoryLedger:
    """Runs in dictionaries, under the lock of the store that has the leases."""

    abilities = LedgerAbilities(durable=False, shared=False, transactional=False)

    def __init__(self, world: World, leases: MemoryStore) -> None:
        self._world, self.leases = world, leases

    @property
    def planner(self) -> MemoryPlanner:
        """What instances ask."""
        return MemoryPlanner(self._world, self)

    @property
    def books(self) -> MemoryBooks:
        """What is written."""
        beside, name = self.leases.beside, f"ledger/{self.leases.namespace}"
        books = beside.get(name) or beside.setdefault(name, MemoryBooks())
        assert isinstance(books, MemoryBooks), "nobody else keeps anything there"
        return books

    async def claim(self, want: Want) -> Claimed:
        """Decide, and carry the decision out."""
        with self.leases.turn:
            return self.claim_now(want)

    async def beat(self, attempt: Attempt, *, ttl: float, report: Report = NOTHING) -> bool:
        """Renew the lease and take the report."""
        with self.leases.turn:
            run, token = self._ours(attempt, "beat"), attempt.token
            if not (run.handed_off or self.leases.extend(attempt.lease, attempt.nonce, token, ttl)):
                raise LeaseLost(attempt.lease, token=attempt.token, reason="it ran out")
            self.put(self._reported(run, report)._replace(beat_at=self._world.clocks.wall()))
            return bool(run.cancel_at)

    async def save(
        self,
        attempt: Attempt,
        *,
        checkpoint: str,
        order: int | None = None,
        report: Report = NOTHING,
    ) -> bool:
        """Keep a checkpoint."""
        with self.leases.turn:
            run = self._ours(attempt, "save")
            run = self._reported(run, report)._replace(beat_at=self._world.clocks.wall())
            late = order is not None and order <= run.saves
            if checkpoint != run.checkpoint and not late:
                run = run._replace(checkpoint=checkpoint, streak=0, strikes=0)
            run = run._replace(saves=max(run.saves, order or 0))
            self.put(run)
            return bool(run.cancel_at)

    async def begin(
        self, attempt: Attempt, *, scope: str, items: Sequence[str], call: str, repeat: bool
    ) -> list[Found]:
        """Begin items."""
        with self.leases.turn:
            self._ours(attempt, "begin")
            found = {
                item: self._begin(attempt, scope, item, call, repeat=repeat)
                for item in dict.fromkeys(items)
            }
            return once_each(items, found)

    async def end(
        self,
        attempt: Attempt,
        *,
        scope: str,
        items: Sequence[tuple[str, ItemState, str | None]],
        call: str | None = None,
    ) -> None:
        """End items that this attempt began."""
        with self.leases.turn:
            self._ours(attempt, "end")
            now, key, token = self._world.clocks.wall(), str(attempt.key), attempt.token
            for item, state, error in items:
                known = self.books.items.get((scope, item))
                if known and begun_by(known, key=key, token=token, call=call):
                    ended = known._replace(state=state, error=error, at=now)
                    self.books.items[scope, item] = ended

    async def finish(
        self, attempt: Attempt, settled: Settled, *, report: Report = NOTHING
    ) -> RunRecord:
        """End the attempt and release its lease."""
        with self.leases.turn:
            return self.finish_now(attempt, settled, report)

    async def hand_over(self, attempt: Attempt, *, ttl: float) -> None:
        """Entrust the attempt to whoever knows its token."""
        with self.leases.turn:
            run = self.books.runs.get(attempt.key)
            if run is not None and run.was_ended_by(attempt.token, attempt.nonce):
                return
            run = self._ours(attempt, "hand_over")
            if not self.leases.entrust(attempt.lease, attempt.nonce, attempt.token, ttl):
                raise LeaseLost(attempt.lease, token=attempt.token, reason="it ran out")
            now = self._world.clocks.wall()
            if not run.handed_off:
                self._tell(run, HANDED_OFF, now=now)
            self.put(run._replace(reason=HANDED_OFF, beat_at=now))

    async def order_stop(self, attempt: Attempt) -> bool:
        """Keep that the process of the attempt was ordered to stop."""
        with self.leases.turn:
            run = self.books.runs.get(attempt.key)
            if run is None or run.state is not State.RUNNING or run.handed_off:
                return False
            if (run.token, run.holder.nonce) != (attempt.token, attempt.nonce):
                return False
            self.put(run._replace(reason=STOPPING))
            return True

    async def cancel(
        self, key: RunKey, *, force: bool, operator: str, only_waiting: bool = False
    ) -> RunRecord:
        """Cancel what does not run; ask what runs, or take it away."""
        with self.leases.turn:
            return self.cancel_now(key, operator, force=force, only_waiting=only_waiting)

    async def sync(self) -> None:
        """Survive no power cut, whatever is done."""

    async def note(self, key: RunKey, what: str, *, token: int = 0, detail: str = "") -> None:
        """Keep an event about a run."""
        with self.leases.turn:
            now = self._world.clocks.wall()
            self.books.events.append(RunEvent(key, now, what, token, "", detail))

    async def register(self, job: str, definition: str) -> None:
        """Keep the definition of a job."""
        with self.leases.turn:
            known = self.books.jobs.get(job, JobRecord(job))
            if not known.epoch:  # else instances decide about it
                self.books.jobs[job] = known._replace(definition=definition)

    async def lift(self, job: str) -> bool:
        """Release a job from quarantine."""
        with self.leases.turn:
            known = self.books.jobs.get(job)
            if known is None or not known.quarantined:
                return False
            self.books.jobs[job] = known._replace(quarantined="")
            return True

    async def find(self, key: RunKey) -> RunRecord | None:
        """Return a run."""
        with self.leases.turn:
            return self.books.runs.get(key)

    async def runs(
        self, job: str | None = None, *, limit: int = 30, states: Sequence[State] = ()
    ) -> list[RunRecord]:
        """Return the newest runs, by slot."""
        with self.leases.turn:
            return newest(self.books.runs.values(), job=job, limit=limit, states=states)

    async def events(self, key: RunKey) -> list[RunEvent]:
        """Return what happened to a run."""
        with self.leases.turn:
            return [event for event in self.books.events if event.key == key]

    async def items(self, scope: str, *, states: Sequence[ItemState] = ()) -> list[ItemRecord]:
        """Return the items of a scope."""
        with self.leases.turn:
            return [
                record
                for (where, _), record in sorted(self.books.items.items())
                if where == scope and (not states or record.state in states)
            ]

    async def counts(self, key: RunKey) -> dict[str, int]:
        """Return the counters of a run."""
        with self.leases.turn:
            totals: dict[str, int] = {}
            for (name, _), value in sorted(self.books.counts.get(key, {}).items()):
                totals[name] = totals.get(name, 0) + value
            return totals

    async def jobs(self) -> list[JobRecord]:
        """Return all jobs."""
        with self.leases.turn:
            return [self.books.jobs[job] for job in sorted(self.books.jobs)]

    async def now(self) -> float:
        """Return the time of the ledger's clock."""
        return self._world.clocks.wall()

    async def close(self) -> None:
        """Have nothing to close."""

    # What happens under the lock.

    def claim_now(self, want: Want) -> Claimed:
        """Decide, and carry the decision out."""
        now = self._world.clocks.wall()
        facts = self._facts(want)
        decision = decide(want, facts, now=now)
        for key in decision.superseded:
            self._supersede(key, want, now=now)
        if decision.verdict is Verdict.GO:
            return self._go(want, facts, decision, now=now)
        run = facts.own
        if decision.change is not None:
            run = self._change(want, facts.own, decision.change, now=now)
        return Claimed(
            decision.verdict,
            run,
            blocker=decision.blocker,
            holder=decision.holder,
            pause=max(0.0, decision.at - now),
            fresh=decision.change is not None,
            now=now,
        )

    def finish_now(self, attempt: Attempt, settled: Settled, report: Report) -> RunRecord:
        """End the attempt and release its lease."""
        run = self.books.runs.get(attempt.key)
        if run is not None and recorded(run, settled, token=attempt.token, nonce=attempt.nonce):
            return run
        run = self._reported(self._ours(attempt, "finish"), report)
        now = self._world.clocks.wall()
        settled = in_view_of(run, settled)
        if settled.state in UNFINISHED:
            detail = settled.error or ""
            self._tell(run, UNFINISHED[settled.state], now=now, detail=detail)
        return self.put(ended_record(run, settled, now=now))

    def cancel_now(
        self, key: RunKey, operator: str, *, force: bool, only_waiting: bool = False
    ) -> RunRecord:
        """Cancel what does not run; ask what runs, or take it away."""
        run = self.books.runs.get(key)
        if run is None:
            raise UnknownRun(str(key))
        if run.state.terminal or (only_waiting and not run.fresh):
            return run
        now = self._world.clocks.wall()
        run = run._replace(cancel_at=run.cancel_at or now)
        if run.state is State.RUNNING and not force:
            self._tell(run, "cancel_requested", now=now, detail=operator)
            return self.put(run)
        if run.state is State.RUNNING:
            why = f"run {key} was cancelled"
            token = self.leases.revoke(run.lease, run.holder.nonce, operator, why)
            self._tell(run, "cancel_forced", now=now, detail=operator)
            run = run._replace(token=max(run.token, token))
        settled = Settled(State.CANCELLED, "cancelled", error=run.error)
        return self.put(ended_record(run, settled, now=now))

    def _facts(self, want: Want) -> Facts:
        own = self.books.runs.get(want.key)
        others = sorted(
            (
                run
                for run in self.books.runs.values()
                if run.lock == want.lock and not run.state.terminal and run.key != want.key
            ),
            key=lambda run: (run.key.slot, run.key),
        )
        names = {*looked_at(want), *(run.lease for run in (*others, own) if run and run.lease)}
        job = self.books.jobs.get(want.key.job)
        return Facts(
            own,
            others,
            {name: self.standing(name) for name in names},
            quarantined=bool(job and job.quarantined),
            paused=job is not None and job.pauses(self._world.clocks.wall()),
            retired=bool(job and job.retired),
            pruned=job is not None and want.key.slot <= job.pruned,
        )

    def standing(self, name: str) -> Standing:
        """Return how a lease stands."""
        seen = self.leases.look(name)
        if seen is None or not seen.held:
            return Standing(name, token=0 if seen is None else seen.token)
        return Standing(name, True, seen.holder, seen.token, seen.since, seen.expires_in)  # noqa: FBT003

    def _go(self, want: Want, facts: Facts, decision: Decision, *, now: float) -> Claimed:
        if decision.adopted:
            assert facts.own is not None, "only a run that is there can be adopted"
            grant = self.leases.readopt(decision.lease, want.holder.nonce, want.policy.lease)
            return Claimed(Verdict.GO, facts.own, grant, now=now)
        assert decision.change is not None, "whoever may go has something to change"
        self._tell_left(facts.own, decision.change, now=now)
        if facts.own is not None and moved_from(facts.own, decision.lease):
            self._tell(facts.own, LEASE_CHANGED, now=now, detail=facts.own.lease)
        for other in passed_on(facts, decision.lease):
            if not self._was_told(other, LAPSED):
                self._tell(other, LAPSED, now=now, detail=str(want.key))
        above, lease = 0 if facts.own is None else facts.own.token, decision.lease
        grant = self.leases.give(lease, want.holder, want.policy.lease, above=above)
        if lease != want.lock:
            self.leases.mark(want.lock, mark_of(want, facts), MARK_TTL)
        change = decision.change
        run = claimed_record(want, facts.own, change, lease=lease, token=grant.token, now=now)
        return Claimed(Verdict.GO, self.put(run), grant, now=now)

    def _change(
        self, want: Want, own: RunRecord | None, change: Change, *, now: float
    ) -> RunRecord:
        self._tell_left(own, change, now=now)
        if change.quarantine:
            known = self.books.jobs.get(want.key.job, JobRecord(want.key.job))
            self.books.jobs[want.key.job] = known._replace(quarantined=str(want.key))
        return self.put(changed_record(want, own, change, now=now))

    def _supersede(self, key: RunKey, want: Want, *, now: float) -> None:
        run = self.books.runs[key]
        settled = Settled(State.FAILED, "superseded", error=run.error)
        self.put(ended_record(run, settled, now=now)._replace(blocker=str(want.key)))

    def _begin(self, attempt: Attempt, scope: str, item: str, call: str, *, repeat: bool) -> Found:
        known = self.books.items.get((scope, item))
        found = find(
            known,
            token=attempt.token,
            call=call,
            begun_by_living=known is not None and self._has_run(known),
            repeat=repeat,
        )
        if found.go:
            now, key = self._world.clocks.wall(), str(attempt.key)
            begun = ItemRecord(scope, item, ItemState.BEGUN, attempt.token, key, call, now)
            self.books.items[scope, item] = begun
        return found

    def _has_run(self, item: ItemRecord) -> bool:
        """Say whether the attempt that began an item still has its run."""
        return any(
            run.state is State.RUNNING and run.token == item.token and str(run.key) == item.run
            for run in self.books.runs.values()
        )

    def _ours(self, attempt: Attempt, what: str) -> RunRecord:
        """Return the run that an attempt wants to write to, or record it as stale and refuse."""
        run = self.books.runs.get(attempt.key)
        if run is None:
            raise RunLost(str(attempt.key), token=attempt.token, reason="the ledger has no record")
        if run.state is State.RUNNING and (run.token, run.holder.nonce) == (
            attempt.token,
            attempt.nonce,
        ):
            return run
        if not (what == "beat" and run.was_ended_by(attempt.token, attempt.nonce)):
            now = self._world.clocks.wall()
            event = RunEvent(attempt.key, now, "stale_write", attempt.token, attempt.holder, what)
            self.books.events.append(event)
        raise RunLost(str(attempt.key), token=attempt.token, reason=why_lost(run))

    def _reported(self, run: RunRecord, report: Report) -> RunRecord:
        for name, value in report.counts:
            self.books.counts.setdefault(run.key, {})[name, report.source] = value
        if report.done is not None:
            run = run._replace(done=report.done)
        return run if report.total is None else run._replace(total=report.total)

    def _tell(self, run: RunRecord, what: str, *, now: float, detail: str = "") -> None:
        event = RunEvent(run.key, now, what, run.token, str(run.holder), detail)
        self.books.events.append(event)

    def _was_told(self, run: RunRecord, what: str) -> bool:
        """Say whether this was told of the attempt that has a run."""
        about = (run.key, what, run.token)
        return any((e.key, e.what, e.token) == about for e in self.books.events)

    def _tell_left(self, own: RunRecord | None, change: Change, *, now: float) -> None:
        left = left_behind(own, change)
        if own is not None and left is not None:
            self._tell(own, left[0], now=now, detail=left[1])

    def put(self, run: RunRecord) -> RunRecord:
        """Keep a run as it is now, if it may become that."""
        before = self.books.runs.get(run.key)
        assert legal(before and before.state, run.state), f"{before} cannot become {run}"
        if before and before.state is State.RUNNING and run.state is not State.RUNNING:
            # A run that no longer runs holds no lease: whatever ends it frees what it held.
            self.leases.end(before.lease, before.holder.nonce)
        self.books.runs[run.key] = run
        return run
