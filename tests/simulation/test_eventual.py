"""A lock that looks and then writes, on edges that hear of each other later: T0, and why."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from fencepost import Fencepost
from fencepost.errors import LeaseHeld, LeaseLost, Misuse
from fencepost.ledger import open as ledgers
from fencepost.model.lease import Holder
from fencepost.model.tier import Tier, refuse_less, tier_of
from fencepost.stores.memory import MemoryStore
from fencepost.testing.checker import check, relevant
from fencepost.testing.clock import SettableClocks
from fencepost.testing.conformance import Desk, LeaseStoreConformance
from fencepost.testing.eventual import CompareAndSetStore, EventualKv, EventualStore
from fencepost.testing.history import table
from fencepost.testing.simulator import faults
from fencepost.testing.simulator.cluster import simulate
from fencepost.testing.simulator.eventual import COMPARED, EVENTUAL
from fencepost.testing.simulator.scheduler import Scheduler
from fencepost.testing.simulator.world import Machine, SimulatedWorld
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost.stores.api import LeaseStore
    from fencepost.world.api import World

    Kind = type[EventualStore]

# Somebody who deletes a key by hand also deletes what tells a late duplicate from a first request.
NO_DELETIONS = faults.ALL._replace(deletions=0.0)


# In the simulator.


def test_two_hold_it_at_once_though_nothing_else_goes_wrong() -> None:
    for seed in range(20):
        rules = {
            broken.rule for broken in check(simulate(seed, parts=EVENTUAL, faults=faults.NONE))
        }
        if "one holder" in rules:
            return
    raise AssertionError("no seed shows the duplicate")


def test_the_same_lock_with_a_condition_keeps_every_promise_in_every_storm() -> None:
    for seed in range(400):
        history = simulate(seed, parts=COMPARED, faults=NO_DELETIONS)
        for broken in check(history)[:1]:
            raise AssertionError(f"seed {seed}: {broken}\n{table(relevant(history, broken))}")


def test_the_same_seed_gives_the_same_history() -> None:
    for parts in (EVENTUAL, COMPARED):
        assert simulate(7, parts=parts) == simulate(7, parts=parts)


class Pulse:
    """A cron trigger each minute, at two points of presence: aggregate, once a minute."""

    def __init__(self, seed: int, kind: Kind) -> None:
        self.scheduler = Scheduler(seed)
        server = SimulatedWorld(self.scheduler, instance="kv")
        self.kv = EventualKv(server, delay=60.0)
        self.kind = kind
        self.rows: Counter[int] = Counter()

    def run(self, *, minutes: int) -> Counter[int]:
        """Return how many rows each minute has."""
        worlds = []
        for edge in ("ams", "bos"):
            machine = Machine(self.scheduler, name=edge, booted=self.scheduler.dice() * 1000)
            world = SimulatedWorld(self.scheduler, machine, instance=edge)
            worlds.append(world)
            for minute in range(minutes):
                world.spawn(self._trigger(world, minute))
        self.scheduler.run()
        return self.rows

    async def _trigger(self, world: SimulatedWorld, minute: int) -> None:
        await world.sleep(60.0 * minute + 5.0 * world.dice())
        store = self.kind(world, self.kv, edge=world.instance)
        holder = Holder(world.nonce(), world.instance, 1)
        try:
            grant = await store.acquire("aggregate", holder=holder, ttl=55.0)
        except LeaseHeld:
            return
        self.rows[minute] += 1
        await world.sleep(20.0)
        with suppress(LeaseLost):  # the other one's by now
            await store.release("aggregate", nonce=holder.nonce, token=grant.token)


def test_two_triggers_of_one_minute_write_duplicate_rows() -> None:
    duplicates = sum(
        count > 1
        for seed in range(20)
        for count in Pulse(seed, EventualStore).run(minutes=5).values()
    )
    assert duplicates > 10


def test_the_same_triggers_write_one_row_where_a_condition_decides() -> None:
    for seed in range(20):
        assert Pulse(seed, CompareAndSetStore).run(minutes=5) == dict.fromkeys(range(5), 1)


# In an ordinary program.


def two_edges(kind: Kind, clocks: SettableClocks, *, delay: float) -> list[Fencepost]:
    kv = EventualKv(BlockingWorld(clocks=clocks), delay=delay)

    def near(edge: str) -> Callable[[World, str], LeaseStore]:
        return lambda world, namespace: kind(world, kv, edge=edge, namespace=namespace)

    return [Fencepost(near(edge), clocks=clocks) for edge in ("ams", "bos")]


def test_two_edges_let_two_in_at_once_and_one_place_does_not() -> None:
    ams, bos = two_edges(EventualStore, SettableClocks(), delay=60.0)
    with ams, bos, ams.lock("job") as one, bos.lock("job") as two:
        one.check()
        two.check()
    ams, bos = two_edges(CompareAndSetStore, SettableClocks(), delay=60.0)
    with ams, bos, ams.lock("job"), pytest.raises(LeaseHeld), bos.lock("job"):
        raise AssertionError("two at once")


def test_it_works_until_it_does_not() -> None:
    clocks = SettableClocks()
    ams, bos = two_edges(EventualStore, clocks, delay=10.0)
    with ams, bos, ams.lock("job"):
        clocks.advance(10.0)  # by now everybody has heard of it
        with pytest.raises(LeaseHeld), bos.lock("job"):
            raise AssertionError("two at once")


def test_an_edge_sees_its_own_writes_at_once_and_never_goes_back() -> None:
    clocks = SettableClocks()
    world = BlockingWorld(clocks=clocks)
    kv = EventualKv(world, delay=10.0)
    near, far = (EventualStore(world, kv, edge=edge) for edge in ("ams", "bos"))
    seen, tokens = [], []
    for number in range(40):
        holder = Holder(f"n{number}", "host", 1)
        token = finish(near.acquire("job", holder=holder, ttl=30.0)).token
        view = finish(near.peek("job"))
        assert view is not None
        assert view.token == token
        finish(near.release("job", nonce=holder.nonce, token=token))
        clocks.advance(1.0)
        there = finish(far.peek("job"))
        tokens.append(token)
        seen.append(0 if there is None else there.token)
    assert seen == sorted(seen)
    assert seen != tokens, "the other edge is behind"
    assert set(seen) <= {0, *tokens}
    assert len(kv._writes["default", "job"]) < 30, "what everybody has heard of is forgotten"


# What may run there.


def test_it_offers_t0_whatever_ledger_stands_beside_it() -> None:
    for transactional in (False, True):
        exclusive = EventualStore.capabilities.exclusive
        offered = tier_of(exclusive=exclusive, transactional=transactional)
        assert offered is Tier.T0
        with pytest.raises(Misuse, match=r"needs T1 \(exclusive\).*T0 \(advisory\) only"):
            refuse_less("billing", needs=None, idempotent=False, offered=offered)
        assert refuse_less("cleanup", needs=None, idempotent=True, offered=offered) is Tier.T0
        with pytest.raises(Misuse, match=r"needs T2"):
            refuse_less("cleanup", needs="T2", idempotent=True, offered=offered)


class AdvisoryStore(MemoryStore):
    """Promises what an eventually consistent store does, and has a ledger beside it."""

    capabilities = EventualStore.capabilities


def test_a_job_that_is_not_declared_idempotent_is_refused_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"{AdvisoryStore.__module__}.{AdvisoryStore.__qualname__}"
    monkeypatch.setitem(ledgers._LEDGERS, name, ("fencepost.ledger.memory", "MemoryLedger"))
    with Fencepost(lambda world, namespace: AdvisoryStore(world, namespace=namespace)) as fp:
        with pytest.raises(Misuse, match=r"'billing' needs T1 .*declare it idempotent=True"):
            fp.job("billing")(lambda: None)
        fp.job("cleanup", idempotent=True)(lambda: None)
        assert fp.trigger("cleanup", manual=True).status == "succeeded"


def test_a_store_of_leases_alone_takes_no_job_at_all() -> None:
    (fp, _) = two_edges(EventualStore, SettableClocks(), delay=1.0)
    with fp, pytest.raises(Misuse):
        fp.job("cleanup", idempotent=True)(lambda: None)


# All else that a lease store must do, it does.

_PLACES: dict[str, EventualKv] = {}


class TestEventualStore(LeaseStoreConformance):
    rounds = 20

    def open_store(self, world: World, *, place: str, namespace: str) -> LeaseStore:
        kv = _PLACES.setdefault(place, EventualKv(world, delay=0.0))
        edge = world.nonce()  # each client is near another
        return EventualStore(world, kv, edge=edge, namespace=namespace)

    def restart(self, place: str) -> None:
        del _PLACES[place]

    async def prove_eight_rivals_never_meet(self, desk: Desk) -> None:
        """They do: that is what ``exclusive=False`` says."""
        assert not desk.store.capabilities.exclusive
        kv = EventualKv(desk.world, delay=1000.0)
        for edge in ("ams", "bos"):
            store = EventualStore(desk.world, kv, edge=edge)
            await store.acquire("job", holder=desk.holder(edge), ttl=30.0)


class TestCompareAndSetStore(LeaseStoreConformance):
    rounds = 20

    def open_store(self, world: World, *, place: str, namespace: str) -> LeaseStore:
        kv = _PLACES.setdefault(place, EventualKv(world, delay=60.0))
        return CompareAndSetStore(world, kv, edge=world.nonce(), namespace=namespace)

    def restart(self, place: str) -> None:
        del _PLACES[place]
