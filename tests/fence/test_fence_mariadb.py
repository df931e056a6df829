"""``lease.fence(conn)`` on MariaDB and MySQL: of two transactions the older token is refused."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pymysql
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from fencepost.errors import FenceMisused, TokenStale
from fencepost.fence import admit, record_item
from fencepost.fence_mariadb import CREATE_DONE, CREATE_GUARD
from mariaplace import KINDS, Place, emptied

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fencepost import Lease

    Connection = pymysql.Connection[Any]


@pytest.fixture(params=KINDS)
def database(request: pytest.FixtureRequest) -> Place:
    """Return a database that has the guard table and one of its own."""
    place = emptied(request.param, request.node.nodeid)
    with closing(connect(place, autocommit=True)) as db, db.cursor() as cursor:
        cursor.execute(CREATE_GUARD)
        cursor.execute(CREATE_DONE)
        cursor.execute("CREATE TABLE effect (token BIGINT NOT NULL) ENGINE = InnoDB")
    return place


def connect(database: Place, **settings: Any) -> Connection:
    settings = {"ssl_disabled": True, **settings}
    return pymysql.connect(
        host="127.0.0.1",
        port=database.port,
        user="post",
        password="secret",
        database=database.name,
        **settings,
    )


@pytest.fixture
def conn(database: Place) -> Iterator[Connection]:
    with closing(connect(database)) as conn:
        yield conn


def write(conn: Connection, token: int) -> None:
    with conn.cursor() as cursor:
        cursor.execute("INSERT INTO effect VALUES (%s)", (token,))


def effects(database: Place) -> list[Any]:
    rows = database.server.run(f"SELECT token FROM `{database}`.effect ORDER BY token")
    return [token for (token,) in rows]


def test_a_newer_token_is_admitted_and_an_older_one_refused(
    conn: Connection, database: Place
) -> None:
    for token in (5, 5, 9):
        admit(conn, resource="r", token=token)
        write(conn, token)
        conn.commit()
    with pytest.raises(TokenStale) as caught:
        admit(conn, resource="r", token=8)
    assert caught.value.highest == 9
    conn.rollback()
    admit(conn, resource="other", token=1)
    conn.commit()
    assert effects(database) == [5, 5, 9]


def test_a_lease_of_any_store_fences_a_transaction(
    conn: Connection, lease: Lease, database: Place
) -> None:
    lease.fence(conn)
    write(conn, 1)
    conn.commit()
    rows = database.server.run(f"SELECT token FROM `{database}`.fencepost_guard")
    assert rows == [(lease.token,)]


def test_the_older_transaction_waits_for_the_newer_one_and_is_refused(
    conn: Connection, database: Place
) -> None:
    admit(conn, resource="r", token=1)
    conn.commit()
    admit(conn, resource="r", token=7)  # and is still open
    write(conn, 7)
    said: list[BaseException] = []

    def late() -> None:
        with closing(connect(database)) as other:
            with other.cursor() as cursor:
                cursor.execute("SELECT count(*) FROM effect")  # its view of the world is from here
                cursor.fetchall()
            try:
                admit(other, resource="r", token=6)
            except TokenStale as stale:
                said.append(stale)

    thread = threading.Thread(target=late)
    thread.start()
    while not _blocked(database):
        thread.join(0.005)
        assert thread.is_alive()
    conn.commit()
    thread.join(30)
    assert [type(error) for error in said] == [TokenStale]
    assert effects(database) == [7]


def _blocked(database: Place) -> bool:
    return bool(
        database.server.run(
            "SELECT 1 FROM information_schema.processlist"
            f" WHERE db = '{database}' AND info LIKE '%INSERT INTO fencepost_guard%'"
            " AND info NOT LIKE '%processlist%'"
        )
    )


def test_a_rolled_back_transaction_leaves_the_guard_as_it_was(conn: Connection) -> None:
    admit(conn, resource="r", token=7)
    conn.rollback()
    admit(conn, resource="r", token=3)
    conn.commit()


def test_a_resource_may_have_any_name(conn: Connection) -> None:
    for number, name in enumerate(("x" * 1100, "x" * 1101, "a", "A", "a ", "🔒"), 1):
        admit(conn, resource=name, token=number)
    with pytest.raises(TokenStale):
        admit(conn, resource="x" * 1101, token=1)


def test_a_connection_that_commits_each_statement_by_itself_is_refused(database: Place) -> None:
    with closing(connect(database, autocommit=True)) as conn:
        with pytest.raises(FenceMisused, match=r"begin with conn\.begin\(\)"):
            admit(conn, resource="r", token=1)
        conn.begin()
        admit(conn, resource="r", token=1)
        conn.commit()
    with pytest.raises(FenceMisused, match="closed"):
        admit(conn, resource="r", token=1)


def test_a_cursor_class_of_the_users_changes_nothing(database: Place) -> None:
    dictionaries = {"cursorclass": pymysql.cursors.DictCursor}
    with closing(connect(database, **dictionaries)) as conn:
        admit(conn, resource="r", token=1)
        assert record_item(conn, scope="s", item="i", token=1)


def test_a_database_without_the_table_says_how_to_make_it(
    conn: Connection, database: Place
) -> None:
    for table in ("guard", "done"):
        database.server.run(f"DROP TABLE `{database}`.fencepost_{table}")
    with pytest.raises(FenceMisused, match="CREATE TABLE IF NOT EXISTS fencepost_guard"):
        admit(conn, resource="r", token=1)
    with pytest.raises(FenceMisused, match="CREATE TABLE IF NOT EXISTS fencepost_done"):
        record_item(conn, scope="s", item="i", token=1)


def test_an_item_is_recorded_once(conn: Connection) -> None:
    assert record_item(conn, scope="s", item="i", token=1)
    assert not record_item(conn, scope="s", item="i", token=1)
    assert record_item(conn, scope="s", item="j", token=1)
    conn.commit()
    assert not record_item(conn, scope="s", item="j", token=2)


def test_sqlalchemy_connections_and_sessions_are_guarded(lease: Lease, database: Place) -> None:
    engine = create_engine(f"mysql+pymysql://post:secret@127.0.0.1:{database.port}/{database}")
    insert = text("INSERT INTO effect VALUES (:token)")
    with engine.begin() as connection:
        lease.fence(connection)
        connection.execute(insert, {"token": 1})
    with Session(engine) as session, session.begin():
        lease.fence(session)
        session.execute(insert, {"token": 2})
    with engine.begin() as connection, pytest.raises(TokenStale):
        admit(connection, resource="default/billing", token=lease.token - 1)
    with (
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        pytest.raises(FenceMisused, match="needs an open transaction"),
    ):
        lease.fence(connection)
    engine.dispose()
    assert effects(database) == [1, 2]
