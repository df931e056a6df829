"""What an instance fires side by side: never more than it may, and whatever becomes of one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from alarmlab import running

from fencepost import AsyncFencepost, Fencepost
from fencepost.alarming import WORKERS
from fencepost.errors import StoreUnavailable
from fencepost.ledger.planning import LOOK
from fencepost.model.alarm import AlarmWant
from fencepost.model.alarm_policy import AlarmPolicy, lease_of
from fencepost.model.lease import Holder
from fencepost.testing.clock import SettableClocks
from fencepost.world.flow import finish
from holder import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from fencepost import Alarm
    from fencepost.model.alarm import Batch
    from fencepost.model.event import JobEvent, LeaseEvent

QUICK, SLOW = 300, 60
FAR = 0.02


class Before:
    """A book that does something before each claim, as a network that takes its time."""

    def __init__(self, fp: Fencepost | AsyncFencepost, act: Callable[[], Any]) -> None:
        self._book, self._act, self.asked = fp._alarming.book, act, 0
        fp._alarming._book = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._book, name)

    async def claim_due(self, want: AlarmWant) -> Batch:
        self.asked += 1
        assert self.asked < 3000, "it claims for ever"
        waits = self._act()
        if waits is not None:
            await waits
        return await self._book.claim_due(want)


class Inside:
    """How many handlers are at work, and how many there have been at once."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self.now = self.most = self.over = 0

    def __enter__(self) -> None:
        with self._turn:
            self.now += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *_: object) -> None:
        with self._turn:
            self.now, self.over = self.now - 1, self.over + 1


def lanes() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("fencepost-lane")]


@asynccontextmanager
async def ringing(fp: AsyncFencepost) -> AsyncIterator[None]:
    instance = asyncio.create_task(fp.run(signals=False))
    try:
        yield
    finally:
        fp.stop(grace=0)
        await asyncio.wait_for(instance, 20)


async def happens(true: Callable[[], object]) -> None:
    """Wait until something is true."""
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110 -- what threads do raises no event here
            await asyncio.sleep(0.01)


# No more than there may be.


def test_a_ledger_that_is_far_away_has_no_more_handlers_run_at_once() -> None:
    inside, over = Inside(), threading.Event()
    with Fencepost("memory://") as fp:

        @fp.alarm("k")
        def handle(alarm: Alarm) -> None:
            with inside:
                assert not alarm.key.startswith("slow") or over.wait(30)

        Before(fp, lambda: time.sleep(FAR))
        for number in range(QUICK):
            fp.alarms.set("k", f"{number:04}", in_=0)
        for number in range(SLOW):
            fp.alarms.set("k", f"slow{number:04}", in_=0)
        with running(fp):
            try:
                until(lambda: inside.over == QUICK and inside.now >= WORKERS)
                assert not over.wait(2 * LOOK)
                assert (inside.most, len(lanes())) == (WORKERS, WORKERS)
            finally:
                over.set()
            until(lambda: inside.over == QUICK + SLOW)
            assert inside.most == WORKERS


def test_a_ledger_that_is_far_away_has_no_more_handlers_run_on_a_loop() -> None:
    inside = Inside()

    async def main() -> None:
        over = asyncio.Event()
        async with AsyncFencepost("memory://") as fp:

            @fp.alarm("k")
            async def handle(alarm: Alarm) -> None:
                with inside:
                    if alarm.key.startswith("slow"):
                        await over.wait()

            Before(fp, lambda: asyncio.sleep(FAR))
            for number in range(QUICK):
                await fp.alarms.set("k", f"{number:04}", in_=0)
            for number in range(SLOW):
                await fp.alarms.set("k", f"slow{number:04}", in_=0)
            async with ringing(fp):
                try:
                    await happens(lambda: inside.over == QUICK and inside.now >= WORKERS)
                    await asyncio.sleep(2 * LOOK)
                    assert inside.most == WORKERS
                finally:
                    over.set()
                await happens(lambda: inside.over == QUICK + SLOW)
                assert inside.most == WORKERS

    asyncio.run(main())


# What fires alone.


def vanished() -> AlarmWant:
    """Return the claim of somebody whose handler is never heard of again."""
    return AlarmWant(Holder("gone", "elsewhere", 1), {"k": AlarmPolicy(lease=0.2)}, 1)


def test_what_fires_alone_has_no_neighbours_until_it_has_ended(tmp_path: Path) -> None:
    inside, over, fresh = threading.Event(), threading.Event(), threading.Event()
    with Fencepost(f"sqlite:///{tmp_path}/ledger.db") as fp:

        @fp.alarm("k")
        def handle(alarm: Alarm) -> None:
            if alarm.key == "lost":
                inside.set()
                assert over.wait(30)
            else:
                fresh.set()

        fp.alarms.set("k", "lost", in_=0)
        assert finish(fp._alarming.book.claim_due(vanished())).claimed
        with running(fp):
            try:
                assert inside.wait(10)
                record = finish(fp._alarming.book.get("k", "lost"))
                assert record is not None
                assert (record.solitary, record.losses) == (True, 1)
                fp.alarms.set("k", "fresh", in_=0)
                assert not fp.alarms.run_due()
                assert not fresh.wait(2 * LOOK)
            finally:
                over.set()
            assert fresh.wait(10)


def test_what_fires_alone_has_no_neighbours_on_a_loop(tmp_path: Path) -> None:
    async def main() -> None:
        inside, over, fresh = asyncio.Event(), asyncio.Event(), asyncio.Event()
        async with AsyncFencepost(f"sqlite:///{tmp_path}/ledger.db") as fp:

            @fp.alarm("k")
            async def handle(alarm: Alarm) -> None:
                if alarm.key == "lost":
                    inside.set()
                    await over.wait()
                else:
                    fresh.set()

            await fp.alarms.set("k", "lost", in_=0)
            assert (await fp._alarming.book.claim_due(vanished())).claimed
            async with ringing(fp):
                try:
                    await asyncio.wait_for(inside.wait(), 10)
                    await fp.alarms.set("k", "fresh", in_=0)
                    assert not await fp.alarms.run_due()
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(fresh.wait(), 2 * LOOK)
                finally:
                    over.set()
                await asyncio.wait_for(fresh.wait(), 10)

    asyncio.run(main())


# A system without threads.


class Threads:
    """The threads of this system; those of some names are not to be had."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.without: tuple[str, ...] = ()
        start = threading.Thread.start

        def started(thread: threading.Thread) -> None:
            if self.without and thread.name.startswith(self.without):
                raise RuntimeError("can't start new thread")
            start(thread)

        patch.setattr(threading.Thread, "start", started)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    return Threads(monkeypatch)


LANES = ("fencepost-lane", "ThreadPoolExecutor")


def test_an_instance_without_threads_for_a_while_fires_all_once_there_are_some(
    tmp_path: Path, threads: Threads
) -> None:
    told: list[LeaseEvent | JobEvent] = []
    seen: list[tuple[str, int]] = []
    with Fencepost(f"sqlite:///{tmp_path}/ledger.db", on_event=told.append) as fp:
        fp.alarm("k", budget=1)(lambda alarm: seen.append((alarm.key, alarm.attempt)))
        threads.without = LANES
        for key in "abc":
            fp.alarms.set("k", key, in_=0)
        with running(fp):
            until(lambda: sum(event.what == "unconfirmed" for event in told) >= 3)
            assert {view.state for view in fp.alarms.list()} <= {"armed", "firing"}
            assert seen == []
            threads.without = ()
            fp.alarms.set("k", "later", in_=0)
            until(lambda: len(seen) == 4)
        assert sorted(seen) == [("a", 1), ("b", 1), ("c", 1), ("later", 1)]
        assert fp.alarms.list() == []


def test_a_handler_without_a_thread_beside_a_loop_is_given_back_and_not_blamed(
    tmp_path: Path, threads: Threads
) -> None:
    told: list[LeaseEvent | JobEvent] = []
    seen: list[int] = []

    async def main() -> None:
        url = f"sqlite:///{tmp_path}/ledger.db"
        async with AsyncFencepost(url, on_event=told.append) as fp:

            @fp.alarm("k", retry=1)
            def handle(alarm: Alarm) -> None:
                seen.append(alarm.attempt)

            threads.without = ("fencepost-k/",)
            await fp.alarms.set("k", "a", in_=0)
            async with ringing(fp):
                await happens(lambda: sum(event.what == "unconfirmed" for event in told) >= 2)
                threads.without = ()
                await happens(lambda: seen)
            assert await fp.alarms.list() == []

    asyncio.run(main())
    assert seen == [1]


def test_an_instance_on_a_loop_that_cannot_ask_its_ledger_for_want_of_threads_asks_again(
    tmp_path: Path, threads: Threads
) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    told: list[LeaseEvent | JobEvent] = []
    seen: list[str] = []

    async def main() -> None:
        async with AsyncFencepost(url, on_event=told.append) as fp:

            @fp.alarm("k")
            async def handle(alarm: Alarm) -> None:
                seen.append(alarm.key)

            async with ringing(fp):
                await fp.alarms.set("k", "first", in_=0)
                await happens(lambda: seen)
                fp._alarming.world._begin_anew()  # type: ignore[attr-defined]
                threads.without = ("fencepost-call",)
                await happens(lambda: sum(event.what == "unconfirmed" for event in told) >= 4)
                threads.without = ()
                await fp.alarms.set("k", "second", in_=0)
                await happens(lambda: len(seen) == 2)

    asyncio.run(main())
    assert seen == ["first", "second"]


@pytest.mark.parametrize("without", [LANES, ("fencepost-keeper",)])
def test_a_call_without_threads_says_so_and_leaves_all_as_it_was(
    tmp_path: Path, threads: Threads, without: tuple[str, ...]
) -> None:
    seen: list[int] = []
    with Fencepost(f"sqlite:///{tmp_path}/ledger.db") as fp:
        fp.alarm("k", budget=1, retry=1)(lambda alarm: seen.append(alarm.attempt))
        for key in "abc":
            fp.alarms.set("k", key, in_=0)
        threads.without = without
        for _ in range(3):
            with pytest.raises(StoreUnavailable, match="thread"):
                fp.alarms.run_due(workers=3)
        assert [(one.state, one.losses) for one in fp.alarms.list()] == [("armed", 0)] * 3
        threads.without = ()
        assert fp.alarms.run_due(workers=3).fired == 3
    assert seen == [1, 1, 1]


# What handlers do to those who wait for them.

ENDLESS = """
import sys, threading, time
from fencepost import Fencepost

fp = Fencepost(sys.argv[1])
inside = threading.Event()

@fp.alarm("k")
def handle():
    inside.set()
    time.sleep(3600)

def stop():
    inside.wait()
    fp.stop(grace=0)

fp.alarms.set("k", "a", in_=0)
threading.Thread(target=stop, daemon=True).start()
fp.run(signals=False)
print("over", flush=True)
"""


def test_a_handler_that_does_not_end_keeps_no_process_from_its_end(tmp_path: Path) -> None:
    program = [sys.executable, "-c", ENDLESS, f"sqlite:///{tmp_path}/ledger.db"]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stdout) == (0, "over\n"), ended.stderr


def test_a_handler_that_raises_an_interrupt_has_failed_and_others_go_on(tmp_path: Path) -> None:
    fired = threading.Event()
    with Fencepost(f"sqlite:///{tmp_path}/ledger.db") as fp:

        @fp.alarm("k", retry=1)
        def handle(alarm: Alarm) -> None:
            if alarm.key == "bad":
                raise KeyboardInterrupt
            fired.set()

        fp.alarms.set("k", "bad", in_=0)
        with running(fp):
            until(lambda: fp.alarms.list(state="dead"))
            fp.alarms.set("k", "good", in_=0)
            assert fired.wait(10)


def test_a_call_that_is_cancelled_gives_all_back_that_it_fires(tmp_path: Path) -> None:
    async def main() -> None:
        begun: list[str] = []
        async with AsyncFencepost(f"sqlite:///{tmp_path}/ledger.db") as fp:

            @fp.alarm("k")
            async def handle(alarm: Alarm) -> None:
                begun.append(alarm.key)
                await asyncio.sleep(60)

            for key in "abc":
                await fp.alarms.set("k", key, in_=0)
            call = asyncio.create_task(fp.alarms.run_due(workers=3))
            await happens(lambda: len(begun) == 3)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            views = await fp.alarms.list()
            assert [(one.state, one.losses) for one in views] == [("armed", 0)] * 3

    asyncio.run(main())


# Claims that find nothing that can be had.


def taken(fp: Fencepost, count: int) -> None:
    """Set alarms that are due, and whose leases somebody has."""
    leases = fp._working.ledger.leases
    for number in range(count):
        fp.alarms.set("k", str(number), in_=0)
        name, holder = lease_of("k", str(number)), Holder(f"operator {number}", "h", 1)
        finish(leases.acquire(name, holder=holder, ttl=36_000.0))


@pytest.mark.parametrize("budget", ["1s", None])
def test_a_call_ends_though_alarms_that_cannot_be_had_are_due_again_and_again(
    budget: str | None,
) -> None:
    clocks = SettableClocks()
    with Fencepost("memory://", clocks=clocks) as fp:
        fp.alarm("k")(lambda: None)
        taken(fp, 10)
        book = Before(fp, lambda: clocks.advance(0.4))  # for a second each of them is left alone
        assert not fp.alarms.run_due(budget)
        assert book.asked < 5 if budget else book.asked >= 10


def test_an_instance_that_is_stopped_claims_no_more_though_none_can_be_had() -> None:
    clocks = SettableClocks()
    with Fencepost("memory://", clocks=clocks) as fp:
        fp.alarm("k")(lambda: None)
        taken(fp, 3 * WORKERS)
        book = Before(fp, lambda: clocks.advance(1.0))
        with running(fp):
            until(lambda: book.asked >= 20)
        until(lambda: not [one for one in threading.enumerate() if one.name == "fencepost-alarms"])
