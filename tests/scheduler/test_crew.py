"""Bodies run beside each other, never more than were asked for, and whatever they raise."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from schedlab import Heard, claims_ahead, serving, until, url_of

from fencepost import AsyncFencepost, Fencepost, Misuse, Retry
from fencepost.model.run import RunRecord, State
from fencepost.serving import ThreadCrew
from fencepost.world.blocking import BlockingWorld

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fencepost import Run


async def served(fp: AsyncFencepost, condition: Callable[[list[RunRecord]], object]) -> None:
    """Have an instance run until its ledger shows what is waited for."""
    task = asyncio.create_task(fp.run(signals=False, concurrency=3))
    try:
        async with asyncio.timeout(30):
            while not condition(await fp.runs(limit=1000)):
                assert not task.done(), task
                await asyncio.sleep(0.02)
    finally:
        fp.stop(grace=0)
        await asyncio.wait_for(task, 30)


class Inside:
    """Who is inside at the same time, at most."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.now = self.most = self.all = 0

    def __enter__(self) -> None:
        with self.turn:
            self.now += 1
            self.all += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *_: object) -> None:
        with self.turn:
            self.now -= 1


def test_never_more_bodies_run_at_once_than_were_asked_for(tmp_path: Path) -> None:
    inside = Inside()
    with Fencepost(url_of(tmp_path)) as fp:

        def body() -> None:
            with inside:
                time.sleep(0.02)

        for number in range(12):
            fp.job(f"job-{number}", every="1s")(body)
        with serving(fp, concurrency=3):
            until(lambda: inside.all >= 24)
        assert not [run for run in fp.runs() if run.state is State.RUNNING]
    assert inside.most == 3


def test_never_more_coroutines_run_at_once_than_were_asked_for(tmp_path: Path) -> None:
    inside = Inside()

    async def main() -> None:
        async with AsyncFencepost(url_of(tmp_path)) as fp:

            async def body() -> None:
                with inside:
                    await asyncio.sleep(0.02)

            for number in range(12):
                fp.job(f"job-{number}", every="1s")(body)
            await served(fp, lambda _: inside.all >= 24)

    asyncio.run(main())
    assert inside.most == 3


def test_a_worker_is_free_while_a_run_waits_for_its_retry(tmp_path: Path) -> None:
    ran: list[str] = []
    with Fencepost(url_of(tmp_path)) as fp:

        @fp.job("fails", every="1h", retry=Retry(2, base="1s", jitter=False))
        def fails(run: Run) -> None:
            ran.append(f"fails {run.attempt}")
            raise ValueError("not yet")

        @fp.job("other", every="1s")
        def other() -> None:
            ran.append("other")

        hour = int(time.time()) // 3600 * 3600
        fp.backfill("fails", hour - 3600, hour, wait=False)
        with serving(fp, concurrency=1):
            until(lambda: "fails 2" in ran)
            until(lambda: fp.runs("fails")[0].state is State.FAILED)
        (run,) = fp.runs("fails")
    first, second = ran.index("fails 1"), ran.index("fails 2")
    assert "other" in ran[first:second]
    assert (run.starts, run.losses, run.attempt) == (2, 0, 2)


RAISED = [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), StopIteration(), BaseException("x")]


def raiser(error: BaseException) -> Callable[[], None]:
    def bad() -> None:
        raise error

    return bad


def kinds_failed(runs: list[RunRecord]) -> set[str]:
    """Return by which errors runs have failed, each at its first try."""
    failed = [run for run in runs if run.state is State.FAILED]
    assert all(run.starts == 1 for run in failed)
    assert all(run.key.job in str(run.error) for run in failed)
    return {run.key.job for run in failed}


def test_whatever_a_body_raises_in_a_thread_is_a_failure_of_its_run_alone(tmp_path: Path) -> None:
    kinds = {type(error).__name__ for error in RAISED}
    with Fencepost(url_of(tmp_path)) as fp:
        for error in RAISED:
            fp.job(type(error).__name__, every="1s")(raiser(error))
        fp.job("good", every="1s")(lambda: None)
        with serving(fp):
            until(lambda: kinds_failed(fp.runs(limit=100)) == kinds)
            until(lambda: len(fp.runs("good")) >= 2)
        assert not [run for run in fp.runs(limit=100) if run.state is State.RUNNING]


def test_whatever_a_function_raises_beside_an_event_loop_is_a_failure_of_its_run_alone(
    tmp_path: Path,
) -> None:
    kinds = {type(error).__name__ for error in RAISED}

    async def main() -> None:
        async with AsyncFencepost(url_of(tmp_path)) as fp:
            for error in RAISED:
                fp.job(type(error).__name__, every="1s")(raiser(error))
            await served(fp, lambda runs: kinds_failed(runs) == kinds)

    asyncio.run(main())


@pytest.mark.parametrize("blocking", [True, False])
def test_a_coroutine_that_exits_ends_its_run_and_not_the_instance(
    tmp_path: Path, *, blocking: bool
) -> None:
    async def bad() -> None:
        raise SystemExit(3)

    def failed(runs: list[RunRecord]) -> bool:
        return [run.state for run in runs].count(State.FAILED) >= 1

    async def main() -> list[RunRecord]:
        async with AsyncFencepost(url_of(tmp_path)) as fp:
            fp.job("bad", every="1s")(bad)
            await served(fp, failed)
            return await fp.runs()

    if blocking:
        with Fencepost(url_of(tmp_path)) as fp:
            fp.job("bad", every="1s")(bad)
            with serving(fp):
                until(lambda: failed(fp.runs()))
            runs = fp.runs()
    else:
        runs = asyncio.run(main())
    assert all(run.starts == 1 for run in runs if run.state is State.FAILED)


def test_a_body_that_forks_goes_on_in_its_parent_only(tmp_path: Path) -> None:
    children: list[int] = []
    with Fencepost(url_of(tmp_path)) as fp:

        @fp.job("forks", every="1s")
        def forks() -> str:
            pid = os.fork()
            if not pid:
                return "child"  # it comes back to a worker that is not its own
            children.append(pid)
            assert os.waitpid(pid, 0) == (pid, 0)
            return "parent"

        with serving(fp):
            until(lambda: [r.state for r in fp.runs("forks")].count(State.SUCCEEDED) >= 2)
        runs = fp.runs("forks")
    results = {run.result for run in runs if run.state is State.SUCCEEDED}
    assert results == {'"parent"'}
    assert len(children) >= 2


def test_a_face_runs_one_instance_at_a_time_and_may_run_again(tmp_path: Path) -> None:
    ran: list[int] = []
    with Fencepost(url_of(tmp_path)) as fp:
        fp.job("job", every="1s")(lambda: ran.append(1))
        with serving(fp):
            until(lambda: ran)
            with pytest.raises(Misuse, match="running already"):
                fp.run(signals=False)
        seen = len(ran)
        with serving(fp):
            until(lambda: len(ran) > seen)
        (one,) = fp.instances()
        assert one.left_at
        assert one.instance.pid == os.getpid()
        fp.stop()  # with nothing to stop it does nothing


def test_words_that_cannot_be_are_refused(tmp_path: Path) -> None:
    words: list[dict[str, Any]] = [
        {"concurrency": 0},
        {"concurrency": True},
        {"grace": -1},
        {"grace": "soon"},
    ]
    with Fencepost(url_of(tmp_path)) as fp:
        for wrong in words:
            with pytest.raises(Misuse):
                fp.run(**wrong)
        with pytest.raises(Misuse):
            fp.tick(budget=0)
        with pytest.raises(Misuse):
            fp.tick(most=0)


def test_events_tell_of_what_was_decided_and_a_listener_that_fails_ends_nothing(
    tmp_path: Path,
) -> None:
    heard, leave = Heard(), threading.Event()

    def listener(event: Any) -> None:
        heard(event)
        raise ValueError("it does not want to hear")

    with Fencepost(url_of(tmp_path), on_event=listener) as fp:
        fp.job("long", every="1s")(lambda: leave.wait(30))
        with serving(fp):
            until(lambda: heard.about("skipped"))
            leave.set()
            until(lambda: heard.about("completed"))
    skipped = heard.about("skipped")[0]
    assert dict(skipped.more)["reason"] == "lock_held"
    assert str(dict(skipped.more)["blocker"]).startswith("long@")


def test_a_lease_that_ran_out_while_its_attempt_waited_for_a_thread_begins_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims_ahead(monkeypatch)
    ran: list[int] = []
    began, leave = threading.Event(), threading.Event()
    with Fencepost(url_of(tmp_path)) as fp:

        @fp.job("long", every="1s", lease="30s")
        def long() -> None:
            began.set()
            leave.wait(30)

        @fp.job("waits", every="1s", lease="500ms")
        def waits(run: Run) -> None:
            ran.append(run.token)

        with serving(fp, concurrency=1):
            until(began.is_set)
            until(lambda: [r for r in fp.runs("waits") if r.state is State.RUNNING])
            token = fp.runs("waits")[0].token
            time.sleep(0.7)
            leave.set()
            until(lambda: [r for r in fp.runs("waits") if r.state is State.SUCCEEDED])
    assert token not in ran


def test_what_is_claimed_ahead_comes_in_halves(tmp_path: Path) -> None:
    """One half is carried out while the ledger is asked for the other."""
    with Fencepost(url_of(tmp_path)) as fp:
        crew = ThreadCrew(fp._scheduling.serving, fp._working, BlockingWorld(), size=4)
        assert (crew.room(0), crew.free(0)) == (4, 4)
        crew._pace = 490.0  # of short ones: 196 ahead
        assert [crew.room(0), crew.free(0)] == [100, 4]
        crew._begun = 100
        assert [crew.room(0), crew.free(0)] == [100, -96]
        crew._begun = 200
        assert [crew.room(0), crew.room(99), crew.room(100)] == [0, 0, 100]
        assert [crew.free(99), crew.free(200)] == [-97, 4]
