"""The reference: every store must be observably equal to this one, which is a dictionary."""

from __future__ import annotations

from fencepost.errors import LeaseLost, TokenStale
from fencepost.model.divided import in_place_of, is_mark
from fencepost.model.lease import (
    LONGEST_TTL,
    SHORTEST_TTL,
    Grant,
    Holder,
    Record,
    Verdict,
    View,
    checked_ttl,
    judge,
    next_token,
    refusal,
    view,
    why_lost,
)
from fencepost.model.name import well_formed
from fencepost.stores.api import Capabilities

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from fencepost.world.api import World

_ERA = "this process"


class MemoryShelf:
    """What several ``MemoryStore`` objects of one process share: the records and a lock."""

    def __init__(self, world: World) -> None:
        self.clear(world)

    def clear(self, world: World) -> None:
        """Begin empty, with a lock that no thread of a parent process can be holding."""
        self.turn = world.mutex()
        self.records: dict[tuple[str, str], Record] = {}
        self.highest = 0
        self.beside: dict[str, object] = {}  # what a ledger keeps under the same lock
        self.breaks: list[tuple[str, str, int, int, str, str, float]] = []


_SHELVES: dict[str, MemoryShelf] = {}


def open_memory(world: World, address: str, *, namespace: str) -> MemoryStore:
    """Open ``memory://NAME``: those who say the same name in one process share the leases."""
    shelf = _SHELVES.setdefault(address, MemoryShelf(world))
    return MemoryStore(world, shelf=shelf, namespace=namespace)


class MemoryStore:
    """Leases in a dictionary, under one lock, by one clock."""

    capabilities = Capabilities(
        keeps_time=True,
        durable=False,
        notices_death=False,
        shared=False,
        failover_safe=False,
        fair=False,
        shortest_ttl=SHORTEST_TTL,
        longest_ttl=LONGEST_TTL,
    )

    def __init__(
        self,
        world: World,
        *,
        shelf: MemoryShelf | None = None,
        namespace: str = "default",
        stopped: Callable[[Holder], bool] = lambda _: False,
    ) -> None:
        self._world, self.namespace = world, namespace
        self._shelf = shelf or MemoryShelf(world)
        self._stopped = stopped

    async def acquire(self, name: str, *, holder: Holder, ttl: float) -> Grant:
        """Grant the lease, adopt it, or say who has it."""
        ttl, key = checked_ttl(ttl), self._key(name)
        with self._shelf.turn:
            now, record = self._world.clocks.boottime(), self._shelf.records.get(key)
            verdict = judge(record, nonce=holder.nonce, now=now, era=_ERA)
            if record is None or verdict is Verdict.FREE:
                return self._grant(key, holder, ttl)
            if verdict is Verdict.DIVIDED:
                return self._grant(key, in_place_of(record.holder, holder), ttl)
            if verdict is Verdict.OURS:
                self._shelf.records[key] = record._replace(expires=now + ttl, ttl=ttl)
                return Grant(record.token, ttl, adopted=True)
            if verdict is Verdict.SPENT:
                raise LeaseLost(name, token=record.token, reason="this nonce has given it back")
            if self._is_dead(record):
                return self._grant(key, holder, ttl)
            raise refusal(record, expires_in=record.expires - now)

    async def renew(self, name: str, *, nonce: str, token: int, ttl: float) -> Grant:
        """Move the end of the lease, if it is still ours."""
        ttl, key = checked_ttl(ttl), self._key(name)
        with self._shelf.turn:
            now, record = self._world.clocks.boottime(), self._shelf.records.get(key)
            reason = why_lost(record, nonce=nonce, token=token, now=now, era=_ERA)
            if record is None or reason is not None:
                raise LeaseLost(name, token=token, reason=str(reason))
            self._shelf.records[key] = record._replace(
                expires=now + ttl, ttl=ttl, beat=record.beat + 1
            )
            return Grant(token, ttl)

    async def release(self, name: str, *, nonce: str, token: int | None = None) -> None:
        """Give it back. The record stays: the next token must be higher."""
        key = self._key(name)
        with self._shelf.turn:
            record = self._shelf.records.get(key)
            ours = record is not None and record.holder.nonce == nonce
            if record is None or not ours or (token is not None and record.token != token):
                reason = why_lost(record, nonce=nonce, token=token or 0, now=0.0, era=_ERA)
                raise LeaseLost(name, token=token or 0, reason=str(reason))
            if record.held:
                self._shelf.records[key] = record._replace(held=False, ended="it was released")

    async def peek(self, name: str) -> View | None:
        """Return who has it."""
        with self._shelf.turn:
            record = self._shelf.records.get(self._key(name))
            return None if record is None else self._view(record)

    async def views(self) -> list[View]:
        """Return every lease of this namespace."""
        with self._shelf.turn:
            return [
                self._view(record)
                for (namespace, _), record in sorted(self._shelf.records.items())
                if namespace == self.namespace
            ]

    async def break_(self, name: str, *, token: int, reason: str, operator: str) -> int:
        """Take the lease away and leave a record of it."""
        key = self._key(name)
        with self._shelf.turn:
            record = self._shelf.records.get(key)
            if record is None or record.token != token:
                raise TokenStale(name, token=token, highest=0 if record is None else record.token)
            fresh, wall = self._next_token(), self._world.clocks.wall()
            self._shelf.records[key] = record._replace(
                token=fresh,
                holder=record.holder._replace(nonce=""),
                held=False,
                ended=f"it was broken by {operator}: {reason}",
            )
            self._shelf.breaks.append((*key, token, fresh, reason, operator, wall))
            return fresh

    # What a ledger does with leases inside of its own step, holding the lock already.

    @property
    def turn(self) -> AbstractContextManager[object]:
        """The lock that guards everything on the shelf."""
        return self._shelf.turn

    @property
    def beside(self) -> dict[str, object]:
        """What is kept on the same shelf by others."""
        return self._shelf.beside

    def look(self, name: str) -> View | None:
        """Return who has it, as the store would judge it now."""
        record = self._shelf.records.get(self._key(name))
        if record is None:
            return None
        seen = self._view(record)
        return seen._replace(held=False) if self._is_dead(record) else seen

    def give(self, name: str, holder: Holder, ttl: float, *, above: int = 0) -> Grant:
        """Grant a lease that was seen to be free, with a token that is higher than ``above``."""
        return self._grant(self._key(name), holder, ttl, above=above)

    def mark(self, name: str, holder: Holder, ttl: float) -> None:
        """Leave the mark of permits at a lock, with a token above those of this name."""
        key = self._key(name)
        before = self._shelf.records.get(key)
        wall_us = int(self._world.clocks.wall() * 1e6)
        token = next_token(0 if before is None else before.token, store_us=wall_us)
        self._keep(key, holder, ttl, token)
        self._shelf.highest = max(self._shelf.highest, token)

    def readopt(self, name: str, nonce: str, ttl: float) -> Grant:
        """Return again what this nonce was granted, from now on."""
        key = self._key(name)
        record = self._shelf.records[key]
        assert record.holder.nonce == nonce, "only its own grant can be adopted"
        expires = self._world.clocks.boottime() + ttl
        self._shelf.records[key] = record._replace(expires=expires, ttl=ttl)
        return Grant(record.token, ttl, adopted=True)

    def extend(self, name: str, nonce: str, token: int, ttl: float) -> bool:
        """Move the end of a lease; say whether it was still ours to move."""
        key = self._key(name)
        now, record = self._world.clocks.boottime(), self._shelf.records.get(key)
        if record is None or why_lost(record, nonce=nonce, token=token, now=now, era=_ERA):
            return False
        beat = record.beat + 1
        self._shelf.records[key] = record._replace(expires=now + ttl, ttl=ttl, beat=beat)
        return True

    def entrust(self, name: str, nonce: str, token: int, ttl: float) -> bool:
        """Move the end of a lease that no death frees any more; say whether it was ours."""
        if not self.extend(name, nonce, token, ttl):
            return False
        key = self._key(name)
        self._shelf.records[key] = self._shelf.records[key]._replace(entrusted=True)
        return True

    def end(self, name: str, nonce: str) -> bool:
        """Give a lease back; say whether it was ours."""
        key = self._key(name)
        record = self._shelf.records.get(key)
        if record is None or record.holder.nonce != nonce or not record.held:
            return False
        self._shelf.records[key] = record._replace(held=False, ended="it was released")
        return True

    def drop(self, name: str, nonce: str) -> None:
        """Forget a lease of this nonce; its token stays the highest of all."""
        record = self._shelf.records.get(self._key(name))
        if record is not None and record.holder.nonce == nonce:
            del self._shelf.records[self._key(name)]

    @property
    def highest(self) -> int:
        """The highest token of all."""
        return self._shelf.highest

    def revoke(self, name: str, nonce: str, operator: str, reason: str) -> int:
        """Take a lease from the holder of ``nonce``, if it has it; return the token from then on.

        0 if somebody else has it by now: then there is nothing to take.
        """
        key = self._key(name)
        record = self._shelf.records.get(key)
        if record is None or record.holder.nonce != nonce:
            return 0
        fresh, ended = self._next_token(), f"it was broken by {operator}: {reason}"
        nobody = record.holder._replace(nonce="")
        self._shelf.records[key] = record._replace(
            token=fresh, holder=nobody, held=False, ended=ended
        )
        wall = self._world.clocks.wall()
        self._shelf.breaks.append((*key, record.token, fresh, reason, operator, wall))
        return fresh

    async def line(self, name: str) -> None:
        """Have no line: asking again costs nothing here."""

    def forget(self) -> None:
        """Keep nothing of a parent's: a forked copy of a dictionary is nobody's lease."""
        self._shelf.clear(self._world)

    async def close(self) -> None:
        """Have nothing to close."""

    def _grant(self, key: tuple[str, str], holder: Holder, ttl: float, *, above: int = 0) -> Grant:
        self._shelf.highest = max(self._shelf.highest, above)
        token = self._next_token()
        self._keep(key, holder, ttl, token)
        return Grant(token, ttl)

    def _keep(self, key: tuple[str, str], holder: Holder, ttl: float, token: int) -> None:
        now = self._world.clocks.boottime()
        self._shelf.records[key] = Record(
            name=key[1],
            token=token,
            holder=holder,
            held=True,
            era=_ERA,
            expires=now + ttl,
            ttl=ttl,
            since=self._world.clocks.wall(),
        )

    def _is_dead(self, record: Record) -> bool:
        return not (record.entrusted or is_mark(record.holder)) and self._stopped(record.holder)

    def _next_token(self) -> int:
        wall_us = int(self._world.clocks.wall() * 1e6)
        self._shelf.highest = next_token(self._shelf.highest, store_us=wall_us)
        return self._shelf.highest

    def _view(self, record: Record) -> View:
        left = record.expires - self._world.clocks.boottime()
        return view(record, held=record.held and left > 0, expires_in=left, alive=None)

    def _key(self, name: str) -> tuple[str, str]:
        return self.namespace, well_formed(name)
