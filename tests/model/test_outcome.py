from __future__ import annotations

import pytest

from fencepost.model.claim import Standing
from fencepost.model.lease import Holder
from fencepost.model.outcome import Outcome, held, of_record
from fencepost.model.run import TERMINAL, RunRecord, State
from fencepost.model.slot import RunKey

STATUSES = {"succeeded", "failed", "timed_out", "cancelled", "skipped", "already_done", "lost"}


def ended(state: State) -> RunRecord:
    return RunRecord(
        RunKey("job", 60), state, "job", token=7, holder=Holder("n", "host", 1), starts=1
    )


@pytest.mark.parametrize("status", sorted(STATUSES))
def test_an_outcome_is_true_only_if_the_work_is_done(status: str) -> None:
    assert bool(Outcome(status)) is (status in {"succeeded", "already_done"})


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_every_end_has_a_status_that_was_promised(state: State, *, fresh: bool) -> None:
    assert of_record(ended(state), fresh=fresh).status in STATUSES


def test_whoever_comes_after_a_success_is_told_that_it_was_there_already() -> None:
    assert of_record(ended(State.SUCCEEDED), fresh=False).status == "already_done"
    assert of_record(ended(State.SUCCEEDED), fresh=True).status == "succeeded"


def test_whoever_comes_after_a_failure_is_not_told_of_a_success() -> None:
    assert not of_record(ended(State.FAILED), fresh=False)


def test_a_missed_slot_was_not_run_and_says_why() -> None:
    missed = ended(State.MISSED)._replace(reason="start_deadline")
    outcome = of_record(missed, fresh=True)
    assert (outcome.status, outcome.reason) == ("skipped", "start_deadline")


def test_a_result_comes_back_as_it_was_returned() -> None:
    done = ended(State.SUCCEEDED)._replace(result='{"rows": 3}')
    assert of_record(done, fresh=True).result == {"rows": 3}


def test_an_outcome_names_the_run_and_who_had_it() -> None:
    outcome = of_record(ended(State.FAILED)._replace(error="x", reason="error"), fresh=True)
    assert outcome.run_id == "job@1970-01-01T00:01:00Z"
    assert (outcome.holder, outcome.token, outcome.attempt) == ("host pid 1", 7, 1)
    assert (outcome.error, outcome.reason) == ("x", "error")


def test_nobody_is_named_for_a_run_that_nobody_had() -> None:
    skipped = ended(State.SKIPPED)._replace(holder=Holder("the asker's", "", 0))
    assert of_record(skipped, fresh=True).holder == ""


def test_whoever_is_turned_away_learns_who_holds_it_and_for_how_long() -> None:
    holder = Standing("job", True, Holder("n", "host", 1), 7, 100.0, 25.0)  # noqa: FBT003
    outcome = held("job@x", slot=60, reason="lock_held", holder=holder, now=130.0)
    assert (outcome.holder, outcome.token) == ("host pid 1", 7)
    assert (outcome.held_for, outcome.lease_left) == (30.0, 25.0)
    assert not outcome


def test_a_holder_whose_clock_is_ahead_has_not_held_for_less_than_no_time() -> None:
    holder = Standing("job", True, Holder("n", "host", 1), 7, 200.0, 25.0)  # noqa: FBT003
    assert held("job@x", slot=60, reason="", holder=holder, now=130.0).held_for == 0.0


def test_whoever_is_turned_away_by_nobody_is_told_of_nobody() -> None:
    outcome = held("job@x", slot=60, reason="waiting_retry", holder=None, now=0.0)
    assert (outcome.holder, outcome.held_for, outcome.lease_left) == ("", None, None)
