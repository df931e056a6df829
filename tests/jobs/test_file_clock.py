"""On SQLite those who trigger keep the file's clock, and go by it, where no instance is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from fencepost import Fencepost
from fencepost.cli.verify import gathered
from fencepost.ledger.sqlite_clock import CONFIRMS, SILENCE
from fencepost.model.slot import instant
from fencepost.testing.clock import SettableClocks
from fencepost.testing.ledger_checker import prove
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fencepost.running import Run

STEP = 600.0


class Caller:
    """A process of a machine that triggers a job, and hears what it is told."""

    def __init__(self, url: str, clocks: SettableClocks) -> None:
        self.clocks, self.heard = clocks, list[Any]()
        self.fp = Fencepost(url, clocks=clocks, on_event=self.heard.append)
        self.fp.job("bills", every="1m")(lambda: None)

    def trigger(self) -> float:
        """Return for how long the slot has been due by the clock of this process."""
        outcome = self.fp.trigger("bills")
        assert outcome.status in ("succeeded", "already_done")
        return self.clocks.wall() - instant(outcome.slot)

    def clock_words(self) -> list[str]:
        return [event.what for event in self.heard if event.what.startswith("clock")]


@pytest.fixture
def callers(tmp_path: Path) -> Iterator[tuple[Caller, Caller]]:
    url = f"sqlite:///{tmp_path}/ledger.db"
    right, wrong = Caller(url, SettableClocks()), Caller(url, SettableClocks())
    with right.fp, wrong.fp:
        yield right, wrong


def unproven(caller: Caller) -> list[str]:
    found = prove(finish(gathered(caller.fp._working.ledger))).findings
    return [str(finding) for finding in found]


def is_recent(age: float) -> bool:
    return -1.0 <= age < 60.0


@pytest.mark.parametrize("step", [STEP, -STEP])
def test_who_triggers_alone_has_the_clock_on_record(
    callers: tuple[Caller, Caller], step: float
) -> None:
    right, wrong = callers
    assert is_recent(right.trigger())
    wrong.clocks.step_wall(step)
    assert is_recent(wrong.trigger() - step)
    assert wrong.clock_words() == ["clock_disagrees"]
    assert right.clock_words() == []
    for run in right.fp.runs("bills"):
        assert abs(run.started_at - right.clocks.wall()) < 10
        assert abs(run.ended_at - right.clocks.wall()) < 10
    assert unproven(right) == []


def test_who_triggers_now_and_then_confirms_it(callers: tuple[Caller, Caller]) -> None:
    right, wrong = callers
    right.trigger()
    for _ in range(4):
        for caller in callers:
            caller.clocks.advance(CONFIRMS + 1)
        right.trigger()
    for caller in callers:
        caller.clocks.advance(SILENCE - 1)
    wrong.clocks.step_wall(STEP)
    assert is_recent(wrong.trigger() - STEP)
    assert wrong.clock_words() == ["clock_disagrees"]


@pytest.mark.parametrize("step", [STEP, -STEP])
def test_a_step_that_all_have_seen_blocks_nobody_and_is_believed_after_a_silence(
    callers: tuple[Caller, Caller], step: float
) -> None:
    caller, _ = callers
    caller.trigger()
    caller.clocks.step_wall(step)
    assert is_recent(caller.trigger() - step)  # by the time that is on record
    assert caller.clock_words() == ["clock_disagrees"]
    for _ in range(3):
        caller.clocks.advance(SILENCE / 2)
        caller.trigger()
    assert is_recent(caller.trigger())
    assert caller.clock_words() == ["clock_disagrees", "clock_agrees"]


def test_a_run_that_is_at_work_while_its_clock_is_set_ends_by_the_time_on_record(
    callers: tuple[Caller, Caller],
) -> None:
    caller, other = callers

    @caller.fp.job("long")
    def long(run: Run) -> None:
        caller.clocks.step_wall(STEP)
        run.save(1)

    other.trigger()
    assert caller.fp.trigger("long", manual=True)
    (run,) = caller.fp.runs("long")
    assert run.ended_at - run.started_at < 10
    assert unproven(other) == []


def test_a_wrong_clock_keeps_an_alarm_from_ringing_early_and_late(
    callers: tuple[Caller, Caller],
) -> None:
    right, wrong = callers
    right.trigger()
    wrong.clocks.step_wall(-STEP)
    wrong.fp.alarms.set("bell", "one", in_=30.0)
    (alarm,) = right.fp.alarms.list()
    assert abs(alarm.due.timestamp() - right.clocks.wall() - 30) < 10
