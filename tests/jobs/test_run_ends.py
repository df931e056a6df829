"""However a body ends, its end is on record: once, by its own process, in words to be kept."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import sys
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from fencepost import AsyncFencepost, Fencepost
from fencepost.errors import LeaseLost
from fencepost.model.run import State
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fencepost.model.event import JobEvent, LeaseEvent
    from fencepost.model.run import RunRecord
    from fencepost.running import AsyncRun, Run

SLOT = datetime(2026, 1, 20, 2, tzinfo=UTC)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/fp.db"


@pytest.fixture
def fp(url: str) -> Iterator[Fencepost]:
    with Fencepost(url) as fencepost:
        yield fencepost


class _Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError(os.fsdecode(b"/tmp/\xff")), "FileNotFoundError: /tmp/\\udcff"),
        (_Speechless(), "_Speechless: (it cannot say what it is)"),
    ],
)
def test_an_error_that_no_database_keeps_as_it_is_ends_the_run_all_the_same(
    fp: Fencepost, error: Exception, words: str
) -> None:
    @fp.job("billing")
    def billing() -> None:
        raise error

    outcome = fp.trigger("billing", SLOT)
    assert (outcome.status, outcome.error) == ("failed", words)
    assert fp.runs("billing")[0].state is State.FAILED


def test_an_item_that_failed_with_a_secret_is_kept_without_it(fp: Fencepost) -> None:
    @fp.job("billing")
    def billing(run: Run) -> None:
        with run.batch(["a"]) as mine:
            mine.failed("a", "no route to postgresql://me:hunter22@db/\udcff")

    assert fp.trigger("billing", SLOT)
    (item,) = finish(fp._working.ledger.items("billing@2026-01-20T02:00:00Z"))
    assert item.error is not None
    assert "hunter22" not in item.error


def test_a_reason_to_skip_that_is_no_text_is_a_mistake_and_not_an_endless_wait(
    fp: Fencepost,
) -> None:
    @fp.job("billing")
    def billing(run: Run) -> None:
        run.skip(None)  # type: ignore[arg-type]

    outcome = fp.trigger("billing", SLOT)
    assert outcome.status == "failed"
    assert "reason is None" in str(outcome.error)


def test_a_run_that_skips_itself_is_told_of_once(url: str) -> None:
    events: list[str] = []

    def hear(event: LeaseEvent | JobEvent) -> None:
        events.append(event.what)

    with Fencepost(url, on_event=hear) as fp:

        @fp.job("billing")
        def billing(run: Run) -> None:
            run.skip("no input")

        assert fp.trigger("billing", SLOT).reason == "no input"
    assert events.count("skipped") == 1


@pytest.mark.parametrize("steps", [[2**70], [2**62, 2**62], [-(2**63)]])
def test_a_count_that_no_database_keeps_is_refused_where_it_is_made(
    fp: Fencepost, steps: list[int]
) -> None:
    @fp.job("billing")
    def billing(run: Run) -> None:
        for step in steps:
            run.count("rows", step)

    outcome = fp.trigger("billing", SLOT)
    assert (outcome.status, fp.runs("billing")[0].state) == ("failed", State.FAILED)
    assert str(outcome.error).startswith("Misuse")


@pytest.mark.parametrize("leaves", ["exit", "return", "raise"])
def test_a_forked_child_that_leaves_the_body_does_not_end_the_run_of_its_parent(
    fp: Fencepost, leaves: str
) -> None:
    parent = os.getpid()

    @fp.job("billing")
    def billing() -> str:
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            return "the parent's"
        if leaves == "exit":
            sys.exit(0)
        if leaves == "raise":
            raise ValueError("of the child")
        return "the child's"

    try:
        outcome = fp.trigger("billing", SLOT)
    finally:
        if os.getpid() != parent:
            os._exit(0)
    assert (outcome.status, outcome.result) == ("succeeded", "the parent's")
    (run,) = fp.runs("billing")
    assert (run.state, run.losses) == (State.SUCCEEDED, 0)


def test_a_forked_child_cannot_begin_the_items_of_its_parent(fp: Fencepost) -> None:
    mine: list[str] = []

    @fp.job("billing")
    def billing(run: Run) -> int:
        child = os.fork()
        if not child:
            try:
                with run.batch([1, 2]):
                    os._exit(1)
            except LeaseLost:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        with run.batch([1, 2]) as batch:
            mine.extend(batch)
        return status

    assert fp.trigger("billing", SLOT).result == 0
    assert mine == ["1", "2"]


def test_a_body_that_is_cancelled_from_within_has_failed(fp: Fencepost) -> None:
    @fp.job("billing")
    async def billing(run: AsyncRun) -> None:
        never = asyncio.get_running_loop().create_future()
        never.cancel()
        await never

    outcome = fp.trigger("billing", SLOT)
    assert (outcome.status, fp.runs("billing")[0].attempt) == ("failed", 1)
    assert "cancelled from within" in str(outcome.error)


def test_a_body_in_a_thread_that_returns_after_its_trigger_was_cancelled_is_done(url: str) -> None:
    async def cancel_a_trigger() -> None:
        began, go = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()
        async with AsyncFencepost(url) as fp:

            @fp.job("billing")
            def billing() -> int:
                loop.call_soon_threadsafe(began.set)
                go.wait()
                return 42

            task = asyncio.create_task(fp.trigger("billing", SLOT))
            await began.wait()
            task.cancel()
            await asyncio.sleep(0)  # so that it hears of it before the body returns
            go.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            (run,) = await fp.runs("billing")
        assert (run.state, run.result) == (State.SUCCEEDED, "42")

    asyncio.run(cancel_a_trigger())


def test_an_interrupt_while_the_end_is_recorded_does_not_undo_the_work(
    fp: Fencepost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = fp._working.ledger
    whole, calls = ledger._finish, []  # type: ignore[attr-defined]

    def interrupted(*args: object) -> object:
        calls.append(args)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        return whole(*args)

    monkeypatch.setattr(ledger, "_finish", interrupted)

    @fp.job("billing")
    def billing() -> int:
        return 42

    with pytest.raises(KeyboardInterrupt):
        fp.trigger("billing", SLOT)
    (run,) = fp.runs("billing")
    assert (run.state, run.result) == (State.SUCCEEDED, "42")
    assert len(calls) == 2


def test_a_system_without_threads_gives_the_run_back_and_is_asked_again_later(
    fp: Fencepost, monkeypatch: pytest.MonkeyPatch
) -> None:
    @fp.job("billing")
    def billing() -> None:
        """Have nothing to do."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            fp.trigger("billing", SLOT)
    keeper = fp._holding.keeper
    assert not keeper.charges.holds()
    assert fp.runs("billing")[0].state is State.PENDING
    assert fp.trigger("billing", SLOT).status == "succeeded"
    assert keeper._thread is not None
    assert keeper._thread.is_alive()


def test_a_manual_run_that_waits_for_its_turn_is_still_the_same_run(fp: Fencepost) -> None:
    began, go = threading.Event(), threading.Event()

    @fp.job("billing", overlap="reschedule")
    def billing() -> None:
        began.set()
        go.wait()

    first = threading.Thread(target=fp.trigger, args=("billing", SLOT))
    first.start()
    began.wait()
    waiting = threading.Event()

    def let_go() -> None:
        while not any(run.state is State.PENDING for run in fp.runs("billing")):
            waiting.wait(0.001)
        go.set()

    helper = threading.Thread(target=let_go)
    helper.start()
    outcome = fp.trigger("billing", manual=True)
    helper.join()
    first.join()
    assert outcome.status == "succeeded"
    assert outcome.run_id.endswith("!manual-1")
    assert len(fp.runs("billing")) == 2


def test_the_key_of_an_item_is_the_same_wherever_it_is_asked_for(fp: Fencepost) -> None:
    keys: list[str] = []

    @fp.job("billing", items="job")
    def billing(run: Run) -> None:
        with run.once("a") as first:
            keys.extend([first.key, run.key_of("a"), run.headers("a")["Idempotency-Key"]])

    assert fp.trigger("billing", SLOT)
    assert keys == ["billing/a"] * 3


def test_a_run_ends_in_the_file_that_is_there_and_not_in_one_that_was_replaced(
    fp: Fencepost, tmp_path: Path
) -> None:
    path, copy = tmp_path / "fp.db", tmp_path / "copy.db"
    minutes = iter(range(3))

    @fp.job("billing")
    def billing(run: Run) -> None:
        with run.transaction() as tx:
            tx.execute("CREATE TABLE IF NOT EXISTS paid (number INTEGER)")
        if next(minutes) == 2:
            with sqlite3.connect(path) as old, sqlite3.connect(copy) as new:
                old.backup(new)
            new.close()
            old.close()
            for suffix in ("", "-wal", "-shm"):
                os.rename(f"{path}{suffix}", f"{path}.old{suffix}")
            copy.rename(path)
            with run.transaction() as tx:
                tx.execute("INSERT INTO paid VALUES (1)")

    outcomes = [fp.trigger("billing", SLOT.timestamp() + 60 * minute) for minute in range(3)]
    assert [outcome.status for outcome in outcomes] == ["succeeded"] * 3
    found = sqlite3.connect(path)
    assert found.execute("SELECT DISTINCT state FROM fencepost_run").fetchall() == [("succeeded",)]
    assert found.execute("SELECT number FROM paid").fetchall() == [(1,)]
    found.close()


def test_a_trigger_without_patience_does_not_give_up_the_run_that_another_waits_for(
    url: str,
) -> None:
    began, go = threading.Event(), threading.Event()
    outcomes: list[str] = []
    with Fencepost(url) as patient, Fencepost(url) as hasty:
        for face in (patient, hasty):

            @face.job("billing", overlap="reschedule")
            def billing() -> None:
                began.set()
                go.wait()

        later = SLOT.timestamp() + 60
        first = threading.Thread(target=patient.trigger, args=("billing", SLOT))
        second = threading.Thread(
            target=lambda: outcomes.append(patient.trigger("billing", later).status)
        )
        first.start()
        began.wait()
        second.start()
        while not any(run.state is State.PENDING for run in hasty.runs("billing")):
            second.join(0.001)
        assert hasty.trigger("billing", later, wait="10ms").reason == "lock_held"
        go.set()
        first.join()
        second.join()
    assert outcomes == ["succeeded"]


def test_work_that_was_done_in_a_cancelled_thread_is_done_whatever_it_returned(
    tmp_path: Path,
) -> None:
    bodies: list[str] = []

    async def main() -> list[RunRecord]:
        inside, leave = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()
        async with AsyncFencepost(f"sqlite:///{tmp_path}/fp.db") as fp:

            @fp.job("report")
            def report() -> object:
                bodies.append("began")
                loop.call_soon_threadsafe(inside.set)
                assert leave.wait(30)
                return object()  # which nobody can keep

            task = asyncio.create_task(fp.trigger("report", "2026-01-20T02:00:00Z"))
            await inside.wait()
            task.cancel()
            leave.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            return await fp.runs("report")

    (run,) = asyncio.run(main())
    assert (run.state, bodies) == (State.SUCCEEDED, ["began"])
