"""What each verb costs, in statements: nothing is asked twice, nothing is asked for nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fencepost.model.lease import Holder
from fencepost.stores.sqlite import SqliteStore
from fencepost.stores.sqlite_reserve import TokenReserve
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


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[Traced]:
    traced = Traced(tmp_path / "leases.db")
    yield traced
    finish(traced.store.close())


def test_the_first_acquire_of_a_name_writes_once(traced: Traced) -> None:
    traced.acquire("a")
    # The reserve of tokens, once a minute. Then an attempt to take a free lease that is not there
    # yet, a look, and the one that writes.
    assert traced.verbs() == ["INSERT", "UPDATE", "SELECT", "SELECT", "INSERT"]


def test_neither_a_grant_nor_a_release_is_synced_while_tokens_are_reserved(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(traced.store.release("x", nonce="a", token=traced.acquire("a")))
    synced: list[int] = []
    monkeypatch.setattr("os.fdatasync", synced.append)
    finish(traced.store.release("x", nonce="b", token=traced.acquire("b")))
    assert synced == []


def test_a_grant_whose_token_is_not_reserved_is_synced(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(traced.store.release("x", nonce="a", token=traced.acquire("a")))
    monkeypatch.setattr(TokenReserve, "covers", lambda *_: False)
    synced: list[int] = []
    monkeypatch.setattr("os.fdatasync", synced.append)
    traced.acquire("b")
    assert len(synced) == 2  # another reserve, in vain, and the grant itself


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


def test_the_next_acquire_is_one_statement(traced: Traced) -> None:
    token = traced.acquire("a")
    finish(traced.store.release("x", nonce="a", token=token))
    traced.verbs()
    traced.acquire("b")
    assert traced.verbs() == ["UPDATE"]
