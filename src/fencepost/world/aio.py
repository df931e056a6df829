"""The asyncio world: doors suspend on the running loop; blocking calls run in a few threads."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor

from fencepost.errors import OutcomeUnknown
from fencepost.world.clocks import SystemClocks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from typing import Self

    from fencepost.world.api import Clocks, Flow, T


class AioSignal:
    """A flag that any thread may raise and tasks of one loop wait for."""

    def __init__(self) -> None:
        self._up = False
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def set(self) -> None:
        """Raise the flag; safe from any thread."""
        self._up = True
        for loop, event in list(self._waiting):
            loop.call_soon_threadsafe(event.set)

    def clear(self) -> None:
        """Lower the flag."""
        self._up = False

    async def wait(self, timeout: float | None) -> bool:
        """Suspend this task until the flag is up, or ``timeout`` has passed."""
        event = asyncio.Event()
        waiting = (asyncio.get_running_loop(), event)
        self._waiting.add(waiting)
        try:
            if not self._up:  # asked after joining, so that a set() in between is not missed
                async with asyncio.timeout(timeout):
                    await event.wait()
        except TimeoutError:
            return self._up
        finally:
            self._waiting.discard(waiting)
        return True


class TaskLanes:
    """A task for each flow."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        cancelled = error if isinstance(error, asyncio.CancelledError) else None
        passed_on, again = False, None
        while self._tasks:
            try:
                if cancelled is not None and not passed_on:
                    await asyncio.sleep(0)  # a task that never began could give nothing back
                    passed_on = True
                    for task in self._tasks:
                        task.cancel()
                await asyncio.wait(self._tasks)
                await asyncio.sleep(0)  # for the callbacks that take them out
            except asyncio.CancelledError as once_more:
                cancelled = again = once_more
        if again is not None:
            raise again

    def begin(self, flow: Flow[None]) -> None:
        """Run a flow as a task."""
        task = asyncio.get_running_loop().create_task(flow, name=self._name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class AioWorld:
    """Tasks of an asyncio loop, and threads for what can only block."""

    def __init__(self, *, clocks: Clocks | None = None, threads: int = 4) -> None:
        self.clocks: Clocks = clocks or SystemClocks()
        self._most = threads
        self._begin_anew()

    def nonce(self) -> str:
        """Return 128 random bits as text."""
        return os.urandom(16).hex()

    def dice(self) -> float:
        """Return a number for jitter."""
        return int.from_bytes(os.urandom(4)) / 2**32

    def mutex(self) -> AbstractContextManager[object]:
        """Return a lock between the threads that ``call`` uses."""
        return threading.Lock()

    def signal(self) -> AioSignal:
        """Return a lowered flag."""
        return AioSignal()

    async def sleep(self, seconds: float) -> None:
        """Suspend this task."""
        await asyncio.sleep(seconds)

    async def call(self, function: Callable[..., T], *args: object) -> T:
        """Run ``function`` in a thread, to its end.

        A cancelled caller waits for that end: until then nobody could say whether the statement
        was carried out, and a grant that arrives after its janitor would stay for a whole ttl.
        """
        if self._pid != os.getpid():  # a fork left the threads behind
            self._begin_anew()
        future = self._given(function, *args)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                try:
                    await asyncio.wait([future])
                except asyncio.CancelledError:
                    continue  # the first cancellation is already on its way
            if not future.cancelled():
                future.exception()  # the caller is gone; mark it as seen
            raise

    async def readable(self, fd: int, timeout: float) -> bool:
        """Suspend this task until ``fd`` can be read."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(fd, ready.set)
        try:
            async with asyncio.timeout(max(0.0, timeout)):
                await ready.wait()
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(fd)
        return True

    async def together(self, *flows: Flow[T]) -> list[T]:
        """Run each flow as a task."""
        return list(await asyncio.gather(*flows))

    def lanes(self, name: str) -> TaskLanes:
        """Return lanes that are tasks."""
        return TaskLanes(name)

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False)

    def _given(self, function: Callable[..., T], *args: object) -> asyncio.Future[T]:
        try:
            return asyncio.get_running_loop().run_in_executor(self._threads, function, *args)
        except RuntimeError as error:
            if "new thread" not in str(error):
                raise
            # It is on the pile all the same, and a thread that is there may come to it yet.
            raise OutcomeUnknown(f"no thread is to be had: {error}") from error

    def _begin_anew(self) -> None:
        self._threads = ThreadPoolExecutor(self._most, thread_name_prefix="fencepost-call")
        self._pid = os.getpid()
