"""Waiters stand in line on a board, first come first served; whoever leaves calls the next.

A call is only a hint, and may get lost with a process that dies at the wrong moment: so nobody
sleeps for longer than ``LONGEST_NAP``, and the lease itself is decided elsewhere. Who says on the
board what it wants may find, when it is called, that it has it already.
"""

from __future__ import annotations

import zlib

from fencepost.model.name import base
from fencepost.model.named import NamedTuple
from fencepost.world.board import LONGEST_TEXT, board_of
from fencepost.world.seat import hang_up, lean_on, put_by, reach, take_seat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self

    from fencepost.world.api import World
    from fencepost.world.board import Board
    from fencepost.world.seat import Seat

# A process that dies wakes nobody: those who wait look by themselves this often.
LONGEST_NAP = 0.2


class Called(NamedTuple):
    """The first in line: its pipe, to be closed as soon as it shall hear, and what it wants."""

    fd: int
    wish: bytes
    ticket: int
    slot: int
    board: Board

    def hang_up(self) -> None:
        """Let it hear that it was called."""
        hang_up(self.fd)

    def still_waits(self) -> bool:
        """Say whether it has not withdrawn since we called."""
        return self.board.ticket(self.slot) == self.ticket


class Line:
    """The line for one name, as seen from outside of it."""

    __slots__ = ("folder", "key")

    def __init__(self, folder: str, *, namespace: str, name: str) -> None:
        self.folder = folder
        # Two checksums are enough: a collision only wakes somebody for nothing.
        text = f"{namespace}/{base(name)}".encode()
        self.key = zlib.crc32(text) << 32 | zlib.adler32(text)

    def waiters(self) -> list[tuple[int, int]]:
        """Return ticket and slot of those who wait, the first in line first."""
        try:
            return board_of(self.folder).line(self.key)
        except OSError:
            return []  # somebody removed the folder: the waiters look by themselves

    def anybody(self) -> bool:
        """Say whether somebody waits, perhaps in another line."""
        try:
            return any(board_of(self.folder).tickets())
        except OSError:
            return False

    def anybody_before(self, place: tuple[int, int]) -> bool:
        """Say whether somebody alive stands in line before that ticket and slot."""
        called = self.call(before=place)
        if called is not None:
            called.hang_up()
        return called is not None

    def call(self, *, before: tuple[int, int] | None = None) -> Called | None:
        """Reach the first in line. Those who died there are taken out of it on the way.

        Who has just left, or is another user's, cannot be reached either.
        """
        try:
            board = board_of(self.folder)
            first = board.first(self.key)
            if first is None or (before is not None and first >= before):
                return None
        except OSError:
            return None
        ticket, slot = first
        fd = reach(self.folder, board.pipe(slot))
        if fd is not None and fd >= 0:
            return Called(fd, board.read(slot, ticket), ticket, slot, board)
        if fd == -1:
            board.withdraw(slot, ticket)
        return self._call_later(board, after=first, before=before)

    def _call_later(
        self, board: Board, *, after: tuple[int, int], before: tuple[int, int] | None
    ) -> Called | None:
        """Reach the first in line behind one who cannot be reached."""
        try:
            line = board.line(self.key)
        except OSError:
            return None
        for ticket, slot in line:
            if before is not None and (ticket, slot) >= before:
                return None
            if (ticket, slot) > after:
                fd = reach(self.folder, board.pipe(slot))
                if fd == -1:
                    board.withdraw(slot, ticket)
                elif fd is not None:
                    return Called(fd, board.read(slot, ticket), ticket, slot, board)
        return None

    def wake(self) -> None:
        """Wake the first in line."""
        called = self.call()
        if called is not None:
            called.hang_up()


class LinePlace:
    """One waiter's place in a line."""

    _seat: Seat | None = None

    def __init__(self, world: World, line: Line) -> None:
        self.world, self._line = world, line
        self._ticket = 0
        self._wish = b""  # what others may hand to us
        self._wished = False  # something may lean on our seat, also after we have withdrawn
        self._is_next = False  # found so when we joined

    @classmethod
    async def joined(cls, world: World, line: Line, *more: Any) -> Self:
        """Stand at the end of the line."""
        place = cls(world, line, *more)
        joined = False
        try:
            await world.call(place._join)
            joined = True
        finally:
            if not joined:  # cancelled meanwhile: nobody must wait behind a place without a waiter
                place._leave(False)  # noqa: FBT003
        return place

    @property
    def seat(self) -> Seat:
        """Where we are called."""
        assert self._seat is not None, "nobody asks who has left the line"
        return self._seat

    def wish(self, text: bytes) -> bool:
        """Say what others may hand to us, and where; say whether there was room for it."""
        self._wish, self._wished = text, True
        return self._write_wish()

    async def turn(self, patience: float) -> bool:
        """Wait until we are first or are called, at most ``patience`` seconds; say whether so.

        Who can have no seat, for want of a folder or of descriptors, only naps.
        """
        if self._is_next:
            self._is_next = False
            return True
        seat, nap = self._seat, min(patience, LONGEST_NAP)
        if seat is None or seat.deaf:
            # We came too early, or too late. While we asked we could not hear: so ask once more.
            if self._listen():
                return True
            await self.world.sleep(nap)
            return False
        seat.deaf = await self.world.readable(seat.fd, nap)
        if not seat.deaf:
            self._mend()
        return seat.deaf

    async def first(self) -> bool:
        """Say whether nobody alive stands before us."""
        slot = -1 if self._seat is None else self._seat.slot
        return not await self.world.call(self._line.anybody_before, (self._ticket, slot))

    def withdraw(self) -> None:
        """Have nothing handed to us any more, except by those who are about to do so."""
        self._wish = b""
        if self._seat is not None:
            self._seat.board.withdraw(self._seat.slot, self._ticket)

    def keep(self, seat: Seat, nonce: str) -> None:
        """Leave the line with what was handed to us: our seat is what it leans on."""
        # In this order: a signal may come in between, and then we leave once more.
        seat.board.withdraw(seat.slot, self._ticket)
        lean_on(seat, nonce)
        self._seat = None

    async def leave(self, *, served: bool) -> None:
        """Leave the line. Who leaves without the lease passes on the call it may have got."""
        if self._seat is not None:
            await self.world.call(self._leave, served)

    def _join(self) -> None:
        self._ticket = int(self.world.clocks.boottime() * 1e9)
        self._sit()
        self._is_next = self._line.waiters()[:1] in ([], [(self._ticket, self.seat.slot)])

    def _sit(self) -> None:
        self._seat = seat = take_seat(self._line.folder, nonce=self.world.nonce())
        seat.board.stand(seat.slot, self._line.key, self._ticket)
        if self._wish:
            seat.warned = True  # of what was handed to us at the seat before, only the row knows
            self._write_wish()

    def _write_wish(self) -> bool:
        seat = self.seat
        text = b"%b\n%b\n%b" % (self._wish, seat.name.encode(), seat.inode.encode())
        if len(text) > LONGEST_TEXT:
            self._wish, self._wished = b"", False
            return False
        seat.board.write(seat.slot, text)
        return True

    def _listen(self) -> bool:
        """Hear what is called from now on; say whether we do."""
        try:
            if self._seat is None:
                self._sit()
            else:
                self._seat.listen()
        except FileNotFoundError:  # somebody removed it; to listen to the dead one would be to spin
            return self._move()
        except OSError:
            return False
        return True

    def _move(self) -> bool:
        """Find a new seat, with the old ticket; say whether there was one."""
        seat, self._seat = self._seat, None
        if seat is not None:
            seat.close()
        try:
            self._sit()
        except OSError:
            return False
        return True

    def _mend(self) -> None:
        """Find a new seat if nobody could call us at the one we have."""
        seat = self.seat
        if not (seat.is_fit() and seat.is_there()):
            self._move()
        elif seat.board.ticket(seat.slot) != self._ticket:
            # Somebody took us for the one who died at this slot before us.
            seat.board.stand(seat.slot, self._line.key, self._ticket)

    def _leave(self, served: bool) -> None:  # noqa: FBT001
        seat, self._seat = self._seat, None
        if seat is None or seat.fd < 0:
            return  # never came so far as to have a place, or it is that of a parent process
        seat.board.withdraw(seat.slot, self._ticket)
        if served or not self._wished:
            put_by(seat)
        else:
            # Something may be on its way to us. Whoever finds it must find our pipe too, unlocked:
            # then it is for anybody. The pipe is swept when nothing leans on it.
            seat.close(remove=False)
        if not served:
            self._line.wake()

    def __del__(self) -> None:
        if self._seat is not None:  # a signal came before we could leave
            self._leave(False)  # noqa: FBT003
