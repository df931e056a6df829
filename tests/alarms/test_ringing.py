"""An instance that runs fires what comes due, whatever it found when it looked before."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from alarmlab import running

from fencepost import Fencepost
from fencepost.alarming import WORKERS
from fencepost.ledger.planning import LOOK
from fencepost.model.alarm_policy import lease_of
from holder import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fencepost import Alarm


@pytest.fixture
def fp(tmp_path: Path) -> Iterator[Fencepost]:
    with Fencepost(f"sqlite:///{tmp_path}/ledger.db") as fp:
        yield fp


def test_a_look_that_found_nothing_to_claim_is_not_the_last(fp: Fencepost) -> None:
    fired = threading.Event()
    fp.alarm("k")(fired.set)
    with fp.lock(lease_of("k", "busy")):
        fp.alarms.set("k", "busy", in_=0)
        with running(fp):
            until(lambda: postponed(fp, "busy"))
            fp.alarms.set("k", "free", in_=0)
            assert fired.wait(10)


def test_one_call_fires_what_is_due_behind_those_that_cannot_be_had(fp: Fencepost) -> None:
    seen = []
    fp.alarm("k")(lambda alarm: seen.append(alarm.key))
    with fp.lock(lease_of("k", "a")), fp.lock(lease_of("k", "b")):
        for key in "abc":
            fp.alarms.set("k", key, in_=0)
        assert fp.alarms.run_due().fired == 1
    assert seen == ["c"]


def postponed(fp: Fencepost, key: str) -> bool:
    view = fp.alarms.get("k", key)
    return view is not None and view.next is not None and view.next > view.due


def test_a_slow_handler_holds_up_nothing_that_comes_due_later(fp: Fencepost) -> None:
    begun, fired, over = threading.Event(), threading.Event(), threading.Event()

    @fp.alarm("k")
    def handle(alarm: Alarm) -> None:
        if alarm.key == "slow":
            begun.set()
            assert over.wait(20)
        else:
            fired.set()

    fp.alarms.set("k", "slow", in_=0)
    with running(fp):
        assert begun.wait(10)
        fp.alarms.set("k", "later", in_=0)
        try:
            assert fired.wait(10)
        finally:
            over.set()


def test_whoever_stops_leaves_the_rest_of_what_is_due_to_others(fp: Fencepost) -> None:
    begun, over = threading.Event(), threading.Event()

    @fp.alarm("k")
    def handle() -> None:
        begun.set()
        assert over.wait(20)

    for number in range(100):
        fp.alarms.set("k", str(number), in_=0)
    with running(fp):
        assert begun.wait(10)
        fp.stop(grace=10)
        over.set()
    assert len(fp.alarms.list()) >= 50


def test_no_more_handlers_run_at_once_than_before_however_many_come_due(fp: Fencepost) -> None:
    begun, over = threading.Semaphore(0), threading.Event()

    @fp.alarm("k")
    def handle() -> None:
        begun.release()
        assert over.wait(20)

    with running(fp):
        try:
            for number in range(WORKERS):
                fp.alarms.set("k", str(number), in_=0)
                assert begun.acquire(timeout=10)
            for number in range(WORKERS, WORKERS + 8):
                fp.alarms.set("k", str(number), in_=0)
            assert not begun.acquire(timeout=2 * LOOK)
        finally:
            over.set()
        for _ in range(8):
            assert begun.acquire(timeout=10)
