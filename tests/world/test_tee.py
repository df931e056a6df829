"""What a command says reaches our streams untouched, and the record at once, whatever happens."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from fencepost.model.output import Excerpt
from fencepost.world.output import Tee

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tee_program.py")
PATIENCE = 40.0
FLOOD = 50 * 1024 * 1024
NOT_OPEN = 1000


class Guarded:
    """A command under guard and through a tee, in a program of its own."""

    def __init__(self, folder: Path, *argv: str, **streams: Any) -> None:
        self.report_at = folder / "report"
        words = [sys.executable, PROGRAM, str(self.report_at), *argv]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
        self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, **pipes)

    def outcome(self) -> tuple[bytes, bytes, dict[str, Any]]:
        out, err = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == 0, err
        return out, err, json.loads(self.report_at.read_text())


def python(program: str) -> tuple[str, str, str]:
    return sys.executable, "-c", program


@contextmanager
def tee_into(out: int, err: int) -> Iterator[tuple[Tee, Excerpt]]:
    """Give a tee whose writing ends are ours to close, as ``start`` would."""
    excerpt = Excerpt()
    tee = Tee(excerpt, out=out, err=err)
    yield tee, excerpt
    assert tee.close(patience=PATIENCE)


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def run(tee: Tee, *argv: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(argv, stdin=stdin, stdout=tee.stdout, stderr=tee.stderr, bufsize=0)
    os.close(tee.stdout)
    os.close(tee.stderr)
    tee.begin()
    return process


def test_both_streams_are_copied_and_recorded(tmp_path: Path) -> None:
    out, err, report = Guarded(tmp_path, "sh", "-c", "echo out; echo err >&2; exit 3").outcome()
    assert (out, err) == (b"out\n", b"err\n")
    assert sorted(report["text"].split()) == ["err", "out"]
    assert (report["code"], report["passed_on"]) == (3, True)
    assert report["open"] == 3  # nothing is left behind but the standard streams


def test_lines_are_recorded_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    """The command says the next thing when it was told that we have seen the last."""
    program = "import os\nfor i in range(20):\n os.write(1 + i % 2, b'%d\\n' % i); os.read(0, 1)"
    with pipe() as (out_reads, out), pipe() as (err_reads, err), tee_into(out, err) as (tee, got):
        process = run(tee, *python(program), stdin=subprocess.PIPE)
        assert process.stdin is not None
        for i in range(20):
            assert os.read((out_reads, err_reads)[i % 2], 100) == b"%d\n" % i
            process.stdin.write(b"x")
        process.stdin.close()
        assert process.wait(PATIENCE) == 0
        tee.finish()
        assert got.text().split() == [str(i) for i in range(20)]


def test_a_flood_passes_in_bounded_memory(tmp_path: Path) -> None:
    program = f"import os\nfor _ in range({FLOOD} >> 16): os.write(1, bytes(range(256)) * 256)"
    guarded = Guarded(tmp_path, *python(program))
    assert guarded.process.stdout is not None
    length, wrong = 0, 0
    while chunk := os.read(guarded.process.stdout.fileno(), 1 << 16):
        expected = bytes((length + i) % 256 for i in range(256)) * (len(chunk) // 256 + 1)
        wrong += chunk != expected[: len(chunk)]
        length += len(chunk)
    _, _, report = guarded.outcome()
    assert (length, wrong) == (FLOOD, 0)
    assert (report["total"], report["code"]) == (FLOOD, 0)
    assert report["grown_kb"] < 8 * 1024


def test_bytes_that_are_no_text_are_copied_as_they_are(tmp_path: Path) -> None:
    program = "import os; os.write(1, bytes(range(256))); os.write(2, bytes(range(255, -1, -1)))"
    out, err, report = Guarded(tmp_path, *python(program)).outcome()
    assert out == bytes(range(256))
    assert err == out[::-1]
    assert report["total"] == 512


def test_a_command_may_close_a_stream_and_go_on(tmp_path: Path) -> None:
    script = "echo one; exec >&-; echo two >&2; exit 4"
    out, err, report = Guarded(tmp_path, "sh", "-c", script).outcome()
    assert (out, err, report["code"]) == (b"one\n", b"two\n", 4)
    assert report["text"] == "one\ntwo\n"


def test_what_a_killed_command_has_said_is_recorded(tmp_path: Path) -> None:
    out, _, report = Guarded(tmp_path, "sh", "-c", "echo last words; kill -9 $$").outcome()
    assert (out, report["text"], report["code"]) == (b"last words\n", "last words\n", 137)


def test_a_command_that_cannot_be_started_says_nothing(tmp_path: Path) -> None:
    out, err, report = Guarded(tmp_path, "no-such-command").outcome()
    assert (out, err, report["text"], report["passed_on"]) == (b"", b"", "", True)
    assert report["failed"]


def test_only_the_command_has_its_end_of_the_pipes(tmp_path: Path) -> None:
    """Whoever else had one would hide the command's end from the reader."""
    names = "readlink /proc/$$/fd/1 /proc/$$/fd/2; read line < {}"
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    guarded = Guarded(tmp_path, "sh", "-c", names.format(gate))
    assert guarded.process.stdout is not None
    pipes = {guarded.process.stdout.readline().strip().decode() for _ in range(2)}
    assert len(pipes) == 2
    opened = os.open(gate, os.O_WRONLY)  # returns when the command reads
    writers = [pid for pid in family(guarded.process.pid) if pipes & written_by(pid)]
    assert len(writers) == 1
    os.close(opened)
    assert guarded.outcome()[2]["code"] == 1


def family(pid: int) -> list[int]:
    below = [pid]
    for entry in sorted(int(entry) for entry in os.listdir("/proc") if entry.isdecimal()):
        try:
            with open(f"/proc/{entry}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent in below:
            below.append(entry)
    return below


def written_by(pid: int) -> set[str]:
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with open(f"/proc/{pid}/fdinfo/{fd}") as file:
            flags = int(file.read().partition("flags:")[2].split()[0], 8)
        if flags & os.O_ACCMODE == os.O_WRONLY:
            found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


def test_a_stray_that_holds_the_pipe_delays_nothing() -> None:
    script = "exec 3<&0; echo before; (cat <&3; echo after) & echo done"
    with pipe() as (reads, out), pipe() as (gate, _), tee_into(out, out) as (tee, excerpt):
        process = run(tee, "sh", "-c", script, stdin=gate)
        assert process.wait(PATIENCE) == 0
        tee.finish()
        assert excerpt.text() == "before\ndone\n"
        assert tee.close(patience=PATIENCE)
        assert os.read(reads, 100) == b"before\ndone\n"


def test_a_stray_that_never_stops_talking_delays_nothing() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    with tee_into(null, null) as (tee, excerpt):
        process = run(tee, "sh", "-c", "yes & echo done")
        assert process.wait(PATIENCE) == 0
        tee.finish()
        total = excerpt.total
        assert tee.close(patience=PATIENCE)  # and the stray finds nobody to talk to
        assert excerpt.total == total
    os.close(null)


def test_a_grandchild_with_the_pipe_ends_with_the_command(tmp_path: Path) -> None:
    script = "echo parent; (echo child; exec sleep 600) & exit 5"
    out, _, report = Guarded(tmp_path, "sh", "-c", script).outcome()
    assert (report["code"], report["passed_on"]) == (5, True)
    assert "parent\n" in report["text"]
    assert report["text"] == out.decode()


def test_a_reader_that_went_away_does_not_stop_the_command(tmp_path: Path) -> None:
    program = "import os\nfor _ in range(100): os.write(1, b'x' * 10000)\nos.write(2, b'end')"
    reads, writes = os.pipe()
    os.close(reads)
    guarded = Guarded(tmp_path, *python(program), stdout=writes)
    os.close(writes)
    _, err, report = guarded.outcome()
    assert (report["code"], report["total"], err) == (0, 1_000_003, b"end")


def test_a_closed_stdout_of_ours_does_not_stop_the_command() -> None:
    with pipe() as (reads, err), tee_into(NOT_OPEN, err) as (tee, excerpt):
        process = run(tee, "sh", "-c", "echo out; echo err >&2; echo out")
        assert process.wait(PATIENCE) == 0
        tee.finish()
        assert sorted(excerpt.text().split()) == ["err", "out", "out"]
        assert os.read(reads, 100) == b"err\n"


def test_a_reader_that_does_not_read_delays_neither_the_record_nor_the_other_stream() -> None:
    """Our stdout is full. The command's last words are on record before anybody reads it."""
    with pipe() as (reads, out), pipe() as (err_reads, err), tee_into(out, err) as (tee, excerpt):
        stuffing = fill(out)
        process = run(tee, "sh", "-c", "echo out; echo err >&2")
        assert os.read(err_reads, 100) == b"err\n"
        assert process.wait(PATIENCE) == 0
        tee.finish()
        assert sorted(excerpt.text().split()) == ["err", "out"]
        assert not tee.close(patience=0)
        got = b""
        while len(got) < stuffing + 4:
            got += os.read(reads, 1 << 16)
        assert got == b"." * stuffing + b"out\n"


def fill(fd: int) -> int:
    """Fill a pipe to the brim, and return with how much."""
    length = 0
    os.set_blocking(fd, False)
    try:
        while True:
            length += os.write(fd, b"." * 4096)
    except BlockingIOError:
        return length
    finally:
        os.set_blocking(fd, True)


def test_a_stream_of_ours_that_does_not_block_loses_nothing() -> None:
    """Whoever started us may have made it so."""
    with pipe() as (reads, out), tee_into(out, out) as (tee, _):
        os.set_blocking(out, False)
        process = run(tee, *python("import os; os.write(1, bytes(range(256)) * 4096)"))
        got = b""
        while len(got) < 256 * 4096:
            assert select.select([reads], [], [], PATIENCE)[0]
            got += os.read(reads, 1 << 16)
        assert got == bytes(range(256)) * 4096
        assert process.wait(PATIENCE) == 0


def test_signals_are_left_to_the_main_thread() -> None:
    with pipe() as (_, out), tee_into(out, out) as (tee, _):
        os.close(tee.stderr)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        tee.begin()
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
        (thread,) = [t for t in threading.enumerate() if t.name == "fencepost-tee"]
        with open(f"/proc/self/task/{thread.native_id}/status") as file:
            blocked = int(file.read().partition("SigBlk:")[2].split()[0], 16)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            assert blocked & 1 << (signum - 1)
        os.close(tee.stdout)


@pytest.mark.parametrize("begun", [True, False])
def test_a_tee_leaves_no_descriptor_open(*, begun: bool) -> None:
    before = os.listdir("/proc/self/fd")
    tee = Tee(Excerpt())
    os.close(tee.stdout)
    os.close(tee.stderr)
    if begun:
        tee.begin()
    assert tee.close(patience=PATIENCE)
    assert os.listdir("/proc/self/fd") == before
