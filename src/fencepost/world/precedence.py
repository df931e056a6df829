"""Who serves comes first: others of its process work while it waits for a server.

Threads share one interpreter. Where one of them asks a server, and others carry out what it was
granted, theirs is best done while the server is at work: done before, it keeps the server idle,
and the interpreter changes hands only every few milliseconds. Nobody's safety depends on it, and
nobody is kept for longer than a moment.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextlib import AbstractContextManager

# How long others stand back at most, in seconds: whoever comes first may have a lot to think about.
MOMENT = 0.02

_firsts: dict[int, Precedence] = {}  # by thread


class Precedence:
    """The precedence of one thread over those that ask for it between two pieces of work.

    It begins once that thread was seen to wait for a server. Where nobody tells of such waits
    there is none: others would only lose time.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._lends = self._has = False

    def take(self) -> None:
        """Come first from now on, in this thread."""
        _firsts[threading.get_ident()] = self
        if self._lends and not self._has:
            self._turn.acquire()
            self._has = True

    def leave(self) -> None:
        """Come first no more."""
        _firsts.pop(threading.get_ident(), None)
        self._lend()

    def stand_back(self) -> None:
        """Return once whoever comes first waits, or after a moment."""
        if self._turn.acquire(timeout=MOMENT):
            self._turn.release()

    def __enter__(self) -> None:
        self._lends = True
        self._lend()

    def __exit__(self, *error: object) -> None:
        self.take()

    def _lend(self) -> None:
        if self._has:
            self._has = False
            self._turn.release()


_NOBODY = nullcontext()  # for threads that do not come first


def waiting() -> AbstractContextManager[None]:
    """Return the context in which this thread waits for a server."""
    return _firsts.get(threading.get_ident(), _NOBODY) if _firsts else _NOBODY
