"""The reference: every book of alarms must be observably equal to this one, a dictionary."""

from __future__ import annotations

from fencepost.ledger import alarm_verbs as verbs
from fencepost.model.alarm import AlarmRecord, AlarmState, NextDue, first_due

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from fencepost.ledger.memory import MemoryLedger
    from fencepost.model.alarm import AlarmEnd, AlarmWant, Batch, Failure, Firing, Rearm, Setting
    from fencepost.world.api import World


class MemoryAlarmShelf:
    """What several ``MemoryAlarms`` objects of one process share."""

    def __init__(self) -> None:
        self.alarms: dict[tuple[str, str], AlarmRecord] = {}
        self.floor = 0  # the highest generation of any alarm that was deleted


class MemoryAlarmDesk:
    """The alarms, under the lock of the store that has the leases."""

    def __init__(self, shelf: MemoryAlarmShelf, ledger: MemoryLedger, *, now: float) -> None:
        self._shelf, self._alarms, self._leases = shelf, shelf.alarms, ledger.leases
        self.now = now
        self.standing = ledger.standing
        self.give, self.extend = self._leases.give, self._leases.extend
        self.drop = self._leases.drop

    def all(self) -> list[AlarmRecord]:
        """Return all alarms, by kind and key."""
        return [record for _, record in sorted(self._alarms.items())]

    def find(self, kind: str, key: str, *, lease: str = "") -> AlarmRecord | None:
        """Return an alarm, or its tombstone."""
        del lease  # it is at hand
        return self._alarms.get((kind, key))

    def floor(self) -> int:
        """Return what the generation of an alarm must be above that was not found."""
        return max(self._leases.highest, self._shelf.floor)

    def firing(self, want: AlarmWant) -> list[AlarmRecord]:
        """Return all that fire."""
        return [record for record in self.all() if record.fired and record.kind in want.policies]

    def due(self, want: AlarmWant) -> list[AlarmRecord]:
        """Return the first that are due of each kind."""
        return first_due(self.all(), want, now=self.now)

    def put(self, record: AlarmRecord) -> AlarmRecord:
        """Keep an alarm as it is now."""
        before = self._alarms.get((record.kind, record.key))
        assert before is None or before.generation <= record.generation, "it never falls"
        self._alarms[record.kind, record.key] = record
        return record

    def let_go(self, record: AlarmRecord) -> None:
        """Forget an alarm, but for the highest generation."""
        del self._alarms[record.kind, record.key]
        self._shelf.floor = max(self._shelf.floor, record.generation, record.token)


class MemoryAlarms:
    """Alarms in a dictionary."""

    def __init__(self, world: World, ledger: MemoryLedger) -> None:
        self._world, self._ledger, self._leases = world, ledger, ledger.leases

    @property
    def _desk(self) -> MemoryAlarmDesk:
        beside, name = self._leases.beside, f"alarms/{self._leases.namespace}"
        shelf = beside.get(name) or beside.setdefault(name, MemoryAlarmShelf())
        assert isinstance(shelf, MemoryAlarmShelf), "nobody else keeps anything there"
        return MemoryAlarmDesk(shelf, self._ledger, now=self._world.clocks.wall())

    async def set(self, setting: Setting) -> AlarmRecord:
        """Set an alarm, in place of what there was."""
        with self._leases.turn:
            return verbs.set_(self._desk, setting)

    async def clear(
        self, kind: str, key: str, *, keep: float = 0.0, if_generation: int | None = None
    ) -> AlarmRecord | None:
        """Clear an alarm and return the tombstone."""
        with self._leases.turn:
            return verbs.clear(self._desk, kind, key, keep=keep, if_generation=if_generation)

    async def get(self, kind: str, key: str) -> AlarmRecord | None:
        """Return an alarm, or its tombstone."""
        with self._leases.turn:
            return self._desk.find(kind, key)

    async def listed(
        self, kind: str | None = None, *, states: Sequence[AlarmState] = (), limit: int = 100
    ) -> list[AlarmRecord]:
        """Return alarms by kind and key."""
        with self._leases.turn:
            return [
                record
                for record in self._desk.all()
                if kind in (None, record.kind) and (not states or record.state in states)
            ][:limit]

    async def next_due(self, kinds: Sequence[str]) -> NextDue:
        """Say when one of these kinds is due next."""
        with self._leases.turn:
            desk = self._desk
            ours = [record for record in desk.all() if record.kind in kinds]
            armed = [record.wake_at for record in ours if record.state is AlarmState.ARMED]
            firing = any(record.fired for record in ours)
            return NextDue(max(0.0, min(armed) - desk.now) if armed else None, firing)

    async def claim_due(self, want: AlarmWant) -> Batch:
        """Claim what is due, in one step."""
        with self._leases.turn:
            return verbs.claim(self._desk, want)

    async def beat(self, firing: Firing, *, ttl: float) -> bool:
        """Renew the lease of a handler; say whether a newer generation is there."""
        with self._leases.turn:
            return verbs.beat(self._desk, firing, ttl=ttl)

    async def finish(self, firing: Firing, rearm: Rearm | None = None) -> AlarmEnd:
        """Commit a handler's success, and release its lease."""
        with self._leases.turn:
            return verbs.finish(self._desk, firing, rearm)

    async def fail(self, firing: Firing, failure: Failure) -> AlarmEnd:
        """Record a handler's failure, and release its lease."""
        with self._leases.turn:
            return verbs.fail(self._desk, firing, failure)

    async def prune(self, *, limit: int = 1000) -> int:
        """Delete tombstones that were kept for long enough."""
        with self._leases.turn:
            desk = self._desk
            cleared = [record for record in desk.all() if record.state is AlarmState.CLEARED]
            over = [record for record in cleared if record.keep_until <= desk.now]
            over.sort(key=lambda record: record.keep_until)
            for record in over[:limit]:
                desk.drop(record.lease, record.holder.nonce)
                desk.let_go(record)
            return len(over[:limit])
