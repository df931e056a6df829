"""The keeper renews whatever the user's code does; without it, safety is the holder's own clock."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from faultlab import Heard, Puppet, SteppedClocks, boottime, fencepost, until, url_of

from fencepost import AsyncFencepost, Fencepost, LeaseHeld, LeaseLost, Misuse
from fencepost.errors import StoreUnavailable
from fencepost.flows.acquire import Granted
from fencepost.flows.keep import Charges, Hold, keep
from fencepost.model.lease import Grant
from fencepost.stores.memory import MemoryStore
from fencepost.stores.sqlite import SqliteStore
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fencepost import Lease
    from fencepost.stores.api import LeaseStore
    from fencepost.world.api import World

    Opener = Callable[[World, str], LeaseStore]


dying = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def is_kept(fp: Fencepost | AsyncFencepost) -> bool:
    """Say whether the keeper of this one is alive."""
    thread = fp._holding._keeper._thread
    return thread is not None and thread.is_alive()


class MortalStore(SqliteStore):
    """A store at which keepers die, as long as it is told so."""

    deadly = False

    async def renew(self, name: str, *, nonce: str, token: int, ttl: float) -> Grant:
        if MortalStore.deadly:
            raise SystemExit
        return await super().renew(name, nonce=nonce, token=token, ttl=ttl)


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Opener]:
    def opened(world: World, namespace: str) -> LeaseStore:
        return MortalStore(world, str(tmp_path / "leases.db"), namespace=namespace)

    yield opened
    MortalStore.deadly = False


def kill_keeper(fp: Fencepost | AsyncFencepost) -> None:
    """Let the keeper die at its next renewal."""
    MortalStore.deadly = True
    until(lambda: not is_kept(fp))
    MortalStore.deadly = False


def expiry(folder: Path, name: str) -> float:
    """Return the instant at which the store would grant the lease to another."""
    with sqlite3.connect(folder / "leases.db") as database:
        row = database.execute("SELECT expires_us FROM fencepost_lease WHERE name = ?", (name,))
        (expires_us,) = row.fetchone()
    database.close()
    return float(expires_us) / 1e6


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep everybody else from writing, as a long transaction of another program does."""
    database = sqlite3.connect(folder / "leases.db", isolation_level=None, timeout=30)
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        database.close()


def test_a_blocked_event_loop_loses_nothing(tmp_path: Path) -> None:
    url = url_of(tmp_path)

    async def main() -> None:
        async with AsyncFencepost(url) as fp, fp.lock("x", ttl="0.5s") as lease:
            time.sleep(1.5)  # the fault itself
            lease.check()
            await asyncio.sleep(0)
            lease.check()

    asyncio.run(main())


@dying
def test_without_a_keeper_check_raises_before_another_can_be_granted(
    tmp_path: Path, mortal: Opener
) -> None:
    with fencepost(mortal) as fp:
        lock = fp.lock("x", ttl="1s")
        lease = lock.acquire()
        kill_keeper(fp)

        passed = 0.0

        def work() -> None:
            nonlocal passed
            while True:
                began = boottime()  # before: a machine that is late after it proves nothing
                lease.check()
                passed = began

        with pytest.raises(LeaseLost, match="no renewal was confirmed"):
            work()
        assert 0 < passed < lease.hold.trust.until < expiry(tmp_path, "x")
        assert lease.lost.is_set()
        lock.release(lease)


@dying
def test_who_waits_for_the_loss_is_told_without_a_keeper(tmp_path: Path, mortal: Opener) -> None:
    with fencepost(mortal) as fp:
        lock = fp.lock("x", ttl="1s")
        lease = lock.acquire()
        kill_keeper(fp)
        assert not lease.lost.wait(0.01)
        assert lease.lost.wait(30)
        assert boottime() >= lease.hold.trust.until
        assert lease.hold.trust.until < expiry(tmp_path, "x")
        lock.release(lease)


@dying
def test_a_task_is_cancelled_for_its_loss_without_a_keeper(tmp_path: Path, mortal: Opener) -> None:
    async def main() -> float:
        async with AsyncFencepost(mortal) as fp:

            async def work() -> None:
                async with fp.lock("x", ttl="1s"):
                    kill_keeper(fp)
                    await asyncio.sleep(30)

            with pytest.raises(LeaseLost, match="no renewal"):
                await work()
            return boottime()

    ended = asyncio.run(main())
    assert ended < expiry(tmp_path, "x") + 0.5


@dying
def test_the_next_acquire_starts_a_new_keeper_for_all(tmp_path: Path, mortal: Opener) -> None:
    with fencepost(mortal) as fp, fp.lock("x", ttl="2s") as first:
        kill_keeper(fp)
        with fp.lock("y", ttl="2s") as second:
            assert is_kept(fp)
            before = first.hold.trust, second.hold.trust
            until(lambda: first.hold.trust != before[0] and second.hold.trust != before[1])
            first.check()


def test_danger_is_announced_then_suspicion_then_the_loss_all_before_the_end(
    tmp_path: Path,
) -> None:
    heard = Heard()
    fp = Fencepost(url_of(tmp_path), on_event=heard)
    lock = fp.lock("x", ttl="1.5s")
    lease = lock.acquire()
    with locked(tmp_path):
        until(lambda: "lost" in heard.names())
        assert lease.hold.trust.until < expiry(tmp_path, "x")
        assert "no renewal was confirmed" in str(lease.hold.why_lost)
    assert [what for what in heard.names() if what not in ("unconfirmed", "renewed")] == [
        "acquired",
        "danger",
        "suspect",
        "lost",
    ]
    assert not lock.release(lease)
    fp.close()


def test_a_long_ttl_does_not_delay_the_news_about_a_short_one(tmp_path: Path) -> None:
    heard = Heard()
    with fencepost(url_of(tmp_path)) as other:
        other.locks()
    fp = Fencepost(url_of(tmp_path), on_event=heard)
    long, short = fp.lock("long", ttl="10m").acquire(), fp.lock("short", ttl="1s").acquire()
    long.hold.next_try = 0.0  # due now, as it is every 200 s
    with locked(tmp_path):
        until(lambda: "lost" in heard.names())
        assert short.hold.trust.until < expiry(tmp_path, "short")
        assert heard.at("lost") < short.hold.trust.until + 3  # a renewal of the other takes 5 s
    fp.lock("short").release(short)
    fp.lock("long").release(long)
    fp.close()


def test_the_loss_of_a_short_lease_is_told_while_many_long_ones_are_asked_for_in_vain() -> None:
    world, emit = BlockingWorld(), list[object]().append
    charges, began = Charges(world), world.clocks.boottime()
    asked, told = list[float](), list[int]()

    async def beat(_: LeaseStore, ttl: float) -> Grant:
        asked.append(ttl)
        if ttl > 1:
            await world.sleep(0.3)  # nobody answers
        charges.stopped = len(asked) == 8
        raise StoreUnavailable("it is away")

    for number, ttl in enumerate([0.5, *[30.0] * 7]):
        granted = Granted(f"{number}", Grant(1, ttl), began)
        hold = Hold(granted, nonce=f"{number}", ttl=ttl, max_hold=None, emit=emit)
        hold.beats_by(beat)
        hold.next_try = began
        hold.on_loss += (lambda: told.append(len(asked)),)
        charges.add(hold)
    finish(keep(world, MemoryStore(world), charges, emit=emit))
    assert told
    assert told[0] < len(asked)


def test_a_renewal_that_fails_for_a_while_keeps_the_lease(tmp_path: Path) -> None:
    heard = Heard()
    fp = Fencepost(url_of(tmp_path), on_event=heard)
    with fp.lock("x", ttl="2s") as lease:
        with locked(tmp_path):
            until(lambda: "danger" in heard.names())
        confirmed = lease.hold.trust.confirmed
        until(lambda: lease.hold.trust.confirmed > confirmed)
        lease.check()
    assert "lost" not in heard.names()
    fp.close()


def test_a_task_whose_lease_is_lost_leaves_with_lease_lost(tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncFencepost(url_of(tmp_path)) as fp:

            async def work() -> None:
                async with fp.lock("x", ttl="0.5s") as lease:
                    await fp.break_lock("x", token=lease.token, reason="a drill")
                    await asyncio.sleep(30)

            with pytest.raises(LeaseLost, match="it was broken by"):
                await work()
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0
            await asyncio.sleep(0)  # nothing of it is left over

    asyncio.run(main())


def test_a_cancellation_by_somebody_else_stays_one_although_the_lease_is_lost_too(
    tmp_path: Path,
) -> None:
    async def work(fp: AsyncFencepost, entered: asyncio.Event) -> None:
        async with fp.lock("x", ttl="0.5s") as lease:
            await fp.break_lock("x", token=lease.token, reason="a drill")
            lease.hold.lose("a drill")
            asyncio.get_running_loop().call_soon(entered.set)
            await asyncio.sleep(30)

    async def main() -> None:
        async with AsyncFencepost(url_of(tmp_path)) as fp:
            entered = asyncio.Event()
            task = asyncio.create_task(work(fp, entered))
            await entered.wait()
            task.cancel()
            with pytest.raises((asyncio.CancelledError, LeaseLost)):
                await task

    asyncio.run(main())


def test_a_task_that_turns_its_cancellation_into_another_error_is_not_left_cancelled(
    tmp_path: Path,
) -> None:
    async def work(fp: AsyncFencepost) -> None:
        async with fp.lock("x", ttl="0.5s") as lease:
            lease.hold.lose("a drill")
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                raise ValueError("cleaned up") from None

    async def main() -> None:
        async with AsyncFencepost(url_of(tmp_path)) as fp:
            with pytest.raises(ValueError, match="cleaned up"):
                await work(fp)
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0

    asyncio.run(main())


def test_a_loop_that_was_closed_does_not_end_the_keeper(tmp_path: Path) -> None:
    kept: list[Lease] = []

    async def enter(fp: AsyncFencepost) -> None:
        kept.append(await fp.lock("x", ttl="0.5s").__aenter__())

    fp = AsyncFencepost(url_of(tmp_path))
    asyncio.run(enter(fp))
    (lease,) = kept
    lease.hold.lose("a drill")  # tells a loop that is no more
    assert is_kept(fp)

    async def leave() -> None:
        assert not await fp.lock("x").release(lease)
        await fp.close()

    asyncio.run(leave())


def test_max_hold_ends_a_lease_although_it_is_renewed(tmp_path: Path) -> None:
    with fencepost(url_of(tmp_path)) as fp, fencepost(url_of(tmp_path)) as other:
        lock = fp.lock("x", ttl="0.6s", max_hold="1.5s")
        began = boottime()
        lease = lock.acquire()
        with other.lock("x", wait="30s"):
            assert 1.4 < boottime() - began < 3.0
            with pytest.raises(LeaseLost, match="max_hold is used up"):
                lease.check()
        lock.release(lease)


def test_nobody_waits_for_a_ttl_that_is_longer_than_max_hold(tmp_path: Path) -> None:
    with fencepost(url_of(tmp_path)) as fp, fencepost(url_of(tmp_path)) as other:
        lock = fp.lock("x", ttl="10m", max_hold="0.5s")
        lease = lock.acquire()
        with other.lock("x", wait="30s"):
            assert lease.lost.is_set()
        lock.release(lease)


def test_what_was_lost_may_be_waited_for_again_where_it_was_lost(tmp_path: Path) -> None:
    clocks = SteppedClocks()
    with fencepost(url_of(tmp_path), clocks=clocks) as fp:
        lock = fp.lock("x", ttl="30s", wait="5s")
        first = lock.acquire()
        clocks.boot_offset = 31
        with pytest.raises(LeaseLost):
            first.check()
        second = lock.acquire()
        assert second.token > first.token
        assert not lock.release(first)
        assert lock.release(second)


def test_nobody_spins_who_waits_for_the_loss_of_a_released_lease(tmp_path: Path) -> None:
    with fencepost(url_of(tmp_path)) as fp:
        with fp.lock("x", ttl="0.3s") as lease:
            pass
        assert lease.lost.wait(30) is False
        assert lease.lost.wait() is False


def test_a_closed_fencepost_grants_nothing(tmp_path: Path) -> None:
    fp = Fencepost(url_of(tmp_path))
    fp.close()
    with pytest.raises(Misuse, match="closed"):
        fp.lock("x").acquire()

    async def main() -> None:
        closed = AsyncFencepost(url_of(tmp_path))
        await closed.close()
        with pytest.raises(Misuse, match="closed"):
            await closed.lock("x").acquire()

    asyncio.run(main())


def test_a_change_of_folder_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / "50% of what?"
    odd.mkdir()
    monkeypatch.chdir(odd)
    fp = Fencepost("sqlite:///leases.db")
    monkeypatch.chdir(tmp_path)
    with fp.lock("x", ttl="0.5s") as lease:
        before = lease.hold.trust
        until(lambda: lease.hold.trust != before or lease.lost.is_set())
        lease.check()
    fp.close()
    assert (odd / "leases.db").exists()
    assert os.listdir(tmp_path) == [odd.name]


def test_one_file_by_two_names_is_one_store(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "link.db").symlink_to(tmp_path / "leases.db")
    with Puppet(url_of(tmp_path)) as holder:
        holder.granted("x", "10m")
        with fencepost(f"sqlite:///{tmp_path}/other/link.db") as fp:
            with pytest.raises(LeaseHeld):
                fp.lock("x").acquire()
            holder.kill()
            with fp.lock("x", wait="10s"):
                pass
    assert os.listdir(tmp_path / "other") == ["link.db"]
