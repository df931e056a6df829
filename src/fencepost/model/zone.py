"""A time zone is a row of spans: stretches of time in which its clocks do not change.

Spans come in pages of about a year, each made when it is first looked at, so that any instant is
found at once and no zone is read to its end.
"""

from __future__ import annotations

from bisect import bisect_left
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from fencepost.errors import BadSchedule
from fencepost.model.every import END
from fencepost.model.named import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import tzinfo

_PAGE = 25  # bits: 388 days
_SECOND = timedelta(seconds=1)
# No zone changes its clocks twice within six days, or by more than one day at a time.
_STEP, _FAR = 3 * 86400, 2 * 86400


class Span(NamedTuple):
    """From ``start`` on and before ``end``, clocks show UTC plus ``offset``.

    The others are local times, as seconds of a calendar without zones. From ``gap`` to the span's
    own beginning clocks show nothing, if they went forward. Before ``fresh`` they repeat what they
    have shown, and from ``final`` on they show what they will repeat, if they go back.
    """

    start: int
    end: int
    offset: int
    gap: int
    fresh: int
    final: int


def span_at(tz: str, second: int) -> Span:
    """Return the span of a zone in which a second of UTC lies. Pages end spans, too."""
    for span in _page(tz, second >> _PAGE):
        if second < span.end:
            return span
    raise AssertionError(f"{second} is beyond the calendar")


@lru_cache(maxsize=4096)
def _page(tz: str, number: int) -> tuple[Span, ...]:
    begin, end = number << _PAGE, min(number + 1 << _PAGE, END)
    zone = zone_of(tz)
    changes = list(_changes(zone, begin - _FAR, min(end + _FAR, END)))
    starts = [begin, *(change for change, *_ in changes if begin < change < end)]
    return tuple(
        _span(start, stop, _offset(zone, start), changes)
        for start, stop in zip(starts, [*starts[1:], end], strict=True)
    )


def _span(start: int, end: int, offset: int, changes: list[tuple[int, int, int]]) -> Span:
    gap = fresh = start + offset
    final = end + offset
    for change, before, after in changes:
        if change == start:
            gap = min(gap, change + before)
        if change <= start:
            fresh = max(fresh, change + before)
        else:
            final = min(final, change + after)
    return Span(start, end, offset, gap, fresh, final)


def _changes(zone: tzinfo, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield when the clocks change, with their offset before and after."""
    old = _offset(zone, start)
    while start < end:
        until = min(start + _STEP, end)
        if _offset(zone, until) != old:
            seconds = range(start + 1, until + 1)
            before = old
            until = seconds[
                bisect_left(seconds, 1, key=lambda second: _offset(zone, second) != before)
            ]
            old = _offset(zone, until)
            yield until, before, old
        start = until


def _offset(zone: tzinfo, second: int) -> int:
    offset = datetime.fromtimestamp(second, zone).utcoffset()
    assert offset is not None, "a zone knows its offset"
    return offset // _SECOND


def zone_of(tz: str) -> tzinfo:
    """Return the zone with that name, which must not depend on the host."""
    if tz == "UTC":
        return UTC
    from zoneinfo import ZoneInfo  # 4 ms, for those who leave UTC

    try:
        if tz != "localtime" and not tz.startswith("right/"):  # this host's; with leap seconds
            return ZoneInfo(tz)
    except (AttributeError, LookupError, OSError, TypeError, ValueError):
        pass
    raise BadSchedule(f"tz {tz!r} is no known time zone: give a name such as 'Europe/Berlin'")
