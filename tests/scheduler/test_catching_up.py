"""What becomes of slots that nobody was there for, through the faces, on clocks that are set."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from schedlab import NOON, Heard, Noon, books_of, complaints, states, url_of

from fencepost import BadSchedule, EveryAfter, Fencepost
from fencepost.model.plan import starts_at
from fencepost.model.run import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fencepost import Run

DAY = 86400
OUTAGE = 3 * DAY


class Machine:
    """One face, its clocks, and which slots its job was run for."""

    def __init__(self, folder: Path) -> None:
        self.clocks, self.heard = Noon(), Heard()
        self.fp = Fencepost(url_of(folder), clocks=self.clocks, on_event=self.heard)
        self.ran: list[int] = []

    def declare(self, body: Callable[[Run], Any] | None = None, **words: Any) -> None:
        def noted(run: Run) -> None:
            self.ran.append(int(run.slot.timestamp()))
            if body is not None:
                body(run)

        self.fp.job("job", **words)(noted)
        assert self.fp.tick() == []  # known from here on, and nothing of the past is owed


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with opened(tmp_path) as machine:
        yield machine


@contextmanager
def opened(folder: Path) -> Iterator[Machine]:
    machine = Machine(folder)
    try:
        yield machine
    finally:
        machine.fp.close()


def spans(machine: Machine) -> list[tuple[int, int, str, str]]:
    return [
        (record.span.first, record.span.last, record.span.state.value, record.span.reason)
        for record in machine.fp.slots("job").spans
    ]


def test_latest_runs_the_newest_slot_and_records_the_others_as_one_range(machine: Machine) -> None:
    machine.declare(every="1m")
    machine.clocks.advance(OUTAGE)
    machine.fp.tick()
    newest = NOON + OUTAGE
    assert machine.ran == [newest]
    assert spans(machine) == [(NOON + 60, newest - 60, "missed", "coalesced")]
    (record,) = machine.fp.slots("job").spans
    assert record.span.into == machine.fp.runs("job")[0].key.__str__()
    assert complaints(books_of(machine.fp), reasons={"coalesced"}) == []
    assert machine.fp.tick() == []


def test_all_runs_as_many_as_the_limit_oldest_first_and_records_the_rest(machine: Machine) -> None:
    machine.declare(every="1m", catchup="all", catchup_limit=10)
    machine.clocks.advance(OUTAGE)
    while machine.fp.tick():
        pass
    newest = NOON + OUTAGE
    assert machine.ran == [newest - 60 * back for back in range(9, -1, -1)]
    assert spans(machine) == [(NOON + 60, newest - 600, "missed", "limit")]
    assert complaints(books_of(machine.fp), reasons={"limit"}) == []
    missed = machine.heard.about("missed")
    assert [dict(event.more)["reason"] for event in missed] == ["limit"]


def test_all_looks_back_no_further_than_its_window(machine: Machine) -> None:
    machine.declare(every="1h", catchup="all", catchup_window="1d")
    machine.clocks.advance(OUTAGE)
    while machine.fp.tick():
        pass
    assert machine.ran == [NOON + OUTAGE - 3600 * back for back in range(23, -1, -1)]
    assert [span[3] for span in spans(machine)] == ["window"]


def test_a_tick_of_most_one_takes_the_oldest_missing_slot_only(machine: Machine) -> None:
    machine.declare(every="1m", catchup="all")
    machine.clocks.advance(180)
    for minute in (1, 2, 3):
        assert len(machine.fp.tick(most=1)) == 1
        assert machine.ran[-1] == NOON + 60 * minute
    assert machine.fp.tick(most=1) == []


def test_live_first_runs_the_newest_before_it_makes_up_for_the_others(machine: Machine) -> None:
    machine.declare(every="1m", catchup="all", live_first=True)
    machine.clocks.advance(240)
    while machine.fp.tick():
        machine.clocks.advance(1)
    assert machine.ran == [NOON + 240, NOON + 60, NOON + 120, NOON + 180]
    assert complaints(books_of(machine.fp)) == []


def test_none_runs_only_what_can_start_on_time(machine: Machine) -> None:
    machine.declare(every="1h", catchup="none")
    machine.clocks.advance(OUTAGE + 600)
    assert machine.fp.tick() == []
    assert spans(machine) == [(NOON + 3600, NOON + OUTAGE, "missed", "start_deadline")]
    machine.clocks.advance(3000)
    machine.fp.tick()
    assert machine.ran == [NOON + OUTAGE + 3600]


def test_a_slot_past_its_start_deadline_was_missed(machine: Machine) -> None:
    machine.declare(every="1h", start_deadline="5m")
    machine.clocks.advance(3600 + 299)
    machine.fp.tick()
    assert machine.ran == [NOON + 3600]
    machine.clocks.advance(3600 + 2)
    assert machine.fp.tick() == []
    assert spans(machine) == [(NOON + 7200, NOON + 7200, "missed", "start_deadline")]


def test_a_delay_after_completion_is_counted_from_the_end_of_the_last_run(machine: Machine) -> None:
    machine.declare(lambda _: machine.clocks.advance(100), every=EveryAfter("15m"))
    machine.clocks.advance(900)
    assert len(machine.fp.tick()) == 1
    ended = machine.clocks.wall()
    machine.clocks.advance(890)
    assert machine.fp.tick() == []
    machine.clocks.advance(12)
    assert len(machine.fp.tick()) == 1
    first, second = machine.ran
    assert first == pytest.approx(NOON + 900, abs=2)
    assert second == pytest.approx(ended + 900, abs=2)


def test_an_instant_is_run_once(machine: Machine) -> None:
    machine.declare(at=datetime.fromtimestamp(NOON + 30, UTC))
    machine.clocks.advance(31)
    machine.fp.tick()
    machine.clocks.advance(DAY)
    assert machine.fp.tick() == []
    assert machine.ran == [NOON + 30]
    assert machine.fp.next("job") == []


def test_jitter_delays_the_start_and_not_the_slot(machine: Machine) -> None:
    machine.declare(every="1h", jitter="30m")
    (at, *_) = machine.fp.next("job", 1)
    assert NOON + 3600 <= at.timestamp() < NOON + 3600 + 1800
    machine.clocks.advance(at.timestamp() - machine.clocks.wall() - 1)
    assert machine.fp.tick() == []
    machine.clocks.advance(1.5)
    machine.fp.tick()
    assert machine.ran == [NOON + 3600]
    job = books_of(machine.fp).jobs[0]
    assert job.schedule is not None
    due = starts_at(job.schedule, job.catching_up, "job", NOON + 3600)
    assert due == pytest.approx(at.timestamp(), abs=1e-5)


def test_next_tells_instants_to_come_and_refuses_a_job_without_any(machine: Machine) -> None:
    machine.declare(cron="0 9 * * *")
    days = [datetime.fromtimestamp(NOON - 3 * 3600 + DAY * n, UTC) for n in (1, 2)]
    assert machine.fp.next("job", 2) == days
    assert machine.fp.next("job", 1, after=days[0]) == days[1:]
    machine.fp.job("triggered")(lambda: None)
    with pytest.raises(BadSchedule, match="has no schedule"):
        machine.fp.next("triggered")


def test_slots_of_a_pause_are_skipped_and_nothing_fires_when_it_ends(machine: Machine) -> None:
    machine.declare(every="1m")
    machine.fp.pause("job", reason="maintenance")
    for _ in range(3):
        machine.clocks.advance(60)
        assert machine.fp.tick() == []
    machine.clocks.advance(60)
    assert machine.fp.resume("job").paused == ""
    assert machine.fp.tick() == []
    assert spans(machine) == [(NOON + 60, NOON + 240, "skipped", "paused")]
    machine.clocks.advance(60)
    machine.fp.tick()
    assert machine.ran == [NOON + 300]


@pytest.mark.parametrize("looked", [True, False])
def test_a_pause_ends_by_itself_and_the_next_slot_runs(machine: Machine, *, looked: bool) -> None:
    machine.declare(every="1m")
    machine.fp.pause("job", until=NOON + 150)
    for _ in range(2):
        machine.clocks.advance(60)
        if looked:
            assert machine.fp.tick() == []
    machine.clocks.advance(60)
    machine.fp.tick()
    assert machine.ran == [NOON + 180]
    assert spans(machine) == [(NOON + 60, NOON + 120, "skipped", "paused")]
    assert complaints(books_of(machine.fp), reasons={"paused"}) == []


def test_a_job_that_was_paused_all_the_time_runs_nothing_of_it_afterwards(
    machine: Machine,
) -> None:
    machine.declare(every="1h")
    machine.fp.pause("job", until=NOON + 3 * 3600 + 60)
    machine.clocks.advance(3 * 3600 + 120)
    assert machine.fp.tick() == []
    assert machine.ran == []
    assert [span[2:] for span in spans(machine)] == [("skipped", "paused")]


def test_a_retry_is_due_at_its_time_and_superseded_by_the_next_slot(tmp_path: Path) -> None:
    with opened(tmp_path) as machine:

        def fails(run: Run) -> None:
            raise ValueError("as ever")

        machine.declare(fails, every="1h", retry=3)
        machine.clocks.advance(3600)
        machine.fp.tick()
        (run,) = machine.fp.runs("job")
        assert run.state is State.WAITING_RETRY
        machine.clocks.advance(601)
        assert len(machine.fp.tick()) >= 1
        machine.clocks.advance(3600)
        machine.fp.tick()
        first = machine.fp.slots("job").runs[0]
        assert (first.state, first.attempt) in [
            (State.FAILED, 3),
            (State.FAILED, 2),
        ]
        assert states(machine.fp, "job")[0][2] in ("error", "superseded")
