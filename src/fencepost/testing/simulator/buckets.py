"""The production object store in a storm: a bucket with etags and stamps, behind the network.

There is no clock in a bucket that could end a lease, so the clocks of all machines matter: they
drift, they are set, and each watches for itself. ``objects_expiry`` says why that is sound; here
it is tried.
"""

from __future__ import annotations

import hashlib
import json

from fencepost.errors import OutcomeUnknown, StoreUnavailable
from fencepost.stores import objects
from fencepost.stores.objects import ObjectStore
from fencepost.testing.simulator.cluster import Parts
from fencepost.world.flow import finish
from fencepost.world.objects import Found, Version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from fencepost.model.lease import Holder
    from fencepost.testing.simulator.network import Network
    from fencepost.testing.simulator.servers import Recorder
    from fencepost.testing.simulator.world import SimulatedWorld
    from fencepost.world.api import T

_SHORTEST_TTL = 0.2
_CHANGES = frozenset({"create", "replace"})


class BucketServer:
    """Objects that are written under conditions, each in one instant; leases are written down."""

    kind, where = "s3", "the simulated bucket"

    def __init__(
        self, world: SimulatedWorld, recorder: Recorder, _stopped: Callable[[Holder], bool]
    ) -> None:
        self.away = ""
        self._world, self._note = world, recorder.note
        self._objects: dict[str, Found] = {}
        objects._proven.add(self.where)  # noqa: SLF001 -- it keeps conditions: see below
        self._operator = self._store(world)
        self.capabilities = self._operator.capabilities

    # What a bucket answers.

    def read(self, key: str) -> Found | None:
        """Return an object."""
        return self._objects.get(key)

    def create(self, key: str, body: bytes) -> Version | None:
        """Write an object that must not exist."""
        return None if key in self._objects else self._put(key, body)

    def replace(self, key: str, body: bytes, version: Version) -> Version | None:
        """Write an object that must still be as it was read."""
        found = self._objects.get(key)
        if found is None or found.version != version:
            return None
        return self._put(key, body)

    def stamp(self, key: str, body: bytes) -> float:
        """Write an object and return when that was, in whole seconds of a clock that people set."""
        self._put(key, body)
        return self._objects[key].modified

    # What people do to it.

    def break_(self, name: str) -> None:
        """Be the operator who takes a lease away from whoever has it."""
        seen = finish(self._operator.peek(name))
        if seen is not None and seen.held:
            words = {"reason": "it hangs", "operator": "operator"}
            finish(self._operator.break_(name, token=seen.token, **words))

    def delete(self, name: str) -> None:
        """Delete nothing: a duplicate that is late could then bring a lease back, as docs say."""

    def close(self) -> None:
        """Have nothing to close."""

    # How it is reached.

    def near(self, world: SimulatedWorld, network: Network) -> ObjectStore:
        """Return the store as a process has it: each look and each write is a request."""
        return self._store(_Wired(world, network, self))

    def _store(self, world: Any) -> ObjectStore:
        bucket: Any = self
        return ObjectStore(world, bucket, shortest_ttl=_SHORTEST_TTL)

    def _put(self, key: str, body: bytes) -> Version:
        before = self._objects.get(key)
        # As most stores do it: equal contents have equal etags.
        version = Version(hashlib.sha256(body).hexdigest())
        self._objects[key] = Found(body, version, float(int(self._world.clocks.wall())))
        if key.startswith("leases."):
            self._happened(json.loads(before.body) if before else {}, json.loads(body))
        return version

    def _happened(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        node, name, nonce = f"{now['host']}.{now['pid']}", now["name"], now["nonce"]
        token, until = now["token"], self._world.scheduler.now + now["ttl"]
        if now["held"]:
            same = (before.get("nonce"), before.get("token")) == (nonce, token)
            self._note("renewed" if same else "granted", node, name, nonce, token, until)
        elif nonce:
            self._note("released", node, name, nonce, token)
        else:
            self._note("broken", "operator", name, "", token, 0.0, f"was {before['token']}")


class _Wired:
    """The world of a process, whose calls to the bucket go over the network."""

    def __init__(self, near: SimulatedWorld, network: Network, server: BucketServer) -> None:
        self._near, self._network, self._server = near, network, server

    def __getattr__(self, name: str) -> Any:
        return getattr(self._near, name)

    async def call(self, function: Callable[..., T], *args: object) -> T:
        """Ask the bucket. To look in vain changes nothing, as behind the real door."""
        try:
            return await self._network.ask(self._near, self._server, function, *args)
        except OutcomeUnknown as unknown:
            if function.__name__ in _CHANGES:
                raise
            raise StoreUnavailable(str(unknown)) from unknown


def _near(world: SimulatedWorld, network: Network, server: BucketServer) -> ObjectStore:
    return server.near(world, network)


BUCKET = Parts(server=BucketServer, store=_near)
