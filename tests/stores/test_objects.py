"""Leases in a bucket: the contract, in memory and on a real S3 server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import obstore.store
import pytest

from fencepost.stores.objects import ObjectStore
from fencepost.stores.open import open_store
from fencepost.testing.conformance import LeaseStoreConformance
from fencepost.world.objects import Bucket
from servers import Seaweed, shared
from servers.objects import KEY, SECRET

if TYPE_CHECKING:
    from fencepost.stores.api import LeaseStore
    from fencepost.world.api import World

BRIEF = 0.5
_PLACES: dict[str, obstore.store.MemoryStore] = {}


class TestInMemory(LeaseStoreConformance):
    """The protocol alone: obstore's own store in memory keeps conditions and costs nothing."""

    rounds = 30

    def open_store(self, world: World, *, place: str, namespace: str) -> LeaseStore:
        client = _PLACES.setdefault(place, obstore.store.MemoryStore())
        bucket = Bucket(client, kind="s3", where=place, alone=True)
        return ObjectStore(world, bucket, namespace=namespace, shortest_ttl=0.2)


class TestOnSeaweed(LeaseStoreConformance):
    """The same on a server, whose losers of a race are slow: fewer of them."""

    worlds = ("blocking", "asyncio")
    own_clock = True
    brief = BRIEF
    rounds = 6
    rivals = 3

    def open_store(self, world: World, *, place: str, namespace: str) -> LeaseStore:
        # One prefix for all, so that it is probed once; a namespace for each.
        apart = f"{place.rpartition('/')[2]}.{namespace}"
        return open_store(seaweed_url(), world, namespace=apart)


def seaweed_url() -> str:
    server = shared(Seaweed)
    return server.url(server.bucket("leases"))


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
