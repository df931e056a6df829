"""What becomes of slots that are due and undecided when the schedule of their job is changed.

A slot that both schedules have stays due, and catch-up decides about it as about any other. A slot
of the old schedule only is passed by, on record; one of the new schedule only never fires.
"""

from __future__ import annotations

from itertools import islice

from fencepost.model.every import LONGEST, Every, EveryAfter
from fencepost.model.named import NamedTuple
from fencepost.model.plan import Span, starts_at
from fencepost.model.rules import CatchUp
from fencepost.model.run import State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fencepost.model.every import Schedule
    from fencepost.model.plan import Agenda
    from fencepost.model.rules import Rules

# How many slots are looked at, at most, to find those that two schedules have: a week of seconds.
_LOOKS = 604_800


class Stretch(NamedTuple):
    """Slots that stay due: all that a schedule has from ``first`` to ``last``."""

    schedule: Schedule
    first: int
    last: int


class Edit(NamedTuple):
    """Where a job stands once its schedule was changed, and which slots were passed by.

    Slots that stay due lie above the watermark if both schedules have just these there. Else they
    are ``kept``, to be made up apart, and the job begins anew at the watermark.
    """

    watermark: int
    owed: int = 0
    passed: tuple[Span, ...] = ()
    kept: tuple[Stretch, ...] = ()

    @property
    def begins(self) -> int:
        """Return from which instant on slots are still to be decided."""
        return self.kept[0].first if self.kept else self.watermark + 1


def edit(
    old: Schedule | None, new: Schedule | None, rules: Rules, agenda: Agenda, *, now: float
) -> Edit:
    """Decide about every slot of the old schedule that is due at ``now`` and undecided."""
    nothing = Edit(max(agenda.watermark, int(now)))
    if old is None or isinstance(old, EveryAfter):
        return nothing
    newest, first = old.latest(now), old.after(agenda.watermark)  # also if its jitter is not over
    if newest is None or first is None or first > newest:
        return nothing
    still_owed = agenda.owed > agenda.watermark
    kept = [] if agenda.barred else _kept(old, new, rules, (first, newest), still_owed, now=now)
    late: tuple[Span, ...] = ()
    if kept and new is not None and _is_late(new, rules, agenda.job, kept[-1], now=now):
        late = (Span(kept[0], kept[-1], State.MISSED, "start_deadline"),)
    passed_by = list(gaps(old, kept, first, newest))
    passed = tuple(sorted([*passed_by, *late]))
    if not kept or late or new is None:
        return nothing._replace(passed=passed)
    alone = all(span.last < kept[0] for span in passed_by)
    if not alone or list(islice(new.between(kept[0], now + 1), len(kept) + 1)) != kept:
        return nothing._replace(passed=passed, kept=tuple(stretches(new, kept)))
    owed = kept[-1] if still_owed and rules.catchup is CatchUp.ALL else 0
    return Edit(kept[0] - 1, owed, passed)


def gaps(old: Schedule, kept: list[int], first: int, newest: int) -> Iterator[Span]:
    """Yield the slots of the old schedule from ``first`` to ``newest`` between those kept."""
    start: int | None = first
    for slot in [*kept, newest + 1]:
        last = old.latest(slot - 1)
        if start is not None and last is not None and start <= last:
            yield Span(start, last, State.SKIPPED, "schedule_changed")
        start = old.after(slot)


def common(old: Schedule, new: Schedule | None, first: int, last: int, *, most: int) -> list[int]:
    """Return the newest slots that both schedules have, oldest first, at most so many."""
    if new is None or isinstance(new, EveryAfter):
        return []
    return [*islice(_common_backwards(old, new, first, last), most)][::-1]


def stretches(new: Schedule, kept: Sequence[int]) -> Iterator[Stretch]:
    """Split slots of the new schedule into stretches, each of a schedule that has no others there.

    It is the new one, or one in equal steps: every version that knows the job can read either.
    """
    place = 0
    while place < len(kept):
        stretch, many = new, _in_a_row(new, kept, place)
        step = kept[place + 1] - kept[place] if place + 1 < len(kept) else 0
        if many == 1 and 0 < step <= LONGEST:
            stretch = Every(step, anchor=kept[place])
            many = _in_a_row(stretch, kept, place)
        yield Stretch(stretch, kept[place], kept[place + many - 1])
        place += many


def _in_a_row(schedule: Schedule, kept: Sequence[int], place: int) -> int:
    """Return how many of the slots from a place on follow each other in a schedule."""
    many = 1
    while place + many < len(kept) and schedule.after(kept[place + many - 1]) == kept[place + many]:
        many += 1
    return many


def _common_backwards(one: Schedule, other: Schedule, first: int, last: int) -> Iterator[int]:
    """Yield the slots that both have, newest first: each leaps to where the other one is."""
    for _ in range(_LOOKS):
        slot = one.latest(last)
        there = None if slot is None or slot < first else other.latest(slot)
        if there is None or there < first:
            return
        if there == slot:
            yield there
            there -= 1
        last = there


def _kept(
    old: Schedule,
    new: Schedule | None,
    rules: Rules,
    due: tuple[int, int],
    still_owed: bool,  # noqa: FBT001 -- a fact like the others
    *,
    now: float,
) -> list[int]:
    """Return the slots that stay due: all that can be made up, or the newest."""
    first, newest = due
    if rules.catchup is not CatchUp.ALL:
        return common(old, new, first, newest, most=1)
    if not still_owed:
        window = rules.window if rules.start_deadline is None else rules.start_deadline
        first = max(first, int(now - window))
    return common(old, new, first, newest, most=rules.limit)


def _is_late(schedule: Schedule, rules: Rules, job: str, slot: int, *, now: float) -> bool:
    deadline = rules.deadline
    if deadline is None or rules.catchup is CatchUp.ALL:
        return False
    return now > starts_at(schedule, rules, job, slot) + deadline
