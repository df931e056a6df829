"""A run that ends late is no counter-example, whoever had its permit meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from every_ledger import LEDGERS, clients
from ledgerlab import DONE, attempt_of, wanted

from fencepost.cli.verify import gathered
from fencepost.model.ending import Settled
from fencepost.model.lease import Holder
from fencepost.model.policy import Overlap, Policy
from fencepost.model.run import LAPSED, State
from fencepost.model.slot import RunKey
from fencepost.testing.ledger_checker import prove
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fencepost.ledger.api import Attempt, Ledger
    from fencepost.testing.clock import SettableClocks

ONE = Policy(overlap=Overlap.ALLOW, max_concurrent=1)
TWO = ONE._replace(max_concurrent=2)
TTL = ONE.lease
EARLY, LATE, NEXT = RunKey("nc", 30), RunKey("na", 60), RunKey("nb", 120)


class Place:
    """One ledger, and who asks it for the permits of one lock."""

    def __init__(self, clocks: SettableClocks, ledger: Ledger) -> None:
        self.clocks, self.ledger = clocks, ledger

    def begin(self, key: RunKey, policy: Policy = ONE) -> Attempt:
        want = wanted(key, f"{key} at {self.clocks.boottime()}", policy, lock="L")
        answer = finish(self.ledger.claim(want))
        assert answer.grant is not None, answer
        return attempt_of(answer)

    def end(self, attempt: Attempt) -> None:
        finish(self.ledger.finish(attempt, DONE))

    def lapse(self) -> None:
        """Let the leases run out of all who have one."""
        self.clocks.advance(TTL + 1)

    def borrow(self, name: str = "L#1") -> None:
        """Have a permit for a moment, as a semaphore has it."""
        holder = Holder(f"somebody at {self.clocks.boottime()}", "here", 2)
        grant = finish(self.ledger.leases.acquire(name, holder=holder, ttl=TTL))
        self.clocks.advance(1)
        finish(self.ledger.leases.release(name, nonce=holder.nonce, token=grant.token))

    def broken(self) -> list[str]:
        """Return what the records of the ledger seem to prove against it."""
        return [str(finding) for finding in prove(finish(gathered(self.ledger))).findings]

    def lapses(self, attempt: Attempt) -> int:
        """Return how often it is on record that the permit of an attempt went to another."""
        told = finish(self.ledger.events(attempt.key))
        return sum((event.what, event.token) == (LAPSED, attempt.token) for event in told)


@pytest.fixture(params=LEDGERS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with clients(request.param, tmp_path) as (clocks, (ledger,)):
        yield Place(clocks, ledger)


@pytest.mark.parametrize("semaphores", [0, 1, 2])
def test_a_permit_may_have_been_a_semaphores_before_it_was_another_runs(
    place: Place, semaphores: int
) -> None:
    late = place.begin(LATE)
    place.lapse()
    for _ in range(semaphores):
        place.borrow()
    follower = place.begin(NEXT)
    place.clocks.advance(1)
    place.end(late)
    assert not place.broken()
    place.end(follower)
    assert not place.broken()


def test_a_permit_may_have_been_a_semaphores_before_another_run_had_the_whole_lock(
    place: Place,
) -> None:
    late, waits = place.begin(LATE, TWO), place.begin(EARLY, TWO)
    finish(place.ledger.finish(waits, Settled(State.PENDING, "released")))
    place.lapse()
    place.borrow()
    whole = place.begin(EARLY, Policy())
    assert (late.lease, whole.lease) == ("L#1", "L")
    place.clocks.advance(1)
    place.end(late)
    place.end(whole)
    assert not place.broken()


def test_that_a_permit_went_to_other_runs_is_told_once_of_an_attempt(place: Place) -> None:
    late = place.begin(LATE)
    place.lapse()
    for slot in range(120, 420, 60):
        place.borrow()
        follower = place.begin(RunKey("nb", slot))
        assert place.lapses(late) == 1
        place.clocks.advance(1)
        place.end(follower)
    place.end(late)
    assert not place.broken()
