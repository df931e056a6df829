"""What comes late, or in pieces, is not taken for news: messages, requests, entries in line."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, cast

import pytest
from redis_kit import holder, store_at, until

from fencepost import AsyncFencepost, LeaseHeld, OutcomeUnknown, StoreUnavailable
from fencepost.stores import redis_scripts as scripts
from fencepost.stores.redis import RedisStore, read_address
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish
from fencepost.world.redis import Ear, packed
from proxy import Proxy
from servers import Valkey, shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fencepost.model.lease import Holder
    from fencepost.stores.redis_line import RedisPlace
    from fencepost.world.redis import Wire


class Stoppable(BlockingWorld):
    """A process that may be stopped just when it begins to listen."""

    meanwhile: Callable[[], None] | None = None

    async def readable(self, fd: int, timeout: float) -> bool:
        if self.meanwhile is None:
            return await super().readable(fd, timeout)
        meanwhile, self.meanwhile = self.meanwhile, None
        meanwhile()
        return False


@pytest.fixture
def space(tmp_path: Path) -> str:
    return f"w{abs(hash(str(tmp_path)))}"


@pytest.fixture
def client() -> Iterator[Any]:
    with shared(Valkey).client() as client:
        yield client


@pytest.fixture
def near(space: str) -> Iterator[RedisStore]:
    store = store_at(shared(Valkey).port, space)
    yield store
    finish(store.close())


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy(shared(Valkey).port) as proxy:
        yield proxy


@pytest.fixture
def far(space: str, proxy: Proxy) -> Iterator[RedisStore]:
    store = store_at(proxy.port, space, "?timeout=0.3")
    yield store
    finish(store.close())


def standing(store: RedisStore, who: Holder, *, ttl: float = 30.0) -> RedisPlace:
    place = finish(store.line("x"))
    place.invite("x", holder=who, ttl=ttl)
    assert finish(place.turn(0.05))  # to ask, before standing in line
    assert not finish(place.turn(0.05))
    return place


def request_of(client: Any, space: str) -> list[bytes]:
    """Return what the one who stands in line for x says again and again."""
    ((wish, came),) = client.zrange(f"fp:{{{space}:x}}:line", 0, 0, withscores=True)
    which, nonce, long, ear, who = wish.split(b"\n")
    return [nonce, long, who, which, wish, b"%d" % came, ear]


def comes_late(store: RedisStore, request: list[bytes]) -> Any:
    return store._server.run(scripts.STAND, store._keys("x").three + packed(*request))


def test_an_old_hand_over_is_not_taken_for_a_new_one(near: RedisStore, space: str) -> None:
    world = Stoppable()
    port = shared(Valkey).port
    waiting = RedisStore(world, read_address(f"127.0.0.1:{port}", tls=False), namespace=space)
    first, second, waiter = holder("a"), holder("b"), holder("waiter")
    grant = finish(near.acquire("x", holder=first, ttl=30.0))
    place = standing(waiting, waiter, ttl=0.5)

    def it_is_handed_over_runs_out_and_is_taken() -> None:
        finish(near.release("x", nonce=first.nonce, token=grant.token))
        view = finish(near.peek("x"))
        assert view is not None
        assert view.holder.nonce == waiter.nonce
        until(lambda: not finish(near.peek("x")).held)  # type: ignore[union-attr]
        finish(near.acquire("x", holder=second, ttl=30.0))

    world.meanwhile = it_is_handed_over_runs_out_and_is_taken
    for _ in range(4):
        if finish(place.turn(0.1)):
            assert finish(place.accept()) is None, "another has it"
    view = finish(near.peek("x"))
    assert view is not None
    assert view.holder.nonce == second.nonce
    finish(near.release("x", nonce=second.nonce, token=view.token))
    assert finish(place.turn(5.0)), "and a new one is taken nevertheless"
    handed = finish(place.accept())
    assert handed is not None
    assert handed.grant.token > view.token
    finish(place.leave(served=True))
    finish(waiting.close())


def test_a_late_wish_of_who_was_told_that_it_is_held_is_refused(
    near: RedisStore, far: RedisStore, proxy: Proxy, client: Any, space: str
) -> None:
    first, waiter = holder(), holder("waiter")
    grant = finish(near.acquire("x", holder=first, ttl=30.0))
    place = standing(far, waiter)
    request = request_of(client, space)
    proxy.mode = "hole_up"
    assert finish(place.turn(0.05)), "nobody knows where that request is: to ask tells"
    proxy.mode = "pass"
    place.withdraw()
    with pytest.raises(LeaseHeld):
        finish(far.acquire("x", holder=waiter, ttl=30.0))
    finish(place.leave(served=False))
    finish(near.release("x", nonce=first.nonce, token=grant.token))
    assert comes_late(near, request)[:1] == b"S"
    view = finish(near.peek("x"))
    assert view is not None
    assert not view.held
    assert client.zcard(f"fp:{{{space}:x}}:line") == 0


def test_who_asks_again_whether_it_was_held_is_told_so_although_it_is_free_by_now(
    near: RedisStore, far: RedisStore, proxy: Proxy
) -> None:
    first, waiter = holder(), holder("waiter")
    grant = finish(near.acquire("x", holder=first, ttl=30.0))
    place = standing(far, waiter)
    proxy.mode = "hole_up"
    assert finish(place.turn(0.05))
    proxy.mode = "pass"
    finish(far.peek("x"))  # connected
    place.withdraw()
    proxy.lose_replies()
    with pytest.raises(OutcomeUnknown):
        finish(far.acquire("x", holder=waiter, ttl=30.0))
    finish(near.release("x", nonce=first.nonce, token=grant.token))
    with pytest.raises(LeaseHeld):
        finish(far.acquire("x", holder=waiter, ttl=30.0))
    finish(place.leave(served=False))


def test_a_late_wish_of_who_could_not_ask_any_more_is_refused(
    near: RedisStore, far: RedisStore, proxy: Proxy, client: Any, space: str
) -> None:
    first, waiter = holder(), holder("waiter")
    grant = finish(near.acquire("x", holder=first, ttl=30.0))
    place = standing(far, waiter)
    request = request_of(client, space)
    proxy.mode = "hole_up"
    assert finish(place.turn(0.05))
    proxy.mode = "refuse"
    finish(far.close())
    place.withdraw()
    with pytest.raises(StoreUnavailable):
        finish(far.acquire("x", holder=waiter, ttl=30.0))
    proxy.mode = "pass"
    finish(place.leave(served=False))
    finish(near.release("x", nonce=first.nonce, token=grant.token))
    assert comes_late(near, request)[:1] == b"S"


@pytest.mark.parametrize("known", [True, False])
def test_a_late_wish_of_a_task_that_was_cancelled_is_refused_and_nobody_hears_for_it(
    near: RedisStore, proxy: Proxy, client: Any, space: str, *, known: bool
) -> None:
    lease = f"fp:{{{space}:x}}:lease"

    async def scene() -> list[bytes]:
        url = f"redis://127.0.0.1:{proxy.port}/0?timeout=0.5"
        async with AsyncFencepost(url, namespace=space) as fp:
            waiting = asyncio.create_task(fp.lock("x", wait=30).acquire())
            stands = lambda: client.zcard(f"fp:{{{space}:x}}:line") == 1  # noqa: E731
            await asyncio.to_thread(until, stands)
            request = request_of(client, space)
            proxy.mode = "hole_up"
            await asyncio.to_thread(until, lambda: proxy.swallowed)
            proxy.mode = "pass"
            waiting.cancel()
            if not known:
                client.delete(lease)
            with pytest.raises(asyncio.CancelledError):
                await waiting
            channel = f"fp:turn:{request[-1].decode()}"
            unheard = lambda: client.pubsub_numsub(channel)[0][1] == 0  # noqa: E731
            await asyncio.to_thread(until, unheard, within=5.0)
            if known:
                finish(near.release("x", nonce=first.nonce))
            return request

    first = holder()
    finish(near.acquire("x", holder=first, ttl=30.0))
    assert comes_late(near, asyncio.run(scene()))[:1] == b"S"
    view = finish(near.peek("x"))
    assert view is not None
    assert not view.held
    assert client.zcard(f"fp:{{{space}:x}}:line") == 0
    grant = finish(near.acquire("x", holder=holder(), ttl=30.0))
    assert grant.token > view.token


class InPieces:
    """A connection on which a message comes in as many pieces as the network likes."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = list(pieces)

    def received(self) -> bytes | None:
        return self._pieces.pop(0) if self._pieces else None

    def disconnect(self) -> None: ...


def message(text: bytes) -> bytes:
    return b"*3\r\n" + packed(b"message", b"fp:turn:1", text)


def test_a_message_is_read_when_the_whole_of_it_has_come(near: RedisStore) -> None:
    served = b"%b %d" % (b"n" * 32, time.time_ns() // 1000)
    whole = message(served)
    for cut in range(1, len(whole)):
        ear = Ear(near._server, "fp:turn:1")
        pieces = InPieces(whole[:cut], whole[cut:], message(b"turn"))
        ear._connection = cast("Wire", pieces)
        assert [ear.heard() for _ in range(4)] == [[], [served], [b"turn"], []], f"cut at {cut}"


def test_an_entry_in_line_of_another_format_is_passed_over(
    near: RedisStore, client: Any, space: str
) -> None:
    first, waiter, late = holder(), holder("waiter"), holder("late")
    line, now_us = f"fp:{{{space}:x}}:line", time.time() * 1e6
    grant = finish(near.acquire("x", holder=first, ttl=30.0))
    place = standing(near, waiter)
    client.zadd(line, {"2|silent for long": now_us - 20e6, "2|something new": now_us - 1e6})
    assert finish(place.first())
    finish(near.release("x", nonce=first.nonce, token=grant.token))
    view = finish(near.peek("x"))
    assert view is not None
    assert (view.held, view.holder.nonce) == (True, waiter.nonce)
    finish(place.leave(served=True))
    finish(near.release("x", nonce=waiter.nonce, token=view.token))
    client.zadd(line, {"2|something new": now_us})
    assert finish(near.acquire("x", holder=late, ttl=30.0)).token > view.token
