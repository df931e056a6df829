"""What tests of the ledger of MariaDB and MySQL share: quick servers, clocks that stand still."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from fencepost.ledger.mariadb import MariaLedger
from fencepost.stores.mariadb import MariaStore, read_address
from fencepost.testing.clock import SettableClocks
from fencepost.world.blocking import BlockingWorld
from fencepost.world.mariadb import MariaServer
from servers import MariaDB, MySQL, shared

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fencepost.world.api import World
    from fencepost.world.mariadb import Address

_numbers = itertools.count(1)


class QuickMariaDB(MariaDB):
    """A server that may forget everything when the machine does: for what compares answers."""

    settings: Sequence[str] = ("--innodb-flush-log-at-trx-commit=0",)


class QuickMySQL(MySQL):
    """The same of the other server."""

    settings: Sequence[str] = (*QuickMariaDB.settings, "--innodb-doublewrite=OFF")


QUICK = {"mariadb": QuickMariaDB, "mysql": QuickMySQL}


class MariaClocks(SettableClocks):
    """Clocks that stand still, here and in the sessions that are opened with them."""

    kind: type[MariaDB] = QuickMariaDB

    def __init__(self) -> None:
        super().__init__()
        self._system = self  # type: ignore[assignment]  # what it adds its offsets to
        self.url = shared(self.kind).database("still")

    def wall(self) -> float:
        return 1_700_000_000.0 + self._wall_offset

    def boottime(self) -> float:
        return 1_000.0 + self._boot_offset

    def opened(self, namespace: str) -> MariaLedger:
        world = BlockingWorld()
        store = MariaStore(world, _address(self.url), namespace=namespace)
        store.server = StillServer(world, _address(self.url), self)
        return MariaLedger(world, store)

    def close(self) -> None:
        """Have nothing to close: others may use the server."""


class MySQLClocks(MariaClocks):
    """The same in sessions of the other server."""

    kind = QuickMySQL


class StillServer(MariaServer):
    """A server that is told, on every connection, what time it is."""

    def __init__(self, world: World, address: Address, clocks: MariaClocks) -> None:
        super().__init__(world, address)
        self._clocks = clocks

    def _taken(self, patience: float) -> Any:
        connection = super()._taken(patience)
        connection.query(f"SET SESSION timestamp = {self._clocks.wall():.6f}")
        return connection


def numbers(count: int) -> str:
    """Return a table of the numbers ``seq`` from 1 on, in words that both servers know."""
    return f"""JSON_TABLE(CONCAT('[', REPEAT('0,', {count - 1}), '0]'), '$[*]'
                  COLUMNS (seq FOR ORDINALITY)) AS numbers"""


def fresh_namespace() -> str:
    return f"n{next(_numbers)}"


def opened_mariadb(url: str, *, namespace: str = "default") -> MariaLedger:
    """Return a ledger with connections of its own, as another process would have it."""
    world = BlockingWorld()
    return MariaLedger(world, MariaStore(world, _address(url), namespace=namespace))


def _address(url: str) -> Address:
    return read_address(url.partition("://")[2])
