"""An ear is a session that listens to one channel, and a thread that waits for what is said there.

Nobody depends on it: what was not heard is found by looking. So it never says that anything went
wrong. A session that was cut is opened anew, less and less often if that does not help; behind a
pooler, whose sessions are lent for a transaction at a time, there is nothing to be heard.
"""

from __future__ import annotations

import os
import random
import select
import socket
import threading
import time
from contextlib import suppress

from fencepost.errors import FencepostError
from fencepost.world.postgres_session import Cut, Session, Statement
from fencepost.world.postgres_told import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost.world.postgres import Postgres

_PATIENCE = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 30.0
# A session that was heard for so long ended for a reason of its own: the next may come at once.
_STEADY = 10.0
# How long it is silent before it asks whether there is anybody: a network may go without a word.
_LONGEST_SILENCE = 60.0
# After each word, so that many of them wake nobody more often than this.
_BREATH = 0.02


class Ear:
    """Calls ``heard`` with each word that is said on the channel, from a thread of its own.

    The thread keeps no process alive. ``heard`` must not raise, and is called with ``""`` when a
    session has begun to listen: what was said before that is unknown.
    """

    def __init__(self, db: Postgres, channel: str, heard: Callable[[str], None]) -> None:
        self._db, self._heard = db, heard
        self._listen = Statement(f'LISTEN "{channel}"', prepared=False)
        self._pid = os.getpid()
        self._closed = False
        self._waked, self._waker = socket.socketpair()
        thread = threading.Thread(target=self._run, name="fencepost-ear", daemon=True)
        started = False
        try:
            thread.start()
            started = True
        finally:
            if not started:
                self._let_go()

    def close(self) -> None:
        """Hear no more. The thread ends by itself, and the session with it."""
        if self._pid == os.getpid():  # a forked child has no such thread, and must not end ours
            self._closed = True
            with suppress(OSError):  # it has ended before
                self._waker.send(b".")

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        try:
            while not self._closed and self._db.direct is not False:
                began = time.monotonic()
                session = self._opened()
                if session is not None:
                    self._attend(session)
                    session.close()
                if time.monotonic() - began > _STEADY:
                    pause = _FIRST_PAUSE
                self._wait(pause * random.uniform(0.5, 1.5))  # noqa: S311 -- so that not all come at once
                pause = min(pause * 2, _LONGEST_PAUSE)
        finally:
            self._let_go()

    def _opened(self) -> Session | None:
        """Return a session that listens; None if there is none to be had now."""
        try:
            session = self._db.connect(patience=_PATIENCE)
        except FencepostError:
            return None  # whoever looks finds that out as well, and tells
        try:
            if session.direct:
                session.ask(self._listen, end=time.monotonic() + _PATIENCE)
                return session
        except (Cut, Refusal):
            pass  # likewise
        session.close()
        return None

    def _attend(self, session: Session) -> None:
        """Hear what is said until the session ends, or nobody wants to hear any more."""
        self._heard("")
        while True:
            silent = not self._wait(_LONGEST_SILENCE, session.fd)
            if self._closed:
                return
            try:
                if silent:
                    session.ask(self._listen, end=time.monotonic() + _PATIENCE)
                words = session.heard()
            except (Cut, Refusal):
                return
            for said in dict.fromkeys(words):
                self._heard(said)
            if words:
                self._wait(_BREATH)

    def _wait(self, seconds: float, *sockets: int) -> bool:
        """Wait until one of the sockets can be read, or all is over; say whether any can."""
        watched = [self._waked.fileno(), *sockets]
        if not hasattr(select, "poll"):
            return bool(select.select(watched, [], [], seconds)[0])
        poll = select.poll()
        for each in watched:
            poll.register(each, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def _let_go(self) -> None:
        self._waked.close()
        self._waker.close()
