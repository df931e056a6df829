"""The blocking world: every door answers before it returns, so a flow never suspends."""

from __future__ import annotations

import os
import select
import threading
import time

from fencepost.errors import NoThread
from fencepost.world.clocks import SystemClocks
from fencepost.world.flow import finish

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from typing import Self

    from fencepost.world.api import Clocks, Flow, T


class BlockingSignal:
    """A flag for threads."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Raise the flag."""
        self._event.set()

    def clear(self) -> None:
        """Lower the flag."""
        self._event.clear()

    async def wait(self, timeout: float | None) -> bool:
        """Block this thread until the flag is up, or ``timeout`` has passed."""
        return self._event.wait(timeout)


class ThreadLanes:
    """A thread for each flow, that keeps no process from its end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: set[threading.Thread] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for thread in list(self._threads):
            thread.join()

    def begin(self, flow: Flow[None]) -> None:
        """Run a flow in a thread of its own."""

        def run() -> None:
            try:
                finish(flow)
            finally:
                self._threads.discard(thread)

        thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:
            self._threads.discard(thread)
            flow.close()
            raise NoThread(f"no thread is to be had: {error}") from error


class BlockingWorld:
    """Threads and blocking calls."""

    def __init__(self, *, clocks: Clocks | None = None) -> None:
        self.clocks: Clocks = clocks or SystemClocks()

    def nonce(self) -> str:
        """Return 128 random bits as text."""
        return os.urandom(16).hex()

    def dice(self) -> float:
        """Return a number for jitter."""
        return int.from_bytes(os.urandom(4)) / 2**32

    def mutex(self) -> AbstractContextManager[object]:
        """Return a lock between threads."""
        return threading.Lock()

    def signal(self) -> BlockingSignal:
        """Return a lowered flag."""
        return BlockingSignal()

    async def sleep(self, seconds: float) -> None:
        """Block this thread."""
        time.sleep(seconds)

    async def call(self, function: Callable[..., T], *args: object) -> T:
        """Call it, here and now."""
        return function(*args)

    async def readable(self, fd: int, timeout: float) -> bool:
        """Block until ``fd`` can be read."""
        poll = select.poll()  # unlike select(), not limited to descriptors below 1024
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout) * 1000))

    async def together(self, *flows: Flow[T]) -> list[T]:
        """Run each flow in a thread of its own; raise the first error after all have ended."""
        from concurrent.futures import (
            ThreadPoolExecutor,
        )  # only tests and batches run flows abreast

        with ThreadPoolExecutor(max_workers=len(flows) or 1) as pool:
            return [future.result() for future in [pool.submit(finish, flow) for flow in flows]]

    def lanes(self, name: str) -> ThreadLanes:
        """Return lanes that are threads."""
        return ThreadLanes(name)
