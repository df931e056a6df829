"""The blocking face: ``Fencepost``. Each method is one line over a flow; ``aio.py`` is its twin."""

from __future__ import annotations

import threading
from functools import cached_property, partial

from fencepost.alarm_declaring import DeclaresAlarms
from fencepost.blocking_schedules import Schedules
from fencepost.declaring import Declares, build_of, orphans_after
from fencepost.holding import DEFAULT_TTL, Holding, beside
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime
    from types import TracebackType
    from typing import Any, Self

    from fencepost.alarm_faces import Alarms
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


class Lock:
    """A lease to be had, by any number of threads: ``with`` it, or ``acquire`` and ``release``."""

    def __init__(self, holding: Holding, wanted: Wanted) -> None:
        self._holding, self._wanted = holding, wanted
        self._entered: dict[int, tuple[Lease, ...]] = {}

    def acquire(self) -> Lease:
        """Acquire the lease and return it; raises ``LeaseHeld`` if it cannot be had in time."""
        return finish(self._holding.acquire(self._wanted, owner=threading.get_ident()))

    def release(self, lease: Lease) -> bool:
        """Give a lease back; say whether it was still ours."""
        return finish(self._holding.release(lease))

    def __enter__(self) -> Lease:
        thread = threading.get_ident()
        lease = finish(self._holding.acquire(self._wanted, owner=thread))
        outer = self._entered.get(thread, ())
        self._entered[thread] = (*outer, lease)  # no call, so no signal before the block begins
        return lease

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        thread = threading.get_ident()
        *outer, lease = self._entered.pop(thread)
        if outer:
            self._entered[thread] = tuple(outer)
        if lease.foreign:  # a forked child that leaves the block has nothing to give back
            return
        if not finish(self._holding.give_back(lease)) and error is None:
            raise lease.loss()  # the block ended well, but at its end it was not alone


class Fencepost(Declares, DeclaresAlarms, Schedules):
    """Leases and jobs on the store that ``url`` names.

    Without a URL it is ``$FENCEPOST_URL``, else ``sqlite:///fencepost.db``. For any number of
    threads; a forked child may use it too, but has none of its parent's leases.

    ``leases`` names another store for locks. Runs are then claimed in the ledger at ``url``, and
    hold a lease elsewhere of the same name as well.
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
        self._world = BlockingWorld(clocks=clocks)
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
    def alarms(self) -> Alarms:
        """The alarms: one instant to be woken at for each (kind, key), kept in the ledger."""
        from fencepost.alarm_faces import Alarms

        return Alarms(self._alarming)

    def lock(
        self,
        name: str,
        *,
        ttl: Duration = DEFAULT_TTL,
        wait: Duration | None = None,
        limit: int | None = None,
        max_hold: Duration | None = None,
    ) -> Lock:
        """Return a lock; entering it raises ``LeaseHeld`` if it cannot be had within ``wait``.

        It is renewed while held, for ``max_hold`` at most. ``limit`` makes it a semaphore.
        """
        wanted = self._locks.wanted(name, ttl=ttl, wait=wait, limit=limit, max_hold=max_hold)
        return Lock(self._locks, wanted)

    def locks(self) -> list[View]:
        """Return what is held now in this namespace, by name."""
        return finish(self._locks.locks())

    def break_lock(self, name: str, *, token: int, reason: str, operator: str | None = None) -> int:
        """Take a lease away from the holder of ``token``; return the new token."""
        return finish(self._locks.break_lock(name, token=token, reason=reason, operator=operator))

    def trigger(
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
        return finish(self._working.trigger(job, slot, manual=manual, wait=wait))

    def cancel(self, run_id: str, *, force: bool = False) -> RunRecord:
        """Cancel a run that waits; ask one that runs to end. ``force`` takes it away at once."""
        return finish(self._working.cancel(run_id, force=force))

    def complete(
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
        return finish(
            self._working.complete(
                run_id, token=token, status=status, result=result, error=error, retry=retry
            )
        )

    def beat(
        self, run_id: str, *, token: int, done: int | None = None, total: int | None = None
    ) -> None:
        """Say that a run which was handed off goes on, and how far it is.

        It keeps its lease for another ``handoff_beat``, though not beyond its timeout. Raises
        ``RunCancelled`` if it is to end, ``RunLost`` if it is somebody else's by now.
        """
        finish(self._working.beat(run_id, token=token, done=done, total=total))

    def take_over(self, run_id: str, body: Callable[..., Any], *, token: int) -> Outcome:
        """Carry out here a run that was handed off: ``body(run)``, kept, recorded, and once.

        ``RunLost`` if it has ended, is somebody else's, or was begun with this token before.
        """
        return finish(self._working.take_over(run_id, body, token=token))

    def runs(self, job: str | None = None, *, limit: int = 30) -> list[RunRecord]:
        """Return the newest runs, of one job or of all."""
        return finish(self._working.ledger.runs(job, limit=limit))

    def close(self) -> None:
        """Release what is still held and close the store; an instance of this object is stopped.

        A body that cannot be stopped keeps its lease, and the store stays open for it.
        """
        if "_scheduling" in self.__dict__:
            self._end_instance()
        closed = finish(self._holding.close())
        if self._locks is not self._holding:
            finish(self._locks.close())
        if closed and "_working" in self.__dict__:  # it was used
            finish(self._working.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
