"""However often a worker is killed, every item's effect happens as often as was promised."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fencepost import Fencepost
from fencepost.fence import CREATE_DONE, CREATE_GUARD
from fencepost.ledger.open import ledger_of
from fencepost.model.item import ItemState
from fencepost.model.run import State
from fencepost.model.slot import parsed
from fencepost.stores.open import open_store
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from fencepost.ledger.api import Ledger

PROGRAM = Path(__file__).with_name("job_program.py")
RUN = "work@2026-01-20T02:00:00Z"
ITEMS = 1000
# 50 in every run of the tests; FENCEPOST_KILLS=200 in `make soak`.
KILLS = int(os.environ.get("FENCEPOST_KILLS", "50"))


def start(folder: Path, mode: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), f"sqlite:///{folder}/ledger.db", mode, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def heard(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    return json.loads(line) if line else {}


def killed_often(folder: Path, mode: str) -> int:
    """Kill the worker at random moments of its work, then let it finish; return how often."""
    dice = random.Random(f"{mode} {KILLS}")
    ended, saved = 0, True
    while ended < KILLS:
        process = start(folder, mode)
        said = heard(process)
        assert "began" in said, said
        # Some lives end before they saved anything; but never two in a row, however slow the
        # machine is: a work that gets nowhere is poison, and rightly stopped.
        saved = not saved or dice.random() < 0.75
        if saved:
            assert "saved" in heard(process)
        # A random moment of a life. All lives together are a good half of the work.
        time.sleep(dice.random() * 0.06)
        process.kill()
        rest = process.communicate()[0]
        assert b"succeeded" not in rest, "there was nothing left to be killed in"
        ended += 1
    process = start(folder, mode)
    last = json.loads(process.communicate(timeout=120)[0].splitlines()[-1])
    assert last["status"] in ("succeeded", "already_done"), last
    return ended


def ledger_in(folder: Path) -> Ledger:
    world = BlockingWorld()
    store = open_store(f"sqlite:///{folder}/ledger.db", world, namespace="default")
    return ledger_of(world, store)


def effects(database: Path) -> Counter[int]:
    with closing(sqlite3.connect(database)) as conn:
        return Counter(item for (item,) in conn.execute("SELECT item FROM effect"))


ONCE_EACH = Counter(range(ITEMS))


def test_effects_in_the_ledgers_database_happen_exactly_once(tmp_path: Path) -> None:
    kills = killed_often(tmp_path, "ledger")
    assert effects(tmp_path / "ledger.db") == ONCE_EACH
    assert kills == KILLS
    seen_through(tmp_path, kills)


def test_effects_in_another_database_happen_exactly_once(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "other.db")) as conn:
        conn.executescript(f"{CREATE_GUARD}; {CREATE_DONE}; CREATE TABLE effect (item INTEGER);")
    kills = killed_often(tmp_path, "other")
    assert effects(tmp_path / "other.db") == ONCE_EACH
    assert kills == KILLS
    seen_through(tmp_path, kills)


def outside(folder: Path) -> dict[int, list[str]]:
    keys: dict[int, list[str]] = {}
    for line in (folder / "effects").read_text().splitlines():
        item, key = line.split(" ", 1)
        keys.setdefault(int(item), []).append(key)
    return keys


def test_effects_outside_are_never_repeated_and_those_in_doubt_are_named(tmp_path: Path) -> None:
    kills = killed_often(tmp_path, "report")
    keys = outside(tmp_path)
    ledger = ledger_in(tmp_path)
    doubtful = {int(i.item) for i in finish(ledger.items(RUN, states=[ItemState.BEGUN]))}
    done = {int(i.item) for i in finish(ledger.items(RUN, states=[ItemState.DONE]))}
    finish(ledger.close())
    assert all(len(found) == 1 for found in keys.values())  # nothing twice
    assert done <= set(keys)  # what is said to be done has happened
    assert set(keys) - done <= doubtful  # what has happened and is not done is in doubt
    assert done | doubtful == set(range(ITEMS))  # nothing was forgotten
    assert len(doubtful) <= kills  # and doubt is rare: one item for each death at most
    seen_through(tmp_path, kills)


def test_effects_outside_may_be_repeated_with_the_same_key(tmp_path: Path) -> None:
    kills = killed_often(tmp_path, "repeat")
    keys = outside(tmp_path)
    ledger = ledger_in(tmp_path)
    done = {int(i.item) for i in finish(ledger.items(RUN, states=[ItemState.DONE]))}
    finish(ledger.close())
    assert set(keys) == done == set(range(ITEMS))  # nothing is missing
    assert all(len(set(found)) == 1 for found in keys.values())  # and a repeat has its old key
    assert sum(len(found) - 1 for found in keys.values()) <= kills
    seen_through(tmp_path, kills)


def seen_through(folder: Path, kills: int) -> None:
    """Check the record: it succeeded from its checkpoint, and every death is on it."""
    with Fencepost(f"sqlite:///{folder}/ledger.db") as fp:
        (run,) = fp.runs("work")
    assert run.state is State.SUCCEEDED
    assert run.losses == kills
    assert run.starts == kills + 1
    assert run.attempt == 1
    assert json.loads(str(run.checkpoint)) == ITEMS - 1
    ledger = ledger_in(folder)
    events = finish(ledger.events(parsed(RUN)))
    finish(ledger.close())
    lost = [event for event in events if event.what == "attempt_lost"]
    assert len(lost) == kills
    tokens = [event.token for event in lost]
    assert tokens == sorted(set(tokens))
    assert tokens[-1] < run.token


@pytest.mark.parametrize("processes", [16])
def test_of_many_triggers_of_one_slot_one_runs(tmp_path: Path, processes: int) -> None:
    rounds = 50
    crew = [start(tmp_path, "race") for _ in range(processes)]
    try:
        assert all(heard(member) == {"ready": True} for member in crew)
        for number in range(rounds):
            slot = f"2026-01-20T02:{number:02d}:00Z\n".encode()
            for member in crew:
                assert member.stdin is not None
                member.stdin.write(slot)
                member.stdin.flush()
            answers = Counter(heard(member).get("status") for member in crew)
            assert answers["succeeded"] == 1, (number, answers)
            assert set(answers) <= {"succeeded", "skipped", "already_done"}, answers
    finally:
        for member in crew:
            member.communicate(timeout=60)
    with Fencepost(f"sqlite:///{tmp_path}/ledger.db") as fp:
        runs = fp.runs("work", limit=1000)
    assert len(runs) == rounds
    assert {run.state for run in runs} == {State.SUCCEEDED}
    assert {run.starts for run in runs} == {1}
