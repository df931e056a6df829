"""What is due is found by a key, however many alarms there are, and nothing is walked over."""

from __future__ import annotations

import re
import sqlite3
from typing import TYPE_CHECKING

import pytest
from alarmlab import sqlite_book

from fencepost.ledger import alarm_sqlite_rows as sql
from fencepost.ledger.sqlite_schema import migrate
from fencepost.model.alarm import AlarmRecord, AlarmState
from fencepost.stores.sqlite_schema import CREATE
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STATEMENTS = {
    "find": sql.FIND,
    "due": sql.FIND_DUE,
    "firing": sql.FIND_FIRING,
    "dead": sql.FIND_DEAD,
    "prunable": sql.FIND_PRUNABLE,
    "next due": sql.next_due(3),
    "of a kind": sql.listing(of_kind=True, states=2),
}


@pytest.fixture(scope="module", params=[1, 100_000])
def db(request: pytest.FixtureRequest) -> Iterator[sqlite3.Connection]:
    db = sqlite3.connect(":memory:", isolation_level=None)
    for statement in CREATE:
        db.execute(statement)
    migrate(db, at=0.0)
    states = tuple(AlarmState)
    rows = (
        AlarmRecord(f"k{n % 10}", str(n), n, states[n % 4], due_at=float(n))
        for n in range(request.param)
    )
    db.execute("BEGIN")
    db.executemany(sql.PUT, (("default", *sql.row_of(record)) for record in rows))
    db.execute("COMMIT")
    yield db
    db.close()


@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize("name", STATEMENTS)
def test_a_statement_about_alarms_walks_no_table_and_sorts_nothing(
    db: sqlite3.Connection, name: str, *, analyzed: bool
) -> None:
    db.execute("BEGIN")
    if analyzed:
        db.execute("ANALYZE")
    statement = STATEMENTS[name]
    numbers = [int(number) for number in re.findall(r"\?(\d+)", statement)]
    count = max(numbers, default=statement.count("?"))
    plan = db.execute(f"EXPLAIN QUERY PLAN {statement}", ("",) * count).fetchall()
    db.execute("ROLLBACK")
    steps = [step for *_, step in plan if "fencepost_" in step or "TEMP" in step]
    assert steps
    for step in steps:
        assert step.startswith("SEARCH"), steps
        assert "(namespace=?)" not in step, steps


def test_to_look_while_nothing_is_due_is_one_statement_that_reads(tmp_path: Path) -> None:
    opened = sqlite_book(tmp_path / "ledger.db")
    for number in range(100):
        opened.set(str(number), after=1e6)
    sent: list[str] = []
    connection = opened.ledger.leases.file._connection  # type: ignore[union-attr]
    assert connection is not None
    connection.set_trace_callback(sent.append)
    assert opened.claim().claimed == ()
    assert [statement.split()[0] for statement in sent] == ["WITH"]
    sent.clear()
    finish(opened.book.next_due(("k",)))
    assert [statement.split()[0] for statement in sent] == ["WITH"]
    opened.close()


def test_a_batch_is_one_transaction(tmp_path: Path) -> None:
    opened = sqlite_book(tmp_path / "ledger.db")
    for number in range(20):
        opened.set(str(number))
    sent: list[str] = []
    connection = opened.ledger.leases.file._connection  # type: ignore[union-attr]
    assert connection is not None
    connection.set_trace_callback(sent.append)
    assert len(opened.claim(limit=20).claimed) == 20
    assert sum(statement.startswith("BEGIN") for statement in sent) == 1
    opened.close()


def test_the_file_itself_refuses_a_generation_that_falls(db: sqlite3.Connection) -> None:
    with pytest.raises(sqlite3.IntegrityError, match="never fall"):
        db.execute("UPDATE fencepost_alarm SET generation = generation - 1")
