"""What is true at ZooKeeper when a client is stopped between two of its steps."""

from __future__ import annotations

import threading
import time
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from fencepost.errors import BadUrl, LeaseHeld, LeaseLost
from fencepost.model.lease import Grant, Holder
from fencepost.stores.open import open_store
from fencepost.stores.zookeeper import ZooKeeperStore
from fencepost.stores.zookeeper_record import record_of
from fencepost.stores.zookeeper_still import Still
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish
from holder import until
from servers import ZooKeeper, shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fencepost.world.zookeeper import Node

BRIEF = 0.6


def someone() -> Holder:
    return Holder(uuid.uuid4().hex, "a", 1)


@contextmanager
def opened(root: str = "") -> Iterator[ZooKeeperStore]:
    url = f"zookeeper://127.0.0.1:{shared(ZooKeeper).port}/{root or uuid.uuid4().hex}"
    store = open_store(url, BlockingWorld(), namespace="default")
    assert isinstance(store, ZooKeeperStore)
    try:
        yield store
    finally:
        finish(store.close())


@contextmanager
def several(count: int) -> Iterator[list[ZooKeeperStore]]:
    """Open stores of one place, each with a session of its own that is there already."""
    with opened("a-" + uuid.uuid4().hex) as first:
        root = first.paths.top.split("/")[1]
        if count == 1:
            yield [first]
            return
        with opened(root) as second, opened(root) as third:
            stores = [first, second, third][:count]
            for store in stores:
                finish(store.peek("x"))
            yield stores


def acquire(store: ZooKeeperStore, holder: Holder, *, ttl: float = BRIEF) -> Grant:
    return finish(store.acquire("x", holder=holder, ttl=ttl))


def renew(store: ZooKeeperStore, holder: Holder, grant: Grant, *, ttl: float = BRIEF) -> Grant:
    return finish(store.renew("x", nonce=holder.nonce, token=grant.token, ttl=ttl))


def granted_in_the_end(store: ZooKeeperStore, holder: Holder) -> Grant:
    got: list[Grant] = []

    def asked() -> bool:
        try:
            got.append(acquire(store, holder))
        except LeaseHeld:
            return False
        return True

    until(asked)
    return got[0]


def stopped_once(store: ZooKeeperStore, what: str, meanwhile: Callable[[], object]) -> None:
    """Let something happen before the next time that the door is asked for ``what``."""
    real, done = getattr(store.door, what), threading.Event()

    def later(*args: Any, **options: Any) -> Any:
        if not done.is_set():
            done.set()
            meanwhile()
        return real(*args, **options)

    setattr(store.door, what, later)


def stopped_after(store: ZooKeeperStore, what: str, meanwhile: Callable[[], object]) -> None:
    """Let something happen after the door was asked for ``what``, and before it is known."""
    real, done = getattr(store.door, what), threading.Event()

    def later(*args: Any, **options: Any) -> Any:
        answer = real(*args, **options)
        if not done.is_set():
            done.set()
            meanwhile()
        return answer

    setattr(store.door, what, later)


def holder_now(store: ZooKeeperStore) -> tuple[str, bool]:
    seen = finish(store.peek("x"))
    assert seen is not None
    return seen.holder.nonce, seen.held


def test_a_renewal_that_sleeps_before_its_write_leaves_the_next_holder_alone() -> None:
    with several(2) as (store, other):
        holder, rival = someone(), someone()
        grant = acquire(store, holder)
        stopped_once(store, "commit", lambda: granted_in_the_end(other, rival))
        with pytest.raises(LeaseLost):
            renew(store, holder, grant)
        assert holder_now(other) == (rival.nonce, True)


def test_a_renewal_from_another_session_leaves_the_next_holder_alone_as_well() -> None:
    with several(3) as (store, other, keeper):
        holder, rival = someone(), someone()
        grant = acquire(store, holder)
        stopped_once(keeper, "commit", lambda: granted_in_the_end(other, rival))
        with pytest.raises(LeaseLost):
            renew(keeper, holder, grant)
        assert holder_now(other) == (rival.nonce, True)


def test_who_takes_a_lease_that_stood_still_is_late_if_it_was_renewed_just_then() -> None:
    with several(3) as (store, other, keeper):
        holder = someone()
        grant = acquire(store, holder)
        with pytest.raises(LeaseHeld):
            acquire(other, someone())
        time.sleep(BRIEF + 0.1)  # it stands still in the eyes of one, and not of the other
        stopped_once(other, "commit", lambda: renew(keeper, holder, grant))
        with pytest.raises(LeaseHeld):
            acquire(other, someone())
        assert holder_now(keeper) == (holder.nonce, True)


def test_nobody_acts_on_a_lock_and_a_record_of_two_grants() -> None:
    with several(2) as (store, other):
        holder, rival = someone(), someone()
        grant = acquire(store, holder, ttl=30.0)
        real = store.door.look
        old = real(store.paths.lock("x"), store.paths.record("x"), timeout=5)
        finish(store.release("x", nonce=holder.nonce, token=grant.token))
        acquire(other, rival, ttl=30.0)
        torn = [True]

        def look(*paths: str, timeout: float) -> list[Node | None]:
            lock, record = real(*paths, timeout=timeout)
            return [old[0], record] if torn and torn.pop() else [lock, record]

        store.door.look = look  # type: ignore[method-assign]
        with pytest.raises(LeaseLost):
            finish(store.release("x", nonce=holder.nonce, token=grant.token))
        assert holder_now(other) == (rival.nonce, True)


def test_a_sleep_after_a_look_is_not_time_in_which_a_lease_stood_still() -> None:
    with several(3) as (store, other, keeper):
        holder = someone()
        grant = acquire(store, holder)
        with pytest.raises(LeaseHeld):
            acquire(other, someone())

        def sleep() -> None:
            time.sleep(BRIEF / 2)
            renew(keeper, holder, grant)
            time.sleep(BRIEF / 2 + 0.1)

        stopped_after(other, "look", sleep)
        with pytest.raises(LeaseHeld):
            acquire(other, someone())


def test_a_lease_stood_still_from_after_the_first_look_until_before_the_last() -> None:
    with opened() as store:
        acquire(store, someone())
        found, still = store._look("x"), Still()
        record = record_of(lock=found.lock, record=found.record)
        assert record is not None
        assert not still.long_enough(record, before=0.0, after=10.0)
        assert not still.long_enough(record, before=10.5, after=20.0)
        assert still.long_enough(record, before=10.7, after=10.8)


def test_a_nonce_whose_lease_ran_out_may_ask_again() -> None:
    with opened() as store:
        holder = someone()
        grant = acquire(store, holder)
        assert holder_now(store) == (holder.nonce, True)
        time.sleep(BRIEF + 0.1)
        again = acquire(store, holder)
        assert again.token > grant.token
        assert not again.adopted


def test_a_lease_whose_record_was_removed_by_hand_is_lost_and_may_be_asked_for_again() -> None:
    with opened() as store:
        holder = someone()
        grant = acquire(store, holder, ttl=30.0)
        assert store.door._client is not None
        store.door._client.delete(store.paths.record("x"))
        with pytest.raises(LeaseLost, match="record is gone"):
            renew(store, holder, grant)
        assert acquire(store, holder).token > grant.token


@pytest.mark.parametrize("piece", ["/", "?", "#", "[", "@", ",", ":", "/1@h:1/", "?1@h:1?"])
def test_no_piece_of_a_password_is_shown(piece: str) -> None:
    secret = f"s3cr{piece}et"
    for user in (f"me:{secret}@", f"me:{secret}"):
        words = shown(f"zookeeper://{user}127.0.0.1:1/root")
        assert "s3cr" not in words
        assert "et@" not in words


def shown(url: str) -> str:
    """Return all that is said of a URL, with where it came from."""
    try:
        store = open_store(url, BlockingWorld(), namespace="default")
    except BadUrl as no:
        return f"{no} {no.__cause__} {no.__context__}"
    assert isinstance(store, ZooKeeperStore)
    return store.door.where


@pytest.mark.parametrize("address", ["me:12/34@h:1/root", "me:12?34@h:1/root"])
def test_a_password_is_not_mistaken_for_a_port(address: str) -> None:
    with pytest.raises(BadUrl, match="%2F") as no:
        open_store(f"zookeeper://{address}", BlockingWorld(), namespace="default")
    assert "12" not in str(no.value)
