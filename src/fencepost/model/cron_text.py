"""A cron expression is five fields of text; here they become sets of numbers, and back.

cronsim reads the fields. What it does not know is added before: aliases and ``H``; and what no
calendar can satisfy is refused after.
"""

from __future__ import annotations

import re
from datetime import datetime

from fencepost.errors import BadSchedule
from fencepost.model.dates import DAY, EVERY_DAY, EVERY_WEEKDAY, LAST, LAST_WEEKDAY, Pattern
from fencepost.model.every import HORIZON
from fencepost.model.spread import resolved

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from cronsim import CronSim

ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@hourly": "0 * * * *",
}
ALIASES |= {"@annually": ALIASES["@yearly"], "@midnight": ALIASES["@daily"]}
_NAMES = ("minute", "hour", "day-of-month", "month", "day-of-week")
_SPREADS = ((0, 59), (0, 23), (1, 28), (1, 12), (0, 6))  # H is a day that each month has
# The years to ask about are fixed, not "now": what is a schedule today must be one tomorrow. In 28
# of them, each date has each weekday.
_ASKED = tuple(
    int((datetime(year, 1, 1) - datetime(1970, 1, 1)).total_seconds())  # noqa: DTZ001 -- a calendar
    for year in (2000, 2008, 2016, 2024)
)
_YEARS = HORIZON * 1461 * DAY // 4
_ALL_HOURS = re.compile(r"(0+|0+-0*23|H|H\(0+-0*23\))/\d+", re.ASCII)


def read(
    expression: str, *, spread: str | None = None, second: int = 0, both: bool = False
) -> tuple[Pattern, bool]:
    """Return when an expression is due, and whether it covers the hours rather than naming some.

    It does with ``*``, with a step over all hours, and with all 24 of them.
    """
    fields = _fields(expression)
    try:
        numbers = [
            resolved(field, name=name, spread=spread, limits=limits)
            for field, name, limits in zip(fields, _NAMES, _SPREADS, strict=True)
        ]
    except BadSchedule as error:
        raise BadSchedule(f"cron {expression!r} {error}") from None
    known = _parsed(expression, numbers)
    pattern = Pattern(
        minutes=known.minutes,
        hours=known.hours,
        days=({known.LAST: LAST, known.LAST_WEEKDAY: LAST_WEEKDAY}.get(d, d) for d in known.days),
        months=known.months,
        weekdays=(_weekday(day, last=known.LAST) for day in known.weekdays),
        both=both or known.day_and,
        second=second,
    )
    for start in _ASKED:
        found = pattern.next(start)
        if found is None or found >= start + _YEARS:
            wrong = f"is not due within {HORIZON} years: check its days and months"
            raise BadSchedule(f"cron {expression!r} {wrong}")
    steps = any("*" in term or _ALL_HOURS.fullmatch(term) for term in fields[1].split(","))
    return pattern, steps or len(pattern.hours) == 24


def written(pattern: Pattern) -> str:
    """Return the expression of a pattern, the same for all ways to say it. Its seconds are not in.

    That it wants both a day of the month and one of the week is not in it either, unless one of
    the two is any.
    """
    weekdays = {day for day in pattern.weekdays if isinstance(day, int)}
    nth = [
        f"{day[0]}L" if day[1] < 0 else f"{day[0]}#{day[1]}"
        for day in sorted(day for day in pattern.weekdays if isinstance(day, tuple))
        if day[0] not in weekdays
    ]
    names = sorted(day for day in pattern.days if isinstance(day, str))
    days = {day for day in pattern.days if isinstance(day, int)}
    return " ".join(
        (
            _field(pattern.minutes, range(60)),
            _field(pattern.hours, range(24)),
            _field(days, EVERY_DAY, names),
            _field(pattern.months, range(1, 13)),
            _field(weekdays, EVERY_WEEKDAY, nth),
        )
    )


def ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return numbers as ranges, first and last: 1, 2, 3 and 7 are 1 to 3 and 7 to 7."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found


def _field(numbers: Iterable[int], every: Iterable[int], names: Iterable[str] = ()) -> str:
    if set(numbers) == set(every):
        return "*"
    spelled = (str(low) if low == high else f"{low}-{high}" for low, high in ranges(numbers))
    return ",".join([*spelled, *names])


def _fields(expression: str) -> list[str]:
    if not isinstance(expression, str):
        raise BadSchedule(f"cron is {expression!r}: give text such as '0 2 * * *'")
    fields = ALIASES.get(expression.strip().lower(), expression).upper().split()
    if len(fields) == 5:
        return fields
    wrong = f"has {len(fields)} fields: write five, for minute, hour, day, month and weekday"
    if fields == ["@REBOOT"]:
        wrong = "is no time: what each start of a program needs, let the program do as it starts"
    elif fields and fields[0][0] == "@":
        wrong = f"is unknown: write five fields, or one of {', '.join(ALIASES)}"
    elif fields and "TZ=" in fields[0]:
        wrong = "has its zone inside: say it with tz= instead"
    elif len(fields) == 6:
        wrong = (
            "has 6 fields: seconds are not in the cron string, say second=30 beside it, or "
            "use Every such as Every('10s')"
        )
    raise BadSchedule(f"cron {expression!r} {wrong}")


def _parsed(expression: str, fields: list[str]) -> CronSim:
    from cronsim import CronSim, CronSimError  # 8 ms with its imports, for cron only

    start = datetime(2000, 1, 1)  # noqa: DTZ001 -- a calendar, not a clock
    try:
        return CronSim(" ".join(fields), start)
    except CronSimError as error:
        name = str(error).removeprefix("Bad ")
    wrong = f"has a bad {name}, {fields[_NAMES.index(name)]!r}: write numbers that exist there"
    if name == "day-of-month":
        try:
            CronSim(" ".join([*fields[:3], "*", "*"]), start)
            wrong = f"is never due: no month {fields[3]!r} has a day {fields[2]}"
        except CronSimError:
            pass
    raise BadSchedule(f"cron {expression!r} {wrong}")


def _weekday(day: int | tuple[int, int], *, last: int) -> int | tuple[int, int]:
    if isinstance(day, int):
        return day % 7
    return day[0] % 7, -1 if day[1] == last else day[1]
