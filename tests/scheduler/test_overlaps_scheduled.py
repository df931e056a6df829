"""What a slot does that finds another run of its lock active, when nobody but the clock asked."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from schedlab import NOON, Heard, Member, Noon, effects, members, states, told, until, url_of

from fencepost import AsyncFencepost, Fencepost
from fencepost.model.run import State

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fencepost import AsyncRun, Run

MINUTE = 60


class Pair:
    """Two instances on one machine: the body of one stays inside until it is let go."""

    def __init__(self, folder: Path) -> None:
        self.clocks, self.heard = Noon(), Heard()
        self.one = Fencepost(url_of(folder), clocks=self.clocks)
        self.two = Fencepost(url_of(folder), clocks=self.clocks, on_event=self.heard)
        self.inside, self.leave = threading.Event(), threading.Event()
        self.ran: list[int] = []
        self._thread: threading.Thread | None = None

    def declare(self, **words: Any) -> None:
        def body(run: Run) -> None:
            self.inside.set()
            assert self.leave.wait(30)

        async def stoppable(run: AsyncRun) -> None:
            self.inside.set()
            await asyncio.sleep(30)

        replaces = words.get("overlap") == "replace"
        words = {"every": "1m", "lease": "1h", **words}
        self.one.job("job", **words)(stoppable if replaces else body)

        def noted(run: Run) -> None:
            self.ran.append(int(run.slot.timestamp()))

        async def noted_too(run: AsyncRun) -> None:
            self.ran.append(int(run.slot.timestamp()))

        self.two.job("job", **words)(noted_too if replaces else noted)
        self.one.tick()
        self.two.tick()
        self.clocks.advance(MINUTE)
        self._thread = threading.Thread(target=lambda: self.one.tick(most=1))
        self._thread.start()
        assert self.inside.wait(30)

    def let_go(self) -> None:
        self.leave.set()
        if self._thread is not None:
            self._thread.join()

    def next_minute(self) -> list[str]:
        self.clocks.advance(MINUTE)
        return [outcome.status for outcome in self.two.tick()]

    def states(self) -> list[tuple[int, str, str]]:
        return [((slot - NOON) // MINUTE, *rest) for slot, *rest in states(self.two, "job")]  # type: ignore[misc]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.let_go()
    pair.one.close()
    pair.two.close()


def test_skip_records_who_was_in_the_way(pair: Pair) -> None:
    pair.declare(overlap="skip")
    assert pair.next_minute() == []
    assert pair.states() == [(1, "running", ""), (2, "skipped", "lock_held")]
    runs = pair.two.slots("job").runs
    assert runs[1].blocker == str(runs[0].key)
    (event,) = pair.heard.about("skipped")
    assert dict(event.more)["blocker"] == str(runs[0].key)
    pair.let_go()
    assert pair.next_minute() == ["succeeded"]
    assert pair.ran == [NOON + 3 * MINUTE]  # what was skipped stays skipped


def test_fail_fails_the_slot_at_once(pair: Pair) -> None:
    pair.declare(overlap="fail", retry=5)
    assert pair.next_minute() == []
    assert pair.states()[1] == (2, "failed", "lock_held")
    assert pair.heard.about("failed")


def test_reschedule_keeps_the_oldest_waiting_and_runs_it_when_the_lock_is_free(pair: Pair) -> None:
    pair.declare(overlap="reschedule")
    assert pair.next_minute() == []
    assert pair.next_minute() == []
    assert pair.states()[1:] == [(2, "pending", "lock_held"), (3, "skipped", "waiting_full")]
    pair.let_go()
    pair.clocks.advance(30)
    pair.two.tick()
    assert pair.ran == [NOON + 2 * MINUTE]


def test_reschedule_without_a_limit_runs_all_of_them_in_order(pair: Pair) -> None:
    pair.declare(overlap="reschedule", max_waiting=None)
    for _ in range(3):
        assert pair.next_minute() == []
    assert [state for _, state, _ in pair.states()[1:]] == ["pending"] * 3
    pair.let_go()
    while len(pair.ran) < 3:
        pair.clocks.advance(5)
        pair.two.tick()
    assert pair.ran == [NOON + n * MINUTE for n in (2, 3, 4)]


def test_allow_runs_beside_it_with_tokens_of_its_own(pair: Pair) -> None:
    pair.declare(overlap="allow", max_concurrent=2)
    assert pair.next_minute() == ["succeeded"]
    running, beside = pair.two.slots("job").runs
    assert (running.state, beside.state) == (State.RUNNING, State.SUCCEEDED)
    assert running.lease != beside.lease


def test_replace_stops_what_runs_and_takes_its_place(pair: Pair) -> None:
    pair.declare(overlap="replace", cancel_grace="10m")
    assert pair.next_minute() == []
    assert pair.states()[1] == (2, "pending", "replacing")
    until(lambda: pair.two.slots("job").runs[0].state is State.CANCELLED)
    pair.clocks.advance(5)
    assert [outcome.status for outcome in pair.two.tick()] == ["succeeded"]
    assert pair.ran == [NOON + 2 * MINUTE]


def test_a_lost_run_of_another_job_that_blocks_a_shared_lock_is_resumed_by_the_sweep(
    tmp_path: Path,
) -> None:
    clocks = Noon()
    ran: list[str] = []
    leave = threading.Event()
    with Fencepost(url_of(tmp_path), clocks=clocks) as fp:
        inside = threading.Event()

        @fp.job("first", every="1h", lock="shared", lease="10s")
        def first(run: Run) -> None:
            ran.append(f"first {run.token}")
            if len(ran) == 1:
                inside.set()
                leave.wait(30)

        @fp.job("second", every="1m", lock="shared", lease="10s", overlap="reschedule")
        def second() -> None:
            ran.append("second")

        fp.tick()
        clocks.advance(3600 - 30)
        fp.tick()
        ran.clear()
        clocks.advance(30)
        lost = threading.Thread(target=lambda: fp.tick(most=1), daemon=True)
        # The keeper is told nothing of it: the lease runs out as that of a dead process would.
        fp._holding.keeper.charges.add = lambda hold: None  # type: ignore[method-assign]
        lost.start()
        assert inside.wait(30)
        del fp._holding.keeper.charges.add
        clocks.advance(60)
        with Fencepost(url_of(tmp_path), clocks=clocks) as other:
            other.job("first", every="1h", lock="shared", lease="10s")(first)
            other.job("second", every="1m", lock="shared", lease="10s", overlap="reschedule")(
                second
            )
            other.tick()
            (run,) = [run for run in other.runs("first") if run.key.slot == NOON + 3600]
            assert (run.state, run.losses, run.starts) == (State.SUCCEEDED, 1, 2)
            clocks.advance(60)
            other.tick()
        leave.set()
        lost.join()
    assert ran[1].startswith("first")
    assert "second" in ran


def test_a_job_that_kills_its_processes_is_quarantined_and_others_go_on(tmp_path: Path) -> None:
    deaths = 0
    with members() as fleet:
        while deaths < 20:
            member = Member(tmp_path, "poison")
            fleet.append(member)
            until(lambda: quarantined(tmp_path) or not fleet[-1].alive)
            if quarantined(tmp_path):
                break
            deaths += 1
        seen = len(well(tmp_path))
        until(lambda: len(well(tmp_path)) >= seen + 2)
        fleet[-1].ask_to_stop()
        assert fleet[-1].ended() == 0
    assert 2 <= deaths <= 8
    with Fencepost(url_of(tmp_path)) as fp:
        poisoned = [run for run in fp.runs("deadly") if run.reason == "poison"]
        assert len(poisoned) == 1
        assert [record.span.reason for record in fp.slots("deadly").spans][-1] == "quarantined"
        assert fp.resume("deadly").quarantined == ""


def quarantined(folder: Path) -> bool:
    return any(event["what"] == "quarantined" for event in told(folder))


def well(folder: Path) -> list[Any]:
    return [effect for effect in effects(folder) if effect.job == "well"]


def test_jobs_that_share_a_lock_take_turns_when_they_are_due_together(tmp_path: Path) -> None:
    clocks, ran = Noon(), Counter[str]()
    with Fencepost(url_of(tmp_path), clocks=clocks) as fp:
        for name, overlap in (("sh1", "reschedule"), ("sh2", "skip"), ("sh3", "skip")):
            body = partial(lambda name: ran.update([name]), name)
            fp.job(name, every="1m", overlap=overlap, lock="shared")(body)
        fp.tick()
        for _ in range(12):
            clocks.advance(60)
            fp.tick()
    assert ran["sh1"] == 12, "it waits for the others, and is never skipped"
    assert min(ran["sh2"], ran["sh3"]) >= 4, ran


def test_they_take_turns_in_the_asyncio_face_as_well(tmp_path: Path) -> None:
    clocks, ran = Noon(), Counter[str]()

    async def main() -> None:
        async with AsyncFencepost(url_of(tmp_path), clocks=clocks) as fp:
            for name in ("sh1", "sh2"):
                fp.job(name, every="1m", lock="shared")(
                    partial(lambda name: ran.update([name]), name)
                )
            await fp.tick()
            for _ in range(10):
                clocks.advance(60)
                await fp.tick()

    asyncio.run(main())
    assert ran == {"sh1": 5, "sh2": 5}
