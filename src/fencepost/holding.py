"""What both faces share: the store, the keeper, what is held, and the rules about asking."""

from __future__ import annotations

import os
import weakref
from functools import lru_cache
from typing import NamedTuple

from fencepost.errors import LeaseLost, Misuse, TokenRegressed
from fencepost.flows.acquire import acquire
from fencepost.flows.keep import THREAD_PATIENCE, Hold
from fencepost.flows.release import release
from fencepost.keeper import Keeper
from fencepost.lease import Lease
from fencepost.logs import is_heard, log
from fencepost.model.divided import is_mark
from fencepost.model.duration import positive, seconds
from fencepost.model.event import LeaseEvent
from fencepost.model.lease import Holder, Phase, View, checked_ttl
from fencepost.model.name import checked, checked_namespace, permits
from fencepost.stores.open import DEFAULT_URL, anchored, open_store
from fencepost.version import VERSION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost.model.duration import Duration
    from fencepost.model.event import JobEvent
    from fencepost.stores.api import LeaseStore
    from fencepost.world.api import Flow, World

DEFAULT_TTL = "30s"
_REMEMBERED = 10_000  # names whose highest token this process has in mind


def default_url() -> str:
    """Return the URL for those who give none."""
    return os.environ.get("FENCEPOST_URL") or DEFAULT_URL


class Wanted(NamedTuple):
    """A checked request for a lease."""

    name: str
    names: tuple[str, ...]
    ttl: float
    wait: float
    max_hold: float | None


class Holding:
    """The leases of one ``Fencepost`` or ``AsyncFencepost``."""

    def __init__(
        self,
        store: str | Callable[[World, str], LeaseStore] | None,
        *,
        world: World,
        namespace: str,
        on_event: Callable[[LeaseEvent | JobEvent], None] | None,
    ) -> None:
        self.namespace = checked_namespace(namespace)
        source = default_url() if store is None else store
        self._source = anchored(source) if isinstance(source, str) else source
        self._world, self._on_event = world, on_event
        self._store = self.open_store(world)
        self._closed = False
        self._wanted = lru_cache(maxsize=256, typed=True)(self._checked_request)
        self._highest: dict[str, int] = {}
        self._keeper = self._new_keeper()
        _everywhere.add(self)

    def wanted(
        self,
        name: str,
        *,
        ttl: Duration,
        wait: Duration | None,
        limit: int | None,
        max_hold: Duration | None,
    ) -> Wanted:
        """Check a request before anything is asked of the store. The same one is checked once."""
        try:
            return self._wanted(name, ttl, wait, limit, max_hold)
        except TypeError:  # something that cannot be remembered, and surely cannot be right
            return self._checked_request(name, ttl, wait, limit, max_hold)

    def _checked_request(
        self,
        name: str,
        ttl: Duration,
        wait: Duration | None,
        limit: int | None,
        max_hold: Duration | None,
    ) -> Wanted:
        name = checked(name)
        if limit is not None and (type(limit) is not int or limit < 1):
            raise Misuse(f"limit is {limit!r}: it must be a whole number of at least 1")
        able = self._store.capabilities
        ttl = checked_ttl(ttl, shortest=able.shortest_ttl, longest=able.longest_ttl)
        most = None if max_hold is None else positive(max_hold, what="max_hold")
        if most is not None and most < ttl:
            ttl = checked_ttl(most, shortest=able.shortest_ttl)  # others wait no longer than that
        wait_for = 0.0 if wait is None else seconds(wait, what="wait")
        if wait_for < 0:
            raise Misuse(f"wait is {wait!r}: it must not be negative")
        return Wanted(
            name=name,
            names=(name,) if limit is None else tuple(permits(name, limit=limit)),
            ttl=ttl,
            wait=wait_for,
            max_hold=most,
        )

    async def acquire(self, wanted: Wanted, *, owner: object) -> Lease:
        """Acquire what is wanted, have it kept, and return it."""
        if self._closed:
            raise Misuse(f"lease {wanted.name!r} cannot be had from a Fencepost that was closed")
        if wanted.wait and len(wanted.names) == 1:
            self._refuse_reentry(wanted.name, owner)
        holder = Holder(self._world.nonce(), HOST, os.getpid(), VERSION)
        hold = Hold(
            None,
            nonce=holder.nonce,
            ttl=wanted.ttl,
            max_hold=wanted.max_hold,
            emit=self.emit,
            chatty=self.chatty,
        )
        hold.owner, hold.patience = owner, THREAD_PATIENCE
        lease = Lease(
            hold,
            namespace=self.namespace,
            boottime=self._world.clocks.boottime,
            drop=self._keeper.charges.remove,
        )
        heard = self.chatty()  # now, while there is time: afterwards others wait for our block
        granted = await acquire(
            self._world,
            self._store,
            wanted.names,
            holder=holder,
            ttl=wanted.ttl,
            wait=wanted.wait,
            abandon=self._keeper.abandon,
            handed=True,
        )
        hold.begin(granted)
        kept = False
        try:
            self._refuse_regression(hold)
            self._keeper.add(hold)
            if heard:
                hold.say("adopted" if granted.grant.adopted else "acquired")
            kept = True
        finally:
            if not kept:
                hold.released = True
                self._keeper.charges.remove(hold)
                self._keeper.abandon(hold.name, hold.nonce)
        return lease

    async def release(self, lease: Lease) -> bool:
        """Give a lease back; say whether it was still ours. Only its own process may."""
        if lease.foreign:
            raise LeaseLost(
                lease.name,
                token=lease.token,
                reason="only the process that acquired it may release it",
            )
        return await self.give_back(lease)

    def give_back(self, lease: Lease) -> Flow[bool]:
        """Give back what is known to be of this process; say whether it was still ours."""
        keeper, hold = self._keeper, lease.hold
        keeper.charges.remove(hold)
        if hold.released:
            return _given_back()
        return release(self._world, self._store, hold, abandon=keeper.abandon)

    async def locks(self) -> list[View]:
        """Return what is held in this namespace."""
        views = await self._store.views()
        return [view for view in views if view.held and not is_mark(view.holder)]

    async def break_lock(self, name: str, *, token: int, reason: str, operator: str | None) -> int:
        """Take a lease away from its holder and leave a record of it."""
        if not reason.strip():
            raise Misuse("a reason is needed to break a lock: the next person will want to know")
        fresh = await self._store.break_(
            name, token=token, reason=reason, operator=operator or operator_here()
        )
        self.emit(LeaseEvent("broken", name, token, reason))
        return fresh

    async def close(self) -> bool:
        """Release what is still held, stop the keeper, close the store.

        The lease of a body that goes on is kept, until the body ends or the process. Then the
        keeper and the store stay open, and the answer is False.
        """
        self._closed = True
        holds = self._keeper.charges.holds()
        for hold in holds:
            if not hold.bound:
                self._keeper.charges.remove(hold)
                await release(self._world, self._store, hold, abandon=self._keeper.abandon)
        if any(hold.bound for hold in holds):
            return False
        await self._world.call(self._keeper.stop)
        await self._store.close()
        _everywhere.discard(self)
        return True

    @property
    def source(self) -> str | Callable[[World, str], LeaseStore]:
        """By what the store is opened: a URL, or a function."""
        return self._source

    def chatty(self) -> bool:
        """Say whether anybody listens to what goes well."""
        return self._on_event is not None or is_heard()

    @property
    def store(self) -> LeaseStore:
        """The store that this face asks."""
        return self._store

    @property
    def keeper(self) -> Keeper:
        """Who renews what is held."""
        return self._keeper

    def after_fork(self) -> None:
        """Begin anew in a forked child: nothing that the parent holds is ours."""
        self._store.forget()
        self._keeper = self._new_keeper()

    def open_store(self, world: World) -> LeaseStore:
        """Open the same store for another world, or another thread."""
        if callable(self._source):
            return self._source(world, self.namespace)
        return open_store(self._source, world, namespace=self.namespace)

    def _new_keeper(self) -> Keeper:
        return Keeper(self.open_store, clocks=self._world.clocks, emit=self.emit)

    def _refuse_reentry(self, name: str, owner: object) -> None:
        now = self._world.clocks.boottime()
        for hold in self._keeper.charges.holds():
            if (hold.name, hold.owner) == (name, owner) and hold.phase(now) is not Phase.LOST:
                raise Misuse(
                    f"lease {name!r} is already held right here, so waiting for it would never "
                    "end: a lease is not re-entrant, pass it along instead"
                )

    def _refuse_regression(self, hold: Hold) -> None:
        highest = self._highest.get(hold.name, 0)
        if hold.token <= highest:
            raise TokenRegressed(hold.name, token=hold.token, highest=highest)
        self._highest[hold.name] = hold.token
        if len(self._highest) > _REMEMBERED:  # forget the name that was seen first
            del self._highest[next(iter(self._highest))]

    def emit(self, event: LeaseEvent | JobEvent) -> None:
        """Tell the log, and whoever subscribed."""
        log(event)
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:  # a subscriber's mistake must not end the keeper: say so, and go on
                import logging

                logging.getLogger("fencepost").exception("on_event failed for %r", event)


async def _given_back() -> bool:
    return True


def beside(own: Holding, other: Holding) -> Holding:
    """Return the leases elsewhere, unless they are there anyway: a run would block itself."""
    ours, theirs = own.source, other.source
    if isinstance(ours, str) and isinstance(theirs, str) and _place(ours) == _place(theirs):
        raise Misuse("leases= names the ledger's own store: leave it out, leases are there anyway")
    return other


def _place(url: str) -> str:
    scheme, _, address = url.partition("://")
    path, _, _ = address.partition("?")
    return os.path.realpath(path) if scheme == "sqlite" else f"{scheme}://{path}"


_everywhere: weakref.WeakSet[Holding] = weakref.WeakSet()


def _begin_anew() -> None:
    for holding in list(_everywhere):
        holding.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def _find_host() -> str:
    return (
        os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "unknown")
    )


HOST = _find_host()


def operator_here() -> str:
    """Return who is asking, for the record."""
    user = os.environ.get("USER") or os.environ.get("USERNAME") or f"uid {os.getuid()}"
    return f"{user}@{HOST}"
