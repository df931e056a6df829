"""Whoever stops caring in the middle of an acquire or a release leaves no ghost behind."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from faultlab import fencepost, until, url_of, waiters

import fencepost as fencepost_package
from fencepost import AsyncFencepost, Fencepost
from fencepost.stores.sqlite import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator
    from pathlib import Path
    from types import FrameType
    from typing import Any

    from fencepost.model.lease import Grant, Holder
    from fencepost.stores.api import LeaseStore
    from fencepost.world.api import World


PACKAGE = os.path.dirname(fencepost_package.__file__)
WITHIN = tuple(os.path.join(PACKAGE, part) for part in ("world", "stores", "flows", "holding"))


class Stepwise:
    """An awaitable that cancels its own task at the k-th suspension of what it wraps."""

    def __init__(self, flow: Coroutine[Any, Any, object], *, cancel_at: int) -> None:
        self._flow, self._cancel_at = flow, cancel_at
        self.suspensions = 0

    def __await__(self) -> Generator[Any, Any, object]:
        task = asyncio.current_task()
        assert task is not None
        send: Any = None
        error: BaseException | None = None
        while True:
            try:
                flow = self._flow
                awaited = flow.send(send) if error is None else flow.throw(error)
            except StopIteration as done:
                return done.value
            self.suspensions += 1
            if self.suspensions == self._cancel_at:
                task.cancel()
            send = error = None
            try:
                send = yield awaited
            except BaseException as thrown:  # noqa: BLE001 -- handed on as it came
                error = thrown


def assert_no_ghost(url: str, *names: str) -> None:
    with fencepost(url) as fp:
        until(lambda: not [view for view in fp.locks() if view.name in names], within=1.0)


async def cancelled_at_every_suspension(
    work: Callable[[], Coroutine[Any, Any, object]], after: Callable[[], None]
) -> int:
    """Run ``work`` with a cancellation at its first suspension, its second, … until it ends."""
    for number in range(1, 100):
        step = Stepwise(work(), cancel_at=number)

        async def run(step: Stepwise = step) -> None:
            await step

        with suppress(asyncio.CancelledError):
            await asyncio.create_task(run())
        await asyncio.to_thread(after)
        if step.suspensions < number:
            return number
    raise AssertionError("it never ended")


@pytest.mark.parametrize("wait", ["0s", "20s"])
def test_an_acquire_cancelled_at_any_await_leaves_no_ghost(tmp_path: Path, wait: str) -> None:
    url = url_of(tmp_path)

    async def main() -> None:
        async with AsyncFencepost(url) as fp:

            async def work() -> None:
                lock = fp.lock("x", wait=wait)
                await lock.release(await lock.acquire())

            def after() -> None:
                assert_no_ghost(url, "x")
                assert waiters(tmp_path) == []

            assert await cancelled_at_every_suspension(work, after) > 2

    asyncio.run(main())


def test_a_waiter_cancelled_at_any_await_leaves_no_ghost_and_no_place_in_line(
    tmp_path: Path,
) -> None:
    url = url_of(tmp_path)

    async def main() -> None:
        async with AsyncFencepost(url) as fp:

            async def work() -> None:
                held = await fp.lock("x").acquire()
                waiting = asyncio.ensure_future(fp.lock("x", wait="20s").acquire())
                try:
                    await asyncio.sleep(0.05)
                    await fp.lock("x").release(held)
                    await fp.lock("x").release(await waiting)
                finally:
                    waiting.cancel()
                    with suppress(asyncio.CancelledError):
                        await fp.lock("x").release(await waiting)
                    await fp.lock("x").release(held)

            def after() -> None:
                assert_no_ghost(url, "x")
                assert waiters(tmp_path) == []

            await cancelled_at_every_suspension(work, after)

    asyncio.run(main())


def test_a_block_cancelled_at_any_await_leaves_no_ghost(tmp_path: Path) -> None:
    url = url_of(tmp_path)

    async def main() -> None:
        async with AsyncFencepost(url) as fp:

            async def work() -> None:
                async with fp.lock("x", wait="20s"), fp.lock("y", limit=2):
                    await asyncio.sleep(0)

            await cancelled_at_every_suspension(
                work, lambda: assert_no_ghost(url, "x", "y#1", "y#2")
            )

    asyncio.run(main())


def test_a_cancelled_acquire_leaves_no_ghost_although_all_is_closed_at_once(
    tmp_path: Path,
) -> None:
    url = url_of(tmp_path)

    async def work(number: int) -> int:
        async with AsyncFencepost(url) as fp:
            step = Stepwise(fp.lock("x").acquire(), cancel_at=number)
            with suppress(asyncio.CancelledError):
                lease = await step  # noqa: F841 -- kept, so that it is for close to release it
        return step.suspensions

    async def main() -> None:
        for number in range(1, 20):
            task = asyncio.create_task(work(number))
            suspensions = await task
            await asyncio.to_thread(assert_no_ghost, url, "x")
            if suspensions < number:
                return

    asyncio.run(main())


class Interrupted(BaseException):
    """What Ctrl-C does: an end that no ``except Exception`` sees."""


class InterruptingStore(SqliteStore):
    """A store whose caller is interrupted before or after the deed."""

    when = ""

    async def acquire(self, name: str, *, holder: Holder, ttl: float) -> Grant:
        self._interrupt("before acquire")
        grant = await super().acquire(name, holder=holder, ttl=ttl)
        self._interrupt("after acquire")
        return grant

    async def release(self, name: str, *, nonce: str, token: int | None = None) -> None:
        self._interrupt("before release")
        await super().release(name, nonce=nonce, token=token)
        self._interrupt("after release")

    def _interrupt(self, here: str) -> None:
        if InterruptingStore.when == here:
            InterruptingStore.when = ""
            raise Interrupted


@pytest.mark.parametrize("wait", ["0s", "20s"])
@pytest.mark.parametrize(
    "when", ["before acquire", "after acquire", "before release", "after release"]
)
def test_an_interrupt_leaves_no_ghost(tmp_path: Path, when: str, wait: str) -> None:
    def opened(world: World, namespace: str) -> LeaseStore:
        return InterruptingStore(world, str(tmp_path / "leases.db"), namespace=namespace)

    with fencepost(opened) as fp:
        fp.locks()
        InterruptingStore.when = when
        with pytest.raises(Interrupted), fp.lock("x", wait=wait):
            pass
        assert_no_ghost(url_of(tmp_path), "x")
        with fp.lock("x"):
            pass


class InterruptAt:
    """Interrupts at the n-th call in the package: at its start a function lets signals in."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, _arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(WITHIN):
            self.left -= 1
            if self.left == 0:
                raise Interrupted

    def __enter__(self) -> None:
        sys.settrace(self)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_an_interrupt_at_any_call_locks_nobody_out(tmp_path: Path) -> None:
    fp = Fencepost(url_of(tmp_path))
    with fp.lock("before", wait="20s"):
        pass
    other = sqlite3.connect(tmp_path / "leases.db", timeout=1, isolation_level=None)
    number, interrupted = 0, True
    while interrupted:
        number += 1
        interrupted = False
        interrupt = InterruptAt(number)
        try:
            with interrupt, fp.lock(f"{number}", ttl="0.3s", wait="20s"):
                pass
        except Interrupted:
            pass
        interrupted = interrupt.left <= 0
        other.execute("BEGIN IMMEDIATE")  # raises if the file was left locked
        other.execute("ROLLBACK")
    assert number > 50
    until(lambda: fp.locks() == [], within=10)
    assert waiters(tmp_path) == []
    with fp.lock("after", wait="1s") as lease:
        lease.check()
    other.close()
    fp.close()
