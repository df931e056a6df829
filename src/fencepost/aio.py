"""The asyncio face: ``AsyncFencepost``, the twin of ``blocking.py``, over the same flows."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import cached_property, partial

from fencepost.aio_schedules import AsyncSchedules
from fencepost.alarm_declaring import DeclaresAlarms
from fencepost.declaring import Declares, build_of, orphans_after
from fencepost.flows.keep import LOOP_PATIENCE
from fencepost.holding import DEFAULT_TTL, Holding, beside
from fencepost.model.lease import Phase
from fencepost.world.aio import AioWorld

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime
    from types import TracebackType
    from typing import Any, Self

    from fencepost.alarm_faces import AsyncAlarms
    from fencepost.alarming import Alarming
    from fencepost.holding import Wanted
    from fencepost.lease import Lease
    from fencepost.model.duration import Duration
    from fencepost.model.event import JobEvent, LeaseEvent
    from fencepost.model.lease import View
    from fencepost.model.outcome import Outcome
    from fencepost.model.run import RunRecord
    from fencepost.stores.api import LeaseStore
    from fencepost.working import Working
    from fencepost.world.api import Clocks, World


class AsyncLock:
    """A lease to be had by any number of tasks: ``async with``, or ``acquire`` and ``release``."""

    def __init__(self, holding: Holding, wanted: Wanted) -> None:
        self._holding, self._wanted = holding, wanted
        self._entered: dict[int, list[_Entered]] = {}

    async def acquire(self) -> Lease:
        """Acquire the lease and return it; raises ``LeaseHeld`` if it cannot be had in time."""
        lease = await self._holding.acquire(self._wanted, owner=asyncio.current_task())
        lease.hold.patience = LOOP_PATIENCE
        return lease

    async def release(self, lease: Lease) -> bool:
        """Give a lease back; say whether it was still ours."""
        return await self._holding.release(lease)

    async def __aenter__(self) -> Lease:
        lease = await self.acquire()
        self._entered.setdefault(id(asyncio.current_task()), []).append(_Entered(lease))
        return lease

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        stack = self._entered[id(asyncio.current_task())]
        entered = stack.pop()
        if not stack:
            del self._entered[id(asyncio.current_task())]
        cancelled_by_us = entered.disarm()
        lease = entered.lease
        if lease.foreign:  # a forked child that leaves the block has nothing to give back
            return
        kept = await self.release(lease)
        if cancelled_by_us and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise lease.loss() from error
        if not kept and error is None:
            raise lease.loss()  # the block ended well, but at its end it was not alone


class _Entered:
    """A lease whose loss cancels the task that entered it, as a timeout would.

    It looks at the clock by itself at the end of its trust: a dead keeper cannot hide a loss.
    """

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        task = asyncio.current_task()
        assert task is not None, "asyncio runs this, so there is a task"
        self._task: asyncio.Task[Any] = task
        self._loop = asyncio.get_running_loop()
        self._requests_before = task.cancelling()
        self._armed = True
        self._cancelled = False
        lease.hold.on_loss += (self._from_any_thread,)
        self._timer = self._loop.call_later(lease.lapses_in, self._look)

    def disarm(self) -> bool:
        """Cancel nobody from now on; say whether only we have cancelled the task."""
        self._armed = False
        self._timer.cancel()
        return self._cancelled and self._task.uncancel() <= self._requests_before

    def _look(self) -> None:
        if self.lease.phase is Phase.LOST:
            self._cancel()
        else:
            self._timer = self._loop.call_later(self.lease.lapses_in, self._look)

    def _from_any_thread(self) -> None:
        with suppress(RuntimeError):  # the loop is closed, and its tasks have ended
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._armed and not self._cancelled:
            self._cancelled = True
            self._task.cancel("the lease was lost")


class AsyncFencepost(Declares, DeclaresAlarms, AsyncSchedules):
    """Leases and jobs on the store that ``url`` names, for asyncio.

    The same contract as ``Fencepost``. Leases are renewed from a thread, so a blocked event loop
    does not lose them. A task whose lease is lost is cancelled, and leaves its block with
    ``LeaseLost``. ``leases`` names another store for locks, as there.
    """

    def __init__(
        self,
        url: str | Callable[[World, str], LeaseStore] | None = None,
        *,
        leases: str | Callable[[World, str], LeaseStore] | None = None,
        namespace: str = "default",
        on_event: Callable[[LeaseEvent | JobEvent], None] | None = None,
        clocks: Clocks | None = None,
        version: int = 0,
        orphan_after: Duration = "15m",
    ) -> None:
        self._world = AioWorld(clocks=clocks)
        hold = partial(Holding, world=self._world, namespace=namespace, on_event=on_event)
        self._holding = hold(url)
        self._locks = self._holding if leases is None else beside(self._holding, hold(leases))
        self._build, self._orphan_after = build_of(version), orphans_after(orphan_after)

    @cached_property
    def _working(self) -> Working:
        from fencepost.working import Working  # a dear import, that locks alone never need

        elsewhere = None if self._locks is self._holding else self._locks
        return Working(self._holding, self._world, elsewhere=elsewhere)

    @cached_property
    def _alarming(self) -> Alarming:
        from fencepost.alarming import Alarming  # which most programs never need

        return Alarming(self._holding, self._world, self._working)

    @property
    def alarms(self) -> AsyncAlarms:
        """The alarms: one instant to be woken at for each (kind, key), kept in the ledger."""
        from fencepost.alarm_faces import AsyncAlarms

        return AsyncAlarms(self._alarming)

    def lock(
        self,
        name: str,
        *,
        ttl: Duration = DEFAULT_TTL,
        wait: Duration | None = None,
        limit: int | None = None,
        max_hold: Duration | None = None,
    ) -> AsyncLock:
        """Return a lock; entering it raises ``LeaseHeld`` if it cannot be had within ``wait``.

        It is renewed while held, for ``max_hold`` at most. ``limit`` makes it a semaphore.
        """
        wanted = self._locks.wanted(name, ttl=ttl, wait=wait, limit=limit, max_hold=max_hold)
        return AsyncLock(self._locks, wanted)

    async def locks(self) -> list[View]:
        """Return what is held now in this namespace, by name."""
        return await self._locks.locks()

    async def break_lock(
        self, name: str, *, token: int, reason: str, operator: str | None = None
    ) -> int:
        """Take a lease away from the holder of ``token``; return the new token."""
        return await self._locks.break_lock(name, token=token, reason=reason, operator=operator)

    async def trigger(
        self,
        job: str | Callable[..., Any],
        slot: datetime | str | float | None = None,
        *,
        manual: bool = False,
        wait: Duration | None = None,
    ) -> Outcome:
        """Run a slot of a job here, once: claim it, see it through, and say what became of it.

        Without a slot it is the newest one due. ``manual`` makes a run of its own. ``wait`` is how
        long to wait for a run that others have, or that is not due again yet.
        """
        return await self._working.trigger(job, slot, manual=manual, wait=wait)

    async def cancel(self, run_id: str, *, force: bool = False) -> RunRecord:
        """Cancel a run that waits; ask one that runs to end. ``force`` takes it away at once."""
        return await self._working.cancel(run_id, force=force)

    async def complete(
        self,
        run_id: str,
        *,
        token: int,
        status: str = "succeeded",
        result: Any = None,
        error: str | None = None,
        retry: bool = True,
    ) -> Outcome:
        """Say how a run ended that was handed off: succeeded, failed or cancelled.

        For any process that was given its id and token; told twice, the second is answered as the
        first. ``RunLost`` for a token that is not the newest. What failed is tried again as its
        job's policy says, unless ``retry`` is False.
        """
        return await self._working.complete(
            run_id, token=token, status=status, result=result, error=error, retry=retry
        )

    async def beat(
        self, run_id: str, *, token: int, done: int | None = None, total: int | None = None
    ) -> None:
        """Say that a run which was handed off goes on, and how far it is.

        It keeps its lease for another ``handoff_beat``, though not beyond its timeout. Raises
        ``RunCancelled`` if it is to end, ``RunLost`` if it is somebody else's by now.
        """
        await self._working.beat(run_id, token=token, done=done, total=total)

    async def take_over(self, run_id: str, body: Callable[..., Any], *, token: int) -> Outcome:
        """Carry out here a run that was handed off: ``body(run)``, kept, recorded, and once.

        ``RunLost`` if it has ended, is somebody else's, or was begun with this token before.
        """
        return await self._working.take_over(run_id, body, token=token)

    async def runs(self, job: str | None = None, *, limit: int = 30) -> list[RunRecord]:
        """Return the newest runs, of one job or of all."""
        return await self._working.ledger.runs(job, limit=limit)

    async def close(self) -> None:
        """Release what is still held and close the store; an instance of this object is stopped.

        A body that cannot be stopped keeps its lease, and the store stays open for it.
        """
        if "_scheduling" in self.__dict__:
            await self._end_instance()
        closed = await self._holding.close()
        if self._locks is not self._holding:
            await self._locks.close()
        if not closed:
            return
        if "_working" in self.__dict__:  # it was used
            await self._working.close()
        self._world.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
