"""What ``fencepost exec`` promises to whoever types it."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import sys
from typing import TYPE_CHECKING

import pytest
from exec_kit import FENCEPOST, PATIENCE, Kit, Tree, environment, kit_in, lives, stat, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TRAP = """
import os, signal, sys
signal.signal(int(sys.argv[1]), lambda *_: os._exit(42))
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    with kit_in(tmp_path) as kit:
        yield kit


def one_line(text: str) -> str:
    """Return the only line of a complaint."""
    (line,) = text.splitlines()
    return line


def test_the_exit_code_is_that_of_the_command(kit: Kit) -> None:
    assert kit.fencepost("exec", "job", "--", "true").returncode == 0
    assert kit.fencepost("exec", "job", "--", "sh", "-c", "exit 37").returncode == 37


def test_a_command_that_a_signal_ended_exits_with_128_plus_its_number(kit: Kit) -> None:
    assert kit.fencepost("exec", "job", "--", "sh", "-c", "kill -9 $$").returncode == 137


def test_output_and_input_are_the_commands_own(kit: Kit) -> None:
    done = kit.fencepost("exec", "job", "--", "sh", "-c", "echo out; echo err >&2; cat")
    assert (done.stdout, done.stderr) == ("out\n", "err\n")


def test_the_command_learns_its_name_and_token(kit: Kit) -> None:
    script = 'echo "$FENCEPOST_NAME $FENCEPOST_TOKEN $FENCEPOST_NONCE"'
    tokens = []
    for _ in range(2):
        done = kit.fencepost("exec", "nightly", "--", "sh", "-c", script)
        name, token, nonce = done.stdout.split()
        assert name == "nightly"
        assert re.fullmatch("[0-9a-f]{32}", nonce)
        tokens.append(int(token))
    assert 0 < tokens[0] < tokens[1]


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "QUIT", "USR1", "USR2"])
def test_a_signal_is_forwarded_to_the_command(kit: Kit, name: str) -> None:
    number = getattr(signal, f"SIG{name}")
    process = kit.start("exec", "job", "--", sys.executable, "-c", TRAP, str(int(number)))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 42


def test_a_command_that_dies_of_a_forwarded_signal_says_so(kit: Kit) -> None:
    process = kit.start("exec", "job", "--", "sh", "-c", "echo ready; exec sleep 600")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (143, "")


def test_a_terminated_tree_ends_by_the_commands_own_choice(kit: Kit) -> None:
    """An init system sends SIGTERM to all of them; the guards must not be the first to go."""
    process = kit.start("exec", "job", "--", sys.executable, "-c", TRAP, str(int(signal.SIGTERM)))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    tree = Tree(process)
    for pid in (tree.guardian, tree.sentinel, tree.wrapper):
        os.kill(pid, signal.SIGTERM)
    assert tree.outcome().returncode == 42


def test_a_held_lease_exits_with_75_and_one_line_about_its_holder(kit: Kit) -> None:
    tree, _ = kit.start_worker("job")
    done = kit.fencepost("exec", "job", "--", "sh", "-c", "echo ran")
    assert (done.returncode, done.stdout) == (75, "")
    line = one_line(done.stderr)
    pattern = (
        rf"fencepost: lease 'job' is held by \S+ pid {tree.wrapper} since \d{{4}}-\d\d-\d\d "
        r"\d\d:\d\d:\d\d \([\d.]+ s\) and for another \d+ s unless renewed; .* not run"
    )
    assert re.fullmatch(pattern, line), line


def test_the_exit_code_for_held_can_be_chosen_and_its_line_silenced(kit: Kit) -> None:
    kit.start_worker("job")
    done = kit.fencepost("exec", "job", "--held-exit", "0", "--quiet", "--", "true")
    assert (done.returncode, done.stderr) == (0, "")


def test_another_name_or_namespace_is_not_held(kit: Kit) -> None:
    kit.start_worker("job")
    assert kit.fencepost("exec", "other", "--", "true").returncode == 0
    assert kit.fencepost("--namespace", "staging", "exec", "job", "--", "true").returncode == 0
    assert kit.fencepost("exec", "job", "--namespace", "staging", "--", "true").returncode == 0


def test_whoever_waits_runs_as_soon_as_the_holder_has_ended(kit: Kit) -> None:
    first = kit.start("exec", "job", "--", "sh", "-c", "echo ready; exec sleep 600")
    assert first.stdout is not None
    assert first.stdout.readline() == "ready\n"
    second = kit.start_successor("job")
    first.terminate()
    assert first.wait(PATIENCE) == 143
    assert second.wait(PATIENCE) == 0


def test_a_semaphore_admits_as_many_commands_as_its_limit(kit: Kit) -> None:
    kit.start_worker("job", "--limit", "2")
    kit.start_worker("job", "--limit", "2")
    assert kit.fencepost("exec", "job", "--limit", "2", "--", "true").returncode == 75


def test_a_signal_ends_the_wait_and_leaves_the_line(kit: Kit) -> None:
    kit.start_worker("job")
    waiting = kit.start_successor("job")
    waiting.terminate()
    _, err = waiting.communicate(timeout=PATIENCE)
    assert (waiting.returncode, err) == (143, "")
    assert not [e for e in os.listdir(kit.folder / "leases.db-live") if e.endswith(".waiter")]


def test_an_unreachable_store_exits_with_69_and_one_line(kit: Kit) -> None:
    kit.fencepost("migrate")
    database = sqlite3.connect(kit.folder / "leases.db", isolation_level=None)
    database.execute("BEGIN IMMEDIATE")
    done = kit.fencepost("exec", "job", "--", "sh", "-c", "echo ran")
    database.close()
    assert (done.returncode, done.stdout) == (69, "")
    assert one_line(done.stderr).endswith("locked; the command was not run")


def test_a_store_in_a_folder_that_is_not_there_exits_with_69(kit: Kit) -> None:
    url = f"sqlite:///{kit.folder}/nowhere/leases.db"
    done = kit.fencepost("--url", url, "exec", "job", "--", "true")
    assert done.returncode == 69
    assert "does its folder exist" in one_line(done.stderr)


def test_a_command_that_is_not_found_exits_with_127_and_frees_the_lease(kit: Kit) -> None:
    done = kit.fencepost("exec", "job", "--", "no-such-command")
    assert done.returncode == 127
    assert one_line(done.stderr) == (
        "fencepost: 'no-such-command' was not run: No such file or directory"
    )
    assert kit.fencepost("exec", "job", "--", "true").returncode == 0


def test_a_command_that_is_not_executable_exits_with_126(kit: Kit) -> None:
    (kit.folder / "text").write_text("just text")
    done = kit.fencepost("exec", "job", "--", "./text")
    assert done.returncode == 126
    assert one_line(done.stderr).endswith("was not run: Permission denied")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--ttl", "4s", "--", "true"], "exec needs at least 5.0 s"),
        (["--ttl", "soon", "--", "true"], "write a number and a unit"),
        (["--limit", "0", "--", "true"], "limit is 0"),
        (["--held-exit", "700", "--", "true"], "from 0 to 255"),
        (["--"], "exec needs a command"),
        ([], "exec needs a command"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_with_2(
    kit: Kit, words: list[str], sentence: str
) -> None:
    done = kit.fencepost("exec", "job", *words)
    assert done.returncode == 2
    assert sentence in one_line(done.stderr)


def test_debug_shows_the_traceback_that_is_never_shown_otherwise(kit: Kit) -> None:
    assert "Traceback" in kit.fencepost("--debug", "exec", "job", "--ttl", "1s", "--", "x").stderr


def test_what_outlives_the_command_is_ended_before_the_lease_is_released(kit: Kit) -> None:
    place = kit.folder / "worker"
    place.mkdir()
    program = os.path.join(os.path.dirname(__file__), "worker_program.py")
    words = [sys.executable, program, str(kit.folder), str(place), "brief", "stubborn"]
    done = kit.fencepost("exec", "job", "--grace", "500ms", "--", *words)
    assert done.returncode == 3
    for kind in ("child", "daemon"):
        assert not lives(int((place / kind).read_text()))


def test_max_hold_ends_the_command(kit: Kit) -> None:
    done = kit.fencepost("exec", "job", "--max-hold", "2s", "--grace", "1s", "--", "sleep", "600")
    assert done.returncode == 143
    assert "max_hold is used up; the command was stopped" in one_line(done.stderr)


def test_max_hold_ends_a_command_without_notice_if_there_is_no_grace(kit: Kit) -> None:
    done = kit.fencepost("exec", "job", "--max-hold", "1s", "--grace", "0s", "--", "sleep", "600")
    assert done.returncode == 137
    assert "max_hold is used up; the command was stopped" in one_line(done.stderr)


def test_a_long_command_keeps_its_lease_beyond_the_ttl(kit: Kit) -> None:
    script = "echo ready; exec sleep 7"
    process = kit.start("exec", "job", "--ttl", "5s", "--", "sh", "-c", script)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    successor = kit.start_successor("job")
    assert process.wait(PATIENCE) == 0
    assert successor.wait(PATIENCE) == 0


def test_a_broken_lock_stops_the_command_and_says_why(kit: Kit) -> None:
    tree, worker = kit.start_worker("job", "--ttl", "5s")
    token = re.search(rb"FENCEPOST_TOKEN=(\d+)", environment(tree.command))
    assert token is not None
    words = ("--token", token[1].decode(), "--reason", "stuck", "--operator", "ann")
    assert kit.fencepost("lock", "break", "job", *words).returncode == 0
    done = tree.outcome()
    assert done.returncode == 143
    assert one_line(done.stderr).startswith(
        "fencepost: lease 'job' was lost: it was broken by ann: stuck; the command was stopped; "
        "processes that the command left behind were stopped: python3 (pid "
    )
    assert worker.living() == []


def test_the_command_inherits_nothing_but_its_streams_and_two_pledges(kit: Kit) -> None:
    done = kit.fencepost("exec", "job", "--", "sh", "-c", "ls -l /proc/$$/fd; exit 0")
    targets = [line.split(" -> ")[1] for line in done.stdout.splitlines() if " -> " in line]
    others = [t for t in targets if not t.startswith("pipe:") and t != "/dev/null"]
    assert [os.path.splitext(t)[1] for t in others] == [".pulse"]
    assert len(targets) == 5


def test_the_guards_hold_nothing_but_their_pipes_and_the_pulse(kit: Kit) -> None:
    tree, _ = kit.start_worker("job")

    def files(pid: int) -> set[str]:
        found = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
        return {re.sub(r".*(\.pulse)$|^(pipe):.*", r"\1\2", name) for name in found}

    for guard in (tree.guardian, tree.sentinel):
        wait_for(
            lambda pid=guard: files(pid) == {"/dev/null", "pipe", ".pulse"},  # type: ignore[misc]
            "the guard to have let go of the rest",
        )
        assert os.readlink(f"/proc/{guard}/cwd") == "/"


def test_a_signal_that_was_ignored_before_stays_ignored(kit: Kit) -> None:
    """As under nohup. All other signals are as a program expects to find them."""
    show = "for what in Ign Cgt Blk; do grep Sig$what /proc/$$/status | cut -f2; done"
    (kit.folder / "show").write_text(show)
    script = f'trap "" HUP; exec {FENCEPOST} exec other -- sh show'
    done = kit.fencepost("exec", "job", "--", "sh", "-c", script)
    ignored, _, blocked = (int(word, 16) for word in done.stdout.split())
    standard = (1 << 31) - 1  # the others are the C library's own
    assert ignored & standard == 1 << (signal.SIGHUP - 1)
    assert blocked == 0


def test_commands_of_a_session_without_a_terminal_run_too(kit: Kit) -> None:
    done = kit.fencepost("exec", "job", "--", "sh", "-c", "cat /proc/$$/stat")
    assert stat(os.getpid())  # the format that the next line relies on
    assert done.stdout.rpartition(")")[2].split()[4] == "0"


def test_closed_standard_streams_do_not_become_lock_files(kit: Kit) -> None:
    program = (
        "import os\nos.write(2, b' '.join(os.readlink(b'/proc/self/fd/%d' % fd) for fd in (0, 1)))"
    )
    (kit.folder / "streams.py").write_text(program)
    script = f"exec {FENCEPOST} exec other -- {sys.executable} streams.py <&- >&-"
    done = kit.fencepost("exec", "job", "--", "sh", "-c", script)
    assert (done.returncode, done.stderr) == (0, "/dev/null /dev/null")
