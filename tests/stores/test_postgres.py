from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from fencepost.stores.postgres import open_postgres
from fencepost.testing.conformance import NAME, TTL, LeaseStoreConformance
from fencepost.world.postgres_pulse import GRACE
from servers import PgBouncer, Postgres, shared

if TYPE_CHECKING:
    from fencepost.stores.api import LeaseStore
    from fencepost.testing.conformance import Desk
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

    async def prove_a_free_lease_is_granted_with_a_token(self, desk: Desk) -> None:
        _, grant = await desk.grant()
        assert 0 < grant.token < 2**53
        assert GRACE <= grant.ttl < TTL, "a pulse is leaned on for a while, then it is proven anew"
        view = await desk.store.peek(NAME)
        assert view is not None
        assert grant.ttl < view.expires_in <= TTL, "but the lease lasts for as long as was asked"


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
