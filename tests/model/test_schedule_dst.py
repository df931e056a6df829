"""What cron schedules do where clocks change: by table, by a slow oracle, and in all zones."""

from __future__ import annotations

import os
import random
import zoneinfo
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim

from fencepost.errors import BadSchedule
from fencepost.model.schedule import Cron
from fencepost.model.zone import span_at

MINUTE, HOUR, DAY = 60, 3600, 86400
SKIP, SECOND, BOTH = {"dst_gap": "skip"}, {"dst_fold": "second"}, {"dst_fold": "both"}


def at(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp())


def shown(cron: Cron, day: str, hours: tuple[int, int]) -> str:
    """Return the slots of some hours of a local day, as its clocks show them; * is the second."""
    zone = ZoneInfo(cron.tz)
    start, end = (
        (datetime.fromisoformat(day) + timedelta(hours=hour)).replace(tzinfo=zone).timestamp()
        for hour in hours
    )
    clocks = [datetime.fromtimestamp(slot, zone) for slot in cron.between(start, end)]
    return " ".join(f"{clock:%H:%M}" + "*" * clock.fold for clock in clocks)


BERLIN, NEW_YORK = "Europe/Berlin", "America/New_York"
LORD_HOWE, CASABLANCA = "Australia/Lord_Howe", "Africa/Casablanca"
FORWARD = {
    BERLIN: "2024-03-31",  # 02:00 is 03:00
    NEW_YORK: "2024-03-10",  # 02:00 is 03:00
    LORD_HOWE: "2024-10-06",  # 02:00 is 02:30
    CASABLANCA: "2024-04-14",  # 02:00 is 03:00, after Ramadan
}
BACK = {
    BERLIN: "2024-10-27",  # 03:00 is 02:00
    NEW_YORK: "2024-11-03",  # 02:00 is 01:00
    LORD_HOWE: "2024-04-07",  # 02:00 is 01:30
    CASABLANCA: "2024-03-10",  # 03:00 is 02:00, for Ramadan
}


@pytest.mark.parametrize(
    ("zone", "expression", "words", "expected"),
    [
        # A fixed hour.
        (BERLIN, "30 2 * * *", {}, "03:00"),
        (BERLIN, "30 2 * * *", SKIP, ""),
        (BERLIN, "0,20,40 2,3 * * *", {}, "03:00 03:20 03:40"),
        (BERLIN, "0,20,40 2,3 * * *", SKIP, "03:00 03:20 03:40"),
        (BERLIN, "10 2,3 * * *", {}, "03:00 03:10"),
        (BERLIN, "30 2 * * *", {"second": 30}, "03:00"),
        (NEW_YORK, "30 2 * * *", {}, "03:00"),
        (NEW_YORK, "30 2 * * *", SKIP, ""),
        (LORD_HOWE, "15 2 * * *", {}, "02:30"),
        (LORD_HOWE, "15 2 * * *", SKIP, ""),
        (LORD_HOWE, "45 2 * * *", {}, "02:45"),
        (CASABLANCA, "30 2 * * *", {}, "03:00"),
        (CASABLANCA, "30 2 * * *", SKIP, ""),
        # Every minute of a fixed hour is a fixed hour, too.
        (BERLIN, "*/15 2 * * *", {}, "03:00"),
        (BERLIN, "*/15 2 * * *", SKIP, ""),
        (BERLIN, "*/30 1-2 * * *", {}, "01:00 01:30 03:00"),
        (LORD_HOWE, "*/15 2 * * *", {}, "02:30 02:45"),
        # Each hour.
        (BERLIN, "30 * * * *", {}, "01:30 03:30"),
        (NEW_YORK, "30 * * * *", {}, "01:30 03:30"),
        (LORD_HOWE, "30 * * * *", {}, "01:30 02:30 03:30"),
        (LORD_HOWE, "15 * * * *", {}, "01:15 03:15"),
        (CASABLANCA, "30 * * * *", {}, "01:30 03:30"),
        (BERLIN, "30 0-23 * * *", {}, "01:30 03:30"),
        (BERLIN, "30 */2 * * *", {}, ""),
        (BERLIN, "30 0-23/2 * * *", {}, ""),
        (BERLIN, "30 0,2,4 * * *", {}, "03:00"),
        # Each quarter of an hour.
        (BERLIN, "*/15 * * * *", {}, "01:00 01:15 01:30 01:45 03:00 03:15 03:30 03:45"),
        (BERLIN, "*/15 * * * *", SKIP, "01:00 01:15 01:30 01:45 03:00 03:15 03:30 03:45"),
        (NEW_YORK, "*/15 * * * *", {}, "01:00 01:15 01:30 01:45 03:00 03:15 03:30 03:45"),
        (
            LORD_HOWE,
            "*/15 * * * *",
            {},
            "01:00 01:15 01:30 01:45 02:30 02:45 03:00 03:15 03:30 03:45",
        ),
        (CASABLANCA, "*/15 * * * *", {}, "01:00 01:15 01:30 01:45 03:00 03:15 03:30 03:45"),
    ],
)
def test_where_clocks_go_forward(
    zone: str, expression: str, words: dict[str, Any], expected: str
) -> None:
    assert shown(Cron(expression, zone, **words), FORWARD[zone], (1, 4)) == expected


@pytest.mark.parametrize(
    ("zone", "expression", "words", "expected"),
    [
        # A fixed hour.
        (BERLIN, "30 2 * * *", {}, "02:30"),
        (BERLIN, "30 2 * * *", SECOND, "02:30*"),
        (BERLIN, "30 2 * * *", BOTH, "02:30 02:30*"),
        (BERLIN, "0,30 1-3 * * *", {}, "01:00 01:30 02:00 02:30 03:00 03:30"),
        (BERLIN, "0,30 1-3 * * *", SECOND, "01:00 01:30 02:00* 02:30* 03:00 03:30"),
        (BERLIN, "0,30 1-3 * * *", BOTH, "01:00 01:30 02:00 02:30 02:00* 02:30* 03:00 03:30"),
        (NEW_YORK, "30 1 * * *", {}, "01:30"),
        (NEW_YORK, "30 1 * * *", SECOND, "01:30*"),
        (NEW_YORK, "30 1 * * *", BOTH, "01:30 01:30*"),
        (LORD_HOWE, "45 1 * * *", {}, "01:45"),
        (LORD_HOWE, "45 1 * * *", SECOND, "01:45*"),
        (LORD_HOWE, "45 1 * * *", BOTH, "01:45 01:45*"),
        (LORD_HOWE, "15 1 * * *", BOTH, "01:15"),
        (CASABLANCA, "30 2 * * *", {}, "02:30"),
        (CASABLANCA, "30 2 * * *", SECOND, "02:30*"),
        (CASABLANCA, "30 2 * * *", BOTH, "02:30 02:30*"),
        # Every minute of a fixed hour is a fixed hour, too.
        (BERLIN, "*/30 2 * * *", {}, "02:00 02:30"),
        (BERLIN, "*/30 2 * * *", SECOND, "02:00* 02:30*"),
        # Each hour.
        (BERLIN, "30 * * * *", {}, "01:30 02:30 02:30* 03:30"),
        (BERLIN, "30 * * * *", SECOND, "01:30 02:30 02:30* 03:30"),
        (NEW_YORK, "30 * * * *", {}, "01:30 01:30* 02:30 03:30"),
        (LORD_HOWE, "45 * * * *", {}, "01:45 01:45* 02:45 03:45"),
        (LORD_HOWE, "15 * * * *", {}, "01:15 02:15 03:15"),
        (CASABLANCA, "30 * * * *", {}, "01:30 02:30 02:30* 03:30"),
        (BERLIN, "30 */2 * * *", {}, "02:30 02:30*"),
        (BERLIN, "30 0,2,4 * * *", {}, "02:30"),
        # Each quarter of an hour.
        (BERLIN, "*/30 * * * *", {}, "01:00 01:30 02:00 02:30 02:00* 02:30* 03:00 03:30"),
        (NEW_YORK, "*/30 * * * *", {}, "01:00 01:30 01:00* 01:30* 02:00 02:30 03:00 03:30"),
        (LORD_HOWE, "*/15 1 * * *", {}, "01:00 01:15 01:30 01:45"),
        (LORD_HOWE, "*/30 * * * *", {}, "01:00 01:30 01:30* 02:00 02:30 03:00 03:30"),
        (CASABLANCA, "*/30 * * * *", {}, "01:00 01:30 02:00 02:30 02:00* 02:30* 03:00 03:30"),
    ],
)
def test_where_clocks_go_back(
    zone: str, expression: str, words: dict[str, Any], expected: str
) -> None:
    assert shown(Cron(expression, zone, **words), BACK[zone], (1, 4)) == expected


@pytest.mark.parametrize("words", [{}, SKIP, SECOND, BOTH])
@pytest.mark.parametrize("expression", ["30 2 * * *", "30 * * * *", "*/15 * * * *"])
def test_utc_has_no_such_days(expression: str, words: dict[str, Any]) -> None:
    start = datetime(2024, 3, 31, tzinfo=UTC)
    walk = CronSim(expression, start)
    expected = [int(next(walk).timestamp()) for _ in range(300)]
    found = Cron(expression, **words).between(start.timestamp() + 1, expected[-1] + 1)
    assert list(found) == expected


def test_a_day_that_is_left_out_is_skipped_on_request() -> None:
    found = Cron("0 12 * * *", "Pacific/Apia", dst_gap="skip")
    assert shown(found, "2011-12-29", (0, 72)) == "12:00 12:00"
    assert shown(Cron("0 12 * * *", "Pacific/Apia"), "2011-12-29", (0, 72)) == "12:00 00:00 12:00"


def test_a_second_is_that_of_each_minute() -> None:
    cron = Cron("30 2 * * *", BERLIN, second=45)
    assert cron.after(at("2024-05-01T00:30:44Z")) == at("2024-05-01T00:30:45Z")
    assert cron.after(at("2024-05-01T00:30:45Z")) == at("2024-05-02T00:30:45Z")
    assert cron.latest(at("2024-05-01T00:30:44Z")) == at("2024-04-30T00:30:45Z")
    assert cron.latest(at("2024-05-01T00:30:45Z")) == at("2024-05-01T00:30:45Z")


# How many expressions to try; a soak tries 10,000.
EXPRESSIONS = int(os.environ.get("FENCEPOST_EXPRESSIONS", "2500"))

# The oracle. It reads no calendar and knows no offset: it looks at the clocks each minute, notes
# what they show, and asks of each minute of the local calendar when that was.


class Field(NamedTuple):
    text: str
    values: frozenset[int]


class Days(NamedTuple):
    text: str
    matches: Any  # a date to a bool


class Clocks(NamedTuple):
    """What the clocks of a zone show from two days before a change until two days after it."""

    zone: str
    first: int
    minutes: list[datetime]  # of the local calendar, without leaving one out
    when: dict[datetime, list[int]]  # and the minutes of UTC at which the clocks show one
    past: dict[datetime, int]  # or at which they first show a later one


@lru_cache(maxsize=1)
def clocks_at(zone: str, change: int) -> Clocks:
    there = ZoneInfo(zone)
    seconds = range(change - 2 * DAY, change + 2 * DAY, MINUTE)
    walls = [
        datetime.fromtimestamp(second, there).replace(tzinfo=None, fold=0) for second in seconds
    ]
    when: dict[datetime, list[int]] = {}
    for second, wall in zip(seconds, walls, strict=True):
        when.setdefault(wall, []).append(second)
    start, count = min(walls), (max(walls) - min(walls)) // timedelta(minutes=1) + 1
    minutes = [start + timedelta(minutes=n) for n in range(count)]
    past, later = {}, len(seconds)
    for minute in reversed(minutes):
        if minute in when:
            later = min(when[minute])
        else:
            past[minute] = later
    return Clocks(zone, seconds[0], minutes, when, past)


def slow(clocks: Clocks, fields: tuple[Field, Field, Days], words: dict[str, Any]) -> list[int]:
    minute, hour, days = fields
    covering = "*" in hour.text or len(hour.values) == 24
    gap = "skip" if covering else words.get("dst_gap", "shift")
    fold = "both" if covering else words.get("dst_fold", "first")
    chosen = {"first": slice(0, 1), "second": slice(-1, None), "both": slice(None)}[fold]
    due_days = {day for day in {one.date() for one in clocks.minutes} if days.matches(day)}
    found = set()
    for one in clocks.minutes:
        if one.minute in minute.values and one.hour in hour.values and one.date() in due_days:
            if one in clocks.when:
                found |= {u + words.get("second", 0) for u in clocks.when[one][chosen]}
            elif gap == "shift":
                found.add(clocks.past[one])
    return sorted(found)


def random_field(draw: random.Random, low: int, last: int, *, near: int) -> Field:
    every, high = range(low, last + 1), min(last, 59 if low == 0 else 28)
    kind = draw.randrange(6)
    if kind == 0:
        return Field("*", frozenset(every))
    if kind == 1:
        step = draw.randint(2, 20)
        return Field(f"*/{step}", frozenset(every[::step]))
    if kind == 2:
        one, two = sorted(draw.randint(low, high) for _ in range(2))
        return Field(f"{one}-{two}", frozenset(range(one, two + 1)))
    some = {draw.choice([draw.randint(low, high), min(near, high)]) for _ in range(kind)}
    return Field(",".join(map(str, some)), frozenset(some))


def random_days(draw: random.Random) -> tuple[Days, dict[str, Any]]:
    """Return the three fields of days, mostly any, and how they combine."""
    if draw.random() < 0.6:
        return Days("* * *", lambda _: True), {}
    day = draw.choice([Field("*", frozenset(range(1, 32))), random_field(draw, 1, 31, near=28)])
    week = draw.choice([Field("*", frozenset(range(7))), random_field(draw, 0, 6, near=0)])
    month = draw.choice([Field("*", frozenset(range(1, 13))), random_field(draw, 1, 12, near=4)])
    strict = draw.random() < 0.5
    both = strict or "*" in (day.text[0], week.text[0])

    def matches(one: Any) -> bool:
        by_day, by_week = one.day in day.values, one.isoweekday() % 7 in week.values
        return one.month in month.values and (by_day and by_week if both else by_day or by_week)

    return Days(f"{day.text} {month.text} {week.text}", matches), {
        "day_match": "and" if strict else "or"
    }


def changes_of(zone: str, year: int) -> list[int]:
    """Return when the clocks of a zone change in a year, by asking every six hours."""
    there = ZoneInfo(zone)

    def offset(second: int) -> timedelta:
        found = datetime.fromtimestamp(second, there).utcoffset()
        assert found is not None
        return found

    start, found = at(f"{year}-01-01T00:00Z"), []
    for second in range(start, start + 365 * DAY, DAY // 4):
        low, high = second, second + DAY // 4
        if offset(low) != offset(high) and offset(low) % timedelta(minutes=1) == timedelta():
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if offset(middle) == offset(low) else (low, middle)
            found.append(high)
    return [change for change in found if change % MINUTE == 0]


def random_change(draw: random.Random, zones: list[str]) -> tuple[str, int]:
    while True:
        zone = draw.choice([draw.choice(zones), *FORWARD])
        changes = changes_of(zone, draw.randint(1971, 2037))
        if changes:
            return zone, draw.choice(changes)


@pytest.mark.parametrize("seed", range(10))
def test_random_expressions_near_changes_agree_with_the_clocks(seed: int) -> None:
    """After, latest and all that lies between, for 2,500 expressions and four instants of each."""
    draw = random.Random(seed)
    zones = sorted(zoneinfo.available_timezones() - {"localtime"})
    zones = [zone for zone in zones if not zone.startswith(("right/", "posix/"))]
    for _ in range(25):
        zone, change = random_change(draw, zones)
        clocks = clocks_at(zone, change)
        there = datetime.fromtimestamp(change, ZoneInfo(zone))
        for _ in range(EXPRESSIONS // 250):
            days, words = random_days(draw)
            words |= draw.choice([{}, {}, SKIP, SECOND, BOTH, SKIP | BOTH, SKIP | SECOND])
            words |= draw.choice([{}, {}, {"second": draw.randrange(60)}])
            near = draw.choice([there.hour, (there.hour - 1) % 24, 23, 0])
            fields = (
                random_field(draw, 0, 59, near=0),
                random_field(draw, 0, 23, near=near),
                days,
            )
            cron = Cron(" ".join(field.text for field in fields), zone, **words)
            compare(draw, cron, slow(clocks, fields, words), change)


def compare(draw: random.Random, cron: Cron, known: list[int], change: int) -> None:
    start, end = change - 30 * HOUR, change + 30 * HOUR
    case = f"{cron} at {datetime.fromtimestamp(change, UTC)}"
    assert list(cron.between(start, end)) == [u for u in known if start <= u < end], case
    for _ in range(4):
        now = change + draw.choice(
            [draw.randint(-2 * HOUR, 2 * HOUR), draw.randint(-DAY, DAY), draw.randint(-2, 2)]
        )
        coming = [slot for slot in known if now < slot < end]
        before = [slot for slot in known if start <= slot <= now]
        after, latest = cron.after(now), cron.latest(now)
        assert after == coming[0] if coming else after is None or after >= end, case
        assert latest == before[-1] if before else latest is None or latest < start, case
        for near in {now, *coming[:1], *before[-1:]}:
            assert cron.contains(near) == (near in known), case


@pytest.mark.parametrize("words", [{}, SECOND, BOTH])
@pytest.mark.parametrize(
    ("zone", "change"),
    [("America/Tijuana", 6_811_549_200), ("America/Anchorage", 6_811_552_800)],
)
def test_clocks_may_go_back_where_a_page_of_the_zone_ends(
    zone: str, change: int, words: dict[str, Any]
) -> None:
    assert (change - HOUR) >> 25 < (change + HOUR) >> 25  # else the pages have moved
    minute = Field("*", frozenset(range(60)))
    fields = (minute, Field("0-22", frozenset(range(23))), Days("* * *", lambda _: True))
    cron = Cron("* 0-22 * * *", zone, **words)
    compare(random.Random(1), cron, slow(clocks_at(zone, change), fields, words), change)


# All zones.


def changes_on_file(zone: str) -> list[int]:
    """Return when clocks change from 1970 to 2037, as the zone's file has it."""
    from zoneinfo import _zoneinfo  # type: ignore[attr-defined]  # the only one that tells

    there, found = ZoneInfo(zone), []
    for change in _zoneinfo.ZoneInfo(zone)._trans_utc:
        if 0 < change < at("2038-01-01T00:00Z"):
            one, two = (datetime.fromtimestamp(change - n, there).utcoffset() for n in (1, 0))
            found += [change] if one != two else []
    return found


@lru_cache(maxsize=1)
def all_zones() -> dict[str, list[int]]:
    """Return each zone with its changes; of those that have the same ones, the first."""
    found: dict[tuple[object, ...], str] = {}
    for zone in sorted(zoneinfo.available_timezones() - {"localtime"}):
        changes = changes_on_file(zone)
        there = ZoneInfo(zone)
        offsets = [datetime.fromtimestamp(change, there).utcoffset() for change in [0, *changes]]
        found.setdefault((*changes, *offsets), zone)
    return {zone: changes_on_file(zone) for zone in found.values()}


def test_no_zone_changes_its_clocks_twice_within_six_days_or_by_more_than_one() -> None:
    for zone, changes in all_zones().items():
        assert all(two - one > 6 * DAY for one, two in pairwise(changes)), zone
        for change in changes:
            before, after = span_at(zone, change - 1), span_at(zone, change)
            assert abs(after.offset - before.offset) <= DAY, (zone, change)


def test_no_change_of_any_zone_is_overlooked() -> None:
    end = at("2038-01-01T00:00Z")
    for zone, changes in list(all_zones().items())[::4]:
        second, found = 0, []
        before = span_at(zone, 0)
        while second < end:
            span = span_at(zone, second)
            found += [span.start] if span.offset != before.offset else []
            before, second = span, span.end
        assert [change for change in found if change < end] == changes, zone


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("30 2 * * *", {}),
        ("30 0,1,2,3,23 * * *", BOTH | SKIP),
        ("*/20 * * * *", {}),
    ],
)
def test_slots_strictly_increase_at_every_change_of_every_zone(
    expression: str, words: dict[str, Any]
) -> None:
    for zone, changes in all_zones().items():
        cron = Cron(expression, zone, **words)
        for change in changes[:: 1 if len(changes) < 20 else 5]:
            found = list(cron.between(change - 3 * HOUR, change + 3 * HOUR))
            assert all(one < two for one, two in pairwise(found)), (zone, change)
            assert [cron.latest(two - 1) for _, two in pairwise(found)] == found[:-1]


def test_a_daily_job_has_one_slot_for_each_local_day_of_every_zone() -> None:
    for zone, changes in all_zones().items():
        cron, there = Cron("30 2 * * *", zone), ZoneInfo(zone)
        for change in changes[::3]:
            start, end = change - 3 * DAY, change + 3 * DAY
            walls = [datetime.fromtimestamp(u, there).replace(tzinfo=None) for u in (start, end)]
            one, two = ((wall - timedelta(hours=2, minutes=30)).toordinal() for wall in walls)
            assert len(list(cron.between(start + 1, end + 1))) == two - one, (zone, change)


# The calendar, of which cronsim is the oracle.


def random_calendar(draw: random.Random) -> str:
    return " ".join(
        (
            draw.choice(["0", "*/7", "5,50", "59"]),
            draw.choice(["0", "*/5", "23", "3-7", "*"]),
            draw.choice(["*", "1", "31", "L", "LW", "1,L", "28-31", "*/9", "15,LW", "29"]),
            draw.choice(["*", "2", "1,12", "*/3", "FEB-APR"]),
            draw.choice(
                ["*", "0", "7", "MON-FRI", "1#1", "5L", "6#5", "0,3#2", "*/2", "7L", "0#1"]
            ),
        )
    )


def test_the_calendar_is_that_of_cronsim() -> None:
    draw = random.Random(1)
    compared = 0
    while compared < 600:
        expression = random_calendar(draw)
        start = draw.randint(at("1999-12-01T00:00Z"), at("2101-03-02T00:00Z"))
        try:
            cron = Cron(expression)
        except BadSchedule:
            continue  # never due
        now = datetime.fromtimestamp(start, UTC)
        ahead, back = CronSim(expression, now), CronSim(expression, now, reverse=True)
        one, two = cron.after(start), cron.latest(start - 1)
        assert one == int(next(ahead).timestamp()), (expression, now)
        assert two == int(next(back).timestamp()), (expression, now)
        compared += 1
