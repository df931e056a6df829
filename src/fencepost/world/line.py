"""Waiters stand in line in a folder, first come first served; whoever leaves wakes the next.

Each waiter has a named pipe whose name begins with the line and the instant it joined, and reads
from it. Whoever wakes the first opens that pipe for writing and closes it again: the reader hears
the line go dead. A byte would do as well, but Linux lets the reader of a byte wait for the core of
its writer, which has more to do. Waking is only a hint, and may get lost with a process that dies
at the wrong moment: so nobody sleeps for longer than ``LONGEST_NAP``, and the lease itself is
decided elsewhere.
"""

from __future__ import annotations

import atexit
import errno
import os
import time
import weakref
from functools import cached_property

from fencepost.model.name import base

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.world.api import World

_SUFFIX = ".waiter"
# A process that dies wakes nobody: those who wait look by themselves this often.
LONGEST_NAP = 0.2
_standing: weakref.WeakSet[LinePlace] = weakref.WeakSet()
# To make a pipe costs more than all the rest of a wait: a few are kept open for later, by folder.
_spares: dict[str, list[tuple[int, str]]] = {}
_SPARE, _MOST_SPARES = ".spare", 4
# When a folder in which nobody waited was last changed, as the file system has it.
_deserted: dict[str, int] = {}
_LONGEST_TICK_NS = 50_000_000


class Line:
    """The line for one name, as seen from outside of it."""

    def __init__(self, folder: str, *, namespace: str, name: str) -> None:
        self.folder, self._namespace, self._name = folder, namespace, name

    @cached_property
    def key(self) -> str:
        """How the names of all pipes in this line begin."""
        return _key(self._namespace, base(self._name))

    def waiters(self) -> list[str]:
        """Return the pipes of those who wait, the first in line first."""
        waiting = _waiting_in(self.folder)
        return sorted(entry for entry in waiting if entry.startswith(self.key))

    def anybody_before(self, name: str) -> bool:
        """Say whether somebody alive stands in line before the pipe ``name``."""
        for entry in self.waiters():
            if entry >= name:
                return False
            fd = self._reach(entry)
            if fd is not None:
                os.close(fd)
                return True
        return False

    def wake(self) -> None:
        """Wake the first in line. Those who died there are removed on the way."""
        for entry in self.waiters():
            fd = self._reach(entry)
            if fd is not None:
                os.close(fd)
                return

    def sweep(self) -> None:
        """Remove the pipes that dead processes had kept for later."""
        for entry in os.listdir(self.folder):
            if entry.endswith(_SPARE) and (fd := self._reach(entry)) is not None:
                os.close(fd)

    def _reach(self, entry: str) -> int | None:
        """Open the pipe of a waiter; None if it is dead, has just left, or is another user's."""
        path = os.path.join(self.folder, entry)
        try:
            return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nobody reads: its process is dead
                _remove(path)
            return None


class LinePlace:
    """One waiter's place in a line."""

    _fd = -1

    def __init__(self, world: World, line: Line) -> None:
        self._world, self._line = world, line
        self._name = self._spare = ""
        self._is_next = False  # told so when we joined
        self._heard = False  # a hint, after which the pipe must be opened anew

    @classmethod
    async def joined(cls, world: World, line: Line) -> LinePlace:
        """Stand at the end of the line."""
        place = cls(world, line)
        joined = False
        try:
            await world.call(place._join)
            joined = True
        finally:
            if not joined:  # cancelled meanwhile: nobody must wait behind a place without a waiter
                place._leave(False)  # noqa: FBT003
        return place

    async def turn(self, patience: float) -> bool:
        """Wait until we are first or are woken, at most ``patience`` seconds; say whether so."""
        if self._is_next:
            self._is_next = False
            return True
        if self._heard:
            # We came too early, or too late. While we asked we could not hear: so ask once more.
            self._heard = False
            self._listen(os.path.join(self._line.folder, self._name))
            return True
        self._heard = await self._world.readable(self._fd, min(patience, LONGEST_NAP))
        return self._heard

    async def first(self) -> bool:
        """Say whether nobody alive stands before us."""
        return not await self._world.call(self._line.anybody_before, self._name)

    async def leave(self, *, served: bool) -> None:
        """Leave the line. Who leaves without the lease passes on the wake-up it may have got."""
        await self._world.call(self._leave, served)

    def _join(self) -> None:
        ticket = int(self._world.clocks.boottime() * 1e9)
        self._name = f"{self._line.key}{ticket:020d}-{self._world.nonce()}{_SUFFIX}"
        path = os.path.join(self._line.folder, self._name)
        if not self._reuse(path):
            self._make(path)
        self._is_next = self._line.waiters()[:1] in ([], [self._name])

    def _listen(self, path: str) -> None:
        """Open the pipe anew: who heard it go dead hears nothing more, and others must reach us."""
        dead = self._fd
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:  # somebody removed it; to listen to the dead one would be to spin
            self._make(path)
        os.close(dead)

    def _reuse(self, path: str) -> bool:
        """Stand in line with the pipe of an earlier wait; say whether there was one."""
        spares = _spares.get(self._line.folder)
        while spares:
            self._fd, self._spare = spares.pop()
            _standing.add(self)
            try:
                os.rename(self._spare, path)
            except FileNotFoundError:
                self.drop()  # somebody removed it
            else:
                self._listen(path)  # and not for hints that came too late for an earlier wait
                return True
        return False

    def _make(self, path: str) -> None:
        """Stand in line with a new pipe."""
        if not os.path.isdir(self._line.folder):  # not its parents: no database, no line
            os.mkdir(self._line.folder)
        self._line.sweep()
        self._spare = path.removesuffix(_SUFFIX) + _SPARE
        # A pipe that nobody reads yet would be taken for a dead waiter's: so it gets its real
        # name only after it was opened.
        os.mkfifo(path + "-new", 0o666)
        self._fd = os.open(path + "-new", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        _standing.add(self)
        os.rename(path + "-new", path)

    def _leave(self, served: bool) -> None:  # noqa: FBT001
        if not self._name:
            return  # never came so far as to have a place
        path = os.path.join(self._line.folder, self._name)
        if served and self._put_by(path):
            return
        _remove(path)
        _remove(path + "-new")
        self.drop()
        if not served:
            self._line.wake()

    def _put_by(self, path: str) -> bool:
        """Keep the pipe for a later wait, unless there are plenty; say whether it was kept."""
        spares = _spares.setdefault(self._line.folder, [])
        if self._fd < 0 or len(spares) >= _MOST_SPARES:
            return False
        try:
            os.rename(path, self._spare)
        except OSError:
            return False
        spares.append((self._fd, self._spare))
        self._fd = -1
        _standing.discard(self)
        return True

    def drop(self) -> None:
        """Close this process's copy of the pipe: all that a forked child has to do with it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            _standing.discard(self)

    def __del__(self) -> None:
        if self._fd >= 0:  # a signal came between joining and leaving
            self._leave(False)  # noqa: FBT003


def put_away(folder: str) -> None:
    """Remove the pipes of this process that nobody waits at."""
    for fd, path in _spares.pop(folder, []):
        _remove(path)
        os.close(fd)


def _put_away_all() -> None:
    for folder in list(_spares):
        put_away(folder)


def _drop_all() -> None:
    """Keep nobody's place in a forked child: a pipe that is read looks like a living waiter."""
    for place in list(_standing):
        place.drop()
    while _spares:
        for fd, _ in _spares.popitem()[1]:
            os.close(fd)


atexit.register(_put_away_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_all)


def can_queue() -> bool:
    """Say whether this system has named pipes."""
    return hasattr(os, "mkfifo")


def _waiting_in(folder: str) -> list[str]:
    """Return all pipes at which somebody waits, in any line; by one look if nothing has changed."""
    try:
        changed = os.stat(folder).st_mtime_ns
        if _deserted.get(folder) == changed:
            return []
        waiting = [entry for entry in os.listdir(folder) if entry.endswith(_SUFFIX)]
    except OSError:
        return []  # somebody removed the folder: the waiters look by themselves
    # A change in the same tick of the kernel's clock would leave the same mark: so only a mark
    # that is older than any tick is remembered.
    if not waiting and time.time_ns() - changed > _LONGEST_TICK_NS:
        _deserted[folder] = changed
    return waiting


def _key(namespace: str, name: str) -> str:
    import zlib  # two checksums are enough: a collision only wakes somebody for nothing

    text = f"{namespace}/{name}".encode()
    return f"{zlib.crc32(text):08x}{zlib.adler32(text):08x}-"


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return  # whoever woke us last was quicker, or it is another user's
