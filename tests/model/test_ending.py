from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from fencepost.model.ending import (
    LONGEST_ERROR,
    Ending,
    Settled,
    ended_record,
    in_view_of,
    recorded,
    settle,
)
from fencepost.model.lease import Holder
from fencepost.model.policy import Policy, Retry
from fencepost.model.run import TABLE, RunRecord, State, legal
from fencepost.model.slot import RunKey

NOW = 5000.0
THREE_TRIES = Policy(retry=Retry(3, base=10, jitter=False))
endings = st.sampled_from(sorted(TABLE[State.RUNNING])).filter(
    lambda state: state is not State.RUNNING
)


def running(*, starts: int = 1, losses: int = 0, cancel_at: float = 0.0) -> RunRecord:
    holder = Holder("nonce", "host", 1)
    return RunRecord(
        RunKey("job", 60),
        State.RUNNING,
        "job",
        "job",
        token=7,
        holder=holder,
        starts=starts,
        losses=losses,
        cancel_at=cancel_at,
    )


def failed(*, again: bool = True, after: float = 0.0) -> Ending:
    return Ending(State.FAILED, "error", error="ValueError: x", again=again, after=after)


def settled_as(run: RunRecord, ending: Ending, policy: Policy = THREE_TRIES) -> Settled:
    return settle(run, ending, policy, dice=0.5)


def test_an_error_with_tries_left_waits_for_the_next_one() -> None:
    assert settled_as(running(starts=2), failed()) == Settled(
        State.WAITING_RETRY, "error", 20, None, "ValueError: x"
    )


def test_the_last_try_is_the_last() -> None:
    assert settled_as(running(starts=3), failed()).state is State.FAILED


def test_losses_leave_all_tries_to_the_errors() -> None:
    assert settled_as(running(starts=5, losses=4), failed()).pause == 10


def test_a_job_without_a_retry_fails_at_its_first_error() -> None:
    assert settled_as(running(), failed(), Policy()).state is State.FAILED


def test_an_error_that_no_try_can_help_is_final() -> None:
    assert settled_as(running(), failed(again=False)).state is State.FAILED


def test_a_body_may_ask_for_a_longer_wait_than_the_policy() -> None:
    assert settled_as(running(), failed(after=90)).pause == 90


def test_a_body_cannot_ask_for_a_shorter_wait_than_the_policy() -> None:
    assert settled_as(running(), failed(after=1)).pause == 10


def test_a_timeout_is_retried_like_an_error() -> None:
    late = Ending(State.TIMED_OUT, "timeout", again=True)
    assert settled_as(running(), late).state is State.WAITING_RETRY
    assert settled_as(running(starts=3), late).state is State.TIMED_OUT


@pytest.mark.parametrize("state", [State.SUCCEEDED, State.CANCELLED, State.SKIPPED, State.PENDING])
def test_only_errors_and_timeouts_are_ever_tried_again(state: State) -> None:
    assert settled_as(running(), Ending(state, again=True)).state is state


def test_a_result_is_kept_as_it_is() -> None:
    assert settled_as(running(), Ending(State.SUCCEEDED, result="[1]")).result == "[1]"


def test_of_a_page_of_error_only_the_beginning_is_kept() -> None:
    long = Ending(State.FAILED, error="x" * 10_000)
    assert len(settled_as(running(), long).error or "") == LONGEST_ERROR


@given(
    state=endings,
    again=st.booleans(),
    starts=st.integers(1, 5),
    cancel_at=st.sampled_from([0.0, 1.0]),
)
def test_however_an_attempt_ends_the_table_allows_it(
    state: State, *, again: bool, starts: int, cancel_at: float
) -> None:
    run = running(starts=starts, cancel_at=cancel_at)
    settled = in_view_of(run, settled_as(run, Ending(state, again=again)))
    assert legal(run.state, settled.state)


@given(state=endings)
def test_what_was_asked_to_stop_never_comes_back(state: State) -> None:
    asked = running(cancel_at=1.0)
    settled = in_view_of(asked, settled_as(asked, Ending(state, again=True)))
    assert settled.state.terminal


def test_work_that_was_done_is_done_though_a_cancel_was_asked_for() -> None:
    done = Settled(State.SUCCEEDED, result="1")
    assert in_view_of(running(cancel_at=1.0), done) == done


def test_nothing_changes_for_a_run_that_nobody_wants_to_cancel() -> None:
    waiting = Settled(State.WAITING_RETRY, "error", 9.0)
    assert in_view_of(running(), waiting) == waiting


@given(state=endings)
def test_an_end_has_an_instant_if_and_only_if_it_is_one(state: State) -> None:
    run = ended_record(running(), Settled(state), now=NOW)
    assert run.ended_at == (NOW if state.terminal else 0.0)


def test_a_run_that_was_given_back_has_its_try_back() -> None:
    before = running(starts=2)
    after = ended_record(before, Settled(State.PENDING, "released"), now=NOW)
    assert after.attempt == before.attempt - 1
    assert after.losses == 0
    assert after.active


def test_an_end_that_was_recorded_before_is_recognised() -> None:
    done = Settled(State.SUCCEEDED)
    run = ended_record(running(), done, now=NOW)
    assert recorded(run, done, token=7, nonce="nonce")


@pytest.mark.parametrize(("token", "nonce"), [(8, "nonce"), (7, "another"), (6, "nonce")])
def test_the_end_of_somebody_else_is_not_taken_for_ones_own(token: int, nonce: str) -> None:
    done = Settled(State.SUCCEEDED)
    assert not recorded(ended_record(running(), done, now=NOW), done, token=token, nonce=nonce)


def test_another_end_than_the_recorded_one_is_not_recognised() -> None:
    run = ended_record(running(), Settled(State.FAILED), now=NOW)
    assert not recorded(run, Settled(State.SUCCEEDED), token=7, nonce="nonce")


def test_a_run_that_still_goes_on_has_no_recorded_end() -> None:
    assert not recorded(running(), Settled(State.SUCCEEDED), token=7, nonce="nonce")


def test_a_retry_that_became_a_cancel_is_recognised_when_its_end_is_told_again() -> None:
    waiting = Settled(State.WAITING_RETRY, "error", 9.0)
    asked = running(cancel_at=1.0)
    run = ended_record(asked, in_view_of(asked, waiting), now=NOW)
    assert recorded(run, waiting, token=7, nonce="nonce")
