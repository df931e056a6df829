"""Which run a trigger means, and at which times of the ledger's clock it means that run.

The ledger's clock decides which slot is due, and the caller has only its own to choose by. So a
claim carries between which instants the choice holds, and the ledger refuses it at any other time.
A caller whose clock is a little ahead waits for its slot; one whose clock is wrong chooses again.
"""

from __future__ import annotations

from fencepost.model.claim import FOREVER
from fencepost.model.named import NamedTuple
from fencepost.model.schedule import due_slot, tolerance
from fencepost.model.slot import RunKey

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.model.schedule import Schedule

# A clock that differs from the ledger's by more than this is wrong.
SLACK = 2.0
# How long before its instant a trigger may mean a slot: a timer may fire a moment early. Such a
# trigger waits, for no slot starts early.
EARLY = 1.0


class Meant(NamedTuple):
    """A run, and the times of the ledger's clock at which a trigger means it."""

    key: RunKey
    since: float = 0.0
    until: float = FOREVER


def newest_slot(job: str, schedule: Schedule, *, now: float) -> Meant | None:
    """Return the newest slot that is due by the caller's clock; None if none is due."""
    slot = due_slot(schedule, now, early=EARLY)
    if slot is None:
        return None
    until, coming = FOREVER, schedule.after(slot)
    if coming is not None:
        until = max(coming - tolerance(slot, coming, early=EARLY), now + SLACK)
    return Meant(RunKey(job, slot), float(slot), until)


def given_slot(job: str, slot: int) -> Meant:
    """Return a slot that the caller names: it must not start early by the ledger's clock."""
    return Meant(RunKey(job, slot), float(slot))


def by_ledger(key: RunKey, *, now: float) -> Meant:
    """Return a run that was chosen by the ledger's clock, whose slot may be about to come."""
    return Meant(key, float(key.slot) if key.slot > now and not key.manual else 0.0)


def comes_in(meant: Meant, *, now: float) -> float:
    """Return how long a trigger waits for its slot; 0 if it has come, or is too far away."""
    wait = meant.since - now
    return wait if 0.0 < wait <= SLACK else 0.0


def manual_run(job: str, *, now: float, number: int = 1) -> Meant:
    """Return a run that has no slot: it is named after the time at which it was asked for."""
    return Meant(RunKey(job, int(now), manual=number), now - SLACK, now + SLACK)


def clock_off(now: float, *, asked: float, answered: float) -> float:
    """Return how far the caller's clock is ahead of the ledger's; 0 if the two agree.

    The ledger's clock showed ``now`` at some time between the question and the answer.
    """
    off = min(answered - now, 0.0) or max(asked - now, 0.0)
    return off if abs(off) > SLACK else 0.0
