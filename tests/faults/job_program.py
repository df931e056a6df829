"""A process that runs jobs, for the fault tests: it says what it does on standard output.

python job_program.py URL MODE FOLDER     handle all items of one slot, in the given mode
python job_program.py URL race FOLDER     trigger each slot that is named on standard input
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING

from fencepost import Fencepost

if TYPE_CHECKING:
    from fencepost import Run

ITEMS = int(os.environ.get("FENCEPOST_ITEMS", "1000"))
SLOT = "2026-01-20T02:00:00Z"
# So slow that all the lives that are ended in the middle do not end the work.
PACE = int(os.environ.get("FENCEPOST_KILLS", "50")) * 40e-6


def say(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def remaining(run: Run) -> range:
    first = 0 if run.checkpoint is None else run.checkpoint + 1
    say(began=first, token=run.token)
    return range(first, ITEMS)


def in_ledger(run: Run, _folder: str) -> None:
    with run.transaction() as tx:
        files = isinstance(tx.connection, sqlite3.Connection)
        if files:  # on a server it is there: one cannot do so in a transaction everywhere
            tx.execute("CREATE TABLE IF NOT EXISTS effect (item INTEGER)")
        mark = "?" if files else "%s"
    for item in remaining(run):
        with run.transaction() as tx:
            if tx.once(item):
                tx.execute(f"INSERT INTO effect VALUES ({mark})", (item,))
            tx.save(item)
        say(saved=item)
        time.sleep(PACE)


def in_other(run: Run, folder: str) -> None:
    with closing(sqlite3.connect(f"{folder}/other.db", isolation_level=None)) as conn:
        for item in remaining(run):
            conn.execute("BEGIN IMMEDIATE")
            run.fence(conn)
            with run.once(item, conn=conn) as first:
                if first:
                    conn.execute("INSERT INTO effect VALUES (?)", (item,))
            conn.execute("COMMIT")
            if item % 2:
                run.save(item)
                say(saved=item)
            time.sleep(PACE)


def outside(run: Run, folder: str) -> None:
    """Have effects that nobody can take back: lines in a file, each with its idempotency key."""
    fd = os.open(f"{folder}/effects", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for item in remaining(run):
        with run.once(item) as first:
            if first:
                os.write(fd, f"{item} {first.key}\n".encode())
        if item % 2:
            run.save(item)
            say(saved=item)
        time.sleep(PACE)
    os.close(fd)


def raced(_run: Run, folder: str) -> None:
    """Notice anybody else who is inside at the same time."""
    try:
        os.close(os.open(f"{folder}/inside", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        say(overlap=True)
    time.sleep(0.002)
    os.unlink(f"{folder}/inside")


BODIES = {
    "ledger": (in_ledger, "report"),
    "other": (in_other, "report"),
    "report": (outside, "report"),
    "repeat": (outside, "repeat"),
    "race": (raced, "report"),
}


def main() -> None:
    url, mode, folder = sys.argv[1:]
    body, in_doubt = BODIES[mode]
    with Fencepost(url) as fp:

        @fp.job("work", in_doubt=in_doubt, lease="10s", timeout=None)
        def work(run: Run) -> None:
            body(run, folder)

        if mode == "race":
            say(ready=True)
            for line in sys.stdin:
                outcome = fp.trigger("work", line.strip())
                say(status=outcome.status, reason=outcome.reason)
        else:
            outcome = fp.trigger("work", SLOT, wait="60s")
            say(status=outcome.status, reason=outcome.reason, attempt=outcome.attempt)


if __name__ == "__main__":
    main()
