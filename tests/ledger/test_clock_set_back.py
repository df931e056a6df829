"""A ledger whose clock was set back by an hour makes nobody wait for that hour."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from ledgerlab import StillClocks, attempt_of, opened, wanted
from test_registering import ALL, A, B, C, Town, bills

from fencepost.errors import RunLost
from fencepost.ledger.alarm_open import alarms_of
from fencepost.ledger.memory import MemoryLedger
from fencepost.model.alarm import AlarmWant, Failure, Firing, Setting
from fencepost.model.alarm_policy import AlarmPolicy
from fencepost.model.claim import Verdict
from fencepost.model.cohort import GONE_AFTER, ORPHAN_AFTER
from fencepost.model.ending import Settled
from fencepost.model.lease import Holder
from fencepost.model.plan import WAITS
from fencepost.model.policy import Overlap, Policy
from fencepost.model.run import State
from fencepost.model.schedule import Every
from fencepost.model.slot import RunKey
from fencepost.stores.memory import MemoryStore
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish
from marialab import MariaClocks, MySQLClocks
from pglab import ServerClocks, fresh_namespace, opened_postgres

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fencepost.ledger.api import Ledger
    from fencepost.testing.clock import SettableClocks

HOUR, TTL = 3600.0, 2.0
BRIEF = Policy(lease=TTL, loss_pause=0.0)
AGAIN = Settled(State.WAITING_RETRY, "error", 10.0, error="Oops")
# Where every process is the clock, a step is believed once nobody confirms the old time.
BELIEVED = 16.0


class Place(Town):
    """A town whose clock can be set back."""

    def set_back(self, *present: object) -> None:
        """Set the clock back by an hour, between two signs of life of those who are present."""
        self.attend(*present)  # type: ignore[arg-type]  # instances
        self.clocks.step_wall(-HOUR)
        self.clocks.advance(BELIEVED)
        self.attend(*present)  # type: ignore[arg-type]  # instances

    def live(self) -> list[str]:
        return [record.instance.name for record in finish(self.planner.instances())]


@pytest.fixture(params=["memory", "sqlite", "postgres", "mariadb", "mysql"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    clocks: SettableClocks = StillClocks()
    ledger: Ledger
    if request.param == "memory":
        world = BlockingWorld(clocks=clocks)
        ledger = MemoryLedger(world, MemoryStore(world))
    elif request.param == "sqlite":
        ledger = opened(":memory:", clocks)
    elif request.param in ("mariadb", "mysql"):
        clocks = MariaClocks() if request.param == "mariadb" else MySQLClocks()
        ledger = clocks.opened(fresh_namespace())
    else:
        clocks = ServerClocks()
        ledger = opened_postgres(clocks.url, namespace=fresh_namespace())
    yield Place(ledger, clocks)  # type: ignore[arg-type]  # they stand still as well
    finish(ledger.close())
    if isinstance(clocks, ServerClocks):
        clocks.close()


def test_a_run_whose_holder_died_is_resumed_after_one_ttl(place: Place) -> None:
    place.policy = BRIEF
    place.announce(A, bills())
    place.clocks.advance(41)
    (first,) = place.tick()
    place.clocks.step_wall(-HOUR)
    place.tick()
    place.clocks.advance(TTL + 0.1)
    (second,) = place.tick()
    assert first.run is not None
    assert second.run is not None
    assert second.run.key == first.run.key
    assert (second.run.starts, second.run.losses) == (2, 1)
    assert second.run.token > first.run.token


def test_who_only_triggers_waits_for_one_ttl_as_well(place: Place) -> None:
    key = RunKey("bills", 60)
    first = finish(place.ledger.claim(wanted(key, "first", BRIEF)))
    assert first.verdict is Verdict.GO
    place.clocks.step_wall(-HOUR)
    refused = finish(place.ledger.claim(wanted(key, "second", BRIEF)))
    assert refused.verdict is Verdict.BUSY
    assert refused.holder is not None
    assert refused.holder.expires_in <= TTL
    place.clocks.advance(TTL + 0.1)
    second = finish(place.ledger.claim(wanted(key, "third", BRIEF)))
    assert second.verdict is Verdict.GO
    with pytest.raises(RunLost, match="has it now"):
        finish(place.ledger.finish(attempt_of(first), Settled(State.SUCCEEDED)))


def test_another_try_does_not_wait_for_the_hour(place: Place) -> None:
    place.announce(A, bills())
    place.clocks.advance(41)
    (first,) = place.tick()
    finish(place.ledger.finish(attempt_of(first), AGAIN))
    place.set_back(A)
    place.clocks.advance(10.0)
    (second,) = place.tick()
    assert second.run is not None
    assert first.run is not None
    assert second.run.key == first.run.key


def test_another_try_of_what_is_only_triggered_does_not_wait_either(place: Place) -> None:
    key = RunKey("bills", 60)
    first = finish(place.ledger.claim(wanted(key, "first")))
    finish(place.ledger.finish(attempt_of(first), AGAIN))
    assert finish(place.ledger.claim(wanted(key, "second"))).verdict is Verdict.LATER
    place.clocks.step_wall(-HOUR)
    place.clocks.advance(BELIEVED)
    assert finish(place.ledger.claim(wanted(key, "third"))).verdict is Verdict.GO


def test_what_is_made_up_does_not_wait_for_the_hour(place: Place) -> None:
    place.announce(A, bills(rules=ALL))
    place.clocks.advance(3 * HOUR)
    (oldest,) = place.tick()
    assert place.tick() == []  # the next slot waits for its turn
    place.set_back(A)
    finish(place.ledger.finish(attempt_of(oldest), Settled(State.SUCCEEDED)))
    place.clocks.advance(WAITS)
    (following,) = place.tick()
    assert oldest.run is not None
    assert following.run is not None
    assert following.run.key.slot == oldest.run.key.slot + 60


def test_who_does_not_stop_is_replaced_after_its_grace(place: Place) -> None:
    place.policy = Policy(lease=300.0, overlap=Overlap.REPLACE, cancel_grace=5.0)
    place.announce(A, bills())
    place.clocks.advance(41)
    (stubborn,) = place.tick()
    place.clocks.advance(60)
    assert place.tick() == []  # it was asked to stop
    place.set_back(A)
    place.clocks.advance(6)
    begun = place.tick()  # it is taken away
    place.clocks.advance(WAITS)
    begun += place.tick()
    assert [one.run.key.slot for one in begun if one.run] == [
        stubborn.run.key.slot + 60 if stubborn.run else 0
    ]


def test_who_died_is_gone_after_its_time_and_nobody_is_at_once(place: Place) -> None:
    for instance in (A, B, C):
        place.announce(instance, bills())
    place.set_back(A)
    assert place.live() == ["a", "b", "c"]
    place.pass_time(GONE_AFTER - 10, A, C)
    assert place.live() == ["a", "b", "c"]
    place.pass_time(15, A, C)
    assert place.live() == ["a", "c"]


def test_a_clock_that_went_ahead_and_came_back_takes_nobody_for_gone(place: Place) -> None:
    place.announce(A, bills())
    place.announce(B, bills()._replace(job="others"))
    place.clocks.step_wall(HOUR)
    place.clocks.advance(BELIEVED)
    told = place.attend(A)
    place.clocks.step_wall(-HOUR)
    place.clocks.advance(BELIEVED)
    told += place.attend(A)
    assert place.live() == ["a", "b"]
    assert "orphaned" not in told
    assert not place.job("others").unknown_since


def test_a_new_version_takes_over_at_once(place: Place) -> None:
    place.announce(A, bills())
    place.clocks.advance(600)
    place.announce(B, bills(Every(30)))
    assert place.job().epoch == 2
    place.set_back(A, B)
    place.clocks.advance(1)
    place.announce(C, bills(Every(20)))
    assert place.job().epoch == 3
    place.attend(A, B, C)
    assert place.job().epoch == 3


def test_a_version_that_is_gone_gives_way_after_its_time(place: Place) -> None:
    place.announce(A, bills())
    place.clocks.advance(20)
    place.announce(B, bills(Every(30)))
    assert place.job().spec == bills(Every(30)).spec
    place.set_back(A)
    place.pass_time(GONE_AFTER + 10, A)
    assert place.job().spec == bills().spec


def test_a_job_that_nobody_knows_is_told_of_in_time(place: Place) -> None:
    place.announce(A, bills()._replace(job="others"))
    place.announce(B, bills())
    place.pass_time(GONE_AFTER + 5, A)
    assert place.job("bills").unknown_since
    place.set_back(A)
    place.pass_time(ORPHAN_AFTER, A)
    assert place.job("bills").orphaned_at


def test_it_is_told_of_once(place: Place) -> None:
    place.announce(A, bills())
    place.announce(B, bills())
    place.clocks.step_wall(-HOUR)
    place.clocks.advance(BELIEVED)
    told = place.attend(A, B, A)
    assert told.count("clock_set_back") == 1


def test_a_clock_that_runs_a_little_behind_is_nothing_to_tell(place: Place) -> None:
    place.announce(A, bills())
    place.clocks.step_wall(-1.0)
    assert place.attend(A) == []


@pytest.mark.parametrize("place", ["sqlite", "postgres", "mariadb", "mysql"], indirect=True)
def test_an_alarm_that_failed_does_not_wait_for_the_hour(place: Place) -> None:
    policies = {"kind": AlarmPolicy()}
    book = alarms_of(BlockingWorld(clocks=place.clocks), place.ledger)
    place.announce(A, bills())
    finish(book.set(Setting("kind", "x", "call", after=0.0)))
    place.clocks.advance(2 * HOUR)
    (one,) = finish(book.claim_due(AlarmWant(Holder("n", "here", 1), policies, 5))).claimed
    alarm = one.record
    firing = Firing("kind", "x", alarm.fired, alarm.token, alarm.holder.nonce, alarm.lease)
    finish(book.fail(firing, Failure("errors", 10.0, error="Oops")))
    place.set_back(A)
    place.clocks.advance(10.0)
    assert finish(book.claim_due(AlarmWant(Holder("m", "here", 1), policies, 5))).claimed


@pytest.mark.parametrize("place", ["memory", "postgres", "mariadb", "mysql"], indirect=True)
def test_an_alarm_whose_handler_died_fires_again_after_one_ttl(place: Place) -> None:
    policies = {"kind": AlarmPolicy(lease=TTL)}
    book = alarms_of(BlockingWorld(clocks=place.clocks), place.ledger)
    finish(book.set(Setting("kind", "x", "call", after=0.0)))
    place.clocks.advance(2 * HOUR)
    (first,) = finish(book.claim_due(AlarmWant(Holder("n", "here", 1), policies, 5))).claimed
    place.clocks.step_wall(-HOUR)
    assert not finish(book.claim_due(AlarmWant(Holder("m", "here", 1), policies, 5))).claimed
    place.clocks.advance(TTL + 0.1)
    again = finish(book.claim_due(AlarmWant(Holder("o", "here", 1), policies, 5))).claimed
    assert [one.record.losses for one in again] == [1]
    assert again[0].record.token > first.record.token
