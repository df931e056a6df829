from __future__ import annotations

from typing import TYPE_CHECKING

from fencepost.stores import memory
from fencepost.testing.conformance import LeaseStoreConformance

if TYPE_CHECKING:
    from fencepost.stores.api import LeaseStore
    from fencepost.world.api import World


class TestMemoryStore(LeaseStoreConformance):
    def open_store(self, world: World, *, place: str, namespace: str) -> LeaseStore:
        return memory.open_memory(world, place, namespace=namespace)

    def restart(self, place: str) -> None:
        memory._SHELVES.pop(place)
