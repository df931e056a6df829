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

    from fencepost.world.postgres_session import Session
    from fencepost.world.postgres_told import Refusal

# What a server answers that is out of resources, fails at its disk, or has become a standby.
_LACKS = frozenset({"53", "58", "25006"})

# One for each session, for as long as that: the names of what psycopg prepares are its own.
_lent: weakref.WeakKeyDictionary[Session, psycopg.Connection[Any]] = weakref.WeakKeyDictionary()


def lent(session: Session) -> psycopg.Connection[Any]:
    """Return the psycopg connection over a session."""
    found = _lent.get(session)
    if found is None:
        found = _lent[session] = psycopg.Connection(session.raw)
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
    """Say whether an error of psycopg is about the server, not about what it was asked.

    Either the session is over, or the server lacks what it needs: a disk, memory, its primary.
    """
    if not isinstance(error, psycopg.Error):
        return False
    code = error.sqlstate or ""
    return not is_alive(session) or code[:2] in _LACKS or code in _LACKS


def in_drivers_words(refusal: Refusal) -> psycopg.Error:
    """Return the server's error as psycopg would have raised it."""
    return errors.lookup(refusal.code)(refusal.said)
