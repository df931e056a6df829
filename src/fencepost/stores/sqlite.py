"""Leases in one SQLite file: any number of processes of one machine, no server.

The clock is the kernel's boot-time clock, which all processes share; a lease carries the boot id it
was granted under, so a restart frees everything and a stepping wall clock frees nothing. Which
commits must survive a power cut is in docs/decisions/0004-durability.md: grants and breaks must,
because of their tokens; renewals and releases need not, because a power cut changes the boot id.
"""

from __future__ import annotations

import os

from fencepost.errors import BadUrl, LeaseLost, Misuse, TokenStale
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
    left,
    next_token,
    refusal,
    view,
    why_lost,
)
from fencepost.model.name import well_formed
from fencepost.model.watch import Watch
from fencepost.stores.api import Capabilities
from fencepost.world.disk import refuse_shared
from fencepost.world.line import Line, LinePlace, can_queue, put_away
from fencepost.world.pulse import Pulse
from fencepost.world.sqlite import SqliteFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sqlite3 import Connection
    from typing import Any

    from fencepost.world.api import World

SCHEMA = 1

# One row about the file itself: the highest token of any lease in it, and whose boot-time clock
# its instants are read on. The row of a lease may be deleted by hand; this one keeps its token.
_CREATE_FILE = """
CREATE TABLE IF NOT EXISTS fencepost_file (
    id             INTEGER PRIMARY KEY CHECK (id = 1),
    schema         INTEGER NOT NULL,
    token          INTEGER NOT NULL,
    boot_id        TEXT    NOT NULL,
    time_namespace TEXT    NOT NULL
)"""

# A lease, kept for ever: a released one is a tombstone that carries the last token and nonce.
_CREATE_LEASE = """
CREATE TABLE IF NOT EXISTS fencepost_lease (
    namespace   TEXT    NOT NULL,
    name        TEXT    NOT NULL,
    token       INTEGER NOT NULL,
    nonce       TEXT    NOT NULL,
    held        INTEGER NOT NULL,
    boot_id     TEXT    NOT NULL,
    expires_us  INTEGER NOT NULL,
    ttl_us      INTEGER NOT NULL,
    beat        INTEGER NOT NULL,
    since_us    INTEGER NOT NULL,
    host        TEXT    NOT NULL,
    pid         INTEGER NOT NULL,
    version     TEXT    NOT NULL,
    pulse       TEXT    NOT NULL,
    pulse_inode TEXT    NOT NULL,
    ended       TEXT    NOT NULL,
    PRIMARY KEY (namespace, name)
) WITHOUT ROWID"""

# Who took a lease away from whom, and why.
_CREATE_BREAK = """
CREATE TABLE IF NOT EXISTS fencepost_break (
    id        INTEGER PRIMARY KEY,
    namespace TEXT    NOT NULL,
    name      TEXT    NOT NULL,
    token     INTEGER NOT NULL,
    new_token INTEGER NOT NULL,
    holder    TEXT    NOT NULL,
    operator  TEXT    NOT NULL,
    reason    TEXT    NOT NULL,
    at_us     INTEGER NOT NULL
)"""

CREATE = (_CREATE_FILE, _CREATE_LEASE, _CREATE_BREAK)

_COLUMNS = """lease.name, lease.token, lease.nonce, lease.held, lease.boot_id, lease.expires_us,
       lease.ttl_us, lease.beat, lease.since_us, lease.host, lease.pid, lease.version,
       lease.pulse, lease.pulse_inode, lease.ended"""

# The file's highest token and, if there is one, the lease: all that an acquire needs to decide.
_FIND = f"""
SELECT file.token, {_COLUMNS}
  FROM fencepost_file AS file
  LEFT JOIN fencepost_lease AS lease ON lease.namespace = :namespace AND lease.name = :name
 WHERE file.id = 1"""

_FIND_ALL = f"""
SELECT {_COLUMNS}
  FROM fencepost_lease AS lease
 WHERE lease.namespace = :namespace
 ORDER BY lease.name"""

_GRANT = """
INSERT OR REPLACE INTO fencepost_lease
VALUES (:namespace, :name, :token, :nonce, 1, :boot_id, :expires_us, :ttl_us, 0, :since_us,
        :host, :pid, :version, :pulse, :pulse_inode, '')"""

_RAISE_TOKEN = "UPDATE fencepost_file SET token = :token WHERE id = 1"

# A renewal past the end is refused even if nobody came: past means past.
_RENEW = """
UPDATE fencepost_lease
   SET expires_us = :now_us + :ttl_us, ttl_us = :ttl_us, beat = beat + 1
 WHERE namespace = :namespace AND name = :name AND nonce = :nonce AND token = :token
   AND held = 1 AND boot_id = :boot_id AND expires_us > :now_us"""

_RELEASE = """
UPDATE fencepost_lease
   SET held = 0, ended = 'it was released'
 WHERE namespace = :namespace AND name = :name AND nonce = :nonce AND held = 1
   AND token = coalesce(:token, token)"""

_BREAK = """
UPDATE fencepost_lease
   SET token = :new_token, nonce = '', held = 0, ended = :ended
 WHERE namespace = :namespace AND name = :name"""

_RECORD_BREAK = """
INSERT INTO fencepost_break (namespace, name, token, new_token, holder, operator, reason, at_us)
VALUES (:namespace, :name, :token, :new_token, :holder, :operator, :reason, :at_us)"""


def open_sqlite(world: World, address: str, *, namespace: str) -> SqliteStore:
    """Open ``sqlite:///relative.db`` or ``sqlite:////absolute/path.db``."""
    path, _, options = address.partition("?")
    if options not in ("", "trust_filesystem=1"):
        raise BadUrl(
            f"sqlite URL has unknown options {options!r}: only trust_filesystem=1 is known"
        )
    if not path.startswith("/") or path == "/":
        raise BadUrl(
            f"'sqlite://{address}' names no file: write sqlite:///relative.db (three slashes) or "
            "sqlite:////absolute/path.db (four)"
        )
    if path == "/:memory:":
        raise BadUrl("an SQLite database in memory is shared with nobody: use memory:// instead")
    if "%" in path:
        from urllib.parse import unquote  # dear, and rarely needed

        path = unquote(path)
    return SqliteStore(world, path[1:], namespace=namespace, trust_disk=bool(options))


class Row:
    """A lease as the file has it: the record, and where to feel its holder's pulse."""

    __slots__ = ("pulse", "pulse_inode", "record")

    def __init__(self, columns: tuple[Any, ...]) -> None:
        (name, token, nonce, held, boot_id, expires_us, ttl_us, beat, since_us) = columns[:9]
        host, pid, version, self.pulse, self.pulse_inode, ended = columns[9:]
        self.record = Record(
            name=name,
            token=token,
            holder=Holder(nonce, host, pid, version),
            held=bool(held),
            era=boot_id,
            expires=expires_us / 1e6,
            ttl=ttl_us / 1e6,
            since=since_us / 1e6,
            ended=ended,
            beat=beat,
        )


class SqliteStore:
    """Leases in the rows of one file."""

    def __init__(
        self, world: World, path: str, *, namespace: str = "default", trust_disk: bool = False
    ) -> None:
        self._world, self._namespace = world, namespace
        self._private = path == ":memory:"
        if not self._private:
            path = os.path.realpath(path)  # by whatever name, from whatever folder: one file
            if not trust_disk:
                refuse_shared(path)
        self._file = SqliteFile(world, path, set_up=self._set_up)
        self._folder = path + "-live"
        self._pulse = Pulse(self._folder)
        self._watch = Watch()
        self.capabilities = Capabilities(
            keeps_time=world.clocks.era() is not None,
            durable=not self._private,
            notices_death=not self._private and self._pulse.possible,
            shared=not self._private,
            failover_safe=not self._private,
            fair=not self._private and can_queue(),
            shortest_ttl=SHORTEST_TTL,
            longest_ttl=LONGEST_TTL,
        )

    # The four verbs. Each is one call through the world's door, and at most one transaction.

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
        """Return who has it, and whether they still live."""
        return await self._world.call(self._peek, well_formed(name))

    async def views(self) -> list[View]:
        """Return every lease of this namespace."""
        return await self._world.call(self._views)

    async def break_(self, name: str, *, token: int, reason: str, operator: str) -> int:
        """Take the lease away and leave a record of it."""
        return await self._world.call(self._break, well_formed(name), token, reason, operator)

    async def line(self, name: str) -> LinePlace | None:
        """Stand in line, where there are named pipes to do it with."""
        if not self.capabilities.fair:
            return None
        try:
            return await LinePlace.joined(self._world, self._line(name))
        except (
            OSError
        ):  # no room, no right, no descriptor: those who cannot stand in line ask again
            return None

    def lifeline(self) -> int | None:
        """Return what vouches for us and for children that keep a copy; they never use the file."""
        self._file.stay_open()
        return self._pulse.fd if self._pulse.fd >= 0 else None

    def forget(self) -> None:
        """Drop what a fork carried over; the parent's pulse and connection go on without us."""
        self._file.forget()
        self._pulse.drop()

    async def close(self) -> None:
        """Close the file. The pulse stays while leases lean on it."""
        await self._world.call(self._close)

    # What runs behind the door.

    def _acquire(self, name: str, holder: Holder, ttl: float) -> Grant:
        return self._file.write(lambda db: self._decide(db, name, holder, ttl), durable=True)

    def _decide(self, db: Connection, name: str, holder: Holder, ttl: float) -> Grant:
        highest, row = self._find(db, name)
        now, era = self._now()
        record = None if row is None else row.record
        verdict = judge(record, nonce=holder.nonce, now=now, era=era)
        if row is None or record is None or verdict is Verdict.FREE:
            return self._grant(db, name, holder, ttl, highest)
        if verdict is Verdict.OURS:
            if self._move_end(db, name, holder.nonce, record.token, ttl):
                return Grant(record.token, ttl, adopted=True)
            return self._grant(db, name, holder, ttl, highest)  # it ran out this very moment
        if verdict is Verdict.SPENT:
            raise LeaseLost(name, token=record.token, reason="this nonce has given it back")
        if self._watch.long_enough(record, now=now, era=era):
            return self._grant(db, name, holder, ttl, highest)
        if self._gone(row):
            grant = self._grant(db, name, holder, ttl, highest)
            self._sweep(db)
            return grant
        raise refusal(record, expires_in=left(record, now=now, era=era))

    def _grant(self, db: Connection, name: str, holder: Holder, ttl: float, highest: int) -> Grant:
        # The pulse must beat before anybody can read a row that leans on it.
        pulse, inode = ("", "") if self._private else self._pulse.beat(holder.nonce)
        wall_us = _us(self._world.clocks.wall())
        token = next_token(highest, store_us=wall_us)
        now, era = self._now()
        db.execute(
            _GRANT,
            {
                "namespace": self._namespace,
                "name": name,
                "token": token,
                "nonce": holder.nonce,
                "boot_id": era,
                "expires_us": _us(now) + _us(ttl),
                "ttl_us": _us(ttl),
                "since_us": wall_us,
                "host": holder.host,
                "pid": holder.pid,
                "version": holder.version,
                "pulse": pulse,
                "pulse_inode": inode,
            },
        )
        db.execute(_RAISE_TOKEN, {"token": token})
        self._pulse.leases.add(holder.nonce)
        return Grant(token, ttl)

    def _renew(self, name: str, nonce: str, token: int, ttl: float) -> Grant:
        # Short, so that a keeper which has to tell of danger is not kept here.
        patience = min(ttl / 20, 0.25)
        if not self._file.write_one(
            lambda db: self._move_end(db, name, nonce, token, ttl), patience=patience
        ):
            raise self._loss(name, nonce, token)
        return Grant(token, ttl)

    def _move_end(self, db: Connection, name: str, nonce: str, token: int, ttl: float) -> int:
        now, era = self._now()
        return db.execute(
            _RENEW,
            {
                "namespace": self._namespace,
                "name": name,
                "nonce": nonce,
                "token": token,
                "boot_id": era,
                "now_us": _us(now),
                "ttl_us": _us(ttl),
            },
        ).rowcount

    def _release(self, name: str, nonce: str, token: int | None) -> None:
        values = {"namespace": self._namespace, "name": name, "nonce": nonce, "token": token}
        changed = self._file.write_one(lambda db: db.execute(_RELEASE, values).rowcount)
        self._pulse.leases.discard(nonce)
        if changed:
            self._wake(name)
            return
        _, row = self._file.read(lambda db: self._find(db, name))
        if row is None or row.record.holder.nonce != nonce or row.record.held:
            raise self._loss(name, nonce, token or 0)

    def _peek(self, name: str) -> View | None:
        _, row = self._file.read(lambda db: self._find(db, name))
        return None if row is None else self._view(row)

    def _views(self) -> list[View]:
        values = {"namespace": self._namespace}
        rows = self._file.read(lambda db: db.execute(_FIND_ALL, values).fetchall())
        return [self._view(Row(columns)) for columns in rows]

    def _break(self, name: str, token: int, reason: str, operator: str) -> int:
        fresh = self._file.write(
            lambda db: self._take_away(db, name, token, reason, operator), durable=True
        )
        self._wake(name)
        return fresh

    def _take_away(self, db: Connection, name: str, token: int, reason: str, operator: str) -> int:
        highest, row = self._find(db, name)
        if row is None or row.record.token != token:
            raise TokenStale(name, token=token, highest=0 if row is None else row.record.token)
        wall_us = _us(self._world.clocks.wall())
        fresh = next_token(highest, store_us=wall_us)
        values = {
            "namespace": self._namespace,
            "name": name,
            "token": token,
            "new_token": fresh,
            "holder": str(row.record.holder),
            "operator": operator,
            "reason": reason,
            "ended": f"it was broken by {operator}: {reason}",
            "at_us": wall_us,
        }
        db.execute(_BREAK, values)
        db.execute(_RECORD_BREAK, values)
        db.execute(_RAISE_TOKEN, {"token": fresh})
        return fresh

    def _close(self) -> None:
        self._file.close()
        self._pulse.end()
        put_away(self._folder)

    # Facts.

    def _find(self, db: Connection, name: str) -> tuple[int, Row | None]:
        values = {"namespace": self._namespace, "name": name}
        found = db.execute(_FIND, values).fetchone()
        if found is None:
            raise Misuse(
                f"{self._file.path!r} has lost its row in fencepost_file: restart to mend it"
            )
        highest, *columns = found
        if columns[0] is None:
            return highest, None
        row = Row(tuple(columns))
        return max(highest, row.record.token), row

    def _loss(self, name: str, nonce: str, token: int) -> LeaseLost:
        _, row = self._file.read(lambda db: self._find(db, name))
        now, era = self._now()
        record = None if row is None else row.record
        reason = why_lost(record, nonce=nonce, token=token, now=now, era=era)
        return LeaseLost(name, token=token, reason=reason or "it was renewed too late")

    def _view(self, row: Row) -> View:
        now, era = self._now()
        record = row.record
        remains = left(record, now=now, era=era)
        held = record.held and remains > 0
        held = held and not self._watch.long_enough(record, now=now, era=era)
        gone = held and self._gone(row)
        alive = not gone if self.capabilities.notices_death else None
        return view(record, held=held, expires_in=remains, alive=alive)

    def _gone(self, row: Row) -> bool:
        return not self._private and self._pulse.stopped(row.pulse, row.pulse_inode)

    def _now(self) -> tuple[float, str]:
        clocks = self._world.clocks
        return clocks.boottime(), clocks.era() or ""

    def _line(self, name: str) -> Line:
        return Line(self._folder, namespace=self._namespace, name=name)

    def _wake(self, name: str) -> None:
        if self.capabilities.fair:
            self._line(name).wake()

    # The file.

    def _set_up(self, db: Connection) -> None:
        """Bring the file to this version's schema and this machine's clock, or refuse it."""
        if not self._private:
            os.makedirs(self._folder, exist_ok=True)
        known = db.execute(
            "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'fencepost_file'"
        ).fetchone()
        era, namespace = self._world.clocks.era() or "", self._world.clocks.namespace()
        file = (
            known
            and db.execute(
                "SELECT schema, boot_id, time_namespace FROM fencepost_file WHERE id = 1"
            ).fetchone()
        )
        if file:
            schema, boot_id, found = file
            self._refuse_foreign(schema, boot_id == era, found, namespace)
            if boot_id == era:
                return
        db.execute("BEGIN IMMEDIATE")
        for statement in CREATE:
            db.execute(statement)
        db.execute(
            "INSERT INTO fencepost_file"
            " VALUES (1, ?, (SELECT coalesce(max(token), 0) FROM fencepost_lease), ?, ?)"
            " ON CONFLICT (id) DO UPDATE SET boot_id = excluded.boot_id,"
            " time_namespace = excluded.time_namespace",
            (SCHEMA, era, namespace),
        )
        if not self._private:
            self._sweep(db)
        db.execute("COMMIT")

    def _sweep(self, db: Connection) -> None:
        """Remove what the dead left behind. In a write transaction, where no grant is half done."""
        leaned_on = db.execute("SELECT pulse FROM fencepost_lease WHERE held").fetchall()
        self._pulse.sweep(keep={pulse for (pulse,) in leaned_on})

    def _refuse_foreign(self, schema: int, same_boot: bool, found: str, ours: str) -> None:  # noqa: FBT001
        if schema > SCHEMA:
            raise Misuse(
                f"{self._file.path!r} was written by a newer fencepost (schema {schema}, this one "
                f"knows {SCHEMA}): upgrade this installation"
            )
        if same_boot and found != ours:
            raise Misuse(
                f"{self._file.path!r} is in use by processes of another time namespace ({found}, "
                f"here {ours}): their clocks disagree, so they cannot share it"
            )


def _us(seconds: float) -> int:
    return int(seconds * 1e6)
