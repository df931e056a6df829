"""Cut, swallowed, killed, stopped, flushed: who holds a lease stays one, and tokens never fall."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
from redis_kit import Process, Waiter, holder, store_at, until

from fencepost import Fencepost, LeaseHeld, LeaseLost, OutcomeUnknown, StoreUnavailable
from fencepost.testing.checker import check
from fencepost.testing.history import Event, from_lines
from fencepost.world.flow import finish
from proxy import Proxy
from servers import Valkey, shared

if TYPE_CHECKING:
    from pathlib import Path

    from fencepost.stores.redis import RedisStore


class Forgetful(Valkey):
    """A server that writes nothing down."""

    settings = ("--appendonly", "no")


@pytest.fixture
def space(tmp_path: Path) -> str:
    return f"t{abs(hash(str(tmp_path)))}"


def token_of(store: RedisStore, name: str = "x") -> int:
    """Acquire and release; return the token."""
    who = holder()
    grant = finish(store.acquire(name, holder=who, ttl=30.0))
    finish(store.release(name, nonce=who.nonce, token=grant.token))
    return grant.token


def test_a_grant_whose_reply_was_cut_is_adopted_and_leaves_no_ghost(space: str) -> None:
    with Proxy(shared(Valkey).port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}/0?timeout=1"
        with Fencepost(url, namespace=space) as fp:
            with fp.lock("warm"):
                proxy.lose_replies()
                with fp.lock("x") as lease:
                    assert [view.token for view in fp.locks() if view.name == "x"] == [lease.token]
            assert fp.locks() == []
            with fp.lock("x") as again:
                assert again.token > lease.token


def test_a_release_whose_reply_was_cut_is_no_loss_even_if_it_was_handed_on(space: str) -> None:
    server = shared(Valkey)
    with (
        Proxy(server.port) as proxy,
        Fencepost(f"redis://127.0.0.1:{proxy.port}/0?timeout=1", namespace=space) as first,
        Fencepost(server.url(), namespace=space) as second,
    ):
        lock = first.lock("x")
        lease = lock.acquire()
        heir = Waiter(second)
        until(lambda: in_line(space) == 1)
        proxy.lose_replies()
        assert lock.release(lease) is True
        assert heir.lease().token > lease.token


def in_line(space: str, name: str = "x") -> int:
    with shared(Valkey).client() as client:
        return int(client.zcard(f"fp:{{{space}:{name}}}:line"))


def test_a_request_that_was_swallowed_is_unknown_in_time_and_did_nothing(space: str) -> None:
    with Proxy(shared(Valkey).port) as proxy:
        store, direct = (
            store_at(proxy.port, space, "?timeout=0.3"),
            store_at(shared(Valkey).port, space),
        )
        for mode in ("hole_up", "hole"):
            finish(store.peek("x"))  # connected
            proxy.mode = mode
            began = time.monotonic()
            with pytest.raises(OutcomeUnknown, match=rf"127.0.0.1:{proxy.port}/0 did not answer"):
                finish(store.acquire("x", holder=holder(), ttl=30.0))
            assert time.monotonic() - began < 2
            with pytest.raises(StoreUnavailable):  # to look changes nothing, so it did not happen
                finish(store.peek("x"))
            assert finish(direct.peek("x")) is None
            proxy.mode = "pass"
            proxy.reset()
        assert token_of(store)
        finish(store.close())
        finish(direct.close())


def test_who_is_not_answered_waits_for_as_long_as_the_url_says_and_no_longer(space: str) -> None:
    with Proxy(shared(Valkey).port) as proxy:
        store, who = store_at(proxy.port, space, "?timeout=1"), holder()
        grant = finish(store.acquire("x", holder=who, ttl=30.0))
        proxy.mode = "hole"
        began = time.monotonic()
        with pytest.raises(OutcomeUnknown, match="did not answer: Timeout reading from"):
            finish(store.release("x", nonce=who.nonce, token=grant.token))
        assert 1.0 <= time.monotonic() - began < 1.9
        assert store._server._idle == [], "an answer may still come on that connection"
        proxy.mode = "pass"
        proxy.reset()
        finish(store.close())


def test_a_renewal_gives_up_soon_enough_to_tell_of_the_loss(space: str) -> None:
    with Proxy(shared(Valkey).port) as proxy:
        store, who = store_at(proxy.port, space), holder()
        grant = finish(store.acquire("x", holder=who, ttl=1.0))
        proxy.mode = "hole"
        began = time.monotonic()
        with pytest.raises(OutcomeUnknown):
            finish(store.renew("x", nonce=who.nonce, token=grant.token, ttl=1.0))
        assert time.monotonic() - began < 1.0
        proxy.mode = "pass"
        proxy.reset()
        finish(store.close())


def test_a_connection_that_the_server_closed_is_opened_again_unnoticed(space: str) -> None:
    with Valkey.own() as server:
        store = store_at(server.port, space)
        before = token_of(store)
        for connection in store._server._idle:
            connection.used_at -= 10  # as if nobody had asked for a while
        server.restart()
        assert token_of(store) > before
        finish(store.close())


def test_a_hold_survives_the_death_and_return_of_the_server() -> None:
    with Valkey.own() as server, Fencepost(server.url()) as fp, fp.lock("x", ttl="2s") as lease:
        first = fp.locks()[0]
        server.restart()
        renewed = store_at(server.port)
        until(lambda: _since_renewal(renewed, lease.token) < 0.3)
        lease.check()
        assert finish(renewed.peek("x")).token == first.token  # type: ignore[union-attr]
        finish(renewed.close())


def _since_renewal(store: RedisStore, token: int) -> float:
    view = finish(store.peek("x"))
    assert view is not None
    assert (view.held, view.token) == (True, token)
    return 2.0 - view.expires_in


def test_who_waits_goes_on_waiting_while_the_server_is_away() -> None:
    with Valkey.own() as server, Fencepost(server.url()) as fp, Fencepost(server.url()) as other:
        lock = fp.lock("x", ttl="20s")
        lease = lock.acquire()
        waiter = Waiter(other)
        with server.client() as client:
            until(lambda: client.zcard("fp:{default:x}:line") == 1)
        server.restart()
        with server.client() as client:
            until(lambda: client.execute_command("PUBSUB", "CHANNELS", "fp:turn:*"))
        assert lock.release(lease)
        assert waiter.lease().token > lease.token


def test_a_holder_that_slept_through_its_end_finds_its_successor(space: str) -> None:
    url = shared(Valkey).url()
    with Process(url, name=space, ttl=0.6) as sleeper:
        until(lambda: sleeper.granted)
        sleeper.signal(signal.SIGSTOP)
        with Fencepost(url) as fp, fp.lock(space, wait=20) as lease:
            sleeper.signal(signal.SIGCONT)
            sleeper.go_on()
            until(lambda: "LeaseLost" in sleeper.lines)
            lease.check()


def test_a_holder_that_died_is_waited_for_and_no_longer_than_its_ttl(space: str) -> None:
    """``notices_death`` is disclaimed, and visibly does not hold."""
    url = shared(Valkey).url()
    with Process(url, name=space, ttl=1.5) as doomed, Fencepost(url) as fp:
        until(lambda: doomed.granted)
        doomed.signal(signal.SIGKILL)
        doomed.wait()
        with pytest.raises(LeaseHeld):
            fp.lock(space).acquire()
        began = time.monotonic()
        with fp.lock(space, wait=20):
            assert time.monotonic() - began < 3.0


def test_processes_that_are_killed_and_stopped_never_share_a_lease(space: str) -> None:
    url, history = shared(Valkey).url(), list[Event]()
    crew = [Process(url, name=space, ttl=0.5, rounds=40) for _ in range(4)]
    doomed = [Process(url, name=space, ttl=0.5, rounds=10_000) for _ in range(3)]
    for number, process in enumerate(doomed):
        count = len(process.lines)
        until(lambda process=process, count=count: len(process.lines) > count + 9)  # type: ignore[misc]
        if number == 0:
            process.signal(signal.SIGSTOP)
            time.sleep(0.7)  # past its ttl
            process.signal(signal.SIGCONT)
        process.signal(signal.SIGKILL)
        process.wait()
        history.append(Event(time.time(), "crashed", str(process.pid)))
    for process in [*crew, *doomed]:
        with process:
            process.wait()
        told = from_lines(line for line in process.lines if line.startswith("{"))
        last = told[-1]
        if last.what == "releasing" and last.at < last.until:
            history.append(last._replace(what="released"))  # perhaps, and it claims it no more
        history += told
    assert sum(event.what == "granted" for event in history) >= 160
    assert check(history) == []


def test_tokens_never_fall_whatever_becomes_of_the_keys(space: str) -> None:
    with Valkey.own() as server, server.client() as client:
        store = store_at(server.port, space)
        last = token_of(store)
        for disaster in (
            client.script_flush,
            lambda: client.delete(f"fp:{{{space}:x}}:lease"),
            client.flushall,
            server.restart,
        ):
            disaster()
            try:
                token = token_of(store)
            except OutcomeUnknown:  # the connection that the restart cut
                token = token_of(store)
            assert token > last
            last = token
        finish(store.close())


def test_without_persistence_a_restart_forgets_the_holder_but_not_the_order() -> None:
    with Forgetful.own() as server:
        store, who = store_at(server.port), holder()
        old = finish(store.acquire("x", holder=who, ttl=30.0))
        server.restart()
        finish(store.close())
        with pytest.raises(LeaseLost, match="record is gone"):
            finish(store.renew("x", nonce=who.nonce, token=old.token, ttl=30.0))
        assert finish(store.peek("x")) is None, "durable holds only with appendonly yes"
        assert token_of(store) > old.token
        finish(store.close())


def test_a_failover_may_forget_a_grant_but_its_successor_has_a_higher_token() -> None:
    """``failover_safe`` is disclaimed, and visibly does not hold; a fence still does."""
    with Valkey.own() as primary, Proxy(primary.port) as wire:

        class Replica(Valkey):
            replica_of = wire.port

        with Replica.own() as replica, replica.client() as promoted:
            until(lambda: promoted.info("replication")["master_link_status"] == "up")
            wire.mode = "hole"  # replication is asynchronous: the primary goes on alone
            before, after = store_at(primary.port), store_at(replica.port)
            old_holder, new_holder = holder("old"), holder("new")
            old = finish(before.acquire("x", holder=old_holder, ttl=30.0))
            with pytest.raises(StoreUnavailable, match="is a read-only replica: name the primary"):
                finish(after.acquire("x", holder=new_holder, ttl=30.0))
            promoted.replicaof("NO", "ONE")
            new = finish(after.acquire("x", holder=new_holder, ttl=30.0))
            finish(before.renew("x", nonce=old_holder.nonce, token=old.token, ttl=30.0))
            assert new.token > old.token, "both believe; the fence admits one"
            with pytest.raises(LeaseLost):
                finish(after.renew("x", nonce=old_holder.nonce, token=old.token, ttl=30.0))
            wire.mode = "pass"
            finish(before.close())
            finish(after.close())


def test_a_server_whose_clock_was_set_back_keeps_nothing_longer_than_granted(space: str) -> None:
    store, who = store_at(shared(Valkey).port, space), holder()
    finish(store.acquire("x", holder=who, ttl=0.5))
    key = f"fp:{{{space}:x}}:lease"
    with shared(Valkey).client() as client:
        lines = client.get(key).split(b"\n")
        lines[6] = b"%d" % (int(lines[6]) + 3_600_000_000)  # as an hour ago would have seen it
        client.set(key, b"\n".join(lines))
    view = finish(store.peek("x"))
    assert view is not None
    assert view.expires_in <= 0.5
    with pytest.raises(LeaseHeld) as held:
        finish(store.acquire("x", holder=holder(), ttl=1.0))
    assert held.value.expires_in <= 0.5
    time.sleep(0.6)  # the ttl, once more
    finish(store.acquire("x", holder=holder(), ttl=1.0))
    finish(store.close())


def test_a_forked_child_asks_with_connections_of_its_own(space: str) -> None:
    url = shared(Valkey).url()
    with Fencepost(url, namespace=space) as fp, fp.lock("x") as lease:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with fp.lock("y"):
                    code = 0 if len(fp.locks()) == 2 else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert [view.name for view in fp.locks()] == ["x"]
        lease.check()


def test_a_full_server_refuses_and_nothing_has_happened(space: str) -> None:
    with Valkey.own() as server, server.client() as client:
        store, who = store_at(server.port, space), holder()
        client.config_set("maxmemory", "1")
        with pytest.raises(StoreUnavailable, match="is out of memory: raise maxmemory"):
            finish(store.acquire("x", holder=who, ttl=30.0))
        client.config_set("maxmemory", "0")
        assert finish(store.peek("x")) is None
        finish(store.close())
