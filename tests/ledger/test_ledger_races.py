"""Eight processes that begin at once, on a file that is not there yet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ledgerlab import opened

from fencepost.model.run import State
from fencepost.world.flow import finish

PROGRAM = Path(__file__).with_name("claimer_program.py")
SLOTS = 40


def test_of_eight_processes_that_claim_the_same_slots_one_gets_each(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    claimers = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(path), str(SLOTS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    for claimer in claimers:
        assert claimer.stdout is not None
        assert claimer.stdout.readline() == "ready\n"
    for claimer in claimers:  # all have started: let them go
        assert claimer.stdin is not None
        claimer.stdin.write("go\n")
        claimer.stdin.flush()
    said = [claimer.communicate(timeout=60)[0].split() for claimer in claimers]
    assert [claimer.returncode for claimer in claimers] == [0] * 8
    assert sorted(int(slot) for slots in said for slot in slots) == list(range(SLOTS))
    ledger = opened(path)
    runs = finish(ledger.runs("job", limit=SLOTS + 1))
    assert [(run.state, run.starts) for run in runs] == [(State.SUCCEEDED, 1)] * SLOTS
    finish(ledger.close())
