"""Retention forgets what is old, a few jobs at a time, and looks at nothing that is young."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from ledgerlab import StillClocks, opened

from fencepost.ledger import sqlite_planner, sqlite_rows as rows
from fencepost.ledger.retention import KEPT_FOR, KEPT_RUNS, forgotten
from fencepost.model.run import RunRecord, State
from fencepost.model.slot import RunKey
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from sqlite3 import Connection

    from fencepost.ledger.sqlite import SqliteLedger

OLD = 3


class Kept:
    """A ledger with a history, and the clock that makes it old."""

    def __init__(self, path: Path) -> None:
        self.clocks = StillClocks()
        self.ledger: SqliteLedger = opened(path, self.clocks)
        self.now = self.clocks.wall()

    def history(self, job: str, *, states: Sequence[State] = (), count: int = 0) -> list[RunRecord]:
        """Record runs that ended long ago, one a minute."""
        count = count or KEPT_RUNS + OLD
        first = int(self.now - 3 * KEPT_FOR)
        runs = [
            RunRecord(
                RunKey(job, first + 60 * n),
                states[n % len(states)] if states else State.SKIPPED,
                job,
                ended_at=first + 60.0 * n,
            )
            for n in range(count)
        ]

        def work(db: Connection) -> None:
            values = (("default", *rows.row_of(run._replace(state=State.SKIPPED))) for run in runs)
            db.executemany(rows.INSERT, values)
            for run in runs:
                if run.state is not State.SKIPPED:
                    db.execute("DROP TRIGGER IF EXISTS fencepost_run_next")
                    key = "job = ? AND slot = ?"
                    set_state = f"UPDATE fencepost_run SET state = ? WHERE {key}"
                    db.execute(set_state, (run.state.value, job, run.key.slot))

        finish(self.ledger.register(job, "{}"))
        self.ledger.written(work)
        return runs

    def prune(self, most: int = 500) -> int:
        return finish(self.ledger.planner.prune(most=most))

    def left(self, job: str) -> list[RunRecord]:
        return finish(self.ledger.runs(job, limit=10_000))


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    kept = Kept(tmp_path / "ledger.db")
    yield kept
    finish(kept.ledger.close())


def test_a_prune_looks_at_so_many_jobs_and_goes_on_from_there_the_next_time(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_planner, "_JOBS_PRUNED", 2)
    for job in "abcde":
        kept.history(job)
    assert [kept.prune() for _ in range(3)] == [2 * OLD, 2 * OLD, OLD]
    kept.history("aa")  # it starts again from the first
    assert kept.prune() == OLD


def test_a_prune_that_was_cut_short_goes_on_with_the_same_jobs(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_planner, "_JOBS_PRUNED", 1)
    kept.history("a")
    kept.history("b")
    assert [kept.prune(most=2) for _ in range(4)] == [2, 1, 2, 1]
    assert len(kept.left("a")) == len(kept.left("b")) == KEPT_RUNS


def test_a_prune_looks_at_nothing_of_the_history_that_is_young(kept: Kept) -> None:
    kept.history("a", count=20_000)
    kept.clocks.step_wall(-2.9 * KEPT_FOR)  # nothing of it is a month old
    steps: list[int] = []
    connection = kept.ledger.leases.file._connection
    assert connection is not None
    connection.set_progress_handler(lambda: steps.append(1), 100)
    assert kept.prune() == 0
    assert len(steps) < 1000


@pytest.mark.parametrize(
    "states",
    [(State.FAILED,), (State.SUCCEEDED, State.FAILED), (State.TIMED_OUT, State.SKIPPED)],
)
@pytest.mark.parametrize("back", [0.0, 1.0, 1.5, 2.0])
def test_sqlite_forgets_just_what_the_rule_says(
    kept: Kept, states: tuple[State, ...], back: float
) -> None:
    runs = kept.history("a", states=states, count=2 * KEPT_RUNS + 50)
    kept.clocks.step_wall(-back * KEPT_FOR + 7200)
    gone = forgotten(runs, now=kept.clocks.wall())
    assert kept.prune() == len(gone)
    assert {run.key for run in runs} - {run.key for run in gone} == {
        run.key for run in kept.left("a")
    }
