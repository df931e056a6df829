"""On PostgreSQL a command outlives the stalls of its wrapper, and never runs beside a successor."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest
from exec_kit import HERE, Kit, Tree, Worker, kit_in, stat, took_over, wait_for

from fencepost import Fencepost, LeaseHeld
from fencepost.model.run import State
from fencepost.model.slot import parsed
from fencepost.world.flow import finish
from proxy import Proxy
from servers import Postgres

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fencepost.model.run import RunRecord

WRAPPER = ("wrapper",)
ALL = ("wrapper", "guardian", "sentinel")
LOST = "fencepost: lease 'job' was lost: "
# The daemon of the worker is not in its session: it is always told of.
LEFT = r"processes that the command left behind were stopped: \S+ \(pid \d+\)(, [^;]+)?"
SLOT = "2026-01-20T02:00:00Z"


@pytest.fixture
def server() -> Iterator[Postgres]:
    with Postgres.own() as server:
        yield server


@pytest.fixture
def kit(tmp_path: Path, server: Postgres) -> Iterator[Kit]:
    with kit_in(tmp_path) as kit:
        kit.url = server.url()
        yield kit


def send(tree: Tree, signum: int, *roles: str) -> None:
    for role in roles:
        os.kill(getattr(tree, role), signum)


def stands_still(worker: Worker) -> None:
    """Wait until it does; on a busy machine the wrapper has asked for more grace before."""
    wait_for(lambda: worker.last_beat() < time.time() - 1.0, "the command to stand still")


def goes_on(worker: Worker) -> None:
    before = time.time()
    wait_for(lambda: worker.last_beat() > before + 0.5, "the command to go on")


def successor_in(kit: Kit) -> list[str]:
    return [sys.executable, f"{HERE}/successor_program.py", str(kit.folder)]


@pytest.mark.parametrize("stopped", [WRAPPER, ALL], ids="+".join)
def test_a_command_of_thirty_seconds_survives_a_stall_of_five(
    kit: Kit, stopped: tuple[str, ...]
) -> None:
    tree, worker = kit.start_worker("job", "--ttl", "30s")
    send(tree, signal.SIGSTOP, *stopped)
    time.sleep(4.5)
    with Fencepost(kit.url) as fp, pytest.raises(LeaseHeld):
        fp.lock("job").acquire()
    time.sleep(0.5)
    if stopped == WRAPPER:  # its guards have it stand still: nobody can tell whether it may go on
        stands_still(worker)
    send(tree, signal.SIGCONT, *stopped)
    goes_on(worker)
    assert sorted(worker.living()) == sorted(Worker.KINDS)
    os.kill(tree.wrapper, signal.SIGTERM)
    done = tree.outcome()
    assert re.fullmatch(rf"fencepost: {LEFT}\n", done.stderr), done.stderr
    assert done.returncode == 143


def test_a_command_is_ended_by_a_stall_that_is_longer_than_its_ttl(kit: Kit) -> None:
    tree, worker = kit.start_worker("job", "--ttl", "5s", options="stubborn")
    successor = kit.start("exec", "job", "--wait", "40s", "--", *successor_in(kit))
    send(tree, signal.SIGSTOP, *WRAPPER)
    took = took_over(successor)
    assert took.alone
    assert worker.last_beat() < took.at
    send(tree, signal.SIGCONT, *WRAPPER)
    done = tree.outcome()
    assert done.returncode == 137
    why = r"no renewal was confirmed for [\d.]+ s"
    assert re.fullmatch(rf"{LOST}{why}; the command was stopped; {LEFT}\n", done.stderr)


@pytest.mark.parametrize("stopped", [WRAPPER, ("wrapper", "guardian")], ids="+".join)
def test_a_command_whose_session_ends_during_a_stall_does_nothing_beside_its_successor(
    kit: Kit, server: Postgres, stopped: tuple[str, ...]
) -> None:
    tree, worker = kit.start_worker("job", "--ttl", "30s", options="stubborn")
    send(tree, signal.SIGSTOP, *stopped)
    assert server.terminate() >= 2
    took = took_over(kit.start("exec", "job", "--wait", "40s", "--", *successor_in(kit)))
    assert worker.last_beat() < took.at, "what stands still has its lock on the file, and no more"
    send(tree, signal.SIGCONT, *stopped)
    done = tree.outcome()
    assert worker.last_beat() < took.at
    assert worker.living() == []
    assert done.returncode == 137
    told = rf"{LOST}it was released; the command was stopped; {LEFT}\n"
    assert re.fullmatch(told, done.stderr), done.stderr


def test_a_command_whose_wrapper_is_killed_is_followed_within_a_second_or_two(kit: Kit) -> None:
    tree, worker = kit.start_worker("job", "--ttl", "10m", options="stubborn")
    successor = kit.start("exec", "job", "--wait", "40s", "--", *successor_in(kit))
    killed_at = tree.kill("wrapper")
    took = took_over(successor)
    assert took.alone
    assert worker.last_beat() < took.at
    assert took.at - killed_at < 10  # of a ttl of 600; usually well under two


def test_a_command_stands_still_in_a_hole_and_goes_on_after_it(tmp_path: Path) -> None:
    with Postgres.own() as server, Proxy(server.port) as proxy, kit_in(tmp_path) as kit:
        kit.url = server.url().replace(str(server.port), str(proxy.port))
        tree, worker = kit.start_worker("job", "--ttl", "30s")
        proxy.mode = "hole"
        time.sleep(4.0)
        stands_still(worker)
        proxy.reset()
        proxy.mode = "pass"
        goes_on(worker)
        os.kill(tree.wrapper, signal.SIGTERM)
        assert re.fullmatch(rf"fencepost: {LEFT}\n", tree.outcome().stderr)


class Cut:
    """The run of a job, whose command stands still because its wrapper cannot reach the server."""

    def __init__(self, kit: Kit, proxy: Proxy, *words: str) -> None:
        self._kit, self._proxy = kit, proxy
        self.tree, self._worker = kit.start_worker("job", "--slot", SLOT, *words)
        proxy.mode = "hole"
        wait_for(self._stands_still, "the command to stand still")

    def _stands_still(self) -> bool:
        return all(stat(pid)[0] == "T" for pid in self._worker.pids().values())

    def ends(self) -> str:
        """Wait until the command was killed, heal the network, and return what is said of it."""
        beat = self._worker.last_beat()
        wait_for(lambda: not self._worker.living(), "the command to be killed")
        assert self._worker.last_beat() == beat
        self._proxy.reset()
        self._proxy.mode = "pass"
        done = self.tree.outcome()
        assert done.returncode == 137
        return done.stderr

    def record(self) -> RunRecord:
        with Fencepost(self._kit.url) as fp:
            record = finish(fp._working.ledger.find(parsed(f"job@{SLOT}")))
        assert record is not None
        return record


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[tuple[Kit, Proxy]]:
    with Postgres.own() as server, Proxy(server.port) as proxy, kit_in(tmp_path) as kit:
        kit.url = server.url().replace(str(server.port), str(proxy.port))
        yield kit, proxy


def test_a_run_whose_command_is_killed_while_it_stands_still_is_lost_and_resumed(
    proxied: tuple[Kit, Proxy],
) -> None:
    kit, proxy = proxied
    run = Cut(kit, proxy, "--ttl", "5s")
    said = run.ends()
    assert said.endswith("; the command was stopped\n"), said
    assert run.record().state is State.RUNNING
    resumed = kit.fencepost("exec", "job", "--slot", SLOT, "--wait", "40s", "--", "true")
    assert resumed.returncode == 0, resumed.stderr
    record = run.record()
    assert (record.state, record.starts, record.losses) == (State.SUCCEEDED, 2, 1)


def test_a_run_whose_time_is_up_while_its_command_stands_still_has_timed_out(
    proxied: tuple[Kit, Proxy],
) -> None:
    run = Cut(*proxied, "--ttl", "60s", "--timeout", "5s", "--grace", "500ms")
    run.ends()
    assert run.record().state is State.TIMED_OUT


def test_a_signal_to_the_wrapper_does_not_wake_a_command_that_stands_still(
    proxied: tuple[Kit, Proxy],
) -> None:
    run = Cut(*proxied, "--ttl", "5s")
    os.kill(run.tree.wrapper, signal.SIGTERM)
    run.ends()
    assert run.record().state is State.RUNNING
