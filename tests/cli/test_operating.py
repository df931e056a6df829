"""What ``pause``, ``resume``, ``retire``, ``slots`` and ``instances`` answer, and change."""

from __future__ import annotations

import re
import sqlite3
import time
from typing import TYPE_CHECKING

import pytest
from seeing_kit import Desk, nothing

from fencepost import Fencepost
from fencepost.model.slot import shown
from fencepost.testing.clock import SettableClocks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MINUTE = 60


class Served(Desk):
    """A job that is due every minute, on a clock that can be moved."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__(folder, capsys)
        self.clocks = SettableClocks()
        self.clocks.advance(MINUTE + 5 - self.clocks.wall() % MINUTE)  # no minute ends by itself
        self.fp = Fencepost(self.url, clocks=self.clocks)
        self.fp.job("bills", every="1m")(nothing)
        self.fp.tick()

    def passed(self, minutes: int) -> None:
        for _ in range(minutes):
            self.clocks.advance(MINUTE)
            self.fp.tick()


@pytest.fixture
def desk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Served]:
    desk = Served(tmp_path, capsys)
    yield desk
    desk.fp.close()


def test_a_pause_lets_slots_pass_until_it_is_ended(desk: Served) -> None:
    answer = desk.ask("pause", "bills", "--reason", "holidays")
    assert answer.code == 0
    assert "is paused until somebody resumes it" in answer.out
    desk.passed(3)
    assert desk.fp.runs("bills") == []
    assert "holidays" in desk.ask("list").out
    status = desk.ask("status")
    assert (status.code, "paused: holidays" in status.out) == (0, True)
    resumed = desk.ask("resume", "bills")
    assert "is no longer paused (holidays" in resumed.out
    assert "what passed does not fire" in resumed.out
    desk.passed(1)
    assert len(desk.fp.runs("bills")) == 1


def test_a_pause_may_end_by_itself(desk: Served) -> None:
    until = shown(int(time.time()) + 3600)
    document = desk.ask("pause", "bills", "--until", until, "--json").json
    assert (document["job"], document["paused_until"]) == ("bills", until)
    assert f"until {until}" in desk.ask("list").out
    assert desk.ask("list", "--json").json[0]["paused_until"] == until


@pytest.mark.parametrize(
    "words",
    [("--until", "2020-01-01T00:00:00Z"), ("--until", "tomorrow"), ("--until", "2030-01-01T00:00")],
)
def test_a_pause_until_what_is_over_or_no_instant_is_refused(
    desk: Served, words: tuple[str, ...]
) -> None:
    answer = desk.ask("pause", "bills", *words)
    assert answer.code == 2
    assert len(answer.err.splitlines()) == 1
    assert desk.ask("list", "--json").json[0]["paused"] is None


def test_a_job_that_is_retired_is_over_for_good(desk: Served) -> None:
    desk.passed(1)
    assert desk.ask("retire", "bills", "--reason", " ").code == 2
    answer = desk.ask("retire", "bills", "--reason", "replaced by mail")
    assert "is retired" in answer.out
    assert "replaced by mail" in desk.ask("list").out
    desk.passed(2)
    assert len(desk.fp.runs("bills")) == 1
    for words in (("retire", "bills", "--reason", "x"), ("pause", "bills"), ("resume", "bills")):
        refused = desk.ask(*words)
        assert refused.code == 4
        assert "that is for good" in refused.err
    assert desk.ask("list", "--json").json[0]["next_due"] is None


@pytest.mark.parametrize("verb", ["pause", "resume", "retire", "slots"])
def test_a_job_that_is_not_there_is_one_sentence(desk: Served, verb: str) -> None:
    more = ("--reason", "x") if verb == "retire" else ()
    answer = desk.ask(verb, "nope", *more)
    assert answer.code == 2
    assert "no job is called 'nope'" in answer.err


def test_list_and_status_say_when_a_job_is_due_next(desk: Served) -> None:
    due = desk.ask("list", "--json").json[0]["next_due"]
    assert due is not None
    assert due in desk.ask("list").out
    assert due in desk.ask("status").out


# slots


def test_slots_are_runs_and_ranges_newest_first(desk: Served) -> None:
    desk.passed(2)
    desk.ask("pause", "bills")
    desk.passed(3)
    desk.ask("resume", "bills")
    desk.passed(1)
    _, *rows = desk.ask("slots", "bills").lines
    outcomes = [re.split(r"  +", row)[1:3] for row in rows]
    assert outcomes == [["succeeded", "-"], ["skipped", "paused"], *[["succeeded", "-"]] * 2]
    first, last = desk.fp.slots("bills").spans[0].span[:2]
    assert rows[1].startswith(f"{shown(first)} … {shown(last)} (3)")
    document = desk.ask("slots", "bills", "--json").json
    assert (document[1]["count"], document[1]["reason"]) == (3, "paused")


def test_a_slot_that_was_made_up_is_not_counted_in_its_range(desk: Served) -> None:
    desk.ask("pause", "bills")
    desk.passed(3)
    desk.ask("resume", "bills")
    first = desk.fp.slots("bills").spans[0].span.first
    desk.fp.backfill("bills", first, first + MINUTE)
    made_up, range_ = sorted(
        desk.ask("slots", "bills", "--json").json, key=lambda one: "run" not in one
    )
    assert (made_up["trigger"], range_["count"]) == ("backfill", 2)


def test_slots_can_be_asked_for_from_one_instant_to_another(desk: Served) -> None:
    desk.passed(4)
    slots = [run.key.slot for run in desk.fp.slots("bills").runs]
    words = ("--since", shown(slots[1]), "--until", shown(slots[3]), "--json")
    found = [run["slot"] for run in desk.ask("slots", "bills", *words).json]
    assert found == [shown(slots[2]), shown(slots[1])]
    assert len(desk.ask("slots", "bills", "--limit", "1", "--quiet").lines) == 1
    assert desk.ask("slots", "bills", "--since", "yesterday").code == 2


def test_a_limit_counts_slots_and_not_the_manual_runs_between_them(desk: Served) -> None:
    desk.passed(2)
    for _ in range(5):
        desk.fp.trigger("bills", manual=True)
    assert len(desk.ask("slots", "bills", "--limit", "2", "--json").json) == 2


# instances


def test_instances_says_who_schedules_here(desk: Served) -> None:
    headings, row = desk.ask("instances").lines
    assert headings.split()[:2] == ["INSTANCE", "STATE"]
    assert "  alive  " in row
    (document,) = desk.ask("instances", "--json").json
    assert document["state"] == "alive"


def test_an_instance_that_was_not_heard_of_for_a_minute_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    desk = Desk(tmp_path, capsys)
    clocks = SettableClocks()
    clocks.advance(-100)
    with Fencepost(desk.url, clocks=clocks) as fp:
        fp.job("bills", every="1m")(nothing)
        fp.tick()
    assert desk.ask("instances", "--json").json[0]["state"] == "gone"


def test_where_nobody_schedules_it_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    desk = Desk(tmp_path, capsys)
    assert "has no ledger" in desk.ask("instances").out
    desk.ask("migrate")
    assert "no instance was heard of lately" in desk.ask("instances").out


def test_an_orphan_is_something_wrong_and_is_told_how_to_end(desk: Served) -> None:
    database = sqlite3.connect(desk.path)
    with database:
        database.execute("UPDATE fencepost_job SET orphaned_at = 1700000000.0")
    database.close()
    answer = desk.ask("status")
    assert answer.code == 1
    assert "bills is an orphan: no instance knows it any more" in answer.out
    assert "ORPHANED" in desk.ask("list").out
    desk.ask("retire", "bills", "--reason", "over")
    assert desk.ask("status").code == 0
