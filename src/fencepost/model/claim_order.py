"""Which of two runs of one lock goes first: the one that is asked for, or another live one."""

from __future__ import annotations

from fencepost.model.policy import Overlap, RetryUntil
from fencepost.model.run import RunRecord, State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.model.claim import Facts, Want

# A run with such a trigger makes up for the past, and never keeps a live slot from running.
BEHIND = frozenset({"backfill", "backfill_all", "owed"})
# A run with this trigger makes up for the past before the live slots.
CATCHUP = "catchup"


def alive(run: RunRecord, facts: Facts) -> bool:
    """Say whether the attempt that has a run still holds its lease."""
    standing = facts.standings.get(run.lease)
    return (
        run.state is State.RUNNING
        and standing is not None
        and standing.held
        and standing.holder.nonce == run.holder.nonce
    )


def goes_first(want: Want, other: RunRecord, facts: Facts) -> bool:
    """Say whether an active run goes before the one that was asked for.

    Of two that are both active and both without an attempt, the older goes first. Without this
    rule each would wait for the other, for ever.
    """
    if facts.own is None or not facts.own.active or alive(other, facts):
        return True
    return (other.key.slot, other.key) < (want.key.slot, want.key)


def is_exclusive(want: Want, other: RunRecord, facts: Facts) -> bool:
    """Say whether a run has, or had when it was lost, the whole lock of which a permit is asked."""
    whole = other.state is State.RUNNING and other.lease == want.lock
    return whole and goes_first(want, other, facts)


def made_up_first(want: Want, other: RunRecord, facts: Facts) -> bool:
    """Say whether a run that may overlap waits all the same: what is made up runs one at a time."""
    return (
        want.patient
        and not want.behind
        and CATCHUP in (want.trigger, other.trigger)
        and other.active
        and other.key.job == want.key.job
        and other.trigger not in BEHIND
        and not other.key.manual
        and goes_first(want, other, facts)
    )


def gives_way(want: Want, other: RunRecord) -> bool:
    """Say whether a failing run ends because this newer slot of its job is due."""
    return (
        other.state is State.WAITING_RETRY
        and want.policy.retry_until is RetryUntil.NEXT_SLOT
        and other.key.job == want.key.job
        and other.key.slot < want.key.slot
        and not (want.key.manual or other.key.manual or want.behind or other.trigger in BEHIND)
    )


def can_be_resumed(want: Want, other: RunRecord, facts: Facts, *, now: float) -> bool:
    """Say whether a run that was lost can be resumed by the asker, and now.

    An asker knows the policies of its own job only. What it is to replace it does not resume,
    but once a cancel was asked for, whoever claims a lost run ends it.
    """
    if other.key.job != want.key.job or other.state is State.WAITING_RETRY:
        return False
    if replaces(want, other) and not other.cancel_at and not (facts.own and facts.own.active):
        return False
    if other.state is State.RUNNING:
        return not alive(other, facts)
    return other.not_before <= now


def replaces(want: Want, other: RunRecord) -> bool:
    """Say whether a run has the right to take another's place: an older slot never does."""
    return want.policy.overlap is Overlap.REPLACE and other.key.slot <= want.key.slot


def came_first(want: Want, other: RunRecord, facts: Facts) -> bool:
    """Say whether ``other`` waits for the same lock and has waited for longer.

    A run that was begun before goes before those that were not, however old they are. What makes
    up for the past goes after all that is live.
    """
    if want.behind and facts.own is None:
        return other.key.job == want.key.job and other.fresh and other.trigger not in BEHIND
    return (
        want.policy.overlap is Overlap.RESCHEDULE
        and not (facts.own is not None and facts.own.active)
        and other.key.job == want.key.job
        and other.fresh
        and other.key.slot < want.key.slot
        and other.trigger not in BEHIND
    )
