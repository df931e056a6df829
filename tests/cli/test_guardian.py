"""Whatever is killed or stopped: a command never runs beside its successor."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest
from exec_kit import FENCEPOST, Kit, Tree, Worker, kit_in, lives, took_over, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LONG = ("--ttl", "10m")
VICTIMS = [
    ("wrapper",),
    ("guardian",),
    ("command",),
    ("wrapper", "guardian"),
    ("guardian", "wrapper"),
    ("wrapper", "command"),
    ("command", "wrapper"),
    ("guardian", "command"),
    ("command", "guardian"),
    ("sentinel", "wrapper"),
    ("sentinel", "guardian"),
    ("wrapper", "sentinel"),
]


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    with kit_in(tmp_path) as kit:
        yield kit


def token_of(tree: Tree) -> int:
    with open(f"/proc/{tree.command}/environ", "rb") as file:
        pairs = dict(pair.partition(b"=")[::2] for pair in file.read().split(b"\0"))
    return int(pairs[b"FENCEPOST_TOKEN"])


@pytest.mark.parametrize("victims", VICTIMS, ids="+".join)
@pytest.mark.parametrize("options", ["", "stubborn"], ids=["obedient", "stubborn"])
def test_after_kill_9_the_successor_starts_soon_and_alone(
    kit: Kit, victims: tuple[str, ...], options: str
) -> None:
    tree, worker = kit.start_worker("job", *LONG, "--grace", "300ms", options=options)
    token = token_of(tree)
    successor = kit.start_successor("job", *LONG)
    killed_at = tree.kill(*victims)
    took = took_over(successor)
    assert took.alone
    assert took.token > token
    assert worker.living() == []
    assert worker.last_beat() < took.at
    print(f"{'+'.join(victims)} {options}: {took.at - killed_at:.2f} s to take over")
    assert took.at - killed_at < 10  # of a ttl of 600; usually well under one


@pytest.mark.parametrize("options", ["aloof stubborn", "masked stubborn", "aloof masked stubborn"])
@pytest.mark.parametrize("victim", ["wrapper", "guardian", "command"])
def test_a_daemon_is_found_by_its_mark_by_its_pledge_or_by_its_descent(
    kit: Kit, options: str, victim: str
) -> None:
    """One has closed all that it inherited, one begins with an empty environment, one has both."""
    tree, worker = kit.start_worker("job", *LONG, "--grace", "300ms", options=options)
    successor = kit.start_successor("job", *LONG)
    tree.kill(victim)
    assert took_over(successor).alone
    assert worker.living() == []


def test_a_sentinel_that_is_stopped_wakes_up_to_replace_a_dead_guardian(kit: Kit) -> None:
    tree, worker = kit.start_worker("job", *LONG, options="aloof masked stubborn")
    successor = kit.start_successor("job", *LONG)
    os.kill(tree.sentinel, signal.SIGSTOP)
    tree.kill("guardian")
    assert took_over(successor).alone
    assert worker.living() == []


def test_what_keeps_forking_is_killed_all_the_same(kit: Kit) -> None:
    """Each process of it lives for a moment only, in a session of its own, deaf to SIGTERM."""
    program = f"""
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.closerange(0, 1000)
    while True:
        if os.fork():
            os._exit(0)
        os.setsid()
        with open({str(kit.folder / "beats")!r}, "a") as file:
            file.write(f"{{time.time()}}\\n")
        time.sleep(0.001)
while not os.path.exists({str(kit.folder / "beats")!r}):
    time.sleep(0.01)
"""
    done = kit.fencepost("exec", "job", "--grace", "200ms", "--", sys.executable, "-c", program)
    ended_at = time.time()
    assert done.returncode == 0, done.stderr
    assert "left behind were stopped: python3 (pid " in done.stderr
    size = (kit.folder / "beats").stat().st_size
    assert size > 0
    assert kit.fencepost("exec", "job", "--", "true").returncode == 0
    beats = (kit.folder / "beats").read_text().split()
    assert float(beats[-1]) < ended_at


def test_the_guards_do_not_answer_to_the_name_of_the_wrapper(kit: Kit) -> None:
    tree, _ = kit.start_worker("job", *LONG)
    names = {role: comm(getattr(tree, role)) for role in ("wrapper", "guardian", "sentinel")}
    assert names == {
        "wrapper": "fencepost",
        "guardian": "fence-guardian",
        "sentinel": "fence-sentinel",
    }


def comm(pid: int) -> str:
    with open(f"/proc/{pid}/comm") as file:
        return file.read().strip()


def test_killing_the_wrappers_whole_process_group_ends_the_command(kit: Kit) -> None:
    tree, worker = kit.start_worker("job", *LONG)
    successor = kit.start_successor("job", *LONG)
    os.killpg(tree.wrapper, signal.SIGKILL)
    assert took_over(successor).alone
    assert worker.living() == []


def test_a_stopped_wrapper_has_its_command_ended_before_its_lease_ends(kit: Kit) -> None:
    tree, worker = kit.start_worker("job", "--ttl", "5s", options="stubborn")
    successor = kit.start_successor("job")
    os.kill(tree.wrapper, signal.SIGSTOP)
    took = took_over(successor)
    assert took.alone
    assert worker.last_beat() < took.at
    os.kill(tree.wrapper, signal.SIGCONT)
    done = tree.outcome()
    assert done.returncode == 137
    (line,) = done.stderr.splitlines()
    assert line.startswith("fencepost: lease 'job' was lost: ")


def test_a_stopped_wrapper_and_guardian_leave_it_to_the_sentinel(kit: Kit) -> None:
    tree, worker = kit.start_worker("job", "--ttl", "5s")
    successor = kit.start_successor("job")
    for pid in (tree.guardian, tree.wrapper):
        os.kill(pid, signal.SIGSTOP)
    took = took_over(successor)
    assert took.alone
    assert worker.last_beat() < took.at
    assert not lives(tree.guardian)  # for the sentinel to adopt what it had adopted
    os.kill(tree.wrapper, signal.SIGCONT)
    assert tree.outcome().returncode == 137


def test_a_stopped_guardian_does_not_save_the_command_of_a_dead_wrapper(kit: Kit) -> None:
    tree, worker = kit.start_worker("job", *LONG)
    os.kill(tree.guardian, signal.SIGSTOP)
    tree.kill("wrapper")
    wait_for(lambda: worker.living() == [], "the sentinel to end the command")
    wait_for(lambda: not lives(tree.guardian), "the sentinel to end the guardian")


def test_a_command_within_a_command_ends_with_the_outer_one(kit: Kit) -> None:
    place = kit.folder / "inner"
    place.mkdir()
    program = os.path.join(os.path.dirname(__file__), "worker_program.py")
    inner = [FENCEPOST, "exec", "inner", *LONG, "--", sys.executable, program]
    inner += [str(kit.folder), str(place), "stubborn"]
    outer = kit.start("exec", "job", *LONG, "--", *inner)
    worker = Worker(place)
    wait_for(worker.ready, "the inner command to be ready")
    successor = kit.start_successor("job", *LONG)
    outer.kill()
    assert took_over(successor).alone
    assert worker.living() == []


def test_the_guards_leave_when_all_is_done(kit: Kit) -> None:
    tree, _ = kit.start_worker("job", *LONG)
    os.kill(tree.wrapper, signal.SIGTERM)
    assert tree.outcome().returncode == 143
    wait_for(lambda: not lives(tree.guardian) and not lives(tree.sentinel), "the guards to leave")


def test_nothing_is_signalled_twice_when_the_wrapper_dies(kit: Kit) -> None:
    count = kit.folder / "terms"
    program = f"""
import signal, time
def note(*_):
    with open({str(count)!r}, "a") as file:
        file.write("x")
signal.signal(signal.SIGTERM, note)
print("ready", flush=True)
while True:
    time.sleep(1)
"""
    process = kit.start("exec", "job", *LONG, "--", sys.executable, "-c", program)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    tree = Tree(process)
    tree.kill("wrapper")
    wait_for(lambda: not lives(tree.sentinel), "the guards to leave")
    assert count.read_text() == "x"
