"""The pulse of a process is a lock that one idle session has; it ends when the session does.

Its key is random and new for each session, so that nobody else ever has it: if it can be had, the
session has ended, and with it, most likely, the process. *Most likely* is why nobody acts on it at
once, and why whoever leans on a pulse proves it all the time. One pulse serves all leases of a
process in one schema of a server, whichever store object asked for them.
"""

from __future__ import annotations

import os
import secrets
import threading
import time

from fencepost.errors import FencepostError
from fencepost.world.postgres_lean import Silences, Vouching
from fencepost.world.postgres_session import Cut, Session, Statement
from fencepost.world.postgres_told import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.world.postgres import Postgres

_LOCK = Statement("SELECT pg_try_advisory_lock(:pulse::bigint)", prepared=False)
# For how long a proof may be leaned on. Whoever finds a pulse gone waits for as long, so that the
# dead are followed within a second. A process that is often late to prove itself asks for more: a
# machine that is short of time must not lose what it holds.
GRACE = 0.6
_LONGEST_GRACE = 5.0
_STRETCH = 4.0  # of the longest delay of late
_CALM_AFTER = 60.0
_AGAIN_AFTER = 1.0  # seconds without a pulse, if its session cannot be had
_PATIENCE = 0.4


class Pulse:
    """The sign of life of this process on one server, for the leases of one schema."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._session: Session | None = None
        self._key = 0
        self._try_at = 0.0
        self.grace = GRACE
        self._calm_at = 0.0
        self.vouching, self.silences = Vouching(), Silences()

    def beat(self, db: Postgres) -> int:
        """Make sure that there is a pulse; return its key, or 0 if there can be none now."""
        session = self._session
        if session is not None and not session.is_stale():
            return self._key
        with self._turn:
            if self._session is not None and not self._session.is_stale():
                return self._key
            if time.monotonic() >= self._try_at:
                self._begin(db)
            return self._key

    @property
    def key(self) -> int:
        """The key of the pulse as it is, without a look at whether it still beats."""
        return self._key

    def heed(self, delay: float, *, now: float) -> float:
        """Take note of how long it took from one proof to the next; return the grace to ask for."""
        if delay > self.grace / 2:
            self.grace = min(max(self.grace, delay * _STRETCH), _LONGEST_GRACE)
            self._calm_at = now + _CALM_AFTER
        elif now >= self._calm_at:
            self.grace = GRACE
        return self.grace

    def let_go(self) -> None:
        """End the session, unless leases lean on it."""
        with self._turn:
            if not self.vouching.leans:
                self._end()

    def end(self, key: int) -> None:
        """End a session whose lock is gone, whatever it may look like; the next beat opens one."""
        with self._turn:
            if self._key == key:
                self._end()

    def _begin(self, db: Postgres) -> None:
        self._end()
        key = secrets.randbits(62) + 1
        try:
            session = db.connect(patience=_PATIENCE)
            session.ask(_LOCK, (key,), end=time.monotonic() + _PATIENCE)
        except (FencepostError, Cut, Refusal):  # leases then last for their ttl, as without one
            self._try_at = time.monotonic() + _AGAIN_AFTER
            return
        if not session.direct:
            session.close()
            self._try_at = float("inf")
            return
        self._session, self._key = session, key

    def _end(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session, self._key = None, 0


_pulses: dict[tuple[tuple[str, ...], str], Pulse] = {}
_turn = threading.Lock()


def pulse_on(attempts: tuple[str, ...], *, schema: str) -> Pulse:
    """Return the pulse of this process on the server that these addresses lead to.

    Each schema has its own: whoever proves a pulse looks at the rows that lean on it.
    """
    with _turn:
        return _pulses.setdefault((attempts, schema), Pulse())


def _after_fork() -> None:
    """Have no pulse yet: the parent's is not ours."""
    global _turn  # noqa: PLW0603 -- a thread of the parent may have it
    _turn = threading.Lock()
    for pulse in _pulses.values():
        pulse.__init__()  # type: ignore[misc]


if hasattr(os, "register_at_fork"):  # not on Windows, where there is no fork
    os.register_at_fork(after_in_child=_after_fork)
