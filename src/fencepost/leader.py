"""One of many leads: ``attempt()`` is true for the first who asks, and for nobody else meanwhile.

Leadership is a lease that is kept until its leader resigns or dies. How soon it is followed then is
for the store to say: on PostgreSQL within a second, on SQLite at once, elsewhere after the ttl. A
leader that cannot prove its lease any more does not lead: ask before each effect, and fence it.
"""

from __future__ import annotations

from contextlib import suppress

from fencepost.errors import FencepostError, LeaseHeld
from fencepost.model.lease import Phase

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.aio import AsyncFencepost
    from fencepost.blocking import Fencepost
    from fencepost.lease import Lease
    from fencepost.model.duration import Duration


class Leader:
    """The candidacy of one thread of one process: ``Leader(fp, "scheduler").attempt()``."""

    def __init__(self, fp: Fencepost, name: str, *, ttl: Duration = "30s") -> None:
        self._lock = fp.lock(name, ttl=ttl)
        self._lease: Lease | None = None

    @property
    def lease(self) -> Lease | None:
        """What proves the leadership, with its token; None if somebody else leads, or nobody."""
        return _proven(self._lease)

    def attempt(self) -> bool:
        """Say whether we lead, and lead from now on if nobody does. It never waits for others."""
        if _proven(self._lease) is not None:
            return True
        if _is_unsure(self._lease):
            return False
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
        """What proves the leadership, with its token; None if somebody else leads, or nobody."""
        return _proven(self._lease)

    async def attempt(self) -> bool:
        """Say whether we lead, and lead from now on if nobody does. It never waits for others."""
        if _proven(self._lease) is not None:
            return True
        if _is_unsure(self._lease):
            return False
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


def _proven(lease: Lease | None) -> Lease | None:
    return lease if lease is not None and lease.remaining() > 0 else None


def _is_unsure(lease: Lease | None) -> bool:
    """Say whether nobody can tell at the moment who leads: it may well be us."""
    return lease is not None and lease.phase is Phase.UNPROVEN
