"""A lease, and a database of the user's own in which it is fenced."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from fencepost import Fencepost
from fencepost.fence import CREATE_GUARD

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fencepost import Lease


@pytest.fixture
def database(tmp_path: Path) -> str:
    """Return the path of a database that has the guard table and one of its own."""
    path = str(tmp_path / "app.db")
    with closing(sqlite3.connect(path, isolation_level=None)) as conn:
        conn.execute("PRAGMA journal_mode=WAL")
        conn.execute(CREATE_GUARD)
        conn.execute("CREATE TABLE effect (id INTEGER PRIMARY KEY, token INTEGER NOT NULL)")
    return path


@pytest.fixture
def conn(database: str) -> Iterator[sqlite3.Connection]:
    """Return a connection that begins and commits only when it is told to."""
    with closing(sqlite3.connect(database, timeout=0, isolation_level=None)) as conn:
        yield conn


@pytest.fixture
def fp() -> Iterator[Fencepost]:
    with Fencepost("memory://") as fp:
        yield fp


@pytest.fixture
def lease(fp: Fencepost) -> Iterator[Lease]:
    with fp.lock("billing") as lease:
        yield lease
