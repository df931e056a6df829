"""A body in a process of its own is really stopped, and everything that it has started."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import isolation_bodies as bodies
import pytest
from isolation_bodies import found, lives, wait_for

from fencepost import AsyncFencepost, Fencepost
from fencepost.model.item import ItemState
from fencepost.model.run import State
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fencepost.model.outcome import Outcome

SLOT = datetime(2026, 1, 20, 2, tzinfo=UTC)
HERE = os.path.dirname(os.path.abspath(__file__))
NAMES = ("pid", "child", "bystander")
both_faces = pytest.mark.parametrize("face", ["blocking", "asyncio"])


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ISOLATION_FOLDER", str(tmp_path))
    return f"sqlite:///{tmp_path}/fp.db"


def triggered(face: str, url: str, body: Callable[..., Any], **words: Any) -> Outcome:
    if face == "blocking":
        with Fencepost(url) as fp:
            fp.job("job", isolation="process", **words)(body)
            return fp.trigger("job", SLOT)

    async def work() -> Outcome:
        async with AsyncFencepost(url) as fp:
            fp.job("job", isolation="process", **words)(body)
            return await fp.trigger("job", SLOT)

    return asyncio.run(work())


class Triggered(threading.Thread):
    """A trigger under way in another thread."""

    def __init__(self, face: str, url: str, body: Callable[..., Any], **words: Any) -> None:
        super().__init__()
        self._work = partial(triggered, face, url, body, **words)
        self.outcomes: list[Outcome] = []
        self.start()

    def run(self) -> None:
        self.outcomes.append(self._work())

    def outcome(self) -> Outcome:
        self.join(bodies.PATIENCE)
        return self.outcomes[0]


@both_faces
def test_a_busy_body_ends_at_its_timeout(url: str, face: str) -> None:
    began = time.monotonic()
    outcome = triggered(face, url, bodies.busy, timeout="5s", cancel_grace="40s")
    took = time.monotonic() - began
    assert (outcome.status, outcome.reason) == ("timed_out", "timeout")
    assert not lives(int(found("pid")))
    assert 5 <= took < 30, "it was asked, and needed no grace"


@both_faces
def test_a_body_that_does_not_listen_is_killed_after_its_grace_with_its_children(
    url: str, face: str
) -> None:
    began = time.monotonic()
    outcome = triggered(face, url, bodies.stubborn, timeout="5s", cancel_grace="1s")
    took = time.monotonic() - began
    assert outcome.status == "timed_out"
    assert [lives(int(found(name))) for name in ("pid", "child")] == [False, False]
    assert 6 <= took < 30


def test_a_body_that_checks_hears_of_its_timeout(url: str) -> None:
    outcome = triggered("blocking", url, bodies.checks, timeout="5s")
    assert outcome.status == "timed_out"
    assert not lives(int(found("pid")))


@pytest.mark.parametrize("body", [bodies.cleans_up, bodies.sleeps])
@both_faces
def test_a_body_can_clean_up_before_it_ends(url: str, face: str, body: Callable[..., Any]) -> None:
    outcome = triggered(face, url, body, timeout="5s")  # time for a process to begin
    assert outcome.status == "timed_out", outcome
    assert found("cleaned") == "up"


def test_an_effect_that_was_interrupted_is_in_doubt(url: str) -> None:
    assert triggered("blocking", url, bodies.within_an_effect, timeout="2s").status == "timed_out"
    with Fencepost(url) as fp:
        (item,) = finish(fp._working.ledger.items("job@2026-01-20T02:00:00Z"))
    assert item.state is ItemState.BEGUN, "nobody knows whether it has happened"


@both_faces
@pytest.mark.parametrize("body", [bodies.busy, bodies.checks, bodies.sleeps, bodies.stubborn])
def test_a_body_ends_when_its_run_is_cancelled(
    url: str, face: str, body: Callable[..., Any]
) -> None:
    under_way = Triggered(face, url, body, cancel_grace="1s")
    pid = int(found("pid"))
    with Fencepost(url) as fp:
        fp.cancel("job@2026-01-20T02:00:00Z")
        outcome = under_way.outcome()
        assert (outcome.status, outcome.reason) == ("cancelled", "cancelled")
        assert fp.runs("job")[0].state is State.CANCELLED
    assert not lives(pid)


@both_faces
def test_a_body_whose_lease_was_taken_away_ends_at_once(url: str, face: str) -> None:
    under_way = Triggered(face, url, bodies.stubborn, cancel_grace="30s")
    pid = int(found("pid"))
    with Fencepost(url) as fp:
        (lock,) = fp.locks()
        fp.break_lock("job", token=lock.token, reason="a test")
    assert under_way.outcome().status == "lost"
    assert not lives(pid)


# Whoever waits for a body can go away, in several ways.


class Program:
    """An instance in a process of its own."""

    def __init__(self, url: str, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, f"{HERE}/isolation_program.py", url, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def output(self) -> str:
        out, err = self.process.communicate(timeout=bodies.PATIENCE)
        return out + err


@pytest.fixture
def program(url: str, tmp_path: Path) -> Iterator[Callable[..., Program]]:
    started: list[Program] = []

    def start(*words: str) -> Program:
        started.append(Program(url, *words))
        return started[-1]

    yield start
    for program in started:
        if program.process.poll() is None:
            program.process.kill()
        program.process.communicate(timeout=bodies.PATIENCE)
    # Whatever a test has found, it leaves nothing behind.
    left = [int(path.read_text()) for path in map(tmp_path.joinpath, NAMES) if path.exists()]
    wait_for(lambda: not any(map(lives, left)), f"{left} to end")


@both_faces
def test_a_body_does_not_outlive_its_killed_parent_and_its_successor_comes_soon(
    url: str, face: str, program: Callable[..., Program]
) -> None:
    first = program(face, "stubborn", "process", "10m")
    pid, child = int(found("pid")), int(found("child"))
    with Fencepost(url) as fp:
        fp.job("stubborn", isolation="process", lease="10m")(bodies.others_live)
        assert fp.trigger("stubborn", SLOT).reason == "lock_held"
        killed_at = time.monotonic()
        first.process.kill()

        outcome = wait_for(lambda: fp.trigger("stubborn", SLOT), "the run to be free")
        took = time.monotonic() - killed_at
        assert (outcome.status, outcome.result) == ("succeeded", []), "it began alone"
        assert not lives(pid)
        assert not lives(child)
        run = fp.runs("stubborn")[0]
        assert (run.starts, run.losses) == (2, 1)
    print(f"{took:.2f} s to take over")
    assert took < 15, "of a lease of ten minutes"


def test_a_child_that_the_parent_has_forked_does_not_keep_the_body_alive(
    url: str, program: Callable[..., Program], tmp_path: Path
) -> None:
    first = program("forking", "stubborn", "process", "10m")
    bystander = int(found("bystander"))
    first.process.kill()
    pid = int(found("pid"))
    wait_for(lambda: not lives(pid), "the guards to see that its parent is gone")
    assert lives(bystander)
    os.kill(bystander, signal.SIGKILL)


def test_a_body_is_gone_before_the_lease_of_its_stopped_parent_ends(
    url: str, program: Callable[..., Program]
) -> None:
    first = program("blocking", "stubborn", "process", "5s")
    pid = int(found("pid"))
    os.kill(first.process.pid, signal.SIGSTOP)
    with Fencepost(url) as fp:
        wait_for(lambda: not lives(pid), "the guards to end it")
        assert [lock.name for lock in fp.locks()] == ["stubborn"], "others were not let in before"
    os.kill(first.process.pid, signal.SIGCONT)
    assert first.output().startswith("lost")


@both_faces
def test_an_interrupted_trigger_ends_its_body_and_gives_the_run_back(
    url: str, face: str, program: Callable[..., Program]
) -> None:
    first = program(face, "cleans_up", "process")
    pid = int(found("pid"))
    first.process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in first.output()
    assert found("cleaned") == "up"
    assert not lives(pid)
    assert was_released(url)


@both_faces
def test_a_second_interrupt_spares_whoever_waits_the_grace(
    url: str, face: str, program: Callable[..., Program]
) -> None:
    first = program(face, "stubborn", "process")
    pid = int(found("pid"))
    first.process.send_signal(signal.SIGINT)
    found("asked")
    began = time.monotonic()
    first.process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in first.output()
    assert not lives(pid)
    assert time.monotonic() - began < 15, "of a grace of 20 s"
    assert was_released(url)


def was_released(url: str) -> bool:
    with Fencepost(url) as fp:
        (run,) = fp.runs()
        return (run.state, run.reason, run.releases) == (State.PENDING, "released", 1)


def test_a_cancelled_task_ends_its_body(url: str) -> None:
    async def work() -> None:
        async with AsyncFencepost(url) as fp:
            fp.job("job", isolation="process")(bodies.busy)
            task = asyncio.create_task(fp.trigger("job", SLOT))
            pid = int(await asyncio.to_thread(found, "pid"))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not lives(pid)
            (run,) = await fp.runs()
            assert (run.state, run.reason) == (State.PENDING, "released")

    asyncio.run(work())
