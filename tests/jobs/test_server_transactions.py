"""A run with its ledger on a server has transactions with the contract of those in a file."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from fencepost import AsyncFencepost, Fencepost
from fencepost.errors import Misuse
from joinlab import HOMES, Home, PostgresHome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fencepost import AsyncRun
    from fencepost.running import Run
    from fencepost.transaction import Transaction

SLOT = datetime(2026, 1, 20, 2, tzinfo=UTC)
_numbers = itertools.count(1)


@pytest.fixture(params=HOMES, ids=str)
def home(request: pytest.FixtureRequest) -> Home:
    home: Home = request.param
    return home


@pytest.fixture
def url(home: Home) -> str:
    name = f"transactions{next(_numbers)}"
    url = home.database(name)
    home.run("CREATE TABLE effect (item text)", name)
    return url


@pytest.fixture
def effects(home: Home, url: str) -> Callable[[], list[str]]:
    name = url.rpartition("/")[2]
    return lambda: [row[0] for row in home.run("SELECT item FROM effect ORDER BY item", name)]


@pytest.fixture
def fp(url: str) -> Iterator[Fencepost]:
    with Fencepost(url) as fencepost:
        yield fencepost


def wrong(tx: Transaction) -> None:
    tx.execute("INSERT INTO effect VALUES ('half')")
    tx.execute("so what")


def undone(tx: Transaction) -> None:
    tx.execute("ROLLBACK")
    tx.once("x")


def test_a_transaction_is_undone_as_a_whole(fp: Fencepost) -> None:
    @fp.job("work", needs="T3")
    def work(run: Run) -> list[Any]:
        with run.transaction() as tx:
            assert tx.once("a")
            assert not tx.once("a")
        with suppress(ValueError), run.transaction() as tx:
            tx.execute("INSERT INTO effect VALUES ('half')")
            assert tx.once("b")
            tx.save("half")
            raise ValueError("half way")
        assert run.checkpoint is None
        with run.transaction() as tx:
            assert not tx.once("a")
            assert tx.once("b")
            tx.executemany("INSERT INTO effect VALUES (%s)", [("x",), ("y",)])
            rows = tx.execute("SELECT count(*) FROM effect").fetchone()
            tx.save("whole")
        return [run.checkpoint, *rows]

    assert fp.trigger("work", SLOT).result == ["whole", 2]


def test_what_a_transaction_cannot_be_used_for_is_refused_with_a_sentence(
    fp: Fencepost, home: Home, effects: Callable[[], list[str]]
) -> None:
    # PostgreSQL tells that it was ended; MariaDB refuses to have it ended.
    ended = "leave BEGIN, COMMIT and ROLLBACK"

    @fp.job("work")
    def work(run: Run) -> None:
        with run.transaction() as tx:
            with pytest.raises(Misuse, match=r"use tx\.once"):
                run.save(1)
            with pytest.raises(Misuse, match=r"use tx\.once"):
                run.once("x")
            with pytest.raises(Misuse, match="do not nest"), run.transaction():
                pass
        with pytest.raises(Misuse, match="over"):
            tx.execute("SELECT 1")
        with pytest.raises(Misuse, match=ended), run.transaction() as tx:
            tx.execute("COMMIT")
        with pytest.raises(Misuse, match=ended), run.transaction() as tx:
            undone(tx)
        with pytest.raises(home.wrong), run.transaction() as tx:
            wrong(tx)
        assert run.checkpoint is None

    outcome = fp.trigger("work", SLOT)
    assert outcome.status == "succeeded", outcome
    assert effects() == []


def test_a_coroutine_has_transactions_too(url: str) -> None:
    async def main() -> Any:
        async with AsyncFencepost(url) as fp:

            @fp.job("work")
            async def work(run: AsyncRun) -> list[Any]:
                async with run.transaction() as tx:
                    assert await tx.once("a")
                    assert await tx.executemany("INSERT INTO effect VALUES (%s)", [("x",), ("y",)])
                    await tx.save(7)
                    with pytest.raises(Misuse, match=r"use tx\.once"):
                        await run.save(1)
                with suppress(ValueError):
                    async with run.transaction() as tx:
                        await tx.execute("INSERT INTO effect VALUES ('z')")
                        raise ValueError
                async with run.transaction() as tx:
                    rows = await tx.execute("SELECT item FROM effect ORDER BY item")
                return [run.checkpoint, *rows]

            return await fp.trigger("work", SLOT)

    assert asyncio.run(main()).result == [7, ["x"], ["y"]]


def test_more_coroutines_than_threads_may_wait_for_the_row_that_one_has_locked(
    url: str, home: Home, effects: Callable[[], list[str]]
) -> None:
    """Whoever has it locked must get its next word to the server, however many wait for that."""
    database, many = url.rpartition("/")[2], 6

    def somebody_waits() -> None:
        while not home.waits(database):
            time.sleep(0.2)  # MariaDB tells nothing new to who asks more often

    async def main() -> Any:
        async with AsyncFencepost(url) as fp:

            @fp.job("work", lease="15s")
            async def work(run: AsyncRun) -> None:
                async def write() -> None:
                    async with run.transaction() as tx:
                        await tx.execute("UPDATE effect SET item = concat(item, '+')")

                async with run.transaction() as tx:
                    await tx.execute("UPDATE effect SET item = concat(item, '+')")
                    writers = [asyncio.create_task(write()) for _ in range(many)]
                    await asyncio.to_thread(somebody_waits)
                    await tx.execute("UPDATE effect SET item = concat(item, '+')")
                await asyncio.gather(*writers)

            return await fp.trigger("work", SLOT)

    home.run("INSERT INTO effect VALUES ('first')", database)
    assert asyncio.run(main()).status == "succeeded"
    assert effects() == ["first" + "+" * (many + 2)]


def test_a_transaction_that_is_open_for_three_leases_loses_nothing_and_hears_of_a_cancel(
    fp: Fencepost, url: str, effects: Callable[[], list[str]]
) -> None:
    cancelled = threading.Event()

    @fp.job("work", lease="700ms")
    def work(run: Run) -> str:
        run._course.on_stop += (cancelled.set,)
        with run.transaction() as tx:
            tx.execute("INSERT INTO effect VALUES ('one')")
            tx.save("long")
            assert not cancelled.wait(2.1)
            run.check()
            with Fencepost(url) as other:
                other.cancel(run.id)
            assert cancelled.wait(10)  # by its keeper, which nothing keeps waiting
        run.check()
        raise AssertionError("it was cancelled")

    assert fp.trigger("work", SLOT).status == "cancelled"
    assert effects() == ["one"]  # what was committed is


def test_threads_of_one_body_have_transactions_side_by_side(
    fp: Fencepost, effects: Callable[[], list[str]]
) -> None:
    both = threading.Barrier(2)

    @fp.job("work")
    def work(run: Run) -> None:
        def write(item: str) -> None:
            with run.transaction() as tx:
                both.wait(10)
                tx.execute("INSERT INTO effect VALUES (%s)", (item,))
                with pytest.raises(Misuse, match="do not nest"), run.transaction():
                    pass
            run.check()

        threads = [threading.Thread(target=write, args=(item,)) for item in ("x", "y")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not run._course.transacting

    assert fp.trigger("work", SLOT).status == "succeeded"
    assert effects() == ["x", "y"]


def test_an_interrupt_inside_of_a_transaction_leaves_nothing_open(
    fp: Fencepost,
    home: Home,
    effects: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = home.asks.batch

    def interrupted(asked: Any, steps: Any, **words: Any) -> Any:
        if any("xid" in values for _, values in steps):  # the commit
            if isinstance(home, PostgresHome):
                asked.raw.send_query(b"SELECT 1")  # asked, and not answered yet
            else:
                asked._connection._execute_command(3, "SELECT 1")
            raise KeyboardInterrupt
        return batch(asked, steps, **words)

    @fp.job("work")
    def work(run: Run) -> None:
        with run.transaction() as tx:
            tx.execute("INSERT INTO effect VALUES ('one')")

    with monkeypatch.context() as patched:
        patched.setattr(home.asks, "batch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fp.trigger("work", SLOT)
    assert effects() == []
    assert fp.trigger("work", SLOT).status == "succeeded"
    assert effects() == ["one"]
