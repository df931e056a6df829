"""Alarms in the ledger's file: a claim of what is due and its leases are one transaction.

Sets, clears and ends must survive a power cut. A claim need not: what it leads to is committed by
its end, and an alarm whose claim was forgotten is due as before. While nothing is due and nobody
has died, to look costs one statement that reads.
"""

from __future__ import annotations

import os

from fencepost.errors import LeaseLost
from fencepost.ledger import alarm_sqlite_rows as sql, sqlite_clock as clock
from fencepost.model.alarm import (
    AlarmEnd,
    AlarmRecord,
    AlarmState,
    Batch,
    Became,
    ClaimedAlarm,
    NextDue,
    busy_record,
    chosen,
    claimed_record,
    cleared_record,
    failed,
    finished,
    lost_record,
    refuse_changed,
    set_record,
)
from fencepost.model.lease import DRIFT, MARGIN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from sqlite3 import Connection

    from fencepost.ledger.sqlite import SqliteLedger
    from fencepost.model.alarm import AlarmWant, Failure, Firing, Rearm, Setting
    from fencepost.world.api import World


class SqliteAlarms:
    """Alarms in the rows of one file."""

    def __init__(self, world: World, ledger: SqliteLedger) -> None:
        self._world, self._ledger, self._leases = world, ledger, ledger.leases
        self._written, self._read = ledger.written, ledger.read
        self._settles = bool(ledger.abilities.settles)
        self._namespace = ledger.leases.namespace

    async def set(self, setting: Setting) -> AlarmRecord:
        """Set an alarm, in place of what there was."""

        def work(db: Connection) -> AlarmRecord:
            known, now = self._find(db, setting.kind, setting.key), self._world.clocks.wall()
            floor = self._leases.deleted(db) if known is None else 0
            return self._put(db, set_record(known, setting, floor=floor, now=now))

        record: AlarmRecord = await self._world.call(self._written, work)
        return record

    async def clear(
        self, kind: str, key: str, *, keep: float = 0.0, if_generation: int | None = None
    ) -> AlarmRecord | None:
        """Clear an alarm and return the tombstone."""

        def work(db: Connection) -> AlarmRecord | None:
            known = self._find(db, kind, key)
            refuse_changed(kind, key, known, expected=if_generation)
            if known is None:
                return None
            now = self._world.clocks.wall()
            return self._put(db, cleared_record(known, keep=keep, now=now))

        found: AlarmRecord | None = await self._world.call(self._written, work)
        return found

    async def get(self, kind: str, key: str) -> AlarmRecord | None:
        """Return an alarm, or its tombstone."""
        found: AlarmRecord | None = await self._world.call(
            self._read, lambda db: self._find(db, kind, key)
        )
        return found

    async def listed(
        self, kind: str | None = None, *, states: Sequence[AlarmState] = (), limit: int = 100
    ) -> list[AlarmRecord]:
        """Return alarms by kind and key."""
        return await self._world.call(self._list, kind, states, limit)

    async def next_due(self, kinds: Sequence[str]) -> NextDue:
        """Say when one of these kinds is due next."""
        if not kinds:
            return NextDue()
        found: NextDue = await self._world.call(self._read, lambda db: self._next_due(db, kinds))
        return found

    async def claim_due(self, want: AlarmWant) -> Batch:
        """Claim what is due, all in one transaction."""
        return await self._world.call(self._claim_due, want)

    async def beat(self, firing: Firing, *, ttl: float) -> bool:
        """Renew the lease of a handler; say whether a newer generation is there."""
        patience = min(DRIFT * ttl + 0.6 * MARGIN, 0.25)  # as short as a renewal's

        def work(db: Connection) -> bool:
            row = db.execute(sql.HAS, (self._namespace, *firing[:5])).fetchone()
            ours = row is not None
            if not ours or not self._leases.extend(
                db, firing.lease, firing.nonce, firing.token, ttl
            ):
                reason = "it ran out" if ours else "the alarm is no longer this handler's"
                raise LeaseLost(firing.lease, token=firing.token, reason=reason)
            return bool(row[0] != firing.generation)

        newer: bool = await self._world.call(self._written, work, False, patience)  # noqa: FBT003 -- a door takes arguments by position
        return newer

    async def finish(self, firing: Firing, rearm: Rearm | None = None) -> AlarmEnd:
        """Commit a handler's success, and release its lease."""
        return await self._world.call(
            self._end, firing, lambda record, now: finished(record, firing, rearm, now=now)
        )

    async def fail(self, firing: Firing, failure: Failure) -> AlarmEnd:
        """Record a handler's failure, and release its lease."""
        return await self._world.call(
            self._end, firing, lambda record, now: failed(record, firing, failure, now=now)
        )

    async def prune(self, *, limit: int = 1000) -> int:
        """Delete tombstones that were kept for long enough."""

        def work(db: Connection) -> int:
            if clock.agreed(db, self._world.clocks):
                return 0
            values = (self._namespace, self._world.clocks.wall(), limit)
            gone = list(map(sql.alarm_of, db.execute(sql.FIND_PRUNABLE, values).fetchall()))
            for record in gone:
                self._leases.drop(db, record.lease, record.holder.nonce)
                db.execute(sql.DELETE, (self._namespace, record.kind, record.key))
            return len(gone)

        count: int = await self._world.call(self._written, work, False)  # noqa: FBT003 -- as above
        return count

    # What runs behind the door.

    def _list(
        self, kind: str | None, states: Sequence[AlarmState], limit: int
    ) -> list[AlarmRecord]:
        if tuple(states) == (AlarmState.DEAD,):  # they have an index, and are few
            rows = self._read(lambda db: db.execute(sql.FIND_DEAD, (self._namespace,)).fetchall())
            dead = [record for record in map(sql.alarm_of, rows) if kind in (None, record.kind)]
            return sorted(dead, key=lambda record: record[:2])[:limit]
        statement = sql.listing(of_kind=kind is not None, states=len(states))
        of_kind = () if kind is None else (kind,)
        values = (self._namespace, *of_kind, *(state.value for state in states), limit)
        rows = self._read(lambda db: db.execute(statement, values).fetchall())
        return [sql.alarm_of(row) for row in rows]

    def _next_due(self, db: Connection, kinds: Sequence[str]) -> NextDue:
        values = (*kinds, self._namespace)
        wake_at, firing = db.execute(sql.next_due(len(kinds)), values).fetchone()
        if wake_at is None:
            return NextDue(None, bool(firing))
        within = wake_at - self._world.clocks.wall()
        if within <= 0.0:  # unless it is our clock that is early
            within += clock.off_by(db, self._world.clocks)
        return NextDue(max(0.0, within), bool(firing))

    def _claim_due(self, want: AlarmWant) -> Batch:
        if not want.policies or not self._read(lambda db: self._worthwhile(db, want)):
            return Batch()
        proofs: list[int] = []

        def work(db: Connection) -> Batch:
            self._ledger.refuse_doubtful(db)
            if clock.agreed(db, self._world.clocks):  # what is due is for those to say who know it
                return Batch()
            return self._claim(db, want, proofs)

        if self._settles:
            self._leases.reserve.ahead()
        try:
            batch: Batch = self._written(work, not self._settles)
        finally:
            for proof in proofs:  # only now, as for a run
                os.close(proof)
        tokens = [one.record.token for one in batch.claimed]
        if tokens:
            if self._settles and not self._leases.reserve.covers(max(tokens)):
                self._leases.file.sync()
            self._leases.pulse.leases.update(one.record.holder.nonce for one in batch.claimed)
            self._ledger.testify(max(tokens))
        return batch

    def _worthwhile(self, db: Connection, want: AlarmWant) -> bool:
        """Say whether a claim could find anything, without keeping others from writing."""
        within, firing = self._next_due(db, tuple(want.policies))
        if within == 0.0:
            return True
        if not firing:
            return False
        proofs: list[int] = []
        try:
            return any(
                record.batch == want.holder.nonce
                or (want.sweep and not self._alive(db, record, proofs))
                for record in self._firing(db, want)
            )
        finally:
            for proof in proofs:
                os.close(proof)

    def _claim(self, db: Connection, want: AlarmWant, proofs: list[int]) -> Batch:
        now, adopted = self._world.clocks.wall(), self._adopted(db, want, proofs)
        if adopted:
            return Batch(tuple(adopted))
        dead, lost = [], 0
        if want.sweep:
            for record in self._firing(db, want):
                if not self._alive(db, record, proofs):
                    lost += 1
                    settled = lost_record(record, want.policies[record.kind], now=now)
                    self._leases.drop(db, record.lease, record.holder.nonce)
                    self._put(db, settled)
                    if settled.state is AlarmState.DEAD:
                        dead.append(settled)
            if lost:
                self._leases.sweep(db)
        due = self._due(db, want, now=now)
        taken = chosen(due, limit=want.limit, alone=want.alone, now=now)
        claimed: list[ClaimedAlarm] = []
        for record in taken:
            begun = self._begin(db, want, record, claimed, proofs, now=now)
            if begun.state is AlarmState.DEAD:
                dead.append(begun)
        return Batch(tuple(claimed), tuple(dead), lost, more=len(due) > len(taken))

    def _adopted(self, db: Connection, want: AlarmWant, proofs: list[int]) -> list[ClaimedAlarm]:
        """Return what this very request has claimed before, and its answer got lost."""
        found = []
        for kind, policy in want.policies.items():
            values = (self._namespace, kind, want.holder.nonce)
            for record in map(sql.alarm_of, db.execute(sql.FIND_CLAIMED, values).fetchall()):
                ours = self._alive(db, record, proofs) and self._leases.extend(
                    db, record.lease, record.holder.nonce, record.token, policy.lease
                )
                if ours:
                    found.append(ClaimedAlarm(record, policy.lease, adopted=True))
        return found

    def _begin(
        self,
        db: Connection,
        want: AlarmWant,
        record: AlarmRecord,
        claimed: list[ClaimedAlarm],
        proofs: list[int],
        *,
        now: float,
    ) -> AlarmRecord:
        """Claim one of the due, with a lease, or find why it cannot be."""
        policy = want.policies[record.kind]
        found = self._leases.look(db, record.lease, proofs=proofs)
        if found is not None and found[1].held:
            return self._put(db, busy_record(record, now=now))
        begun = claimed_record(record, policy, alone=want.alone, now=now)
        if begun.state is AlarmState.DEAD:
            return self._put(db, begun)
        seen = None if found is None else (found[0].token, int(found[0].held), found[0].beat)
        above = max(record.generation, record.token, *(one.record.token for one in claimed))
        holder = want.holder._replace(nonce=f"{want.holder.nonce}-{len(claimed)}")
        grant = self._leases.give(db, record.lease, holder, policy.lease, seen=seen, above=above)
        begun = begun._replace(token=grant.token, holder=holder, batch=want.holder.nonce)
        late = max(0.0, now - record.wake_at)
        claimed.append(ClaimedAlarm(begun, policy.lease, late, late > policy.grace))
        return self._put(db, begun)

    def _end(
        self, firing: Firing, decide: Callable[[AlarmRecord | None, float], AlarmEnd]
    ) -> AlarmEnd:
        def work(db: Connection) -> AlarmEnd:
            end = decide(self._find(db, firing.kind, firing.key), self._world.clocks.wall())
            if end.record is not None:
                self._put(db, end.record)
            elif end.became is Became.DONE:
                db.execute(sql.DELETE, (self._namespace, firing.kind, firing.key))
            self._leases.drop(db, firing.lease, firing.nonce)
            return end

        end: AlarmEnd = self._written(work)
        self._leases.gave(firing.lease, firing.nonce, wake=False)
        return end

    # Facts.

    def _find(self, db: Connection, kind: str, key: str) -> AlarmRecord | None:
        row = db.execute(sql.FIND, (self._namespace, kind, key)).fetchone()
        return None if row is None else sql.alarm_of(row)

    def _put(self, db: Connection, record: AlarmRecord) -> AlarmRecord:
        db.execute(sql.PUT, (self._namespace, *sql.row_of(record)))
        return record

    def _firing(self, db: Connection, want: AlarmWant) -> list[AlarmRecord]:
        return [
            sql.alarm_of(row)
            for kind in sorted(want.policies)
            for row in db.execute(sql.FIND_FIRING, (self._namespace, kind)).fetchall()
        ]

    def _due(self, db: Connection, want: AlarmWant, *, now: float) -> list[AlarmRecord]:
        return [
            sql.alarm_of(row)
            for kind in want.policies
            for row in db.execute(sql.FIND_DUE, (self._namespace, kind, now, want.limit + 1))
        ]

    def _alive(self, db: Connection, record: AlarmRecord, proofs: list[int]) -> bool:
        """Say whether the handler that has an alarm still holds its lease."""
        found = self._leases.look(db, record.lease, proofs=proofs)
        return found is not None and found[1].held and found[0].holder.nonce == record.holder.nonce
