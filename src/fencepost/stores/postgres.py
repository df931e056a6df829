"""Leases in the rows of a PostgreSQL table: any number of processes on any number of machines.

The server's clock decides, in the statement that grants. Where a session is our own, a lock that
it has vouches for the process: once it can be had the process is gone, or cut off, and the lease is
for others after a moment's grace. The holder believes in its lease for less than that after each
proof of it; if the next one is late it asks before it goes on. See
docs/decisions/0022-postgres-leases.md and 0044-a-late-lock-is-not-lost.md.
"""

from __future__ import annotations

from fencepost.errors import LeaseLost, StoreUnavailable, StoreUnfit, TokenStale
from fencepost.model.divided import in_place_of, is_mark
from fencepost.model.lease import (
    DRIFT,
    LONGEST_TTL,
    MARK,
    SHORTEST_TTL,
    Grant,
    Holder,
    Verdict,
    View,
    checked_ttl,
    judge,
    left,
    refusal,
    view,
    why_lost,
)
from fencepost.model.name import well_formed
from fencepost.stores import postgres_rows as sql
from fencepost.stores.api import Capabilities
from fencepost.stores.postgres_place import PostgresPlace, our_place
from fencepost.stores.postgres_runs import vouch
from fencepost.stores.postgres_schema import LEASE_STEPS, LEASES, bring_up_to_date
from fencepost.world.postgres import PATIENCE, Cut, Postgres, Refusal, ends_after, read_address
from fencepost.world.postgres_lean import LockLean
from fencepost.world.postgres_line import seats_at
from fencepost.world.postgres_pulse import GRACE, pulse_on

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from fencepost.model.symptom import Symptom
    from fencepost.world.api import World
    from fencepost.world.postgres import Address, Session, Statement
    from fencepost.world.postgres_line import Seat
    from fencepost.world.postgres_pulse import Pulse

# Each race that is lost was won by somebody: this many in a row means that something is wrong.
_MOST_RACES = 100
# What ends this soon by itself need not lean on a pulse.
_SHORT = 2 * GRACE
_MOST_LET_GO = 1000  # that are kept in mind
_LONGEST_RENEWAL, _BRIEF_RENEWAL = 1.0, 0.5


def open_postgres(world: World, address: str, *, namespace: str) -> PostgresStore:
    """Open ``postgresql://user@host:5432/database?schema=…&advisory=auto|on|off``."""
    return PostgresStore(world, read_address(address), namespace=namespace)


class PostgresStore:
    """Leases in one table of one database."""

    def __init__(self, world: World, address: Address, *, namespace: str = "default") -> None:
        self._world, self.namespace = world, namespace
        self.db = Postgres(address, set_up=self._set_up)
        self._pulse = pulse_on(address.attempts, schema=address.schema)
        self._seats = seats_at(address.attempts)
        self._places: set[PostgresPlace] = set()
        self._let_go: set[str] = set()  # leases that were released here, and not asked for since
        self._doubtful = False  # the last renewal was not answered

    @property
    def leans(self) -> bool:
        """Whether leases lean on a pulse here: asked for, or possible as far as is known."""
        return self.db.address.advisory != "off" and self.db.direct is not False

    @property
    def capabilities(self) -> Capabilities:
        """What this store can promise. Behind a pooler it learns with the first call that it is."""
        return Capabilities(
            keeps_time=True,
            durable=True,
            notices_death=self.leans,
            shared=True,
            failover_safe=False,
            fair=self.leans,
            shortest_ttl=SHORTEST_TTL,
            longest_ttl=LONGEST_TTL,
        )

    # The four verbs. Each is one round trip, unless something went wrong before.

    async def acquire(self, name: str, *, holder: Holder, ttl: float) -> Grant:
        """Grant the lease, adopt it, take it from the dead, or say who has it."""
        ttl, name = checked_ttl(ttl), well_formed(name)
        boottime = self._world.clocks.boottime
        began = boottime()
        for _ in range(_MOST_RACES):
            found = await self._world.call(self._ask, name, holder, ttl, self._called(name))
            if isinstance(found, Grant):
                return found
            if found is not None:
                # Its holder believes in it for less than its grace after its last proof, and that
                # came before this. If it lives it proves itself anew meanwhile.
                await self._world.sleep(found.grace * (1 + DRIFT))
                waited = boottime() - began
                taken = await self._world.call(self._take, name, holder, ttl, found)
                if taken is not None:
                    return taken._replace(ttl=taken.ttl + waited)  # the caller counts from before
        raise StoreUnavailable(f"lease {name!r} changed hands too often while it was asked for")

    async def renew(self, name: str, *, nonce: str, token: int, ttl: float) -> Grant:
        """Move the end of the lease, if it is still ours."""
        ttl, name = checked_ttl(ttl), well_formed(name)
        return await self._world.call(self._renew, name, nonce, token, ttl)

    async def release(self, name: str, *, nonce: str, token: int | None = None) -> None:
        """Give it back; the server wakes whoever is first in line."""
        await self._world.call(self._release, well_formed(name), nonce, token)

    async def peek(self, name: str) -> View | None:
        """Return who has it, and whether they still live."""
        row = await self._world.call(self._find, well_formed(name))
        return None if row is None else self._view(row)

    async def views(self) -> list[View]:
        """Return every lease of this namespace."""
        rows = await self._world.call(self._find_all)
        return [self._view(row) for row in rows]

    async def break_(self, name: str, *, token: int, reason: str, operator: str) -> int:
        """Take the lease away and leave a record of it."""
        return await self._world.call(self._break, well_formed(name), token, reason, operator)

    async def line(self, name: str) -> PostgresPlace | None:
        """Stand in the server's line; behind a pooler there is none."""
        name = well_formed(name)
        seat = await self._world.call(self._sit, name)
        if seat is None:
            return None
        gone = self._places.discard
        place = PostgresPlace(self._world, self._seats, seat, name=name, gone=gone)
        self._places.add(place)
        return place

    async def vouch(self) -> None:
        """Prove this process's pulse, for all of its leases at once."""
        await self._world.call(vouch, self)

    async def examine(self) -> list[Symptom]:
        """Say what on this server would break a promise."""
        from fencepost.stores.postgres_examine import examined

        return await self._world.call(examined, self.db, self._world.clocks.wall)

    @property
    def pulse_here(self) -> Pulse:
        """The pulse of this process, for the runs that the ledger grants."""
        return self._pulse

    @property
    def boottime(self) -> Callable[[], float]:
        """The clock by which this process believes in what it was granted."""
        return self._world.clocks.boottime

    def forget(self) -> None:
        """Drop what a fork carried over; the parent's sessions go on without us."""
        self.db.forget()
        self._places.clear()

    async def close(self) -> None:
        """Close what nobody waits with, and the pulse if no lease leans on it."""
        await self._world.call(self._close)

    # What runs behind the door.

    def _ask(
        self, name: str, holder: Holder, ttl: float, place: PostgresPlace | None
    ) -> Grant | sql.Row | None:
        """Return a grant; or a lease whose pulse is silent; or None after a lost race."""
        pulse = self._pulse_for(holder, ttl)
        sent = self._world.clocks.boottime()
        values = self._wished(name, holder, ttl, pulse)
        if place is not None and not place.called:
            place.called = True
            rows = self._on_seat(place.seat, sql.GRANT_IN_TURN, values)
            if rows:
                place.granted_to = holder.nonce
                return self._granted(name, holder.nonce, sent, rows[0], ttl, seat=place.seat)
        if place is None and name in self._let_go:  # nobody has come since, most likely
            self._let_go.discard(name)
            rows = self.db.ask(sql.GRANT_IN_TURN, values).rows
            if rows:
                return self._granted(name, holder.nonce, sent, rows[0], ttl)
        rows = self.db.ask(sql.GRANT, values).rows
        if not rows:
            return None  # it was granted for the first time just now, to somebody else
        *granted, seen = rows[0]
        if seen is not None:
            return self._refused(sql.row_seen(seen), holder, ttl, sent, pulse)
        seat = None
        if place is not None:
            place.granted_to, seat = holder.nonce, place.seat
        return self._granted(name, holder.nonce, sent, granted, ttl, seat=seat)

    def _refused(
        self, row: sql.Row, holder: Holder, ttl: float, sent: float, pulse: int
    ) -> Grant | sql.Row | None:
        """Decide what it means that a lease could not be granted at once."""
        record = row.record
        verdict = judge(record, nonce=holder.nonce, now=row.now, era=sql.ERA)
        if verdict is Verdict.FREE:
            return None  # it was free, and somebody else was faster
        if verdict is Verdict.SPENT:
            reason = "this nonce has given it back"
            raise LeaseLost(record.name, token=record.token, reason=reason)
        if verdict is Verdict.OURS:
            values = self._ours(record.name, holder.nonce, record.token)
            rows = self.db.ask(sql.ADOPT, values | self._terms(ttl, pulse)).rows
            if not rows:
                return None
            adopted = self._granted(record.name, holder.nonce, sent, rows[0], ttl)
            return adopted._replace(adopted=True)
        if verdict is Verdict.DIVIDED:
            mark = in_place_of(record.holder, holder)
            return self._take(record.name, mark, ttl, row, statement=sql.TAKE_PLACE)
        if row.set_back:
            self.db.ask(sql.CLAMP, {"key": self._key(record.name), "token": record.token})
        if row.silent:
            return row
        raise refusal(record, expires_in=left(record, now=row.now, era=sql.ERA))

    def _take(
        self,
        name: str,
        holder: Holder,
        ttl: float,
        seen: sql.Row,
        *,
        statement: Statement = sql.TAKE,
    ) -> Grant | None:
        """Take a lease from the dead, unless it has shown any sign of life since it was seen."""
        sent = self._world.clocks.boottime()
        wished = self._wished(name, holder, ttl, self._pulse_for(holder, ttl))
        record = seen.record
        rows = self.db.ask(
            statement, wished | {"seen_token": record.token, "seen_beat": record.beat}
        ).rows
        return self._granted(name, holder.nonce, sent, rows[0], ttl) if rows else None

    def _granted(
        self,
        name: str,
        nonce: str,
        sent: float,
        granted: Sequence[Any],
        ttl: float,
        *,
        seat: Seat | None = None,
    ) -> Grant:
        """Return a grant or a renewal, and what it leans on from now on."""
        token, pulse, grace_us = granted
        if seat is not None:
            seat.until = ends_after(ttl)
        grace = grace_us / 1e6  # as the row has it, for others go by that
        lean = self._lean_of(nonce)
        if lean is not None:
            lean.renewed(pulse, grace=grace, sent=sent)
        elif ttl > _SHORT and self.leans and not nonce.startswith(MARK):
            lean = LockLean(
                self._pulse.vouching,
                lease=self._key(name),
                nonce=nonce,
                token=token,
                on=pulse,
                grace=grace,
                sent=sent,
            )
            self._pulse.vouching.lean(lean)
        return Grant(token, ttl, lean=lean)

    def _lean_of(self, nonce: str) -> LockLean | None:
        lean = self._pulse.vouching.leans.get(nonce)
        return lean if isinstance(lean, LockLean) else None

    def _renew(self, name: str, nonce: str, token: int, ttl: float) -> Grant:
        sent = self._world.clocks.boottime()
        lean = self._lean_of(nonce)
        pulse = 0
        if lean is not None:  # else its holder proves none
            pulse = self.beat(ttl)
            lean.may_lean(pulse, sent=sent)
        ours = self._ours(name, nonce, token)
        rows = self._ask_in_time(sql.RENEW, ours | self._terms(ttl, pulse), ttl)
        if not rows:
            self._pulse.vouching.leans.pop(nonce, None)
            raise self._loss(name, nonce, token)
        self._seats.lasts(nonce, ends_after(ttl))
        return self._granted(name, nonce, sent, rows[0], ttl)

    def _ask_in_time(
        self, statement: Statement, values: dict[str, Any], ttl: float
    ) -> list[tuple[Any, ...]]:
        """Ask for a renewal, and give up in time for another try.

        The first may take long. After one that was not answered the others are briefer: one keeper
        renews all leases of a process, and has to tell of each loss in time. But not too brief
        to open a session anew.
        """
        patience = min(ttl / 6, _BRIEF_RENEWAL if self._doubtful else _LONGEST_RENEWAL)
        self._doubtful = True
        rows = self.db.ask(statement, values, patience=patience).rows
        self._doubtful = False
        return rows

    def _release(self, name: str, nonce: str, token: int | None) -> None:
        lean = self._pulse.vouching.leans.pop(nonce, None)
        if lean is not None and lean.on:  # what was late asks for more time the next time
            now = self._world.clocks.boottime()
            self._pulse.heed(now - lean.proven, now=now)
        values = {"key": self._key(name), "nonce": nonce, "token": token}
        seat = self._seats.kept(nonce)
        if seat is not None and not seat.broken:
            changed = self._release_in_turn(seat, values)
        else:
            changed = self.db.ask(sql.RELEASE, values).count
            if changed and len(self._let_go) < _MOST_LET_GO:
                self._let_go.add(name)
        if changed:
            return
        row = self._find(name)
        record = None if row is None else row.record
        if record is None or record.holder.nonce != nonce or record.held:
            raise self._loss(name, nonce, token or 0, found=row)
        if token is not None and record.token != token:
            raise self._loss(name, nonce, token, found=row)

    def _release_in_turn(self, seat: Seat, values: dict[str, Any]) -> int:
        """Release with the session that was served, which calls the next one as well."""
        rows = self._on_seat(seat, sql.RELEASE_IN_TURN, values | {"line": seat.line})
        seat.is_first = False
        self._seats.give_back(seat.session)
        return int(rows[0][0])

    def _on_seat(
        self, seat: Seat, statement: Statement, values: dict[str, Any]
    ) -> list[tuple[Any, ...]]:
        try:
            return seat.session.ask(statement, values, end=ends_after(PATIENCE)).rows
        except Refusal as refused:
            raise self.db.told(refused, changes=True) from refused
        except Cut as cut:
            raise self.db.told_of_cut(cut, changes=True) from cut
        except BaseException:  # a signal between question and answer: nobody must read the latter
            seat.session.close()
            raise

    def _break(self, name: str, token: int, reason: str, operator: str) -> int:
        key = self._key(name)
        values = {"key": key, "token": token, "operator": operator, "reason": reason}
        rows = self.db.ask(sql.BREAK, values).rows
        if not rows:
            row = self._find(name)
            raise TokenStale(name, token=token, highest=0 if row is None else row.record.token)
        return int(rows[0][0])

    def _sit(self, name: str) -> Seat | None:
        if not self._is_leaning():
            return None
        line = sql.line_key(self.db.address.schema, self.namespace, name)
        return self._seats.sit(self.db, line)

    def _close(self) -> None:
        self.db.close()
        self._seats.close()
        self._pulse.let_go()

    # Facts.

    def _find(self, name: str) -> sql.Row | None:
        rows = self.db.ask(sql.FIND, (self._key(name),), changes=False).rows
        return sql.row_of(rows[0]) if rows else None

    def _find_all(self) -> list[sql.Row]:
        rows = self.db.ask(sql.FIND_ALL, (self.namespace,), changes=False).rows
        return [sql.row_of(columns) for columns in rows]

    def _loss(
        self, name: str, nonce: str, token: int, *, found: sql.Row | None = None
    ) -> LeaseLost:
        row = found or self._find(name)
        record, now = (None, 0.0) if row is None else (row.record, row.now)
        reason = why_lost(record, nonce=nonce, token=token, now=now, era=sql.ERA)
        return LeaseLost(name, token=token, reason=reason or "it was renewed too late")

    def _view(self, row: sql.Row) -> View:
        remains = left(row.record, now=row.now, era=sql.ERA)
        held = row.record.held and remains > 0
        alive = None if row.silent is None else not row.silent
        return view(row.record, held=held, expires_in=remains, alive=alive)

    def _called(self, name: str) -> PostgresPlace | None:
        """Return the place at which whoever asks was waiting, if the server has called it."""
        place = our_place()
        if place is None or place not in self._places or place.name != name:
            return None
        return place if place.in_turn else None

    def _pulse_for(self, holder: Holder, ttl: float) -> int:
        """Return the pulse that a lease of this holder leans on; a mark leans on none."""
        return 0 if is_mark(holder) else self.beat(ttl)

    def beat(self, ttl: float) -> int:
        """Return the pulse that a lease of this ttl leans on; 0 if on none."""
        return self._pulse.beat(self.db) if ttl > _SHORT and self._is_leaning() else 0

    def _is_leaning(self) -> bool:
        if self.db.direct is None and self.db.address.advisory != "off":
            with self.db.session(changes=False):
                pass  # now it is known
        return self.leans

    def _wished(self, name: str, holder: Holder, ttl: float, pulse: int) -> dict[str, Any]:
        return {
            "key": self._key(name),
            "namespace": self.namespace,
            "name": name,
            "nonce": holder.nonce,
            "host": holder.host,
            "pid": holder.pid,
            "version": holder.version,
            **self._terms(ttl, pulse),
        }

    def _terms(self, ttl: float, pulse: int) -> dict[str, Any]:
        return {"ttl_us": sql.us(ttl), "pulse": pulse, "grace_us": sql.us(self._pulse.grace)}

    def _ours(self, name: str, nonce: str, token: int) -> dict[str, Any]:
        return {"key": self._key(name), "nonce": nonce, "token": token}

    def _key(self, name: str) -> bytes:
        return sql.lease_key(self.namespace, name)

    # The database.

    def _set_up(self, session: Session) -> None:
        """Make the database ready for this version, or refuse it."""
        if self.db.address.advisory == "on" and not session.direct:
            raise StoreUnfit(
                f"advisory=on needs sessions of its own, and at {self.db.where} there is a pooler "
                "in between: connect to PostgreSQL itself, or say advisory=off"
            )
        bring_up_to_date(session, self.db.address.schema, LEASES, LEASE_STEPS)
