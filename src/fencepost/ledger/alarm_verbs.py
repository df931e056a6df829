"""How alarms are set, claimed and ended inside of one transaction, at the desk of any book."""

from __future__ import annotations

from fencepost.errors import LeaseLost
from fencepost.model.alarm import (
    AlarmEnd,
    AlarmState,
    Batch,
    Became,
    ClaimedAlarm,
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
from fencepost.model.named import Protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.model.alarm import AlarmRecord, AlarmWant, Failure, Firing, Rearm, Setting
    from fencepost.model.claim import Standing
    from fencepost.model.lease import Grant, Holder


class AlarmDesk(Protocol):
    """An open transaction on the alarms of one namespace, and on the leases beside them."""

    @property
    def now(self) -> float:
        """The book's time."""

    def find(self, kind: str, key: str, *, lease: str = "") -> AlarmRecord | None:
        """Return an alarm, or its tombstone; whoever goes on to drop its ``lease`` says so."""

    def floor(self) -> int:
        """Return what the generation of an alarm must be above that was not found."""

    def firing(self, want: AlarmWant) -> list[AlarmRecord]:
        """Return what this request has claimed before; to sweep, at least what is lost as well."""

    def due(self, want: AlarmWant) -> list[AlarmRecord]:
        """Return the first that are due of each kind: if there are, one more than are wanted."""

    def put(self, record: AlarmRecord) -> AlarmRecord:
        """Keep an alarm as it is now."""

    def let_go(self, record: AlarmRecord) -> None:
        """Forget an alarm, but for the highest generation."""

    def standing(self, name: str, /) -> Standing:
        """Return how a lease stands."""

    def give(self, name: str, holder: Holder, ttl: float, /, *, above: int) -> Grant:
        """Grant a lease that was seen to be free, with a token that is higher than ``above``."""

    def extend(self, name: str, nonce: str, token: int, ttl: float, /) -> bool:
        """Move the end of a lease; say whether it was still this nonce's."""

    def drop(self, name: str, nonce: str, /) -> None:
        """Forget a lease, if this nonce has it."""


def set_(desk: AlarmDesk, setting: Setting) -> AlarmRecord:
    """Set an alarm, in place of what there was."""
    known = desk.find(setting.kind, setting.key)
    floor = desk.floor() if known is None else 0
    return desk.put(set_record(known, setting, floor=floor, now=desk.now))


def clear(
    desk: AlarmDesk, kind: str, key: str, *, keep: float, if_generation: int | None
) -> AlarmRecord | None:
    """Clear an alarm and return the tombstone."""
    known = desk.find(kind, key)
    refuse_changed(kind, key, known, expected=if_generation)
    return None if known is None else desk.put(cleared_record(known, keep=keep, now=desk.now))


def claim(desk: AlarmDesk, want: AlarmWant) -> Batch:
    """Claim what is due, unless this very request has done so before."""
    firing = desk.firing(want)
    asked = [one for one in firing if one.batch == want.holder.nonce and lives(desk, one)]
    if asked:
        # Whoever is answered gives back what it must not fire. Not here: this may be an early copy
        # of its request that arrives late, while a handler has what a later one was granted.
        stale = tuple(one for one in asked if one.generation != one.fired)
        same = (_adopted(desk, want, one) for one in asked if one.generation == one.fired)
        return Batch(tuple(one for one in same if one is not None), stale=stale)
    lost = [record for record in firing if want.sweep and not lives(desk, record)]
    changed = [_lose(desk, want, record) for record in lost]
    due = desk.due(want)
    taken = chosen(due, limit=want.limit, alone=want.alone, now=desk.now)
    claimed: list[ClaimedAlarm] = []
    begun = [_begin(desk, want, record, claimed) for record in taken]
    dead = tuple(one for one in (*changed, *begun) if one.state is AlarmState.DEAD)
    busy = sum(one.state is AlarmState.ARMED for one in begun)
    return Batch(tuple(claimed), dead, len(lost), more=len(due) > len(taken), busy=busy)


def lives(desk: AlarmDesk, record: AlarmRecord) -> bool:
    """Say whether the handler that has an alarm still holds its lease."""
    standing = desk.standing(record.lease)
    return standing.held and standing.holder.nonce == record.holder.nonce


def _adopted(desk: AlarmDesk, want: AlarmWant, record: AlarmRecord) -> ClaimedAlarm | None:
    """Return again what this very request has claimed before, and its answer got lost."""
    ttl = want.policies[record.kind].lease
    if not desk.extend(record.lease, record.holder.nonce, record.token, ttl):
        return None
    return ClaimedAlarm(record, ttl, adopted=True)


def _lose(desk: AlarmDesk, want: AlarmWant, record: AlarmRecord) -> AlarmRecord:
    desk.drop(record.lease, record.holder.nonce)
    return desk.put(lost_record(record, want.policies[record.kind], now=desk.now))


def _begin(
    desk: AlarmDesk, want: AlarmWant, record: AlarmRecord, claimed: list[ClaimedAlarm]
) -> AlarmRecord:
    """Claim one of the due, with a lease, or find why it cannot be."""
    policy, now = want.policies[record.kind], desk.now
    if desk.standing(record.lease).held:
        return desk.put(busy_record(record, now=now))
    begun = claimed_record(record, policy, alone=want.alone, now=now)
    if begun.state is AlarmState.FIRING:
        above = max(record.generation, record.token, *(one.record.token for one in claimed))
        holder = want.holder._replace(nonce=f"{want.holder.nonce}-{len(claimed)}")
        token = desk.give(record.lease, holder, policy.lease, above=above).token
        begun = begun._replace(token=token, holder=holder, batch=want.holder.nonce)
        late = max(0.0, now - record.wake_at)
        claimed.append(ClaimedAlarm(begun, policy.lease, late, late > policy.grace))
    return desk.put(begun)


def beat(desk: AlarmDesk, firing: Firing, *, ttl: float) -> bool:
    """Renew the lease of a handler; say whether a newer generation is there."""
    record = desk.find(firing.kind, firing.key)
    if record is None or not is_by(record, firing):
        raise not_ours(firing)
    if not desk.extend(firing.lease, firing.nonce, firing.token, ttl):
        raise ran_out(firing)
    return record.generation != firing.generation


def not_ours(firing: Firing) -> LeaseLost:
    """Return what a handler is told whose alarm somebody else has, or nobody."""
    reason = "the alarm is no longer this handler's"
    return LeaseLost(firing.lease, token=firing.token, reason=reason)


def ran_out(firing: Firing) -> LeaseLost:
    """Return what a handler is told whose lease has ended."""
    return LeaseLost(firing.lease, token=firing.token, reason="it ran out")


def finish(desk: AlarmDesk, firing: Firing, rearm: Rearm | None) -> AlarmEnd:
    """Commit a handler's success, and release its lease."""
    known = desk.find(firing.kind, firing.key, lease=firing.lease)
    return _ended(desk, firing, known, finished(known, firing, rearm, now=desk.now))


def fail(desk: AlarmDesk, firing: Firing, failure: Failure) -> AlarmEnd:
    """Record a handler's failure, and release its lease."""
    known = desk.find(firing.kind, firing.key, lease=firing.lease)
    return _ended(desk, firing, known, failed(known, firing, failure, now=desk.now))


def _ended(desk: AlarmDesk, firing: Firing, known: AlarmRecord | None, end: AlarmEnd) -> AlarmEnd:
    if end.record is not None:
        desk.put(end.record)
    elif end.became is Became.DONE:
        assert known is not None, "only what is there can be done"
        desk.let_go(known)
    desk.drop(firing.lease, firing.nonce)
    return end
