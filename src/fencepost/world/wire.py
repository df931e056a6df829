"""Wrapper and guards talk in short lines over pipes; the end of a pipe is the end of a process.

A line is written with one call and is far shorter than what a pipe takes in one piece, so lines
never mix, whoever writes them and whenever.
"""

from __future__ import annotations

import os


class Inbox:
    """The reading end of a pipe. ``closed`` once everybody who could write to it is gone."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.closed = False
        self._rest = b""

    def lines(self) -> list[list[str]]:
        """Return the words of each line that has arrived by now."""
        while not self.closed:
            try:
                chunk = os.read(self.fd, 65536)
            except BlockingIOError:
                break
            self._rest += chunk
            self.closed = not chunk
        *whole, self._rest = self._rest.split(b"\n")
        return [line.decode().split() for line in whole if line]


def tell(fd: int, *words: object) -> bool:
    """Write one line; say whether anybody is there to read it.

    A reader who was stopped for so long that the pipe is full is told nothing more: a guard that
    hears of no renewal ends the command, which is the safe side.
    """
    try:
        os.write(fd, (" ".join(map(str, words)) + "\n").encode())
    except BlockingIOError:
        return True
    except BrokenPipeError:
        return False
    return True
