from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from fencepost.stores.open import open_store
from fencepost.testing.conformance import Desk, LeaseStoreConformance
from patient import Patient
from servers import ZooKeeper, shared

if TYPE_CHECKING:
    from fencepost.stores.api import LeaseStore
    from fencepost.world.api import World


class TestZooKeeperStore(Patient):
    worlds: ClassVar[tuple[str, ...]] = ("blocking", "asyncio")
    rounds: ClassVar[int] = 6
    brief: ClassVar[float] = 0.5
    own_clock: ClassVar[bool] = True

    def open_store(self, world: World, *, place: str, namespace: str) -> LeaseStore:
        url = f"{shared(ZooKeeper).url()}/{Path(place).name}"
        return open_store(url, world, namespace=namespace)

    async def prove_tokens_survive_a_restart_if_the_store_is_durable(self, desk: Desk) -> None:
        with ZooKeeper.own() as server:

            def opened(namespace: str) -> LeaseStore:
                return open_store(server.url(), desk.world, namespace=namespace)

            desk = desk._replace(store=opened("default"), open=opened, restart=server.restart)
            proof = LeaseStoreConformance.prove_tokens_survive_a_restart_if_the_store_is_durable
            await proof(self, desk)
