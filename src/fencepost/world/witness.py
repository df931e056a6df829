"""A witness remembers, outside of a database, how far the database had come.

A file that is replaced by an older copy of itself looks healthy from inside. Only a process that
saw it later can tell. Beside the database, where no copy brings them along, lie a line that all
processes share (which database it is, and the highest token that was synced) and a cell of each
process (its newest commit). A cell is written after each commit, without a sync: the kernel keeps
it when the process dies, and what a power cut takes from it only makes the witness milder.
"""

from __future__ import annotations

import enum
import os
from time import monotonic
from zlib import crc32

from fencepost.model.named import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

fcntl: Any
try:
    import fcntl
except ImportError:  # without flock nobody knows whose process is gone: cells stay
    fcntl = None

_NAME, _SUFFIX = "witness", ".seen"
_WIDTH = 96
# What a cell says ends with this and a checksum. Behind that may be the rest of a longer text.
_END = b"\0"
# How long to go without looking whether a cell is still there, or can be made by now.
_TRUSTED = 1.0
# A cell that is written just now may be read torn: it is whole a moment later.
_TRIES = 3


class Seen(NamedTuple):
    """Which life of the database was seen, and the highest token in it."""

    incarnation: str
    token: int


class Witness:
    """The witness of one database, in the folder beside it."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, _NAME)
        self._fd = -1
        self._pid = 0

    def asked(self) -> Seen | None:
        """Return what was seen; None if nobody was there, or it cannot be read."""
        try:
            with open(self._path, "rb") as file:
                words = file.read(_WIDTH).split()
        except OSError:
            return None
        if len(words) != 2 or not words[1].isdigit():
            return None  # torn, or somebody else's: as good as none
        return Seen(words[0].decode(errors="replace"), int(words[1]))

    def tell(self, seen: Seen, *, anew: bool = False) -> None:
        """Have it remembered, unless another process has told of a higher token.

        In one write, so that no reader sees half of it.
        """
        known = None if anew else self.asked()
        if known is not None and known.incarnation == seen.incarnation and known.token > seen.token:
            return
        line = f"{seen.incarnation} {seen.token}\n".encode().ljust(_WIDTH)
        try:
            os.pwrite(self._opened(), line, 0)
        except OSError:
            return  # a full disk takes the witness, not the work

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0 and self._pid == os.getpid():
            os.close(self._fd)
        self._fd = -1

    def _opened(self) -> int:
        if self._fd < 0 or self._pid != os.getpid():
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
            self._fd, self._pid = os.open(self._path, flags, 0o666), os.getpid()
        return self._fd


class Wrote(enum.Enum):
    """What became of a cell when it was written."""

    SAME = enum.auto()
    NEW = enum.auto()
    REMOVED = enum.auto()  # and not written


class Cells:
    """The cells of one database, in the folder beside it; one of them is this process's own.

    The own cell stays locked while its process lives, so that nobody removes it.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._fd, self.own = -1, ""
        self._look_at = 0.0

    def write(self, text: str) -> Wrote:
        """Put this into our own cell; say whether the cell is new, or was removed meanwhile."""
        data = text.encode()
        data += _END + crc32(data).to_bytes(4)
        wrote = Wrote.SAME
        try:
            if monotonic() >= self._look_at:
                wrote = self._look()
            if wrote is not Wrote.REMOVED:
                os.pwrite(self._fd, data, 0)
        except OSError:
            return Wrote.SAME  # a full disk, or a folder to read only, takes the witness only
        return wrote

    def read(self) -> dict[str, str]:
        """Return what all cells say, by their names; those that cannot be read say nothing."""
        try:
            names = [name for name in os.listdir(self._folder) if name.endswith(_SUFFIX)]
        except OSError:
            return {}
        found = {name: self._read(name) for name in names}
        return {name: text for name, text in found.items() if text is not None}

    def remove(self, read: dict[str, str], *, dead: bool) -> None:
        """Remove cells; if ``dead``, only of processes that are gone and told nothing since."""
        for name, text in read.items():
            if name != self.own or not dead:
                self._remove(name, text if dead else None)

    def close(self) -> None:
        """Let go of our own cell: it stays, and the next write begins another.

        A fork's child does so at once: the lock is its parent's, and must not outlive that.
        """
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self.own, self._look_at = -1, "", 0.0

    def _look(self) -> Wrote:
        """Make our own cell if there is none; say so, or that somebody has removed it."""
        self._look_at = monotonic() + _TRUSTED
        if self._fd < 0:
            self._make()
            return Wrote.NEW
        return Wrote.SAME if os.fstat(self._fd).st_nlink else Wrote.REMOVED

    def _make(self) -> None:
        os.makedirs(self._folder, exist_ok=True)
        name = os.urandom(8).hex() + _SUFFIX
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fd, self.own = os.open(os.path.join(self._folder, name), flags, 0o666), name
        if fcntl is not None:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _read(self, name: str) -> str | None:
        for _ in range(_TRIES):
            try:
                with open(os.path.join(self._folder, name), "rb") as file:
                    data, _, check = file.read().partition(_END)
            except OSError:
                return None
            if data and check[:4] == crc32(data).to_bytes(4):
                return data.decode(errors="replace")
        return None

    def _remove(self, name: str, told: str | None) -> None:
        path = os.path.join(self._folder, name)
        try:
            if told is None:
                os.unlink(path)
            elif fcntl is not None:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    if self._read(name) == told:
                        os.unlink(path)
                finally:
                    os.close(fd)
        except OSError:
            return  # its process lives, it is another user's, or others were quicker
