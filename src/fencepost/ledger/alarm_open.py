"""A ledger that keeps runs may keep alarms beside them, in the same database."""

from __future__ import annotations

import importlib

from fencepost.errors import Misuse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost.ledger.alarm_api import AlarmBook
    from fencepost.ledger.api import Ledger
    from fencepost.world.api import World

# By the ledger's class, so that nothing is imported that nobody asked for.
_BOOKS = {
    "fencepost.ledger.memory.MemoryLedger": ("fencepost.ledger.alarm_memory", "MemoryAlarms"),
    "fencepost.ledger.sqlite.SqliteLedger": ("fencepost.ledger.alarm_sqlite", "SqliteAlarms"),
    "fencepost.ledger.mariadb.MariaLedger": ("fencepost.ledger.mariadb_alarms", "MariaAlarms"),
    "fencepost.ledger.postgres.PostgresLedger": (
        "fencepost.ledger.postgres_alarms",
        "PostgresAlarms",
    ),
}


def alarms_of(world: World, ledger: Ledger) -> AlarmBook:
    """Return the book of alarms that goes with a ledger, or say that it has none."""
    kind = type(ledger)
    found = _BOOKS.get(f"{kind.__module__}.{kind.__qualname__}")
    if found is None:
        raise Misuse(f"{kind.__name__} keeps no alarms: use a store such as sqlite:///")
    module, name = found
    make: Callable[[World, Ledger], AlarmBook] = getattr(importlib.import_module(module), name)
    return make(world, ledger)
