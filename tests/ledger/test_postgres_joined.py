"""What only PostgreSQL does in a transaction that user code joins; the rest: ``test_joined``."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import psycopg
import pytest
from ledgerlab import claimed

from fencepost.errors import Misuse, OutcomeUnknown, RunLost, StoreUnavailable
from fencepost.ledger.api import NOTHING
from fencepost.ledger.postgres_joined import PostgresJoined
from fencepost.model.item import Found
from fencepost.model.slot import RunKey
from fencepost.world.flow import finish
from pglab import fresh_namespace, opened_postgres
from proxy import Proxy
from servers import PgBouncer, Postgres, shared

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from fencepost.ledger.api import Attempt
    from fencepost.ledger.postgres import PostgresLedger

KEY = RunKey("job", 1_000)


@pytest.fixture
def url() -> str:
    server = shared(Postgres)
    url = server.database("joined")
    server.run("CREATE TABLE IF NOT EXISTS effect (space text, item integer)", database="joined")
    return url + "?advisory=off"


@pytest.fixture
def ledger(url: str) -> Iterator[PostgresLedger]:
    ledger = opened_postgres(url, namespace=f"{fresh_namespace()}-{time.time_ns()}")
    finish(ledger.jobs())
    yield ledger
    finish(ledger.close())


def begun(ledger: PostgresLedger, attempt: Attempt, *, idle: float = 10.0) -> PostgresJoined:
    joined = PostgresJoined(ledger, attempt)
    assert joined.begin(idle=idle, longest=0.0) is False
    return joined


def add(joined: PostgresJoined, ledger: PostgresLedger, item: int) -> None:
    joined.connection.execute("INSERT INTO effect VALUES (%s, %s)", (ledger.namespace, item))


def effects(ledger: PostgresLedger) -> list[Any]:
    rows = shared(Postgres).run(
        f"SELECT item FROM effect WHERE space = '{ledger.namespace}' ORDER BY item",
        database="joined",
    )
    return [item for (item,) in rows]


def run_out(ledger: PostgresLedger) -> None:
    """Have all leases end now, as if their holders had not been heard of for long."""
    shared(Postgres).run(
        f"UPDATE fencepost_lease SET expires_us = 1 WHERE namespace = '{ledger.namespace}'",
        database="joined",
    )


def test_a_transaction_that_the_server_has_undone_is_not_committed(ledger: PostgresLedger) -> None:
    attempt = claimed(ledger, KEY, "a")
    joined = begun(ledger, attempt)
    add(joined, ledger, 1)
    with pytest.raises(psycopg.errors.DivisionByZero):
        joined.connection.execute("SELECT 1/0")
    with pytest.raises(Misuse, match="savepoint"):
        joined.commit(None, NOTHING)
    joined = begun(ledger, attempt)
    add(joined, ledger, 2)
    with pytest.raises(psycopg.errors.DivisionByZero), joined.connection.transaction():
        joined.connection.execute("SELECT 1/0")
    joined.commit(None, NOTHING)
    assert effects(ledger) == [2]


def test_a_transaction_that_was_ended_and_begun_again_is_found_out(ledger: PostgresLedger) -> None:
    joined = begun(ledger, claimed(ledger, KEY, "a"))
    joined.connection.execute("COMMIT")
    assert joined.connection is None
    joined.roll_back()
    joined = begun(ledger, claimed(ledger, RunKey("other", 1), "b"))
    joined.connection.execute("COMMIT")
    assert joined._session is not None
    joined._session.raw.exec_(b"BEGIN")
    add(joined, ledger, 1)
    with pytest.raises(Misuse, match="another one begun"):
        joined.commit(None, NOTHING)
    assert effects(ledger) == []


def test_what_is_checked_at_the_commit_is_told_in_the_drivers_words(ledger: PostgresLedger) -> None:
    attempt = claimed(ledger, KEY, "a")
    joined = begun(ledger, attempt)
    table = "CREATE TABLE late (n integer UNIQUE DEFERRABLE INITIALLY DEFERRED)"
    joined.connection.execute(table)
    joined.connection.execute("INSERT INTO late VALUES (1), (1)")
    with pytest.raises(psycopg.errors.UniqueViolation):
        joined.commit(None, NOTHING)
    begun(ledger, attempt).roll_back()  # and it goes on, on the same session


def test_a_commit_of_which_nobody_can_tell_is_unknown(url: str) -> None:
    server = shared(Postgres)
    with Proxy(server.port) as proxy:
        through = url.replace(str(server.port), str(proxy.port))
        ledger = opened_postgres(through, namespace=f"lost-{time.time_ns()}")
        joined = begun(ledger, claimed(ledger, KEY, "a"))
        proxy.mode = "refuse"
        proxy.reset()
        with pytest.raises(OutcomeUnknown):
            joined.commit("4", NOTHING)
        proxy.mode = "pass"
        finish(ledger.close())


@pytest.mark.usefixtures("url")
@pytest.mark.parametrize("late", [False, True])
def test_an_item_that_is_wanted_inside_and_outside_of_a_transaction_is_had_by_one(
    ledger: PostgresLedger, *, late: bool
) -> None:
    """Each waits for a row of the other: the server ends that, and whoever is undone is told."""
    attempt, server = claimed(ledger, KEY, "a"), shared(Postgres)
    joined, found = begun(ledger, attempt), list[Found]()
    add(joined, ledger, 1)
    assert joined.once("s", "x", call="inside", repeat=False) is Found.FIRST

    def outside() -> None:
        begin = ledger.begin(attempt, scope="s", items=["x"], call="outside", repeat=False)
        found.extend(finish(begin))

    thread = threading.Thread(target=outside)
    thread.start()
    waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = 'joined'"
    while thread.is_alive() and not server.run(waiting):
        time.sleep(0.01)
    if late:
        time.sleep(1.5)  # the server has looked for a deadlock by then, and will not look again
    try:
        joined.commit(None, NOTHING)
    except StoreUnavailable:
        joined.roll_back()
    thread.join()
    assert (effects(ledger), found) in [([1], [Found.DONE]), ([], [Found.FIRST])]


@pytest.mark.usefixtures("url")  # which makes the database
def test_transactions_work_behind_a_pooler() -> None:
    server = shared(Postgres)
    with PgBouncer.before(server.port).own() as pooler:
        ledger = opened_postgres(pooler.url("joined"), namespace=f"pooled-{time.time_ns()}")
        attempt = claimed(ledger, KEY, "a")
        for number in range(8):  # more often than psycopg needs to prepare a statement
            joined = begun(ledger, attempt)
            assert joined.once("s", str(number), call="1", repeat=False) is Found.FIRST
            add(joined, ledger, number)
            joined.commit(str(number), NOTHING)
        joined = begun(ledger, attempt)
        add(joined, ledger, 99)
        run_out(ledger)
        claimed(ledger, KEY, "b")
        with pytest.raises(RunLost):
            joined.commit(None, NOTHING)
        assert effects(ledger) == list(range(8))
        finish(ledger.close())


def test_what_the_driver_forgets_of_its_statements_is_not_what_we_need(
    ledger: PostgresLedger,
) -> None:
    """psycopg has the server forget all that is prepared, ours as well, after a ROLLBACK."""
    attempt = claimed(ledger, KEY, "a")
    for item in (1, 2):
        joined = begun(ledger, attempt)
        joined.connection.prepare_threshold = 0
        add(joined, ledger, item)
        if item == 2:  # by now all that we say has been said once
            with pytest.raises(ZeroDivisionError), joined.connection.transaction():
                raise ZeroDivisionError
        assert joined.once("s", str(item), call="1", repeat=False) is Found.FIRST
        assert joined.commit(str(item), NOTHING) is False
    assert effects(ledger) == [1, 2]
