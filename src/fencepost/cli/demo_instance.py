"""One process of the demo's cluster: a fencepost instance, and beside it a naive one.

Both have the same job: due every second, some work, then one line in a book. A line
that is there twice is an invoice that was sent twice.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import sys
import threading
import time

from fencepost.blocking import Fencepost
from fencepost.fence import CREATE_DONE, CREATE_GUARD

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.model.event import JobEvent, LeaseEvent
    from fencepost.running import Run

JOB, WORK, LEASE = "invoices", 0.4, 3.0
# Twelve times as long as the job takes: a value that one finds in many programs.
NAIVE_TTL = 5.0

CREATE = (
    CREATE_GUARD,
    CREATE_DONE,
    "CREATE TABLE IF NOT EXISTS line (who TEXT, slot INTEGER, writer TEXT, at REAL)",
    "CREATE TABLE IF NOT EXISTS naive_lock (name TEXT PRIMARY KEY, owner TEXT, expires_at REAL)",
)
_WRITE = "INSERT INTO line VALUES (?, ?, ?, ?)"


def opened(folder: str) -> sqlite3.Connection:
    """Open the book."""
    path = os.path.join(folder, "books.db")
    return sqlite3.connect(path, isolation_level=None, timeout=30, check_same_thread=False)


class Naive:
    """A timer, and a lock as it is often built: set if absent, with a time to live.

    It is built with care: only its owner deletes it, and the time to live is long. It has no token
    that a book could ask for, and it knows nothing of slots, only of *now*. Its timer is aligned
    to the second, and makes up what it slept through, as timers do.
    """

    def __init__(self, name: str, folder: str) -> None:
        self._name, self._book = name, opened(folder)
        self._stopped = threading.Event()

    def run(self) -> None:
        """Do the job every second."""
        slot = int(time.time()) + 1
        while not self._stopped.wait(max(0.0, slot - time.time())):
            if self._acquire():
                time.sleep(WORK)
                self._book.execute(_WRITE, ("naive", slot, self._name, time.time()))
                self._release()
            slot += 1

    def stop(self) -> None:
        """Have it end after this second."""
        self._stopped.set()

    def _acquire(self) -> bool:
        now = time.time()
        with contextlib.suppress(sqlite3.OperationalError):
            self._book.execute("DELETE FROM naive_lock WHERE expires_at <= ?", (now,))
            values = (JOB, self._name, now + NAIVE_TTL)
            done = self._book.execute("INSERT OR IGNORE INTO naive_lock VALUES (?, ?, ?)", values)
            return done.rowcount == 1
        return False

    def _release(self) -> None:
        values = (JOB, self._name)
        self._book.execute("DELETE FROM naive_lock WHERE name = ? AND owner = ?", values)


def be(name: str, folder: str) -> None:
    """Be an instance until told to stop by SIGTERM."""
    told = threading.Lock()

    def tell(event: LeaseEvent | JobEvent) -> None:
        run_id, error = getattr(event, "run_id", ""), dict(getattr(event, "more", ()))
        with told:
            print("\t".join((event.what, run_id, str(error.get("error", "")))), flush=True)

    fp = Fencepost(f"sqlite:///{folder}/cluster.db", on_event=tell)
    book = opened(folder)

    @fp.job(JOB, every="1s", lease=LEASE, catchup="all", timeout="20s")
    def invoices(run: Run) -> None:
        """Work, then write a line: once, however many attempts it takes."""
        time.sleep(WORK)
        book.execute("BEGIN IMMEDIATE")
        try:
            with run.once("line", conn=book) as first:  # refuses who no longer has the run
                if first:
                    book.execute(_WRITE, ("fencepost", _slot(run), name, time.time()))
        except BaseException:
            book.execute("ROLLBACK")
            raise
        book.execute("COMMIT")

    naive = Naive(name, folder)
    thread = threading.Thread(target=naive.run, daemon=True)
    print("ready\t\t", flush=True)
    sys.stdin.readline()  # all begin together
    thread.start()
    fp.run(concurrency=1, grace=5.0)
    naive.stop()
    thread.join(2 * WORK + 1)
    fp.close()


def _slot(run: Run) -> int:
    return int(run.slot.timestamp())
