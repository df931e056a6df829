"""Schedules that need no calendar are arithmetic: each slot is computed, none is added up.

What every schedule can be asked stands here too. Schedules are values: what is wrong with one is
said when it is made; afterwards it only answers.
"""

from __future__ import annotations

from datetime import datetime

from fencepost.errors import BadDuration, BadSchedule, BadSlot
from fencepost.model import slot as slots
from fencepost.model.duration import seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from fencepost.model.duration import Duration

    Instant = datetime | str | float

END = 253_370_764_800  # the year 9999: from here on, some zone's calendar has no more pages
HORIZON = 8  # years; a leap day can be that far away, as from 2096 to 2104
LONGEST = HORIZON * 365 * 86400
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


class Schedule:
    """What all schedules can be asked. Two are equal if they say the same in other words.

    ``spec`` is the schedule as canonical text: whatever changes a slot is in it, and nothing else.
    """

    __slots__ = ("spec",)  # set last: from then on, nothing else can be
    spec: str

    def after(self, instant: float) -> int | None:
        """Return the first slot strictly later than ``instant``, or None if there is none."""
        found = self._after(second_of(instant))
        return found if found is not None and found < END else None

    def latest(self, instant: float) -> int | None:
        """Return the newest slot that is not later than ``instant``, or None if there is none."""
        found = self._latest(second_of(instant))
        return found if found is not None and found >= 0 else None

    def contains(self, slot: int) -> bool:
        """Say whether ``slot`` is one of this schedule's."""
        return self.latest(slot) == slot

    def between(self, start: float, end: float) -> Iterator[int]:
        """Yield the slots from ``start`` on and before ``end``, oldest first, one at a time."""
        found = self.after(start - 1)
        while found is not None and found < end:
            if found >= start:  # which may be a fraction later than the first
                yield found
            found = self.after(found)

    if TYPE_CHECKING:

        def _after(self, second: int) -> int | None: ...
        def _latest(self, second: int) -> int | None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self.spec == other.spec

    def __hash__(self) -> int:
        return hash(self.spec)

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(self, "spec"):
            raise AttributeError(f"{self} is a value: make another instead of setting {name!r}")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"<{self}>"


class Every(Schedule):
    """A slot each ``interval``, counted from ``anchor`` plus ``phase`` in both directions.

    The k-th is computed, never added up, so it does not drift. The default anchor is 1970-01-01 in
    UTC: every 15 minutes is at :00, :15, :30 and :45.
    """

    __slots__ = ("interval", "offset")
    interval: int
    offset: int

    def __init__(self, interval: Duration, *, anchor: Instant = 0, phase: Duration = 0) -> None:
        length, shift = _length(interval, "every"), _whole(phase, "phase", seconds)
        if not 0 <= shift < length:
            raise BadSchedule(f"phase is {phase!r}: give less than the interval of {length} s")
        first = _whole(anchor, "anchor", slots.instant) + shift
        offset = first % length
        shifted = f',"offset":{offset}' if offset else ""
        fill = object.__setattr__  # there may be a million of these to make
        fill(self, "interval", length)
        fill(self, "offset", offset)
        fill(self, "spec", f'{{"every":{length}{shifted}}}')

    def __str__(self) -> str:
        shifted = f", shifted by {shortly(self.offset)}" if self.offset else ""
        return f"every {shortly(self.interval)}{shifted}"

    def _after(self, second: int) -> int | None:
        return self._latest(second) + self.interval

    def _latest(self, second: int) -> int:
        return (second - self.offset) // self.interval * self.interval + self.offset


class EveryAfter(Schedule):
    """A slot ``interval`` after the last run has ended: as often as possible, never at once.

    There is no calendar. Which second becomes a slot is decided by when a run ends, so each second
    may be one (``contains``), none is known beforehand (``between`` is empty), and none is the
    newest (``latest`` is None): whoever knows the last run's end asks ``after_end``.
    """

    __slots__ = ("interval",)

    def __init__(self, interval: Duration) -> None:
        self.interval = _length(interval, "every after")
        self.spec = f'{{"every_after":{self.interval}}}'

    def __str__(self) -> str:
        return f"{shortly(self.interval)} after the last run"

    def after_end(self, ended_at: float) -> int:
        """Return the slot that follows a run which ended then."""
        return second_of(ended_at) + self.interval

    def contains(self, slot: int) -> bool:
        """Say that ``slot`` may be one: only the end of the run before it could tell."""
        return 0 <= slot < END

    def between(self, start: float, end: float) -> Iterator[int]:
        """Yield nothing: no slot is known before a run has ended."""
        del start, end
        return iter(())

    def _after(self, second: int) -> int | None:
        return self.after_end(second)

    def _latest(self, second: int) -> int | None:
        del second
        return None


class At(Schedule):
    """One slot, at ``instant``."""

    __slots__ = ("slot",)

    def __init__(self, instant: Instant) -> None:
        self.slot = _whole(instant, "at", slots.instant)
        self.spec = f'{{"at":{self.slot}}}'

    def __str__(self) -> str:
        return f"once at {slots.shown(self.slot)}"

    def _after(self, second: int) -> int | None:
        return self.slot if self.slot > second else None

    def _latest(self, second: int) -> int | None:
        return self.slot if self.slot <= second else None


def second_of(instant: float) -> int:
    """Return the whole second of an instant, within the calendar: infinity is its end."""
    return int(min(max(instant, -1), END - 1) // 1)


def shortly(length: int) -> str:
    """Return a length in the largest unit that it is a whole number of: ``90 min``."""
    return next(f"{length // size} {unit}" for size, unit in _UNITS if length % size == 0)


def _length(interval: Duration, what: str) -> int:
    length = _whole(interval, what, seconds)
    if not 1 <= length <= LONGEST:
        raise BadSchedule(f"{what} is {interval!r}: give 1 s or more, up to {HORIZON} years")
    return length


def _whole(value: Any, what: str, read: Callable[[Any], float]) -> int:
    if type(value) is int and 0 <= value < END:
        return value
    try:
        number = read(value)
    except (BadDuration, BadSlot) as error:
        wrong = str(error).partition(" is ")[2]  # they cannot know what it is for
        raise BadSchedule(f"{what} is {wrong}") from None
    exact = value.timestamp() if isinstance(value, datetime) else value
    if abs((exact if isinstance(exact, float) else number) - round(number)) > 1e-7:  # or 0.55 h
        raise BadSchedule(f"{what} is {value!r}: slots are whole seconds, leave the fraction out")
    if number >= END:
        raise BadSchedule(f"{what} is {value!r}: the calendar ends with the year 9998")
    return round(number)
