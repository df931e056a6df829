"""Schedules as text: nothing is lost, equal ones are equal, and what is unknown is refused."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from fencepost.errors import BadSchedule
from fencepost.model.schedule import (
    At,
    Cron,
    Every,
    EveryAfter,
    Schedule,
    schedule_from,
    spec_of,
    upcoming,
)

FIELDS = st.tuples(
    st.sampled_from(["0", "*", "*/15", "5,6,7,50", "H", "H/20", "0-59"]),
    st.sampled_from(["2", "*", "*/2", "0-23/2", "0-23", "1-3,9", "H", "H/6", "H(0-3)", "5,*/4"]),
    st.sampled_from(["*", "1", "L", "LW,3", "1-31", "*/2", "H", "1,2,3,28"]),
    st.sampled_from(["*", "JAN,jul", "*/3", "1-12"]),
    st.sampled_from(["*", "MON-FRI", "7", "0-6", "1#2,5L", "*/2", "1,1#2", "sun#1"]),
).map(" ".join)


def cron_or_none(expression: str, tz: str, **words: Any) -> Cron | None:
    try:
        return Cron(expression, tz, **words)
    except BadSchedule:  # the last day of a month is never its first Sunday
        return None


CRONS: st.SearchStrategy[Any] = st.builds(
    cron_or_none,
    st.one_of(FIELDS, st.sampled_from(["@daily", "@hourly"])),
    st.sampled_from(["UTC", "Europe/Berlin", "Australia/Lord_Howe"]),
    spread=st.sampled_from(["billing", "reports"]),
    second=st.sampled_from([0, 0, 30]),
    day_match=st.sampled_from(["or", "and"]),
    dst_gap=st.sampled_from(["shift", "skip"]),
    dst_fold=st.sampled_from(["first", "second", "both"]),
).filter(bool)
LENGTHS = st.integers(1, 8 * 365 * 86400)
SCHEDULES = st.one_of(
    CRONS,
    st.builds(Every, LENGTHS, anchor=st.integers(0, 4 * 10**9)),
    st.builds(EveryAfter, LENGTHS),
    st.builds(At, st.integers(0, 4 * 10**9)),
)
BERLIN_2024 = 1_711_800_000  # the day before its clocks go forward


@settings(deadline=None, max_examples=300)
@given(SCHEDULES)
def test_a_schedule_survives_being_written_down(schedule: Schedule) -> None:
    spec = spec_of(schedule)
    schedule_from.cache_clear()
    again = schedule_from(spec)
    assert type(again) is type(schedule)
    assert again == schedule
    assert spec_of(again) == spec
    assert json.dumps(json.loads(spec), separators=(",", ":")) == spec
    for start in (0, BERLIN_2024, BERLIN_2024 + 210 * 86400):
        assert upcoming(again, after=start, count=5) == upcoming(schedule, after=start, count=5)


@settings(deadline=None, max_examples=300)
@given(CRONS, CRONS)
def test_what_has_one_spec_has_the_same_slots(one: Cron, two: Cron) -> None:
    slots = [
        [
            *upcoming(cron, after=BERLIN_2024, count=50),
            *upcoming(cron, after=BERLIN_2024 + 209 * 86400, count=50),
        ]
        for cron in (one, two)
    ]
    assert (spec_of(one) == spec_of(two)) <= (slots[0] == slots[1])


@pytest.mark.parametrize(
    ("schedule", "spec"),
    [
        (Every("15m"), '{"every":900}'),
        (Every("15m", phase="1m"), '{"every":900,"offset":60}'),
        (EveryAfter("15m"), '{"every_after":900}'),
        (At("2026-01-20T02:00:00Z"), '{"at":1768874400}'),
        (Cron("@daily"), '{"cron":"0 0 * * *"}'),
        (Cron("0 2 * * MON-FRI", "Asia/Tokyo"), '{"cron":"0 2 * * 1-5","tz":"Asia/Tokyo"}'),
        (Cron("0 2 13 * 5", day_match="and"), '{"cron":"0 2 13 * 5","days":"and"}'),
        (
            Cron("*/30 */12 * * *", "Europe/Berlin", second=5, dst_gap="skip"),
            '{"cron":"0,30 0,12 * * *","tz":"Europe/Berlin","second":5,"elapsed":true}',
        ),
        (
            Cron("0 2 * * *", "Europe/Berlin", dst_gap="skip", dst_fold="both"),
            '{"cron":"0 2 * * *","tz":"Europe/Berlin","gap":"skip","fold":"both"}',
        ),
    ],
)
def test_what_ledgers_keep_can_be_read_for_ever(schedule: Schedule, spec: str) -> None:
    assert spec_of(schedule) == spec
    assert schedule_from(spec) == schedule


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "every 15 min",
        "[]",
        "{}",
        "5",
        "null",
        '{"every":900,"jitter":5}',
        '{"every":900,"offset":5,"more":1}',
        '{"every":"15m"}',
        '{"every":true}',
        '{"moon":"full"}',
        '{"cron":"0 2 * * *","moon":"full"}',
        '{"cron":"0 2 * * *","elapsed":"perhaps"}',
        '{"at":5,"every_after":5}',
    ],
)
def test_a_spec_of_a_newer_version_is_refused_with_a_sentence(spec: str) -> None:
    with pytest.raises(BadSchedule, match="written by a newer version of fencepost"):
        schedule_from(spec)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ('{"cron":"0 2 * * *","tz":"Mars/Phobos"}', "is no known time zone"),
        ('{"cron":"0 2 * * *","fold":"third"}', "dst_fold is 'third'"),
        ('{"cron":"0 25 * * *"}', "has a bad hour"),
        ('{"every":0}', "every is 0"),
    ],
)
def test_a_spec_that_cannot_be_followed_says_why(spec: str, why: str) -> None:
    with pytest.raises(BadSchedule, match="cannot be followed here") as refused:
        schedule_from(spec)
    assert why in str(refused.value)


def test_a_spec_is_read_once() -> None:
    schedule_from.cache_clear()
    assert schedule_from('{"cron":"0 2 * * *"}') is schedule_from('{"cron":"0 2 * * *"}')
    assert schedule_from.cache_info().maxsize is not None


def test_a_million_intervals_can_be_read_in_seconds() -> None:
    specs = [f'{{"every":{60 + number},"offset":7}}' for number in range(20_000)]
    start = time.process_time()
    for spec in specs:
        schedule_from(spec)
    assert (time.process_time() - start) / len(specs) < 50e-6  # it is about 4 µs
