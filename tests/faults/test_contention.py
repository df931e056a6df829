"""However many ask at once: one holder per lease, as many as there are permits, and no errors."""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from faultlab import Puppet, SteppedClocks, fencepost, url_of

from fencepost import AsyncFencepost, Fencepost, LeaseHeld, Misuse

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def in_threads(work: Callable[[int], None], *, count: int) -> None:
    """Run ``work`` in threads and raise what went wrong in any of them."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 -- raised again below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_eight_processes_count_to_exactly_four_thousand(tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")
    with ExitStack() as stack:
        puppets = [stack.enter_context(Puppet(url_of(tmp_path))) for _ in range(8)]
        for puppet in puppets:
            puppet.tell("count", counter, 500)
        assert {puppet.answer(within=80) for puppet in puppets} == {"counted"}
    assert counter.read_text() == "4000"


def test_sixteen_processes_open_a_brand_new_file_at_the_same_instant(tmp_path: Path) -> None:
    with ExitStack() as stack:
        puppets = [stack.enter_context(Puppet(url_of(tmp_path))) for _ in range(16)]
        start = time.monotonic() + 0.2
        for puppet in puppets:
            puppet.tell("open_new", tmp_path, 4, start)
        assert {puppet.answer(within=60) for puppet in puppets} == {"fine"}


def test_eight_processes_are_never_more_than_three_with_three_permits(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    with ExitStack() as stack:
        puppets = [stack.enter_context(Puppet(url_of(tmp_path))) for _ in range(8)]
        for puppet in puppets:
            puppet.tell("crowd", marks, 3, 12)
        seen = {int(puppet.answer(within=60).split()[1]) for puppet in puppets}
    assert max(seen) == 3


def test_eight_threads_are_never_more_than_three_with_three_permits(tmp_path: Path) -> None:
    inside: set[int] = set()
    most: list[int] = []
    all_three = threading.Barrier(3, timeout=20)
    tokens: dict[str, list[int]] = {}
    with fencepost(url_of(tmp_path)) as fp:
        lock = fp.lock("x", limit=3, wait="60s")

        def work(number: int) -> None:
            with lock as lease:
                inside.add(number)
                tokens.setdefault(lease.name, []).append(lease.token)
                if number < 3:
                    all_three.wait()  # so three are in at once, or this breaks
                most.append(len(inside))
                inside.discard(number)

        in_threads(work, count=3)
        for _ in range(4):
            in_threads(lambda number: work(number + 3), count=8)
    assert max(most) <= 3
    assert set(tokens) == {"x#1", "x#2", "x#3"}
    for granted in tokens.values():
        assert granted == sorted(set(granted))


def test_many_threads_share_one_fencepost_and_one_lock(tmp_path: Path) -> None:
    count = 0
    with fencepost(url_of(tmp_path)) as fp:
        lock = fp.lock("x", wait="60s")

        def work(_number: int) -> None:
            nonlocal count
            for _ in range(10):
                with lock:
                    before = count
                    os.sched_yield()
                    count = before + 1

        in_threads(work, count=8)
    assert count == 80


def test_a_lock_is_not_reentrant_by_accident(tmp_path: Path) -> None:
    with fencepost(url_of(tmp_path)) as fp, fp.lock("x"):
        with pytest.raises(LeaseHeld), fp.lock("x"):
            pass
        with pytest.raises(Misuse, match="not re-entrant"), fp.lock("x", wait="60s"):
            pass

        def ask(_number: int) -> None:
            with pytest.raises(LeaseHeld):
                fp.lock("x").acquire()

        in_threads(ask, count=1)


def test_one_thread_may_hold_two_permits_of_one_lock_object(tmp_path: Path) -> None:
    with fencepost(url_of(tmp_path)) as fp:
        lock = fp.lock("x", limit=2, wait="5s")
        with lock as outer:
            with lock as inner:
                assert outer.name != inner.name
                inner.check()
            outer.check()
            assert [view.name for view in fp.locks()] == [outer.name]
        assert fp.locks() == []


async def one_task_may_hold_two_permits(url: str) -> None:
    async with AsyncFencepost(url) as fp:
        lock = fp.lock("x", limit=2)
        async with lock as outer:
            async with lock as inner:
                assert outer.name != inner.name
            outer.check()
        assert await fp.locks() == []


def test_one_task_may_hold_two_permits_of_one_lock_object(tmp_path: Path) -> None:
    import asyncio

    asyncio.run(one_task_may_hold_two_permits(url_of(tmp_path)))


def test_namespaces_do_not_meet(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    staging, production = Fencepost(url, namespace="staging"), Fencepost(url)
    with staging.lock("x") as one, production.lock("x", wait="1s") as two:
        assert [view.token for view in staging.locks()] == [one.token]
        assert [view.token for view in production.locks()] == [two.token]
    staging.close()
    production.close()


def test_tokens_rise_over_a_thousand_rounds_of_everything(tmp_path: Path) -> None:
    clocks, tokens = SteppedClocks(), [0]
    with fencepost(url_of(tmp_path), clocks=clocks) as fp:
        lock = fp.lock("x", ttl="1s")
        for number in range(1000):
            lease = lock.acquire()
            tokens.append(lease.token)
            match number % 10:
                case 3:  # it runs out
                    clocks.boot_offset += 1.01
                case 5:
                    tokens.append(fp.break_lock("x", token=lease.token, reason="a drill"))
                case 7:  # its row is deleted by hand, and the wall clock set back
                    delete_row(tmp_path)
                    clocks.wall_offset -= 3600
                case 9:
                    clocks.wall_offset += 1800
            lock.release(lease)
    assert tokens == sorted(set(tokens))


def delete_row(folder: Path) -> None:
    import sqlite3

    with sqlite3.connect(folder / "leases.db", timeout=30) as database:
        database.execute("DELETE FROM fencepost_lease")
    database.close()
