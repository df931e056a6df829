from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, strategies as st

from fencepost.errors import BadName, BadSlot
from fencepost.model.slot import RunKey, checked_job, instant, parsed, shown

if TYPE_CHECKING:
    from datetime import tzinfo

LAST = 253_402_300_799
slots = st.integers(min_value=0, max_value=LAST)
jobs = st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S"]), min_size=1)
keys = st.builds(
    RunKey,
    jobs.filter(lambda name: "@" not in name and not name.rpartition("#")[2].isdigit()),
    slots,
    st.integers(min_value=0, max_value=10**6),
    st.integers(min_value=0, max_value=10**6),
)
moments = st.datetimes(min_value=datetime(1971, 1, 1), max_value=datetime(9998, 1, 1))  # noqa: DTZ001 -- zones are added below
zones = st.sampled_from(
    [
        UTC,
        timezone(timedelta(hours=5, minutes=45)),
        timezone(timedelta(hours=-11, seconds=-1)),
        ZoneInfo("Europe/Berlin"),
        ZoneInfo("America/St_Johns"),
        ZoneInfo("Australia/Lord_Howe"),
    ]
)


@given(key=keys)
def test_a_key_survives_being_written_and_read(key: RunKey) -> None:
    assert parsed(str(key)) == key


@given(one=keys, other=keys)
def test_different_runs_are_never_written_alike(one: RunKey, other: RunKey) -> None:
    assert (str(one) == str(other)) is (one == other)


@given(slot=slots)
def test_an_instant_survives_being_shown(slot: int) -> None:
    assert instant(shown(slot)) == slot


@given(moment=moments, zone=zones, elsewhere=zones)
def test_one_moment_is_one_slot_whatever_zone_names_it(
    moment: datetime, zone: tzinfo, elsewhere: tzinfo
) -> None:
    there = moment.replace(tzinfo=UTC).astimezone(zone)
    here = there.astimezone(elsewhere)
    assert instant(there) == instant(here) == instant(moment.replace(tzinfo=UTC))


@given(moment=moments, zone=zones)
def test_a_fraction_of_a_second_is_cut_off_and_never_rounded_up(
    moment: datetime, zone: tzinfo
) -> None:
    aware = moment.replace(tzinfo=UTC)
    slot = instant(aware.astimezone(zone))
    begun = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=slot)
    assert begun <= aware < begun + timedelta(seconds=1)


def test_the_last_microsecond_of_a_second_of_a_far_year_still_belongs_to_it() -> None:
    late = datetime(2900, 1, 1, 2, 0, 0, 999_999, tzinfo=UTC)
    assert instant(late) == instant(late.replace(microsecond=0))


def test_both_two_o_clocks_of_a_night_that_has_two_are_different_slots() -> None:
    berlin = ZoneInfo("Europe/Berlin")
    first = datetime(2026, 10, 25, 2, 30, tzinfo=berlin)
    assert instant(first.replace(fold=1)) - instant(first) == 3600


def test_a_datetime_without_a_zone_is_refused() -> None:
    with pytest.raises(BadSlot, match="without a time zone"):
        instant(datetime(2026, 1, 20, 2))  # noqa: DTZ001 -- that is the point


@pytest.mark.parametrize(
    "text",
    [
        "2026-01-20T02:00:00Z",
        "2026-01-20T02:00Z",
        "2026-01-20T02:00:00.000Z",
        "2026-01-20T03:00:00+01:00",
        "2026-01-20T03:00+0100",
        "2026-01-19T21:00:00-05:00",
    ],
)
def test_one_moment_may_be_spelled_in_many_ways(text: str) -> None:
    assert shown(instant(text)) == "2026-01-20T02:00:00Z"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "now",
        "2026-01-20",
        "2026-01-20T02:00:00",
        "2026-01-20 02:00:00Z",
        "2026-01-20T02:00:00.5Z",
        "2026-13-20T02:00:00Z",
        "2026-01-20T02:00:60Z",
        "1969-12-31T23:59:59Z",
        "9999-12-31T23:59:59-01:00",
        "2026-01-20T02:00:00Z\n",
        "２０２６-01-20T02:00:00Z",  # noqa: RUF001 -- wide digits are digits to some
        "1768874400",
    ],
)
def test_text_that_could_mean_another_moment_is_refused(text: str) -> None:
    with pytest.raises(BadSlot, match="slot is"):
        instant(text)


@pytest.mark.parametrize(
    "value", [-1, -0.5, LAST + 1, float("nan"), float("inf"), True, None, date(2026, 1, 20)]
)
def test_a_number_that_is_no_moment_is_refused(value: object) -> None:
    with pytest.raises(BadSlot, match="slot is"):
        instant(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "billing",
        "billing@",
        "@2026-01-20T02:00:00Z",
        "billing@2026-01-20T02:00:00",
        "billing@2026-01-20T02:00:00+00:00",
        "billing@2026-01-20T02:00:00Z!manual-0",
        "billing@2026-01-20T02:00:00Z!manual-01",
        "billing@2026-01-20T02:00:00Z~0",
        "billing@2026-01-20T02:00:00Z~1!manual-1",
        "billing@2026-01-20T02:00:00Z!manual-1٢",
        "billing@2026-02-30T02:00:00Z",
    ],
)
def test_text_that_is_almost_a_key_is_refused(text: str) -> None:
    with pytest.raises(BadSlot):
        parsed(text)


def test_a_key_is_read_with_the_canonical_name_of_its_job() -> None:
    assert parsed("cafe\u0301@2026-01-20T02:00Z").job == "caf\u00e9"


@pytest.mark.parametrize("name", ["a@b", "@", "", "a\nb", "permit#3"])
def test_a_job_whose_keys_could_be_misread_is_refused(name: str) -> None:
    with pytest.raises(BadName):
        checked_job(name)


def test_a_key_of_a_job_that_cannot_be_is_refused() -> None:
    with pytest.raises(BadName, match="between a job and its slot"):
        parsed("a@b@2026-01-20T02:00:00Z")
