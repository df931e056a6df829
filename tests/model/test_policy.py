from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, strategies as st

from fencepost.errors import BadDuration, GiveUp, Misuse, RetryAfter
from fencepost.model.policy import (
    LONGEST_LOSS_PAUSE,
    OnLoss,
    Overlap,
    Policy,
    Retry,
    RetryUntil,
    checked_policy,
    loss_pause,
)

pauses = st.floats(min_value=0.001, max_value=1e6)
dice = st.floats(min_value=0, max_value=1, exclude_max=True)


def test_a_job_that_says_nothing_runs_once_and_skips_what_overlaps() -> None:
    policy = checked_policy()
    assert policy.retry.attempts == 1
    assert policy.overlap is Overlap.SKIP
    assert policy.on_loss is OnLoss.RESUME
    assert (policy.timeout, policy.lease, policy.cancel_grace) == (3600.0, 30.0, 30.0)
    assert (policy.max_losses, policy.max_waiting, policy.max_concurrent) == (5, 1, 16)


def test_saying_nothing_is_the_same_as_the_default_policy() -> None:
    assert checked_policy() == Policy()


@pytest.mark.parametrize("word", [*Overlap, *(word.value for word in Overlap)])
def test_overlap_is_said_in_words_or_values(word: str) -> None:
    assert checked_policy(overlap=word).overlap is Overlap(word)


@pytest.mark.parametrize(
    "said",
    [
        {"overlap": "Skip"},
        {"overlap": None},
        {"retry_until": "tomorrow"},
        {"on_loss": "retry"},
        {"in_doubt": ""},
        {"max_concurrent": 0},
        {"max_concurrent": True},
        {"max_waiting": 0},
        {"max_waiting": 1.0},
        {"max_losses": 0},
        {"retry": 0},
        {"retry": True},
        {"retry": "5"},
        {"cancel_grace": -1},
    ],
)
def test_a_word_that_cannot_be_is_refused_by_its_name(said: dict[str, Any]) -> None:
    with pytest.raises(Misuse, match=f"^{next(iter(said))} "):
        checked_policy(**said)


@pytest.mark.parametrize("what", ["timeout", "loss_pause", "start_deadline"])
@pytest.mark.parametrize("value", [0, -1, "10", "soon", float("inf"), True])
def test_a_duration_that_cannot_be_is_refused_by_its_name(what: str, value: object) -> None:
    said: dict[str, Any] = {what: value}
    with pytest.raises(BadDuration, match=f"^{what} is"):
        checked_policy(**said)


def test_durations_are_taken_as_people_write_them() -> None:
    policy = checked_policy(timeout="10m", cancel_grace=timedelta(seconds=5), start_deadline=90)
    assert (policy.timeout, policy.cancel_grace, policy.start_deadline) == (600.0, 5.0, 90.0)


def test_no_timeout_and_no_bound_on_waiting_are_said_with_none() -> None:
    policy = checked_policy(timeout=None, max_waiting=None)
    assert (policy.timeout, policy.max_waiting) == (None, None)


def test_a_number_of_attempts_is_a_retry() -> None:
    assert checked_policy(retry=3).retry.attempts == 3


def test_retry_is_as_patient_as_the_contract_says() -> None:
    retry = Retry()
    assert (retry.attempts, retry.base, retry.factor, retry.ceiling) == (5, 10.0, 2.0, 600.0)
    assert RetryUntil.NEXT_SLOT is checked_policy(retry=retry).retry_until


def test_pauses_double_up_to_the_ceiling() -> None:
    retry = Retry(jitter=False)
    assert [retry.pause(n, dice=0.3) for n in (1, 2, 3, 8)] == [10.0, 20.0, 40.0, 600.0]


@given(
    base=pauses,
    ceiling=pauses,
    factor=st.floats(min_value=1, max_value=1e300),
    attempt=st.integers(min_value=1, max_value=10**9),
    thrown=dice,
)
def test_no_pause_exceeds_the_ceiling_or_overflows(
    base: float, ceiling: float, factor: float, attempt: int, thrown: float
) -> None:
    retry = Retry(10**9, base=base, factor=factor, ceiling=ceiling)
    assert 0 <= retry.pause(attempt, dice=thrown) <= ceiling


@given(attempt=st.integers(min_value=1, max_value=1000))
def test_without_jitter_no_pause_is_shorter_than_the_one_before(attempt: int) -> None:
    retry = Retry(jitter=False, factor=1.1)
    assert retry.pause(attempt, dice=0.0) <= retry.pause(attempt + 1, dice=0.0)


@pytest.mark.parametrize(
    "said",
    [
        {"attempts": 0},
        {"attempts": 2.0},
        {"attempts": True},
        {"factor": 0.5},
        {"factor": float("nan")},
        {"factor": float("inf")},
        {"base": 0},
        {"ceiling": "-1s"},
        {"on": "ValueError"},
        {"on": [ValueError]},
        {"on": (ValueError, "OSError")},
        {"never": ValueError("x")},
        {"never": int},
    ],
)
def test_a_retry_that_cannot_be_is_refused_when_it_is_declared(said: dict[str, Any]) -> None:
    with pytest.raises(Misuse, match=f"^retry {next(iter(said))} "):
        Retry(**said)


@pytest.mark.parametrize(
    ("error", "worth"),
    [
        (OSError(), True),
        (ConnectionError(), True),
        (FileNotFoundError(), False),
        (KeyError(), False),
        (KeyboardInterrupt(), False),
        (GiveUp(), False),
        (RetryAfter(5), True),
    ],
)
def test_only_errors_that_were_named_are_worth_another_try(
    error: BaseException, *, worth: bool
) -> None:
    assert Retry(on=OSError, never=(FileNotFoundError,)).worth(error) is worth


def test_giving_up_is_final_even_if_every_error_is_worth_a_try() -> None:
    assert not Retry(on=BaseException).worth(GiveUp())


def test_the_first_loss_does_not_make_a_run_wait() -> None:
    assert loss_pause(Policy(), streak=1) == 0.0


def test_the_second_loss_makes_a_run_wait() -> None:
    assert loss_pause(Policy(), streak=2) > 0.0


@given(streak=st.integers(min_value=0, max_value=10**9), pause=pauses)
def test_waits_after_losses_never_shrink_and_have_a_ceiling(streak: int, pause: float) -> None:
    policy = Policy(loss_pause=pause)
    here, next_ = loss_pause(policy, streak=streak), loss_pause(policy, streak=streak + 1)
    assert here <= next_ <= LONGEST_LOSS_PAUSE
