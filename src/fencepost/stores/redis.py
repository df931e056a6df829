"""Leases on one Redis or Valkey server: each verb is one script, so one round trip, one step.

The server's clock decides when a lease ends, and the script that reads it also writes the record.
A record outlives its lease by a week; a token is ``max(last + 1, server time in µs)``, so that not
even a server which has forgotten everything grants a lower one. What replication loses in a
failover is lost: see docs/decisions/0019-redis.md.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress

from fencepost.errors import BadUrl, LeaseLost, TokenStale
from fencepost.model.lease import (
    DRIFT,
    LONGEST_TTL,
    MARGIN,
    SHORTEST_TTL,
    Grant,
    Holder,
    Record,
    View,
    checked_ttl,
    refusal,
    view,
    why_lost,
)
from fencepost.model.name import well_formed
from fencepost.stores import redis_scripts as scripts
from fencepost.stores.api import Capabilities
from fencepost.stores.redis_doctor import examined
from fencepost.stores.redis_line import RedisPlace
from fencepost.stores.redis_rows import (
    ERA,
    Keys,
    keys_of,
    name_in,
    pattern_of,
    read_answer,
    record_of,
    us,
    who_of,
)
from fencepost.world.redis import PATIENCE, Address, RedisServer, command, packed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.model.symptom import Symptom
    from fencepost.world.api import World

_MOST_NAMES = 1000  # whose keys are kept in mind
_PAGE = b"1000"  # keys that SCAN looks at in one step
_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname")
_SIX = b"$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n"
_THREE = b"$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n"


def open_redis(world: World, address: str, *, namespace: str) -> RedisStore:
    """Open ``redis://[user[:password]@]host[:port][/database][?timeout=seconds]``."""
    return RedisStore(world, read_address(address, tls=False), namespace=namespace)


def open_rediss(world: World, address: str, *, namespace: str) -> RedisStore:
    """Open ``rediss://…``: the same, encrypted; ``ssl_ca_certs=FILE`` names whom to trust."""
    return RedisStore(world, read_address(address, tls=True), namespace=namespace)


class RedisStore:
    """Leases in the keys of one server."""

    capabilities = Capabilities(
        keeps_time=True,
        durable=True,  # with appendonly yes, which the doctor insists on
        notices_death=False,
        shared=True,
        failover_safe=False,
        fair=True,
        shortest_ttl=SHORTEST_TTL,
        longest_ttl=LONGEST_TTL,
    )

    def __init__(self, world: World, address: Address, *, namespace: str = "default") -> None:
        self._world, self.namespace = world, namespace
        self._server = RedisServer(address)
        self._names: dict[str, Keys] = {}
        self._who: dict[tuple[str, int, str], bytes] = {}
        # Those who wait to be handed a lease, by nonce.
        self._places: dict[str, RedisPlace] = {}

    # The four verbs. Each is one call through the world's door, and one round trip.

    async def acquire(self, name: str, *, holder: Holder, ttl: float) -> Grant:
        """Grant the lease, adopt it, or say who has it."""
        ttl, keys = checked_ttl(ttl), self._keys(name)
        place = self._places.get(holder.nonce) if self._places else None
        rest = keys.three + self._wish(holder, ttl, keys, b"", b"", place)
        answer = await self._world.call(self._server.run, scripts.ACQUIRE, rest)
        if place is not None:
            place.was_answered(granted=type(answer) is int)
        if type(answer) is int:
            return Grant(answer, ttl) if answer > 0 else Grant(-answer, ttl, adopted=True)
        now, record = read_answer(well_formed(name), answer)
        if answer[:1] == b"S" or record is None:
            token = 0 if record is None else record.token
            raise LeaseLost(name, token=token, reason="this nonce has given it back")
        raise refusal(record, expires_in=_left(record, now))

    async def renew(self, name: str, *, nonce: str, token: int, ttl: float) -> Grant:
        """Move the end of the lease, if it is still ours."""
        ttl, keys = checked_ttl(ttl), self._keys(name)
        words = nonce.encode(), b"%d" % token, us(ttl)
        # Shorter than what a holder's trust is short of the ttl, where that is not too short for
        # a network: so that a keeper which waits here can still tell of the loss in time.
        patience = min(max(DRIFT * ttl + 0.6 * MARGIN, 0.25), self._server.address.patience)
        answer = await self._world.call(
            self._server.run, scripts.RENEW, keys.lease + packed(*words), patience
        )
        if type(answer) is not int:
            raise _loss(name, answer, nonce, token)
        return Grant(token, ttl)

    async def release(self, name: str, *, nonce: str, token: int | None = None) -> None:
        """Give it back; the first in line has it then."""
        keys, me = self._keys(name), nonce.encode()
        what = b"" if token is None else b"%d" % token
        rest = keys.three + _THREE % (len(me), me, len(what), what, len(keys.which), keys.which)
        answer = await self._world.call(self._server.run, scripts.RELEASE, rest)
        if type(answer) is not int:
            raise _loss(name, answer, nonce, token or 0)

    async def peek(self, name: str) -> View | None:
        """Return who has it."""
        keys = self._keys(name)
        answer = await self._world.call(self._server.look, scripts.PEEK, keys.lease)
        now, record = read_answer(well_formed(name), answer)
        return None if record is None else _seen(record, now)

    async def views(self) -> list[View]:
        """Return every lease of this namespace. It looks at all keys of the database, in steps."""
        found: dict[str, View] = {}
        cursor = b"0"
        while True:
            cursor, keys = await self._world.call(
                self._server.read, b"SCAN", cursor, b"MATCH", pattern_of(self.namespace),
                b"COUNT", _PAGE,
            )  # fmt: skip
            names = {key: name for key in keys if (name := name_in(key, self.namespace))}
            if names:
                found |= await self._world.call(self._views_of, names)
            if cursor == b"0":
                return [found[name] for name in sorted(found)]

    async def break_(self, name: str, *, token: int, reason: str, operator: str) -> int:
        """Take the lease away and leave a record of it; the first in line has it then."""
        keys = self._keys(name)
        ended = f"it was broken by {operator}: {reason}"
        rest_of_object = json.dumps({"reason": reason, "operator": operator})[1:]
        rest = keys.four + packed(
            b"%d" % token, ended.encode(), keys.which, rest_of_object.encode()
        )
        answer = await self._world.call(self._server.run, scripts.BREAK, rest)
        if type(answer) is not int:
            raise TokenStale(name, token=token, highest=int(answer[1:]))
        return answer

    async def line(self, name: str) -> RedisPlace:
        """Stand in line, at the end of it, as soon as it turns out that one has to wait."""
        return RedisPlace(self._world, self._server, self._keys(name), places=self._places,
                          who=self.who)  # fmt: skip

    async def examine(self) -> list[Symptom]:
        """Say what on this server would break a promise."""
        return await examined(self._world, self._server, namespace=self.namespace)

    def forget(self) -> None:
        """Drop what a fork carried over; the parent's connections go on without us."""
        self._server.forget()
        self._places.clear()

    async def close(self) -> None:
        """Close the connections."""
        await self._world.call(self._server.close)

    # How requests are spelled.

    def who(self, holder: Holder) -> bytes:
        """Return a holder on one line. There is one for each process, so it is kept in mind."""
        _, host, pid, version = holder
        known = self._who.get((host, pid, version))
        if known is None:
            known = who_of(host, pid, version)
            if len(self._who) < _MOST_NAMES:
                self._who[host, pid, version] = known
        return known

    def _wish(
        self,
        holder: Holder,
        ttl: float,
        keys: Keys,
        place: bytes,
        gone: bytes,
        waiting: RedisPlace | None,
    ) -> bytes:
        me, long, who, which = holder.nonce.encode(), us(ttl), self.who(holder), keys.which
        if waiting is not None:
            place, gone = waiting.wish, waiting.gone
        return _SIX % (
            *(len(me), me, len(long), long, len(who), who),
            *(len(which), which, len(place), place, len(gone), gone),
        )

    def _keys(self, name: str) -> Keys:
        known = self._names.get(name)
        if known is None:
            canonical = well_formed(name)
            known = keys_of(self.namespace, canonical)
            if len(self._names) < _MOST_NAMES:
                self._names[name] = known
        return known

    def _views_of(self, names: dict[bytes, str]) -> dict[str, View]:
        commands = [command(b"TIME"), *(command(b"GET", key) for key in names)]
        (seconds, micros), *records = self._server.read_all(commands)
        now = int(seconds) + int(micros) / 1e6
        return {
            name: _seen(record_of(name, text), now)
            for name, text in zip(names.values(), records, strict=True)
            if text is not None
        }


def read_address(address: str, *, tls: bool) -> Address:
    """Read what follows ``redis://``, or say what is wrong with it, without the password."""
    from urllib.parse import parse_qs, unquote, urlsplit  # dear, and needed once

    parts, port = None, None
    # What cannot be read may be a piece of the password: nothing of it goes on from here.
    with suppress(ValueError):
        parts = urlsplit(f"redis://{address}")
        port = parts.port or 6379
    if parts is None or parts.fragment or "@" in parts.path + parts.query:
        raise BadUrl(
            "the redis URL cannot be read: write signs such as / ? # [ ] @ in percents, "
            "%2F for a slash, where they are part of a user, a password or an option"
        )
    if port is None:
        raise BadUrl(
            "the redis URL has a port that is not a number from 1 to 65535 (or a password with "
            "a slash in it: write that as %2F)"
        )
    if not parts.hostname:
        raise BadUrl("the redis URL names no host: write redis://host:6379/0")
    database = parts.path.removeprefix("/")
    if database and not (database.isascii() and database.isdigit()):
        raise BadUrl(f"the redis URL names database {database!r}: it must be a number, such as /0")
    options = {key: values[-1] for key, values in parse_qs(parts.query).items()}
    unknown = set(options) - {"timeout"} - (set(_OPTIONS) if tls else set())
    if unknown:
        known = ", ".join(("timeout", *_OPTIONS) if tls else ("timeout",))
        raise BadUrl(f"the redis URL has the unknown option {min(unknown)!r}: known are {known}")
    return Address(
        host=parts.hostname,
        port=port,
        database=int(database or 0),
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        patience=_patience(options.pop("timeout", "")),
        tls=_tls(options) if tls else None,
    )


def _tls(options: dict[str, str]) -> dict[str, str | bool]:
    """Return what the driver is to do about encryption. Older ones checked no host name."""
    checked = options.get("ssl_check_hostname", "true").lower()
    if checked not in ("true", "false"):
        raise BadUrl(f"the redis URL has ssl_check_hostname={checked}: it must be true or false")
    return {**options, "ssl_check_hostname": checked == "true"}


def _patience(text: str) -> float:
    if not text:
        return PATIENCE
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.05 <= seconds <= 60:
        raise BadUrl(f"the redis URL has timeout={text}: it must be 0.05 to 60 seconds")
    return seconds


def _left(record: Record, now: float) -> float:
    # As the scripts do: a clock that was set back keeps nothing for longer than it was granted.
    return min(max(record.expires - now, 0.0), record.ttl)


def _seen(record: Record, now: float) -> View:
    left = _left(record, now)
    return view(record, held=record.held and left > 0, expires_in=left, alive=None)


def _loss(name: str, answer: bytes, nonce: str, token: int) -> LeaseLost:
    now, record = read_answer(name, answer)
    reason = why_lost(record, nonce=nonce, token=token, now=now, era=ERA)
    return LeaseLost(name, token=token, reason=reason or "it was released")
