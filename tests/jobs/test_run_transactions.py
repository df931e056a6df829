"""A transaction of a run is guarded from its begin to its end, whatever comes in between."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from fencepost import AsyncFencepost, Fencepost, transaction_sqlite
from fencepost.errors import Misuse
from fencepost.model.run import State
from fencepost.world.sqlite import SqliteFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fencepost import AsyncRun
    from fencepost.running import Run
    from fencepost.transaction_sqlite import SqliteTransaction

SLOT = datetime(2026, 1, 20, 2, tzinfo=UTC)


@pytest.fixture
def fp(tmp_path: Path) -> Iterator[Fencepost]:
    with Fencepost(f"sqlite:///{tmp_path}/fp.db") as fencepost:
        yield fencepost


def test_nothing_is_written_any_more_once_the_database_has_rolled_the_transaction_back(
    fp: Fencepost, tmp_path: Path
) -> None:
    @fp.job("billing")
    def billing(run: Run) -> None:
        with run.transaction() as tx:
            tx.execute("CREATE TABLE paid (number INTEGER UNIQUE)")
            tx.execute("INSERT INTO paid VALUES (1)")
        with run.transaction() as tx:
            assert tx.once("two")
            with pytest.raises(sqlite3.IntegrityError):
                tx.execute("INSERT OR ROLLBACK INTO paid VALUES (1)")
            tx.execute("INSERT INTO paid VALUES (2)")  # without its item, and without the guard

    outcome = fp.trigger("billing", SLOT)
    assert outcome.status == "failed"
    assert "ended by other means" in str(outcome.error)
    found = sqlite3.connect(tmp_path / "fp.db")
    assert found.execute("SELECT number FROM paid").fetchall() == [(1,)]
    found.close()


class _Taken(list[Any]):
    """A list whose last one is taken by somebody else, right after it was seen to be there."""

    def __bool__(self) -> bool:
        found = len(self) > 0
        self.clear()
        return found

    def pop(self, *_: Any) -> Any:
        self.clear()
        return super().pop()


def test_two_threads_may_want_the_last_spare_connection_at_once(fp: Fencepost) -> None:
    fp._working.ledger._idle = _Taken([object()])  # type: ignore[attr-defined]

    @fp.job("billing")
    def billing(run: Run) -> None:
        with run.transaction() as tx:
            tx.save(1)

    assert fp.trigger("billing", SLOT).status == "succeeded"


def test_the_end_of_one_transaction_does_not_unpin_that_of_another_thread(
    fp: Fencepost, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[float] = []
    opened, look = threading.Event(), threading.Event()

    @fp.job("billing")
    def billing(run: Run) -> None:
        course = run._course

        def another() -> None:
            with run.transaction():
                opened.set()
                look.wait()
                pinned.append(course.hold.pinned)

        thread = threading.Thread(target=another)
        whole = SqliteFile.finish

        def finish(self: SqliteFile, connection: sqlite3.Connection, *, commit: bool) -> None:
            whole(self, connection, commit=commit)
            if not thread.ident:  # the file is free, and our last words are not said yet
                thread.start()
                opened.wait()

        monkeypatch.setattr(SqliteFile, "finish", finish)
        with run.transaction() as tx:
            tx.save(1)
        look.set()
        thread.join()
        assert not course.hold.pinned

    assert fp.trigger("billing", SLOT).status == "succeeded"
    assert pinned[0] > 0


def test_more_coroutines_than_threads_may_wait_for_the_file_that_one_has_locked(
    tmp_path: Path,
) -> None:
    """Whoever has it must be able to go on, however many wait for that."""

    async def main() -> Any:
        async with AsyncFencepost(f"sqlite:///{tmp_path}/fp.db") as fp:

            @fp.job("billing", lease="15s")
            async def billing(run: AsyncRun) -> Any:
                async def add(number: int) -> None:
                    async with run.transaction() as tx:
                        await tx.save(number)

                async with run.transaction() as tx:
                    adding = [asyncio.create_task(add(number)) for number in range(6)]
                    await asyncio.sleep(0)  # until each of them has begun to wait
                    await tx.execute("CREATE TABLE effect (item TEXT)")
                    await tx.execute("INSERT INTO effect VALUES ('x')")
                await asyncio.gather(*adding)
                return await _effects(run)

            return await fp.trigger("billing", SLOT)

    assert asyncio.run(main()).result == [["x"]]


async def _effects(run: AsyncRun) -> list[Any]:
    async with run.transaction() as tx:
        return await tx.execute("SELECT item FROM effect")


class _Interrupting(set[Any]):
    """A set that is told of a transaction at the very moment of an interrupt."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method

    def add(self, element: SqliteTransaction) -> None:
        super().add(element)
        self._interrupt("add")

    def _interrupt(self, method: str) -> None:
        if method == self.method:
            self.method = ""
            raise KeyboardInterrupt


def test_an_interrupt_right_after_a_transaction_began_leaves_nothing_open(
    fp: Fencepost, monkeypatch: pytest.MonkeyPatch
) -> None:
    still_open = _Interrupting("add")
    monkeypatch.setattr(transaction_sqlite, "_open", still_open)

    @fp.job("billing")
    def billing(run: Run) -> None:
        with run.transaction() as tx:
            tx.save(1)

    with pytest.raises(KeyboardInterrupt):
        fp.trigger("billing", SLOT)
    assert not still_open
    assert fp.runs("billing")[0].state is State.PENDING
    assert fp.trigger("billing", SLOT).status == "succeeded"


def test_an_interrupt_right_before_a_transaction_ends_leaves_nothing_open(
    fp: Fencepost, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = SqliteFile.finish, []

    def finish(self: SqliteFile, connection: sqlite3.Connection, *, commit: bool) -> None:
        calls.append(commit)
        if len(calls) == 1:
            raise KeyboardInterrupt
        whole(self, connection, commit=commit)

    monkeypatch.setattr(SqliteFile, "finish", finish)

    @fp.job("billing")
    def billing(run: Run) -> None:
        with run.transaction() as tx:
            tx.save(1)

    with pytest.raises(KeyboardInterrupt):
        fp.trigger("billing", SLOT)
    assert calls == [True, False]
    run = fp.runs("billing")[0]
    assert (run.state, run.checkpoint) == (State.PENDING, None)
    assert fp.trigger("billing", SLOT).status == "succeeded"


def test_a_helper_that_waits_for_the_transaction_that_waits_for_it_is_told_so(
    fp: Fencepost,
) -> None:
    errors: list[BaseException] = []

    @fp.job("billing", lease="1s")
    def billing(run: Run) -> None:
        def save() -> None:
            try:
                run.save(1)
            except Misuse as error:
                errors.append(error)

        with run.transaction():
            helper = threading.Thread(target=save)
            helper.start()
            helper.join()

    assert fp.trigger("billing", SLOT).status == "succeeded"
    assert "use tx.once(…) and tx.save(…)" in str(errors[0])
