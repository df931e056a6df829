from __future__ import annotations

import copy
import pickle
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim
from hypothesis import example, given, settings, strategies as st

import fencepost
from fencepost.errors import BadSchedule
from fencepost.model.dates import Pattern
from fencepost.model.schedule import (
    At,
    Cron,
    Every,
    EveryAfter,
    doubtful,
    due_slot,
    schedule_of,
    upcoming,
)

if TYPE_CHECKING:
    from fencepost.model.schedule import Schedule

HOUR, DAY = 3600, 86400
FOREVER = float("inf")
# Days on which clocks change: by an hour, by half of one, at midnight, and over a whole day.
CHANGES = [
    ("Europe/Berlin", "2024-03-31"),
    ("Europe/Berlin", "2024-10-27"),
    ("America/New_York", "2024-03-10"),
    ("America/New_York", "2024-11-03"),
    ("Australia/Lord_Howe", "2024-04-06"),
    ("Australia/Lord_Howe", "2024-10-05"),
    ("America/Sao_Paulo", "2018-11-04"),
    ("America/Sao_Paulo", "2018-02-18"),
    ("Pacific/Apia", "2011-12-30"),
    ("Asia/Kathmandu", "2024-03-31"),
    ("UTC", "2024-02-29"),
]


def at(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp())


def local(schedule: Cron, start: str, *, count: int) -> list[str]:
    """Return the next slots after a local day begins, as its clocks show them."""
    zone = ZoneInfo(schedule.tz)
    begin = datetime.fromisoformat(start).replace(tzinfo=zone).timestamp()
    found = islice(schedule.between(begin, FOREVER), count)
    return [datetime.fromtimestamp(slot, zone).strftime("%m-%d %H:%M%z") for slot in found]


class Part(NamedTuple):
    """One field of an expression: its text, and the numbers it means."""

    text: str
    values: frozenset[int]


def parts(low: int, high: int, *, drawn: int | None = None) -> st.SearchStrategy[Part]:
    numbers = st.integers(low, drawn or high)
    every = frozenset(range(low, high + 1))
    return st.one_of(
        st.just(Part("*", every)),
        st.integers(2, 20).map(lambda n: Part(f"*/{n}", frozenset(range(low, high + 1, n)))),
        st.frozensets(numbers, min_size=1, max_size=4).map(
            lambda some: Part(",".join(map(str, some)), some)
        ),
        st.tuples(numbers, numbers)
        .map(sorted)
        .map(lambda ends: Part(f"{ends[0]}-{ends[1]}", frozenset(range(ends[0], ends[1] + 1)))),
    )


HOURS = st.one_of(parts(0, 23), parts(0, 23, drawn=4))  # clocks change at night
FIELDS = st.tuples(
    parts(0, 59), HOURS, parts(1, 31, drawn=28), st.just(Part("*", frozenset(range(1, 13))))
)
EXPRESSIONS = st.tuples(FIELDS, parts(0, 6)).map(lambda both: (*both[0], both[1]))
# Most of what is drawn above is not due on the day in question; this always is.
DAILY = st.tuples(parts(0, 59), HOURS).map(
    lambda both: (*both, *(Part("*", frozenset(range(32))) for _ in range(3)))
)


def matches(wall: datetime, fields: tuple[Part, ...]) -> bool:
    minute, hour, day, month, weekday = fields
    by_day, by_week = wall.day in day.values, wall.isoweekday() % 7 in weekday.values
    both = day.text[0] == "*" or weekday.text[0] == "*"
    return (
        wall.minute in minute.values
        and wall.hour in hour.values
        and wall.month in month.values
        and (by_day and by_week if both else by_day or by_week)
    )


@lru_cache(maxsize=64)
def walls(zone: str, start: int, end: int) -> list[tuple[int, datetime]]:
    """Return each minute of UTC with what the clocks of a zone show then."""
    there = ZoneInfo(zone)
    return [
        (second, datetime.fromtimestamp(second, there).replace(tzinfo=None, fold=0))
        for second in range(start, end, 60)
    ]


def slow(fields: tuple[Part, ...], zone: str, start: int, end: int) -> list[int]:
    """Return the slots by looking at the clocks each minute, without knowing why they change."""
    hour = fields[1]
    if hour.text[0] == "*" or len(hour.values) == 24:
        return [second for second, wall in walls(zone, start, end) if matches(wall, fields)]
    # A time is due when the clocks first show it, or something later.
    found, highest = [], datetime.min  # noqa: DTZ901 -- what clocks show has no zone
    for second, wall in walls(zone, start - 2 * DAY, end):
        since = max(highest + timedelta(minutes=1), wall - timedelta(days=2))
        passed = (wall - since) // timedelta(minutes=1) + 1
        if any(matches(since + timedelta(minutes=n), fields) for n in range(passed)):
            found.append(second)
        highest = max(highest, wall)
    return [second for second in found if second >= start]


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(CHANGES), st.one_of(EXPRESSIONS, DAILY), st.integers(-8, 8))
def test_cron_agrees_with_looking_at_the_clocks_every_minute(
    change: tuple[str, str], fields: tuple[Part, ...], hours: int
) -> None:
    zone, day = change
    start = at(f"{day}T00:00Z") + (hours - 12) * HOUR
    end = start + 30 * HOUR
    schedule = Cron(" ".join(part.text for part in fields), zone)
    assert list(schedule.between(start, end)) == slow(fields, zone, start, end)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(CHANGES), st.one_of(EXPRESSIONS, DAILY), st.data())
def test_the_latest_cron_slot_is_the_last_that_the_clocks_have_shown(
    change: tuple[str, str], fields: tuple[Part, ...], data: st.DataObject
) -> None:
    zone, day = change
    start = at(f"{day}T00:00Z") - 20 * HOUR
    end = start + 50 * HOUR
    now = data.draw(st.integers(start, end - 60))
    known = [slot for slot in slow(fields, zone, start, end) if slot <= now]
    found = Cron(" ".join(part.text for part in fields), zone).latest(now)
    assert found == known[-1] if known else found is None or found < start


CRONS = st.builds(
    lambda fields, change: Cron(" ".join(part.text for part in fields), change[0]),
    st.one_of(EXPRESSIONS, DAILY),
    st.sampled_from(CHANGES),
)
EVERIES = st.integers(1, 10**6).flatmap(
    lambda length: st.builds(
        Every,
        st.just(length),
        anchor=st.integers(0, 2 * 10**9),
        phase=st.integers(0, length - 1),
    )
)
ATS = st.builds(At, st.integers(0, 4 * 10**9))
INSTANTS = st.one_of(
    st.floats(0, 4e9),
    st.sampled_from(CHANGES).flatmap(
        lambda change: st.floats(-DAY, DAY).map(lambda more: at(f"{change[1]}T00:00Z") + more)
    ),
)


@settings(deadline=None, max_examples=200)
@given(st.one_of(CRONS, EVERIES, ATS), INSTANTS)
@example(Every(1), 0.0)
@example(At(0), 0.0)
@example(Cron("30 2 * * *", "Europe/Berlin"), at("2024-10-27T01:15Z") + 0.5)
def test_after_latest_contains_and_between_tell_one_story(
    schedule: Schedule, instant: float
) -> None:
    before, coming = schedule.latest(instant), schedule.after(instant)
    if before is not None:
        assert before <= instant
        assert schedule.contains(before)
        assert schedule.after(before) == coming
        assert schedule.after(before - 1) == before
        assert list(schedule.between(before, instant)) == ([before] if before < instant else [])
    if coming is not None:
        assert coming > instant
        assert schedule.contains(coming)
        assert schedule.latest(coming) == coming
        assert schedule.latest(coming - 1) == before
        assert next(schedule.between(instant, FOREVER)) in (before, coming)
        assert not any(schedule.contains(second) for second in (coming - 1,) if second != before)


@settings(deadline=None, max_examples=50)
@given(CRONS, INSTANTS)
def test_slots_strictly_increase_and_read_the_same_backwards(cron: Cron, instant: float) -> None:
    found = list(islice(cron.between(instant, FOREVER), 100))
    assert all(one < two for one, two in pairwise(found))
    assert [cron.latest(two - 1) for _, two in pairwise(found)] == found[:-1]


@pytest.mark.parametrize(
    "expression",
    [
        "0 0 L * *",
        "0 0 LW * *",
        "0 9 * * MON#1",
        "0 9 * * fri#5",
        "0 9 * * 5L",
        "0 0 1 JAN,jul *",
        "0 9 13 * FRI",
        "0 0 31 * *",
        "5/20 8-18/3 * * 1-5",
        "0 0 29 2 *",
    ],
)
def test_what_cronsim_reads_is_what_it_yields(expression: str) -> None:
    start = datetime(2023, 1, 1, tzinfo=UTC)
    theirs = [int(when.timestamp()) for when in islice(CronSim(expression, start), 30)]
    ours = islice(Cron(expression).between(start.timestamp() + 1, FOREVER), 30)
    assert list(ours) == theirs


def test_a_time_in_a_gap_is_due_at_the_first_instant_after_it() -> None:
    found = local(Cron("30 2 * * *", "Europe/Berlin"), "2024-03-30", count=3)
    assert found == ["03-30 02:30+0100", "03-31 03:00+0200", "04-01 02:30+0200"]


def test_several_times_in_a_gap_are_one_slot() -> None:
    found = local(Cron("0,20,40 2,3 * * *", "Europe/Berlin"), "2024-03-31", count=4)
    assert found == [
        "03-31 03:00+0200",
        "03-31 03:20+0200",
        "03-31 03:40+0200",
        "04-01 02:00+0200",
    ]


def test_a_time_that_comes_twice_is_due_at_the_first() -> None:
    found = local(Cron("30 2 * * *", "Europe/Berlin"), "2024-10-27", count=2)
    assert found == ["10-27 02:30+0200", "10-28 02:30+0100"]


@pytest.mark.parametrize(
    "expression", ["30 * * * *", "30 0-23 * * *", "@hourly", "5 5,* * * *", "7 H/1 * * *"]
)
def test_hourly_patterns_are_due_every_hour_whatever_the_clocks_do(expression: str) -> None:
    for day in ("2024-03-31", "2024-10-27"):
        start = at(f"{day}T00:00Z")
        found = list(Cron(expression, "Europe/Berlin", spread="job").between(start, start + DAY))
        assert len(found) == 24
        assert {two - one for one, two in pairwise(found)} == {HOUR}


def test_half_an_hour_of_change_loses_no_slot() -> None:
    found = local(Cron("0 */3 * * *", "Australia/Lord_Howe"), "2024-10-06", count=3)
    assert found == ["10-06 00:00+1030", "10-06 03:00+1100", "10-06 06:00+1100"]


def test_a_day_that_a_zone_left_out_gives_one_slot_at_its_end() -> None:
    found = local(Cron("0 12 * * *", "Pacific/Apia"), "2011-12-29", count=3)
    assert found == ["12-29 12:00-1000", "12-31 00:00+1400", "12-31 12:00+1400"]


def test_a_million_intervals_do_not_drift() -> None:
    start = at("2026-01-20T00:00:07Z")
    schedule = Every("7s", anchor=start)
    slot: int | None = start
    for k in range(1, 10**6 + 1):
        slot = schedule.after(start + 7 * (k - 1))
        assert slot == start + 7 * k
    assert slot == start + 7 * 10**6


def test_a_delay_counts_from_the_end_of_the_last_run() -> None:
    schedule = EveryAfter("15m")
    assert schedule.after_end(1000.9) == schedule.after(1000.9) == 1900
    assert type(schedule.after_end(1000.9)) is int


def test_a_delay_has_no_calendar() -> None:
    schedule = EveryAfter("1s")
    assert schedule.latest(5000) is None
    assert list(schedule.between(0, FOREVER)) == []
    assert schedule.contains(0)
    assert schedule.contains(5001)
    assert not schedule.contains(-1)
    assert due_slot(schedule, 5000) is None
    assert schedule.after(FOREVER) is None


@pytest.mark.parametrize("interval", [0, -5, "500ms", "9000d", "15", True, FOREVER])
def test_a_delay_that_cannot_be_is_refused(interval: float | str) -> None:
    with pytest.raises(BadSchedule, match=r"^every after is"):
        EveryAfter(interval)


def test_what_is_coming_is_listed_as_far_as_it_is_known() -> None:
    assert upcoming(Every(10), after=5, count=3) == [10, 20, 30]
    assert upcoming(Every(10), after=10, count=0) == []
    assert upcoming(At(10), after=5, count=3) == [10]
    assert upcoming(At(10), after=10, count=3) == []
    assert upcoming(EveryAfter(10), after=5.5, count=3) == [15]
    assert upcoming(EveryAfter(10), after=5.5, count=0) == []


def test_an_anchor_counts_in_both_directions() -> None:
    schedule = Every("1h", anchor="2026-01-20T00:10:00Z", phase="5m")
    assert schedule.latest(at("2026-01-19T23:20Z")) == at("2026-01-19T23:15Z")
    assert schedule.after(at("2026-01-20T00:10Z")) == at("2026-01-20T00:15Z")


def test_a_single_slot_comes_once() -> None:
    schedule = At("2026-01-20T02:00:00Z")
    assert schedule.slot == at("2026-01-20T02:00Z")
    assert schedule.after(schedule.slot - 0.5) == schedule.slot
    assert schedule.after(schedule.slot) is None
    assert schedule.latest(schedule.slot - 0.5) is None


@pytest.mark.parametrize("schedule", [Cron("0 0 29 2 *", "Asia/Tokyo"), Every("1h"), At(5)])
def test_the_ends_of_the_calendar_are_no_errors(schedule: Schedule) -> None:
    assert schedule.latest(-1) is None
    assert schedule.latest(-FOREVER) is None
    assert schedule.after(FOREVER) is None
    assert schedule.after(-FOREVER) == schedule.after(-1)
    last = schedule.latest(FOREVER)
    assert last is not None
    assert schedule.after(last) is None
    assert list(schedule.between(FOREVER, FOREVER)) == []


def test_the_latest_slot_after_ten_years_is_found_without_walking_there() -> None:
    schedule, steps = Cron("* * * * *", "Europe/Berlin"), 0

    class Counted(Pattern):
        __slots__ = ()

        def last(self, local: int) -> int | None:
            nonlocal steps
            steps += 1
            return super().last(local)

    object.__setattr__(schedule.pattern, "__class__", Counted)
    assert schedule.latest(at("2036-01-20T02:00:30Z")) == at("2036-01-20T02:00Z")
    assert steps == 1


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (Cron("0 2 * * *"), Cron("  0   2 * * * ")),
        (Cron("@daily"), Cron("0 0 * * *")),
        (Cron("0 9 * * MON-FRI"), Cron("0 9 * * 1,2,3,4,5")),
        (Cron("0 9 * * sun"), Cron("0 9 * * 7")),
        (Cron("0 */12 * * *"), Cron("0 0,12 * * *")),
        (Cron("0 */2 * * *", "Europe/Berlin"), Cron("0 0-23/2 * * *", "Europe/Berlin")),
        (Cron("0 */2 * * *", "Europe/Berlin"), Cron("0 00-23/2 * * *", "Europe/Berlin")),
        (Cron("0 */2 * * *", "Europe/Berlin"), Cron("0 0/2 * * *", "Europe/Berlin")),
        (Cron("0 0 1-31 * 1"), Cron("0 0 * * *")),  # either day is any day
        (Cron("0 0 */2 * 1"), Cron("0 0 */2 * 1", day_match="and")),
        (Cron("0 2 * * *", dst_gap="skip", dst_fold="both"), Cron("0 2 * * *")),
        (Cron("0 2 * * *", spread="a"), Cron("0 2 * * *", spread="b")),
        (
            Cron("0 * * * *", "Asia/Tokyo", dst_fold="both"),
            Cron("0 0-23 * * *", "Asia/Tokyo", dst_gap="skip"),
        ),
        (EveryAfter("15m"), EveryAfter(900)),
        (Every("15m"), Every(900, anchor=900)),
        (Every("1h", anchor=60), Every(timedelta(hours=1), phase=60)),
        (At(0), At("1970-01-01T00:00:00Z")),
    ],
)
def test_the_same_in_other_words_is_equal(one: Schedule, two: Schedule) -> None:
    assert one == two
    assert hash(one) == hash(two)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (Cron("0 2 * * *"), Cron("0 2 * * *", "Europe/Berlin")),
        (Cron("0 0 1-31 * 1"), Cron("0 0 * * 1")),  # either day, or both
        (Cron("0 */12 * * *", "Europe/Berlin"), Cron("0 0,12 * * *", "Europe/Berlin")),
        (Every("15m"), Every("15m", phase=1)),
        (Every(1), At(0)),
        (Every("15m"), EveryAfter("15m")),
        (Cron("0 2 * * *"), Cron("0 2 * * *", second=1)),
        (Cron("0 2 1 * 1"), Cron("0 2 1 * 1", day_match="and")),
        (Cron("0 2 * * *", "Asia/Tokyo"), Cron("0 2 * * *", "Asia/Tokyo", dst_gap="skip")),
        (Cron("0 2 * * *", "Asia/Tokyo"), Cron("0 2 * * *", "Asia/Tokyo", dst_fold="second")),
        (Cron("0 2 * * *", "Asia/Tokyo"), Cron("0 2 * * *", "Asia/Tokyo", dst_fold="both")),
    ],
)
def test_what_differs_in_some_slot_is_not_equal(one: Schedule, two: Schedule) -> None:
    assert one != two


@pytest.mark.parametrize(
    "schedule", [Cron("0 2 * * *", "Europe/Berlin"), Every("1h"), EveryAfter("1h"), At(5)]
)
def test_schedules_are_values(schedule: Schedule) -> None:
    for same in (
        copy.copy(schedule),
        copy.deepcopy(schedule),
        pickle.loads(pickle.dumps(schedule)),
    ):
        assert same == schedule
        assert same.after(0) == schedule.after(0)
        with pytest.raises(AttributeError, match="is a value"):
            same.tz = "UTC"
    assert schedule != "0 2 * * *"


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (Cron("0  2 * * *", "Europe/Berlin"), "cron '0 2 * * *' in Europe/Berlin"),
        (Cron("@daily"), "cron '@daily' in UTC"),
        (
            Cron("0 2 1 * 1", "Asia/Tokyo", second=5, day_match="and", dst_fold="both"),
            "cron '0 2 1 * 1' in Asia/Tokyo with second=5, day_match='and', dst_fold='both'",
        ),
        (Cron("0 2 */2 * 1"), "cron '0 2 */2 * 1' in UTC"),
        (EveryAfter("15m"), "15 min after the last run"),
        (Every("15m"), "every 15 min"),
        (Every("1h30m", phase=20), "every 90 min, shifted by 20 s"),
        (Every("1d"), "every 1 d"),
        (At("2026-01-20T02:00:00Z"), "once at 2026-01-20T02:00:00Z"),
    ],
)
def test_schedules_read_as_people_say_them(schedule: Schedule, said: str) -> None:
    assert str(schedule) == said
    assert repr(schedule) == f"<{said}>"


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("*/10 * * * * *", "seconds are not in the cron string, say second=30 beside"),
        ("", "has 0 fields: write five"),
        ("0 2 * *", "has 4 fields: write five"),
        ("61 * * * *", "has a bad minute, '61': write numbers"),
        ("0 24 * * *", "has a bad hour, '24'"),
        ("0 0 0 * *", "has a bad day-of-month, '0'"),
        ("0 0 31 2 *", "is never due: no month '2' has a day 31"),
        ("0 0 * foo *", "has a bad month, 'FOO'"),
        ("0 0 * * 8", "has a bad day-of-week, '8'"),
        ("0 0 * 2 MON#5", "is not due within 8 years: check its days and months"),
        ("0 0 29 2 */7", "is not due within 8 years"),
        ("0 0 32 * *", "has a bad day-of-month, '32': write numbers"),
        ("0 0 31 4,6,9 *", "is never due: no month '4,6,9' has a day 31"),
        ("@reboot", "is no time: what each start of a program needs"),
        ("@fortnightly", "is unknown: write five fields, or one of @yearly"),
        ("H 2 * * *", "has an H for its minute, but no name to spread by: give spread="),
        ("CRON_TZ=Asia/Tokyo 0 2 * * *", "say it with tz="),
        (None, "cron is None: give text such as"),
    ],
)
def test_an_expression_that_cannot_be_is_refused_with_a_sentence(
    expression: str, sentence: str
) -> None:
    with pytest.raises(BadSchedule) as refused:
        Cron(expression)
    assert sentence in str(refused.value)
    assert repr(expression) in str(refused.value)


@given(st.text(alphabet="0123456789*/-,L#W@ MONJA", max_size=20))
def test_any_text_is_a_schedule_or_refused(text: str) -> None:
    try:
        found = Cron(text).after(0)
    except BadSchedule:
        return
    assert found is not None


@pytest.mark.parametrize(
    "tz",
    ["Mars/Phobos", "", "europe", "Europe", "../etc/passwd", "localtime", "right/UTC", None, 1],
)
def test_a_zone_that_is_not_known_is_refused(tz: str) -> None:
    with pytest.raises(BadSchedule, match="is no known time zone: give a name such as"):
        Cron("0 2 * * *", tz)


@pytest.mark.parametrize(
    ("interval", "sentence"),
    [
        (0, "every is 0: give 1 s or more"),
        (-5, "every is -5: give 1 s or more"),
        ("500ms", "every is '500ms': slots are whole seconds"),
        (1.5, "every is 1.5: slots are whole seconds"),
        ("9000d", "every is '9000d': give 1 s or more, up to 8 years"),
        ("15", "every is '15': write a number and a unit"),
        (True, "every is True"),
        (FOREVER, "every is inf"),
    ],
)
def test_an_interval_that_cannot_be_is_refused_with_a_sentence(
    interval: float | str, sentence: str
) -> None:
    with pytest.raises(BadSchedule) as refused:
        Every(interval)
    assert sentence in str(refused.value)


@pytest.mark.parametrize("phase", [-1, 60, "1h", 0.5])
def test_a_phase_is_a_part_of_the_interval(phase: float | str) -> None:
    with pytest.raises(BadSchedule, match="phase is"):
        Every("1m", phase=phase)


@pytest.mark.parametrize(
    "instant",
    [
        0.5,
        -1,
        "2026-01-20T02:00",
        "2026-01-20T02:00:00.5Z",
        datetime(2026, 1, 20),  # noqa: DTZ001 -- that is what is wrong with it
        datetime(2026, 1, 20, microsecond=1, tzinfo=UTC),
        "9999-06-01T00:00:00Z",
    ],
)
def test_an_instant_without_a_zone_or_with_a_fraction_is_refused(
    instant: datetime | str | float,
) -> None:
    with pytest.raises(BadSchedule, match=r"^at is"):
        At(instant)
    with pytest.raises(BadSchedule, match=r"^anchor is"):
        Every("1h", anchor=instant)


def test_hours_that_are_whole_seconds_only_in_decimals_are_taken() -> None:
    assert Every("0.55h") == Every(1980)


def test_a_job_says_its_schedule_in_one_way() -> None:
    assert schedule_of() is None
    assert schedule_of(tz="Europe/Berlin") is None
    assert schedule_of(cron="0 2 * * *", tz="Europe/Berlin") == Cron("0 2 * * *", "Europe/Berlin")
    assert schedule_of(cron=Cron("0 2 * * *", "Asia/Tokyo")) == Cron("0 2 * * *", "Asia/Tokyo")
    assert schedule_of(every="15m") == schedule_of(every=Every("15m")) == Every(900)
    assert schedule_of(at="2026-01-20T02:00:00Z") == At("2026-01-20T02:00:00Z")
    assert schedule_of(at=At(5)) == schedule_of(at=5)
    with pytest.raises(BadSchedule, match=r"0 2 \* \* \* and 15m are given: choose one"):
        schedule_of(cron="0 2 * * *", every="15m")


def test_a_job_says_the_words_of_cron_beside_it() -> None:
    made = schedule_of(
        cron="H 2 1 * 1",
        tz="Europe/Berlin",
        second=5,
        day_match="and",
        dst_gap="skip",
        dst_fold="both",
        spread="billing",
    )
    assert made == Cron(
        "H 2 1 * 1",
        "Europe/Berlin",
        spread="billing",
        second=5,
        day_match="and",
        dst_gap="skip",
        dst_fold="both",
    )
    assert schedule_of(every=EveryAfter("15m"), spread="billing") == EveryAfter(900)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"every": "15m", "second": 5}, "second is 5, but every 15 min would not follow it"),
        ({"every": EveryAfter(9), "dst_gap": "skip"}, "dst_gap is 'skip', but 9 s after the last"),
        ({"at": 5, "dst_fold": "both"}, "dst_fold is 'both', but once at"),
        ({"day_match": "and"}, "day_match is 'and', but no cron is there to follow it"),
        ({"cron": Cron("0 2 * * *"), "second": 5}, "say it inside of Cron(…)"),
        ({"cron": "0 2 * * *", "second": 60}, "second is 60: give a whole number from 0 to 59"),
        ({"cron": "0 2 * * *", "second": True}, "second is True: give a whole number"),
        ({"cron": "0 2 * * *", "second": 0.5}, "second is 0.5: give a whole number"),
        ({"cron": "0 2 * * *", "day_match": "xor"}, "day_match is 'xor': it must be 'or' or 'and'"),
        ({"cron": "0 2 * * *", "dst_gap": "run"}, "dst_gap is 'run': it must be 'shift' or 'skip'"),
        ({"cron": "0 2 * * *", "dst_fold": 1}, "it must be 'first' or 'second' or 'both'"),
        ({"cron": 5}, "cron is 5: give text"),
        ({"every": EveryAfter(9), "tz": "Asia/Tokyo"}, "tz is 'Asia/Tokyo', which 9 s after"),
    ],
)
def test_words_that_do_not_go_together_are_refused_with_a_sentence(
    words: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(BadSchedule) as refused:
        schedule_of(**words)
    assert sentence in str(refused.value)


def test_a_zone_that_would_not_be_followed_is_refused() -> None:
    with pytest.raises(BadSchedule, match="which every 1 d would not follow"):
        schedule_of(every="1d", tz="Europe/Berlin")
    with pytest.raises(BadSchedule, match="in UTC would not follow"):
        schedule_of(cron=Cron("0 2 * * *"), tz="Europe/Berlin")


def test_zero_is_an_interval_that_was_asked_for() -> None:
    with pytest.raises(BadSchedule, match="every is 0"):
        schedule_of(every=0)


@pytest.mark.parametrize(
    ("schedule", "now", "meant"),
    [
        (Every("15m"), 900.0, 900),
        (Every("15m"), 899.0, 900),
        (Every("15m"), 898.9, 0),
        (Every("15m"), 1500.0, 900),
        (Every("1s"), 9.95, 10),
        (Every("1s"), 9.85, 9),
        (Every("5s"), 9.5, 10),
        (Every("5s"), 9.4, 5),
        (At(900), 899.0, 900),
        (At(900), 898.0, None),
        (At(900), 5000.0, 900),
    ],
)
def test_a_trigger_a_little_early_means_the_slot_that_is_coming(
    schedule: Schedule, now: float, meant: int | None
) -> None:
    assert due_slot(schedule, now) == meant


@given(st.one_of(EVERIES, ATS), INSTANTS, st.floats(0, 1e6))
def test_no_tolerance_makes_a_trigger_on_time_mean_another_slot(
    schedule: Schedule, instant: float, early: float
) -> None:
    slot = schedule.latest(instant)
    if slot is not None:
        assert due_slot(schedule, slot, early=early) == slot
        assert due_slot(schedule, instant, early=0) == slot


@pytest.mark.parametrize(
    ("schedule", "hint"),
    [
        (Cron("* 9 * * *"), "did you mean '0 9 * * *'?"),
        (Cron("* */2 * * 1-5"), "did you mean '0 */2 * * 1-5'?"),
        (Cron("* * 1 * *"), "did you mean '0 0 1 * *'?"),
        (Cron("0 9 1 * MON"), "did you mean both?"),
        (Cron("0 0 31 * *"), "leaves out months without a day 31: write L"),
        (Cron("0 0 30 * *"), "leaves out months without a day 30"),
        (Cron("0 0 30 1,2 *"), "leaves out months without a day 30"),
        (Cron("0 0 29 * *"), "leaves out months without a day 29"),
        (Cron("0 0 29 2 *"), "is due in leap years only: write L"),
        (Every("5s"), "every 5 s is often"),
        (EveryAfter("5s"), "5 s after the last run is often"),
    ],
)
def test_what_is_probably_a_mistake_is_doubted(schedule: Schedule, hint: str) -> None:
    said = doubtful(schedule)
    assert said is not None
    assert said.startswith(str(schedule))
    assert hint in said


@pytest.mark.parametrize(
    "schedule",
    [
        Cron("* * * * *"),
        Cron("0 9 * * *"),
        Cron("* 9-17 * * MON-FRI"),
        Cron("*/5 9 * * *"),
        Cron("0 0 L * *"),
        Cron("0 0 29,L 2 *"),
        Cron("0 0 31 1,3 *"),
        Cron("0 9 13 * FRI", day_match="and"),
        Cron("0 0 28 * *"),
        Every("10s"),
        At(0),
    ],
)
def test_what_is_plain_is_not_doubted(schedule: Schedule) -> None:
    assert doubtful(schedule) is None


def test_schedules_are_public_names() -> None:
    assert (fencepost.Cron, fencepost.Every, fencepost.At) == (Cron, Every, At)
    assert fencepost.EveryAfter is EveryAfter
