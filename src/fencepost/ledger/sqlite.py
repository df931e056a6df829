"""Runs in the file that has the leases: a claim and its lease are one transaction.

Which commits must survive a power cut: the ends of runs, checkpoints, cancels, and the begin of an
item, because an effect follows. A beat need not, and neither need the end of an item: the next
commit that must will carry it along, and what is lost until then leaves the item in doubt. A claim
is carried along by the first of these, or synced by the keeper soon after; only a run that must
not be tried twice waits for it. See docs/decisions/0011-claims-settle.md.
"""

from __future__ import annotations

import os

from fencepost.errors import RunLost
from fencepost.ledger import sqlite_rows as sql
from fencepost.ledger.api import NOTHING, Attempt, LedgerAbilities, Report
from fencepost.ledger.sqlite_books import SqliteBooks
from fencepost.ledger.sqlite_rows import job_of
from fencepost.ledger.sqlite_schema import is_ready, migrate
from fencepost.ledger.sqlite_testimony import UNTOLD, Testimony, untold
from fencepost.ledger.sqlite_touches import Touches
from fencepost.model.lease import DRIFT, MARGIN
from fencepost.model.named import NamedTuple
from fencepost.model.policy import OnLoss, Overlap
from fencepost.model.run import TERMINAL, RunEvent, RunRecord, State, newest
from fencepost.model.witnessed import Commit, commit_line
from fencepost.world.sqlite import PATIENCE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from sqlite3 import Connection
    from typing import Any, TypeVar

    from fencepost.ledger.sqlite_planner import SqlitePlanner
    from fencepost.model.claim import Claimed, Want
    from fencepost.model.definition import JobRecord
    from fencepost.model.ending import Settled
    from fencepost.model.item import Found, ItemRecord, ItemState
    from fencepost.model.slot import RunKey
    from fencepost.stores.sqlite import SqliteStore
    from fencepost.world.api import Flow, World
    from fencepost.world.sqlite import SqliteFile

    T = TypeVar("T")

# A run that is shorter than this ends before its claim need be on the disk by itself.
SETTLES = 0.02
# How long a keeper waits for the file at most.
_BRIEFLY = 0.25


class Desk(NamedTuple):
    """Where user code may write in this database, guarded: connections nobody uses, the books."""

    world: World
    idle: list[SqliteFile]
    books: SqliteBooks
    leases: SqliteStore


class SqliteLedger:
    """Runs in the rows of one file."""

    def __init__(self, world: World, leases: SqliteStore) -> None:
        self._world, self.leases = world, leases
        self._file, self._namespace = leases.file, leases.namespace
        self.books = SqliteBooks(world, leases)
        self.ready: Connection | None = None  # which connection was seen to have our tables
        able = leases.capabilities
        # Where a power cut cannot be told from a pause, nothing may be forgotten by one.
        self._settles = SETTLES if leases.reserve.possible else 0.0
        self.abilities = LedgerAbilities(
            able.durable, able.shared, transactional=able.durable, settles=self._settles
        )
        self.testimony = Testimony(world, leases.file)
        self.touches = Touches()
        self._idle: list[SqliteFile] = []  # connections that no transaction uses right now
        self._planner: SqlitePlanner | None = None

    def claim(self, want: Want) -> Flow[Claimed]:
        """Decide, and carry the decision out."""
        return self._world.call(self._claim, want)

    async def beat(self, attempt: Attempt, *, ttl: float, report: Report = NOTHING) -> bool:
        """Renew the lease and take the report."""
        # As short as a renewal's: a keeper that is kept here must still be able to tell of it.
        patience = min(DRIFT * ttl + 0.6 * MARGIN, _BRIEFLY)
        return await self._world.call(
            self.written,
            lambda db: self.books.beat(db, attempt, ttl, report),
            False,  # noqa: FBT003 -- a door takes arguments by position
            patience,
            untold,
        )

    async def save(
        self,
        attempt: Attempt,
        *,
        checkpoint: str,
        order: int | None = None,
        report: Report = NOTHING,
    ) -> bool:
        """Keep a checkpoint."""
        saved = None if order is None else self._commit(attempt, saves=order)
        return await self._world.call(
            self.written,
            lambda db: self.books.save(db, attempt, checkpoint, report, order),
            True,  # noqa: FBT003 -- as above
            PATIENCE,
            lambda _: saved,
        )

    async def begin(
        self, attempt: Attempt, *, scope: str, items: Sequence[str], call: str, repeat: bool
    ) -> list[Found]:
        """Begin items."""

        def work(db: Connection) -> list[Found] | RunLost:
            return self.books.begin(db, attempt, scope, items, call, repeat=repeat)

        def vouch(found: list[Found]) -> Commit | None:
            begun = [item for item, one in zip(items, found, strict=True) if one.go]
            return self._commit(attempt, scope=scope, item=begun[-1]) if begun else None

        return await self._world.call(self.written, work, True, PATIENCE, vouch)  # noqa: FBT003 -- as above

    async def end(
        self,
        attempt: Attempt,
        *,
        scope: str,
        items: Sequence[tuple[str, ItemState, str | None]],
        call: str | None = None,
    ) -> None:
        """End items that this attempt began."""
        changed = 0

        def work(db: Connection) -> RunLost | None:
            nonlocal changed
            before = db.total_changes
            lost = self.books.end(db, attempt, scope, items, call)
            changed = db.total_changes - before
            return lost

        def vouch(_: None) -> Commit | None:
            if changed != len(items):
                return None if changed else UNTOLD
            return self._commit(attempt, scope=scope, call=call or "", item=items[-1][0])

        await self._world.call(self.written, work, False, PATIENCE, vouch)  # noqa: FBT003 -- as above

    def finish(
        self, attempt: Attempt, settled: Settled, *, report: Report = NOTHING
    ) -> Flow[RunRecord]:
        """End the attempt and release its lease."""
        return self._world.call(self._finish, attempt, settled, report)

    async def hand_over(self, attempt: Attempt, *, ttl: float) -> None:
        """Entrust the attempt to whoever knows its token."""
        await self._world.call(self._hand_over, attempt, ttl)

    async def order_stop(self, attempt: Attempt) -> bool:
        """Keep that the process of the attempt was ordered to stop."""
        return await self._world.call(
            self.written,
            lambda db: self.books.order_stop(db, attempt),
            True,  # noqa: FBT003 -- as above
            _BRIEFLY,
        )

    async def cancel(
        self, key: RunKey, *, force: bool, operator: str, only_waiting: bool = False
    ) -> RunRecord:
        """Cancel what does not run; ask what runs, or take it away."""
        return await self._world.call(self._cancel, key, force, operator, only_waiting)

    async def sync(self) -> None:
        """Make sure that what was written so far survives a power cut."""
        await self._world.call(self._file.sync)

    async def note(self, key: RunKey, what: str, *, token: int = 0, detail: str = "") -> None:
        """Keep an event about a run."""

        def work(db: Connection) -> None:
            now = self.books.clock.now(db)
            self.books.append(db, RunEvent(key, now, what, token, "", detail))

        await self._world.call(self.written, work, False)  # noqa: FBT003 -- as above

    async def register(self, job: str, definition: str) -> None:
        """Keep the definition of a job."""
        await self._world.call(self._register, job, definition)

    async def lift(self, job: str) -> bool:
        """Release a job from quarantine."""
        values = (self._namespace, job)
        lifted = await self._world.call(
            self.written, lambda db: db.execute(sql.LIFT, values).rowcount
        )
        return bool(lifted)

    async def find(self, key: RunKey) -> RunRecord | None:
        """Return a run."""
        return await self._world.call(self.read, lambda db: self.books.find(db, key))

    async def runs(
        self, job: str | None = None, *, limit: int = 30, states: Sequence[State] = ()
    ) -> list[RunRecord]:
        """Return the newest runs, by slot."""
        return await self._world.call(self._runs, job, limit, states)

    async def events(self, key: RunKey) -> list[RunEvent]:
        """Return what happened to a run."""
        values = (self._namespace, *key)
        rows = await self._world.call(
            self.read, lambda db: db.execute(sql.FIND_EVENTS, values).fetchall()
        )
        return [RunEvent(key, *row) for row in rows]

    async def items(self, scope: str, *, states: Sequence[ItemState] = ()) -> list[ItemRecord]:
        """Return the items of a scope."""
        values = (self._namespace, scope)
        rows = await self._world.call(
            self.read, lambda db: db.execute(sql.FIND_ITEMS, values).fetchall()
        )
        items = map(sql.item_of, rows)
        return [item for item in items if not states or item.state in states]

    async def counts(self, key: RunKey) -> dict[str, int]:
        """Return the counters of a run."""
        values = (self._namespace, *key)
        rows = await self._world.call(
            self.read, lambda db: db.execute(sql.FIND_COUNTS, values).fetchall()
        )
        return dict(rows)

    async def jobs(self) -> list[JobRecord]:
        """Return all jobs."""
        values = (self._namespace,)
        rows = await self._world.call(
            self.read, lambda db: db.execute(sql.FIND_JOBS, values).fetchall()
        )
        return [job_of(row) for row in rows]

    async def now(self) -> float:
        """Return the time of the file."""
        return await self._world.call(self.read, self.books.clock.now)

    async def accept_copy(self) -> None:
        """Take this file for the ledger, though it may be an older copy; an operator says so."""
        await self._world.call(self.written, self.testimony.accept)

    @property
    def desk(self) -> Desk:
        """What a transaction for user code is made of."""
        return Desk(self._world, self._idle, self.books, self.leases)

    async def close(self) -> None:
        """Close the file, and with it the leases."""
        for file in self._idle:
            file.close()
        self.testimony.close()
        await self.leases.close()

    @property
    def planner(self) -> SqlitePlanner:
        """What instances ask."""
        if self._planner is None:
            from fencepost.ledger.sqlite_planner import SqlitePlanner  # not for a lone trigger

            self._planner = SqlitePlanner(self._world, self)
        return self._planner

    # What runs behind the door: one transaction each.

    def written(
        self,
        work: Callable[[Connection], T | RunLost],
        durable: bool = True,  # noqa: FBT001, FBT002 -- a door takes arguments by position
        patience: float = PATIENCE,
        vouch: Callable[[T], Commit | None] | None = None,
    ) -> T:
        """Commit ``work``. A ``RunLost`` is raised after the commit: the stale writer is named.

        ``vouch`` says what this leaves in the file for good, for the witness; else it is counted.
        """
        line, token, counted, told = "", 0, None, None

        def prepared(db: Connection) -> T | RunLost:
            nonlocal line, token, counted
            try:
                moved = self.touches.begin(db) or self.testimony.place != self._file.place
                if moved or db is not self.ready:
                    self._prepare(db)
                before = db.total_changes
                result = work(db)
                commit = None if vouch is None or isinstance(result, RunLost) else vouch(result)
                if commit is None and db.total_changes != before:
                    counted = self.testimony.count(db)
                elif commit is not None and commit is not UNTOLD:
                    line, token = commit_line(commit), commit.token
                return result
            finally:
                self.touches.end()

        def committed() -> None:
            nonlocal told
            if counted or line:
                told = self.testimony.tell(line, token, counted=counted)

        self._file.follow()
        result = self._file.write(prepared, durable=durable, patience=patience, committed=committed)
        if durable and told is not None:
            self.testimony.synced(told)
        if isinstance(result, RunLost):
            raise result
        return result

    def commit_of(self, run: RunRecord) -> Commit:
        """Return what a commit about a run leaves in the file for good."""
        over = run.state is not State.RUNNING
        return Commit(self._namespace, run.key, run.token, over, run.saves)

    def _commit(self, attempt: Attempt, **what: Any) -> Commit:
        return Commit(self._namespace, attempt.key, attempt.token, **what)

    def refuse_doubtful(self, db: Connection) -> None:
        """Raise if the file may be an older copy of the ledger."""
        self.testimony.refuse_doubtful(db)

    def read(self, work: Callable[[Connection], T]) -> T:
        """Read, from tables that are up to date."""
        self._file.follow()
        if self._file.read(lambda db: db is not self.ready and not is_ready(db)):
            self.written(lambda _: None, vouch=untold)
        return self._file.read(work)

    def _prepare(self, db: Connection) -> None:
        """Bring our tables up to date, or see that they are; inside of a write transaction."""
        ready, self.ready = self.ready, None
        if is_ready(db):
            self.testimony.hear(db)
            if db is not ready:
                self.books.clock.lend(db, self.touches)
                self.touches.watch(db)
            self.ready = db
        else:
            # Not to be relied on before it is committed, which is for the next verb to see.
            migrate(db, at=self._world.clocks.wall())
            self.testimony.hear(db)

    def _follow(self) -> None:
        """Look at the file; where somebody has written to it beside us, compare it first.

        Mostly that was a checkpoint of the log: then one statement does what is to be done.
        """
        self._file.follow()
        if self.ready is not None and self.testimony.place != self._file.place:
            self.written(lambda _: None, False, vouch=untold)  # noqa: FBT003 -- as above

    def _is_usual(self, db: Connection) -> bool:
        """Say whether nobody need look at the file before one statement writes to it."""
        heard = db is self.ready and self.testimony.place == self._file.place
        return heard and not self.touches.compiled

    def _claim(self, want: Want) -> Claimed:
        settles = self._settles > 0.0 and want.policy.on_loss is not OnLoss.FAIL
        if settles:
            self.leases.reserve.ahead()
        claimed = self._claim_free(want, durable=not settles)
        if claimed is None:
            claimed = self._claim_decided(want, durable=not settles)
        if claimed.grant is not None:
            if settles and not self.leases.reserve.covers(claimed.grant.token):
                self._file.sync()  # the clock was set back, or the file is another by now
            self.leases.pulse.leases.add(want.holder.nonce)
        return claimed

    def _claim_free(self, want: Want, *, durable: bool) -> Claimed | None:
        """Claim by one statement what nothing speaks against; None elsewhere."""
        if want.policy.overlap is Overlap.ALLOW:
            return None
        told = None

        def work(db: Connection) -> Claimed | None:
            nonlocal told
            if not self._is_usual(db) or self.testimony.doubtful:
                return None  # a file that nobody has looked at yet, or a copy
            claimed = self.books.claim_free(db, want)
            if claimed is not None and claimed.run is not None:
                run = claimed.run
                told = self.testimony.tell_run(self._namespace, run)
            return claimed

        self._follow()
        claimed = self._file.write_one(work, durable=durable)
        if durable and told is not None:
            self.testimony.synced(told)
        return claimed

    def _claim_decided(self, want: Want, *, durable: bool) -> Claimed:
        """Read the facts, decide, and carry the decision out."""
        proofs: list[int] = []

        def work(db: Connection) -> Claimed:
            self.testimony.refuse_doubtful(db)
            return self.books.claim(db, want, proofs=proofs)

        def vouch(claimed: Claimed) -> Commit | None:
            if claimed.run is None or not (claimed.grant is not None or claimed.fresh):
                return UNTOLD  # nothing was decided
            return self.commit_of(claimed.run)

        try:
            return self.written(work, durable, vouch=vouch)
        finally:
            for proof in proofs:  # only now: who was handed the lease could take it otherwise
                os.close(proof)

    def _finish(self, attempt: Attempt, settled: Settled, report: Report) -> RunRecord:
        freed = False
        try:
            run = self._finish_for_good(attempt, settled, report)
            freed = run is not None
            if run is None:
                ended = self.written(
                    lambda db: self.books.finish(db, attempt, settled, report),
                    vouch=lambda ended: self.commit_of(ended.run),
                )
                run, freed = ended
        finally:
            # Whatever was answered, this attempt is over: it needs nobody to vouch for it.
            self.books.forget(attempt.nonce)
            self.leases.gave(attempt.lease, attempt.nonce, wake=freed)
        return run

    def _finish_for_good(
        self, attempt: Attempt, settled: Settled, report: Report
    ) -> RunRecord | None:
        """End an attempt by one statement, where nothing else is to be written; None elsewhere."""
        if not settled.state.terminal or report.counts:
            return None
        told = None

        def work(db: Connection) -> RunRecord | None:
            nonlocal told
            if not self._is_usual(db):
                return None  # a file that nobody has looked at yet
            run = self.books.finish_for_good(db, attempt, settled, report)
            if run is not None:
                told = self.testimony.tell_run(self._namespace, run)
            return run

        self._follow()  # a body may be over at once, and have replaced it
        run = self._file.write_one(work, durable=True)
        if told is not None:
            self.testimony.synced(told)
        return run

    def _hand_over(self, attempt: Attempt, ttl: float) -> None:
        self.written(lambda db: self.books.hand_over(db, attempt, ttl))
        # Only now: a process that ends before this has vouched for it to the last.
        self.books.forget(attempt.nonce)
        self.leases.gave(attempt.lease, attempt.nonce, wake=False)

    def _cancel(self, key: RunKey, force: bool, operator: str, only_waiting: bool) -> RunRecord:  # noqa: FBT001 -- as above
        run, freed = self.written(
            lambda db: self.books.cancel(db, key, operator, force=force, only_waiting=only_waiting)
        )
        if freed:
            self.leases.gave(run.lease, run.holder.nonce, wake=True)
        return run

    def _runs(self, job: str | None, limit: int, states: Sequence[State]) -> list[RunRecord]:
        def work(db: Connection) -> list[tuple[Any, ...]]:
            if states and not TERMINAL.intersection(states):  # the live ones have an index
                return db.execute(sql.FIND_ALL_LIVE, (self._namespace,)).fetchall()
            jobs = [(job,)]
            if job is None:
                jobs = db.execute(sql.FIND_RUN_JOBS, (self._namespace,)).fetchall()
            statement, chosen = sql.listing(states), [state.value for state in states]
            return [
                row
                for (name,) in jobs
                for row in db.execute(statement, (self._namespace, name, *chosen, limit))
            ]

        found = [sql.run_of(row) for row in self.read(work)]
        return newest(found, job=job, limit=limit, states=states)

    def _register(self, job: str, definition: str) -> None:
        values = (self._namespace, job)
        # Every process says what it knows when it starts, and mostly it is what was known before.
        known = self.read(lambda db: db.execute(sql.FIND_JOB, values).fetchone())
        if known is None or known[1] != definition:
            self.written(lambda db: db.execute(sql.DEFINE, (*values, definition)))
