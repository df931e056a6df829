"""To claim a slot is to decide, in one transaction of the ledger, who may run it and who may not.

``decide`` is that decision. It reads facts and returns a value; the ledger carries it out.
``Verdict`` lists all that it can say.
"""

from __future__ import annotations

import enum

from fencepost.errors import RunTimedOut
from fencepost.model.claim_order import (
    BEHIND,
    CATCHUP,
    alive,
    came_first,
    can_be_resumed,
    gives_way,
    goes_first,
    is_exclusive,
    made_up_first,
    replaces,
)
from fencepost.model.divided import in_place_of, is_mark, mark_holder
from fencepost.model.handoff import out_of_time
from fencepost.model.lease import Grant, Holder
from fencepost.model.name import base, permits
from fencepost.model.named import NamedTuple
from fencepost.model.policy import OnLoss, Overlap, Policy, loss_pause
from fencepost.model.rules import CatchUp
from fencepost.model.run import RunRecord, State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from fencepost.model.rules import Rules
    from fencepost.model.slot import RunKey

# How the slots of a schedule are begun, live or made up.
_SCHEDULED = frozenset({"schedule", CATCHUP})
# A run in trouble: from this many losses in a row on, it runs with nobody beside it.
SUSPICIOUS = 2
# Why a run waits that may be tried at any time: its ``not_before`` is only when it is tried again.
_BLOCKED = frozenset({"lock_held", "replacing"})
# By how much a record may be ahead of the ledger's clock and still be of the same time.
_SAME_TIME = 5.0
# And so many times max_losses without a step forward are enough, whoever is to blame: where no
# asker can run it alone, nothing else would ever end it.
HOPELESS = 4
# Later than any ledger's clock will ever be.
FOREVER = 2.0**62


class Want(NamedTuple):
    """A request for a run. The holder's nonce makes it safe to repeat.

    ``can_be_alone`` says that the asker can run it where a crash hurts nobody else. ``new`` asks
    for a run of one's own: if the key is taken already, it is somebody else's. Who is ``patient``
    waits for a lock without a record of it; who has no ``room`` wants to know, not to begin.
    ``planned`` is when the slot was to start, if its jitter made that later than its instant.
    The asker means this run only if the ledger's clock is at ``since`` or later, and before
    ``until``.
    """

    key: RunKey
    holder: Holder
    policy: Policy
    lock: str
    trigger: str = "trigger"
    can_be_alone: bool = False
    new: bool = False
    patient: bool = False
    room: bool = True
    epoch: int = 0
    planned: float = 0.0
    since: float = 0.0
    until: float = FOREVER

    @property
    def behind(self) -> bool:
        """Whether it makes up for the past, and so goes behind what is live."""
        return self.trigger in BEHIND


def is_patient(trigger: str, rules: Rules) -> bool:
    """Say whether a run that never began waits for its lock, whatever ``overlap`` says.

    Each slot of a ``catchup="all"`` job does, and each slot that makes up for the past.
    """
    return trigger in BEHIND or (trigger in _SCHEDULED and rules.catchup is CatchUp.ALL)


class Standing(NamedTuple):
    """How one lease stands: who has it, if anybody who may still be alive does.

    ``token`` is the last one that was granted under this name, 0 if the store keeps none.
    """

    name: str
    held: bool = False
    holder: Holder = Holder("", "", 0, "")
    token: int = 0
    since: float = 0.0
    expires_in: float = 0.0

    @property
    def whole(self) -> bool:
        """Whether somebody has it: not where the lease of a lock only says that it has permits."""
        return self.held and not is_mark(self.holder)


class Facts(NamedTuple):
    """All that a claim is decided by.

    ``own`` is the run asked for, ``others`` every live run of the same lock, oldest slot first.
    ``standings`` has the lock's lease, those of all permits it may need, and those of live runs.
    """

    own: RunRecord | None
    others: Sequence[RunRecord]
    standings: dict[str, Standing]
    quarantined: bool = False
    paused: bool = False
    retired: bool = False
    pruned: bool = False  # the slot is so old that nobody remembers whether it ran


def passed_on(facts: Facts, lease: str) -> Iterator[RunRecord]:
    """Return the runs whose permit goes to another because it ran out while they have not ended.

    Whoever has such a run may still end it: nobody else has the run. But from here on it is
    without a permit, and that has to be on record, once of each attempt. The token of the lease
    does not say whether it is: a semaphore that had the permit meanwhile has raised it as well.
    """
    lock = base(lease)  # whoever has it whole shuts out its permits, and the other way round
    return (
        run
        for run in facts.others
        if run.state is State.RUNNING and (run.lease == lease or lock in (lease, run.lease))
    )


class Verdict(enum.Enum):
    """What a claim found, for the flow that asked."""

    GO = "go"  # it is ours, under a new token
    ENDED = "ended"  # it is over: before, or by this very claim
    BUSY = "busy"  # an attempt of it is alive; nothing changed
    LATER = "later"  # it waits, until ``at`` or until the lock is free
    AFTER = "after"  # an older run of the lock was lost, and is to be resumed first
    REPLACE = "replace"  # the run that is in its way is to be cancelled first
    NO_ROOM = "no_room"  # it could go, but the asker has no room for it
    OTHER_TIME = "other_time"  # by the ledger's clock the asker means another run; nothing changed


class Change(NamedTuple):
    """How a record is to change, besides what every change brings along."""

    state: State
    reason: str = ""
    blocker: str = ""
    not_before: float = 0.0
    lost: bool = False  # the attempt that had it is counted as a loss
    struck: bool = False  # and nobody else can have been the cause
    quarantine: bool = False
    error: str | None = None
    released: bool = False  # the attempt that had it is counted as given back


class Decision(NamedTuple):
    """What is to be done about a claim.

    ``lease`` is the lease to grant for GO. ``change`` is what else happens to the run that was
    asked for; ``superseded`` are runs that end because a newer slot takes their place.
    """

    verdict: Verdict
    lease: str = ""
    change: Change | None = None
    superseded: tuple[RunKey, ...] = ()
    blocker: RunRecord | None = None
    holder: Standing | None = None
    at: float = 0.0
    adopted: bool = False


class Claimed(NamedTuple):
    """A ledger's answer to a claim: the verdict, and the run as it is now.

    ``pause`` is how long it is until the run may be claimed, if that is known. ``now`` is the time
    of the ledger's clock.
    """

    verdict: Verdict
    run: RunRecord | None
    grant: Grant | None = None
    blocker: RunRecord | None = None
    holder: Standing | None = None
    pause: float = 0.0
    fresh: bool = False  # for ENDED: this very claim ended it
    now: float = 0.0


def leases_of(want: Want) -> list[str]:
    """Return the leases of which a run needs one: the lock itself, or its permits."""
    if want.policy.overlap is not Overlap.ALLOW:
        return [want.lock]
    return permits(want.lock, limit=want.policy.max_concurrent)


def looked_at(want: Want) -> list[str]:
    """Return the leases that decide a claim: the lock itself, and its permits if it needs one."""
    return (
        [want.lock] if want.policy.overlap is not Overlap.ALLOW else [want.lock, *leases_of(want)]
    )


def mark_of(want: Want, facts: Facts) -> Holder:
    """Return the mark that a claim of a permit leaves at the lock itself."""
    before = facts.standings[want.lock].holder
    mark = mark_holder(want.holder.nonce, limit=want.policy.max_concurrent)
    return in_place_of(before, mark)


def decide(want: Want, facts: Facts, *, now: float) -> Decision:
    """Decide a claim at the ledger's time ``now``."""
    if not want.since <= now < want.until and not _asked_before(want, facts.own):
        return Decision(Verdict.OTHER_TIME)
    decision = _decide(want, facts, now=now)
    if decision.verdict is Verdict.GO and not want.room and not decision.adopted:
        return Decision(Verdict.NO_ROOM)
    return decision


def _decide(  # noqa: C901, PLR0911 -- one line for each way a claim can go
    want: Want, facts: Facts, *, now: float
) -> Decision:
    own = facts.own
    if own is not None and want.new and own.holder.nonce != want.holder.nonce:
        return Decision(Verdict.BUSY, blocker=own)
    if own is not None and own.state.terminal:
        return Decision(Verdict.ENDED)
    if own is None and facts.pruned and not (want.key.manual or (want.behind and want.key.rerun)):
        return Decision(Verdict.ENDED)
    if own is None and (twin := _twin(want, facts)) is not None:
        return Decision(Verdict.BUSY, blocker=twin, holder=facts.standings.get(twin.lease))
    if own is not None and own.state is State.RUNNING:
        if own.holder.nonce == want.holder.nonce:
            return _adopted(own, facts)
        if alive(own, facts):
            return Decision(Verdict.BUSY, blocker=own, holder=facts.standings[own.lease])
        return _lost(want, own, facts, now=now)
    if own is not None and own.starts and own.holder.nonce == want.holder.nonce:
        # A request that was long under way. It has had its attempt, and nobody waits for another.
        return Decision(Verdict.BUSY, blocker=own)
    if facts.retired and own is not None and own.active:  # there will be no other try
        return Decision(Verdict.ENDED, change=_end(State.CANCELLED, "retired"))
    if own is not None and _waits(own, now=now):
        return Decision(Verdict.LATER, at=own.not_before)
    if own is None or own.fresh:
        refusal = _refused(want, own, facts, now=now)
        if refusal is not None:
            return refusal
    return _free_or_blocked(want, facts, change=Change(State.RUNNING), now=now)


def _asked_before(want: Want, own: RunRecord | None) -> bool:
    """Say whether this very request has been answered, and the answer got lost."""
    return own is not None and own.holder.nonce == want.holder.nonce


def _waits(run: RunRecord, *, now: float) -> bool:
    """Say whether a run's time has not come yet.

    If its last attempt ended in the future the clock was set back since. How long it has waited
    nobody can tell then, and a pause is not worth an hour.
    """
    if run.not_before <= now or run.reason in _BLOCKED:
        return False
    return run.beat_at <= now + _SAME_TIME


def _twin(want: Want, facts: Facts) -> RunRecord | None:
    """Return the live run of the same slot, if there is one: a rerun waits for its end."""
    return next((other for other in facts.others if other.key[:3] == want.key[:3]), None)


def _adopted(own: RunRecord, facts: Facts) -> Decision:
    """Answer a claim whose first reply got lost, or one that came back from the dead."""
    if alive(own, facts):
        return Decision(Verdict.GO, lease=own.lease, adopted=True)
    # Its lease ran out before it heard of it. A nonce is good for one attempt: ask with another.
    return Decision(Verdict.BUSY, blocker=own, holder=facts.standings.get(own.lease))


def _lost(want: Want, own: RunRecord, facts: Facts, *, now: float) -> Decision:
    """Decide about a run whose attempt vanished: resume it, let it wait, or end it.

    If its process was ordered to stop the attempt counts as given back. A run that must not be
    tried twice has been tried all the same.
    """
    stopped = own.ordered_to_stop
    struck = own.solitary and not stopped
    if own.cancel_at or facts.retired:  # whoever asked for an end gets it: it is no failure
        reason = "cancelled" if own.cancel_at else "retired"
        change = _end(State.CANCELLED, reason, lost=not stopped, released=stopped)
        return Decision(Verdict.ENDED, change=change)
    if own.handed_off and out_of_time(own, want.policy, now=now):
        return _unheard(want.policy, own, now=now)
    if want.policy.on_loss is OnLoss.FAIL:
        return Decision(Verdict.ENDED, change=_end(State.FAILED, "lost", lost=True))
    pause = 0.0
    if not stopped:
        hopeless = own.streak + 1 >= HOPELESS * want.policy.max_losses
        if hopeless or own.strikes + struck >= want.policy.max_losses:
            change = _end(State.FAILED, "poison", lost=True, struck=struck, quarantine=True)
            return Decision(Verdict.ENDED, change=change)
        pause = loss_pause(want.policy, streak=own.streak + 1)
    if pause:
        at = min(own.beat_at, now) + pause  # a clock that was set back must not make it wait longer
        if at > now:
            change = Change(State.PENDING, "lost", not_before=at, lost=True, struck=struck)
            return Decision(Verdict.LATER, change=change, at=at)
    change = Change(State.RUNNING, lost=not stopped, struck=struck, released=stopped)
    return _free_or_blocked(want, facts, change=change, now=now)


def _unheard(policy: Policy, own: RunRecord, *, now: float) -> Decision:
    """Decide about a handed-off run of which nothing was heard in all of its time.

    That is a timeout, not a loss, and is tried again as one: but not where a run must not be
    tried twice, for nobody knows that the first try has ended.
    """
    assert policy.timeout is not None, "else it could not be out of time"
    error = f"it was handed off, and not heard of within its timeout of {policy.timeout:g} s"
    worth = policy.retry.worth(RunTimedOut(str(own.key), timeout=policy.timeout))
    if worth and own.attempt < policy.retry.attempts and policy.on_loss is not OnLoss.FAIL:
        at = now + policy.retry.pause(own.attempt, dice=1.0)
        change = Change(State.WAITING_RETRY, "timeout", not_before=at, error=error)
        return Decision(Verdict.LATER, change=change, at=at)
    return Decision(Verdict.ENDED, change=Change(State.TIMED_OUT, "timeout", error=error))


def _refused(want: Want, own: RunRecord | None, facts: Facts, *, now: float) -> Decision | None:
    """Decide about a run that never began, where the job or the time speaks against it."""
    if facts.retired:
        return Decision(Verdict.ENDED, change=Change(State.SKIPPED, "retired"))
    if facts.quarantined or facts.paused:
        reason = "quarantined" if facts.quarantined else "paused"
        return Decision(Verdict.ENDED, change=Change(State.SKIPPED, reason))
    deadline = want.policy.start_deadline
    if deadline is not None and own is not None and now > _counted_from(want, own) + deadline:
        return Decision(Verdict.ENDED, change=Change(State.MISSED, "start_deadline"))
    return None


def _counted_from(want: Want, own: RunRecord) -> float:
    """Return when the time to start begins: as planned, or when somebody asked for an old slot."""
    return max(own.key.slot, want.planned) if own.trigger == "schedule" else own.created_at


def _free_or_blocked(want: Want, facts: Facts, *, change: Change, now: float) -> Decision:
    """Grant a free lease of the lock, unless another run goes first."""
    if want.policy.overlap is Overlap.ALLOW:
        return _permitted(want, facts, change=change, now=now)
    superseded = tuple(other.key for other in facts.others if gives_way(want, other))
    in_the_way = [other for other in facts.others if other.key not in superseded]
    active = [other for other in in_the_way if other.active and goes_first(want, other, facts)]
    for other in sorted(active, key=lambda other: not alive(other, facts)):
        if can_be_resumed(want, other, facts, now=now):
            return Decision(Verdict.AFTER, blocker=other)
        return _blocked(want, facts, other, change=change)
    if facts.standings[want.lock].whole:
        return _blocked(want, facts, None, change=change)
    for other in in_the_way:
        if came_first(want, other, facts):
            return Decision(Verdict.AFTER, blocker=other)
    return Decision(Verdict.GO, lease=want.lock, change=change, superseded=superseded)


def _permitted(want: Want, facts: Facts, *, change: Change, now: float) -> Decision:
    for other in facts.others:
        if is_exclusive(want, other, facts) or made_up_first(want, other, facts):
            if can_be_resumed(want, other, facts, now=now):
                return Decision(Verdict.AFTER, blocker=other)
            return _blocked(want, facts, other, change=change)
    lock = facts.standings.get(want.lock)
    if lock is not None and lock.whole:  # a plain lock has it
        return _blocked(want, facts, None, change=change)
    for name in leases_of(want):
        if not facts.standings[name].held:
            return Decision(Verdict.GO, lease=name, change=change)
    return _blocked(want, facts, None, change=change)


def _blocked(want: Want, facts: Facts, other: RunRecord | None, *, change: Change) -> Decision:
    """Decide what a run does that finds its lock taken."""
    own, policy = facts.own, want.policy
    blocker = str(other.key) if other is not None else ""
    waits: Change | None = None
    if own is not None and own.active:  # an active run is never skipped
        verdict = Verdict.LATER
        if change.lost or change.released:
            waits = change._replace(state=State.PENDING, reason="lock_held", blocker=blocker)
    elif want.patient:
        verdict = Verdict.LATER
    elif other is not None and other.trigger in BEHIND:  # it will be over soon, and then it is ours
        verdict = Verdict.LATER
        if own is None:
            waits = Change(State.PENDING, "lock_held", blocker)
    elif policy.overlap is Overlap.FAIL:
        verdict = Verdict.ENDED
        error = f"the lock {want.lock!r} was held"
        waits = Change(State.FAILED, "lock_held", blocker, error=error)
    elif policy.overlap in (Overlap.RESCHEDULE, Overlap.REPLACE):
        replace = other is not None and replaces(want, other)
        verdict = Verdict.REPLACE if replace else Verdict.LATER
        if own is None:
            waits = Change(State.PENDING, "replacing" if replace else "lock_held", blocker)
            waiting = sum(run.fresh and run.key.job == want.key.job for run in facts.others)
            if policy.max_waiting is not None and waiting >= policy.max_waiting:
                verdict, waits = Verdict.ENDED, Change(State.SKIPPED, "waiting_full", blocker)
    else:
        verdict, waits = Verdict.ENDED, Change(State.SKIPPED, "lock_held", blocker)
    holder = _holder(want, facts, other)
    return Decision(verdict, change=waits, blocker=other, holder=holder)


def _holder(want: Want, facts: Facts, other: RunRecord | None) -> Standing | None:
    names = [other.lease] if other is not None and other.lease else looked_at(want)
    held = (facts.standings[name] for name in names if name in facts.standings)
    return next((standing for standing in held if standing.whole), None)


def _end(state: State, reason: str, **more: Any) -> Change:
    return Change(state, reason, **more)
