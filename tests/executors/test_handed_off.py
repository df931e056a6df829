"""A run that is handed off belongs to whoever has its token, until it tells or its time is up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from endpoint_kit import Asked, Endpoint, Said
from executor_kit import LATER, RUN, SLOT, environment, events, record, triggered, wait_for

from fencepost import (
    AsyncFencepost,
    AsyncRun,
    BadValue,
    Fencepost,
    LeaseLost,
    Misuse,
    Retry,
    Run,
    RunCancelled,
    RunLost,
    RunTimedOut,
    StoreUnavailable,
    UnknownRun,
)
from fencepost.flows.course import Doors
from fencepost.flows.handoff import Held, take
from fencepost.ledger.api import Attempt
from fencepost.model.item import Found
from fencepost.model.policy import Policy
from fencepost.model.run import RunRecord, State
from fencepost.model.slot import parsed
from fencepost.testing.clock import SettableClocks
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HERE = os.path.dirname(os.path.abspath(__file__))
both_faces = pytest.mark.parametrize("face", ["blocking", "asyncio"])
ACCEPTED = Said(202)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/fp.db"


@pytest.fixture(params=["sqlite", "memory"])
def fp(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fencepost]:
    urls = {"sqlite": f"sqlite:///{tmp_path}/fp.db", "memory": f"memory://{tmp_path}"}
    with Fencepost(urls[request.param]) as made:
        yield made


def hand_over(run: Run) -> None:
    run.hand_over()


def handed_off(fp: Fencepost, **words: Any) -> int:
    """Trigger a run whose body hands it off at once; return its token."""
    fp.job("job", **words)(hand_over)
    outcome = fp.trigger("job", SLOT)
    assert (outcome.status, bool(outcome)) == ("handed_off", False)
    assert record(fp).handed_off
    return outcome.token


def test_a_run_that_is_handed_off_is_ended_by_whoever_has_its_token(fp: Fencepost) -> None:
    token = handed_off(fp)
    outcome = fp.complete(RUN, token=token, result={"rows": 3})
    assert (outcome.status, outcome.result) == ("succeeded", {"rows": 3})
    assert fp.trigger("job", SLOT).status == "already_done"
    assert fp.locks() == []


@both_faces
def test_both_faces_hand_off_whatever_the_colour_of_the_body(url: str, face: str) -> None:
    async def async_hand_over(run: AsyncRun) -> None:
        await run.hand_over()

    def declare(fp: Any, body: Any) -> None:
        fp.job("job")(body)

    for slot, body in ((SLOT, hand_over), (LATER, async_hand_over)):
        outcome = triggered(face, url, partial(declare, body=body), slot)
        assert outcome.status == "handed_off"
        with Fencepost(url) as fp:
            assert fp.complete(outcome.run_id, token=outcome.token).status == "succeeded"


def test_a_second_callback_is_answered_as_the_first(fp: Fencepost) -> None:
    token = handed_off(fp)
    first = fp.complete(RUN, token=token, result=1)
    assert fp.complete(RUN, token=token, result=2) == first
    with pytest.raises(RunLost, match="it is succeeded"):
        fp.complete(RUN, token=token, status="failed")


def test_a_callback_with_an_old_token_is_refused_and_named(fp: Fencepost) -> None:
    token = handed_off(fp, handoff_beat="300ms")
    time.sleep(0.4)
    again = fp.trigger("job", SLOT)
    assert again.token > token
    for verb in (fp.complete, fp.beat):
        with pytest.raises(RunLost):
            verb(RUN, token=token)
    assert "stale_write" in [event.what for event in events(fp)]
    assert fp.complete(RUN, token=again.token).status == "succeeded"


def test_what_failed_is_tried_again_as_the_policy_says(fp: Fencepost) -> None:
    token = handed_off(fp, retry=Retry(2, base="50ms", jitter=False))
    failed = fp.complete(RUN, token=token, status="failed", error="password: hunter22")
    assert (failed.status, failed.reason) == ("failed", "waiting_retry")
    assert failed.error == "password: ***"
    assert fp.complete(RUN, token=token, status="failed").reason == "waiting_retry"
    assert fp.trigger("job", SLOT, wait="5s").status == "handed_off"
    token = record(fp).token
    assert fp.complete(RUN, token=token, status="failed", error="again").status == "failed"
    assert record(fp).state is State.FAILED


def test_a_failure_can_be_for_good(fp: Fencepost) -> None:
    token = handed_off(fp, retry=5)
    outcome = fp.complete(RUN, token=token, status="failed", error="no", retry=False)
    assert (record(fp).state, outcome.reason) == (State.FAILED, "gave_up")


def test_a_process_that_never_declared_the_job_knows_its_policies(url: str) -> None:
    with Fencepost(url) as fp:
        token = handed_off(fp, retry=Retry(3, base="70s", jitter=False))
    with Fencepost(url) as stranger:
        stranger.complete(RUN, token=token, status="failed", error="no")
        run = record(stranger)
    assert run.state is State.WAITING_RETRY
    assert run.not_before - run.beat_at == pytest.approx(70, abs=1)


@pytest.mark.parametrize(
    ("words", "lasts"),
    [
        ({"timeout": "10m"}, 600),
        ({"timeout": "3d"}, 259_200),
        ({"timeout": "10m", "handoff_beat": "1m"}, 60),
        ({"timeout": "1m", "handoff_beat": "10m"}, 60),
        ({"timeout": None, "handoff_beat": "2m"}, 120),
        ({"timeout": None}, 86_400),
    ],
)
def test_the_lease_lasts_until_the_next_beat_or_the_end_of_the_timeout(
    fp: Fencepost, words: dict[str, Any], lasts: int
) -> None:
    handed_off(fp, lease="5s", **words)
    (lock,) = fp.locks()
    assert lasts - 10 < lock.expires_in <= lasts


def test_beats_keep_it_for_a_beats_time_and_show_how_far_it_is(fp: Fencepost) -> None:
    token = handed_off(fp, handoff_beat="1s", timeout="10m")
    for done in range(4):
        time.sleep(0.5)
        fp.beat(RUN, token=token, done=done, total=9)
    (lock,) = fp.locks()
    assert 0.5 < lock.expires_in <= 1.0
    assert (record(fp).done, record(fp).total) == (3, 9)
    assert fp.trigger("job", SLOT).reason == "lock_held"


def test_no_beat_moves_it_beyond_its_timeout(fp: Fencepost) -> None:
    token = handed_off(fp, handoff_beat="10s", timeout="500ms")
    (lock,) = fp.locks()
    assert lock.expires_in <= 0.5
    time.sleep(0.6)
    with pytest.raises((RunTimedOut, LeaseLost)):
        fp.beat(RUN, token=token)


def test_a_beat_of_the_keeper_that_comes_late_does_not_shorten_the_lease(fp: Fencepost) -> None:
    from fencepost.world.flow import finish

    def lingering(run: Run) -> None:
        run.hand_over()
        finish(run._course.beat(run._doors.ledger, 1.0))

    fp.job("job", timeout="10m")(lingering)
    assert fp.trigger("job", SLOT).status == "handed_off"
    (lock,) = fp.locks()
    assert lock.expires_in > 500


def test_silence_until_the_next_beat_is_a_loss(fp: Fencepost) -> None:
    handed_off(fp, handoff_beat="300ms", timeout="10m")
    time.sleep(0.4)
    assert fp.trigger("job", SLOT).status == "handed_off"
    assert (record(fp).losses, record(fp).attempt) == (1, 1)


def test_silence_for_the_whole_timeout_is_a_timeout(fp: Fencepost) -> None:
    handed_off(fp, timeout="1500ms")
    time.sleep(1.6)
    outcome = fp.trigger("job", SLOT)
    assert (outcome.status, outcome.reason) == ("timed_out", "timeout")
    assert "not heard of within its timeout of 1.5 s" in (outcome.error or "")
    assert record(fp).losses == 0
    assert fp.locks() == []


def test_a_timeout_is_tried_again_as_the_policy_says(fp: Fencepost) -> None:
    handed_off(fp, timeout="1500ms", retry=Retry(2, base="10ms"))
    time.sleep(1.6)
    assert fp.trigger("job", SLOT, wait="5s").status == "handed_off"
    assert record(fp).attempt == 2
    assert "attempt_failed" in [event.what for event in events(fp)]


def test_what_must_not_be_tried_twice_is_not_tried_after_a_timeout(fp: Fencepost) -> None:
    handed_off(fp, timeout="1500ms", retry=Retry(2, base="10ms"), on_loss="fail")
    time.sleep(1.6)
    assert fp.trigger("job", SLOT).status == "timed_out"


def test_a_late_success_that_nobody_has_taken_over_yet_counts(fp: Fencepost) -> None:
    token = handed_off(fp, timeout="300ms")
    time.sleep(0.4)
    assert fp.complete(RUN, token=token).status == "succeeded"


def test_a_cancel_is_heard_with_the_next_beat(fp: Fencepost) -> None:
    token = handed_off(fp)
    fp.cancel(RUN)
    with pytest.raises(RunCancelled):
        fp.beat(RUN, token=token)
    assert fp.complete(RUN, token=token, status="cancelled").status == "cancelled"


def test_a_forced_cancel_takes_the_token_away(fp: Fencepost) -> None:
    token = handed_off(fp)
    fp.cancel(RUN, force=True)
    with pytest.raises(RunLost):
        fp.complete(RUN, token=token)


def test_a_callback_that_comes_before_the_answer_counts(fp: Fencepost) -> None:
    def at_once(asked: Asked) -> Said:
        with Fencepost(fp._holding.source) as other:
            other.complete(asked.json["run_id"], token=asked.json["token"], result="quick")
        return ACCEPTED

    with Endpoint(at_once) as endpoint:
        fp.http("job", endpoint.url)
        outcome = fp.trigger("job", SLOT)
    assert (outcome.status, outcome.result) == ("succeeded", "quick")
    assert "stale_write" not in [event.what for event in events(fp)]


def test_a_body_that_raises_after_it_handed_over_has_failed(fp: Fencepost) -> None:
    @fp.job("job")
    def body(run: Run) -> None:
        run.hand_over()
        raise OSError("the queue is full")

    outcome = fp.trigger("job", SLOT)
    assert (outcome.status, outcome.error) == ("failed", "OSError: the queue is full")
    with pytest.raises(RunLost):
        fp.complete(RUN, token=outcome.token)


def test_what_a_body_returns_after_it_handed_over_is_of_no_interest(fp: Fencepost) -> None:
    @fp.job("job")
    def body(run: Run) -> object:
        run.hand_over()
        return object()  # as a queue's receipt might be

    assert fp.trigger("job", SLOT).status == "handed_off"


def test_an_isolated_body_cannot_hand_over(url: str) -> None:
    with Fencepost(url) as fp:
        fp.job("job", isolation="process")(hand_over)
        outcome = fp.trigger("job", SLOT)
    assert outcome.status == "failed"
    assert "leave out isolation='process'" in (outcome.error or "")


def test_a_dispatcher_that_is_killed_after_202_loses_nothing(url: str) -> None:
    program = os.path.join(HERE, "dispatcher_program.py")
    with Endpoint(ACCEPTED) as endpoint, Fencepost(url) as fp:
        dispatcher = subprocess.Popen(
            [sys.executable, program, url, "http", endpoint.url],
            env=environment(),
            stdout=subprocess.PIPE,
        )
        assert dispatcher.stdout is not None
        assert dispatcher.stdout.readline() == b"handed_off\n"
        dispatcher.kill()
        dispatcher.wait()
        dispatcher.stdout.close()
        fp.http("job", endpoint.url)
        assert fp.trigger("job", SLOT).reason == "lock_held"
        token = endpoint.asked[0].json["token"]
        assert fp.complete(RUN, token=token, result="done").status == "succeeded"
        assert (record(fp).starts, record(fp).losses, len(endpoint.asked)) == (1, 0, 1)


def test_a_dispatcher_that_is_killed_before_it_hands_over_is_a_loss_at_once(url: str) -> None:
    program = os.path.join(HERE, "dispatcher_program.py")
    with Endpoint(Said(how="hang"), Said(200)) as endpoint, Fencepost(url) as fp:
        dispatcher = subprocess.Popen(
            [sys.executable, program, url, "http", endpoint.url], env=environment()
        )
        wait_for(lambda: endpoint.asked)
        dispatcher.kill()
        dispatcher.wait()
        fp.http("job", endpoint.url)
        assert fp.trigger("job", SLOT, wait="5s").status == "succeeded"
        assert record(fp).losses == 1


def test_the_dispatchers_pulse_vouches_no_more_for_what_it_handed_off(url: str) -> None:
    with Fencepost(url) as fp:
        token = handed_off(fp)
        pulse = fp._holding.store.pulse  # type: ignore[attr-defined]
        assert pulse.leases == set()
    with Fencepost(url) as other:
        (lock,) = other.locks()
        assert (lock.token, lock.alive) == (token, True)


def test_a_scheduler_leaves_a_handed_off_run_alone_until_its_time_is_up(url: str) -> None:
    with Fencepost(url) as fp:
        fp.job("job", every="1s", timeout="3s")(hand_over)
        fp.tick()  # from here on there are slots
        time.sleep(1.1)
        (first,) = fp.tick()
        time.sleep(1.1)
        assert fp.tick() == []
        assert record(fp, first.run_id).handed_off
        time.sleep(2.0)
        fp.tick()
        assert record(fp, first.run_id).state is State.TIMED_OUT


# A run can also be carried out where it was handed off to.


def test_a_run_is_taken_over_once_and_is_a_run_like_any_other(fp: Fencepost) -> None:
    token = handed_off(fp, lease="5s")
    ran: list[int] = []

    def work(run: Run) -> str:
        ran.append(run.token)
        with run.once("mail") as first:
            assert first
        run.save({"page": 2})
        run.progress(2, 3)
        return "sent"

    outcome = fp.take_over(RUN, work, token=token)
    assert (outcome.status, outcome.result, ran) == ("succeeded", "sent", [token])
    assert (record(fp).checkpoint, record(fp).done) == ('{"page":2}', 2)
    with pytest.raises(RunLost):
        fp.take_over(RUN, work, token=token)
    assert ran == [token]


def test_two_deliveries_of_one_message_begin_it_once(fp: Fencepost) -> None:
    token = handed_off(fp)

    def work(run: Run) -> None:
        with pytest.raises(RunLost, match="begun before"):
            fp.take_over(RUN, work, token=token)

    assert fp.take_over(RUN, work, token=token).status == "succeeded"


def test_who_takes_over_keeps_the_lease_and_hears_of_a_cancel(fp: Fencepost) -> None:
    token = handed_off(fp, lease="1s", timeout="1m")

    def work(run: Run) -> None:
        time.sleep(1.5)
        run.check()
        fp.cancel(RUN)
        with contextlib.suppress(TimeoutError):
            wait_for(lambda: run._course.cancelled, patience=5.0)
        run.check()

    assert fp.take_over(RUN, work, token=token).status == "cancelled"


def test_an_error_where_it_was_taken_over_is_tried_again_by_policy(url: str) -> None:
    def broken(run: Run) -> None:
        raise ValueError("no rows")

    with Fencepost(url) as fp:
        token = handed_off(fp, retry=Retry(3, base="1h", jitter=False))
    with Fencepost(url) as stranger:
        outcome = stranger.take_over(RUN, broken, token=token)
        assert (outcome.status, outcome.reason) == ("failed", "waiting_retry")
        assert record(stranger).error == "ValueError: no rows"


def test_the_asyncio_face_takes_over_too(url: str) -> None:
    async def work(run: AsyncRun) -> int:
        await run.save(1)
        return run.token

    async def main() -> None:
        async with AsyncFencepost(url) as afp:
            afp.job("job")(hand_over)
            outcome = await afp.trigger("job", SLOT)
            await afp.beat(RUN, token=outcome.token, done=1)
            taken = await afp.take_over(RUN, work, token=outcome.token)
            assert (taken.status, taken.result) == ("succeeded", outcome.token)
            assert await afp.complete(RUN, token=outcome.token) == taken

    asyncio.run(main())


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ({"status": "done"}, Misuse),
        ({"result": object()}, BadValue),
        ({"token": "7"}, Misuse),
        ({"token": True}, Misuse),
    ],
)
def test_a_completion_that_cannot_be_recorded_is_refused(
    fp: Fencepost, words: dict[str, Any], error: type[Exception]
) -> None:
    token = handed_off(fp)
    with pytest.raises(error):
        fp.complete(RUN, **{"token": token, **words})
    assert record(fp).state is State.RUNNING


def test_a_run_that_is_not_there_is_unknown(fp: Fencepost) -> None:
    with pytest.raises(UnknownRun):
        fp.complete(RUN, token=1)


def test_who_takes_over_gives_up_when_the_lease_would_have_lapsed() -> None:
    asked: list[float] = []

    class Away:
        """A ledger that answers once, and never again; and a world in which waiting is free."""

        clocks = SettableClocks()
        planner = None

        async def begin(self, *_: object, **__: object) -> list[Found]:
            return [Found.FIRST]

        async def hand_over(self, *_: object, **__: object) -> None:
            asked.append(self.clocks.boottime())
            assert len(asked) < 1000, "it asks for ever"
            raise StoreUnavailable("away")

        async def sleep(self, seconds: float) -> None:
            self.clocks.advance(seconds)

        def nonce(self) -> str:
            return "nonce"

    away: Any = Away()
    key = parsed(RUN)
    run = RunRecord(key, State.RUNNING, "job")
    held = Held(run, Attempt(key, 7, "nonce", "job", "other"), Policy(lease=30.0))
    with pytest.raises(StoreUnavailable):
        finish(take(Doors(away, away), held))
    assert 29 < asked[-1] - asked[0] < 32


def test_a_beat_asks_for_one_job_and_not_for_all(
    fp: Fencepost, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = handed_off(fp)
    other = Fencepost(fp._holding.source)
    monkeypatch.setattr(type(other._working.ledger), "jobs", None)
    with other:
        other.beat(RUN, token=token)
        assert other.complete(RUN, token=token).status == "succeeded"
