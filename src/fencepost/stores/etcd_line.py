"""Whoever waits for a lease hears of it when its lock goes away, and then asks."""

from __future__ import annotations

from fencepost.errors import StoreUnavailable
from fencepost.stores.etcd_txn import answer_of, get
from fencepost.world.etcd import Effect

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.world.api import World
    from fencepost.world.etcd import EtcdDoor
    from fencepost.world.etcd_wire import Ear

# A watch may go deaf without a word, behind a firewall for example: then we look by ourselves.
_NAP = 2.0
_PAUSE = 0.2  # where there is nothing to listen to


class EtcdPlace:
    """One who waits. The first sign comes at once: who has not asked yet may as well ask."""

    def __init__(self, world: World, door: EtcdDoor, *, key: str) -> None:
        self._world, self._door, self._key = world, door, key
        self._ear: Ear | None = None
        self._asked = False

    async def turn(self, patience: float) -> bool:
        """Wait for the lock to go away."""
        if not self._asked:
            self._asked = True
            return True
        end = self._world.clocks.boottime() + min(patience, _NAP)
        if self._ear is None:
            try:
                self._ear = await self._world.call(self._listening)
            except StoreUnavailable:
                await self._world.sleep(min(patience, _PAUSE * (0.5 + self._world.dice())))
                return False
            if self._ear is None:
                return True
        while (left := end - self._world.clocks.boottime()) > 0:
            if self._ear.news():
                if self._ear.deaf:
                    self._hang_up()
                return True
            await self._world.readable(self._ear.fd, left)
        return False

    async def first(self) -> bool:
        """Nobody is before us: there is no order."""
        return True

    async def leave(self, *, served: bool) -> None:  # noqa: ARG002 -- the lock itself tells the others
        """Stop listening."""
        self._hang_up()

    def _listening(self) -> Ear | None:
        """Watch the lock from the revision on in which it was seen; None if it is not there."""
        told = self._door.ask("/kv/txn", {"success": [get(self._key)]}, effect=Effect.NONE)
        seen = answer_of(told)
        if seen.first(0) is None:
            return None
        words = get(self._key)["request_range"]
        request = {**words, "start_revision": seen.revision + 1, "filters": ["NOPUT"]}
        return self._door.listen(
            "/watch", {"create_request": request}, until=b'"created":true', timeout=2.0
        )

    def _hang_up(self) -> None:
        ear, self._ear = self._ear, None
        if ear is not None:
            ear.close()
