"""Three servers of ZooKeeper, of which one or two go away in the middle of holds."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING

import pytest

from fencepost import Fencepost
from fencepost.errors import FencepostError, LeaseHeld, OutcomeUnknown, StoreUnavailable
from fencepost.model.lease import Holder
from fencepost.stores.open import open_store
from fencepost.stores.zookeeper import ZooKeeperStore
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish
from holder import until
from servers.zookeeper import ZooKeeperEnsemble

if TYPE_CHECKING:
    from fencepost import Lease


def holds(lease: Lease) -> bool:
    try:
        lease.check()
    except FencepostError:
        return False
    return True


def test_a_hold_survives_the_death_of_the_leader_and_ends_without_a_quorum() -> None:
    with (
        ZooKeeperEnsemble.own() as ensemble,
        Fencepost(f"{ensemble.url()}/p?session=6") as fp,
        Fencepost(f"{ensemble.url()}/p") as other,
    ):
        store = open_store(f"{ensemble.url()}/p", BlockingWorld(), namespace="default")
        assert isinstance(store, ZooKeeperStore)
        codes = {symptom.code for symptom in finish(store.examine())}
        assert codes == {"zookeeper.open"}
        lease = fp.lock("x", ttl="4s").acquire()
        ensemble.leader().kill()
        end = time.monotonic() + 5  # more than a ttl: it was renewed by the next leader
        while time.monotonic() < end:
            lease.check()
            time.sleep(0.1)
        with pytest.raises(LeaseHeld):
            other.lock("x").acquire()
        found = {symptom.code: symptom.what for symptom in finish(store.examine())}
        assert found.keys() == {"zookeeper.open", "zookeeper.server"}
        assert found["zookeeper.server"].endswith(" does not answer")
        leader = ensemble.leader()
        leader.pause()
        try:
            paused = time.monotonic()
            until(lambda: not holds(lease), within=20)
            assert time.monotonic() - paused < 5
            with pytest.raises((OutcomeUnknown, StoreUnavailable)):
                finish(store.acquire("y", holder=Holder(uuid.uuid4().hex, "a", 1), ttl=2.0))
        finally:
            leader.go_on()
        finish(store.close())
