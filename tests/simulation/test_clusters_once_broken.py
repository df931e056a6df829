"""What simulated clusters once found, each made to happen without the storm around it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fencepost.errors import OutcomeUnknown, StoreUnavailable
from fencepost.flows import serve as serving
from fencepost.flows.course import Doors
from fencepost.flows.serve import Office, Told, serve
from fencepost.ledger.api import NOTHING, Attempt
from fencepost.ledger.planning import Ask, Begun, End, Instance, Note, Ticked
from fencepost.model.claim import Claimed, Verdict
from fencepost.model.definition import Definition
from fencepost.model.ending import Settled
from fencepost.model.lease import Grant, Holder
from fencepost.model.run import RunRecord, State
from fencepost.model.slot import RunKey
from fencepost.testing.simulator.scheduler import run_simulated

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pytest

    from fencepost.testing.simulator.world import SimulatedWorld

KEY = RunKey("bills", 60)
HOLDER = Holder("n1", "here", 1)
RUN = RunRecord(KEY, State.RUNNING, "bills", "bills", 7, HOLDER, starts=1)
BEGUN = Begun(Claimed(Verdict.GO, RUN, Grant(7, 30.0)), "bills")
ENDED = End(Attempt(KEY, 7, "n1", "bills"), Settled(State.SUCCEEDED), NOTHING)


class Scripted:
    """A ledger whose planner answers ticks as a test has it."""

    def __init__(self, answer: Callable[[Ask], Ticked]) -> None:
        self.asks: list[Ask] = []
        self.announced: list[str] = []
        self.unknown = False  # whether the next who attends was taken for gone
        self.failures = 0  # how often the second batch is refused
        self._answer = answer
        self.planner = self

    async def announce(self, _: object, definitions: Sequence[Definition]) -> list[Note]:
        names = [definition.job for definition in definitions]
        if self.failures and names == ["b"]:
            self.failures -= 1
            raise StoreUnavailable("away")
        self.announced += names
        return []

    async def attend(self, *_: object) -> list[Note]:
        unknown, self.unknown = self.unknown, False
        return [Note("unknown_instance", "")] if unknown else []

    async def prune(self, **_: object) -> int:
        return 0

    async def depart(self, *_: object) -> None:
        """Take note of nothing."""

    async def tick(self, ask: Ask) -> Ticked:
        self.asks.append(ask)
        return self._answer(ask)


class Crew:
    """Stops when it is told to; what it began has ended as soon as it is asked."""

    def __init__(self, world: SimulatedWorld) -> None:
        self.stopping = False
        self.begun: list[Begun] = []
        self.ends: list[Told] = []
        self.busy = False
        self._world = world

    def room(self, ending: int) -> int:
        return 1 + ending

    free = room

    def begin(self, begun: Begun, sent: float) -> None:
        del sent
        self.begun.append(begun)

    def told(self) -> list[Told]:
        taken, self.ends = self.ends, []
        return taken

    def left(self) -> float:
        return math.inf

    async def rest(self, seconds: float) -> None:
        if not self.ends:
            await self._world.sleep(seconds)


def served(
    answer: Callable[[Ask], Ticked],
    act: Callable[[SimulatedWorld, Crew], object],
    *jobs: str,
    ledger: Scripted | None = None,
) -> tuple[Scripted, Crew]:
    """Serve until ``act`` has stopped the crew; return what was asked, and the crew."""
    kept: list[tuple[Scripted, Crew]] = []

    async def flow(world: SimulatedWorld) -> None:
        scripted, crew = ledger or Scripted(answer), Crew(world)
        kept.append((scripted, crew))
        office = Office(
            Instance("i", "here", 1, "1"),
            lambda: [Definition(job) for job in jobs],
            lambda _: None,
            frozenset,
            lambda _: None,
        )
        doors = Doors(world, scripted)  # type: ignore[arg-type]  # it is asked for its planner only
        await world.together(serve(doors, office, crew), as_flow(act, world, crew))

    run_simulated(flow)
    return kept[0]


async def as_flow(
    act: Callable[[SimulatedWorld, Crew], object], world: SimulatedWorld, crew: Crew
) -> None:
    await act(world, crew)  # type: ignore[misc]  # each of them is a flow


def test_one_who_has_an_end_to_tell_does_not_hammer_a_store_that_is_away() -> None:
    def away(ask: Ask) -> Ticked:
        if len(asked) > 500:
            raise AssertionError("it asks without a pause")
        asked.append(ask)
        if open_[0]:
            return Ticked([], [RUN for _ in ask.ended], [], None)
        raise OutcomeUnknown("no reply") if len(asked) == 1 else StoreUnavailable("away")

    async def act(world: SimulatedWorld, crew: Crew) -> None:
        await world.sleep(0.01)
        crew.ends.append(Told(ENDED, lambda _: None))  # told while an answer is in doubt
        await world.sleep(60.0)
        open_[0] = True
        crew.stopping = True

    asked: list[Ask] = []
    open_ = [False]
    served(away, act)
    assert len(asked) < 60
    assert asked[-1].ended == [ENDED]


def test_one_who_stops_while_an_answer_is_in_doubt_finds_out_what_it_was_granted() -> None:
    def unheard(ask: Ask) -> Ticked:
        if not ask.again:
            raise OutcomeUnknown("no reply")
        return Ticked([BEGUN], [], [], None)

    async def act(world: SimulatedWorld, crew: Crew) -> None:
        await world.sleep(0.001)
        crew.stopping = True

    ledger, crew = served(unheard, act)
    assert crew.begun[:1] == [BEGUN]
    assert ledger.asks[-1].room == 0


def test_one_who_stops_asks_a_store_that_stays_away_a_few_times_only() -> None:
    def away(ask: Ask) -> Ticked:
        raise OutcomeUnknown("no reply")

    async def act(world: SimulatedWorld, crew: Crew) -> None:
        await world.sleep(0.001)
        crew.stopping = True

    ledger, _ = served(away, act)
    assert len(ledger.asks) < 10


def test_one_who_could_announce_some_of_its_jobs_only_announces_the_others_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "BATCH", 1)
    ledger = Scripted(lambda _: Ticked([], [], [], None))

    async def act(world: SimulatedWorld, crew: Crew) -> None:
        await world.sleep(1.0)
        ledger.unknown, ledger.failures = True, 12  # more than it waits for at once
        await world.sleep(60.0)
        crew.stopping = True

    served(lambda _: Ticked([], [], [], None), act, "a", "b", ledger=ledger)
    assert ledger.failures == 0
    assert ledger.announced[-1] == "b"
