"""A schedule is a rule that yields slots: whole seconds of UTC, each later than the one before.

This is the door to all of them: which one a job asked for, and what a trigger or a reader means.
"""

from __future__ import annotations

from fencepost.errors import BadSchedule
from fencepost.model.cron import Cron
from fencepost.model.every import At, Every, EveryAfter, Schedule
from fencepost.model.spec import schedule_from, spec_of
from fencepost.model.spread import delay
from fencepost.model.words import described, doubtful, dst_note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.model.duration import Duration
    from fencepost.model.every import Instant

__all__ = [
    "At",
    "Cron",
    "Every",
    "EveryAfter",
    "Schedule",
    "delay",
    "described",
    "doubtful",
    "dst_note",
    "due_slot",
    "schedule_from",
    "schedule_of",
    "spec_of",
    "upcoming",
]


def schedule_of(  # noqa: PLR0913 -- one for each word that a job may say about time
    *,
    cron: str | Cron | None = None,
    every: Duration | Every | EveryAfter | None = None,
    at: Instant | At | None = None,
    tz: str = "UTC",
    second: int | None = None,
    day_match: str | None = None,
    dst_gap: str | None = None,
    dst_fold: str | None = None,
    spread: str | None = None,
) -> Schedule | None:
    """Return the one schedule that was asked for, or None if none was. Two are refused.

    ``spread`` is the name by which ``H`` is chosen, for a cron that is given as text: the job's.
    """
    given = [f"{value}" for value in (cron, every, at) if value is not None]
    if len(given) > 1:
        raise BadSchedule(f"both {' and '.join(given)} are given: choose one, or make two jobs")
    words = {
        word: value
        for word, value in (
            ("second", second),
            ("day_match", day_match),
            ("dst_gap", dst_gap),
            ("dst_fold", dst_fold),
        )
        if value is not None
    }
    if cron is not None and not isinstance(cron, Cron):
        return Cron(cron, tz, spread=spread, **words)  # type: ignore[arg-type]  # each its own
    made = _ready(cron, every, at)
    for word, value in words.items():
        subject = "no cron is there to follow it" if made is None else f"{made} would not follow it"
        where = "say it inside of Cron(…)" if isinstance(made, Cron) else "it belongs to cron"
        raise BadSchedule(f"{word} is {value!r}, but {subject}: {where}")
    if made is not None and tz not in ("UTC", getattr(made, "tz", "UTC")):
        raise BadSchedule(f"tz is {tz!r}, which {made} would not follow: leave it out, or use cron")
    return made


def due_slot(schedule: Schedule, now: float, *, early: float = 1.0) -> int | None:
    """Return the slot that a trigger at ``now`` means: the newest, or one that is about to come.

    Clocks differ, so a trigger up to ``early`` seconds before a slot means that slot. The tolerance
    is never more than a tenth of the distance between the two: with one each second, 0.1 s. A
    schedule without a calendar has none that a trigger could mean.
    """
    if isinstance(schedule, EveryAfter):
        return None
    newest, coming = schedule.latest(now), schedule.after(now)
    if coming is not None and newest is not None:
        early = tolerance(newest, coming, early=early)
    return newest if coming is None or coming - now > early else coming


def tolerance(slot: int, coming: int, *, early: float) -> float:
    """Return how many seconds before the ``coming`` slot a trigger means that one already."""
    return min(early, (coming - slot) / 10)


def upcoming(schedule: Schedule, *, after: float, count: int) -> list[int]:
    """Return the next slots later than ``after``, at most ``count``.

    Of ``EveryAfter``, whose slots depend on when runs end, it is the one that would follow a run
    that ended at ``after``.
    """
    known = min(count, 1) if isinstance(schedule, EveryAfter) else count
    found: list[int] = []
    while len(found) < known:
        coming = schedule.after(found[-1] if found else after)
        if coming is None:
            break
        found.append(coming)
    return found


def _ready(
    cron: Cron | None, every: Duration | Every | EveryAfter | None, at: Instant | At | None
) -> Schedule | None:
    if cron is not None:
        return cron
    if every is not None:
        return every if isinstance(every, Every | EveryAfter) else Every(every)
    if at is not None:
        return at if isinstance(at, At) else At(at)
    return None
