"""On PostgreSQL a command outlives the stalls of its wrapper, and never runs beside a successor."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest
from exec_kit import HERE, Kit, Tree, Worker, kit_in, took_over, wait_for

from fencepost import Fencepost, LeaseHeld
from proxy import Proxy
from servers import Postgres

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WRAPPER = ("wrapper",)
ALL = ("wrapper", "guardian", "sentinel")


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
    assert done.stderr == ""
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
    (line,) = done.stderr.splitlines()
    assert line.startswith("fencepost: lease 'job' was lost: ")


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
    assert done.stderr.startswith("fencepost: lease 'job' was lost: ")


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
        assert tree.outcome().stderr == ""
