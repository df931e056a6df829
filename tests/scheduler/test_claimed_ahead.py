"""What was claimed before a thread was free begins in time, or is given back without blame."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from schedlab import Heard, Noon, claims_ahead, serving, until, url_of

from fencepost import Fencepost
from fencepost.hands import Hands
from fencepost.ledger.planning import Ask
from fencepost.model.run import State
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from fencepost import Run


def test_what_has_waited_for_a_thread_for_too_long_is_given_back_without_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims_ahead(monkeypatch)
    heard = Heard()
    began, leave = threading.Event(), threading.Event()
    with Fencepost(url_of(tmp_path), on_event=heard) as fp:

        @fp.job("long", every="1s", lease="30s")
        def long() -> None:
            began.set()
            leave.wait(30)

        @fp.job("waits", every="1s", lease="2s")
        def waits(run: Run) -> int:
            return run.token

        with serving(fp, concurrency=1):
            until(began.is_set)
            until(lambda: [run for run in fp.runs("waits") if run.releases])
            leave.set()
            until(lambda: [run for run in fp.runs("waits") if run.state is State.SUCCEEDED])
        runs = fp.runs("waits", limit=1000)
    assert not any(run.losses for run in runs)
    assert all(run.state in (State.SUCCEEDED, State.SKIPPED, State.PENDING) for run in runs)
    told = [event for event in heard.about("released") if event.job == "waits"]
    assert dict(told[0].more) == {"reason": "no thread was free"}


def test_a_stop_gives_back_at_once_what_waits_for_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims_ahead(monkeypatch)
    began, leave = threading.Event(), threading.Event()
    with Fencepost(url_of(tmp_path)) as fp:

        @fp.job("long", every="1s")
        def long() -> None:
            began.set()
            leave.wait(30)

        fp.job("waits", every="1s")(lambda: None)
        with serving(fp, concurrency=1):
            until(began.is_set)
            until(lambda: [run for run in fp.runs("waits") if run.state is State.RUNNING])
            fp.stop(grace=30)
            until(lambda: [run for run in fp.runs("waits") if run.reason == "released"])
            leave.set()


def test_what_a_loss_would_end_is_not_claimed_before_a_thread_is_free(tmp_path: Path) -> None:
    clocks = Noon()
    with Fencepost(url_of(tmp_path), clocks=clocks) as fp:
        fp.job("fragile", every="1m", on_loss="fail")(lambda: None)
        fp.job("sturdy", every="1m")(lambda: None)
        assert fp.tick() == []
        clocks.advance(60)
        want, planner = fp._scheduling.serving.want, fp._scheduling.planner
        begun = []
        for number, free in enumerate((0, 0, 1)):
            ticked = finish(planner.tick(Ask(want, f"{number:024x}", 4, sweep=True, free=free)))
            begun += [(free, one.template) for one in ticked.begun]
    assert sorted(begun) == [(0, "sturdy"), (1, "fragile")]


def test_work_that_is_withdrawn_is_never_carried_out() -> None:
    began, leave, ended = threading.Event(), threading.Event(), threading.Event()
    done: list[int] = []

    def carry_out(work: int) -> None:
        began.set()
        assert leave.wait(30)
        done.append(work)
        if work == 4:
            ended.set()

    hands = Hands(1, carry_out, lambda: None)
    for number in range(5):
        hands.give("kind", number)
        assert began.wait(30)
    assert hands.withdraw(lambda work: work in (0, 1, 3)) == ([1, 3], [2, 4])
    leave.set()
    assert ended.wait(30)
    hands.dismiss()
    assert done == [0, 2, 4]
