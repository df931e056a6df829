"""Leases in one SQLite file: any number of processes of one machine, no server.

The clock is the kernel's boot-time clock, which all processes share; a lease carries the boot id it
was granted under, so a restart frees everything and a stepping wall clock frees nothing. Which
commits must survive a power cut is in docs/decisions/0004-durability.md: none but breaks, because a
power cut changes the boot id and frees everything, and because tokens are reserved ahead.
"""

from __future__ import annotations

import os

from fencepost.errors import BadUrl, FencepostError, LeaseLost, Misuse, StoreUnavailable, TokenStale
from fencepost.model.divided import in_place_of, is_mark
from fencepost.model.lease import (
    DRIFT,
    LONGEST_TTL,
    MARGIN,
    MARK,
    SHORTEST_TTL,
    Grant,
    Holder,
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
from fencepost.stores import sqlite_rows as sql
from fencepost.stores.api import Capabilities
from fencepost.stores.sqlite_handover import RELEASE, HandOver, SqlitePlace
from fencepost.stores.sqlite_inner import SqliteInner
from fencepost.stores.sqlite_reserve import TokenReserve
from fencepost.stores.sqlite_schema import is_ready, prepare
from fencepost.world import seat
from fencepost.world.disk import refuse_shared
from fencepost.world.line import Line
from fencepost.world.pulse import Pulse
from fencepost.world.sqlite import SqliteFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sqlite3 import Connection
    from typing import Any

    from fencepost.model.symptom import Symptom
    from fencepost.world.api import World

_MOST_LINES = 1000  # that are kept in mind
# Each race that is lost was won by somebody: this many in a row means that something is wrong.
_MOST_RACES = 100


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


class SqliteStore(SqliteInner):
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
        self._lines: dict[str, Line] = {}
        self.reserve = TokenReserve(self._file, world.clocks)
        self._hand = HandOver(world, self._file, namespace=namespace, reserve=self.reserve)
        self.capabilities = Capabilities(
            keeps_time=world.clocks.era() is not None,
            durable=not self._private,
            notices_death=not self._private and self._pulse.possible,
            shared=not self._private,
            failover_safe=not self._private,
            fair=not self._private and seat.can_queue(),
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
        if name not in self._lines:  # where it was put in good form
            name = well_formed(name)
        await self._world.call(self._release, name, nonce, token)

    async def peek(self, name: str) -> View | None:
        """Return who has it, and whether they still live."""
        return await self._world.call(self._peek, well_formed(name))

    async def views(self) -> list[View]:
        """Return every lease of this namespace."""
        return await self._world.call(self._views)

    async def break_(self, name: str, *, token: int, reason: str, operator: str) -> int:
        """Take the lease away and leave a record of it."""
        return await self._world.call(self._break, well_formed(name), token, reason, operator)

    async def line(self, name: str) -> SqlitePlace | None:
        """Stand in line, where there are named pipes to do it with."""
        if not self.capabilities.fair:
            return None
        if not seat.has_spare(self._folder):
            await self._world.call(self._tidy)
        try:
            return await SqlitePlace.joined(self._world, self._line(name), self._hand)
        except OSError:
            return None  # no room, no right, no descriptor: who cannot stand in line asks again

    async def examine(self) -> list[Symptom]:
        """Say what would break the promises of this file where it lies."""
        from fencepost.stores.sqlite_examined import examined  # nobody else needs it

        return await self._world.call(examined, self._file, self.capabilities, self._world.clocks)

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
        self.reserve.ahead()
        durable = not self.reserve.possible
        for _ in range(_MOST_RACES):
            grant = self._file.write_one(
                lambda db: self._ask(db, name, holder, ttl), durable=durable
            )
            if grant is not None:
                if not durable and not self.reserve.covers(grant.token):
                    self._file.sync()  # a clock that was set back: its token is far ahead of it
                if not is_mark(holder):
                    self._pulse.leases.add(holder.nonce)
                return grant
        raise StoreUnavailable(f"lease {name!r} changed hands too often while it was asked for")

    def _ask(self, db: Connection, name: str, holder: Holder, ttl: float) -> Grant | None:
        """Take the lease if it is free, else read, decide, compare and set.

        None if it changed between the decision and the grant: then it is asked for again.
        """
        lease = self._wished(name, holder, ttl)
        if db.execute(sql.GRANT_FREE, lease).rowcount:
            return Grant(lease[0], ttl)
        wanted: dict[str, Any] = dict(zip(sql.NUMBERED, lease, strict=True))
        row = self._find(db, name)
        if row is None:
            return self._grant_first(db, wanted, ttl)
        record = row.record
        now, era = self._now()
        verdict = judge(record, nonce=holder.nonce, now=now, era=era)
        if verdict is Verdict.OURS:
            return self._adopt(db, wanted, record.token, ttl)
        if verdict is Verdict.SPENT:
            raise LeaseLost(name, token=record.token, reason="this nonce has given it back")
        proof = None
        if verdict is Verdict.HELD and not self._watch.long_enough(record, now=now, era=era):
            proof = None if self._private else self._pulse.claim(row.pulse, row.pulse_inode)
            if proof is None:
                raise refusal(record, expires_in=left(record, now=now, era=era))
        wanted |= {"seen_held": record.held, "seen_beat": record.beat}
        if verdict is Verdict.DIVIDED:
            wanted["pid"] = in_place_of(record.holder, holder).pid
        try:
            grant = self._grant(db, sql.GRANT_AGAIN, wanted, ttl, highest=record.token)
        finally:
            if proof is not None:
                os.close(proof)  # only now: who was handed the lease could take it otherwise
        if grant is not None and proof is not None:
            self._sweep(db)
        return grant

    def _wished(self, name: str, holder: Holder, ttl: float) -> tuple[Any, ...]:
        """Return a lease as it would be if it were free, by number; the first is its token."""
        nonce, *who = holder
        since_us, *times, pulse, pulse_inode = self.terms(nonce, ttl)
        return (since_us, nonce, *times, *who, pulse, pulse_inode, self._namespace, name)

    def terms(self, nonce: str, ttl: float) -> tuple[int, str, int, int, str, str]:
        """Return a token, and until when and by which pulse its lease would be held: from now."""
        # The pulse must beat before anybody can read a row that leans on it.
        alone = self._private or nonce.startswith(MARK)
        pulse, pulse_inode = ("", "") if alone else self._pulse.beat(nonce)
        clocks, ttl_us = self._world.clocks, int(ttl * 1e6)
        ends_us = int(clocks.boottime() * 1e6) + ttl_us
        since_us = int(clocks.wall() * 1e6)
        return since_us, clocks.era() or "", ends_us, ttl_us, pulse, pulse_inode

    def _adopt(
        self, db: Connection, wanted: dict[str, Any], token: int, ttl: float
    ) -> Grant | None:
        """Have what we were granted, or handed, lean on the pulse of this process from now on."""
        moved = db.execute(sql.ADOPT, wanted | {"token": token, "now_us": sql.us(self._now()[0])})
        return Grant(token, ttl, adopted=True) if moved.rowcount else None

    def _grant_first(self, db: Connection, wanted: dict[str, Any], ttl: float) -> Grant | None:
        found = db.execute(sql.FIND_DELETED).fetchone()
        if found is None:
            raise Misuse(
                f"{self._file.path!r} has lost its row in fencepost_file: restart to mend it"
            )
        return self._grant(db, sql.GRANT_FIRST, wanted, ttl, highest=found[0])

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

    def _move_end(
        self,
        db: Connection,
        name: str,
        nonce: str,
        token: int,
        ttl: float,
        *,
        statement: str = sql.RENEW,
    ) -> int:
        now, era = self._now()
        return db.execute(
            statement,
            {
                "namespace": self._namespace,
                "name": name,
                "nonce": nonce,
                "token": token,
                "boot_id": era,
                "now_us": sql.us(now),
                "ttl_us": sql.us(ttl),
            },
        ).rowcount

    def _release(self, name: str, nonce: str, token: int | None) -> None:
        line = None
        if self.capabilities.fair:
            line = self._lines.get(name) or self._line(name)
        called = None
        if line is not None and token is not None and self._hand.possible:
            called = line.call()
        if line is not None and token is not None and called is not None:
            changed = self._hand.give(line, called, name, nonce, token)
            line = None  # it was told
        else:
            values = (self._namespace, name, nonce, token)
            changed = bool(self._file.write_one(lambda db: db.execute(RELEASE, values).rowcount))
        self._pulse.leases.discard(nonce)
        seat.let_go(nonce)
        if changed:
            if line is not None and line.anybody():
                line.wake()
            return
        row = self._file.read(lambda db: self._find(db, name))
        if row is not None and self._hand.was_given(nonce, to=row.record.holder.nonce):
            return
        if row is None or row.record.holder.nonce != nonce or row.record.held:
            raise self._loss(name, nonce, token or 0)

    def _peek(self, name: str) -> View | None:
        row = self._file.read(lambda db: self._find(db, name))
        return None if row is None else self._view(row)

    def _views(self) -> list[View]:
        values = {"namespace": self._namespace}
        rows = self._file.read(lambda db: db.execute(sql.FIND_ALL, values).fetchall())
        return [self._view(sql.row_of(columns)) for columns in rows]

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
        if not self._private:
            self._pulse.warn(row.pulse)
        wall_us = sql.us(self._world.clocks.wall())
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
        db.execute(sql.BREAK, values)
        db.execute(sql.RECORD_BREAK, values)
        return fresh

    def _close(self) -> None:
        self._file.close()
        self._pulse.end()
        seat.put_away(self._folder)

    # Facts.

    def _find(self, db: Connection, name: str) -> sql.Row | None:
        values = {"namespace": self._namespace, "name": name}
        columns = db.execute(sql.FIND, values).fetchone()
        return None if columns is None else sql.row_of(columns)

    def _loss(self, name: str, nonce: str, token: int) -> LeaseLost:
        row = self._file.read(lambda db: self._find(db, name))
        now, era = self._now()
        record = None if row is None else row.record
        reason = why_lost(record, nonce=nonce, token=token, now=now, era=era)
        return LeaseLost(name, token=token, reason=reason or "it was renewed too late")

    def _view(self, row: sql.Row) -> View:
        now, era = self._now()
        record = row.record
        remains = left(record, now=now, era=era)
        held = record.held and remains > 0
        held = held and not self._watch.long_enough(record, now=now, era=era)
        gone = held and self._gone(row)
        alive = not gone if self.capabilities.notices_death else None
        return view(record, held=held, expires_in=remains, alive=alive)

    def _gone(self, row: sql.Row) -> bool:
        return not self._private and self._pulse.stopped(row.pulse, row.pulse_inode)

    def _now(self) -> tuple[float, str]:
        clocks = self._world.clocks
        return clocks.boottime(), clocks.era() or ""

    def _line(self, name: str) -> Line:
        line = self._lines.get(name)
        if line is None:
            if len(self._lines) >= _MOST_LINES:
                self._lines.clear()
            line = self._lines[name] = Line(self._folder, namespace=self._namespace, name=name)
        return line

    def anybody_waits(self) -> bool:
        """Say whether anybody waits for any lease at all."""
        return self.capabilities.fair and self._line("").anybody()

    def _wake(self, name: str) -> None:
        if self.capabilities.fair:
            self._line(name).wake()

    # The file.

    def _set_up(self, db: Connection) -> None:
        """Make the file ready for this version on this machine, or refuse it."""
        if not self._private:
            os.makedirs(self._folder, exist_ok=True)
            self._hand.set_up(db)
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
            keep = {pulse for (pulse,) in leaned_on}
            self._pulse.sweep(keep=keep)
            if self.capabilities.fair:
                seat.sweep(self._folder, keep=keep)

    def _tidy(self) -> None:
        """Make room for a seat in line. Nobody depends on it."""
        try:
            self._file.read(self._sweep)
        except FencepostError:
            return
