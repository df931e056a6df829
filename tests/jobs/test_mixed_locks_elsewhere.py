"""Runs that may overlap have permits in another store, and plain locks are refused there."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest
from mixed_work import ENOUGH, REFUSED, working

from fencepost import Fencepost, LeaseHeld
from servers import Etcd, Postgres, Valkey, ZooKeeper, shared

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("kind", [Valkey, Etcd, Postgres, ZooKeeper])
def test_a_plain_lock_elsewhere_and_permits_elsewhere_exclude_each_other(
    kind: type[Valkey | Etcd | Postgres | ZooKeeper], tmp_path: Path
) -> None:
    elsewhere, space = shared(kind).url(), tmp_path.name
    ledger = f"sqlite:///{tmp_path}/ledger.db"
    with (
        Fencepost(elsewhere, namespace=space) as other,
        working(ledger, leases=elsewhere, namespace=space) as (_, work),
    ):
        with other.lock("shared"):
            assert work.ask("beside") == REFUSED
        for _ in range(2):
            work.begin("beside")
            work.begin("beside")
            with pytest.raises(LeaseHeld), other.lock("shared"):
                pass
            work.end()
            with other.lock("shared"):
                assert work.ask("beside") == REFUSED
        assert other.locks() == []


@pytest.mark.parametrize("kind", [Valkey, Etcd, Postgres, ZooKeeper, None])
def test_a_mark_outlives_the_process_that_left_it(
    kind: type[Valkey | Etcd | Postgres | ZooKeeper] | None, tmp_path: Path
) -> None:
    elsewhere = f"sqlite:///{tmp_path}/leases.db" if kind is None else shared(kind).url()
    ledger, space = f"sqlite:///{tmp_path}/ledger.db", tmp_path.name
    program = f"""
from fencepost import Fencepost
import os
fp = Fencepost({ledger!r}, leases={elsewhere!r}, namespace={space!r})
fp.job("beside", lock="shared", overlap="allow", max_concurrent=2)(lambda: os._exit(7))
fp.trigger("beside", manual=True)
"""
    with (
        Fencepost(elsewhere, namespace=space) as other,
        working(ledger, leases=elsewhere, namespace=space) as (_, work),
    ):
        work.begin("beside")
        died = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
        assert died.returncode == 7
        with pytest.raises(LeaseHeld), other.lock("shared"):
            pass
        assert work.at_work == ["beside"]


class Visits:
    """Who is inside, as those say who are."""

    def __init__(self, *kinds: str) -> None:
        self.counts = dict.fromkeys(kinds, 0)
        self.wrong: list[list[str]] = []
        self._inside: list[str] = []
        self._turn = threading.Lock()

    def visit(self, kind: str) -> None:
        """Be inside for a moment, and look at who else is."""
        with self._turn:
            self._inside.append(kind)
            if set(self._inside) != {"beside"} and len(self._inside) > 1:
                self.wrong.append(list(self._inside))
        threading.Event().wait(0.01)
        with self._turn:
            self._inside.remove(kind)
            self.counts[kind] += 1

    def enough(self) -> bool:
        """Say whether each kind was inside often enough."""
        return min(self.counts.values()) >= ENOUGH


# Each with the permits of its job, if it has one.
VISITORS = [(kind, most) for kind in ("beside", "waits") for most in (1, 2, 3)] + [("plain", 0)]
KINDS: list[type[Any] | None] = [Valkey, Etcd, Postgres, ZooKeeper, None]


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_lock_that_waits_is_not_served_while_other_runs_begin(
    kind: type[Valkey | Etcd | Postgres | ZooKeeper] | None, tmp_path: Path
) -> None:
    elsewhere = f"sqlite:///{tmp_path}/leases.db" if kind is None else shared(kind).url()
    ledger, space, got = f"sqlite:///{tmp_path}/ledger.db", tmp_path.name, threading.Event()
    with (
        Fencepost(elsewhere, namespace=space) as other,
        working(ledger, leases=elsewhere, namespace=space) as (fp, work),
    ):
        fp.job("brief", lock="shared", overlap="allow", max_concurrent=2)(lambda: None)

        def wait() -> None:
            with other.lock("shared", wait="60s"):
                got.set()

        work.begin("beside")
        waiter = threading.Thread(target=wait)
        waiter.start()
        for _ in range(12):
            assert fp.trigger("brief", manual=True).status == "succeeded"
            assert not got.wait(0.1)
        work.end()
        assert got.wait(30)
        waiter.join(30)


@pytest.mark.parametrize("kind", KINDS)
def test_permits_and_plain_locks_elsewhere_come_and_go_and_never_meet(
    kind: type[Valkey | Etcd | Postgres | ZooKeeper] | None, tmp_path: Path
) -> None:
    elsewhere = f"sqlite:///{tmp_path}/leases.db" if kind is None else shared(kind).url()
    ledger, space = f"sqlite:///{tmp_path}/ledger.db", tmp_path.name
    visits, end = Visits("beside", "plain", "waits"), time.monotonic() + 40

    def visitor(who: str, fp: Fencepost, most: int) -> None:
        dice, wait = random.Random(f"{who}{most}"), "300ms" if who == "waits" else None
        while not visits.enough() and time.monotonic() < end:
            if who == "beside":
                fp.trigger(f"beside {most}", manual=True)
            else:
                with suppress(LeaseHeld), fp.lock("shared", wait=wait):
                    visits.visit(who)
            time.sleep(dice.uniform(0, 0.05))

    with ExitStack() as stack:
        threads = []
        for who, most in VISITORS:
            where: dict[str, Any] = {"leases": elsewhere} if who == "beside" else {}
            url = ledger if who == "beside" else elsewhere
            fp = stack.enter_context(Fencepost(url, namespace=space, **where))
            if who == "beside":
                job = fp.job(f"beside {most}", lock="shared", overlap="allow", max_concurrent=most)
                job(lambda: visits.visit("beside"))
            threads.append(threading.Thread(target=visitor, args=(who, fp, most)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(80)
    assert visits.wrong == []
    assert visits.enough(), visits.counts
