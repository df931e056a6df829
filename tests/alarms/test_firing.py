"""What handlers do to their alarms, through both faces."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import sqlite3
import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from fencepost import AlarmChanged, AsyncFencepost, Fencepost, GiveUp, Misuse, Retry, RetryAfter
from fencepost.alarm_faces import Alarms, AsyncAlarms
from fencepost.errors import BadName, BadSlot, BadValue, StoreUnavailable
from fencepost.fence import CREATE_GUARD
from fencepost.model.alarm_policy import reschedule
from fencepost.testing.clock import SettableClocks
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fencepost import Alarm
    from fencepost.model.event import JobEvent, LeaseEvent


class Kit:
    """A face, its clocks, and what it has told."""

    def __init__(self, url: str) -> None:
        self.clocks = SettableClocks()
        self.events: list[LeaseEvent | JobEvent] = []
        self.fp = Fencepost(url, clocks=self.clocks, on_event=self.events.append)

    def told(self) -> list[str]:
        return [event.what for event in self.events if event.what.startswith("alarm_")]

    def due_in(self) -> float | None:
        return finish(self.fp._alarming.due_in())


@pytest.fixture(params=["memory", "sqlite"])
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kit]:
    memory = f"memory://{tmp_path}"
    kit = Kit(memory if request.param == "memory" else f"sqlite:///{tmp_path}/ledger.db")
    yield kit
    kit.fp.close()


def test_a_handler_is_given_the_alarm_that_fires(kit: Kit) -> None:
    seen = []

    @kit.fp.alarm("remind")
    def remind(alarm: Alarm) -> None:
        alarm.check()
        alarm.log.info("reminded")
        facts = (alarm.kind, alarm.key, alarm.payload, alarm.attempt, alarm.lost.is_set())
        seen.append((facts, alarm.generation, alarm.id, alarm.due, alarm.token > 0))
        assert 0 <= alarm.late < 60
        assert not alarm.superseded

    at = datetime.now(UTC) - timedelta(seconds=1)
    generation = kit.fp.alarms.set("remind", "inv-42", at, {"n": 1})
    assert kit.fp.alarms.run_due() == (1, 0, 0, 0)
    facts = ("remind", "inv-42", {"n": 1}, 1, False)
    assert seen == [(facts, generation, f"remind/inv-42#{generation}", at, True)]
    assert kit.fp.alarms.get("remind", "inv-42") is None
    assert kit.told() == ["alarm_fired"]
    assert kit.due_in() is None


def test_what_is_due_later_is_left_alone(kit: Kit) -> None:
    kit.fp.alarm("remind")(lambda _: None)
    kit.fp.alarms.set("remind", "a", in_="10m")
    assert not kit.fp.alarms.run_due()
    due_in = kit.due_in()
    assert due_in is not None
    assert 590 < due_in <= 600
    kit.clocks.advance(600.0)
    assert kit.fp.alarms.run_due().fired == 1


def test_a_handler_may_take_nothing(kit: Kit) -> None:
    seen = []

    @kit.fp.alarm("wake")
    def wake() -> None:
        seen.append(1)

    kit.fp.alarms.set("wake", "a", in_=0)
    kit.fp.alarms.run_due()
    assert seen == [1]


def test_a_handler_that_is_async_runs_in_a_blocking_face(kit: Kit) -> None:
    seen = []

    @kit.fp.alarm("wake")
    async def wake(alarm: Alarm) -> None:
        await asyncio.sleep(0)
        seen.append(alarm.key)

    kit.fp.alarms.set("wake", "a", in_=0)
    assert kit.fp.alarms.run_due().fired == 1
    assert seen == ["a"]


def test_a_rearm_inside_of_a_handler_commits_with_its_success(kit: Kit) -> None:
    seen = []

    @kit.fp.alarm("count")
    def count(alarm: Alarm) -> None:
        seen.append(alarm.payload)
        if alarm.payload < 3:
            alarm.set(in_="1h", payload=alarm.payload + 1)
            there = kit.fp.alarms.get("count", alarm.key)
            assert there is not None
            assert there.generation == alarm.generation

    kit.fp.alarms.set("count", "a", in_=0, payload=1)
    for _ in range(5):
        kit.fp.alarms.run_due()
        kit.clocks.advance(3600.0)
    assert seen == [1, 2, 3]
    assert kit.fp.alarms.get("count", "a") is None


def test_a_rearm_inside_of_a_handler_that_then_fails_is_not_committed(kit: Kit) -> None:
    @kit.fp.alarm("fragile", retry=1)
    def fragile(alarm: Alarm) -> None:
        alarm.set(in_="1h", payload="never")
        raise RuntimeError("no luck")

    generation = kit.fp.alarms.set("fragile", "a", in_=0, payload="first")
    assert kit.fp.alarms.run_due() == (0, 1, 0, 1)
    there = kit.fp.alarms.get("fragile", "a")
    assert there is not None
    assert (there.generation, there.payload, there.state) == (generation, "first", "dead")


def test_a_set_from_outside_while_it_fires_wins_over_its_own(kit: Kit) -> None:
    @kit.fp.alarm("busy")
    def busy(alarm: Alarm) -> None:
        kit.fp.alarms.set("busy", alarm.key, in_="2h", payload="outside")
        alarm.set(in_="1h", payload="inside")

    kit.fp.alarms.set("busy", "a", in_=0)
    assert kit.fp.alarms.run_due() == (0, 0, 1, 0)
    there = kit.fp.alarms.get("busy", "a")
    assert there is not None
    assert (there.payload, there.state, there.stale) == ("outside", "armed", 1)
    assert kit.told() == ["alarm_stale"]


def test_a_handler_that_always_raises_ends_dead_and_wakes_nobody_any_more(kit: Kit) -> None:
    starts = []

    @kit.fp.alarm("broken")
    def broken(alarm: Alarm) -> None:
        starts.append(alarm.attempt)
        raise RuntimeError("as always")

    kit.fp.alarms.set("broken", "a", in_=0)
    for _ in range(20):
        kit.fp.alarms.run_due()
        kit.clocks.advance(1300.0)
    assert starts == [1, 2, 3, 4, 5, 6]
    (dead,) = kit.fp.alarms.list(state="dead")
    assert (dead.reason, dead.error) == ("exhausted", "RuntimeError: as always")
    assert kit.due_in() is None
    told = [what for what in kit.told() if what != "alarm_late"]
    assert told == ["alarm_failed"] * 6 + ["alarm_dead"]


def test_pauses_between_tries_grow_to_a_ceiling_with_a_quarter_of_jitter(kit: Kit) -> None:
    @kit.fp.alarm("broken", retry=Retry(5, base="10s", factor=2, ceiling="25s"))
    def broken(_: Alarm) -> None:
        raise RuntimeError("as always")

    kit.fp.alarms.set("broken", "a", in_=0)
    for pause in (10.0, 20.0, 25.0, 25.0):
        kit.fp.alarms.run_due()
        due_in = kit.due_in()
        assert due_in is not None
        assert pause - 1.0 < due_in <= pause * 1.25
        kit.clocks.advance(pause * 1.25)


def test_errors_of_the_infrastructure_use_up_no_tries(kit: Kit) -> None:
    @kit.fp.alarm("far", retry=1, faults=ConnectionError)
    def far(alarm: Alarm) -> None:
        raise StoreUnavailable("away") if alarm.payload else ConnectionError("far away")

    kit.fp.alarms.set("far", "a", in_=0)
    kit.fp.alarms.set("far", "b", in_=0, payload=1)
    for _ in range(30):
        kit.fp.alarms.run_due()
        kit.clocks.advance(1276.0)  # 17 minutes, and a quarter
    assert [view.state for view in kit.fp.alarms.list()] == ["armed", "armed"]
    failed = [e for e in kit.events if e.what == "alarm_failed"]
    assert len(failed) == 60


def test_whoever_gives_up_is_dead_at_once_and_who_asks_for_time_gets_it(kit: Kit) -> None:
    @kit.fp.alarm("said")
    def said(alarm: Alarm) -> None:
        raise GiveUp("no hope") if alarm.key == "a" else RetryAfter(500.0)

    kit.fp.alarms.set("said", "a", in_=0)
    kit.fp.alarms.set("said", "b", in_=0)
    kit.fp.alarms.run_due()
    first, second = kit.fp.alarms.list()
    assert (first.state, first.reason) == ("dead", "gave_up")
    assert second.next is not None
    assert second.next > datetime.now(UTC) + timedelta(seconds=490)


def test_an_error_may_be_rescheduled_at_a_fixed_pace_for_ever(kit: Kit) -> None:
    @kit.fp.alarm("stubborn", on_error=reschedule("60s"))
    def stubborn(_: Alarm) -> None:
        raise RuntimeError("as always")

    kit.fp.alarms.set("stubborn", "a", in_=0)
    for _ in range(50):
        assert kit.fp.alarms.run_due().failed == 1
        due_in = kit.due_in()
        assert due_in is not None
        assert 55 < due_in <= 60
        kit.clocks.advance(60.0)
    (view,) = kit.fp.alarms.list()
    assert (view.state, view.attempts, view.error) == ("armed", 50, "RuntimeError: as always")


def test_a_loop_that_arms_itself_without_end_is_stopped_by_its_budget(kit: Kit) -> None:
    seen = []

    @kit.fp.alarm("runaway", budget=20)
    def runaway(alarm: Alarm) -> None:
        seen.append(alarm.generation)
        alarm.set(in_=0)

    kit.fp.alarms.set("runaway", "a", in_=0)
    assert kit.fp.alarms.run_due() == (20, 0, 0, 1)
    assert len(set(seen)) == 20
    (view,) = kit.fp.alarms.list()
    assert (view.state, view.reason) == ("dead", "budget")
    assert kit.due_in() is None
    assert kit.told()[-1] == "alarm_dead"


def test_one_that_comes_every_so_often_is_started_once_and_never_drifts(kit: Kit) -> None:
    seen: list[datetime] = []

    @kit.fp.alarm("beat", every="1m")
    def beat(alarm: Alarm) -> None:
        seen.append(alarm.due)
        if len(seen) == 3:
            alarm.stop()

    first = kit.fp.alarms.start("beat", "node-1")
    assert kit.fp.alarms.start("beat", "node-1") == first
    for _ in range(6):
        kit.clocks.advance(61.0)
        kit.fp.alarms.run_due()
    assert [later - seen[0] for later in seen] == [timedelta(minutes=n) for n in range(3)]
    assert kit.fp.alarms.get("beat", "node-1") is None


def test_one_bad_handler_never_stops_the_others(kit: Kit) -> None:
    seen = []

    @kit.fp.alarm("mixed")
    def mixed(alarm: Alarm) -> None:
        seen.append(alarm.key)
        if alarm.key == "a":
            raise SystemExit(3)
        if alarm.key == "b":
            raise RuntimeError("no luck")

    for key in "abcd":
        kit.fp.alarms.set("mixed", key, in_=0)
    assert kit.fp.alarms.run_due() == (2, 2, 0, 1)
    assert seen == ["a", "b", "c", "d"]


def test_a_slow_handler_holds_up_nobody_where_several_work(kit: Kit) -> None:
    others = threading.Barrier(2)

    @kit.fp.alarm("slow")
    def slow(alarm: Alarm) -> None:
        if alarm.key != "b":  # both wait for each other: neither could end alone
            others.wait(timeout=10)

    for key in "abc":
        kit.fp.alarms.set("slow", key, in_=0)
    assert kit.fp.alarms.run_due(workers=3).fired == 3


def test_none_begins_after_the_budget_of_a_call(kit: Kit) -> None:
    @kit.fp.alarm("slow")
    def slow(_: Alarm) -> None:
        kit.clocks.advance(10.0)

    for key in "abc":
        kit.fp.alarms.set("slow", key, in_=0)
    assert kit.fp.alarms.run_due("15s").fired == 2
    assert kit.fp.alarms.run_due(limit=5).fired == 1


def test_who_is_interrupted_gives_the_alarm_back_without_blame(kit: Kit) -> None:
    @kit.fp.alarm("patient")
    def patient(alarm: Alarm) -> None:
        if not alarm.payload:
            kit.fp.alarms.get("patient", "a")
            raise KeyboardInterrupt

    kit.fp.alarms.set("patient", "a", in_=0)
    with pytest.raises(KeyboardInterrupt):
        kit.fp.alarms.run_due()
    (view,) = kit.fp.alarms.list()
    assert (view.state, view.attempts, view.losses) == ("armed", 0, 0)


def test_a_handler_that_is_out_of_time_is_told_and_fails(kit: Kit) -> None:
    @kit.fp.alarm("slow", timeout="5s", retry=1)
    def slow(alarm: Alarm) -> None:
        kit.clocks.advance(6.0)
        alarm.check()

    kit.fp.alarms.set("slow", "a", in_=0)
    assert kit.fp.alarms.run_due().dead == 1
    (view,) = kit.fp.alarms.list()
    assert "RunTimedOut" in str(view.error)


def test_one_that_is_late_is_reported(kit: Kit) -> None:
    late = []

    @kit.fp.alarm("late", grace="10s")
    def handle(alarm: Alarm) -> None:
        late.append(alarm.late)

    kit.fp.alarms.set("late", "a", in_=0)
    kit.clocks.advance(11.0)
    kit.fp.alarms.run_due()
    assert kit.told() == ["alarm_late", "alarm_fired"]
    assert late[0] > 10


def test_an_alarm_guards_another_database_and_names_its_generation(
    kit: Kit, tmp_path: Path
) -> None:
    seen = []
    with contextlib.closing(sqlite3.connect(tmp_path / "other.db", isolation_level=None)) as conn:
        conn.execute(CREATE_GUARD)

        @kit.fp.alarm("guarded")
        def guarded(alarm: Alarm) -> None:
            conn.execute("BEGIN IMMEDIATE")
            alarm.fence(conn)
            conn.execute("COMMIT")
            seen.append(alarm.headers()["Idempotency-Key"])

        generation = kit.fp.alarms.set("guarded", "a", in_=0)
        kit.fp.alarms.run_due()
    assert seen == [f"guarded/a#{generation}"]


def test_a_compare_and_set_is_refused_with_the_current_generation(kit: Kit) -> None:
    first = kit.fp.alarms.set("remind", "a", in_="1h", if_generation=0)
    second = kit.fp.alarms.set("remind", "a", in_="2h", if_generation=first)
    with pytest.raises(AlarmChanged) as refused:
        kit.fp.alarms.set("remind", "a", in_="3h", if_generation=first)
    assert refused.value.current == second
    tombstone = kit.fp.alarms.clear("remind", "a")
    assert tombstone > second
    assert kit.fp.alarms.get("remind", "a") is None
    assert kit.fp.alarms.list() == []
    assert kit.fp.alarms.clear("remind", "never") == 0


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda alarms: alarms.set("k", "a"), Misuse),
        (lambda alarms: alarms.set("k", "a", 0, in_=0), Misuse),
        (lambda alarms: alarms.set("k", "a", in_=-1), Misuse),
        (lambda alarms: alarms.set("k/l", "a", in_=1), BadName),
        (lambda alarms: alarms.set("k@l", "a", in_=1), BadName),
        (lambda alarms: alarms.set("k", "", in_=1), BadName),
        (lambda alarms: alarms.set("k", "x" * 501, in_=1), BadName),
        (lambda alarms: alarms.set("k", "a", datetime(2026, 1, 1)), BadSlot),  # noqa: DTZ001
        (lambda alarms: alarms.set("k", "a", -1.0), BadSlot),
        (lambda alarms: alarms.set("k", "a", True), BadSlot),  # noqa: FBT003
        (lambda alarms: alarms.set("k", "a", in_=1, payload=object()), BadValue),
        (lambda alarms: alarms.set("k", "a", in_=1, payload="x" * 1_000_001), BadValue),
        (lambda alarms: alarms.start("k", "a"), Misuse),
        (lambda alarms: alarms.list(state="asleep"), Misuse),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    kit: Kit, call: object, error: type[Exception]
) -> None:
    assert callable(call)
    with pytest.raises(error):
        call(kit.fp.alarms)
    assert kit.fp.alarms.list() == []


@pytest.mark.parametrize(
    "words",
    [
        {"every": "100ms"},
        {"on_error": reschedule("10ms")},
        {"on_error": "60s"},
        {"retry": "often"},
        {"budget": 0},
        {"max_losses": 0},
        {"faults": "all"},
        {"lease": "1ms"},
    ],
)
def test_a_word_that_cannot_be_is_refused_when_it_is_declared(
    kit: Kit, words: dict[str, object]
) -> None:
    with pytest.raises(Misuse):
        kit.fp.alarm("k", **words)(lambda _: None)  # type: ignore[arg-type]


def test_two_handlers_of_one_kind_are_refused(kit: Kit) -> None:
    kit.fp.alarm("k")(lambda _: None)
    with pytest.raises(Misuse, match="two handlers"):
        kit.fp.alarm("k")(lambda _: None)


def test_who_has_no_handlers_fires_nothing(kit: Kit) -> None:
    kit.fp.alarms.set("k", "a", in_=0)
    assert not kit.fp.alarms.run_due()
    assert kit.due_in() is None


def test_a_child_that_leaves_a_handler_by_a_fork_ends_nothing(kit: Kit) -> None:
    if "sqlite" not in str(kit.fp._holding.source):
        return

    @kit.fp.alarm("forks")
    def forks(alarm: Alarm) -> None:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                alarm.check()
            except Exception:  # noqa: BLE001 -- any will do
                code = 0
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0

    kit.fp.alarms.set("forks", "a", in_=0)
    assert kit.fp.alarms.run_due().fired == 1


# The other face.


def test_the_asyncio_face_fires_both_colours_side_by_side(tmp_path: Path) -> None:
    seen = []

    async def main() -> None:
        async with AsyncFencepost(f"sqlite:///{tmp_path}/ledger.db") as fp:
            met = asyncio.Event()

            @fp.alarm("task")
            async def task(alarm: Alarm) -> None:
                if alarm.key == "a":
                    await asyncio.wait_for(met.wait(), 10)
                met.set()
                seen.append(alarm.key)
                if alarm.payload:
                    alarm.set(in_="1h")

            @fp.alarm("thread")
            def thread(alarm: Alarm) -> None:
                assert threading.current_thread() is not threading.main_thread()
                seen.append(alarm.key)

            first = await fp.alarms.set("task", "a", in_=0)
            await fp.alarms.set("task", "b", in_=0, payload=1)
            await fp.alarms.set("thread", "c", in_=0)
            with pytest.raises(AlarmChanged):
                await fp.alarms.set("task", "a", in_=0, if_generation=first - 1)
            assert (await fp.alarms.run_due(workers=3)).fired == 3
            (again,) = await fp.alarms.list()
            assert (again.key, again.payload) == ("b", 1)
            assert await fp.alarms.get("task", "a") is None
            assert await fp.alarms.clear("task", "b")
            assert await fp._alarming.due_in() is None

    asyncio.run(main())
    assert sorted(seen) == ["a", "b", "c"]


def test_a_coroutine_is_stopped_at_its_timeout_and_a_cancelled_caller_gives_it_back(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with AsyncFencepost(f"sqlite:///{tmp_path}/ledger.db") as fp:

            @fp.alarm("slow", timeout="50ms", retry=1)
            async def slow(_: Alarm) -> None:
                await asyncio.sleep(60)

            begun = asyncio.Event()

            @fp.alarm("endless")
            async def endless(_: Alarm) -> None:
                begun.set()
                await asyncio.sleep(60)

            await fp.alarms.set("slow", "a", in_=0)
            assert (await fp.alarms.run_due()).dead == 1
            await fp.alarms.set("endless", "b", in_=0)
            firing = asyncio.create_task(fp.alarms.run_due())
            await begun.wait()
            firing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await firing
            view = await fp.alarms.get("endless", "b")
            assert view is not None
            assert (view.state, view.losses) == ("armed", 0)

    asyncio.run(main())


def test_both_faces_of_alarms_have_the_same_methods_with_the_same_arguments() -> None:
    def described(face: type) -> dict[str, str]:
        methods = inspect.getmembers(face, inspect.isfunction)
        return {name: str(inspect.signature(method)) for name, method in methods}

    assert described(Alarms) == described(AsyncAlarms)
