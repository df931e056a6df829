"""What the PostgreSQL ledger tests share: a quick server whose clock stands still."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import psycopg

from fencepost.ledger.postgres import PostgresLedger
from fencepost.stores.postgres import open_postgres
from fencepost.testing.clock import SettableClocks
from fencepost.world.blocking import BlockingWorld
from servers import Postgres, shared

if TYPE_CHECKING:
    from collections.abc import Mapping

_numbers = itertools.count(1)

# A function of the same name that is found before the server's own: whatever reads the clock in
# this database reads a row of ours.
_STAND_STILL = """
CREATE SCHEMA IF NOT EXISTS still;
CREATE UNLOGGED TABLE IF NOT EXISTS still.clock (at double precision NOT NULL);
TRUNCATE still.clock;
INSERT INTO still.clock VALUES (1700000000);
CREATE OR REPLACE FUNCTION still.clock_timestamp() RETURNS timestamptz
    LANGUAGE sql VOLATILE AS 'SELECT to_timestamp(at) FROM still.clock'
"""


class QuickPostgres(Postgres):
    """A server that may forget everything when the machine does: for what compares answers."""

    settings: Mapping[str, str] = {"fsync": "off", "full_page_writes": "off"}


class ServerClocks(SettableClocks):
    """Clocks that stand still, here and in one database of the quick server."""

    def __init__(self) -> None:
        super().__init__()
        self._system = self  # type: ignore[assignment]  # what it adds its offsets to
        server, name = shared(QuickPostgres), "still"
        self.url = server.database(name) + "?advisory=off"
        search = f'ALTER DATABASE "{name}" SET search_path = still, public, pg_catalog'
        if not server.run("SELECT 1 FROM pg_namespace WHERE nspname = 'still'", database=name):
            server.run(search)
            server.run(_STAND_STILL, database=name)
        self._db = psycopg.connect(server.url(name), autocommit=True)
        self._tell()

    def wall(self) -> float:
        return 1_700_000_000.0 + self._wall_offset

    def boottime(self) -> float:
        return 1_000.0 + self._boot_offset

    def advance(self, seconds: float) -> None:
        super().advance(seconds)
        self._tell()

    def step_wall(self, seconds: float) -> None:
        super().step_wall(seconds)
        self._tell()

    def close(self) -> None:
        self._db.close()

    def _tell(self) -> None:
        self._db.execute("UPDATE still.clock SET at = %s", (self.wall(),))


def fresh_namespace() -> str:
    return f"n{next(_numbers)}"


def opened_postgres(url: str, *, namespace: str = "default") -> PostgresLedger:
    """Return a ledger with sessions of its own, as another process would have it."""
    world = BlockingWorld()
    store = open_postgres(world, url.partition("://")[2], namespace=namespace)
    return PostgresLedger(world, store)
