"""The fence stands at the resource: it admits a token only if no higher one was there before.

A lease makes two holders rare; the fence makes the second one harmless. In the transaction that
writes, ``admit`` compares and remembers the token under the same write lock, so that of two
transactions on one database the one with the older token cannot commit after the newer one.
"""

from __future__ import annotations

import importlib

from fencepost.errors import FenceMisused, Misuse
from fencepost.fence_awaited import Fencing, compared
from fencepost.model.fenced import Mark

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from sqlite3 import Connection
    from typing import Any

    from fencepost.model.fenced import Fenced

FENCING_TOKEN = "Fencing-Token"
FENCING_RESOURCE = "Fencing-Resource"
# The resources of earlier attempts under another name, each with the token to refuse there.
FENCING_FORMER = "Fencing-Former"

# What an INTEGER of SQLite, PostgreSQL and MySQL can hold.
HIGHEST_TOKEN = 2**63 - 1

# The documented statement that prepares a database for fences; ``fencepost migrate`` runs it too.
CREATE_GUARD = """
CREATE TABLE IF NOT EXISTS fencepost_guard (
    resource TEXT    PRIMARY KEY,
    token    INTEGER NOT NULL
)"""

# Remember a token that is higher than what was seen. The write lock is taken even if nothing
# changes, and before anything is read: what this transaction sees from here on is the newest.
_RAISE = """
INSERT INTO main.fencepost_guard AS seen (resource, token) VALUES (:resource, :token)
    ON CONFLICT (resource) DO UPDATE SET token = excluded.token
 WHERE excluded.token > seen.token"""

# And the one that lets a database keep which items of a run were done in it.
CREATE_DONE = """
CREATE TABLE IF NOT EXISTS fencepost_done (
    scope TEXT    NOT NULL,
    item  TEXT    NOT NULL,
    token INTEGER NOT NULL,
    PRIMARY KEY (scope, item)
) WITHOUT ROWID"""

_RECORD_ITEM = """
INSERT OR IGNORE INTO main.fencepost_done (scope, item, token) VALUES (:scope, :item, :token)"""

_FIND = "SELECT token FROM main.fencepost_guard WHERE resource = :resource"


def admit(conn: object, *, resource: str, token: int) -> Any:
    """Let ``token`` through in the open transaction of ``conn``, or raise ``TokenStale``.

    Everything the transaction did or will do then stands behind the fence: if this raises, roll
    back; if the transaction commits, every older token is refused from then on.

    On an async connection, of psycopg, aiomysql or asyncmy, it returns what must be awaited; else
    None.
    """
    checked_token(token)
    return admit_all(conn, [Mark(resource, token)])


def admit_all(conn: object, marks: Sequence[Mark]) -> Any:
    """Do the same for the marks of one fence, in their order: every fence takes rows in that one.

    It raises ``TokenStale`` only for a mark that is the holder's own.
    """
    database, begin = _driver_of(conn)
    if (server := _server_fence(database)) is not None:
        if server.is_async(database):
            return Fencing(server, database, marks)
    else:
        _require_transaction(database, begin=begin)
    raise_one = raise_guard if server is None else server.raise_guard
    for mark in marks:
        compared(mark, raise_one(database, resource=mark.resource, token=mark.token))
    return None


def headers_of(fenced: Fenced, token: int) -> dict[str, str]:
    """Return the headers by which a service refuses earlier holders, and earlier attempts."""
    headers = {FENCING_TOKEN: str(token), FENCING_RESOURCE: header_safe(fenced.resource)}
    if fenced.formers:
        formers = (f"{header_safe(name)};{seen}" for name, seen in fenced.formers)
        headers[FENCING_FORMER] = ", ".join(formers)
    return headers


def checked_token(token: object) -> int:
    """Return the token, or refuse what cannot be one."""
    if isinstance(token, bool) or not isinstance(token, int) or not 0 < token <= HIGHEST_TOKEN:
        raise Misuse(f"fencing token {token!r} is not a whole number from 1 to 2**63 - 1")
    return token


def raise_guard(database: Connection, *, resource: str, token: int) -> int:
    """Raise the guard of ``resource`` to ``token`` if that is higher; return where it stands.

    The caller has a transaction open, and keeps it open until its work is done.
    """
    import sqlite3

    cursor = sqlite3.Cursor(database)  # and not database.cursor(), which has the user's row factory
    values = {"resource": resource, "token": token}
    try:
        cursor.execute(_RAISE, values)
    except sqlite3.OperationalError as error:
        if not str(error).startswith("no such table"):
            raise
        raise FenceMisused(
            "this database has no table fencepost_guard: run 'fencepost migrate --guard URL' once, "
            f"or execute: {' '.join(CREATE_GUARD.split())}"
        ) from error
    return find_guard(database, resource=resource)


def must_await(conn: object) -> bool:
    """Say whether ``admit`` and ``record_item`` on this connection return what must be awaited."""
    database, _ = _driver_of(conn)
    server = _server_fence(database)
    return server is not None and bool(server.is_async(database))


def record_item(conn: object, *, scope: str, item: str, token: int) -> Any:
    """Record an item in the open transaction of ``conn``; say whether it was not there before.

    The fence has let this transaction through already, so nobody else can be recording it. On an
    async connection it returns what must be awaited for that.
    """
    import sqlite3

    database, _ = _driver_of(conn)
    if (server := _server_fence(database)) is not None:
        record = server.awaited_item if server.is_async(database) else server.record_item
        return record(database, scope=scope, item=item, token=token)
    values = {"scope": scope, "item": item, "token": token}
    try:
        return sqlite3.Cursor(database).execute(_RECORD_ITEM, values).rowcount == 1
    except sqlite3.OperationalError as error:
        if not str(error).startswith("no such table"):
            raise
        raise FenceMisused(
            "this database has no table fencepost_done: run 'fencepost migrate --guard URL' once, "
            f"or execute: {' '.join(CREATE_DONE.split())}"
        ) from error


def find_guard(database: Connection, *, resource: str) -> int:
    """Return the highest token that ``resource`` has seen; 0 if none."""
    import sqlite3

    row = sqlite3.Cursor(database).execute(_FIND, {"resource": resource}).fetchone()
    return 0 if row is None else int(row[0])


def header_safe(text: str) -> str:
    """Return a resource's name as a header may carry it: percent-encoded where it is not plain.

    Spaces at its ends would be stripped on the way, and a comma would look like two headers.
    """
    if text.isascii() and text.isprintable() and not any(mark in text for mark in "%, "):
        return text
    from urllib.parse import quote  # dear, and most names are plain

    return quote(text, safe="/#")


# Where the fence of a driver is: ``raise_guard`` and ``record_item``, on its connections, and what
# an async one needs (``fence_awaited``).
_SERVER_FENCES = {
    "aiomysql.": "fencepost.fence_mariadb",
    "asyncmy.": "fencepost.fence_mariadb",
    "pymysql.": "fencepost.fence_mariadb",
    "psycopg.": "fencepost.fence_postgres",
}


def _server_fence(driver: object) -> Any:
    """Return the module that guards this driver's databases; None if there is none."""
    for package, module in _SERVER_FENCES.items():
        if _comes_from(driver, package):
            return importlib.import_module(module)
    return None


def _driver_of(conn: Any) -> tuple[Any, str]:
    """Return the driver's connection that ``conn`` is or wraps, and how its user begins."""
    import sqlite3

    if isinstance(conn, sqlite3.Connection) or _server_fence(conn) is not None:
        return conn, 'conn.execute("BEGIN IMMEDIATE")'
    if _comes_from(conn, "sqlalchemy."):
        return _beneath_sqlalchemy(conn)
    raise _unknown(conn)


def _beneath_sqlalchemy(conn: Any) -> tuple[Any, str]:
    """Return the driver's connection beneath an SQLAlchemy connection or session."""
    import sqlite3

    from sqlalchemy.exc import InvalidRequestError

    if _comes_from(conn, "sqlalchemy.ext.asyncio"):
        raise _asynchronous()
    begin = 'conn.exec_driver_sql("BEGIN IMMEDIATE")'
    try:
        if callable(getattr(conn, "connection", None)):  # a session
            conn, begin = conn.connection(), f"session.connection().{begin[5:]}"
        if getattr(conn, "closed", False):
            raise FenceMisused("fence needs an open connection, and this one is closed")
        driver = getattr(getattr(conn, "connection", None), "driver_connection", None)
    except InvalidRequestError as error:
        raise FenceMisused(f"fence needs an open transaction: {error}") from error
    dialect = getattr(conn, "dialect", None)
    if dialect is not None and dialect.is_async:  # inside of run_sync, where nothing is awaited
        raise _asynchronous()
    if isinstance(driver, sqlite3.Connection) or _server_fence(driver) is not None:
        return driver, begin
    if driver is None or dialect is None:
        raise _unknown(conn)
    raise FenceMisused(
        f"fence does not guard {dialect.name} by {dialect.driver}: keep the highest token "
        "in a row that the transaction locks, and compare with admits(highest_seen, token)"
    )


def _comes_from(thing: object, module: str) -> bool:
    """Say whether ``thing`` is of a class of ``module``, or of one derived from it."""
    return any(kind.__module__.startswith(module) for kind in type(thing).__mro__)


def _unknown(conn: object) -> FenceMisused:
    return FenceMisused(
        f"fence cannot guard a {type(conn).__module__}.{type(conn).__qualname__}: give it a "
        "sqlite3 or SQLAlchemy connection, or compare tokens with admits(highest_seen, token)"
    )


def _asynchronous() -> FenceMisused:
    return FenceMisused(
        "fence cannot guard an async connection of SQLAlchemy: do this transaction on a blocking "
        "connection, inside asyncio.to_thread"
    )


def _require_transaction(database: Connection, *, begin: str) -> None:
    """Refuse where the comparison could not hold until the commit.

    Without a transaction there is nothing to guard. In a deferred one that has read, the state it
    acts on may be older than the comparison. A transaction that has the write lock has neither
    fault, and one that has touched nothing yet is about to get the lock.
    """
    import sqlite3

    try:
        begun = database.in_transaction
        late = begun and _is_touched(database) and not _is_writing(database)
    except sqlite3.ProgrammingError as error:  # closed, or another thread's
        raise FenceMisused(f"fence cannot use this connection: {error}") from error
    if not begun:
        raise FenceMisused(
            "fence needs an open transaction, and this connection would commit each statement by "
            f"itself: begin with {begin}"
        )
    if late:
        raise FenceMisused(
            "fence must come before the first read of a transaction, because what was read may be "
            f"older than the fence: fence first, or begin with {begin}"
        )


def _is_touched(database: Connection) -> bool:
    """Say whether the open transaction has read or written anything.

    The sqlite3 module does not offer ``sqlite3_txn_state``. But a connection that has a snapshot
    or a lock is refused a checkpoint, and one that has none is granted it at no harm: a passive
    checkpoint waits for nobody, and SQLite makes one by itself every thousand pages.
    """
    import sqlite3

    try:
        sqlite3.Cursor(database).execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_LOCKED:
            raise
        return True
    return False


class _Answer(Exception):
    """Carries SQLite's answer out of a backup that was never meant to go on."""


def _is_writing(database: Connection) -> bool:
    """Say whether a transaction that has touched something holds the write lock.

    A backup's first step answers SQLITE_BUSY if its source connection is in a write transaction,
    and copies one page if not; either way the callback ends it there.
    """
    import sqlite3

    def answer(status: int, _remaining: int, _total: int) -> None:
        raise _Answer(status)

    target = sqlite3.connect(":memory:")
    try:
        database.backup(target, pages=1, progress=answer)
    except _Answer as given:
        return bool(given.args[0] == sqlite3.SQLITE_BUSY)
    finally:
        target.close()
    return False
