"""A cron schedule is a pattern of local times, and a zone whose clocks show them.

Within a span of the zone, local time is UTC plus a constant: the search goes from span to span,
and what clocks leave out or show twice only moves where a span's local times begin and end.
"""

from __future__ import annotations

import json

from fencepost.errors import BadSchedule
from fencepost.model.cron_text import read, written
from fencepost.model.every import END, Schedule
from fencepost.model.zone import span_at, zone_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from fencepost.model.dates import Pattern
    from fencepost.model.zone import Span

_WORDS: dict[str, tuple[str, ...]] = {  # the first is what is meant if nothing is said
    "day_match": ("or", "and"),
    "dst_gap": ("shift", "skip"),
    "dst_fold": ("first", "second", "both"),
}


class Cron(Schedule):
    """The slots of a cron expression of five fields, by the wall clocks of ``tz``.

    Where clocks go forward, a time that they leave out is due at the first instant after the gap,
    and several such times are one slot; with ``dst_gap="skip"`` it is not due. Where they go back,
    a time that comes twice is due at the first; ``dst_fold`` may say "second" or "both". An hour
    field that covers the hours instead of naming some (``*``, ``*/2``, ``0-23/2``, all 24) follows
    elapsed time: nothing shifts, and what comes twice is due twice.

    ``second`` is the second of each minute that is due. If days of the month and of the week are
    both given, one of them is enough, unless ``day_match="and"``. ``H`` in a field stands for a
    number that the hash of ``spread`` chooses, usually the job's name.
    """

    __slots__ = (
        *("_fresh", "_shift", "_sure"),
        *("dst_fold", "dst_gap", "elapsed", "expression", "pattern", "tz"),
    )

    def __init__(
        self,
        expression: str,
        tz: str = "UTC",
        *,
        spread: str | None = None,
        second: int = 0,
        day_match: str = "or",
        dst_gap: str = "shift",
        dst_fold: str = "first",
    ) -> None:
        said = {"day_match": day_match, "dst_gap": dst_gap, "dst_fold": dst_fold}
        for word, value in said.items():
            if value not in _WORDS[word]:
                known = " or ".join(repr(one) for one in _WORDS[word])
                raise BadSchedule(f"{word} is {value!r}: it must be {known}")
        if type(second) is not int or not 0 <= second < 60:
            raise BadSchedule(f"second is {second!r}: give a whole number from 0 to 59")
        pattern, elapsed = read(expression, spread=spread, second=second, both=day_match == "and")
        zone_of(tz)
        text = " ".join(expression.split())
        self._settle(text, tz, pattern, elapsed=elapsed, dst=(dst_gap, dst_fold))

    def __str__(self) -> str:
        fields, pattern = self.expression.split(), self.pattern
        both = pattern.both and not any(field[0] == "*" for field in fields[2::2] or ["*"])
        words = (
            ("second", pattern.second, 0),
            ("day_match", "and" if both else "or", "or"),
            ("dst_gap", self.dst_gap, "shift"),
            ("dst_fold", self.dst_fold, "first"),
        )
        more = ", ".join(f"{word}={value!r}" for word, value, usual in words if value != usual)
        return f"cron {self.expression!r} in {self.tz}" + (f" with {more}" if more else "")

    def _settle(
        self, text: str, tz: str, pattern: Pattern, *, elapsed: bool, dst: tuple[str, str]
    ) -> None:
        self.expression, self.tz, self.pattern = text, tz, pattern
        self.elapsed = elapsed and tz != "UTC"
        if self.elapsed or tz == "UTC":
            dst = ("shift", "first")  # of which nothing will be seen
        self.dst_gap, self.dst_fold = dst
        self._shift = not self.elapsed and self.dst_gap == "shift"
        self._fresh = not self.elapsed and self.dst_fold == "first"
        self._sure = not self.elapsed and self.dst_fold == "second"
        self.spec = self._spelled()

    def _spelled(self) -> str:
        expression, pattern = written(self.pattern), self.pattern
        either = "*" in (expression.split()[2], expression.split()[4])
        facts: tuple[tuple[str, object, object], ...] = (
            ("cron", expression, None),
            ("tz", self.tz, "UTC"),
            ("second", pattern.second, 0),
            ("days", "and" if pattern.both and not either else "or", "or"),
            ("elapsed", self.elapsed and len(pattern.hours) < 24, False),
            ("gap", self.dst_gap, "shift"),
            ("fold", self.dst_fold, "first"),
        )
        said = {name: value for name, value, usual in facts if value != usual}
        return json.dumps(said, separators=(",", ":"))

    def _begins(self, span: Span) -> int:
        """Return the first local time that counts as one of a span's."""
        if self._shift and span.gap < span.start + span.offset:
            return span.gap
        return span.fresh if self._fresh else span.start + span.offset

    def _ends(self, span: Span) -> int:
        """Return the first local time that does not count as one of a span's any more."""
        return span.final if self._sure else span.end + span.offset

    def _after(self, second: int) -> int | None:
        first, asked, found = second + 1, 0, -1
        while first < END:
            span = span_at(self.tz, first)
            local = self._begins(span)
            if first > span.start:
                local = max(local, first + span.offset)
            if not asked <= local <= found:  # else it is still the next
                coming = self.pattern.next(local)
                if coming is None:
                    return None
                asked, found = local, coming
            if found < self._ends(span):
                return max(found - span.offset, span.start)
            first = span.end
        return None

    def _latest(self, second: int) -> int | None:
        last, asked, found = second, -1, 0
        while last >= 0:
            span = span_at(self.tz, last)
            local = min(last + span.offset, self._ends(span) - 1)
            if not found <= local <= asked:
                newest = self.pattern.last(local)
                if newest is None:
                    return None
                asked, found = local, newest
            if found >= self._begins(span):
                return max(found - span.offset, span.start)
            last = span.start - 1
        return None


def restored(facts: dict[str, Any]) -> Cron:
    """Return the schedule whose spec has these facts; KeyError or TypeError if they are unknown."""
    rest = dict(facts)
    expression, tz = rest.pop("cron"), rest.pop("tz", "UTC")
    second, days = rest.pop("second", 0), rest.pop("days", "or")
    gap, fold = rest.pop("gap", "shift"), rest.pop("fold", "first")
    elapsed = rest.pop("elapsed", False)
    if rest or elapsed not in (True, False):
        raise KeyError(*rest)
    made = Cron(expression, tz, second=second, day_match=days, dst_gap=gap, dst_fold=fold)
    if not elapsed or made.elapsed:
        return made
    covering = Cron.__new__(Cron)
    covering._settle(made.expression, tz, made.pattern, elapsed=True, dst=(gap, fold))  # noqa: SLF001
    return covering
