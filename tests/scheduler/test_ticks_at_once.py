"""Any number of processes may tick at once, each inside of its budget: every slot runs once."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from schedlab import Member, books_of, complaints, effects, members, repeated, told, unproven

from fencepost.model.run import State

if TYPE_CHECKING:
    from pathlib import Path

# A few seconds in every run of the tests; half a minute in `make soak`.
SECONDS = min(30.0, float(os.environ.get("FENCEPOST_SOAK_SECONDS", "8")))
STEPS, BUDGET = 60, 2.0
# A step, a commit, and what a busy machine makes of both.
STEP = 0.05 + 1.0


def test_processes_that_tick_at_once_run_each_slot_once_and_keep_to_their_budget(
    tmp_path: Path,
) -> None:
    with members() as fleet:
        fleet += [
            Member(tmp_path, "ticks", seconds=SECONDS, steps=STEPS, budget=BUDGET) for _ in range(5)
        ]
        assert [member.ended(within=SECONDS + 30) for member in fleet] == [0] * 5
    books, done = books_of(tmp_path), effects(tmp_path)
    ticks = [event["took"] for event in told(tmp_path) if event["what"] == "tick"]
    assert len(ticks) >= SECONDS
    assert max(ticks) <= BUDGET + STEP
    quick = [effect for effect in done if effect.job == "quick"]
    assert len(quick) > SECONDS / 2
    runs = [run for run in books.runs if run.key.job == "quick"]
    assert repeated(books._replace(runs=runs), quick) == []
    assert complaints(books, reasons={"coalesced", "lock_held"}) == []
    assert unproven(tmp_path) == []
    # Three seconds of work in budgets of two: it goes on in a later tick, from its checkpoint.
    steps = [(effect.slot, int(effect.more)) for effect in done if effect.job == "long"]
    assert len(steps) == len(set(steps))
    long = [run for run in books.runs if run.key.job == "long"]
    assert any(run.state is State.SUCCEEDED and run.releases for run in long)
    assert all(run.losses == 0 for run in books.runs)
    assert all(run.attempt <= 1 for run in books.runs)
