"""The first act of the demo shows what a lease can do, and what only a fence can.

Three processes want one lock in one SQLite file. One is killed, one is paused for longer than its
lease lasts and then goes on as if nothing had happened. Each effect is written twice: into a table
behind a fence, and into one without.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time

from fencepost.blocking import Fencepost
from fencepost.errors import FencepostError
from fencepost.fence import CREATE_GUARD

LOCK = "nightly-invoices"
TTL = 2.0


def act(folder: str) -> bool:
    """Tell the story; say whether it ended as promised."""
    return _Story(folder).tell()


class Worker:
    """A process of its own that does one thing at a time when told to."""

    def __init__(self, name: str, folder: str) -> None:
        self.name = name
        program = "import sys; from fencepost.cli.demo_lock import work; work(*sys.argv[1:])"
        self._process = subprocess.Popen(  # noqa: S603 -- this very program
            [sys.executable, "-c", program, name, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what it has to say, it says when it is asked
            text=True,
        )
        self.hear()

    def tell(self, order: str) -> None:
        """Give an order without waiting for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        """Wait for the answer."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def signal(self, number: int) -> None:
        """Send the process a signal."""
        self._process.send_signal(number)

    def end(self) -> None:
        """Leave no process behind."""
        self._process.kill()
        self._process.communicate()


class _Story:
    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._began = time.monotonic()
        self._books = sqlite3.connect(os.path.join(folder, "books.db"))
        for table in ("fenced", "unfenced"):
            self._books.execute(f"CREATE TABLE {table} (writer TEXT, token INTEGER)")
        self._books.execute(CREATE_GUARD)
        self._books.commit()
        self._workers: dict[str, Worker] = {}

    def tell(self) -> bool:
        try:
            self._kill()
            self._pause()
            return self._reckon()
        finally:
            for worker in self._workers.values():
                worker.end()
            self._books.close()

    def _kill(self) -> None:
        self._say(f"three processes want the lock {LOCK!r} (ttl {TTL:.0f} s) in one SQLite file")
        alice, bob = self._start("alice"), self._start("bob")
        alice.tell("acquire")
        self._say(f"alice: {alice.hear()}")
        alice.tell("write")
        self._say(f"alice: {alice.hear()}")
        bob.tell("acquire")
        self._say("bob:   waits in line")
        alice.signal(signal.SIGKILL)
        killed = time.monotonic()
        answer = bob.hear()
        self._say("alice: killed with -9, in the middle of her work")
        self._say(f"bob:   {answer}, {(time.monotonic() - killed) * 1e3:.0f} ms after the kill")
        bob.tell("write")
        self._say(f"bob:   {bob.hear()}")

    def _pause(self) -> None:
        bob, carol = self._workers["bob"], self._start("carol")
        bob.signal(signal.SIGSTOP)
        paused = time.monotonic()
        self._say("bob:   paused (SIGSTOP), as a sleeping laptop or a starved container would be")
        carol.tell("acquire")
        self._say("carol: waits in line")
        answer = carol.hear()
        self._say(f"carol: {answer}, {time.monotonic() - paused:.1f} s later: bob's lease ran out")
        carol.tell("write")
        self._say(f"carol: {carol.hear()}")
        bob.signal(signal.SIGCONT)
        self._say("bob:   goes on (SIGCONT), still believing that he has the lock")
        bob.tell("write")
        self._say(f"bob:   {bob.hear()}")
        bob.tell("check")
        self._say(f"bob:   {bob.hear()}")

    def _reckon(self) -> bool:
        fenced, unfenced = (self._late_writes(table) for table in ("fenced", "unfenced"))
        print()
        print("  table                 writes   by a holder that had been replaced")
        for title, (writes, late) in (
            ("behind the fence", fenced),
            ("without a fence", unfenced),
        ):
            print(f"  {title:<22}{writes:<9}{late}")
        print()
        kept = fenced == (3, 0) and unfenced == (4, 1)
        print(
            "  "
            + (
                "The lock changed hands. Only the fence kept the zombie out."
                if kept
                else "This is not how it should end: please report it."
            )
        )
        return kept

    def _late_writes(self, table: str) -> tuple[int, int]:
        tokens = [token for (token,) in self._books.execute(f"SELECT token FROM {table}")]
        late = sum(token < max(tokens[: place + 1]) for place, token in enumerate(tokens))
        return len(tokens), late

    def _start(self, name: str) -> Worker:
        self._workers[name] = Worker(name, self._folder)
        return self._workers[name]

    def _say(self, line: str) -> None:
        print(f"  {time.monotonic() - self._began:5.1f} s  {line}", flush=True)


def work(name: str, folder: str) -> None:
    """Be one of the processes: obey the orders on standard input until killed."""
    fp = Fencepost(f"sqlite:///{folder}/fencepost.db")
    books = sqlite3.connect(os.path.join(folder, "books.db"), isolation_level=None)
    lock = fp.lock(LOCK, ttl=TTL, wait="30s")
    print("ready", flush=True)
    for order in sys.stdin:
        try:
            if order == "acquire\n":
                lease = lock.acquire()
                answer = f"has the lock, token {lease.token}"
            elif order == "write\n":
                books.execute("INSERT INTO unfenced VALUES (?, ?)", (name, lease.token))
                with books:
                    books.execute("BEGIN IMMEDIATE")
                    lease.fence(books)
                    books.execute("INSERT INTO fenced VALUES (?, ?)", (name, lease.token))
                answer = "wrote an invoice, with and without a fence"
            else:
                lease.check()
                answer = "still has the lock"
        except FencepostError as error:
            answer = f"{type(error).__name__}: {error}"
        print(answer, flush=True)
