"""Every row of the contract about alarms, for the reference and for every database."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from alarmlab import CLOCKS, START, Opened, book_by, firing_of

from fencepost.errors import AlarmChanged, LeaseLost
from fencepost.model.alarm import (
    NOT_BEGUN,
    AlarmState,
    Became,
    Failure,
    NextDue,
    Rearm,
    Setting,
    firing_of as record_firing,
)
from fencepost.model.alarm_policy import AlarmPolicy, Budget
from fencepost.model.lease import Holder
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fencepost.testing.clock import SettableClocks

ERROR = Failure("errors", 10.0, error="Oops: it broke")
LOSSY = AlarmPolicy(max_losses=2)


@pytest.fixture(params=CLOCKS)
def clocks(request: pytest.FixtureRequest) -> Iterator[SettableClocks]:
    clocks = CLOCKS[request.param]()
    yield clocks
    if hasattr(clocks, "close"):
        clocks.close()


@pytest.fixture
def opened(clocks: SettableClocks, tmp_path: Path) -> Iterator[Opened]:
    opened = book_by(clocks, tmp_path)
    yield opened
    opened.close()


# Setting.


def test_a_set_returns_a_generation_that_is_the_stores_time(opened: Opened) -> None:
    assert opened.set() == START * 1e6


def test_each_set_has_a_higher_generation_though_the_clock_falls(
    opened: Opened, clocks: SettableClocks
) -> None:
    first = opened.set()
    clocks.step_wall(-3_600.0)
    assert opened.set() == first + 1


def test_a_generation_never_falls_though_the_alarm_is_gone_and_the_clock_falls(
    opened: Opened, clocks: SettableClocks
) -> None:
    generation = opened.set()
    finish(opened.book.finish(opened.fired()))
    assert finish(opened.book.get("k", "a")) is None
    clocks.step_wall(-3_600.0)
    assert opened.set() > generation


def test_a_set_replaces_the_earlier_time_and_payload(opened: Opened) -> None:
    opened.set(after=5.0, payload="1")
    opened.set(after=50.0, payload="2")
    record = opened.get()
    assert (record.due_at, record.payload) == (START + 50.0, "2")
    assert finish(opened.book.next_due(("k",))) == NextDue(50.0)


def test_a_set_of_an_old_generation_is_refused_with_the_current_one(opened: Opened) -> None:
    old, new = opened.set(), opened.set()
    with pytest.raises(AlarmChanged, match=f"its generation is {new}") as refused:
        opened.set(if_generation=old)
    assert (refused.value.current, refused.value.expected) == (new, old)
    assert opened.get().generation == new
    assert opened.set(if_generation=new) > new


def test_generation_zero_means_only_if_there_is_none(opened: Opened) -> None:
    opened.set(if_generation=0)
    with pytest.raises(AlarmChanged, match="no alarm was expected"):
        opened.set(if_generation=0)
    finish(opened.book.clear("k", "a"))
    opened.set(if_generation=0)


def test_a_set_whose_answer_got_lost_finds_itself(opened: Opened, clocks: SettableClocks) -> None:
    setting = Setting("k", "a", "call", after=5.0, if_generation=0)
    first = finish(opened.book.set(setting))
    clocks.advance(1.0)
    assert finish(opened.book.set(setting)) == first


def test_one_key_of_two_kinds_has_two_alarms(opened: Opened) -> None:
    opened.set(kind="k")
    opened.set(kind="other")
    (one,) = opened.claim().claimed
    assert one.record.kind == "k"
    assert opened.get(kind="other").state is AlarmState.ARMED


# Clearing.


def test_a_clear_leaves_a_tombstone_of_a_higher_generation(opened: Opened) -> None:
    generation = opened.set()
    tombstone = finish(opened.book.clear("k", "a"))
    assert tombstone is not None
    assert tombstone.generation == generation + 1
    assert tombstone.state is AlarmState.CLEARED
    assert opened.claim().claimed == ()
    assert finish(opened.book.clear("k", "a")) == tombstone
    assert finish(opened.book.next_due(("k",))) == NextDue()


def test_a_late_set_with_the_generation_before_the_clear_loses(opened: Opened) -> None:
    generation = opened.set()
    finish(opened.book.clear("k", "a"))
    with pytest.raises(AlarmChanged):
        opened.set(if_generation=generation)


def test_a_clear_of_another_generation_is_refused(opened: Opened) -> None:
    generation = opened.set()
    with pytest.raises(AlarmChanged):
        finish(opened.book.clear("k", "a", if_generation=generation - 1))
    assert opened.get().state is AlarmState.ARMED


def test_what_was_never_set_leaves_no_tombstone(opened: Opened) -> None:
    assert finish(opened.book.clear("k", "a")) is None
    assert finish(opened.book.get("k", "a")) is None


@pytest.mark.parametrize(("keep", "kept"), [(0.0, 86_400.0), (100_000.0, 100_000.0)])
def test_a_tombstone_is_kept_for_a_day_and_for_the_retry_horizon(
    opened: Opened, clocks: SettableClocks, keep: float, kept: float
) -> None:
    opened.set()
    finish(opened.book.clear("k", "a", keep=keep))
    clocks.advance(kept - 1.0)
    assert finish(opened.book.prune()) == 0
    clocks.advance(1.0)
    assert finish(opened.book.prune()) == 1
    assert finish(opened.book.get("k", "a")) is None


# Firing.


def test_what_is_not_due_is_not_claimed(opened: Opened, clocks: SettableClocks) -> None:
    opened.set(after=5.0)
    assert opened.claim().claimed == ()
    clocks.advance(5.0)
    assert len(opened.claim().claimed) == 1


def test_a_batch_is_the_oldest_first_with_a_token_each(
    opened: Opened, clocks: SettableClocks
) -> None:
    for number, key in enumerate("cab"):
        opened.set(key, after=float(number))
    clocks.advance(10.0)
    batch = opened.claim(limit=2)
    assert [one.record.key for one in batch.claimed] == ["c", "a"]
    assert batch.more
    tokens = [one.record.token for one in batch.claimed]
    assert tokens == sorted(set(tokens))
    leases = [view.name for view in finish(opened.leases.views()) if view.held]
    assert leases == ["alarm:k/a", "alarm:k/c"]


def test_an_alarm_that_fires_is_nobody_elses(opened: Opened) -> None:
    opened.set()
    opened.fired()
    assert opened.claim().claimed == ()
    assert finish(opened.book.next_due(("k",))) == NextDue(None, firing=True)


def test_a_claim_whose_answer_got_lost_finds_what_it_claimed_and_no_more(opened: Opened) -> None:
    opened.set("a")
    first = opened.claim(nonce="same")
    opened.set("b")
    again = opened.claim(nonce="same")
    assert [one.record for one in again.claimed] == [one.record for one in first.claimed]
    assert again.claimed[0].adopted


def test_a_claim_that_was_never_answered_does_not_fire_what_was_set_anew_since(
    opened: Opened,
) -> None:
    opened.set(payload='"old"')
    opened.claim(nonce="same")
    newer = opened.set(payload='"new"')
    again = opened.claim(nonce="same", sweep=False)
    assert (again.claimed, again.again) == ((), True)
    (stale,) = again.stale
    assert finish(opened.book.fail(record_firing(stale), NOT_BEGUN)).became is Became.STALE
    record = opened.get()
    assert (record.state, record.generation, record.stale) == (AlarmState.ARMED, newer, 1)
    assert finish(opened.leases.views()) == []
    (one,) = opened.claim().claimed
    assert (one.record.fired, one.record.payload) == (newer, '"new"')
    assert one.record.token > stale.token


def test_a_claim_that_was_never_answered_does_not_fire_what_was_cleared_since(
    opened: Opened,
) -> None:
    opened.set()
    opened.claim(nonce="same")
    finish(opened.book.clear("k", "a"))
    again = opened.claim(nonce="same")
    assert again.claimed == ()
    (stale,) = again.stale
    finish(opened.book.fail(record_firing(stale), NOT_BEGUN))
    record = opened.get()
    assert (record.state, record.fired, record.stale) == (AlarmState.CLEARED, 0, 1)
    assert finish(opened.leases.views()) == []


def test_a_claim_that_arrives_once_more_takes_nothing_from_whom_it_was_granted_to(
    opened: Opened,
) -> None:
    opened.set()
    (one,) = opened.claim(nonce="same").claimed
    opened.set(payload='"new"')
    opened.claim(nonce="same")
    assert finish(opened.book.beat(firing_of(one), ttl=30.0)) is True
    assert finish(opened.book.finish(firing_of(one))).became is Became.STALE


def test_what_was_never_begun_is_as_if_it_had_not_been_claimed(opened: Opened) -> None:
    opened.set()
    before = opened.get()
    policy = AlarmPolicy(budget=Budget(1, 60.0))
    for _ in range(3):
        firing = opened.fired(policy)
        for _ in range(2):  # its answer got lost
            assert finish(opened.book.fail(firing, NOT_BEGUN)).became is Became.AGAIN
    record = opened.get()
    assert (record.state, record.releases, record.starts) == (AlarmState.ARMED, 3, 3)
    assert (record.fires, record.stale, record.due_at) == (0, 0, before.due_at)


def test_what_was_never_begun_is_still_to_be_fired_alone(
    opened: Opened, clocks: SettableClocks
) -> None:
    opened.set()
    opened.fired(AlarmPolicy(lease=5.0))
    clocks.advance(6.0)
    assert opened.claim(alone=False).claimed == ()
    for _ in range(2):
        (one,) = opened.claim().claimed
        assert one.record.solitary
        for _ in range(2):
            assert finish(opened.book.fail(firing_of(one), NOT_BEGUN)).became is Became.AGAIN
        assert (opened.get().streak, opened.get().stale) == (1, 0)


def test_a_success_deletes_the_alarm_and_its_lease(opened: Opened) -> None:
    opened.set()
    assert finish(opened.book.finish(opened.fired())).became is Became.DONE
    assert finish(opened.book.get("k", "a")) is None
    assert finish(opened.leases.views()) == []


def test_a_success_that_is_told_twice_is_gone(opened: Opened) -> None:
    opened.set()
    firing = opened.fired()
    finish(opened.book.finish(firing))
    assert finish(opened.book.finish(firing)).became is Became.GONE


def test_a_set_while_it_fires_stays(opened: Opened, clocks: SettableClocks) -> None:
    opened.set(payload="1")
    firing = opened.fired()
    newer = opened.set(after=50.0, payload="2")
    assert finish(opened.book.beat(firing, ttl=30.0)) is True
    assert opened.claim().claimed == ()
    end = finish(opened.book.finish(firing, Rearm("3", after=1.0)))
    assert end.became is Became.STALE
    record = opened.get()
    assert (record.generation, record.payload, record.due_at) == (newer, "2", START + 50.0)
    assert (record.state, record.stale, record.starts) == (AlarmState.ARMED, 1, 0)
    clocks.advance(50.0)
    assert opened.fired().generation == newer


def test_a_clear_while_it_fires_stays(opened: Opened) -> None:
    opened.set()
    firing = opened.fired()
    finish(opened.book.clear("k", "a"))
    assert finish(opened.book.finish(firing, Rearm(None))).became is Became.STALE
    record = opened.get()
    assert (record.state, record.stale) == (AlarmState.CLEARED, 1)
    assert finish(opened.leases.views()) == []


def test_a_handler_that_dies_after_its_alarm_was_cleared_leaves_nothing_behind(
    opened: Opened, clocks: SettableClocks
) -> None:
    opened.set()
    opened.fired()
    finish(opened.book.clear("k", "a"))
    clocks.advance(31.0)
    assert opened.claim().claimed == ()
    assert opened.get().state is AlarmState.CLEARED
    assert finish(opened.leases.views()) == []
    assert finish(opened.book.next_due(("k",))) == NextDue()


def test_what_was_cleared_and_set_again_waits_for_the_handler_that_still_runs(
    opened: Opened,
) -> None:
    opened.set()
    firing = opened.fired()
    finish(opened.book.clear("k", "a"))
    newest = opened.set()
    assert opened.claim().claimed == ()
    finish(opened.book.finish(firing))
    assert opened.fired().generation == newest


def test_a_rearm_commits_with_the_success(opened: Opened, clocks: SettableClocks) -> None:
    opened.set(payload="1")
    firing = opened.fired()
    end = finish(opened.book.finish(firing, Rearm("2", after=7.0)))
    assert end.became is Became.DONE
    record = opened.get()
    assert record.generation > firing.generation
    assert (record.payload, record.due_at, record.starts) == ("2", START + 7.0, 0)
    assert finish(opened.book.finish(firing, Rearm("2", after=7.0))).became is Became.DONE
    assert opened.get() == record
    clocks.advance(7.0)
    assert opened.fired().generation == record.generation


def test_every_so_often_does_not_drift_and_what_was_missed_is_missed(
    opened: Opened, clocks: SettableClocks
) -> None:
    opened.set()
    clocks.advance(3.0)
    finish(opened.book.finish(opened.fired(), Rearm(None, every=10.0)))
    assert opened.get().due_at == START + 10.0
    clocks.advance(40.0)
    finish(opened.book.finish(opened.fired(), Rearm(None, every=10.0)))
    assert opened.get().due_at == START + 50.0


# Failing.


def test_a_failure_is_tried_again_after_its_pause_and_counted(
    opened: Opened, clocks: SettableClocks
) -> None:
    opened.set()
    first = opened.fired()
    assert finish(opened.book.fail(first, ERROR)).became is Became.AGAIN
    assert finish(opened.book.next_due(("k",))) == NextDue(10.0)
    clocks.advance(10.0)
    again = opened.fired()
    assert (again.generation, opened.get().attempt) == (first.generation, 2)
    assert again.token > first.token


def test_the_last_failure_leaves_it_dead_and_nothing_is_due(
    opened: Opened, clocks: SettableClocks
) -> None:
    opened.set()
    firing = opened.fired()
    assert finish(opened.book.fail(firing, ERROR._replace(dead="exhausted"))).became is Became.DEAD
    record = opened.get()
    assert (record.state, record.reason, record.error) == ("dead", "exhausted", "Oops: it broke")
    assert finish(opened.book.next_due(("k",))) == NextDue()
    clocks.advance(1e6)
    assert opened.claim().claimed == ()
    assert [one.key for one in finish(opened.book.listed(states=(AlarmState.DEAD,)))] == ["a"]


def test_who_sets_a_dead_alarm_again_begins_anew(opened: Opened) -> None:
    opened.set()
    finish(opened.book.fail(opened.fired(), ERROR._replace(dead="exhausted")))
    opened.set()
    record = opened.get()
    assert (record.state, record.errors, record.error, record.fires) == ("armed", 0, None, 0)


# Losing.


def test_a_handler_that_vanished_is_counted_and_the_alarm_fires_again(
    opened: Opened, clocks: SettableClocks
) -> None:
    opened.set()
    first = opened.fired()
    clocks.advance(31.0)
    again = opened.fired()
    assert again.generation == first.generation
    assert again.token > first.token
    record = opened.get()
    assert (record.starts, record.losses, record.attempt) == (2, 1, 1)


def test_a_handler_that_comes_back_after_its_loss_commits_nothing(
    opened: Opened, clocks: SettableClocks
) -> None:
    opened.set()
    zombie = opened.fired()
    clocks.advance(31.0)
    heir = opened.fired()
    with pytest.raises(LeaseLost):
        finish(opened.book.beat(zombie, ttl=30.0))
    assert finish(opened.book.finish(zombie, Rearm(None))).became is Became.LOST
    assert finish(opened.book.fail(zombie, ERROR)).became is Became.LOST
    assert opened.get().stale == 2
    assert finish(opened.book.finish(heir)).became is Became.DONE
    assert finish(opened.book.finish(zombie)).became is Became.GONE


def test_a_handler_that_kills_its_process_ends_dead(opened: Opened, clocks: SettableClocks) -> None:
    opened.set()
    for _ in range(3):
        opened.fired(LOSSY)
        clocks.advance(100.0)
        opened.claim(LOSSY, limit=0)  # notices the loss
        clocks.advance(100.0)
    record = opened.get()
    assert (record.state, record.reason, record.losses) == ("dead", "poison", 3)
    assert finish(opened.book.next_due(("k",))) == NextDue()


def test_neighbours_of_one_who_kills_are_not_blamed_and_it_goes_alone(
    opened: Opened, clocks: SettableClocks
) -> None:
    for key in "abc":
        opened.set(key)
    assert len(opened.claim().claimed) == 3
    clocks.advance(31.0)
    seen = []
    while claimed := opened.claim(LOSSY).claimed:
        (one,) = claimed
        seen.append(one.record.key)
        assert one.record.solitary
        finish(opened.book.finish(firing_of(one)))
    assert seen == ["a", "b", "c"]


def test_one_who_kills_goes_beside_others_where_nobody_is_ever_alone(
    opened: Opened, clocks: SettableClocks
) -> None:
    opened.set(after=25.0)
    clocks.advance(25.0)
    opened.fired(AlarmPolicy(lease=1.0))
    clocks.advance(2.0)
    assert opened.claim(limit=0).lost == 1
    assert opened.claim(alone=False).claimed == ()
    clocks.advance(10.0)
    (one,) = opened.claim(alone=False).claimed
    assert not one.record.solitary


def test_a_loss_of_what_was_set_anew_is_not_held_against_it(
    opened: Opened, clocks: SettableClocks
) -> None:
    opened.set()
    opened.fired()
    newer = opened.set()
    clocks.advance(31.0)
    assert opened.fired().generation == newer
    assert opened.get().losses == 0


# Late ones, and those that come too often.


def test_one_that_is_late_by_more_than_its_grace_is_counted(
    opened: Opened, clocks: SettableClocks
) -> None:
    opened.set()
    clocks.advance(60.0)
    (on_time,) = opened.claim().claimed
    assert (on_time.late, on_time.overdue, on_time.record.late) == (60.0, False, 0)
    finish(opened.book.finish(firing_of(on_time), Rearm(None, after=5.0)))
    clocks.advance(66.0)
    (late,) = opened.claim().claimed
    assert (late.late, late.overdue, late.record.late) == (61.0, True, 1)


def test_one_that_fires_more_often_than_its_budget_dies(
    opened: Opened, clocks: SettableClocks
) -> None:
    policy = AlarmPolicy(budget=Budget(3, 60.0))
    opened.set()
    for _ in range(3):
        clocks.advance(1.0)
        finish(opened.book.finish(opened.fired(policy), Rearm(None)))
    (dead,) = opened.claim(policy).dead
    assert (dead.state, dead.reason) == ("dead", "budget")
    assert "3 times within 60 s" in str(dead.error)
    assert finish(opened.book.next_due(("k",))) == NextDue()
    opened.set()
    opened.fired(policy)


def test_one_that_keeps_within_its_budget_goes_on(opened: Opened, clocks: SettableClocks) -> None:
    policy = AlarmPolicy(budget=Budget(3, 60.0))
    opened.set()
    for _ in range(10):
        finish(opened.book.finish(opened.fired(policy), Rearm(None)))
        clocks.advance(20.0)
    assert opened.get().state is AlarmState.ARMED


def test_one_whose_lease_somebody_has_taken_by_hand_waits(
    opened: Opened, clocks: SettableClocks
) -> None:
    opened.set()
    finish(opened.leases.acquire("alarm:k/a", holder=Holder("x", "there", 2), ttl=20.0))
    assert opened.claim().claimed == ()
    assert finish(opened.book.next_due(("k",))) == NextDue(1.0)
    clocks.advance(20.0)
    opened.fired()


def test_only_kinds_that_one_can_handle_are_claimed_and_waited_for(opened: Opened) -> None:
    opened.set(kind="other")
    assert opened.claim().claimed == ()
    assert finish(opened.book.next_due(("k",))) == NextDue()
    assert finish(opened.book.next_due(("k", "other"))) == NextDue(0.0)
