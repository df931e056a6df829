"""However the command of a job ends, or is ended, the record says so, and once stays once."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
from exec_kit import PATIENCE, Kit, Tree, kit_in, lives, wait_for

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

SLOT = "2026-01-20T02:00:00Z"
AT = ("--slot", SLOT)
RUN = f"job@{SLOT}"
# Ends with the code of its first argument when it is asked to, or not at all.
OBSTINATE = """
import os, signal, sys
code = int(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: os._exit(code) if code >= 0 else None)
print("up", os.getpid(), flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    with kit_in(tmp_path) as kit:
        yield kit


def record(kit: Kit, run: str = RUN) -> dict[str, Any]:
    done = kit.fencepost("logs", run, "--json")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def obstinate(kit: Kit, code: int, *words: str) -> tuple[subprocess.Popen[str], int]:
    """Start the slot; return the wrapper and the number of the command once it is up."""
    process = kit.start(
        "exec", "job", *AT, *words, "--", sys.executable, "-c", OBSTINATE, str(code)
    )
    assert process.stdout is not None
    up, pid = process.stdout.readline().split()
    assert up == "up"
    return process, int(pid)


def test_a_command_that_a_signal_ended_says_which(kit: Kit) -> None:
    done = kit.fencepost("exec", "job", *AT, "--", "sh", "-c", "kill -9 $$")
    assert (done.returncode, done.stderr) == (137, "")
    run = record(kit)
    assert (run["state"], run["error"]) == ("failed", "killed by SIGKILL")
    assert (run["result"]["exit_code"], run["result"]["signal"]) == (None, "SIGKILL")


def test_an_exit_code_above_128_is_not_mistaken_for_a_signal(kit: Kit) -> None:
    assert kit.fencepost("exec", "job", *AT, "--", "sh", "-c", "exit 137").returncode == 137
    run = record(kit)
    assert (run["error"], run["result"]["signal"]) == ("exit code 137", None)


# Retries.


def test_a_failure_is_tried_again_until_it_succeeds(kit: Kit) -> None:
    script = 'echo "try $FENCEPOST_ATTEMPT"; test $FENCEPOST_ATTEMPT = 3'
    words = ("--retry", "5", "--retry-pause", "10ms")
    done = kit.fencepost("exec", "job", *AT, *words, "--", "sh", "-c", script)
    assert (done.returncode, done.stdout) == (0, "try 1\ntry 2\ntry 3\n")
    run = record(kit)
    assert (run["state"], run["attempt"], run["error"]) == ("succeeded", 3, None)
    assert [attempt["output"] for attempt in run["attempts"]] == ["try 1\n", "try 2\n", "try 3\n"]
    tokens = [attempt["token"] for attempt in run["attempts"]]
    assert tokens == sorted(set(tokens))
    text = kit.fencepost("logs", RUN).stdout
    assert re.search(r"1\. token \d+ by \S+ pid \d+, failed: exit code 1", text)
    assert "output of attempt 2:\n  try 2\n" in text


def test_without_success_the_last_exit_code_counts(kit: Kit) -> None:
    words = ("--retry", "2", "--retry-pause", "10ms")
    done = kit.fencepost("exec", "job", *AT, *words, "--", "sh", "-c", "exit 4$FENCEPOST_ATTEMPT")
    assert done.returncode == 42
    run = record(kit)
    assert (run["state"], run["error"], run["attempt"]) == ("failed", "exit code 42", 2)


def test_a_signal_ends_the_wait_for_a_retry_and_the_next_one_goes_on(kit: Kit) -> None:
    words = ("--retry", "3", "--retry-pause", "1h", "--verbose")
    process = kit.start("exec", "job", *AT, *words, "--", "sh", "-c", "exit 3")
    assert process.stderr is not None
    while "retry_in" not in process.stderr.readline():
        pass
    process.terminate()
    assert process.wait(PATIENCE) == 143
    assert record(kit)["state"] == "waiting_retry"
    done = kit.fencepost("exec", "job", *AT, *words, "--", "true")
    assert done.returncode == 75
    assert "it failed, and waits for its next try; the command was not run" in done.stderr


# Timeouts and cancels.


def test_a_timeout_is_sigterm_and_timed_out(kit: Kit) -> None:
    done = kit.fencepost("exec", "job", *AT, "--timeout", "300ms", "--", "sleep", "600")
    assert done.returncode == 143
    sentence = "it was stopped after its timeout of 0.3 s"
    assert done.stderr == f"fencepost: run '{RUN}' is timed_out: {sentence}\n"
    run = record(kit)
    assert (run["state"], run["reason"], run["error"]) == ("timed_out", "timeout", sentence)
    assert run["result"]["signal"] == "SIGTERM"


def test_no_timeout_must_be_asked_for(kit: Kit) -> None:
    for number, timeout in enumerate(["none", "1h"]):
        words = ("--timeout", timeout) if timeout == "none" else ()
        assert kit.fencepost("exec", f"job{number}", *AT, *words, "--", "true").returncode == 0
    jobs = json.loads(kit.fencepost("list", "--json").stdout)
    assert [job["definition"]["timeout"] for job in jobs] == [None, 3600]


def test_who_ignores_sigterm_is_killed_after_the_grace(kit: Kit) -> None:
    process, pid = obstinate(kit, -1, "--timeout", "300ms", "--grace", "200ms")
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 137
    assert not lives(pid)
    run = record(kit)
    assert (run["state"], run["result"]["signal"]) == ("timed_out", "SIGKILL")


def test_who_ends_well_only_because_its_time_was_up_has_not_succeeded(kit: Kit) -> None:
    process, _ = obstinate(kit, 0, "--timeout", "1s")
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert record(kit)["state"] == "timed_out"


def test_a_timeout_is_tried_again_if_there_are_tries_left(kit: Kit) -> None:
    script = "test $FENCEPOST_ATTEMPT = 2 || exec sleep 600"
    words = ("--timeout", "500ms", "--retry", "2", "--retry-pause", "10ms")
    done = kit.fencepost("exec", "job", *AT, *words, "--", "sh", "-c", script)
    assert done.returncode == 0
    assert record(kit)["state"] == "succeeded"


def test_a_cancel_from_elsewhere_stops_the_command(kit: Kit) -> None:
    process, pid = obstinate(kit, 9, "--retry", "5")
    assert kit.fencepost("cancel", RUN, "--reason", "not today").returncode == 0
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 9
    assert err == f"fencepost: run '{RUN}' is cancelled: it was stopped: exit code 9\n"
    assert not lives(pid)
    run = record(kit)
    assert (run["state"], run["attempt"]) == ("cancelled", 1)
    assert run["result"]["exit_code"] == 9
    assert run["events"][0]["detail"].endswith(": not today")


def test_a_cancel_that_the_command_ignores_ends_in_sigkill(kit: Kit) -> None:
    process, pid = obstinate(kit, -1, "--grace", "200ms")
    assert kit.fencepost("cancel", RUN).returncode == 0
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 137
    assert not lives(pid)
    assert record(kit)["state"] == "cancelled"


def test_who_ends_well_after_a_cancel_has_succeeded(kit: Kit) -> None:
    process, _ = obstinate(kit, 0)
    assert kit.fencepost("cancel", RUN).returncode == 0
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    run = record(kit)
    assert run["state"] == "succeeded"
    assert run["cancel_requested_at"] is not None


def test_a_forced_cancel_takes_the_run_away_and_stops_the_command(kit: Kit) -> None:
    process, pid = obstinate(kit, 0)
    assert kit.fencepost("cancel", RUN, "--force").returncode == 0
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert err == (
        f"fencepost: run '{RUN}' was lost: it is cancelled (cancelled); the command was stopped\n"
    )
    assert not lives(pid)
    run = record(kit)
    assert (run["state"], len(run["attempts"])) == ("cancelled", 1)


# Signals to the wrapper, and its death.


def test_a_wrapper_that_is_stopped_gives_the_run_back(kit: Kit) -> None:
    process, _ = obstinate(kit, 7, "--retry", "5")
    process.terminate()
    _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (7, "")
    run = record(kit)
    assert (run["state"], run["reason"], run["losses"]) == ("pending", "released", 0)
    done = kit.fencepost("exec", "job", *AT, "--", "sh", "-c", "echo $FENCEPOST_ATTEMPT")
    assert (done.returncode, done.stdout) == (0, "1\n")
    outputs = [attempt["ended"] for attempt in record(kit)["attempts"]]
    assert outputs == ["given back", "succeeded"]


def test_a_wrapper_that_is_stopped_fails_a_run_that_must_not_be_repeated(kit: Kit) -> None:
    process, _ = obstinate(kit, 7, "--on-loss", "fail", "--retry", "5")
    process.terminate()
    assert process.wait(PATIENCE) == 7
    run = record(kit)
    assert (run["state"], run["reason"], run["error"]) == ("failed", "interrupted", "exit code 7")


def test_a_signal_that_means_no_end_is_the_commands_own_affair(kit: Kit) -> None:
    script = "trap 'echo heard; exit 5' USR1; echo up; while :; do sleep 0.01; done"
    process = kit.start("exec", "job", *AT, "--", "sh", "-c", script)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (5, "heard\n")
    assert record(kit)["error"] == "exit code 5"


def test_after_kill_9_the_next_exec_takes_over_with_a_higher_token(kit: Kit) -> None:
    process, pid = obstinate(kit, 0, "--ttl", "10m")
    token = record(kit)["token"]
    process.kill()
    words = ("--ttl", "10m", "--wait", "40s", "--verbose")
    done = kit.fencepost(
        "exec", "job", *AT, *words, "--", "sh", "-c", f"kill -0 {pid} || echo alone"
    )
    assert (done.returncode, done.stdout) == (0, "alone\n"), done.stderr
    assert " resumed " in done.stderr.splitlines()[0]
    run = record(kit)
    assert (run["state"], run["losses"], run["starts"], run["attempt"]) == ("succeeded", 1, 2, 1)
    assert run["token"] > token
    assert [attempt["ended"] for attempt in run["attempts"]] == ["lost", "succeeded"]


@pytest.mark.parametrize("victims", [("wrapper", "guardian"), ("guardian",), ("command",)])
def test_whichever_of_them_is_killed_the_slot_is_decided(
    kit: Kit, victims: tuple[str, ...]
) -> None:
    process, pid = obstinate(kit, 0, "--ttl", "10m")
    Tree(process).kill(*victims)
    process.communicate(timeout=PATIENCE)
    wait_for(lambda: not lives(pid), "the command to be ended")
    if "wrapper" in victims:
        words = ("--ttl", "10m", "--wait", "40s")
        assert kit.fencepost("exec", "job", *AT, *words, "--", "true").returncode == 0
        assert record(kit)["losses"] == 1
    else:
        error = "its guardian was killed" if "guardian" in victims else "killed by SIGKILL"
        run = record(kit)
        assert (run["state"], run["error"]) == ("failed", error)
        assert process.returncode == 137


def test_on_loss_fail_answers_that_the_run_was_lost(kit: Kit) -> None:
    process, pid = obstinate(kit, 0, "--ttl", "10m")
    process.kill()
    wait_for(lambda: not lives(pid), "the guardian to end the command")
    words = ("--on-loss", "fail", "--wait", "40s")
    done = kit.fencepost("exec", "job", *AT, *words, "--", "sh", "-c", "echo ran")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"run '{RUN}' is failed (lost) since" in done.stderr
    run = record(kit)
    assert (run["state"], run["reason"], run["losses"]) == ("failed", "lost", 1)


def test_the_next_slot_sees_a_lost_one_through_first(kit: Kit) -> None:
    process, pid = obstinate(kit, 0, "--ttl", "10m")
    process.kill()
    wait_for(lambda: not lives(pid), "the guardian to end the command")
    wait_for(lambda: "was lost" in kit.fencepost("status").stdout, "the guards to go")
    script = "echo $FENCEPOST_SLOT"
    later = "2026-01-20T03:00:00Z"
    done = kit.fencepost("exec", "job", "--slot", later, "--", "sh", "-c", script)
    assert (done.returncode, done.stdout.split()) == (0, [SLOT, later])
    assert record(kit)["state"] == record(kit, f"job@{later}")["state"] == "succeeded"


def test_a_long_command_keeps_its_run_beyond_the_ttl(kit: Kit) -> None:
    done = kit.fencepost("exec", "job", *AT, "--ttl", "5s", "--", "sleep", "6")
    assert (done.returncode, done.stderr) == (0, "")
    assert record(kit)["losses"] == 0


def test_what_outlives_the_command_is_ended_before_the_run_is(kit: Kit) -> None:
    script = f"setsid sleep 600 & echo $! > {kit.folder}/stray"
    words = ("exec", "job", *AT, "--grace", "200ms")
    assert kit.fencepost(*words, "--", "sh", "-c", script).returncode == 0
    assert not lives(int((kit.folder / "stray").read_text()))
    assert os.path.exists(kit.folder / "leases.db")
