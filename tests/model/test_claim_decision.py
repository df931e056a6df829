from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, strategies as st

from fencepost.model.claim import (
    Change,
    Decision,
    Facts,
    Standing,
    Verdict,
    Want,
    decide,
    leases_of,
    passed_on,
)
from fencepost.model.claim_order import alive
from fencepost.model.claimed import changed_record, claimed_record
from fencepost.model.divided import mark_holder
from fencepost.model.lease import Holder
from fencepost.model.policy import OnLoss, Overlap, Policy, RetryUntil
from fencepost.model.run import STOPPING, TERMINAL, RunRecord, State, legal
from fencepost.model.slot import RunKey

if TYPE_CHECKING:
    from collections.abc import Sequence

NOW = 1_000_000.0
LOCK = "lock"
LEASES = [LOCK, f"{LOCK}#1", f"{LOCK}#2"]
LIVE = (State.PENDING, State.RUNNING, State.WAITING_RETRY)
US = Holder("us", "here", 1)
exclusive = [overlap for overlap in Overlap if overlap is not Overlap.ALLOW]


def key(slot: int = 100, job: str = "job") -> RunKey:
    return RunKey(job, slot)


def want(slot: int = 100, policy: Policy | None = None, *, job: str = "job") -> Want:
    return Want(key(slot, job), US, policy or Policy(), LOCK)


def record(slot: int = 100, state: State = State.PENDING, *, job: str = "job") -> RunRecord:
    """A run that nobody has: a running one has lost its attempt."""
    starts = 0 if state is State.PENDING else 1
    holder = Holder(f"holder-of-{slot}", "there", slot) if starts else Holder("", "", 0)
    lease = LOCK if starts else ""
    return RunRecord(key(slot, job), state, LOCK, lease, holder=holder, starts=starts)


def lost(slot: int = 100) -> RunRecord:
    return record(slot, State.RUNNING)


def released(slot: int = 100) -> RunRecord:
    return record(slot)._replace(starts=1, releases=1)


def held_by(run: RunRecord | None = None) -> Standing:
    holder = Holder("stranger", "elsewhere", 3) if run is None else run.holder
    return Standing(LOCK, True, holder, 7, NOW - 5, 25.0)  # noqa: FBT003


def asked(
    wanted: Want,
    own: RunRecord | None = None,
    *others: RunRecord,
    lease: Standing | None = None,
    quarantined: bool = False,
    paused: bool = False,
) -> Decision:
    standings = {name: Standing(name) for name in LEASES + leases_of(wanted)}
    if lease is not None:
        standings[lease.name] = lease
    facts = Facts(own, in_order(others), standings, quarantined=quarantined, paused=paused)
    return decide(wanted, facts, now=NOW)


def in_order(runs: Sequence[RunRecord]) -> list[RunRecord]:
    return sorted(runs, key=lambda run: (run.key.slot, run.key))


# All that can be the case at once, and much that cannot.

instants = st.sampled_from([0.0, NOW - 2, NOW, NOW + 50])
nonces = st.sampled_from(["us", "a", "b"])
policies = st.fixed_dictionaries(
    {
        "overlap": st.sampled_from(Overlap),
        "max_concurrent": st.integers(1, 2),
        "max_waiting": st.sampled_from([None, 1, 2]),
        "retry_until": st.sampled_from(RetryUntil),
        "on_loss": st.sampled_from(OnLoss),
        "max_losses": st.integers(1, 3),
        "start_deadline": st.sampled_from([None, 1.0, 10.0]),
    }
).map(lambda said: Policy(**said))
keys = st.builds(
    RunKey,
    st.sampled_from(["job", "neighbour"]),
    st.integers(100, 103),
    st.integers(0, 1),
    st.integers(0, 1),
)


@st.composite
def records(draw: st.DrawFn, states: Sequence[State] = LIVE, *, begun: bool = False) -> RunRecord:
    state = draw(st.sampled_from(states))
    begun = begun or state in (State.RUNNING, State.WAITING_RETRY) or draw(st.booleans())
    return RunRecord(
        draw(keys),
        state,
        LOCK,
        lease=draw(st.sampled_from(LEASES)) if begun else "",
        holder=Holder(draw(nonces), "there", 2) if begun else Holder("", "", 0),
        token=5 if begun else 0,
        created_at=draw(instants),
        not_before=0.0 if state is State.RUNNING else draw(instants),
        beat_at=draw(instants),
        cancel_at=draw(instants) if state is State.RUNNING else 0.0,
        starts=draw(st.integers(1, 4)) if begun else 0,
        streak=draw(st.integers(0, 4)) if begun else 0,
        strikes=draw(st.integers(0, 3)) if begun else 0,
        solitary=begun and draw(st.booleans()),
        reason=draw(st.sampled_from(["", STOPPING])) if state is State.RUNNING else "",
    )


@st.composite
def claims(
    draw: st.DrawFn,
    overlaps: Sequence[Overlap] = tuple(Overlap),
    *,
    own: st.SearchStrategy[RunRecord | None] | None = None,
) -> tuple[Want, Facts]:
    policy = draw(policies)._replace(overlap=draw(st.sampled_from(overlaps)))
    wanted = Want(
        draw(keys),
        US,
        policy,
        LOCK,
        can_be_alone=draw(st.booleans()),
        new=draw(st.booleans()),
    )
    run = draw(st.none() | records(tuple(State)) if own is None else own)
    others = draw(st.lists(records(), max_size=4, unique_by=lambda run: run.key))
    standings = {
        name: Standing(name, draw(st.booleans()), Holder(draw(nonces), "there", 2), 5, NOW, 9.0)
        for name in LEASES
    }
    facts = Facts(
        None if run is None else run._replace(key=wanted.key),
        in_order([other for other in others if other.key != wanted.key]),
        standings,
        quarantined=draw(st.booleans()),
        paused=draw(st.booleans()),
    )
    return wanted, facts


@given(claim=claims())
def test_nobody_goes_while_a_living_attempt_has_the_run(claim: tuple[Want, Facts]) -> None:
    wanted, facts = claim
    decision = decide(wanted, facts, now=NOW)
    if decision.verdict is Verdict.GO and facts.own is not None and alive(facts.own, facts):
        assert decision.adopted
        assert facts.own.holder.nonce == wanted.holder.nonce


@given(claim=claims(exclusive))
def test_nobody_goes_while_anybody_holds_the_lock(claim: tuple[Want, Facts]) -> None:
    wanted, facts = claim
    decision = decide(wanted, facts, now=NOW)
    if decision.verdict is Verdict.GO and not decision.adopted:
        assert decision.lease == LOCK
        assert not facts.standings[LOCK].held


@given(claim=claims(exclusive))
def test_nobody_goes_while_another_run_of_the_lock_is_alive_under_whatever_lease(
    claim: tuple[Want, Facts],
) -> None:
    wanted, facts = claim
    decision = decide(wanted, facts, now=NOW)
    if decision.verdict is Verdict.GO and not decision.adopted:
        assert not [other for other in facts.others if alive(other, facts)]


@given(claim=claims([Overlap.ALLOW]))
def test_a_permit_is_granted_only_if_it_is_free(claim: tuple[Want, Facts]) -> None:
    wanted, facts = claim
    decision = decide(wanted, facts, now=NOW)
    if decision.verdict is Verdict.GO and not decision.adopted:
        assert decision.lease in leases_of(wanted)
        assert not facts.standings[decision.lease].held


@given(claim=claims([Overlap.ALLOW]))
def test_a_permit_is_granted_only_if_nobody_has_the_whole_lock(claim: tuple[Want, Facts]) -> None:
    wanted, facts = claim
    decision = decide(wanted, facts, now=NOW)
    if decision.verdict is Verdict.GO and not decision.adopted:
        assert not facts.standings[LOCK].held
        whole = [other for other in facts.others if other.lease == LOCK]
        assert not [other for other in whole if alive(other, facts)]


def test_the_mark_of_permits_keeps_nobody_out_where_no_run_has_one() -> None:
    mark = Standing(LOCK, True, mark_holder("a", limit=2), 7, NOW - 5, 25.0)  # noqa: FBT003
    for overlap in Overlap:
        decision = asked(want(policy=Policy(overlap=overlap)), lease=mark)
        assert decision.verdict is Verdict.GO


def test_a_permit_waits_for_a_lost_run_that_had_the_whole_lock() -> None:
    exclusive = record(40, State.RUNNING, job="neighbour")._replace(lease=LOCK)
    decision = asked(want(policy=Policy(overlap=Overlap.ALLOW)), None, exclusive)
    assert decision.verdict is Verdict.ENDED
    assert decision.change is not None
    assert (decision.change.state, decision.change.reason) == (State.SKIPPED, "lock_held")
    own = asked(want(policy=Policy(overlap=Overlap.ALLOW)), None, lost(40)._replace(lease=LOCK))
    assert own.verdict is Verdict.AFTER


@given(claim=claims(own=records(begun=True)))
def test_an_active_run_is_never_skipped_or_missed(claim: tuple[Want, Facts]) -> None:
    wanted, facts = claim
    change = decide(wanted, facts, now=NOW).change
    assert change is None or change.state not in (State.SKIPPED, State.MISSED)


@given(claim=claims(own=records(sorted(TERMINAL))))
def test_a_run_that_has_ended_never_changes(claim: tuple[Want, Facts]) -> None:
    wanted, facts = claim
    decision = decide(wanted, facts, now=NOW)
    assert decision.verdict in (Verdict.ENDED, Verdict.BUSY)
    assert decision.change is None
    assert decision.superseded == ()


@given(claim=claims())
def test_every_change_is_one_of_the_table(claim: tuple[Want, Facts]) -> None:
    wanted, facts = claim
    decision = decide(wanted, facts, now=NOW)
    if decision.change is not None:
        assert legal(facts.own and facts.own.state, decision.change.state)
    states = {other.key: other.state for other in facts.others}
    for superseded in decision.superseded:
        assert legal(states[superseded], State.FAILED)


@given(claim=claims())
def test_a_dead_attempt_is_counted_as_lost_or_as_given_back(claim: tuple[Want, Facts]) -> None:
    wanted, facts = claim
    change = decide(wanted, facts, now=NOW).change
    if change is not None:
        dead = facts.own is not None and facts.own.state is State.RUNNING
        assert change.lost + change.released == dead


@given(claim=claims())
def test_who_was_ordered_to_stop_is_lost_only_where_a_loss_is_the_end(
    claim: tuple[Want, Facts],
) -> None:
    wanted, facts = claim
    change = decide(wanted, facts, now=NOW).change
    if change is not None and facts.own is not None and facts.own.state is State.RUNNING:
        ordered = facts.own.reason == STOPPING
        assert not change.released or ordered
        if ordered and change.lost:
            assert (change.state, change.reason) == (State.FAILED, "lost")
            assert wanted.policy.on_loss is OnLoss.FAIL


@given(claim=claims())
def test_a_strike_is_a_loss_of_somebody_who_was_alone(claim: tuple[Want, Facts]) -> None:
    wanted, facts = claim
    change = decide(wanted, facts, now=NOW).change
    if change is not None and change.struck:
        assert change.lost
        assert facts.own is not None
        assert facts.own.solitary


@given(claim=claims())
def test_a_verdict_and_its_change_tell_the_same_story(claim: tuple[Want, Facts]) -> None:
    wanted, facts = claim
    decision = decide(wanted, facts, now=NOW)
    change = decision.change
    if decision.verdict is Verdict.GO:
        assert decision.adopted or (change is not None and change.state is State.RUNNING)
    elif decision.verdict is Verdict.ENDED:
        assert (change is None) is (facts.own is not None and facts.own.state.terminal)
        assert change is None or change.state.terminal
    elif decision.verdict in (Verdict.LATER, Verdict.REPLACE):
        assert change is None or change.state is State.PENDING
        assert change is not None or facts.own is not None, "what waits has a record"
    else:
        assert change is None


@given(claim=claims())
def test_only_whoever_goes_supersedes(claim: tuple[Want, Facts]) -> None:
    wanted, facts = claim
    decision = decide(wanted, facts, now=NOW)
    assert not decision.superseded or decision.verdict is Verdict.GO
    for superseded in decision.superseded:
        assert superseded.job == wanted.key.job
        assert superseded.slot < wanted.key.slot
        assert not superseded.manual


@given(claim=claims())
def test_a_quarantined_or_paused_job_begins_nothing(claim: tuple[Want, Facts]) -> None:
    wanted, facts = claim
    stopped = facts.quarantined or facts.paused
    if stopped and decide(wanted, facts, now=NOW).verdict is Verdict.GO:
        assert facts.own is not None
        assert facts.own.active


@given(claim=claims())
def test_a_slot_never_gets_a_second_live_record(claim: tuple[Want, Facts]) -> None:
    wanted, facts = claim
    twins = [other for other in facts.others if other.key[:3] == wanted.key[:3]]
    if facts.own is None and twins:
        decision = decide(wanted, facts, now=NOW)
        assert decision.verdict is Verdict.BUSY
        assert decision.change is None


@given(claim=claims(own=st.none() | records()))
def test_a_start_is_counted_by_the_claim_that_grants_it(claim: tuple[Want, Facts]) -> None:
    wanted, facts = claim
    decision, before = decide(wanted, facts, now=NOW), facts.own
    if decision.verdict is Verdict.GO and decision.change is not None:
        change, lease = decision.change, decision.lease
        run = claimed_record(wanted, before, change, lease=lease, token=9, now=NOW)
        assert run.state is State.RUNNING
        assert (run.token, run.holder, run.lease) == (9, wanted.holder, lease)
        assert run.starts == (before.starts if before else 0) + 1
        assert run.losses == (before.losses if before else 0) + change.lost


@given(
    runs=st.lists(records(), min_size=1, max_size=5, unique_by=lambda run: run.key[:3]),
    policy=policies,
)
def test_of_many_runs_whose_attempts_are_all_gone_one_can_always_go(
    runs: list[RunRecord], policy: Policy
) -> None:
    runs = [run._replace(not_before=0.0, beat_at=0.0) for run in runs]
    verdicts = {run.key: among(runs, run, policy).verdict for run in runs}
    assert {Verdict.GO, Verdict.ENDED} & set(verdicts.values()), verdicts


@given(
    runs=st.lists(records(), min_size=1, max_size=5, unique_by=lambda run: run.key[:3]),
    policy=policies,
)
def test_whoever_follows_those_that_go_first_does_not_walk_in_circles(
    runs: list[RunRecord], policy: Policy
) -> None:
    runs = [run._replace(not_before=0.0, beat_at=0.0) for run in runs]
    by_key = {run.key: run for run in runs}
    for run in runs:
        here, passed = run, set()
        while (decision := among(runs, here, policy)).verdict is Verdict.AFTER:
            assert here.key not in passed
            passed.add(here.key)
            assert decision.blocker is not None
            here = by_key[decision.blocker.key]


def among(runs: list[RunRecord], run: RunRecord, policy: Policy) -> Decision:
    others = [other for other in runs if other.key != run.key]
    newcomer = Holder("newcomer", "here", 1)
    return asked(Want(run.key, newcomer, policy, LOCK), run, *others)


# One fear each.


def test_a_slot_that_nobody_asked_for_before_goes_at_once() -> None:
    decision = asked(want())
    assert decision.verdict is Verdict.GO
    assert decision.lease == LOCK


def test_a_claim_whose_reply_was_lost_finds_its_own_attempt() -> None:
    ours = lost()._replace(holder=US)
    decision = asked(want(), ours, lease=held_by(ours))
    assert decision.verdict is Verdict.GO
    assert decision.adopted


def test_a_claim_that_comes_back_after_its_lease_ended_starts_nothing_again() -> None:
    assert asked(want(), lost()._replace(holder=US)).verdict is Verdict.BUSY


@pytest.mark.parametrize("state", [State.PENDING, State.WAITING_RETRY])
def test_a_request_that_was_long_under_way_gets_no_second_attempt(state: State) -> None:
    ended = released()._replace(state=state, holder=US)
    assert asked(want(), ended).verdict is Verdict.BUSY


def test_an_attempt_that_is_alive_is_left_alone_and_named() -> None:
    theirs = lost()
    decision = asked(want(), theirs, lease=held_by(theirs))
    assert decision.verdict is Verdict.BUSY
    assert decision.holder == held_by(theirs)
    assert decision.change is None


def test_a_run_of_ones_own_is_not_shared_with_whoever_took_its_key() -> None:
    mine = want()._replace(new=True)
    assert asked(mine, record(state=State.SUCCEEDED)).verdict is Verdict.BUSY


def test_a_run_of_ones_own_that_had_to_wait_is_found_again_by_its_asker() -> None:
    mine = want(policy=Policy(overlap=Overlap.RESCHEDULE))._replace(new=True)
    first = asked(mine, lease=held_by())
    assert first.change is not None
    waiting = changed_record(mine, None, first.change, now=NOW)
    assert asked(mine, waiting).verdict is Verdict.GO


def test_a_run_that_never_began_shows_no_holder() -> None:
    run = changed_record(want(), None, Change(State.SKIPPED, "lock_held"), now=NOW)
    assert run.holder.host == ""
    assert run.token == 0


# Overlap.


@pytest.mark.parametrize(
    ("overlap", "verdict", "state", "reason"),
    [
        (Overlap.SKIP, Verdict.ENDED, State.SKIPPED, "lock_held"),
        (Overlap.FAIL, Verdict.ENDED, State.FAILED, "lock_held"),
        (Overlap.RESCHEDULE, Verdict.LATER, State.PENDING, "lock_held"),
        (Overlap.REPLACE, Verdict.REPLACE, State.PENDING, "replacing"),
    ],
)
def test_a_slot_that_finds_another_running_does_what_its_policy_says(
    overlap: Overlap, verdict: Verdict, state: State, reason: str
) -> None:
    other = lost(40)
    decision = asked(want(policy=Policy(overlap=overlap)), None, other, lease=held_by(other))
    assert decision.verdict is verdict
    assert decision.change is not None
    assert (decision.change.state, decision.change.reason) == (state, reason)
    assert decision.change.blocker == str(other.key)
    assert decision.blocker == other
    assert decision.holder == held_by(other)


@pytest.mark.parametrize("overlap", [Overlap.SKIP, Overlap.FAIL, Overlap.RESCHEDULE])
def test_a_run_between_two_retries_is_in_the_way_though_nobody_holds_the_lock(
    overlap: Overlap,
) -> None:
    policy = Policy(overlap=overlap, retry_until=RetryUntil.EXHAUSTED)
    decision = asked(want(policy=policy), None, record(40, State.WAITING_RETRY))
    assert decision.verdict in (Verdict.ENDED, Verdict.LATER)
    assert decision.blocker is not None


def test_a_lock_that_a_stranger_holds_is_not_replaced_but_awaited() -> None:
    decision = asked(want(policy=Policy(overlap=Overlap.REPLACE)), lease=held_by())
    assert decision.verdict is Verdict.LATER


def test_an_older_slot_never_takes_the_place_of_a_newer_one() -> None:
    newer = lost(200)
    decision = asked(want(100, Policy(overlap=Overlap.REPLACE)), None, newer, lease=held_by(newer))
    assert decision.verdict is Verdict.LATER


def test_what_is_to_be_replaced_is_cancelled_and_not_resumed_first() -> None:
    decision = asked(want(100, Policy(overlap=Overlap.REPLACE)), None, lost(40))
    assert decision.verdict is Verdict.REPLACE


def test_what_was_lost_while_it_was_to_be_replaced_is_ended_by_claiming_it() -> None:
    policy = Policy(overlap=Overlap.REPLACE)
    old = lost(40)._replace(cancel_at=NOW - 1)
    assert asked(want(100, policy), None, old).verdict is Verdict.AFTER
    ended = asked(want(40, policy), old, record(100)).change
    assert ended is not None
    assert ended.state is State.CANCELLED


def test_allowed_runs_start_beside_each_other_until_the_permits_are_used_up() -> None:
    policy = Policy(overlap=Overlap.ALLOW, max_concurrent=2)
    one = lost(40)._replace(lease=f"{LOCK}#1")
    two = lost(41)._replace(lease=f"{LOCK}#2")
    standings = {run.lease: held_by(run)._replace(name=run.lease) for run in (one, two)}
    free = standings | {two.lease: Standing(two.lease)}
    second = decide(want(policy=policy), Facts(None, [one], free), now=NOW)
    assert (second.verdict, second.lease) == (Verdict.GO, two.lease)
    third = decide(want(policy=policy), Facts(None, [one, two], standings), now=NOW)
    assert third.verdict is Verdict.ENDED


@pytest.mark.parametrize(
    "other",
    [
        record(40, State.RUNNING, job="neighbour")._replace(lease=f"{LOCK}#1"),
        record(40, State.WAITING_RETRY)._replace(lease=f"{LOCK}#1"),
        released(40)._replace(not_before=NOW + 1),
        record(40),
    ],
    ids=["of another job", "waits for its retry", "waits for its time", "never began"],
)
def test_a_run_that_nobody_can_resume_now_keeps_no_run_that_may_overlap(other: RunRecord) -> None:
    policy = Policy(overlap=Overlap.ALLOW, max_concurrent=2)
    assert asked(want(policy=policy), None, other).verdict is Verdict.GO


def test_a_lost_run_that_may_overlap_waits_while_others_have_all_permits() -> None:
    policy = Policy(overlap=Overlap.ALLOW, max_concurrent=1)
    gone = lost(40)._replace(lease=f"{LOCK}#1")
    taken = held_by()._replace(name=f"{LOCK}#1")
    assert asked(want(policy=policy), None, gone, lease=taken).verdict is Verdict.ENDED


@pytest.mark.parametrize("token", [0, 7, 8])
def test_a_permit_goes_to_another_run_whoever_had_it_meanwhile(token: int) -> None:
    gone = lost(40)._replace(lease=f"{LOCK}#1", token=7)
    facts = Facts(None, [gone], {gone.lease: Standing(gone.lease, token=token)})
    assert list(passed_on(facts, gone.lease)) == [gone]
    assert list(passed_on(facts, f"{LOCK}#2")) == []


def test_only_so_many_slots_wait_and_the_oldest_are_kept() -> None:
    policy = Policy(overlap=Overlap.RESCHEDULE, max_waiting=1)
    holder = lost(40)
    decision = asked(want(100, policy), None, holder, record(60), lease=held_by(holder))
    assert decision.change is not None
    assert (decision.change.state, decision.change.reason) == (State.SKIPPED, "waiting_full")


def test_the_waiting_slots_of_a_neighbour_leave_room_for_our_own() -> None:
    policy = Policy(overlap=Overlap.RESCHEDULE, max_waiting=1)
    holder = lost(40)
    waiting = record(60, job="neighbour")
    decision = asked(want(100, policy), None, holder, waiting, lease=held_by(holder))
    assert decision.verdict is Verdict.LATER


def test_any_number_waits_if_waiting_has_no_bound() -> None:
    policy = Policy(overlap=Overlap.RESCHEDULE, max_waiting=None)
    holder = lost(40)
    waiting = [record(slot) for slot in range(50, 99)]
    decision = asked(want(100, policy), None, holder, *waiting, lease=held_by(holder))
    assert decision.verdict is Verdict.LATER


def test_slots_that_wait_go_oldest_first() -> None:
    policy = Policy(overlap=Overlap.RESCHEDULE, max_waiting=None)
    older, newer = record(60), record(100)
    decision = asked(want(100, policy), newer, older)
    assert (decision.verdict, decision.blocker) == (Verdict.AFTER, older)
    assert asked(want(60, policy), older, newer).verdict is Verdict.GO


def test_a_run_that_was_begun_goes_before_an_older_one_that_was_not() -> None:
    policy = Policy(overlap=Overlap.RESCHEDULE)
    begun, waiting = lost(100), record(60)
    assert asked(want(100, policy), begun, waiting).verdict is Verdict.GO
    assert asked(want(60, policy), waiting, begun).verdict is Verdict.AFTER


def test_of_two_runs_that_were_given_back_the_older_goes_first() -> None:
    older, newer = released(60), released(100)
    assert asked(want(60), older, newer).verdict is Verdict.GO
    assert asked(want(100), newer, older).blocker == older


# Superseding.


def test_a_newer_slot_supersedes_one_that_keeps_failing() -> None:
    failing = record(40, State.WAITING_RETRY)
    decision = asked(want(), None, failing)
    assert (decision.verdict, decision.superseded) == (Verdict.GO, (failing.key,))


@pytest.mark.parametrize(
    "other",
    [
        record(200, State.WAITING_RETRY),
        record(40, State.WAITING_RETRY, job="neighbour"),
        lost(40),
        released(40),
        record(40, State.WAITING_RETRY)._replace(key=RunKey("job", 40, manual=1)),
    ],
    ids=["newer", "another job's", "lost", "given back", "asked for by hand"],
)
def test_nothing_else_is_superseded(other: RunRecord) -> None:
    decision = asked(want(), None, other)
    assert decision.superseded == ()
    assert decision.verdict is not Verdict.GO


def test_a_slot_that_cannot_go_itself_leaves_the_failing_one_its_tries() -> None:
    decision = asked(want(), None, record(40, State.WAITING_RETRY), lease=held_by())
    assert decision.superseded == ()
    assert decision.change is not None
    assert decision.change.state is State.SKIPPED


# Losses.


def test_a_lost_run_is_resumed_at_once_and_its_loss_counted() -> None:
    decision = asked(want(), lost())
    assert decision.verdict is Verdict.GO
    assert decision.change == Change(State.RUNNING, lost=True)


def test_a_run_whose_process_was_ordered_to_stop_is_resumed_at_once_and_no_loss_counted() -> None:
    often = lost()._replace(reason=STOPPING, streak=100, strikes=100, solitary=True, beat_at=NOW)
    decision = asked(want(policy=Policy(max_losses=1)), often)
    assert decision.verdict is Verdict.GO
    assert decision.change == Change(State.RUNNING, released=True)


def test_a_run_whose_process_was_ordered_to_stop_is_left_alone_while_its_lease_is_held() -> None:
    stopping = lost()._replace(reason=STOPPING)
    decision = asked(want(), stopping, lease=held_by(stopping))
    assert (decision.verdict, decision.change) == (Verdict.BUSY, None)


def test_a_stopped_run_whose_lock_is_taken_waits_and_no_loss_is_counted() -> None:
    decision = asked(want(), lost()._replace(reason=STOPPING), lease=held_by())
    assert decision.verdict is Verdict.LATER
    assert decision.change == Change(State.PENDING, "lock_held", released=True)


def test_a_lost_run_goes_before_a_newer_slot_of_its_job() -> None:
    gone = lost(40)
    decision = asked(want(), None, gone)
    assert (decision.verdict, decision.blocker) == (Verdict.AFTER, gone)


def test_nobody_resumes_the_lost_run_of_another_job() -> None:
    gone = lost(40)._replace(key=key(40, "neighbour"))
    decision = asked(want(), None, gone)
    assert decision.verdict is Verdict.ENDED
    assert decision.blocker == gone


def test_an_attempt_that_is_alive_counts_before_one_that_is_lost() -> None:
    gone, living = lost(40), lost(50)
    decision = asked(want(), None, gone, living, lease=held_by(living))
    assert decision.verdict is Verdict.ENDED
    assert decision.blocker == living


def test_a_run_that_may_be_lost_once_only_has_failed_then() -> None:
    change = asked(want(policy=Policy(on_loss=OnLoss.FAIL)), lost()).change
    assert change == Change(State.FAILED, "lost", lost=True)


@pytest.mark.parametrize("on_loss", OnLoss)
def test_a_run_that_was_lost_after_a_cancel_was_asked_for_is_cancelled(on_loss: OnLoss) -> None:
    change = asked(want(policy=Policy(on_loss=on_loss)), lost()._replace(cancel_at=5.0)).change
    assert change == Change(State.CANCELLED, "cancelled", lost=True)


def test_the_second_loss_in_a_row_makes_a_run_wait() -> None:
    again = lost()._replace(streak=1, beat_at=NOW - 0.25)
    decision = asked(want(policy=Policy(loss_pause=1.0)), again)
    assert (decision.verdict, decision.at) == (Verdict.LATER, NOW + 0.75)
    assert decision.change is not None
    assert decision.change.lost
    assert decision.change.not_before == decision.at


def test_a_clock_that_was_set_back_does_not_prolong_the_wait_after_a_loss() -> None:
    again = lost()._replace(streak=1, beat_at=NOW + 3600)
    decision = asked(want(policy=Policy(loss_pause=1.0)), again)
    assert decision.at == NOW + 1.0


def test_from_the_second_loss_on_a_run_is_alone_with_those_who_can_be() -> None:
    alone = want()._replace(can_be_alone=True)
    change = Change(State.RUNNING, lost=True)
    run = lost()
    flags = []
    for token in range(1, 4):
        run = claimed_record(alone, run, change, lease=LOCK, token=token, now=NOW)
        flags.append(run.solitary)
    assert flags == [False, True, True]
    crowd = claimed_record(want(), run, change, lease=LOCK, token=9, now=NOW)
    assert not crowd.solitary


def test_losses_beside_others_are_not_poison_until_it_is_hopeless() -> None:
    policy = Policy(max_losses=5)
    suspect = lost()._replace(streak=18, strikes=0, solitary=False)
    change = asked(want(policy=policy), suspect).change
    assert change is not None
    assert not change.quarantine
    hopeless = asked(want(policy=policy), suspect._replace(streak=19)).change
    assert hopeless is not None
    assert (hopeless.reason, hopeless.quarantine) == ("poison", True)


def test_the_last_solitary_loss_is_poison_and_puts_the_job_into_quarantine() -> None:
    poison = lost()._replace(streak=6, strikes=4, solitary=True)
    change = asked(want(policy=Policy(max_losses=5)), poison).change
    assert change == Change(State.FAILED, "poison", lost=True, struck=True, quarantine=True)


def test_one_solitary_loss_less_is_not_poison() -> None:
    almost = lost()._replace(streak=5, strikes=3, solitary=True)
    change = asked(want(policy=Policy(max_losses=5)), almost).change
    assert change is not None
    assert not change.quarantine


def test_a_lost_run_whose_lock_is_taken_waits_and_its_loss_is_counted() -> None:
    decision = asked(want(), lost(), lease=held_by())
    assert decision.verdict is Verdict.LATER
    assert decision.change == Change(State.PENDING, "lock_held", lost=True)


# Time, pause and quarantine.


def test_a_retry_is_not_early() -> None:
    waiting = record(state=State.WAITING_RETRY)._replace(not_before=NOW + 0.001)
    assert asked(want(), waiting).at == NOW + 0.001
    assert asked(want(), waiting._replace(not_before=NOW)).verdict is Verdict.GO


def test_a_slot_that_waited_past_its_deadline_is_missed() -> None:
    policy = Policy(overlap=Overlap.RESCHEDULE, start_deadline=10.0)
    waiting = record()._replace(created_at=NOW - 10.0)
    assert asked(want(policy=policy), waiting).verdict is Verdict.GO
    change = asked(want(policy=policy), waiting._replace(created_at=NOW - 10.5)).change
    assert change == Change(State.MISSED, "start_deadline")


def test_a_run_that_has_begun_has_no_deadline_to_start() -> None:
    policy = Policy(start_deadline=10.0)
    assert asked(want(policy=policy), released()._replace(created_at=0.0)).verdict is Verdict.GO


def test_a_new_slot_of_a_paused_job_is_skipped() -> None:
    assert asked(want(), paused=True).change == Change(State.SKIPPED, "paused")


def test_quarantine_is_the_reason_told_even_if_the_job_is_paused_too() -> None:
    change = asked(want(), paused=True, quarantined=True).change
    assert change == Change(State.SKIPPED, "quarantined")


# Records.


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_an_end_has_an_instant(state: State) -> None:
    ended = changed_record(want(), record(), Change(state, "why"), now=NOW)
    assert (ended.ended_at, ended.reason) == (NOW, "why")


def test_a_run_is_claimed_under_the_lock_that_its_job_has_now() -> None:
    moved = record()._replace(lock="the lock of yesterday")
    run = claimed_record(want(), moved, Change(State.RUNNING), lease=LOCK, token=1, now=NOW)
    assert run.lock == LOCK


def test_a_new_attempt_does_not_carry_the_troubles_of_the_last_one() -> None:
    failed = record(state=State.WAITING_RETRY)._replace(
        reason="error", error="ValueError", blocker="x@1", not_before=NOW
    )
    run = claimed_record(want(), failed, Change(State.RUNNING), lease=LOCK, token=1, now=NOW)
    assert (run.reason, run.error, run.blocker, run.not_before) == ("", None, "", 0.0)


def test_a_checkpoint_outlives_the_attempt_that_saved_it() -> None:
    saved = lost()._replace(checkpoint="7")
    run = claimed_record(
        want(), saved, Change(State.RUNNING, lost=True), lease=LOCK, token=1, now=NOW
    )
    assert run.checkpoint == "7"
    assert run.attempt == 1


# Slots that nobody remembers.


@pytest.mark.parametrize("trigger", ["trigger", "schedule", "catchup", "backfill", "owed"])
def test_the_first_run_of_a_slot_whose_history_is_gone_is_never_begun(trigger: str) -> None:
    facts = Facts(None, [], {LOCK: Standing(LOCK)}, pruned=True)
    asked = want()._replace(trigger=trigger)
    assert decide(asked, facts, now=NOW) == Decision(Verdict.ENDED)
    known = facts._replace(pruned=False)
    assert decide(asked, known, now=NOW).verdict is Verdict.GO


def test_a_repeat_and_a_run_of_its_own_may_begin_however_old_their_slot_is() -> None:
    facts = Facts(None, [], {LOCK: Standing(LOCK)}, pruned=True)
    again = want()._replace(key=key()._replace(rerun=1))
    assert decide(again._replace(trigger="backfill"), facts, now=NOW).verdict is Verdict.GO
    assert decide(again, facts, now=NOW) == Decision(Verdict.ENDED)  # which no backfill asked for
    own = want()._replace(key=key()._replace(manual=1))
    assert decide(own, facts, now=NOW).verdict is Verdict.GO
