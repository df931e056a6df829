"""Alarms in the ledger's database: a claim of what is due and its leases are one transaction.

While nothing is due and nobody has died, to look costs one statement that reads. Two who claim at
once have different alarms: each leaves to the other what that has locked.
"""

from __future__ import annotations

import itertools

from fencepost.errors import LeaseLost
from fencepost.ledger.draft_alarm_values import ALARM_WIDTH, alarm_of
from fencepost.ledger.draft_rousing import rouse
from fencepost.ledger.planning import ALARM, LOOK
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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import ModuleType
    from typing import Any

    from fencepost.ledger.draft import Draft
    from fencepost.ledger.draft_dialect import Step
    from fencepost.ledger.draft_ledger import DraftLedger
    from fencepost.model.alarm import AlarmWant, Failure, Firing, Rearm, Setting
    from fencepost.world.api import World

# Whoever sets many alarms that are due at once wakes others no more often than this, in seconds:
# commits that say something come one after the other, in the whole of a database.
_SELDOM = 0.05


class DraftAlarms:
    """Alarms in the rows of one database, which is told about them in the words of ``sql``."""

    def __init__(self, world: World, ledger: DraftLedger, sql: ModuleType) -> None:
        self._world, self._ledger, self._sql = world, ledger, sql
        self._namespace = ledger.namespace
        self._rouse_at = 0.0

    async def set(self, setting: Setting) -> AlarmRecord:
        """Set an alarm, in place of what there was."""

        def work(draft: Draft) -> AlarmRecord:
            shelf = _Shelf(draft, self._namespace, self._sql)
            known, floor = shelf.read_alone(setting.kind, setting.key)
            record = shelf.put(set_record(known, setting, floor=floor, now=draft.now))
            if record.wake_at <= draft.now + LOOK and self._may_rouse():
                rouse(draft, ALARM)
            return record

        return await self._world.call(self._ledger.drafted, work)

    async def clear(
        self, kind: str, key: str, *, keep: float = 0.0, if_generation: int | None = None
    ) -> AlarmRecord | None:
        """Clear an alarm and return the tombstone."""

        def work(draft: Draft) -> AlarmRecord | None:
            shelf = _Shelf(draft, self._namespace, self._sql)
            known, _ = shelf.read_alone(kind, key)
            refuse_changed(kind, key, known, expected=if_generation)
            return known and shelf.put(cleared_record(known, keep=keep, now=draft.now))

        return await self._world.call(self._ledger.drafted, work)

    async def get(self, kind: str, key: str) -> AlarmRecord | None:
        """Return an alarm, or its tombstone."""
        rows = await self._world.call(self._ledger.read, self._sql.FIND, self._place(kind, key))
        return alarm_of(rows[0]) if rows else None

    async def listed(
        self, kind: str | None = None, *, states: Sequence[AlarmState] = (), limit: int = 100
    ) -> list[AlarmRecord]:
        """Return alarms by kind and key."""
        values: dict[str, Any] = {"namespace": self._namespace, "kind": kind, "limit": limit}
        values["states"] = [state.value for state in states]
        dead = tuple(states) == (AlarmState.DEAD,)
        statement = self._sql.LIST_DEAD if dead else self._sql.LIST
        rows = await self._world.call(self._ledger.read, statement, values)
        return [record for row in rows if (record := alarm_of(row)) is not None]

    async def next_due(self, kinds: Sequence[str]) -> NextDue:
        """Say when one of these kinds is due next."""
        return await self._world.call(self._next_due, kinds) if kinds else NextDue()

    async def claim_due(self, want: AlarmWant) -> Batch:
        """Claim what is due, all in one transaction."""
        if not want.policies:
            return Batch()
        return await self._world.call(self._claim_due, want)

    async def beat(self, firing: Firing, *, ttl: float) -> bool:
        """Renew the lease of a handler; say whether a newer generation is there."""
        values = {**firing._asdict(), **self._place(firing.kind, firing.key), "ttl": ttl}
        rows = await self._world.call(self._ledger.changed, self._sql.BEAT, values)
        if not rows or not rows[0][1]:
            reason = "it ran out" if rows else "the alarm is no longer this handler's"
            raise LeaseLost(firing.lease, token=firing.token, reason=reason)
        return bool(rows[0][0])

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
        """Let tombstones go that were kept for long enough."""
        return await self._world.call(self._prune, limit)

    # What runs behind the door.

    def _may_rouse(self) -> bool:
        """Say whether to wake others: who is woken looks once more a moment later, by itself."""
        now = self._world.clocks.boottime()
        if now < self._rouse_at:
            return False
        self._rouse_at = now + _SELDOM
        return True

    def _next_due(self, kinds: Iterable[str]) -> NextDue:
        values = {"namespace": self._namespace, "kinds": list(kinds)}
        now, wake_at, firing = self._ledger.read(self._sql.NEXT_DUE, values)[0]
        return NextDue(None if wake_at is None else max(0.0, wake_at - now), bool(firing))

    def _claim_due(self, want: AlarmWant) -> Batch:
        due = self._next_due(want.policies)
        if due.within != 0.0 and not due.firing:
            return Batch()

        def work(draft: Draft) -> Batch:
            self._ledger.refuse_doubtful(draft)
            return _Shelf(draft, self._namespace, self._sql).claim(want)

        return self._ledger.drafted(work)

    def _end(
        self, firing: Firing, decide: Callable[[AlarmRecord | None, float], AlarmEnd]
    ) -> AlarmEnd:
        def work(draft: Draft) -> AlarmEnd:
            shelf = _Shelf(draft, self._namespace, self._sql)
            known, _ = shelf.read_alone(firing.kind, firing.key, lease=firing.lease)
            end = decide(known, draft.now)
            if end.record is not None:
                shelf.put(end.record)
            elif end.became is Became.DONE:
                assert known is not None, "only what is there can be done"
                shelf.let_go(known)
            draft.drop(firing.lease, firing.nonce)
            return end

        return self._ledger.drafted(work)

    def _prune(self, limit: int) -> int:
        """Let each tombstone go with its lease, and forget what is long gone."""

        def work(draft: Draft) -> int:
            values = {"namespace": self._namespace, "limit": limit}
            old, gone = draft.begin(
                read=[(self._sql.FIND_OLD, values), (self._sql.FIND_GONE, values)]
            )
            if not old and not gone:
                return 0
            values |= {"old": [row[0] for row in old], "gone": [row[0] for row in gone]}
            values |= {"leases": [row[1] for row in old], "nonces": [row[2] for row in old]}
            pruning = (self._sql.DROP_LEASES, self._sql.LET_GO, self._sql.FORGET)
            draft.commit(*((statement, values) for statement in pruning))
            return len(old)

        return self._ledger.drafted(work)

    def _place(self, kind: str, key: str) -> dict[str, Any]:
        return {
            "namespace": self._namespace,
            "place": self._sql.place_of(self._namespace, kind, key),
        }


class _Shelf:
    """The alarms of one draft."""

    def __init__(self, draft: Draft, namespace: str, sql: ModuleType) -> None:
        self._draft, self._namespace, self._sql = draft, namespace, sql
        self._versions: dict[tuple[str, str], Any] = {}
        self._read: dict[tuple[str, str], AlarmRecord | None] = {}
        self._put: dict[tuple[str, str], tuple[AlarmRecord, bool]] = {}  # and whether it is gone
        draft.also.append(self._steps)

    def read_alone(self, kind: str, key: str, *, lease: str = "") -> tuple[AlarmRecord | None, int]:
        """Begin by reading one alarm; return it, and the generation that it must be above."""
        draft = self._draft
        place = self._sql.place_of(self._namespace, kind, key)
        values = {"namespace": self._namespace, "place": place}
        steps: list[Step] = [(self._sql.FIND_ALONE, values)]
        if lease:
            steps.append(draft.leases_by([lease], locks=[], jobs=[]))
        rows, *held = draft.begin(read=steps)
        for found in held:
            draft.took_leases(found, names=[lease])
        if not rows:
            return None, 0
        return self._took(rows[0]), max(rows[0][2], rows[0][7])

    def claim(self, want: AlarmWant) -> Batch:
        """Claim what is due, unless this very request has done so before."""
        draft = self._draft
        firing, due = self._look(want)
        adopted = [self._adopt(record, want) for record in firing if self._is_of(record, want)]
        if adopted:
            return Batch(tuple(adopted))
        dead: list[AlarmRecord] = []
        lost = [record for record in firing if want.sweep and not self._alive(record)]
        for record in lost:
            draft.drop(record.lease, record.holder.nonce)
            settled = self.put(lost_record(record, want.policies[record.kind], now=draft.now))
            if settled.state is AlarmState.DEAD:
                dead.append(settled)
        due = self._due(want, [*due, *(self._put[record[:2]][0] for record in lost)])
        taken = chosen(due, limit=want.limit, alone=want.alone, now=draft.now)
        claimed: list[ClaimedAlarm] = []
        for record in taken:
            begun = self._begin(want, record, claimed)
            if begun.state is AlarmState.DEAD:
                dead.append(begun)
        return Batch(tuple(claimed), tuple(dead), len(lost), more=len(due) > len(taken))

    def _look(self, want: AlarmWant) -> tuple[list[AlarmRecord], list[AlarmRecord]]:
        """Begin by reading what is lost or was claimed by this request, and what is due."""
        values = {"namespace": self._namespace, "most": want.limit + 1}
        values |= {"batch": want.holder.nonce, "sweep": want.sweep}
        asked: list[Step] = [
            (statement, {**values, "kind": kind})
            for statement in (self._sql.FIND_FIRING, self._sql.FIND_DUE)
            for kind in sorted(want.policies)
        ]
        found = [self._took_all(rows) for rows in self._draft.begin(read=asked)]
        firing = list(itertools.chain(*found[: len(want.policies)]))
        self._look_again([record for record in firing if not self._alive(record)])
        return firing, list(itertools.chain(*found[len(want.policies) :]))

    def _look_again(self, lost: list[AlarmRecord]) -> None:
        """Read once more the leases that are not of those who have the alarms.

        The statement that locked an alarm may have seen its lease as it was before: whoever took
        the alarm over meanwhile lives. Now that it is locked nobody can take it over any more.
        """
        others = [
            record.lease
            for record in lost
            if (known := self._draft.lease(record.lease)) is None
            or known.holder.nonce != record.holder.nonce
        ]
        if others:
            (rows,) = self._draft.ask_now([self._draft.leases_by(others, locks=[], jobs=[])])
            self._draft.took_leases(rows, names=others)

    def _due(self, want: AlarmWant, records: list[AlarmRecord]) -> list[AlarmRecord]:
        """Return the first that are due of each kind; those that were lost may be again."""
        due: list[AlarmRecord] = []
        for kind in want.policies:
            of_kind = [
                record
                for record in records
                if record.kind == kind
                and record.state is AlarmState.ARMED
                and record.wake_at <= self._draft.now
            ]
            of_kind.sort(key=lambda record: (record.wake_at, record.key))
            due += of_kind[: want.limit + 1]
        return due

    def _begin(
        self, want: AlarmWant, record: AlarmRecord, claimed: list[ClaimedAlarm]
    ) -> AlarmRecord:
        """Claim one of the due, with a lease, or find why it cannot be."""
        policy, now = want.policies[record.kind], self._draft.now
        if self._draft.standing(record.lease).held:
            return self.put(busy_record(record, now=now))
        begun = claimed_record(record, policy, alone=want.alone, now=now)
        if begun.state is AlarmState.DEAD:
            return self.put(begun)
        above = max(record.generation, record.token, *(one.record.token for one in claimed))
        holder = want.holder._replace(nonce=f"{want.holder.nonce}-{len(claimed)}")
        grant = self._draft.give(record.lease, holder, policy.lease, above=above)
        begun = begun._replace(token=grant.token, holder=holder, batch=want.holder.nonce)
        late = max(0.0, now - record.wake_at)
        claimed.append(ClaimedAlarm(begun, policy.lease, late, late > policy.grace))
        return self.put(begun)

    def _is_of(self, record: AlarmRecord, want: AlarmWant) -> bool:
        asked = record.batch == want.holder.nonce and record.state is AlarmState.FIRING
        return asked and self._alive(record)

    def _adopt(self, record: AlarmRecord, want: AlarmWant) -> ClaimedAlarm:
        ttl = want.policies[record.kind].lease
        self._draft.extend(record.lease, record.holder.nonce, record.token, ttl)
        return ClaimedAlarm(record, ttl, adopted=True)

    def _alive(self, record: AlarmRecord) -> bool:
        standing = self._draft.standing(record.lease)
        return standing.held and standing.holder.nonce == record.holder.nonce

    # Rows.

    def put(self, record: AlarmRecord) -> AlarmRecord:
        """Keep an alarm as it is now."""
        self._put[record[:2]] = (record, False)
        return record

    def let_go(self, record: AlarmRecord) -> None:
        """Forget an alarm, but for its generation."""
        self._put[record[:2]] = (record, True)

    def _took(self, row: Sequence[Any]) -> AlarmRecord | None:
        place, record = (row[0], row[1]), alarm_of(row)
        self._versions[place], self._read[place] = row[ALARM_WIDTH - 1], record
        return record

    def _took_all(self, rows: Iterable[tuple[Any, ...]]) -> list[AlarmRecord]:
        found = []
        for row in rows:
            record = self._took(row)
            assert record is not None, "what is gone is neither due nor fires"
            lease = row[ALARM_WIDTH:]
            self._draft.took_leases([lease] if lease[0] is not None else [], names=[record.lease])
            found.append(record)
        return found

    def _steps(self) -> list[Step]:
        made, moved = [], []
        for place, (record, gone) in sorted(self._put.items()):
            if not gone and record == self._read.get(place):
                continue
            gone_at = self._draft.now if gone else None
            read = self._read.get(place)
            row = self._sql.row_of(self._namespace, record, read=read, gone_at=gone_at)
            if place in self._versions:
                moved.append((row, self._versions[place]))
            else:
                made.append(row)
        return [
            *self._draft.moved(self._sql.UPDATE, moved),
            *self._draft.rows(self._sql.INSERT, made),
        ]
