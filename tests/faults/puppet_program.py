"""A process that does what a test tells it, one line at a time, and answers each with one line."""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
import threading
import time
from functools import partial

from fencepost import Fencepost, FencepostError
from fencepost.world.board import board_of
from fencepost.world.clocks import SystemClocks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost import Lease
    from fencepost.blocking import Lock


class NoBootId(SystemClocks):
    """A machine that does not say which run of its clock this is."""

    def era(self) -> str | None:
        return None


class Puppet:
    """The commands, by name. Words come in, a line goes out."""

    def __init__(self, url: str) -> None:
        clocks = NoBootId() if os.environ.get("PUPPET_HAS_NO_BOOT_ID") else None
        self.fp = Fencepost(url, clocks=clocks)
        self.path = url.removeprefix("sqlite:///")
        self.held: list[tuple[Lock, Lease]] = []

    def acquire(self, name: str, ttl: str = "10m", wait: str = "0s", limit: str = "") -> str:
        lock = self.fp.lock(name, ttl=ttl, wait=wait, limit=int(limit) if limit else None)
        try:
            lease = lock.acquire()
        except FencepostError as error:
            return f"{type(error).__name__} {error}"
        self.held.append((lock, lease))
        return f"granted {lease.token} {SystemClocks().boottime()}"

    def release(self) -> str:
        lock, lease = self.held.pop()
        return f"released {lock.release(lease)}"

    def check(self) -> str:
        return self._try(self.held[-1][1].check)

    def write(self, path: str, value: str) -> str:
        """Write to a database of ours, behind the fence."""
        lease = self.held[-1][1]
        with sqlite3.connect(path, timeout=30, isolation_level=None) as database:
            database.execute("BEGIN IMMEDIATE")
            answer = self._try(lambda: lease.fence(database))
            if answer == "fine":
                database.execute("INSERT INTO effect VALUES (?)", (value,))
                database.execute("COMMIT")
            else:
                database.execute("ROLLBACK")
        database.close()
        return answer

    def fork(self, what: str) -> str:
        """Leave a child behind that does ``what`` and then stays; say its pid."""
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            if what == "closes-all":
                os.closerange(3, writer)
                os.closerange(writer + 1, 1024)
            os.write(writer, b".")
            while True:
                signal.pause()
        os.close(writer)
        assert os.read(reader, 1) == b"."
        os.close(reader)
        return f"child {pid}"

    def fork_in_line(self, name: str) -> str:
        """Wait for a lease in a thread, and leave a child behind meanwhile."""
        threading.Thread(target=self.acquire, args=(name, "10m", "60s"), daemon=True).start()
        while not any(board_of(self.path + "-live").tickets()):
            time.sleep(0.001)
        return self.fork("stays")

    def count(self, path: str, times: str) -> str:
        """Increment the number in a file that nothing but the lock protects."""
        for _ in range(int(times)):
            with self.fp.lock("counter", wait="60s"):
                with open(path) as file:
                    number = int(file.read())
                with open(path, "w") as file:
                    file.write(str(number + 1))
        return "counted"

    def crowd(self, path: str, limit: str, times: str) -> str:
        """Enter a semaphore again and again, with a mark in a folder while inside; say the most."""
        most = 0
        for _ in range(int(times)):
            with self.fp.lock("crowd", wait="60s", limit=int(limit)) as lease:
                mark = os.path.join(path, str(lease.token))
                os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
                deadline = time.monotonic() + 0.005
                while time.monotonic() < deadline:
                    most = max(most, len(os.listdir(path)))
                os.unlink(mark)
        return f"most {most}"

    def open_new(self, folder: str, rounds: str, start: str) -> str:
        """Meet others at brand-new files, at the same instant, round after round."""
        for number in range(int(rounds)):
            at = float(start) + number * 0.08
            while time.monotonic() < at:
                pass  # a sleep would spread us out
            with Fencepost(f"sqlite:///{folder}/{number}.db") as fp:
                answer = self._try(partial(enter, fp.lock("x", wait="30s")))
            if answer != "fine":
                return answer
        return "fine"

    def _try(self, what: Callable[[], object]) -> str:
        try:
            what()
        except FencepostError as error:
            return f"{type(error).__name__} {error}"
        return "fine"


def enter(lock: Lock) -> None:
    with lock as lease:
        lease.check()


def main() -> None:
    puppet = Puppet(sys.argv[1])
    print("ready", flush=True)
    for line in sys.stdin:
        verb, *words = line.split()
        print(getattr(puppet, verb)(*words), flush=True)


if __name__ == "__main__":
    main()
