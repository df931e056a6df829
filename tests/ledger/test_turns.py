"""Jobs that share a lock and are due together take turns, on every ledger."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from every_ledger import LEDGERS, clients

from fencepost.ledger.api import NOTHING, Attempt
from fencepost.ledger.planning import Ask, Asked, Begun, End, Instance
from fencepost.model.claim import Want
from fencepost.model.definition import Definition, JobRecord
from fencepost.model.ending import Settled
from fencepost.model.lease import Holder
from fencepost.model.policy import Overlap, Policy
from fencepost.model.run import State
from fencepost.model.schedule import Every, spec_of
from fencepost.model.turns import in_turn
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fencepost.ledger.api import Ledger

MINUTE = 60
SKIP, WAIT = Overlap.SKIP, Overlap.RESCHEDULE


class Sharers:
    """Jobs with one lock, and the instances that run them."""

    def __init__(self, ledgers: Sequence[Ledger], overlaps: Sequence[Overlap]) -> None:
        self._ledgers, self._asks = ledgers, 0
        self._policies = {
            f"job{number}": Policy(overlap=overlap, lease=600.0)
            for number, overlap in enumerate(overlaps)
        }
        names = list(self._policies)
        self._rivals = {name: [other for other in names if other != name] for name in names}
        definitions = [Definition(name, spec_of(Every(MINUTE)), template=name) for name in names]
        for number, ledger in enumerate(ledgers):
            instance = Instance(f"i{number}", "here", number, "1.0")
            finish(ledger.planner.announce(instance, definitions))
        self.began: list[str] = []

    def tick(self, *, room: int, ended: Sequence[Begun] = (), sweep: bool = True) -> list[Begun]:
        self._asks += 1
        ledger = self._ledgers[self._asks % len(self._ledgers)]
        ends = [End(_attempt(one), Settled(State.SUCCEEDED), NOTHING) for one in ended]
        ask = Ask(self._want, f"ask {self._asks:05x} ", room, ends, sweep=sweep)
        ask = ask._replace(stirs=frozenset(self._policies), rivals=self._rivals)
        begun = finish(ledger.planner.tick(ask)).begun
        self.began += [one.template for one in begun]
        return begun

    def _want(self, asked: Asked) -> Want:
        holder = Holder(asked.nonce, "here", 1)
        policy = self._policies[asked.template]
        return Want(asked.key, holder, policy, "shared", asked.trigger, epoch=asked.epoch)


def _attempt(begun: Begun) -> Attempt:
    run = begun.claimed.run
    assert run is not None
    return Attempt(run.key, run.token, run.holder.nonce, run.lease, str(run.holder), run)


@pytest.mark.parametrize("kind", LEDGERS)
@pytest.mark.parametrize("instances", [1, 2])
@pytest.mark.parametrize(
    "overlaps",
    [(SKIP, SKIP), (WAIT, SKIP), (WAIT, WAIT), (SKIP, SKIP, SKIP), (WAIT, SKIP, SKIP)],
    ids="+".join,
)
@pytest.mark.parametrize("room", [1, 8])
def test_jobs_that_share_a_lock_take_turns(
    kind: str, instances: int, overlaps: tuple[Overlap, ...], room: int, tmp_path: Path
) -> None:
    """Each job begins at least once in as many slots as there are jobs."""
    with clients(kind, tmp_path, instances) as (clocks, ledgers):
        sharers = Sharers(ledgers, overlaps)
        by_slot: list[set[str]] = []
        for _ in range(9):
            clocks.advance(MINUTE)
            before = len(sharers.began)
            begun = sharers.tick(room=room)
            while begun:  # the body takes a second; and whatever waited for it may go on
                clocks.advance(1)
                begun = sharers.tick(room=room, ended=begun)
            by_slot.append(set(sharers.began[before:]))
    count = len(overlaps)
    for first in range(len(by_slot) - count + 1):
        seen = set().union(*by_slot[first : first + count])
        assert seen == {f"job{number}" for number in range(count)}, by_slot


@pytest.mark.parametrize("kind", LEDGERS)
def test_a_run_that_waits_goes_before_a_newer_one_of_the_job_that_has_the_lock(
    kind: str, tmp_path: Path
) -> None:
    """Each body takes longer than the time between two slots, so there is always a queue."""
    with clients(kind, tmp_path) as (clocks, ledgers):
        sharers = Sharers(ledgers, (WAIT, WAIT))
        clocks.advance(MINUTE)
        begun = sharers.tick(room=8)
        for _ in range(8):
            clocks.advance(MINUTE)
            sharers.tick(room=8)
            clocks.advance(MINUTE / 4)
            begun = sharers.tick(room=8, ended=begun)
            assert len(begun) == 1
    turns = Counter(sharers.began)
    assert abs(turns["job0"] - turns["job1"]) <= 1, sharers.began


def test_the_job_that_began_least_recently_goes_first() -> None:
    jobs = [JobRecord(name, next_due=due) for name, due in (("a", 7.0), ("b", 7.0), ("c", 5.0))]
    assert [job.job for job in in_turn(jobs, {"a": 3.0, "b": 2.0, "c": 4.0})] == ["b", "a", "c"]
    assert [job.job for job in in_turn(jobs, {})] == ["c", "a", "b"]
