"""A witness remembers, outside of a database, how far the database had come.

A file that is replaced by an older copy of itself looks healthy from inside. Only somebody who saw
it later can tell. The witness is a small file beside the database, which no copy brings along. It
is told after each claim, without a sync: what a power cut takes from it only makes it milder.
"""

from __future__ import annotations

import os

from fencepost.model.named import NamedTuple

_NAME = "witness"
_WIDTH = 96


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

    def tell(self, seen: Seen) -> None:
        """Have it remembered. In one write, so that no reader sees half of it."""
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
