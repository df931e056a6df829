"""A lock in a store whose reads lag behind its writes: the one that works until it does not.

Key-value stores at the edge of a network answer from the copy that is near. What another edge wrote
is seen there some time later. A lock that looks, finds nothing and then writes is granted twice
whenever two look at two edges within that time. ``EventualStore`` is such a lock: every other rule
of a lease store is kept, and ``exclusive=False`` says what is not, so a job must be declared
``idempotent=True`` to run on it. ``CompareAndSetStore`` is the same lock with the one difference
that matters: it writes on the condition that nobody wrote since it looked.

    kv = EventualKv(world, delay=60.0)
    amsterdam = EventualStore(world, kv, edge="ams")
    boston = EventualStore(world, kv, edge="bos")
"""

from __future__ import annotations

from fencepost.errors import LeaseLost, StoreUnavailable, TokenStale
from fencepost.model.divided import in_place_of
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
from fencepost.model.named import NamedTuple
from fencepost.stores.api import Capabilities

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.world.api import World

ERA = "the store's"
_MOST_RACES = 100


class Seen(NamedTuple):
    """An answer of the store: what the edge knows, which write that is, and the store's time."""

    record: Record | None
    write: int  # its number; 0 if nothing was ever written
    now: float
    wall: float


class _Write(NamedTuple):
    number: int
    at: float
    edge: str
    record: Record
    reaches: dict[str, float]  # when other edges see it


class EventualKv:
    """What all edges share: each key's latest writes, and when they are seen where."""

    def __init__(self, world: World, *, delay: float) -> None:
        self.delay = delay
        self._world = world
        self._turn = world.mutex()
        self._writes: dict[tuple[str, str], list[_Write]] = {}
        self._number = 0

    def get(self, edge: str, key: tuple[str, str]) -> Seen:
        """Return the newest write that ``edge`` has heard of: its own, or one that got here."""
        with self._turn:
            now = self._world.clocks.boottime()
            for write in reversed(self._writes.get(key, ())):
                if write.edge == edge or self._reached(write, edge) <= now:
                    return self._seen(write, now)
            return self._seen(None, now)

    def latest(self, key: tuple[str, str]) -> Seen:
        """Return the newest write of all, as a store would that has one place for a key."""
        with self._turn:
            writes = self._writes.get(key)
            return self._seen(writes[-1] if writes else None, self._world.clocks.boottime())

    def put(self, edge: str, key: tuple[str, str], record: Record) -> float:
        """Write, whatever is there; return when it ends. Other edges hear of it later."""
        with self._turn:
            return self._put(edge, key, record)

    def swap(self, edge: str, key: tuple[str, str], record: Record, write: int) -> float | None:
        """Write if ``write`` is still the newest; return when it ends, or None if it is not."""
        with self._turn:
            writes = self._writes.get(key)
            if (writes[-1].number if writes else 0) != write:
                return None
            return self._put(edge, key, record)

    def delete(self, key: tuple[str, str]) -> bool:
        """Forget a key everywhere at once, as nobody but a person can; say whether it was there."""
        with self._turn:
            return self._writes.pop(key, None) is not None

    def keys(self, namespace: str) -> list[tuple[str, str]]:
        """Return all keys of a namespace."""
        with self._turn:
            return sorted(key for key in self._writes if key[0] == namespace)

    def _put(self, edge: str, key: tuple[str, str], record: Record) -> float:
        now = self._world.clocks.boottime()
        self._number += 1
        kept = record._replace(expires=now + record.ttl)
        writes = self._writes.setdefault(key, [])
        # All that is older than the delay has reached everybody: only the newest of it counts.
        while len(writes) > 1 and writes[1].at + self.delay <= now:
            del writes[0]
        writes.append(_Write(self._number, now, edge, kept, {}))
        return kept.expires

    def _reached(self, write: _Write, edge: str) -> float:
        if edge not in write.reaches:
            write.reaches[edge] = write.at + self._world.dice() * self.delay
        return write.reaches[edge]

    def _seen(self, write: _Write | None, now: float) -> Seen:
        wall = self._world.clocks.wall()
        return (
            Seen(None, 0, now, wall) if write is None else Seen(write.record, write[0], now, wall)
        )


class EventualStore:
    """Look, then write: a lease that two can have at once. For what does no harm twice."""

    capabilities = Capabilities(
        keeps_time=False,
        durable=False,
        notices_death=False,
        shared=False,
        failover_safe=False,
        fair=False,
        shortest_ttl=SHORTEST_TTL,
        longest_ttl=LONGEST_TTL,
        exclusive=False,
    )

    def __init__(
        self, world: World, kv: EventualKv, *, edge: str, namespace: str = "default"
    ) -> None:
        self._world, self._kv, self._edge = world, kv, edge
        self.namespace = namespace

    async def acquire(self, name: str, *, holder: Holder, ttl: float) -> Grant:
        """Grant the lease if this edge knows of no holder."""
        ttl, key = checked_ttl(ttl), self._key(name)
        for _ in range(_MOST_RACES):
            seen = await self._read(key)
            record = seen.record
            verdict = judge(record, nonce=holder.nonce, now=seen.now, era=ERA)
            if record is not None and verdict is Verdict.DIVIDED:
                holder, verdict = in_place_of(record.holder, holder), Verdict.FREE
            if record is None or verdict is Verdict.FREE:
                fresh = self._fresh(key[1], seen, holder, ttl)
                if await self._write(key, seen, fresh, what="granted"):
                    return Grant(fresh.token, ttl)
            elif verdict is Verdict.OURS:
                adopted = record._replace(ttl=ttl, beat=record.beat + 1)
                if await self._write(key, seen, adopted, what="adopted"):
                    return Grant(record.token, ttl, adopted=True)
            elif verdict is Verdict.SPENT:
                raise LeaseLost(name, token=record.token, reason="this nonce has given it back")
            else:
                raise refusal(record, expires_in=record.expires - seen.now)
        raise self._too_many(name)

    async def renew(self, name: str, *, nonce: str, token: int, ttl: float) -> Grant:
        """Move the end of the lease, as far as this edge knows that it is ours."""
        ttl, key = checked_ttl(ttl), self._key(name)
        for _ in range(_MOST_RACES):
            seen = await self._read(key)
            record = seen.record
            reason = why_lost(record, nonce=nonce, token=token, now=seen.now, era=ERA)
            if record is None or reason is not None:
                raise LeaseLost(name, token=token, reason=str(reason))
            renewed = record._replace(ttl=ttl, beat=record.beat + 1)
            if await self._write(key, seen, renewed, what="renewed"):
                return Grant(token, ttl)
        raise self._too_many(name)

    async def release(self, name: str, *, nonce: str, token: int | None = None) -> None:
        """Give it back, as far as this edge knows that it is ours."""
        key = self._key(name)
        for _ in range(_MOST_RACES):
            seen = await self._read(key)
            record = seen.record
            ours = record is not None and record.holder.nonce == nonce
            if record is None or not ours or token not in (None, record.token):
                reason = why_lost(record, nonce=nonce, token=token or 0, now=0.0, era=ERA)
                raise LeaseLost(name, token=token or 0, reason=str(reason))
            ended = record._replace(held=False, ended="it was released", beat=record.beat + 1)
            if not record.held or await self._write(key, seen, ended, what="released"):
                return
        raise self._too_many(name)

    async def peek(self, name: str) -> View | None:
        """Return who has it, as far as this edge knows."""
        return _view(await self._read(self._key(name)))

    async def views(self) -> list[View]:
        """Return every lease of this namespace that this edge knows of."""
        keys = await self._world.call(self._kv.keys, self.namespace)
        seen = [_view(await self._read(key)) for key in keys]
        return [one for one in seen if one is not None]

    async def break_(self, name: str, *, token: int, reason: str, operator: str) -> int:
        """Take it away from whoever has it, as far as this edge knows."""
        key = self._key(name)
        for _ in range(_MOST_RACES):
            seen = await self._read(key)
            record = seen.record
            if record is None or record.token != token:
                raise TokenStale(name, token=token, highest=0 if record is None else record.token)
            broken = record._replace(
                token=next_token(token, store_us=int(seen.wall * 1e6)),
                holder=record.holder._replace(nonce=""),
                held=False,
                ended=f"it was broken by {operator}: {reason}",
            )
            if await self._write(key, seen, broken, what="broken"):
                return broken.token
        raise self._too_many(name)

    async def line(self, name: str) -> None:
        """Have no line."""

    def forget(self) -> None:
        """Keep what there is: it is a simulation, and nobody's lease."""

    async def close(self) -> None:
        """Have nothing to close."""

    # What a lock like this is made of: a look, and a write that asks for nothing.

    async def _read(self, key: tuple[str, str]) -> Seen:
        return await self._world.call(self._kv.get, self._edge, key)

    async def _write(self, key: tuple[str, str], seen: Seen, record: Record, *, what: str) -> bool:
        del seen, what
        await self._world.call(self._kv.put, self._edge, key, record)
        return True

    def _fresh(self, name: str, seen: Seen, holder: Holder, ttl: float) -> Record:
        before = seen.record
        highest, beat = (before.token, before.beat) if before else (0, 0)
        return Record(
            name=name,
            token=next_token(highest, store_us=int(seen.wall * 1e6)),
            holder=holder,
            held=True,
            era=ERA,
            expires=0.0,  # the store knows when
            ttl=ttl,
            since=seen.wall,
            beat=beat + 1,
        )

    def _key(self, name: str) -> tuple[str, str]:
        return self.namespace, well_formed(name)

    def _too_many(self, name: str) -> StoreUnavailable:
        return StoreUnavailable(f"lease {name!r} changed hands too often while it was asked for")


class CompareAndSetStore(EventualStore):
    """The same lock on one place for each key, written only if it is as it was seen."""

    capabilities = EventualStore.capabilities._replace(exclusive=True)

    async def _read(self, key: tuple[str, str]) -> Seen:
        return await self._world.call(self._kv.latest, key)

    async def _write(self, key: tuple[str, str], seen: Seen, record: Record, *, what: str) -> bool:
        del what
        ends = await self._world.call(self._kv.swap, self._edge, key, record, seen.write)
        return ends is not None


def _view(seen: Seen) -> View | None:
    record = seen.record
    if record is None:
        return None
    left = record.expires - seen.now
    return view(record, held=record.held and left > 0, expires_in=left, alive=None)
