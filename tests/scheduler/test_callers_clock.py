"""A trigger, a command of ``exec`` and a backfill go by the ledger's clock, not by the caller's.

Each caller is a process whose wall clock is an hour ahead or an hour behind. The clock of the
ledger is right: that of the database server, or on SQLite that of the processes that agree.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from schedlab import serving, until

from fencepost import Fencepost
from fencepost.cli.verify import gathered
from fencepost.model.slot import instant, shown
from fencepost.testing.ledger_checker import prove
from fencepost.world.flow import finish
from marialab import QuickMariaDB
from pglab import QuickPostgres
from servers import shared
from servers.faketime import wrong_by

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fencepost.model.run import RunRecord

PROGRAM = Path(__file__).with_name("caller_program.py")
FENCEPOST = os.path.join(os.path.dirname(sys.executable), "fencepost")
HOUR, EVERY = 3600, 6
SCHEDULE = {"every": f"{EVERY}s"}
# Within this time of the ledger's clock a trigger may mean the slot before or after an instant.
NEAR = 2.0 + EVERY


class Place:
    """A ledger, a face of this process whose clock is right, and callers whose clocks are not."""

    def __init__(self, url: str, namespace: str) -> None:
        self.url, self.namespace = url, namespace
        self.fp = Fencepost(url, namespace=namespace)
        self.fp.job("bills", every=SCHEDULE["every"])(lambda: None)

    def call(self, verb: str, *, off: int, face: str = "blocking", **words: object) -> Any:
        """Return what a caller was told whose clock is wrong by so much."""
        asked = {"schedule": SCHEDULE, **words}
        place = [self.url, self.namespace, face, verb]
        command = [sys.executable, str(PROGRAM), *place, json.dumps(asked)]
        return json.loads(self._run(command, off=off).stdout)

    def exec(self, *words: str, off: int) -> subprocess.CompletedProcess[str]:
        """Run ``fencepost exec`` with a wrong clock."""
        return self.fencepost("exec", "bills", *words, "--", "echo", "ran", off=off)

    def fencepost(self, *words: str, off: int) -> subprocess.CompletedProcess[str]:
        """Run a command line with a wrong clock."""
        where = ["--url", self.url, "--namespace", self.namespace]
        return self._run([FENCEPOST, *where, *words], off=off, check=False)

    def _run(
        self, command: list[str], *, off: int, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, **(wrong_by(off) if off else {})}
        return subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=60, check=check
        )

    def runs(self) -> list[RunRecord]:
        return finish(self.fp._working.ledger.runs("bills", limit=100))

    def unproven(self) -> list[str]:
        found = prove(finish(gathered(self.fp._working.ledger))).findings
        return [str(finding) for finding in found]

    def settled(self) -> None:
        """Check that no record has a wrong time, and that all of it is proven."""
        now = time.time()
        for run in self.runs():
            for at in (run.created_at, run.started_at, run.ended_at, run.beat_at):
                assert not at or now - 120 < at <= now + 2, run
            assert run.created_at <= run.started_at <= run.ended_at
        assert self.unproven() == []


@pytest.fixture(params=["sqlite", "sqlite alone", "postgres", "mariadb"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "postgres":
        url = shared(QuickPostgres).database("callers")
    elif request.param == "mariadb":
        url = shared(QuickMariaDB).database("callers")
    else:
        url = f"sqlite:///{tmp_path}/ledger.db"
    place = Place(url, tmp_path.name)
    with place.fp:
        if request.param == "sqlite":
            instance = Fencepost(url, namespace=tmp_path.name)
            done: list[int] = []
            instance.job("beat", every="1s")(lambda: done.append(1))
            with instance, serving(instance):
                until(lambda: done)
                yield place
        else:
            if (
                request.param == "sqlite alone"
            ):  # there is no instance: an earlier trigger was right
                assert place.fp.trigger("bills", manual=True)
            yield place


def near(slot: str, at: float) -> bool:
    """Say whether a slot was the newest one due at about an instant."""
    return at - NEAR < instant(slot) <= at + 1.0


def disagrees(told: Any) -> list[str]:
    return [event["off"] for event in told["events"] if event["what"] == "clock_disagrees"]


def runs_of_slots(place: Place) -> list[RunRecord]:
    return [run for run in place.runs() if not run.key.manual]


@pytest.mark.parametrize("face", ["blocking", "aio"])
@pytest.mark.parametrize("off", [HOUR, -HOUR])
def test_a_trigger_means_the_newest_slot_by_the_ledgers_clock(
    place: Place, off: int, face: str
) -> None:
    before = time.time()
    told = place.call("trigger", off=off, face=face)
    assert abs(told["wall"] - time.time() - off) < 30, "the caller's clock is wrong"
    outcome = told["answer"]
    assert outcome["status"] == "succeeded"
    assert any(near(outcome["slot"], at) for at in (before, time.time()))
    (said,) = disagrees(told)
    assert abs(float(said[:-1]) - off) < 10
    assert said[0] == ("+" if off > 0 else "-")
    place.settled()


@pytest.mark.parametrize("off", [HOUR, -HOUR])
def test_the_next_slot_runs_when_its_time_comes_exactly_once(place: Place, off: int) -> None:
    ran = instant(place.call("trigger", off=off)["answer"]["slot"])
    coming = max(int(time.time()) // EVERY * EVERY, ran) + EVERY
    until(lambda: time.time() >= coming)
    slot = shown(coming)
    outcome = place.fp.trigger("bills", slot)
    assert (outcome.status, outcome.slot) == ("succeeded", slot)
    again = place.call("trigger", off=off, slot=slot)
    assert again["answer"]["status"] == "already_done"
    assert all(run.starts == 1 for run in place.runs())
    place.settled()


@pytest.mark.parametrize("off", [HOUR, -HOUR])
@pytest.mark.parametrize("words", [("--every", f"{EVERY}s"), ("--cron", "* * * * *")])
def test_exec_means_the_newest_slot_by_the_ledgers_clock(
    place: Place, off: int, words: tuple[str, str]
) -> None:
    before = time.time()
    done = place.exec(*words, off=off)
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    (run,) = runs_of_slots(place)
    assert before - 60 - NEAR < run.key.slot <= time.time() + 1
    lines = [line for line in done.stderr.splitlines() if "clock" in line]
    assert len(lines) == 1, done.stderr
    assert ("ahead of" if off > 0 else "behind") in lines[0]
    place.settled()


def test_a_slot_that_has_not_come_by_the_ledgers_clock_is_refused(place: Place) -> None:
    slot = shown(int(time.time() // EVERY * EVERY) + HOUR // 2)
    told = place.call("trigger", off=HOUR, slot=slot)
    assert "BadSlot" in told["error"]
    assert "a slot never starts early" in told["error"]
    assert len(disagrees(told)) == 1
    refused = place.exec("--every", f"{EVERY}s", "--slot", slot, off=HOUR)
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert "a slot never starts early" in refused.stderr
    assert runs_of_slots(place) == []


def test_a_slot_that_has_come_by_the_ledgers_clock_runs_for_a_slow_caller(place: Place) -> None:
    slots = [shown(int(time.time() // EVERY * EVERY) - ago * EVERY) for ago in (1, 2)]
    told = place.call("trigger", off=-HOUR, slot=slots[0])
    assert told["answer"]["status"] == "succeeded"
    assert len(disagrees(told)) == 1
    done = place.exec("--every", f"{EVERY}s", "--slot", slots[1], off=-HOUR)
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    assert {shown(run.key.slot) for run in runs_of_slots(place)} == set(slots)
    place.settled()


@pytest.mark.parametrize("off", [HOUR, -HOUR])
def test_a_manual_run_is_named_after_the_ledgers_clock(place: Place, off: int) -> None:
    told = place.call("trigger", off=off, manual=True)
    assert told["answer"]["status"] == "succeeded"
    done = place.exec("--manual", off=off)
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    assert all(abs(run.key.slot - time.time()) < 60 for run in place.runs() if run.key.manual)
    place.settled()


@pytest.mark.parametrize(("off", "face"), [(HOUR, "aio"), (-HOUR, "blocking")])
def test_a_backfill_ends_now_by_the_ledgers_clock(place: Place, off: int, face: str) -> None:
    start = int(time.time() // EVERY * EVERY) - 2 * EVERY
    words: dict[str, object] = {"start": start, "end": start + 2 * HOUR}
    would = place.call("backfill", off=off, face=face, dry_run=True, **words)
    keys, now = would["answer"], time.time()
    assert len(keys) >= 3
    assert max(keys) <= f"bills@{shown(int(now))}"
    assert len(disagrees(would)) == 1
    place.call("backfill", off=off, face=face, wait=False, **words)
    (lane,) = finish(place.fp._working.ledger.planner.lanes())
    assert now - 1 <= lane.until <= time.time() + 1
    assert abs(lane.created_at - time.time()) < 60
    asked = ["backfill", "bills", shown(start), shown(start + 2 * HOUR), "--dry-run"]
    said = place.fencepost(*asked, off=off)
    assert said.returncode == 0, said.stderr
    assert max(re.findall(r"bills@[-0-9T:]+Z", said.stdout)) <= f"bills@{shown(int(time.time()))}"


@pytest.mark.parametrize("off", [HOUR, -HOUR])
def test_a_caller_whose_clock_is_wrong_does_not_begin_what_is_at_one_instant(
    place: Place, off: int
) -> None:
    """It may be due only by the caller's clock, or only by the ledger's."""
    at = shown(int(time.time()) + (HOUR // 2 if off > 0 else -HOUR // 2))
    told = place.call("trigger", off=off, schedule={"at": at})
    if off > 0:
        assert "is due yet" in told["error"]
        assert runs_of_slots(place) == []
    else:
        assert (told["answer"]["status"], told["answer"]["slot"]) == ("succeeded", at)
        place.settled()


@pytest.mark.parametrize("off", [HOUR, -HOUR])
def test_an_alarm_that_is_set_to_ring_in_a_while_rings_by_the_ledgers_clock(
    place: Place, off: int
) -> None:
    place.call("alarm", off=off, in_=60.0)
    (alarm,) = place.fp.alarms.list()
    assert abs(alarm.due.timestamp() - time.time() - 60) < 30
