"""What a command job or an isolated body leaves behind is stopped before the next run begins.

The witnesses are the daemon, which writes down each of its beats, and the successor.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from executor_kit import PYTHON, SLOT, events, lives, number_in, record, triggered, wait_for

import leaving_program
from fencepost import Fencepost, Misuse
from fencepost.jobfile import load
from joinlab import PostgresHome

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fencepost.model.outcome import Outcome

PROGRAM = leaving_program.__file__
FOLLOWING = os.path.join(os.path.dirname(PROGRAM), "following_program.py")
KINDS = ("popen", "forks", "nohup", "daemon")
ENDS = ("ends well", "fails", "times out", "is killed")
BODIES = ("command", "isolated")
STATUSES = {
    ("command", "is killed"): "failed",
    ("isolated", "is killed"): "failed",
    **{(body, "ends well"): "succeeded" for body in BODIES},
    **{(body, "fails"): "failed" for body in BODIES},
    **{(body, "times out"): "timed_out" for body in BODIES},
}
# 1 in every run of the tests; more with FENCEPOST_LEFTOVERS.
ROUNDS = int(os.environ.get("FENCEPOST_LEFTOVERS", "1"))
# A process in a session of its own, with no descriptor of ours.
LEAVE = (
    "import subprocess, sys; p = subprocess.Popen(['sleep', '600'], start_new_session=True); "
    "open(sys.argv[1], 'w').write(str(p.pid))"
)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/fp.db"


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Path]:
    """Return where a command writes the number of the process that it leaves; kill that at last."""
    path = tmp_path / "left"
    yield path
    if path.exists():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", BODIES)
def test_nothing_that_a_run_left_behind_beats_beside_the_next_run(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, kind: str, end: str
) -> None:
    beside_its_successor(url, tmp_path, monkeypatch, (body, kind, end))


@pytest.mark.parametrize("end", ["ends well", "fails"])
@pytest.mark.parametrize("body", BODIES)
def test_nor_on_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, end: str
) -> None:
    url = PostgresHome().database(f"left{time.time_ns()}")
    beside_its_successor(url, tmp_path, monkeypatch, (body, "daemon", end))


def beside_its_successor(
    url: str, folder: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[str, str, str]
) -> None:
    body, kind, end = case
    late = 0
    with Fencepost(url) as fp:
        for number in range(ROUNDS):
            place = folder / f"place-{number}"
            place.mkdir()
            words = [str(place), kind, end, "stubborn" if number % 2 else "obedient"]
            monkeypatch.setenv("LEAVING", "|".join(words))
            timeout = "2s" if end == "times out" else "1h"
            job: dict[str, Any] = {"timeout": timeout, "cancel_grace": "300ms", "on_loss": "fail"}
            job["lock"] = "one"
            if body == "command":
                fp.command(f"job{number}", [PYTHON, PROGRAM, *words], **job)
            else:
                fp.job(f"job{number}", isolation="process", **job)(leaving_program.body)
            argv = [PYTHON, FOLLOWING, str(place)]
            fp.command(f"next{number}", argv, overlap="reschedule", lock="one")
            outcome, following = both(fp, number, place)
            assert outcome.status == STATUSES[body, end], outcome
            told = json.loads(following.result["output"])
            assert told["beats"] > 0
            late += bool(told["late"])
        assert late == 0, f"{late} of {ROUNDS} daemons were alive when their successors began"
        for number in range(ROUNDS):
            kept = events(fp, f"job{number}@2026-01-20T02:00:00Z")
            (detail,) = [each.detail for each in kept if each.what == "children_stopped"]
            assert re.fullmatch(r"[^ ]+ \(pid \d+\)", detail), detail


def both(fp: Fencepost, number: int, place: Path) -> tuple[Outcome, Outcome]:
    """Have both runs, the second one waiting for the first; return what became of them."""
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(fp.trigger, f"job{number}", SLOT)
        wait_for((place / "beats").exists)
        second = threads.submit(fp.trigger, f"next{number}", SLOT, wait="40s")
        wait_for(lambda: fp.runs(f"next{number}"))
        (place / "go").touch()
        return first.result(60), second.result(60)


@pytest.mark.parametrize("face", ["blocking", "asyncio"])
def test_a_job_may_leave_its_children_and_that_is_on_record(
    url: str, left: Path, face: str
) -> None:
    argv = [PYTHON, "-c", LEAVE, str(left)]
    outcome = triggered(face, url, lambda fp: fp.command("job", argv, leave_children=True))
    assert outcome.status == "succeeded"
    pid = number_in(left)
    assert lives(pid)
    with Fencepost(url) as fp:
        (event,) = [each for each in events(fp) if each.what.startswith("children")]
        assert (event.what, event.detail) == ("children_left", f"sleep (pid {pid})")
        assert event.token == record(fp).token


@pytest.mark.parametrize("stay", [True, False])
def test_an_isolated_body_may_leave_its_children_too(url: str, left: Path, *, stay: bool) -> None:
    with Fencepost(url) as fp:
        job = fp.job("job", isolation="process", leave_children=stay)
        job(leaving_program.leave_a_sleeper)
        pid = fp.trigger("job", SLOT).result
        left.write_text(str(pid))
        assert lives(pid) is stay
        (event,) = events(fp)
        fate = "left" if stay else "stopped"
        assert (event.what, event.detail) == (f"children_{fate}", f"sleep (pid {pid})")


def test_children_that_may_stay_do_not_keep_the_pulse_of_the_process(
    url: str, left: Path, tmp_path: Path
) -> None:
    leave = LEAVE.replace("start_new_session=True", "start_new_session=True, close_fds=False")
    with Fencepost(url) as fp:
        fp.command("job", [PYTHON, "-c", leave, str(left)], leave_children=True)
        assert fp.trigger("job", SLOT).status == "succeeded"
        fds = f"/proc/{number_in(left)}/fd"
        held = [os.readlink(f"{fds}/{fd}") for fd in os.listdir(fds)]
        assert [path for path in held if path.startswith(str(tmp_path))] == []


def test_a_command_that_is_stopped_leaves_no_children_whatever_it_may(url: str, left: Path) -> None:
    with Fencepost(url) as fp:
        argv = [PYTHON, "-c", LEAVE + "; import time; time.sleep(600)", str(left)]
        fp.command("job", argv, leave_children=True, timeout="1s", cancel_grace="1s")
        assert fp.trigger("job", SLOT).status == "timed_out"
        pid = number_in(left)
        assert not lives(pid)
        (event,) = [each for each in events(fp) if each.what.startswith("children")]
        assert (event.what, event.detail) == ("children_stopped", f"sleep (pid {pid})")


def test_a_command_that_leaves_nothing_behind_has_no_such_event(url: str) -> None:
    with Fencepost(url) as fp:
        fp.command("job", ["/bin/sh", "-c", "sleep 0.01 & wait; (sleep 0.02 &)"])
        assert fp.trigger("job", SLOT).status == "succeeded"
        assert events(fp) == []


def test_many_children_are_named_up_to_ten(url: str, caplog: pytest.LogCaptureFixture) -> None:
    script = "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13; do setsid sleep 600 & done; sleep 0.2"
    with Fencepost(url) as fp:
        fp.command("job", ["/bin/sh", "-c", script])
        assert fp.trigger("job", SLOT).status == "succeeded"
        (event,) = events(fp)
        assert re.fullmatch(r"(sleep \(pid \d+\),? ){10}and 3 more", event.detail), event.detail
    (line,) = [line for line in caplog.messages if line.startswith("children_stopped job=job ")]
    assert f' count=13 children="{event.detail}"' in line


def test_a_job_file_may_say_so(url: str, left: Path, tmp_path: Path) -> None:
    argv = json.dumps([PYTHON, "-c", LEAVE, str(left)])
    file = tmp_path / "jobs.toml"
    file.write_text(f'[[job]]\nname = "job"\ncommand = {argv}\nleave_children = true\n')
    with Fencepost(url) as fp:
        load(file, fp)
        assert fp.trigger("job", SLOT).status == "succeeded"
        assert lives(number_in(left))
        assert json.loads(fp._working.registry.find("job").definition())["leave_children"] is True


def test_only_jobs_that_leave_children_say_so_in_their_definition(url: str) -> None:
    with Fencepost(url) as fp:
        fp.command("plain", ["true"])
        fp.command("said", ["true"], leave_children=False)
        for name in ("plain", "said"):
            assert "leave_children" not in fp._working.registry.find(name).definition()
        with pytest.raises(Misuse, match="leave_children is 'yes': give True or False"):
            fp.command("other", ["true"], leave_children="yes")


def test_a_body_in_this_process_cannot_leave_children_on_purpose() -> None:
    fp = Fencepost("memory://no-guard")
    with pytest.raises(Misuse, match="nothing stops the children of a body in this process"):

        @fp.job("plain", leave_children=True)
        def plain() -> None:
            """Do nothing."""

    fp.close()
