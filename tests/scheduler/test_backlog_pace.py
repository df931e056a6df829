"""A backlog is made up as quickly as its runs end, also by instances with room for one only."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from schedlab import serving, until, url_of

from fencepost import Fencepost
from fencepost.testing.clock import SettableClocks

if TYPE_CHECKING:
    from pathlib import Path

    from fencepost import Run


def test_whoever_ends_a_run_begins_the_next_of_a_backlog(tmp_path: Path) -> None:
    clocks = SettableClocks()
    began: list[float] = []

    def body(_: Run) -> None:
        began.append(time.monotonic())
        time.sleep(0.4)  # so long that nothing is claimed ahead, and that the other looks

    one, other = (Fencepost(url_of(tmp_path), clocks=clocks) for _ in range(2))
    with one, other:
        for fp in (one, other):
            fp.job("job", every="1m", catchup="all")(body)
        one.tick()
        clocks.advance(6 * 60)
        with serving(one, concurrency=1), serving(other, concurrency=1):
            until(lambda: len(began) >= 6)
    # A second for each is what they take that wait for the next look instead.
    assert began[5] - began[0] < 4.0, [round(at - began[0], 2) for at in began]
