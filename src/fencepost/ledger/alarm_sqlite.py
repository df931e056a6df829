"""Alarms in the ledger's file: a claim of what is due and its leases are one transaction.

Sets, clears and ends must survive a power cut. A claim need not: what it leads to is committed by
its end, and an alarm whose claim was forgotten is due as before. While nothing is due and nobody
has died, to look costs one statement that reads.
"""

from __future__ import annotations

import os

from fencepost.ledger import alarm_sqlite_rows as sql, alarm_verbs as verbs
from fencepost.ledger.sqlite_testimony import untold
from fencepost.model.alarm import AlarmState, Batch, NextDue
from fencepost.model.lease import DRIFT, MARGIN
from fencepost.world.sqlite import PATIENCE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from sqlite3 import Connection
    from typing import Any, TypeVar

    from fencepost.ledger.sqlite import SqliteLedger
    from fencepost.model.alarm import (
        AlarmEnd,
        AlarmRecord,
        AlarmWant,
        Failure,
        Firing,
        Rearm,
        Setting,
    )
    from fencepost.model.claim import Standing
    from fencepost.model.lease import Grant, Holder
    from fencepost.model.witnessed import Commit
    from fencepost.stores.sqlite_inner import Seen
    from fencepost.world.api import World

    T = TypeVar("T")


class SqliteAlarmDesk:
    """An open transaction. ``proofs`` of deaths are for whoever opened it to close after it."""

    def __init__(
        self, db: Connection, ledger: SqliteLedger, proofs: list[int], *, now: float
    ) -> None:
        self.db, self.now = db, now
        self._books, self._leases, self._proofs = ledger.books, ledger.leases, proofs
        self._namespace = ledger.leases.namespace
        self._seen: dict[str, Seen] = {}

    def find(self, kind: str, key: str, *, lease: str = "") -> AlarmRecord | None:
        """Return an alarm, or its tombstone."""
        del lease  # it is dropped unseen
        row = self.db.execute(sql.FIND, (self._namespace, kind, key)).fetchone()
        return None if row is None else sql.alarm_of(row)

    def floor(self) -> int:
        """Return what the generation of an alarm must be above that was not found."""
        return self._leases.deleted(self.db)

    def firing(self, want: AlarmWant) -> list[AlarmRecord]:
        """Return what this request has claimed before; to sweep, all that fire."""
        return [
            sql.alarm_of(row)
            for kind in sorted(want.policies)
            for row in self.db.execute(
                sql.FIND_FIRING, (self._namespace, kind, want.sweep, want.holder.nonce)
            ).fetchall()
        ]

    def due(self, want: AlarmWant) -> list[AlarmRecord]:
        """Return the first that are due of each kind."""
        return [
            sql.alarm_of(row)
            for kind in want.policies
            for row in self.db.execute(
                sql.FIND_DUE, (self._namespace, kind, self.now, want.limit + 1)
            ).fetchall()
        ]

    def put(self, record: AlarmRecord) -> AlarmRecord:
        """Keep an alarm as it is now."""
        self.db.execute(sql.PUT, (self._namespace, *sql.row_of(record)))
        return record

    def let_go(self, record: AlarmRecord) -> None:
        """Forget an alarm: the file remembers the highest generation."""
        self.db.execute(sql.DELETE, (self._namespace, record.kind, record.key))

    def standing(self, name: str) -> Standing:
        """Return how a lease stands."""
        standing, self._seen[name] = self._books.standing(self.db, name, self._proofs)
        return standing

    def give(self, name: str, holder: Holder, ttl: float, *, above: int) -> Grant:
        """Grant a lease that was seen to be free."""
        return self._leases.give(self.db, name, holder, ttl, seen=self._seen[name], above=above)

    def extend(self, name: str, nonce: str, token: int, ttl: float) -> bool:
        """Move the end of a lease; say whether it was still this nonce's."""
        return self._leases.extend(self.db, name, nonce, token, ttl)

    def drop(self, name: str, nonce: str) -> None:
        """Forget a lease, if this nonce has it."""
        self._leases.drop(self.db, name, nonce)


class SqliteAlarms:
    """Alarms in the rows of one file."""

    def __init__(self, world: World, ledger: SqliteLedger) -> None:
        self._world, self._ledger, self._leases = world, ledger, ledger.leases
        self._settles = bool(ledger.abilities.settles)
        self._namespace = ledger.leases.namespace
        self._clock = ledger.books.clock

    async def set(self, setting: Setting) -> AlarmRecord:
        """Set an alarm, in place of what there was."""
        return await self._world.call(self._write, lambda desk: verbs.set_(desk, setting))

    async def clear(
        self, kind: str, key: str, *, keep: float = 0.0, if_generation: int | None = None
    ) -> AlarmRecord | None:
        """Clear an alarm and return the tombstone."""
        return await self._world.call(
            self._write,
            lambda desk: verbs.clear(desk, kind, key, keep=keep, if_generation=if_generation),
        )

    async def get(self, kind: str, key: str) -> AlarmRecord | None:
        """Return an alarm, or its tombstone."""
        return await self._world.call(self._look, lambda desk: desk.find(kind, key))

    async def listed(
        self, kind: str | None = None, *, states: Sequence[AlarmState] = (), limit: int = 100
    ) -> list[AlarmRecord]:
        """Return alarms by kind and key."""
        return await self._world.call(self._list, kind, states, limit)

    async def next_due(self, kinds: Sequence[str]) -> NextDue:
        """Say when one of these kinds is due next."""
        if not kinds:
            return NextDue()
        return await self._world.call(self._look, lambda desk: self._next_due(desk, kinds))

    async def claim_due(self, want: AlarmWant) -> Batch:
        """Claim what is due, all in one transaction."""
        return await self._world.call(self._claim_due, want)

    async def beat(self, firing: Firing, *, ttl: float) -> bool:
        """Renew the lease of a handler; say whether a newer generation is there."""
        patience = min(DRIFT * ttl + 0.6 * MARGIN, 0.25)  # as short as a renewal's

        def work(desk: SqliteAlarmDesk) -> bool:
            return verbs.beat(desk, firing, ttl=ttl)

        return await self._world.call(self._write, work, False, patience, untold)  # noqa: FBT003 -- a door takes arguments by position

    async def finish(self, firing: Firing, rearm: Rearm | None = None) -> AlarmEnd:
        """Commit a handler's success, and release its lease."""
        return await self._world.call(
            self._end, firing, lambda desk: verbs.finish(desk, firing, rearm)
        )

    async def fail(self, firing: Firing, failure: Failure) -> AlarmEnd:
        """Record a handler's failure, and release its lease."""
        return await self._world.call(
            self._end, firing, lambda desk: verbs.fail(desk, firing, failure)
        )

    async def prune(self, *, limit: int = 1000) -> int:
        """Delete tombstones that were kept for long enough."""

        def work(desk: SqliteAlarmDesk) -> int:
            self._ledger.refuse_doubtful(desk.db)  # this would set its count ahead
            if self._clock.look(desk.db):
                return 0
            values = (self._namespace, desk.now, limit)
            gone = list(map(sql.alarm_of, desk.db.execute(sql.FIND_PRUNABLE, values).fetchall()))
            for record in gone:
                desk.drop(record.lease, record.holder.nonce)
                desk.let_go(record)
            return len(gone)

        return await self._world.call(self._write, work, False)  # noqa: FBT003 -- as above

    # What runs behind the door.

    def _write(
        self,
        work: Callable[[SqliteAlarmDesk], T],
        durable: bool = True,  # noqa: FBT001, FBT002 -- as above
        patience: float = PATIENCE,
        vouch: Callable[[T], Commit | None] | None = None,
    ) -> T:
        proofs: list[int] = []
        try:
            return self._ledger.written(
                lambda db: work(self._desk(db, proofs)), durable, patience, vouch
            )
        finally:
            _close(proofs)  # only now, as for a run

    def _look(self, work: Callable[[SqliteAlarmDesk], T]) -> T:
        proofs: list[int] = []
        try:
            return self._ledger.read(lambda db: work(self._desk(db, proofs)))
        finally:
            _close(proofs)

    def _desk(self, db: Connection, proofs: list[int]) -> SqliteAlarmDesk:
        return SqliteAlarmDesk(db, self._ledger, proofs, now=self._clock.now(db))

    def _list(
        self, kind: str | None, states: Sequence[AlarmState], limit: int
    ) -> list[AlarmRecord]:
        if tuple(states) == (AlarmState.DEAD,):  # they have an index, and are few
            rows = self._rows(sql.FIND_DEAD, (self._namespace,))
            dead = [record for record in map(sql.alarm_of, rows) if kind in (None, record.kind)]
            return sorted(dead, key=lambda record: record[:2])[:limit]
        statement = sql.listing(of_kind=kind is not None, states=len(states))
        of_kind = () if kind is None else (kind,)
        values = (self._namespace, *of_kind, *(state.value for state in states), limit)
        return [sql.alarm_of(row) for row in self._rows(statement, values)]

    def _rows(self, statement: str, values: tuple[object, ...]) -> list[tuple[Any, ...]]:
        return self._ledger.read(lambda db: db.execute(statement, values).fetchall())

    def _next_due(self, desk: SqliteAlarmDesk, kinds: Sequence[str]) -> NextDue:
        values = (*kinds, self._namespace)
        wake_at, firing = desk.db.execute(sql.next_due(len(kinds)), values).fetchone()
        if wake_at is None:
            return NextDue(None, bool(firing))
        return NextDue(max(0.0, wake_at - desk.now), bool(firing))

    def _claim_due(self, want: AlarmWant) -> Batch:
        if not want.policies or not self._look(lambda desk: self._worthwhile(desk, want)):
            return Batch()

        def work(desk: SqliteAlarmDesk) -> Batch:
            self._ledger.refuse_doubtful(desk.db)
            if self._clock.look(desk.db):
                return Batch()  # what is due is for those to say who know it
            batch = verbs.claim(desk, want)
            if batch.lost:
                self._leases.sweep(desk.db)
            return batch

        if self._settles:
            self._leases.reserve.ahead()
        batch = self._write(work, not self._settles)
        tokens = [one.record.token for one in batch.claimed]
        if tokens:
            if self._settles and not self._leases.reserve.covers(max(tokens)):
                self._leases.file.sync()
            self._leases.pulse.leases.update(one.record.holder.nonce for one in batch.claimed)
        return batch

    def _worthwhile(self, desk: SqliteAlarmDesk, want: AlarmWant) -> bool:
        """Say whether a claim could find anything, without keeping others from writing."""
        within, firing = self._next_due(desk, tuple(want.policies))
        if within == 0.0 or not firing:
            return within == 0.0
        return any(
            record.batch == want.holder.nonce or not verbs.lives(desk, record)
            for record in desk.firing(want)
        )

    def _end(self, firing: Firing, work: Callable[[SqliteAlarmDesk], AlarmEnd]) -> AlarmEnd:
        def known(desk: SqliteAlarmDesk) -> AlarmEnd:
            self._ledger.refuse_doubtful(desk.db)  # this would set its count ahead
            return work(desk)

        end = self._write(known)
        self._leases.gave(firing.lease, firing.nonce, wake=False)
        return end


def _close(proofs: list[int]) -> None:
    for proof in proofs:
        os.close(proof)
