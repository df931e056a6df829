"""Tasks that carry attempts out on the running event loop, for an instance of the asyncio face."""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import suppress
from functools import partial

from fencepost.errors import RunLost
from fencepost.flows.serve import Told
from fencepost.ledger.planning import End
from fencepost.serving import SETTLE
from fencepost.working import Terms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from fencepost.ledger.api import Attempt, Report
    from fencepost.ledger.planning import Begun
    from fencepost.model.ending import Settled
    from fencepost.model.run import RunRecord
    from fencepost.serving import Serving
    from fencepost.working import Working
    from fencepost.world.api import World


# How long a task needs at most to end once its end is decided.
_MOMENT = 0.05


class TaskCrew:
    """One task for each attempt; a task that has told its end waits until it is recorded."""

    def __init__(self, serving: Serving, working: Working, world: World, *, size: int) -> None:
        self._serving, self._working, self._world, self._size = serving, working, world, size
        self._told: list[Told] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._signal, self._loop = asyncio.Event(), asyncio.get_running_loop()
        self._dismissed = False
        self.pid = os.getpid()
        self._server = asyncio.current_task()
        self.gone = asyncio.Event()  # once nobody serves any more
        self.grace = 0.0
        self.stopping = False
        self._ordering = threading.RLock()  # a handler of signals may stop us, too
        self.recall_at: float | None = None
        self._wait_until = float("inf")  # how long others wait for it, once it is to stop

    @property
    def busy(self) -> bool:
        """Whether any attempt has not ended."""
        return bool(self._tasks)

    def room(self, ending: int) -> int:
        """Say how many more attempts may begin, once so many have ended."""
        return self._size - len(self._tasks) + ending

    free = room  # nothing is claimed ahead

    def begin(self, begun: Begun, sent: float) -> None:
        """Have an attempt carried out."""
        terms = Terms(self._tell, None, begun, lambda: self.recall_at)
        job = self._serving.job_of(begun)
        flow = self._working.carry_out(job, begun.claimed, sent, terms=terms)
        task = asyncio.get_running_loop().create_task(flow)
        self._tasks.add(task)
        task.add_done_callback(self._is_over)

    def told(self) -> list[Told]:
        """Take the ends that were told since the last time."""
        self._signal.clear()
        taken, self._told = self._told, []
        return taken

    async def rest(self, seconds: float) -> None:
        """Wait until an end is told or a stop is asked for."""
        try:
            async with asyncio.timeout(seconds):
                await self._signal.wait()
        except TimeoutError:
            return

    def wake(self) -> None:
        """Have the one who serves look now; from any thread."""
        with suppress(RuntimeError):  # the loop is closed, and nobody serves any more
            self._loop.call_soon_threadsafe(self._signal.set)

    def stop(self, grace: float, *, shorten: bool = True) -> None:
        """Begin nothing more, and give back what has not ended after ``grace``; from any thread.

        Without ``shorten``, an end that is ordered already and later stays.
        """
        with self._ordering:
            at = self._world.clocks.boottime() + grace
            if self.recall_at is not None and not shorten:
                at = max(at, self.recall_at)
            self.recall_at, self._wait_until = at, at + SETTLE
            self.stopping = True
            self._serving.recall(at)
        self.wake()

    def left(self) -> float:
        """Say how many seconds an instance that is to stop may still wait."""
        return self._wait_until - self._world.clocks.boottime()

    def is_ours(self) -> bool:
        """Say whether this task is one of those that an end has to wait for."""
        here = asyncio.current_task()
        return here is self._server or any(here is task for task in self._tasks)

    async def dismiss(self) -> None:
        """Cancel what still runs, as the one who serves was cancelled, and wait for it.

        From now on each records its own end, also those who have told it and were not answered.
        To be cancelled once more changes nothing: what runs is waited for. A body that a stop
        could not end in time goes on; its lease is kept, and its end recorded.
        """
        self._dismissed = True
        if not self._tasks:
            return
        if self.left() <= 0:
            await asyncio.wait(self._tasks, timeout=_MOMENT)  # for those who were just answered
            await asyncio.sleep(0)  # and for the callbacks that take them out
            return
        self.stop(0.0)
        cancelled: asyncio.CancelledError | None = None
        asked = False
        while self._tasks:
            try:
                await asyncio.sleep(0)  # a task that never began could not give anything back
                if not asked:
                    asked = True
                    for task in self._tasks:
                        task.cancel()
                await asyncio.wait(self._tasks)
                await asyncio.sleep(0)  # for the callbacks that take them out
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def _tell(self, attempt: Attempt, settled: Settled, report: Report) -> RunRecord:
        if self._dismissed:
            return await self._working.ledger.finish(attempt, settled, report=report)
        answered: asyncio.Future[RunRecord | RunLost] = asyncio.get_running_loop().create_future()
        self._told.append(Told(End(attempt, settled, report), partial(_settle, answered)))
        self._signal.set()
        answer = await answered
        if isinstance(answer, RunLost):
            raise answer
        return answer

    def _is_over(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._serving.tell_trouble(error)
        self._signal.set()


def _settle(answered: asyncio.Future[Any], answer: RunRecord | RunLost) -> None:
    if not answered.done():  # else its task was cancelled, and waits for nothing
        answered.set_result(answer)
