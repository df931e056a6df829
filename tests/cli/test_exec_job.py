"""``fencepost exec JOB`` with a slot: once per slot, and what the record says of it."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import time
from typing import TYPE_CHECKING, Any

import pytest
from exec_kit import PATIENCE, Kit, kit_in, wait_for

from fencepost.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SLOT = "2026-01-20T02:00:00Z"
AT = ("--slot", SLOT)
RUN = f"job@{SLOT}"


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    with kit_in(tmp_path) as kit:
        yield kit


def record(kit: Kit, run: str = RUN) -> dict[str, Any]:
    """Return all that is on record about a run."""
    done = kit.fencepost("logs", run, "--json")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def one_line(text: str) -> str:
    (line,) = text.splitlines()
    return line


# Once.


def test_of_eight_at_once_one_runs_the_slot(kit: Kit) -> None:
    script = f"echo ran >> {kit.folder}/ran"
    started = [kit.start("exec", "job", *AT, "--", "sh", "-c", script) for _ in range(8)]
    answers = [process.communicate(timeout=PATIENCE) for process in started]
    codes = sorted(process.returncode for process in started)
    assert codes == [0, *[75] * 7], answers
    assert (kit.folder / "ran").read_text() == "ran\n"
    for _, err in answers:
        assert not err or re.search("is held by|was already done by", one_line(err))
    run = record(kit)
    assert (run["state"], run["starts"], run["trigger"]) == ("succeeded", 1, "exec")


def test_a_slot_that_is_done_is_not_run_again_and_says_when_it_was(kit: Kit) -> None:
    assert kit.fencepost("exec", "job", *AT, "--", "true").returncode == 0
    done = kit.fencepost("exec", "job", *AT, "--", "sh", "-c", "echo ran")
    assert (done.returncode, done.stdout) == (75, "")
    pattern = (
        rf"fencepost: run '{RUN}' was already done by \S+ pid \d+ at "
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ \([\d.]+ s ago\); the command was not run"
    )
    assert re.fullmatch(pattern, one_line(done.stderr)), done.stderr
    words = ("exec", "job", *AT, "--held-exit", "0", "--quiet", "--", "false")
    quiet = kit.fencepost(*words)
    assert (quiet.returncode, quiet.stderr) == (0, "")


def test_a_slot_that_failed_is_not_run_again_either(kit: Kit) -> None:
    assert kit.fencepost("exec", "job", *AT, "--", "sh", "-c", "exit 3").returncode == 3
    done = kit.fencepost("exec", "job", *AT, "--", "true")
    assert done.returncode == 75
    assert f"run '{RUN}' is failed (exit code 3) since" in one_line(done.stderr)


def test_a_slot_that_runs_says_who_has_it(kit: Kit) -> None:
    holder = sleeper(kit)
    done = kit.fencepost("exec", "job", *AT, "--", "true")
    assert done.returncode == 75
    pattern = rf"run '{RUN}' is held by \S+ pid {holder.pid} since \S+ \([\d.]+ s\); .* not run"
    assert re.search(pattern, one_line(done.stderr)), done.stderr


def test_another_slot_of_a_job_that_runs_is_skipped_and_on_record(kit: Kit) -> None:
    sleeper(kit)
    later = "2026-01-20T03:00:00Z"
    done = kit.fencepost("exec", "job", "--slot", later, "--", "true")
    assert done.returncode == 75
    assert f"run 'job@{later}' was skipped: {RUN} is held by" in one_line(done.stderr)
    run = record(kit, f"job@{later}")
    assert (run["state"], run["reason"], run["blocker"]) == ("skipped", "lock_held", RUN)


def test_whoever_waits_runs_the_next_slot_when_the_job_is_free(kit: Kit) -> None:
    holder = sleeper(kit, "--on-loss", "fail")
    later = "2026-01-20T03:00:00Z"
    waiting = kit.start("exec", "job", "--slot", later, "--wait", "40s", "--", "echo", "ran")
    wait_for(lambda: "waiting" in kit.fencepost("status").stdout, "the later slot to wait")
    holder.terminate()
    out, err = waiting.communicate(timeout=PATIENCE)
    assert (waiting.returncode, out) == (0, "ran\n"), err


def test_with_replace_the_older_run_gives_way(kit: Kit) -> None:
    holder = sleeper(kit)
    later = "2026-01-20T03:00:00Z"
    words = ("exec", "job", "--slot", later, "--overlap", "replace", "--", "echo", "ran")
    done = kit.fencepost(*words)
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    _, err = holder.communicate(timeout=PATIENCE)
    assert holder.returncode == 143, err
    assert record(kit)["state"] == "cancelled"


def test_overlap_allow_lets_as_many_run_as_the_limit(kit: Kit) -> None:
    allow = ("--overlap", "allow", "--limit", "2")
    sleeper(kit, *allow)
    later = ("--slot", "2026-01-20T03:00:00Z")
    assert kit.fencepost("exec", "job", *later, *allow, "--", "true").returncode == 0


def test_a_signal_ends_the_wait_for_others(kit: Kit) -> None:
    sleeper(kit)
    waiting = kit.start("exec", "job", *AT, "--wait", "40s", "--", "true")
    wait_for(lambda: has_handler(waiting.pid), "the waiting one to be listening")
    waiting.terminate()
    _, err = waiting.communicate(timeout=PATIENCE)
    assert (waiting.returncode, err) == (143, "")
    assert record(kit)["starts"] == 1


def test_who_waits_for_the_same_slot_learns_that_it_is_done(kit: Kit) -> None:
    script = f"echo up; cat {kit.folder}/gate"
    os.mkfifo(kit.folder / "gate")
    holder = kit.start("exec", "job", *AT, "--", "sh", "-c", script)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "up\n"
    waiting = kit.start("exec", "job", *AT, "--wait", "40s", "--", "true")
    wait_for(lambda: has_handler(waiting.pid), "the waiting one to be listening")
    (kit.folder / "gate").write_text("")
    assert holder.wait(PATIENCE) == 0
    _, err = waiting.communicate(timeout=PATIENCE)
    assert waiting.returncode == 75
    assert "was already done" in one_line(err)


def test_a_slot_of_a_job_in_quarantine_is_skipped(kit: Kit) -> None:
    assert kit.fencepost("exec", "job", "--manual", "--", "true").returncode == 0
    database = sqlite3.connect(kit.folder / "leases.db")
    with database:
        database.execute("UPDATE fencepost_job SET quarantined = 'job@then'")
    database.close()
    done = kit.fencepost("exec", "job", *AT, "--", "true")
    assert done.returncode == 75
    pattern = rf"run '{RUN}' was skipped \S+ \(.* ago\): its job is in quarantine, and .* not run"
    assert re.search(pattern, one_line(done.stderr)), done.stderr
    assert kit.fencepost("resume", "job").returncode == 0
    assert kit.fencepost("exec", "job", "--manual", "--", "true").returncode == 0


def test_overlap_fail_makes_it_a_failure_that_the_lock_was_held(kit: Kit) -> None:
    sleeper(kit)
    later = "2026-01-20T03:00:00Z"
    done = kit.fencepost("exec", "job", "--slot", later, "--overlap", "fail", "--", "true")
    assert done.returncode == 75
    assert "is failed (the lock 'job' was held)" in one_line(done.stderr)
    assert record(kit, f"job@{later}")["reason"] == "lock_held"


def test_manual_runs_are_each_their_own(kit: Kit) -> None:
    for _ in range(3):
        assert kit.fencepost("exec", "job", "--manual", "--", "true").returncode == 0
    runs = json.loads(kit.fencepost("runs", "job", "--json").stdout)
    assert [run["trigger"] for run in runs] == ["manual"] * 3
    assert all("!manual-" in run["run"] for run in runs)


@pytest.mark.parametrize("words", [("--every", "8760h"), ("--cron", "0 0 29 2 *")])
def test_a_schedule_means_its_newest_slot_that_is_due(kit: Kit, words: tuple[str, ...]) -> None:
    """Both are due so rarely that none comes between the two triggers."""
    script = ("--", "sh", "-c", "echo $FENCEPOST_SLOT")
    done = kit.fencepost("exec", "job", *words, *script)
    assert done.returncode == 0, done.stderr
    slot = done.stdout.strip()
    assert time.strptime(slot, "%Y-%m-%dT%H:%M:%SZ") < time.gmtime()
    assert kit.fencepost("exec", "job", *words, *script).returncode == 75
    assert record(kit, f"job@{slot}")["state"] == "succeeded"
    (job,) = json.loads(kit.fencepost("list", "--json").stdout)
    assert job["schedule"] is not None


def test_a_slot_by_hand_leaves_the_schedule_of_a_job_as_it_is_known(kit: Kit) -> None:
    assert kit.fencepost("exec", "job", "--every", "1h", "--", "true").returncode == 0
    assert kit.fencepost("exec", "job", *AT, "--", "true").returncode == 0
    (job,) = json.loads(kit.fencepost("list", "--json").stdout)
    assert job["schedule"] == "every 1 h"


# What the command gets to know, and what is known of it.


def test_the_command_learns_which_run_it_is(kit: Kit) -> None:
    names = ("RUN_ID", "SLOT", "ATTEMPT", "IDEMPOTENCY_KEY", "TOKEN", "NAME")
    script = "echo " + " ".join(f"$FENCEPOST_{name}" for name in names)
    done = kit.fencepost("exec", "job", *AT, "--", "sh", "-c", script)
    *facts, token, name = done.stdout.split()
    assert (facts, name) == ([RUN, SLOT, "1", RUN], "job")
    assert record(kit)["token"] == int(token)


def test_what_the_command_says_is_passed_on_and_on_record(kit: Kit) -> None:
    done = kit.fencepost("exec", "job", *AT, "--", "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (done.stdout, done.stderr, done.returncode) == ("out\n", "err\n", 3)
    run = record(kit)
    result = run["result"]
    assert (run["state"], run["reason"], run["error"]) == ("failed", "error", "exit code 3")
    assert (result["exit_code"], result["signal"], result["version"]) == (3, None, VERSION)
    assert sorted(result["output"].split()) == ["err", "out"]
    assert result["host"] == run["holder"].split()[0]
    assert 0 < result["duration"] < PATIENCE
    text = kit.fencepost("logs", RUN).stdout
    assert "output:\n" in text
    assert "  out\n" in text


def test_of_much_output_the_head_and_the_tail_are_on_record(kit: Kit) -> None:
    script = "echo begin; seq 1 20000; echo end"
    done = kit.fencepost("exec", "job", *AT, "--", "sh", "-c", script)
    assert done.stdout.splitlines() == ["begin", *map(str, range(1, 20001)), "end"]
    result = record(kit)["result"]
    head, left_out, tail = re.split(r"\[… ([\d,]+) bytes left out …\]\n", result["output"])
    assert head.startswith("begin\n1\n")
    assert tail.endswith("20000\nend\n")
    assert int(left_out.replace(",", "")) == result["output_left_out"] > 0
    assert result["output_bytes"] == len(done.stdout)
    assert len(result["output"]) < 40_000


def test_no_secret_is_on_record(kit: Kit) -> None:
    script = 'echo "hush: $DB_PASSWORD"; echo "api_key=abcdef123456"; echo "run $FENCEPOST_RUN_ID"'
    words = ("exec", "job", *AT, "--", "sh", "-c", script)
    done = kit.fencepost(*words, DB_PASSWORD="correct horse", FENCEPOST_IDEMPOTENCY_KEY=RUN)
    assert "correct horse" in done.stdout  # it is the command's own affair where it says it
    said = record(kit)["result"]["output"]
    assert said == f"hush: ***\napi_key=***\nrun {RUN}\n"
    files = (file for file in kit.folder.iterdir() if file.is_file())
    dump = b"".join(file.read_bytes() for file in files)
    assert b"correct horse" not in dump


def test_a_reader_that_went_away_does_not_fail_the_run(kit: Kit) -> None:
    process = kit.start("exec", "job", *AT, "--", "sh", "-c", "seq 1 200000; echo done >&2")
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (0, "done\n")
    assert record(kit)["state"] == "succeeded"


def test_a_command_that_is_not_found_fails_the_run_with_127(kit: Kit) -> None:
    done = kit.fencepost("exec", "job", *AT, "--retry", "5", "--", "no-such-command")
    assert done.returncode == 127
    sentence = "'no-such-command' was not run: No such file or directory"
    assert one_line(done.stderr) == f"fencepost: {sentence}"
    run = record(kit)
    assert (run["state"], run["reason"], run["error"]) == ("failed", "not_started", sentence)


# Log lines.


def test_it_is_quiet_unless_asked_for_log_lines(kit: Kit) -> None:
    quiet = kit.fencepost("exec", "job", "--manual", "--", "true")
    assert (quiet.stdout, quiet.stderr) == ("", "")
    verbose = kit.fencepost("exec", "job", *AT, "--verbose", "--", "true")
    first, last = verbose.stderr.splitlines()
    about = rf"job=job run_id={re.escape(RUN)} token=\d+"
    assert re.fullmatch(rf"\d\d:\d\d:\d\d lock_acquired {about}", first)
    assert re.fullmatch(
        rf"\d\d:\d\d:\d\d completed {about} duration=\S+s last_success_at=\S+Z", last
    )


def test_log_lines_can_be_json(kit: Kit) -> None:
    sleeper(kit)
    later = "2026-01-20T03:00:00Z"
    words = ("exec", "job", "--slot", later, "--quiet", "--", "true")
    done = kit.fencepost(*words, FENCEPOST_LOG="json")
    event = json.loads(one_line(done.stderr))
    assert (event["event"], event["run_id"], event["reason"]) == (
        *("skipped", f"job@{later}", "lock_held"),
    )
    assert event["holder"]


# What is refused, and what cannot be asked.


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--slot", "tomorrow"], "slot is 'tomorrow': write an instant and its zone"),
        (["--slot", ""], "write an instant and its zone"),
        (["--slot", "2026-01-20T02:00:00"], "write an instant and its zone"),
        (["--slot", "2026-01-20T02:00:01Z", "--every", "1h"], "is no slot of job 'job'"),
        (["--slot", SLOT, "--manual"], "give either --slot or --manual"),
        (["--cron", "* * *"], "has 3 fields"),
        (["--cron", "61 * * * *"], "61"),
        (["--cron", "0 2 * * *", "--tz", "Mars/Olympus"], "Mars/Olympus"),
        (["--cron", "0 2 * * *", "--every", "1h"], "choose one"),
        (["--every", "often"], "write a number and a unit"),
        (["--every", "0s"], "give 1 s or more"),
        (["--every", "1h", "--tz", "Europe/Berlin"], "--tz says whose clocks --cron means"),
        ([*AT, "--overlap", "maybe"], "overlap is 'maybe': it must be one of 'skip'"),
        ([*AT, "--on-loss", "cry"], "on_loss is 'cry': it must be one of 'resume'"),
        ([*AT, "--retry", "often"], "retry is 'often': it must be a whole number"),
        ([*AT, "--retry", "0"], "must be a whole number from 1 on"),
        ([*AT, "--retry-pause", "1s"], "--retry-pause is without effect unless --retry"),
        ([*AT, "--timeout", "0s"], "timeout is '0s': it must be more than zero"),
        ([*AT, "--max-hold", "1s"], "has a --timeout"),
        ([*AT, "--limit", "2"], "give --overlap allow with it"),
        ([*AT, "--ttl", "1s"], "exec needs at least 5.0 s"),
        (["--retry", "3"], "--retry is for the run of a job"),
        (["--timeout", "3s"], "--timeout is for the run of a job"),
        (["--verbose"], "--verbose is for the run of a job"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_before_anything_is_asked(
    kit: Kit, words: list[str], sentence: str
) -> None:
    done = kit.fencepost("exec", "job", *words, "--", "true")
    assert done.returncode == 2
    assert sentence in one_line(done.stderr)
    assert not (kit.folder / "leases.db").exists()


def test_a_slot_that_is_not_due_is_refused_by_the_ledgers_clock(kit: Kit) -> None:
    done = kit.fencepost("exec", "job", "--slot", "2126-01-20T02:00:00Z", "--", "echo", "ran")
    assert (done.returncode, done.stdout) == (2, "")
    assert "is not due yet" in one_line(done.stderr)
    assert kit.fencepost("runs", "job", "--json").stdout.strip() == "[]"


def test_a_job_cannot_have_the_sign_between_job_and_slot_in_its_name(kit: Kit) -> None:
    done = kit.fencepost("exec", "a@b", *AT, "--", "true")
    assert done.returncode == 2
    assert "contains '@'" in one_line(done.stderr)


def test_an_unreachable_ledger_exits_with_69_and_one_line(kit: Kit) -> None:
    kit.fencepost("migrate")
    database = sqlite3.connect(kit.folder / "leases.db", isolation_level=None)
    database.execute("BEGIN IMMEDIATE")
    done = kit.fencepost("exec", "job", *AT, "--", "sh", "-c", "echo ran")
    database.close()
    assert (done.returncode, done.stdout) == (69, "")
    assert one_line(done.stderr).endswith("locked; the command was not run")


def test_a_ledger_in_a_folder_that_is_not_there_exits_with_69(kit: Kit) -> None:
    url = f"sqlite:///{kit.folder}/nowhere/leases.db"
    done = kit.fencepost("--url", url, "exec", "job", *AT, "--", "true")
    assert done.returncode == 69
    assert "does its folder exist" in one_line(done.stderr)


def has_handler(pid: int) -> bool:
    """Say whether a process has its own answer to SIGTERM by now."""
    with open(f"/proc/{pid}/status") as file:
        caught = next(line for line in file if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) & 1 << (signal.SIGTERM - 1))


def sleeper(kit: Kit, *words: str) -> Any:
    """Start the slot with a command that sleeps, and wait until it does."""
    process = kit.start("exec", "job", *AT, *words, "--", "sh", "-c", "echo up; exec sleep 600")
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process
