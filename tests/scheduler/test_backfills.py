"""Making up for the past: what is said to be done is done, once, and never in the way."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from schedlab import (
    NOON,
    Member,
    Noon,
    books_of,
    effects,
    members,
    repeated,
    serving,
    unproven,
    until,
    url_of,
)

from fencepost import BadSchedule, BadSlot, EveryAfter, Fencepost, Misuse
from fencepost.model.run import State

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fencepost import Run
    from fencepost.scheduling import Progress

HOUR = 3600


class Past:
    def __init__(self, folder: Path) -> None:
        self.clocks, self.url = Noon(), url_of(folder)
        self.fp = Fencepost(self.url, clocks=self.clocks)
        self.ran: list[int] = []
        self.bad: set[int] = set()

        @self.fp.job("job", every="1h")
        def job(run: Run) -> None:
            hour = (int(run.slot.timestamp()) - NOON) // HOUR
            self.ran.append(hour)
            if hour in self.bad:
                raise ValueError(hour)

    def hours(self, first: int, until: int, **words: Any) -> Any:
        return self.fp.backfill("job", NOON + first * HOUR, NOON + until * HOUR, **words)


@pytest.fixture
def past(tmp_path: Path) -> Iterator[Past]:
    past = Past(tmp_path)
    yield past
    past.fp.close()


def test_a_range_is_half_open_and_made_up_oldest_first(past: Past) -> None:
    lane = past.hours(-4, -1)
    assert past.ran == [-4, -3, -2]
    assert lane.ended_at
    runs = past.fp.slots("job").runs
    assert {run.trigger for run in runs} == {"backfill"}
    assert [run.state for run in runs] == [State.SUCCEEDED] * 3


def test_a_dry_run_says_which_and_runs_nothing(past: Past) -> None:
    keys = past.hours(-3, 0, dry_run=True)
    assert [(key.slot - NOON) // HOUR for key in keys] == [-3, -2, -1]
    assert past.ran == []
    assert past.fp.slots("job").runs == []
    assert [key.slot for key in past.hours(-3, 0, dry_run=True, order="newest")] == [
        key.slot for key in reversed(keys)
    ]


def test_what_is_there_is_left_repeated_if_it_failed_or_repeated_in_any_case(past: Past) -> None:
    past.bad = {-2}
    past.hours(-3, 0)
    past.ran.clear()
    past.bad = set()
    past.hours(-4, 0)
    assert past.ran == [-4]
    past.ran.clear()
    again = past.hours(-4, 0, existing="failed", dry_run=True)
    assert [((key.slot - NOON) // HOUR, key.rerun) for key in again] == [(-2, 1)]
    past.hours(-4, 0, existing="failed")
    assert past.ran == [-2]
    past.ran.clear()
    past.hours(-3, -1, existing="all")
    assert past.ran == [-3, -2]
    reruns = [run.key.rerun for run in past.fp.slots("job").runs if run.key.slot == NOON - 2 * HOUR]
    assert reruns == [0, 1, 2]


@pytest.mark.parametrize(
    ("where", "isolation"), [("sqlite", None), ("sqlite", "transaction"), ("memory", None)]
)
def test_what_failed_half_way_goes_on_and_only_what_repeats_all_has_its_effects_anew(
    tmp_path: Path, where: str, isolation: str | None
) -> None:
    url = url_of(tmp_path) if where == "sqlite" else "memory://"
    done: list[tuple[str, int]] = []
    keys: list[tuple[str, str]] = []
    bad = True
    space = "default" if where == "sqlite" else tmp_path.name
    with Fencepost(url, clocks=Noon(), namespace=space) as fp:

        @fp.job("job", every="1h")
        def job(run: Run) -> None:
            keys.append((run.headers()["Idempotency-Key"], run.key_of(1)))
            for item in range(3):
                if isolation is None:
                    with run.once(item) as first:
                        go = bool(first)
                else:
                    with run.transaction() as tx:
                        go = tx.once(item, scope="slot")
                if go:
                    done.append((run.id, item))
                if item == 1 and bad:
                    raise ValueError(item)

        slot = "job@2026-01-05T11:00:00Z"
        span = (NOON - HOUR, NOON)
        fp.backfill("job", *span)
        fp.backfill("job", *span, existing="failed")
        bad = False
        fp.backfill("job", *span, existing="failed")
        assert done == [(slot, 0), (slot, 1), (f"{slot}~2", 2)]
        assert keys == [(slot, f"{slot}/1")] * 3
        done.clear()
        keys.clear()
        bad = True
        fp.backfill("job", *span, existing="all")
        bad = False
        fp.backfill("job", *span, existing="failed")
        assert done == [(f"{slot}~3", 0), (f"{slot}~3", 1), (f"{slot}~4", 2)]
        assert keys == [(f"{slot}~3", f"{slot}~3/1")] * 2
        triggers = [run.trigger for run in fp.slots("job").runs]
        assert triggers == ["backfill"] * 3 + ["backfill_all", "backfill"]
    assert where == "memory" or unproven(tmp_path) == []


def test_a_repeat_that_is_handed_off_goes_on_with_the_same_items(past: Past) -> None:
    fp, done, handed = past.fp, [], []

    @fp.job("afar", every="1h")
    def afar(run: Run) -> None:
        handed.append((run.id, run.token))
        run.hand_over()

    def body(run: Run) -> None:
        with run.once("mail") as first:
            if first:
                done.append(run.key_of())
        raise ValueError(run.id)

    for existing in ("skip", "failed", "all"):
        fp.backfill("afar", NOON - HOUR, NOON, existing=existing, wait=False)
        fp.tick(most=1)
        run_id, token = handed[-1]
        assert fp.take_over(run_id, body, token=token).status == "failed"
        past.clocks.advance(2)
        fp.tick(most=1)
    assert done == ["afar@2026-01-05T11:00:00Z", "afar@2026-01-05T11:00:00Z~2"]


def test_nobody_waits_for_a_job_that_is_paused(past: Past) -> None:
    past.fp.pause("job")
    with pytest.raises(Misuse, match="is paused"):
        past.hours(-2, 0)
    lane = past.hours(-2, 0, wait=False)
    past.fp.resume("job")
    assert past.hours(-2, 0).number == lane.number
    assert past.ran == [-2, -1]


def test_a_backfill_can_be_stopped(past: Past) -> None:
    lane = past.hours(-3, 0, wait=False)
    past.fp.tick(most=1)
    stopped = past.fp.stop_backfill(lane.number)
    assert stopped.ended_at
    assert "stopped by" in stopped.stopped
    past.clocks.advance(2)
    past.fp.tick()
    assert past.ran == [-3]
    assert past.fp.stop_backfill(lane.number) == stopped  # told twice: the same answer
    with pytest.raises(Misuse, match="no backfill number"):
        past.fp.stop_backfill(99)


def test_the_newest_may_go_first(past: Past) -> None:
    past.hours(-3, 0, order="newest")
    assert past.ran == [-1, -2, -3]


def test_progress_is_told_and_a_failure_stops_nothing(past: Past) -> None:
    past.bad = {-2}
    seen: list[Progress] = []
    past.hours(-3, 0, progress=seen.append)
    assert past.ran == [-3, -2, -1]
    assert [step.outcome.status for step in seen if step.outcome is not None] == [
        "succeeded",
        "failed",
        "succeeded",
    ]
    assert (seen[-1].done, seen[-1].total) == (3, 3)


def test_what_was_missed_as_a_range_can_be_made_up(past: Past) -> None:
    past.fp.tick()
    past.clocks.advance(4 * HOUR)
    past.fp.tick()
    assert past.ran == [4]
    past.hours(0, 5, existing="failed")
    assert past.ran == [4, 0, 1, 2, 3]


def test_words_that_cannot_be_are_refused(past: Past) -> None:
    for wrong in (
        {"existing": "some"},
        {"order": "random"},
        {"max_active": 0},
        {"max_active": True},
    ):
        with pytest.raises(Misuse):
            past.hours(-2, 0, **wrong)
    with pytest.raises(BadSlot):
        past.hours(0, 0)
    past.fp.job("after", every=EveryAfter("1h"))(lambda: None)
    with pytest.raises(BadSchedule):
        past.fp.backfill("after", NOON - HOUR, NOON)


def test_the_future_is_not_made_up(past: Past) -> None:
    past.hours(-1, 10)
    assert past.ran == [-1, 0]


def test_no_more_than_were_asked_for_are_active_at_once(tmp_path: Path) -> None:
    clocks, inside, most, turn = Noon(), 0, 0, threading.Lock()
    leave = threading.Event()
    with Fencepost(url_of(tmp_path), clocks=clocks) as fp:

        @fp.job("job", every="1h", overlap="allow", max_concurrent=8)
        def job() -> None:
            nonlocal inside, most
            with turn:
                inside += 1
                most = max(most, inside)
            leave.wait(0.05)
            with turn:
                inside -= 1

        fp.backfill("job", NOON - 9 * HOUR, NOON, max_active=2, wait=False)
        with serving(fp):
            until(lambda: len(fp.runs("job")) >= 9)
        assert len(fp.slots("job").runs) == 9
    assert most == 2


def test_a_live_slot_waits_for_a_backfill_and_is_never_skipped_for_it(tmp_path: Path) -> None:
    clocks, inside, leave = Noon(), threading.Event(), threading.Event()
    ran: list[str] = []
    one, two = (Fencepost(url_of(tmp_path), clocks=clocks) for _ in range(2))
    with one, two:

        def body(run: Run) -> None:
            ran.append(run.id)
            if run.slot.timestamp() < NOON:
                inside.set()
                assert leave.wait(30)

        for fp in (one, two):
            fp.job("job", every="1h", lease="5h")(body)
            fp.tick()
        back = threading.Thread(target=lambda: one.backfill("job", NOON - 2 * HOUR, NOON))
        back.start()
        assert inside.wait(30)
        clocks.advance(HOUR)
        assert two.tick() == []
        live = next(run for run in two.slots("job").runs if run.key.slot == NOON + HOUR)
        assert (live.state, live.reason) == (State.PENDING, "lock_held")
        leave.set()

        def looked() -> bool:
            clocks.advance(1)
            two.tick()
            return len(ran) >= 3

        until(looked)
        back.join(30)
        assert not back.is_alive()
    assert sorted(ran[1:]) == sorted(set(ran[1:]))
    assert ran[1].endswith("13:00:00Z")  # the live one went before the rest of the past


@pytest.mark.parametrize("kills", [2])
def test_a_backfill_that_was_killed_goes_on_where_it_was(tmp_path: Path, kills: int) -> None:
    words = {"start": NOON - 30 * HOUR, "end": NOON, "pace": 0.1}
    with members() as fleet:
        for kill in range(kills):
            fleet.append(Member(tmp_path, "backfill", **words))
            until(lambda kill=kill: len(effects(tmp_path)) >= 5 * (kill + 1))  # type: ignore[misc]
            fleet[-1].kill()
        fleet.append(Member(tmp_path, "backfill", **{**words, "pace": 0.0}))
        assert fleet[-1].ended() == 0
    books, done = books_of(tmp_path), effects(tmp_path)
    assert repeated(books, done) == []
    assert unproven(tmp_path) == []
    assert [run.state for run in books.runs] == [State.SUCCEEDED] * 30
    assert sum(run.losses for run in books.runs) <= kills
    first = list(dict.fromkeys(effect.slot for effect in done))
    assert first == sorted(first)  # oldest first, through all of it
