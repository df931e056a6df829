"""What a run is on record as, once a claim of it was decided."""

from __future__ import annotations

from fencepost.model.claim import SUSPICIOUS
from fencepost.model.ending import UNFINISHED
from fencepost.model.lease import Holder
from fencepost.model.run import STOPPING, RunRecord, State
from fencepost.model.slot import RunKey

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.model.claim import Change, Want


def claimed_record(
    want: Want, own: RunRecord | None, change: Change, *, lease: str, token: int, now: float
) -> RunRecord:
    """Return a run as a granted claim leaves it: started, and counted before user code begins."""
    run = changed_record(want, own, change, now=now)
    return run._replace(
        lock=want.lock,  # as the definition has it now
        lease=lease,
        token=token,
        holder=want.holder,
        started_at=now,
        beat_at=now,
        not_before=0.0,
        reason="",
        blocker="",
        error=None,
        starts=run.starts + 1,
        saves=0,
        solitary=run.streak >= SUSPICIOUS and want.can_be_alone,
    )


def left_behind(own: RunRecord | None, change: Change) -> tuple[str, str] | None:
    """Return the event that tells how the attempt before ended, and its detail; None if none did.

    Only who claims a run finds out that an attempt has vanished.
    """
    if own is None:
        return None
    if change.lost:
        return "attempt_lost", ""
    if change.released:
        return UNFINISHED[State.PENDING], STOPPING
    if own.handed_off and change.state in UNFINISHED:
        return UNFINISHED[change.state], change.error or ""
    return None


# What lies between how often a run began and its epoch, as a first claim leaves it.
_UNTRIED = RunRecord(RunKey("", 0), State.RUNNING, "")[16:-1]


def begun_record(want: Want, *, token: int, now: float) -> RunRecord:
    """Return a run as the first claim leaves it, where there was nothing before."""
    # By position: for every run that is claimed.
    return RunRecord(
        want.key,
        State.RUNNING,
        want.lock,
        want.lock,
        token,
        want.holder,
        "",
        "",
        want.trigger,
        now,
        now,
        0.0,
        0.0,
        now,
        0.0,
        1,
        *_UNTRIED,
        want.epoch,
    )


def changed_record(want: Want, own: RunRecord | None, change: Change, *, now: float) -> RunRecord:
    """Return a run as a decision about it leaves it."""
    run = own or _first_record(want, change, now=now)
    return run._replace(
        state=change.state,
        reason=change.reason,
        blocker=change.blocker,
        not_before=change.not_before,
        ended_at=now if change.state.terminal else 0.0,
        losses=run.losses + change.lost,
        releases=run.releases + change.released,
        streak=run.streak + change.lost,
        strikes=run.strikes + change.struck,
        error=change.error if change.error is not None else run.error,
    )


def _first_record(want: Want, change: Change, *, now: float) -> RunRecord:
    # Who asked first is kept by its nonce alone: asking again after a lost reply, it finds its own.
    asker = Holder(want.holder.nonce, "", 0, "")
    return RunRecord(
        want.key,
        change.state,
        want.lock,
        holder=asker,
        trigger=want.trigger,
        created_at=now,
        epoch=want.epoch,
    )
