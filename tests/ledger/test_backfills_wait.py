"""What makes up for the past goes behind live slots that wait for their lock, on every ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from every_ledger import LEDGERS, clients
from test_edits import ALL, NOW, Owner, _attempt

from fencepost.ledger.api import NOTHING
from fencepost.ledger.planning import Ask, End, Lane
from fencepost.model.ending import Settled
from fencepost.model.run import State
from fencepost.model.schedule import Every
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("kind", LEDGERS)
def test_a_live_slot_goes_before_the_next_slot_of_a_backfill(kind: str, tmp_path: Path) -> None:
    """It looks at the lock once a second, and the backfill has its next slot at once."""
    with clients(kind, tmp_path, 2) as (clocks, (ours, theirs)):
        live, past = Owner(ours), Owner(theirs)
        live.declare(Every(10), ALL)
        start = NOW - 500
        finish(theirs.planner.backfill(Lane(0, "bills", start, NOW, start)))
        (run,) = finish(theirs.planner.tick(Ask(past._want, "past 1 ", 1))).begun
        clocks.advance(10)
        assert finish(ours.planner.tick(Ask(live._want, "live 1 ", 9))).begun == []  # the lock
        end = End(_attempt(run), Settled(State.SUCCEEDED), NOTHING)
        assert finish(theirs.planner.tick(Ask(past._want, "past 2 ", 1, [end]))).begun == []
        clocks.advance(1)
        (due,) = finish(ours.planner.tick(Ask(live._want, "live 2 ", 9))).begun
        assert _attempt(due).key.slot == NOW + 10
        end = End(_attempt(due), Settled(State.SUCCEEDED), NOTHING)
        assert finish(ours.planner.tick(Ask(live._want, "live 3 ", 9, [end]))).begun != []
