"""The file itself refuses what is not in THE TABLE, whoever writes to it."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

import pytest

from fencepost.ledger.sqlite_rows import INSERT, row_of
from fencepost.ledger.sqlite_schema import migrate
from fencepost.model.run import FIRST, TABLE, RunRecord, State, legal
from fencepost.model.slot import RunKey
from fencepost.stores.sqlite_schema import CREATE

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = RunKey("job", 1_000)
# The shortest way from nothing to each state.
WAYS = {state: (state,) for state in FIRST} | {
    state: (State.RUNNING, state) for state in TABLE[State.RUNNING] if state not in FIRST
}


@pytest.fixture
def db() -> Iterator[sqlite3.Connection]:
    db = sqlite3.connect(":memory:", isolation_level=None)
    for statement in CREATE:  # of the leases, which are there before any ledger
        db.execute(statement)
    migrate(db, at=0.0)
    yield db
    db.close()


def begin(db: sqlite3.Connection, state: State, *, token: int = 7) -> None:
    db.execute(INSERT, ("default", *row_of(RunRecord(KEY, state, "job", token=token))))


def bring_to(db: sqlite3.Connection, state: State) -> None:
    first, *rest = WAYS[state]
    begin(db, first)
    for following in rest:
        db.execute("UPDATE fencepost_run SET state = ?", (following.value,))


@pytest.mark.parametrize("state", State)
def test_a_run_begins_only_as_the_table_says(db: sqlite3.Connection, state: State) -> None:
    if legal(None, state):
        begin(db, state)
    else:
        with pytest.raises(sqlite3.IntegrityError, match=f"cannot begin as {state.value}$"):
            begin(db, state)


@pytest.mark.parametrize("after", State)
@pytest.mark.parametrize("before", State)
def test_a_run_changes_only_as_the_table_says(
    db: sqlite3.Connection, before: State, after: State
) -> None:
    bring_to(db, before)
    change = "UPDATE fencepost_run SET state = ?"
    if legal(before, after):
        db.execute(change, (after.value,))
    else:
        said = "never changes again" if before is after else f"cannot become {after.value}"
        with pytest.raises(sqlite3.IntegrityError, match=f"a run that is {before.value} {said}$"):
            db.execute(change, (after.value,))


def test_a_change_that_is_refused_names_both_states(db: sqlite3.Connection) -> None:
    bring_to(db, State.SUCCEEDED)
    with pytest.raises(sqlite3.IntegrityError, match="is succeeded cannot become running"):
        db.execute("UPDATE fencepost_run SET state = 'running'")


@pytest.mark.parametrize("state", [state for state in State if state.terminal])
def test_no_column_of_an_ended_run_can_be_changed(db: sqlite3.Connection, state: State) -> None:
    bring_to(db, state)
    columns = [name for _, name, *_ in db.execute("PRAGMA table_info(fencepost_run)")]
    for column in columns:
        with pytest.raises(sqlite3.IntegrityError, match=state.value):
            db.execute(f"UPDATE fencepost_run SET {column} = {column}")


@pytest.mark.parametrize("state", ["", "done", "RUNNING"])
def test_what_is_not_a_state_is_refused(db: sqlite3.Connection, state: str) -> None:
    begin(db, State.PENDING)
    with pytest.raises(sqlite3.IntegrityError, match="not a state"):
        db.execute("UPDATE fencepost_run SET state = ?", (state,))
    row = row_of(RunRecord(KEY, State.PENDING, "job"))
    with pytest.raises(sqlite3.IntegrityError, match="not a state"):
        db.execute(INSERT, ("other", *row[:4], state, *row[5:]))


def test_the_token_of_a_run_never_falls(db: sqlite3.Connection) -> None:
    begin(db, State.RUNNING, token=7)
    db.execute("UPDATE fencepost_run SET token = 7")
    db.execute("UPDATE fencepost_run SET token = 8")
    with pytest.raises(sqlite3.IntegrityError, match="token of a run never falls"):
        db.execute("UPDATE fencepost_run SET token = 7")


def test_a_slot_has_at_most_one_live_run(db: sqlite3.Connection) -> None:
    begin(db, State.RUNNING)
    rerun = RunRecord(KEY._replace(rerun=1), State.PENDING, "job")
    with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"):
        db.execute(INSERT, ("default", *row_of(rerun)))
    db.execute("UPDATE fencepost_run SET state = 'failed'")
    db.execute(INSERT, ("default", *row_of(rerun)))


@pytest.mark.parametrize("state", State)
def test_a_run_of_any_state_can_be_deleted(db: sqlite3.Connection, state: State) -> None:
    bring_to(db, state)
    assert db.execute("DELETE FROM fencepost_run").rowcount == 1


def test_an_event_is_never_changed(db: sqlite3.Connection) -> None:
    db.execute(
        "INSERT INTO fencepost_event (namespace, job, slot, manual, rerun, at, what, token, "
        "holder, detail) VALUES ('default', 'job', 1, 0, 0, 0.0, 'seen', 0, '', '')"
    )
    with pytest.raises(sqlite3.IntegrityError, match="never changed"):
        db.execute("UPDATE fencepost_event SET what = 'nothing'")


def test_a_run_that_no_longer_runs_holds_no_lease(db: sqlite3.Connection) -> None:
    run = RunRecord(KEY, State.RUNNING, "job", "job", token=7)
    holder = run.holder._replace(nonce="n")
    db.execute(INSERT, ("default", *row_of(run._replace(holder=holder))))
    lease = (
        "INSERT INTO fencepost_lease "
        "VALUES ('default', ?, 7, ?, 1, 'b', 9, 9, 0, 1, '', 1, '', '', '', '')"
    )
    for name, nonce in (("job", "n"), ("other", "n"), ("third", "m")):
        db.execute(lease, (name, nonce))
    db.execute("UPDATE fencepost_run SET beat_at = 1.0")
    assert _held(db) == ["job", "other", "third"]
    db.execute("UPDATE fencepost_run SET state = 'failed'")
    assert _held(db) == ["other", "third"]


def _held(db: sqlite3.Connection) -> list[str]:
    rows = db.execute("SELECT name FROM fencepost_lease WHERE held = 1 ORDER BY name")
    return [name for (name,) in rows]
