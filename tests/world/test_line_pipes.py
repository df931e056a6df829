"""The pipes that waiters keep for later: they serve again, and outlive nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from fencepost.world import line as line_module
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish
from fencepost.world.line import Line, LinePlace, put_away

if TYPE_CHECKING:
    from pathlib import Path

DIES_WITH_A_SPARE = """
import os, signal, sys
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish
from fencepost.world.line import Line, LinePlace
line = Line(sys.argv[1], namespace="default", name="job")
finish(finish(LinePlace.joined(BlockingWorld(), line)).leave(served=True))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def line(tmp_path: Path) -> Line:
    return Line(str(tmp_path / "live"), namespace="default", name="job")


def join(line: Line) -> LinePlace:
    return finish(LinePlace.joined(BlockingWorld(), line))


def leave(place: LinePlace, *, served: bool = True) -> None:
    finish(place.leave(served=served))


def inodes(line: Line) -> set[int]:
    return {os.stat(os.path.join(line.folder, entry)).st_ino for entry in os.listdir(line.folder)}


def test_who_was_served_waits_with_the_same_pipe_again(line: Line) -> None:
    leave(join(line))
    before = inodes(line)
    second = join(line)
    assert inodes(line) == before
    assert len(line.waiters()) == 1
    leave(second)
    put_away(line.folder)


def test_nobody_stands_in_line_with_a_pipe_kept_for_later(line: Line) -> None:
    leave(join(line))
    assert line.waiters() == []
    put_away(line.folder)


def test_a_hint_that_came_too_late_does_not_wake_the_next_wait(line: Line) -> None:
    first, second = join(line), join(line)
    assert finish(first.turn(0)), "nobody was before the first"
    line.wake()  # unread when the first leaves
    leave(first)
    third = join(line)
    assert not finish(third.turn(0)), "the second stands before it"
    leave(second)
    leave(third)
    put_away(line.folder)


def test_who_leaves_unserved_keeps_nothing(line: Line) -> None:
    leave(join(line), served=False)
    assert os.listdir(line.folder) == []


def test_put_away_leaves_no_file(line: Line) -> None:
    places = [join(line) for _ in range(6)]
    for place in places:
        leave(place)
    put_away(line.folder)
    assert os.listdir(line.folder) == []


def test_a_pipe_that_somebody_removed_is_made_anew(line: Line) -> None:
    leave(join(line))
    for entry in os.listdir(line.folder):
        os.unlink(os.path.join(line.folder, entry))
    place = join(line)
    assert len(line.waiters()) == 1
    leave(place)
    put_away(line.folder)


def test_what_a_killed_process_kept_is_removed_by_the_next_who_makes_a_pipe(line: Line) -> None:
    killed = subprocess.run([sys.executable, "-c", DIES_WITH_A_SPARE, line.folder], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(os.listdir(line.folder)) == 1
    place = join(line)
    assert os.listdir(line.folder) == line.waiters()
    leave(place, served=False)


def test_a_forked_child_neither_uses_nor_removes_what_its_parent_keeps(line: Line) -> None:
    leave(join(line))
    child = os.fork()
    if child == 0:  # pragma: no cover -- another process
        line_module._put_away_all()
        os._exit(len(line_module._spares))
    assert os.waitpid(child, 0)[1] == 0
    assert len(os.listdir(line.folder)) == 1
    put_away(line.folder)


def test_a_waiter_whose_pipe_was_removed_after_a_hint_listens_again_and_does_not_spin(
    line: Line,
) -> None:
    place = join(line)
    assert finish(place.turn(1.0))  # first in line: asked at once
    line.wake()
    assert finish(place.turn(1.0))  # woken
    (pipe,) = line.waiters()
    os.unlink(os.path.join(line.folder, pipe))
    assert finish(place.turn(1.0))  # asked once more, for what it could not hear
    assert not finish(place.turn(0.01))  # and then it waits
    assert line.waiters() == [pipe]
    line.wake()
    assert finish(place.turn(1.0))
    leave(place)
