"""Effects in the database of a ledger on a server happen once, whoever is killed or stopped."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from faultlab import until

from fencepost import Fencepost
from fencepost.model.run import State
from joinlab import HOMES, Home, LoggedMariaHome, LoggedMySQLHome

if TYPE_CHECKING:
    from fencepost import Run

PROGRAM = Path(__file__).with_name("job_program.py")
ZOMBIE = Path(__file__).with_name("zombie_program.py")
SLOT = "2026-01-20T02:00:00Z"
# 5 in every run of the tests; more with FENCEPOST_KILLS.
KILLS = int(os.environ.get("FENCEPOST_KILLS", "5"))
ITEMS = 40 * KILLS


def start(url: str, mode: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), url, mode, "."],
        stdout=subprocess.PIPE,
        env={**os.environ, "FENCEPOST_ITEMS": str(ITEMS)},
    )


def heard(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    return json.loads(line) if line else {}


def buried(home: Home, database: str) -> None:
    """Have the leases of the dead end now, and not only after their time."""
    home.run("UPDATE fencepost_lease SET expires_us = 1", database)


@pytest.mark.parametrize("home", [*HOMES, LoggedMariaHome(), LoggedMySQLHome()], ids=str)
def test_effects_in_the_ledgers_database_happen_exactly_once(home: Home) -> None:
    name, dice = f"deaths{time.time_ns()}", random.Random(KILLS)
    url = home.database(name)
    home.run("CREATE TABLE effect (item INTEGER)", name)
    for _ in range(KILLS):
        process = start(url, "ledger")
        assert "began" in heard(process)
        assert "saved" in heard(process)  # what gets nowhere is poison, and rightly stopped
        time.sleep(dice.random() * 0.06)  # a random moment of a life
        process.kill()
        assert b"succeeded" not in process.communicate()[0], (
            "there was nothing left to be killed in"
        )
        buried(home, name)
    last = json.loads(start(url, "ledger").communicate(timeout=120)[0].splitlines()[-1])
    assert last["status"] == "succeeded", last
    found = home.run("SELECT item FROM effect", name)
    assert Counter(item for (item,) in found) == Counter(range(ITEMS))
    with Fencepost(url) as fp:
        (run,) = fp.runs("work")
    assert (run.state, run.losses, run.starts) == (State.SUCCEEDED, KILLS, KILLS + 1)
    assert json.loads(str(run.checkpoint)) == ITEMS - 1


@pytest.mark.parametrize("home", HOMES, ids=str)
def test_a_worker_that_is_stopped_inside_of_a_transaction_cannot_commit_it(home: Home) -> None:
    name = f"zombie{time.time_ns()}"
    url = home.database(name)
    home.run("CREATE TABLE effect (item text)", name)
    zombie = subprocess.Popen(
        [sys.executable, str(ZOMBIE), url, ".", "inside"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert zombie.stdin is not None
    assert zombie.stdout is not None
    try:
        token = int(zombie.stdout.readline())
        os.kill(zombie.pid, signal.SIGSTOP)
        with Fencepost(url) as fp:

            @fp.job("work", lease="600ms")
            def work(run: Run) -> int:
                with run.transaction() as tx:  # not kept waiting by what the other has open
                    tx.execute("INSERT INTO effect VALUES ('successor')")
                    tx.save("successor")
                return run.token

            outcomes: list[Any] = []

            def taken_over() -> bool:
                outcomes.append(fp.trigger("work", SLOT))
                return bool(outcomes[-1])

            until(taken_over)
            assert outcomes[-1].result > token
            os.kill(zombie.pid, signal.SIGCONT)
            zombie.stdin.write("go on\n")
            zombie.stdin.flush()
            said = json.loads(zombie.stdout.readline())
            (run,) = fp.runs("work")
    finally:
        zombie.kill()
        zombie.communicate()
    assert said == {"end": "lost"}
    assert (run.state, run.losses) == (State.SUCCEEDED, 1)
    assert json.loads(str(run.checkpoint)) == "successor"
    assert list(home.run("SELECT item FROM effect", name)) == [("successor",)]
