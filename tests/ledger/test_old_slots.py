"""A slot that has ended never runs again because its history is forgotten just then.

Retention deletes runs and raises a mark in one transaction. Triggers and backfills of those slots
come before it, after it, and in the middle: each of them finds the slot done.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from ledgerlab import wanted
from oldlab import PLACES, Place, locked, pruned, tick, waits

from fencepost.ledger.draft_desk import DraftDesk
from fencepost.ledger.planning import Lane
from fencepost.model.claim import Claimed, Verdict
from fencepost.model.slot import RunKey
from fencepost.world.flow import finish
from joinlab import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fencepost.ledger.api import Ledger

# How many old slots are triggered while they are pruned.
SLOTS = int(os.environ.get("FENCEPOST_OLD_SLOTS", "200"))
THREADS = 4
SOME = 13  # slots of one backfill
SERVERS = ("postgres", "mariadb", "mysql")


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place = PLACES[request.param](tmp_path)
    with closing(place):
        yield place


@pytest.fixture(params=SERVERS)
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place = PLACES[request.param](tmp_path)
    with closing(place):
        yield place


def trigger(ledger: Ledger, slot: int, nonce: str) -> Claimed:
    """Claim a slot, under a lock of its own: so that no trigger has to wait for another."""
    return finish(ledger.claim(wanted(RunKey("old", slot), nonce, lock=f"old {slot}")))


# Triggers.


def test_no_trigger_of_an_old_slot_runs_while_its_history_is_pruned(place: Place) -> None:
    slots = place.history(SLOTS)
    other = place.another()
    refused: list[tuple[int, Claimed]] = []
    began: list[tuple[int, Claimed]] = []

    def some(part: int) -> None:
        for number, slot in enumerate(slots[part::THREADS]):
            claimed = trigger(other, slot, f"again {part} {number}")
            (refused if claimed.verdict is Verdict.ENDED else began).append((slot, claimed))

    with ThreadPoolExecutor(THREADS + 1) as pool:
        pruning = pool.submit(pruned, place.ledger)
        for future in [pool.submit(some, part) for part in range(THREADS)]:
            future.result()
        assert pruning.result() >= SLOTS
    assert began == []
    assert len(refused) == SLOTS
    job = finish(place.ledger.planner.job("old"))
    assert job is not None
    assert job.pruned == slots[-1]


def test_a_claim_that_waits_for_the_prune_of_its_slot_finds_it_done(served: Place) -> None:
    slots = served.history(2)
    other = served.another()
    assert trigger(other, slots[-1] + 60, "ready").verdict is Verdict.ENDED  # all is prepared
    with (
        ThreadPoolExecutor(2) as pool,
        locked(served, "fencepost_job WHERE job = 'old'") as let_go,
    ):
        pruning = pool.submit(pruned, served.ledger)
        until(lambda: waits(served, "SET pruned"))
        claiming = pool.submit(trigger, other, slots[0], "again")
        until(lambda: waits(served, "nonce") or claiming.done())
        let_go()
        assert pruning.result() == 2
        assert claiming.result().verdict is Verdict.ENDED
    assert finish(other.find(RunKey("old", slots[0]))) is None


# Backfills.


@pytest.mark.parametrize("existing", ["skip", "failed"])
def test_no_backfill_runs_an_old_slot_while_its_history_is_pruned(
    place: Place, existing: str
) -> None:
    slots = place.history(SLOTS)
    other = place.another()
    began: list[RunKey] = []
    rounds, looked_at = 0, 0

    def prune_all() -> None:
        while finish(place.ledger.find(RunKey("old", slots[-1]))) is not None:
            finish(place.ledger.planner.prune(most=20))

    with ThreadPoolExecutor(1) as pool:
        pruning = pool.submit(prune_all)
        while not (pruning.done() and looked_at >= SLOTS):
            # Some slots at a time: what is being made up is not forgotten until that is over.
            start = slots[(looked_at * 7) % SLOTS]
            lane = Lane(0, "old", start, min(start + 60 * SOME, slots[-1] + 60), start, existing)
            finish(other.planner.backfill(lane))
            while finish(other.planner.lanes()):
                rounds += 1
                began += tick(other, f"made up {rounds:06}", newest=slots[-1])
                place.clocks.advance(2.0)
            looked_at += (lane.until - lane.start) // 60
    assert began == []


@pytest.mark.parametrize("existing", ["skip", "failed"])
def test_a_backfill_that_began_before_a_prune_committed_finds_its_slots_done(
    served: Place, existing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = served.history(3)
    other = served.another()
    assert tick(other, "what is due", newest=slots[-1]) == []
    with (
        ThreadPoolExecutor(1) as pool,
        locked(served, "fencepost_job WHERE job = 'old'") as let_go,
    ):
        pruning = pool.submit(pruned, served.ledger)
        until(lambda: waits(served, "SET pruned"))
        lane = Lane(0, "old", slots[0], slots[-1] + 60, slots[0], existing)
        finish(other.planner.backfill(lane))
        about = DraftDesk._about
        met: list[int] = []

        def then_commits(desk: DraftDesk, jobs: Any) -> None:
            """Have the prune commit after the tick has read the job, before it reads runs."""
            about(desk, jobs)
            if not met:
                let_go()
                met.append(pruning.result())

        monkeypatch.setattr(DraftDesk, "_about", then_commits)
        assert tick(other, "made up", newest=slots[-1]) == []
        assert met == [4]  # the fourth gave its place to what was due
