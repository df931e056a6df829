"""Which slots of the past a lane makes up, and as which run of each."""

from __future__ import annotations

from fencepost.ledger.planning import BACKFILL_ALL, OWED, Lane
from fencepost.model.plan import Span, newest_due, starts_at
from fencepost.model.rules import CatchUp
from fencepost.model.run import State
from fencepost.model.slot import RunKey

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from fencepost.ledger.planning import Desk
    from fencepost.model.definition import JobRecord
    from fencepost.model.edited import Stretch
    from fencepost.model.run import RunRecord

_AGAIN = {"skip": frozenset[State](), "all": frozenset(State)}
_AGAIN["failed"] = frozenset({State.FAILED, State.TIMED_OUT, State.MISSED, State.SKIPPED})


def repeats(existing: str, run: RunRecord) -> bool:
    """Say whether a run that has ended is to be repeated."""
    return run.state.terminal and run.state in _AGAIN[existing]


def made_up_as(lane: Lane, slot: int, known: RunRecord | None, *, pruned: int) -> int | None:
    """Return which run of a slot a lane is to begin; None if none, for that was done before.

    A slot whose history is gone counts as done. To repeat it all the same takes a number that none
    of its forgotten runs can have had. What is owed is not forgotten before it was made up.
    """
    if known is not None:
        return known.key.rerun + 1 if repeats(lane.existing, known) else None
    if slot > pruned:
        return 0
    return int(lane.created_at) if lane.existing == "all" else None


def items_known_by(desk: Desk, run: RunRecord) -> int:
    """Return by which run of its slot the items of a run are known."""
    for rerun in range(run.key.rerun, 0, -1):
        known = desk.run(run.key._replace(rerun=rerun))
        if known is None:  # nobody remembers it
            return 0
        if known.trigger == BACKFILL_ALL:
            return rerun
    return 0


def owed_now(desk: Desk, job: JobRecord) -> int:
    """Return what a job owes: an outage, or lanes that go before the live slots; 0 if neither."""
    rules = job.catching_up
    if job.owed > job.watermark:
        return job.owed
    ordered = rules.catchup is CatchUp.ALL and not rules.live_first
    return job.watermark if ordered and owed_lanes(desk, job.job) else 0


def owed_lanes(desk: Desk, name: str) -> list[Lane]:
    """Return what is owed of a job, what is owed for longest first."""
    return [lane for lane in desk.lanes(name) if lane.trigger == OWED]


def owe(desk: Desk, name: str, kept: Sequence[Stretch], *, since: int = 0) -> None:
    """Have slots made up that stay due, though the schedule in force has others among them."""
    for schedule, start, last in kept:
        first = max(start, since)
        lane = Lane(0, name, first, last + 1, first, trigger=OWED, spec=schedule.spec)
        desk.put_lane(lane._replace(created_at=desk.now))


def oldest_owed(desk: Desk, job: str) -> Lane | None:
    """Return the lane of a job whose slots are owed for longest; None if none are."""
    return next(iter(owed_lanes(desk, job)), None)


def jitter_ends(job: JobRecord, slot: int) -> float:
    """Return when an owed slot may start: it keeps its jitter, though it is made up."""
    schedule = job.schedule
    return slot if schedule is None else starts_at(schedule, job.catching_up, job.job, slot)


def given_up(lane: Lane, job: JobRecord, slot: int, *, now: float) -> Span | None:
    """Return how an owed slot is recorded that ``catchup`` would not make up; None if it would.

    A job that makes up every slot gives none up. Of any other an owed slot may start until its
    deadline, and until a newer slot of the schedule in force is due.
    """
    schedule, rules = job.schedule, job.catching_up
    if schedule is None or rules.catchup is CatchUp.ALL:
        return None
    deadline = rules.deadline
    if deadline is not None and now > jitter_ends(job, slot) + deadline:
        return Span(slot, slot, State.MISSED, "start_deadline")
    newest = newest_due(schedule, rules, job.job, now=now)
    if newest is None or newest <= max(slot, lane.created_at):  # older ones never fire
        return None
    if rules.catchup is CatchUp.NONE:
        return Span(slot, slot, State.MISSED, "start_deadline")
    return Span(slot, slot, State.MISSED, "coalesced", str(RunKey(job.job, newest)))
