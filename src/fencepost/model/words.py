"""What a schedule means in plain English, and what its author may not have thought of."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise

from fencepost.model import slot as slots
from fencepost.model.cron import Cron
from fencepost.model.cron_text import ALIASES, ranges
from fencepost.model.dates import EVERY_DAY, EVERY_WEEKDAY, LAST
from fencepost.model.every import At, Every, EveryAfter
from fencepost.model.zone import span_at

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fencepost.model.dates import Pattern
    from fencepost.model.every import Schedule

_DAYS = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_NTH = {-1: "last", 1: "first", 2: "second", 3: "third", 4: "fourth", 5: "fifth"}
_UNITS = ((86400, "day"), (3600, "hour"), (60, "minute"), (1, "second"))
_MANY = 6  # times to list one by one
_LONGEST_MONTH = (0, 31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def described(schedule: Schedule) -> str:
    """Return what a schedule means, such as ``at 02:00 every day, Berlin time``."""
    if isinstance(schedule, Cron):
        place = schedule.tz.rpartition("/")[2].replace("_", " ")
        zone = "UTC" if schedule.tz == "UTC" else f"{place} time"
        return f"{_pattern(schedule.pattern)}, {zone}"
    if isinstance(schedule, Every):
        return _interval(schedule)
    if isinstance(schedule, EveryAfter):
        return f"{_length(schedule.interval)} after the last run has ended"
    assert isinstance(schedule, At), "there is no fifth kind"
    return f"once, at {slots.shown(schedule.slot)}"


def dst_note(schedule: Schedule, slot: int) -> str | None:
    """Return why a slot is not at the time, or not as often, as the expression says; else None."""
    if not isinstance(schedule, Cron) or schedule.tz == "UTC":
        return None
    left_out = _left_out(schedule, slot)
    if left_out:
        return left_out
    span = span_at(schedule.tz, slot)
    local = slot + span.offset
    again, will = local < span.fresh, local >= span.final
    if not again and not will:
        return None
    which = "both times"
    if not schedule.elapsed and schedule.dst_fold != "both":
        which = f"at the {schedule.dst_fold}"
    this = ", this is the second" if again else ", this is the first"
    more = this if which == "both times" else ""
    return f"clocks go back: {_time(local)} comes twice, runs {which}{more}"


def doubtful(schedule: Schedule) -> str | None:
    """Return a sentence if the schedule probably does not mean what its author does, else None."""
    if isinstance(schedule, Every | EveryAfter):
        often = schedule.interval < 10
        return f"{schedule} is often, and each slot a run: is 10 s enough?" if often else None
    if not isinstance(schedule, Cron):
        return None
    pattern = schedule.pattern
    expression = ALIASES.get(schedule.expression.lower(), schedule.expression)
    _, hour, day, *rest = expression.split()
    dates = [date for date in pattern.days if isinstance(date, int)]
    first = min(dates) if pattern.both and len(dates) == len(pattern.days) else 0
    short = [month for month in pattern.months if _LONGEST_MONTH[month] < first]
    narrow = hour if len(pattern.hours) < 24 else day
    doubt = None
    if len(pattern.minutes) == 60 and narrow != "*" and "-" not in narrow:
        meant = " ".join(["0", hour if narrow is hour else "0", day, *rest])
        doubt = f"is due in every minute of its hours: did you mean {meant!r}?"
    elif not pattern.both:
        doubt = (
            "is due if the day of the month or that of the week matches: did you mean both? "
            'Say so with day_match="and"'
        )
    elif first == 29 and pattern.months == (2,):
        doubt = "is due in leap years only: write L for the last day of February"
    elif short or (first == 29 and 2 in pattern.months):
        doubt = f"leaves out months without a day {first}: write L for the last day"
    return f"{schedule} {doubt}" if doubt else None


def _left_out(cron: Cron, slot: int) -> str | None:
    """Return what to know of a slot that stands for, or follows, times in a gap."""
    if cron.elapsed:
        return None
    span = span_at(cron.tz, slot)
    begin = span.start + span.offset
    if cron.dst_gap == "shift":
        if slot != span.start or span.gap == begin:
            return None
        names, verb = _names(_due(cron.pattern, span.gap, begin))
        note = f"clocks go forward: {names} {verb} not exist, runs at {_time(begin)}"
        return note if names else None
    before = cron.latest(slot - 1)
    since = slot if before is None else before
    while span.start > since:
        begin = span.start + span.offset
        names, _ = _names(_due(cron.pattern, span.gap, begin))
        if names:
            day = datetime.fromtimestamp(begin - 1, UTC).date()
            return f"clocks went forward on {day}: {names} did not exist and was left out"
        span = span_at(cron.tz, span.start - 1)
    return None


def _due(pattern: Pattern, start: int, end: int) -> Iterator[int]:
    found = pattern.next(start)
    while found is not None and found < end:
        yield found
        found = pattern.next(found + 1)


def _names(found: Iterator[int]) -> tuple[str, str]:
    times = [_time(local) for local in found]
    if len(times) > _MANY:
        return f"{times[0]} to {times[-1]}", "do"
    return _listed(times), "does" if len(times) == 1 else "do"


def _time(local: int) -> str:
    hour, rest = divmod(local % 86400, 3600)
    minute, second = divmod(rest, 60)
    return f"{hour:02}:{minute:02}" + (f":{second:02}" if second else "")


def _listed(words: Sequence[str], last: str = "and") -> str:
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


def _length(seconds: int) -> str:
    size, unit = next(one for one in _UNITS if seconds % one[0] == 0)
    return f"{seconds // size} {unit}{'s' if seconds > size else ''}"


def _each(seconds: int) -> str:
    return f"every {_length(seconds).removeprefix('1 ')}"


def _interval(every: Every) -> str:
    length, offset = every.interval, every.offset
    if 3600 % length == 0 and 3600 // length <= _MANY:
        times = [_past(second) for second in range(offset, 3600, length)]
        return f"{_each(length)} at {_listed(times)}"
    if 86400 % length == 0 and 86400 // length <= _MANY:
        times = [_time(second) for second in range(offset, 86400, length)]
        return f"{_each(length)} at {_listed(times)} UTC"
    shifted = f", shifted by {_length(offset)} from the start of 1970 in UTC" if offset else ""
    return _each(length) + shifted


def _past(second: int) -> str:
    return ":" + _time(second).partition(":")[2]


def _pattern(pattern: Pattern) -> str:
    times = [
        hour * 3600 + minute * 60 + pattern.second
        for hour in pattern.hours
        for minute in pattern.minutes
    ]
    step = _step(pattern.hours, 24)
    daily = len(pattern.hours) < 24 and len(times) <= _MANY
    if daily:
        text = f"at {_listed([_time(one) for one in times])}"
    elif len(pattern.minutes) == 1 and 1 < step < 24:
        text = f"every {step} hours from {_time(times[0])}"
    elif len(pattern.hours) < 24:
        text = f"{_minutes(pattern)}, {_hours(pattern)}"
    else:
        text = _minutes(pattern)
    days = _which_days(pattern)
    if days:
        text += f" {days}" if daily else f", {days}"
    elif daily:
        text += " every day"
    return text + (f" in {_months(pattern)}" if len(pattern.months) < 12 else "")


def _minutes(pattern: Pattern) -> str:
    minutes = pattern.minutes
    marks = [_past(minute * 60 + pattern.second) for minute in minutes]
    if len(minutes) == 60:
        return "every minute" + (f" at second {pattern.second}" if pattern.second else "")
    step = _step(minutes, 60)
    if step and len(minutes) > _MANY:
        return f"every {step} minutes" + (f" from {marks[0]}" if marks[0] != ":00" else "")
    if len(minutes) > _MANY:
        marks = [
            _past(one * 60 + pattern.second)
            + (f" to {_past(two * 60 + pattern.second)}" if two > one else "")
            for one, two in ranges(minutes)
        ]
    often = f"{_each(step * 60)} " if step and len(minutes) > 1 else ""
    if len(pattern.hours) == 24:
        often = often or "every hour "
    return f"{often}at {_listed(marks)}"


def _step(numbers: Sequence[int], size: int) -> int:
    """Return the distance between numbers that go round evenly, else 0."""
    step = size // len(numbers)
    even = all(two - one == step for one, two in pairwise(numbers))
    return step if even and step * len(numbers) == size else 0


def _hours(pattern: Pattern) -> str:
    found = ranges(pattern.hours)
    if len(found) > 2:
        return f"in the hours {_listed([f'{hour:02}' for hour in pattern.hours])}"
    return _listed([f"from {one:02}:00 to {two:02}:59" for one, two in found])


def _months(pattern: Pattern) -> str:
    names = [
        [_MONTHS[number - 1] for number in range(one, two + 1)]
        for one, two in ranges(pattern.months)
    ]
    return _listed(
        [name for run in names for name in (run if len(run) < 3 else [f"{run[0]} to {run[-1]}"])]
    )


def _which_days(pattern: Pattern) -> str:
    month = _days_of_month(pattern) if not pattern.days >= EVERY_DAY else ""
    week = _days_of_week(pattern) if not pattern.weekdays >= EVERY_WEEKDAY else ""
    if month and week:
        return f"{month}, if also {week}" if pattern.both else f"{month}, or {week}"
    return month or week


def _days_of_month(pattern: Pattern) -> str:
    numbers = sorted(day for day in pattern.days if isinstance(day, int))
    names = [
        _ordinal(one) if one == two else f"{_ordinal(one)} to {_ordinal(two)}"
        for one, two in ranges(numbers)
    ]
    names += ["last day"] if LAST in pattern.days else []
    names += ["last weekday"] if "LW" in pattern.days else []
    return f"on the {_listed(names)} of the month"


def _days_of_week(pattern: Pattern) -> str:
    plain = [day for day in pattern.weekdays if isinstance(day, int)]
    nth = sorted(day for day in pattern.weekdays if isinstance(day, tuple))
    names = [f"on the {_NTH[n]} {_DAYS[day]} of the month" for day, n in nth]
    runs = ranges((day + 6) % 7 for day in plain)  # a week that begins with Monday
    if len(runs) == 1 and runs[0][1] - runs[0][0] > 1:
        first, last = ((number + 1) % 7 for number in runs[0])
        return _listed([f"from {_DAYS[first]} to {_DAYS[last]}", *names], "or")
    days = [f"{_DAYS[(n + 1) % 7]}s" for one, two in runs for n in range(one, two + 1)]
    return _listed([*([f"on {_listed(days)}"] if days else []), *names], "or")


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number // 10 != 1 else "th"
    return f"{number}{ending}"
