"""What each verb costs, in statements: nothing is asked twice, nothing is asked for nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fencepost.model.lease import Holder
from fencepost.stores.sqlite import SqliteStore
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Traced:
    """A store, and the statements it has sent since it was last asked."""

    def __init__(self, path: Path) -> None:
        self.store = SqliteStore(BlockingWorld(), str(path))
        finish(self.store.views())
        self._sent: list[str] = []
        connection = self.store._file._connection
        assert connection is not None
        connection.set_trace_callback(self._sent.append)

    def acquire(self, nonce: str) -> int:
        holder = Holder(nonce, "here", 1)
        return finish(self.store.acquire("x", holder=holder, ttl=30)).token

    def verbs(self) -> list[str]:
        """Return the first words of what was sent, settings of the connection left out."""
        sent = [statement.split()[0] for statement in self._sent if "PRAGMA" not in statement]
        self._sent.clear()
        return sent

    def writes(self) -> list[str]:
        """Return only what wrote, each of which is or belongs to one commit."""
        return [verb for verb in self.verbs() if verb not in ("BEGIN", "SELECT", "COMMIT")]


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[Traced]:
    traced = Traced(tmp_path / "leases.db")
    yield traced
    finish(traced.store.close())


def test_an_acquire_writes_once(traced: Traced) -> None:
    traced.acquire("a")
    assert traced.writes() == ["INSERT"]


def test_an_acquire_is_one_transaction(traced: Traced) -> None:
    traced.acquire("a")
    verbs = traced.verbs()
    assert verbs.count("BEGIN") == verbs.count("COMMIT") <= 1


def test_a_renewal_is_one_statement(traced: Traced) -> None:
    token = traced.acquire("a")
    traced.verbs()
    finish(traced.store.renew("x", nonce="a", token=token, ttl=30))
    assert traced.verbs() == ["UPDATE"]


def test_a_release_is_one_statement(traced: Traced) -> None:
    token = traced.acquire("a")
    traced.verbs()
    finish(traced.store.release("x", nonce="a", token=token))
    assert traced.verbs() == ["UPDATE"]


def test_a_look_is_one_statement(traced: Traced) -> None:
    traced.acquire("a")
    traced.verbs()
    finish(traced.store.peek("x"))
    assert traced.verbs() == ["SELECT"]


def test_the_next_acquire_reads_once_and_writes_once(traced: Traced) -> None:
    token = traced.acquire("a")
    finish(traced.store.release("x", nonce="a", token=token))
    traced.verbs()
    traced.acquire("b")
    assert [v for v in traced.verbs() if v not in ("BEGIN", "COMMIT")] == ["SELECT", "UPDATE"]
