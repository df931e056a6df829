"""Exclusive runs, runs that may overlap and plain locks of one name exclude each other."""

from __future__ import annotations

import asyncio
import itertools
import random
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest

from fencepost import AsyncFencepost, Fencepost, LeaseHeld
from fencepost.cli.main import main
from fencepost.flows.acquire import acquire
from fencepost.flows.divide import Division, divide
from fencepost.model.divided import MARK_TTL
from fencepost.model.lease import Holder
from fencepost.stores.open import open_store
from fencepost.testing.clock import SettableClocks
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish
from holder import until
from mariaplace import emptied
from servers import Etcd, Postgres, Valkey, ZooKeeper, shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fencepost.flows.acquire import Granted
    from fencepost.stores.api import LeaseStore

_numbers = itertools.count()


@pytest.fixture(params=["memory", "sqlite", "postgres", "mariadb", "mysql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return place(request.param, tmp_path, request)


def place(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    if kind == "memory":
        return f"memory://{tmp_path.name}"
    if kind == "sqlite":
        return f"sqlite:///{tmp_path}/ledger.db"
    if kind == "postgres":
        return shared(Postgres).database(f"mixed_locks_{next(_numbers)}")
    return emptied(kind, request.node.nodeid).url()


class Work:
    """Jobs of which each run stays in its body until it is told to leave."""

    def __init__(self, fp: Fencepost) -> None:
        self._fp, self._stack = fp, ExitStack()
        self.at_work: list[str] = []

        def body(name: str) -> Callable[[], None]:
            def work() -> None:
                leave = threading.Event()
                self._leave[name].append(leave)
                self.at_work.append(name)
                assert leave.wait(30)
                self.at_work.remove(name)

            return work

        self._leave: dict[str, list[threading.Event]] = {"alone": [], "beside": []}
        fp.job("alone", lock="shared")(body("alone"))
        fp.job("beside", lock="shared", overlap="allow", max_concurrent=2)(body("beside"))
        self._threads: list[threading.Thread] = []

    def begin(self, job: str) -> None:
        """Have a run at work."""
        count = len(self.at_work)
        thread = threading.Thread(target=lambda: self._fp.trigger(job, manual=True))
        self._threads.append(thread)
        thread.start()
        until(lambda: len(self.at_work) > count)

    def ask(self, job: str) -> tuple[str, str]:
        """Say what becomes of another run, which is not to begin."""
        outcome = self._fp.trigger(job, manual=True)
        return outcome.status, outcome.reason

    def end(self) -> None:
        """Have all runs end."""
        for leave in itertools.chain(*self._leave.values()):
            leave.set()
        for thread in self._threads:
            thread.join(30)


@contextmanager
def working(url: str, **settings: Any) -> Iterator[tuple[Fencepost, Work]]:
    with Fencepost(url, **settings) as fp:
        work = Work(fp)
        try:
            yield fp, work
        finally:
            work.end()


REFUSED = ("skipped", "lock_held")
# How often each kind is to be at work while the others ask.
ENOUGH = 10


def test_a_run_that_may_overlap_does_not_begin_beside_an_exclusive_one(url: str) -> None:
    with working(url) as (_, work):
        work.begin("alone")
        assert work.ask("beside") == REFUSED
        work.end()
        work.begin("beside")


def test_an_exclusive_run_does_not_begin_beside_one_that_may_overlap(url: str) -> None:
    with working(url) as (_, work):
        work.begin("beside")
        work.begin("beside")
        assert work.ask("beside") == REFUSED  # there are two permits
        assert work.ask("alone") == REFUSED
        work.end()
        work.begin("alone")


def test_a_run_that_may_overlap_does_not_begin_beside_a_plain_lock(url: str) -> None:
    with working(url) as (fp, work):
        with fp.lock("shared"):
            assert work.ask("beside") == REFUSED
        work.begin("beside")


def test_a_plain_lock_is_refused_while_a_run_has_a_permit(url: str) -> None:
    with working(url) as (fp, work):
        for _ in range(2):  # also after the mark of the first time was taken away
            work.begin("beside")
            with pytest.raises(LeaseHeld), fp.lock("shared"):
                pass
            work.end()
            with fp.lock("shared") as lease:
                lease.check()
                assert work.ask("beside") == REFUSED
                assert work.ask("alone") == REFUSED


def test_a_plain_lock_waits_until_no_run_has_a_permit(url: str) -> None:
    with working(url) as (fp, work):
        work.begin("beside")
        got = threading.Event()

        def wait() -> None:
            with fp.lock("shared", wait="30s"):
                got.set()

        waiter = threading.Thread(target=wait)
        waiter.start()
        assert not got.wait(0.3)
        work.end()
        assert got.wait(20)
        waiter.join(20)


def test_nobody_is_shown_to_have_a_lock_that_only_had_permits(url: str) -> None:
    with working(url) as (fp, work):
        work.begin("beside")
        assert [view.name for view in fp.locks()] == ["shared#1"]
        work.end()
        assert fp.locks() == []


def test_an_exclusive_run_begins_after_runs_that_overlapped_and_the_other_way_round(
    url: str,
) -> None:
    with working(url) as (_, work):
        for job in ("beside", "alone") * 2:
            work.begin(job)
            work.end()


def test_a_permit_of_more_permits_than_there_are_now_keeps_a_plain_lock_out(url: str) -> None:
    with Fencepost(url) as fp, Fencepost(url) as deployed:
        leave, entered = threading.Event(), threading.Semaphore(0)

        def work() -> None:
            entered.release()
            assert leave.wait(30)

        fp.job("job", overlap="allow", max_concurrent=3)(work)
        deployed.job("job", overlap="allow", max_concurrent=1)(lambda: None)
        threads = [
            threading.Thread(target=lambda: fp.trigger("job", manual=True)) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert entered.acquire(timeout=30)
        [first, second, third] = sorted(fp.locks())
        for view in (first, second):
            fp.break_lock(view.name, token=view.token, reason="only the third stays")
        deployed.trigger("job", manual=True)  # by the first permit
        with pytest.raises(LeaseHeld, match=str(third.token)), fp.lock("job"):
            pass
        leave.set()
        for thread in threads:
            thread.join(30)


def test_many_who_ask_at_once_are_never_inside_together(url: str) -> None:
    """Whatever order their steps come in, two kinds are never at work at once."""
    inside: list[str] = []
    wrong: list[list[str]] = []
    turn = threading.Lock()

    def visit(kind: str) -> None:
        with turn:
            inside.append(kind)
            if len(set(inside)) > 1 or inside.count("alone") > 1 or inside.count("plain") > 1:
                wrong.append(list(inside))
        threading.Event().wait(0.003)
        with turn:
            inside.remove(kind)

    counts = dict.fromkeys(("alone", "beside", "plain"), 0)

    def visitor(kind: str, fp: Fencepost) -> None:
        dice = random.Random(kind)
        end = time.monotonic() + 40
        while min(counts.values()) < ENOUGH and time.monotonic() < end:
            if kind == "plain":
                with suppress(LeaseHeld), fp.lock("shared"):
                    visit(kind)
                    counts[kind] += 1
            elif fp.trigger(kind, manual=True).status == "succeeded":
                counts[kind] += 1
            time.sleep(dice.uniform(0, 0.02))

    with ExitStack() as stack:
        threads = []
        for kind in ("alone", "beside", "beside", "plain"):
            fp = stack.enter_context(Fencepost(url))
            fp.job("alone", lock="shared")(lambda: visit("alone"))
            fp.job("beside", lock="shared", overlap="allow", max_concurrent=3)(
                lambda: visit("beside")
            )
            threads.append(threading.Thread(target=visitor, args=(kind, fp)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert wrong == []
    assert min(counts.values()) >= ENOUGH, counts


def test_the_other_face_is_refused_and_served_alike(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"

    async def asked() -> bool:
        async with AsyncFencepost(url) as other:
            try:
                async with other.lock("shared"):
                    return True
            except LeaseHeld:
                return False

    with working(url) as (_, work):
        work.begin("beside")
        assert not asyncio.run(asked())
        work.end()
        assert asyncio.run(asked())


def test_a_plain_lock_does_not_wait_for_a_permit_of_the_dead(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    program = f"""
from fencepost import Fencepost
import time
fp = Fencepost({url!r})
@fp.job("beside", lock="shared", overlap="allow")
def beside():
    print("at work", flush=True)
    time.sleep(60)
fp.trigger("beside", manual=True)
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    with child, Fencepost(url) as fp:
        assert child.stdout is not None
        assert child.stdout.readline() == b"at work\n"
        with pytest.raises(LeaseHeld), fp.lock("shared"):
            pass
        child.kill()
        child.wait(30)
        with fp.lock("shared") as lease:
            lease.check()


def is_free(fp: Fencepost) -> bool:
    try:
        with fp.lock("shared"):
            return True
    except LeaseHeld:
        return False


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mariadb", "mysql"])
def test_whoever_triggers_the_next_slot_resumes_lost_runs_that_may_overlap(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = place(kind, tmp_path, request)
    program = f"""
from fencepost import Fencepost
import os, threading
fp, here = Fencepost({url!r}), threading.Barrier(2)
@fp.job("beside", lock="shared", lease="2s", overlap="allow", max_concurrent=3)
def beside():
    here.wait(30)
    os._exit(7)
threading.Thread(target=fp.trigger, args=("beside", 60)).start()
fp.trigger("beside", 120)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 7
    with Fencepost(url) as fp:
        ran: list[int] = []
        options: dict[str, Any] = {"lock": "shared", "lease": "2s"}
        fp.job("beside", **options, overlap="allow", max_concurrent=3)(
            lambda run: ran.append(int(run.slot.timestamp()))
        )
        fp.job("alone", **options)(lambda: None)
        until(lambda: is_free(fp))
        assert fp.trigger("alone", 60).reason == "lock_held"
        assert fp.trigger("beside", 180).status == "succeeded"
        assert ran == [60, 120, 180]
        assert fp.trigger("alone", 120).status == "succeeded"
    assert main(["verify", "--url", url]) == 0


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_run_that_is_at_work_for_days_keeps_a_plain_lock_out(kind: str, tmp_path: Path) -> None:
    clocks = SettableClocks()
    url = f"memory://{tmp_path.name}" if kind == "memory" else f"sqlite:///{tmp_path}/ledger.db"
    world = BlockingWorld(clocks=clocks)
    store = open_store(url, world, namespace="default")
    permit = Holder("somebody", "here", 1, "")
    grant = finish(store.acquire("shared#1", holder=permit, ttl=MARK_TTL / 2))
    finish(divide(store, "shared", limit=1, nonce=world.nonce()))
    division = Division(world, "shared", limit=1)
    for _ in range(10):
        clocks.advance(MARK_TTL / 4)
        finish(store.renew("shared#1", nonce="somebody", token=grant.token, ttl=MARK_TTL / 2))
        finish(division.keep(store))
        with pytest.raises(LeaseHeld):
            plain_lock(world, store)
    finish(store.release("shared#1", nonce="somebody", token=grant.token))
    assert plain_lock(world, store).name == "shared"
    finish(store.close())


def plain_lock(world: BlockingWorld, store: LeaseStore) -> Granted:
    """Ask once for the lock itself."""
    holder = Holder(world.nonce(), "here", 2, "")
    asked = acquire(
        world, store, ["shared"], holder=holder, ttl=30.0, wait=0.0, abandon=lambda *_: None
    )
    return finish(asked)


# Leases elsewhere.


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


# What is proven.


def test_the_proof_of_both_kinds_of_runs_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    with working(url) as (_, work):
        for job in ("beside", "alone") * 2:
            work.begin(job)
            work.end()
    assert main(["verify", "--url", url]) == 0, capsys.readouterr()


def test_an_overlap_of_both_kinds_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    with working(url) as (_, work):
        for job in ("beside", "alone"):
            work.begin(job)
            work.end()
    with closing(sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)) as db:
        triggers = "SELECT name FROM sqlite_master WHERE type = 'trigger' AND name LIKE '%run%'"
        for (name,) in db.execute(triggers).fetchall():
            db.execute(f"DROP TRIGGER {name}")
        db.execute(
            "UPDATE fencepost_run SET ended_at = ended_at + 5, beat_at = beat_at + 5"
            " WHERE job = 'beside'"
        )
    assert main(["verify", "--url", url]) == 1
    assert "had 'shared' while beside@" in capsys.readouterr().out
