"""The reference: every book of alarms must be observably equal to this one, a dictionary."""

from __future__ import annotations

from fencepost.errors import LeaseLost
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
    is_by,
    lost_record,
    refuse_changed,
    set_record,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from fencepost.ledger.memory import MemoryLedger
    from fencepost.model.alarm import AlarmWant, Failure, Firing, Rearm, Setting
    from fencepost.world.api import World


class MemoryAlarmShelf:
    """What several ``MemoryAlarms`` objects of one process share."""

    def __init__(self) -> None:
        self.alarms: dict[tuple[str, str], AlarmRecord] = {}
        self.floor = 0  # the highest generation of any alarm that was deleted


class MemoryAlarms:
    """Alarms in a dictionary, under the lock of the store that has the leases."""

    def __init__(self, world: World, ledger: MemoryLedger) -> None:
        self._world, self._leases = world, ledger.leases

    @property
    def _shelf(self) -> MemoryAlarmShelf:
        beside, name = self._leases.beside, f"alarms/{self._leases.namespace}"
        shelf = beside.get(name) or beside.setdefault(name, MemoryAlarmShelf())
        assert isinstance(shelf, MemoryAlarmShelf), "nobody else keeps anything there"
        return shelf

    @property
    def _alarms(self) -> dict[tuple[str, str], AlarmRecord]:
        return self._shelf.alarms

    async def set(self, setting: Setting) -> AlarmRecord:
        """Set an alarm, in place of what there was."""
        with self._leases.turn:
            known, now = self._alarms.get(setting[:2]), self._world.clocks.wall()
            floor = max(self._leases.highest, self._shelf.floor)
            return self._put(set_record(known, setting, floor=floor, now=now))

    async def clear(
        self, kind: str, key: str, *, keep: float = 0.0, if_generation: int | None = None
    ) -> AlarmRecord | None:
        """Clear an alarm and return the tombstone."""
        with self._leases.turn:
            known, now = self._alarms.get((kind, key)), self._world.clocks.wall()
            refuse_changed(kind, key, known, expected=if_generation)
            return None if known is None else self._put(cleared_record(known, keep=keep, now=now))

    async def get(self, kind: str, key: str) -> AlarmRecord | None:
        """Return an alarm, or its tombstone."""
        with self._leases.turn:
            return self._alarms.get((kind, key))

    async def listed(
        self, kind: str | None = None, *, states: Sequence[AlarmState] = (), limit: int = 100
    ) -> list[AlarmRecord]:
        """Return alarms by kind and key."""
        with self._leases.turn:
            return [
                record
                for _, record in sorted(self._alarms.items())
                if kind in (None, record.kind) and (not states or record.state in states)
            ][:limit]

    async def next_due(self, kinds: Sequence[str]) -> NextDue:
        """Say when one of these kinds is due next."""
        with self._leases.turn:
            now, ours = self._world.clocks.wall(), [r for r in self._all() if r.kind in kinds]
            armed = [record.wake_at for record in ours if record.state is AlarmState.ARMED]
            firing = any(record.fired for record in ours)
            return NextDue(max(0.0, min(armed) - now) if armed else None, firing)

    async def claim_due(self, want: AlarmWant) -> Batch:
        """Claim what is due, in one step."""
        with self._leases.turn:
            return self._claim(want)

    async def beat(self, firing: Firing, *, ttl: float) -> bool:
        """Renew the lease of a handler; say whether a newer generation is there."""
        with self._leases.turn:
            record = self._alarms.get((firing.kind, firing.key))
            ours = record is not None and is_by(record, firing)
            if not ours or not self._leases.extend(firing.lease, firing.nonce, firing.token, ttl):
                reason = "it ran out" if ours else "the alarm is no longer this handler's"
                raise LeaseLost(firing.lease, token=firing.token, reason=reason)
            return record is not None and record.generation != firing.generation

    async def finish(self, firing: Firing, rearm: Rearm | None = None) -> AlarmEnd:
        """Commit a handler's success, and release its lease."""
        with self._leases.turn:
            known = self._alarms.get((firing.kind, firing.key))
            return self._ended(
                firing, finished(known, firing, rearm, now=self._world.clocks.wall())
            )

    async def fail(self, firing: Firing, failure: Failure) -> AlarmEnd:
        """Record a handler's failure, and release its lease."""
        with self._leases.turn:
            known = self._alarms.get((firing.kind, firing.key))
            return self._ended(
                firing, failed(known, firing, failure, now=self._world.clocks.wall())
            )

    async def prune(self, *, limit: int = 1000) -> int:
        """Delete tombstones that were kept for long enough."""
        with self._leases.turn:
            now = self._world.clocks.wall()
            over = [
                record
                for record in self._all()
                if record.state is AlarmState.CLEARED and record.keep_until <= now
            ]
            over.sort(key=lambda record: record.keep_until)
            for record in over[:limit]:
                self._leases.drop(record.lease, record.holder.nonce)
                self._delete(record.kind, record.key)
            return len(over[:limit])

    # What happens under the lock.

    def _claim(self, want: AlarmWant) -> Batch:
        now, dead = self._world.clocks.wall(), []
        firing = [r for r in self._all() if r.fired and r.kind in want.policies]
        adopted = [self._adopt(record, want) for record in firing if self._is_of(record, want)]
        if adopted:
            return Batch(tuple(adopted))
        lost = [record for record in firing if want.sweep and not self._alive(record)]
        for record in lost:
            self._leases.drop(record.lease, record.holder.nonce)
            settled = self._put(lost_record(record, want.policies[record.kind], now=now))
            if settled.state is AlarmState.DEAD:
                dead.append(settled)
        due = self._due(want, now=now)
        taken = chosen(due, limit=want.limit, alone=want.alone, now=now)
        claimed: list[ClaimedAlarm] = []
        for record in taken:
            begun = self._begin(want, record, claimed, now=now)
            if begun.state is AlarmState.DEAD:
                dead.append(begun)
        return Batch(tuple(claimed), tuple(dead), len(lost), more=len(due) > len(taken))

    def _due(self, want: AlarmWant, *, now: float) -> list[AlarmRecord]:
        due: list[AlarmRecord] = []
        for kind in want.policies:
            of_kind = [
                record
                for record in self._all()
                if record.kind == kind
                and record.state is AlarmState.ARMED
                and record.wake_at <= now
            ]
            of_kind.sort(key=lambda record: (record.wake_at, record.key))
            due += of_kind[: want.limit + 1]
        return due

    def _begin(
        self, want: AlarmWant, record: AlarmRecord, claimed: list[ClaimedAlarm], *, now: float
    ) -> AlarmRecord:
        policy, seen = want.policies[record.kind], self._leases.look(record.lease)
        if seen is not None and seen.held:
            return self._put(busy_record(record, now=now))
        begun = claimed_record(record, policy, alone=want.alone, now=now)
        if begun.state is AlarmState.DEAD:
            return self._put(begun)
        holder = want.holder._replace(nonce=f"{want.holder.nonce}-{len(claimed)}")
        grant = self._leases.give(record.lease, holder, policy.lease)
        begun = begun._replace(token=grant.token, holder=holder, batch=want.holder.nonce)
        late = max(0.0, now - record.wake_at)
        claimed.append(ClaimedAlarm(begun, policy.lease, late, late > policy.grace))
        return self._put(begun)

    def _is_of(self, record: AlarmRecord, want: AlarmWant) -> bool:
        asked = record.batch == want.holder.nonce and record.state is AlarmState.FIRING
        return asked and self._alive(record)

    def _adopt(self, record: AlarmRecord, want: AlarmWant) -> ClaimedAlarm:
        ttl = want.policies[record.kind].lease
        self._leases.extend(record.lease, record.holder.nonce, record.token, ttl)
        return ClaimedAlarm(record, ttl, adopted=True)

    def _alive(self, record: AlarmRecord) -> bool:
        seen = self._leases.look(record.lease)
        return seen is not None and seen.held and seen.holder.nonce == record.holder.nonce

    def _ended(self, firing: Firing, end: AlarmEnd) -> AlarmEnd:
        if end.record is not None:
            self._put(end.record)
        elif end.became is Became.DONE:
            self._delete(firing.kind, firing.key)
        self._leases.drop(firing.lease, firing.nonce)
        return end

    def _all(self) -> list[AlarmRecord]:
        return [record for _, record in sorted(self._alarms.items())]

    def _delete(self, kind: str, key: str) -> None:
        shelf, record = self._shelf, self._alarms.pop((kind, key))
        shelf.floor = max(shelf.floor, record.generation, record.token)

    def _put(self, record: AlarmRecord) -> AlarmRecord:
        before = self._alarms.get((record.kind, record.key))
        assert before is None or before.generation <= record.generation, "it never falls"
        self._alarms[record.kind, record.key] = record
        return record
