"""To divide a lock into permits, and to have it whole again: see ``model.divided``."""

from __future__ import annotations

from contextlib import suppress

from fencepost.errors import LeaseHeld, LeaseLost
from fencepost.model.divided import is_mark, mark_holder, may_be_mark
from fencepost.model.name import permits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.model.lease import View
    from fencepost.stores.api import LeaseStore


async def undivided(store: LeaseStore, held: LeaseHeld) -> bool:
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
        if permit is not None and permit.held and permit.alive is not False:
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
            await store.acquire(name, holder=holder, ttl=store.capabilities.longest_ttl)
        except LeaseHeld as held:
            if not may_be_mark(held.holder):
                raise
            mark = await store.peek(name)
            if mark is not None and is_mark(mark.holder) and mark.holder.pid >= holder.pid:
                return
        else:
            return


async def _take_away(store: LeaseStore, mark: View) -> None:
    with suppress(LeaseLost):  # another one is there by now, or none
        await store.release(mark.name, nonce=mark.holder.nonce, token=mark.token)
