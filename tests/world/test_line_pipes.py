"""Seats are made once and kept; nobody is called at a seat that is not its own any more."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from fencepost import Fencepost
from fencepost.errors import LeaseHeld
from fencepost.world import seat as seat_module
from fencepost.world.blocking import BlockingWorld
from fencepost.world.board import LONGEST_TEXT, Board, board_of
from fencepost.world.flow import finish
from fencepost.world.line import Line, LinePlace
from fencepost.world.pulse import Pulse
from fencepost.world.seat import Seat, lean_on, let_go, put_away, sweep

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DIES_WITH_A_SPARE = """
import os, signal, sys
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish
from fencepost.world.line import Line, LinePlace
line = Line(sys.argv[1], namespace="default", name="job")
place = finish(LinePlace.joined(BlockingWorld(), line))
if sys.argv[2:] != ["waiting"]:
    finish(place.leave(served=True))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    line = Line(str(tmp_path / "live"), namespace="default", name="job")
    yield line
    put_away(line.folder)


def join(line: Line) -> LinePlace:
    return finish(LinePlace.joined(BlockingWorld(), line))


def leave(place: LinePlace, *, served: bool = True) -> None:
    finish(place.leave(served=served))


def pipes(line: Line) -> set[str]:
    return {entry for entry in os.listdir(line.folder) if entry.endswith(".waiter")}


def kill_one(line: Line, *words: str) -> None:
    program = [sys.executable, "-c", DIES_WITH_A_SPARE, line.folder, *words]
    assert subprocess.run(program, check=False).returncode == -signal.SIGKILL


def test_who_was_served_waits_with_the_same_pipe_again(line: Line) -> None:
    leave(join(line))
    before = pipes(line)
    second = join(line)
    assert pipes(line) == before
    assert len(line.waiters()) == 1
    leave(second)


def test_nobody_stands_in_line_with_a_seat_kept_for_later(line: Line) -> None:
    leave(join(line))
    assert line.waiters() == []


def test_a_call_that_came_too_late_does_not_wake_the_next_wait(line: Line) -> None:
    first, second = join(line), join(line)
    assert finish(first.turn(0)), "nobody was before the first"
    line.wake()  # unheard when the first leaves
    leave(first)
    third = join(line)
    assert not finish(third.turn(0)), "the second stands before it"
    leave(second)
    leave(third)


def test_who_leaves_unserved_calls_the_next(line: Line) -> None:
    first, second = join(line), join(line)
    leave(first, served=False)
    assert finish(second.turn(0))
    leave(second)


def test_the_pipe_of_one_who_could_still_be_handed_something_stays_until_it_is_swept(
    line: Line,
) -> None:
    place = join(line)
    assert place.wish(b"the lease")
    leave(place, served=False)
    (pipe,) = pipes(line)
    sweep(line.folder, keep={pipe})
    assert pipes(line) == {pipe}
    sweep(line.folder, keep=set())
    assert pipes(line) == set()


def test_put_away_leaves_no_pipe(line: Line) -> None:
    places = [join(line) for _ in range(6)]
    for place in places:
        leave(place)
    put_away(line.folder)
    assert pipes(line) == set()


def test_a_pipe_that_somebody_removed_is_made_anew(line: Line) -> None:
    leave(join(line))
    (pipe,) = pipes(line)
    os.unlink(os.path.join(line.folder, pipe))
    place = join(line)
    assert finish(place.turn(0))  # nobody is before us
    line.wake()
    if not finish(place.turn(0)):  # at the removed one: after a nap it has another
        line.wake()
        assert finish(place.turn(0))
    leave(place)


def test_a_waiter_whose_pipe_was_removed_after_a_call_listens_again_and_does_not_spin(
    line: Line,
) -> None:
    place = join(line)
    assert finish(place.turn(1.0))  # first in line: asked at once
    line.wake()
    assert finish(place.turn(1.0))  # called
    (pipe,) = pipes(line)
    os.unlink(os.path.join(line.folder, pipe))
    before = line.waiters()
    assert finish(place.turn(1.0))  # asked once more, for what it could not hear
    assert not finish(place.turn(0.01))  # and then it waits
    assert [ticket for ticket, _ in line.waiters()] == [ticket for ticket, _ in before]
    line.wake()
    assert finish(place.turn(1.0))
    leave(place)


def test_a_waiter_finds_the_new_board_after_the_folder_was_removed(line: Line) -> None:
    place = join(line)
    assert finish(place.turn(0))
    for entry in os.listdir(line.folder):
        os.unlink(os.path.join(line.folder, entry))
    os.rmdir(line.folder)
    board_of(line.folder).look_at = 0.0  # a second later
    assert not finish(place.turn(0.001))
    assert len(line.waiters()) == 1
    line.wake()
    assert finish(place.turn(1.0))
    leave(place)


def test_a_waiter_that_was_taken_out_by_mistake_stands_at_its_old_place_again(line: Line) -> None:
    first, second = join(line), join(line)
    before = line.waiters()
    board = board_of(line.folder)
    assert finish(first.turn(0))
    board.withdraw(before[0][1], before[0][0])
    assert not finish(first.turn(0.001))
    assert line.waiters() == before
    leave(first)
    leave(second)


def test_what_a_killed_process_kept_is_swept(line: Line) -> None:
    kill_one(line)
    assert len(pipes(line)) == 1
    sweep(line.folder, keep=set())
    assert pipes(line) == set()


def test_who_was_killed_in_line_is_taken_out_of_it_by_the_next_call(line: Line) -> None:
    kill_one(line, "waiting")
    place = join(line)
    assert len(line.waiters()) == 2
    line.wake()
    assert len(line.waiters()) == 1
    assert finish(place.turn(0))
    leave(place)


def test_a_forked_child_neither_uses_nor_removes_what_its_parent_keeps(line: Line) -> None:
    leave(join(line))
    waiting = join(line)
    child = os.fork()
    if child == 0:  # pragma: no cover -- another process
        seat_module._put_away_all()
        waiting._leave(False)  # noqa: FBT003
        os._exit(len(seat_module._spares) + len(seat_module._seats))
    assert os.waitpid(child, 0)[1] == 0
    assert len(pipes(line)) == 1
    assert len(line.waiters()) == 1
    leave(waiting)


def test_a_child_that_was_forked_during_a_call_does_not_keep_it_from_being_heard(
    line: Line,
) -> None:
    """Else whoever waits at that pipe would hear no call for as long as the child lives."""
    place = join(line)
    assert finish(place.turn(1.0))  # first in line: asked at once
    called = line.call()
    assert called is not None
    child = os.fork()
    if child == 0:  # pragma: no cover -- another process
        signal.pause()
    called.hang_up()
    heard = [finish(place.turn(1.0)) for _ in range(5)]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    leave(place)
    assert any(heard)


def test_slots_of_the_dead_are_handed_out_again_before_the_board_grows(tmp_path: Path) -> None:
    board, other = Board(str(tmp_path)), Board(str(tmp_path))
    slots = [board.claim(f"{number}", is_dead=lambda _: False) for number in range(63)]
    assert slots == list(range(63))
    assert board.claim("heir", is_dead=lambda pipe: pipe == "7") == 7
    assert board.claim("63", is_dead=lambda _: False) == 63  # the 64th: twice as large now
    board.stand(63, 1, 5)
    assert other.line(1) == [(5, 63)]
    assert other.pipe(63) == "63"


def test_a_wish_is_read_only_as_it_was_written(tmp_path: Path) -> None:
    board = Board(str(tmp_path))
    slot = board.claim("pipe", is_dead=lambda _: False)
    board.stand(slot, 1, 5)
    assert board.read(slot, 5) == b""
    board.write(slot, b"x" * LONGEST_TEXT)
    assert board.read(slot, 5) == b"x" * LONGEST_TEXT
    assert board.read(slot, 6) == b"", "under another ticket it was another's"
    board._bytes[512 + 200] = ord("y")  # torn
    assert board.read(slot, 5) == b""


def grown(folder: str) -> Board:
    """Have another process's board, with more slots than a board has at first."""
    board = Board(folder)
    for number in range(70):
        board.claim(f"{number}", is_dead=lambda _: False)
    return board


def test_a_board_that_grew_elsewhere_and_was_removed_is_an_empty_one(tmp_path: Path) -> None:
    board = Board(str(tmp_path))
    grown(str(tmp_path))
    os.unlink(tmp_path / "line-2")
    assert board.tickets() == []
    assert board.line(1) == []
    board.withdraw(62, 5)  # a slot that we had before is still one


def test_a_board_that_grew_elsewhere_has_a_slot_for_us(tmp_path: Path) -> None:
    board = Board(str(tmp_path))
    grown(str(tmp_path))
    with alarm(5):  # to wait for our own lock would be for ever
        assert board.claim("ours", is_dead=lambda _: False) == 70


def test_a_board_that_cannot_be_mapped_anew_keeps_nobody_from_a_release(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(join(line))
    grown(line.folder)
    full(monkeypatch, Board, "_grown")
    line.wake()
    assert line.waiters() == []


def test_who_was_stopped_while_it_had_the_board_alone_keeps_nobody_waiting_for_ever(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path}/fp.db"
    with Fencepost(url) as fp, Fencepost(url) as other, fp.lock("job"):
        with pytest.raises(LeaseHeld), other.lock("job", wait=0.01):
            pass  # now there is a board
        put_away(f"{tmp_path}/fp.db-live")
        stopped = os.open(tmp_path / "fp.db-live" / "line-2", os.O_RDWR)
        fcntl.flock(stopped, fcntl.LOCK_EX)
        with alarm(10) as waited, pytest.raises(LeaseHeld), other.lock("job", wait=0.01):
            pass
        os.pwrite(stopped, (1000).to_bytes(8, sys.byteorder), 0)  # it has just made it larger
        with alarm(10) as released, fp.lock("another"):
            pass
        assert not waited.is_set()
        assert not released.is_set()
        os.close(stopped)


def test_who_was_stopped_while_it_swept_a_new_pulse_keeps_its_owner_waiting_for_ever_no_more(
    tmp_path: Path,
) -> None:
    first, second = Pulse(str(tmp_path)), Pulse(str(tmp_path))
    name, _ = first.beat("first")
    number = int(name.removeprefix("first-").removesuffix(".pulse"))
    sweeper = os.open(tmp_path / f"second-{number + 1}.pulse", os.O_RDWR | os.O_CREAT)
    fcntl.flock(sweeper, fcntl.LOCK_SH)
    with alarm(10):
        name, inode = second.beat("second")
    assert not first.stopped(name, inode)
    os.close(sweeper)
    for pulse in (first, second):
        pulse.end()


def test_a_folder_that_another_waiter_makes_first_is_as_good(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.path.isdir", lambda _: False)
    os.mkdir(line.folder)
    leave(join(line))


@pytest.mark.parametrize("fault", ["listen", "sit", "mend"])
def test_a_waiter_that_can_have_no_seat_naps_and_sits_down_when_it_can(
    line: Line, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    place = join(line)
    assert finish(place.turn(1.0))  # first in line: asked at once
    if fault != "mend":
        line.wake()
        assert finish(place.turn(1.0))
    if fault != "listen":
        (pipe,) = pipes(line)
        os.unlink(os.path.join(line.folder, pipe))
    with monkeypatch.context() as patch:
        full(patch, Seat, "listen" if fault == "listen" else "_make")
        assert not finish(place.turn(0.01))
        assert not finish(place.turn(0.01))
        assert finish(place.first())
    assert finish(place.turn(0.01)), "what it could not hear, it asks"
    assert not finish(place.turn(0.01))
    assert len(line.waiters()) == 1
    line.wake()
    assert finish(place.turn(1.0))
    leave(place)


def test_who_is_interrupted_when_it_has_what_was_handed_to_it_stands_in_no_line(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = join(line)
    assert place.wish(b"the lease")
    assert place.seat.lock()

    def interrupted(seat: Seat, nonce: str) -> None:
        lean_on(seat, nonce)
        raise KeyboardInterrupt

    monkeypatch.setattr("fencepost.world.line.lean_on", interrupted)
    with pytest.raises(KeyboardInterrupt):
        place.keep(place.seat, "nonce")
    assert line.waiters() == []
    leave(place, served=False)
    let_go("nonce")  # which the keeper gives back
    again = join(line)
    assert len(line.waiters()) == 1
    leave(again)


def test_a_seat_is_not_used_again_while_something_may_lean_on_it(line: Line) -> None:
    place = join(line)
    assert place.wish(b"the lease")
    place.withdraw()
    (pipe,) = pipes(line)
    leave(place, served=False)
    again = join(line)
    assert again.seat.name != pipe
    leave(again)


def full(patch: pytest.MonkeyPatch, owner: type, step: str) -> None:
    """Let a step fail for want of a descriptor."""

    def fails(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    patch.setattr(owner, step, fails)


@contextmanager
def alarm(within: int) -> Iterator[threading.Event]:
    """Fail if it takes longer than so many seconds; what is yielded tells if that was swallowed."""
    rung = threading.Event()

    def late(*_: object) -> None:
        rung.set()
        raise TimeoutError(f"not within {within} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(within)
    try:
        yield rung
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_rubbish_on_the_board_harms_nobody(line: Line) -> None:
    leave(join(line))
    put_away(line.folder)
    with open(os.path.join(line.folder, "line-2"), "r+b") as file:
        file.write(b"\xff\x00" * (8 * 512))
    board_of(line.folder).look_at = 0.0
    assert line.waiters() == []
    line.wake()
    assert isinstance(line.anybody(), bool)
    sweep(line.folder, keep=set())
    with alarm(5):
        leave(join(line))
