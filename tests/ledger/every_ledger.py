"""A ledger of each kind, as several processes see it, with a clock that the test sets."""

from __future__ import annotations

from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from ledgerlab import StillClocks, opened

from fencepost.ledger.memory import MemoryLedger
from fencepost.stores.memory import MemoryStore
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish
from marialab import MariaClocks
from pglab import ServerClocks, fresh_namespace, opened_postgres

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fencepost.ledger.api import Ledger
    from fencepost.testing.clock import SettableClocks

LEDGERS = ("memory", "sqlite", "postgres", "mariadb")


@contextmanager
def clients(
    kind: str, folder: Path, count: int = 1
) -> Iterator[tuple[SettableClocks, list[Ledger]]]:
    """Yield the clock of one ledger, and the views that so many processes have of it."""
    clocks: SettableClocks
    ledgers: list[Ledger]
    if kind == "postgres":
        server, space = ServerClocks(), fresh_namespace()
        clocks = server
        ledgers = [opened_postgres(server.url, namespace=space) for _ in range(count)]
    elif kind == "mariadb":
        maria, space = MariaClocks(), fresh_namespace()
        clocks, ledgers = maria, [maria.opened(space) for _ in range(count)]
    elif kind == "sqlite":
        clocks = StillClocks()
        ledgers = [opened(folder / "ledger.db", clocks) for _ in range(count)]
    else:
        clocks = StillClocks()
        world = BlockingWorld(clocks=clocks)
        ledgers = [MemoryLedger(world, MemoryStore(world))] * count
    try:
        yield clocks, ledgers
    finally:
        for ledger in ledgers:
            finish(ledger.close())
        if isinstance(clocks, ServerClocks):
            with closing(clocks):
                pass
