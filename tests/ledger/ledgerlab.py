"""What the ledger tests share: clocks that stand still, and short ways to claim and to end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from fencepost.ledger.api import Attempt, Report
from fencepost.ledger.sqlite import SqliteLedger
from fencepost.model.claim import Claimed, Want
from fencepost.model.ending import Settled
from fencepost.model.item import ItemState
from fencepost.model.lease import Holder
from fencepost.model.policy import Policy
from fencepost.model.run import RunRecord, State
from fencepost.model.slot import RunKey
from fencepost.stores.sqlite import SqliteStore
from fencepost.testing.clock import SettableClocks
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from pathlib import Path

    from fencepost.ledger.api import Ledger

DONE = Settled(State.SUCCEEDED)


class StillClocks(SettableClocks):
    """Clocks that only move when they are told to."""

    def __init__(self) -> None:
        super().__init__()
        self._system = self  # type: ignore[assignment]  # what it adds its offsets to

    def wall(self) -> float:
        return 1_700_000_000.0 + self._wall_offset

    def boottime(self) -> float:
        return 1_000.0 + self._boot_offset


def opened(
    path: Path | str, clocks: SettableClocks | None = None, *, namespace: str = "default"
) -> SqliteLedger:
    world = BlockingWorld(clocks=clocks)
    return SqliteLedger(world, SqliteStore(world, str(path), namespace=namespace))


def wanted(
    key: RunKey, nonce: str, policy: Policy | None = None, *, lock: str = "", alone: bool = False
) -> Want:
    holder = Holder(nonce, "here", 1)
    return Want(key, holder, policy or Policy(), lock or key.job, can_be_alone=alone)


def attempt_of(claimed: Claimed) -> Attempt:
    run = claimed.run
    assert run is not None
    return Attempt(run.key, run.token, run.holder.nonce, run.lease, str(run.holder), run)


def claimed(ledger: Ledger, key: RunKey, nonce: str, policy: Policy | None = None) -> Attempt:
    """Claim a run that is free."""
    answer = finish(ledger.claim(wanted(key, nonce, policy)))
    assert answer.grant is not None, answer
    return attempt_of(answer)


def run_through(ledger: Ledger, key: RunKey, nonce: str) -> RunRecord:
    """Claim a run and end it well."""
    return finish(ledger.finish(claimed(ledger, key, nonce), DONE))


class Counted(Protocol):
    """What counts how often this process waited for an answer of its server."""

    def cost(self) -> int:
        """Return the round trips since the last call."""


def every_verb(ledger: Ledger, slot: int, trips: Counted) -> dict[str, int]:
    costs = {}
    want = wanted(RunKey("job", slot), f"nonce {slot}")
    report = Report(1, 2, (("rows", 3),), "a")
    trips.cost()
    attempt = attempt_of(finish(ledger.claim(want)))
    costs["claim"] = trips.cost()
    assert finish(ledger.claim(want)).grant is not None
    costs["adopted"] = trips.cost()
    finish(ledger.beat(attempt, ttl=30.0, report=report))
    costs["beat"] = trips.cost()
    finish(ledger.save(attempt, checkpoint="1", report=report))
    costs["save"] = trips.cost()
    finish(ledger.begin(attempt, scope=str(slot), items=["a", "b"], call="c", repeat=False))
    costs["begin"] = trips.cost()
    finish(ledger.end(attempt, scope=str(slot), items=[("a", ItemState.DONE, None)]))
    costs["end"] = trips.cost()
    finish(ledger.finish(attempt, DONE, report=report))
    costs["finish"] = trips.cost()
    return costs
