"""Processes that claim runs in one SQLite file at once."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from ledgerlab import opened, run_through, wanted

from fencepost import Fencepost
from fencepost.cli.verify import gathered
from fencepost.model.run import State
from fencepost.model.slot import RunKey
from fencepost.testing.clock import SettableClocks
from fencepost.testing.ledger_checker import prove
from fencepost.world.flow import finish

PROGRAM = Path(__file__).with_name("claimer_program.py")
TURNS = Path(__file__).with_name("turns_program.py")
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


class ProbingClocks(SettableClocks):
    """Clocks that keep which wall times were read while a write transaction had the file."""

    def __init__(self) -> None:
        super().__init__()
        self.path: Path | None = None
        self.read_locked: list[float] = []

    def wall(self) -> float:
        self.advance(0.001)  # no two reads return the same time
        now = super().wall()
        if self.path is not None and _is_locked(self.path):
            self.read_locked.append(now)
        return now


def _is_locked(path: Path) -> bool:
    with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as db:
        try:
            db.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
        db.execute("ROLLBACK")
        return False


def test_a_claim_reads_the_time_that_it_records_while_nobody_else_can_write(
    tmp_path: Path,
) -> None:
    clocks, path = ProbingClocks(), tmp_path / "ledger.db"
    ledger = opened(path, clocks)
    run_through(ledger, RunKey("job", 0), "warm")
    clocks.path = path
    answer = finish(ledger.claim(wanted(RunKey("job", 60), "a")))
    clocks.path = None
    assert answer.run is not None
    assert answer.now == answer.run.started_at
    kept = finish(ledger.find(answer.run.key))
    assert kept == answer.run
    assert {kept.created_at, kept.started_at, kept.beat_at} <= set(clocks.read_locked)
    assert kept.token in [int(at * 1e6) for at in clocks.read_locked]
    finish(ledger.close())


def test_processes_that_take_turns_leave_a_ledger_that_proves_itself(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    callers = [
        subprocess.Popen([sys.executable, str(TURNS), url, str(number)]) for number in range(3)
    ]
    assert [caller.wait(timeout=60) for caller in callers] == [0] * 3
    with Fencepost(url) as fp:
        evidence = finish(gathered(fp._working.ledger))
    assert len(evidence.runs) > 100
    assert [str(finding) for finding in prove(evidence).findings] == []
