"""What only MariaDB does in a transaction that user code joins; the rest: ``test_joined``."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pymysql
import pytest
from ledgerlab import claimed

from fencepost.errors import FencepostError, Misuse, OutcomeUnknown, StoreUnavailable
from fencepost.ledger import mariadb_joined
from fencepost.ledger.api import NOTHING
from fencepost.ledger.mariadb_joined import MariaJoined
from fencepost.model.item import Found, ItemState
from fencepost.model.slot import RunKey
from fencepost.world.flow import finish
from joinlab import LoggedMariaHome, MariaHome, MySQLHome, until
from proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fencepost.ledger.api import Attempt
    from fencepost.ledger.draft_joined import Joined
    from fencepost.ledger.draft_ledger import DraftLedger

KEY, DATABASE = RunKey("job", 1_000), "joined_here"


@pytest.fixture(params=[MariaHome(), LoggedMariaHome(), MySQLHome()], ids=str)
def home(request: pytest.FixtureRequest) -> MariaHome:
    home: MariaHome = request.param
    return home


@pytest.fixture
def ledger(home: MariaHome) -> Iterator[DraftLedger]:
    url = home.database(DATABASE)
    home.run("DROP TABLE IF EXISTS effect", DATABASE)
    home.run("CREATE TABLE effect (item INT PRIMARY KEY, n INT)", DATABASE)
    ledger = home.opened(url, namespace=f"n{time.time_ns()}")
    finish(ledger.jobs())
    yield ledger
    finish(ledger.close())


def begun(ledger: DraftLedger, attempt: Attempt, *, longest: float = 0.0) -> Joined:
    joined = ledger.join(attempt)
    joined.begin(idle=10.0, longest=longest)
    return joined


def effects(home: MariaHome) -> list[Any]:
    return [item for (item,) in home.run("SELECT item FROM effect ORDER BY item", DATABASE)]


@pytest.mark.parametrize(
    "statement",
    [
        *("COMMIT", "ROLLBACK", "BEGIN", "START TRANSACTION", "SET autocommit = 1"),
        *("CREATE TABLE other (n INT)", "ALTER TABLE effect ADD m INT", "DROP TABLE effect"),
        *("TRUNCATE effect", "LOCK TABLES effect WRITE", "CREATE VIEW v AS SELECT 1"),
    ],
)
def test_what_would_commit_without_the_guard_is_refused(
    home: MariaHome, ledger: DraftLedger, statement: str
) -> None:
    joined = begun(ledger, claimed(ledger, KEY, "a"))
    joined.execute("INSERT INTO effect VALUES (1, 0)", ())
    with pytest.raises(Misuse, match="outside of it"):
        joined.execute(statement, ())
    # A library is told by whoever refuses: the server, or before it is sent the connection.
    before = isinstance(home, LoggedMariaHome)
    kind = Misuse if before else pymysql.OperationalError
    with pytest.raises(kind, match="outside of it" if before else "XAER_RMFAIL"):
        joined.connection.cursor().execute(statement)
    assert effects(home) == []
    joined.commit(None, NOTHING)  # it happened to nothing, and so there is nothing to undo
    assert effects(home) == [1]


def test_savepoints_are_welcome_and_temporary_tables_as_the_server_has_it(
    home: MariaHome, ledger: DraftLedger
) -> None:
    joined = begun(ledger, claimed(ledger, KEY, "a"))
    if isinstance(home, MySQLHome):
        with pytest.raises(Misuse, match="unless its xa_detach_on_prepare is OFF"):
            joined.execute("CREATE TEMPORARY TABLE some (n INT)", ())
    else:
        joined.execute("CREATE TEMPORARY TABLE some (n INT)", ())
    joined.execute("INSERT INTO effect VALUES (1, 0)", ())
    joined.execute("SAVEPOINT here", ())
    with pytest.raises(pymysql.IntegrityError):
        joined.executemany("INSERT INTO effect VALUES (%s, 0)", [(2,), (1,)])
    joined.execute("ROLLBACK TO here", ())
    joined.commit(None, NOTHING)
    assert effects(home) == [1]


def test_a_sequence_that_is_not_there_is_told_as_the_server_tells_it(
    home: MariaHome, ledger: DraftLedger
) -> None:
    """MariaDB has given that the number by which MySQL refuses temporary tables."""
    joined = begun(ledger, claimed(ledger, KEY, "a"))
    with pytest.raises(pymysql.Error, match=r"SEQUENCE|does not exist"):
        joined.execute("SELECT NEXTVAL(nowhere)", ())
    joined.commit(None, NOTHING)


def test_who_is_undone_by_a_deadlock_commits_nothing_of_it(
    home: MariaHome, ledger: DraftLedger
) -> None:
    home.run("INSERT INTO effect VALUES (1, 0), (2, 0)", DATABASE)
    joined = begun(ledger, claimed(ledger, KEY, "a"))
    other = begun(ledger, claimed(ledger, RunKey("other", 1), "b"))
    # The server undoes whoever has changed less.
    other.executemany("INSERT INTO effect VALUES (%s, 0)", [(n,) for n in range(100, 120)])
    joined.execute("UPDATE effect SET n = 1 WHERE item = 1", ())
    other.execute("UPDATE effect SET n = 2 WHERE item = 2", ())
    crossing = threading.Thread(
        target=other.execute, args=("UPDATE effect SET n = 2 WHERE item = 1", ())
    )
    crossing.start()
    until(lambda: home.waits(DATABASE))
    with pytest.raises(pymysql.OperationalError, match="Deadlock"):
        joined.execute("UPDATE effect SET n = 1 WHERE item = 2", ())
    crossing.join()
    with pytest.raises(Misuse, match="deadlock"):  # who goes on nevertheless
        joined.execute("INSERT INTO effect VALUES (3, 0)", ())
    with pytest.raises(Misuse, match="deadlock"):
        joined.commit(None, NOTHING)
    other.commit(None, NOTHING)
    rows = home.run("SELECT item, n FROM effect WHERE item < 100 ORDER BY item", DATABASE)
    assert list(rows) == [(1, 2), (2, 2)]


def test_a_statement_that_waited_in_vain_is_undone_alone(
    home: MariaHome, ledger: DraftLedger
) -> None:
    home.run("INSERT INTO effect VALUES (1, 0)", DATABASE)
    joined = begun(ledger, claimed(ledger, KEY, "a"))
    other = begun(ledger, claimed(ledger, RunKey("other", 1), "b"))
    other.execute("UPDATE effect SET n = 2 WHERE item = 1", ())
    joined.execute("SET SESSION innodb_lock_wait_timeout = 1", ())
    joined.execute("INSERT INTO effect VALUES (2, 0)", ())
    with pytest.raises(pymysql.OperationalError, match="Lock wait timeout"):
        joined.execute("UPDATE effect SET n = 1 WHERE item = 1", ())
    joined.commit(None, NOTHING)
    other.roll_back()
    assert list(home.run("SELECT item, n FROM effect", DATABASE)) == [(1, 0), (2, 0)]


def test_a_connection_that_was_opened_anew_inside_commits_nothing(
    home: MariaHome, ledger: DraftLedger
) -> None:
    attempt = claimed(ledger, KEY, "a")
    joined = begun(ledger, attempt)
    joined.execute("INSERT INTO effect VALUES (1, 0)", ())
    (number,) = joined.execute("SELECT CONNECTION_ID()", ()).fetchone()
    home.run(f"KILL {number}", DATABASE)
    until(lambda: home.is_cut(joined))
    joined.connection._force_close()
    joined.connection.connect()  # as libraries do it, in good faith
    joined.execute("INSERT INTO effect VALUES (2, 0)", ())
    with pytest.raises(Misuse):
        joined.commit(None, NOTHING)
    assert effects(home) == []
    begun(ledger, attempt).roll_back()


def test_what_user_code_leaves_unread_or_changes_is_no_trouble(
    home: MariaHome, ledger: DraftLedger
) -> None:
    joined = begun(ledger, claimed(ledger, KEY, "a"), longest=30.0)
    joined.execute("INSERT INTO effect VALUES (1, 0)", ())
    joined.execute("USE mysql", ())
    unread = joined.connection.cursor(pymysql.cursors.SSCursor)
    unread.execute("SELECT 1 UNION SELECT 2")
    assert joined.once("s", "x", call="1", repeat=False) is Found.FIRST
    joined.connection.cursor().execute("SELECT '%'; SELECT 2")
    joined.commit('"a"', NOTHING)
    assert effects(home) == [1]
    joined = begun(ledger, claimed(ledger, RunKey("other", 1), "b"), longest=0.3)
    with pytest.raises(pymysql.Error, match=r"max_statement_time|maximum statement execution time"):
        joined.execute("SELECT SLEEP(20) FROM effect", ())
    joined.roll_back()


def test_a_session_that_was_left_serializable_keeps_nobody_from_keeping_the_run(
    home: MariaHome,
    ledger: DraftLedger,
) -> None:
    """There even a plain SELECT locks what it reads, and each transaction looks at its run."""
    attempt = claimed(ledger, KEY, "a")
    joined = begun(ledger, attempt)
    joined.execute("SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE", ())
    joined.commit(None, NOTHING)
    joined = begun(ledger, attempt)
    assert not finish(ledger.beat(attempt, ttl=30.0))
    joined.commit(None, NOTHING)


def test_a_limit_for_rows_that_user_code_has_set_is_no_trouble_now_nor_later(
    home: MariaHome, ledger: DraftLedger
) -> None:
    attempt = claimed(ledger, KEY, "a")
    for item in ("x", "y"):  # the second time on the session that the first has left
        joined = begun(ledger, attempt)
        joined.execute("SET SESSION sql_select_limit = 0", ())
        assert joined.once("s", item, call="1", repeat=False) is Found.FIRST
        joined.execute("SET SESSION sql_select_limit = 0", ())
        joined.commit(None, NOTHING)
    assert len(home.spare(ledger)) == 1


def test_a_commit_of_which_nobody_can_tell_is_unknown(
    home: MariaHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = home.database(DATABASE)
    with Proxy(home.server.port) as proxy:
        through = url.replace(str(home.server.port), str(proxy.port))
        ledger = home.opened(through, namespace=f"n{time.time_ns()}")
        joined = begun(ledger, claimed(ledger, KEY, "a"))
        monkeypatch.setattr(mariadb_joined, "_PAUSES", ())  # nobody is asked
        proxy.lose_replies()
        with pytest.raises(OutcomeUnknown, match="may have been committed"):
            joined.commit(None, NOTHING)
        proxy.mode = "pass"
        finish(ledger.close())


def test_a_commit_whose_name_others_have_driven_out_is_unknown_and_not_undone(
    home: MariaHome,
    ledger: DraftLedger,
) -> None:
    """A run remembers the newest few: threads of one run may commit many more meanwhile."""
    attempt = claimed(ledger, KEY, "a")
    with Proxy(home.server.port) as proxy:
        url = home.database(DATABASE).replace(str(home.server.port), str(proxy.port))
        unheard = home.opened(url, namespace=ledger.namespace)
        for before, others, error in (
            (0, 8, OutcomeUnknown),  # nothing was on record when it began
            (0, 8, OutcomeUnknown),
            (3, 6, None),
        ):
            for _ in range(before):
                begun(ledger, attempt).commit(None, NOTHING)
            joined, told = begun(unheard, attempt), list[type[BaseException] | None]()
            asking = threading.Thread(target=lambda: told.append(_outcome(joined)))  # noqa: B023
            swallowed, proxy.mode = proxy.swallowed, "hole_down"
            asking.start()
            until(lambda: proxy.swallowed > swallowed)  # noqa: B023 -- it was committed
            for _ in range(others):
                begun(ledger, attempt).commit(None, NOTHING)
            proxy.mode = "pass"
            proxy.reset()
            asking.join()
            assert told == [error]
        finish(unheard.close())


def test_to_find_out_is_tried_again_if_that_answer_is_lost_too(
    home: MariaHome, ledger: DraftLedger
) -> None:
    attempt = claimed(ledger, KEY, "a")
    with Proxy(home.server.port) as proxy:
        url = home.database(DATABASE).replace(str(home.server.port), str(proxy.port))
        unheard = home.opened(url, namespace=ledger.namespace)
        finish(unheard.jobs())  # there is a connection to ask on
        joined, told = begun(unheard, attempt), list[type[BaseException] | None]()
        (number,) = joined.execute("SELECT CONNECTION_ID()", ()).fetchone()
        asking = threading.Thread(target=lambda: told.append(_outcome(joined)))
        proxy.mode = "hole_down"
        asking.start()
        until(lambda: proxy.swallowed)  # it was committed
        swallowed = proxy.swallowed
        home.run(f"KILL {number}", DATABASE)
        until(lambda: proxy.swallowed > swallowed)  # and so was the answer to what became of it
        proxy.mode = "pass"
        proxy.reset()
        asking.join()
        finish(unheard.close())
    assert told == [None]


def _outcome(joined: Joined) -> type[BaseException] | None:
    try:
        joined.commit(None, NOTHING)
    except FencepostError as error:
        return type(error)
    return None


def test_what_was_not_committed_is_known_though_others_have_committed_meanwhile(
    home: MariaHome,
    ledger: DraftLedger,
) -> None:
    attempt = claimed(ledger, KEY, "a")
    with Proxy(home.server.port) as proxy:
        url = home.database(DATABASE).replace(str(home.server.port), str(proxy.port))
        unheard = home.opened(url, namespace=ledger.namespace)
        for others in (6, 6):  # the second time more are on record than there is room for
            joined, told = begun(unheard, attempt), list[type[BaseException] | None]()
            asking = threading.Thread(target=lambda: told.append(_outcome(joined)))  # noqa: B023
            swallowed, proxy.mode = proxy.swallowed, "hole_up"
            asking.start()
            until(lambda: proxy.swallowed > swallowed)  # noqa: B023 -- the server never saw it
            for _ in range(others):
                begun(ledger, attempt).commit(None, NOTHING)
            proxy.mode = "pass"
            proxy.reset()
            asking.join()
            assert told == [StoreUnavailable]
        finish(unheard.close())


def test_a_session_that_was_cut_while_nobody_used_it_is_replaced(
    home: MariaHome, ledger: DraftLedger
) -> None:
    attempt = claimed(ledger, KEY, "a")
    begun(ledger, attempt).commit(None, NOTHING)
    (kept,) = home.spare(ledger)
    home.run(f"KILL {kept.thread_id()}", DATABASE)
    joined = begun(ledger, attempt)
    joined.commit(None, NOTHING)
    assert home.spare(ledger) != [kept]
    joined = begun(ledger, attempt)
    joined.connection.close()
    with pytest.raises(StoreUnavailable, match="nothing was committed"):
        joined.commit(None, NOTHING)


def test_one_that_the_server_began_on_a_session_that_was_cut_is_no_obstacle(
    home: MariaHome,
    ledger: DraftLedger,
) -> None:
    """Its name is taken for as long as the server has not noticed that nobody is there."""
    attempt = claimed(ledger, KEY, "a")
    begun(ledger, attempt).commit(None, NOTHING)
    joined = ledger.join(attempt)
    assert isinstance(joined, MariaJoined)
    with home.connected(home.database(DATABASE)) as forgotten:
        forgotten.cursor().execute(f"XA START '{joined._xid}'")
        (kept,) = home.spare(ledger)
        home.run(f"KILL {kept.thread_id()}", DATABASE)
        joined.begin(idle=10.0, longest=0.0)
        joined.commit(None, NOTHING)


def test_who_begins_more_than_a_thousand_items_waits_for_no_other(
    home: MariaHome, ledger: DraftLedger
) -> None:
    """The server makes a join of so long a list, unless told not to, and reads the whole table."""
    attempt, many = claimed(ledger, KEY, "a"), [str(number) for number in range(1_200)]
    found = finish(ledger.begin(attempt, scope="s", items=many, call="1", repeat=True))
    assert set(found) == {Found.FIRST}
    other = begun(ledger, claimed(ledger, RunKey("other", 1), "b"))
    assert other.once("another", "x", call="1", repeat=False) is Found.FIRST  # until it commits
    ended = [(item, ItemState.FAILED, None) for item in many]
    finish(ledger.end(attempt, scope="s", items=ended, call="1"))
    found = finish(ledger.begin(attempt, scope="s", items=many, call="2", repeat=True))
    assert set(found) == {Found.FIRST}
    other.commit(None, NOTHING)
