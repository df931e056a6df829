"""Orders to stop that meet: signals are counted, and ``fp.stop()`` is none."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from schedlab import until, url_of
from stoplab import AT_ONCE, FACES, GRACE, MORE, locked, only_run, owed, resumed, stopped

from fencepost import Fencepost, stopping
from fencepost.model.run import State
from fencepost.stopping import Signals

if TYPE_CHECKING:
    from pathlib import Path

    from stoplab import Stopped

BOTH = ["blocking", "aio"]
LONG = 600.0


def ordered(one: Stopped, grace: float) -> None:
    """Have the program stop its instance, and wait until it has."""
    before = len(one.marks("ordered"))
    one.order(grace)
    until(lambda: len(one.marks("ordered")) > before)


def heard(folder: Path) -> None:
    """Wait until the order of the first signal is on record."""
    until(lambda: only_run(folder).reason == "stopping")


def ended_by_itself(one: Stopped, folder: Path) -> None:
    """Prove that a body that hears nothing came to its end, and its process after it."""
    one.took()
    assert "cut" not in one.said()
    run = only_run(folder)
    assert (run.state, run.result, run.starts) == (State.SUCCEEDED, '"late"', 1)


@pytest.mark.parametrize("face", BOTH)
def test_the_first_signal_after_the_program_stopped_its_instance_cuts_nothing(
    tmp_path: Path, face: str
) -> None:
    owed(tmp_path)
    with stopped(tmp_path, face, grace=0, seconds=4) as one:
        one.begin()
        ordered(one, 60)
        one.ask()
        ended_by_itself(one, tmp_path)


@pytest.mark.parametrize("face", BOTH)
def test_the_first_signal_gives_its_grace_also_to_who_had_less_before(
    tmp_path: Path, face: str
) -> None:
    owed(tmp_path)
    with stopped(tmp_path, face, grace=60, seconds=6) as one:
        one.begin()
        ordered(one, 3)
        one.ask()
        ended_by_itself(one, tmp_path)


@pytest.mark.parametrize("face", BOTH)
def test_the_program_may_lengthen_the_stop_that_a_signal_ordered(tmp_path: Path, face: str) -> None:
    owed(tmp_path)
    with stopped(tmp_path, face, grace=GRACE, seconds=GRACE + 4) as one:
        one.begin()
        one.ask()
        heard(tmp_path)
        ordered(one, 60)
        ended_by_itself(one, tmp_path)


@pytest.mark.parametrize("face", BOTH)
def test_a_stop_that_was_lengthened_is_a_bound_as_well(tmp_path: Path, face: str) -> None:
    owed(tmp_path)
    with stopped(tmp_path, face, grace=1) as one:
        one.begin()
        one.ask()
        heard(tmp_path)
        ordered(one, 3)
        at = one.marks("ordered")[-1]
        one.took()
        took = time.clock_gettime(time.CLOCK_BOOTTIME) - at
        assert 2.9 < took < 3 + MORE
        assert one.told("cut")


@pytest.mark.parametrize("face", BOTH)
def test_the_second_signal_ends_a_process_at_once_whatever_its_program_orders(
    tmp_path: Path, face: str
) -> None:
    owed(tmp_path)
    with stopped(tmp_path, face, grace=0) as one:
        one.begin()
        ordered(one, LONG)
        one.ask()
        heard(tmp_path)
        ordered(one, LONG)
        seen = len(one.marks("lives"))
        until(lambda: len(one.marks("lives")) > seen + 50)  # for longer than the grace of 0
        one.order(LONG)  # which may come just before, or just after
        one.ask(signal.SIGINT)
        assert one.took() < AT_ONCE
    run = resumed(tmp_path)
    assert (run.state, run.losses, run.releases) == (State.SUCCEEDED, 0, 1)


@pytest.mark.parametrize("face", FACES)
def test_a_handler_of_alarms_that_is_cut_is_told(tmp_path: Path, face: str) -> None:
    with Fencepost(url_of(tmp_path)) as fp:
        fp.alarms.set("ring", "key", in_="0s")
    with stopped(tmp_path, face, body="alarm", grace=0.5) as one:
        one.begin()
        one.ask()
        assert one.took() < 0.5 + MORE
        assert "a loss of it is counted" in one.told("alarm_cut", "job=ring run_id=ring/key#")
    with Fencepost(url_of(tmp_path)) as fp:
        fired: list[int] = []
        fp.alarm("ring")(lambda alarm: fired.append(alarm.generation))
        until(lambda: fp.alarms.run_due() and fired)


@pytest.mark.parametrize("face", BOTH)
def test_an_end_of_an_alarm_that_could_not_be_recorded_is_told(tmp_path: Path, face: str) -> None:
    with Fencepost(url_of(tmp_path)) as fp:
        fp.alarms.set("ring", "key", in_="0s")
    with stopped(tmp_path, face, body="alarm", handler="waits") as one:
        one.begin()
        with locked(tmp_path / "ledger.db"):
            (tmp_path / "go").touch()
            until(lambda: one.marks("returns"))
            one.ask()
            assert one.took() < GRACE + MORE
            told = one.told("alarm_unrecorded", "job=ring run_id=ring/key#")
            assert "ended=succeeded" in told


@pytest.mark.parametrize("face", BOTH)
def test_no_loss_is_foretold_where_only_the_reply_was_lost(tmp_path: Path, face: str) -> None:
    owed(tmp_path)
    with stopped(tmp_path, face, grace=1, **{"replies are lost": True}) as one:
        one.begin()
        one.ask()
        assert one.took() < 1 + MORE
        assert "may be counted as lost" in one.told("cut")
    run = resumed(tmp_path)
    assert (run.state, run.losses, run.releases) == (State.SUCCEEDED, 0, 1)


# The thread that ends the process, without an instance.


class _Crew:
    """A crew that has nothing to do."""

    def __init__(self) -> None:
        self.pid, self.grace = os.getpid(), 0.0
        self.recall_at: float | None = None
        self.orders: list[float] = []
        self.stopping = False

    def stop(self, grace: float, **_: object) -> None:
        self.orders.append(grace)
        self.stopping = True


def alone(crew: _Crew) -> Signals:
    """Return who listens for a crew, with no instance around it."""
    world = SimpleNamespace(clocks=SimpleNamespace(boottime=time.monotonic))
    working = SimpleNamespace(courses={})
    scheduling = SimpleNamespace(world=world, working=working, emit=lambda event: None)
    return Signals(cast("Any", scheduling), cast("Any", crew), None)


def test_a_good_end_is_not_followed_by_the_end_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exits: list[int] = []
    late, closed, over = threading.Event(), threading.Event(), threading.Event()
    end = Signals._end

    def end_too_late(self: Signals) -> None:
        """Be so slow that the instance has closed meanwhile."""
        late.set()
        assert closed.wait(30)
        try:
            end(self)
        finally:
            over.set()

    monkeypatch.setattr(Signals, "_end", end_too_late)
    monkeypatch.setattr(os, "_exit", exits.append)
    listener = alone(_Crew())
    listener.listen()
    os.kill(os.getpid(), signal.SIGTERM)
    assert late.wait(30)
    listener.close(busy=False)
    closed.set()
    assert over.wait(30)
    assert exits == []


def test_a_signal_of_which_its_handler_tells_first_is_one_signal() -> None:
    crew = _Crew()
    crew.grace = LONG
    listener = alone(crew)
    listener.listen()
    try:
        assert listener._pipe is not None
        tell = listener._pipe[1].send
        number = int(signal.SIGTERM)
        tell(bytes([number + stopping._HANDLED, number]))  # another thread was the interrupted one
        tell(bytes([signal.SIGINT]))
        until(lambda: crew.orders[-1:] == [0.0])
        assert crew.orders == [LONG, 0.0]
    finally:
        listener.close(busy=False)
