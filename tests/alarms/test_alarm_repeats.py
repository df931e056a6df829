"""Whoever never heard an answer asks again, and is told what became of the first request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from alarmlab import CLOCKS, Opened, book_by

from fencepost.errors import AlarmChanged
from fencepost.model.alarm import RELEASED, AlarmState, Became, Failure
from fencepost.model.alarm_policy import AlarmPolicy
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fencepost.testing.clock import SettableClocks

ERROR = Failure("errors", 10.0, error="Oops: it broke")


@pytest.fixture(params=CLOCKS)
def clocks(request: pytest.FixtureRequest) -> Iterator[SettableClocks]:
    clocks = CLOCKS[request.param]()
    yield clocks
    if hasattr(clocks, "close"):
        clocks.close()


@pytest.fixture
def opened(clocks: SettableClocks, tmp_path: Path) -> Iterator[Opened]:
    opened = book_by(clocks, tmp_path)
    yield opened
    opened.close()


@pytest.mark.parametrize("failure", [ERROR, ERROR._replace(dead="exhausted"), RELEASED])
def test_a_failure_that_is_told_twice_is_recorded_once(opened: Opened, failure: Failure) -> None:
    opened.set()
    firing = opened.fired()
    first = finish(opened.book.fail(firing, failure))
    assert first.became is (Became.DEAD if failure.dead else Became.AGAIN)
    assert finish(opened.book.fail(firing, failure)) == first
    assert opened.get() == first.record


def test_a_failure_of_who_was_taken_for_dead_is_not_taken_for_the_loss(
    opened: Opened, clocks: SettableClocks
) -> None:
    opened.set()
    opened.fired()
    clocks.advance(31.0)
    zombie = opened.fired()
    clocks.advance(31.0)
    assert opened.claim(AlarmPolicy(loss_pause=60.0)).lost == 1
    assert opened.get().state is AlarmState.ARMED
    assert finish(opened.book.fail(zombie, ERROR)).became is Became.LOST
    record = opened.get()
    assert (record.errors, record.losses, record.stale) == (0, 2, 1)


def test_a_clear_that_is_asked_for_twice_finds_its_tombstone(opened: Opened) -> None:
    generation = opened.set()
    first = finish(opened.book.clear("k", "a", if_generation=generation))
    assert first is not None
    assert finish(opened.book.clear("k", "a", if_generation=generation)) == first


def test_a_clear_of_an_old_generation_is_refused_once_it_was_set_again(opened: Opened) -> None:
    generation = opened.set()
    finish(opened.book.clear("k", "a", if_generation=generation))
    opened.set()
    with pytest.raises(AlarmChanged):
        finish(opened.book.clear("k", "a", if_generation=generation))
