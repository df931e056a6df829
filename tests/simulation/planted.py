"""Parts with one bug each, the kind that real projects ship. The simulator must find every one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fencepost.errors import LeaseHeld, LeaseLost
from fencepost.flows.keep import keep
from fencepost.model.lease import Grant, Holder, Record
from fencepost.stores.memory import MemoryShelf, MemoryStore
from fencepost.testing.simulator.cluster import Parts
from fencepost.testing.simulator.servers import (
    LeaseServer,
    Recorder,
    RemoteStore,
    Resource,
    instance,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost.flows.keep import Charges
    from fencepost.model.event import LeaseEvent
    from fencepost.stores.api import LeaseStore
    from fencepost.testing.simulator.network import Network
    from fencepost.testing.simulator.world import SimulatedWorld
    from fencepost.world.api import World


def served_by(store_type: type[MemoryStore]) -> Callable[..., LeaseServer]:
    """Serve a broken relative of the memory store."""

    def server(
        world: SimulatedWorld, recorder: Recorder, stopped: Callable[[Holder], bool]
    ) -> LeaseServer:
        shelf = MemoryShelf(world)
        store = store_type(world, shelf=shelf, stopped=stopped)
        return LeaseServer(store, recorder, world.scheduler, delete=lambda _: False)

    return server


# 1. "if (await KV.get(key)) return; await KV.put(key, '1', { expirationTtl: 55 })"


class KeyValueServer:
    """A store of keys that vanish after a while. It knows nothing of locks."""

    capabilities = MemoryStore.capabilities

    def __init__(self, world: SimulatedWorld, recorder: Recorder, _stopped: object) -> None:
        self.away = ""
        self._clock, self._note = world.clocks.boottime, recorder.note
        self._values: dict[str, tuple[Holder, float]] = {}
        self._puts = 0

    def get(self, name: str) -> Holder | None:
        holder, until = self._values.get(name, (None, 0.0))
        return holder if self._clock() < until else None

    def put(self, name: str, holder: Holder, ttl: float) -> int:
        before, until = self.get(name), self._clock() + ttl
        self._values[name] = (holder, until)
        if before != holder:
            self._puts += 1
            what = "granted"
        else:
            what = "renewed"
        self._note(what, instance(holder), name, holder.nonce, self._puts, until)
        return self._puts

    def delete(self, name: str, nonce: str = "") -> None:
        if nonce and self._values.pop(name, None) is not None:
            self._note("released", name=name, holder=nonce)

    def break_(self, name: str) -> None:
        """Have no operator."""

    def close(self) -> None:
        """Have nothing to close."""


class KeyValueLock(RemoteStore):
    """Look, then leap."""

    def __init__(self, world: SimulatedWorld, network: Network, server: Any) -> None:
        super().__init__(world, network, server)
        self._values: KeyValueServer = server
        self._holders: dict[str, Holder] = {}

    async def acquire(self, name: str, *, holder: Holder, ttl: float) -> Grant:
        found = await self._ask(self._values.get, name)
        if found is not None and found != holder:
            raise LeaseHeld(name, holder=str(found), token=0, expires_in=ttl)
        self._holders[holder.nonce] = holder
        return Grant(await self._ask(self._values.put, name, holder, ttl), ttl)

    async def renew(self, name: str, *, nonce: str, token: int, ttl: float) -> Grant:
        holder = self._holders[nonce]
        if await self._ask(self._values.get, name) != holder:
            raise LeaseLost(name, token=token, reason="the key is gone")
        await self._ask(self._values.put, name, holder, ttl)
        return Grant(token, ttl)

    async def release(self, name: str, *, nonce: str, token: int | None = None) -> None:
        if await self._ask(self._values.get, name) == self._holders.get(nonce):
            await self._ask(self._values.delete, name, nonce)

    async def _ask(self, verb: Callable[..., Any], *args: object) -> Any:
        return await self._network.ask(self._world, self._values, verb, *args)


CHECK_THEN_SET = Parts(server=KeyValueServer, store=KeyValueLock)


# 2. A lock with a ttl, and a resource that takes the word of whoever writes.


class UnfencedResource(Resource):
    def admits(self, highest_seen: int, token: int) -> bool:
        return True


UNFENCED = Parts(resource=UnfencedResource)


# 3. A released lease is deleted, and its counter with it.


class ResettingStore(MemoryStore):
    async def release(self, name: str, *, nonce: str, token: int | None = None) -> None:
        await super().release(name, nonce=nonce, token=token)
        del self._shelf.records[self._key(name)]

    def _next_token(self) -> int:
        return 1 + max((record.token for record in self._shelf.records.values()), default=0)


TOKEN_RESETS = Parts(server=served_by(ResettingStore))


# 4. "UPDATE locks SET until = :now + :ttl WHERE until < :now", with the caller's own :now.


class ClientTimedServer(LeaseServer):
    """Believes whatever time it is told."""

    def __init__(self, world: SimulatedWorld, recorder: Recorder, _stopped: object) -> None:
        self._shelf = MemoryShelf(world)
        store = MemoryStore(world, shelf=self._shelf)
        super().__init__(store, recorder, world.scheduler, delete=lambda _: False)

    def acquire_at(self, now: float, name: str, holder: Holder, ttl: float) -> Grant:
        record: Record | None = self._shelf.records.get(("default", name))
        if record is not None and record.held and record.holder.nonce != holder.nonce:
            if self._until.get(name, 0.0) > now:
                raise LeaseHeld(name, holder=str(record.holder), token=record.token, expires_in=ttl)
            self._shelf.records["default", name] = record._replace(held=False)
        self._until[name] = now + ttl
        return self.acquire(name, holder, ttl)

    _until: dict[str, float]


class ClientTimedStore(RemoteStore):
    """Sends its own wall clock along."""

    async def acquire(self, name: str, *, holder: Holder, ttl: float) -> Grant:
        server: Any = self._server
        now = self._world.clocks.wall()
        grant: Grant = await self._network.ask(
            self._world, server, server.acquire_at, now, name, holder, ttl
        )
        return grant


def _client_timed(world: SimulatedWorld, recorder: Recorder, stopped: object) -> ClientTimedServer:
    server = ClientTimedServer(world, recorder, stopped)
    server._until = {}
    return server


CLIENT_CLOCK = Parts(server=_client_timed, store=ClientTimedStore)


# 5. "except Exception: log.warning('renewal failed')", and on with the work.


class HopefulHold:
    """Wraps a store so that a renewal never fails."""

    def __init__(self, store: LeaseStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def renew(self, name: str, *, nonce: str, token: int, ttl: float) -> Grant:
        try:
            return await self._store.renew(name, nonce=nonce, token=token, ttl=ttl)
        except Exception:  # noqa: BLE001 -- this is the bug
            return Grant(token, ttl)


async def hopeful_keep(
    world: World, store: Any, charges: Charges, *, emit: Callable[[LeaseEvent], None]
) -> None:
    await keep(world, HopefulHold(store), charges, emit=emit)


STILL_OWNED = Parts(keep=hopeful_keep)


# 6. "DEL lock", whoever has it.


class CarelessStore(MemoryStore):
    async def release(self, name: str, *, nonce: str, token: int | None = None) -> None:
        record = self._shelf.records.get(self._key(name))
        if record is not None:
            self._shelf.records[self._key(name)] = record._replace(held=False)


RELEASES_OTHERS = Parts(server=served_by(CarelessStore))


# 7. A holder that missed two renewals is declared dead before its lease has ended.


class TakesSilenceForDeath(MemoryStore):
    async def acquire(self, name: str, *, holder: Holder, ttl: float) -> Grant:
        record = self._shelf.records.get(self._key(name))
        now = self._world.clocks.boottime()
        if record is not None and record.held and now > record.expires - ttl / 3:
            self._shelf.records[self._key(name)] = record._replace(held=False)
        return await super().acquire(name, holder=holder, ttl=ttl)


SILENCE_IS_DEATH = Parts(server=served_by(TakesSilenceForDeath))


# Each bug, and the promise that it breaks.
PLANTED = {
    "check then set": ("one holder", CHECK_THEN_SET),
    "a zombie writes without a fence": ("fence holds", UNFENCED),
    "the token resets on release": ("tokens grow", TOKEN_RESETS),
    "expiry is judged by the client's clock": ("one holder", CLIENT_CLOCK),
    "a renewal that raised counts as done": ("proof", STILL_OWNED),
    "a release does not ask whose": ("one holder", RELEASES_OTHERS),
    "silence is taken for death": ("one holder", SILENCE_IS_DEATH),
}
