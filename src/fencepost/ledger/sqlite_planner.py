"""The scheduling side of the SQLite ledger: one transaction for each verb, in the ledger's file.

An instance whose clock is off decides nothing, and says so.
"""

from __future__ import annotations

import os

from fencepost.ledger import (
    registering,
    sqlite_clock as clock,
    sqlite_planner_rows as sql,
    sqlite_retention_rows as rows,
)
from fencepost.ledger.planning import Note, Slots, Ticked
from fencepost.ledger.retention import KEPT_FOR, KEPT_RUNS, LEFT, at_once, scopes_of
from fencepost.ledger.sqlite_desk import SqliteDesk
from fencepost.ledger.sqlite_rows import job_of, run_of
from fencepost.ledger.ticking import tick
from fencepost.model.named import NamedTuple
from fencepost.model.plan import WAITS
from fencepost.model.run import RunRecord
from fencepost.model.slot import RunKey

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from sqlite3 import Connection
    from typing import TypeVar

    from fencepost.ledger.planning import Ask, Ear, Instance, InstanceRecord, Lane
    from fencepost.ledger.retention import Slot
    from fencepost.ledger.sqlite import SqliteLedger
    from fencepost.model.definition import Definition, JobRecord
    from fencepost.model.run import RunEvent
    from fencepost.model.witnessed import Commit
    from fencepost.world.api import World

    T = TypeVar("T")

# How many jobs one prune looks at: it goes on from there the next time.
_JOBS_PRUNED = 200


class _Old(NamedTuple):
    """What may be forgotten: of which jobs, which runs, how many items of a slot, which ranges."""

    jobs: list[str]
    runs: list[RunKey]
    items: dict[Slot, int]
    spans: list[tuple[str, int, int]]


class SqlitePlanner:
    """Plans in the file of a ``SqliteLedger``."""

    def __init__(self, world: World, ledger: SqliteLedger) -> None:
        self._world, self._ledger = world, ledger
        self._leases, self._namespace = ledger.leases, ledger.leases.namespace
        self._pruned_to = ""  # the last job that was looked at for what is old

    async def announce(
        self, instance: Instance | None, definitions: Sequence[Definition]
    ) -> list[Note]:
        """Make jobs known."""
        return await self._changed(
            lambda desk: registering.announce(desk, instance, definitions), durable=True
        )

    async def attend(self, instance: Instance) -> list[Note]:
        """Say that an instance lives, and see to those that do not."""

        def work(desk: SqliteDesk, db: Connection) -> list[Note]:
            if not desk.off:
                clock.confirm(db, self._world.clocks)
            told = Note("clock", "", about=(("off", desk.off),))
            return [told, *registering.attend(desk, instance)]

        return await self._world.call(self._office, work, False)  # noqa: FBT003 -- a door

    async def depart(self, instance: Instance) -> None:
        """Say that an instance has ended."""
        await self._changed(lambda desk: registering.depart(desk, instance))

    async def store(self, definitions: Sequence[Definition]) -> int:
        """Keep jobs in the ledger itself."""
        return await self._changed(lambda desk: registering.store(desk, definitions), durable=True)

    async def tick(self, ask: Ask) -> Ticked:
        """Carry one tick out."""
        return await self._world.call(self._tick, ask)

    async def pause(self, job: str, *, reason: str, until: float = 0.0) -> JobRecord:
        """Let the slots of a job pass."""
        return await self._changed(
            lambda desk: registering.pause(desk, job, reason=reason, until=until), durable=True
        )

    async def resume(self, job: str) -> JobRecord:
        """Let a job run again."""
        return await self._changed(lambda desk: registering.resume(desk, job), durable=True)

    async def retire(self, job: str, *, reason: str) -> JobRecord:
        """End a job for good."""
        return await self._changed(
            lambda desk: registering.retire(desk, job, reason=reason), durable=True
        )

    async def backfill(self, lane: Lane) -> Lane:
        """Have slots of the past made up."""
        return await self._changed(lambda desk: registering.backfill(desk, lane), durable=True)

    async def lanes(self, *, active: bool = True) -> list[Lane]:
        """Return what is being made up."""
        statement = sql.FIND_LANES if active else sql.FIND_ALL_LANES
        rows = await self._read(lambda db: db.execute(statement, (self._namespace,)).fetchall())
        return [sql.lane_of(row) for row in rows]

    async def lane(self, number: int) -> Lane | None:
        """Return one of what was ever to be made up."""
        values = (self._namespace, number)
        row = await self._read(lambda db: db.execute(sql.FIND_LANE, values).fetchone())
        return None if row is None else sql.lane_of(row)

    async def stop_lane(self, number: int, *, reason: str) -> None:
        """Stop making up what was not begun yet."""

        def work(desk: SqliteDesk) -> None:
            lane = desk.lane(number)
            if lane is not None and not lane.ended_at:
                desk.put_lane(lane._replace(ended_at=desk.now, stopped=reason))

        await self._changed(work, durable=True)

    async def prune(self, *, most: int) -> int:
        """Forget old runs."""
        return await self._world.call(self._prune, most)

    async def job(self, name: str) -> JobRecord | None:
        """Return a job."""
        values = (self._namespace, name)
        row = await self._read(lambda db: db.execute(sql.FIND_JOB, values).fetchone())
        return None if row is None else job_of(row)

    async def slots(self, job: str, *, start: int, end: int, limit: int = 1000) -> Slots:
        """Return what became of the slots of a job."""
        values = (self._namespace, job, start, end, limit)
        runs = await self._read(lambda db: db.execute(sql.FIND_SLOT_RUNS, values).fetchall())
        spans = await self._read(lambda db: db.execute(sql.FIND_SPANS, values).fetchall())
        return Slots([run_of(row) for row in runs], [sql.span_of(row) for row in spans])

    async def events(self) -> list[RunEvent]:
        """Return what happened to all runs."""

        def work(db: Connection) -> list[RunEvent]:
            return [sql.event_of(row) for row in db.execute(sql.FIND_ALL_EVENTS, values)]

        values = (self._namespace,)
        return await self._read(work)

    def listen(self, heard: Callable[[str], None]) -> Ear | None:
        """Hear nothing: a file carries no words."""
        del heard
        return None

    async def instances(self) -> list[InstanceRecord]:
        """Return all instances."""
        rows = await self._read(
            lambda db: db.execute(sql.FIND_INSTANCES, (self._namespace,)).fetchall()
        )
        return [sql.instance_of(row) for row in rows]

    # What runs behind the door.

    async def _read(self, work: Callable[[Connection], T]) -> T:
        return await self._world.call(self._ledger.read, work)

    async def _changed(self, work: Callable[[SqliteDesk], T], *, durable: bool = False) -> T:
        return await self._world.call(self._office, lambda desk, _: work(desk), durable)

    def _office(
        self,
        work: Callable[[SqliteDesk, Connection], T],
        durable: bool,  # noqa: FBT001 -- a door takes arguments by position
        vouch: Callable[[T], Commit | None] | None = None,
    ) -> T:
        """Commit ``work``, and see to what may only be done after that."""
        desks: list[SqliteDesk] = []

        def inside(db: Connection) -> T:
            self._ledger.refuse_doubtful(db)
            # Who disagrees with the others goes by their time: else it would take them for gone.
            off = self._ledger.books.clock.look(db)
            now = self._world.clocks.wall() - off
            desks.append(SqliteDesk(db, self._ledger.books, self._leases, now=now, off=off))
            return work(desks[-1], db)

        try:
            result = self._ledger.written(inside, durable, vouch=vouch)
        finally:
            for desk in desks:
                for proof in desk.proofs:
                    os.close(proof)
        for desk in desks[-1:]:
            waits = bool(desk.over) and self._leases.anybody_waits()
            for lease, nonce, freed in desk.over:
                self._ledger.books.forget(nonce)
                self._leases.gave(lease, nonce, wake=freed and waits)
        return result

    def _tick(self, ask: Ask) -> Ticked:
        if not (ask.ended or ask.again or ask.only):
            idle = self._ledger.read(lambda db: self._idle(db, ask))
            if idle is not None:
                return idle
        self._leases.reserve.ahead()
        settles = self._ledger.abilities.settles > 0
        durable = not settles or any(end.settled.state.terminal for end in ask.ended)
        urgent = False

        def work(desk: SqliteDesk, _: Connection) -> Ticked:
            nonlocal urgent
            ticked = self._ticked(desk, ask)
            urgent = desk.urgent
            return ticked

        ticked = self._office(work, durable, self._vouch)
        newest = 0
        for begun in ticked.begun:
            run = begun.claimed.run
            assert run is not None, "what was begun has a record"
            self._leases.pulse.leases.add(run.holder.nonce)
            newest = max(newest, run.token)
        doubtful = newest and not self._leases.reserve.covers(newest)
        if not durable and (urgent or doubtful):
            self._leases.file.sync()
        return ticked

    def _vouch(self, ticked: Ticked) -> Commit | None:
        """Return what a tick leaves in the file for good, by the last run that it is about."""
        runs = [begun.claimed.run for begun in ticked.begun[-1:]] or ticked.ended[-1:]
        run = runs[0] if runs else None
        return self._ledger.commit_of(run) if isinstance(run, RunRecord) else None

    def _idle(self, db: Connection, ask: Ask) -> Ticked | None:
        """Answer a tick for which there is nothing to do: one statement, and nothing written."""
        desk = SqliteDesk(db, self._ledger.books, self._leases, now=self._world.clocks.wall())
        look = desk.next_look()
        if look is not None and look <= desk.now:
            return None
        if ask.sweep and desk.lost_runs(only=None):
            return None
        return Ticked([], [], [], None if look is None else look - desk.now)

    def _ticked(self, desk: SqliteDesk, ask: Ask) -> Ticked:
        if not desk.off:
            # Every process is the clock here: what it says of itself is no news, and ``off`` tells.
            return tick(desk, ask)._replace(now=0.0)
        ended = desk.finish_all(ask.ended)
        return Ticked([], ended, [], WAITS, off=desk.off)

    # What is old.

    def _prune(self, most: int) -> int:
        """Forget what is old of the next jobs in turn; again of the same ones, if there is more."""
        space, start = self._namespace, self._pruned_to
        left = self._ledger.read(lambda db: db.execute(rows.FIND_LEFT, (space, LEFT)).fetchone())
        if left is not None:
            self._office(lambda _, db: self._forget_left(db, left, most), False)  # noqa: FBT003 -- as above
            return most
        old = self._ledger.read(lambda db: self._find_old(db, start, most))
        chosen, too_many = at_once(old.runs, items=lambda slot: old.items.get(slot, 0), most=most)

        def work(desk: SqliteDesk, db: Connection) -> bool:
            still = set(self._find_old(db, start, most).runs)  # nobody repeats one of them by now
            runs = [key for key in chosen if key in still]
            items = 0 if too_many else most
            return not desk.off and self._forget(db, runs, old.spans, items)

        if (chosen or old.spans) and not self._office(work, False):  # noqa: FBT003 -- as above
            return 0
        if too_many or len(chosen) < len(old.runs) or len(old.spans) == most:
            return max(most, len(chosen))
        self._pruned_to = old.jobs[-1] if len(old.jobs) == _JOBS_PRUNED else ""
        return len(chosen)

    def _find_old(self, db: Connection, start: str, most: int) -> _Old:
        """Return what is old of the next jobs, up to one run more than go at once."""
        clocks, space = self._world.clocks, self._namespace
        old = _Old([], [], {}, [])
        if clock.off_by(db, clocks):  # what is old is for those to say who know the time
            return old
        page = (space, start, _JOBS_PRUNED)
        old.jobs.extend(job for (job,) in db.execute(rows.FIND_JOBS_THAT_RAN, page).fetchall())
        for job in old.jobs:
            rest = most + 1 - len(old.runs)
            values = (space, job, KEPT_RUNS, clocks.wall(), KEPT_FOR, rest)
            found = db.execute(rows.FIND_FORGOTTEN, values).fetchall() if rest else []
            old.runs.extend(RunKey(*row) for row in found)
            passed = (space, job, most - len(old.spans))
            old.spans.extend(db.execute(rows.FIND_OLD_SPANS, passed).fetchall())
        for scope, slot in scopes_of(old.runs).items():
            (count,) = db.execute(rows.COUNT_ITEMS, (space, scope)).fetchone()
            old.items[slot] = old.items.get(slot, 0) + count
        return old

    def _forget(
        self,
        db: Connection,
        runs: Sequence[RunKey],
        spans: Sequence[tuple[str, int, int]],
        items: int,
    ) -> bool:
        for key in runs:
            for statement in (rows.FORGET_LEASE, *rows.FORGET):
                db.execute(statement, (self._namespace, *key))
            if not key.manual:
                db.execute(rows.PRUNED, (key.slot, self._namespace, key.job))
        space, now = self._namespace, self._world.clocks.wall()
        for scope, (job, slot, manual) in scopes_of(runs).items():
            db.execute(rows.FORGET_ITEMS, (space, scope, items, job, slot, manual))
            db.execute(rows.KEEP_LEFT, (space, LEFT, scope, job, slot, str(manual), now))
        for span in spans:
            db.execute(rows.FORGET_SPAN, (self._namespace, *span))
        return True

    def _forget_left(self, db: Connection, left: tuple[str, str, int, int], most: int) -> None:
        """Delete items whose runs are gone, and what records that they are left."""
        scope, *slot = left
        db.execute(rows.FORGET_ITEMS, (self._namespace, scope, most, *slot))
        db.execute(rows.FORGET_LEFT, (self._namespace, LEFT, scope))
