from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from fencepost.stores.postgres import open_postgres
from fencepost.testing.conformance import LeaseStoreConformance
from servers import PgBouncer, Postgres, shared

if TYPE_CHECKING:
    from fencepost.stores.api import LeaseStore
    from fencepost.world.api import World


class OnPostgres:
    """One server, one schema; each proof has namespaces of its own."""

    own_clock = True
    brief = 0.4
    rounds = 6
    options = ""

    def url(self) -> str:
        return shared(Postgres).url()

    def open_store(self, world: World, *, place: str, namespace: str) -> LeaseStore:
        apart = hashlib.sha256(place.encode()).hexdigest()[:12]
        address = f"{self.url()}?schema=conformance{self.options}".removeprefix("postgresql://")
        return open_postgres(world, address, namespace=f"{apart} {namespace}")


class TestPostgresStore(OnPostgres, LeaseStoreConformance):
    """With sessions of its own: leases lean on a pulse, and waiters stand in line."""

    worlds = ("blocking", "asyncio")


class TestPostgresRows(OnPostgres, LeaseStoreConformance):
    """Rows and nothing else."""

    worlds = ("blocking",)
    options = "&advisory=off"


class TestPostgresBehindPooler(OnPostgres, LeaseStoreConformance):
    """Behind a pooler in transaction mode."""

    worlds = ("blocking",)

    def url(self) -> str:
        return shared(_pooler()).url()


_POOLERS: list[type[PgBouncer]] = []


def _pooler() -> type[PgBouncer]:
    """Return the pooler of the server that these tests share: always the same class."""
    if not _POOLERS:
        _POOLERS.append(PgBouncer.before(shared(Postgres).port))
    return _POOLERS[0]
