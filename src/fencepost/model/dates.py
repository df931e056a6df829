"""A pattern is the local times at which a cron expression is due, on a calendar without zones.

Fields are sets of bits, so the next minute or day is the lowest bit that is left. Local times are
whole seconds, counted as if 1970-01-01 had begun at 0 here: what they are in UTC is a zone's say.
"""

from __future__ import annotations

from datetime import date
from functools import lru_cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

LAST, LAST_WEEKDAY = "L", "LW"  # in place of a day
EVERY_DAY, EVERY_WEEKDAY = frozenset(range(1, 32)), frozenset(range(7))
DAY = 86400
_EPOCH = date(1970, 1, 1).toordinal()
_YEARS = range(1969, 10000)
_LENGTHS = (0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


class Pattern:
    """When an expression is due: sets of numbers, and how days of month and week combine.

    ``days`` may have ``L`` and ``LW`` in it, ``weekdays`` pairs such as ``(1, 2)`` for the second
    Monday or ``(5, -1)`` for the last Friday. Sunday is 0. ``both`` wants both to match.
    """

    __slots__ = (
        *("_hours", "_minutes", "_months", "_shapes"),
        *("both", "days", "hours", "minutes", "months", "second", "weekdays"),
    )

    def __init__(
        self,
        *,
        minutes: Iterable[int],
        hours: Iterable[int],
        days: Iterable[int | str],
        months: Iterable[int],
        weekdays: Iterable[int | tuple[int, int]],
        both: bool,
        second: int = 0,
    ) -> None:
        self.minutes, self.hours, self.months = (
            tuple(sorted(numbers)) for numbers in (minutes, hours, months)
        )
        self.days, self.weekdays = frozenset(days), frozenset(weekdays)
        self.both, self.second = both, second
        if not both and (self.days >= EVERY_DAY or self.weekdays >= EVERY_WEEKDAY):
            self.days, self.weekdays = frozenset(EVERY_DAY), frozenset(EVERY_WEEKDAY)
        if self.days >= EVERY_DAY or self.weekdays >= EVERY_WEEKDAY:
            self.both = True  # as either way is the same, this is the one to say it
        self._minutes, self._hours, self._months = (
            sum(1 << number for number in numbers)
            for numbers in (self.minutes, self.hours, self.months)
        )
        self._shapes = _shapes(self.days, self.weekdays, self.both)

    def next(self, local: int) -> int | None:
        """Return the first local time that is due, from ``local`` on."""
        number, time = divmod(local, DAY)
        today = date.fromordinal(number + _EPOCH)
        year, month, day = today.year, today.month, today.day
        bits = self._month(year, month) >> day << day
        if bits >> day & 1:
            found = self._time_from(time)
            if found is not None:
                return number * DAY + found
            bits ^= 1 << day
        while not bits:
            year, month = (year, month + 1) if month < 12 else (year + 1, 1)
            if year not in _YEARS:
                return None
            bits = self._month(year, month)
        number = date(year, month, _lowest(bits)).toordinal() - _EPOCH
        return number * DAY + self.hours[0] * 3600 + self.minutes[0] * 60 + self.second

    def last(self, local: int) -> int | None:
        """Return the newest local time that is due, until ``local``."""
        number, time = divmod(local, DAY)
        today = date.fromordinal(number + _EPOCH)
        year, month, day = today.year, today.month, today.day
        bits = _until(self._month(year, month), day)
        if bits >> day & 1:
            found = self._time_until(time)
            if found is not None:
                return number * DAY + found
            bits ^= 1 << day
        while not bits:
            year, month = (year, month - 1) if month > 1 else (year - 1, 12)
            if year not in _YEARS:
                return None
            bits = self._month(year, month)
        number = date(year, month, bits.bit_length() - 1).toordinal() - _EPOCH
        return number * DAY + self.hours[-1] * 3600 + self.minutes[-1] * 60 + self.second

    def _time_from(self, time: int) -> int | None:
        minute, second = divmod(time, 60)
        hour, minute = divmod(minute + (second > self.second), 60)
        bits = self._minutes >> minute << minute if self._hours >> hour & 1 else 0
        if not bits:
            hours = self._hours >> hour + 1 << hour + 1
            if not hours:
                return None
            hour, bits = _lowest(hours), self._minutes
        return hour * 3600 + _lowest(bits) * 60 + self.second

    def _time_until(self, time: int) -> int | None:
        minute, second = divmod(time, 60)
        hour, minute = divmod(minute - (second < self.second), 60)
        if hour < 0:
            return None
        bits = _until(self._minutes, minute) if self._hours >> hour & 1 else 0
        if not bits:
            hours = _until(self._hours, hour - 1)
            if not hours:
                return None
            hour, bits = hours.bit_length() - 1, self._minutes
        return hour * 3600 + (bits.bit_length() - 1) * 60 + self.second

    def _month(self, year: int, month: int) -> int:
        """Return the days of a month that are due, as bits."""
        if not self._months >> month & 1:
            return 0
        leap = month == 2 and year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
        shape = _LENGTHS[month] + leap, date(year, month, 1).isoweekday() % 7
        bits = self._shapes.get(shape)
        if bits is None:
            bits = self._shapes[shape] = self._shaped(*shape)
        return bits

    def _shaped(self, length: int, first: int) -> int:
        """Return the days that are due in months of this length whose first is that weekday."""
        last = (first + length - 1) % 7
        named = {LAST: length, LAST_WEEKDAY: length - {6: 1, 0: 2}.get(last, 0)}
        by_day = by_week = 0
        for day in self.days:
            by_day |= 1 << (named[day] if isinstance(day, str) else day)
        for weekday in self.weekdays:
            name, nth = weekday if isinstance(weekday, tuple) else (weekday, 0)
            dates = range((name - first) % 7 + 1, length + 1, 7)
            if nth:
                dates = dates[-1:] if nth < 0 else dates[nth - 1 : nth]
            by_week |= sum(1 << day for day in dates)
        return _until(by_day & by_week if self.both else by_day | by_week, length)


@lru_cache(maxsize=1024)
def _shapes(*_: object) -> dict[tuple[int, int], int]:
    """Return where those who agree about days keep what they know of months: 28 shapes."""
    return {}


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _until(bits: int, highest: int) -> int:
    return bits & (2 << highest) - 1 if highest >= 0 else 0
