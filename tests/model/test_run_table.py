from __future__ import annotations

import pytest

from fencepost.model.lease import Holder
from fencepost.model.run import (
    FIRST,
    TABLE,
    TERMINAL,
    RunRecord,
    State,
    diagram,
    legal,
    public,
    why_lost,
)
from fencepost.model.slot import RunKey

LIVE = (State.PENDING, State.RUNNING, State.WAITING_RETRY)


def run(state: State = State.PENDING, *, starts: int = 0, losses: int = 0) -> RunRecord:
    return RunRecord(RunKey("job", 60), state, "job", starts=starts, losses=losses)


@pytest.mark.parametrize("after", State)
@pytest.mark.parametrize("before", sorted(TERMINAL))
def test_nothing_follows_a_terminal_state(before: State, after: State) -> None:
    assert not legal(before, after)


def test_the_terminal_states_are_those_of_the_contract() -> None:
    words = {"succeeded", "failed", "timed_out", "cancelled", "skipped", "missed"}
    assert {state.value for state in State if state.terminal} == words


@pytest.mark.parametrize("state", LIVE)
def test_every_live_state_has_a_way_to_every_end_by_running(state: State) -> None:
    reached, todo = set(), [state]
    while todo:
        here = todo.pop()
        if here not in reached:
            reached.add(here)
            todo += TABLE.get(here, {})
    assert reached >= TERMINAL


def test_nothing_succeeds_that_was_not_running() -> None:
    before = {state for state in State if legal(state, State.SUCCEEDED)}
    assert before == {State.RUNNING}
    assert not legal(None, State.SUCCEEDED)


@pytest.mark.parametrize("state", [State.RUNNING, State.WAITING_RETRY])
def test_what_has_begun_is_never_missed(state: State) -> None:
    assert not legal(state, State.MISSED)


def test_what_waits_for_a_retry_is_never_skipped() -> None:
    assert not legal(State.WAITING_RETRY, State.SKIPPED)


@pytest.mark.parametrize("state", LIVE)
def test_whatever_lives_can_be_cancelled(state: State) -> None:
    assert legal(state, State.CANCELLED)


def test_a_run_does_not_begin_in_the_middle_of_its_life() -> None:
    assert FIRST.isdisjoint({State.WAITING_RETRY, State.TIMED_OUT, State.CANCELLED})


@pytest.mark.parametrize(
    ("record", "active"),
    [
        (run(), False),
        (run(starts=1), True),
        (run(State.RUNNING, starts=1), True),
        (run(State.WAITING_RETRY, starts=1), True),
        (run(State.FAILED, starts=1), False),
        (run(State.SKIPPED), False),
    ],
)
def test_a_run_is_active_from_its_first_start_to_its_end(
    record: RunRecord, *, active: bool
) -> None:
    assert record.active is active


@pytest.mark.parametrize("starts", [0, 1])
@pytest.mark.parametrize("state", State)
def test_no_run_is_fresh_and_active(state: State, starts: int) -> None:
    record = run(state, starts=starts)
    assert not (record.fresh and record.active)
    if not state.terminal:
        assert record.fresh or record.active


def test_losses_and_releases_do_not_use_up_attempts() -> None:
    assert run(State.RUNNING, starts=6, losses=3)._replace(releases=2).attempt == 1


def test_a_stale_writer_is_told_who_has_the_run_now() -> None:
    taken = run(State.RUNNING)._replace(token=9, holder=Holder("n", "host-b", 4))
    assert why_lost(taken) == "host-b pid 4 has it now with token 9"


def test_a_stale_writer_is_told_how_the_run_ended() -> None:
    assert why_lost(run(State.FAILED)._replace(reason="poison")) == "it is failed (poison)"


def test_the_diagram_has_every_arrow_of_the_table_and_no_other() -> None:
    arrows = sum(len(follows) for follows in TABLE.values()) + len(FIRST) + len(TERMINAL)
    lines = diagram().splitlines()
    assert len(lines) == 1 + arrows
    assert "    running --> succeeded: done" in lines
    assert not [
        line for line in lines if line.startswith("    succeeded --> ") and "[*]" not in line
    ]


def test_what_programs_see_of_a_run_is_json_and_not_text_of_json() -> None:
    told = public(run()._replace(checkpoint='{"page": 3}', result="[1]", done=2, total=5))
    assert told["checkpoint"] == {"page": 3}
    assert told["result"] == [1]
    assert told["progress"] == {"done": 2, "total": 5}
    assert told["run"] == "job@1970-01-01T00:01:00Z"


def test_nobody_is_shown_as_the_holder_of_a_run_that_nobody_had() -> None:
    asked_for = run()._replace(holder=Holder("the asker's", "", 0))
    assert public(asked_for)["holder"] is None
