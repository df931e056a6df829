"""To acquire is to ask until it is certain: granted, held by another, or out of time.

A reply that got lost is asked for again with the same nonce, so the grant is adopted. Whoever stops
caring in between (an error, a cancellation, a signal) leaves the nonce to ``abandon``: a grant
that nobody waits for must not keep others out for a whole ttl.
"""

from __future__ import annotations

from fencepost.errors import LeaseHeld, Misuse, OutcomeUnknown, StoreUnavailable
from fencepost.flows.divide import make_whole
from fencepost.model.divided import is_mark, may_be_mark
from fencepost.model.named import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from fencepost.model.lease import Grant, Holder
    from fencepost.stores.api import LeaseStore, OpenPlace, Place
    from fencepost.world.api import World

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.2
# How many marks are taken away for one answer: each that is left anew stands for another run.
_MOST_MARKS = 8


class Granted(NamedTuple):
    """A grant, and the instant before the request for it was sent."""

    name: str
    grant: Grant
    sent: float


async def acquire(
    world: World,
    store: LeaseStore,
    names: Sequence[str],
    *,
    holder: Holder,
    ttl: float,
    wait: float,
    abandon: Callable[[str, str], None],
    handed: bool = False,
) -> Granted:
    """Acquire one of ``names`` (a lease has one, a semaphore one for each permit) within ``wait``.

    Raises ``LeaseHeld`` by whoever is due to end first. If ``handed``, it may also be taken from
    the hands of the holder before us.
    """
    asking = _Asking(world, store, names, holder=holder, ttl=ttl, handed=handed)
    try:
        granted = await (asking.once() if wait <= 0 else asking.until(wait))
        asking.unsettled.discard(granted.name)
        return granted
    finally:
        if asking.unsettled:
            for name in sorted(asking.unsettled):
                abandon(name, holder.nonce)


class _Asking:
    """One acquisition: the same nonce in every request."""

    __slots__ = (
        *("_doubted", "_holder", "_names", "_open", "_seen_free", "_store", "_ttl", "_world"),
        *("_handed", "unsettled"),
    )

    def __init__(
        self,
        world: World,
        store: LeaseStore,
        names: Sequence[str],
        *,
        holder: Holder,
        ttl: float,
        handed: bool,
    ) -> None:
        self._world, self._store = world, store
        self._holder, self._ttl = holder, ttl
        self._names = names
        if len(names) > 1:  # from a random permit on, so that those who come together spread out
            first = int(world.dice() * len(names))
            self._names = [*names[first:], *names[:first]]
        self.unsettled: set[str] = set()
        self._seen_free: tuple[str, int, str] | None = None
        self._open: OpenPlace | None = None  # where the lease can be handed to us
        self._doubted = False  # a reply was lost
        self._handed = handed and len(names) == 1

    async def once(self) -> Granted:
        """Ask for each name once; raise ``LeaseHeld`` if all are held."""
        if len(self._names) == 1:
            return await self._settle(self._names[0])
        soonest: LeaseHeld | None = None
        for name in self._names:
            try:
                return await self._settle(name)
            except LeaseHeld as held:
                if soonest is None or held.expires_in < soonest.expires_in:
                    soonest = held
        assert soonest is not None, "a lease has at least one name"
        raise soonest

    async def until(self, wait: float) -> Granted:
        """Stand in line until served, at most ``wait`` seconds."""
        give_up, name = self._world.clocks.boottime() + wait, self._names[0]
        place = await self._store.line(name)
        served = False
        try:
            self._invite(place)
            pause = _FIRST_PAUSE
            while (left := give_up - self._world.clocks.boottime()) > 0:
                if place is None or await self._is_our_turn(place, left):
                    try:
                        handed = self._open and await self._open.accept()
                        granted = (handed and Granted(name, *handed)) or await self.once()
                    except (LeaseHeld, StoreUnavailable):
                        pass  # the reason to wait on
                    else:
                        served = True
                        return granted
                if place is None:
                    await self._world.sleep(min(left, pause * (0.5 + self._world.dice())))
                    pause = min(pause * 1.6, _LONGEST_PAUSE)
            granted = await self._last_word()
            served = True
            return granted
        finally:
            if place is not None:
                # Where there are more permits, the next in line may be served as well.
                await place.leave(served=served and len(self._names) == 1)

    def _invite(self, place: Any) -> None:
        """Let the lease be handed to us, where it can be. If we stop caring it must not stay."""
        if not self._handed or not hasattr(place, "invite"):
            return
        self.unsettled.add(self._names[0])
        if place.invite(self._names[0], holder=self._holder, ttl=self._ttl):
            self._open = place
        else:
            self.unsettled.discard(self._names[0])

    async def _last_word(self) -> Granted:
        """Be handed nothing any more, and ask: it is granted, or this is who has it.

        Only that answer says that nothing was handed to us either, just before we withdrew.
        """
        if self._open is not None:
            self._open.withdraw()
            self._open = None
        try:
            return await self.once()
        except LeaseHeld:
            if not self._doubted:
                self.unsettled.clear()
            raise

    async def _settle(self, name: str) -> Granted:
        """Ask until the store's answer is known, for as long as a grant could last."""
        boottime = self._world.clocks.boottime
        sent = boottime()
        give_up, pause = sent + self._ttl, _FIRST_PAUSE
        in_doubt = name in self.unsettled  # from an earlier round of asking
        self.unsettled.add(name)
        marks, mark = 0, None  # how many it was refused by, and the one to be taken away
        while True:
            try:
                if mark is not None:
                    await make_whole(self._world, self._store, mark)
                    mark, sent = None, boottime()
                grant = await self._store.acquire(name, holder=self._holder, ttl=self._ttl)
            except OutcomeUnknown:
                in_doubt = self._doubted = True
                if boottime() >= give_up:
                    raise
                await self._world.sleep(pause * (0.5 + self._world.dice()))
                pause = min(pause * 2, _LONGEST_PAUSE)
                sent = boottime()
                continue
            except LeaseHeld as held:
                if mark is None and marks < _MOST_MARKS and may_be_mark(held.holder):
                    await self._rest(marks)
                    marks, mark = marks + 1, held
                    continue
                if not in_doubt:
                    self.unsettled.discard(name)
                raise
            except (Misuse, StoreUnavailable):
                # An earlier try may still be on its way, and be granted when nobody waits for it.
                if not in_doubt:
                    self.unsettled.discard(name)
                raise
            return Granted(name, grant, sent)

    async def _rest(self, marks: int) -> None:
        """Pause before another mark is taken away; there is no pause before the first."""
        if marks:
            pause = min(_FIRST_PAUSE * 2**marks, _LONGEST_PAUSE)
            await self._world.sleep(pause * (0.5 + self._world.dice()))

    async def _is_our_turn(self, place: Place, patience: float) -> bool:
        """Say whether to ask: we were woken, or it is free and nobody before us cares.

        The first in line may be stopped, or stuck: what it left alone for a whole nap, with no
        other holder in between, is for anybody.
        """
        if await place.turn(patience):
            return len(self._names) == 1 or await self._looks_free() is not None
        before, self._seen_free = self._seen_free, await self._looks_free()
        if self._seen_free is None:
            return False
        if self._seen_free == before or self._seen_free[2] == self._holder.nonce:
            return True  # the latter was handed to us by somebody who died before the call
        return await place.first()

    async def _looks_free(self) -> tuple[str, int, str] | None:
        """Return a name that may be had, with its last token and nonce, and disturb no writer."""
        for name in self._names:
            try:
                view = await self._store.peek(name)
            except StoreUnavailable:
                continue  # asked again after the next nap
            if view is None:
                return name, 0, ""
            ours = view.holder.nonce == self._holder.nonce
            if ours or not view.held or view.alive is False or is_mark(view.holder):
                return name, view.token, view.holder.nonce
        return None
