"""Three members of etcd, of which one or two go away in the middle of holds."""

from __future__ import annotations

import time
import uuid

import pytest

from fencepost import Fencepost
from fencepost.errors import FencepostError, LeaseHeld, OutcomeUnknown, StoreUnavailable
from fencepost.model.lease import Holder
from fencepost.model.symptom import Severity
from fencepost.stores.etcd import EtcdStore
from fencepost.stores.etcd_doctor import revokes_early
from fencepost.stores.open import open_store
from fencepost.testing.checker import check
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish
from holder import until
from rivals import BadServers, recorded
from servers import EtcdCluster


def holds(check: object) -> bool:
    try:
        check()  # type: ignore[operator]
    except FencepostError:
        return False
    return True


def test_a_hold_survives_the_death_of_the_leader() -> None:
    with (
        EtcdCluster.own() as cluster,
        Fencepost(cluster.url()) as fp,
        Fencepost(cluster.url()) as other,
    ):
        lease = fp.lock("x", ttl="4s").acquire()
        cluster.leader().kill()
        end = time.monotonic() + 6  # more than a ttl: it was renewed by the next leader
        while time.monotonic() < end:
            lease.check()
            time.sleep(0.1)
        with pytest.raises(LeaseHeld):
            other.lock("x").acquire()
        assert fp.lock("x").release(lease)
        with other.lock("x", wait="10s") as later:
            assert later.token > lease.token


def test_without_a_quorum_nothing_is_granted_and_a_holder_stops_in_time() -> None:
    with EtcdCluster.own() as cluster, Fencepost(cluster.url()) as fp:
        asked = time.monotonic()
        lease = fp.lock("x", ttl="2s").acquire()
        paused = cluster.nodes[:2]
        for node in paused:
            node.pause()
        try:
            until(lambda: not holds(lease.check), within=10)
            # It may have been renewed just before the pause; never after.
            assert time.monotonic() - asked < 2 * 2 + 1
            store = open_store(cluster.url(), BlockingWorld(), namespace="default")
            with pytest.raises((OutcomeUnknown, StoreUnavailable)):
                finish(store.acquire("y", holder=Holder(uuid.uuid4().hex, "a", 1), ttl=2.0))
            finish(store.close())
        finally:
            for node in paused:
                node.go_on()
        with fp.lock("x", wait="20s") as later:
            assert later.token > lease.token


def test_a_hold_survives_a_leader_that_is_stopped_and_knows_if_its_return_ends_it() -> None:
    """A cluster of an old version may have leases ended that were renewed: see its doctor."""
    with EtcdCluster.own() as cluster, Fencepost(cluster.url()) as fp:
        lease = fp.lock("x", ttl="6s").acquire()  # an election may take some seconds
        deposed = cluster.leader()
        deposed.pause()
        try:
            end = time.monotonic() + 7
            while time.monotonic() < end:
                lease.check()
                time.sleep(0.1)
        finally:
            deposed.go_on()
        end = time.monotonic() + 2
        while time.monotonic() < end and holds(lease.check):
            time.sleep(0.1)
        if holds(lease.check):
            assert fp.lock("x").release(lease)
            return
        version = cluster.nodes[0].version()
        assert revokes_early(version), f"etcd {version} has a lease ended that was renewed"
        with fp.lock("x", wait="10s") as later:
            assert later.token > lease.token


def test_rivals_of_a_cluster_whose_members_fail_never_hold_it_at_once() -> None:
    with EtcdCluster.own() as cluster:
        trouble = BadServers(cluster.nodes, seed=5)
        history = recorded(cluster.url(), trouble, seconds=10, ttl="2s")
    assert sum(event.what == "granted" for event in history) >= 5, "they hardly got to it"
    assert check(history) == []


def test_a_dead_endpoint_is_left_for_the_next() -> None:
    with EtcdCluster.own() as cluster:
        cluster.nodes[0].kill()
        store = open_store(cluster.url(), BlockingWorld(), namespace="default")
        assert isinstance(store, EtcdStore)
        until(lambda: any(node.ready() for node in cluster.nodes[1:]))
        holder = Holder(uuid.uuid4().hex, "a", 1)
        grant = finish(store.acquire("x", holder=holder, ttl=5.0))
        finish(store.renew("x", nonce=holder.nonce, token=grant.token, ttl=5.0))
        found = {symptom.code: symptom.severity for symptom in finish(store.examine())}
        assert found["etcd.endpoint"] is Severity.RISK
        assert ("etcd.revokes" in found) is revokes_early(cluster.nodes[1].version())
        finish(store.close())
