"""To release is to give back what is ours, and to find out if it no longer was."""

from __future__ import annotations

from fencepost.errors import LeaseLost, OutcomeUnknown, StoreUnavailable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost.flows.keep import Hold
    from fencepost.stores.api import LeaseStore
    from fencepost.world.api import World

_TRIES = 3


async def release(
    world: World, store: LeaseStore, hold: Hold, *, abandon: Callable[[str, str], None]
) -> bool:
    """Give the lease back; say whether it was still ours.

    Asked a few times; what could not be confirmed is left to ``abandon``, and to the lease's end.
    """
    now = world.clocks.boottime()
    if now >= hold.trust.until:
        hold.phase(now)  # past its end it is lost, though nobody may have taken it
    hold.released = True
    settled = False
    try:
        for attempt in range(_TRIES):
            if attempt:
                await world.sleep(0.02 * attempt)
            try:
                await store.release(hold.name, nonce=hold.nonce, token=hold.token)
            except LeaseLost:
                settled = True
                return False
            except (OutcomeUnknown, StoreUnavailable):
                continue
            settled = True
            hold.mention("released")
            return hold.why_lost is None
        return hold.why_lost is None
    finally:
        if not settled:
            abandon(hold.name, hold.nonce)
