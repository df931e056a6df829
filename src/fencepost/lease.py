"""The lease as user code sees it: a token, and an honest answer to "may I still?"."""

from __future__ import annotations

import os
import threading
import warnings

from fencepost.errors import LeaseLost
from fencepost.fence import admit, admit_all, headers_of
from fencepost.model.fenced import Fenced
from fencepost.model.lease import Phase
from fencepost.model.name import resource

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from fencepost.flows.keep import Hold


class LostSignal(threading.Event):
    """Set once the lease is lost. It looks at the clock by itself: no dead keeper can hide it."""

    def __init__(self, hold: Hold, *, boottime: Callable[[], float]) -> None:
        super().__init__()
        self._hold, self._boottime, self._pid = hold, boottime, os.getpid()
        hold.on_loss += (self.set,)

    def is_set(self) -> bool:
        """Say whether the lease is lost by now. To a forked child it is: it never had it."""
        self._hold.phase(self._boottime())
        return self._hold.why_lost is not None or self._pid != os.getpid()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the lease is lost, at most ``timeout`` seconds; say whether it is.

        A lease that was released can no longer be lost: then the wait ends, within a ttl.
        """
        give_up = None if timeout is None else self._boottime() + timeout
        while not self.is_set():
            now = self._boottime()
            if self._hold.released or (give_up is not None and now >= give_up):
                return False
            left = max(self._hold.trust.until - now, 0.001)
            super().wait(left if give_up is None else min(left, give_up - now))
        return True


class Lease:
    """A granted lease. Ask ``check()`` before each effect, and ``fence(conn)`` inside of it."""

    __slots__ = ("_boottime", "_drop", "_fenced", "_hold", "_lost", "_namespace", "_pid")

    def __init__(
        self,
        hold: Hold,
        *,
        namespace: str,
        boottime: Callable[[], float],
        drop: Callable[[Hold], None],
        fenced: Callable[[], Fenced] | None = None,
    ) -> None:
        self._hold, self._namespace, self._boottime, self._drop = hold, namespace, boottime, drop
        self._fenced = fenced
        self._pid = os.getpid()
        self._lost: LostSignal | None = None

    @property
    def hold(self) -> Hold:
        """What the keeper knows of this lease; for fencepost's own use."""
        return self._hold

    @property
    def name(self) -> str:
        """The name of the lease; for a semaphore that of the permit, such as ``uploads#2``."""
        return self._hold.name

    @property
    def namespace(self) -> str:
        """The namespace that the lease's name belongs to."""
        return self._namespace

    @property
    def token(self) -> int:
        """The fencing token: higher than that of every earlier holder of this name."""
        return self._hold.token

    @property
    def ttl(self) -> float:
        """Seconds that the lease outlives its holder's last sign of life."""
        return self._hold.ttl

    @property
    def phase(self) -> Phase:
        """How far the lease can be believed in right now."""
        return Phase.LOST if self.foreign else self._hold.phase(self._boottime())

    def asked(self, patience: float) -> Phase:
        """Return the phase once it is known, or after that time; for fencepost's own use."""
        if self.foreign:
            return Phase.LOST
        return self._hold.sure(self._boottime, patience=patience)

    @property
    def lost(self) -> LostSignal:
        """An event that is set once the lease is lost."""
        if self._lost is None:
            self._lost = LostSignal(self._hold, boottime=self._boottime)
        return self._lost

    @property
    def foreign(self) -> bool:
        """Whether this object came here by a fork: then the lease is the parent's alone."""
        return self._pid != os.getpid()

    def remaining(self) -> float:
        """Return for how many seconds the lease can be trusted without another renewal.

        0.0 if ``check()`` would raise; where that has to ask, so does this.
        """
        return 0.0 if self._why_not() is not None else max(0.0, self.lapses_in)

    @property
    def lapses_in(self) -> float:
        """Seconds until the lease is lost unless it is renewed; for fencepost's own use."""
        return self._hold.trust.until - self._boottime()

    def check(self) -> None:
        """Return if the lease can be trusted now; raise ``LeaseLost`` if not.

        After a stall a holder on PostgreSQL does not know that from memory: it waits for the
        answer of its store, for 30 s at most, on an event loop for a second.
        """
        reason = self._why_not()
        if reason is not None:
            raise LeaseLost(self.name, token=self.token, reason=reason)

    def loss(self) -> LeaseLost:
        """Return the error that says why the lease is gone."""
        reason = self._hold.why_lost or "it was somebody else's when it was given back"
        return LeaseLost(self.name, token=self.token, reason=reason)

    def fence(self, conn: object, *, resource: str | None = None) -> Any:
        """Guard the open transaction of ``conn``: raise ``TokenStale`` if a later holder was here.

        ``conn`` is a ``sqlite3``, psycopg, PyMySQL or SQLAlchemy connection in a transaction that
        has read nothing yet, or has locked what it read; see docs/fencing.md. On an async
        connection, of psycopg, aiomysql or asyncmy, it must be awaited.
        """
        if resource is not None:
            fencing = admit(conn, resource=resource, token=self.token)
        else:
            fencing = admit_all(conn, self._resources().marks(self.token))
        if fencing is not None:
            return fencing.then(self.check)
        self.check()
        return None

    def headers(self) -> dict[str, str]:
        """Return headers by which another service can refuse a holder that woke up late."""
        return headers_of(self._resources(), self.token)

    def __repr__(self) -> str:
        return f"<Lease {self.name!r} token={self.token} {self.phase.value}>"

    def __reduce__(self) -> str:
        raise TypeError("a lease cannot be pickled: pass its name and token, and fence with those")

    def __del__(self) -> None:
        hold = self._hold
        if hold.released or self.foreign:
            return
        # No I/O here: without renewals the lease ends by itself, and that must do.
        self._drop(hold)
        if hold.lean is not None:
            hold.lean.end()
        if hold.why_lost is None:
            warnings.warn(
                f"lease {hold.name!r} was dropped without being released; it ends by itself in "
                f"{hold.ttl:.0f} s at most",
                ResourceWarning,
                source=self,
                stacklevel=1,
            )

    def _why_not(self) -> str | None:
        if self.foreign:
            return "it belongs to the parent process, and a fork does not share it"
        return self._hold.why_not_ours(self._boottime)

    def _resources(self) -> Fenced:
        if self._fenced is not None:
            return self._fenced()
        return Fenced(resource(self._namespace, name=self.name))
