"""Any number of processes may tick at once, each inside of its budget: every slot runs once."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from schedlab import Member, books_of, complaints, effects, members, repeated, told, unproven, until

from fencepost.model.run import State

if TYPE_CHECKING:
    from pathlib import Path

# A few seconds in every run of the tests; half a minute in `make soak`.
SECONDS = min(30.0, float(os.environ.get("FENCEPOST_SOAK_SECONDS", "8")))
STEPS, BUDGET = 60, 2.0
# A step, a commit that may wait for the others', and nothing else but how late the machine was.
STEP = 0.05 + 1.0


def spread(folder: Path) -> bool:
    """Whether a run has succeeded that was given back and taken up again."""
    runs = (run for run in books_of(folder).runs if run.key.job == "long")
    return any(run.state is State.SUCCEEDED and run.releases for run in runs)


def test_processes_that_tick_at_once_run_each_slot_once_and_keep_to_their_budget(
    tmp_path: Path,
) -> None:
    with members() as fleet:
        began = time.monotonic()
        fleet += [Member(tmp_path, "ticks", steps=STEPS, budget=BUDGET) for _ in range(5)]
        # However slow the machine is, a work of three seconds gets done in budgets of two.
        until(lambda: time.monotonic() - began > SECONDS and spread(tmp_path), within=SECONDS + 60)
        (tmp_path / "enough").touch()
        assert [member.ended() for member in fleet] == [0] * 5
    books, done = books_of(tmp_path), effects(tmp_path)
    ticks = [event for event in told(tmp_path) if event["what"] == "tick"]
    assert len(ticks) >= SECONDS
    assert [tick for tick in ticks if tick["took"] > BUDGET + STEP + 3 * tick["late"]] == []
    quick = [effect for effect in done if effect.job == "quick"]
    assert len(quick) > SECONDS / 2
    runs = [run for run in books.runs if run.key.job == "quick"]
    assert repeated(books._replace(runs=runs), quick) == []
    assert complaints(books, reasons={"coalesced", "lock_held"}) == []
    assert unproven(tmp_path) == []
    # What went on in a later tick went on from its checkpoint.
    steps = [(effect.slot, int(effect.more)) for effect in done if effect.job == "long"]
    assert len(steps) == len(set(steps))
    assert all(run.losses == 0 for run in books.runs)
    assert all(run.attempt <= 1 for run in books.runs)
