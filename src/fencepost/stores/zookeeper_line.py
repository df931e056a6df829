"""Whoever waits for a lease hears of it when its lock goes away, and then asks."""

from __future__ import annotations

from fencepost.errors import StoreUnavailable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.world.api import World
    from fencepost.world.zookeeper import Bell, ZooKeeperDoor

# A lease whose holder stopped to renew is over when it was seen to stand still: so we look.
_NAP = 1.0
_PAUSE = 0.2  # where there is nothing to listen to


class ZooKeeperPlace:
    """One who waits. The first sign comes at once: who has not asked yet may as well ask."""

    def __init__(self, world: World, door: ZooKeeperDoor, *, path: str) -> None:
        self._world, self._door, self._path = world, door, path
        self._bell: Bell | None = None
        self._asked = False

    async def turn(self, patience: float) -> bool:
        """Wait for the lock to go away."""
        if not self._asked:
            self._asked = True
            return True
        end = self._world.clocks.boottime() + min(patience, _NAP)
        while (left := end - self._world.clocks.boottime()) > 0:
            if self._bell is None:
                try:
                    self._bell = await self._world.call(self._listening)
                except StoreUnavailable:
                    await self._world.sleep(min(left, _PAUSE * (0.5 + self._world.dice())))
                    return False
                if self._bell is None:
                    return True
                continue
            if await self._world.readable(self._bell.fd, left):
                self._hang_up()  # it went away, or it was renewed: to listen again tells
        return False

    async def first(self) -> bool:
        """Nobody is before us: there is no order."""
        return True

    async def leave(self, *, served: bool) -> None:  # noqa: ARG002 -- the lock itself tells the others
        """Stop listening."""
        self._hang_up()

    def _listening(self) -> Bell | None:
        return self._door.bell(self._path, timeout=2.0)

    def _hang_up(self) -> None:
        bell, self._bell = self._bell, None
        if bell is not None:
            bell.close()
