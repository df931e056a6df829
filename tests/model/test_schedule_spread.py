"""``H`` and jitter: the same in every process and every version, so their values are pinned."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from fencepost.errors import BadSchedule
from fencepost.model.schedule import Cron, delay

NAMES = [f"job-{number}" for number in range(300)]


@pytest.mark.parametrize(
    ("expression", "name", "spec"),
    [
        ("H H H H H", "billing", '{"cron":"46 23 21 9 1"}'),
        ("H * * * *", "billing", '{"cron":"46 * * * *"}'),
        ("H(0-29) 2 * * *", "billing", '{"cron":"16 2 * * *"}'),
        ("H/15 * * * *", "billing", '{"cron":"1,16,31,46 * * * *"}'),
        ("0 H(8-17)/2 * * *", "billing", '{"cron":"0 9,11,13,15,17 * * *"}'),
        ("0 H/6 * * *", "billing", '{"cron":"0 5,11,17,23 * * *"}'),
        ("H H * * *", "reports", '{"cron":"39 7 * * *"}'),
        ("H H * * *", "käse ☃", '{"cron":"8 10 * * *"}'),
    ],
)
def test_an_h_never_moves(expression: str, name: str, spec: str) -> None:
    assert Cron(expression, spread=name).spec == spec


def test_an_h_is_the_same_in_another_process() -> None:
    program = "from fencepost import Cron; print(Cron('H H H H H', spread='billing').spec)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == Cron("H H H H H", spread="billing").spec


def test_names_are_spread_over_each_field() -> None:
    crons = [Cron("H H H H H", spread=name) for name in NAMES]
    for field, count in (("minutes", 60), ("hours", 24), ("months", 12), ("weekdays", 7)):
        seen = {min(getattr(cron.pattern, field)) for cron in crons}
        assert len(seen) > 0.95 * count, field
    assert {min(map(int, cron.pattern.days)) for cron in crons} <= set(range(1, 29))


def test_each_field_has_an_h_of_its_own() -> None:
    same = sum(
        cron.pattern.minutes == cron.pattern.hours
        for cron in (Cron("H(0-23) H * * *", spread=name) for name in NAMES)
    )
    assert same < len(NAMES) / 10


@given(st.text(min_size=1, max_size=20), st.integers(0, 59), st.integers(0, 59))
def test_an_h_stays_within_its_range(name: str, one: int, two: int) -> None:
    low, high = sorted((one, two))
    (minute,) = Cron(f"H({low}-{high}) * * * *", spread=name).pattern.minutes
    assert low <= minute <= high


@given(st.text(min_size=1, max_size=20), st.integers(0, 59), st.integers(0, 59), st.integers(1, 99))
def test_steps_begin_at_an_h_and_end_with_its_range(
    name: str, one: int, two: int, step: int
) -> None:
    low, high = sorted((one, two))
    minutes = Cron(f"H({low}-{high})/{step} * * * *", spread=name).pattern.minutes
    assert minutes == tuple(range(minutes[0], high + 1, step))
    assert low <= minutes[0] < low + step


def test_an_h_that_appears_twice_is_evenly_apart() -> None:
    for name in NAMES:
        one, two = Cron("H(0-29),H(30-59) * * * *", spread=name).pattern.minutes
        assert two - one == 30


def test_a_weekday_with_an_h_in_its_name_is_a_weekday() -> None:
    assert Cron("0 0 * * THU") == Cron("0 0 * * 4")


@pytest.mark.parametrize(
    ("expression", "wrong"),
    [
        ("H(0-60) * * * *", "has a bad minute, 'H(0-60)': H is within 0-59 there"),
        ("H(9-8) * * * *", "has a bad minute, 'H(9-8)'"),
        ("0 0 H(1-31) * *", "has a bad day-of-month, 'H(1-31)': H is within 1-28 there"),
        ("0 H/0 * * *", "has a bad hour, 'H/0'"),
        ("HH * * * *", "has a bad minute, 'HH'"),
        ("H(1) * * * *", "has a bad minute, 'H(1)'"),
        ("H-5 * * * *", "has a bad minute, 'H-5'"),
    ],
)
def test_an_h_that_cannot_be_is_refused(expression: str, wrong: str) -> None:
    with pytest.raises(BadSchedule) as refused:
        Cron(expression, spread="billing")
    assert wrong in str(refused.value)
    assert repr(expression) in str(refused.value)


@pytest.mark.parametrize("spread", [None, "", 5])
def test_an_h_needs_a_name(spread: str) -> None:
    with pytest.raises(BadSchedule, match="no name to spread by"):
        Cron("H 2 * * *", spread=spread)


# Jitter.


@pytest.mark.parametrize(
    ("job", "slot", "expected"),
    [
        ("billing", 0, 46.7544),
        ("billing", 1768874400, 13.9707),
        ("billing", 1768874401, 54.6816),
        ("reports", 1768874400, 52.1124),
    ],
)
def test_a_delay_never_changes(job: str, slot: int, expected: float) -> None:
    assert delay(job, slot, jitter=60, next_slot=None) == pytest.approx(expected, abs=1e-3)


@given(st.text(max_size=20), st.integers(0, 4 * 10**9), st.floats(0, 1e6), st.integers(1, 10**6))
def test_a_delay_is_within_its_range_and_before_the_next_slot(
    job: str, slot: int, jitter: float, interval: int
) -> None:
    free = delay(job, slot, jitter=jitter, next_slot=None)
    assert 0 <= free <= jitter
    bound = delay(job, slot, jitter=jitter, next_slot=slot + interval)
    assert 0 <= bound <= min(jitter, interval - 1)
    assert bound == delay(job, slot, jitter=jitter, next_slot=slot + interval)
    if interval - 1 >= jitter:
        assert bound == free


def test_slots_one_second_apart_have_no_room_for_a_delay() -> None:
    assert delay("job", 100, jitter=60, next_slot=101) == 0
    assert delay("job", 100, jitter=60, next_slot=50) == 0
    assert delay("job", 100, jitter=0, next_slot=None) == 0


def test_delays_are_spread_evenly_over_jobs_and_over_slots() -> None:
    for many in (
        [delay(name, 0, jitter=100, next_slot=None) for name in NAMES],
        [delay("job", slot, jitter=100, next_slot=None) for slot in range(300)],
        [delay(name, 0, jitter=10**6, next_slot=101) for name in NAMES],
    ):
        assert all(sum(low <= one < low + 25 for one in many) > 40 for low in (0, 25, 50, 75))
