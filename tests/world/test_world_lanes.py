"""Lanes of every world: flows run beside the one that begins them, and it leaves after them."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from fencepost.errors import NoThread, OutcomeUnknown
from fencepost.testing.simulator.scheduler import run_simulated
from fencepost.world.aio import AioWorld
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from fencepost.testing.simulator.world import SimulatedWorld

WORLDS = ("blocking", "asyncio", "simulated")


async def two_that_meet(world: BlockingWorld | AioWorld | SimulatedWorld) -> list[str]:
    seen: list[str] = []
    one, other = world.signal(), world.signal()

    async def first() -> None:
        one.set()
        assert await other.wait(10)
        seen.append("first")

    async def second() -> None:
        assert await one.wait(10)
        seen.append("second")
        other.set()

    async with world.lanes("fencepost-test") as lanes:
        lanes.begin(first())
        lanes.begin(second())
    return seen


@pytest.mark.parametrize("kind", WORLDS)
def test_flows_in_lanes_meet_and_whoever_leaves_waits_for_them(kind: str) -> None:
    if kind == "blocking":
        seen = finish(two_that_meet(BlockingWorld()))
    elif kind == "asyncio":
        seen = asyncio.run(two_that_meet(AioWorld()))
    else:
        seen = run_simulated(two_that_meet)
    assert seen == ["second", "first"]


def test_a_lane_without_a_thread_begins_nothing_of_its_flow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []

    async def flow() -> None:
        seen.append(1)

    async def main() -> None:
        async with BlockingWorld().lanes("fencepost-test") as lanes:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", no_thread)
                with pytest.raises(NoThread, match="can't start new thread"):
                    lanes.begin(flow())
            assert seen == []
            lanes.begin(flow())

    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    finish(main())
    assert seen == [1]


def test_a_call_for_which_there_is_no_thread_may_have_happened_and_is_worth_asking_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> int:
        world = AioWorld()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(OutcomeUnknown, match="no thread"):
                await world.call(abs, -1)
        try:
            return await world.call(abs, -2)
        finally:
            world.close()

    assert asyncio.run(main()) == 2


def test_whoever_is_cancelled_has_its_lanes_cancelled_once_they_have_begun() -> None:
    seen: list[str] = []

    async def flow(name: str) -> None:
        seen.append(f"{name} began")
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            seen.append(f"{name} ended")

    async def outer(begun: asyncio.Event) -> None:
        async with AioWorld().lanes("fencepost-test") as lanes:
            lanes.begin(flow("a"))
            lanes.begin(flow("b"))
            begun.set()
            await asyncio.sleep(60)

    async def main() -> None:
        begun = asyncio.Event()
        task = asyncio.create_task(outer(begun))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert sorted(seen) == ["a began", "a ended", "b began", "b ended"]


def test_whoever_is_cancelled_while_it_waits_for_its_lanes_has_them_cancelled() -> None:
    seen: list[str] = []

    async def flow(begun: asyncio.Event) -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            seen.append("ended")

    async def outer(begun: asyncio.Event) -> None:
        async with AioWorld().lanes("fencepost-test") as lanes:
            lanes.begin(flow(begun))

    async def main() -> None:
        begun = asyncio.Event()
        task = asyncio.create_task(outer(begun))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert seen == ["ended"]
