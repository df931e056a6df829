"""A crowd of processes for one lease, in every trouble there is, and the history of all of it."""

from __future__ import annotations

import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

from fencepost.fence import CREATE_GUARD
from fencepost.testing.history import Event, from_lines
from fencepost.world.clocks import SystemClocks

if TYPE_CHECKING:
    from proxy import Proxy
    from servers import Running

PROGRAM = Path(__file__).with_name("crowd_program.py")
MEMBERS = 4
TTL = 1.0
boottime = SystemClocks().boottime


class Member:
    """One process of the crowd."""

    def __init__(self, url: str, folder: Path, number: int) -> None:
        self.path, self._stopped = folder / f"{number}.history", False
        self.process = subprocess.Popen(
            [sys.executable, PROGRAM, url, f"{TTL}s", self.path, folder / "effects.db"],
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def sleep(self, seconds: float) -> None:
        """Stop it where it is, for as long."""
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> Event:
        """End it at once."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return Event(boottime(), "crashed", str(self.process.pid))


class Storm:
    """Each kind of trouble in turn, in a random order, for as long as the crowd competes."""

    def __init__(self, url: str, server: Running, proxy: Proxy, folder: Path, *, seed: int) -> None:
        self._url, self._server, self._proxy, self._folder = url, server, proxy, folder
        self._dice, self._members = random.Random(seed), list[Member]()
        self._number = 0
        self._stack = ExitStack()
        self.history: list[Event] = []

    def rage(self, *, rounds: int) -> list[Event]:
        """Let every trouble come so many times; return what happened."""
        with sqlite3.connect(self._folder / "effects.db") as db:
            db.execute("CREATE TABLE effect (id INTEGER PRIMARY KEY, at REAL, token INTEGER)")
            db.execute(CREATE_GUARD)
            db.execute("PRAGMA journal_mode = WAL")
        troubles = [self.lost_replies, self.half_open, self.cut, self.killed]
        troubles += [self.stopped, self.server_killed]
        with self._stack:
            for _ in range(MEMBERS):
                self._join()
            for _ in range(rounds):
                for trouble in self._dice.sample(troubles, len(troubles)):
                    trouble()
                    self._calm()
        return self.history + self._told() + self._effects()

    # The troubles.

    def lost_replies(self) -> None:
        for _ in range(3):
            self._proxy.lose_replies()
            time.sleep(0.1)

    def half_open(self) -> None:
        self._proxy.mode = self._dice.choice(["hole", "hole_up", "hole_down"])
        time.sleep(TTL * 0.8)

    def cut(self) -> None:
        for _ in range(3):
            self._proxy.reset()
            time.sleep(0.05)

    def killed(self) -> None:
        one = self._members.pop(0)
        self.history.append(one.kill())
        self._join()

    def stopped(self) -> None:
        """Stop whoever has the lease, if that can be seen, past its end."""
        owner = max(self._members, key=lambda one: one.path.stat().st_mtime)
        owner.sleep(TTL * 1.5)

    def server_killed(self) -> None:
        self._server.kill()
        self._server.start()

    # What is around them.

    def _join(self) -> None:
        self._number += 1
        member = Member(self._url, self._folder, self._number)
        self._members.append(self._stack.enter_context(member))

    def _calm(self) -> None:
        """Let somebody be granted the lease before the next trouble comes."""
        self._proxy.mode = "pass"
        self._proxy.reset()
        known = self._grants()
        end = time.monotonic() + 30
        while self._grants() == known:
            assert time.monotonic() < end, "nobody is granted the lease any more"
            time.sleep(0.02)

    def _grants(self) -> int:
        return sum(path.read_bytes().count(b'"granted"') for path in self._folder.glob("*.history"))

    def _told(self) -> list[Event]:
        told = []
        for path in self._folder.glob("*.history"):
            whole = path.read_text().rpartition("\n")[0]  # the last line may have been cut short
            told += from_lines(whole.splitlines())
        return told

    def _effects(self) -> list[Event]:
        with sqlite3.connect(self._folder / "effects.db") as db:
            rows = db.execute("SELECT at, token FROM effect ORDER BY id").fetchall()
        return [Event(at, "admitted", name="effects", token=token) for at, token in rows]
