from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fencepost.errors import LeaseLost, RunLost, UnknownRun
from fencepost.ledger.api import Attempt, Report
from fencepost.ledger.memory import MemoryLedger
from fencepost.model.claim import Claimed, Verdict, Want
from fencepost.model.ending import Settled
from fencepost.model.item import Found, ItemState
from fencepost.model.lease import Holder
from fencepost.model.policy import OnLoss, Overlap, Policy, RetryUntil
from fencepost.model.run import RunRecord, State
from fencepost.model.slot import RunKey
from fencepost.stores.memory import MemoryStore
from fencepost.testing.clock import SettableClocks
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from collections.abc import Callable

DONE = Settled(State.SUCCEEDED, result="1")
RELEASED = Settled(State.PENDING, "released")


class Lab:
    """A ledger, its clock, and askers that can die."""

    def __init__(self) -> None:
        self.clocks, self.dead = SettableClocks(), set[str]()
        world = BlockingWorld(clocks=self.clocks)
        store = MemoryStore(world, stopped=lambda holder: holder.nonce in self.dead)
        self.ledger = MemoryLedger(world, store)

    def claim(
        self,
        slot: int = 100,
        who: str = "a",
        policy: Policy | None = None,
        *,
        job: str = "job",
        lock: str = "lock",
        alone: bool = False,
    ) -> Claimed:
        holder = Holder(who, f"host-{who}", 1)
        key = RunKey(job, slot)
        want = Want(key, holder, policy or Policy(), lock, can_be_alone=alone)
        return finish(self.ledger.claim(want))

    def go(
        self,
        slot: int = 100,
        who: str = "a",
        policy: Policy | None = None,
        *,
        job: str = "job",
        alone: bool = False,
    ) -> Attempt:
        return attempt_of(self.claim(slot, who, policy, job=job, alone=alone))

    def finish(self, attempt: Attempt, settled: Settled = DONE) -> RunRecord:
        return finish(self.ledger.finish(attempt, settled))

    def fail(self, attempt: Attempt, *, retry_in: float = 10.0) -> RunRecord:
        return self.finish(attempt, Settled(State.WAITING_RETRY, "error", retry_in, error="x"))

    def cancel(self, slot: int = 100, *, force: bool = False) -> RunRecord:
        return finish(self.ledger.cancel(RunKey("job", slot), force=force, operator="ops"))

    def run(self, slot: int = 100) -> RunRecord:
        run = finish(self.ledger.find(RunKey("job", slot)))
        assert run is not None
        return run

    def told(self, slot: int = 100) -> list[str]:
        return [event.what for event in finish(self.ledger.events(RunKey("job", slot)))]

    def begin(
        self, attempt: Attempt, *items: str, call: str = "call", repeat: bool = False
    ) -> list[Found]:
        begun = self.ledger.begin(attempt, scope="s", items=items, call=call, repeat=repeat)
        return finish(begun)

    def end(self, attempt: Attempt, item: str, state: ItemState = ItemState.DONE) -> None:
        finish(self.ledger.end(attempt, scope="s", items=[(item, state, None)]))

    def holder_of(self, name: str = "lock") -> str | None:
        seen = finish(self.ledger.leases.peek(name))
        return seen.holder.nonce if seen is not None and seen.held else None


def attempt_of(claimed: Claimed) -> Attempt:
    run = claimed.run
    assert claimed.verdict is Verdict.GO, claimed
    assert run is not None
    return Attempt(run.key, run.token, run.holder.nonce, run.lease, str(run.holder))


@pytest.fixture
def lab() -> Lab:
    return Lab()


# Claims.


def test_a_granted_claim_has_run_lease_and_token_in_one_step(lab: Lab) -> None:
    claimed = lab.claim()
    assert claimed.grant is not None
    assert claimed.run is not None
    assert claimed.grant.token == claimed.run.token > 0
    assert lab.holder_of() == "a"
    assert (claimed.run.state, claimed.run.starts, claimed.run.attempt) == (State.RUNNING, 1, 1)


def test_of_two_that_claim_one_slot_one_goes(lab: Lab) -> None:
    lab.go(who="a")
    second = lab.claim(who="b")
    assert second.verdict is Verdict.BUSY
    assert second.holder is not None
    assert second.holder.holder.nonce == "a"


def test_a_claim_that_is_repeated_after_a_lost_reply_is_one_start(lab: Lab) -> None:
    first, second = lab.go(), lab.claim()
    assert attempt_of(second) == first
    assert second.grant is not None
    assert second.grant.adopted
    assert lab.run().starts == 1


def test_a_slot_that_is_done_is_never_claimed_again(lab: Lab) -> None:
    lab.finish(lab.go())
    again = lab.claim(who="b")
    assert (again.verdict, again.fresh, again.run) == (Verdict.ENDED, False, lab.run())


def test_tokens_of_a_run_grow_with_every_attempt(lab: Lab) -> None:
    tokens = []
    for who in "abcd":
        attempt = lab.go(who=who)
        tokens.append(attempt.token)
        lab.finish(attempt, RELEASED)
    assert tokens == sorted(set(tokens))


def test_tokens_grow_though_the_wall_clock_is_set_back(lab: Lab) -> None:
    first = lab.go(who="a")
    lab.finish(first, RELEASED)
    lab.clocks.step_wall(-86_400)
    assert lab.go(who="b").token > first.token


def test_namespaces_do_not_see_each_others_runs(lab: Lab) -> None:
    world = BlockingWorld(clocks=lab.clocks)
    store = MemoryStore(world, shelf=lab.ledger.leases._shelf, namespace="staging")
    lab.go()
    assert finish(MemoryLedger(world, store).find(RunKey("job", 100))) is None


# Overlap.


def test_a_slot_that_is_skipped_says_who_was_in_its_way(lab: Lab) -> None:
    first = lab.go(100)
    claimed = lab.claim(200, "b")
    assert (claimed.verdict, claimed.fresh) == (Verdict.ENDED, True)
    run = lab.run(200)
    assert (run.state, run.reason) == (State.SKIPPED, "lock_held")
    assert run.blocker == str(first.key)
    assert claimed.holder is not None
    assert claimed.holder.token == first.token


def test_a_skipped_slot_stays_skipped_when_the_lock_is_free_again(lab: Lab) -> None:
    first = lab.go(100)
    lab.claim(200, "b")
    lab.finish(first)
    assert lab.claim(200, "c").verdict is Verdict.ENDED
    assert lab.run(200).starts == 0


def test_a_slot_fails_at_once_where_overlap_is_a_failure(lab: Lab) -> None:
    lab.go(100)
    lab.claim(200, "b", Policy(overlap=Overlap.FAIL))
    run = lab.run(200)
    assert (run.state, run.reason) == (State.FAILED, "lock_held")
    assert "was held" in (run.error or "")


def test_slots_that_wait_get_their_turn_oldest_first(lab: Lab) -> None:
    policy = Policy(overlap=Overlap.RESCHEDULE, max_waiting=2)
    first = lab.go(100, policy=policy)
    assert lab.claim(300, "c", policy).verdict is Verdict.LATER
    assert lab.claim(200, "b", policy).verdict is Verdict.LATER
    lab.finish(first)
    ahead = lab.claim(300, "c", policy)
    assert ahead.verdict is Verdict.AFTER
    assert ahead.blocker is not None
    assert ahead.blocker.key.slot == 200
    lab.finish(lab.go(200, "b", policy))
    lab.finish(lab.go(300, "c", policy))


def test_a_slot_for_which_there_is_no_room_to_wait_is_skipped(lab: Lab) -> None:
    policy = Policy(overlap=Overlap.RESCHEDULE)
    lab.go(100, policy=policy)
    lab.claim(200, "b", policy)
    lab.claim(300, "c", policy)
    assert lab.run(200).fresh
    assert lab.run(300).reason == "waiting_full"


def test_a_slot_that_waited_for_too_long_is_missed(lab: Lab) -> None:
    policy = Policy(overlap=Overlap.RESCHEDULE, start_deadline=60.0)
    first = lab.go(100, policy=policy)
    lab.claim(200, "b", policy)
    lab.finish(first)
    lab.clocks.advance(61)
    assert lab.claim(200, "b", policy).verdict is Verdict.ENDED
    assert lab.run(200).state is State.MISSED


def test_two_slots_never_wait_for_each_other(lab: Lab) -> None:
    policy = Policy(overlap=Overlap.RESCHEDULE)
    lab.go(200, "a", policy)
    assert lab.claim(100, "b", policy).verdict is Verdict.LATER
    lab.dead.add("a")
    assert lab.claim(100, "b", policy).verdict is Verdict.AFTER
    lab.finish(lab.go(200, "c", policy))
    lab.finish(lab.go(100, "b", policy))


def test_a_run_is_replaced_once_it_has_been_cancelled(lab: Lab) -> None:
    policy = Policy(overlap=Overlap.REPLACE)
    old = lab.go(100, "a", policy)
    claimed = lab.claim(200, "b", policy)
    assert claimed.verdict is Verdict.REPLACE
    assert claimed.blocker is not None
    assert claimed.blocker.key == old.key
    lab.cancel(100, force=True)
    assert lab.go(200, "b", policy).token > old.token


def test_allowed_runs_have_leases_and_tokens_of_their_own(lab: Lab) -> None:
    policy = Policy(overlap=Overlap.ALLOW, max_concurrent=2)
    one, two = lab.go(100, "a", policy), lab.go(200, "b", policy)
    assert {one.lease, two.lease} == {"lock#1", "lock#2"}
    assert lab.claim(300, "c", policy).verdict is Verdict.ENDED
    lab.finish(one)
    assert lab.go(400, "d", policy).lease == one.lease
    lab.finish(two)


def test_runs_that_were_given_back_all_get_their_turn_when_overlap_is_forbidden(lab: Lab) -> None:
    allow = Policy(overlap=Overlap.ALLOW)
    for slot, who in ((100, "a"), (200, "b")):
        lab.go(slot, who, allow)
    for slot, who in ((100, "a"), (200, "b")):
        run = lab.run(slot)
        lab.finish(Attempt(run.key, run.token, who, run.lease), RELEASED)
    assert lab.claim(200, "c").verdict is Verdict.AFTER
    lab.finish(lab.go(100, "d"))
    lab.finish(lab.go(200, "e"))


def test_a_run_of_another_job_with_the_same_lock_is_in_the_way(lab: Lab) -> None:
    lab.go(100)
    assert lab.claim(100, "b", job="neighbour").verdict is Verdict.ENDED
    assert lab.claim(100, "b", job="stranger", lock="another").verdict is Verdict.GO


def test_a_lease_that_somebody_took_by_hand_is_in_the_way(lab: Lab) -> None:
    finish(lab.ledger.leases.acquire("lock", holder=Holder("x", "host-x", 1), ttl=30.0))
    claimed = lab.claim()
    assert claimed.verdict is Verdict.ENDED
    assert claimed.holder is not None
    assert claimed.holder.holder.nonce == "x"


# Retries and superseding.


def test_between_two_tries_the_lock_is_free_but_the_run_is_in_the_way(lab: Lab) -> None:
    exhausted = Policy(retry_until=RetryUntil.EXHAUSTED)
    lab.fail(lab.go(100))
    assert lab.holder_of() is None
    assert lab.claim(200, "b", exhausted).verdict is Verdict.ENDED
    assert lab.run(200).state is State.SKIPPED


def test_a_retry_waits_for_its_time_and_is_then_the_next_attempt(lab: Lab) -> None:
    lab.fail(lab.go(), retry_in=10)
    early = lab.claim(who="b")
    assert early.verdict is Verdict.LATER
    assert 9 < early.pause <= 10
    lab.clocks.advance(10)
    lab.go(who="b")
    assert lab.run().attempt == 2
    assert "attempt_failed" in lab.told()


def test_a_newer_slot_ends_the_one_that_keeps_failing(lab: Lab) -> None:
    lab.fail(lab.go(100))
    lab.go(200, "b")
    run = lab.run(100)
    assert (run.state, run.reason, run.error) == (State.FAILED, "superseded", "x")
    assert run.blocker == str(RunKey("job", 200))


def test_an_attempt_that_was_given_back_costs_neither_a_try_nor_a_loss(lab: Lab) -> None:
    lab.finish(lab.go(), RELEASED)
    lab.go(who="b")
    run = lab.run()
    assert (run.starts, run.losses, run.releases, run.attempt) == (2, 0, 1, 1)
    assert "attempt_released" in lab.told()


# Beats and checkpoints.


def test_a_beat_keeps_the_lease_beyond_its_first_end(lab: Lab) -> None:
    attempt = lab.go()
    for _ in range(4):
        lab.clocks.advance(20)
        finish(lab.ledger.beat(attempt, ttl=30.0))
    assert lab.claim(who="b").verdict is Verdict.BUSY


def test_a_beat_that_comes_after_the_lease_ended_does_not_revive_it(lab: Lab) -> None:
    attempt = lab.go()
    lab.clocks.advance(31)
    with pytest.raises(LeaseLost):
        finish(lab.ledger.beat(attempt, ttl=30.0))
    assert lab.holder_of() is None


@pytest.mark.parametrize("verb", ["beat", "save"])
def test_an_attempt_learns_that_a_cancel_was_asked_for(lab: Lab, verb: str) -> None:
    attempt = lab.go()

    def told() -> bool:
        if verb == "beat":
            return finish(lab.ledger.beat(attempt, ttl=30.0))
        return finish(lab.ledger.save(attempt, checkpoint="1"))

    assert told() is False
    lab.cancel()
    assert told() is True


def test_a_checkpoint_is_there_for_the_next_attempt(lab: Lab) -> None:
    finish(lab.ledger.save(lab.go(), checkpoint="41"))
    lab.dead.add("a")
    claimed = lab.claim(who="b")
    assert claimed.run is not None
    assert claimed.run.checkpoint == "41"


def test_counts_may_be_told_twice_and_are_counted_once(lab: Lab) -> None:
    attempt = lab.go()
    report = Report(3, 9, (("rows", 3),), "source-a")
    for _ in range(2):
        finish(lab.ledger.beat(attempt, ttl=30.0, report=report))
    assert finish(lab.ledger.counts(attempt.key)) == {"rows": 3}
    assert (lab.run().done, lab.run().total) == (3, 9)


def test_the_counts_of_all_attempts_are_added_up(lab: Lab) -> None:
    for who in "ab":
        attempt = lab.go(who=who)
        finish(lab.ledger.beat(attempt, ttl=30.0, report=Report(counts=(("rows", 2),), source=who)))
        lab.finish(attempt, RELEASED)
    assert finish(lab.ledger.counts(RunKey("job", 100))) == {"rows": 4}


# The end.


def test_an_end_that_is_told_twice_is_recorded_once(lab: Lab) -> None:
    attempt = lab.go()
    assert lab.finish(attempt) == lab.finish(attempt)
    assert lab.told() == []


@pytest.mark.parametrize("settled", [RELEASED, Settled(State.WAITING_RETRY, "error", 9.0)])
def test_an_unfinished_end_that_is_told_twice_is_recorded_once(lab: Lab, settled: Settled) -> None:
    attempt = lab.go()
    assert lab.finish(attempt, settled) == lab.finish(attempt, settled)
    assert len(lab.told()) == 1


def test_another_end_for_a_run_that_has_ended_is_refused(lab: Lab) -> None:
    attempt = lab.go()
    lab.finish(attempt)
    with pytest.raises(RunLost, match="it is succeeded"):
        lab.finish(attempt, Settled(State.FAILED, "error"))
    assert lab.run().state is State.SUCCEEDED


def test_an_end_frees_the_lock(lab: Lab) -> None:
    lab.finish(lab.go(100))
    assert lab.claim(200, "b").verdict is Verdict.GO


def test_work_that_ends_after_its_lease_did_counts_if_nobody_took_over(lab: Lab) -> None:
    attempt = lab.go()
    lab.clocks.advance(3600)
    assert lab.finish(attempt).state is State.SUCCEEDED


def test_an_end_does_not_free_the_lease_of_somebody_else(lab: Lab) -> None:
    attempt = lab.go()
    lab.clocks.advance(31)
    finish(lab.ledger.leases.acquire("lock", holder=Holder("x", "host-x", 1), ttl=30.0))
    lab.finish(attempt)
    assert lab.holder_of() == "x"


# Stale writers.


@pytest.mark.parametrize(
    ("what", "write"),
    [
        ("beat", lambda lab, it: finish(lab.ledger.beat(it, ttl=30.0))),
        ("save", lambda lab, it: finish(lab.ledger.save(it, checkpoint="stale"))),
        ("begin", lambda lab, it: lab.begin(it, "x")),
        ("end", lambda lab, it: lab.end(it, "x")),
        ("finish", lambda lab, it: lab.finish(it)),
    ],
)
def test_a_writer_whose_run_was_taken_over_is_refused_and_named(
    lab: Lab, what: str, write: Callable[[Lab, Attempt], object]
) -> None:
    stale = lab.go(who="a")
    lab.dead.add("a")
    lab.go(who="b")
    before = lab.run()
    with pytest.raises(RunLost, match="host-b pid 1 has it now"):
        write(lab, stale)
    assert lab.run() == before
    event = finish(lab.ledger.events(stale.key))[-1]
    assert (event.what, event.detail) == ("stale_write", what)
    assert (event.token, event.holder) == (stale.token, "host-a pid 1")


def test_a_writer_without_a_record_is_refused(lab: Lab) -> None:
    with pytest.raises(RunLost, match="no record"):
        lab.finish(Attempt(RunKey("job", 1), 1, "n", "lock"))


# Losses, strikes, poison.


def test_a_dead_holder_is_succeeded_at_once_under_a_higher_token(lab: Lab) -> None:
    first = lab.go(who="a")
    lab.dead.add("a")
    second = lab.go(who="b")
    assert second.token > first.token
    run = lab.run()
    assert (run.starts, run.losses, run.attempt) == (2, 1, 1)
    assert lab.told() == ["attempt_lost"]


def test_a_silent_holder_is_succeeded_when_its_lease_ends_and_not_before(lab: Lab) -> None:
    lab.go(who="a")
    lab.clocks.advance(29)
    assert lab.claim(who="b").verdict is Verdict.BUSY
    lab.clocks.advance(1)
    assert lab.claim(who="b").verdict is Verdict.GO


def test_a_lost_run_is_resumed_before_a_newer_slot_begins(lab: Lab) -> None:
    lab.go(100, "a")
    lab.dead.add("a")
    claimed = lab.claim(200, "b")
    assert claimed.verdict is Verdict.AFTER
    assert claimed.run is None
    assert claimed.blocker == lab.run(100)


def test_a_run_that_must_not_be_tried_twice_fails_when_it_is_lost(lab: Lab) -> None:
    policy = Policy(on_loss=OnLoss.FAIL)
    lab.go(who="a", policy=policy)
    lab.dead.add("a")
    assert lab.claim(who="b", policy=policy).verdict is Verdict.ENDED
    run = lab.run()
    assert (run.state, run.reason, run.losses) == (State.FAILED, "lost", 1)


def crash(lab: Lab, *, times: int, alone: bool, policy: Policy | None = None) -> Claimed:
    """Let that many attempts die, one after the other, and ask once more."""
    number = 0
    while True:
        who = f"victim-{lab.clocks.wall()}-{number}"
        claimed = lab.claim(who=who, policy=policy, alone=alone)
        if claimed.verdict is Verdict.LATER:
            lab.clocks.advance(claimed.pause)
            continue
        if claimed.verdict is not Verdict.GO or number == times:
            return claimed
        lab.dead.add(who)
        number += 1


def test_a_run_that_kills_whoever_runs_it_alone_is_poison_in_the_end(lab: Lab) -> None:
    claimed = crash(lab, times=100, alone=True)
    assert claimed.verdict is Verdict.ENDED
    run = lab.run()
    assert (run.state, run.reason, run.strikes) == (State.FAILED, "poison", 5)
    assert run.losses == run.starts == 7


def test_a_poisoned_job_is_in_quarantine_until_somebody_lifts_it(lab: Lab) -> None:
    crash(lab, times=100, alone=True)
    (job,) = finish(lab.ledger.jobs())
    assert job.quarantined == str(RunKey("job", 100))
    lab.claim(200, "b")
    assert (lab.run(200).state, lab.run(200).reason) == (State.SKIPPED, "quarantined")
    assert finish(lab.ledger.lift("job")) is True
    assert finish(lab.ledger.lift("job")) is False
    assert lab.claim(300, "c").verdict is Verdict.GO


def test_a_definition_that_is_registered_again_does_not_lift_a_quarantine(lab: Lab) -> None:
    crash(lab, times=100, alone=True)
    finish(lab.ledger.register("job", '{"new": 1}'))
    (job,) = finish(lab.ledger.jobs())
    assert job.quarantined
    assert job.definition == '{"new": 1}'


def test_a_run_whose_neighbours_die_is_not_blamed(lab: Lab) -> None:
    assert crash(lab, times=18, alone=False).verdict is Verdict.GO
    assert lab.run().strikes == 0


def test_a_run_that_gets_on_between_its_losses_is_never_poison(lab: Lab) -> None:
    for number in range(12):
        attempt = attempt_of(crash(lab, times=1, alone=True))
        finish(lab.ledger.save(attempt, checkpoint=str(number)))
        lab.dead.add(attempt.nonce)
    assert lab.run().state is State.RUNNING
    assert lab.run().losses > 5


def test_saving_the_same_checkpoint_again_is_no_progress(lab: Lab) -> None:
    attempt = attempt_of(crash(lab, times=2, alone=True))
    finish(lab.ledger.save(attempt, checkpoint="1"))
    assert lab.run().streak == 0
    lab.dead.add(attempt.nonce)
    again = attempt_of(crash(lab, times=0, alone=True))
    finish(lab.ledger.save(again, checkpoint="1"))
    assert lab.run().streak == 1


def test_the_second_loss_in_a_row_makes_the_run_wait(lab: Lab) -> None:
    for who in "ab":
        lab.go(who=who)
        lab.dead.add(who)
    claimed = lab.claim(who="c")
    assert claimed.verdict is Verdict.LATER
    run = lab.run()
    assert (run.state, run.losses) == (State.PENDING, 2)
    assert 0 < claimed.pause <= 1
    lab.clocks.advance(1)
    assert lab.claim(who="c").verdict is Verdict.GO
    assert lab.run().losses == 2


def test_an_attempt_whose_loss_was_counted_cannot_end_the_run_any_more(lab: Lab) -> None:
    for who in "ab":
        attempt = lab.go(who=who)
        lab.dead.add(who)
    lab.claim(who="c")
    with pytest.raises(RunLost, match=r"it is pending \(lost\)"):
        lab.finish(attempt)


def test_a_lease_that_an_operator_broke_is_a_loss_of_its_run(lab: Lab) -> None:
    first = lab.go(who="a")
    broken = lab.ledger.leases.break_("lock", token=first.token, reason="hung", operator="ops")
    finish(broken)
    assert lab.go(who="b").token > first.token
    assert lab.run().losses == 1


# Cancels.


def test_what_waits_is_cancelled_at_once(lab: Lab) -> None:
    lab.fail(lab.go())
    run = lab.cancel()
    assert (run.state, run.reason) == (State.CANCELLED, "cancelled")
    lab.clocks.advance(60)
    assert lab.claim(who="b").verdict is Verdict.ENDED


def test_the_error_of_the_last_attempt_outlives_a_cancel(lab: Lab) -> None:
    lab.fail(lab.go())
    assert lab.cancel().error == "x"


def test_what_runs_is_asked_and_goes_on(lab: Lab) -> None:
    lab.go()
    run = lab.cancel()
    assert run.state is State.RUNNING
    assert run.cancel_at > 0
    assert lab.told() == ["cancel_requested"]


def test_a_success_after_the_request_is_a_success_with_the_request_on_record(lab: Lab) -> None:
    attempt = lab.go()
    lab.cancel()
    run = lab.finish(attempt)
    assert run.state is State.SUCCEEDED
    assert run.cancel_at > 0


def test_a_cancel_after_the_success_changes_nothing(lab: Lab) -> None:
    done = lab.finish(lab.go())
    assert lab.cancel() == lab.cancel(force=True) == done


def test_an_attempt_that_fails_after_the_request_is_not_tried_again(lab: Lab) -> None:
    attempt = lab.go()
    lab.cancel()
    assert lab.fail(attempt).state is State.CANCELLED


def test_an_attempt_that_is_given_back_after_the_request_is_cancelled(lab: Lab) -> None:
    attempt = lab.go()
    lab.cancel()
    assert lab.finish(attempt, RELEASED).state is State.CANCELLED


def test_a_run_that_is_lost_after_the_request_is_not_resumed(lab: Lab) -> None:
    lab.go(who="a")
    lab.cancel()
    lab.dead.add("a")
    assert lab.claim(who="b").verdict is Verdict.ENDED
    assert lab.run().state is State.CANCELLED


def test_force_takes_the_token_so_that_a_late_success_is_refused(lab: Lab) -> None:
    attempt = lab.go()
    run = lab.cancel(force=True)
    assert run.state is State.CANCELLED
    assert run.token > attempt.token
    with pytest.raises(RunLost, match="it is cancelled"):
        lab.finish(attempt)
    assert lab.run() == run
    assert lab.told() == ["cancel_forced", "stale_write"]


def test_force_frees_the_lock_and_the_next_token_is_higher(lab: Lab) -> None:
    lab.go(100)
    taken = lab.cancel(100, force=True).token
    assert lab.go(200, "b").token > taken


def test_force_leaves_the_lease_that_somebody_else_has_by_now(lab: Lab) -> None:
    lab.go()
    lab.clocks.advance(31)
    finish(lab.ledger.leases.acquire("lock", holder=Holder("x", "host-x", 1), ttl=30.0))
    lab.cancel(force=True)
    assert lab.holder_of() == "x"


def test_a_run_that_nobody_knows_cannot_be_cancelled(lab: Lab) -> None:
    with pytest.raises(UnknownRun):
        lab.cancel(999)


# Items.


def test_an_item_is_begun_once_and_done_once(lab: Lab) -> None:
    attempt = lab.go()
    assert lab.begin(attempt, "x", "y", call="1") == [Found.FIRST, Found.FIRST]
    lab.end(attempt, "x")
    assert lab.begin(attempt, "x", call="2") == [Found.DONE]


def test_a_begin_that_is_repeated_after_a_lost_reply_is_still_the_first(lab: Lab) -> None:
    attempt = lab.go()
    assert lab.begin(attempt, "x") == lab.begin(attempt, "x") == [Found.FIRST]


def test_an_item_that_is_named_twice_in_one_begin_has_its_effect_once(lab: Lab) -> None:
    assert lab.begin(lab.go(), "x", "x") == [Found.FIRST, Found.OPEN]


def test_an_item_that_failed_is_begun_anew(lab: Lab) -> None:
    attempt = lab.go()
    lab.begin(attempt, "x", call="1")
    lab.end(attempt, "x", ItemState.FAILED)
    assert lab.begin(attempt, "x", call="2") == [Found.FIRST]


@pytest.mark.parametrize(("repeat", "found"), [(False, Found.DOUBT), (True, Found.AGAIN)])
def test_an_item_of_an_attempt_that_died_is_in_doubt(
    lab: Lab, found: Found, *, repeat: bool
) -> None:
    lab.begin(lab.go(who="a"), "x")
    lab.dead.add("a")
    assert lab.begin(lab.go(who="b"), "x", call="2", repeat=repeat) == [found]


def test_an_item_in_doubt_stays_so_until_somebody_repeats_it(lab: Lab) -> None:
    first = lab.go(who="a")
    lab.begin(first, "x")
    lab.dead.add("a")
    second = lab.go(who="b")
    lab.begin(second, "x", call="2")
    lab.end(second, "x")
    (item,) = finish(lab.ledger.items("s"))
    assert (item.state, item.token) == (ItemState.BEGUN, first.token)


def test_an_item_that_a_living_attempt_is_at_is_not_in_doubt(lab: Lab) -> None:
    policy = Policy(overlap=Overlap.ALLOW)
    one, two = lab.go(100, "a", policy), lab.go(200, "b", policy)
    lab.begin(one, "x", call="1")
    assert lab.begin(two, "x", call="2", repeat=True) == [Found.OPEN]


def test_items_are_listed_by_scope_and_state(lab: Lab) -> None:
    attempt = lab.go()
    lab.begin(attempt, "y", "x")
    lab.end(attempt, "y")
    assert [item.item for item in finish(lab.ledger.items("s"))] == ["x", "y"]
    open_ones = finish(lab.ledger.items("s", states=[ItemState.BEGUN]))
    assert [item.item for item in open_ones] == ["x"]
    assert finish(lab.ledger.items("elsewhere")) == []


# Lists.


def test_the_newest_slots_of_a_job_are_listed_first(lab: Lab) -> None:
    for slot, who in ((200, "a"), (100, "b"), (300, "c")):
        lab.finish(lab.go(slot, who))
    assert [run.key.slot for run in finish(lab.ledger.runs("job", limit=2))] == [300, 200]


def test_the_newest_slots_are_listed_first_whenever_they_ran(lab: Lab) -> None:
    for slot, who in ((200, "a"), (100, "b")):
        lab.finish(lab.go(slot, who))
        lab.clocks.advance(1)
    assert [run.key.slot for run in finish(lab.ledger.runs())] == [200, 100]


def test_runs_can_be_listed_by_state(lab: Lab) -> None:
    lab.go(100, "a")
    lab.claim(200, "b")
    skipped = finish(lab.ledger.runs(states=[State.SKIPPED]))
    assert [run.key.slot for run in skipped] == [200]


def test_a_note_is_among_the_events_of_its_run_only(lab: Lab) -> None:
    finish(lab.ledger.note(RunKey("job", 100), "stuck", token=7, detail="why"))
    (event,) = finish(lab.ledger.events(RunKey("job", 100)))
    assert (event.what, event.token, event.detail) == ("stuck", 7, "why")
    assert finish(lab.ledger.events(RunKey("job", 200))) == []


def test_a_beat_that_meets_the_end_of_its_own_run_is_no_stale_writer(lab: Lab) -> None:
    attempt = lab.go(100, "a")
    lab.finish(attempt)
    with pytest.raises(RunLost):
        finish(lab.ledger.beat(attempt, ttl=30))
    assert finish(lab.ledger.events(attempt.key)) == []


def test_who_gives_up_waiting_leaves_alone_what_has_begun_since(lab: Lab) -> None:
    attempt = lab.go(100, "a")
    cancel = lab.ledger.cancel(attempt.key, force=False, operator="b", only_waiting=True)
    assert finish(cancel).cancel_at == 0.0
    assert not finish(lab.ledger.beat(attempt, ttl=30))
