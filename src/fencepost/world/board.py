"""The board is a small file that all processes map, on which every waiter has a slot of its own.

Only its owner says there what it wants, so nothing here needs a lock but handing out the slots;
whoever hands it a lease says so beside it. A ticket, the instant from which its owner waits, is
one aligned word; what else a slot says carries a checksum, and what was read while it was being
written counts as not written. The board is an aid: whoever is not found there looks by itself.
"""

from __future__ import annotations

import mmap
import os
from contextlib import contextmanager
from time import monotonic, sleep
from zlib import crc32

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows has no named pipes either: there nobody stands in line
    fcntl = None

_FILE = "line-2"  # the number of the layout: processes with another one have a board of their own
# In bytes. A slot: its line and its ticket, a word each; the pipe of its owner; a checksum and a
# length; what was handed to the owner, in four words; what it wants. In the room of a first slot
# stands how many slots were ever handed out.
_SLOT = 512
_PIPE, _MARK, _HANDED, _TEXT = 16, 80, 88, 120
_COUNT = 0  # in words
_WORDS = _SLOT // 8
_FIRST_SIZE = 64 * _SLOT
LONGEST_TEXT = _SLOT - _TEXT
# How long to go without looking whether somebody removed the file.
_TRUSTED = 1.0
# How long to wait for whoever has the file alone, which takes a moment: it may have been stopped.
_PATIENCE = 0.5
_boards: dict[str, Board] = {}


class Board:
    """The board of one folder, as this process has it mapped."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._path = os.path.join(folder, _FILE)
        self.look_at = 0.0
        with self._alone() as fd:
            self._map(fd, least=_FIRST_SIZE)

    def tickets(self) -> list[int]:
        """Return the ticket of each slot, in their order; 0 where nobody waits."""
        count = self._words[_COUNT]
        if count > self._capacity:
            count = self._grown()
        return self._words[_WORDS + 1 : _WORDS * (count + 1) : _WORDS].tolist()

    def line(self, key: int) -> list[tuple[int, int]]:
        """Return ticket and slot of everybody in the line ``key``, the first in line first."""
        count = self._words[_COUNT]
        if count > self._capacity:
            count = self._grown()
        words, end, slots = self._words, _WORDS * (count + 1), range(count)
        keys = words[_WORDS:end:_WORDS].tolist()
        if key not in keys:
            return []
        tickets = words[_WORDS + 1 : end : _WORDS].tolist()
        return sorted([(tickets[n], n) for n in slots if keys[n] == key and tickets[n]])

    def first(self, key: int) -> tuple[int, int] | None:
        """Return ticket and slot of the first in the line ``key``, if anybody is."""
        count = self._words[_COUNT]
        if count > self._capacity:
            count = self._grown()
        words, end, found = self._words, _WORDS * (count + 1), None
        keys = words[_WORDS:end:_WORDS].tolist()
        if key in keys:
            tickets = words[_WORDS + 1 : end : _WORDS].tolist()
            for slot, ticket in enumerate(tickets):
                # Of two with one ticket the lower slot goes first, as everywhere.
                if ticket and keys[slot] == key and (found is None or ticket < found[0]):
                    found = ticket, slot
        return found

    def stand(self, slot: int, key: int, ticket: int) -> None:
        """Wait at a slot from the instant ``ticket`` on."""
        self._words[(slot + 1) * _WORDS] = key
        self._words[(slot + 1) * _WORDS + 1] = ticket

    def withdraw(self, slot: int, ticket: int) -> None:
        """Wait no longer; of use to others only if ``ticket`` is still what the slot says."""
        word = (slot + 1) * _WORDS + 1
        if ticket and self._words[word] == ticket:
            self._words[word] = 0

    def ticket(self, slot: int) -> int:
        """Return the ticket of one slot."""
        return self._words[(slot + 1) * _WORDS + 1]

    def write(self, slot: int, text: bytes) -> None:
        """Say what is wanted at a slot, under the ticket it has."""
        start = (slot + 1) * _SLOT
        self._bytes[start + _TEXT : start + _TEXT + len(text)] = text
        mark = crc32(text, self.ticket(slot) & 0xFFFFFFFF)
        self._words[(start + _MARK) // 8] = mark << 16 | len(text)

    def read(self, slot: int, ticket: int) -> bytes:
        """Return what is wanted at a slot under that ticket; nothing if that cannot be trusted."""
        start = (slot + 1) * _SLOT
        mark = self._words[(start + _MARK) // 8]
        length = min(mark & 0xFFFF, LONGEST_TEXT)
        text = bytes(self._bytes[start + _TEXT : start + _TEXT + length])
        return text if mark >> 16 == crc32(text, ticket & 0xFFFFFFFF) else b""

    def hand(self, slot: int, ticket: int, token: int, expires_us: int) -> None:
        """Tell the owner of a slot what it was handed while it had that ticket."""
        words, first = self._words, ((slot + 1) * _SLOT + _HANDED) // 8
        words[first], words[first + 1], words[first + 2] = token, expires_us, ticket
        words[first + 3] = token ^ expires_us ^ ticket

    def handed(self, slot: int, ticket: int) -> tuple[int, int]:
        """Return the token that was handed to a slot under that ticket, and its end; else zeros.

        Of two hands to one ticket no mixture is believed: each word is stored at once.
        """
        first = ((slot + 1) * _SLOT + _HANDED) // 8
        token, expires_us, meant, check = self._words[first : first + 4].tolist()
        if meant == ticket and check == token ^ expires_us ^ meant:
            return token, expires_us
        return 0, 0

    def pipe(self, slot: int) -> str:
        """Return the name of the pipe at which the owner of a slot listens."""
        start = (slot + 1) * _SLOT + _PIPE
        name = str(self._bytes[start : start + _MARK - _PIPE], "ascii", "replace")
        return name.partition("\0")[0]

    def claim(self, pipe: str, *, is_dead: Callable[[str], bool]) -> int:
        """Have a slot of one's own: a free one, else a dead process's, else a new one."""
        with self._alone() as fd:
            if self._words[_COUNT] > self._capacity:
                self._map(fd, least=self._size)  # not _grown, which would wait for our own lock
            slots = range(min(self._words[_COUNT], self._capacity))
            slot = next((slot for slot in slots if not self.pipe(slot)), len(slots))
            if slot >= self._capacity:
                slot = next((slot for slot in slots if is_dead(self.pipe(slot))), slot)
            if slot >= self._capacity:
                self._map(fd, least=2 * self._size)
            self._words[(slot + 1) * _WORDS + 1] = 0
            self._name(slot, pipe)
            self._words[_COUNT] = max(len(slots), slot + 1)
            return slot

    def free(self, slot: int, pipe: str) -> None:
        """Give a slot back, if it still is that of ``pipe``."""
        if self.pipe(slot) == pipe:
            self._words[(slot + 1) * _WORDS + 1] = 0
            self._name(slot, "")

    def is_stale(self) -> bool:
        """Say whether others have another board by now. To be asked from ``look_at`` on."""
        self.look_at = monotonic() + _TRUSTED
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return True
        return (status.st_dev, status.st_ino) != self._identity

    def _grown(self) -> int:
        """Map the file that others have made larger; return how many of its slots are in use."""
        with self._alone() as fd:
            self._map(fd, least=self._size)  # perhaps it was removed, and is a new one
        return min(self._words[_COUNT], self._capacity)

    @property
    def _size(self) -> int:
        return (self._capacity + 1) * _SLOT

    def _name(self, slot: int, pipe: str) -> None:
        start = (slot + 1) * _SLOT + _PIPE
        self._bytes[start : start + _MARK - _PIPE] = pipe.encode("ascii").ljust(
            _MARK - _PIPE, b"\0"
        )

    @contextmanager
    def _alone(self) -> Iterator[int]:
        """Open the file, and keep others from handing out slots or making it larger meanwhile.

        Raises ``BlockingIOError`` if somebody else does not let go of it.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._path, flags, 0o666)
        try:
            _lock(fd)
            yield fd
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a mapping keeps a copy of what we close here
            os.close(fd)

    def _map(self, fd: int, *, least: int) -> None:
        """Map the whole file, after it was made at least so large."""
        if os.fstat(fd).st_size < least:
            _enlarge(fd, least, like=self.folder)
        status = os.fstat(fd)
        mapped = memoryview(mmap.mmap(fd, status.st_size))
        self._identity = status.st_dev, status.st_ino
        self._bytes, self._words = mapped, mapped.cast("Q")
        self._capacity = status.st_size // _SLOT - 1


def board_of(folder: str) -> Board:
    """Return the board of a folder, which is made if there is none."""
    board = _boards.get(folder)
    if board is None or (monotonic() >= board.look_at and board.is_stale()):
        board = _boards[folder] = Board(folder)
    return board


def forget_board(folder: str) -> None:
    """Let go of the board of a folder that nobody here uses any more."""
    _boards.pop(folder, None)


def _lock(fd: int) -> None:
    give_up = monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if monotonic() >= give_up:
                raise
            sleep(0.001)
        else:
            return


def _enlarge(fd: int, least: int, *, like: str) -> None:
    """Make the file as large as that, and usable by all who may write to its folder.

    Written, not only stretched: to touch a mapped page for which the disk has no room is deadly.
    """
    while (size := os.fstat(fd).st_size) < least:
        os.pwrite(fd, bytes(least - size), size)
    folder = os.stat(like)
    try:
        os.fchmod(fd, folder.st_mode & 0o666)
        if os.geteuid() == 0:
            os.fchown(fd, folder.st_uid, folder.st_gid)
    except PermissionError:
        return  # another user's, who has seen to it
