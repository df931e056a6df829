from __future__ import annotations

from typing import TYPE_CHECKING

from fencepost.stores.sqlite import SqliteStore
from fencepost.testing.conformance import LeaseStoreConformance

if TYPE_CHECKING:
    from fencepost.stores.api import LeaseStore
    from fencepost.world.api import World


class TestSqliteStore(LeaseStoreConformance):
    def open_store(self, world: World, *, place: str, namespace: str) -> LeaseStore:
        return SqliteStore(world, f"{place}/leases.db", namespace=namespace)
