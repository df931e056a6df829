"""What is listed or looked for is found by a key, however long the history is."""

from __future__ import annotations

import re
import sqlite3
from typing import TYPE_CHECKING

import pytest

from fencepost.ledger import sqlite_rows as sql
from fencepost.ledger.sqlite_schema import CLAIMABLE, migrate
from fencepost.ledger.sqlite_touches import Touches
from fencepost.model.run import RunRecord, State
from fencepost.model.slot import RunKey
from fencepost.stores.sqlite_schema import CREATE

if TYPE_CHECKING:
    from collections.abc import Iterator

STATEMENTS = {
    "claim": "SELECT 1 WHERE " + re.sub(r"NEW\.\w+", "?", CLAIMABLE),
    "finish": sql.FINISH,
    "silent finish": sql.FINISH_SILENT,
    "find": sql.FIND,
    "live": sql.FIND_LIVE,
    "has": sql.HAS,
    "update": sql.UPDATE,
    "beat": sql.BEAT,
    "events": sql.FIND_EVENTS,
    "items": sql.FIND_ITEMS,
    "counts": sql.FIND_COUNTS,
    "jobs": sql.FIND_JOBS,
    "newest of a job": sql.listing(()),
    "failed of a job": sql.listing((State.FAILED,)),
    "all jobs": sql.FIND_RUN_JOBS,
    "all that live": sql.FIND_ALL_LIVE,
}

FEW = {"jobs", "all jobs", "all that live"}


@pytest.fixture(scope="module", params=[1, 100_000])
def db(request: pytest.FixtureRequest) -> Iterator[sqlite3.Connection]:
    db = sqlite3.connect(":memory:", isolation_level=None)
    for statement in CREATE:
        db.execute(statement)
    migrate(db, at=0.0)
    Touches().watch(db)
    rows = (
        RunRecord(RunKey(f"job {n % 10}", n), State.SKIPPED, "lock", created_at=float(n))
        for n in range(request.param)
    )
    db.execute("BEGIN")
    db.executemany(sql.INSERT, (("default", *sql.row_of(run)) for run in rows))
    db.execute("COMMIT")
    yield db
    db.close()


@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize("name", STATEMENTS)
def test_a_statement_walks_no_table_and_sorts_nothing(
    db: sqlite3.Connection, name: str, *, analyzed: bool
) -> None:
    db.execute("BEGIN")
    if analyzed:  # as an operator may do, and SQLite's mind may change
        db.execute("ANALYZE")
    statement = STATEMENTS[name]
    numbers = [int(number) for number in re.findall(r"\?(\d+)", statement)]
    count = max(numbers, default=statement.count("?"))
    plan = db.execute(f"EXPLAIN QUERY PLAN {statement}", ("",) * count).fetchall()
    db.execute("ROLLBACK")
    steps = [step for *_, step in plan if "fencepost_" in step or "TEMP" in step or "lease" in step]
    assert steps
    for step in steps:
        assert step.startswith("SEARCH"), steps
        # The namespace alone is no key. Only what is few may be walked: jobs, and what lives; and
        # the least of all names is the first in the table.
        assert name in FEW or "(namespace=?)" not in step, steps
