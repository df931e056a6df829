"""What goes wrong inside of ``run.transaction()`` and is the job's own: no fault of the ledger."""

from __future__ import annotations

import itertools
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pymysql
import pytest

from fencepost import Fencepost
from fencepost.world.mariadb_errors import is_of_server
from joinlab import Home, MariaHome, MySQLHome, PostgresHome
from mariaplace import LoggedMariaDB
from servers import MariaDB, MySQL
from small_disk import SmallPostgres

if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost import Run
    from fencepost.transaction import Transaction

SLOT = datetime(2026, 1, 20, 2, tzinfo=UTC)
_STRICT = ("--max-allowed-packet=1M", "--secure-file-priv=/usr")
_numbers = itertools.count(1)


class StrictMariaDB(MariaDB):
    settings = _STRICT


class StrictLoggedMariaDB(MariaDB):
    settings = (*LoggedMariaDB.settings, *_STRICT)


class StrictMySQL(MySQL):
    settings = _STRICT


class StrictMariaHome(MariaHome):
    kind = StrictMariaDB


class StrictLoggedMariaHome(MariaHome):
    kind = StrictLoggedMariaDB


class StrictMySQLHome(MySQLHome):
    kind = StrictMySQL


POSTGRES = PostgresHome()
MARIAS: list[Home] = [StrictMariaHome(), StrictLoggedMariaHome(), StrictMySQLHome()]
HOMES = [POSTGRES, *MARIAS]


def database(home: Home) -> str:
    name = f"own{next(_numbers)}"
    url = home.database(name)
    home.run("CREATE TABLE effect (item text)", name)
    return url


def assert_the_jobs_own(url: str, body: Callable[[Transaction], object]) -> str:
    """Have a body fail in its first transaction; return the error that is on record."""
    tokens: list[int] = []
    with Fencepost(url) as fp:

        @fp.job("work")
        def work(run: Run) -> None:
            tokens.append(run.token)
            if len(tokens) == 1:
                with run.transaction() as tx:
                    body(tx)

        outcome = fp.trigger("work", SLOT)
    assert (outcome.status, len(tokens)) == ("failed", 1), outcome
    return str(outcome.error)


# Another database, by the same driver.


def is_ended(other: Any) -> None:
    """Have the other session ended, and notice it."""
    cursor = other.cursor()
    if "psycopg" in type(other).__module__:
        cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")
    cursor.execute("SELECT connection_id()")
    ((session,),) = cursor.fetchall()
    with suppress(Exception):
        cursor.execute(f"KILL {session}")
    cursor.execute("SELECT 1")


@pytest.mark.parametrize("home", HOMES, ids=str)
def test_a_session_elsewhere_that_is_ended(home: Home) -> None:
    url = database(home)
    other = home.connected(url)
    assert_the_jobs_own(url, lambda _: is_ended(other))
    with suppress(Exception):
        other.close()


@pytest.mark.parametrize("home", HOMES, ids=str)
def test_a_session_elsewhere_that_was_closed(home: Home) -> None:
    url = database(home)
    other = home.connected(url)
    other.close()
    assert_the_jobs_own(url, lambda _: other.cursor().execute("SELECT 1"))


def raised(code: str) -> str:
    return f"DO $$ BEGIN RAISE EXCEPTION 'as if' USING ERRCODE = '{code}'; END $$"


@pytest.mark.parametrize("code", ["53100", "53200", "53300", "58030", "25006"])
def test_a_postgres_elsewhere_that_lacks_something(code: str) -> None:
    url = database(POSTGRES)
    with POSTGRES.connected(url) as other:
        assert_the_jobs_own(url, lambda _: other.execute(raised(code)))


def test_a_mariadb_elsewhere_that_lacks_something() -> None:
    home = MARIAS[0]
    url = database(home)
    other = home.connected(url)
    words = "SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1021, MESSAGE_TEXT = 'Disk full (./a)'"
    assert "Disk full" in assert_the_jobs_own(url, lambda _: other.cursor().execute(words))
    other.close()


# What was asked of the ledger's own server.


@pytest.mark.parametrize(
    "statements",
    [
        ["COPY effect FROM '/missing'"],
        [
            "SET LOCAL temp_file_limit = 0",
            "SELECT * FROM generate_series(1, 999999) ORDER BY 1 DESC",
        ],
        ["SET TRANSACTION READ ONLY", "INSERT INTO effect VALUES ('a')"],
        ["SET LOCAL statement_timeout = 1", "SELECT pg_sleep(9)"],
        [raised("53100")],
    ],
    ids=["missing", "limit", "read-only", "slow", "raised"],
)
def test_statements_that_postgres_refuses(statements: list[str]) -> None:
    def body(tx: Transaction) -> None:
        for statement in statements:
            tx.execute(statement)

    assert_the_jobs_own(database(POSTGRES), body)


def by_an_item(tx: Transaction) -> None:
    tx.once("a")


def by_a_checkpoint(tx: Transaction) -> None:
    tx.save("a")


def by_the_commit(_: Transaction) -> None:
    """Ask nothing more."""


@pytest.mark.parametrize("then", [by_an_item, by_a_checkpoint, by_the_commit])
def test_a_body_that_makes_its_transaction_read_only(
    then: Callable[[Transaction], None],
) -> None:
    def body(tx: Transaction) -> None:
        tx.execute("SET TRANSACTION READ ONLY")
        then(tx)

    assert "read-only" in assert_the_jobs_own(database(POSTGRES), body)


@pytest.mark.parametrize("code", ["55000", "58P01", "57014", "53400"])
def test_what_a_deferred_trigger_refuses_at_the_commit(code: str) -> None:
    url = database(POSTGRES)
    name = url.rpartition("/")[2]
    words = f"BEGIN RAISE EXCEPTION 'refused' USING ERRCODE = '{code}'; END"
    POSTGRES.run(
        f"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ {words} $$", name
    )
    POSTGRES.run(
        "CREATE CONSTRAINT TRIGGER refuses AFTER INSERT ON effect DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION refuse()",
        name,
    )
    error = assert_the_jobs_own(url, lambda tx: tx.execute("INSERT INTO effect VALUES ('a')"))
    assert "refused" in error


@pytest.mark.parametrize("home", MARIAS, ids=str)
def test_a_file_that_mariadb_may_not_write(home: Home) -> None:
    def body(tx: Transaction) -> None:
        tx.execute("SELECT 1 INTO OUTFILE '/tmp/nowhere'")

    assert "1290" in assert_the_jobs_own(database(home), body)


@pytest.mark.parametrize("home", MARIAS, ids=str)
def test_a_table_in_memory_that_is_full(home: Home) -> None:
    url = database(home)
    name = url.rpartition("/")[2]
    home.run("CREATE TABLE small (item char(200)) ENGINE = MEMORY MAX_ROWS = 5", name)

    def body(tx: Transaction) -> None:
        for _ in range(100_000):
            tx.execute("INSERT INTO small VALUES ('a')")

    assert "1114" in assert_the_jobs_own(url, body)


@pytest.mark.parametrize("home", MARIAS, ids=str)
@pytest.mark.parametrize("swallowed", [False, True])
def test_a_statement_that_is_larger_than_the_server_takes(home: Home, *, swallowed: bool) -> None:
    def body(tx: Transaction) -> None:
        try:
            tx.execute("INSERT INTO effect VALUES (%s)", ("a" * 5_000_000,))
        except Exception:
            if not swallowed:
                raise

    assert_the_jobs_own(database(home), body)


# What a body does to its own session.


@pytest.mark.parametrize("home", HOMES, ids=str)
@pytest.mark.parametrize("then", [by_an_item, by_the_commit])
def test_a_body_that_closes_its_connection(home: Home, then: Callable[[Transaction], None]) -> None:
    def body(tx: Transaction) -> None:
        with tx.connection:
            tx.execute("SELECT 1")
        then(tx)

    assert "ended by other means" in assert_the_jobs_own(database(home), body)


@pytest.mark.parametrize("home", HOMES, ids=str)
def test_a_body_that_goes_on_with_a_connection_that_it_has_closed(home: Home) -> None:
    def body(tx: Transaction) -> None:
        connection = tx.connection
        connection.close()
        connection.cursor().execute("SELECT 1")

    assert_the_jobs_own(database(home), body)


# And what is a fault nevertheless.


def fill(tx: Transaction) -> None:
    for _ in range(3_000):
        tx.execute("INSERT INTO effect VALUES (REPEAT('a', 50000))")


def assert_a_fault(url: str, body: Callable[[Transaction], object]) -> None:
    """Have a body fail in its first transaction, and be resumed."""
    tokens: list[int] = []
    with Fencepost(url) as fp:

        @fp.job("work")
        def work(run: Run) -> None:
            tokens.append(run.token)
            if len(tokens) == 1:
                with run.transaction() as tx:
                    body(tx)

        outcome = fp.trigger("work", SLOT)
        (run,) = fp.runs("work")
    assert outcome.status == "succeeded", outcome
    assert (len(tokens), run.losses, run.releases) == (2, 0, 1)


def test_a_postgres_whose_disk_is_full() -> None:
    with SmallPostgres.own() as server:
        url = server.database("test")
        server.run("CREATE TABLE effect (item text)", database="test")
        server.run("ALTER TABLE effect ALTER item SET STORAGE EXTERNAL", database="test")

        def body(tx: Transaction) -> None:
            server.disk.fill()
            try:
                fill(tx)
            finally:
                server.disk.clear()

        assert_a_fault(url, body)


class NarrowMariaDB(MariaDB):
    """A server that has no more room for its tables than this. (On a full disk it ends itself.)"""

    settings = (
        "--innodb-file-per-table=0",
        "--innodb-data-file-path=ibdata1:12M:autoextend:max:40M",
    )


def test_a_mariadb_without_room_for_its_tables() -> None:
    with NarrowMariaDB.own() as server:
        url = server.database("test")
        server.run("CREATE TABLE effect (item text)", database="test")
        assert_a_fault(url, fill)


@pytest.mark.parametrize(
    ("number", "words", "lacks"),
    [
        (1021, "Disk full (./test/effect); waiting for someone to free some space", True),
        (1021, "Disk full (/tmp/#sql-temptable-1); waiting for someone to free some space", False),
        (1037, "Out of memory; restart server and try again (needed 9 bytes)", True),
        (1290, "The MariaDB server is running with the --read-only option", True),
        (1290, "The MySQL server is running with the --super-read-only option", True),
        (1290, "The MySQL server is running with the --secure-file-priv option", False),
        (1030, "Got error 168 - 'Unknown (generic) error from engine'", False),
        (1064, "You have an error in your SQL syntax", False),
        (2013, "Lost connection to MySQL server during query", False),
    ],
)
def test_what_mariadb_lacks(number: int, words: str, *, lacks: bool) -> None:
    assert is_of_server(pymysql.OperationalError(number, words)) is lacks
