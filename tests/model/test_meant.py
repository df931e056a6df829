"""Which run a trigger means by a clock that may be wrong, and when the ledger takes its word."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from fencepost.caller import Asked
from fencepost.errors import BadSlot
from fencepost.jobs import Declared, Job, Words, declare
from fencepost.model.claim import Facts, Standing, Verdict, Want, decide
from fencepost.model.lease import Holder
from fencepost.model.meant import (
    EARLY,
    SLACK,
    by_ledger,
    clock_off,
    comes_in,
    given_slot,
    manual_run,
    newest_slot,
)
from fencepost.model.policy import Policy
from fencepost.model.run import RunRecord, State
from fencepost.model.schedule import At, Every, EveryAfter, Schedule, due_slot
from fencepost.model.slot import RunKey
from fencepost.model.tier import Tier

HOUR = 3600.0
NOON = 1_768_910_400  # a whole hour
lengths = st.sampled_from([1, 5, 10, 60, 3600])
offs = st.one_of(st.floats(-4, 4), st.floats(-2 * HOUR, 2 * HOUR))


def job_of(schedule: Schedule | None) -> Job:
    policy = {"overlap": "skip", "max_concurrent": 16, "retry": None, "retry_until": None}
    policy |= {"timeout": "1h", "cancel_grace": 30.0, "lease": 30.0, "on_loss": "resume"}
    declared = Declared(None, None, "slot", Tier.T1, idempotent=False)
    rules = {"catchup": "latest", "start_deadline": None}
    asked = {"every": schedule} if isinstance(schedule, Every | EveryAfter) else {"at": schedule}
    return declare("job", lambda: None, Words(declared, asked, rules, policy))


def chosen(schedule: Schedule, *, wall: float, now: float) -> int:
    """Return the slot that runs, as a flow and a ledger choose it together."""
    meant = newest_slot("job", schedule, now=wall)
    assert meant is not None
    while not meant.since <= now < meant.until:
        if wait := comes_in(meant, now=now):
            now = max(now + wait, meant.since)
            continue
        slot = due_slot(schedule, now, early=EARLY)
        assert slot is not None
        meant = by_ledger(RunKey("job", slot), now=now)
    assert meant.key.slot <= now, "a slot never starts early"
    return meant.key.slot


@given(length=lengths, at=st.floats(0, 2 * HOUR), off=offs)
def test_a_clock_that_agrees_is_believed_and_any_other_one_changes_nothing(
    length: int, at: float, off: float
) -> None:
    schedule, now = Every(length), NOON + at
    slot, right = chosen(schedule, wall=now + off, now=now), due_slot(schedule, now, early=EARLY)
    if abs(off) > SLACK:
        # A wrong clock may guess right, or guess a slot for which it waits.
        assert slot <= now + SLACK
        assert slot == right or now < slot + length <= now + EARLY or now < slot
    else:
        assert slot == due_slot(schedule, now + off, early=EARLY) or slot == right
        assert slot <= now + EARLY + SLACK


@given(length=lengths, at=st.floats(0, 2 * HOUR), off=st.floats(-SLACK, SLACK))
def test_a_caller_that_agrees_asks_once_or_waits_for_its_slot(
    length: int, at: float, off: float
) -> None:
    now = NOON + at
    meant = newest_slot("job", Every(length), now=now + off)
    assert meant is not None
    asks_once = meant.since <= now < meant.until
    waits = comes_in(meant, now=now) > 0
    assert asks_once or waits or abs(off) > SLACK - EARLY - 1e-3


def test_at_the_boundary_of_a_slot_either_is_right() -> None:
    schedule = Every(3600)
    before = newest_slot("job", schedule, now=NOON - 1.0005)
    assert before is not None
    assert before.key.slot == NOON - 3600
    assert before.since <= NOON + 0.01 < before.until
    after = newest_slot("job", schedule, now=NOON - 0.0005)
    assert after is not None
    assert after.key.slot == NOON
    assert comes_in(after, now=NOON - 1.9) == pytest.approx(1.9)
    assert not comes_in(after, now=NOON - 2.1)


@pytest.mark.parametrize(
    ("now", "due", "wait"),
    [
        (NOON, True, 0.0),
        (NOON + HOUR, True, 0.0),
        (NOON - 0.5, False, 0.5),
        (NOON - SLACK, False, SLACK),
        (NOON - SLACK - 0.5, False, 0.0),
        (NOON - HOUR, False, 0.0),
    ],
)
def test_a_slot_that_is_named_never_starts_early_by_the_ledgers_clock(
    now: float, wait: float, *, due: bool
) -> None:
    meant = given_slot("job", NOON)
    assert (meant.since <= now < meant.until) is due
    assert comes_in(meant, now=now) == wait


def test_a_manual_run_is_of_its_time() -> None:
    meant = manual_run("job", now=NOON + 0.9)
    assert meant.key == RunKey("job", NOON, manual=1)
    assert meant.since <= NOON < meant.until
    assert not meant.since <= NOON + HOUR < meant.until
    assert Asked(job_of(None), manual=True).meant_at(NOON + HOUR).slot == NOON + HOUR


def test_what_is_not_due_is_refused_with_the_ledgers_time() -> None:
    with pytest.raises(BadSlot, match=r"it is 2026-01-20T12:00:00Z by the ledger's clock"):
        Asked(job_of(Every(3600)), NOON + 3600).meant_at(NOON)
    once = job_of(At(NOON))
    assert Asked(once).meant(now=NOON - HOUR) is None
    assert Asked(once).meant_at(NOON) == RunKey("job", NOON)
    with pytest.raises(BadSlot, match="is due yet"):
        Asked(once).meant_at(NOON - HOUR)
    assert Asked(job_of(EveryAfter(60))).meant(now=NOON) is None


@given(now=st.floats(0, 100), asked=st.floats(0, 100), took=st.floats(0, 50), off=offs)
def test_a_slow_answer_is_not_a_wrong_clock(
    now: float, asked: float, took: float, off: float
) -> None:
    assert clock_off(asked + took / 2, asked=asked, answered=asked + took) == 0.0
    told = clock_off(now, asked=now + off, answered=now + off + took)
    assert told == 0.0 or abs(told - off) <= took + 1e-6
    if off > SLACK or off + took < -SLACK:
        assert told * off > 0


def test_a_request_whose_answer_got_lost_finds_its_run_at_any_time() -> None:
    us = Holder("us", "here", 1)
    want = Want(RunKey("job", NOON), us, Policy(), "job", since=NOON, until=NOON + 10)
    free = Facts(None, [], {"job": Standing("job")})
    assert decide(want, free, now=NOON + 1.0).verdict is Verdict.GO
    for now in (NOON - 0.1, NOON + 10.0):
        assert decide(want, free, now=now).verdict is Verdict.OTHER_TIME
    ours = RunRecord(want.key, State.RUNNING, "job", "job", 7, us, starts=1)
    held = Facts(ours, [], {"job": Standing("job", True, us, 7, NOON, 30.0)})  # noqa: FBT003
    decision = decide(want, held, now=NOON + 20.0)
    assert (decision.verdict, decision.adopted) == (Verdict.GO, True)
    # What others did with the slot does not matter if another one is meant.
    done = ours._replace(state=State.SUCCEEDED, holder=Holder("them", "there", 2))
    late = decide(want, Facts(done, [], {"job": Standing("job")}), now=NOON + 20.0)
    assert late.verdict is Verdict.OTHER_TIME
