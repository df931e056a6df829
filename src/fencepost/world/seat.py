"""A seat is what a waiter is called by: a pipe of its own, a lock on it, and a slot on the board.

Whoever calls opens the pipe for writing and closes it again: the waiter hears the line go dead. A
byte would do as well, but Linux lets the reader of a byte wait for the core of its writer, which
has more to do. A seat is made once and kept for the next wait, for to make a pipe costs more than
all the rest of a wait.

The lock says whether its owner has taken what was handed to it. A lease may lean on the pipe
instead of on a pulse: while nobody has locked it, the lease is for whoever comes. Whoever does
leaves a byte in the pipe before it takes the lease over, for the owner to find.
"""

from __future__ import annotations

import atexit
import errno
import os
import select
import weakref
from contextlib import suppress

from fencepost.world.board import board_of, forget_board
from fencepost.world.pulse import inode_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows has no named pipes either
    fcntl = None

_SUFFIX = ".waiter"
_LISTEN = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | os.O_RDONLY
_CALL = os.O_WRONLY
for _flag in ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK"):
    _CALL |= getattr(os, _flag, 0)
_MOST_SPARES = 4
_MOST_WARNINGS = 4096  # to read at once: more than processes would take over one lease
# All seats of this process, those of them that nobody uses, and those that leases lean on.
_seats: weakref.WeakSet[Seat] = weakref.WeakSet()
_spares: dict[str, list[Seat]] = {}
_leaned_on: dict[str, Seat] = {}
# The pipes of those who are being called: a forked child would else keep the line open.
_calls: set[int] = set()


class Seat:
    """A pipe to listen at, the lock on it, and where the board says so."""

    fd = lock_fd = -1
    slot = -1

    def __init__(self, folder: str, *, nonce: str) -> None:
        if not os.path.isdir(folder):  # not its parents: no database, no line
            with suppress(FileExistsError):  # another waiter was quicker
                os.mkdir(folder)
        self.folder, self.name = folder, nonce + _SUFFIX
        self.deaf = False  # a call was heard, after which the pipe hears nothing more
        self.locked = False
        self.warned = False  # what was handed to us during this wait may have been taken over
        try:
            self._make(os.path.join(folder, self.name))
            self.board = board_of(folder)
            self.slot = self.board.claim(self.name, is_dead=self._is_dead)
        except BaseException:
            self._remove()
            self.drop()
            raise

    def listen(self) -> None:
        """Hear what is called from now on; raise ``FileNotFoundError`` if nobody can call us."""
        fd = os.open(os.path.join(self.folder, self.name), _LISTEN)
        self._read_warnings()  # what stays in the pipe would be heard as a call, for ever
        os.close(self.fd)
        self.fd, self.deaf = fd, False

    def is_fit(self) -> bool:
        """Say whether others can still find and reach us; a call that came too late is dropped."""
        try:
            if self.board is not board_of(self.folder) or self.board.pipe(self.slot) != self.name:
                return False
            if self.deaf or self._heard():
                self.listen()
        except OSError:
            return False
        return True

    def is_there(self) -> bool:
        """Say whether the pipe is still where others look for it."""
        return os.path.exists(os.path.join(self.folder, self.name))

    def lock_unwarned(self) -> bool:
        """Take what was handed to us, and say whether surely nobody took it over before.

        In doubt it is locked or not, and no.
        """
        try:
            fcntl.flock(self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.locked = True
            if not self.warned:
                self.warned = os.read(self.fd, _MOST_WARNINGS) != b""
        except OSError:  # somebody looks whether we live, or calls us
            return False
        return not self.warned

    def lock(self) -> bool:
        """Take what was handed to us. No if somebody is just looking whether we did."""
        try:
            fcntl.flock(self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        self.locked = True
        return True

    def unlock(self) -> None:
        """Let go of it."""
        if self.locked:
            self.locked = False
            fcntl.flock(self.lock_fd, fcntl.LOCK_UN)

    def drop(self) -> None:
        """Close this process's copies: all that a forked child has to do with them."""
        for fd in (self.fd, self.lock_fd):
            if fd >= 0:
                os.close(fd)
        self.fd = self.lock_fd = -1
        self.locked = False
        _seats.discard(self)

    def close(self, *, remove: bool = True) -> None:
        """Have no seat any more."""
        if self.fd < 0:
            return
        if self.slot >= 0:
            self.board.free(self.slot, self.name)
        if remove:
            self._remove()
        self.drop()

    def __del__(self) -> None:
        self.close(remove=False)  # a signal came before anybody could put it by: it is swept

    def _make(self, path: str) -> None:
        # A pipe that nobody reads yet would be taken for a dead waiter's: so it gets its real
        # name only after it was opened.
        os.mkfifo(path + "-new", 0o666)
        _seats.add(self)
        self.fd = os.open(path + "-new", _LISTEN)
        self.lock_fd = os.open(path + "-new", _LISTEN)
        os.rename(path + "-new", path)
        self.inode = inode_of(os.fstat(self.fd))

    def _read_warnings(self) -> None:
        try:
            if os.read(self.fd, _MOST_WARNINGS):
                self.warned = True
        except BlockingIOError:
            return  # somebody has it open for writing, and wrote nothing

    def _remove(self) -> None:
        for suffix in ("", "-new"):
            _remove(os.path.join(self.folder, self.name + suffix))

    def _heard(self) -> bool:
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(0))

    def _is_dead(self, name: str) -> bool:
        return reach(self.folder, name, then_close=True) == -1


def take_seat(folder: str, *, nonce: str) -> Seat:
    """Return a seat that was put by, or a new one."""
    spares = _spares.get(folder)
    while spares:
        seat = spares.pop()
        if seat.is_fit():
            seat.warned = False  # that was about an earlier wait
            return seat
        seat.close()
    return Seat(folder, nonce=nonce)


def has_spare(folder: str) -> bool:
    """Say whether there is a seat for the next who waits."""
    return bool(_spares.get(folder))


def put_by(seat: Seat) -> None:
    """Keep a seat for a later wait, unless there are plenty, or it was closed meanwhile."""
    if seat.fd < 0:
        return
    seat.unlock()
    spares = _spares.setdefault(seat.folder, [])
    if len(spares) < _MOST_SPARES:
        spares.append(seat)
    else:
        seat.close()


def lean_on(seat: Seat, nonce: str) -> None:
    """Keep a seat locked for the lease that this nonce was handed."""
    _leaned_on[nonce] = seat


def let_go(nonce: str) -> None:
    """Put the seat by that this nonce's lease leaned on, if it did."""
    if _leaned_on:
        seat = _leaned_on.pop(nonce, None)
        if seat is not None:
            put_by(seat)


def put_away(folder: str) -> None:
    """Remove the pipes of this process that nobody waits at."""
    for seat in _spares.pop(folder, []):
        seat.close()
    if all(seat.folder != folder for seat in _seats):
        forget_board(folder)


def reach(folder: str, name: str, *, then_close: bool = False) -> int | None:
    """Open the pipe of a waiter; -1 if it is dead, None if we may not or it is another kind."""
    try:
        fd = os.open(f"{folder}/{name}", _CALL)
    except OSError as error:
        return -1 if error.errno in (errno.ENXIO, errno.ENOENT) else None
    _calls.add(fd)
    if then_close:
        hang_up(fd)
    return fd


def hang_up(fd: int) -> None:
    """Close the pipe of one who was reached, which hears that."""
    _calls.discard(fd)  # first: from then on the number may be another file's
    os.close(fd)


def sweep(folder: str, *, keep: set[str]) -> None:
    """Remove the pipes of dead processes, but for those that leases still lean on.

    Pipes at which somebody waits are left alone: to try them would be to call their owners.
    """
    try:
        board = board_of(folder)
        tickets = board.tickets()
    except OSError:
        return  # not ours to use, or no room: then nobody here stands in line either
    waited_at = {board.pipe(slot) for slot, ticket in enumerate(tickets) if ticket}
    for entry in os.listdir(folder):
        unused = entry.endswith(_SUFFIX) and entry not in keep and entry not in waited_at
        if unused and reach(folder, entry, then_close=True) == -1:
            _remove(os.path.join(folder, entry))


def can_queue() -> bool:
    """Say whether this system has named pipes."""
    return hasattr(os, "mkfifo") and fcntl is not None


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return  # somebody was quicker, or it is another user's


def _put_away_all() -> None:
    for folder in list(_spares):
        put_away(folder)
    for seat in list(_seats):
        seat.fd = seat.lock_fd = -1  # the kernel closes what leases lean on, and nobody earlier


def _drop_all() -> None:
    """Keep nobody's seat in a forked child: a pipe that is read looks like a living waiter.

    Nor one that is open for writing: its owner hears a call only when all have hung up.
    """
    for seat in list(_seats):
        seat.drop()
    _spares.clear()
    _leaned_on.clear()
    while _calls:
        os.close(_calls.pop())


atexit.register(_put_away_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_all)
