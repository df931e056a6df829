"""Whatever a command leaves behind, and however it ends: nothing of it runs beside its successor.

The witnesses are the daemon, which writes down each of its beats, and the successor.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from datetime import date, timedelta
from functools import partial
from typing import TYPE_CHECKING

import pytest
from exec_kit import FENCEPOST, PATIENCE, Kit, Tree, kit_in, lives, wait_for

import leaving_program
from fencepost import Fencepost, LeaseHeld
from fencepost.model.slot import parsed
from fencepost.world.flow import finish

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

FOLLOWING = os.path.join(os.path.dirname(leaving_program.__file__), "following_program.py")
KINDS = ("popen", "forks", "nohup", "daemon")
ENDS = ("ends well", "fails", "times out", "is killed")
CODES = {"ends well": (0,), "fails": (3,), "times out": (143, 137), "is killed": (137,)}
# 3 in every run of the tests; more with FENCEPOST_LEFTOVERS.
ROUNDS = int(os.environ.get("FENCEPOST_LEFTOVERS", "3"))


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    with kit_in(tmp_path) as kit:
        yield kit


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_a_command_left_behind_beats_beside_the_next_holder_of_its_lock(
    kit: Kit, kind: str, end: str
) -> None:
    late, said = 0, []
    for number in range(ROUNDS):
        options = ("--max-hold", "2s") if end == "times out" else ()
        place = kit.folder / f"place-{number}"
        leaver = leaving(kit, place, kind, end, number, *options)
        successor = following(kit, place)
        wait_for(kit.somebody_waits, "the successor to stand in line")
        late += was_beside(successor, place)
        _, err = leaver.communicate(timeout=PATIENCE)
        assert leaver.returncode in CODES[end]
        said.append(err)
    assert late == 0, f"{late} of {ROUNDS} daemons were alive when their successors began"
    for text in said:
        (line,) = text.splitlines()
        assert re.search(r"left behind were stopped: [^ ]+ \(pid \d+\)$", line), line


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_a_run_left_behind_beats_beside_the_next_run(
    kit: Kit, kind: str, end: str
) -> None:
    late, kept = 0, []
    with Fencepost(kit.url) as fp:
        for number in range(ROUNDS):
            place = kit.folder / f"place-{number}"
            day = date(2026, 1, 1) + timedelta(number)
            words = (
                "--slot",
                f"{day}T02:00:00Z",
                "--timeout",
                "2s" if end == "times out" else "1h",
            )
            leaver = leaving(kit, place, kind, end, number, *words)
            successor = following(kit, place, "--slot", f"{day}T03:00:00Z")
            runs = 2 * number + 2
            wait_for(partial(has_runs, fp, runs), "the next run to wait")
            late += was_beside(successor, place)
            leaver.communicate(timeout=PATIENCE)
            assert leaver.returncode in CODES[end]
            events = finish(fp._working.ledger.events(parsed(f"job@{day}T02:00:00Z")))
            kept.append([event.detail for event in events if event.what == "children_stopped"])
    assert late == 0, f"{late} of {ROUNDS} daemons were alive when their successors began"
    for details in kept:
        (detail,) = details
        assert re.fullmatch(r"[^ ]+ \(pid \d+\)", detail), detail


LEAVE = "setsid sleep 600 < /dev/null > /dev/null 2>&1 & echo $!; sleep 0.2"


def test_a_lock_may_leave_children_and_says_which(kit: Kit) -> None:
    done = kit.fencepost("exec", "job", "--leave-children", "--", "/bin/sh", "-c", LEAVE)
    pid = int(done.stdout)
    try:
        assert lives(pid)
        told = "fencepost: processes that the command left behind were left alone: sleep (pid "
        assert (done.returncode, done.stderr) == (0, f"{told}{pid})\n")
    finally:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("words", [(), ("--leave-children",)])
def test_what_outlives_its_guards_and_wrapper_keeps_others_out_unless_it_may_leave_children(
    kit: Kit, words: tuple[str, ...]
) -> None:
    begun = ("/bin/sh", "-c", "echo begun; exec sleep 600")
    process = kit.start("exec", "job", "--ttl", "10m", *words, "--", *begun)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    tree = Tree(process)
    above = (tree.wrapper, tree.sentinel, tree.guardian)
    try:
        for signum in (signal.SIGSTOP, signal.SIGKILL):  # so that none sees another die
            for pid in above:
                os.kill(pid, signum)
        process.wait(PATIENCE)
        wait_for(lambda: not any(map(lives, above)), "the guards to die")
        assert lives(tree.command)
        with Fencepost(kit.url) as fp:
            if words:
                with fp.lock("job"):
                    pass
            else:
                with pytest.raises(LeaseHeld):
                    fp.lock("job").acquire()
    finally:
        os.kill(tree.command, signal.SIGKILL)


@pytest.mark.parametrize(("words", "fate"), [((), "stopped"), (("--leave-children",), "left")])
def test_the_record_of_a_run_names_the_children_that_it_left_behind(
    kit: Kit, words: tuple[str, ...], fate: str
) -> None:
    slot = ("--slot", "2026-01-20T02:00:00Z", "--verbose")
    done = kit.fencepost("exec", "job", *slot, *words, "--", "/bin/sh", "-c", LEAVE)
    pid = int(done.stdout)
    assert lives(pid) is (fate == "left")
    if fate == "left":
        os.kill(pid, signal.SIGKILL)
    assert f'children="sleep (pid {pid})"' in done.stderr
    shown = kit.fencepost("logs", "job@2026-01-20T02:00:00Z").stdout
    assert re.search(rf"children_{fate} token=\d+ sleep \(pid {pid}\)\n", shown), shown


def test_a_command_within_a_command_may_leave_nothing_to_the_outer_one(kit: Kit) -> None:
    """The inner lock leaves its children alone; to the outer one they are children like others."""
    inner = ("exec", "inner", "--leave-children", "--", "/bin/sh", "-c", LEAVE)
    done = kit.fencepost("exec", "outer", "--", FENCEPOST, *inner)
    assert done.returncode == 0
    assert not lives(int(done.stdout))
    left, stopped = done.stderr.splitlines()
    assert left.endswith(f"were left alone: sleep (pid {int(done.stdout)})")
    assert stopped.endswith(f"were stopped: sleep (pid {int(done.stdout)})")


def test_a_python_without_ctypes_finds_them_by_their_mark(kit: Kit) -> None:
    (kit.folder / "ctypes.py").write_text("raise ImportError('left out of this build')")
    pythonpath = os.pathsep.join([str(kit.folder), os.environ.get("PYTHONPATH", "")])
    leave = "import subprocess; streams = dict.fromkeys(('stdout', 'stderr'), -3); print("
    leave += "subprocess.Popen(['sleep', '600'], start_new_session=True, **streams).pid)"
    words = ("exec", "job", "--", sys.executable, "-c", leave)
    done = kit.fencepost(*words, PYTHONPATH=pythonpath)
    assert done.returncode == 0
    assert not lives(int(done.stdout))
    assert done.stderr.endswith(f"were stopped: sleep (pid {int(done.stdout)})\n")


def has_runs(fp: Fencepost, count: int) -> bool:
    return len(fp.runs("job", limit=count)) == count


def leaving(
    kit: Kit, place: Path, kind: str, end: str, number: int, *words: str
) -> subprocess.Popen[str]:
    """Start a command that leaves a daemon behind; one in two daemons is deaf to SIGTERM."""
    place.mkdir()
    manner = "stubborn" if number % 2 else "obedient"
    program = [sys.executable, leaving_program.__file__, str(place), kind, end, manner]
    leaver = kit.start("exec", "job", "--grace", "300ms", *words, "--", *program)
    wait_for((place / "beats").exists, "the daemon to begin")
    return leaver


def following(kit: Kit, place: Path, *words: str) -> subprocess.Popen[str]:
    program = [sys.executable, FOLLOWING, str(place)]
    return kit.start("exec", "job", "--wait", "40s", *words, "--", *program)


def was_beside(successor: subprocess.Popen[str], place: Path) -> bool:
    """Let the command go, and say whether its daemon was alive when the successor had begun."""
    (place / "go").touch()
    out, err = successor.communicate(timeout=PATIENCE)
    assert successor.returncode == 0, err
    told = json.loads(out)
    assert told["beats"] > 0
    return bool(told["late"])
