"""However an instance is brought to an end, or cannot begin, nothing of it is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from schedlab import serving, until, url_of

from fencepost import AsyncFencepost, Fencepost
from fencepost.model.run import State

if TYPE_CHECKING:
    from pathlib import Path

    from fencepost import Run


def test_an_interrupt_waits_for_a_body_that_hears_of_it(tmp_path: Path) -> None:
    began = threading.Event()
    with Fencepost(url_of(tmp_path)) as fp:

        @fp.job("job", every="1s")
        def job(run: Run) -> None:
            began.set()
            while True:
                run.check()
                time.sleep(0.01)

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
                fp.run(signals=False)
        finally:
            signal.signal(signal.SIGINT, before)
            helper.join()
        assert not [run for run in fp.runs("job") if run.state is State.RUNNING]
        assert fp.runs("job")[-1].reason == "released"


def test_a_cancelled_instance_ends_its_bodies_before_it_waits_for_alarms(tmp_path: Path) -> None:
    log: list[str] = []

    async def main() -> None:
        began, left, fired = asyncio.Event(), asyncio.Event(), asyncio.Event()
        async with AsyncFencepost(url_of(tmp_path)) as fp:

            @fp.job("body", every="1s")
            async def body() -> None:
                began.set()
                try:
                    await asyncio.sleep(60)
                finally:
                    log.append("body")
                    left.set()

            @fp.alarm("kind")
            async def alarm(_: Any) -> None:
                if fired.is_set():
                    return
                fired.set()
                try:
                    await asyncio.sleep(60)
                finally:
                    log.append("alarm")

            await fp.alarms.set("kind", key="key", at=time.time())
            task = asyncio.create_task(fp.run(signals=False))
            async with asyncio.timeout(30):
                await began.wait()
                await fired.wait()
                task.cancel()
                await left.wait()
                while not task.done():  # it waits for the alarm, until it is cancelled once more
                    task.cancel()
                    await asyncio.sleep(0.01)
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert [run.reason for run in await fp.runs("body")][-1] == "released"
            again = asyncio.create_task(fp.run(signals=False))
            await asyncio.sleep(0)
            fp.stop(grace=0)
            await asyncio.wait_for(again, 30)

    asyncio.run(main())
    assert log[:2] == ["body", "alarm"]


def test_a_second_cancel_leaves_no_body_behind(tmp_path: Path) -> None:
    async def main() -> None:
        began, leaving, leave = asyncio.Event(), asyncio.Event(), asyncio.Event()
        async with AsyncFencepost(url_of(tmp_path)) as fp:

            @fp.job("body", every="1s")
            async def body() -> None:
                began.set()
                try:
                    await asyncio.sleep(60)
                finally:
                    leaving.set()
                    while not leave.is_set():  # it has to be left in order, whoever is in a hurry
                        with suppress(asyncio.CancelledError):
                            await leave.wait()

            task = asyncio.create_task(fp.run(signals=False))
            async with asyncio.timeout(30):
                await began.wait()
                task.cancel()
                await leaving.wait()
                task.cancel()
                await asyncio.sleep(0.05)
                assert not task.done()
                leave.set()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert not [run for run in await fp.runs("body") if run.state is State.RUNNING]

    asyncio.run(main())


def test_an_instance_that_could_not_begin_may_be_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ran: list[int] = []
    with Fencepost(url_of(tmp_path)) as fp:
        fp.job("job", every="1s")(lambda: ran.append(1))
        fp.alarm("kind")(lambda alarm: None)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(RuntimeError, match="new thread"):
                fp.run(signals=False)
        with serving(fp):
            until(lambda: ran)


def test_a_signal_stops_an_instance_also_on_a_loop_that_handles_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with AsyncFencepost(url_of(tmp_path)) as fp:

            def none(*_: object) -> None:
                raise NotImplementedError

            loop = asyncio.get_running_loop()
            monkeypatch.setattr(loop, "add_signal_handler", none)
            task = asyncio.create_task(fp.run())
            await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(task, 30)

    asyncio.run(main())


def test_a_forked_child_may_run_an_instance_of_its_own(tmp_path: Path) -> None:
    ran: list[int] = []
    with Fencepost(url_of(tmp_path)) as fp:
        fp.job("job", every="1s")(lambda: ran.append(os.getpid()))
        with serving(fp):
            until(lambda: ran)
            pid = os.fork()
            if not pid:
                code = 1
                try:
                    fp.stop()  # its parent's is none of its business
                    with serving(fp):
                        until(lambda: os.getpid() in ran or fp.instances()[1:])
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitpid(pid, 0) == (pid, 0)
            seen = len(ran)
            until(lambda: len(ran) > seen)


def test_a_job_that_is_declared_late_is_announced_and_run(tmp_path: Path) -> None:
    ran: list[str] = []
    with Fencepost(url_of(tmp_path)) as fp:
        fp.job("early", every="1s")(lambda: ran.append("early"))
        with serving(fp):
            until(lambda: ran)
            fp.job("late", every="1s")(lambda: ran.append("late"))
            until(lambda: "late" in ran)
