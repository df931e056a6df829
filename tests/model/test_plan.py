"""What becomes of the slots of a job that are due: decided once, in order, and all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import given, settings, strategies as st

from fencepost.model.plan import (
    WAITS,
    Agenda,
    Past,
    Plan,
    Span,
    newest_due,
    next_start,
    plan,
    starts_at,
)
from fencepost.model.rules import CatchUp, Rules
from fencepost.model.run import State
from fencepost.model.schedule import At, Cron, Every, EveryAfter

if TYPE_CHECKING:
    from fencepost.model.schedule import Schedule

MINUTE, HOUR, DAY = 60, 3600, 86400
START = 1_700_000_040  # a full minute
MINUTELY, FIVE = Every(MINUTE), Every(300, phase=START % 300)
LATEST, ALL, NONE = (Rules(word) for word in (CatchUp.LATEST, CatchUp.ALL, CatchUp.NONE))


class Counted(Every):
    """A schedule that counts how often it is asked."""

    __slots__ = ("calls",)
    calls: list[int]

    def __init__(self, interval: int) -> None:
        object.__setattr__(self, "calls", [0])
        super().__init__(interval)

    def after(self, instant: float) -> int | None:
        self.calls[0] += 1
        return super().after(instant)

    def latest(self, instant: float) -> int | None:
        self.calls[0] += 1
        return super().latest(instant)


class Decided(NamedTuple):
    """What a whole series of plans came to."""

    slots: list[int]
    spans: list[Span]
    plans: list[Plan]
    watermark: int


def planned(
    rules: Rules, *, now: float, mark: int = START, schedule: Schedule = MINUTELY, barred: str = ""
) -> Plan:
    return plan(schedule, rules, Agenda("bills", mark, barred=barred), now=now)


def carried_out(
    schedule: Schedule, rules: Rules, *, now: float, mark: int = START, most: int = 2000
) -> Decided:
    """Plan again and again at one instant, as if each slot ended at once."""
    slots: list[int] = []
    spans: list[Span] = []
    plans: list[Plan] = []
    owed = 0
    for _ in range(most):
        made = plan(schedule, rules, Agenda("bills", mark, owed), now=now)
        plans.append(made)
        spans += made.spans
        if made.slot is not None:
            slots.append(made.slot)
        if made.later is not None:
            slots += schedule.between(made.later[0], made.later[1] + 1)
        assert made.watermark >= mark
        if (made.watermark, made.slot) == (mark, None):
            return Decided(slots, spans, plans, mark)
        mark, owed = made.watermark, made.owed
    raise AssertionError("it never comes to an end")


# The newest only.


def test_nothing_is_due_before_the_next_slot() -> None:
    made = planned(LATEST, now=START + 59.9)
    assert made == Plan(None, (), START, START + 60)


def test_a_slot_on_time_is_run_and_nothing_was_missed() -> None:
    made = planned(LATEST, now=START + 60.0)
    assert made == Plan(START + 60, (), START + 60, START + 120)


def test_after_three_days_latest_runs_one_slot_and_records_one_range() -> None:
    now = START + 3 * DAY + 5
    made = planned(LATEST, now=now)
    newest = START + 3 * DAY
    into = "bills@2023-11-17T22:14:00Z"
    missed = Span(START + 60, newest - 60, State.MISSED, "coalesced", into)
    assert made == Plan(newest, (missed,), newest, newest + 60)


@pytest.mark.parametrize("rules", [LATEST, NONE, Rules(start_deadline=10.0)])
def test_a_long_outage_asks_the_schedule_no_more_often_than_a_short_one(rules: Rules) -> None:
    calls = set()
    for length in (2 * MINUTE, DAY, 3 * DAY, 3650 * DAY):
        schedule = Counted(MINUTE)
        planned(rules, now=START + length + 5.0, schedule=schedule)
        calls.add(schedule.calls[0])
    assert len(calls) == 1
    assert calls.pop() <= 8


def test_none_runs_only_what_can_start_on_time() -> None:
    on_time = planned(NONE, now=START + 600 + 30.0, schedule=FIVE)
    assert on_time.slot == START + 600
    assert [(span.reason, span.first, span.last) for span in on_time.spans] == [
        ("start_deadline", START + 300, START + 300)
    ]
    late = planned(NONE, now=START + 600 + 61.0, schedule=FIVE)
    assert late.slot is None
    assert late.spans == (Span(START + 300, START + 600, State.MISSED, "start_deadline"),)
    assert late.watermark == START + 600


@pytest.mark.parametrize("word", [CatchUp.LATEST, CatchUp.NONE])
def test_a_slot_exactly_as_late_as_its_deadline_still_runs(word: CatchUp) -> None:
    rules = Rules(word, start_deadline=20.0)
    assert planned(rules, now=START + 80.0).slot == START + 60
    assert planned(rules, now=START + 80.1).slot is None


# Every one.


def test_all_runs_every_slot_oldest_first_and_one_at_a_time() -> None:
    done = carried_out(MINUTELY, ALL, now=START + 10 * MINUTE + 1.0)
    assert done.slots == [START + MINUTE * k for k in range(1, 11)]
    assert done.spans == []
    assert done.watermark == START + 10 * MINUTE


def test_all_runs_exactly_as_many_as_its_limit_and_records_one_range() -> None:
    rules = ALL._replace(limit=7)
    done = carried_out(MINUTELY, rules, now=START + 100 * MINUTE + 1.0)
    assert done.slots == [START + MINUTE * k for k in range(94, 101)]
    assert done.spans == [Span(START + 60, START + 93 * 60, State.MISSED, "limit")]


def test_ten_years_of_minutes_are_cut_to_the_limit() -> None:
    rules = ALL._replace(window=1e12)
    done = carried_out(MINUTELY, rules, now=START + 3650 * DAY + 1.0, most=1002)
    assert len(done.slots) == 1000
    assert done.slots == sorted(done.slots)
    assert [span.reason for span in done.spans] == ["limit"]


def test_what_is_older_than_the_window_is_missed() -> None:
    rules = ALL._replace(window=5 * MINUTE + 1.0)
    done = carried_out(MINUTELY, rules, now=START + 20 * MINUTE + 1.0)
    assert done.slots == [START + MINUTE * k for k in range(15, 21)]
    assert done.spans == [Span(START + 60, START + 14 * 60, State.MISSED, "window")]


def test_a_window_that_nothing_lies_in_leaves_nothing_to_run() -> None:
    rules = ALL._replace(window=10.0)
    made = planned(rules, now=START + 20 * MINUTE + 30.0)
    assert made.slot is None
    assert made.spans == (Span(START + 60, START + 20 * 60, State.MISSED, "window"),)


def test_slots_that_come_due_while_others_are_made_up_are_not_cut_off() -> None:
    rules = ALL._replace(limit=3)
    made = plan(MINUTELY, rules, Agenda("bills", START), now=START + 10 * MINUTE + 1.0)
    assert made.slot == START + 8 * MINUTE
    made = plan(
        MINUTELY,
        rules,
        Agenda("bills", made.watermark, made.owed),
        now=START + 30 * MINUTE + 1.0,
    )
    assert (made.slot, made.spans) == (START + 9 * MINUTE, ())


def test_between_two_slots_that_are_made_up_there_is_a_pause() -> None:
    rules = ALL._replace(pause=7.0)
    now = START + 10 * MINUTE + 1.0
    assert planned(rules, now=now).next_due == now + 7
    last = planned(rules, now=now, mark=START + 9 * MINUTE)
    assert last.next_due == START + 11 * MINUTE


def test_live_first_runs_the_newest_and_owes_the_others() -> None:
    rules = ALL._replace(live_first=True)
    made = planned(rules, now=START + 10 * MINUTE + 1.0)
    assert made.slot == made.watermark == START + 10 * MINUTE
    assert made.later == (START + MINUTE, START + 9 * MINUTE)
    assert made.next_due == START + 11 * MINUTE


# Jobs that may not run.


@pytest.mark.parametrize(
    ("barred", "state"),
    [("paused", State.SKIPPED), ("quarantined", State.SKIPPED), ("orphaned", State.MISSED)],
)
@pytest.mark.parametrize("rules", [LATEST, ALL, NONE])
def test_what_comes_due_while_a_job_is_barred_is_one_range(
    barred: str, state: State, rules: Rules
) -> None:
    made = planned(rules, now=START + 10 * MINUTE + 1.0, barred=barred)
    assert made.slot is None
    assert made.spans == (Span(START + 60, START + 600, state, barred),)
    assert (made.watermark, made.next_due) == (START + 600, START + 660)


# Delays after completion.


def after(past: Past, *, now: float, mark: int = START, barred: str = "") -> Plan:
    agenda = Agenda("bills", mark, barred=barred)
    return plan(EveryAfter(45), LATEST, agenda, now=now, past=past)


def test_the_first_slot_comes_a_delay_after_the_job_is_known() -> None:
    assert after(Past(), now=START + 44.9) == Plan(None, (), START, START + 45)
    assert after(Past(), now=START + 50.0).slot == START + 45


def test_while_a_run_is_live_the_next_slot_is_not_known() -> None:
    made = after(Past(START + 45, live=True), now=START + 500.0, mark=START + 45)
    assert made == Plan(None, (), START + 45, START + 500.0 + WAITS)


def test_the_next_slot_is_counted_from_the_end_of_the_last_run() -> None:
    past = Past(START + 45, ended_at=START + 100.7)
    assert after(past, now=START + 144.0, mark=START + 45).next_due == START + 145
    made = after(past, now=START + 1000.0, mark=START + 45)
    assert (made.slot, made.watermark, made.spans) == (START + 145, START + 145, ())


def test_while_it_is_barred_nothing_is_owed_and_the_delay_begins_anew() -> None:
    made = after(Past(), now=START + 500.0, barred="paused")
    assert made == Plan(None, (), START + 500, START + 545)


def test_a_single_slot_runs_once_and_then_nothing_is_due() -> None:
    once = At(START + 10)
    made = planned(LATEST, now=START + 11.0, schedule=once)
    assert made == Plan(START + 10, (), START + 10, None)
    again = planned(LATEST, now=START + 900.0, mark=START + 10, schedule=once)
    assert again == Plan(None, (), START + 10, None)


# Whatever the rules.

schedules = st.sampled_from(
    (MINUTELY, Every(90, phase=13), Cron("*/7 * * * *"), Cron("0 2 * * *"), At(START + 4000))
)
jitters = st.sampled_from((0.0, 0.0, 10.0, 45.0, 5000.0))
some_rules = st.builds(
    Rules,
    st.sampled_from(CatchUp),
    st.sampled_from((None, None, 5.0, 200.0)),
    jitters,
    st.sampled_from((1, 2, 5, 1000)),
    st.sampled_from((100.0, 3000.0, 7 * DAY)),
    st.sampled_from((0.0, 30.0)),
).flatmap(
    lambda rules: st.sampled_from((rules, rules._replace(live_first=rules.catchup is CatchUp.ALL)))
)


@settings(max_examples=200)
@given(schedules, some_rules, st.floats(0, 20_000))
def test_every_slot_up_to_the_watermark_is_run_or_in_a_range_and_none_is_both(
    schedule: Schedule, rules: Rules, length: float
) -> None:
    now = START + length
    done = carried_out(schedule, rules, now=now)
    ranged = [slot for span in done.spans for slot in schedule.between(span.first, span.last + 1)]
    decided = sorted([*done.slots, *ranged])
    assert decided == list(schedule.between(START + 1, done.watermark + 1))
    newest = newest_due(schedule, rules, "bills", now=now)
    assert done.watermark == max(START, newest or START)


@settings(max_examples=200)
@given(schedules, some_rules, st.lists(st.floats(0, 700), min_size=1, max_size=25))
def test_watermarks_never_fall_and_slots_come_in_order_as_time_passes(
    schedule: Schedule, rules: Rules, steps: list[float]
) -> None:
    agenda, now, last = Agenda("bills", START), float(START), 0
    for step in steps:
        now += step
        made = plan(schedule, rules, agenda, now=now)
        assert made.watermark >= agenda.watermark
        if made.slot is not None:
            assert made.slot > max(agenda.watermark, last)
            assert starts_at(schedule, rules, "bills", made.slot) <= now
            last = made.slot
        assert made.next_due is None or made.next_due > made.watermark
        agenda = agenda._replace(watermark=made.watermark, owed=made.owed)


@given(schedules, jitters, st.floats(0, 20_000))
def test_jitter_never_starts_a_slot_early_and_keeps_the_order(
    schedule: Schedule, jitter: float, length: float
) -> None:
    rules = Rules(jitter=jitter)
    slot = schedule.after(START + length)
    if slot is None:
        return
    starts, following = starts_at(schedule, rules, "bills", slot), schedule.after(slot)
    assert slot <= starts <= slot + jitter
    assert following is None or starts < following
    assert next_start(schedule, rules, "bills", slot - 1) == starts
    assert newest_due(schedule, rules, "bills", now=starts) == slot
    if starts > slot:
        assert newest_due(schedule, rules, "bills", now=starts - 1e-3) != slot


@given(schedules, some_rules, st.floats(0, 20_000))
def test_a_clock_that_is_set_back_decides_nothing_again(
    schedule: Schedule, rules: Rules, length: float
) -> None:
    mark = carried_out(schedule, rules, now=START + length).watermark
    made = plan(schedule, rules, Agenda("bills", mark), now=START + length / 2)
    assert (made.slot, made.spans, made.watermark) == (None, (), mark)


@pytest.mark.parametrize("rules", [ALL._replace(start_deadline=60.0), ALL._replace(window=60.0)])
def test_one_missed_slot_is_cut_like_many(rules: Rules) -> None:
    daily = Every(DAY)
    slot = daily.after(START)
    assert slot is not None
    late = plan(daily, rules, Agenda("job", slot - 1), now=slot + 60.5)
    assert (late.slot, late.spans) == (None, (Span(slot, slot, State.MISSED, "window"),))
    assert plan(daily, rules, Agenda("job", slot - 1), now=slot + 60.0).slot == slot


def test_how_late_a_slot_is_that_is_made_up_is_counted_from_its_planned_start() -> None:
    daily, rules = Every(DAY), ALL._replace(start_deadline=60.0, jitter=float(HOUR))
    slot = daily.after(START)
    assert slot is not None
    begins = starts_at(daily, rules, "job", slot)
    assert begins > slot + 60
    assert plan(daily, rules, Agenda("job", slot - 1), now=begins + 1).slot == slot
    assert plan(daily, rules, Agenda("job", slot - 1), now=begins + 61).slot is None
