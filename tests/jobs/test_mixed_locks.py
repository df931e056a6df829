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
from typing import TYPE_CHECKING, Any, cast

import pytest
from mixed_work import ENOUGH, REFUSED, working

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
from mariaplace import emptied
from servers import Postgres, shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fencepost.flows.acquire import Granted
    from fencepost.model.lease import Grant
    from fencepost.stores.api import LeaseStore

_numbers = itertools.count()


@pytest.fixture(params=["memory", "sqlite", "postgres", "mariadb", "mysql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    kind: str = request.param
    if kind == "memory":
        return f"memory://{tmp_path.name}"
    if kind == "sqlite":
        return f"sqlite:///{tmp_path}/ledger.db"
    if kind == "postgres":
        return shared(Postgres).database(f"mixed_locks_{next(_numbers)}")
    return emptied(kind, request.node.nodeid).url()


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


def test_a_plain_lock_that_waits_is_not_served_while_a_run_keeps_its_mark(url: str) -> None:
    world, got = BlockingWorld(), threading.Event()
    with working(url) as (fp, work), closing_store(url, world) as store:

        def wait() -> None:
            with fp.lock("shared", wait="60s"):
                got.set()

        work.begin("beside")
        waiter = threading.Thread(target=wait)
        waiter.start()
        for _ in range(12):
            finish(divide(store, "shared", limit=2, nonce=world.nonce()))
            assert not got.wait(0.05)
        work.end()
        assert got.wait(30)
        waiter.join(30)


@contextmanager
def closing_store(url: str, world: BlockingWorld) -> Iterator[LeaseStore]:
    store = open_store(url, world, namespace="default")
    try:
        yield store
    finally:
        finish(store.close())


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


@pytest.mark.parametrize("host", ["here", "permits"])
def test_a_real_holder_refuses_both_kinds_whatever_its_host_is_called(host: str) -> None:
    with in_memory() as (world, store):
        finish(store.acquire("shared", holder=Holder(world.nonce(), host, 7, ""), ttl=30.0))
        with pytest.raises(LeaseHeld, match=f"{host} pid 7"):
            finish(divide(store, "shared", limit=2, nonce=world.nonce()))
        with pytest.raises(LeaseHeld, match=f"{host} pid 7"):
            plain_lock(world, store)


def test_a_plain_lock_that_a_permit_refuses_leaves_nothing_to_give_back() -> None:
    with in_memory() as (world, store):
        finish(store.acquire("shared#2", holder=Holder(world.nonce(), "here", 7, ""), ttl=30.0))
        finish(divide(store, "shared", limit=2, nonce=world.nonce()))
        left: list[str] = []
        with pytest.raises(LeaseHeld, match="here pid 7"):
            plain_lock(world, store, abandon=lambda name, _: left.append(name))
        assert left == []


def test_a_lock_that_is_marked_again_and_again_is_refused_in_the_end() -> None:
    with in_memory() as (world, store):
        marked = MarkedAnew(world, store)
        with pytest.raises(LeaseHeld, match="permits pid 2"):
            plain_lock(world, cast("LeaseStore", marked))
        assert 1 < marked.asked < 20


class MarkedAnew:
    """A store in which the lock is marked by another run before each request for it."""

    def __init__(self, world: BlockingWorld, store: LeaseStore) -> None:
        self._world, self._store, self.asked = world, store, 0

    async def acquire(self, name: str, *, holder: Holder, ttl: float) -> Grant:
        self.asked += 1
        await divide(self._store, name, limit=2, nonce=self._world.nonce())
        return await self._store.acquire(name, holder=holder, ttl=ttl)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@contextmanager
def in_memory() -> Iterator[tuple[BlockingWorld, LeaseStore]]:
    world = BlockingWorld()
    with closing_store(f"memory://{world.nonce()}", world) as store:
        yield world, store


def plain_lock(
    world: BlockingWorld,
    store: LeaseStore,
    *,
    abandon: Callable[[str, str], None] = lambda *_: None,
) -> Granted:
    """Ask once for the lock itself."""
    holder = Holder(world.nonce(), "here", 2, "")
    asked = acquire(world, store, ["shared"], holder=holder, ttl=30.0, wait=0.0, abandon=abandon)
    return finish(asked)


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
