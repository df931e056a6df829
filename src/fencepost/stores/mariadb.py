"""Leases in one table of a MariaDB or MySQL database, by the server's clock.

Each verb is one statement in a transaction of its own: it reads the clock, compares and changes one
row. A lease that is refused, and why, come back in the same round trip. The row outlives the lease,
so that tokens never fall; see docs/decisions/0023-mariadb.md.
"""

from __future__ import annotations

import hashlib

from fencepost.errors import (
    BadUrl,
    LeaseLost,
    OutcomeUnknown,
    StoreUnavailable,
    StoreUnfit,
    TokenStale,
)
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
from fencepost.model.name import base, well_formed
from fencepost.stores import mariadb_rows as sql
from fencepost.stores.api import Capabilities
from fencepost.stores.mariadb_examined import examined
from fencepost.stores.mariadb_place import MariaPlace, wake
from fencepost.world.mariadb import TIMEOUT, Address, MariaServer
from fencepost.world.mariadb_batch import Part, Statement
from fencepost.world.mariadb_errors import NoTable, RowExists

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from fencepost.model.symptom import Symptom
    from fencepost.world.api import World
    from fencepost.world.mariadb import Answer
    from fencepost.world.mariadb_batch import Transaction

_OPTIONS = ("timeout", "tls", "ca", "socket")
# Each race that is lost was won by somebody: this many in a row means that something is wrong.
_MOST_RACES = 100

# What is said in a transaction; the last of it is who is first in line.
_FIND_TO_BREAK, *_BREAK = (
    Statement((Part(text),))
    for text in (sql.FIND_TO_BREAK, sql.BREAK, sql.RECORD_BREAK, sql.FIRST_IN_LINE)
)


def open_mariadb(world: World, address: str, *, namespace: str) -> MariaStore:
    """Open ``mariadb://user:password@host:3306/database``; nothing is connected yet."""
    return MariaStore(world, read_address(address), namespace=namespace)


def open_mysql(world: World, address: str, *, namespace: str) -> MariaStore:
    """Open ``mysql://user:password@host:3306/database``; the same, under the other name."""
    return MariaStore(world, read_address(address, kind="MySQL"), namespace=namespace)


def read_address(address: str, *, kind: str = "MariaDB") -> Address:
    """Return what follows ``mariadb://`` as values, or a sentence about what is wrong with it.

    ``kind`` is what whoever wrote the URL calls the server.
    """
    from urllib.parse import parse_qsl, unquote, urlsplit

    try:
        parts = urlsplit(f"mariadb://{address}")
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True))
        port = parts.port or 3306
        timeout = float(options.pop("timeout", TIMEOUT))
    except ValueError as error:
        hidden = "" if parts_secret(address) else f": {error}"
        raise BadUrl(
            f"a {kind} URL cannot be read{hidden}; write {kind.lower()}://user:password@host:3306/"
            "database with special characters as %XX"
        ) from None  # the cause may quote the password
    host, database = parts.hostname or "", unquote(parts.path[1:])
    if not database or "/" in database:
        raise BadUrl(f"the URL of {host or f'a {kind}'} names no database: write …@host/database")
    tls = options.pop("tls", "prefer")
    if tls not in ("off", "prefer", "require", "verify"):
        raise BadUrl(f"tls={tls!r} in a {kind} URL: it is off, prefer, require or verify")
    ca, socket = options.pop("ca", ""), options.pop("socket", "")
    if options:
        known = ", ".join(_OPTIONS)
        raise BadUrl(f"a {kind} URL has the unknown options {sorted(options)}: known are {known}")
    if not 0.1 <= timeout <= 600:
        raise BadUrl(f"timeout={timeout:g} in a {kind} URL: it must be 0.1 to 600 seconds")
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    if ca:
        tls = "verify"
    where = (host or "localhost", port, user, password, database, socket)
    return Address(*where, tls=tls, ca=ca, timeout=timeout, kind=kind)


def parts_secret(address: str) -> bool:
    """Say whether an address may hold a password, so that no complaint may quote it."""
    return "@" in address


class MariaStore:
    """Leases in the rows of one table."""

    tables = sql.CREATE

    def __init__(self, world: World, address: Address, *, namespace: str = "default") -> None:
        self._world, self.namespace = world, namespace
        self.server = MariaServer(world, address)
        self.capabilities = Capabilities(
            keeps_time=True,
            durable=True,
            notices_death=False,
            shared=True,
            failover_safe=False,
            fair=True,
            shortest_ttl=SHORTEST_TTL,
            longest_ttl=LONGEST_TTL,
        )

    async def acquire(self, name: str, *, holder: Holder, ttl: float) -> Grant:
        """Grant the lease, adopt it, or say who has it."""
        ttl, name = checked_ttl(ttl), well_formed(name)
        return await self._world.call(self._acquire, name, holder, ttl)

    async def renew(self, name: str, *, nonce: str, token: int, ttl: float) -> Grant:
        """Move the end of the lease, if it is still ours."""
        ttl, name = checked_ttl(ttl), well_formed(name)
        return await self._world.call(self._renew, name, nonce, token, ttl)

    async def release(self, name: str, *, nonce: str, token: int | None = None) -> None:
        """Give it back and wake whoever is first in line."""
        await self._world.call(self._release, well_formed(name), nonce, token)

    async def peek(self, name: str) -> View | None:
        """Return who has it."""
        return await self._world.call(self._peek, well_formed(name))

    async def views(self) -> list[View]:
        """Return every lease of this namespace."""
        return await self._world.call(self._views)

    async def break_(self, name: str, *, token: int, reason: str, operator: str) -> int:
        """Take the lease away and leave a record of it."""
        return await self._world.call(self._break, well_formed(name), token, reason, operator)

    async def line(self, name: str) -> MariaPlace | None:
        """Stand in line, where the server keeps one."""
        if not self.capabilities.fair:
            return None
        try:
            return await MariaPlace.joined(self._world, self.server, self._line(name))
        except StoreUnavailable:
            return None  # no room for one more connection: who cannot stand in line asks again

    async def examine(self) -> list[Symptom]:
        """Say what would break the promises of this store on this server."""
        return await self._world.call(examined, self.server, self._world.clocks.wall)

    async def prepare(self, statements: tuple[str, ...] = sql.CREATE) -> None:
        """Make tables that are missing: ours, or others in the same database."""
        await self._world.call(self.create, statements)

    def forget(self) -> None:
        """Drop, in a forked child, the connections of the parent."""
        self.server.forget()

    async def close(self) -> None:
        """Close the connections."""
        await self._world.call(self.server.close)

    # What runs behind the door.

    def _acquire(self, name: str, holder: Holder, ttl: float) -> Grant:
        values = self._which(name) | holder._asdict() | {"ttl_us": _us(ttl)}
        statement = sql.ACQUIRE
        for _ in range(_MOST_RACES):
            try:
                granted, found = self._run(statement, values, changes=True, patience=ttl)
            except RowExists:  # somebody was quicker, or an earlier try of our own
                statement = sql.ACQUIRE
                continue
            row = sql.row_of(found.rows[0][0]) if found.rows else None
            if row is None:
                statement = sql.ACQUIRE_FIRST
            elif not granted.changed:
                statement = sql.ACQUIRE
                if (grant := self._again(row, values, ttl)) is not None:
                    return grant
            elif row.record.holder.nonce == holder.nonce:  # else it was taken away again already
                return Grant(row.record.token, ttl)
        raise StoreUnavailable(f"lease {name!r} changed hands too often while it was asked for")

    def _again(self, row: sql.Row, values: dict[str, Any], ttl: float) -> Grant | None:
        """Adopt a lease that could not be granted, or refuse it; None if it changed meanwhile."""
        record = row.record
        verdict = judge(record, nonce=values["nonce"], now=row.now, era=sql.ERA)
        if verdict is Verdict.SPENT:
            raise LeaseLost(record.name, token=record.token, reason="this nonce has given it back")
        values = values | {"token": record.token}
        if verdict is Verdict.OURS:
            [moved] = self._run(sql.RENEW, values, changes=True, patience=ttl)
            return Grant(record.token, ttl, adopted=True) if moved.changed else None
        if verdict is Verdict.DIVIDED:
            return self._in_place(record, values, ttl)
        if verdict is Verdict.HELD:
            if row.set_back:
                self._run(sql.CLAMP, values, changes=True, patience=ttl)
            raise refusal(record, expires_in=row.left)
        return None

    def _in_place(self, before: Record, values: dict[str, Any], ttl: float) -> Grant | None:
        """Put a mark in the place of another one; None if that has changed meanwhile."""
        values = values | {"pid": max(values["pid"], before.holder.pid)}
        taken, found = self._run(sql.TAKE_PLACE, values, changes=True, patience=ttl)
        if not taken.changed or not found.rows:
            return None
        record = sql.row_of(found.rows[0][0]).record
        return Grant(record.token, ttl) if record.holder.nonce == values["nonce"] else None

    def _renew(self, name: str, nonce: str, token: int, ttl: float) -> Grant:
        values = self._which(name) | {"nonce": nonce, "token": token, "ttl_us": _us(ttl)}
        # Two more tries must fit into what is left when a renewal is due.
        [moved] = self._run(sql.RENEW, values, changes=True, patience=max(ttl / 4, 0.1))
        if not moved.changed:
            raise self._loss(name, nonce, token)
        return Grant(token, ttl)

    def _release(self, name: str, nonce: str, token: int | None) -> None:
        values = self._which(name) | {"nonce": nonce, "token": token, "line": self._line(name)}
        [ended] = self._run(sql.RELEASE, values, changes=True)
        if ended.changed:
            if first := sql.first_in_line(ended.number):
                wake(self.server, first)
            return
        row = self._find(name)
        record = None if row is None else row.record
        if record is None or record.holder.nonce != nonce or record.held:
            raise self._loss(name, nonce, token or 0)

    def _peek(self, name: str) -> View | None:
        row = self._find(name)
        return None if row is None else _view(row)

    def _views(self) -> list[View]:
        [found] = self._run(sql.FIND_ALL, {"namespace": self.namespace})
        return [_view(sql.row_of(text)) for (text,) in found.rows]

    def _break(self, name: str, token: int, reason: str, operator: str) -> int:
        self._peek(name)  # so that the tables are there
        values = self._which(name) | {"token": token, "operator": operator, "reason": reason}

        def take_away(transaction: Transaction) -> tuple[int, int | None]:
            [found] = transaction.batch([(_FIND_TO_BREAK, values)])
            row = sql.row_of(found.rows[0][0]) if found.rows else None
            if row is None or row.record.token != token:
                highest = 0 if row is None else row.record.token
                raise TokenStale(name, token=token, highest=highest)
            fresh = next_token(token, store_us=row.now_us)
            more = values | {
                "new_token": fresh,
                "holder": str(row.record.holder),
                "ended": f"it was broken by {operator}: {reason}",
                "line": self._line(name),
            }
            [*_, first] = transaction.batch([(step, more) for step in _BREAK], last=True)
            return fresh, first.rows[0][0]

        fresh, first = self.server.transaction(take_away)
        if first:
            wake(self.server, first)
        return fresh

    # Facts.

    def _find(self, name: str) -> sql.Row | None:
        [found] = self._run(sql.FIND, self._which(name))
        return sql.row_of(found.rows[0][0]) if found.rows else None

    def _loss(self, name: str, nonce: str, token: int) -> Exception:
        try:
            row = self._find(name)
        except StoreUnavailable as error:  # it was refused, that much is known; but why?
            return OutcomeUnknown(f"lease {name!r}: {error}")
        record, now = (None, 0.0) if row is None else (row.record, row.now)
        reason = why_lost(record, nonce=nonce, token=token, now=now, era=sql.ERA)
        return LeaseLost(name, token=token, reason=reason or "it was renewed too late")

    def _which(self, name: str) -> dict[str, Any]:
        digest = hashlib.sha256(name.encode()).hexdigest()
        return {"namespace": self.namespace, "digest": digest, "name": name}

    def _line(self, name: str) -> str:
        """Return which lock of the server is the line for a lease; its names are few and short."""
        whole = "\0".join((self.server.address.database, self.namespace, base(name)))
        return f"fencepost.{hashlib.sha256(whole.encode()).hexdigest()[:48]}"

    # The tables.

    def _run(
        self,
        text: str,
        values: dict[str, Any],
        *,
        changes: bool = False,
        patience: float | None = None,
    ) -> list[Answer]:
        """Run statements; make the tables if they are missing, once."""
        try:
            return self.server.run(text, values, changes=changes, patience=patience)
        except NoTable:
            self.create(sql.CREATE)
        return self.server.run(text, values, changes=changes, patience=patience)

    def create(self, statements: tuple[str, ...]) -> None:
        """Make the tables; those who do so at the same time do no harm."""
        try:
            for statement in statements:
                self.server.run(statement, {}, changes=True)
        except StoreUnfit as error:
            raise StoreUnfit(
                f"{self.server.address} has no tables of fencepost, and they could not be made: "
                f"{error}; run 'fencepost migrate' as a user who may create tables"
            ) from error


def _view(row: sql.Row) -> View:
    held = row.record.held and row.left > 0
    return view(row.record, held=held, expires_in=row.left, alive=None)


def _us(seconds: float) -> int:
    return int(seconds * 1e6)
