"""A line is a lock that those who wait ask for: the server serves them in the order they came.

Each of them has a session of its own to wait with. Whoever is served keeps the lock with that
session until it releases the lease, so that the server itself wakes the next.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

from fencepost.errors import FencepostError
from fencepost.model.named import NamedTuple
from fencepost.world.postgres_session import Cut, Session, Statement
from fencepost.world.postgres_told import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.world.postgres import Postgres

# A statement that waits keeps a snapshot, and vacuum leaves alone what that snapshot might see. So
# after a minute it is asked anew, at the price of the place.
_LONGEST_WAIT_MS = 60_000
_SETTLE = Statement(
    f"SELECT set_config('statement_timeout', '{_LONGEST_WAIT_MS}', false)", prepared=False
)
_QUEUE = Statement("SELECT pg_advisory_lock(:line::bigint)")
# Also of a statement that was cancelled: it may have had the lock just before, and then keeps it.
_LEAVE = Statement("SELECT pg_advisory_unlock_all()")
_GAVE_UP = ("57014", "55P03")
_PATIENCE = 2.0
_MOST_IDLE = 4


class Seat:
    """One session that waits in one line."""

    def __init__(self, session: Session, line: int) -> None:
        self.session, self.line = session, line
        self.is_first = False
        self.waits = False
        self.until = 0.0  # when the lease that it was served with is over, unless it is renewed

    @property
    def broken(self) -> bool:
        """Say whether it is no use any more."""
        return self.session.broken

    def ask(self) -> None:
        """Ask for the lock; the answer comes when it is our turn."""
        self.waits = True
        self.session.send(_QUEUE, (self.line,), end=time.monotonic() + _PATIENCE)

    def hear(self) -> bool:
        """Take the answer that has come; say whether it is our turn. If not, ask anew."""
        try:
            self.session.collect(end=time.monotonic() + _PATIENCE)
            self.is_first, self.waits = True, False
        except Refusal as refusal:
            self.waits = False
            if refusal.code in _GAVE_UP and not refusal.fatal:
                self._ask_anew()
            else:
                self.session.close()
        except Cut:
            pass  # it is closed: ``broken`` tells
        return self.is_first

    def leave(self) -> None:
        """Give up the place, or the turn."""
        end = time.monotonic() + _PATIENCE
        try:
            if self.waits:
                self.session.cancel(end=end)
                if self.broken:
                    return
                self.waits = False
                with suppress(Refusal):
                    self.session.collect(end=end)
            self.is_first = False
            self.session.ask(_LEAVE, end=end)
        except (Cut, Refusal):
            self.session.close()

    def _ask_anew(self) -> None:
        try:
            self.session.ask(_LEAVE, end=time.monotonic() + _PATIENCE)
            self.ask()
        except Refusal:
            self.session.close()
        except Cut:
            pass  # it is closed: ``broken`` tells


class Served(NamedTuple):
    """What a release needs to know of the seat that its lease was waited for with."""

    session: Session
    line: int


class Seats:
    """The seats of this process at one server."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._idle: list[Session] = []
        self._served: dict[str, Seat] = {}

    def sit(self, db: Postgres, line: int) -> Seat | None:
        """Stand in line; None if there is no session to do it with."""
        self._sweep()
        session = self._idle_one()
        try:
            if session is None:
                session = db.connect(patience=_PATIENCE)
                if not session.direct:
                    session.close()
                    return None
                session.ask(_SETTLE, end=time.monotonic() + _PATIENCE)
            seat = Seat(session, line)
            seat.ask()
        except (FencepostError, Cut, Refusal):
            return None
        return seat

    def get_up(self, seat: Seat) -> None:
        """Leave the line."""
        seat.leave()
        self.give_back(seat.session)

    def keep(self, nonce: str, seat: Seat) -> None:
        """Keep the turn for as long as the lease is held."""
        with self._turn:
            self._served[nonce] = seat

    def kept(self, nonce: str) -> Seat | None:
        """Return, once, the seat that goes with a lease."""
        if not self._served:
            return None
        with self._turn:
            return self._served.pop(nonce, None)

    def lasts(self, nonce: str, until: float) -> None:
        """Take note of a renewal."""
        seat = self._served.get(nonce)
        if seat is not None:
            seat.until = until

    def give_back(self, session: Session) -> None:
        """Keep a session for the next one who waits."""
        with self._turn:
            if not session.broken and len(self._idle) < _MOST_IDLE:
                self._idle.append(session)
                return
        if not session.broken:
            session.close()

    def close(self) -> None:
        """Close the sessions that nobody waits with."""
        with self._turn:
            idle, self._idle = self._idle, []
        for session in idle:
            session.close()

    def _idle_one(self) -> Session | None:
        while True:
            with self._turn:
                if not self._idle:
                    return None
                session = self._idle.pop()
            if not session.is_stale():
                return session
            session.close()

    def _sweep(self) -> None:
        """Let go of the turns of leases that ran out: nobody will release them."""
        if not self._served:
            return
        now = time.monotonic()
        with self._turn:
            over = [nonce for nonce, seat in self._served.items() if seat.until < now]
            seats = [self._served.pop(nonce) for nonce in over]
        for seat in seats:
            seat.session.close()


_seats: dict[tuple[str, ...], Seats] = {}
_turn = threading.Lock()


def seats_at(attempts: tuple[str, ...]) -> Seats:
    """Return the seats of this process at the server that these addresses lead to."""
    with _turn:
        return _seats.setdefault(attempts, Seats())


def _after_fork() -> None:
    """Stand in none of a parent's lines."""
    global _turn  # noqa: PLW0603 -- a thread of the parent may have it
    _turn = threading.Lock()
    for seats in _seats.values():
        seats.__init__()  # type: ignore[misc]


if hasattr(os, "register_at_fork"):  # not on Windows, where there is no fork
    os.register_at_fork(after_in_child=_after_fork)
