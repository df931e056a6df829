"""What tests of the object store against the stub have in common."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fencepost.model.lease import Holder
from fencepost.stores.objects import ObjectStore
from fencepost.stores.open import open_store
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from objects_stub import StubS3

    from fencepost.world.api import Clocks

SECRET = "hunter2-secret"
KEY = "leases.default/job.json"
TTL = 30.0


def opened(server: StubS3, *, clocks: Clocks | None = None, options: str = "") -> ObjectStore:
    world = BlockingWorld(clocks=clocks)
    store = open_store(server.url(options=options), world, namespace="default")
    assert isinstance(store, ObjectStore)
    return store


def ready(server: StubS3, *, options: str = "") -> ObjectStore:
    """Return a store that has been used: the bucket is proven, the server's time is known."""
    store = opened(server, options=options)
    take(store, "warm")
    server.asked.clear()
    return store


def holder(nonce: str = "n1") -> Holder:
    return Holder(nonce, "host", 1)


def take(store: ObjectStore, name: str = "job", *, nonce: str = "n1", ttl: float = TTL) -> int:
    return finish(store.acquire(name, holder=holder(nonce), ttl=ttl)).token


def lease(server: StubS3, key: str = KEY) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(server.objects[key].body)
    return fields
