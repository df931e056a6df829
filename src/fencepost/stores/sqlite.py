"""Leases in one SQLite file: any number of processes of one machine, no server.

The clock is the kernel's boot-time clock, which all processes share; a lease carries the boot id it
was granted under, so a restart frees everything and a stepping wall clock frees nothing. Which
commits must survive a power cut is in docs/decisions/0004-durability.md: grants and breaks must,
because of their tokens; renewals and releases need not, because a power cut changes the boot id.
"""

from __future__ import annotations

import os

from fencepost.errors import BadUrl, LeaseLost, Misuse, StoreUnavailable, TokenStale
from fencepost.model.lease import (
    DRIFT,
    LONGEST_TTL,
    MARGIN,
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
from fencepost.model.named import NamedTuple
from fencepost.model.watch import Watch
from fencepost.stores.api import Capabilities
from fencepost.stores.sqlite_schema import is_ready, prepare
from fencepost.world.disk import refuse_shared
from fencepost.world.line import Line, LinePlace, can_queue, put_away
from fencepost.world.pulse import Pulse
from fencepost.world.sqlite import SqliteFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sqlite3 import Connection
    from typing import Any

    from fencepost.world.api import World

    # The token of a lease, whether it is held, and its beat; None if there is no such row.
    Seen = tuple[int, int, int] | None

# Each race that is lost was won by somebody: this many in a row means that something is wrong.
_MOST_RACES = 100

_COLUMNS = """lease.name, lease.token, lease.nonce, lease.host, lease.pid, lease.version,
       lease.held, lease.boot_id, lease.expires_us, lease.ttl_us, lease.since_us, lease.ended,
       lease.beat, lease.pulse, lease.pulse_inode"""

_FIND = f"""
SELECT {_COLUMNS}
  FROM fencepost_lease AS lease
 WHERE lease.namespace = :namespace AND lease.name = :name"""

_FIND_ALL = f"""
SELECT {_COLUMNS}
  FROM fencepost_lease AS lease
 WHERE lease.namespace = :namespace
 ORDER BY lease.name"""

# Only a lease without a row may have been deleted: any other was granted above this already.
_FIND_DELETED = "SELECT token FROM fencepost_file WHERE id = 1"

# The first grant of a name, unless somebody else was first or has just deleted a lease.
_GRANT_FIRST = """
INSERT OR IGNORE INTO fencepost_lease
SELECT :namespace, :name, :token, :nonce, 1, :boot_id, :expires_us, :ttl_us, 0, :since_us,
       :host, :pid, :version, :pulse, :pulse_inode, ''
  FROM fencepost_file WHERE id = 1 AND token = :seen_token"""

# The usual grant, in one statement: nobody has the lease, and the clock is ahead of its token.
_GRANT_FREE = """
UPDATE fencepost_lease
   SET token = :since_us, nonce = :nonce, held = 1, boot_id = :boot_id, expires_us = :expires_us,
       ttl_us = :ttl_us, beat = 0, since_us = :since_us, host = :host, pid = :pid,
       version = :version, pulse = :pulse, pulse_inode = :pulse_inode, ended = ''
 WHERE namespace = :namespace AND name = :name
   AND held = 0 AND nonce <> :nonce AND token < :since_us"""

# Any other grant, unless the lease is no longer what it was when the decision was made.
_GRANT_AGAIN = """
UPDATE fencepost_lease
   SET token = :token, nonce = :nonce, held = 1, boot_id = :boot_id, expires_us = :expires_us,
       ttl_us = :ttl_us, beat = 0, since_us = :since_us, host = :host, pid = :pid,
       version = :version, pulse = :pulse, pulse_inode = :pulse_inode, ended = ''
 WHERE namespace = :namespace AND name = :name
   AND token = :seen_token AND held = :seen_held AND beat = :seen_beat"""

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


class Row(NamedTuple):
    """A lease as the file has it: the record, and where to feel its holder's pulse."""

    record: Record
    pulse: str
    pulse_inode: str


def _row(columns: tuple[Any, ...]) -> Row:
    """Return what ``_COLUMNS`` selected as values. In their order: this is on everybody's way."""
    name, token, nonce, host, pid, version, held, era, expires_us, ttl_us, since_us = columns[:11]
    ended, beat, pulse, pulse_inode = columns[11:]
    holder = Holder(nonce, host, pid, version)
    instants = (era, expires_us / 1e6, ttl_us / 1e6, since_us / 1e6)
    return Row(Record(name, token, holder, held == 1, *instants, ended, beat), pulse, pulse_inode)


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
        self.namespace, self.file, self.pulse = namespace, self._file, self._pulse  # for a ledger
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
        except OSError:
            return None  # no room, no right, no descriptor: who cannot stand in line asks again

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
        for _ in range(_MOST_RACES):
            grant = self._file.write_one(lambda db: self._ask(db, name, holder, ttl), durable=True)
            if grant is not None:
                self._pulse.leases.add(holder.nonce)
                return grant
        raise StoreUnavailable(f"lease {name!r} changed hands too often while it was asked for")

    def _ask(self, db: Connection, name: str, holder: Holder, ttl: float) -> Grant | None:
        """Take the lease if it is free, else read, decide, compare and set.

        None if it changed between the decision and the grant: then it is asked for again.
        """
        wanted = self._wanted(name, holder, ttl)
        if db.execute(_GRANT_FREE, wanted).rowcount:
            return Grant(wanted["since_us"], ttl)
        row = self._find(db, name)
        if row is None:
            return self._grant_first(db, wanted, ttl)
        record = row.record
        now, era = self._now()
        verdict = judge(record, nonce=holder.nonce, now=now, era=era)
        if verdict is Verdict.OURS:
            moved = self._move_end(db, name, holder.nonce, record.token, ttl)
            return Grant(record.token, ttl, adopted=True) if moved else None
        if verdict is Verdict.SPENT:
            raise LeaseLost(name, token=record.token, reason="this nonce has given it back")
        dead = False
        if verdict is Verdict.HELD and not self._watch.long_enough(record, now=now, era=era):
            dead = self._gone(row)
            if not dead:
                raise refusal(record, expires_in=left(record, now=now, era=era))
        wanted |= {"seen_held": record.held, "seen_beat": record.beat}
        grant = self._grant(db, _GRANT_AGAIN, wanted, ttl, highest=record.token)
        if grant is not None and dead:
            self._sweep(db)
        return grant

    def _wanted(self, name: str, holder: Holder, ttl: float) -> dict[str, Any]:
        """Return the lease as it will be, but for its token, if nobody is quicker."""
        # The pulse must beat before anybody can read a row that leans on it.
        pulse, inode = ("", "") if self._private else self._pulse.beat(holder.nonce)
        now, era = self._now()
        return {
            "namespace": self._namespace,
            "name": name,
            "nonce": holder.nonce,
            "boot_id": era,
            "expires_us": _us(now) + _us(ttl),
            "ttl_us": _us(ttl),
            "since_us": _us(self._world.clocks.wall()),
            "host": holder.host,
            "pid": holder.pid,
            "version": holder.version,
            "pulse": pulse,
            "pulse_inode": inode,
        }

    def _grant_first(self, db: Connection, wanted: dict[str, Any], ttl: float) -> Grant | None:
        found = db.execute(_FIND_DELETED).fetchone()
        if found is None:
            raise Misuse(
                f"{self._file.path!r} has lost its row in fencepost_file: restart to mend it"
            )
        return self._grant(db, _GRANT_FIRST, wanted, ttl, highest=found[0])

    def _grant(
        self, db: Connection, statement: str, wanted: dict[str, Any], ttl: float, *, highest: int
    ) -> Grant | None:
        token = next_token(highest, store_us=wanted["since_us"])
        changed = db.execute(statement, wanted | {"token": token, "seen_token": highest}).rowcount
        return Grant(token, ttl) if changed else None

    def _renew(self, name: str, nonce: str, token: int, ttl: float) -> Grant:
        # Shorter than what a holder's trust is short of the ttl: so that a keeper which is kept
        # here can still tell of the loss before anybody else is granted the lease.
        patience = min(DRIFT * ttl + 0.6 * MARGIN, 0.25)
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
        row = self._file.read(lambda db: self._find(db, name))
        if row is None or row.record.holder.nonce != nonce or row.record.held:
            raise self._loss(name, nonce, token or 0)

    def _peek(self, name: str) -> View | None:
        row = self._file.read(lambda db: self._find(db, name))
        return None if row is None else self._view(row)

    def _views(self) -> list[View]:
        values = {"namespace": self._namespace}
        rows = self._file.read(lambda db: db.execute(_FIND_ALL, values).fetchall())
        return [self._view(_row(columns)) for columns in rows]

    def _break(self, name: str, token: int, reason: str, operator: str) -> int:
        fresh = self._file.write(
            lambda db: self._take_away(db, name, token, reason, operator), durable=True
        )
        self._wake(name)
        return fresh

    def _take_away(self, db: Connection, name: str, token: int, reason: str, operator: str) -> int:
        row = self._find(db, name)
        if row is None or row.record.token != token:
            raise TokenStale(name, token=token, highest=0 if row is None else row.record.token)
        wall_us = _us(self._world.clocks.wall())
        fresh = next_token(token, store_us=wall_us)
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
        return fresh

    def _close(self) -> None:
        self._file.close()
        self._pulse.end()
        put_away(self._folder)

    # What a ledger does with leases inside of its own transaction, on the same connection.

    def look(self, db: Connection, name: str) -> tuple[Record, View] | None:
        """Return a lease as it is written, and as it stands: the dead hold nothing."""
        row = self._find(db, name)
        if row is None:
            return None
        seen = self._view(row)
        return row.record, seen._replace(held=seen.held and seen.alive is not False)

    def give(
        self, db: Connection, name: str, holder: Holder, ttl: float, *, seen: Seen, above: int
    ) -> Grant:
        """Grant a lease that was ``seen`` to be free, with a token that is higher than ``above``.

        A run that goes on under another permit of its lock must not find its token fallen.
        """
        wanted = self._wanted(name, holder, ttl)
        wanted["since_us"] = max(wanted["since_us"], above + 1)  # if the clock was set back
        token, wanted["seen_held"], wanted["seen_beat"] = seen or (0, 0, 0)
        if seen is None:
            grant = self._grant_first(db, wanted, ttl)
        else:
            grant = self._grant(db, _GRANT_AGAIN, wanted, ttl, highest=token)
        assert grant is not None, "nobody else can write while we do"
        if wanted["seen_held"]:
            self._sweep(db)
        return grant

    def wish(self, name: str, holder: Holder, ttl: float) -> dict[str, Any]:
        """Return a lease as it would be if it were free; ``since_us`` would be its token."""
        return self._wanted(name, holder, ttl)

    def take_free(self, db: Connection, wish: dict[str, Any]) -> bool:
        """Grant what was wished for, if it is free and its last token is lower."""
        return db.execute(_GRANT_FREE, wish).rowcount == 1

    def extend(self, db: Connection, name: str, nonce: str, token: int, ttl: float) -> bool:
        """Move the end of a lease; say whether it was still ours to move."""
        return self._move_end(db, name, nonce, token, ttl) == 1

    def end(self, db: Connection, name: str, nonce: str) -> bool:
        """Give a lease back; say whether it was ours."""
        values = {"namespace": self._namespace, "name": name, "nonce": nonce, "token": None}
        return db.execute(_RELEASE, values).rowcount == 1

    def revoke(self, db: Connection, name: str, nonce: str, operator: str, reason: str) -> int:
        """Take a lease from the holder of ``nonce``; return the token from then on, or 0."""
        row = self._find(db, name)
        ours = row is not None and row.record.holder.nonce == nonce
        return self._take_away(db, name, row.record.token, reason, operator) if row and ours else 0

    def gave(self, name: str, nonce: str, *, wake: bool) -> None:
        """Need our pulse no more for this nonce; wake who waits for a lease that is free now."""
        self._pulse.leases.discard(nonce)
        if wake:
            self._wake(name)

    # Facts.

    def _find(self, db: Connection, name: str) -> Row | None:
        values = {"namespace": self._namespace, "name": name}
        columns = db.execute(_FIND, values).fetchone()
        return None if columns is None else _row(columns)

    def _loss(self, name: str, nonce: str, token: int) -> LeaseLost:
        row = self._file.read(lambda db: self._find(db, name))
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
        """Make the file ready for this version on this machine, or refuse it."""
        if not self._private:
            os.makedirs(self._folder, exist_ok=True)
        clocks = self._world.clocks
        if not is_ready(db, era=clocks.era() or "", time_namespace=clocks.namespace()):
            db.execute("BEGIN IMMEDIATE")
            prepare(db, era=clocks.era() or "", time_namespace=clocks.namespace())
            self._sweep(db)
            db.execute("COMMIT")

    def _sweep(self, db: Connection) -> None:
        """Remove what the dead left behind, except for what leases lean on."""
        if not self._private:
            leaned_on = db.execute("SELECT pulse FROM fencepost_lease WHERE held").fetchall()
            self._pulse.sweep(keep={pulse for (pulse,) in leaned_on})


def _us(seconds: float) -> int:
    return int(seconds * 1e6)
