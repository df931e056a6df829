"""The ledger of a MariaDB or MySQL database: how it is asked, and what makes its tables."""

from __future__ import annotations

import re

from fencepost.errors import Misuse, StoreUnfit
from fencepost.ledger import (
    mariadb_leases as leases_sql,
    mariadb_life,
    mariadb_planner_rows as plans_sql,
    mariadb_retention_rows,
    mariadb_rows as runs_sql,
)
from fencepost.ledger.api import LedgerAbilities
from fencepost.ledger.draft_dialect import Dialect
from fencepost.ledger.draft_ledger import DraftLedger
from fencepost.ledger.draft_testimony import Testimony
from fencepost.ledger.mariadb_schema import PART, STEPS
from fencepost.world.mariadb_batch import said
from fencepost.world.mariadb_errors import NoTable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, TypeVar

    from fencepost.ledger.api import Attempt
    from fencepost.ledger.draft_dialect import Transaction
    from fencepost.ledger.mariadb_joined import MariaJoined
    from fencepost.ledger.mariadb_said import Statement
    from fencepost.stores.mariadb import MariaStore
    from fencepost.world.api import World

    T = TypeVar("T")

DIALECT = Dialect(
    "MariaDB",
    runs_sql,
    leases_sql,
    plans_sql,
    mariadb_retention_rows,
    longest=1200,
    packed=list,
)

_CREATE_VERSIONS = """
CREATE TABLE IF NOT EXISTS fencepost_schema (
    part    VARCHAR(100) CHARACTER SET ascii COLLATE ascii_bin NOT NULL PRIMARY KEY,
    version INT NOT NULL
) ENGINE = InnoDB"""
_SET_VERSION = f"""
INSERT INTO fencepost_schema (part, version) VALUES ('{PART}', {len(STEPS)})
    ON DUPLICATE KEY UPDATE version = GREATEST(version, VALUES(version))"""
# With SKIP LOCKED and JSON_TABLE; with triggers that are made unless they are there, and XA
# transactions that a crash leaves whole beside a binary log.
_OLDEST_MARIADB, _OLDEST_MYSQL = (10, 6, 0), (8, 0, 30)
_FIND_SERVER = said("SELECT VERSION()")
_FIND_VERSION = said(f"SELECT version FROM fencepost_schema WHERE part = '{PART}'")


def statements(done: int = 0) -> tuple[str, ...]:
    """Return what brings the tables up to date from a version; an operator may do so by hand."""
    return (
        _CREATE_VERSIONS,
        *(text for step in STEPS[done:] for text in step),
        _SET_VERSION,
    )


def refuse_other(version: str) -> None:
    """Raise if a server of that version lacks what the ledger relies on. Leases need less."""
    found = re.match(r"(?:5\.5\.5-)?(\d+)\.(\d+)\.(\d+)", version)
    oldest = _OLDEST_MARIADB if "mariadb" in version.lower() else _OLDEST_MYSQL
    if found is None or tuple(map(int, found.groups())) < oldest:
        raise StoreUnfit(
            f"jobs need MariaDB 10.6 or MySQL 8.0.30 or newer, and this server is {version!r}: "
            "keep them in another database, and the leases here if you like (leases=…)"
        )


class MariaLedger(DraftLedger):
    """Runs in the rows of one MariaDB or MySQL database."""

    leases: MariaStore
    abilities = LedgerAbilities(durable=True, shared=True, transactional=True)

    def __init__(self, world: World, leases: MariaStore) -> None:
        super().__init__(world, leases, namespace=leases.namespace, dialect=DIALECT)
        self._server = leases.server
        self._ready = False
        self.testimony = Testimony(self, mariadb_life, where=str(self._server.address))

    def join(self, attempt: Attempt) -> MariaJoined:
        """Return a transaction that statements of user code may join."""
        from fencepost.ledger.mariadb_joined import MariaJoined  # not for a lone trigger

        return MariaJoined(self, attempt)

    def read(self, statement: Statement, values: dict[str, Any]) -> Sequence[tuple[Any, ...]]:
        """Return the rows of a statement that changes nothing."""
        self.prepared()
        return self._server.ask(statement, values)

    def changed(self, statement: Statement, values: dict[str, Any]) -> Sequence[tuple[Any, ...]]:
        """Return the rows of a statement that changes something, all or nothing."""
        self.prepared()
        return self._server.transaction(
            lambda transaction: transaction.batch([(statement, values)], last=True)[0].rows
        )

    def transacted(self, work: Callable[[Transaction], T]) -> T:
        """Run ``work`` in one transaction, and again if it lost against another one."""
        self.prepared()
        return self._server.transaction(work)

    def prepared(self) -> None:
        """Have the tables of this ledger, up to date, and the office of this namespace."""
        if self._ready:
            return
        try:
            rows = self._server.ask(_FIND_VERSION, {})
        except NoTable:
            rows = ()
        found = rows[0][0] if rows else 0
        if found > len(STEPS):
            raise Misuse(
                f"this database was prepared by a newer fencepost (schema {found}, this one knows "
                f"{len(STEPS)}): upgrade this installation"
            )
        if found < len(STEPS):
            refuse_other(self._server.ask(_FIND_SERVER, {})[0][0])
            self.leases.create((*self.leases.tables, *statements(found)))
        space = {"namespace": self.namespace}
        self._server.transaction(
            lambda transaction: transaction.batch([(runs_sql.OPEN_OFFICE, space)], last=True)
        )
        self._ready = True
