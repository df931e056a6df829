"""A lost reply is asked for again: what was granted is adopted, what was given back is free."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from faultlab import fencepost, until, url_of

from fencepost import Fencepost, LeaseHeld, OutcomeUnknown, StoreUnavailable, TokenRegressed
from fencepost.flows.divide import divide
from fencepost.stores.sqlite import SqliteStore
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from pathlib import Path

    from fencepost.model.event import JobEvent, LeaseEvent
    from fencepost.model.lease import Grant, Holder
    from fencepost.stores.api import LeaseStore
    from fencepost.world.api import World


class CutStore(SqliteStore):
    """A store whose replies get lost after the deed, as many times as it is told for each verb."""

    cuts: dict[str, int]

    async def acquire(self, name: str, *, holder: Holder, ttl: float) -> Grant:
        grant = await super().acquire(name, holder=holder, ttl=ttl)
        self._cut("acquire")
        return grant

    async def renew(self, name: str, *, nonce: str, token: int, ttl: float) -> Grant:
        grant = await super().renew(name, nonce=nonce, token=token, ttl=ttl)
        self._cut("renew")
        return grant

    async def release(self, name: str, *, nonce: str, token: int | None = None) -> None:
        await super().release(name, nonce=nonce, token=token)
        self._cut("release")

    def _cut(self, verb: str) -> None:
        if self.cuts.get(verb, 0) > 0:
            self.cuts[verb] -= 1
            raise OutcomeUnknown(f"the reply to {verb} was lost")


class Cable:
    """What the stores of one test share: how often a reply gets lost, and what was heard of it."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "leases.db")
        self.cuts: dict[str, int] = {}
        self.heard: list[str] = []

    def opened(self, world: World, namespace: str) -> LeaseStore:
        store = CutStore(world, self.path, namespace=namespace)
        store.cuts = self.cuts
        return store

    def hear(self, event: JobEvent | LeaseEvent) -> None:
        self.heard.append(event.what)


@pytest.fixture
def cable(tmp_path: Path) -> Cable:
    return Cable(tmp_path)


@pytest.mark.parametrize("wait", ["0s", "5s"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_grant_whose_reply_was_lost_is_adopted(cable: Cable, times: int, wait: str) -> None:
    fp = Fencepost(cable.opened, on_event=cable.hear)
    cable.cuts["acquire"] = times
    with fp.lock("x", wait=wait) as lease:
        assert cable.heard == ["adopted"]
        assert [view.token for view in fp.locks()] == [lease.token]
        lease.check()
    assert fp.locks() == []
    fp.close()


def test_a_renewal_whose_reply_was_lost_keeps_the_lease(cable: Cable) -> None:
    fp = Fencepost(cable.opened, on_event=cable.hear)
    with fp.lock("x", ttl="1s") as lease:
        cable.cuts["renew"] = 2
        before = lease.hold.trust
        until(lambda: lease.hold.trust != before)
        assert cable.heard.count("unconfirmed") == 2
        lease.check()
    assert "lost" not in cable.heard
    fp.close()


@pytest.mark.parametrize("times", [1, 3, 5])
def test_a_release_whose_reply_was_lost_leaves_it_free(cable: Cable, times: int) -> None:
    with fencepost(cable.opened) as fp, fencepost(cable.opened) as other:
        with fp.lock("x"):
            cable.cuts["release"] = times
        with other.lock("x", wait="1s"):
            pass


def test_a_grant_nobody_ever_heard_of_is_given_back_within_a_second(cable: Cable) -> None:
    with fencepost(cable.opened) as fp:
        cable.cuts["acquire"] = 10**6
        with pytest.raises(OutcomeUnknown):
            fp.lock("x", ttl="0.3s").acquire()
        cable.cuts.clear()
        until(lambda: fp.locks() == [], within=1.0)


def test_a_semaphore_adopts_the_permit_it_was_granted(cable: Cable) -> None:
    with fencepost(cable.opened) as fp:
        cable.cuts["acquire"] = 2
        with fp.lock("x", limit=3) as lease:
            assert [view.name for view in fp.locks()] == [lease.name]


def test_a_grant_below_one_seen_before_is_refused_and_given_back(tmp_path: Path) -> None:
    class RestoredStore(SqliteStore):
        """A store that was restored from a backup, and whose clock was set back as well."""

        async def acquire(self, name: str, *, holder: Holder, ttl: float) -> Grant:
            grant = await super().acquire(name, holder=holder, ttl=ttl)
            return grant._replace(token=5)

    def opened(world: World, namespace: str) -> LeaseStore:
        return RestoredStore(world, str(tmp_path / "leases.db"), namespace=namespace)

    fp = Fencepost(opened)
    lease = fp.lock("x").acquire()
    assert lease.token == 5
    fp._holding._keeper.charges.remove(lease.hold)
    lease.hold.released = True
    with fencepost(url_of(tmp_path)) as operator:
        operator.break_lock("x", token=operator.locks()[0].token, reason="a drill")
    with pytest.raises(TokenRegressed, match="restored from a backup"):
        fp.lock("x").acquire()
    until(lambda: fp.locks() == [], within=1.0)
    fp.close()


def test_a_store_that_is_away_is_waited_for(cable: Cable) -> None:
    class AwayStore(CutStore):
        away = 3

        async def acquire(self, name: str, *, holder: Holder, ttl: float) -> Grant:
            if AwayStore.away:
                AwayStore.away -= 1
                raise StoreUnavailable("nobody home")
            return await super().acquire(name, holder=holder, ttl=ttl)

    def opened(world: World, namespace: str) -> LeaseStore:
        store = AwayStore(world, cable.path, namespace=namespace)
        store.cuts = cable.cuts
        return store

    with fencepost(opened) as fp:
        with pytest.raises(StoreUnavailable):
            fp.lock("x").acquire()
        with fp.lock("x", wait="20s"):
            assert AwayStore.away == 0


def test_who_gave_up_waiting_is_told_who_has_it(cable: Cable) -> None:
    with fencepost(cable.opened) as fp, fencepost(cable.opened) as other, fp.lock("x") as lease:
        with pytest.raises(LeaseHeld) as refused:
            other.lock("x", wait="0.3s").acquire()
        assert refused.value.token == lease.token


@pytest.mark.parametrize("wait", ["0s", "5s"])
def test_a_mark_whose_removal_was_not_answered_is_asked_about_again(
    cable: Cable, wait: str
) -> None:
    world = BlockingWorld()
    store = cable.opened(world, "default")
    finish(divide(store, "x", limit=2, nonce=world.nonce()))
    with Fencepost(cable.opened) as fp:
        cable.cuts["release"] = 2
        with fp.lock("x", wait=wait) as lease:
            lease.check()
    finish(store.close())
