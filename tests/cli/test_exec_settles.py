"""The claim of a command settles as soon as that of any other body (decision 11)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fencepost.cli.exec_attempt import CommandAttempt
from fencepost.ledger.api import LedgerAbilities
from fencepost.model.claim import Claimed, Verdict
from fencepost.model.lease import Grant
from fencepost.model.policy import Policy
from fencepost.model.run import RunRecord, State
from fencepost.model.slot import RunKey
from fencepost.world.blocking import BlockingWorld


@pytest.mark.parametrize(("settles", "first"), [(0.02, 100.02), (0.0, 102.0)])
def test_the_first_beat_of_a_command_comes_when_its_claim_is_to_settle(
    settles: float, first: float
) -> None:
    able = LedgerAbilities(durable=True, shared=True, transactional=True, settles=settles)
    errand: Any = SimpleNamespace(
        world=BlockingWorld(),
        ledger=SimpleNamespace(abilities=able),
        job=SimpleNamespace(policy=Policy()),
    )
    run = RunRecord(RunKey("billing", 0), State.RUNNING, "billing", "billing", 1)
    attempt = CommandAttempt(errand, Claimed(Verdict.GO, run, Grant(1, 30.0)), 100.0)
    assert attempt._hold.wakes() == pytest.approx(first)
