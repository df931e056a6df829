"""Starts ``fencepost exec`` as real processes, and knows its wrapper, guards and command."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from fencepost.world.board import board_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

T = TypeVar("T")

FENCEPOST = os.path.join(os.path.dirname(sys.executable), "fencepost")
HERE = os.path.dirname(os.path.abspath(__file__))
PATIENCE = 40.0


def wait_for(condition: Callable[[], T], what: str) -> T:
    """Return the first truthy answer; the deadline is only for a broken program."""
    give_up = time.monotonic() + PATIENCE
    while time.monotonic() < give_up:
        answer = condition()
        if answer:
            return answer
        time.sleep(0.01)
    raise AssertionError(f"waited {PATIENCE:.0f} s in vain for: {what}")


class Kit:
    """A store in a folder, and the commands that use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"sqlite:///{folder}/leases.db"
        self._started: list[subprocess.Popen[str]] = []

    def fencepost(self, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run one command line to its end."""
        process = self.start(*words, **extra)
        out, err = process.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def start(self, *words: str, **extra: str) -> subprocess.Popen[str]:
        """Start one command line in a process group of its own."""
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # pytest runs in the background
            signal.signal(signal.SIGINT, signal.default_int_handler)
        process = subprocess.Popen(
            [FENCEPOST, *words],
            env={**os.environ, "FENCEPOST_URL": self.url, **extra},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def start_worker(self, name: str, *words: str, options: str = "") -> tuple[Tree, Worker]:
        """Start a command that has children of several kinds, and wait until all are at work."""
        place = self.folder / f"worker-{len(self._started)}"
        place.mkdir()
        program = [sys.executable, f"{HERE}/worker_program.py", str(self.folder), str(place)]
        wrapper = self.start("exec", name, *words, "--", *program, *options.split())
        worker = Worker(place)
        wait_for(worker.ready, "the worker and its children to be ready")
        return Tree(wrapper), worker

    def start_successor(self, name: str, *words: str) -> subprocess.Popen[str]:
        """Start a command that waits for the lease, and wait until it stands in line."""
        program = [sys.executable, f"{HERE}/successor_program.py", str(self.folder)]
        successor = self.start("exec", name, "--wait", "40s", *words, "--", *program)
        wait_for(self.somebody_waits, "the successor to stand in line")
        return successor

    def somebody_waits(self) -> bool:
        """Say whether a command stands in line for a lease."""
        folder = self.folder / "leases.db-live"
        return folder.exists() and any(board_of(str(folder)).tickets())

    def clean_up(self) -> None:
        """Leave no process behind, whatever a test has found."""
        mine = os.fsencode(self.folder)  # every command that a test starts has it as an argument
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if entry.isdecimal() and mine in read(f"/proc/{entry}/cmdline"):
                    os.kill(int(entry), signal.SIGKILL)
        for process in self._started:
            process.kill()
            process.communicate(timeout=PATIENCE)


class Tree:
    """The processes of one ``fencepost exec``."""

    def __init__(self, wrapper: subprocess.Popen[str]) -> None:
        self.process = wrapper
        self.wrapper = wrapper.pid
        (self.sentinel,) = children(wrapper.pid)
        (self.guardian,) = children(self.sentinel)
        # Daemons become the guardian's children, too, and are in sessions of their own.
        below = children(self.guardian)
        (self.command,) = [pid for pid in below if session(pid) == self.sentinel]

    def kill(self, *roles: str) -> float:
        """Kill the processes that have these roles, and return when."""
        at = time.time()
        for role in roles:
            with contextlib.suppress(ProcessLookupError):  # those that watch it may be quicker
                os.kill(getattr(self, role), signal.SIGKILL)
        return at

    def outcome(self) -> subprocess.CompletedProcess[str]:
        """Wait for the wrapper's end."""
        out, err = self.process.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess([], self.process.returncode, out, err)


class Worker:
    """What ``worker_program.py`` leaves in its folder."""

    KINDS = ("itself", "child", "daemon")

    def __init__(self, place: Path) -> None:
        self._place = place

    def ready(self) -> bool:
        return all((self._place / kind).exists() for kind in self.KINDS)

    def pids(self) -> dict[str, int]:
        return {kind: int((self._place / kind).read_text()) for kind in self.KINDS}

    def living(self) -> list[str]:
        return [kind for kind, pid in self.pids().items() if lives(pid)]

    def last_beat(self) -> float:
        """When any of them was last at work, as they say themselves."""
        return max(float(line) for line in (self._place / "beats").read_text().split())


class Took(NamedTuple):
    """What a successor found."""

    alone: bool
    token: int
    at: float


def took_over(successor: subprocess.Popen[str]) -> Took:
    out, err = successor.communicate(timeout=PATIENCE)
    assert successor.returncode == 0, err
    return Took(**json.loads(out))


@contextlib.contextmanager
def kit_in(folder: Path) -> Iterator[Kit]:
    kit = Kit(folder)
    try:
        yield kit
    finally:
        kit.clean_up()


def lives(pid: int) -> bool:
    try:
        return stat(pid)[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                if int(stat(int(entry))[1]) == pid:
                    found.append(int(entry))
    return found


def session(pid: int) -> int:
    try:
        return int(stat(pid)[3])
    except (FileNotFoundError, ProcessLookupError):  # daemons come and go
        return 0


def stat(pid: int) -> list[str]:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()


def environment(pid: int) -> bytes:
    return read(f"/proc/{pid}/environ")


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
