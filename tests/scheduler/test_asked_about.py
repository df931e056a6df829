"""What a scheduler answers about jobs and runs: reads change nothing, and answers are true."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from schedlab import NOON, Noon, books_of, url_of

from fencepost import Fencepost, Misuse, Retry
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fencepost import Run

HOUR = 3600


@pytest.fixture
def clocks() -> Noon:
    return Noon()


@pytest.fixture(params=["sqlite", "memory"])
def fp(request: pytest.FixtureRequest, tmp_path: Path, clocks: Noon) -> Iterator[Fencepost]:
    url = url_of(tmp_path) if request.param == "sqlite" else "memory://"
    with Fencepost(url, clocks=clocks, namespace=tmp_path.name) as made:
        yield made


def test_a_job_that_was_only_triggered_is_asked_about_by_its_schedule(fp: Fencepost) -> None:
    fp.job("job", every="1h")(lambda: None)
    fp.trigger("job")
    assert [at.timestamp() for at in fp.next("job", 2)] == [NOON + HOUR, NOON + 2 * HOUR]
    assert len(fp.backfill("job", NOON - 3 * HOUR, NOON, dry_run=True)) == 3
    (job,) = books_of(fp).jobs
    assert job.epoch == 0  # whoever only asks has changed nothing
    fp.backfill("job", NOON - 3 * HOUR, NOON)
    assert len(fp.slots("job").runs) == 4


def test_who_asks_about_a_job_does_not_rename_it(fp: Fencepost, clocks: Noon) -> None:
    fp.job("old", every="1h")(lambda: None)
    fp.tick()
    fp.job("new", every="1h", aliases=["old"])(lambda: None)
    fp.next("new")
    fp.backfill("new", NOON - HOUR, NOON, dry_run=True)
    with pytest.raises(Misuse, match="still 'old'"):
        fp.pause("new")
    assert [(job.job, job.retired) for job in books_of(fp).jobs] == [("old", "")]
    clocks.advance(HOUR)
    fp.tick()
    retired = {job.job: job.retired for job in books_of(fp).jobs}
    assert retired == {"old": "renamed to new", "new": ""}


def test_a_slot_whose_jittered_start_is_to_come_is_the_next_one(
    fp: Fencepost, clocks: Noon
) -> None:
    fp.job("job", every="1h", jitter="50m")(lambda: None)
    fp.tick()
    start = fp.next("job", 1)[0].timestamp()
    assert start > NOON + HOUR + 2
    clocks.advance(NOON + HOUR + 1 - clocks.wall())
    first, second = fp.next("job", 2)
    assert first.timestamp() == start
    assert second.timestamp() >= NOON + 2 * HOUR
    assert fp.next("job", 1, after=NOON + HOUR + 1) == [first]
    clocks.advance(start - clocks.wall() + 0.5)
    fp.tick()
    assert fp.next("job", 1) == [second]


def test_a_slot_that_was_decided_before_the_job_was_there_is_not_the_next_one(
    fp: Fencepost, clocks: Noon
) -> None:
    clocks.advance(1)
    fp.job("job", every="1h", jitter="50m")(lambda: None)
    assert fp.next("job", 1)[0].timestamp() >= NOON + HOUR
    fp.tick()
    assert fp.next("job", 1)[0].timestamp() >= NOON + HOUR


def test_a_tick_tells_of_an_attempt_that_failed_and_will_be_tried_again(
    fp: Fencepost, clocks: Noon
) -> None:
    @fp.job("job", every="1h", retry=Retry(3))
    def job() -> None:
        raise ValueError("no")

    fp.tick()
    clocks.advance(HOUR)
    (outcome,) = fp.tick()
    assert (outcome.status, outcome.reason) == ("failed", "waiting_retry")
    assert "no" in (outcome.error or "")


def test_the_first_window_begins_when_the_schedule_came_into_force(
    fp: Fencepost, clocks: Noon
) -> None:
    seen: list[tuple[float, float]] = []

    def body(run: Run) -> None:
        assert run.window is not None
        start, end = (edge.timestamp() - NOON for edge in run.window)
        seen.append((start, end))

    def declared(**words: Any) -> None:
        fp.job("job", **words)(body)
        fp._scheduling._announced = -1
        fp.tick()

    clocks.advance(600)
    declared(every="1h")
    clocks.advance(HOUR)
    fp.tick()
    clocks.advance(HOUR)
    fp.tick()
    assert seen == [(600, HOUR), (HOUR, 2 * HOUR)]
    seen.clear()
    fp.backfill("job", NOON - HOUR, NOON + 1)
    assert seen == [(-2 * HOUR, -HOUR), (-HOUR, 0)]  # the past has windows of its own
    seen.clear()
    declared(every="1h", timeout="5m")  # another policy takes nothing away from the next window
    clocks.advance(HOUR)
    fp.tick()
    assert seen == [(2 * HOUR, 3 * HOUR)]
    seen.clear()
    declared(every="2h")  # another schedule begins now
    clocks.advance(HOUR)
    fp.tick()
    assert seen == [(3 * HOUR + 600, 4 * HOUR)]


def test_an_older_program_that_triggers_does_not_say_what_a_job_is(
    fp: Fencepost, clocks: Noon
) -> None:
    fp.job("job", every="1h", retry=Retry(5), timeout="10m")(lambda: None)
    fp.tick()
    before = finish(fp._scheduling.planner.job("job"))
    finish(fp._working.ledger.register("job", "{}"))
    assert finish(fp._scheduling.planner.job("job")) == before
