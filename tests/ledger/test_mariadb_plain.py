"""What is true of plain transactions of user code, as they are where MariaDB has a binary log.

That they do what XA transactions do elsewhere: ``test_joined`` and ``test_mariadb_joined``.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pymysql
import pytest
from ledgerlab import claimed

from fencepost.errors import Misuse
from fencepost.ledger.api import NOTHING
from fencepost.model.slot import RunKey
from fencepost.world.flow import finish
from fencepost.world.mariadb_guest import Guest
from joinlab import LoggedMariaHome, LoggedMySQLHome, MariaHome, until
from marialab import opened_mariadb
from mariaplace import LoggedMariaDB
from servers import MariaDB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fencepost.ledger.api import Attempt
    from fencepost.ledger.draft_joined import Joined
    from fencepost.ledger.draft_ledger import DraftLedger

KEY, DATABASE, HOME = RunKey("job", 1_000), "joined_plainly", LoggedMariaHome()

PROCEDURES = {
    "commits": "COMMIT",
    "rolls_back": "ROLLBACK",
    "begins": "START TRANSACTION",
    "creates": "BEGIN CREATE TABLE IF NOT EXISTS made (n INT); INSERT INTO made VALUES (1); END",
    "switches": "SET autocommit = 1",
    "meets": """BEGIN
        DECLARE CONTINUE HANDLER FOR 1213 SET @met = 1;
        UPDATE effect SET n = 1 WHERE item = 102;
    END""",
}


@pytest.fixture
def ledger() -> Iterator[DraftLedger]:
    url = HOME.database(DATABASE)
    HOME.run("DROP TABLE IF EXISTS effect", DATABASE)
    HOME.run("CREATE TABLE effect (item INT PRIMARY KEY, n INT)", DATABASE)
    for name, body in PROCEDURES.items():
        HOME.run(f"CREATE OR REPLACE PROCEDURE {name}() {body}", DATABASE)
    ledger = HOME.opened(url, namespace=f"n{time.time_ns()}")
    finish(ledger.jobs())
    yield ledger
    finish(ledger.close())


def begun(ledger: DraftLedger, attempt: Attempt) -> Joined:
    joined = ledger.join(attempt)
    joined.begin(idle=10.0, longest=0.0)
    return joined


def add(joined: Joined, item: int) -> None:
    joined.execute("INSERT INTO effect VALUES (%s, 0)", (item,))


def effects() -> list[Any]:
    return [item for (item,) in HOME.run("SELECT item FROM effect ORDER BY item", DATABASE)]


@pytest.mark.parametrize(
    "end",
    [
        lambda joined: joined.connection.commit(),
        lambda joined: joined.connection.rollback(),
        lambda joined: joined.connection.begin(),
        lambda joined: joined.connection.autocommit(True),  # noqa: FBT003 -- the driver's way
        lambda joined: joined.connection.query("COMMIT"),
        lambda joined: joined.connection.cursor().execute("SELECT 1; COMMIT"),
        lambda joined: joined.connection.cursor(pymysql.cursors.SSCursor).execute("COMMIT"),
        lambda joined: joined.executemany("DROP TABLE IF EXISTS %s", [("a",), ("b",)]),
        lambda joined: joined.executemany(
            "INSERT INTO effect VALUES (%s, 0) ON DUPLICATE KEY UPDATE n = 1; COMMIT", [(2,), (3,)]
        ),
    ],
)
def test_whatever_would_end_it_is_refused_by_each_way_to_say_it(
    ledger: DraftLedger, end: Callable[[Joined], object]
) -> None:
    joined = begun(ledger, claimed(ledger, KEY, "a"))
    add(joined, 1)
    with pytest.raises(Misuse, match="outside of it"):
        end(joined)
    assert effects() == []
    joined.once("s", "x", call="1", repeat=False)
    with pytest.raises(Misuse, match="outside of it"):  # also after we have spoken
        end(joined)
    joined.commit(None, NOTHING)
    assert effects() == [1]


@pytest.mark.parametrize(
    ("hidden", "kept"),
    [
        ("CALL commits()", [1]),
        ("CALL begins()", [1]),
        ("CALL creates()", [1]),
        ("CALL rolls_back()", []),
        ("CALL switches()", [1, 2]),  # each statement commits by itself
        ("IF 1 THEN COMMIT; END IF", [1]),
        ("EXECUTE IMMEDIATE 'COMMIT'", [1]),
        ("PREPARE hidden FROM 'COMMIT'; EXECUTE hidden", [1]),
    ],
)
def test_what_was_ended_by_what_no_text_shows_is_noticed_by_the_commit(
    ledger: DraftLedger, hidden: str, kept: list[int]
) -> None:
    attempt = claimed(ledger, KEY, "a")
    joined = begun(ledger, attempt)
    add(joined, 1)
    joined.execute(hidden, ())
    add(joined, 2)
    with pytest.raises(Misuse, match="may have been committed, without the guard"):
        joined.commit('"far"', NOTHING)
    assert effects() == kept
    run = finish(ledger.find(KEY))
    assert run is not None
    assert run.checkpoint is None
    joined = begun(ledger, attempt)  # what it has left on the session is no trouble
    assert joined.execute("SELECT @@autocommit", ()).fetchone() == (0,)
    add(joined, 3)
    joined.roll_back()
    joined = begun(ledger, attempt)
    add(joined, 4)
    joined.commit('"far"', NOTHING)
    assert effects() == [*kept, 4]


def test_that_it_was_ended_is_told_even_if_the_run_was_lost_as_well(ledger: DraftLedger) -> None:
    joined = begun(ledger, claimed(ledger, KEY, "a"))
    add(joined, 1)
    joined.execute("CALL commits()", ())
    gone = f"UPDATE fencepost_lease SET expires_us = 1 WHERE namespace = '{ledger.namespace}'"
    HOME.run(gone, DATABASE)
    claimed(ledger, KEY, "b")
    with pytest.raises(Misuse, match="may have been committed"):
        joined.commit(None, NOTHING)


def test_a_deadlock_that_a_procedure_has_swallowed_is_noticed_by_the_commit(
    ledger: DraftLedger,
) -> None:
    HOME.run("INSERT INTO effect VALUES (101, 0), (102, 0)", DATABASE)
    joined = begun(ledger, claimed(ledger, KEY, "a"))
    other = begun(ledger, claimed(ledger, RunKey("other", 1), "b"))
    other.executemany("INSERT INTO effect VALUES (%s, 0)", [(n,) for n in range(200, 220)])
    joined.execute("UPDATE effect SET n = 1 WHERE item = 101", ())
    other.execute("UPDATE effect SET n = 2 WHERE item = 102", ())
    crossing = threading.Thread(
        target=other.execute, args=("UPDATE effect SET n = 2 WHERE item = 101", ())
    )
    crossing.start()
    until(lambda: HOME.waits(DATABASE))
    joined.execute("CALL meets()", ())
    crossing.join()
    assert joined.execute("SELECT @met", ()).fetchall() == ((1,),)
    add(joined, 1)
    with pytest.raises(Misuse, match="what was written since is undone"):
        joined.commit(None, NOTHING)
    other.roll_back()
    assert effects() == [101, 102]


def test_after_a_deadlock_nothing_is_sent_by_whichever_way(ledger: DraftLedger) -> None:
    joined = begun(ledger, claimed(ledger, KEY, "a"))
    with pytest.raises(pymysql.OperationalError, match="as one would"):
        joined.connection.cursor().execute(
            "SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213, MESSAGE_TEXT = 'as one would'"
        )
    for say in (
        lambda: joined.connection.cursor().execute("SELECT 1"),
        lambda: joined.once("s", "x", call="1", repeat=False),
        lambda: joined.commit(None, NOTHING),
    ):
        with pytest.raises(Misuse, match="deadlock"):
            say()
    joined.roll_back()


def test_nobody_rolls_back_to_before_it(ledger: DraftLedger) -> None:
    attempt = claimed(ledger, KEY, "a")
    joined = begun(ledger, attempt)
    joined.execute("SAVEPOINT early", ())
    joined.commit(None, NOTHING)
    joined = begun(ledger, attempt)  # on the same session
    add(joined, 1)
    for statement in ("ROLLBACK TO early", "RELEASE SAVEPOINT early", "CALL nothing_like_it()"):
        with pytest.raises(pymysql.OperationalError, match="does not exist"):
            joined.execute(statement, ())
    joined.execute("SAVEPOINT early", ())
    add(joined, 2)
    joined.execute("SAVEPOINT late", ())
    add(joined, 3)
    joined.execute("ROLLBACK TO early", ())
    add(joined, 4)
    joined.execute("RELEASE SAVEPOINT early", ())
    joined.commit(None, NOTHING)
    assert effects() == [1, 4]
    assert len(HOME.spare(ledger)) == 1


@pytest.mark.parametrize("how", ["CHAIN", "RELEASE"])
def test_a_commit_and_an_undo_are_the_end_however_a_session_completes(
    ledger: DraftLedger, how: str
) -> None:
    attempt = claimed(ledger, KEY, "a")
    for item, end in ((1, "commit"), (2, "roll_back"), (3, "commit")):
        joined = begun(ledger, attempt)
        session = joined.connection
        joined.execute(f"SET SESSION completion_type = '{how}'", ())
        add(joined, item)
        joined.commit(None, NOTHING) if end == "commit" else joined.roll_back()
        with session.cursor() as cursor:
            cursor.execute("SELECT @@in_transaction")
            assert cursor.fetchone() == (0,)
        assert HOME.spare(ledger) == [session]
    assert effects() == [1, 3]


def test_a_session_without_escapes_is_read_so(ledger: DraftLedger) -> None:
    joined = begun(ledger, claimed(ledger, KEY, "a"))
    text = r"SELECT 'a\'; COMMIT -- '"
    joined.execute(text, ())
    joined.execute("SET SESSION sql_mode = 'NO_BACKSLASH_ESCAPES'", ())
    with pytest.raises(Misuse, match="outside of it"):
        joined.execute(text, ())
    joined.commit(None, NOTHING)


def test_what_is_written_to_a_connection_after_its_transaction_is_not_committed_by_the_next(
    ledger: DraftLedger,
) -> None:
    attempt = claimed(ledger, KEY, "a")
    joined = begun(ledger, attempt)
    kept = joined.connection
    joined.commit(None, NOTHING)
    kept.cursor().execute("INSERT INTO effect VALUES (9, 0)")
    with pytest.raises(Misuse, match="outside of it"):
        kept.commit()
    joined = begun(ledger, attempt)
    assert joined.connection is kept
    add(joined, 1)
    joined.commit(None, NOTHING)
    assert effects() == [1]


@pytest.mark.parametrize("home", [MariaHome(), HOME, LoggedMySQLHome()], ids=str)
def test_which_kind_it_is_goes_by_the_session_and_costs_no_round_trip(
    home: MariaHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = home.opened(home.database(DATABASE), namespace=f"n{time.time_ns()}")
    attempt, sent = claimed(ledger, KEY, "a"), list[bytes]()
    send = Guest._execute_command

    def noted(guest: Guest, command: int, sql: Any) -> None:
        sent.append(sql if isinstance(sql, bytes) else sql.encode())
        send(guest, command, sql)

    monkeypatch.setattr(Guest, "_execute_command", noted)
    for opening in (2, 0):  # its character set, and all else
        sent.clear()
        joined = begun(ledger, attempt)
        joined.once("s", str(opening), call="1", repeat=False)
        joined.commit("1", NOTHING)
        assert len(sent) == opening + 3
        assert (b"XA START" in sent[opening]) is not (home is HOME)
        assert (b"SAVEPOINT" in sent[opening]) is (home is HOME)
    finish(ledger.close())


def test_a_binary_log_that_is_switched_on_later_is_heard_of_by_the_next_session() -> None:
    """And a transaction that was undone because a lock was not had in time is not gone on with."""
    with MariaDB.own() as server:
        url = server.database("test")
        server.run("CREATE TABLE effect (item INT PRIMARY KEY, n INT)", database="test")
        ledger = opened_mariadb(url)
        attempt = claimed(ledger, KEY, "a")
        joined = begun(ledger, attempt)
        joined.execute("INSERT INTO effect VALUES (1, 0)", ())
        assert not joined.connection.logs
        joined.commit(None, NOTHING)
        server.stop()
        server.settings = (*LoggedMariaDB.settings, "--innodb-rollback-on-timeout=ON")
        server.start()
        joined = begun(ledger, attempt)
        assert joined.connection.logs
        other = begun(ledger, claimed(ledger, RunKey("other", 1), "b"))
        other.execute("UPDATE effect SET n = 2", ())
        joined.execute("SET SESSION innodb_lock_wait_timeout = 0", ())
        joined.execute("INSERT INTO effect VALUES (2, 0)", ())
        with pytest.raises(pymysql.OperationalError, match="Lock wait timeout"):
            joined.execute("UPDATE effect SET n = 1", ())
        joined.execute("INSERT INTO effect VALUES (3, 0)", ())
        with pytest.raises(Misuse, match="what was written since is undone"):
            joined.commit(None, NOTHING)
        other.commit(None, NOTHING)
        rows = server.run("SELECT item, n FROM effect ORDER BY item", database="test")
        assert list(rows) == [(1, 2)]
        finish(ledger.close())
