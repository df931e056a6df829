"""The ledger's tables come with its first use, once, and never from a later version."""

from __future__ import annotations

import re
import sqlite3
from typing import TYPE_CHECKING

import pytest
from ledgerlab import claimed, opened, run_through

from fencepost.errors import Misuse
from fencepost.ledger import sqlite_schema
from fencepost.ledger.sqlite_planner_schema import SCHEDULES
from fencepost.model.lease import Holder
from fencepost.model.run import State
from fencepost.model.slot import RunKey
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from pathlib import Path

LATER = "INSERT INTO fencepost_migration VALUES ('ledger', 99, 0.0)"

# What tells a file of the first migration from one of the second.
# What the steps after the first have added, taken away again.
LATER_TABLES = ("span", "lane", "instance", "member", "cohort", "clock", "alarm")
LATER_INDEXES = ("job_due", "job_unknown", "run_waiting", "run_apart")
LATER_COLUMNS = re.findall(r"fencepost_(\w+) ADD COLUMN (\w+)", "\n".join(SCHEDULES))
FIRST_ONLY = (
    "DELETE FROM fencepost_migration WHERE number > 1",
    *(f"DROP VIEW fencepost_{name}" for name in ("claim", "slot", "end")),
    *(f"DROP INDEX fencepost_{name}" for name in LATER_INDEXES),
    "DROP TRIGGER fencepost_job_mark",
    *(f"DROP TABLE fencepost_{name}" for name in LATER_TABLES),
    "DROP INDEX fencepost_run_live",
    "DROP TRIGGER fencepost_run_first",
    "DROP TRIGGER fencepost_run_next",
    """CREATE UNIQUE INDEX fencepost_run_live
           ON fencepost_run (namespace, lock, job, slot, manual)
        WHERE state IN ('pending', 'running', 'waiting_retry')""",
    """CREATE TRIGGER fencepost_run_first BEFORE INSERT ON fencepost_run
         WHEN NEW.state NOT IN ('pending', 'running', 'failed', 'skipped', 'missed')
        BEGIN SELECT RAISE(ABORT, 'a run cannot begin so'); END""",
    """CREATE TRIGGER fencepost_run_next BEFORE UPDATE ON fencepost_run
         WHEN OLD.state NOT IN ('pending', 'running', 'waiting_retry')
        BEGIN SELECT RAISE(ABORT, 'a run cannot become so'); END""",
    *(f"ALTER TABLE fencepost_{table} DROP COLUMN {column}" for table, column in LATER_COLUMNS),
)


def names(path: Path) -> set[str]:
    db = sqlite3.connect(path)
    found = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    db.close()
    return found


def execute(path: Path, statement: str) -> list[tuple[object, ...]]:
    db = sqlite3.connect(path, isolation_level=None)
    found = db.execute(statement).fetchall()
    db.close()
    return found


def test_who_only_locks_has_no_ledger_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    leases = opened(path).leases
    finish(leases.acquire("x", holder=Holder("n", "here", 1), ttl=30.0))
    finish(leases.release("x", nonce="n"))
    assert names(path) & {"fencepost_migration", "fencepost_run"} == set()
    finish(leases.close())


@pytest.mark.parametrize("reading", [True, False])
def test_the_first_use_creates_all_and_says_so_once(tmp_path: Path, *, reading: bool) -> None:
    path = tmp_path / "ledger.db"
    for _ in range(2):
        ledger = opened(path)
        if reading:
            finish(ledger.jobs())
        finish(ledger.register("job", "{}"))
        finish(ledger.close())
    assert {"fencepost_run", "fencepost_run_live", "fencepost_run_next"} <= names(path)
    found = execute(path, "SELECT part, number FROM fencepost_migration")
    assert found == [("ledger", n + 1) for n in range(len(sqlite_schema.MIGRATIONS))]


def test_a_first_claim_that_is_undone_undoes_the_tables_and_the_next_makes_them_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ledger.db"
    ledger = opened(path)
    with pytest.raises(Misuse, match="no run"):
        finish(ledger.cancel(RunKey("job", 1), force=False, operator="olga"))
    assert "fencepost_run" not in names(path)
    run_through(ledger, RunKey("job", 1), "n")
    assert "fencepost_run" in names(path)
    finish(ledger.close())


def test_what_a_later_version_wrote_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    ledger = opened(path)
    run_through(ledger, RunKey("job", 1), "n")
    finish(ledger.close())
    execute(path, LATER)
    with pytest.raises(Misuse, match=r"written by a newer fencepost .* upgrade"):
        finish(ledger.runs())
    with pytest.raises(Misuse, match=r"written by a newer fencepost .* upgrade"):
        run_through(ledger, RunKey("job", 2), "m")
    # Leases are as they always were.
    finish(ledger.leases.acquire("x", holder=Holder("n", "here", 1), ttl=30.0))
    finish(ledger.leases.release("x", nonce="n"))
    finish(ledger.close())


def test_a_file_that_is_behind_is_brought_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.db"
    ledger = opened(path)
    run_through(ledger, RunKey("job", 1), "n")
    finish(ledger.close())
    later = (*sqlite_schema.MIGRATIONS, ("ALTER TABLE fencepost_job ADD COLUMN owner TEXT",))
    monkeypatch.setattr(sqlite_schema, "MIGRATIONS", later)
    run_through(ledger, RunKey("job", 2), "m")
    finish(ledger.close())
    assert execute(path, "SELECT max(number) FROM fencepost_migration") == [(len(later),)]
    assert execute(path, "SELECT owner FROM fencepost_job") == []


def test_a_file_of_the_first_migration_keeps_its_runs_and_gets_all_that_came_later(
    tmp_path: Path,
) -> None:
    first, second = tmp_path / "first.db", tmp_path / "second.db"
    ledgers = [opened(path) for path in (first, second)]
    for ledger in ledgers:
        run_through(ledger, RunKey("job", 1), "n")
        claimed(ledger, RunKey("job", 2), "m")
        finish(ledger.close())
    for statement in FIRST_ONLY:
        execute(first, statement)
    for ledger in ledgers:
        runs = finish(ledger.runs(states=(State.RUNNING,)))
        assert [run.key.slot for run in runs] == [2]
        run_through(ledger, RunKey("other", 1), "o")
        finish(ledger.close())
    schema = "SELECT type, name, sql FROM sqlite_master WHERE sql <> '' ORDER BY name"
    assert execute(first, schema) == execute(second, schema)


def test_a_file_that_was_replaced_gets_its_tables_again(tmp_path: Path) -> None:
    ledger = opened(tmp_path / "ledger.db")
    run_through(ledger, RunKey("job", 1), "n")
    finish(ledger.close())
    for path in tmp_path.glob("ledger.db*"):
        if path.is_file():
            path.unlink()
    assert finish(ledger.runs()) == []
    run_through(ledger, RunKey("job", 1), "m")
    finish(ledger.close())


def test_namespaces_keep_their_runs_apart(tmp_path: Path) -> None:
    here, there = (opened(tmp_path / "ledger.db", namespace=name) for name in ("here", "there"))
    run_through(here, RunKey("job", 1), "n")
    assert finish(there.runs()) == finish(there.runs("job")) == []
    run_through(there, RunKey("job", 1), "m")
    for ledger in (here, there):
        assert len(finish(ledger.runs())) == 1
        finish(ledger.close())
