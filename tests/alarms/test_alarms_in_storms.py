"""Production flows and books keep every promise about alarms, whatever the seed does to them."""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import pytest

from fencepost.flows.firing import Ringer
from fencepost.ledger.alarm_memory import MemoryAlarms
from fencepost.model.alarm import AlarmEnd, Became
from fencepost.testing.alarm_checker import check_alarms
from fencepost.testing.history import table
from fencepost.testing.simulator import faults
from fencepost.testing.simulator.alarms import memory_alarms, simulate_alarms, sqlite_alarms

if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost.flows.firing import _Asker
    from fencepost.model.alarm import AlarmWant, Batch, Firing, Rearm
    from fencepost.testing.simulator.alarm_books import AlarmServer

# `FENCEPOST_SEEDS=10000 pytest tests/alarms` for the long run.
SEEDS = int(os.environ.get("FENCEPOST_SEEDS", "2000"))
BOOKS: dict[str, Callable[..., AlarmServer]] = {"memory": memory_alarms, "sqlite": sqlite_alarms}


@pytest.mark.parametrize(("book", "seeds"), [("memory", SEEDS // 5), ("sqlite", SEEDS // 40)])
def test_no_seed_breaks_a_promise_about_an_alarm(book: str, seeds: int) -> None:
    for seed in range(seeds):
        history = simulate_alarms(seed, server=BOOKS[book])
        broken = check_alarms(history)
        assert not broken, f"seed {seed}: {broken}\n{table(history)}"


def test_the_same_seed_gives_the_same_history() -> None:
    assert simulate_alarms(7) == simulate_alarms(7)
    assert simulate_alarms(7) != simulate_alarms(8)


def test_everything_that_can_happen_to_an_alarm_happens() -> None:
    seen: Counter[str] = Counter()
    for seed in range(150):
        seen.update(event.what for event in simulate_alarms(seed))
    wanted = "set,cleared,claimed,adopted,began,acted,committed,crashed,paused,released,died"
    wanted += ",failed again,failed dead,failed stale,failed lost"
    assert {what for what in wanted.split(",") if not seen[what]} == set()


def test_without_faults_every_generation_is_begun_once_for_each_try() -> None:
    for seed in range(40):
        history = simulate_alarms(seed, faults=faults.NONE)
        assert not check_alarms(history)
        events = Counter(event.what for event in history)
        assert events["claimed"] == events["began"]


class Forgetful(MemoryAlarms):
    """A book whose ends do not look at the generation."""

    async def finish(self, firing: Firing, rearm: Rearm | None = None) -> AlarmEnd:
        known = self._desk.find(firing.kind, firing.key)
        if known is not None and known.fired == firing.generation and rearm is None:
            self._desk.let_go(known)
            self._desk.drop(firing.lease, firing.nonce)
            return AlarmEnd(Became.DONE)
        return await super().finish(firing, rearm)


class Trusting(MemoryAlarms):
    """A book whose ends do not look at the token."""

    async def finish(self, firing: Firing, rearm: Rearm | None = None) -> AlarmEnd:
        known = self._desk.find(firing.kind, firing.key)
        if known is not None and known.fired == firing.generation:
            firing = firing._replace(token=known.token, nonce=known.holder.nonce)
        return await super().finish(firing, rearm)


class Hasty(MemoryAlarms):
    """A book that takes everybody for dead."""

    async def claim_due(self, want: AlarmWant) -> Batch:
        for record in self._desk.firing(want):
            if len(record.key) <= 3:
                self._desk.drop(record.lease, record.holder.nonce)
        return await super().claim_due(want)


class Eager(MemoryAlarms):
    """A book that has no end: what was committed stays armed."""

    async def finish(self, firing: Firing, rearm: Rearm | None = None) -> AlarmEnd:
        known = self._desk.find(firing.kind, firing.key)
        end = await super().finish(firing, rearm)
        if end == AlarmEnd(Became.DONE) and known is not None and known.losses:
            self._desk.put(known._replace(fired=0, state=known.state.ARMED))
        return end


@pytest.mark.parametrize("kind", [Forgetful, Trusting, Hasty, Eager])
def test_a_book_that_breaks_a_promise_is_found_out(kind: type[MemoryAlarms]) -> None:
    broken = partial(memory_alarms, kind=kind)
    assert any(check_alarms(simulate_alarms(seed, server=broken)) for seed in range(100))


def never_alone(ringer: Ringer, asker: _Asker, batch: Batch | None) -> None:
    HEARD(ringer, asker, batch)
    ringer._alone = False


HEARD = Ringer._heard
CARELESS = {
    "_heard": (never_alone, "one that fires alone has a neighbour"),
    "room": (lambda _, workers: workers, "more handlers than workers"),
}


@pytest.mark.parametrize("part", CARELESS)
def test_a_process_that_fires_more_than_it_may_is_found_out(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    careless, why = CARELESS[part]
    monkeypatch.setattr(Ringer, part, careless)
    broken = [one for seed in range(100) for one in check_alarms(simulate_alarms(seed))]
    assert broken
    assert all(why in one for one in broken)
