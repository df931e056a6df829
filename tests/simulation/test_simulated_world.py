"""The doors of the simulated world, and how a process behind them dies."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from fencepost.testing.simulator.scheduler import Crashed, Scheduler, run_simulated
from fencepost.testing.simulator.world import Machine, SimulatedWorld

if TYPE_CHECKING:
    from fencepost.world.api import World


def check_types(world: SimulatedWorld) -> World:
    """Is of interest to the type checker only: a simulated world is a world."""
    return world


def test_an_hour_of_sleep_takes_no_time() -> None:
    async def flow(world: SimulatedWorld) -> float:
        before = world.clocks.boottime()
        await world.sleep(3600)
        return world.clocks.boottime() - before

    began = time.monotonic()
    assert run_simulated(flow) == pytest.approx(3600)
    assert time.monotonic() - began < 60


def test_the_result_and_the_error_of_a_flow_reach_whoever_ran_it() -> None:
    async def fails(world: SimulatedWorld) -> None:
        await world.sleep(1)
        raise KeyError("x")

    with pytest.raises(KeyError):
        run_simulated(fails)


def test_a_flow_that_waits_in_vain_is_an_error_and_not_an_endless_run() -> None:
    async def waits(world: SimulatedWorld) -> bool:
        return await world.signal().wait(None)

    with pytest.raises(AssertionError, match="never comes"):
        run_simulated(waits)


def test_flows_run_side_by_side_and_answer_in_order() -> None:
    async def one(world: SimulatedWorld, seconds: float) -> float:
        await world.sleep(seconds)
        return seconds

    async def flow(world: SimulatedWorld) -> tuple[list[float], float]:
        before = world.clocks.boottime()
        answers = await world.together(*(one(world, seconds) for seconds in (3.0, 1.0, 2.0)))
        return answers, world.clocks.boottime() - before

    answers, passed = run_simulated(flow)
    assert answers == [3.0, 1.0, 2.0]
    assert passed == pytest.approx(3.0)


def test_the_first_error_of_flows_side_by_side_is_raised_after_all_have_ended() -> None:
    ended = []

    async def one(world: SimulatedWorld, seconds: float) -> None:
        await world.sleep(seconds)
        ended.append(seconds)
        if seconds < 3:
            raise ValueError(seconds)

    async def flow(world: SimulatedWorld) -> None:
        await world.together(*(one(world, seconds) for seconds in (2.0, 1.0, 3.0)))

    with pytest.raises(ValueError, match="2"):
        run_simulated(flow)
    assert ended == [1.0, 2.0, 3.0]


def test_a_signal_wakes_its_waiter_or_lets_it_time_out() -> None:
    async def flow(world: SimulatedWorld) -> list[Any]:
        signal = world.signal()

        async def raise_it() -> bool:
            await world.sleep(1)
            signal.set()
            return True

        async def wait() -> bool:
            return await signal.wait(5)

        early = await signal.wait(0.5)
        before = world.clocks.boottime()
        _, woken = await world.together(raise_it(), wait())
        passed = world.clocks.boottime() - before
        still_up = await signal.wait(0)
        signal.clear()
        return [early, woken, passed, still_up, await signal.wait(0.5)]

    early, woken, passed, still_up, lowered = run_simulated(flow)
    assert (early, woken, still_up, lowered) == (False, True, True, False)
    assert passed == pytest.approx(1.0)


def test_a_call_runs_in_one_piece_some_time_later() -> None:
    async def flow(world: SimulatedWorld) -> tuple[int, bool]:
        before = world.clocks.boottime()
        return await world.call(max, 1, 2), world.clocks.boottime() > before

    assert run_simulated(flow) == (2, True)


def test_a_real_descriptor_can_be_waited_for() -> None:
    reader, writer = os.pipe()

    async def flow(world: SimulatedWorld) -> list[bool]:
        first = await world.readable(reader, 1.0)
        os.write(writer, b".")
        return [first, await world.readable(reader, 1.0)]

    try:
        assert run_simulated(flow) == [False, True]
    finally:
        os.close(reader)
        os.close(writer)


def test_nonces_are_never_repeated() -> None:
    world = SimulatedWorld(Scheduler(0))
    assert len({world.nonce() for _ in range(1000)}) == 1000


def test_a_machine_may_count_seconds_a_little_differently() -> None:
    scheduler = Scheduler(0)
    fast = SimulatedWorld(scheduler, Machine(scheduler, rate=1.01))
    fast.spawn(fast.sleep(101))
    scheduler.run()
    assert scheduler.now == pytest.approx(100)
    assert fast.clocks.boottime() == pytest.approx(101)


def test_a_wall_clock_that_is_set_leaves_the_boot_clock_alone() -> None:
    machine = Machine(Scheduler(0), wall=1000.0)
    machine.step(-3600)
    assert (machine.wall(), machine.boottime()) == (-2600.0, 0.0)


def test_after_a_crash_no_door_opens_even_for_a_finally_block() -> None:
    scheduler, reached = Scheduler(0), []
    world = SimulatedWorld(scheduler)

    async def flow() -> None:
        try:
            await world.sleep(10)
        finally:
            reached.append("finally")
            await world.call(reached.append, "the store")

    task = world.spawn(flow())
    scheduler.later(5.0, lambda *_: world.crash(), None, None)
    scheduler.run()
    assert reached == ["finally"]
    assert task.ended
    with pytest.raises(Crashed):
        world.enter()


def test_a_paused_process_goes_on_late_and_with_all_its_flows() -> None:
    scheduler, woken = Scheduler(0), []
    world, other = (SimulatedWorld(scheduler, instance=name) for name in ("a.1", "b.1"))

    async def flow(world: SimulatedWorld) -> None:
        await world.sleep(1)
        woken.append((world.instance, scheduler.now))

    for one in (world, world, other):
        one.spawn(flow(one))
    scheduler.later(0.5, lambda *_: world.freeze(9.5), None, None)
    scheduler.run()
    assert woken == [("b.1", 1.0), ("a.1", 10.0), ("a.1", 10.0)]


def test_the_error_of_a_flow_that_nobody_watches_is_not_swallowed() -> None:
    async def background() -> None:
        raise KeyError("unseen")

    async def flow(world: SimulatedWorld) -> None:
        world.spawn(background())
        await world.sleep(10)

    with pytest.raises(KeyError, match="unseen"):
        run_simulated(flow)
