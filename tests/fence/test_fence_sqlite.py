"""``lease.fence(conn)`` on sqlite3: where it guards, and where it refuses to pretend."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from fencepost import LeaseLost, TokenStale
from fencepost.errors import FenceMisused
from fencepost.fence import CREATE_GUARD, admit

if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost import Fencepost, Lease

BEGINNINGS = ["BEGIN IMMEDIATE", "BEGIN EXCLUSIVE", "BEGIN"]


def highest(database: str, resource: str) -> int | None:
    with closing(sqlite3.connect(database)) as conn:
        row = conn.execute(
            "SELECT token FROM fencepost_guard WHERE resource = ?", (resource,)
        ).fetchone()
    return None if row is None else int(row[0])


@pytest.mark.parametrize("begin", BEGINNINGS)
def test_a_committed_fence_remembers_the_token(
    conn: sqlite3.Connection, database: str, lease: Lease, begin: str
) -> None:
    conn.execute(begin)
    lease.fence(conn)
    conn.execute("INSERT INTO effect (token) VALUES (?)", (lease.token,))
    conn.execute("COMMIT")
    assert highest(database, "default/billing") == lease.token


@pytest.mark.parametrize("begin", BEGINNINGS)
def test_a_fence_has_the_write_lock_even_if_the_token_was_seen_before(
    conn: sqlite3.Connection, database: str, lease: Lease, begin: str
) -> None:
    for _ in range(2):
        conn.execute(begin)
        lease.fence(conn)
        with (
            closing(sqlite3.connect(database, timeout=0, isolation_level=None)) as other,
            pytest.raises(sqlite3.OperationalError, match="locked"),
        ):
            other.execute("BEGIN IMMEDIATE")
        conn.execute("COMMIT")


@pytest.mark.parametrize("begin", BEGINNINGS)
def test_a_predecessor_is_refused_once_its_successor_has_fenced(
    conn: sqlite3.Connection, fp: Fencepost, begin: str
) -> None:
    with fp.lock("billing") as old:
        pass
    with fp.lock("billing") as new:
        conn.execute(begin)
        new.fence(conn)
        conn.execute("COMMIT")
        conn.execute(begin)
        with pytest.raises(TokenStale) as refusal:
            old.fence(conn)
    assert (refusal.value.token, refusal.value.highest) == (old.token, new.token)
    assert refusal.value.resource == "default/billing"


def test_a_fence_that_was_rolled_back_is_forgotten(
    conn: sqlite3.Connection, database: str, lease: Lease
) -> None:
    conn.execute("BEGIN IMMEDIATE")
    lease.fence(conn)
    conn.execute("ROLLBACK")
    assert highest(database, "default/billing") is None


def test_a_lost_lease_is_refused_though_nobody_came_after_it(
    conn: sqlite3.Connection, fp: Fencepost
) -> None:
    lock = fp.lock("billing")
    lease = lock.acquire()
    lock.release(lease)
    conn.execute("BEGIN IMMEDIATE")
    with pytest.raises(LeaseLost):
        lease.fence(conn)


def test_resources_have_tokens_of_their_own(conn: sqlite3.Connection) -> None:
    conn.execute("BEGIN IMMEDIATE")
    admit(conn, resource="invoices", token=9)
    admit(conn, resource="letters", token=3)
    with pytest.raises(TokenStale):
        admit(conn, resource="invoices", token=8)


def test_a_caller_may_name_the_resource(
    conn: sqlite3.Connection, database: str, lease: Lease
) -> None:
    conn.execute("BEGIN IMMEDIATE")
    lease.fence(conn, resource="invoices")
    conn.execute("COMMIT")
    assert highest(database, "invoices") == lease.token


def test_what_the_zombie_committed_is_seen_after_the_fence(
    conn: sqlite3.Connection, database: str
) -> None:
    with closing(sqlite3.connect(database, isolation_level=None)) as zombie:
        zombie.execute("BEGIN IMMEDIATE")
        admit(zombie, resource="r", token=1)
        zombie.execute("INSERT INTO effect (token) VALUES (1)")
        conn.execute("BEGIN")
        zombie.execute("COMMIT")
    admit(conn, resource="r", token=2)
    assert conn.execute("SELECT token FROM effect").fetchall() == [(1,)]


def test_a_connection_that_commits_each_statement_is_refused(
    conn: sqlite3.Connection, lease: Lease
) -> None:
    with pytest.raises(FenceMisused, match=r'begin with conn.execute\("BEGIN IMMEDIATE"\)'):
        lease.fence(conn)


def test_a_transaction_that_has_ended_is_refused(conn: sqlite3.Connection, lease: Lease) -> None:
    conn.execute("BEGIN IMMEDIATE")
    conn.execute("COMMIT")
    with pytest.raises(FenceMisused, match="needs an open transaction"):
        lease.fence(conn)


def test_an_implicit_transaction_that_has_not_begun_is_refused(database: str, lease: Lease) -> None:
    with closing(sqlite3.connect(database)) as conn, pytest.raises(FenceMisused, match="BEGIN"):
        lease.fence(conn)


def test_an_implicit_transaction_that_has_written_is_guarded(database: str, lease: Lease) -> None:
    with closing(sqlite3.connect(database)) as conn:
        conn.execute("INSERT INTO effect (token) VALUES (1)")
        lease.fence(conn)
        conn.commit()
    assert highest(database, "default/billing") == lease.token


@pytest.mark.parametrize("journal", ["WAL", "DELETE"])
def test_a_read_before_the_fence_of_a_deferred_transaction_is_refused(
    conn: sqlite3.Connection, lease: Lease, journal: str
) -> None:
    conn.execute(f"PRAGMA journal_mode={journal}")
    conn.execute("BEGIN")
    conn.execute("SELECT * FROM effect").fetchall()
    with pytest.raises(FenceMisused, match="before the first read"):
        lease.fence(conn)
    conn.execute("ROLLBACK")


@pytest.mark.parametrize("journal", ["WAL", "DELETE"])
def test_a_read_under_the_write_lock_is_harmless(
    conn: sqlite3.Connection, lease: Lease, journal: str
) -> None:
    conn.execute(f"PRAGMA journal_mode={journal}")
    conn.execute("BEGIN IMMEDIATE")
    conn.execute("SELECT * FROM effect").fetchall()
    lease.fence(conn)
    conn.execute("COMMIT")


def test_a_savepoint_that_has_read_is_refused_too(conn: sqlite3.Connection, lease: Lease) -> None:
    conn.execute("SAVEPOINT s")
    conn.execute("SELECT * FROM effect").fetchall()
    with pytest.raises(FenceMisused, match="before the first read"):
        lease.fence(conn)
    conn.execute("ROLLBACK")


def test_a_fence_that_found_the_file_busy_succeeds_in_the_next_transaction(
    conn: sqlite3.Connection, database: str, lease: Lease
) -> None:
    with closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        conn.execute("BEGIN")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            lease.fence(conn)
        other.execute("ROLLBACK")
    conn.execute("ROLLBACK")
    conn.execute("BEGIN")
    lease.fence(conn)
    conn.execute("COMMIT")


def test_a_closed_connection_is_refused(conn: sqlite3.Connection, lease: Lease) -> None:
    conn.close()
    with pytest.raises(FenceMisused, match="closed"):
        lease.fence(conn)


def test_the_connection_of_another_thread_is_refused(
    conn: sqlite3.Connection, lease: Lease
) -> None:
    conn.execute("BEGIN IMMEDIATE")
    caught: list[BaseException] = []

    def elsewhere() -> None:
        try:
            lease.fence(conn)
        except FenceMisused as error:
            caught.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "thread" in str(caught[0])


@pytest.mark.parametrize("thing", [None, "app.db", object()])
def test_what_is_no_connection_is_refused_with_a_way_out(lease: Lease, thing: object) -> None:
    with pytest.raises(FenceMisused, match=r"admits\(highest_seen, token\)"):
        lease.fence(thing)


def test_a_missing_table_is_answered_with_the_statement_that_makes_it(lease: Lease) -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as conn:
        conn.execute("BEGIN IMMEDIATE")
        with pytest.raises(FenceMisused) as refusal:
            lease.fence(conn)
        conn.execute("ROLLBACK")
        message = str(refusal.value)
        conn.execute(message[message.index("CREATE TABLE") :])
        conn.execute("BEGIN IMMEDIATE")
        lease.fence(conn)


def test_a_temporary_table_of_the_same_name_is_not_the_guard(
    conn: sqlite3.Connection, database: str, lease: Lease
) -> None:
    conn.execute(CREATE_GUARD.replace("TABLE IF NOT EXISTS", "TEMP TABLE"))
    conn.execute("BEGIN IMMEDIATE")
    lease.fence(conn)
    conn.execute("COMMIT")
    assert highest(database, "default/billing") == lease.token


def _as_dict(cursor: sqlite3.Cursor, row: tuple[object, ...]) -> dict[str, object]:
    return dict(zip((column[0] for column in cursor.description), row, strict=True))


@pytest.mark.parametrize("factory", [sqlite3.Row, _as_dict])
def test_the_row_factory_of_the_user_does_not_matter(
    conn: sqlite3.Connection, lease: Lease, factory: Callable[..., object]
) -> None:
    conn.row_factory = factory
    conn.execute("BEGIN IMMEDIATE")
    lease.fence(conn)
    lease.fence(conn)
    assert conn.row_factory is factory


@pytest.mark.since(3, 12)  # when autocommit= came
@pytest.mark.parametrize("journal", ["WAL", "DELETE"])
def test_a_connection_that_is_always_in_a_transaction_fences_first(
    database: str, lease: Lease, journal: str
) -> None:
    options = {"autocommit": False}
    with closing(sqlite3.connect(database, isolation_level=None)) as conn:
        conn.execute(f"PRAGMA journal_mode={journal}")
    with closing(sqlite3.connect(database, **options)) as conn:  # type: ignore[call-overload]
        for _ in range(2):
            lease.fence(conn)
            conn.execute("INSERT INTO effect (token) VALUES (?)", (lease.token,))
            conn.commit()
        conn.execute("SELECT * FROM effect").fetchall()
        with pytest.raises(FenceMisused, match="fence first"):
            lease.fence(conn)
        conn.rollback()
        lease.fence(conn)
        conn.rollback()
    assert highest(database, "default/billing") == lease.token


@pytest.mark.since(3, 12)  # when autocommit= came
def test_a_connection_in_autocommit_mode_is_refused(database: str, lease: Lease) -> None:
    options = {"autocommit": True}
    with closing(sqlite3.connect(database, **options)) as conn:  # type: ignore[call-overload]
        with pytest.raises(FenceMisused, match="needs an open transaction"):
            lease.fence(conn)
        conn.execute("BEGIN IMMEDIATE")
        lease.fence(conn)
        conn.execute("COMMIT")
    assert highest(database, "default/billing") == lease.token


def test_importing_the_fence_brings_in_nothing_heavy() -> None:
    heavy = "{'asyncio', 'json', 'urllib.parse', 'sqlite3', 'sqlalchemy', 'threading'}"
    program = f"import sys, fencepost.fence; print(sorted({heavy} & set(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {program}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "[]"
