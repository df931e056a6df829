from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fencepost.stores.redis import RedisStore, read_address
from fencepost.testing.conformance import LeaseStoreConformance
from servers import Valkey, shared
from servers.valkey import EverySecond

if TYPE_CHECKING:
    from fencepost.stores.api import LeaseStore
    from fencepost.testing.conformance import Desk
    from fencepost.world.api import World


class TestRedisStore(LeaseStoreConformance):
    worlds = ("blocking", "asyncio")
    own_clock = True
    brief = 0.7
    rounds = 6

    def open_store(self, world: World, *, place: str, namespace: str) -> LeaseStore:
        address = read_address(f"127.0.0.1:{shared(EverySecond).port}", tls=False)
        return RedisStore(world, address, namespace=f"{Path(place).name}.{namespace}")

    async def prove_tokens_survive_a_restart_if_the_store_is_durable(self, desk: Desk) -> None:
        with Valkey.own() as server:
            address = read_address(f"127.0.0.1:{server.port}", tls=False)
            store = RedisStore(desk.world, address)
            own = desk._replace(
                store=store,
                open=lambda namespace: RedisStore(desk.world, address, namespace=namespace),
                restart=server.restart,
            )
            await super().prove_tokens_survive_a_restart_if_the_store_is_durable(own)
