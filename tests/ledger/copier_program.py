"""Workers that are killed at random moments, beside copies of their ledger that were made before.

    python copier_program.py FOLDER ROUNDS ENOUGH SEED

There are more rounds until so many copies lacked something, but not more than ten times as many.
Each round tells in a line of JSON whether the copy lacked something that a worker knows of,
whether it was refused, and whether the ledger itself was refused.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from fencepost import Fencepost
from fencepost.errors import LedgerDoubtful

if TYPE_CHECKING:
    from fencepost import Run

FIRST = datetime(2020, 1, 1, tzinfo=UTC)
WORKERS = 2
PARTS = ("", "-wal", "-shm")


def worker(folder: str, name: str, first: int) -> None:
    """Work until killed; put on the log what was seen to be done, once it is."""
    log = os.open(f"{folder}/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def saw(*words: object) -> None:
        os.write(log, (json.dumps(words) + "\n").encode())

    fp = Fencepost(f"sqlite:///{folder}/ledger.db")

    @fp.job(name)
    def work(run: Run) -> None:
        at = round((run.slot - FIRST) / timedelta(minutes=1))  # one of a dead worker is resumed
        saw("run", name, at, "running")
        if at % 3 == 1:
            run.save({"page": 1})
            saw("saved", name, at, 1)
        if at % 3 == 2:
            with run.transaction() as tx:
                tx.once("sent")
            saw("item", run.id, "sent")

    for number in range(first, first + 100_000):
        if number % 5 == 4:
            fp.alarms.set("ring", f"{name} {number}", at=FIRST + timedelta(days=9000))
            saw("alarm", f"{name} {number}")
        if fp.trigger(name, FIRST + timedelta(minutes=number)).status == "succeeded":
            saw("run", name, number, "succeeded")


def missing(folder: str) -> list[object]:
    """Return what the log knows of and the file in place does not."""
    lacks: list[object] = []
    with closing(sqlite3.connect(f"{folder}/ledger.db")) as db:
        runs = {
            (job, slot): (state, saves)
            for job, slot, state, saves in db.execute(
                "SELECT job, slot, state, saves FROM fencepost_run"
            )
        }
        items = {run for (run,) in db.execute("SELECT run FROM fencepost_item")}
        alarms = {key for (key,) in db.execute("SELECT key FROM fencepost_alarm")}
    with open(f"{folder}/log") as log:
        for line in log:
            kind, *words = json.loads(line)
            if kind in ("run", "saved"):
                job, number, what = words
                slot = int((FIRST + timedelta(minutes=number)).timestamp())
                state, saves = runs.get((job, slot), ("", 0))
                there = state and (state != "running" or what == "running")
                if not (there if kind == "run" else saves >= what):
                    lacks.append([kind, *words])
            elif words[0] not in (items if kind == "item" else alarms):
                lacks.append([kind, *words])
    return lacks


def refused(folder: str, slot: int) -> bool:
    fp = Fencepost(f"sqlite:///{folder}/ledger.db")
    fp.job("probe")(lambda: None)
    try:
        fp.trigger("probe", FIRST + timedelta(minutes=slot))
    except LedgerDoubtful:
        return True
    finally:
        fp.close()
    return False


def begun(folder: str, number: int) -> list[int]:
    """Fork the workers of a round."""
    pids = []
    for each in range(WORKERS):
        pid = os.fork()
        if not pid:
            worker(folder, f"worker {number}.{each}", number * 1_000)
        pids.append(pid)
    return pids


def killed(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    ended = [os.waitpid(pid, 0)[1] for pid in pids]
    assert ended == [signal.SIGKILL] * WORKERS, ended


def moved(folder: str, here: str, there: str) -> None:
    """Rename a database with all that belongs to it."""
    for part in PARTS:
        if os.path.exists(f"{folder}/{here}{part}"):
            os.rename(f"{folder}/{here}{part}", f"{folder}/{there}{part}")


def main() -> None:
    folder, rounds, enough = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dice = random.Random(sys.argv[4])
    refused(folder, 0)
    number = lacking = 0
    while number < rounds or (lacking < enough and number < 10 * rounds):
        number += 1
        open(f"{folder}/log", "w").close()
        pids = begun(folder, number)
        while not os.path.getsize(f"{folder}/log"):
            time.sleep(0.001)
        time.sleep(dice.uniform(0.0, 0.05))
        source, target = (sqlite3.connect(f"{folder}/{n}.db") for n in ("ledger", "copy"))
        with closing(source), closing(target):
            source.backup(target)
        time.sleep(dice.choice((0.0, dice.uniform(0.0, 0.001), dice.uniform(0.005, 0.03))))
        killed(pids)
        moved(folder, "ledger.db", "aside.db")
        shutil.copyfile(f"{folder}/copy.db", f"{folder}/ledger.db")
        lacks = missing(folder)
        lacking += bool(lacks)
        copy = refused(folder, 0)  # which ran long ago: on the copy nothing is recorded
        moved(folder, "ledger.db", "gone.db")
        moved(folder, "aside.db", "ledger.db")
        lost, live = missing(folder), refused(folder, number)
        found = {"lacks": lacks[:3], "copy": copy, "live": live, "lost": lost}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
