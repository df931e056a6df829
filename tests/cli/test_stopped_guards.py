"""Guards that are stopped, not killed: their command ends all the same before others begin.

The witnesses are the command, which writes down each of its beats, and its successor, which tells
when it began: both by the boot-time clock.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import sys
from typing import TYPE_CHECKING

import pytest
from exec_kit import HERE, PATIENCE, Kit, Tree, children, kit_in, lives, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOLD = ("--max-hold", "3s", "--grace", "500ms")
# It begins at once, as no interpreter does, and lasts until a predecessor would have beaten again.
FOLLOWING = "read up idle < /proc/uptime; echo $up; exec sleep 0.5"
STOP, KILL = signal.SIGSTOP, signal.SIGKILL


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    with kit_in(tmp_path) as kit:
        yield kit


def relentless(kit: Kit, kind: str, *words: str) -> Tree:
    """Start a command that only SIGKILL ends, and wait until it beats."""
    program = [sys.executable, f"{HERE}/relentless_program.py", str(kit.folder / "beats"), kind]
    wrapper = kit.start("exec", "job", "--ttl", "5s", *words, "--", *program)
    wait_for((kit.folder / "beats").exists, "the command to beat")
    return Tree(wrapper)


def is_renewed_for_less(kit: Kit) -> bool:
    """Say whether the lease was renewed for so short a time that it ends with its hold."""
    with contextlib.closing(sqlite3.connect(kit.folder / "leases.db")) as database:
        rows = database.execute("SELECT ttl_us FROM fencepost_lease WHERE held").fetchall()
    return [ttl for (ttl,) in rows if ttl < 700_000] != []


def beats_beside(
    kit: Kit, tree: Tree, *signals: tuple[str, signal.Signals], late: bool = False
) -> list[float]:
    """Signal some of the tree, and return the beats since the successor began."""
    successor = kit.start("exec", "job", "--wait", "40s", "--", "/bin/sh", "-c", FOLLOWING)
    wait_for(kit.somebody_waits, "the successor to stand in line")
    if late:
        wait_for(lambda: is_renewed_for_less(kit), "the hold to be almost over")
    for role, signum in signals:
        os.kill(getattr(tree, role), signum)
    out, err = successor.communicate(timeout=PATIENCE)
    assert successor.returncode == 0, err
    beats = [float(line) for line in (kit.folder / "beats").read_text().split()]
    assert len(beats) > 10
    print(f"the last beat was {float(out) - beats[-1]:.2f} s before the successor")
    return [beat for beat in beats if beat >= float(out)]


@pytest.mark.parametrize("kind", ["one", "chain"])
def test_the_sentinel_ends_a_hold_that_is_over_before_others_begin(kit: Kit, kind: str) -> None:
    tree = relentless(kit, kind, *HOLD)
    stopped = (("guardian", STOP), ("wrapper", STOP))
    assert beats_beside(kit, tree, *stopped, late=True) == []
    assert not lives(tree.guardian)
    os.kill(tree.wrapper, signal.SIGCONT)
    done = tree.outcome()
    assert done.returncode == 137
    assert "lease 'job' was lost: max_hold is used up; the command was stopped" in done.stderr


@pytest.mark.parametrize("kind", ["one", "chain"])
def test_the_wrapper_wakes_the_guardian_when_a_hold_is_over(kit: Kit, kind: str) -> None:
    tree = relentless(kit, kind, *HOLD)
    assert beats_beside(kit, tree, ("guardian", STOP)) == []
    done = tree.outcome()
    assert done.returncode == 137
    assert "max_hold is used up; the command was stopped" in done.stderr


@pytest.mark.parametrize("sentinel", [STOP, KILL])
def test_the_wrapper_wakes_a_guardian_that_has_no_sentinel(
    kit: Kit, sentinel: signal.Signals
) -> None:
    tree = relentless(kit, "chain", *HOLD)
    assert beats_beside(kit, tree, ("guardian", STOP), ("sentinel", sentinel)) == []
    done = tree.outcome()
    assert done.returncode == 137
    assert "max_hold is used up; the command was stopped" in done.stderr


@pytest.mark.parametrize(
    "signals",
    [
        [("guardian", STOP), ("wrapper", KILL)],
        [("sentinel", STOP), ("wrapper", KILL)],
        [("guardian", KILL), ("wrapper", KILL)],
        [("guardian", KILL), ("sentinel", STOP)],
    ],
    ids=lambda signals: "+".join(f"{role} {signum.name}" for role, signum in signals),
)
def test_a_chain_ends_whoever_is_left_to_end_it(
    kit: Kit, signals: list[tuple[str, signal.Signals]]
) -> None:
    tree = relentless(kit, "chain")
    assert beats_beside(kit, tree, *signals) == []
    left = [pid for role in ("guardian", "sentinel") for pid in children(getattr(tree, role))]
    assert not any(lives(pid) for pid in left if pid != tree.guardian)


def test_while_the_guardian_is_stopped_the_lease_is_renewed_and_nobody_begins(kit: Kit) -> None:
    tree = relentless(kit, "one")
    os.kill(tree.guardian, STOP)
    done = kit.fencepost("exec", "job", "--wait", "8s", "--", "true")
    assert "is held by" in done.stderr
    os.kill(tree.guardian, signal.SIGCONT)
    os.kill(tree.command, KILL)
    assert tree.outcome().returncode == 137
