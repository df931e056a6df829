"""A schedule is a rule that yields slots: whole seconds of UTC, each later than the one before.

Schedules are values. What is wrong with one is said when it is made; afterwards it only answers.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from datetime import UTC, datetime, timedelta

from fencepost.errors import BadDuration, BadSchedule, BadSlot
from fencepost.model import slot as slots
from fencepost.model.duration import seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from datetime import tzinfo
    from typing import Any

    from cronsim import CronSim

    from fencepost.model.duration import Duration

    Instant = datetime | str | float

_ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_ALIASES |= {"@annually": _ALIASES["@yearly"], "@midnight": _ALIASES["@daily"]}
_NAMES = ("minute", "hour", "day-of-month", "month", "day-of-week")
# A leap day can be eight years away, as from 2096 to 2104. The years to ask about are fixed, not
# "now": what is a schedule today must be one tomorrow. In 28 of them, each date has each weekday.
_HORIZON, _ASKED = 8, (2000, 2008, 2016, 2024)
_END = 253_370_764_800  # the year 9999: from here on, some zone's calendar has no more pages
_SECOND = timedelta(seconds=1)


class Schedule:
    """What all schedules can be asked. Two are equal if they say the same in other words."""

    __slots__ = ("_meaning",)  # set last: from then on, nothing else can be
    _meaning: tuple[object, ...]

    def after(self, instant: float) -> int | None:
        """Return the first slot strictly later than ``instant``, or None if there is none."""
        found = self._after(_second(instant))
        return found if found is not None and found < _END else None

    def latest(self, instant: float) -> int | None:
        """Return the newest slot that is not later than ``instant``, or None if there is none."""
        found = self._latest(_second(instant))
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
        return isinstance(other, Schedule) and self._meaning == other._meaning

    def __hash__(self) -> int:
        return hash(self._meaning)

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(self, "_meaning"):
            raise AttributeError(f"{self} is a value: make another instead of setting {name!r}")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"<{self}>"


class Cron(Schedule):
    """The slots of a cron expression of five fields, by the wall clocks of ``tz``.

    Where clocks go forward, a time that they leave out is due at the first instant after the gap,
    and several such times are one slot. Where they go back, a time that comes twice is due at the
    first. A minute or hour that begins with ``*``, or hours that are all there are, follow
    elapsed time instead: nothing shifts, and what comes twice is due twice (Debian's rule).
    """

    __slots__ = ("_ahead", "_back", "_fields", "_wild", "_zone", "expression", "tz")

    def __init__(self, expression: str, tz: str = "UTC") -> None:
        self._fields, self._zone = _fields(expression), _zone(tz)
        self.expression, self.tz = " ".join(expression.split()), tz
        self._ahead, self._back = _parsed(self.expression, self._fields)
        walk, stars = self._ahead, [field[0] == "*" for field in self._fields]
        self._wild = tz != "UTC" and (stars[0] or stars[1] or len(walk.hours) == 24)
        weekdays = {0 if day == 7 else day for day in walk.weekdays}
        sets: list[Iterable[object]] = [walk.minutes, walk.hours, walk.days, walk.months, weekdays]
        self._meaning = ("cron", *map(frozenset[object], sets), walk.day_and, self._wild, tz)

    def __str__(self) -> str:
        return f"cron {self.expression!r} in {self.tz}"

    def _after(self, second: int) -> int | None:
        here = datetime.fromtimestamp(second, self._zone)
        found = self._search(here, beyond=second)
        turn = self._turn(here) if self._wild and not here.fold else None
        if turn is not None and (found is None or found > turn):
            # The clocks are about to go back: what comes after that is earlier on their faces.
            again = datetime.fromtimestamp(turn, self._zone)
            found = self._search(again - _SECOND, beyond=turn - 1)
        return found

    def _latest(self, second: int) -> int | None:
        here = datetime.fromtimestamp(second, self._zone)
        turn = self._turn(here) if here.fold else None
        due = turn is None or self._wild  # what comes twice is due at the first, unless wild
        found = self._search(here + _SECOND, beyond=second + 1, back=True) if due else None
        if turn is not None and (found is None or found < turn):
            # The clocks went back a moment ago: what was before is later on their faces.
            ahead = datetime.fromtimestamp(turn - 1, self._zone)
            found = self._search(ahead + _SECOND, beyond=turn, back=True)
        return found

    def _search(self, wall: datetime, *, beyond: int, back: bool = False) -> int | None:
        """Return the first slot past ``beyond`` whose local time is past ``wall``.

        cronsim walks a calendar without zones, because its own walk along a zone steps by whole
        hours and so loses slots where clocks move by half of one (Lord Howe).
        """
        walk = copy.copy(self._back if back else self._ahead)  # parsed once, walked often
        walk.dt = wall.replace(tzinfo=None, fold=0)
        try:
            for local in walk:
                for found in self._instants(local, back=back):
                    if found < beyond if back else found > beyond:
                        return found
        except OverflowError:
            pass  # the calendar's last page
        return None

    def _instants(self, local: datetime, *, back: bool) -> tuple[int, ...]:
        """Return when a local time is due, in the order of the search."""
        once = int(local.replace(tzinfo=self._zone).timestamp())
        again = int(local.replace(tzinfo=self._zone, fold=1).timestamp())
        if once > again:  # a gap: the clocks never show it
            return () if self._wild else (self._change(again, once),)
        if once == again or not self._wild:
            return (once,)
        return (again, once) if back else (once, again)

    def _turn(self, here: datetime) -> int | None:
        """Return when the clocks go back, if they show ``here`` once before that and once after."""
        once, again = (int(here.replace(fold=fold).timestamp()) for fold in (0, 1))
        return self._change(once, again) if once < again else None

    def _change(self, before: int, after: int) -> int:
        """Return the first second with another offset than ``before``, at the latest ``after``."""

        def changed(second: int) -> bool:
            return datetime.fromtimestamp(second, self._zone).utcoffset() != old

        old = datetime.fromtimestamp(before, self._zone).utcoffset()
        return before + 1 + bisect_left(range(before + 1, after), 1, key=changed)


class Every(Schedule):
    """A slot each ``interval``, counted from ``anchor`` plus ``phase`` in both directions.

    The k-th is computed, never added up, so it does not drift. The default anchor is 1970-01-01 in
    UTC: every 15 minutes is at :00, :15, :30 and :45.
    """

    __slots__ = ("interval", "offset")

    def __init__(self, interval: Duration, *, anchor: Instant = 0, phase: Duration = 0) -> None:
        length, shift = _whole(interval, "every", seconds), _whole(phase, "phase", seconds)
        if not 1 <= length <= _HORIZON * 365 * 86400:
            raise BadSchedule(f"every is {interval!r}: give 1 s or more, up to {_HORIZON} years")
        if not 0 <= shift < length:
            raise BadSchedule(f"phase is {phase!r}: give less than the interval of {length} s")
        first = _whole(anchor, "anchor", slots.instant) + shift
        self.interval, self.offset = length, first % length
        self._meaning = ("every", self.interval, self.offset)

    def __str__(self) -> str:
        shifted = f", shifted by {_words(self.offset)}" if self.offset else ""
        return f"every {_words(self.interval)}{shifted}"

    def _after(self, second: int) -> int | None:
        return self._latest(second) + self.interval

    def _latest(self, second: int) -> int:
        return (second - self.offset) // self.interval * self.interval + self.offset


class At(Schedule):
    """One slot, at ``instant``."""

    __slots__ = ("slot",)

    def __init__(self, instant: Instant) -> None:
        self.slot = _whole(instant, "at", slots.instant)
        self._meaning = ("at", self.slot)

    def __str__(self) -> str:
        return f"once at {slots.shown(self.slot)}"

    def _after(self, second: int) -> int | None:
        return self.slot if self.slot > second else None

    def _latest(self, second: int) -> int | None:
        return self.slot if self.slot <= second else None


def schedule_of(
    *,
    cron: str | Cron | None = None,
    every: Duration | Every | None = None,
    at: Instant | At | None = None,
    tz: str = "UTC",
) -> Schedule | None:
    """Return the one schedule that was asked for, or None if none was. Two are refused."""
    given = [f"{value}" for value in (cron, every, at) if value is not None]
    if len(given) > 1:
        raise BadSchedule(f"both {' and '.join(given)} are given: choose one, or make two jobs")
    if cron is not None:
        made: Schedule = cron if isinstance(cron, Cron) else Cron(cron, tz)
    elif every is not None:
        made = every if isinstance(every, Every) else Every(every)
    elif at is not None:
        made = at if isinstance(at, At) else At(at)
    else:
        return None
    if tz not in ("UTC", getattr(made, "tz", "UTC")):
        raise BadSchedule(f"tz is {tz!r}, which {made} would not follow: leave it out, or use cron")
    return made


def due_slot(schedule: Schedule, now: float, *, early: float = 1.0) -> int | None:
    """Return the slot that a trigger at ``now`` means: the newest, or one that is about to come.

    Clocks differ, so a trigger up to ``early`` seconds before a slot means that slot. The tolerance
    is never more than a tenth of the distance between the two: with one each second, 0.1 s.
    """
    newest, coming = schedule.latest(now), schedule.after(now)
    if coming is not None and newest is not None:
        early = min(early, (coming - newest) / 10)
    return newest if coming is None or coming - now > early else coming


def doubtful(schedule: Schedule) -> str | None:
    """Return a sentence if the schedule probably does not mean what its author does, else None."""
    if not isinstance(schedule, Cron):
        often = isinstance(schedule, Every) and schedule.interval < 10
        return f"{schedule} is often, and each slot a run: is 10 s enough?" if often else None
    walk, (_, hour, day, *rest) = schedule._ahead, schedule._fields  # noqa: SLF001 -- ours
    doubt = None
    narrow = hour if len(walk.hours) < 24 else day
    if len(walk.minutes) == 60 and narrow != "*" and "-" not in narrow:
        meant = " ".join(["0", hour if narrow is hour else "0", day, *rest])
        doubt = f"is due in every minute of its hours: did you mean {meant!r}?"
    elif not walk.day_and:
        doubt = "is due if the day of the month or that of the week matches: did you mean both?"
    elif len(walk.months) == 12 and min(walk.days) > 28:
        doubt = f"leaves out months without a day {min(walk.days)}: write L for the last day"
    return f"{schedule} {doubt}" if doubt else None


def _second(instant: float) -> int:
    return int(min(max(instant, -1), _END - 1) // 1)  # infinity is the calendar's end


def _words(length: int) -> str:
    units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    return next(f"{length // size} {unit}" for size, unit in units if length % size == 0)


def _whole(value: Any, what: str, read: Callable[[Any], float]) -> int:
    try:
        number = read(value)
    except (BadDuration, BadSlot) as error:
        wrong = str(error).partition(" is ")[2]  # they cannot know what it is for
        raise BadSchedule(f"{what} is {wrong}") from None
    exact = value.timestamp() if isinstance(value, datetime) else value
    if abs((exact if isinstance(exact, float) else number) - round(number)) > 1e-7:  # or 0.55 h
        raise BadSchedule(f"{what} is {value!r}: slots are whole seconds, leave the fraction out")
    if number >= _END:
        raise BadSchedule(f"{what} is {value!r}: the calendar ends with the year 9998")
    return round(number)


def _fields(expression: str) -> list[str]:
    if not isinstance(expression, str):
        raise BadSchedule(f"cron is {expression!r}: give text such as '0 2 * * *'")
    fields = _ALIASES.get(expression.strip().lower(), expression).upper().split()
    if len(fields) == 5:
        return fields
    wrong = f"has {len(fields)} fields: write five, for minute, hour, day, month and weekday"
    if fields and fields[0][0] == "@":
        wrong = f"is unknown: write five fields, or one of {', '.join(_ALIASES)}"
    elif fields and "TZ=" in fields[0]:
        wrong = "has its zone inside: say it with tz= instead"
    elif len(fields) == 6:
        wrong = "has 6 fields: seconds are not in the cron string, use Every such as Every('10s')"
    raise BadSchedule(f"cron {expression!r} {wrong}")


def _parsed(expression: str, fields: list[str]) -> tuple[CronSim, CronSim]:
    """Return two walks, forwards and backwards, to be copied and set to where they begin."""
    from cronsim import CronSim, CronSimError  # 8 ms with its imports, for cron only

    text, start = " ".join(fields), datetime(2000, 1, 1)  # noqa: DTZ001 -- a calendar, not a clock
    try:
        ahead, back = CronSim(text, start), CronSim(text, start, reverse=True)
    except CronSimError as error:
        name = str(error).removeprefix("Bad ")
        wrong = f"has a bad {name}, {fields[_NAMES.index(name)]!r}"
        raise BadSchedule(f"cron {expression!r} {wrong}: write numbers that exist there") from None
    for year in _ASKED:
        found = next(CronSim(text, start.replace(year=year) - _SECOND), None)
        if found is None or found.year >= year + _HORIZON:
            wrong = f"is not due within {_HORIZON} years: check its days and months"
            raise BadSchedule(f"cron {expression!r} {wrong}")
    return ahead, back


def _zone(tz: str) -> tzinfo:
    if tz == "UTC":
        return UTC
    from zoneinfo import ZoneInfo  # 4 ms, for those who leave UTC

    try:
        if tz != "localtime" and not tz.startswith("right/"):  # this host's; with leap seconds
            return ZoneInfo(tz)
    except (AttributeError, LookupError, OSError, TypeError, ValueError):
        pass
    raise BadSchedule(f"tz {tz!r} is no known time zone: give a name such as 'Europe/Berlin'")
