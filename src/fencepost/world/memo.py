"""A memo is one line that a host keeps for those who run on it later, outside of every database.

It is written without a sync, by whoever comes: what a power cut takes from it, or a full disk, only
makes it milder. Where there is no home to keep it in there is none.
"""

from __future__ import annotations

import hashlib
import os

_WIDTH = 8192


class Memo:
    """What this host knows under one name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def read(self) -> str | None:
        """Return the line; None if there is none, or it cannot be read."""
        try:
            with open(self._path(), "rb") as file:
                return file.read(_WIDTH).decode(errors="replace").split("\n", 1)[0]
        except OSError:
            return None

    def write(self, line: str) -> None:
        """Keep a line. In one write, so that no reader sees half of it."""
        path, text = self._path(), (line + "\n").encode()
        if len(text) > _WIDTH:
            return  # a name as long as that is nobody's; and half a line would be worse than none
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(fd, text.ljust(_WIDTH), 0)
            finally:
                os.close(fd)
        except OSError:
            return

    def _path(self) -> str:
        digest = hashlib.blake2b(self._name.encode(), digest_size=16).hexdigest()
        home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        return os.path.join(home, "fencepost", digest)
