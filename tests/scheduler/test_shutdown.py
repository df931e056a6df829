"""A stop begins nothing more; what runs finishes, or is given back and goes on elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from schedlab import Heard, Member, claims_ahead, effects, members, serving, until, url_of

from fencepost import AsyncFencepost, Fencepost
from fencepost.model.run import RunRecord, State

if TYPE_CHECKING:
    from pathlib import Path

    from fencepost import AsyncRun, Run

STEPS = 200  # of 50 ms each: longer than anybody waits


def owed(folder: Path) -> None:
    """Leave one slot of the past to whichever instance comes."""
    hour = int(time.time()) // 3600 * 3600
    with Fencepost(url_of(folder)) as fp:
        fp.job("steps", every="1h", lease="5s")(lambda run: None)
        fp.backfill("steps", hour - 3600, hour, wait=False)


def only_run(folder: Path) -> RunRecord:
    with Fencepost(url_of(folder)) as fp:
        (run,) = fp.runs("steps")
    return run


def steps_done(folder: Path) -> list[int]:
    return [int(effect.more) for effect in effects(folder)]


@pytest.mark.parametrize("mode", ["stopped", "stopped_aio"])
def test_a_body_that_saves_is_given_back_after_its_checkpoint_and_resumed_elsewhere(
    tmp_path: Path, mode: str
) -> None:
    owed(tmp_path)
    with members() as fleet:
        first = Member(tmp_path, mode, steps=STEPS, saves=True, grace=60)
        fleet.append(first)
        until(lambda: len(effects(tmp_path)) >= 5)
        first.ask_to_stop()
        assert first.ended() == 0
        run = only_run(tmp_path)
        assert (run.state, run.reason) == (State.PENDING, "released")
        fleet.append(Member(tmp_path, mode, steps=len(effects(tmp_path)) + 5, saves=True, grace=60))
        until(lambda: only_run(tmp_path).state is State.SUCCEEDED)
    run = only_run(tmp_path)
    assert (run.starts, run.losses, run.releases, run.attempt) == (2, 0, 1, 1)
    done = steps_done(tmp_path)
    assert done == sorted(set(done))  # no step was taken twice


@pytest.mark.parametrize("mode", ["stopped", "stopped_aio"])
def test_a_body_may_finish_within_the_grace(tmp_path: Path, mode: str) -> None:
    owed(tmp_path)
    with members() as fleet:
        member = Member(tmp_path, mode, steps=20, saves=False, grace=60)
        fleet.append(member)
        until(lambda: effects(tmp_path))
        member.ask_to_stop()
        assert member.ended() == 0
    run = only_run(tmp_path)
    assert (run.state, run.starts) == (State.SUCCEEDED, 1)


def test_a_coroutine_is_cancelled_at_the_end_of_the_grace_and_given_back(tmp_path: Path) -> None:
    owed(tmp_path)
    with members() as fleet:
        member = Member(tmp_path, "stopped_aio", steps=STEPS, saves=False, grace=0.2)
        fleet.append(member)
        until(lambda: effects(tmp_path))
        member.ask_to_stop()
        assert member.ended() == 0
    run = only_run(tmp_path)
    assert (run.state, run.reason, run.losses) == (State.PENDING, "released", 0)


@pytest.mark.parametrize("mode", ["stopped", "stopped_aio"])
def test_a_second_signal_hurries(tmp_path: Path, mode: str) -> None:
    owed(tmp_path)
    with members() as fleet:
        member = Member(tmp_path, mode, steps=STEPS, saves=False, grace=600)
        fleet.append(member)
        until(lambda: effects(tmp_path))
        member.ask_to_stop()
        seen = len(effects(tmp_path))
        until(lambda: len(effects(tmp_path)) > seen)  # it goes on, for now
        member.ask_to_stop()
        assert member.ended(within=10) == 0
    run = only_run(tmp_path)
    assert (run.state, run.reason, run.losses) == (State.PENDING, "released", 0)


def test_signals_are_left_to_those_who_had_them_before(tmp_path: Path) -> None:
    def mine(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with Fencepost(url_of(tmp_path)) as fp:
            stopper = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM))
            stopper.start()
            fp.run()
            stopper.join()
        assert signal.getsignal(signal.SIGTERM) is mine

        async def main() -> None:
            async with AsyncFencepost(url_of(tmp_path)) as fp:
                interrupts = signal.getsignal(signal.SIGINT)
                asyncio.get_running_loop().call_later(
                    0.2, lambda: os.kill(os.getpid(), signal.SIGTERM)
                )
                await fp.run()
                assert signal.getsignal(signal.SIGINT) is interrupts

        asyncio.run(main())
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_was_claimed_ahead_is_given_back_unstarted_and_is_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims_ahead(monkeypatch)
    began, leave = threading.Event(), threading.Event()
    with Fencepost(url_of(tmp_path)) as fp:

        def body() -> None:
            began.set()
            assert leave.wait(30)

        for number in range(5):
            fp.job(f"job-{number}", every="1s")(body)
        with serving(fp, concurrency=1) as thread:
            crew = fp._scheduling.crew
            assert crew is not None
            assert began.wait(30)
            until(lambda: len(fp._working.courses) >= 1)
            until(lambda: len([r for r in fp.runs() if r.state is State.RUNNING]) >= 2)
            fp.stop(grace=30)
            assert crew.stopping
            leave.set()
            thread.join(30)
            assert not thread.is_alive()
        runs = fp.runs()
    given_back = [run for run in runs if run.releases]
    assert given_back
    assert all(run.state is State.PENDING for run in given_back)
    assert all((run.losses, run.streak, run.attempt) == (0, 0, 0) for run in given_back)
    assert not [run for run in runs if run.state is State.RUNNING]


def test_a_stop_that_comes_while_an_attempt_begins_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    with Fencepost(url_of(tmp_path)) as fp:

        @fp.job("job", every="1s")
        def job(run: Run) -> None:
            ran.append(1)

        keeper = fp._holding.keeper
        add = keeper.add

        def stopped_just_now(hold: Any) -> None:
            fp.stop(grace=30)
            add(hold)

        monkeypatch.setattr(keeper, "add", stopped_just_now)
        with serving(fp) as thread:
            thread.join(30)
            assert not thread.is_alive()
        (run,) = fp.runs("job")
    assert not ran
    assert (run.state, run.reason, run.losses) == (State.PENDING, "released", 0)


def test_an_instance_whose_task_is_cancelled_gives_back_what_runs_and_ends(tmp_path: Path) -> None:
    async def main() -> list[RunRecord]:
        began = asyncio.Event()
        async with AsyncFencepost(url_of(tmp_path)) as fp:

            @fp.job("job", every="1s")
            async def job(run: AsyncRun) -> None:
                began.set()
                await asyncio.sleep(60)

            @fp.job("quick", every="1s")
            async def quick() -> None: ...

            task = asyncio.create_task(fp.run(signals=False))
            await asyncio.wait_for(began.wait(), 30)
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=20)
            assert done, "it never ended"
            assert task.cancelled()
            return await fp.runs()

    runs = asyncio.run(main())
    job = next(run for run in runs if run.key.job == "job")
    assert (job.state, job.losses, job.releases) == (State.PENDING, 0, 1)
    assert not [run for run in runs if run.state is State.RUNNING]


def test_an_instance_that_is_interrupted_leaves_no_run_without_an_end(tmp_path: Path) -> None:
    heard = Heard()
    began, leave = threading.Event(), threading.Event()
    with Fencepost(url_of(tmp_path), on_event=heard) as fp:

        @fp.job("job", every="1s")
        def job() -> str:
            began.set()
            assert leave.wait(30)
            return "done"

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        def interrupt() -> None:
            assert began.wait(30)
            os.kill(os.getpid(), signal.SIGINT)

        before = signal.signal(signal.SIGINT, interrupted)
        helper = threading.Thread(target=interrupt)
        helper.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                fp.run(signals=False, grace=0.1)  # for longer nobody waits for it
        finally:
            signal.signal(signal.SIGINT, before)
            helper.join()
        leave.set()
        until(lambda: [run.state for run in fp.runs("job")][-1] is State.SUCCEEDED)
        assert fp.runs("job")[-1].result == '"done"'


def deaf(fp: Fencepost | AsyncFencepost) -> tuple[threading.Event, threading.Event]:
    """Declare a job whose body hears nothing: return what says that it began, and what ends it."""
    began, leave = threading.Event(), threading.Event()

    @fp.job("job", every="1s", lease="2s")
    def job() -> str:
        began.set()
        assert leave.wait(60)
        return "done"

    return began, leave


def is_kept(folder: Path, since: float) -> bool:
    """Say whether a run was renewed for longer than its lease is, and nobody else may have it."""
    with Fencepost(url_of(folder)) as other:
        other.job("job", every="1s", lease="2s")(lambda: None)
        assert [outcome.status for outcome in other.tick()] == []
        run = other.runs("job")[-1]
    assert run.state is State.RUNNING
    return run.beat_at > since + 3


def test_a_program_that_stops_its_instance_goes_on_beside_a_body_that_hears_nothing(
    tmp_path: Path,
) -> None:
    with Fencepost(url_of(tmp_path)) as fp:
        began, leave = deaf(fp)
        thread = threading.Thread(target=lambda: fp.run(signals=False), daemon=True)
        thread.start()
        assert began.wait(30)
        fp.stop(grace=0.2)
        thread.join(5)
        assert not thread.is_alive()
    closed = time.time()
    until(lambda: is_kept(tmp_path, closed))  # the face is closed, and the body is not over
    leave.set()
    with Fencepost(url_of(tmp_path)) as other:
        until(lambda: other.runs("job")[-1].state is State.SUCCEEDED)
        run = other.runs("job")[-1]
    assert (run.result, run.starts, run.losses) == ('"done"', 1, 0)
    until(lambda: not fp._working.courses)
    fp.close()


def test_a_task_that_stops_its_instance_goes_on_beside_a_body_that_hears_nothing(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with AsyncFencepost(url_of(tmp_path)) as fp:
            began, leave = deaf(fp)
            task = asyncio.create_task(fp.run(signals=False))
            assert await asyncio.to_thread(began.wait, 30)
            fp.stop(grace=0.2)
            await asyncio.wait_for(task, 5)
        closed = time.time()
        await asyncio.to_thread(until, lambda: is_kept(tmp_path, closed))
        leave.set()
        await asyncio.to_thread(until, lambda: not fp._working.courses)
        await fp.close()

    asyncio.run(main())
    with Fencepost(url_of(tmp_path)) as fp:
        run = fp.runs("job")[-1]
    assert (run.state, run.result, run.starts, run.losses) == (State.SUCCEEDED, '"done"', 1, 0)


def test_a_stop_may_be_lengthened(tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncFencepost(url_of(tmp_path)) as fp:

            @fp.job("job", every="1s")
            async def job() -> str:
                fp.stop(grace=0.2)
                await asyncio.sleep(0.05)  # the first one is heard
                fp.stop(grace=60)
                await asyncio.sleep(0.6)
                return "done"

            await asyncio.wait_for(fp.run(signals=False), 30)

    asyncio.run(main())
    with Fencepost(url_of(tmp_path)) as fp:

        @fp.job("other", every="1s")
        async def other() -> str:
            fp.stop(grace=0.2)
            await asyncio.sleep(0.05)  # the first one is heard
            fp.stop(grace=60)
            await asyncio.sleep(0.6)
            return "done"

        fp.run(signals=False)
        runs = [*fp.runs("job"), *fp.runs("other")]
    assert [(run.state, run.result) for run in runs] == [(State.SUCCEEDED, '"done"')] * 2
