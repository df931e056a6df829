from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from fencepost.stores.open import open_store
from fencepost.testing.conformance import Desk, LeaseStoreConformance
from patient import Patient
from servers import Etcd, shared

if TYPE_CHECKING:
    from fencepost.stores.api import LeaseStore
    from fencepost.world.api import World


class TestEtcdStore(Patient):
    worlds: ClassVar[tuple[str, ...]] = ("blocking", "asyncio")
    rounds: ClassVar[int] = 3
    brief: ClassVar[float] = 1.0
    own_clock: ClassVar[bool] = True
    late: ClassVar[float] = 3.0  # etcd looks twice a second for what ran out, and has to agree

    def open_store(self, world: World, *, place: str, namespace: str) -> LeaseStore:
        url = f"{shared(Etcd).url()}/{Path(place).name}"
        return open_store(url, world, namespace=namespace)

    async def prove_tokens_survive_a_restart_if_the_store_is_durable(self, desk: Desk) -> None:
        with Etcd.own() as server:

            def opened(namespace: str) -> LeaseStore:
                return open_store(server.url(), desk.world, namespace=namespace)

            desk = desk._replace(store=opened("default"), open=opened, restart=server.restart)
            proof = LeaseStoreConformance.prove_tokens_survive_a_restart_if_the_store_is_durable
            await proof(self, desk)
