"""An alarm is one instant to be woken at, for each (kind, key); setting it again replaces it.

Every set makes a new *generation*. Who fires an alarm fires one generation, under a token, and
that generation commits at most once: at the end the alarm goes if it is still the one that fired;
if somebody has set or cleared it meanwhile, theirs stays. All here are decisions about a record.
"""

from __future__ import annotations

import enum

from fencepost.errors import AlarmChanged, GiveUp, RetryAfter
from fencepost.model.alarm_policy import TOMBSTONE, AlarmPolicy, lease_of
from fencepost.model.claim import HOPELESS
from fencepost.model.lease import Holder
from fencepost.model.named import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

# How long an alarm waits whose lease somebody has taken by hand.
_BUSY_PAUSE = 1.0
# And one that should go alone, where something else always runs.
_LONGEST_WAIT = 10.0


class AlarmState(enum.StrEnum):
    """What is true of an alarm now."""

    ARMED = "armed"  # due some time, or waiting for another try
    FIRING = "firing"  # its handler runs, under a token
    DEAD = "dead"  # given up: nothing happens until somebody sets it again
    CLEARED = "cleared"  # a tombstone: there is no alarm, and late setters find that out


class AlarmRecord(NamedTuple):
    """An alarm as the book has it. Instants are seconds of the book's wall clock.

    ``fired`` is the generation that ``token`` was granted for, 0 if no handler has it. What has
    been counted is about the newest generation, but for ``late`` and ``stale``, and for the
    budget's window. ``starts`` are counted in the claim, before user code.
    """

    kind: str
    key: str
    generation: int
    state: AlarmState
    due_at: float
    not_before: float = 0.0
    fired: int = 0
    token: int = 0
    holder: Holder = Holder("", "", 0, "")
    batch: str = ""
    set_by: str = ""
    reason: str = ""
    set_at: float = 0.0
    claimed_at: float = 0.0
    ended_at: float = 0.0
    keep_until: float = 0.0
    starts: int = 0
    errors: int = 0
    faults: int = 0
    losses: int = 0
    releases: int = 0
    streak: int = 0
    strikes: int = 0
    solitary: bool = False
    late: int = 0
    stale: int = 0
    window_at: float = 0.0
    fires: int = 0
    payload: str | None = None
    error: str | None = None

    @property
    def wake_at(self) -> float:
        """When it is to fire: at its time, or after the pause that its last try brought."""
        return max(self.due_at, self.not_before)

    def is_due(self, now: float) -> bool:
        """Say whether it waits, and its time has come."""
        return self.state is AlarmState.ARMED and self.wake_at <= now

    @property
    def attempt(self) -> int:
        """Which try this is. Losses, faults and releases are nobody's fault and do not count."""
        return self.errors + (1 if self.fired else 0)

    @property
    def lease(self) -> str:
        """The name of the lease under which it fires."""
        return lease_of(self.kind, self.key)

    @property
    def id(self) -> str:
        """What names this generation for ever: an idempotency key."""
        return f"{self.kind}/{self.key}#{self.fired or self.generation}"


class Setting(NamedTuple):
    """A request to set an alarm: ``at`` an instant, or ``after`` so many seconds.

    ``call`` makes it safe to repeat. ``if_generation`` is what must still be true; 0 means that
    there must be no alarm. ``keep`` leaves an alarm as it is that waits or fires already.
    """

    kind: str
    key: str
    call: str
    at: float | None = None
    after: float = 0.0
    payload: str | None = None
    if_generation: int | None = None
    keep: bool = False


class Rearm(NamedTuple):
    """How a handler that succeeded leaves its alarm: ``at`` an instant, ``after`` or ``every``."""

    payload: str | None
    at: float | None = None
    after: float = 0.0
    every: float | None = None


class Firing(NamedTuple):
    """Who writes: one handler of one generation, under one token."""

    kind: str
    key: str
    generation: int
    token: int
    nonce: str
    lease: str


def firing_of(record: AlarmRecord) -> Firing:
    """Return who has an alarm that fires."""
    return Firing(
        record.kind, record.key, record.fired, record.token, record.holder.nonce, record.lease
    )


class AlarmWant(NamedTuple):
    """A request for whatever is due. The holder's nonce makes it safe to repeat.

    Only kinds with a policy are claimed. ``alone`` says that nothing else runs where the asker
    would run it. ``sweep`` asks to look after those whose holder may have died, too.
    """

    holder: Holder
    policies: dict[str, AlarmPolicy]
    limit: int
    alone: bool = False
    sweep: bool = True


class ClaimedAlarm(NamedTuple):
    """An alarm that is ours to fire: the record, its lease's ttl, how late it is in seconds."""

    record: AlarmRecord
    ttl: float
    late: float = 0.0
    overdue: bool = False  # later than its grace
    adopted: bool = False


class Batch(NamedTuple):
    """A book's answer to a claim. ``dead`` ended by this very claim; ``more`` is due as well.

    So many are ``busy`` and were put off: somebody has taken their leases by hand. ``stale`` are
    those that this request has claimed before and that somebody has changed since: they are to be
    given back, unless they fire already.
    """

    claimed: tuple[ClaimedAlarm, ...] = ()
    dead: tuple[AlarmRecord, ...] = ()
    lost: int = 0
    more: bool = False
    busy: int = 0
    stale: tuple[AlarmRecord, ...] = ()

    @property
    def again(self) -> bool:
        """Whether to claim again: nothing was granted, but what was in the way no longer is."""
        passed = self.more and bool(self.dead or self.busy)
        return not self.claimed and (passed or bool(self.stale))


class NextDue(NamedTuple):
    """When to look again: in how many seconds something is due, and whether anything fires now."""

    within: float | None = None
    firing: bool = False


class Became(enum.StrEnum):
    """What became of a handler's end."""

    DONE = "done"  # it was committed: the alarm is gone, or armed anew as the handler wished
    AGAIN = "again"  # it failed, and will be tried again
    DEAD = "dead"  # it failed for the last time
    STALE = "stale"  # a newer generation is there: this one was discarded
    LOST = "lost"  # somebody else had taken it over: nothing was written but the count
    GONE = "gone"  # there is no such alarm any more: perhaps this very end was recorded before


class AlarmEnd(NamedTuple):
    """A book's answer to the end of a handler, and the alarm as it is now."""

    became: Became
    record: AlarmRecord | None = None


class Failure(NamedTuple):
    """What is written when a handler failed. ``pause`` is a length: the book tells the time."""

    counted: str  # "errors", "faults" or "releases"
    pause: float = 0.0
    dead: str = ""  # why, if it is the last
    error: str | None = None
    begun: bool = True


RELEASED = Failure("releases")
# It was claimed and there was nothing to fire it with: that tells nothing about the alarm.
NOT_BEGUN = Failure("releases", begun=False)


# Setting and clearing.


def next_generation(previous: int, *, now: float) -> int:
    """Return a generation above every earlier one; time keeps it above those that were deleted."""
    return max(previous + 1, int(now * 1e6))


def set_record(
    known: AlarmRecord | None, setting: Setting, *, floor: int, now: float
) -> AlarmRecord:
    """Return an alarm as it is once it was set; raise ``AlarmChanged`` if it may not be.

    ``floor`` is the highest generation of any alarm that was deleted.
    """
    there = known is not None and known.state is not AlarmState.CLEARED
    if known is not None and known.set_by == setting.call:
        return known  # it was set by this very request, whose answer got lost
    current = known.generation if known is not None else 0
    waits = known is not None and known.state in (AlarmState.ARMED, AlarmState.FIRING)
    if known is not None and setting.keep and waits:
        return known
    expected = setting.if_generation
    if expected is not None and expected != current and not (expected == 0 and not there):
        raise AlarmChanged(setting.kind, setting.key, expected=expected, current=current)
    due_at = now + setting.after if setting.at is None else setting.at
    fresh = AlarmRecord(
        setting.kind,
        setting.key,
        next_generation(max(current, floor if known is None else 0), now=now),
        AlarmState.ARMED,
        due_at,
        set_by=setting.call,
        set_at=now,
        payload=setting.payload,
    )
    return fresh if known is None else _in_place_of(known, fresh)


def _in_place_of(known: AlarmRecord, fresh: AlarmRecord) -> AlarmRecord:
    """Return the newer generation, with what outlives one: who fires now, counts, the budget."""
    kept = fresh._replace(
        state=AlarmState.FIRING if known.fired else AlarmState.ARMED,
        fired=known.fired,
        token=known.token,
        holder=known.holder,
        batch=known.batch,
        claimed_at=known.claimed_at,
        late=known.late,
        stale=known.stale,
    )
    if known.state is AlarmState.DEAD:  # whoever sets it again has seen to the cause
        return kept
    return kept._replace(window_at=known.window_at, fires=known.fires)


def cleared_record(known: AlarmRecord, *, keep: float, now: float) -> AlarmRecord:
    """Return the tombstone of an alarm; one that is cleared already stays as it is."""
    if known.state is AlarmState.CLEARED:
        return known
    return known._replace(
        state=AlarmState.CLEARED,
        generation=next_generation(known.generation, now=now),
        ended_at=now,
        keep_until=now + max(keep, TOMBSTONE),
        payload=None,
        set_by="",
        reason="",
    )


def refuse_changed(kind: str, key: str, known: AlarmRecord | None, *, expected: int | None) -> None:
    """Raise if an alarm that is to be cleared is not of the generation that somebody expected.

    One that is cleared already is as it was to be: perhaps by this request, whose answer got lost.
    """
    if known is not None and known.state is AlarmState.CLEARED:
        return
    current = 0 if known is None else known.generation
    if expected is not None and expected != current:
        raise AlarmChanged(kind, key, expected=expected, current=current)


# Claiming.


def first_due(records: Iterable[AlarmRecord], want: AlarmWant, *, now: float) -> list[AlarmRecord]:
    """Return the first that are due of each kind that is wanted, and one more if there is."""
    due: list[AlarmRecord] = []
    ordered = sorted(records, key=lambda record: (record.wake_at, record.key))
    for kind in want.policies:
        of_kind = [record for record in ordered if record.kind == kind and record.is_due(now)]
        due += of_kind[: want.limit + 1]
    return due


def chosen(due: Iterable[AlarmRecord], *, limit: int, alone: bool, now: float) -> list[AlarmRecord]:
    """Return which of the due alarms to claim together, oldest first.

    One whose last handler vanished goes alone: else it would take its neighbours along once more,
    and they would be blamed. If nobody can run it alone for long it goes all the same.
    """
    ordered = sorted(due, key=lambda record: (record.wake_at, record.kind, record.key))
    if alone and ordered and ordered[0].streak:
        return ordered[: min(limit, 1)]
    eligible = [
        record
        for record in ordered
        if not record.streak or (not alone and now > record.wake_at + _LONGEST_WAIT)
    ]
    return eligible[:limit]


def claimed_record(
    record: AlarmRecord, policy: AlarmPolicy, *, alone: bool, now: float
) -> AlarmRecord:
    """Return a due alarm as a claim leaves it: about to fire, or dead because it fires too often.

    The token and the holder are for the book to add.
    """
    window_at, fires = record.window_at, record.fires
    if not window_at <= now < window_at + policy.budget.window:  # also if the clock was set back
        window_at, fires = now, 0
    if fires >= policy.budget.fires:
        why = f"it fired {fires} times within {policy.budget.window:g} s"
        return _dead(record, "budget", error=why, now=now)
    return record._replace(
        state=AlarmState.FIRING,
        fired=record.generation,
        not_before=0.0,
        claimed_at=now,
        starts=record.starts + 1,
        solitary=alone and record.streak > 0,
        late=record.late + (now > record.wake_at + policy.grace),
        window_at=window_at,
        fires=fires + 1,
    )


def busy_record(record: AlarmRecord, *, now: float) -> AlarmRecord:
    """Return an alarm whose lease somebody else has: it is looked at again soon."""
    return record._replace(not_before=now + _BUSY_PAUSE)


def lost_record(record: AlarmRecord, policy: AlarmPolicy, *, now: float) -> AlarmRecord:
    """Return an alarm whose handler vanished: armed again, at once or later; or dead."""
    if record.generation != record.fired:  # a newer one waits: what was lost concerns nobody
        return settled_record(record)
    streak, strikes = record.streak + 1, record.strikes + record.solitary
    record = record._replace(losses=record.losses + 1, streak=streak, strikes=strikes)
    if strikes >= policy.max_losses or streak >= HOPELESS * policy.max_losses:
        return _dead(record, "poison", error=f"{streak} handlers in a row vanished", now=now)
    pause = policy.pause_after_loss(streak)
    return settled_record(record)._replace(not_before=now + pause if pause else 0.0)


def _dead(record: AlarmRecord, reason: str, *, error: str | None, now: float) -> AlarmRecord:
    return settled_record(record)._replace(
        state=AlarmState.DEAD, reason=reason, error=error, ended_at=now, not_before=0.0
    )


def settled_record(record: AlarmRecord) -> AlarmRecord:
    """Return an alarm that no handler has any more."""
    cleared = record.state is AlarmState.CLEARED
    state = AlarmState.CLEARED if cleared else AlarmState.ARMED
    return record._replace(state=state, fired=0, batch="", solitary=False)


# Ending.


def is_by(record: AlarmRecord, firing: Firing) -> bool:
    """Say whether a handler still has its alarm."""
    ours = (record.fired, record.token, record.holder.nonce)
    return ours == (firing.generation, firing.token, firing.nonce)


def finished(
    record: AlarmRecord | None, firing: Firing, rearm: Rearm | None, *, now: float
) -> AlarmEnd:
    """Decide what becomes of an alarm whose handler succeeded; no record means that it goes."""
    early = _too_late(record, firing)
    if record is None or early is not None:
        return early or AlarmEnd(Became.GONE)
    if rearm is None:
        return AlarmEnd(Became.DONE)
    fresh = AlarmRecord(
        record.kind,
        record.key,
        next_generation(record.generation, now=now),
        AlarmState.ARMED,
        _rearmed_at(record, rearm, now=now),
        set_by=firing.nonce,
        set_at=now,
        payload=rearm.payload,
    )
    return AlarmEnd(Became.DONE, _in_place_of(settled_record(record), fresh))


def _rearmed_at(record: AlarmRecord, rearm: Rearm, *, now: float) -> float:
    if rearm.every is not None:  # from its time and not from now, so that it does not drift
        missed = max(0, int((now - record.due_at) // rearm.every))
        return record.due_at + rearm.every * (missed + 1)
    return now + rearm.after if rearm.at is None else rearm.at


def failed(record: AlarmRecord | None, firing: Firing, failure: Failure, *, now: float) -> AlarmEnd:
    """Decide what becomes of an alarm whose handler failed, or was interrupted."""
    if record is not None and _was_failed_by(record, firing, failure):
        return AlarmEnd(Became.DEAD if failure.dead else Became.AGAIN, record)
    early = _too_late(record, firing)
    if record is None or early is not None:
        return early or AlarmEnd(Became.GONE)
    counts: dict[str, Any] = {failure.counted: getattr(record, failure.counted) + 1}
    record = record._replace(error=failure.error or record.error, **counts)
    if failure.begun:
        record = record._replace(streak=0, strikes=0)
    else:
        record = record._replace(fires=max(0, record.fires - 1))
    if failure.dead:
        dead = _dead(record, failure.dead, error=record.error, now=now)
        return AlarmEnd(Became.DEAD, dead)
    waits = now + failure.pause if failure.pause else 0.0
    return AlarmEnd(Became.AGAIN, settled_record(record)._replace(not_before=waits))


def _was_failed_by(record: AlarmRecord, firing: Firing, failure: Failure) -> bool:
    """Say whether this very failure is on record, and its answer got lost.

    A loss has a streak. So may have what was not begun, and to that one a loss changes nothing.
    """
    last = (record.generation, record.token, record.holder.nonce)
    ours = last == (firing.generation, firing.token, firing.nonce)
    return ours and not record.fired and (not record.streak or not failure.begun)


def _too_late(record: AlarmRecord | None, firing: Firing) -> AlarmEnd | None:
    """Return what is answered to a handler that no longer has the alarm as it was."""
    if record is None:
        return AlarmEnd(Became.GONE)
    if not is_by(record, firing):
        if record.set_by == firing.nonce:
            return AlarmEnd(Became.DONE, record)  # its own end, whose answer got lost
        return AlarmEnd(Became.LOST, record._replace(stale=record.stale + 1))
    if record.generation != firing.generation:
        kept = settled_record(record)
        return AlarmEnd(Became.STALE, kept._replace(stale=kept.stale + 1))
    return None


def failure_of(
    record: AlarmRecord, error: BaseException, words: str, policy: AlarmPolicy, *, dice: float
) -> Failure:
    """Decide what an error means: another try later, or the end."""
    if isinstance(error, policy.faults):
        pause = policy.fault_pause(record.faults + 1, dice=dice)
        return Failure("faults", pause, error=words)
    errors = record.errors + 1
    if isinstance(error, GiveUp):
        return Failure("errors", dead="gave_up", error=words)
    if policy.on_error is None and not policy.retry.worth(error):
        return Failure("errors", dead="error", error=words)
    if policy.on_error is None and errors >= policy.retry.attempts:
        return Failure("errors", dead="exhausted", error=words)
    pause = policy.pause(errors, dice=dice)
    if isinstance(error, RetryAfter):
        pause = max(pause, error.seconds)
    return Failure("errors", pause, error=words)
