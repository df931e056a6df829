"""Histories of clusters, each with one broken promise, written by hand."""

from __future__ import annotations

import pytest

from fencepost.model.rules import CatchUp, Rules, text_of
from fencepost.model.schedule import Every, EveryAfter, spec_of
from fencepost.testing.cluster_checker import check_cluster
from fencepost.testing.history import Event

# The ledger's clock shows 1000 s at 0, a slot of every minute is at 1020.
CLOCK = Event(0.0, "clock", until=1000.0)
MINUTELY, TWICE = spec_of(Every(60)), spec_of(Every(30))
JOB = Event(0.0, "declared", name="bills", detail="overlap=skip retry_until=next_slot on_loss=fail")
FIRST = "bills@1970-01-01T00:17:00Z"  # 1020
SECOND = "bills@1970-01-01T00:18:00Z"  # 1080


def stands(
    at: float,
    mark: int,
    *,
    epoch: int = 1,
    spec: str = MINUTELY,
    rules: Rules | None = None,
    since: float = 1000.0,
    barred: str = "",
) -> Event:
    told = text_of(rules or Rules())
    return Event(at, "stands", "a.1", "bills", told, epoch, since, spec, state=barred, number=mark)


def planned(at: float, run: str, *, trigger: str = "schedule", epoch: int = 1) -> Event:
    return Event(at, "planned", "a.1", "bills", detail=trigger, run=run, number=epoch)


def ran(at: float, run: str, *, token: int = 1, epoch: int = 1) -> list[Event]:
    """Return all that happens to a run that goes well, within a second."""
    who, name, nonce = "a.1", "bills", f"n{token}"
    return [
        planned(at, run, epoch=epoch),
        Event(at, "claimed", who, name, nonce, token, at + 10, run=run, state="running", number=1),
        Event(at, "began", who, "", nonce, token, run=run),
        Event(at + 1, "left", who, "", nonce, token, detail="returned", run=run),
        Event(at + 1, "settled", who, name, nonce, token, run=run, state="succeeded", number=1),
        Event(at + 1, "released", who, name, nonce, token),
    ]


def row(run: str, state: str = "succeeded", reason: str = "", *, starts: int = 1) -> Event:
    return Event(900.0, "row", run=run, state=state, detail=reason, number=starts)


def span(first: int, last: int, reason: str, state: str = "missed", *, into: str = "") -> Event:
    return Event(
        900.0, "span", "", "bills", "", first, float(last), reason, into, state, number=1100
    )


def broken(*events: Event) -> list[str]:
    return [violation.rule for violation in check_cluster([CLOCK, JOB, *events])]


GOOD = [stands(0, 1000), *ran(20, FIRST), stands(20, 1020), row(FIRST)]


def test_a_history_without_fault_breaks_nothing() -> None:
    assert broken(*GOOD) == []


def test_a_watermark_must_not_fall() -> None:
    assert broken(*GOOD, stands(30, 1010)) == ["watermark"]


def test_a_slot_up_to_the_watermark_must_be_on_record() -> None:
    assert broken(*GOOD, stands(90, 1080)) == ["covered"]
    assert broken(*GOOD, stands(90, 1080), *ran(90, SECOND, token=2), row(SECOND)) == []


def test_a_range_that_its_rules_know_covers_a_slot() -> None:
    late = span(1080, 1080, "start_deadline")
    assert broken(*GOOD, stands(90, 1080), late) == ["reasons"]
    none = stands(90, 1080, rules=Rules(CatchUp.NONE), epoch=2, since=1050.0)
    assert broken(Event(0.0, "deployed"), *GOOD, none, late) == []


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        ("limit", "missed"),
        ("window", "missed"),
        ("coalesced", "missed"),
        ("paused", "skipped"),
        ("schedule_changed", "skipped"),
        ("orphaned", "missed"),
        ("quarantined", "skipped"),
        ("no_luck", "missed"),
    ],
)
def test_a_range_needs_a_reason_that_can_be(reason: str, state: str) -> None:
    passed = span(1080, 1080, reason, state, into="bills@1970-01-01T00:19:00Z")
    assert broken(*GOOD, stands(90, 1080), passed) == ["reasons"]


def test_a_pause_and_an_orphan_are_reasons_if_there_was_one() -> None:
    paused = Event(30.0, "pausing", name="bills")
    assert broken(*GOOD, paused, stands(90, 1080), span(1080, 1080, "paused", "skipped")) == []
    orphan = stands(90, 1080, barred="orphaned")
    assert broken(*GOOD, orphan, span(1080, 1080, "orphaned")) == []


def test_ranges_must_not_overlap() -> None:
    paused = Event(30.0, "pausing", name="bills")
    one, other = span(1080, 1140, "paused", "skipped"), span(1140, 1200, "paused", "skipped")
    assert broken(*GOOD, paused, stands(90, 1200), one, other) == ["ranges"]


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("skipped", "waiting_full"),
        ("failed", "lock_held"),
        ("missed", "start_deadline"),
        ("skipped", "paused"),
        ("skipped", "schedule_changed"),
        ("cancelled", "cancelled"),
    ],
)
def test_a_run_needs_a_reason_that_its_policy_knows(state: str, reason: str) -> None:
    ended = Event(90.0, "became", "a.1", run=SECOND, state=state, detail=reason)
    rules = broken(*GOOD, planned(90, SECOND), ended, row(SECOND, state, reason, starts=0))
    assert "reasons" in rules


def test_a_slot_must_not_be_planned_before_it_is_due() -> None:
    assert broken(stands(0, 1000), *ran(19.9, FIRST), row(FIRST)) == ["belongs"]


def test_a_slot_must_not_start_before_its_jitter_ends() -> None:
    late = stands(0, 1000, rules=Rules(jitter=50.0))
    assert broken(late, *ran(20.0, FIRST), row(FIRST)) == ["belongs"]


def test_a_slot_must_be_one_of_the_definition_in_force() -> None:
    half_past = "bills@1970-01-01T00:17:30Z"
    assert broken(*GOOD, *ran(60, half_past, token=2), row(half_past)) == ["belongs"]
    assert broken(*GOOD, *ran(90, SECOND, token=2, epoch=7), row(SECOND)) == ["belongs"]


def test_an_edit_must_not_fire_for_the_past() -> None:
    half_past = "bills@1970-01-01T00:17:30Z"
    edited = stands(55, 1055, epoch=2, spec=TWICE, since=1055.0)
    deployed = Event(0.0, "deployed")
    late = ran(56, half_past, token=2, epoch=2)
    assert broken(deployed, *GOOD, edited, *late, row(half_past)) == ["belongs"]


def test_a_slot_that_both_definitions_have_may_run_under_the_second() -> None:
    edited = stands(85, 1079, epoch=2, spec=TWICE, since=1085.0)
    deployed = Event(0.0, "deployed")
    kept = ran(86, SECOND, token=2, epoch=2)
    assert broken(deployed, *GOOD, edited, *kept, stands(86, 1080, epoch=2), row(SECOND)) == []


def test_a_slot_after_completion_must_not_come_too_soon() -> None:
    after = spec_of(EveryAfter(20))
    begun = stands(0, 1000, spec=after)
    too_soon = "bills@1970-01-01T00:17:20Z"  # 1040, but the first ended at 1021
    assert broken(
        begun, *ran(20, FIRST), *ran(40, too_soon, token=2), row(FIRST), row(too_soon)
    ) == ["belongs"]


def test_two_runs_of_one_slot_must_not_be_live_at_once() -> None:
    again = f"{FIRST}~1"
    two = Event(
        20.5, "claimed", "a.1", "bills again", "n2", 2, 30.0, run=again, state="running", number=1
    )
    asked = planned(20.5, again, trigger="backfill")
    assert "one row" in broken(*GOOD, asked, two)


def test_a_definition_must_not_flip_without_a_deploy() -> None:
    edits = [
        stands(10.0 + epoch, 1010 + epoch, epoch=epoch, since=1010.0 + epoch, spec=spec)
        for epoch, spec in ((2, TWICE), (3, MINUTELY))
    ]
    deployed = Event(9.0, "deployed", number=2)
    assert broken(deployed, stands(0, 1000), *edits) == ["one version"]
    assert broken(deployed, deployed, stands(0, 1000), *edits) == []


def test_a_definition_may_change_back_if_its_instances_fell_silent() -> None:
    edits = [
        stands(10.0 + 90 * epoch, 1000 + epoch, epoch=epoch, since=1000.0, spec=spec)
        for epoch, spec in ((2, TWICE), (3, MINUTELY), (4, TWICE))
    ]
    deployed = Event(9.0, "deployed", number=2)
    old = [Event(float(at), "heard", "a.1", number=1) for at in range(0, 400, 5)]
    new = [Event(at, "heard", "b.1", number=2) for at in (180.0, 370.0)]
    assert broken(deployed, stands(0, 1000), *edits, *old, *new) == []
    assert broken(deployed, stands(0, 1000), *edits, *new) == ["one version"]


def calm(*events: Event, spec: str = MINUTELY) -> list[str]:
    quiet = Event(100.0, "calm", until=1100.0)
    serves = Event(100.0, "serves", name="bills", detail=spec)
    return broken(*GOOD, quiet, serves, *events)


def test_after_the_storm_the_newest_program_must_be_in_force() -> None:
    assert calm(spec=TWICE) == ["in force"]


def test_after_the_storm_everything_that_was_due_must_be_settled() -> None:
    assert calm() == ["settled"]  # 1080 was due, and 1020 is the last that is decided
    done = [*ran(120, SECOND, token=2), stands(120, 1080)]
    assert calm(*done, row(SECOND)) == []
    waiting = [planned(120, SECOND), stands(120, 1080)]
    waits = Event(120.0, "became", "a.1", run=SECOND, state="pending")
    assert calm(*waiting, waits, row(SECOND, "pending", starts=0)) == ["settled"]


def test_what_is_made_up_must_be_made_up_in_the_end() -> None:
    def lane(state: str) -> Event:
        return Event(900.0, "lane", "", "bills", "", 960, 1021.0, state=state, number=1)

    done = [*ran(120, SECOND, token=2), stands(120, 1080), row(SECOND)]
    assert calm(*done, lane("open")) == ["settled"]
    assert calm(*done, lane("ended")) == ["covered"]  # nothing ran at 960
