"""What the board says was handed over is believed only if the row must say the same."""

from __future__ import annotations

import os
import select
import signal
from typing import TYPE_CHECKING

import pytest
from faultlab import SteppedClocks, until
from partylab import Other, Party, after, before

from fencepost.errors import LeaseHeld
from fencepost.stores.sqlite import SqliteStore
from fencepost.stores.sqlite_handover import HandOver
from fencepost.world import pulse
from fencepost.world.board import Board, board_of
from fencepost.world.flow import finish
from fencepost.world.line import Called
from fencepost.world.pulse import Pulse
from fencepost.world.seat import Seat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fencepost.world.api import Clocks

STOP, KILL = signal.SIGSTOP, signal.SIGKILL


@pytest.fixture
def party(tmp_path: Path) -> Iterator[Callable[..., Party]]:
    parties: list[Party] = []

    def make(nonce: str, *, clocks: Clocks | None = None) -> Party:
        parties.append(Party(tmp_path, nonce, clocks=clocks))
        return parties[-1]

    yield make
    for one in parties:
        one.close()


def asked(one: Party) -> int | None:
    try:
        return one.acquire()
    except LeaseHeld:
        return None


def in_line(folder: Path) -> bool:
    return any(board_of(str(folder / "leases.db-live")).tickets())


# Whoever is handed the lease stops or dies at any step: it has it, or else whoever asks.

TAKING = {
    "before it locks": (before, Seat, "lock_unwarned"),
    "before it looks for warnings": (before, os, "read"),
    "before it reads the board": (before, Board, "handed"),
    "when it has it": (after, HandOver, "take_told"),
}


@pytest.mark.parametrize("what", [STOP, KILL])
@pytest.mark.parametrize("step", TAKING)
def test_one_of_the_taker_and_the_next_has_the_lease(
    party: Callable[..., Party], tmp_path: Path, step: str, what: int
) -> None:
    def take() -> bool:
        one = Party(tmp_path, "taker")
        one.join()
        when, owner, name = TAKING[step]
        when(owner, name, what)
        return one.accept() is not None or asked(one) is not None

    first, third = party("a"), party("c")
    token = first.acquire()
    taker = Other(take, ready=lambda: in_line(tmp_path))
    until(lambda: board_of(first.store._folder).read(0, board_of(first.store._folder).ticket(0)))
    first.release(token)
    assert taker.comes_to_it() == what
    got = asked(third)
    if what == KILL:
        assert got is not None
        assert got > token
    else:
        assert taker.goes_on() is (got is None)
        assert (got is not None) is (step == "before it locks")


# Whoever takes over stops or dies at any step: it has it, or else the one that it was handed to.

TAKING_OVER = {
    "before it looks": (before, Pulse, "claim"),
    "when it has the proof": (after, Pulse, "proof"),
    "when it has warned": (after, pulse, "_warned"),
    "before it is granted": (before, SqliteStore, "_grant"),
    "when it was granted": (after, SqliteStore, "_grant"),
}


@pytest.mark.parametrize("what", [STOP, KILL])
@pytest.mark.parametrize("step", TAKING_OVER)
def test_one_of_the_heir_and_who_takes_over_has_the_lease(
    party: Callable[..., Party], tmp_path: Path, step: str, what: int
) -> None:
    first, second = party("a"), party("b")
    token = first.acquire()
    second.join()
    first.release(token)

    def take_over() -> bool:
        when, owner, name = TAKING_OVER[step]
        when(owner, name, what)
        return asked(Party(tmp_path, "other")) is not None

    other = Other(take_over, ready=lambda: True)
    assert other.comes_to_it() == what
    got = second.accept()
    if got is None and what == STOP:
        got = asked(second)
    done = step == "when it was granted"
    assert (got is None) is done
    if what == STOP:
        assert other.goes_on() is done
    elif done:
        assert second.acquire() > token, "the one who took over is dead"


# Whoever hands over dies at any step.


def half_said(board: Board, slot: int, _ticket: int, token: int, _expires_us: int) -> None:
    board._words[(slot + 1) * 64 + 11] = token
    os.kill(os.getpid(), KILL)


HANDING = {
    "before the commit": (Called, "still_waits"),
    "before it is said": (Board, "hand"),
    "before the call": (Called, "hang_up"),
}


@pytest.mark.parametrize("step", [*HANDING, "when half of it is said"])
def test_what_somebody_died_handing_over_is_had_at_once(
    party: Callable[..., Party], tmp_path: Path, step: str
) -> None:
    second = party("b")
    held = tmp_path / "held"

    def hand_over() -> bool:
        one = Party(tmp_path, "dies")
        token = one.acquire()
        held.write_text(str(token))
        until(lambda: in_line(tmp_path))
        until(lambda: board_of(one.store._folder).read(0, board_of(one.store._folder).ticket(0)))
        if step in HANDING:
            before(*HANDING[step], KILL)
        else:
            pytest.MonkeyPatch().setattr(Board, "hand", half_said)
        one.release(token)
        return False

    other = Other(hand_over, ready=held.exists)
    second.join()
    assert other.comes_to_it() == KILL
    got = second.accept() or asked(second)
    assert got is not None
    assert got > int(held.read_text() or 0)


# And what else may be on the board, or in the pipe.


def test_what_was_broken_before_it_was_taken_is_not_taken(party: Callable[..., Party]) -> None:
    first, second = party("a"), party("b")
    token = first.acquire()
    second.join()
    first.release(token)
    view = finish(first.store.peek("x"))
    assert view is not None
    finish(first.store.break_("x", token=view.token, reason="a drill", operator="me"))
    assert second.accept() is None


def test_what_has_run_out_is_not_taken(party: Callable[..., Party]) -> None:
    clocks = SteppedClocks()
    first, second = party("a", clocks=clocks), party("b", clocks=clocks)
    token = first.acquire()
    second.join()
    first.release(token)
    clocks.boot_offset += 20.1
    assert second.accept() is None


def test_what_is_said_too_late_is_not_said_to_the_next_wait(
    party: Callable[..., Party], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = party("a"), party("b"), party("c")
    token = first.acquire()
    place = second.join()
    held_back: list[tuple[int, ...]] = []
    with monkeypatch.context() as patch:
        patch.setattr(Board, "hand", lambda _, *words: held_back.append(words))
        first.release(token)
    board = place.seat.board
    second.release(second.accept() or 0)
    later = third.acquire()
    again = second.join()
    assert again.seat.slot == held_back[0][0], "the same seat"
    board.hand(*held_back[0])
    again.seat.deaf = True
    assert finish(again.accept()) is None
    third.release(later)


def test_a_torn_word_on_the_board_sends_the_heir_to_the_row(party: Callable[..., Party]) -> None:
    first, second = party("a"), party("b")
    token = first.acquire()
    place = second.join()
    first.release(token)
    board, slot = place.seat.board, place.seat.slot
    said, ends = board.handed(slot, place._ticket)
    assert said > token
    board._words[(slot + 1) * 64 + 11] = said + 1
    assert board.handed(slot, place._ticket) == (0, 0)
    assert board.handed(slot, place._ticket + 1) == (0, 0)
    second.trace()
    assert second.accept() == said
    assert second.verbs() == ["SELECT"]
    assert ends


def test_who_was_warned_listens_again_and_does_not_spin(party: Callable[..., Party]) -> None:
    first, second, third, fourth = (party(nonce) for nonce in "abcd")
    token = first.acquire()
    place = second.join()
    first.release(token)
    third.acquire()  # takes over
    os.close(third.store._pulse.claim(place.seat.name, place.seat.inode) or 0)  # and once more
    assert second.accept() is None
    assert finish(place.turn(0)), "asked once more, for what it could not hear"
    assert not finish(place.turn(0.01))
    with pytest.raises(LeaseHeld):
        fourth.acquire()


def test_a_warning_is_forgotten_with_the_wait_that_it_was_for(
    party: Callable[..., Party],
) -> None:
    first, second, third = party("a"), party("b"), party("c")
    token = first.acquire()
    place = second.join()
    first.release(token)
    later = third.acquire()
    assert second.accept() is None
    pipe = place.seat
    place.withdraw()
    finish(place.leave(served=True))  # so that its seat is kept
    place = second.join()
    assert place.seat is pipe
    assert not place.seat.warned
    third.release(later)
    second.trace()
    assert second.accept() is not None
    assert second.verbs() == []


def test_who_got_another_seat_does_not_believe_what_was_said_at_the_first(
    party: Callable[..., Party],
) -> None:
    first, second, third = party("a"), party("b"), party("c")
    token = first.acquire()
    place = second.join()
    first.release(token)
    third.acquire()  # takes over, and warns at the first seat
    former = place.seat
    os.unlink(os.path.join(former.folder, former.name))
    place._mend()
    assert place.seat is not former
    assert place.seat.slot == former.slot
    assert place.seat.board.handed(former.slot, place._ticket)[0] > token
    place.seat.deaf = True
    assert finish(place.accept()) is None


def test_who_cannot_warn_the_heir_does_not_take_over(
    party: Callable[..., Party], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = party("a"), party("b"), party("c")
    token = first.acquire()
    second.join()
    first.release(token)
    monkeypatch.setattr(pulse, "_WARN", os.O_WRONLY | os.O_DIRECTORY)  # as if it were another's
    with pytest.raises(LeaseHeld):
        third.acquire()
    assert second.accept() is not None


def test_a_pipe_that_is_full_of_warnings_is_warned(
    party: Callable[..., Party], tmp_path: Path
) -> None:
    first, second, third = party("a"), party("b"), party("c")
    token = first.acquire()
    place = second.join()
    first.release(token)
    path = tmp_path / "leases.db-live" / place.seat.name
    writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    while select.select([], [writer], [], 0)[1]:
        os.write(writer, b"!" * 4096)
    os.close(writer)
    assert third.acquire() > token
    assert second.accept() is None
