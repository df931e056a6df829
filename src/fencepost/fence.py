"""The fence stands at the resource: it admits a token only if no higher one was there before.

A lease makes two holders rare; the fence makes the second one harmless. In the transaction that
writes, ``admit`` compares and remembers the token under the same write lock, so that of two
transactions on one database the one with the older token cannot commit after the newer one.
"""

from __future__ import annotations

from fencepost.errors import FenceMisused, Misuse, TokenStale
from fencepost.model.lease import admits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sqlite3 import Connection
    from typing import Any

FENCING_TOKEN = "Fencing-Token"
FENCING_RESOURCE = "Fencing-Resource"

# The documented statement that prepares a database for fences; ``fencepost migrate`` runs it too.
CREATE_GUARD = """
CREATE TABLE IF NOT EXISTS fencepost_guard (
    resource TEXT    PRIMARY KEY,
    token    INTEGER NOT NULL
)"""

_FIND = "SELECT token FROM fencepost_guard WHERE resource = ?"

_RAISE = """
INSERT INTO fencepost_guard (resource, token) VALUES (?, ?)
    ON CONFLICT (resource) DO UPDATE SET token = excluded.token"""


def admit(conn: object, *, resource: str, token: int) -> None:
    """Let ``token`` through in the open transaction of ``conn``, or raise ``TokenStale``.

    Everything the transaction did or will do then stands behind the fence: if this raises, roll
    back; if the transaction commits, every older token is refused from then on.
    """
    database = _sqlite_of(conn)
    _require_write_transaction(database)
    highest = _highest(database, resource)
    if not admits(highest, token):
        raise TokenStale(resource, token=token, highest=highest)
    if token > highest:
        database.execute(_RAISE, (resource, token))


def header_safe(text: str) -> str:
    """Return a resource's name as a header may carry it: percent-encoded where it is not plain."""
    if text.isascii() and text.isprintable() and "%" not in text:
        return text
    from urllib.parse import quote  # dear, and most names are plain

    return quote(text, safe="/#")


def _sqlite_of(conn: object) -> Connection:
    """Return the ``sqlite3`` connection that ``conn`` is, or wraps."""
    import sqlite3

    if isinstance(conn, sqlite3.Connection):
        return conn
    inner = _beneath_sqlalchemy(conn)
    if isinstance(inner, sqlite3.Connection):
        return inner
    raise FenceMisused(
        f"fence cannot guard a {type(conn).__module__}.{type(conn).__qualname__}: give it a sqlite3 "
        "or SQLAlchemy connection, or compare tokens yourself with admits(highest_seen, token)"
    )


def _beneath_sqlalchemy(conn: Any) -> object:
    """Return the driver's connection beneath an SQLAlchemy connection or session, else None."""
    if not type(conn).__module__.startswith("sqlalchemy."):
        return None
    if hasattr(conn, "connection") and callable(conn.connection):  # a Session
        conn = conn.connection()
    if getattr(conn, "closed", False):
        raise FenceMisused("fence needs an open connection, and this one is closed")
    return getattr(getattr(conn, "connection", None), "driver_connection", None)


def _require_write_transaction(database: Connection) -> None:
    """Refuse where the comparison could not hold until the commit.

    Without a transaction there is nothing to guard. In a deferred one that has read, the state it
    acts on may be older than the comparison. A transaction that has the write lock has neither
    fault: nobody else can commit between what it reads, the fence, and its own commit.
    """
    import sqlite3

    try:
        begun = database.in_transaction
        writing = begun and _is_writing(database)
    except sqlite3.ProgrammingError as error:
        raise FenceMisused(f"fence needs an open connection: {error}") from error
    if not begun:
        raise FenceMisused(
            "fence needs an open transaction, and this connection commits each statement by "
            'itself: execute "BEGIN IMMEDIATE" first'
        )
    if not writing:
        raise FenceMisused(
            "fence must come before the first read of a transaction, with the write lock in hand: "
            'begin it with "BEGIN IMMEDIATE"'
        )


class _Found(Exception):  # noqa: N818 -- an answer, not an error
    """Carries SQLite's answer out of a backup that was never meant to go on."""


def _is_writing(database: Connection) -> bool:
    """Say whether this very connection holds the write lock.

    The sqlite3 module does not offer ``sqlite3_txn_state``. But a backup's first step answers
    SQLITE_BUSY if its source connection is in a write transaction, and copies one page if not;
    either way the callback ends it there. A connection that has begun but read nothing may get
    the same answer while others are committing: then the fence is its first statement, and safe.
    """
    import sqlite3

    def answer(status: int, _remaining: int, _total: int) -> None:
        raise _Found(status)

    target = sqlite3.connect(":memory:")
    try:
        database.backup(target, pages=1, progress=answer)
    except _Found as found:
        return bool(found.args[0] in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED))
    finally:
        target.close()
    return False


def _highest(database: Connection, resource: str) -> int:
    import sqlite3

    try:
        row = database.execute(_FIND, (resource,)).fetchone()
    except sqlite3.OperationalError as error:
        if "no such table" not in str(error):
            raise
        raise Misuse(
            "this database has no table fencepost_guard: run 'fencepost migrate --guard URL' once, "
            f"or execute: {' '.join(CREATE_GUARD.split())}"
        ) from error
    return 0 if row is None else int(row[0])
