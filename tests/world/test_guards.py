"""What the guards of a command do with one that stands still, and what they tell of its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from fencepost.world.apart import start_apart
from fencepost.world.clocks import SystemClocks
from fencepost.world.strays import Trail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fencepost.world.guardian import Guarded

NEVER = float("inf")
PATIENCE = 30.0
boottime = SystemClocks().boottime
# It writes down its number, and then that it is at work; so it does when it is asked to stop.
PROGRAM = """
import os, signal, sys, time
def note(word):
    with open(sys.argv[1], "a") as file:
        file.write(word + "\\n")
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: note("asked"))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
note(str(os.getpid()))
while True:
    note("works")
    time.sleep(0.005)
"""


class Guards:
    """A command under guard, and the processes around it."""

    def __init__(self, folder: Path) -> None:
        self._notes = folder / "notes"
        self.command = self.sentinel = self.guardian = 0

    def start(
        self,
        *words: str,
        argv: list[str] | None = None,
        ask: float = 600.0,
        kill: float = 600.0,
        still: float = NEVER,
        grace: float = 5.0,
    ) -> Guarded:
        """Start a command; the times are seconds from now."""
        now = boottime()
        self.guarded = start_apart(
            argv or [sys.executable, "-c", PROGRAM, str(self._notes), *words],
            environment=dict(os.environ),
            nonce=f"nonce-{time.time_ns()}",
            lifeline=None,
            until=(now + ask, now + kill),
            still_at=now + still,
            grace=grace,
        )
        wait_for(lambda: self.notes() or self.guarded.gone, "the command to begin")
        self.sentinel, self.guardian = parent(pid := int(self.notes()[0]), 2), parent(pid)
        self.command = pid
        return self.guarded

    def until(self, *, ask: float = 600.0, kill: float = 600.0, still: float = NEVER) -> None:
        """Tell the guards until when the command may run, in seconds from now."""
        now = boottime()
        self.guarded.extend(now + ask, now + kill, now + still)

    def notes(self) -> list[str]:
        return self._notes.read_text().splitlines() if self._notes.exists() else []

    def stands_still(self) -> int:
        """Wait until the command stands still; return how many notes it has made."""
        wait_for(lambda: state(self.command) == "T", "the command to stand still")
        return len(self.notes())

    def gone(self) -> None:
        """Do what a wrapper does until nothing of the command is left."""

        def look() -> bool:
            self.guarded.listen()
            if self.guarded.orphaned and not self.guarded.gone:
                self.guarded.mop_up()
            return self.guarded.gone

        wait_for(look, "nothing to be left of the command")


def wait_for(condition: Callable[[], object], what: str) -> None:
    give_up = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < give_up, f"waited {PATIENCE:.0f} s in vain for: {what}"
        time.sleep(0.01)


def fields(pid: int) -> list[str]:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()


def state(pid: int) -> str:
    try:
        return fields(pid)[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


def parent(pid: int, times: int = 1) -> int:
    for _ in range(times):
        pid = int(fields(pid)[1])
    return pid


@pytest.fixture
def guards(tmp_path: Path) -> Iterator[Guards]:
    guards = Guards(tmp_path)
    yield guards
    for pid in (guards.guardian, guards.sentinel, guards.command):
        with contextlib.suppress(ProcessLookupError):
            if pid:
                os.kill(pid, signal.SIGCONT)
    guards.guarded.close()


# What is told of its end.


def test_a_command_that_is_killed_while_it_stands_still_did_not_end_by_itself(
    guards: Guards,
) -> None:
    command = guards.start()
    guards.until(ask=0.2, kill=0.8, still=0.1)
    guards.gone()
    assert (command.asked, command.code) == (True, 137)


def test_a_command_that_is_killed_without_notice_did_not_end_by_itself(guards: Guards) -> None:
    command = guards.start()
    guards.until(ask=0.2, kill=0.2)
    guards.gone()
    assert (command.asked, command.code) == (True, 137)


@pytest.mark.parametrize("renewed", ["never", "too late"])
def test_a_command_that_the_sentinel_kills_did_not_end_by_itself(
    guards: Guards, renewed: str
) -> None:
    command = guards.start()
    os.kill(guards.guardian, signal.SIGSTOP)
    guards.until(ask=0.3, kill=0.3)
    wait_for(lambda: state(guards.command) in ("Z", "gone"), "the sentinel to kill the command")
    if renewed == "too late":
        guards.until()
        with contextlib.suppress(ProcessLookupError):  # the sentinel was quicker
            os.kill(guards.guardian, signal.SIGCONT)
    guards.gone()
    assert (command.asked, command.code) == (True, 137)


def test_a_guardian_that_is_stopped_at_its_deadline_is_replaced(guards: Guards) -> None:
    command = guards.start()
    os.kill(guards.guardian, signal.SIGSTOP)
    guards.until(ask=0.1, kill=0.1)
    wait_for(lambda: state(guards.sentinel) == "Z", "the sentinel to have ended all")
    assert (state(guards.command), state(guards.guardian)) == ("gone", "gone")
    guards.gone()
    assert (command.orphaned, command.asked, command.code) == (True, True, 137)


def test_the_wrapper_wakes_guards_that_are_stopped_at_their_deadline(guards: Guards) -> None:
    command = guards.start()
    os.kill(guards.sentinel, signal.SIGSTOP)
    os.kill(guards.guardian, signal.SIGSTOP)
    guards.until(ask=0.1, kill=0.1)
    guards.gone()
    assert (command.orphaned, command.asked, command.code) == (False, True, 137)


def test_the_wrapper_wakes_guards_that_are_stopped_when_their_command_must_stand_still(
    guards: Guards,
) -> None:
    command = guards.start()
    os.kill(guards.sentinel, signal.SIGSTOP)
    os.kill(guards.guardian, signal.SIGSTOP)
    guards.until(still=0.1)

    def stands_still() -> bool:
        command.listen()
        return state(guards.command) == "T"

    wait_for(stands_still, "the command to stand still")
    guards.until(ask=0.0, kill=0.0)
    guards.gone()


# A sentinel past its deadline from the start, and a guardian that only says what it does. It
# prints whether the sentinel has killed in its place.
AT_THE_DEADLINE = """
import os, sys, time
from fencepost.world.clocks import SystemClocks
from fencepost.world.sentinel import SentinelOrders, _Sentinel
from fencepost.world.strays import Trail
from fencepost.world.wire import tell
now = SystemClocks().boottime
from_guardian, to_sentinel = os.pipe()
from_wrapper, wrapper = os.pipe()
guardian = os.fork()
if guardian == 0:
    os.close(from_guardian)
    for _ in range(20):
        tell(to_sentinel, "acts", repr(now() + 0.05))
        time.sleep(0.05)
        if "stops" in sys.argv:
            time.sleep(20)
    tell(to_sentinel, "done")
    os._exit(0)
os.close(to_sentinel)
trail = Trail(session=-1, root=os.getpid(), nonce="of-nobody", pledge="of-nobody")
never, nobody = float("inf"), os.open(os.devnull, os.O_WRONLY)
orders = SentinelOrders(
    guardian, trail, None, now(), never, from_wrapper, from_guardian, nobody
)
print(_Sentinel(orders).stand())
"""


@pytest.mark.parametrize("word", ["goes on", "stops"])
def test_a_guardian_that_kills_is_left_alone_for_as_long_as_it_says_so(word: str) -> None:
    """What cannot be killed, such as another user's process, is waited for."""
    began = time.monotonic()
    words = [sys.executable, "-c", AT_THE_DEADLINE, word]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout == ("True\n" if word == "stops" else "False\n")
    assert word == "goes on" or time.monotonic() - began < 10  # not as long as it would have slept


def test_a_command_that_ended_before_its_guardian_was_late_ended_by_itself(guards: Guards) -> None:
    script = f"echo $$ > {guards._notes}; sleep 0.5; exit 3"
    command = guards.start(argv=["/bin/sh", "-c", script])
    guards.until(ask=30, kill=30)
    os.kill(guards.guardian, signal.SIGSTOP)
    wait_for(lambda: state(guards.command) == "Z", "the command to end")
    guards.until(ask=0.0, kill=0.0)
    os.kill(guards.guardian, signal.SIGCONT)
    guards.gone()
    assert (command.asked, command.code) == (False, 3)


def test_a_command_that_another_kills_while_it_stands_still_was_not_stopped_by_its_guards(
    guards: Guards,
) -> None:
    command = guards.start()
    guards.until(still=0.0)
    guards.stands_still()
    os.kill(guards.command, signal.SIGKILL)
    guards.gone()
    assert (command.asked, command.code) == (False, 137)


# What it may do from then on.


def test_a_command_that_stands_still_does_nothing_more_when_its_guardian_dies(
    guards: Guards,
) -> None:
    guards.start("stubborn")
    guards.until(still=0.0)
    before = guards.stands_still()
    os.kill(guards.guardian, signal.SIGKILL)
    guards.gone()
    assert guards.notes()[before:] == []


def test_a_command_that_stands_still_is_killed_by_its_wrapper_when_both_guards_die(
    guards: Guards,
) -> None:
    """The kernel wakes it then, as a process group without a parent, and sends it SIGHUP."""
    guards.start("stubborn")
    guards.until(still=0.0)
    guards.stands_still()
    os.kill(guards.sentinel, signal.SIGKILL)
    os.kill(guards.guardian, signal.SIGKILL)
    guards.gone()
    assert "asked" not in guards.notes()


def test_a_command_that_is_to_stand_still_soon_is_killed_by_then_when_its_guardian_dies(
    guards: Guards,
) -> None:
    guards.start("stubborn")
    os.kill(guards.sentinel, signal.SIGSTOP)
    guards.until(still=0.0)
    guards.stands_still()
    os.kill(guards.guardian, signal.SIGKILL)
    os.kill(guards.command, signal.SIGCONT)  # as if it had not stood still yet
    wait_for(lambda: state(guards.command) in "RS", "the command to go on")
    os.kill(guards.sentinel, signal.SIGCONT)
    guards.gone()
    assert "asked" not in guards.notes()


def test_a_command_that_stands_still_hears_of_a_signal_when_it_goes_on(guards: Guards) -> None:
    command = guards.start("stubborn")
    guards.until(still=0.0)
    before = guards.stands_still()
    command.forward(signal.SIGTERM)
    time.sleep(0.3)
    assert guards.notes()[before:] == []
    guards.until()
    wait_for(lambda: "asked" in guards.notes(), "the command to hear of SIGTERM")
    guards.until(ask=0.0, kill=0.0)
    guards.gone()


def test_what_a_command_left_behind_is_killed_when_it_would_have_to_stand_still(
    guards: Guards,
) -> None:
    works = f"trap '' TERM; while :; do echo works >> {guards._notes}; sleep 0.01; done"
    script = f"echo $$ > {guards._notes}; ({works}) & sleep 0.5"
    command = guards.start(argv=["/bin/sh", "-c", script], grace=300)
    wait_for(lambda: state(guards.command) == "gone", "the command to end")
    guards.until(still=0.2)
    guards.gone()
    assert (command.asked, command.code) == (False, 0)


def test_a_process_that_opens_and_closes_files_is_known_by_its_pledge() -> None:
    """Its descriptors are read one after the other, and some are closed before they are read."""
    life, pledge = os.pipe()
    name = os.readlink(f"/proc/self/fd/{pledge}")
    trail = Trail(session=-1, root=-1, nonce="of-nobody", pledge=name)
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", CHURN],
        {},
        file_actions=[(os.POSIX_SPAWN_DUP2, pledge, 1), (os.POSIX_SPAWN_CLOSE, life)],
    )
    os.close(pledge)
    try:
        assert os.read(life, 1) == b"x"
        ours = [os.getpid()]
        missed = sum([one.pid for one in trail.find(spare=ours)] != [pid] for _ in range(100))
        assert missed == 0
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(life)


# The pledge has a number above those of the files.
CHURN = """
import os
os.dup2(1, 200)
os.close(1)
os.write(200, b"x")
while True:
    for fd in [os.open("/dev/null", os.O_RDONLY) for _ in range(50)]:
        os.close(fd)
"""
