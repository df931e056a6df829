"""A server's clock steps by an hour, either way: nobody is blocked for longer than one ttl.

Three holders compete for one lease meanwhile, and each writes under it to a resource with a fence.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from fencepost import Fencepost
from fencepost.errors import LeaseHeld, LeaseLost
from fencepost.model.lease import Grant, Holder
from fencepost.testing.checker import check
from fencepost.testing.history import Event
from fencepost.world.flow import finish
from servers.mariadb import MariaDBOutOfTime
from servers.postgres import PostgresOutOfTime

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fencepost.testing.checker import Violation

    Server = PostgresOutOfTime | MariaDBOutOfTime

HOUR, TTL = 3600.0, 1.5
# How long a busy machine may take for what takes no time: still far less than an hour.
SLACK = 15.0
STEPS = (-HOUR, 0.0, HOUR, 0.0)
_numbers = itertools.count(1)


# With signs of life and a line, where the server has them, and without.
WAYS = [(PostgresOutOfTime, ""), (PostgresOutOfTime, "?advisory=off"), (MariaDBOutOfTime, "")]


@pytest.fixture(params=WAYS, ids=["postgres", "postgres-off", "mariadb"], scope="module")
def way(request: pytest.FixtureRequest) -> Iterator[tuple[Server, str]]:
    kind, option = request.param
    with kind.own() as server:
        yield server, option


@pytest.fixture
def server(way: tuple[Server, str]) -> Server:
    way[0].step(0)
    return way[0]


@pytest.fixture
def url(server: Server, way: tuple[Server, str]) -> str:
    return server.database(f"clocks{next(_numbers)}") + way[1]


@pytest.mark.parametrize("step", [-HOUR, HOUR])
def test_a_lease_whose_holder_died_is_for_others_within_its_ttl(
    server: Server, url: str, step: float
) -> None:
    with Fencepost(url) as fp:
        store, dead = fp._holding.store, Holder(os.urandom(8).hex(), "here", 1)
        old = finish(store.acquire("x", holder=dead, ttl=TTL))
        server.step(step)
        end, new = time.monotonic() + TTL + SLACK, None
        while new is None:
            assert time.monotonic() < end, "blocked for longer than its ttl"
            with suppress(LeaseHeld):
                new = _asked(fp)
            time.sleep(0.01)
        assert new.token > old.token
        with pytest.raises(LeaseLost):
            finish(store.renew("x", nonce=dead.nonce, token=old.token, ttl=TTL))
        with pytest.raises(LeaseLost):
            finish(store.release("x", nonce=dead.nonce, token=old.token))


def _asked(fp: Fencepost) -> Grant:
    holder = Holder(os.urandom(8).hex(), "here", 1)
    return finish(fp._holding.store.acquire("x", holder=holder, ttl=TTL))


class Rival(threading.Thread):
    """One who wants the lease again and again, and writes under it."""

    def __init__(
        self, number: int, url: str, history: list[Event], enough: threading.Event
    ) -> None:
        super().__init__(daemon=True)
        self._node, self._url = f"rival-{number}", url
        self._history, self._enough = history, enough
        self.turns = 0

    def run(self) -> None:
        try:
            with Fencepost(self._url) as fp:
                while not self._enough.is_set():
                    with suppress(LeaseLost):
                        self._turn(fp)
                    if not fp._holding.store.capabilities.fair:
                        self._enough.wait(0.2)  # else one who asks again at once leaves no room
        except BaseException as error:  # noqa: BLE001 -- the checker tells of it
            self._tell("failed", detail=repr(error))

    def _turn(self, fp: Fencepost) -> None:
        self._tell("wanted", until=time.monotonic() + TTL + SLACK)
        with fp.lock("x", ttl=TTL, wait=60.0) as lease:
            # It renews as long as it lives, and says so before it gives back.
            self._tell("granted", token=lease.token, until=float("inf"))
            try:
                for _ in range(4):
                    lease.check()
                    self._tell("acted", token=lease.token)
                    time.sleep(0.02)
                self.turns += 1
            finally:
                self._tell("released")

    def _tell(self, what: str, **more: object) -> None:
        event = Event(time.monotonic(), what, self._node, "x", self._node, **more)  # type: ignore[arg-type]
        self._history.append(event)


def test_rivals_go_on_one_by_one_through_steps_of_the_servers_clock(
    server: Server, url: str
) -> None:
    history: list[Event] = []
    enough, ahead = threading.Event(), list[float]()
    rivals = [Rival(number, url, history, enough) for number in range(3)]
    for rival in rivals:
        rival.start()

    def all_had_turns() -> None:
        had, end = [rival.turns for rival in rivals], time.monotonic() + 3 * (TTL + SLACK)
        while any(rival.turns == before for rival, before in zip(rivals, had, strict=True)):
            assert time.monotonic() < end, "somebody is blocked"
            time.sleep(0.01)

    all_had_turns()
    for before, off in pairwise((0.0, *STEPS)):
        if off > before:
            ahead.append(time.monotonic())
        server.step(off)
        all_had_turns()
    enough.set()
    for rival in rivals:
        rival.join(TTL + SLACK)
        assert not rival.is_alive()

    def declared(violation: Violation) -> bool:
        """Say whether a step ahead ended a lease early: its holder stops within its ttl."""
        overlap = violation.rule in ("one holder", "proof")
        return overlap and any(-0.5 < violation.event.at - at < TTL for at in ahead)

    assert [str(broken) for broken in check(history) if not declared(broken)] == []
