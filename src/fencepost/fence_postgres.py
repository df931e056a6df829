"""The fence in a PostgreSQL database: a row that the transaction locks before it compares.

``INSERT … ON CONFLICT DO UPDATE`` locks the guard's row, new or old, until the transaction ends. Of
two transactions the later one waits, and then compares with what the earlier one committed: so the
older token is refused. Under *repeatable read* and *serializable* it is refused by PostgreSQL
itself, with a serialization failure, if the guard was raised after the transaction began to look.
"""

from __future__ import annotations

import hashlib

import psycopg
from psycopg import errors
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from fencepost.errors import FenceMisused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# A resource may have a longer name than any index entry: so the key is a digest of it. Half of each
# page is left free, for the row changes with every transaction.
CREATE_GUARD = """
CREATE TABLE IF NOT EXISTS fencepost_guard (
    digest   bytea  PRIMARY KEY,
    resource text   NOT NULL,
    token    bigint NOT NULL
) WITH (fillfactor = 50)"""

CREATE_DONE = """
CREATE TABLE IF NOT EXISTS fencepost_done (
    digest bytea  PRIMARY KEY,
    scope  text   NOT NULL,
    item   text   NOT NULL,
    token  bigint NOT NULL
)"""

# Remember a token that is higher than what was seen; lock the row in any case. Beside it, whether
# this comes too late: under read committed, what an earlier statement of the transaction has read
# of a table (which shows in the lock that a plain SELECT keeps) may be older than the fence. What
# was written, or read FOR UPDATE, is locked and cannot be.
_RAISE = """
  WITH raised AS (
INSERT INTO fencepost_guard AS seen (digest, resource, token)
VALUES (%(digest)s, %(resource)s, %(token)s)
    ON CONFLICT (digest) DO UPDATE SET token = greatest(seen.token, excluded.token)
RETURNING seen.token)
SELECT raised.token,
       current_setting('transaction_isolation') = 'read committed'
       AND NOT EXISTS (SELECT FROM fencepost_guard AS ours
                        WHERE ours.digest = %(digest)s
                          AND ours.xmin = pg_current_xact_id_if_assigned()::xid)
       AND EXISTS (SELECT FROM pg_locks AS kept
                     JOIN pg_class AS read ON read.oid = kept.relation
                    WHERE kept.pid = pg_backend_pid() AND kept.locktype = 'relation'
                      AND kept.mode = 'AccessShareLock' AND kept.relation >= 16384
                      AND read.relkind IN ('r', 'p', 'm', 'f')
                      AND read.relname NOT IN ('fencepost_guard', 'fencepost_done'))
  FROM raised"""

_RECORD_ITEM = """
INSERT INTO fencepost_done (digest, scope, item, token)
VALUES (%(digest)s, %(scope)s, %(item)s, %(token)s)
    ON CONFLICT (digest) DO NOTHING"""


def raise_guard(conn: Any, *, resource: str, token: int) -> int:
    """Raise the guard of ``resource`` to ``token`` if that is higher; return where it stands."""
    require_transaction(conn)
    values = {"digest": _digest(resource), "resource": resource, "token": token}
    # And not conn.cursor(), which may be of the user's kind.
    cursor = psycopg.Cursor(conn, row_factory=tuple_row)
    try:
        found = cursor.execute(_RAISE, values).fetchone()
    except errors.UndefinedTable as error:
        raise _no_table("fencepost_guard", CREATE_GUARD) from error
    return _in_time(found)


async def awaited_guard(conn: Any, *, resource: str, token: int) -> int:
    """Do the same on an async connection."""
    values = {"digest": _digest(resource), "resource": resource, "token": token}
    cursor = psycopg.AsyncCursor(conn, row_factory=tuple_row)
    try:
        await cursor.execute(_RAISE, values)
    except errors.UndefinedTable as error:
        raise _no_table("fencepost_guard", CREATE_GUARD) from error
    return _in_time(await cursor.fetchone())


def is_async(conn: object) -> bool:
    """Say whether a fence on this connection must be awaited."""
    return isinstance(conn, psycopg.AsyncConnection)


def cut(conn: Any) -> None:
    """End an async connection at once; the server undoes what was not committed."""
    conn.pgconn.finish()


def record_item(conn: Any, *, scope: str, item: str, token: int) -> bool:
    """Record an item; say whether it was not there before.

    The fence has let this transaction through already, so nobody else can be recording it.
    """
    values = {"digest": _digest(scope, item), "scope": scope, "item": item, "token": token}
    try:
        return psycopg.Cursor(conn).execute(_RECORD_ITEM, values).rowcount == 1
    except errors.UndefinedTable as error:
        raise _no_table("fencepost_done", CREATE_DONE) from error


async def awaited_item(conn: Any, *, scope: str, item: str, token: int) -> bool:
    """Do the same on an async connection."""
    values = {"digest": _digest(scope, item), "scope": scope, "item": item, "token": token}
    cursor = psycopg.AsyncCursor(conn)
    try:
        await cursor.execute(_RECORD_ITEM, values)
    except errors.UndefinedTable as error:
        raise _no_table("fencepost_done", CREATE_DONE) from error
    return cursor.rowcount == 1


def _in_time(found: tuple[int, bool] | None) -> int:
    """Return where the guard stands, unless the fence came too late."""
    assert found is not None, "the statement always answers"
    highest, late = found
    if late:
        raise FenceMisused(
            "fence must come before the first read of a transaction, because what was read may be "
            "older than the fence: roll back and fence first, or read FOR UPDATE"
        )
    return highest


def _no_table(table: str, create: str) -> FenceMisused:
    return FenceMisused(
        f"this database has no table {table}: roll back, then run 'fencepost migrate --guard URL' "
        f"once, or execute: {' '.join(create.split())}"
    )


def require_transaction(conn: Any) -> None:
    """Refuse where each statement would be committed by itself: the lock would be gone at once."""
    if conn.closed:
        raise FenceMisused("fence needs an open connection, and this one is closed")
    status = conn.info.transaction_status
    if status is TransactionStatus.INERROR:
        raise FenceMisused("fence needs an open transaction, and this one has failed: roll back")
    if conn.autocommit and status is TransactionStatus.IDLE:
        raise FenceMisused(
            "fence needs an open transaction, and this connection would commit each statement by "
            "itself: begin with 'with conn.transaction():'"
        )


def _digest(*parts: str) -> bytes:
    return hashlib.sha256("\0".join(parts).encode()).digest()
