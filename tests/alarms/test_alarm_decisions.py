"""The decisions about an alarm, without any book: pauses, choices, and what an error means."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from fencepost.errors import GiveUp, Misuse, OutcomeUnknown, RetryAfter
from fencepost.model.alarm import (
    AlarmRecord,
    AlarmState,
    Failure,
    chosen,
    failure_of,
    lost_record,
    next_generation,
)
from fencepost.model.alarm_policy import (
    AlarmPolicy,
    Budget,
    checked_alarm_policy,
    moment,
    reschedule,
)
from fencepost.model.fault import FAULT_CEILING
from fencepost.model.policy import Retry

ARMED = AlarmRecord("k", "a", 7, AlarmState.ARMED, due_at=100.0)
WORDS = {
    "retry": None,
    "on_error": None,
    "faults": (),
    "timeout": None,
    "cancel_grace": 0,
    "lease": 30.0,
    "max_losses": 5,
    "grace": 0,
    "budget": 100,
    "every": None,
}


def named(key: str, *, due_at: float = 0.0, streak: int = 0) -> AlarmRecord:
    return ARMED._replace(key=key, due_at=due_at, streak=streak)


@pytest.mark.parametrize(("errors", "pause"), [(1, 10.0), (2, 20.0), (3, 40.0), (9, 1020.0)])
def test_pauses_double_up_to_the_ceiling(errors: int, pause: float) -> None:
    policy = AlarmPolicy()
    assert policy.pause(errors, dice=0.0) == pause
    assert policy.pause(errors, dice=1.0) == pause * 1.25


def test_a_pause_may_be_fixed_and_without_jitter() -> None:
    policy = AlarmPolicy(retry=Retry(9, base=30, factor=1, jitter=False))
    assert {policy.pause(n, dice=0.9) for n in range(1, 9)} == {30.0}


def test_faults_back_off_to_seventeen_minutes_however_many_there_are() -> None:
    policy = AlarmPolicy()
    assert [policy.fault_pause(n, dice=0.0) for n in (1, 2, 3)] == [1.0, 2.0, 4.0]
    assert policy.fault_pause(10_000, dice=0.0) == FAULT_CEILING == 17 * 60
    assert policy.fault_pause(10_000, dice=1.0) == FAULT_CEILING * 1.25


def test_the_sixth_error_is_the_last() -> None:
    error, policy = RuntimeError("no"), AlarmPolicy()
    fifth = failure_of(ARMED._replace(errors=4), error, "no", policy, dice=0.0)
    assert (fifth.dead, fifth.pause) == ("", 160.0)
    sixth = failure_of(ARMED._replace(errors=5), error, "no", policy, dice=0.0)
    assert sixth == Failure("errors", dead="exhausted", error="no")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (GiveUp("no"), Failure("errors", dead="gave_up", error="w")),
        (RetryAfter(500.0), Failure("errors", 500.0, error="w")),
        (OutcomeUnknown("?"), Failure("faults", 1.0, error="w")),
        (SystemExit(1), Failure("errors", dead="error", error="w")),
        (ValueError("bad"), Failure("errors", dead="error", error="w")),
    ],
)
def test_an_error_says_what_becomes_of_the_alarm(error: BaseException, expected: Failure) -> None:
    policy = AlarmPolicy(retry=Retry(6, never=ValueError))
    assert failure_of(ARMED, error, "w", policy, dice=0.0) == expected


def test_what_is_rescheduled_never_dies_of_errors() -> None:
    policy = AlarmPolicy(on_error=reschedule("60s"))
    tired = ARMED._replace(errors=10_000)
    assert failure_of(tired, SystemExit(1), "w", policy, dice=0.9) == Failure(
        "errors", 60.0, error="w"
    )


def test_losses_wait_longer_and_longer_and_only_solitary_ones_are_held_against_it() -> None:
    policy = AlarmPolicy(max_losses=2)
    record = ARMED._replace(state=AlarmState.FIRING, fired=7)
    first = lost_record(record, policy, now=200.0)
    assert (first.state, first.not_before, first.strikes) == (AlarmState.ARMED, 0.0, 0)
    again = first._replace(state=AlarmState.FIRING, fired=7, solitary=True)
    second = lost_record(again, policy, now=200.0)
    assert (second.state, second.not_before, second.strikes) == (AlarmState.ARMED, 201.0, 1)
    third = lost_record(
        second._replace(state=AlarmState.FIRING, fired=7, solitary=True), policy, now=200.0
    )
    assert (third.state, third.reason) == (AlarmState.DEAD, "poison")


def test_losses_beside_others_are_enough_after_four_times_as_many() -> None:
    policy, record = AlarmPolicy(max_losses=2), ARMED
    for count in range(1, 9):
        assert record.state is AlarmState.ARMED, count
        record = lost_record(record._replace(state=AlarmState.FIRING, fired=7), policy, now=200.0)
    assert record.state is AlarmState.DEAD


def test_the_oldest_are_chosen_first_and_one_in_trouble_goes_alone() -> None:
    due = [named("c", due_at=3.0), named("a", due_at=1.0, streak=1), named("b", due_at=2.0)]
    (alone,) = chosen(due, limit=5, alone=True, now=5.0)
    assert alone.key == "a"
    beside = chosen(due, limit=5, alone=False, now=5.0)
    assert [record.key for record in beside] == ["b", "c"]
    much_later = chosen(due, limit=5, alone=False, now=50.0)
    assert [record.key for record in much_later] == ["a", "b", "c"]


def test_a_generation_is_the_time_or_one_more() -> None:
    assert next_generation(0, now=2.0) == 2_000_000
    assert next_generation(3_000_000, now=2.0) == 3_000_001


def test_the_horizon_covers_all_tries_and_pauses() -> None:
    policy = AlarmPolicy(retry=Retry(3, base=10, factor=1), timeout=100.0)
    assert policy.horizon == 3 * 100.0 + 2 * 12.5


def test_a_budget_may_have_a_window_and_must_allow_what_is_declared() -> None:
    assert checked_alarm_policy(**{**WORDS, "budget": (5, "1h")}).budget == Budget(5, 3600.0)  # type: ignore[arg-type]
    with pytest.raises(Misuse, match="every is 1 s"):
        checked_alarm_policy(**{**WORDS, "budget": (5, "1h"), "every": 1})  # type: ignore[arg-type]


def test_an_instant_is_given_in_words_numbers_or_with_its_zone() -> None:
    assert moment("2026-01-20T02:00:00Z") == moment(datetime(2026, 1, 20, 2, tzinfo=UTC))
    assert moment(1.5) == 1.5
