"""The fence in a MariaDB or MySQL database: a row that the transaction locks before it compares.

``INSERT … ON DUPLICATE KEY UPDATE`` locks the guard's row, new or old, until the transaction ends,
and reads what was committed last, whatever older state the transaction sees elsewhere. So of two
transactions the one with the older token waits, and is then refused.
"""

from __future__ import annotations

import hashlib

import pymysql
from pymysql.constants import SERVER_STATUS
from pymysql.cursors import Cursor

from fencepost.errors import FenceMisused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# A resource may have a longer name than any key: so the key is a digest of it.
CREATE_GUARD = """
CREATE TABLE IF NOT EXISTS fencepost_guard (
    digest   CHAR(64) CHARACTER SET ascii   COLLATE ascii_bin   NOT NULL PRIMARY KEY,
    resource TEXT     CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    token    BIGINT   NOT NULL
) ENGINE = InnoDB"""

CREATE_DONE = """
CREATE TABLE IF NOT EXISTS fencepost_done (
    digest CHAR(64) CHARACTER SET ascii   COLLATE ascii_bin   NOT NULL PRIMARY KEY,
    scope  TEXT     CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    item   TEXT     CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    token  BIGINT   NOT NULL
) ENGINE = InnoDB"""

# Remember a token that is higher than what was seen; lock the row in any case.
_RAISE = """
INSERT INTO fencepost_guard (digest, resource, token) VALUES (%(digest)s, %(resource)s, %(token)s)
    ON DUPLICATE KEY UPDATE token = GREATEST(token, %(token)s)"""

_FIND = "SELECT token FROM fencepost_guard WHERE digest = %(digest)s FOR UPDATE"

_FIND_ITEM = "SELECT 1 FROM fencepost_done WHERE digest = %(digest)s FOR UPDATE"

_RECORD_ITEM = """
INSERT INTO fencepost_done (digest, scope, item, token)
VALUES (%(digest)s, %(scope)s, %(item)s, %(token)s)"""

_NO_SUCH_TABLE = 1146


def raise_guard(conn: Any, *, resource: str, token: int) -> int:
    """Raise the guard of ``resource`` to ``token`` if that is higher; return where it stands."""
    _require_transaction(conn)
    values = {"digest": _digest(resource), "resource": resource, "token": token}
    with conn.cursor(Cursor) as cursor:  # and not conn.cursor(), which may be of the user's kind
        _execute(cursor, _RAISE, values, "fencepost_guard", CREATE_GUARD)
        cursor.execute(_FIND, values)
        [(highest,)] = cursor.fetchall()
    return int(highest)


def record_item(conn: Any, *, scope: str, item: str, token: int) -> bool:
    """Record an item; say whether it was not there before.

    The fence has let this transaction through already, so nobody else can be recording it.
    """
    values = {"digest": _digest(scope, item), "scope": scope, "item": item, "token": token}
    with conn.cursor(Cursor) as cursor:
        _execute(cursor, _FIND_ITEM, values, "fencepost_done", CREATE_DONE)
        if cursor.fetchall():
            return False
        cursor.execute(_RECORD_ITEM, values)
    return True


def _execute(
    cursor: Cursor, statement: str, values: dict[str, Any], table: str, create: str
) -> None:
    try:
        cursor.execute(statement, values)
    except pymysql.ProgrammingError as error:
        if error.args[0] != _NO_SUCH_TABLE:
            raise
        raise FenceMisused(
            f"this database has no table {table}: run 'fencepost migrate --guard URL' once, "
            f"or execute: {' '.join(create.split())}"
        ) from error


def _require_transaction(conn: Any) -> None:
    """Refuse where each statement would be committed by itself: the lock would be gone at once."""
    if not conn.open:
        raise FenceMisused("fence needs an open connection, and this one is closed")
    if conn.get_autocommit() and not conn.server_status & SERVER_STATUS.SERVER_STATUS_IN_TRANS:
        raise FenceMisused(
            "fence needs an open transaction, and this connection would commit each statement by "
            "itself: begin with conn.begin()"
        )


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
