"""How schedules speak to people."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from fencepost.model.schedule import At, Cron, Every, EveryAfter, Schedule, described, dst_note


def at(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp())


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (Cron("0 2 * * *", "Europe/Berlin"), "at 02:00 every day, Berlin time"),
        (Cron("0 2 * * *", "America/New_York"), "at 02:00 every day, New York time"),
        (Cron("0 2 * * *", second=30), "at 02:00:30 every day, UTC"),
        (Cron("*/15 * * * *"), "every 15 minutes at :00, :15, :30 and :45, UTC"),
        (Cron("*/5 * * * *"), "every 5 minutes, UTC"),
        (Cron("3/5 * * * *"), "every 5 minutes from :03, UTC"),
        (Cron("* * * * *"), "every minute, UTC"),
        (Cron("* * * * *", second=30), "every minute at second 30, UTC"),
        (Cron("@hourly"), "every hour at :00, UTC"),
        (Cron("5,20 * * * *"), "every hour at :05 and :20, UTC"),
        (Cron("0-9,30 * * * *"), "every hour at :00 to :09 and :30, UTC"),
        (Cron("0 */2 * * *"), "every 2 hours from 00:00, UTC"),
        (Cron("30 6,18 * * *"), "at 06:30 and 18:30 every day, UTC"),
        (
            Cron("*/5 9-17 * * MON-FRI"),
            "every 5 minutes, from 09:00 to 17:59, from Monday to Friday, UTC",
        ),
        (Cron("0 9-17 * * *"), "at :00, from 09:00 to 17:59, UTC"),
        (
            Cron("0 0-7,9,11 * * *"),
            "at :00, in the hours 00, 01, 02, 03, 04, 05, 06, 07, 09 and 11, UTC",
        ),
        (Cron("0 9 * * MON"), "at 09:00 on Mondays, UTC"),
        (Cron("0 9 * * SAT,SUN"), "at 09:00 on Saturdays and Sundays, UTC"),
        (Cron("0 9 * * 5-7"), "at 09:00 from Friday to Sunday, UTC"),
        (Cron("0 9 * * 1#1"), "at 09:00 on the first Monday of the month, UTC"),
        (Cron("0 9 * * 2,5L"), "at 09:00 on Tuesdays or on the last Friday of the month, UTC"),
        (Cron("0 9 1,2,3,22 * *"), "at 09:00 on the 1st to 3rd and 22nd of the month, UTC"),
        (Cron("0 9 11 * *"), "at 09:00 on the 11th of the month, UTC"),
        (Cron("0 9 L * *"), "at 09:00 on the last day of the month, UTC"),
        (Cron("0 9 LW * *"), "at 09:00 on the last weekday of the month, UTC"),
        (Cron("0 9 13 * 5"), "at 09:00 on the 13th of the month, or on Fridays, UTC"),
        (
            Cron("0 9 13 * 5", day_match="and"),
            "at 09:00 on the 13th of the month, if also on Fridays, UTC",
        ),
        (
            Cron("0 0 1 1,2,6-9 *"),
            "at 00:00 on the 1st of the month in January, February and June to September, UTC",
        ),
        (Every("15m"), "every 15 minutes at :00, :15, :30 and :45"),
        (Every("15m", phase="1m"), "every 15 minutes at :01, :16, :31 and :46"),
        (Every("1h", phase=30), "every hour at :00:30"),
        (Every("10s"), "every 10 seconds"),
        (Every("1s"), "every second"),
        (Every("1d"), "every day at 00:00 UTC"),
        (Every("6h", phase="1h"), "every 6 hours at 01:00, 07:00, 13:00 and 19:00 UTC"),
        (
            Every("7d", phase="1d"),
            "every 7 days, shifted by 1 day from the start of 1970 in UTC",
        ),
        (EveryAfter("15m"), "15 minutes after the last run has ended"),
        (At("2026-01-20T02:00:00Z"), "once, at 2026-01-20T02:00:00Z"),
    ],
)
def test_a_schedule_is_described_in_plain_words(schedule: Schedule, words: str) -> None:
    assert described(schedule) == words


@settings(deadline=None)
@given(
    st.tuples(
        st.sets(st.integers(0, 59), min_size=1),
        st.sets(st.integers(0, 23), min_size=1),
        st.sets(st.integers(1, 28), min_size=1),
        st.sets(st.integers(1, 12), min_size=1),
        st.sets(st.integers(0, 7), min_size=1),
    )
)
def test_anything_can_be_described(fields: tuple[set[int], ...]) -> None:
    cron = Cron(" ".join(",".join(map(str, field)) for field in fields))
    assert described(cron).endswith(", UTC")
    assert "  " not in described(cron)


FORWARD, BACK = "2024-03-31T01:00:00Z", "2024-10-27T00:30:00Z"  # in Berlin
AGAIN, NEXT = "2024-10-27T01:30:00Z", "2024-04-01T00:30:00Z"


@pytest.mark.parametrize(
    ("expression", "words", "slot", "note"),
    [
        ("30 2 * * *", {}, FORWARD, "clocks go forward: 02:30 does not exist, runs at 03:00"),
        (
            "0,20,40 2 * * *",
            {},
            FORWARD,
            "clocks go forward: 02:00, 02:20 and 02:40 do not exist, runs at 03:00",
        ),
        ("* 2 * * *", {}, FORWARD, "clocks go forward: 02:00 to 02:59 do not exist, runs at 03:00"),
        ("0 3 * * *", {}, FORWARD, None),
        ("0 * * * *", {}, FORWARD, None),
        ("30 2 * * *", {}, NEXT, None),
        (
            "30 2 * * *",
            {"dst_gap": "skip"},
            NEXT,
            "clocks went forward on 2024-03-31: 02:30 did not exist and was left out",
        ),
        ("30 2 * * *", {"dst_gap": "skip"}, "2024-04-02T00:30:00Z", None),
        ("30 2 * * *", {}, BACK, "clocks go back: 02:30 comes twice, runs at the first"),
        (
            "30 2 * * *",
            {"dst_fold": "second"},
            AGAIN,
            "clocks go back: 02:30 comes twice, runs at the second",
        ),
        (
            "30 2 * * *",
            {"dst_fold": "both"},
            AGAIN,
            "clocks go back: 02:30 comes twice, runs both times, this is the second",
        ),
        (
            "30 * * * *",
            {},
            BACK,
            "clocks go back: 02:30 comes twice, runs both times, this is the first",
        ),
        ("30 2 * * *", {}, "2024-10-28T01:30:00Z", None),
    ],
)
def test_a_slot_at_a_change_of_the_clocks_has_a_note(
    expression: str, words: dict[str, Any], slot: str, note: str | None
) -> None:
    cron = Cron(expression, "Europe/Berlin", **words)
    assert cron.contains(at(slot))
    assert dst_note(cron, at(slot)) == note


@pytest.mark.parametrize("schedule", [Cron("30 2 * * *"), Every("1h"), EveryAfter("1h"), At(0)])
def test_where_no_clocks_change_there_is_no_note(schedule: Schedule) -> None:
    assert dst_note(schedule, at("2024-03-31T02:30:00Z")) is None
