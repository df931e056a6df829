"""A session of ours lent to user code, as the connection that psycopg's users know.

Both speak over one libpq connection, in turns. What user code sets or prepares on it stays on it:
so such a session is never used for anything but transactions of user code.
"""

from __future__ import annotations

import weakref

import psycopg
from psycopg import errors, pq

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from psycopg.pq.abc import PGconn

    from fencepost.world.postgres_session import Session
    from fencepost.world.postgres_told import Refusal

# What a server answers whose disk is full or fails, or that is out of memory: it would say so to
# the ledger as well. Whoever has a session is never told that there is no room for another one, and
# loses it before its server becomes a standby: a transaction is read-only because it was made so.
LACKS = frozenset({"53100", "53200", "58030"})
# Who may say the same in a server's name: one that it has asked on our behalf, or a function.
_ELSEWHERE = frozenset({"connection.c", "dblink.c", "pl_exec.c"})
# What a statement puts aside for itself: no room for that is no full disk to anybody else.
_SET_ASIDE = "pgsql_tmp"
# Of a session that was ended because of how long it was quiet, or its transaction open.
_OVERSTAYED = frozenset({"25P03", "25P04"})


if TYPE_CHECKING:
    _Connection = psycopg.Connection[Any]
else:
    _Connection = psycopg.Connection


class Guest(_Connection):
    """The connection that is lent. It knows its errors from those of other connections."""

    def __init__(self, conn: PGconn) -> None:
        super().__init__(conn)
        self.met: weakref.WeakSet[psycopg.Error] = weakref.WeakSet()

    @property
    def parted(self) -> bool:
        """Whether user code itself has closed it."""
        return bool(vars(self)["_closed"])

    def wait(self, *args: Any, **options: Any) -> Any:
        """Wait for an answer: the one door for all of them, by whichever method."""
        try:
            return super().wait(*args, **options)
        except psycopg.Error as error:
            self.met.add(error)
            raise


# One for each session, for as long as that: the names of what psycopg prepares are its own.
_lent: weakref.WeakKeyDictionary[Session, Guest] = weakref.WeakKeyDictionary()


def lent(session: Session) -> Guest:
    """Return the psycopg connection over a session."""
    found = _lent.get(session)
    if found is None:
        found = _lent[session] = Guest(session.raw)
        if not session.direct:
            found.prepare_threshold = None  # behind a pooler the next statement may be elsewhere
    return found


def is_whole(session: Session) -> bool:
    """Say whether a session that was lent can be lent again: idle, and as it was before."""
    if session.broken or session.raw.pipeline_status != pq.PipelineStatus.OFF:
        return False
    return session.raw.transaction_status == pq.TransactionStatus.IDLE


def is_open(session: Session) -> bool:
    """Say whether a transaction is open on a session, be it one that has failed."""
    status = session.raw.transaction_status
    return not session.broken and status not in (
        pq.TransactionStatus.IDLE,
        pq.TransactionStatus.UNKNOWN,
    )


def is_alive(session: Session) -> bool:
    """Say whether a session was still connected when it was last used."""
    return not session.broken and session.raw.status == pq.ConnStatus.OK


def is_of_server(error: BaseException, session: Session) -> bool:
    """Say whether an error of psycopg is about our own server, not about what it was asked.

    Either the session is over, and nobody here has ended it; or this very error came by way of it,
    and says that the server lacks what the ledger needs as well.
    """
    if not isinstance(error, psycopg.Error):
        return False
    guest = lent(session)
    if not is_alive(session):
        return not guest.parted and error.sqlstate not in _OVERSTAYED
    if error not in guest.met or error.sqlstate not in LACKS:
        return False
    return error.diag.source_file not in _ELSEWHERE and _SET_ASIDE not in str(error)


def in_drivers_words(refusal: Refusal) -> psycopg.Error:
    """Return the server's error as psycopg would have raised it."""
    return errors.lookup(refusal.code)(refusal.said)
