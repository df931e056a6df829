"""A range never covers a slot that ran, and one backfill that is asked for twice is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from schedlab import url_of

from fencepost import Fencepost
from fencepost.ledger.planning import Lane
from fencepost.testing.clock import SettableClocks
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MINUTE = 60


@pytest.fixture(params=["sqlite", "memory"])
def served(
    tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[Fencepost, SettableClocks]]:
    clocks = SettableClocks()
    clocks.advance(MINUTE + 5 - clocks.wall() % MINUTE)  # no minute ends while the test runs
    url = url_of(tmp_path) if request.param == "sqlite" else f"memory://{tmp_path.name}"
    with Fencepost(url, clocks=clocks) as fp:
        fp.job("job", every="1m", lease="30s")(lambda: None)
        fp.tick()
        yield fp, clocks


def test_two_pauses_with_a_run_between_them_are_two_ranges(
    served: tuple[Fencepost, SettableClocks],
) -> None:
    fp, clocks = served
    for _ in range(2):
        fp.pause("job")
        for _ in range(2):  # what goes on where the last range ended makes that longer
            clocks.advance(2 * MINUTE)
            fp.tick()
        fp.resume("job")
        clocks.advance(MINUTE)
        assert fp.tick()
    found = fp.slots("job")
    assert len(found.runs) == 2
    assert [(one.span.last - one.span.first) // MINUTE for one in found.spans] == [3, 3]
    assert not [
        run
        for run in found.runs
        for one in found.spans
        if one.span.first <= run.key.slot <= one.span.last
    ]


def test_a_backfill_up_to_now_that_is_asked_for_again_later_goes_on(
    served: tuple[Fencepost, SettableClocks],
) -> None:
    fp, clocks = served
    start, end = clocks.wall() - 10 * MINUTE, clocks.wall() + 3600
    first = fp.backfill("job", start, end, existing="all", wait=False)
    clocks.advance(5 * MINUTE)
    second = fp.backfill("job", start, end, existing="all", wait=False)
    assert isinstance(first, Lane)
    assert isinstance(second, Lane)
    assert first.number == second.number
    assert len(finish(fp._scheduling.planner.lanes())) == 1
    other = fp.backfill("job", start, end, existing="failed", wait=False)
    assert isinstance(other, Lane)
    assert other.number != first.number
