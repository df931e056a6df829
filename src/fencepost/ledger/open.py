"""A store that keeps leases may keep a ledger beside them, in the same transactions."""

from __future__ import annotations

import importlib

from fencepost.errors import Misuse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost.ledger.api import Ledger
    from fencepost.stores.api import LeaseStore
    from fencepost.world.api import World

# By the store's class, so that nothing is imported that nobody asked for.
_LEDGERS = {
    "fencepost.stores.memory.MemoryStore": ("fencepost.ledger.memory", "MemoryLedger"),
    "fencepost.stores.sqlite.SqliteStore": ("fencepost.ledger.sqlite", "SqliteLedger"),
    "fencepost.stores.mariadb.MariaStore": ("fencepost.ledger.mariadb", "MariaLedger"),
    "fencepost.stores.postgres.PostgresStore": ("fencepost.ledger.postgres", "PostgresLedger"),
}


def has_ledger(leases: LeaseStore) -> bool:
    """Say whether stores of this kind keep a ledger as well."""
    return f"{type(leases).__module__}.{type(leases).__qualname__}" in _LEDGERS


def ledger_of(world: World, leases: LeaseStore) -> Ledger:
    """Return the ledger that goes with a lease store, or say that it has none."""
    kind = type(leases)
    found = _LEDGERS.get(f"{kind.__module__}.{kind.__qualname__}")
    if found is None:
        raise Misuse(
            f"{kind.__name__} keeps leases only: jobs need a store with a ledger, such as sqlite:///"
        )
    module, name = found
    make: Callable[[World, LeaseStore], Ledger] = getattr(importlib.import_module(module), name)
    return make(world, leases)
