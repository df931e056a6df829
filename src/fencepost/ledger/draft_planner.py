"""The scheduling side of a ledger on an SQL server: one transaction for each verb, few round trips.

The server's clock is everybody's, so no instance can disagree with it. Instances tick side by
side: each locks what it decides about. Who registers has the office for itself for a moment.
"""

from __future__ import annotations

from fencepost.ledger import registering
from fencepost.ledger.draft_desk import DraftDesk
from fencepost.ledger.draft_retention import DraftRetention
from fencepost.ledger.draft_roll import DraftOffice
from fencepost.ledger.draft_rousing import rouse
from fencepost.ledger.draft_values import event_of, instance_of, job_of, lane_of, run_of, span_of
from fencepost.ledger.planning import DUE, PAGE, Begun, Note, Slots, Ticked
from fencepost.ledger.ticking import tick

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any, TypeVar

    from fencepost.ledger.draft import Draft
    from fencepost.ledger.draft_bearings import Bearings
    from fencepost.ledger.draft_desk import Needs
    from fencepost.ledger.draft_ledger import DraftLedger
    from fencepost.ledger.planning import Ask, Ear, Instance, InstanceRecord, Lane
    from fencepost.model.definition import Definition, JobRecord
    from fencepost.model.run import RunEvent
    from fencepost.world.api import World

    T = TypeVar("T")

# How many more jobs than there is room for are read at once: not all that are due are to run.
_BESIDE = 25
# Of how many jobs is kept in mind what their runs need.
_MOST_NEEDS = 20_000


class DraftPlanner:
    """Plans in the database of a ``DraftLedger``."""

    def __init__(self, world: World, ledger: DraftLedger) -> None:
        self._world, self._ledger, self._namespace = world, ledger, ledger.namespace
        self._sql = ledger.dialect.plans
        self._needs: Needs = {}
        self._retention = DraftRetention(ledger)

    async def announce(
        self, instance: Instance | None, definitions: Sequence[Definition]
    ) -> list[Note]:
        """Make jobs known."""
        return await self._registered(
            lambda office: registering.announce(office, instance, definitions),
            jobs=self._named(definitions),
        )

    async def attend(self, instance: Instance) -> list[Note]:
        """Say that an instance lives, and see to those that do not."""
        told = await self._registered(lambda office: registering.attend(office, instance))
        return [Note("clock", "", about=(("off", 0.0),)), *told]  # there is only one

    async def depart(self, instance: Instance) -> None:
        """Say that an instance has ended."""
        await self._registered(lambda office: registering.depart(office, instance))

    async def store(self, definitions: Sequence[Definition]) -> int:
        """Keep jobs in the ledger itself."""
        return await self._registered(
            lambda office: registering.store(office, definitions), jobs=self._named(definitions)
        )

    async def tick(self, ask: Ask) -> Ticked:
        """Carry one tick out."""
        return await self._world.call(self._tick, ask)

    async def pause(self, job: str, *, reason: str, until: float = 0.0) -> JobRecord:
        """Let the slots of a job pass."""
        return await self._registered(
            lambda office: registering.pause(office, job, reason=reason, until=until), jobs=[job]
        )

    async def resume(self, job: str) -> JobRecord:
        """Let a job run again."""
        return await self._registered(lambda office: registering.resume(office, job), jobs=[job])

    async def retire(self, job: str, *, reason: str) -> JobRecord:
        """End a job for good."""
        return await self._registered(
            lambda office: registering.retire(office, job, reason=reason), jobs=[job]
        )

    async def backfill(self, lane: Lane) -> Lane:
        """Have slots of the past made up."""
        return await self._registered(
            lambda office: registering.backfill(office, lane), jobs=[lane.job]
        )

    async def lanes(self, *, active: bool = True) -> list[Lane]:
        """Return what is being made up."""
        rows = await self._read(self._sql.FIND_LANES, active=active)
        return [lane_of(row) for row in rows]

    async def lane(self, number: int) -> Lane | None:
        """Return one of what was ever to be made up."""
        rows = await self._read(self._sql.FIND_LANE, number=number)
        return lane_of(rows[0]) if rows else None

    async def stop_lane(self, number: int, *, reason: str) -> None:
        """Stop making up what was not begun yet."""

        def work(office: DraftOffice) -> None:
            lane = office.lane(number)
            if lane is not None and not lane.ended_at:
                office.put_lane(lane._replace(ended_at=office.now, stopped=reason))

        await self._registered(work)

    async def prune(self, *, most: int) -> int:
        """Forget old runs."""
        return await self._world.call(self._retention.prune, most)

    async def job(self, name: str) -> JobRecord | None:
        """Return a job."""
        rows = await self._read(self._sql.FIND_JOB, job=name)
        return job_of(rows[0]) if rows else None

    async def slots(self, job: str, *, start: int, end: int, limit: int = 1000) -> Slots:
        """Return what became of the slots of a job."""
        values = {"job": job, "start": start, "end": end, "limit": limit}
        runs = await self._read(self._sql.FIND_SLOT_RUNS, **values)
        spans = await self._read(self._sql.FIND_SPANS, **values)
        return Slots([run_of(row) for row in runs], [span_of(row) for row in spans])

    async def events(self) -> list[RunEvent]:
        """Return what happened to all runs."""
        return [event_of(row) for row in await self._read(self._sql.FIND_ALL_EVENTS)]

    def listen(self, heard: Callable[[str], None]) -> Ear | None:
        """Hear what is said to instances, where the server carries words."""
        return self._ledger.listen(heard)

    async def instances(self) -> list[InstanceRecord]:
        """Return all instances."""
        return [instance_of(row) for row in await self._read(self._sql.FIND_INSTANCES)]

    # What runs behind the door.

    async def _read(self, statement: Any, **values: Any) -> Sequence[tuple[Any, ...]]:
        values["namespace"] = self._namespace
        return await self._world.call(self._ledger.read, statement, values)

    def _named(self, definitions: Sequence[Definition]) -> set[str]:
        """Return the jobs that definitions speak of, by all their names."""
        for each in definitions:
            self._ledger.fitting(each.job)
        return {name for each in definitions for name in (each.job, *each.aliases)}

    async def _registered(self, work: Callable[[DraftOffice], T], *, jobs: Iterable[str] = ()) -> T:
        def inside(draft: Draft) -> T:
            self._ledger.refuse_doubtful(draft)
            office = DraftOffice(draft, self._namespace, self._needs)
            office.open(jobs)
            result = work(office)
            if office.hastened:
                rouse(draft, DUE)
            return result

        return await self._world.call(self._ledger.drafted, inside)

    def _tick(self, ask: Ask) -> Ticked:
        watch = self._ledger.watch()
        if watch.is_ripe():
            ask = ask._replace(sweep=True)
        if not (ask.ended or ask.again or ask.only):
            values = {"namespace": self._namespace, "sweep": ask.sweep, "only": None}
            now, look, lost, *seen = self._ledger.read(*watch.idle(self._sql, values))[0]
            watch.saw(seen, sweep=ask.sweep)
            if not lost and (look is None or look > now):
                pause = None if look is None else look - now
                return Ticked([], [], [], pause, soon=watch.soon(), now=now)
        if len(self._needs) > _MOST_NEEDS:
            self._needs.clear()
        size = max(1, min(ask.most, ask.room + _BESIDE, PAGE))

        def inside(draft: Draft) -> Ticked:
            self._ledger.refuse_doubtful(draft)
            desk = DraftDesk(draft, self._namespace, self._needs)
            desk.read_ahead(ask, watch, size=size)
            return tick(desk, ask)

        def then(ticked: Ticked, bearings: Bearings) -> Ticked:
            begun = [Begun(bearings.leaning(one.claimed), *one[1:]) for one in ticked.begun]
            return ticked._replace(begun=begun, soon=watch.soon())

        ticked = self._ledger.drafted(inside, then=then)
        self._ledger.ended(end.attempt for end in ask.ended)
        for begun in ticked.begun[-1:]:  # all of one commit, so one of them will do
            self._ledger.testify(begun.claimed.run)
        return ticked
