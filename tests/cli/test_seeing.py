"""What ``list``, ``status``, ``runs``, ``slots`` and ``resume`` answer."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import threading
from typing import TYPE_CHECKING

import pytest
from exec_kit import PATIENCE, Kit, kit_in
from seeing_kit import INSTANT, LATER, SLOT, Desk, broken, nothing

from fencepost import Fencepost

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fencepost import Run


@pytest.fixture
def desk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Desk:
    return Desk(tmp_path, capsys)


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    with kit_in(tmp_path) as kit:
        yield kit


# Where there is nothing.


@pytest.mark.parametrize("verb", ["list", "status", "runs"])
def test_to_look_for_a_ledger_does_not_make_one(desk: Desk, verb: str) -> None:
    answer = desk.ask(verb)
    assert (answer.code, answer.out) == (
        0,
        f"no job has run here yet: {desk.url} has no ledger\n",
    )
    assert desk.ask(verb, "--quiet").out == ""
    assert os.listdir(desk.path.parent) == []


def test_no_ledger_is_an_empty_document(desk: Desk) -> None:
    assert desk.ask("list", "--json").json == []
    assert desk.ask("runs", "--json").json == []
    assert desk.ask("status", "--json").json == {"ok": True, "jobs": []}


@pytest.mark.parametrize("verb", ["list", "status", "runs"])
def test_a_file_with_nothing_but_leases_gets_no_tables_by_being_looked_at(
    desk: Desk, verb: str
) -> None:
    with Fencepost(desk.url) as fp, fp.lock("job"):
        pass
    before = tables(desk.path)
    assert "has no ledger" in desk.ask(verb).out
    assert tables(desk.path) == before


@pytest.mark.parametrize(
    ("verb", "sentence"),
    [("list", "knows no job"), ("status", "knows no job"), ("runs", "there is no run yet")],
)
def test_an_empty_ledger_is_answered_with_a_sentence(desk: Desk, verb: str, sentence: str) -> None:
    assert desk.ask("migrate").code == 0
    answer = desk.ask(verb)
    assert answer.code == 0
    assert sentence in answer.out
    assert len(answer.lines) == 1


@pytest.mark.parametrize(
    "words",
    [("slots", "nope"), ("runs", "nope"), ("status", "nope"), ("resume", "nope")],
)
def test_an_unknown_job_is_one_sentence_with_2(desk: Desk, words: tuple[str, ...]) -> None:
    for known in ("none", "'job'"):
        answer = desk.ask(*words)
        assert (answer.code, answer.out) == (2, "")
        assert answer.err == f"fencepost: no job is called 'nope'; known here: {known}\n"
        desk.ran(nothing, SLOT)


@pytest.mark.parametrize("verb", ["logs", "cancel"])
def test_an_unknown_run_is_one_sentence_with_2(desk: Desk, verb: str) -> None:
    for _ in range(2):
        answer = desk.ask(verb, f"job@{LATER}")
        assert (answer.code, answer.out) == (2, "")
        assert f"the ledger has no run 'job@{LATER}'" in answer.err
        desk.ran(nothing, SLOT)
    answer = desk.ask(verb, "job")
    assert answer.code == 2
    assert "'job' is not a run: write job@instant" in answer.err


@pytest.mark.parametrize("verb", ["list", "status", "runs"])
def test_a_folder_that_is_not_there_is_an_unreachable_store(desk: Desk, verb: str) -> None:
    desk.url = f"sqlite:///{desk.path.parent}/nowhere/runs.db"
    answer = desk.ask(verb)
    assert answer.code == 3
    assert "does its folder exist?" in answer.err


def test_what_is_no_database_is_one_sentence(desk: Desk) -> None:
    desk.path.write_text("just text, and enough of it to be taken for a header of something" * 20)
    answer = desk.ask("status")
    assert answer.code == 3
    assert "is not a healthy SQLite file" in answer.err
    assert len(answer.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("runs", "--limit", "0"), "limit is 0"),
        (("slots", "job", "--limit", "-1"), "limit is -1"),
        (("runs", "--state", "done"), "state is 'done': it must be one of pending, running"),
    ],
)
def test_words_that_make_no_sense_are_refused(
    desk: Desk, words: tuple[str, ...], sentence: str
) -> None:
    answer = desk.ask(*words)
    assert answer.code == 2
    assert sentence in answer.err


# list


def test_list_shows_schedule_overlap_and_last_run(desk: Desk) -> None:
    desk.ran(nothing, SLOT)
    desk.ran(broken, SLOT, name="other")
    headings, *rows = desk.ask("list").lines
    assert headings.split("  ")[0] == "JOB"
    assert re.fullmatch(rf"job    every 1 h  skip +{INSTANT}  succeeded", rows[0]), rows
    assert re.fullmatch(rf"other  every 1 h  skip +{INSTANT}  failed", rows[1]), rows
    assert [row.split()[0] for row in desk.ask("list", "--quiet").lines] == ["job", "other"]


def test_list_in_json_has_the_definition_and_the_last_run(desk: Desk) -> None:
    desk.ran(nothing, SLOT)
    (job,) = desk.ask("list", "--json").json
    assert job["last_run"]["run"] == f"job@{SLOT}"
    assert (job["job"], job["schedule"], job["overlap"]) == ("job", "every 1 h", "skip")
    assert (job["quarantined"], job["paused"]) == (None, None)
    assert job["definition"]["timeout"] == 3600


def test_a_job_in_quarantine_is_listed_as_such_until_it_is_resumed(desk: Desk) -> None:
    desk.poisoned()
    assert f"by job@{SLOT}" in desk.ask("list").out
    status = desk.ask("status")
    assert status.code == 1
    assert f"job is in quarantine because of job@{SLOT}" in status.out
    assert desk.ask("status", "--quiet").lines[0].startswith("job is in quarantine")
    assert desk.ask("resume", "job").out == "job 'job' is out of quarantine: its next slot runs\n"
    nothing_changed = "job 'job' was neither paused nor in quarantine; nothing changed\n"
    assert desk.ask("resume", "job").out == nothing_changed
    assert "QUARANTINED" not in desk.ask("list").out


def test_resume_in_json_says_whether_anything_changed(desk: Desk) -> None:
    desk.poisoned()
    first, second = (desk.ask("resume", "job", "--json").json for _ in range(2))
    by = {"job": "job", "resumed": True, "quarantined_by": f"job@{SLOT}", "paused": None}
    assert first == by
    assert second == by | {"resumed": False, "quarantined_by": None}


# status


def test_status_is_fine_after_a_success_and_wrong_after_a_failure(desk: Desk) -> None:
    desk.ran(nothing, SLOT)
    answer = desk.ask("status")
    assert answer.code == 0
    assert re.fullmatch(rf"job  {INSTANT}  succeeded  {INSTANT}", answer.lines[1]), answer.out
    assert desk.ask("status", "--quiet").out == ""
    desk.ran(broken, LATER)
    answer = desk.ask("status", "job")
    assert answer.code == 1
    assert answer.lines[-1] == rf"  job@{LATER} is failed: ValueError: no \x1b[31minput"
    assert re.search(rf"failed +ValueError.*  {INSTANT}$", answer.lines[1])


def test_status_in_json_says_if_all_is_well_and_what_is_not(desk: Desk) -> None:
    desk.ran(nothing, SLOT)
    desk.ran(broken, LATER)
    document = desk.ask("status", "--json").json
    (job,) = document["jobs"]
    assert document["ok"] is job["ok"] is False
    assert job["last_run"]["run"] == f"job@{LATER}"
    assert job["last_success"]["run"] == f"job@{SLOT}"
    assert job["last_success_age"] >= 0
    assert (job["running"], job["waiting"], len(job["problems"])) == ([], [], 1)


def test_a_slot_that_had_nothing_to_do_does_not_make_up_for_a_failure(desk: Desk) -> None:
    desk.ran(broken, SLOT)
    desk.ran(lambda run: run.skip(), LATER)
    answer = desk.ask("status")
    assert answer.code == 1
    assert "skipped" in answer.lines[1]


def test_status_shows_who_runs_what_and_how_far_it_is(desk: Desk) -> None:
    at_work, go_on = threading.Event(), threading.Event()

    def body(run: Run) -> None:
        run.progress(3, 10)
        run.save("here")
        at_work.set()
        assert go_on.wait(PATIENCE)

    thread = threading.Thread(target=desk.ran, args=(body, SLOT))
    thread.start()
    try:
        assert at_work.wait(PATIENCE)
        answer, document = desk.ask("status"), desk.ask("status", "--json").json
    finally:
        go_on.set()
        thread.join()
    line = answer.lines[-1].strip()
    pattern = rf"job@{SLOT} by \S+ pid {os.getpid()} for [\d.]+ s, attempt 1, 3 of 10 done"
    assert answer.code == 0
    assert re.fullmatch(pattern, line), answer.out
    (running,) = document["jobs"][0]["running"]
    assert (running["alive"], running["progress"]) == (True, {"done": 3, "total": 10})


def test_a_run_whose_process_was_killed_is_shown_as_lost(kit: Kit) -> None:
    process = kit.start("exec", "job", "--slot", SLOT, "--", "sh", "-c", "echo up; sleep 600")
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.kill()
    process.communicate(timeout=PATIENCE)  # which waits for the command, who has our pipe
    done = kit.fencepost("status")
    while "running now" in done.stdout:  # the guards take a moment to go
        done = kit.fencepost("status")
    assert done.returncode == 1
    assert f"job@{SLOT} was lost:" in done.stdout
    (running,) = json.loads(kit.fencepost("status", "--json").stdout)["jobs"][0]["running"]
    assert running["alive"] is False


def test_status_shows_what_waits_for_a_retry_and_until_when(kit: Kit) -> None:
    words = ("exec", "job", "--slot", SLOT, "--retry", "2", "--retry-pause", "1h", "--verbose")
    process = kit.start(*words, "--", "sh", "-c", "exit 3")
    assert process.stderr is not None
    while "retry_in" not in process.stderr.readline():
        pass
    done = kit.fencepost("status")
    process.terminate()
    assert process.wait(PATIENCE) == 143
    assert done.returncode == 0
    pattern = rf"  job@{SLOT} for a retry \S+ \(in .*\); attempt 1 failed: exit code 3"
    assert re.fullmatch(pattern, done.stdout.splitlines()[-1]), done.stdout
    assert kit.fencepost("cancel", f"job@{SLOT}").stdout == f"run 'job@{SLOT}' is cancelled\n"


# runs and slots


def test_runs_shows_the_newest_first_and_only_what_is_asked_for(desk: Desk) -> None:
    desk.ran(nothing, SLOT)
    desk.ran(broken, LATER)
    desk.ran(nothing, SLOT, name="other")
    headings, *rows = desk.ask("runs").lines
    assert headings.split()[:3] == ["RUN", "STATE", "WHY"]
    assert [row.split()[0] for row in rows] == [
        *(f"job@{LATER}", f"other@{SLOT}", f"job@{SLOT}"),
    ]
    assert [row.split()[0] for row in desk.ask("runs", "job", "--quiet").lines] == [
        *(f"job@{LATER}", f"job@{SLOT}"),
    ]
    assert len(desk.ask("runs", "--limit", "1").lines) == 2
    wanted = ("--state", "failed", "--state", "timed_out")
    assert [run["run"] for run in desk.ask("runs", *wanted, "--json").json] == [f"job@{LATER}"]
    assert desk.ask("runs", "job", "--state", "missed").out == (
        "there is no run of job 'job' that is missed yet\n"
    )


def test_no_line_ends_in_blanks_and_no_column_is_empty(desk: Desk) -> None:
    desk.ran(nothing, SLOT)
    for words in (("list",), ("status",), ("runs",), ("slots", "job"), ("logs", f"job@{SLOT}")):
        for line in desk.ask(*words).lines:
            assert line == line.rstrip()
    assert "WHY" not in desk.ask("runs").out


def test_slots_says_what_became_of_each_and_what_was_in_the_way(desk: Desk) -> None:
    at_work, go_on = threading.Event(), threading.Event()

    def body(_: Run) -> None:
        at_work.set()
        assert go_on.wait(PATIENCE)

    thread = threading.Thread(target=desk.ran, args=(body, SLOT))
    thread.start()
    try:
        assert at_work.wait(PATIENCE)
        desk.ran(nothing, LATER)
    finally:
        go_on.set()
        thread.join()
    _, *rows = desk.ask("slots", "job").lines
    assert re.fullmatch(rf"{LATER}  skipped    lock_held  job@{SLOT}  {INSTANT}", rows[0])
    assert re.fullmatch(rf"{SLOT}  succeeded  - +- +{INSTANT}", rows[1])
    first, *_ = desk.ask("slots", "job", "--json").json
    assert (first["state"], first["reason"], first["blocker"]) == (
        *("skipped", "lock_held", f"job@{SLOT}"),
    )


def test_a_manual_run_is_no_slot(desk: Desk) -> None:
    desk.ran(nothing, SLOT, LATER)
    with Fencepost(desk.url) as fp:
        fp.job("job", every="1h")(nothing)
        for _ in range(3):
            fp.trigger("job", manual=True)
    assert [run["slot"] for run in desk.ask("slots", "job", "--limit", "2", "--json").json] == [
        *(LATER, SLOT),
    ]


def tables(path: Path) -> list[str]:
    database = sqlite3.connect(path)
    try:
        names = "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
        return [name for (name,) in database.execute(names)]
    finally:
        database.close()
