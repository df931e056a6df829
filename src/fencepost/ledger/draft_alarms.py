"""Alarms in the ledger's database: a claim of what is due and its leases are one transaction.

While nothing is due and nobody has died, to look costs one statement that reads. Two who claim at
once have different alarms: each leaves to the other what that has locked.
"""

from __future__ import annotations

import itertools

from fencepost.ledger import alarm_verbs as verbs
from fencepost.ledger.draft_alarm_values import ALARM_WIDTH, alarm_of
from fencepost.ledger.draft_rousing import rouse
from fencepost.ledger.planning import ALARM, LOOK
from fencepost.model.alarm import AlarmState, Batch, NextDue, first_due

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import ModuleType
    from typing import Any, TypeVar

    from fencepost.ledger.draft import Draft
    from fencepost.ledger.draft_dialect import Step
    from fencepost.ledger.draft_ledger import DraftLedger
    from fencepost.model.alarm import (
        AlarmEnd,
        AlarmRecord,
        AlarmWant,
        Failure,
        Firing,
        Rearm,
        Setting,
    )
    from fencepost.world.api import World

    T = TypeVar("T")

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
        rouses = False  # and does again, if it is undone and done again

        def work(desk: DraftAlarmDesk) -> AlarmRecord:
            nonlocal rouses
            record = verbs.set_(desk, setting)
            if record.wake_at <= desk.now + LOOK:
                rouses = rouses or self._may_rouse()
                if rouses:
                    rouse(desk.draft, ALARM)
            return record

        return await self._world.call(self._drafted, work)

    async def clear(
        self, kind: str, key: str, *, keep: float = 0.0, if_generation: int | None = None
    ) -> AlarmRecord | None:
        """Clear an alarm and return the tombstone."""
        return await self._world.call(
            self._drafted,
            lambda desk: verbs.clear(desk, kind, key, keep=keep, if_generation=if_generation),
        )

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
        if not rows:
            raise verbs.not_ours(firing)
        newer, renewed = rows[0]
        if not renewed:
            raise verbs.ran_out(firing)
        return bool(newer)

    async def finish(self, firing: Firing, rearm: Rearm | None = None) -> AlarmEnd:
        """Commit a handler's success, and release its lease."""
        return await self._world.call(self._drafted, lambda desk: verbs.finish(desk, firing, rearm))

    async def fail(self, firing: Firing, failure: Failure) -> AlarmEnd:
        """Record a handler's failure, and release its lease."""
        return await self._world.call(self._drafted, lambda desk: verbs.fail(desk, firing, failure))

    async def prune(self, *, limit: int = 1000) -> int:
        """Let tombstones go that were kept for long enough."""
        return await self._world.call(self._prune, limit)

    # What runs behind the door.

    def _drafted(self, work: Callable[[DraftAlarmDesk], T]) -> T:
        return self._ledger.drafted(
            lambda draft: work(DraftAlarmDesk(draft, self._namespace, self._sql))
        )

    def _may_rouse(self) -> bool:
        """Say whether to wake others: who is woken looks once more a moment later, by itself."""
        now = self._world.clocks.boottime()
        if now < self._rouse_at:
            return False
        self._rouse_at = now + _SELDOM
        return True

    def _next_due(self, kinds: Iterable[str]) -> NextDue:
        values = {"namespace": self._namespace, "kinds": list(kinds)}
        if not values["kinds"]:
            return NextDue(None, firing=False)
        now, wake_at, firing = self._ledger.read(self._sql.NEXT_DUE, values)[0]
        return NextDue(None if wake_at is None else max(0.0, wake_at - now), bool(firing))

    def _claim_due(self, want: AlarmWant) -> Batch:
        due = self._next_due(want.policies)
        if due.within != 0.0 and not due.firing:
            return Batch()

        def work(desk: DraftAlarmDesk) -> Batch:
            self._ledger.refuse_doubtful(desk.draft)
            return verbs.claim(desk, want)

        return self._drafted(work)

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


class DraftAlarmDesk:
    """The alarms of one draft."""

    def __init__(self, draft: Draft, namespace: str, sql: ModuleType) -> None:
        self.draft, self._namespace, self._sql = draft, namespace, sql
        self._read: dict[tuple[str, str], tuple[AlarmRecord | None, Any]] = {}  # and its version
        self._put: dict[tuple[str, str], AlarmRecord | None] = {}  # None if it has gone
        self._floor = 0
        self.standing, self.give = draft.standing, draft.give
        self.extend, self.drop = draft.extend, draft.drop
        draft.also.append(self._steps)

    @property
    def now(self) -> float:
        """The server's time."""
        return self.draft.now

    def find(self, kind: str, key: str, *, lease: str = "") -> AlarmRecord | None:
        """Begin by reading one alarm, and its lease if that is to be dropped."""
        place = self._sql.place_of(self._namespace, kind, key)
        steps: list[Step] = [(self._sql.FIND_ALONE, {"namespace": self._namespace, "place": place})]
        if lease:
            steps.append(self.draft.leases_by([lease], locks=[], jobs=[]))
        rows, *held = self.draft.begin(read=steps)
        for found in held:
            self.draft.took_leases(found, names=[lease])
        if not rows:
            return None
        self._floor = max(rows[0][2], rows[0][7])
        return self._took(rows[0])

    def floor(self) -> int:
        """Return what the generation of an alarm must be above that was not found."""
        return self._floor

    def firing(self, want: AlarmWant) -> list[AlarmRecord]:
        """Begin by reading what is lost or was claimed by this request, and what is due."""
        values = {"namespace": self._namespace, "most": want.limit + 1}
        values |= {"batch": want.holder.nonce, "sweep": want.sweep}
        asked: list[Step] = [
            (statement, {**values, "kind": kind})
            for statement in (self._sql.FIND_FIRING, self._sql.FIND_DUE)
            for kind in sorted(want.policies)
        ]
        found = [self._took_all(rows) for rows in self.draft.begin(read=asked)]
        firing = list(itertools.chain(*found[: len(want.policies)]))
        self._look_again([record for record in firing if not verbs.lives(self, record)])
        return firing

    def _look_again(self, lost: list[AlarmRecord]) -> None:
        """Read once more the leases that are not of those who have the alarms.

        The statement that locked an alarm may have seen its lease as it was before: whoever took
        the alarm over meanwhile lives. Now that it is locked nobody can take it over any more.
        """
        others = [
            record.lease
            for record in lost
            if (known := self.draft.lease(record.lease)) is None
            or known.holder.nonce != record.holder.nonce
        ]
        if others:
            (rows,) = self.draft.ask_now([self.draft.leases_by(others, locks=[], jobs=[])])
            self.draft.took_leases(rows, names=others)

    def due(self, want: AlarmWant) -> list[AlarmRecord]:
        """Return the first that are due of each kind; those that were lost may be again."""
        read = {place: record for place, (record, _) in self._read.items()}
        here = [record for record in (read | self._put).values() if record is not None]
        return first_due(here, want, now=self.now)

    def put(self, record: AlarmRecord) -> AlarmRecord:
        """Keep an alarm as it is now."""
        self._put[record[:2]] = record
        return record

    def let_go(self, record: AlarmRecord) -> None:
        """Forget an alarm, but for its generation."""
        self._put[record[:2]] = None

    # Rows.

    def _took(self, row: Sequence[Any]) -> AlarmRecord | None:
        record = alarm_of(row)
        self._read[row[0], row[1]] = (record, row[ALARM_WIDTH - 1])
        return record

    def _took_all(self, rows: Iterable[tuple[Any, ...]]) -> list[AlarmRecord]:
        found = []
        for row in rows:
            record = self._took(row)
            assert record is not None, "what is gone is neither due nor fires"
            lease = row[ALARM_WIDTH:]
            self.draft.took_leases([lease] if lease[0] is not None else [], names=[record.lease])
            found.append(record)
        return found

    def _steps(self) -> list[Step]:
        made, moved = [], []
        for place, record in sorted(self._put.items()):
            read, version = self._read.get(place, (None, None))
            if record == read:
                continue
            known, gone_at = record or read, self.now if record is None else None
            row = self._sql.row_of(self._namespace, known, read=read, gone_at=gone_at)
            if place in self._read:
                moved.append((row, version))
            else:
                made.append(row)
        return [
            *self.draft.moved(self._sql.UPDATE, moved),
            *self.draft.rows(self._sql.INSERT, made),
        ]
