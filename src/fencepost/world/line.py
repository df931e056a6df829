"""Waiters stand in line in a folder, first come first served; whoever leaves wakes the next.

Each waiter has a named pipe whose name begins with the line and the instant it joined. Waking is
one byte into the pipe of whoever is first. It is only a hint, and may get lost with a process that
dies at the wrong moment: so nobody sleeps on it for longer than ``LONGEST_NAP``, and the lease
itself is decided elsewhere.
"""

from __future__ import annotations

import os

from fencepost.model.name import base

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.world.api import World

_SUFFIX = ".waiter"
# A process that dies wakes nobody: those who wait look by themselves this often.
LONGEST_NAP = 0.2


class Line:
    """The line for one name, as seen from outside of it."""

    def __init__(self, folder: str, *, namespace: str, name: str) -> None:
        self.folder = folder
        self.key = _key(namespace, base(name))

    def waiters(self) -> list[str]:
        """Return the pipes of those who wait, the first in line first."""
        return sorted(
            entry
            for entry in os.listdir(self.folder)
            if entry.startswith(self.key) and entry.endswith(_SUFFIX)
        )

    def wake(self) -> None:
        """Wake the first in line. Those who died there are removed on the way."""
        for entry in self.waiters():
            path = os.path.join(self.folder, entry)
            try:
                fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # it has just left
            except OSError:  # nobody reads: its process is dead
                _remove(path)
                continue
            try:
                os.write(fd, b".")
            except OSError:
                continue  # full of hints already, or gone between the two calls
            finally:
                os.close(fd)
            return


class LinePlace:
    """One waiter's place in a line."""

    def __init__(self, world: World, line: Line) -> None:
        self._world, self._line = world, line
        self._fd = -1
        self._name = ""

    @classmethod
    async def joined(cls, world: World, line: Line) -> LinePlace:
        """Stand at the end of the line."""
        place = cls(world, line)
        await world.call(place._join)
        return place

    async def turn(self, patience: float) -> bool:
        """Wait until we are first or are woken, at most ``patience`` seconds; say whether so."""
        woken = await self._world.readable(self._fd, min(patience, LONGEST_NAP))
        if woken:
            os.read(self._fd, 64)
        return woken

    async def leave(self, *, served: bool) -> None:
        """Leave the line. Who leaves without the lease passes on the wake-up it may have got."""
        await self._world.call(self._leave, served)

    def _join(self) -> None:
        ticket = int(self._world.clocks.boottime() * 1e9)
        self._name = f"{self._line.key}{ticket:020d}-{self._world.nonce()}{_SUFFIX}"
        path = os.path.join(self._line.folder, self._name)
        # A pipe that nobody reads yet would be taken for a dead waiter's: so it gets its real
        # name only after it was opened.
        os.mkfifo(path + "-new", 0o666)
        # Read and write: so it never reports an end of file when a waker closes it.
        self._fd = os.open(path + "-new", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        os.rename(path + "-new", path)
        if self._line.waiters()[:1] in ([], [self._name]):
            os.write(self._fd, b".")  # nobody is before us: our turn is now

    def _leave(self, served: bool) -> None:  # noqa: FBT001
        if self._fd < 0:
            return
        _remove(os.path.join(self._line.folder, self._name))
        os.close(self._fd)
        self._fd = -1
        if not served:
            self._line.wake()


def can_queue() -> bool:
    """Say whether this system has named pipes."""
    return hasattr(os, "mkfifo")


def _key(namespace: str, name: str) -> str:
    import zlib  # two checksums are enough: a collision only wakes somebody for nothing

    text = f"{namespace}/{name}".encode()
    return f"{zlib.crc32(text):08x}{zlib.adler32(text):08x}-"


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return  # whoever woke us last was quicker
