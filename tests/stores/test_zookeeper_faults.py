"""What ZooKeeper, the wire or a client may do wrong, and what is then true."""

from __future__ import annotations

import os
import threading
import time
import uuid
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from kazoo.client import KazooClient

from fencepost import Fencepost
from fencepost.errors import (
    BadUrl,
    FencepostError,
    LeaseHeld,
    LeaseLost,
    Misuse,
    OutcomeUnknown,
    StoreUnavailable,
)
from fencepost.model.lease import Grant, Holder
from fencepost.model.symptom import Severity
from fencepost.stores.open import open_store
from fencepost.stores.zookeeper import ZooKeeperStore
from fencepost.testing.checker import check
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish
from holder import HolderProcess, until
from proxy import Proxy
from rivals import BadWire, recorded
from servers import ZooKeeper, shared

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fencepost.stores.api import LeaseStore

TTL = 30.0
SECRET = "hunter2-for-zookeeper"


def someone() -> Holder:
    return Holder(uuid.uuid4().hex, "a", 1)


@contextmanager
def opened(
    port: int, *, root: str = "", user: str = "", session: float = 40
) -> Iterator[ZooKeeperStore]:
    url = f"zookeeper://{user}127.0.0.1:{port}/{root or uuid.uuid4().hex}?session={session}"
    store = open_store(url, BlockingWorld(), namespace="default")
    assert isinstance(store, ZooKeeperStore)
    try:
        yield store
    finally:
        finish(store.close())


def acquire(store: LeaseStore, holder: Holder, *, name: str = "x", ttl: float = TTL) -> Grant:
    return finish(store.acquire(name, holder=holder, ttl=ttl))


def renew(store: LeaseStore, holder: Holder, grant: Grant, *, ttl: float = TTL) -> Grant:
    return finish(store.renew("x", nonce=holder.nonce, token=grant.token, ttl=ttl))


def release(store: LeaseStore, holder: Holder, grant: Grant | None = None) -> None:
    finish(store.release("x", nonce=holder.nonce, token=grant.token if grant else None))


def warm(store: LeaseStore) -> None:
    """Let the store make what it makes once."""
    holder = someone()
    release(store, holder, acquire(store, holder))


def holds(lease: object) -> bool:
    try:
        lease.check()  # type: ignore[attr-defined]
    except FencepostError:
        return False
    return True


def reached(store: LeaseStore) -> bool:
    try:
        finish(store.peek("x"))
    except StoreUnavailable:
        return False
    return True


# Lost replies and lost connections.


def test_a_grant_whose_reply_is_lost_is_adopted_and_leaves_no_ghost() -> None:
    with Proxy(shared(ZooKeeper).port) as proxy, opened(proxy.port) as store:
        warm(store)
        holder, session = someone(), store.door.session().id
        found = store._look("x")
        proxy.lose_replies()  # to the transaction, which comes next
        store._look = lambda *_, **__: found  # type: ignore[method-assign]
        with pytest.raises(OutcomeUnknown):
            acquire(store, holder)
        del store._look
        seen = finish(store.peek("x"))
        assert seen is not None
        assert seen.held
        assert store.door.session().id == session
        grant = acquire(store, holder)
        assert (grant.token, grant.adopted) == (seen.token, True)
        release(store, holder, grant)
        acquire(store, someone())


def test_a_release_whose_reply_is_lost_is_done_and_may_be_repeated() -> None:
    with Proxy(shared(ZooKeeper).port) as proxy, opened(proxy.port) as store:
        holder = someone()
        grant = acquire(store, holder)
        proxy.lose_replies()
        with pytest.raises(OutcomeUnknown):
            release(store, holder, grant)
        release(store, holder, grant)
        acquire(store, someone())


def test_a_half_open_connection_keeps_nobody_longer_than_the_timeouts() -> None:
    with Proxy(shared(ZooKeeper).port) as proxy, opened(proxy.port) as store:
        holder = someone()
        grant = acquire(store, holder, ttl=1.0)
        proxy.mode = "hole"
        began = time.monotonic()
        with pytest.raises((OutcomeUnknown, StoreUnavailable)):
            renew(store, holder, grant, ttl=1.0)
        with pytest.raises((OutcomeUnknown, StoreUnavailable)):
            acquire(store, someone(), ttl=1.0)
        assert time.monotonic() - began < 8
        proxy.mode = "pass"
        until(lambda: reached(store))


def test_a_server_that_is_not_there_did_nothing() -> None:
    with Proxy(shared(ZooKeeper).port) as proxy:
        port = proxy.port
    with (
        opened(port, user=f"me:{SECRET}@") as store,
        pytest.raises(StoreUnavailable, match=f"ZooKeeper at 127.0.0.1:{port} cannot be") as no,
    ):
        acquire(store, someone())
    assert SECRET not in str(no.value)


def test_a_holder_that_is_cut_off_stops_before_its_session_ends() -> None:
    root, direct = uuid.uuid4().hex, shared(ZooKeeper)
    with Proxy(direct.port) as proxy:
        url = f"zookeeper://127.0.0.1:{proxy.port}/{root}?session=2"
        with Fencepost(url) as fp, Fencepost(f"{direct.url()}/{root}") as other:
            lease = fp.lock("x", ttl="30s").acquire()
            proxy.mode = "hole"
            stopped: list[float] = []

            def watch() -> None:
                until(lambda: not holds(lease))
                stopped.append(time.monotonic())

            thread = threading.Thread(target=watch)
            thread.start()
            with other.lock("x", wait="20s") as later:
                granted = time.monotonic()
                assert later.token > lease.token
            thread.join(20)
            assert stopped[0] < granted
            proxy.mode = "pass"
            proxy.reset()


def test_a_client_whose_thread_has_died_is_replaced() -> None:
    with opened(shared(ZooKeeper).port) as store:
        warm(store)
        client = store.door._client
        assert client is not None
        client.stop()
        with pytest.raises(StoreUnavailable):
            acquire(store, someone())
        acquire(store, someone())


# Sessions.


def test_a_lease_is_trusted_for_no_longer_than_its_session_is_certain() -> None:
    with opened(shared(ZooKeeper).port, session=2) as store:
        holder = someone()
        grant = acquire(store, holder)
        assert grant.ttl == 1.5
        assert renew(store, holder, grant).ttl == 1.5


def test_a_lease_ends_with_its_session() -> None:
    with opened(shared(ZooKeeper).port) as store, opened(shared(ZooKeeper).port) as other:
        other.paths = store.paths
        holder = someone()
        grant = acquire(store, holder)
        client = store.door._client
        assert client is not None
        thief = KazooClient(f"127.0.0.1:{shared(ZooKeeper).port}", client_id=client.client_id)
        thief.start(10)
        thief.stop()
        thief.close()
        with pytest.raises(LeaseLost, match="ran out"):
            renew(other, holder, grant)
        assert acquire(other, someone()).token > grant.token


def test_the_session_that_renews_a_lease_vouches_for_it_from_then_on() -> None:
    with opened(shared(ZooKeeper).port) as keeper:
        with opened(shared(ZooKeeper).port) as face:
            face.paths = keeper.paths
            holder = someone()
            grant = acquire(face, holder)
            assert renew(keeper, holder, grant).token == grant.token
            face._vouched.clear()  # so that closing ends its session
        seen = finish(keeper.peek("x"))
        assert seen is not None
        assert seen.held
        release(keeper, holder, grant)


def test_a_lease_that_nobody_renews_ends_for_others_although_its_session_lives() -> None:
    port = shared(ZooKeeper).port
    with opened(port) as store:
        root = store.paths.top.split("/")[1]
        grant = acquire(store, someone(), ttl=0.5)
        url = f"zookeeper://127.0.0.1:{port}/{root}"
        with Fencepost(url) as fp, fp.lock("x", wait="20s") as later:
            assert later.token > grant.token


def test_who_has_just_come_cannot_tell_that_a_lease_has_run_out() -> None:
    with opened(shared(ZooKeeper).port) as store, opened(shared(ZooKeeper).port) as newcomer:
        assert not store.capabilities.keeps_time
        newcomer.paths = store.paths
        acquire(store, someone(), ttl=0.5)
        time.sleep(0.7)
        with pytest.raises(LeaseHeld):
            acquire(newcomer, someone())
        time.sleep(0.6)
        acquire(newcomer, someone())


def test_closing_a_store_does_not_release_what_it_holds() -> None:
    with opened(shared(ZooKeeper).port) as store:
        acquire(store, someone())
        finish(store.close())
        seen = finish(store.peek("x"))
        assert seen is not None
        assert seen.held


def test_a_hold_outlives_a_crash_of_the_server() -> None:
    with (
        ZooKeeper.own() as server,
        Fencepost(server.url()) as fp,
        Fencepost(server.url()) as other,
    ):
        lease = fp.lock("x", ttl="20s").acquire()
        server.restart()
        until(lambda: refused(other))
        lease.check()
        assert fp.lock("x").release(lease)
        with other.lock("x", wait="10s") as later:
            assert later.token > lease.token


def refused(fp: Fencepost) -> bool:
    try:
        fp.lock("x").acquire()
    except LeaseHeld:
        return True
    except (StoreUnavailable, OutcomeUnknown):
        return False
    raise AssertionError("two have it")


# The client stops.


def test_a_holder_that_was_stopped_past_its_end_is_told_so() -> None:
    url = f"{shared(ZooKeeper).url()}/{uuid.uuid4().hex}"
    with HolderProcess(f"{url}?session=2", "x", ttl="1s") as holder, Fencepost(url) as fp:
        assert holder.believes() == "held"
        holder.pause()
        with fp.lock("x", wait="20s") as lease:
            assert lease.token > holder.token
            holder.go_on()
            assert holder.believes().startswith("LeaseLost")


def test_a_killed_holder_is_waited_for_as_the_store_says() -> None:
    url = f"{shared(ZooKeeper).url()}/{uuid.uuid4().hex}"
    with HolderProcess(f"{url}?session=1", "x", ttl="30s") as holder, Fencepost(url) as fp:
        holder.kill()
        with pytest.raises(LeaseHeld):
            fp.lock("x").acquire()
        assert not fp.locks()[0].alive
        with fp.lock("x", wait="20s") as lease:
            assert lease.token > holder.token


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_a_session_of_its_own() -> None:
    with opened(shared(ZooKeeper).port) as store:
        holder = someone()
        grant = acquire(store, holder)
        child = os.fork()
        if child == 0:
            try:
                store.forget()
                acquire(store, someone(), name="y")
                with pytest.raises(LeaseHeld):
                    acquire(store, someone())
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        renew(store, holder, grant)
        release(store, holder, grant)


# What it costs.


def test_acquire_release_and_renew_take_these_round_trips() -> None:
    with opened(shared(ZooKeeper).port) as store:
        warm(store)
        marks = [store.door.asked]
        holder = someone()
        grant = acquire(store, holder)
        marks.append(store.door.asked)
        renew(store, holder, grant)
        marks.append(store.door.asked)
        with pytest.raises(LeaseHeld):
            acquire(store, someone())
        marks.append(store.door.asked)
        other = someone()
        release(store, holder, grant)
        grant = acquire(store, other)
        marks.append(store.door.asked)
        release(store, other, grant)
        marks.append(store.door.asked)
        spent = [after - before for before, after in pairwise(marks)]
        # acquire, renew, refused, (release after a renewal: two more, and acquire), release
        assert spent == [2, 2, 1, 5, 1]


def test_who_waits_is_woken_by_the_release() -> None:
    url = f"{shared(ZooKeeper).url()}/{uuid.uuid4().hex}"
    with Fencepost(url) as fp, Fencepost(url) as other:
        lease = fp.lock("x").acquire()
        got: list[float] = []

        def wait() -> None:
            with other.lock("x", wait="20s"):
                got.append(time.monotonic())

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.5)  # it has asked, was refused, and listens
        fp.lock("x").release(lease)
        released = time.monotonic()
        thread.join(20)
        assert got[0] - released < 0.9  # a nap is 1 s


# Replies that are cut may end kazoo's thread with an error; then the next call makes a new client.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_rivals_on_a_bad_network_never_hold_it_at_once_and_tokens_grow() -> None:
    with Proxy(shared(ZooKeeper).port) as proxy:
        url = f"zookeeper://127.0.0.1:{proxy.port}/{uuid.uuid4().hex}?session=2"
        history = recorded(url, BadWire(proxy, seed=11))
    assert sum(event.what == "granted" for event in history) >= 5, "they hardly got to it"
    assert check(history) == []


# Wrong addresses and wrong rights.


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("zookeeper://", "not a ZooKeeper server"),
        ("zookeeper://host:99999", "not a ZooKeeper server"),
        (f"zookeeper://me:{SECRET}@h:1?x=1", "unknown options x"),
        ("zookeeper://me@h", "user:password@"),
        ("zookeeper://h?session=soon", "session=soon"),
        ("zookeeper://h/a/../b", "cannot be the root"),
    ],
)
def test_a_url_that_makes_no_sense_is_refused_with_a_reason(url: str, sentence: str) -> None:
    with pytest.raises(BadUrl, match=sentence) as no:
        open_store(url, BlockingWorld(), namespace="default")
    assert SECRET not in str(no.value)


def test_nodes_of_another_user_are_refused_in_one_sentence() -> None:
    port, root = shared(ZooKeeper).port, uuid.uuid4().hex
    with opened(port, root=root, user=f"me:{SECRET}@") as store:
        warm(store)
    for user in ("", f"me:not-{SECRET}@"):
        with (
            opened(port, root=root, user=user) as store,
            pytest.raises(Misuse, match="does not let") as no,
        ):
            acquire(store, someone())
        assert SECRET not in str(no.value)


def test_the_doctor_names_what_a_single_open_server_cannot_promise() -> None:
    with opened(shared(ZooKeeper).port, session=4) as store:
        found = {symptom.code: symptom.severity for symptom in finish(store.examine())}
    assert found == {
        "zookeeper.servers": Severity.RISK,
        "zookeeper.session": Severity.NOTE,
        "zookeeper.open": Severity.NOTE,
    }
