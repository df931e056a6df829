"""What becomes of due slots when a schedule is changed, compared with a plain walk over seconds."""

from __future__ import annotations

import time
from itertools import count
from random import Random

import pytest

from fencepost.model.edited import edit, stretches
from fencepost.model.plan import Agenda, plan
from fencepost.model.rules import CatchUp, Rules
from fencepost.model.schedule import Cron, Every, EveryAfter, Schedule, schedule_from, spec_of

START = 1_700_000_000


def drawn(dice: Random) -> Schedule:
    if dice.random() < 0.3:
        step = dice.choice((1, 2, 3, 5))
        return Cron(f"*/{step} * * * *", second=dice.choice((0, 15, 30)))
    interval = dice.randint(1, 90)
    return Every(interval, phase=dice.randrange(interval))


@pytest.mark.parametrize("seed", range(150))
def test_every_slot_is_kept_or_passed_by_and_nothing_else_fires(seed: int) -> None:
    dice = Random(seed)
    old, new = drawn(dice), drawn(dice)
    limit = dice.choice((1, 3, 1000))
    rules = Rules(dice.choice(tuple(CatchUp)), limit=limit, window=dice.choice((60.0, 1e6)))
    now = START + dice.randint(1, 600)
    due = [slot for slot in range(START + 1, now + 1) if old.contains(slot)]
    both = [slot for slot in due if new.contains(slot)]
    done = edit(old, new, rules, Agenda("bills", START), now=now)
    ran = [
        slot
        for schedule, first, last in done.kept
        for slot in schedule_from(spec_of(schedule)).between(first, last + 1)
    ]
    mark, owed, spans = done.watermark, done.owed, list(done.passed)
    for _ in count():
        made = plan(new, rules, Agenda("bills", mark, owed), now=now)
        spans += made.spans
        if made.slot is not None:
            ran.append(made.slot)
        if (made.watermark, made.slot) == (mark, None):
            break
        mark, owed = made.watermark, made.owed
    if rules.catchup is CatchUp.ALL:
        expected = [slot for slot in both if slot >= now - rules.window][-limit:]
    else:
        expected = [
            slot for slot in both[-1:] if rules.catchup is CatchUp.LATEST or now - slot <= 60
        ]
    assert ran == expected
    for slot in due:
        inside = sum(span.first <= slot <= span.last for span in spans)
        assert inside == (slot not in ran), (slot, spans)
    assert mark >= now or new.latest(now) == mark


def test_a_slot_that_is_owed_already_stays_owed_beyond_the_window() -> None:
    rules = Rules(CatchUp.ALL, window=60.0)
    agenda = Agenda("bills", START, owed=START + 600)
    done = edit(Every(60), Every(120), rules, agenda, now=START + 700)
    assert done.watermark == START + 700
    assert done.kept == ((Every(120), 1_700_000_040, 1_700_000_640),)


def test_a_schedule_that_is_only_said_in_other_words_goes_on_where_it_stands() -> None:
    rules = Rules(CatchUp.ALL, window=60.0)
    agenda = Agenda("bills", START, owed=START + 600)
    done = edit(Every(60), Cron("* * * * *"), rules, agenda, now=START + 700)
    assert done == (1_700_000_040 - 1, 1_700_000_700, (), ())


@pytest.mark.parametrize(
    ("old", "new"),
    [(Every(2), Every(2, phase=1)), (Every(1), Cron("0 0 29 2 *")), (Cron("* * * * *"), Every(7))],
)
def test_a_long_outage_is_not_walked_slot_by_slot(old: Schedule, new: Schedule) -> None:
    rules = Rules(CatchUp.ALL, window=1e9)
    began = time.process_time()
    done = edit(old, new, rules, Agenda("bills", START - 10**9), now=START)
    assert time.process_time() - began < 2
    assert len(done.passed) <= rules.limit + 1


def test_schedules_without_slots_in_common_begin_anew() -> None:
    agenda = Agenda("bills", START)
    for old, new in ((Every(60), EveryAfter(5)), (EveryAfter(5), Every(60)), (Every(60), None)):
        done = edit(old, new, Rules(CatchUp.ALL), agenda, now=START + 600)
        assert (done.watermark, done.kept) == (START + 600, ())


@pytest.mark.parametrize("seed", range(100))
def test_stretches_have_just_the_slots_that_were_kept(seed: int) -> None:
    dice = Random(seed)
    old, new = drawn(dice), drawn(dice)
    kept = [slot for slot in new.between(START, START + 3600) if old.contains(slot)]
    found = [
        slot for one, first, last in stretches(new, kept) for slot in one.between(first, last + 1)
    ]
    assert found == kept


def test_two_schedules_in_equal_steps_have_one_stretch_in_common() -> None:
    kept = list(range(30, 3000, 30))
    assert list(stretches(Every(10), kept)) == [(Every(30), 30, 2970)]
    assert list(stretches(Every(30), kept)) == [(Every(30), 30, 2970)]
