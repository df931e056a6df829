"""Every SQL server is told the same things, each in its own words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fencepost.ledger import mariadb, postgres
from fencepost.world.mariadb_batch import Statement as MariaStatement
from fencepost.world.postgres import Statement as PostgresStatement

if TYPE_CHECKING:
    from types import ModuleType

KINDS = ("runs", "leases", "plans", "retention")
# Those of alarms have dialects of their own.
SHARED = [
    path
    for path in sorted(Path(mariadb.__file__).parent.glob("draft*.py"))
    if "alarm" not in path.name
]
# What one server needs beside that: MariaDB has locked rows for turns, PostgreSQL knows who lives.
MARIADB_ONLY = {"OPEN_OFFICE"}


def statements(module: ModuleType) -> set[str]:
    found = set()
    for name, value in vars(module).items():
        first = value[0] if isinstance(value, tuple) and value else value
        several = isinstance(value, (PostgresStatement, MariaStatement))
        if not name.startswith("_") and (
            several or isinstance(first, (PostgresStatement, MariaStatement))
        ):
            found.add(name)
    return found


def asked_for() -> set[str]:
    """Return every statement that the shared code asks a dialect for."""
    text = "\n".join(path.read_text() for path in SHARED)
    return set(re.findall(r"(?:_sql|dialect\.\w+|plans)\.([A-Z][A-Z_]+)\b", text))


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_ledgers_share_is_said_in_every_dialect(kind: str) -> None:
    known = [statements(getattr(each.DIALECT, kind)) for each in (postgres, mariadb)]
    used = asked_for()
    assert known[0] & used == known[1] & used
    assert known[1] - known[0] <= MARIADB_ONLY


def test_every_statement_that_the_shared_code_asks_for_is_there() -> None:
    assert len(asked_for()) > 50
    for each in (postgres, mariadb):
        known = set().union(*(statements(getattr(each.DIALECT, kind)) for kind in KINDS))
        assert asked_for() - known == set(), each.__name__
