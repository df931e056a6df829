"""A command as a job's body: guarded, recorded, and gone before anybody else may start."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from executor_kit import (
    LATER,
    PYTHON,
    RUN,
    SLOT,
    Triggered,
    environment,
    events,
    lives,
    number_in,
    record,
    triggered,
    wait_for,
)

from fencepost import Fencepost, Misuse, Retry
from fencepost.executors.command import command_body
from fencepost.model.run import State
from proxy import Proxy
from servers import Postgres

if TYPE_CHECKING:
    from pathlib import Path

HERE = os.path.dirname(os.path.abspath(__file__))
both_faces = pytest.mark.parametrize("face", ["blocking", "asyncio"])
# A command with a child in a session of its own, both deaf to SIGTERM.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal,time; "
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"], start_new_session=True)
for name, pid in (("child", child.pid), ("pid", os.getpid())):
    with open(os.path.join(sys.argv[1] if len(sys.argv) > 1 else ".", name), "w") as file:
        file.write(str(pid))
time.sleep(600)
"""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/fp.db"


def said(fp: Fencepost) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(record(fp).result or "null")
    return result


@both_faces
def test_a_command_that_ends_well_is_a_success_with_its_output(url: str, face: str) -> None:
    argv = [PYTHON, "-c", "import sys; print('made it'); print('nearly', file=sys.stderr)"]
    outcome = triggered(face, url, lambda fp: fp.command("job", argv))
    assert outcome.status == "succeeded"
    assert (outcome.result["exit_code"], outcome.result["signal"]) == (0, None)
    assert sorted(outcome.result["output"].splitlines()) == ["made it", "nearly"]


def test_a_command_runs_in_memory_too_and_once_per_slot(tmp_path: Path) -> None:
    count = f"open({str(tmp_path / 'count')!r}, 'a').write('x')"
    with Fencepost("memory://commands") as fp:
        fp.command("job", [PYTHON, "-c", count])
        assert [fp.trigger("job", SLOT).status for _ in range(2)] == ["succeeded", "already_done"]
    assert (tmp_path / "count").read_text() == "x"


def test_a_command_finds_its_run_in_its_environment_and_starts_in_its_folder(
    url: str, tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    show = "import json,os; print(json.dumps({**os.environ, 'cwd': os.getcwd()}))"
    with Fencepost(url) as fp:
        env = {"MORE": "yes", "FENCEPOST_TOKEN": "1"}
        fp.command("job", [PYTHON, "-c", show], env=env, cwd=tmp_path / "there")
        outcome = fp.trigger("job", SLOT)
    shown = json.loads(outcome.result["output"])
    assert shown["FENCEPOST_RUN_ID"] == shown["FENCEPOST_IDEMPOTENCY_KEY"] == RUN
    assert (shown["FENCEPOST_JOB"], shown["FENCEPOST_ATTEMPT"]) == ("job", "1")
    assert shown["FENCEPOST_SLOT"] == "2026-01-20T02:00:00Z"
    assert shown["FENCEPOST_TOKEN"] == str(outcome.token)
    assert (shown["MORE"], shown["cwd"]) == ("yes", str(tmp_path / "there"))


def test_a_command_that_is_stored_finds_its_payload_and_what_it_repeats(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FENCEPOST_PAYLOAD", "of whoever started us")
    show = "import os; print(*[os.environ.get('FENCEPOST_' + name) for name in"
    show += " ('PAYLOAD', 'RUN_ID', 'IDEMPOTENCY_KEY')], sep='|'); raise SystemExit(1)"
    with Fencepost(url) as fp:
        fp.command("job", [PYTHON, "-c", show], every="1h")
        fp.store("job", [{"name": "stored", "every": "1h", "payload": {"ü": 1}}])
        for job, told in (("job", "None"), ("stored", '{"ü":1}')):
            run = RUN.replace("job@", f"{job}@")
            for existing, rerun in (("skip", ""), ("failed", "~1")):
                fp.backfill(job, SLOT, LATER, existing=existing)
                result = json.loads(fp.slots(job).runs[-1].result or "{}")
                assert result["output"].strip() == f"{told}|{run}{rerun}|{run}"


def test_an_exit_code_is_a_failure_that_keeps_its_output(url: str) -> None:
    with Fencepost(url) as fp:
        fp.command("job", [PYTHON, "-c", "print('disk full'); raise SystemExit(3)"])
        outcome = fp.trigger("job", SLOT)
        assert (outcome.status, outcome.error) == ("failed", "CommandFailed: exit code 3")
        assert (said(fp)["exit_code"], said(fp)["output"]) == (3, "disk full\n")


def test_exit_code_75_is_tried_again_whatever_else_is_not(url: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    code = f"import os,sys; os.path.exists(p := {str(mark)!r}) or (open(p, 'w'), sys.exit(75))"
    with Fencepost(url) as fp:
        fp.command("job", [PYTHON, "-c", code], retry=Retry(2, base="10ms", on=KeyError))
        outcome = fp.trigger("job", SLOT)
        assert (outcome.status, outcome.attempt) == ("succeeded", 2)
        kept = [event.what for event in events(fp)]
        assert kept == ["attempt_failed", "attempt_output"]


@pytest.mark.parametrize(
    ("argv", "cwd", "words"),
    [
        (["no-such-program-anywhere"], None, "'no-such-program-anywhere' was not run: No such"),
        ([PYTHON], "/no/such/folder", "No such file or directory: '/no/such/folder'"),
    ],
)
def test_a_command_that_cannot_be_started_is_not_tried_again(
    url: str, argv: list[str], cwd: str | None, words: str
) -> None:
    with Fencepost(url) as fp:
        fp.command("job", argv, cwd=cwd, retry=Retry(5, base="10ms"))
        outcome = fp.trigger("job", SLOT)
    assert (outcome.status, outcome.reason, outcome.attempt) == ("failed", "gave_up", 1)
    assert words in (outcome.error or "")


def test_secrets_of_the_environment_are_not_kept(url: str, tmp_path: Path) -> None:
    show = "import os; print('key is', os.environ['SHOP_API_KEY']); raise SystemExit(1)"
    with Fencepost(url) as fp:
        fp.command("job", [PYTHON, "-c", show], env={"SHOP_API_KEY": "zebra-crossing"})
        fp.trigger("job", SLOT)
        assert said(fp)["output"] == "key is ***\n"
    for file in tmp_path.glob("fp.db*"):
        if file.is_file():
            assert b"zebra-crossing" not in file.read_bytes()


@both_faces
def test_a_command_is_killed_at_its_timeout_with_all_it_started(
    url: str, tmp_path: Path, face: str
) -> None:
    argv = [PYTHON, "-c", STUBBORN, str(tmp_path)]
    words = {"timeout": "1500ms", "cancel_grace": "300ms"}
    outcome = triggered(face, url, lambda fp: fp.command("job", argv, **words))
    assert (outcome.status, outcome.reason) == ("timed_out", "timeout")
    assert not any(lives(number_in(tmp_path / name)) for name in ("pid", "child"))
    assert outcome.result["signal"] == "SIGKILL"


@both_faces
def test_a_command_is_killed_when_its_run_is_cancelled(url: str, tmp_path: Path, face: str) -> None:
    argv = [PYTHON, "-c", STUBBORN, str(tmp_path)]
    declare = partial(_declared, argv=argv, cancel_grace="300ms")
    under_way = Triggered(face, url, declare)
    pids = [number_in(tmp_path / name) for name in ("pid", "child")]
    with Fencepost(url) as fp:
        fp.cancel(RUN)
    assert under_way.outcome().status == "cancelled"
    assert not any(map(lives, pids))


def _declared(fp: Any, *, argv: list[str], **words: Any) -> None:
    fp.command("job", argv, **words)


def test_a_command_is_gone_before_a_lease_that_nobody_renews_can_lapse(
    url: str, tmp_path: Path
) -> None:
    argv = [PYTHON, "-c", STUBBORN, str(tmp_path)]
    under_way = Triggered("blocking", url, partial(_declared, argv=argv, lease="5s"))
    pids = [number_in(tmp_path / name) for name in ("pid", "child")]
    with Fencepost(url) as fp:
        lease = next(lock for lock in fp.locks() if lock.name == "job")
        # The row is as good as gone: no renewal can be confirmed from here on.
        fp.break_lock("job", token=lease.token, reason="the test wants it")
        began = time.monotonic()
        wait_for(lambda: not any(map(lives, pids)))
        assert time.monotonic() - began < 4.5
        assert under_way.outcome().status == "lost"
        fp.command("job", [PYTHON, "-c", ""])
        assert fp.trigger("job", SLOT).status == "succeeded"


def test_a_command_is_gone_in_time_when_the_store_confirms_nothing(
    url: str, tmp_path: Path
) -> None:
    argv = [PYTHON, "-c", STUBBORN, str(tmp_path)]
    under_way = Triggered("blocking", url, partial(_declared, argv=argv, lease="5s"))
    pids = [number_in(tmp_path / name) for name in ("pid", "child")]
    with contextlib.closing(sqlite3.connect(tmp_path / "fp.db", isolation_level=None)) as busy:
        busy.execute("BEGIN IMMEDIATE")  # and from here on nobody else can write
        began = time.monotonic()
        wait_for(lambda: not any(map(lives, pids)))
        assert time.monotonic() - began < 4.8  # SIGTERM after 2.5 s, which it ignores; SIGKILL: 4 s
        busy.execute("ROLLBACK")
    assert under_way.outcome().status == "lost"


def test_a_forked_child_does_not_keep_the_command_of_a_dead_parent_alive(
    url: str, tmp_path: Path
) -> None:
    program = (
        "import threading,time,os,sys\nfrom executor_kit import SLOT\n"
        "from fencepost import Fencepost\n"
        f"fp = Fencepost({url!r})\n"
        f"fp.command('job', [sys.executable, '-c', {STUBBORN!r}])\n"
        "threading.Thread(target=fp.trigger, args=('job', SLOT), daemon=True).start()\n"
        "while not os.path.exists('pid'): time.sleep(0.02)\n"
        "child = os.fork()\n"
        "if child == 0: time.sleep(60); os._exit(0)\n"
        "open('forked', 'w').write(str(child)); time.sleep(60)\n"
    )
    parent = subprocess.Popen([PYTHON, "-c", program], env=environment(), cwd=tmp_path)
    child, *pids = (number_in(tmp_path / name) for name in ("forked", "pid", "child"))
    try:
        parent.kill()
        parent.wait()
        wait_for(lambda: not any(map(lives, pids)), patience=5.0)
        assert lives(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_command_dies_with_the_process_that_started_it(url: str, tmp_path: Path) -> None:
    code = STUBBORN.replace("sys.argv[1] if len(sys.argv) > 1 else '.'", "'.'")
    program = os.path.join(HERE, "dispatcher_program.py")
    dispatcher = subprocess.Popen(
        [sys.executable, program, url, "command", code], env=environment(), cwd=tmp_path
    )
    pids = [number_in(tmp_path / name) for name in ("pid", "child")]
    dispatcher.kill()
    dispatcher.wait()
    wait_for(lambda: not any(map(lives, pids)), patience=5.0)
    with Fencepost(url) as fp:
        fp.command("job", [PYTHON, "-c", ""])
        outcome = fp.trigger("job", SLOT, wait="5s")
        assert outcome.status == "succeeded"
        assert record(fp).losses == 1


def test_an_interrupt_ends_the_command_and_gives_the_run_back(url: str, tmp_path: Path) -> None:
    code = STUBBORN.replace("signal.SIG_IGN)\nchild", "signal.SIG_DFL)\nchild")
    program = os.path.join(HERE, "dispatcher_program.py")
    dispatcher = subprocess.Popen(
        [sys.executable, program, url, "command", code],
        env=environment(),
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    )
    pid = number_in(tmp_path / "pid")
    dispatcher.send_signal(signal.SIGINT)
    wait_for(lambda: not lives(pid))
    with Fencepost(url) as fp:
        wait_for(lambda: record(fp).state is not State.RUNNING, patience=40.0)
        assert (record(fp).state, record(fp).releases) == (State.PENDING, 1)
    dispatcher.kill()
    dispatcher.wait()


def test_a_command_that_outlasts_the_budget_of_a_tick_is_stopped_and_given_back(
    url: str, tmp_path: Path
) -> None:
    with Fencepost(url) as fp:
        words: dict[str, Any] = {"every": "1s", "cancel_grace": "300ms"}
        fp.command("job", [PYTHON, "-c", STUBBORN, str(tmp_path)], **words)
        fp.tick()  # from here on there are slots
        time.sleep(1.1)
        (outcome,) = fp.tick(budget="2s")
        assert not any(lives(number_in(tmp_path / name)) for name in ("pid", "child"))
        assert record(fp, outcome.run_id).state is State.PENDING
        assert record(fp, outcome.run_id).losses == 0


def test_a_command_may_replace_another(url: str, tmp_path: Path) -> None:
    argv = [PYTHON, "-c", STUBBORN, str(tmp_path)]
    words: dict[str, Any] = {"overlap": "replace", "cancel_grace": "5s"}
    under_way = Triggered("blocking", url, partial(_declared, argv=argv, **words))
    pid = number_in(tmp_path / "pid")
    with Fencepost(url) as fp:
        fp.command("job", [PYTHON, "-c", ""], **words)
        assert fp.trigger("job", LATER).status == "succeeded"
    assert not lives(pid)
    assert under_way.outcome().status in ("cancelled", "lost")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"lease": "2s"}, "too short to be sure that its command is gone"),
        ({"isolation": "process"}, "a process of its own already"),
        ({"overlap": "replace", "cancel_grace": "1s"}, "to hear of it and to be gone"),
    ],
)
def test_a_job_that_cannot_be_a_command_is_refused_when_it_is_declared(
    url: str, words: dict[str, Any], sentence: str
) -> None:
    with Fencepost(url) as fp, pytest.raises(Misuse, match=sentence):
        fp.command("job", ["true"], **words)


@pytest.mark.parametrize(
    ("argv", "env"),
    [("ls -l", None), ([], None), (["ls", 3], None), (["a\0b"], None), (["ls"], {"A": 1})],
)
def test_what_is_no_command_is_refused(argv: Any, env: Any) -> None:
    with pytest.raises(Misuse):
        command_body(argv, env=env)


def _stands_still(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


@both_faces
@pytest.mark.parametrize(
    ("words", "status"),
    [({"lease": "5s"}, "lost"), ({"timeout": "4s", "cancel_grace": "0.5s"}, "timed_out")],
    ids=["its lease ends", "its time is up"],
)
def test_a_command_that_is_killed_while_it_stands_still_did_not_fail(
    tmp_path: Path, words: dict[str, str], status: str, face: str
) -> None:
    """Its process cannot reach the server and does not know whether the run is still its own."""
    argv = [PYTHON, "-c", STUBBORN, str(tmp_path)]
    with Postgres.own() as server, Proxy(server.port) as proxy:
        url = server.url().replace(str(server.port), str(proxy.port))
        under_way = Triggered(face, url, partial(_declared, argv=argv, **words))
        pids = [number_in(tmp_path / name) for name in ("pid", "child")]
        proxy.mode = "hole"
        wait_for(lambda: _stands_still(pids[0]))
        wait_for(lambda: not any(map(lives, pids)))
        proxy.reset()
        proxy.mode = "pass"
        assert under_way.outcome().status == status
        with Fencepost(url) as fp:
            if status == "timed_out":
                assert record(fp).state is State.TIMED_OUT
                return
            fp.command("job", [PYTHON, "-c", ""])
            wait_for(lambda: fp.trigger("job", SLOT, wait="10s").status == "succeeded")
            assert (record(fp).starts, record(fp).losses) == (2, 1)
