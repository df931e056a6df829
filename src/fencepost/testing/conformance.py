"""What every lease store must do, as one text that runs in every world.

Subclass ``LeaseStoreConformance``, say how your store is opened, and give the class to any test
runner: each ``prove_…`` becomes one ``test_…`` for each world. Nothing here imports a runner.

    class TestMyStore(LeaseStoreConformance):
        def open_store(self, world, *, place, namespace):
            return MyStore(world, f"{place}/leases", namespace=namespace)

A store that reads the clock of ``world`` is proven in no time: the clock is set. A server has a
clock of its own; say ``own_clock = True`` and how short a ``brief`` lease may be, and the proofs
wait for it to pass.
"""

from __future__ import annotations

import asyncio
import inspect
import tempfile
from contextlib import contextmanager
from typing import NamedTuple

from fencepost.errors import BadDuration, BadName, LeaseHeld, LeaseLost, OutcomeUnknown, TokenStale
from fencepost.flows.acquire import Granted, acquire
from fencepost.flows.keep import Hold, renew
from fencepost.flows.release import release
from fencepost.model.divided import mark_holder
from fencepost.model.lease import Grant, Holder, Phase
from fencepost.testing.clock import SettableClocks
from fencepost.world.aio import AioWorld
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from typing import Any, ClassVar

    from fencepost.stores.api import LeaseStore
    from fencepost.world.api import World

TTL = 30.0  # longer than any proof takes
NAME = "nightly-report"


class Desk(NamedTuple):
    """What a proof works with: a world, a fresh store in it, and ways to disturb both."""

    world: World
    store: LeaseStore
    open: Callable[[str], LeaseStore]
    restart: Callable[[], None]
    pass_time: Callable[[float], Awaitable[None]]
    step_wall: Callable[[float], None]
    brief: float = TTL  # the ttl of leases that are left to lapse

    async def lapse(self) -> None:
        """Let a brief lease come to its end, on any clock that may decide about it."""
        await self.store.peek(NAME)  # whoever has no clock must have seen it unchanged for so long
        await self.pass_time(self.brief * 1.1 + 0.1)

    def holder(self, host: str = "a") -> Holder:
        """Return a new holder: each acquisition is another."""
        return Holder(self.world.nonce(), host, 1)

    async def grant(self, name: str = NAME, *, ttl: float = TTL) -> tuple[Holder, Grant]:
        """Acquire a lease that is expected to be free."""
        holder = self.holder()
        return holder, await self.store.acquire(name, holder=holder, ttl=ttl)


@contextmanager
def refuses(*errors: type[Exception]) -> Iterator[list[Any]]:
    """Expect one of ``errors``; the list that it gives holds the error afterwards."""
    caught: list[Any] = []
    try:
        yield caught
    except errors as error:
        caught.append(error)
    else:
        raise AssertionError(f"none of {', '.join(e.__name__ for e in errors)} was raised")


class LeaseStoreConformance:
    """The contract of a lease store. Subclass it and implement ``open_store``."""

    worlds: ClassVar[tuple[str, ...]] = ("blocking", "asyncio", "simulated")
    rounds: ClassVar[int] = 100  # for the proofs that repeat themselves
    brief: ClassVar[float] = TTL  # the ttl of leases that are left to lapse
    own_clock: ClassVar[bool] = False  # time passes for this store only by passing
    rivals: ClassVar[int] = 8  # how many compete; fewer where losers are slow

    def open_store(self, world: World, *, place: str, namespace: str) -> LeaseStore:
        """Open the store that lives at ``place``, a folder that is this test's own."""
        raise NotImplementedError("say how your store is opened")

    def restart(self, place: str) -> None:
        """Restart whatever keeps the leases at ``place``; a store that is only a file need not."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for name, proof in inspect.getmembers(cls, inspect.iscoroutinefunction):
            if name.startswith("prove_"):
                for world in cls.worlds:
                    title = f"test_{name.removeprefix('prove_')}__{world}"
                    setattr(cls, title, _in_world(world, proof, title))

    # Granting and refusing.

    async def prove_a_free_lease_is_granted_with_a_token(self, desk: Desk) -> None:
        _, grant = await desk.grant()
        assert 0 < grant.token < 2**53, "a token must survive JSON, Lua and JavaScript"
        assert grant.ttl == TTL
        assert not grant.adopted

    async def prove_a_held_lease_is_refused_with_its_holder_and_time_left(self, desk: Desk) -> None:
        _, grant = await desk.grant()
        with refuses(LeaseHeld) as caught:
            await desk.store.acquire(NAME, holder=desk.holder("b"), ttl=TTL)
        held = caught[0]
        assert held.name == NAME
        assert "a" in held.holder
        assert held.token == grant.token
        assert 0 < held.expires_in <= TTL

    async def prove_two_acquisitions_of_one_process_are_two_holders(self, desk: Desk) -> None:
        await desk.grant()
        with refuses(LeaseHeld):
            await desk.grant()

    async def prove_another_client_sees_the_same_leases(self, desk: Desk) -> None:
        holder, grant = await desk.grant()
        other = desk.open("default")
        with refuses(LeaseHeld):
            await other.acquire(NAME, holder=desk.holder("b"), ttl=TTL)
        await desk.store.release(NAME, nonce=holder.nonce, token=grant.token)
        assert (await other.acquire(NAME, holder=desk.holder("b"), ttl=TTL)).token > grant.token
        await other.close()

    async def prove_namespaces_keep_apart(self, desk: Desk) -> None:
        _, grant = await desk.grant()
        staging = desk.open("staging")
        granted = await staging.acquire(NAME, holder=desk.holder("b"), ttl=TTL)
        assert granted.token > 0
        assert [view.token for view in await desk.store.views()] == [grant.token]
        assert [view.token for view in await staging.views()] == [granted.token]
        await staging.close()

    # Lapse.

    async def prove_a_lapsed_lease_is_granted_to_the_next(self, desk: Desk) -> None:
        _, first = await desk.grant(ttl=desk.brief)
        await desk.lapse()
        _, second = await desk.grant()
        assert second.token > first.token

    async def prove_a_renewed_lease_outlives_its_first_ttl(self, desk: Desk) -> None:
        holder, grant = await desk.grant(ttl=desk.brief)
        for ttl in (desk.brief, desk.brief, TTL):  # the last is long enough for a slow machine
            await desk.pass_time(desk.brief * 0.6)
            again = await desk.store.renew(NAME, nonce=holder.nonce, token=grant.token, ttl=ttl)
            assert again.token == grant.token, "a renewal is not a new grant"
        with refuses(LeaseHeld):
            await desk.grant()

    async def prove_a_lease_past_its_end_cannot_be_renewed(self, desk: Desk) -> None:
        holder, grant = await desk.grant(ttl=desk.brief)
        await desk.lapse()
        with refuses(LeaseLost):
            await desk.store.renew(NAME, nonce=holder.nonce, token=grant.token, ttl=TTL)

    async def prove_a_stepping_wall_clock_frees_and_blocks_nothing(self, desk: Desk) -> None:
        for step in (3600.0, -7200.0):
            holder, grant = await desk.grant()
            desk.step_wall(step)
            with refuses(LeaseHeld):
                await desk.grant()
            await desk.store.renew(NAME, nonce=holder.nonce, token=grant.token, ttl=desk.brief)
            await desk.lapse()
            _, after = await desk.grant(ttl=desk.brief)
            assert after.token > grant.token
            await desk.lapse()

    # Tokens.

    async def prove_tokens_increase_however_a_lease_ends(self, desk: Desk) -> None:
        last = 0
        for number in range(self.rounds):
            ends_alone = number % 3 == 1
            holder, grant = await desk.grant(ttl=desk.brief if ends_alone else TTL)
            assert grant.token > last, "a token must never fall or repeat"
            last = grant.token
            if number % 3 == 0:
                await desk.store.release(NAME, nonce=holder.nonce, token=grant.token)
            elif ends_alone:
                await desk.lapse()
            else:
                last = await desk.store.break_(
                    NAME, token=grant.token, reason="test", operator="conformance"
                )
                assert last > grant.token

    async def prove_tokens_survive_a_restart_if_the_store_is_durable(self, desk: Desk) -> None:
        _, grant = await desk.grant()
        durable = desk.store.capabilities.durable
        await desk.store.close()
        desk.restart()
        again = desk.open("default")
        view = await again.peek(NAME)
        if durable:
            assert view is not None
            assert view.token == grant.token
            with refuses(LeaseHeld):
                await again.acquire(NAME, holder=desk.holder("b"), ttl=TTL)
        else:
            assert view is None, "a store that forgets must say so, and one that remembers too"
        await again.close()

    # Stale holders.

    async def prove_a_stale_holder_can_neither_renew_nor_release(self, desk: Desk) -> None:
        stale, old = await desk.grant(ttl=desk.brief)
        await desk.lapse()
        _, new = await desk.grant()
        with refuses(LeaseLost):
            await desk.store.renew(NAME, nonce=stale.nonce, token=old.token, ttl=TTL)
        with refuses(LeaseLost):
            await desk.store.release(NAME, nonce=stale.nonce, token=old.token)
        view = await desk.store.peek(NAME)
        assert view is not None
        assert (view.held, view.token) == (True, new.token)

    async def prove_the_nonce_counts_and_not_the_host(self, desk: Desk) -> None:
        _, grant = await desk.grant()
        with refuses(LeaseLost):
            await desk.store.release(NAME, nonce=desk.holder("a").nonce, token=grant.token)
        with refuses(LeaseHeld):
            await desk.grant()

    async def prove_releasing_twice_is_fine(self, desk: Desk) -> None:
        holder, grant = await desk.grant()
        await desk.store.release(NAME, nonce=holder.nonce, token=grant.token)
        await desk.store.release(NAME, nonce=holder.nonce, token=grant.token)

    async def prove_a_nonce_that_released_cannot_take_it_again(self, desk: Desk) -> None:
        holder, grant = await desk.grant()
        await desk.store.release(NAME, nonce=holder.nonce, token=grant.token)
        with refuses(LeaseLost):  # a duplicate of the request, delivered late
            await desk.store.acquire(NAME, holder=holder, ttl=TTL)
        await desk.grant()

    async def prove_a_broken_lease_is_lost_to_its_holder(self, desk: Desk) -> None:
        holder, grant = await desk.grant()
        with refuses(TokenStale):
            await desk.store.break_(NAME, token=grant.token - 1, reason="r", operator="o")
        await desk.store.break_(NAME, token=grant.token, reason="it hangs", operator="ops")
        with refuses(LeaseLost) as caught:
            await desk.store.renew(NAME, nonce=holder.nonce, token=grant.token, ttl=TTL)
        assert "it hangs" in caught[0].reason, "the holder should learn why"
        with refuses(LeaseLost):
            await desk.store.release(NAME, nonce=holder.nonce, token=grant.token)

    async def prove_a_mark_takes_the_place_of_a_mark(self, desk: Desk) -> None:
        first, second = mark_holder("a", limit=3), mark_holder("b", limit=2)
        before = await desk.store.acquire(NAME, holder=first, ttl=TTL)
        after = await desk.store.acquire(NAME, holder=second, ttl=TTL)
        [view] = await desk.store.views()
        assert (view.held, view.token, view.holder) == (True, after.token, second._replace(pid=3))
        assert after.token > before.token
        with refuses(LeaseLost):
            await desk.store.release(NAME, nonce=first.nonce, token=before.token)
        with refuses(LeaseHeld):
            await desk.grant()

    # Unknown outcomes.

    async def prove_an_acquire_whose_reply_was_lost_is_adopted(self, desk: Desk) -> None:
        holder = desk.holder()
        first = await desk.store.acquire(NAME, holder=holder, ttl=TTL)
        again = await desk.store.acquire(NAME, holder=holder, ttl=TTL)
        assert again.token == first.token, "asking again must not make a second grant"
        assert again.adopted

    async def prove_lost_replies_leave_no_ghost(self, desk: Desk) -> None:
        abandoned: list[tuple[str, str]] = []
        store = CutReplies(desk.store, cut=2)
        holder = desk.holder()
        granted = await acquire(
            desk.world,
            store,
            [NAME],
            holder=holder,
            ttl=TTL,
            wait=0.0,
            abandon=lambda *ghost: abandoned.append(ghost),
        )
        hold = _held(granted, holder)
        store.cut = 1
        await renew(desk.world, store, hold)
        assert hold.phase(desk.world.clocks.boottime()) is Phase.HELD, "unknown is not lost"
        store.cut = 1
        assert await release(desk.world, store, hold, abandon=lambda *_: None)
        await desk.grant()
        assert abandoned == []

    async def prove_a_release_without_a_token_gives_back_an_unknown_grant(self, desk: Desk) -> None:
        holder, _ = await desk.grant()
        await desk.store.release(NAME, nonce=holder.nonce)
        await desk.grant()

    # Names, sizes and durations.

    async def prove_names_of_all_kinds_are_told_apart(self, desk: Desk) -> None:
        names = ["x" * 1000, "x" * 999, "a b", "A B", "'; DROP TABLE lease; --", '"', "%s", "a/b"]
        names += ["ä", "日本語", "🔒", "a%00", "../up", "CON", "#", "a#b", "job#1", "job#2", "🔒🔒"]
        for name in names:
            await desk.grant(name)
        assert sorted(view.name for view in await desk.store.views()) == sorted(names)
        for name in names:
            with refuses(LeaseHeld):
                await desk.grant(name)

    async def prove_one_name_in_two_encodings_is_one_name(self, desk: Desk) -> None:
        await desk.grant("caf\u00e9")
        with refuses(LeaseHeld):
            await desk.grant("cafe\u0301")

    async def prove_impossible_names_are_refused(self, desk: Desk) -> None:
        for name in ("", "x" * 1001, "a\nb", "a\x00b", "\ud800", None, 7):
            with refuses(BadName):
                await desk.grant(name)  # type: ignore[arg-type]
        assert await desk.store.views() == []

    async def prove_impossible_durations_are_refused(self, desk: Desk) -> None:
        year = 365 * 86_400.0
        for ttl in (0, -1, None, float("nan"), float("inf"), year, 0.000001, "soon"):
            with refuses(BadDuration):
                await desk.grant(ttl=ttl)  # type: ignore[arg-type]
        assert await desk.store.views() == [], "a refused request must leave nothing behind"
        holder, grant = await desk.grant()
        with refuses(BadDuration):
            await desk.store.renew(NAME, nonce=holder.nonce, token=grant.token, ttl=0)

    # Seeing.

    async def prove_peek_tells_who_has_it_and_changes_nothing(self, desk: Desk) -> None:
        assert await desk.store.peek(NAME) is None
        holder, grant = await desk.grant()
        view = await desk.store.peek(NAME)
        assert view is not None
        assert (view.name, view.token, view.held) == (NAME, grant.token, True)
        assert view.holder.host == "a"
        assert 0 < view.expires_in <= TTL
        assert view.alive is not False
        await desk.store.release(NAME, nonce=holder.nonce, token=grant.token)
        view = await desk.store.peek(NAME)
        assert view is not None
        assert (view.token, view.held, view.expires_in) == (grant.token, False, 0.0)

    # Contention.

    async def prove_eight_rivals_never_meet(self, desk: Desk) -> None:
        counter = _Counter()
        await desk.world.together(*(self._count(desk, counter) for _ in range(self.rivals)))
        assert counter.value == self.rivals * 5, "two were inside at once"

    async def prove_who_waits_gets_it_after_the_release(self, desk: Desk) -> None:
        first, grant = await desk.grant()
        second = desk.holder("b")

        async def let_go() -> Granted | None:
            await desk.world.sleep(0.05)
            await desk.store.release(NAME, nonce=first.nonce, token=grant.token)
            return None

        _, granted = await desk.world.together(let_go(), _waiting(desk, second))
        assert granted is not None
        assert granted.grant.token > grant.token

    async def prove_who_waits_in_vain_is_told_who_has_it(self, desk: Desk) -> None:
        await desk.grant()
        with refuses(LeaseHeld):
            await _waiting(desk, desk.holder("b"), wait=0.05)

    async def _count(self, desk: Desk, counter: _Counter) -> None:
        for _ in range(5):
            holder = desk.holder()
            granted = await _waiting(desk, holder)
            seen = counter.value
            await desk.world.sleep(0.001)  # long enough for a rival to spoil the count
            counter.value = seen + 1
            await desk.store.release(NAME, nonce=holder.nonce, token=granted.grant.token)


class CutReplies:
    """A store whose next ``cut`` replies are lost after it has done what was asked."""

    def __init__(self, store: LeaseStore, *, cut: int) -> None:
        self._store, self.cut = store, cut

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._store, name)
        if name not in ("acquire", "renew", "release"):
            return verb

        async def cut_off(*args: object, **kwargs: object) -> object:
            answer = await verb(*args, **kwargs)
            if self.cut > 0:
                self.cut -= 1
                raise OutcomeUnknown(f"the reply to {name} was lost")
            return answer

        return cut_off


class _Counter:
    value = 0


async def _waiting(desk: Desk, holder: Holder, *, wait: float = 60.0) -> Granted:
    return await acquire(
        desk.world,
        desk.store,
        [NAME],
        holder=holder,
        ttl=TTL,
        wait=wait,
        abandon=lambda *_: None,
    )


def _held(granted: Granted, holder: Holder) -> Hold:
    return Hold(granted, nonce=holder.nonce, ttl=TTL, max_hold=None, emit=lambda _: None)


def _in_world(world: str, proof: Callable[..., Any], title: str) -> Callable[..., None]:
    """Return a plain test method that runs one proof in one world."""

    def test(self: LeaseStoreConformance) -> None:
        with tempfile.TemporaryDirectory() as place:
            _RUNNERS[world](self, proof, place)

    test.__name__ = title
    test.__doc__ = proof.__doc__
    return test


async def _prove(
    suite: LeaseStoreConformance,
    proof: Callable[..., Awaitable[None]],
    world: World,
    place: str,
    pass_time: Callable[[float], Awaitable[None]],
    step_wall: Callable[[float], None],
) -> None:
    store = suite.open_store(world, place=place, namespace="default")
    desk = Desk(
        world,
        store,
        lambda namespace: suite.open_store(world, place=place, namespace=namespace),
        lambda: suite.restart(place),
        world.sleep if suite.own_clock else pass_time,
        step_wall,
        suite.brief,
    )
    try:
        await proof(suite, desk)
    finally:
        await store.close()


def _run_blocking(suite: LeaseStoreConformance, proof: Callable[..., Any], place: str) -> None:
    clocks = SettableClocks()
    world = BlockingWorld(clocks=clocks)
    finish(_prove(suite, proof, world, place, _jump(clocks), clocks.step_wall))


def _run_asyncio(suite: LeaseStoreConformance, proof: Callable[..., Any], place: str) -> None:
    clocks = SettableClocks()
    world = AioWorld(clocks=clocks)
    try:
        asyncio.run(_prove(suite, proof, world, place, _jump(clocks), clocks.step_wall))
    finally:
        world.close()


def _run_simulated(suite: LeaseStoreConformance, proof: Callable[..., Any], place: str) -> None:
    from fencepost.testing.simulator.scheduler import run_simulated

    run_simulated(lambda world: _prove(suite, proof, world, place, world.sleep, world.clocks.step))


def _jump(clocks: SettableClocks) -> Callable[[float], Awaitable[None]]:
    async def pass_time(seconds: float) -> None:
        clocks.advance(seconds)

    return pass_time


_RUNNERS = {"blocking": _run_blocking, "asyncio": _run_asyncio, "simulated": _run_simulated}
