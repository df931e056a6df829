"""What the ledger tests share: clocks that stand still, and short ways to claim and to end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencepost.ledger.api import Attempt
from fencepost.ledger.sqlite import SqliteLedger
from fencepost.model.claim import Claimed, Want
from fencepost.model.ending import Settled
from fencepost.model.lease import Holder
from fencepost.model.policy import Policy
from fencepost.model.run import RunRecord, State
from fencepost.stores.sqlite import SqliteStore
from fencepost.testing.clock import SettableClocks
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from pathlib import Path

    from fencepost.ledger.api import Ledger
    from fencepost.model.slot import RunKey

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
    return Attempt(run.key, run.token, run.holder.nonce, run.lease, str(run.holder))


def claimed(ledger: Ledger, key: RunKey, nonce: str, policy: Policy | None = None) -> Attempt:
    """Claim a run that is free."""
    answer = finish(ledger.claim(wanted(key, nonce, policy)))
    assert answer.grant is not None, answer
    return attempt_of(answer)


def run_through(ledger: Ledger, key: RunKey, nonce: str) -> RunRecord:
    """Claim a run and end it well."""
    return finish(ledger.finish(claimed(ledger, key, nonce), DONE))
