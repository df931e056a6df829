"""Those who wait are served in the order in which they came, by whoever releases, at once."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
from redis_kit import Process, Waiter, holder, store_at, until

from fencepost import AsyncFencepost, Fencepost, LeaseHeld, LeaseLost
from fencepost.stores import redis_scripts as scripts
from fencepost.world.flow import finish
from fencepost.world.redis import packed
from proxy import Proxy
from servers import Valkey, shared

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def space(tmp_path: Path) -> str:
    return f"l{abs(hash(str(tmp_path)))}"


@pytest.fixture
def client() -> Iterator[Any]:
    with shared(Valkey).client() as client:
        yield client


@pytest.fixture
def fp(space: str) -> Iterator[Fencepost]:
    with Fencepost(shared(Valkey).url(), namespace=space) as fp:
        yield fp


def key(space: str, what: str, name: str = "x") -> str:
    return f"fp:{{{space}:{name}}}:{what}"


def test_waiters_are_served_in_the_order_in_which_they_came(
    fp: Fencepost, client: Any, space: str
) -> None:
    lock = fp.lock("x")
    lease = lock.acquire()
    waiters = []
    for number in range(1, 7):
        waiters.append(Waiter(fp))
        until(lambda number=number: client.zcard(key(space, "line")) == number)  # type: ignore[misc]
    lock.release(lease)
    for waiter in waiters:
        token = waiter.lease().token
        assert [view.token for view in fp.locks()] == [token]
        waiter.release()
    assert [waiter.at for waiter in waiters] == sorted(waiter.at for waiter in waiters)
    assert client.keys(f"fp:{{{space}*") == [key(space, "lease").encode()], "nothing is left over"


def test_a_hand_over_needs_no_request_of_the_one_who_is_served(
    fp: Fencepost, client: Any, space: str
) -> None:
    first, second = fp.lock("x"), fp.lock("x", wait=30)
    second.release(second.acquire())  # so that the script is known
    lease = first.acquire()
    Waiter(fp, "other").release()
    waiter = Waiter(fp)
    until(lambda: client.zcard(key(space, "line")) == 1)
    with client.monitor() as watched:
        first.release(lease)
        waiter.lease()
        client.echo("over")
        sent = []
        for command in watched.listen():
            if "over" in command["command"]:
                break
            if command["client_type"] != "lua":
                sent.append(command["command"].split()[0])
    assert sent.count("EVALSHA") == 1, sent
    waiter.release()


def test_a_waiter_that_died_is_passed_over_at_once(client: Any, space: str) -> None:
    url = shared(Valkey).url()
    with Fencepost(url) as fp, Process(url, name=space) as doomed:
        until(lambda: doomed.granted)
        with Process(url, name=space) as dead:
            until(lambda: client.zcard(key("default", "line", space)) == 1)
            waiter = Waiter(fp, space)
            until(lambda: client.zcard(key("default", "line", space)) == 2)
            dead.signal(signal.SIGKILL)
            dead.wait()
            began = time.monotonic()
            doomed.go_on()
            waiter.lease()
            assert waiter.at - began < 5, "the dead one's ttl is 30 s"
            assert not dead.granted
            waiter.release()


def test_a_waiter_that_was_silent_for_long_is_passed_over_and_keeps_its_place(
    client: Any, space: str
) -> None:
    url = shared(Valkey).url()
    line = key("default", "line", space)
    with Fencepost(url) as fp, Process(url, name=space) as sleeper_first:
        until(lambda: sleeper_first.granted)
        with Process(url, name=space) as stopped:
            until(lambda: client.zcard(line) == 1)
            stopped.signal(signal.SIGSTOP)
            ((wish, came),) = client.zrange(line, 0, 0, withscores=True)
            client.zadd(line, {wish: came - 10e6})  # ten seconds ago
            client.delete(key("default", "seen", space))
            waiter = Waiter(fp, space)
            until(lambda: client.zcard(line) == 2)
            sleeper_first.go_on()
            waiter.lease()
            stopped.signal(signal.SIGCONT)
            until(lambda: client.zcard(line) == 1)  # it stands there again by itself
            waiter.release()
            until(lambda: stopped.granted)
            stopped.go_on()
            stopped.wait()


def test_a_call_that_got_lost_is_found_by_looking(client: Any, space: str) -> None:
    server = shared(Valkey)
    with (
        Proxy(server.port) as proxy,
        Fencepost(server.url(), namespace=space) as near,
        Fencepost(f"redis://127.0.0.1:{proxy.port}/0?timeout=0.5", namespace=space) as far,
    ):
        lock = near.lock("x")
        lease = lock.acquire()
        waiter = Waiter(far)
        until(lambda: client.zcard(key(space, "line")) == 1)
        proxy.mode = "hole_down"  # the server speaks, and nobody hears it
        lock.release(lease)
        until(lambda: [view.token for view in near.locks()] > [lease.token])
        proxy.mode = "pass"
        assert waiter.lease().token == near.locks()[0].token
        waiter.release()


def test_a_waiter_that_lost_its_connection_is_served_nevertheless(
    fp: Fencepost, client: Any, space: str
) -> None:
    lock = fp.lock("x")
    lease = lock.acquire()
    waiter = Waiter(fp)
    until(lambda: client.zcard(key(space, "line")) == 1)
    client.client_kill_filter(_type="pubsub")
    lock.release(lease)
    waiter.release()


def test_who_gives_up_leaves_nothing_behind(fp: Fencepost, client: Any, space: str) -> None:
    with Fencepost(shared(Valkey).url(), namespace=space) as other:
        with fp.lock("x"):
            for wait in (0.3, 0.05):
                with pytest.raises(LeaseHeld):
                    other.lock("x", wait=wait).acquire()
            assert client.zcard(key(space, "line")) == 0
        with other.lock("x"):
            pass


def test_who_lost_sight_of_the_server_leaves_no_wish_behind(client: Any, space: str) -> None:
    with Proxy(shared(Valkey).port) as proxy:
        near, far = store_at(shared(Valkey).port, space), store_at(proxy.port, space)
        finish(near.acquire("x", holder=holder(), ttl=30.0))
        place = finish(far.line("x"))
        place.invite("x", holder=holder(), ttl=30.0)
        assert finish(place.turn(0.05))  # to ask, before standing in line
        assert not finish(place.turn(0.05))
        assert client.zcard(key(space, "line")) == 1
        proxy.mode = "refuse"  # what is open stays open: we still hear
        finish(far.close())
        assert not finish(place.turn(0.05))
        proxy.mode = "pass"
        finish(place.leave(served=False))
        assert client.zcard(key(space, "line")) == 0
        finish(near.close())
        finish(far.close())


def test_a_cancelled_task_leaves_the_line(client: Any, space: str) -> None:
    async def scene() -> None:
        async with AsyncFencepost(shared(Valkey).url(), namespace=space) as fp:
            async with fp.lock("x"):
                waiting = asyncio.create_task(fp.lock("x", wait=30).acquire())
                standing = lambda: client.zcard(key(space, "line")) == 1  # noqa: E731
                await asyncio.to_thread(until, standing)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                assert client.zcard(key(space, "line")) == 0
            async with fp.lock("x"):
                pass

    asyncio.run(scene())


def test_tasks_hand_over_to_each_other(space: str) -> None:
    async def scene() -> None:
        inside = 0

        async def work(fp: AsyncFencepost) -> None:
            nonlocal inside
            for _ in range(5):
                async with fp.lock("x", wait=30):
                    inside += 1
                    assert inside == 1
                    await asyncio.sleep(0.001)
                    inside -= 1

        async with AsyncFencepost(shared(Valkey).url(), namespace=space) as fp:
            await asyncio.gather(*(work(fp) for _ in range(6)))

    asyncio.run(scene())


def test_a_lapsed_lease_goes_to_who_has_waited_longest_even_if_others_ask(space: str) -> None:
    server = shared(Valkey)
    store = store_at(server.port, space)
    finish(store.acquire("x", holder=holder(), ttl=0.6))
    with Fencepost(server.url(), namespace=space) as fp, server.client() as client:
        waiter = Waiter(fp)
        until(lambda: client.zcard(key(space, "line")) == 1)

        def somebody_has_it() -> bool:
            with pytest.raises(LeaseHeld) as held:
                finish(store.acquire("x", holder=holder("greedy"), ttl=30.0))
            return "greedy" not in str(held.value) and held.value.expires_in > 1

        until(somebody_has_it)
        waiter.release()
    finish(store.close())


def test_a_broken_lease_goes_to_the_first_in_line_and_leaves_a_record(
    fp: Fencepost, client: Any, space: str
) -> None:
    lock = fp.lock("x")
    lease = lock.acquire()
    waiter = Waiter(fp)
    until(lambda: client.zcard(key(space, "line")) == 1)
    fresh = fp.break_lock("x", token=lease.token, reason='it "hangs"', operator="ops")
    assert waiter.lease().token > fresh
    written = json.loads(client.lindex(key(space, "breaks"), 0))
    assert (written["token"], written["fresh"]) == (lease.token, fresh)
    assert (written["reason"], written["operator"]) == ('it "hangs"', "ops")
    assert not lock.release(lease)
    waiter.release()


def test_a_late_duplicate_of_a_wish_does_not_stand_in_line_again(space: str) -> None:
    store, who = store_at(shared(Valkey).port, space), holder()
    keys = store._keys("x")
    wish = packed(who.nonce.encode(), b"30000000", b"1 0 a", b"", b"wish", b"", b"id")
    token = store._server.run(scripts.STAND, keys.three + wish)
    finish(store.release("x", nonce=who.nonce, token=token))
    assert store._server.run(scripts.STAND, keys.three + wish)[:1] == b"S"
    for _ in range(3):  # not even when others have had it since
        other = holder()
        grant = finish(store.acquire("x", holder=other, ttl=30.0))
        assert grant.token > token
        finish(store.release("x", nonce=other.nonce, token=grant.token))
    with pytest.raises(LeaseLost, match="given it back"):
        finish(store.acquire("x", holder=who, ttl=30.0))
    finish(store.close())


def test_permits_of_a_semaphore_go_to_those_who_wait(
    fp: Fencepost, client: Any, space: str
) -> None:
    locks = [fp.lock("pool", limit=2) for _ in range(2)]
    leases = [lock.acquire() for lock in locks]
    third = Waiter(fp, "pool", limit=2)
    until(lambda: client.zcard(key(space, "lines", "pool")) == 1)
    locks[1].release(leases[1])
    third.release()
    locks[0].release(leases[0])
    assert client.zcard(key(space, "lines", "pool")) == 0
