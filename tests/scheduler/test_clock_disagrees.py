"""An instance whose clock is wrong decides nothing and says so; all that agree go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from schedlab import (
    Heard,
    Member,
    books_of,
    complaints,
    effects,
    members,
    repeated,
    serving,
    told,
    unproven,
    until,
    url_of,
)

from fencepost import Fencepost
from fencepost.ledger.retention import KEPT_FOR, KEPT_RUNS
from fencepost.testing.clock import SettableClocks
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def disagreeing(folder: Path) -> set[int]:
    return {event["pid"] for event in told(folder) if event["what"] == "clock_disagrees"}


@pytest.mark.parametrize("off", [600, -600])
def test_a_process_whose_clock_is_off_decides_nothing_and_the_others_go_on(
    tmp_path: Path, off: int
) -> None:
    with members() as fleet:
        fleet += [Member(tmp_path, "clocked") for _ in range(2)]
        until(lambda: effects(tmp_path))
        wrong = Member(tmp_path, "clocked", off=off, knows=True)
        fleet.append(wrong)
        until(lambda: wrong.pid in disagreeing(tmp_path))
        seen = len(effects(tmp_path))
        until(lambda: len(effects(tmp_path)) >= seen + 3)
        for member in fleet:
            member.ask_to_stop()
        assert [member.ended() for member in fleet] == [0, 0, 0]
    books, done = books_of(tmp_path), effects(tmp_path)
    assert {effect.pid for effect in done} <= {member.pid for member in fleet[:2]}
    assert disagreeing(tmp_path) == {wrong.pid}
    assert repeated(books, done) == []
    assert unproven(tmp_path) == []
    assert complaints(books, reasons={"coalesced", "lock_held"}) == []
    # A job that only the wrong one knows begins at the time of the others.
    marks = {job.job: job.watermark for job in books.jobs}
    assert abs(marks["other"] - marks["job"]) < 60
    # And it took nobody for gone.
    assert not [event for event in told(tmp_path) if event["what"] in ("orphaned", "edited")]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[tuple[SettableClocks, Fencepost, Fencepost, Heard]]:
    clocks, heard = SettableClocks(), Heard()
    one = Fencepost(url_of(tmp_path), clocks=clocks, on_event=heard)
    two = Fencepost(url_of(tmp_path), clocks=clocks)
    for fp in (one, two):
        fp.job("job", every="1s")(lambda: None)
    yield clocks, one, two, heard
    one.close()
    two.close()


def test_a_step_that_all_agree_about_is_believed_once_nobody_confirms_the_old_time(
    machine: tuple[SettableClocks, Fencepost, Fencepost, Heard],
) -> None:
    clocks, one, two, heard = machine
    one.tick()
    until(one.tick)
    clocks.step_wall(600)
    assert one.tick() == two.tick() == []
    assert "clock_disagrees" in heard.names()
    (event, *_) = heard.about("clock_disagrees")
    assert dict(event.more)["off"] == "+600.0s"
    clocks.advance(14)
    assert one.tick() == []
    clocks.advance(2)
    assert one.tick()  # nobody has confirmed the old time for longer than 15 s
    assert two.tick() is not None
    before = len(heard.about("clock_disagrees"))
    until(lambda: one.tick() or two.tick())
    assert len(heard.about("clock_disagrees")) == before


class Ahead(SettableClocks):
    """Clocks of the same machine, but for a wall clock that is ahead."""

    def __init__(self, clocks: SettableClocks, by: float) -> None:
        super().__init__()
        self._clocks, self._by = clocks, by

    def wall(self) -> float:
        return self._clocks.wall() + self._by

    def boottime(self) -> float:
        return self._clocks.boottime()

    def era(self) -> str | None:
        return self._clocks.era()


def test_an_instance_whose_clock_is_ahead_forgets_nothing(tmp_path: Path) -> None:
    clocks = SettableClocks()
    right = Fencepost(url_of(tmp_path), clocks=clocks)
    right.job("job", every="1m", catchup="all")(lambda: None)
    right.tick()
    for _ in range(KEPT_RUNS + 2):
        clocks.advance(60)
        right.tick()
    runs = right.runs("job", limit=1_000)
    wrong = Fencepost(url_of(tmp_path), clocks=Ahead(clocks, 2 * KEPT_FOR))
    assert finish(wrong._scheduling.planner.prune(most=500)) == 0
    assert right.runs("job", limit=1_000) == runs
    clocks.advance(2 * KEPT_FOR)  # and once it is as late as that, it does
    assert finish(right._scheduling.planner.prune(most=500)) > 0
    wrong.close()
    right.close()


def test_an_instance_whose_clock_is_ahead_fires_no_alarm_early(tmp_path: Path) -> None:
    clocks, fired = SettableClocks(), list[str]()
    right = Fencepost(url_of(tmp_path), clocks=clocks)
    wrong = Fencepost(url_of(tmp_path), clocks=Ahead(clocks, 7200.0))
    right.alarm("kind")(lambda _: fired.append("right"))
    wrong.alarm("kind")(lambda _: fired.append("wrong"))
    right.alarms.set("kind", key="x", at=clocks.wall() + 3600)
    right.job("job", every="1m")(lambda: None)
    right.tick()
    wrong.alarms.run_due()
    assert fired == []
    clocks.advance(3601)
    right.tick()
    wrong.alarms.run_due()
    assert fired == []  # it is due, but not for this one to say
    right.alarms.run_due()
    assert fired == ["right"]
    wrong.close()
    right.close()


def test_an_instance_that_serves_tells_when_its_clock_agrees_again(tmp_path: Path) -> None:
    clocks, heard = SettableClocks(), Heard()

    def names() -> list[str]:
        return [name for name in heard.names() if name.startswith("clock")]

    with Fencepost(url_of(tmp_path), clocks=clocks, on_event=heard) as fp:
        fp.job("job", every="1s")(lambda: None)
        with serving(fp):
            until(lambda: fp.runs("job"))
            clocks.step_wall(-300)
            until(lambda: names() == ["clock_disagrees"])
            clocks.step_wall(300)
            until(lambda: names() == ["clock_disagrees", "clock_agrees"])
            seen = fp.runs("job")[0].key.slot
            until(lambda: fp.runs("job")[0].key.slot > seen)
        assert names() == ["clock_disagrees", "clock_agrees"]
