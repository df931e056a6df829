"""What the simulator found in production code, each as the shortest test that shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fencepost.errors import LeaseHeld, OutcomeUnknown, StoreUnavailable
from fencepost.flows.acquire import acquire
from fencepost.model.lease import DRIFT, MARGIN, Grant, Holder, renewal_ttl, trust
from fencepost.stores.memory import MemoryStore
from fencepost.testing.simulator.scheduler import run_simulated

if TYPE_CHECKING:
    from fencepost.testing.simulator.world import SimulatedWorld


def test_a_shortened_renewal_that_was_never_confirmed_outlives_the_trust() -> None:
    # The store shortened the lease to max_hold, the reply was lost, and the holder went on to the
    # last instant of max_hold: past the lease's end, on a clock that was a little slower.
    held = trust(0.0, ttl=10.0, ends=12.0)
    for sent in (3.4, 6.8, 9.9, 11.7):
        ttl = renewal_ttl(10.0, now=sent, ends=12.0)
        assert ttl is not None
        assert held.until <= sent + ttl * (1 - DRIFT) - MARGIN + 1e-9


def test_a_doubt_outlives_the_round_of_asking_that_it_arose_in() -> None:
    # Granted, but the reply was lost; then the store was away until nobody waited any more.
    class GoesAway(MemoryStore):
        asked = 0

        async def acquire(self, name: str, *, holder: Holder, ttl: float) -> Grant:
            self.asked += 1
            if self.asked == 1:
                await super().acquire(name, holder=holder, ttl=ttl)
                raise OutcomeUnknown("the reply was lost")
            raise StoreUnavailable("the store is away")

    assert given_up(GoesAway, StoreUnavailable, wait=1.0) == [("job", "nonce")]


def test_a_request_that_is_still_on_its_way_is_given_up_for_when_another_is_refused() -> None:
    # The first request was delayed, the second met another holder; were the first to arrive after
    # that holder's release, it would be granted to nobody.
    class Delays(MemoryStore):
        asked = 0

        async def acquire(self, name: str, *, holder: Holder, ttl: float) -> Grant:
            self.asked += 1
            if self.asked == 1:
                raise OutcomeUnknown("no reply yet")
            raise LeaseHeld(name, holder="another", token=1, expires_in=1.0)

    assert given_up(Delays, LeaseHeld, wait=0.0) == [("job", "nonce")]


def given_up(
    store: type[MemoryStore], error: type[Exception], *, wait: float
) -> list[tuple[str, str]]:
    """Ask a store that ends in ``error``; return what was left for the keeper to give back."""
    abandoned: list[tuple[str, str]] = []

    async def flow(world: SimulatedWorld) -> None:
        with pytest.raises(error):
            await acquire(
                world,
                store(world),
                ["job"],
                holder=Holder("nonce", "host", 1),
                ttl=30.0,
                wait=wait,
                abandon=lambda name, nonce: abandoned.append((name, nonce)),
            )

    run_simulated(flow)
    return abandoned
