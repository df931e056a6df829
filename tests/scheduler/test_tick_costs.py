"""What a tick costs, in statements and commits: as much as is due, however much is registered."""

from __future__ import annotations

import re
import sqlite3
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pytest
from schedlab import Noon, url_of

from fencepost import Fencepost
from fencepost.ledger import sqlite_planner_rows as sql, sqlite_retention_rows
from fencepost.ledger.api import NOTHING, Attempt
from fencepost.ledger.planning import Ask, Begun, End, Lane, Ticked
from fencepost.ledger.sqlite_schema import migrate
from fencepost.model.ending import Settled
from fencepost.model.run import State
from fencepost.stores.sqlite_schema import CREATE
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

DONE = Settled(State.SUCCEEDED)
# Whether a backup was restored into the file: a number in its header, and no page more.
LOOK = "PRAGMA schema_version"


class Traced:
    """An instance, and what its ticks have asked of the file since."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self.clocks = Noon()
        self.fp = Fencepost(url_of(folder), clocks=self.clocks)
        self.fp.job("template", every="1d")(lambda run: None)
        self.fp.tick()
        names = ({"name": f"job-{n}", "every": "1h"} for n in range(jobs))
        assert self.fp.store("template", names) == jobs
        self.scheduling = self.fp._scheduling
        self.sent: list[str] = []
        connection = self.fp._holding.store.file._connection  # type: ignore[attr-defined]
        connection.set_trace_callback(self.sent.append)
        self.number = 0

    def tick(self, room: int, *, ended: Sequence[Begun] = (), sweep: bool = False) -> Ticked:
        self.number += 1
        ends = [End(attempt_of(begun), DONE, NOTHING) for begun in ended]
        ask = Ask(self.scheduling.serving.want, f"n{self.number}-", room, ends, sweep=sweep)
        return finish(self.scheduling.planner.tick(ask))

    def cost(self) -> list[str]:
        """Return the first words sent since the last call."""
        sent = [statement for statement in self.sent if LOOK not in statement]
        words = [statement.split()[0] for statement, _ in groupby(sent)]
        self.sent.clear()
        return words


def attempt_of(begun: Begun) -> Attempt:
    run = begun.claimed.run
    assert run is not None
    return Attempt(run.key, run.token, run.holder.nonce, run.lease, str(run.holder))


@pytest.fixture(params=[1, 10_000])
def traced(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Traced]:
    traced = Traced(tmp_path, request.param)
    yield traced
    traced.fp.close()


def test_an_idle_tick_is_one_statement_that_reads_and_no_commit(traced: Traced) -> None:
    ticked = traced.tick(16)
    assert not ticked.begun
    assert ticked.pause == pytest.approx(3600, abs=10)
    assert traced.cost() == ["SELECT"]


def test_an_idle_sweep_is_two_statements_that_read_and_no_commit(traced: Traced) -> None:
    traced.tick(16, sweep=True)
    assert traced.cost() == ["SELECT", "SELECT"]


@pytest.mark.parametrize("traced", [500], indirect=True)
@pytest.mark.parametrize("count", [1, 10, 100])
def test_a_tick_that_begins_many_is_one_commit(traced: Traced, count: int) -> None:
    traced.clocks.advance(3600)
    assert len(traced.tick(count).begun) == count
    words = traced.cost()
    assert words.count("COMMIT") == 1
    assert words.count("BEGIN") == 1


@pytest.mark.parametrize("traced", [500], indirect=True)
def test_ends_and_claims_share_a_commit(traced: Traced) -> None:
    traced.clocks.advance(3600)
    first = traced.tick(50)
    traced.cost()
    second = traced.tick(50, ended=first.begun)
    assert len(second.begun) == 50
    assert [run.state for run in second.ended if not isinstance(run, Exception)] == [
        State.SUCCEEDED
    ] * 50
    assert traced.cost().count("COMMIT") == 1


# SQLite writes out what it traces, whole batches for each of their rows: so batches are small here.
@pytest.mark.parametrize("traced", [2_000], indirect=True)
def test_twenty_batches_that_are_due_take_a_commit_each_with_their_ends(traced: Traced) -> None:
    traced.clocks.advance(3600)
    ran: set[str] = set()
    begun: list[Begun] = []
    traced.cost()
    while True:
        ticked = traced.tick(100, ended=begun)
        begun = ticked.begun
        keys = {str(attempt_of(one).key) for one in begun}
        assert not keys & ran
        ran |= keys
        if not begun:
            break
    words = traced.cost()
    assert len(ran) == 2_000
    assert words.count("COMMIT") <= 21
    # Claims and ends go by the batch.
    assert len(words) <= 12 * 21


@pytest.mark.parametrize("traced", [500], indirect=True)
def test_what_is_due_and_has_no_room_costs_no_more_than_a_look(traced: Traced) -> None:
    traced.clocks.advance(3600)
    ticked = traced.tick(0)
    assert ticked.full
    assert not ticked.begun
    assert len(traced.cost()) < 10


@pytest.mark.parametrize("on_loss", ["fail", "resume"])
def test_a_tick_that_begins_what_must_not_be_tried_twice_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_loss: str
) -> None:
    synced: list[int] = []
    traced = Traced(tmp_path, 1)
    traced.fp.job("careful", every="1h", on_loss=on_loss)(lambda run: None)
    traced.fp.tick()
    traced.clocks.advance(3600)
    traced.fp._holding.store.reserve.ahead()  # type: ignore[attr-defined]
    finish(traced.fp._working.ledger.sync())
    monkeypatch.setattr("os.fdatasync", synced.append)
    assert len(traced.tick(5).begun) == 2
    assert len(synced) == (on_loss == "fail")
    traced.fp.close()


def test_an_end_for_good_that_nobody_expected_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    traced = Traced(tmp_path, 1)
    traced.clocks.advance(3600)
    (begun,) = traced.tick(1).begun
    ledger = traced.fp._working.ledger
    finish(ledger.cancel(attempt_of(begun).key, force=False, operator="olga"))
    monkeypatch.setattr("os.fdatasync", synced.append)
    end = End(attempt_of(begun), Settled(State.WAITING_RETRY, "error"), NOTHING)
    ask = Ask(traced.scheduling.serving.want, "n", 0, [end])
    (run,) = finish(traced.scheduling.planner.tick(ask)).ended
    assert not isinstance(run, Exception)
    assert run.state is State.CANCELLED
    assert len(synced) == 1
    traced.fp.close()


async def slowly(_: object) -> None:
    """Do what can be stopped."""


def test_a_run_that_is_taken_away_to_be_replaced_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    traced = Traced(tmp_path, 0)
    words: dict[str, Any] = {"overlap": "replace", "cancel_grace": "5s"}
    traced.fp.job("job", every="1h", lease="2h", **words)(slowly)
    traced.fp.tick()
    traced.clocks.advance(3600)
    (begun,) = traced.tick(1).begun
    traced.clocks.advance(3600)
    assert traced.tick(1).begun == []  # it was asked to stop
    traced.fp._holding.store.reserve.ahead()  # type: ignore[attr-defined]
    finish(traced.fp._working.ledger.sync())
    monkeypatch.setattr("os.fdatasync", synced.append)
    traced.clocks.advance(60)
    traced.tick(1)
    run = finish(traced.fp._working.ledger.find(attempt_of(begun).key))
    assert run is not None
    assert run.state is State.CANCELLED
    assert synced
    traced.fp.close()


def lanes(traced: Traced, count: int) -> list[Lane]:
    planner, start = traced.scheduling.planner, int(traced.clocks.wall()) - 86_400
    asked = (Lane(0, f"job-{n}", start, start + 7200, start) for n in range(count))
    return [finish(planner.backfill(lane)) for lane in asked]


@pytest.mark.parametrize("traced", [500], indirect=True)
def test_lanes_that_are_due_cost_no_more_than_a_look_without_room(traced: Traced) -> None:
    lanes(traced, 500)
    traced.cost()
    assert traced.tick(0).full
    assert len(traced.cost()) < 12


@pytest.mark.parametrize("traced", [500], indirect=True)
def test_lanes_that_have_to_wait_are_looked_at_by_the_batch(traced: Traced) -> None:
    lanes(traced, 500)
    begun: list[Begun] = []
    while found := traced.tick(500).begun:
        begun += found
    assert len({attempt_of(one).key.job for one in begun}) == 500  # and none is forgotten
    traced.clocks.advance(2)
    traced.cost()
    assert traced.tick(500).begun == []
    assert len(traced.cost()) < 1000


@pytest.mark.parametrize("traced", [500], indirect=True)
def test_one_lane_is_found_by_its_number_also_when_it_has_ended(traced: Traced) -> None:
    planner = traced.scheduling.planner
    first, second = lanes(traced, 2)
    finish(planner.stop_lane(first.number, reason="enough"))
    stopped = finish(planner.lane(first.number))
    assert stopped is not None
    assert stopped.stopped == "enough"
    assert finish(planner.lane(second.number)) == second
    assert finish(planner.lane(99)) is None


STATEMENTS = {
    name: text
    for name, text in (vars(sql) | vars(sqlite_retention_rows)).items()
    if isinstance(text, str) and re.match(r"\s*(WITH|SELECT|INSERT|UPDATE|DELETE)\s", text)
}
# What is few is walked: instances, what runs; what an operator asks for; and of what is in order
# only the first is looked at.
WALKED = {"FIND_INSTANCES", "FIND_ALL_LANES", "FIND_LANES", "FIND_ALL_EVENTS"}
FIRST = {"NEXT_LOOK", "ANY_LANE"}
LIVING = {"FIND_RUNNING", "FIND_DUE_RUNS"}
SORTED = {"FIND_UNKNOWN", "FIND_SLOT_RUNS", "FIND_SPANS", "FIND_WAITING", "FIND_LANES"}


@pytest.fixture(scope="module")
def db() -> Iterator[sqlite3.Connection]:
    db = sqlite3.connect(":memory:", isolation_level=None)
    for statement in CREATE:
        db.execute(statement)
    migrate(db, at=0.0)
    yield db
    db.close()


@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize("name", sorted(STATEMENTS))
def test_a_statement_of_the_planner_walks_no_table(
    db: sqlite3.Connection, name: str, *, analyzed: bool
) -> None:
    statement = STATEMENTS[name]
    db.execute("BEGIN")
    if analyzed:
        db.execute("ANALYZE")
    numbers = [int(number) for number in re.findall(r"\?(\d+)", statement)]
    count = max(numbers, default=statement.count("?"))
    plan: list[Any] = db.execute(f"EXPLAIN QUERY PLAN {statement}", ("",) * count).fetchall()
    db.execute("ROLLBACK")
    for *_, step in plan:
        assert name in WALKED or not ("SCAN" in step and "fencepost_" in step), plan
        if "(namespace=?)" in step:
            assert name in WALKED | FIRST | LIVING, plan
        if "TEMP B-TREE" in step:
            assert name in SORTED | LIVING, plan
