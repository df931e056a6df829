"""Leases in a bucket: one object for each name, written only if nobody else wrote it meanwhile.

Every change is read, decide, write on the condition that the object is still what was read. A
release leaves the object in place: the next token must be higher. There is no clock to ask, so a
lease is over once it was seen to stand still for its whole ttl; see ``objects_expiry``.
"""

from __future__ import annotations

from fencepost.errors import (
    FencepostError,
    LeaseLost,
    Misuse,
    OutcomeUnknown,
    StoreUnavailable,
    TokenStale,
)
from fencepost.model.divided import in_place_of
from fencepost.model.lease import (
    LONGEST_TTL,
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
from fencepost.model.symptom import Severity, Symptom
from fencepost.stores.api import Capabilities
from fencepost.stores.objects_expiry import (
    AGREE,
    Sightings,
    over_by_stamps,
    patience,
    worth_a_stamp,
)
from fencepost.stores.objects_probe import IgnoresConditions, prove
from fencepost.stores.objects_record import ERA, Entry, body_of, entry_of, folder_of, key_of
from fencepost.stores.objects_url import SHORTEST, address_of
from fencepost.world.objects import endpoint_of_environment, open_bucket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from fencepost.world.api import World
    from fencepost.world.objects import Bucket

_CLOCK = "clock.json"
_CLOCK_BODY = b'{"fencepost": "this object is written to learn the time of the server"}'
# Each race that is lost was won by somebody: this many in a row means that something is wrong.
_MOST_RACES = 20
_SHORTEST_NAP, _LONGEST_NAP = 0.05, 1.0
_AT_ONCE = 8  # objects that are read side by side
_MOST_KEPT = 1000
# Buckets that were found to be sound by this process.
_proven: set[str] = set()


def open_s3(world: World, address: str, *, namespace: str) -> ObjectStore:
    """Open ``s3://bucket/prefix?endpoint=…&region=…``; credentials are in the environment."""
    return _open("s3", world, address, namespace)


def open_gs(world: World, address: str, *, namespace: str) -> ObjectStore:
    """Open ``gs://bucket/prefix``."""
    return _open("gs", world, address, namespace)


def open_az(world: World, address: str, *, namespace: str) -> ObjectStore:
    """Open ``az://container/prefix?account=…``."""
    return _open("az", world, address, namespace)


def _open(kind: str, world: World, address: str, namespace: str) -> ObjectStore:
    found = address_of(kind, address, elsewhere=endpoint_of_environment(kind))
    bucket = open_bucket(
        kind,
        found.bucket,
        prefix=found.prefix,
        where=found.where,
        config=found.config,
        client=found.client,
        timeout=found.timeout,
    )
    # What a server of somebody's own does when it fails over is theirs to know.
    safe = not found.endpoint
    return ObjectStore(
        world, bucket, namespace=namespace, shortest_ttl=found.shortest, failover_safe=safe
    )


class ObjectStore:
    """Leases as objects of one bucket."""

    def __init__(
        self,
        world: World,
        bucket: Bucket,
        *,
        namespace: str = "default",
        shortest_ttl: float = SHORTEST,
        failover_safe: bool = False,
    ) -> None:
        self._world, self._bucket, self.namespace = world, bucket, namespace
        self._seen = Sightings()
        self._kept: dict[str, Entry] = {}  # as they were last read or written here
        self._stamp: tuple[float, float] | None = None  # the server's time, and ours then
        self.capabilities = Capabilities(
            keeps_time=False,
            durable=True,
            notices_death=False,
            shared=True,
            failover_safe=failover_safe,
            fair=False,
            shortest_ttl=shortest_ttl,
            longest_ttl=LONGEST_TTL,
        )

    # The four verbs. Each is a read and a write, or the write alone where we wrote last.

    async def acquire(self, name: str, *, holder: Holder, ttl: float) -> Grant:
        """Grant the lease, adopt it, or say who has it."""
        ttl = checked_ttl(ttl, shortest=self.capabilities.shortest_ttl)
        key = self._key(name := well_formed(name))
        await self._refuse_unsound()
        for race in range(_MOST_RACES):
            await self._pause(race)
            entry = await self._read(key)
            record = None if entry is None else await self._judged(key, entry)
            now = self._world.clocks.boottime()
            verdict = judge(record, nonce=holder.nonce, now=now, era=ERA)
            if entry is None or record is None:
                granted = await self._grant(key, None, _first(name, holder), ttl)
            elif verdict is Verdict.FREE:
                granted = await self._grant(key, entry, record._replace(holder=holder), ttl)
            elif verdict is Verdict.DIVIDED:
                mark = in_place_of(record.holder, holder)
                granted = await self._grant(key, entry, record._replace(holder=mark), ttl)
            elif verdict is Verdict.OURS:
                granted = await self._adopt(key, entry, ttl)
            elif verdict is Verdict.SPENT:
                raise LeaseLost(name, token=record.token, reason="this nonce has given it back")
            else:
                raise refusal(record, expires_in=min(record.ttl, record.expires - now))
            if granted is not None:
                return granted
        raise self._too_many(name)

    async def renew(self, name: str, *, nonce: str, token: int, ttl: float) -> Grant:
        """Move the end of the lease, if it is still ours."""
        ttl = checked_ttl(ttl)
        key = self._key(name := well_formed(name))
        await self._refuse_unsound()
        entry = self._kept.get(key)
        for race in range(_MOST_RACES):
            await self._pause(race)
            if race or entry is None or entry.record.holder.nonce != nonce:
                entry = await self._read(key)
            now = self._world.clocks.boottime()
            record = None if entry is None else self._observed(key, entry, now=now)
            reason = why_lost(record, nonce=nonce, token=token, now=now, era=ERA)
            if entry is None or record is None or reason is not None:
                raise LeaseLost(name, token=token, reason=str(reason))
            if await self._adopt(key, entry, ttl) is not None:
                return Grant(token, ttl)
        raise self._too_many(name)

    async def release(self, name: str, *, nonce: str, token: int | None = None) -> None:
        """Give it back. The object stays."""
        key = self._key(name := well_formed(name))
        await self._refuse_unsound()
        entry = self._kept.get(key)
        for race in range(_MOST_RACES):
            await self._pause(race)
            if race or entry is None or not _is_of(entry.record, nonce, token):
                entry = await self._read(key)
            record = None if entry is None else entry.record
            if entry is None or record is None or not _is_of(record, nonce, token):
                reason = why_lost(record, nonce=nonce, token=token or 0, now=0.0, era=ERA)
                raise LeaseLost(name, token=token or 0, reason=str(reason))
            if not record.held:
                return
            tombstone = record._replace(held=False, ended="it was released")
            if await self._write(key, entry, tombstone):
                return
        raise self._too_many(name)

    async def peek(self, name: str) -> View | None:
        """Return who has it."""
        key = self._key(well_formed(name))
        entry = await self._read(key)
        return None if entry is None else self._view(await self._judged(key, entry))

    async def views(self) -> list[View]:
        """Return every lease of this namespace. What has changed since it was read is read."""
        tags = await self._world.call(self._bucket.tags, folder_of(self.namespace))
        keys = [key for key in tags if key.endswith(".json")]
        found: list[View] = []
        for begin in range(0, len(keys), _AT_ONCE):
            some = keys[begin : begin + _AT_ONCE]
            entries = await self._world.together(*(self._current(key, tags[key]) for key in some))
            for key, entry in zip(some, entries, strict=True):
                if entry is not None:
                    found.append(self._view(await self._judged(key, entry)))
        return sorted(found, key=lambda seen: seen.name)

    async def break_(self, name: str, *, token: int, reason: str, operator: str) -> int:
        """Take the lease away and leave a record of it, in the object itself."""
        key = self._key(name := well_formed(name))
        await self._refuse_unsound()
        for race in range(_MOST_RACES):
            await self._pause(race)
            entry = await self._read(key)
            if entry is None or entry.record.token != token:
                raise TokenStale(name, token=token, highest=entry.record.token if entry else 0)
            record, fresh = entry.record, await self._next_token(entry)
            broken = record._replace(
                token=fresh,
                holder=record.holder._replace(nonce=""),
                held=False,
                ended=f"it was broken by {operator}: {reason}",
            )
            audit = {
                "token": token,
                "new_token": fresh,
                "holder": str(record.holder),
                "operator": operator,
                "reason": reason,
                "at": self._world.clocks.wall(),
            }
            if await self._write(key, entry, broken, breaks=(*entry.breaks, audit)):
                return fresh
        raise self._too_many(name)

    async def line(self, name: str) -> Unhurried:
        """Look now and then: nobody is told of a release, and each look is paid for."""
        del name
        return Unhurried(self._world)

    async def examine(self) -> list[Symptom]:
        """Look whether conditions are kept, and whether the clocks agree."""
        try:
            await prove(self._world, self._bucket, thoroughly=True)
        except IgnoresConditions as broken:
            return [_breaks("objects.conditions", broken, "use a store with conditional writes")]
        except Misuse as refused:
            return [_breaks("objects.access", refused, "give it a bucket that it may write to")]
        found: list[Symptom] = []
        off = await self._server_time() - self._world.clocks.wall()
        if abs(off) > AGREE:
            found.append(_clocks_differ(self._bucket.where, off))
        witness = await self._world.call(self._bucket.read, _CLOCK)
        if self._bucket.kind == "s3" and witness is not None and witness.version.generation:
            found.append(_versioned(self._bucket.where))
        return found

    def forget(self) -> None:
        """Keep what is known of the leases: a child may know it too. The door refuses by itself."""

    async def close(self) -> None:
        """Have nothing to close: idle connections end by themselves."""

    # Writing.

    async def _grant(
        self, key: str, entry: Entry | None, record: Record, ttl: float
    ) -> Grant | None:
        token = await self._next_token(entry)
        since = self._world.clocks.wall()
        fresh = record._replace(token=token, held=True, ttl=ttl, since=since, ended="")
        return Grant(token, ttl) if await self._write(key, entry, fresh) else None

    async def _adopt(self, key: str, entry: Entry, ttl: float) -> Grant | None:
        """Write the same grant again: those who watch must see it move."""
        if not await self._write(key, entry, entry.record._replace(ttl=ttl)):
            return None
        return Grant(entry.record.token, ttl, adopted=True)

    async def _write(
        self,
        key: str,
        entry: Entry | None,
        record: Record,
        *,
        breaks: tuple[dict[str, Any], ...] | None = None,
    ) -> bool:
        """Write a lease if it is still as in ``entry``; say whether it was."""
        record = record._replace(beat=record.beat + 1)
        kept = breaks or (entry.breaks if entry else ())
        written_at = self._world.clocks.wall()
        body = body_of(record, breaks=kept, written_at=written_at)
        self._kept.pop(key, None)  # until it is known what is there
        if entry is None:
            version = await self._world.call(self._bucket.create, key, body)
        else:
            version = await self._world.call(self._bucket.replace, key, body, entry.version)
        if version is None:
            return False
        self._keep(key, Entry(record, kept, written_at, version, 0.0))
        return True

    async def _next_token(self, entry: Entry | None) -> int:
        """Return a token above all earlier ones, and not below the server's time where it is known.

        The stamp of the object is the server's time of its last write. Without an object there
        may have been one once, and the server is asked for its time.
        """
        if entry is None and self._stamp is None:
            await self._server_time()
        floor = 0.0 if entry is None else entry.modified
        if self._stamp is not None:
            stamp, at = self._stamp
            floor = max(floor, stamp + self._world.clocks.boottime() - at)
        return next_token(entry.record.token if entry else 0, store_us=int(floor * 1e6))

    async def _refuse_unsound(self) -> None:
        if self._bucket.where in _proven:
            return
        try:
            await prove(self._world, self._bucket)
        except OutcomeUnknown as error:  # of the probe: what was asked for was never sent
            raise StoreUnavailable(str(error)) from error
        _proven.add(self._bucket.where)

    async def _pause(self, race: int) -> None:
        if race:  # 409 and 412 alike: somebody else was quicker, and may be still at it
            await self._world.sleep(min(0.02 * 2**race, 1.0) * self._world.dice())

    # Reading.

    async def _read(self, key: str) -> Entry | None:
        found = await self._world.call(self._bucket.read, key)
        if found is None:
            self._kept.pop(key, None)
            return None
        entry = entry_of(found, key=key, where=self._bucket.where)
        self._keep(key, entry)
        return entry

    async def _current(self, key: str, e_tag: str) -> Entry | None:
        """Return a lease whose etag was listed: from memory if it is the same."""
        entry = self._kept.get(key)
        if entry is not None and entry.modified and entry.version.e_tag == e_tag:
            return entry
        return await self._read(key)

    async def _judged(self, key: str, entry: Entry) -> Record:
        """Return the record with its end filled in, by what we saw or by the server's stamps."""
        clocks = self._world.clocks
        record = self._observed(key, entry, now=clocks.boottime())
        alive = record.held and record.expires > clocks.boottime()
        if alive and worth_a_stamp(entry, wall=clocks.wall()):
            try:
                stamp = await self._server_time()
            except FencepostError:  # who may only read can still watch
                return record
            if over_by_stamps(entry, stamp=stamp, wall=clocks.wall()):
                return record._replace(expires=clocks.boottime())
        return record

    def _observed(self, key: str, entry: Entry, *, now: float) -> Record:
        since = self._seen.see(key, entry.version, now=now)
        return entry.record._replace(expires=since + patience(entry.record.ttl))

    async def _server_time(self) -> float:
        stamp = await self._world.call(self._bucket.stamp, _CLOCK, _CLOCK_BODY)
        self._stamp = stamp, self._world.clocks.boottime()
        return stamp

    def _keep(self, key: str, entry: Entry) -> None:
        if len(self._kept) >= _MOST_KEPT:
            self._kept.clear()
        self._kept[key] = entry
        self._seen.see(key, entry.version, now=self._world.clocks.boottime())

    def _view(self, record: Record) -> View:
        left = min(record.ttl, record.expires - self._world.clocks.boottime())
        return view(record, held=record.held and left > 0, expires_in=left, alive=None)

    def _key(self, name: str) -> str:
        return key_of(self.namespace, name)

    def _too_many(self, name: str) -> StoreUnavailable:
        return StoreUnavailable(f"lease {name!r} changed hands too often while it was asked for")


class Unhurried:
    """No line, but naps that grow: to look costs money, and nobody is told of a release."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._nap = 0.0

    async def turn(self, patience: float) -> bool:
        """Ask at once the first time; later sleep a little, and leave it to a look."""
        if not self._nap:
            self._nap = _SHORTEST_NAP
            return True
        await self._world.sleep(min(patience, self._nap * (0.5 + self._world.dice())))
        self._nap = min(self._nap * 1.6, _LONGEST_NAP)
        return False

    async def first(self) -> bool:
        """Know of nobody else."""
        return True

    async def leave(self, *, served: bool) -> None:
        """Leave nothing behind."""


def _first(name: str, holder: Holder) -> Record:
    return Record(name, 0, holder, held=True, era=ERA, expires=0.0, ttl=0.0, since=0.0)


def _is_of(record: Record, nonce: str, token: int | None) -> bool:
    return record.holder.nonce == nonce and token in (None, record.token)


def _breaks(code: str, error: Misuse, remedy: str) -> Symptom:
    return Symptom(code, Severity.BREAKS, str(error), remedy)


def _clocks_differ(where: str, off: float) -> Symptom:
    return Symptom(
        "objects.clock",
        Severity.NOTE,
        f"the clock of {where} and that of this machine differ by {abs(off):.0f} s",
        "set the time: until then the lease of a holder that vanished is freed only by a process "
        "that has watched it for a whole ttl",
    )


def _versioned(where: str) -> Symptom:
    return Symptom(
        "objects.versions",
        Severity.NOTE,
        f"{where} keeps old versions: every renewal leaves one behind",
        "expire noncurrent versions of this prefix after a day; never expire current ones",
    )
