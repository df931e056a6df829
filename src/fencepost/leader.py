"""One of many leads: ``attempt()`` is true for the first who asks, and for nobody else meanwhile.

Leadership is a lease that is kept until its leader resigns or dies. How soon it is followed then is
for the store to say: on PostgreSQL within a second, on SQLite at once, elsewhere after the ttl. A
leader that cannot prove its lease any more does not lead: ask before each effect, and fence it.

A leader on PostgreSQL that stood still has to ask its server whether it still leads. ``attempt()``
gives the answer a second to come, and no event loop waits for it. Where nobody can tell, it says
no, and keeps the lease. ``lease`` never waits.
"""

from __future__ import annotations

from contextlib import suppress

from fencepost.errors import FencepostError, LeaseHeld
from fencepost.flows.keep import LOOP_PATIENCE
from fencepost.model.lease import Phase

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.aio import AsyncFencepost
    from fencepost.blocking import Fencepost
    from fencepost.lease import Lease
    from fencepost.model.duration import Duration


# How often one who waits for the answer, on an event loop, looks whether it has come.
_GLANCE = 0.01
_NOT_OURS = (Phase.UNPROVEN, Phase.LOST)


class Leader:
    """The candidacy of one thread of one process: ``Leader(fp, "scheduler").attempt()``."""

    def __init__(self, fp: Fencepost, name: str, *, ttl: Duration = "30s") -> None:
        self._lock = fp.lock(name, ttl=ttl)
        self._lease: Lease | None = None

    @property
    def lease(self) -> Lease | None:
        """What proves the leadership, with its token; None if we do not lead, or cannot tell."""
        return _proven(self._lease)

    def attempt(self) -> bool:
        """Say whether we lead, and lead from now on if nobody does. It never waits for others."""
        lease, phase = self._lease, Phase.LOST
        if lease is not None:
            phase = lease.asked(LOOP_PATIENCE)
        if phase is not Phase.LOST:
            return phase is not Phase.UNPROVEN
        self.resign()  # of what can no longer be proven: else we would keep ourselves out
        try:
            self._lease = self._lock.acquire()
        except LeaseHeld:
            return False
        return True

    def resign(self) -> None:
        """Lead no more, so that others may at once."""
        lease, self._lease = self._lease, None
        if lease is not None:
            with suppress(FencepostError):  # it ends by itself
                self._lock.release(lease)


class AsyncLeader:
    """The candidacy of one task: ``await AsyncLeader(fp, "scheduler").attempt()``."""

    def __init__(self, fp: AsyncFencepost, name: str, *, ttl: Duration = "30s") -> None:
        self._lock = fp.lock(name, ttl=ttl)
        self._lease: Lease | None = None

    @property
    def lease(self) -> Lease | None:
        """What proves the leadership, with its token; None if we do not lead, or cannot tell."""
        return _proven(self._lease)

    async def attempt(self) -> bool:
        """Say whether we lead, and lead from now on if nobody does. It never waits for others."""
        lease, phase = self._lease, Phase.LOST
        if lease is not None:
            phase = await _asked(lease)
        if phase is not Phase.LOST:
            return phase is not Phase.UNPROVEN
        await self.resign()  # of what can no longer be proven: else we would keep ourselves out
        try:
            self._lease = await self._lock.acquire()
        except LeaseHeld:
            return False
        return True

    async def resign(self) -> None:
        """Lead no more, so that others may at once."""
        lease, self._lease = self._lease, None
        if lease is not None:
            with suppress(FencepostError):  # it ends by itself
                await self._lock.release(lease)


async def _asked(lease: Lease) -> Phase:
    """Return the phase once it is known, or after a second; the event loop goes on meanwhile."""
    import asyncio

    loop = asyncio.get_running_loop()
    end = loop.time() + LOOP_PATIENCE
    phase = lease.phase
    while phase is Phase.UNPROVEN and loop.time() < end:
        await asyncio.sleep(_GLANCE)
        phase = lease.phase
    return phase


def _proven(lease: Lease | None) -> Lease | None:
    return lease if lease is not None and lease.phase not in _NOT_OURS else None
