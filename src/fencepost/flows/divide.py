"""To divide a lock into permits, and to have it whole again: see ``model.divided``."""

from __future__ import annotations

from contextlib import suppress

from fencepost.errors import LeaseHeld, LeaseLost
from fencepost.model.divided import MARK_TTL, is_mark, mark_holder
from fencepost.model.name import permits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.model.lease import View
    from fencepost.stores.api import LeaseStore
    from fencepost.world.api import World


async def make_whole(world: World, store: LeaseStore, held: LeaseHeld) -> None:
    """Take away the mark that a lease was refused by: then it may be asked for again.

    Raises ``LeaseHeld`` for a permit that is held, or if it was refused by no mark. The mark is
    read before the permits are: if one is claimed after that, the mark has another token.
    """
    mark = await store.peek(held.name)
    if mark is None or not mark.held:
        return
    if not is_mark(mark.holder):
        raise held
    for name in permits(held.name, limit=mark.holder.pid):
        permit = await store.peek(name)
        if permit is not None and permit.held and not await _is_dead(world, store, permit):
            raise LeaseHeld(
                held.name,
                holder=str(permit.holder),
                token=permit.token,
                expires_in=permit.expires_in,
                since=permit.since,
            ) from held
    with suppress(LeaseLost):  # another one is there by now, or none
        await store.release(mark.name, nonce=mark.holder.nonce, token=mark.token)


async def divide(store: LeaseStore, name: str, *, limit: int, nonce: str) -> None:
    """Leave a mark at a lock of which a permit was acquired, or raise ``LeaseHeld``.

    The mark that is there was perhaps read by a plain lock before the permit was held. So it is
    not enough that there is one: this one takes its place, under a new token.
    """
    ttl = min(MARK_TTL, store.capabilities.longest_ttl)
    await store.acquire(name, holder=mark_holder(nonce, limit=limit), ttl=ttl)


async def _is_dead(world: World, store: LeaseStore, permit: View) -> bool:
    """Say whether a permit's holder is dead, by the store's own judgement: it then grants it."""
    if permit.alive is not False:
        return False
    holder = mark_holder(world.nonce(), limit=0)
    try:
        ttl = store.capabilities.shortest_ttl
        grant = await store.acquire(permit.name, holder=holder, ttl=ttl)
    except LeaseHeld:
        return False
    with suppress(LeaseLost):
        await store.release(permit.name, nonce=holder.nonce, token=grant.token)
    return True


class Division:
    """The mark that stays at a lock for as long as one permit of it is held."""

    def __init__(self, world: World, name: str, *, limit: int) -> None:
        self._world, self._name, self._limit = world, name, limit
        self._next = world.clocks.boottime() + MARK_TTL / 3

    async def keep(self, store: LeaseStore) -> None:
        """Leave another mark if the last one may be old."""
        now = self._world.clocks.boottime()
        if now < self._next:
            return
        with suppress(LeaseHeld):  # somebody broke the mark by force, and has the lock
            await divide(store, self._name, limit=self._limit, nonce=self._world.nonce())
        self._next = now + MARK_TTL / 3
