"""To divide a lock into permits, and to have it whole again: see ``model.divided``."""

from __future__ import annotations

from contextlib import suppress

from fencepost.errors import LeaseHeld, LeaseLost
from fencepost.model.divided import MARK_TTL, is_mark, mark_holder, may_be_mark
from fencepost.model.name import permits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.model.lease import View
    from fencepost.stores.api import LeaseStore
    from fencepost.world.api import World


async def undivided(world: World, store: LeaseStore, held: LeaseHeld) -> bool:
    """Take away the mark that a lease was refused by; say whether it may be asked for again.

    Raises ``LeaseHeld`` for a permit that is held. The mark is read before the permits are: if one
    is claimed after that, the mark has another token.
    """
    if not may_be_mark(held.holder):
        return False
    mark = await store.peek(held.name)
    if mark is None or not mark.held:
        return True
    if not is_mark(mark.holder):
        return False
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
    await _take_away(store, mark)
    return True


async def divide(store: LeaseStore, name: str, *, limit: int, nonce: str) -> None:
    """Leave a mark at a lock of which a permit was acquired, or raise ``LeaseHeld``.

    The mark that is there was perhaps read by a plain lock before the permit was held. So it is
    taken away, and another one is left; if another run leaves one first, that is as good.
    """
    mark = await store.peek(name)
    while True:
        before = None if mark is None else mark.holder
        if mark is not None and mark.held and is_mark(mark.holder):
            await _take_away(store, mark)
        holder = mark_holder(nonce, limit=limit, before=before)
        try:
            ttl = min(MARK_TTL, store.capabilities.longest_ttl)
            await store.acquire(name, holder=holder, ttl=ttl)
        except LeaseHeld as held:
            if not may_be_mark(held.holder):
                raise
            mark = await store.peek(name)
            if mark is not None and is_mark(mark.holder) and mark.holder.pid >= holder.pid:
                return
        else:
            return


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


async def _take_away(store: LeaseStore, mark: View) -> None:
    with suppress(LeaseLost):  # another one is there by now, or none
        await store.release(mark.name, nonce=mark.holder.nonce, token=mark.token)
