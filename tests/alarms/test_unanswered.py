"""A request whose answer never came is asked again, and finds what it did."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from alarmlab import Opened, memory_book

from fencepost import Fencepost
from fencepost.errors import GiveUp, OutcomeUnknown, StoreUnavailable
from fencepost.ledger.alarm_memory import MemoryAlarms
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fencepost import Alarm
    from fencepost.ledger.alarm_api import AlarmBook
    from fencepost.model.event import JobEvent, LeaseEvent


class Deaf:
    """A book whose answers to one verb get lost; ``away`` means that nothing is done at all."""

    def __init__(
        self,
        book: AlarmBook,
        verb: str,
        *,
        answers: int,
        away: bool = False,
        instead: type[BaseException] = OutcomeUnknown,
    ) -> None:
        self._book, self._verb, self.left, self._away = book, verb, answers, away
        self._instead = instead

    def __getattr__(self, name: str) -> object:
        verb = getattr(self._book, name)
        if name != self._verb:
            return verb

        async def unheard(*args: object, **words: object) -> object:
            if self.left and self._away:
                self.left -= 1
                raise StoreUnavailable("it is away")
            answer = await verb(*args, **words)
            if self.left:
                self.left -= 1
                raise self._instead("no answer came")
            return answer

        return unheard


class Kit:
    """A face on a deaf book."""

    def __init__(self, url: str) -> None:
        self.events: list[LeaseEvent | JobEvent] = []
        self.fp = Fencepost(url, on_event=self.events.append)
        self.seen: list[str] = []

        @self.fp.alarm("k", lease="200ms")
        def handle(alarm: Alarm) -> None:
            self.seen.append(alarm.key)

    def deafen(self, verb: str, *, answers: int, **how: Any) -> None:
        alarming = self.fp._alarming
        alarming._book = Deaf(alarming.book, verb, answers=answers, **how)  # type: ignore[assignment]
        alarming._ringer = None


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    kit = Kit(f"sqlite:///{tmp_path}/ledger.db")
    yield kit
    kit.fp.close()


def test_a_claim_that_is_answered_late_fires_what_it_was_granted_the_first_time(kit: Kit) -> None:
    kit.fp.alarms.set("k", "a", in_=0)
    kit.deafen("claim_due", answers=3)
    assert kit.fp.alarms.run_due().fired == 1
    assert kit.seen == ["a"]


def test_what_a_claim_was_granted_that_was_never_answered_is_fired_by_the_next_call(
    kit: Kit,
) -> None:
    for key in "abc":
        kit.fp.alarms.set("k", key, in_=0)
    kit.deafen("claim_due", answers=1000)
    with pytest.raises(OutcomeUnknown):
        kit.fp.alarms.run_due(workers=3)
    deaf = kit.fp._alarming.book
    assert isinstance(deaf, Deaf)
    deaf.left = 0
    assert kit.fp.alarms.run_due().fired == 3
    assert sorted(kit.seen) == ["a", "b", "c"]


def test_what_was_set_anew_since_an_unanswered_claim_fires_when_it_is_due_and_not_before(
    kit: Kit,
) -> None:
    seen: list[tuple[object, int]] = []

    @kit.fp.alarm("patient", lease="30s")
    def patient(alarm: Alarm) -> None:
        seen.append((alarm.payload, alarm.generation))

    kit.fp.alarms.set("patient", "a", in_=0, payload="old")
    kit.deafen("claim_due", answers=1, instead=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        kit.fp.alarms.run_due()
    kit.fp.alarms.set("patient", "a", in_="1h", payload="new")
    assert kit.fp.alarms.run_due() == (0, 0, 1, 0)
    assert seen == []
    (view,) = kit.fp.alarms.list()
    assert (view.state, view.payload, view.stale) == ("armed", "new", 1)
    assert [event.what for event in kit.events if event.what.startswith("alarm_")] == [
        "alarm_stale"
    ]
    newest = kit.fp.alarms.set("patient", "a", in_=0, payload="newest")
    assert kit.fp.alarms.run_due().fired == 1
    assert seen == [("newest", newest)]


def test_a_success_whose_answer_got_lost_is_a_success(kit: Kit) -> None:
    kit.fp.alarms.set("k", "a", in_=0)
    kit.deafen("finish", answers=1)
    assert kit.fp.alarms.run_due() == (1, 0, 0, 0)
    assert kit.fp.alarms.list() == []


def test_a_failure_whose_answer_got_lost_is_a_failure(kit: Kit) -> None:
    @kit.fp.alarm("bad")
    def bad() -> None:
        raise GiveUp("for good")

    kit.fp.alarms.set("bad", "a", in_=0)
    kit.deafen("fail", answers=1)
    assert kit.fp.alarms.run_due() == (0, 1, 0, 1)
    told = [event.what for event in kit.events if event.what.startswith("alarm_")]
    assert told == ["alarm_failed", "alarm_dead"]


def test_a_success_that_was_committed_when_an_interrupt_came_is_a_success(kit: Kit) -> None:
    kit.fp.alarms.set("k", "a", in_=0)
    kit.deafen("finish", answers=1, instead=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        kit.fp.alarms.run_due()
    assert kit.seen == ["a"]
    assert [event.what for event in kit.events if event.what.startswith("alarm_")] == [
        "alarm_fired"
    ]


def test_an_end_that_the_store_refuses_for_a_while_is_told_again(kit: Kit) -> None:
    kit.fp.alarms.set("k", "a", in_=0)
    kit.deafen("finish", answers=4, away=True)
    assert kit.fp.alarms.run_due() == (1, 0, 0, 0)
    assert kit.seen == ["a"]


def test_a_store_that_is_away_ends_the_call_and_nothing_is_lost(kit: Kit) -> None:
    kit.fp.alarms.set("k", "a", in_=0)
    kit.deafen("claim_due", answers=1, away=True)
    with pytest.raises(StoreUnavailable):
        kit.fp.alarms.run_due()
    assert kit.fp.alarms.run_due().fired == 1


def test_many_threads_count_what_they_do_and_keep_to_the_limit(kit: Kit) -> None:
    together = threading.Barrier(4)

    @kit.fp.alarm("wide")
    def wide(alarm: Alarm) -> None:
        if int(alarm.key) < 4:
            together.wait(timeout=10)

    for number in range(30):
        kit.fp.alarms.set("wide", str(number), in_=0)
    assert kit.fp.alarms.run_due(limit=20, workers=4).fired == 20
    assert len(kit.fp.alarms.list()) == 10
    assert kit.fp.alarms.run_due(workers=4).fired == 10


def test_two_books_on_one_shelf_are_one(tmp_path: Path) -> None:
    one: Opened = memory_book()
    other = MemoryAlarms(one.ledger._world, one.ledger)  # type: ignore[arg-type]
    generation = one.set()
    found = finish(other.get("k", "a"))
    assert found is not None
    assert found.generation == generation
