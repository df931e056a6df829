"""MariaDB and MySQL keep the contract, on real servers."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from fencepost.stores.open import open_store
from fencepost.testing.conformance import LeaseStoreConformance
from servers import MariaDB, MySQL, shared

if TYPE_CHECKING:
    from fencepost.stores.api import LeaseStore
    from fencepost.world.api import World


class TestMariaStore(LeaseStoreConformance):
    worlds = ("blocking", "asyncio")
    own_clock = True
    brief = 0.5
    rounds = 6
    kind: type[MariaDB] = MariaDB

    def open_store(self, world: World, *, place: str, namespace: str) -> LeaseStore:
        database = "c" + hashlib.sha256(place.encode()).hexdigest()[:16]
        return open_store(shared(self.kind).database(database), world, namespace=namespace)


class TestMariaStoreOnMySQL(TestMariaStore):
    kind = MySQL
