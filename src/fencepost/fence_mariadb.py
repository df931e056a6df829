"""The fence in a MariaDB or MySQL database: a row that the transaction locks before it compares.

``INSERT … ON DUPLICATE KEY UPDATE`` locks the guard's row, new or old, until the transaction ends,
and reads what was committed last, whatever older state the transaction sees elsewhere. So of two
transactions the one with the older token waits, and is then refused.

Connections are those of PyMySQL, or of aiomysql and asyncmy, which are made after it. None of them
is imported here: whoever brings a connection has its driver.
"""

from __future__ import annotations

import hashlib
import importlib

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
_IN_TRANSACTION = 1  # a bit of the status that comes with every answer

_BLOCKING, _ASYNC = "pymysql", ("aiomysql", "asyncmy")


def raise_guard(conn: Any, *, resource: str, token: int) -> int:
    """Raise the guard of ``resource`` to ``token`` if that is higher; return where it stands."""
    require_transaction(conn)
    values = {"digest": _digest(resource), "resource": resource, "token": token}
    with _cursor(conn) as cursor:
        try:
            cursor.execute(_RAISE, values)
        except Exception as error:
            _tell_of_table(error, "fencepost_guard", CREATE_GUARD)
            raise
        cursor.execute(_FIND, values)
        [(highest,)] = cursor.fetchall()
    return int(highest)


async def awaited_guard(conn: Any, *, resource: str, token: int) -> int:
    """Do the same on an async connection."""
    values = {"digest": _digest(resource), "resource": resource, "token": token}
    async with _cursor(conn) as cursor:
        try:
            await cursor.execute(_RAISE, values)
        except Exception as error:
            _tell_of_table(error, "fencepost_guard", CREATE_GUARD)
            raise
        await cursor.execute(_FIND, values)
        [(highest,)] = await cursor.fetchall()
    return int(highest)


def record_item(conn: Any, *, scope: str, item: str, token: int) -> bool:
    """Record an item; say whether it was not there before.

    The fence has let this transaction through already, so nobody else can be recording it.
    """
    values = {"digest": _digest(scope, item), "scope": scope, "item": item, "token": token}
    with _cursor(conn) as cursor:
        try:
            cursor.execute(_FIND_ITEM, values)
        except Exception as error:
            _tell_of_table(error, "fencepost_done", CREATE_DONE)
            raise
        if cursor.fetchall():
            return False
        cursor.execute(_RECORD_ITEM, values)
    return True


async def awaited_item(conn: Any, *, scope: str, item: str, token: int) -> bool:
    """Do the same on an async connection."""
    values = {"digest": _digest(scope, item), "scope": scope, "item": item, "token": token}
    async with _cursor(conn) as cursor:
        try:
            await cursor.execute(_FIND_ITEM, values)
        except Exception as error:
            _tell_of_table(error, "fencepost_done", CREATE_DONE)
            raise
        if await cursor.fetchall():
            return False
        await cursor.execute(_RECORD_ITEM, values)
    return True


def require_transaction(conn: Any) -> None:
    """Refuse where each statement would be committed by itself: the lock would be gone at once."""
    if not _is_open(conn):
        raise FenceMisused("fence needs an open connection, and this one is closed")
    if conn.get_autocommit() and not conn.server_status & _IN_TRANSACTION:
        begin = "await conn.begin()" if is_async(conn) else "conn.begin()"
        raise FenceMisused(
            "fence needs an open transaction, and this connection would commit each statement by "
            f"itself: begin with {begin}"
        )


def is_async(conn: object) -> bool:
    """Say whether a fence on this connection must be awaited."""
    return _driver(conn) in _ASYNC


def cut(conn: Any) -> None:
    """End an async connection at once; the server undoes what was not committed."""
    if not conn.loop.is_closed():  # else nothing can be sent on it any more
        conn.close()


def _is_open(conn: Any) -> bool:
    driver = _driver(conn)
    if driver == "aiomysql":
        return not conn.closed
    return bool(conn.connected if driver == "asyncmy" else conn.open)


def _cursor(conn: Any) -> Any:
    """Return a plain cursor, and not conn.cursor(), which may be of the user's kind."""
    return conn.cursor(importlib.import_module(f"{_driver(conn)}.cursors").Cursor)


def _driver(conn: object) -> str:
    """Return which driver a connection is of, or of a class derived from whose."""
    packages = (kind.__module__.partition(".")[0] for kind in type(conn).__mro__)
    return next(package for package in packages if package in (_BLOCKING, *_ASYNC))


def _tell_of_table(error: Exception, table: str, create: str) -> None:
    """Raise a better error for a table that is missing."""
    if error.args[:1] == (_NO_SUCH_TABLE,):
        raise FenceMisused(
            f"this database has no table {table}: run 'fencepost migrate --guard URL' once, "
            f"or execute: {' '.join(create.split())}"
        ) from error


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
