"""A place in the server's own line; its head asks for the lease, and the others sleep."""

from __future__ import annotations

from contextvars import ContextVar

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost.world.api import World
    from fencepost.world.postgres_line import Seat, Seats

# The first in line may be stopped: after each nap the others look whether it left the lease alone.
_NAP = 0.2
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.05


# Where this thread or task stands in line. A place is for whoever waits at it, because its session
# is for one thread at a time.
_ours: ContextVar[PostgresPlace | None] = ContextVar("fencepost_postgres_place", default=None)


def our_place() -> PostgresPlace | None:
    """Return the place at which this thread or task waits."""
    return _ours.get()


class PostgresPlace:
    """A place in the line for one lease, taken by the thread or task that makes it."""

    def __init__(
        self,
        world: World,
        seats: Seats,
        seat: Seat,
        *,
        name: str,
        gone: Callable[[PostgresPlace], None],
    ) -> None:
        self._world, self._seats, self.seat, self._gone = world, seats, seat, gone
        self.name = name
        self._pause = _FIRST_PAUSE
        self.called = False  # it has asked, and the answer was no
        self.granted_to = ""  # the nonce that the lease was granted to in this turn
        _ours.set(self)

    @property
    def in_turn(self) -> bool:
        """Say whether the server has called us, and the session that it called still lives."""
        return self.seat.is_first and not self.seat.broken

    async def turn(self, patience: float) -> bool:
        """Wait until the server calls us. Once it has, look again every now and then."""
        if self.seat.is_first or self.seat.broken:
            # The holder did not come by this line, or nobody can say whose turn it is.
            await self._world.sleep(min(patience, self._pause))
            self._pause = min(self._pause * 1.5, _LONGEST_PAUSE)
            return True
        if not await self._world.readable(self.seat.session.fd, min(patience, _NAP)):
            return False
        return await self._world.call(self.seat.hear)

    async def first(self) -> bool:
        """Say whether it is our turn."""
        return self.in_turn

    async def leave(self, *, served: bool) -> None:
        """Leave, or keep the turn until the lease is released."""
        self._gone(self)
        if _ours.get() is self:
            _ours.set(None)
        if served and self.granted_to and self.in_turn:
            self._seats.keep(self.granted_to, self.seat)
        else:
            await self._world.call(self._seats.get_up, self.seat)
