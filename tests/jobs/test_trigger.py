"""A slot runs once, whoever triggers it and however often."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from fencepost import AsyncFencepost, Fencepost, Retry
from fencepost.errors import (
    BadSchedule,
    BadSlot,
    GiveUp,
    LeaseLost,
    Misuse,
    RetryAfter,
    UnknownJob,
    UnknownRun,
)
from fencepost.ledger.retention import KEPT_FOR, KEPT_RUNS
from fencepost.model.run import State
from fencepost.model.slot import shown
from fencepost.stores.memory import MemoryStore
from fencepost.testing.clock import SettableClocks
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fencepost.running import AsyncRun, Run

SLOT = datetime(2026, 1, 20, 2, tzinfo=UTC)


@pytest.fixture(params=["memory", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{tmp_path}" if request.param == "memory" else f"sqlite:///{tmp_path}/fp.db"


@pytest.fixture
def fp(url: str) -> Iterator[Fencepost]:
    with Fencepost(url) as fencepost:
        yield fencepost


def test_a_slot_runs_once_and_its_result_is_kept(fp: Fencepost) -> None:
    bodies: list[str] = []

    @fp.job("billing")
    def billing(run: Run) -> dict[str, int]:
        bodies.append(run.id)
        return {"sent": 418}

    first, again = fp.trigger("billing", SLOT), fp.trigger(billing, SLOT)
    assert (first.status, again.status) == ("succeeded", "already_done")
    assert first
    assert again
    assert first.result == again.result == {"sent": 418}
    assert bodies == ["billing@2026-01-20T02:00:00Z"] == [first.run_id]


def test_one_moment_in_two_zones_is_one_slot(fp: Fencepost) -> None:
    @fp.job("billing")
    def billing() -> None:
        return None

    elsewhere = SLOT.astimezone(tz=None) + timedelta(0)
    assert fp.trigger("billing", SLOT).status == "succeeded"
    assert fp.trigger("billing", elsewhere).status == "already_done"
    assert fp.trigger("billing", "2026-01-20T03:00:00+01:00").status == "already_done"


def test_without_a_slot_the_newest_due_one_is_meant(fp: Fencepost) -> None:
    @fp.job("hourly", every="1h")
    def hourly(run: Run) -> str:
        assert run.window is not None
        start, end = run.window
        assert (end - start, end) == (timedelta(hours=1), run.slot)
        return run.id

    outcome = fp.trigger("hourly")
    assert outcome.result == f"hourly@{outcome.slot}"
    assert fp.trigger("hourly").run_id == outcome.run_id


def test_a_slot_that_comes_in_a_moment_is_waited_for(fp: Fencepost) -> None:
    began: list[float] = []
    fp.job("job")(lambda: began.append(time.time()))
    slot = int(time.time()) + 1
    assert fp.trigger("job", slot).status == "succeeded"
    assert began[0] >= slot


def test_a_manual_run_is_its_own_each_time(fp: Fencepost) -> None:
    @fp.job("billing")
    def billing(run: Run) -> str:
        return run.id

    ids = {fp.trigger("billing", manual=True).run_id for _ in range(3)}
    assert len(ids) == 3
    assert all("!manual-" in run_id for run_id in ids)


def test_a_manual_run_is_retried_as_itself(fp: Fencepost) -> None:
    tries: list[str] = []

    @fp.job("billing", retry=Retry(3, base=0.01, jitter=False))
    def billing(run: Run) -> None:
        tries.append(run.id)
        if len(tries) < 3:
            raise ValueError("not yet")

    assert fp.trigger("billing", manual=True).status == "succeeded"
    assert len(set(tries)) == 1
    assert len(tries) == 3


def test_a_concurrent_trigger_of_the_slot_is_told_who_has_it(fp: Fencepost) -> None:
    inside, leave = threading.Event(), threading.Event()

    @fp.job("billing")
    def billing() -> None:
        inside.set()
        assert leave.wait(30)

    outcomes: list[Any] = []
    worker = threading.Thread(target=lambda: outcomes.append(fp.trigger("billing", SLOT)))
    worker.start()
    assert inside.wait(30)
    other = fp.trigger("billing", SLOT)
    leave.set()
    worker.join()
    assert not other
    assert (other.status, other.reason) == ("skipped", "lock_held")
    assert "pid" in other.holder
    assert other.held_for is not None
    assert other.lease_left is not None
    assert 0 < other.lease_left <= 30
    assert outcomes[0].status == "succeeded"
    assert len(fp.runs("billing")) == 1


@pytest.mark.parametrize(("overlap", "status"), [("skip", "skipped"), ("fail", "failed")])
def test_the_next_slot_finds_the_lock_held(fp: Fencepost, overlap: str, status: str) -> None:
    inside, leave = threading.Event(), threading.Event()

    @fp.job("billing", overlap=overlap)
    def billing() -> None:
        inside.set()
        assert leave.wait(30)

    worker = threading.Thread(target=lambda: fp.trigger("billing", SLOT))
    worker.start()
    assert inside.wait(30)
    other = fp.trigger("billing", SLOT + timedelta(hours=1))
    leave.set()
    worker.join()
    assert (other.status, other.reason) == (status, "lock_held")
    assert other.blocker == "billing@2026-01-20T02:00:00Z"
    newest = fp.runs("billing")[0]
    assert (newest.state.value, newest.blocker) == (status, other.blocker)


def test_a_rescheduled_slot_waits_its_turn(fp: Fencepost) -> None:
    inside, leave = threading.Event(), threading.Event()
    order: list[datetime] = []

    @fp.job("billing", overlap="reschedule")
    def billing(run: Run) -> None:
        order.append(run.slot)
        inside.set()
        assert leave.wait(30)

    slots = [SLOT, SLOT + timedelta(hours=1)]
    outcomes: list[Any] = []
    first = threading.Thread(target=lambda: outcomes.append(fp.trigger("billing", slots[0])))
    first.start()
    assert inside.wait(30)
    second = threading.Thread(target=lambda: outcomes.append(fp.trigger("billing", slots[1])))
    second.start()
    _until(lambda: len(fp.runs("billing")) == 2)
    third = fp.trigger("billing", SLOT + timedelta(hours=2))
    assert (third.status, third.reason) == ("skipped", "waiting_full")
    leave.set()
    first.join()
    second.join()
    assert order == slots
    assert [outcome.status for outcome in outcomes] == ["succeeded", "succeeded"]


def test_waiting_for_a_turn_is_bounded(fp: Fencepost) -> None:
    @fp.job("billing", overlap="reschedule", start_deadline="100ms")
    def billing() -> None:
        raise AssertionError("the lock was held all the time")

    with fp.lock("billing"):
        outcome = fp.trigger("billing", SLOT)
    assert (outcome.status, outcome.reason) == ("skipped", "start_deadline")
    assert fp.runs("billing")[0].state is State.MISSED


def test_replace_cancels_the_older_run_and_then_starts(url: str) -> None:
    async def main() -> tuple[Any, Any]:
        async with AsyncFencepost(url) as fp:
            inside = asyncio.Event()

            @fp.job("report", overlap="replace", cancel_grace="20s")
            async def report(run: AsyncRun) -> str:
                if run.slot == SLOT:
                    inside.set()
                    await asyncio.sleep(60)
                return run.id

            older = asyncio.create_task(fp.trigger("report", SLOT))
            await inside.wait()
            newer = await fp.trigger("report", SLOT + timedelta(hours=1))
            return await older, newer

    older, newer = asyncio.run(main())
    assert (older.status, newer.status) == ("cancelled", "succeeded")


def test_replace_takes_the_token_of_one_who_does_not_stop(url: str) -> None:
    async def main() -> tuple[Any, Any, list[str]]:
        said: list[str] = []
        async with AsyncFencepost(url) as fp:
            inside, leave = asyncio.Event(), asyncio.Event()

            @fp.job("report", overlap="replace", cancel_grace=1.0, lease=0.6)
            async def report(run: AsyncRun) -> None:
                if run.slot != SLOT:
                    return
                inside.set()
                while not leave.is_set():
                    try:
                        await leave.wait()
                    except asyncio.CancelledError:
                        said.append("no")
                await run.save("late")

            older = asyncio.create_task(fp.trigger("report", SLOT))
            await inside.wait()
            newer = await fp.trigger("report", SLOT + timedelta(hours=1))
            leave.set()
            return await older, newer, said

    older, newer, said = asyncio.run(main())
    assert said
    assert newer.status == "succeeded"
    assert older.status == "lost"


def test_allow_runs_side_by_side_up_to_its_limit(fp: Fencepost) -> None:
    inside, leave = threading.Semaphore(0), threading.Event()
    tokens: list[int] = []

    @fp.job("crawl", overlap="allow", max_concurrent=2)
    def crawl(run: Run) -> None:
        tokens.append(run.token)
        inside.release()
        assert leave.wait(30)

    workers = [
        threading.Thread(target=fp.trigger, args=("crawl", SLOT + timedelta(hours=n)))
        for n in range(2)
    ]
    for worker in workers:
        worker.start()
    for _ in workers:
        assert inside.acquire(timeout=30)
    third = fp.trigger("crawl", SLOT + timedelta(hours=2))
    leave.set()
    for worker in workers:
        worker.join()
    assert (third.status, third.reason) == ("skipped", "lock_held")
    assert {run.lease for run in fp.runs("crawl") if run.state is State.SUCCEEDED} == {
        "crawl#1",
        "crawl#2",
    }


def test_an_error_is_retried_until_it_is_not(fp: Fencepost) -> None:
    seen: list[int] = []

    @fp.job("billing", retry=Retry(3, base=0.01, jitter=False))
    def billing(run: Run) -> None:
        seen.append(run.attempt)
        raise ValueError("no luck")

    outcome = fp.trigger("billing", SLOT)
    assert seen == [1, 2, 3]
    assert (outcome.status, outcome.error) == ("failed", "ValueError: no luck")
    assert not outcome
    assert fp.trigger("billing", SLOT).status == "failed"
    assert seen == [1, 2, 3]


def test_give_up_and_never_end_a_run_at_once(fp: Fencepost) -> None:
    @fp.job("a", retry=Retry(5, base=0.01))
    def a() -> None:
        raise GiveUp("the account is closed")

    @fp.job("b", retry=Retry(5, base=0.01, never=KeyError))
    def b() -> None:
        raise KeyError("x")

    assert [fp.trigger(job, SLOT).attempt for job in ("a", "b")] == [1, 1]


def test_retry_after_sets_the_pause(fp: Fencepost) -> None:
    @fp.job("billing", retry=Retry(2, base=60))
    def billing(run: Run) -> str:
        if run.attempt == 1:
            raise RetryAfter(0.01, "rate limited")
        return "fine"

    # Full jitter could draw a long pause from base=60: the ceiling keeps this test short.
    @fp.job("quick", retry=Retry(2, base=0.001))
    def quick(run: Run) -> str:
        return billing(run)

    outcome = fp.trigger("quick", SLOT)
    assert (outcome.status, outcome.result) == ("succeeded", "fine")


def test_a_newer_slot_supersedes_one_that_waits_for_its_retry(fp: Fencepost) -> None:
    failed = threading.Event()

    @fp.job("billing", retry=Retry(2, base=3600, ceiling=3600, jitter=False))
    def billing(run: Run) -> str:
        if run.slot == SLOT:
            failed.set()
            raise ValueError("no luck")
        return "fine"

    worker = threading.Thread(target=fp.trigger, args=("billing", SLOT), daemon=True)
    worker.start()
    _until(lambda: [run.state for run in fp.runs("billing")] == [State.WAITING_RETRY])
    assert fp.trigger("billing", SLOT).reason == "waiting_retry"
    assert fp.trigger("billing", SLOT + timedelta(hours=1)).status == "succeeded"
    old = fp.runs("billing")[1]
    assert (old.state, old.reason) == (State.FAILED, "superseded")
    worker.join(30)
    assert not worker.is_alive()


def test_a_body_may_find_that_there_is_nothing_to_do(fp: Fencepost) -> None:
    @fp.job("billing")
    def billing(run: Run) -> None:
        run.skip("no input")

    outcome = fp.trigger("billing", SLOT)
    assert (outcome.status, outcome.reason) == ("skipped", "no input")
    assert not outcome


def test_a_cancel_is_heard_at_the_next_check(fp: Fencepost) -> None:
    @fp.job("billing")
    def billing(run: Run) -> None:
        fp.cancel(run.id)
        run.save("half")

    outcome = fp.trigger("billing", SLOT)
    assert outcome.status == "cancelled"


def test_a_cancel_is_heard_without_any_check_by_a_coroutine(fp: Fencepost) -> None:
    @fp.job("billing", lease="0.6s")
    async def billing(run: AsyncRun) -> None:
        fp.cancel(run.id)
        await asyncio.sleep(60)

    assert fp.trigger("billing", SLOT).status == "cancelled"


def test_work_that_is_done_in_spite_of_a_cancel_is_done(fp: Fencepost) -> None:
    @fp.job("billing")
    def billing(run: Run) -> str:
        fp.cancel(run.id)
        return "done"

    outcome = fp.trigger("billing", SLOT)
    assert outcome.status == "succeeded"
    assert fp.runs("billing")[0].cancel_at > 0


def test_a_forced_cancel_cannot_be_overwritten(fp: Fencepost) -> None:
    @fp.job("billing")
    def billing(run: Run) -> str:
        fp.cancel(run.id, force=True)
        return "done"

    assert fp.trigger("billing", SLOT).status == "lost"
    assert fp.runs("billing")[0].state is State.CANCELLED


def test_a_cancelled_attempt_is_never_retried(fp: Fencepost) -> None:
    @fp.job("billing", retry=Retry(5, base=0.01))
    def billing(run: Run) -> None:
        fp.cancel(run.id)
        raise ValueError("cleanup failed")

    outcome = fp.trigger("billing", SLOT)
    assert (outcome.status, outcome.attempt) == ("cancelled", 1)


def test_an_interrupted_body_gives_its_run_back_without_blame(fp: Fencepost) -> None:
    interrupt = [True]

    @fp.job("billing")
    def billing(run: Run) -> Any:
        if interrupt:
            run.save("half")
            interrupt.clear()
            raise KeyboardInterrupt
        return run.checkpoint

    with pytest.raises(KeyboardInterrupt):
        fp.trigger("billing", SLOT)
    waiting = fp.runs("billing")[0]
    assert (waiting.state, waiting.losses, waiting.releases) == (State.PENDING, 0, 1)
    outcome = fp.trigger("billing", SLOT)
    assert (outcome.result, outcome.attempt) == ("half", 1)


def test_a_result_that_cannot_be_kept_is_refused_and_not_retried(fp: Fencepost) -> None:
    @fp.job("a", retry=Retry(5, base=0.01))
    def a() -> object:
        return object()

    @fp.job("b")
    def b(run: Run) -> str:
        run.save("x" * 1_000_001)
        return "never"

    for job, words in (("a", "the result cannot be kept as JSON"), ("b", "is the most")):
        outcome = fp.trigger(job, SLOT)
        assert (outcome.status, outcome.attempt) == ("failed", 1)
        assert words in str(outcome.error)


def test_secrets_in_an_error_do_not_reach_the_ledger(fp: Fencepost) -> None:
    @fp.job("billing")
    def billing() -> None:
        raise ConnectionError("postgresql://ann:hunter2@db/x refused us, password=hunter2")

    outcome = fp.trigger("billing", SLOT)
    assert "hunter2" not in str(outcome)
    assert "hunter2" not in str(fp.runs("billing"))
    assert "ConnectionError" in str(outcome.error)


def test_a_forked_copy_of_a_run_is_nobody(fp: Fencepost, monkeypatch: pytest.MonkeyPatch) -> None:
    @fp.job("billing")
    def billing(run: Run) -> str:
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr("os.getpid", lambda: -1)
            with pytest.raises(LeaseLost, match="fork"):
                run.check()
        return "fine"

    assert fp.trigger("billing", SLOT).result == "fine"


def test_both_colours_run_in_both_faces(url: str) -> None:
    def plain(run: Run) -> str:
        run.save(1)
        with run.once("x") as first:
            assert first
        return f"{run.checkpoint}"

    async def coloured(run: AsyncRun) -> str:
        await run.save(2)
        async with run.once("x") as first:
            assert first
        return f"{run.checkpoint}"

    with Fencepost(url, namespace="blocking") as fp:
        fp.job("plain")(plain)
        fp.job("coloured")(coloured)
        blocking = [fp.trigger(job, SLOT).result for job in ("plain", "coloured")]

    async def main() -> list[Any]:
        async with AsyncFencepost(url, namespace="aio") as afp:
            afp.job("plain")(plain)
            afp.job("coloured")(coloured)
            return [(await afp.trigger(job, SLOT)).result for job in ("plain", "coloured")]

    assert blocking == asyncio.run(main()) == ["1", "2"]


def test_a_cancelled_task_gives_its_run_back(url: str) -> None:
    async def main() -> list[Any]:
        async with AsyncFencepost(url) as fp:
            inside = asyncio.Event()

            @fp.job("report")
            async def report() -> None:
                inside.set()
                await asyncio.sleep(60)

            task = asyncio.create_task(fp.trigger("report", SLOT))
            await inside.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return await fp.runs("report")

    (run,) = asyncio.run(main())
    assert (run.state, run.releases, run.losses) == (State.PENDING, 1, 0)


def test_mistakes_are_answered_with_a_sentence(fp: Fencepost) -> None:
    @fp.job("nightly", cron="0 2 * * *", tz="Europe/Berlin")
    def nightly() -> None:
        return None

    @fp.job("bare")
    def bare() -> None:
        return None

    tomorrow = datetime.now(tz=UTC) + timedelta(days=1)
    for job, slot, error, words in (
        ("nightyl", SLOT, UnknownJob, "no job is called 'nightyl'; known here: 'bare', 'nightly'"),
        ("nightly", SLOT, BadSlot, "is no slot of job 'nightly'"),
        ("nightly", SLOT.replace(tzinfo=None), BadSlot, "without a time zone"),
        ("nightly", "tomorrow", BadSlot, "write an instant and its zone"),
        ("bare", tomorrow, BadSlot, "never starts early"),
        ("bare", None, BadSlot, "has no schedule to tell the slot from"),
    ):
        with pytest.raises(error, match=words):
            fp.trigger(job, slot)
    assert fp.runs() == []
    with pytest.raises(UnknownRun, match="has no run"):
        fp.cancel(f"bare@{shown(0)}")
    with pytest.raises(BadSlot, match="is not a run"):
        fp.cancel("bare")


@pytest.mark.parametrize(
    ("words", "error", "sentence"),
    [
        ({"cron": "61 * * * *"}, BadSchedule, "61"),
        ({"every": "0s"}, BadSchedule, "0s"),
        ({"timeout": "soon"}, Misuse, "timeout is 'soon'"),
        ({"overlap": "maybe"}, Misuse, "overlap is 'maybe'"),
        ({"overlap": "replace"}, Misuse, "cannot be stopped"),
        ({"retry": "often"}, Misuse, "retry is 'often'"),
        ({"lease": "0s"}, Misuse, "ttl is '0s'"),
        ({"on_loss": "cry"}, Misuse, "on_loss is 'cry'"),
        ({"isolation": "cage"}, Misuse, "isolation is 'cage'"),
        ({"max_losses": 0}, Misuse, "max_losses is 0"),
        ({"tz": "Europe/Atlantis", "cron": "0 2 * * *"}, BadSchedule, "Atlantis"),
        ({"needs": "T9"}, Misuse, "needs 'T9'"),
    ],
)
def test_a_typo_in_a_declaration_raises_at_once(
    fp: Fencepost, words: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        fp.job("billing", **words)(lambda: None)


def test_where_two_may_run_at_once_a_job_must_be_idempotent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    advisory = MemoryStore.capabilities._replace(exclusive=False)
    monkeypatch.setattr(MemoryStore, "capabilities", advisory)
    with Fencepost(f"memory://{tmp_path}") as fp:
        with pytest.raises(Misuse, match=r"needs T1 \(exclusive\).*T0.*idempotent=True"):
            fp.job("billing")
        fp.job("cleanup", idempotent=True)(lambda: None)
        assert fp.trigger("cleanup", SLOT).status == "succeeded"


def test_a_name_stands_for_one_function(fp: Fencepost) -> None:
    fp.job("billing")(lambda: None)
    with pytest.raises(Misuse, match="two jobs are called 'billing'"):
        fp.job("billing")(lambda: None)


def test_a_failing_body_backs_off_to_the_ceiling_and_uses_no_cpu_meanwhile(fp: Fencepost) -> None:
    began: list[float] = []

    @fp.job("billing", retry=Retry(5, base=0.1, ceiling=0.3, jitter=False))
    def billing() -> None:
        began.append(time.monotonic())
        raise ValueError("no luck")

    fp.trigger("billing", SLOT - timedelta(hours=1))  # whatever is imported late is imported now
    began.clear()
    cpu = time.process_time()
    outcome = fp.trigger("billing", SLOT)
    spent = time.process_time() - cpu
    pauses = [later - earlier for earlier, later in pairwise(began)]
    assert (outcome.status, outcome.attempt) == ("failed", 5)
    assert all(p >= least for p, least in zip(pauses, [0.1, 0.2, 0.3, 0.3], strict=True)), pauses
    assert spent < 0.25 * sum(pauses)


def test_a_trigger_may_wait_for_a_slot_that_another_runs(fp: Fencepost) -> None:
    inside, leave = threading.Event(), threading.Event()

    @fp.job("billing")
    def billing() -> str:
        inside.set()
        assert leave.wait(30)
        return "done"

    worker = threading.Thread(target=fp.trigger, args=("billing", SLOT))
    worker.start()
    assert inside.wait(30)
    assert fp.trigger("billing", SLOT, wait="10ms").reason == "lock_held"
    later = threading.Timer(0.05, leave.set)
    later.start()
    outcome = fp.trigger("billing", SLOT, wait="30s")
    worker.join()
    later.join()
    assert (outcome.status, outcome.result) == ("already_done", "done")


def test_counters_may_have_any_name(fp: Fencepost, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    @fp.job("billing")
    def billing(run: Run) -> None:
        for name in ("error", "duration", "emit", "what", "reason"):
            run.count(name, 2)

    assert fp.trigger("billing", SLOT).status == "succeeded"
    assert "error=2" in caplog.messages[-1]


def test_a_body_that_loses_something_else_has_only_failed(fp: Fencepost) -> None:
    @fp.job("billing")
    def billing() -> None:
        raise LeaseLost("another", token=1, reason="it ran out")

    assert fp.trigger("billing", SLOT).status == "failed"


def test_a_slot_that_nobody_remembers_is_done(url: str) -> None:
    clocks = SettableClocks()
    clocks.advance(60 - clocks.wall() % 60 + 1)
    first = int(clocks.wall()) // 60 * 60
    with Fencepost(url, clocks=clocks) as fp:
        fp.job("job", every="1m")(lambda: None)
        for _ in range(KEPT_RUNS + 2):
            clocks.advance(60)
            assert fp.trigger("job").status == "succeeded"
        clocks.advance(KEPT_FOR + 86_400)
        assert finish(fp._working.ledger.planner.prune(most=500))
        outcome = fp.trigger("job", slot=first + 60)
    assert (outcome.status, outcome.reason) == ("already_done", "pruned")
    assert (outcome.run_id, outcome.slot) == (f"job@{shown(first + 60)}", shown(first + 60))


def _until(true: Any) -> None:
    deadline = threading.Event()
    for _ in range(3000):
        if true():
            return
        deadline.wait(0.01)
    raise AssertionError("it did not come true within 30 s")
