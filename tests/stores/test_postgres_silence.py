"""A server that is silent for a while: who asks on an event loop is answered, and goes on."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import pytest
from postgres_kit import fresh

from fencepost import AsyncFencepost, AsyncRun, Fencepost, LeaseLost
from fencepost.flows.keep import LOOP_PATIENCE
from fencepost.leader import AsyncLeader, Leader
from fencepost.model.lease import Phase
from fencepost.model.run import State
from holder import until
from proxy import Proxy
from servers import Postgres, shared

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from fencepost import Lease
    from fencepost.model.event import JobEvent, LeaseEvent

# More than one question lasts, and than the longest grace.
SILENCE = 1.5
ENOUGH = 30.0
SLOT = "2026-01-20T02:00:00Z"


class Line:
    """The way to a server that may fall silent."""

    def __init__(self, proxy: Proxy, url: str) -> None:
        self._proxy, self.url = proxy, url

    def fall_silent(self) -> None:
        self._proxy.mode = "hole"

    def speak(self) -> None:
        self._proxy.reset()
        self._proxy.mode = "pass"


@pytest.fixture
def line() -> Iterator[Line]:
    server = shared(Postgres)
    with Proxy(server.port) as proxy:
        yield Line(proxy, server.url().replace(str(server.port), str(proxy.port)))


class Beat:
    """For how long an event loop has kept its tasks waiting, at most."""

    def __init__(self) -> None:
        self.longest, self._began = 0.0, time.monotonic()

    def forget(self) -> None:
        """Begin anew."""
        self.longest, self._began = 0.0, time.monotonic()

    async def go(self) -> None:
        while True:
            self._began = time.monotonic()
            await asyncio.sleep(0.01)
            self.longest = max(self.longest, time.monotonic() - self._began)


@asynccontextmanager
async def beating() -> AsyncIterator[Beat]:
    beat = Beat()
    task = asyncio.create_task(beat.go())
    try:
        yield beat
    finally:
        task.cancel()


@contextmanager
def taking(*, less: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < less


# Runs.


def faces(line: Line, folder: Path) -> dict[str, tuple[str, str | None]]:
    return {"ledger": (line.url, None), "elsewhere": (f"sqlite:///{folder}/ledger.db", line.url)}


@pytest.mark.parametrize("where", ["ledger", "elsewhere"])
def test_a_run_on_a_loop_goes_on_after_a_silence_in_which_nobody_could_tell(
    line: Line, tmp_path: Path, where: str
) -> None:
    async def go() -> None:
        url, leases = faces(line, tmp_path)[where]
        async with AsyncFencepost(url, leases=leases, namespace=fresh()) as fp:

            @fp.job(name=fresh(), every="1h")
            async def body(run: AsyncRun) -> None:
                run.check()
                line.fall_silent()
                await asyncio.sleep(SILENCE)
                with (
                    taking(less=2 * LOOP_PATIENCE),
                    pytest.raises(LeaseLost, match="nobody could tell"),
                ):
                    run.check()
                assert not run.lost.is_set()
                line.speak()
                end = time.monotonic() + ENOUGH
                while True:
                    try:
                        run.check()
                    except LeaseLost:
                        assert time.monotonic() < end
                    else:
                        break
                    await asyncio.sleep(0.05)

            outcome = await fp.trigger(body, manual=True)
            assert (outcome.status, outcome.error) == ("succeeded", None)

    asyncio.run(go())


@pytest.mark.parametrize("where", ["ledger", "elsewhere"])
def test_a_run_whose_body_leaves_because_nobody_can_tell_is_given_back(
    line: Line, tmp_path: Path, where: str
) -> None:
    async def go() -> None:
        url, leases = faces(line, tmp_path)[where]
        async with AsyncFencepost(url, leases=leases, namespace=fresh()) as fp:
            silent = [True]

            @fp.job(name=fresh(), every="1h")
            async def body(run: AsyncRun) -> None:
                if silent.pop():
                    silent.append(False)
                    asyncio.get_running_loop().call_later(SILENCE + 2 * LOOP_PATIENCE, line.speak)
                    line.fall_silent()
                    await asyncio.sleep(SILENCE)
                run.check()

            first = await fp.trigger(body, SLOT)
            [run] = await fp.runs()
            assert (run.state, run.reason, run.losses) == (State.PENDING, "released", 0), first
            assert (await fp.trigger(body, SLOT, wait="30s")).status == "succeeded"
            [run] = await fp.runs()
            assert (run.starts, run.losses, run.releases) == (2, 0, 1)

    asyncio.run(go())


@pytest.mark.parametrize("where", ["ledger", "elsewhere"])
def test_a_run_that_must_not_be_tried_twice_is_lost_if_its_body_leaves(
    line: Line, tmp_path: Path, where: str
) -> None:
    async def go() -> None:
        url, leases = faces(line, tmp_path)[where]
        async with AsyncFencepost(url, leases=leases, namespace=fresh()) as fp:

            @fp.job(name=fresh(), every="1h", on_loss="fail")
            async def body(run: AsyncRun) -> None:
                asyncio.get_running_loop().call_later(SILENCE + 2 * LOOP_PATIENCE, line.speak)
                line.fall_silent()
                await asyncio.sleep(SILENCE)
                run.check()

            assert (await fp.trigger(body, SLOT)).status == "lost"
            again = await fp.trigger(body, SLOT, wait="45s")
            assert (again.status, again.reason) == ("failed", "lost")

    asyncio.run(go())


def test_a_run_that_waits_to_begin_keeps_no_other_task_waiting(line: Line) -> None:
    """Its proof is late when its body is to begin."""

    async def go() -> None:
        async with beating() as beat:

            def heard(event: LeaseEvent | JobEvent) -> None:
                if event.what == "lock_acquired":
                    [course] = fp._working.courses.values()
                    line.fall_silent()
                    until(lambda: course.unsure)
                    threading.Timer(SILENCE, line.speak).start()
                    beat.forget()

            async with AsyncFencepost(line.url, namespace=fresh(), on_event=heard) as fp:

                @fp.job(name=fresh(), every="1h")
                async def body() -> None:
                    """Do nothing."""

                assert (await fp.trigger(body, manual=True)).status == "succeeded"
        assert beat.longest < SILENCE / 2

    asyncio.run(go())


# Leaders.


def proof_of(leader: Leader | AsyncLeader) -> Lease | None:
    return leader.lease


def test_a_leader_answers_soon_while_nobody_can_tell_and_leads_on(line: Line) -> None:
    with Fencepost(line.url, namespace=fresh()) as fp:
        leader = Leader(fp, "leader")
        assert leader.attempt()
        lease = proof_of(leader)
        assert lease is not None
        line.fall_silent()
        until(lambda: lease.phase is Phase.UNPROVEN)
        with taking(less=LOOP_PATIENCE / 2):
            assert proof_of(leader) is None
        with taking(less=2 * LOOP_PATIENCE):
            assert not leader.attempt()
        line.speak()
        until(leader.attempt)
        assert proof_of(leader) is lease
        leader.resign()


def test_an_async_leader_keeps_no_other_task_waiting_while_nobody_can_tell(line: Line) -> None:
    async def go() -> None:
        async with AsyncFencepost(line.url, namespace=fresh()) as fp:
            leader = AsyncLeader(fp, "leader")
            assert await leader.attempt()
            lease = proof_of(leader)
            assert lease is not None
            line.fall_silent()
            until(lambda: lease.phase is Phase.UNPROVEN)
            async with beating() as beat:
                await asyncio.sleep(0.02)
                beat.forget()
                with taking(less=2 * LOOP_PATIENCE):
                    assert proof_of(leader) is None
                    assert not await leader.attempt()
                    assert proof_of(leader) is None
                assert beat.longest < LOOP_PATIENCE / 2
            line.speak()
            end = time.monotonic() + ENOUGH
            while not await leader.attempt():
                assert time.monotonic() < end
            assert proof_of(leader) is lease
            await leader.resign()

    asyncio.run(go())
