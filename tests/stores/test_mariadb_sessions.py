"""What a session of MariaDB or MySQL is left with, what a server is set to, what a URL says."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pymysql
import pytest
from test_mariadb_promises import TTL, closing_store, holder, opened

from fencepost.errors import BadUrl, TokenStale
from fencepost.model.symptom import Severity
from fencepost.stores.open import open_store
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish
from mariaplace import KINDS, LOGGED, Place, emptied
from servers import MySQL, shared

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fencepost.model.symptom import Symptom
    from fencepost.stores.mariadb import MariaStore


@pytest.fixture(params=KINDS)
def database(request: pytest.FixtureRequest) -> Place:
    return emptied(request.param, request.node.nodeid)


@pytest.fixture
def store(database: Place) -> Iterator[MariaStore]:
    store = opened(database.url())
    yield store
    finish(store.close())


class Sent:
    """The packets that were sent, each with an answer of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.packets: list[str] = []
        connection: Any = pymysql.Connection
        send = connection._execute_command

        def noted(this: Any, command: int, text: Any) -> Any:
            self.packets.append(text if isinstance(text, str) else text.decode())
            return send(this, command, text)

        monkeypatch.setattr(connection, "_execute_command", noted)

    def take(self) -> list[str]:
        taken, self.packets = self.packets, []
        return taken


def test_a_break_is_three_round_trips_and_one_to_wake_the_first(
    store: MariaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = finish(store.acquire("x", holder=holder(), ttl=TTL)).token
    sent = Sent(monkeypatch)
    broken = finish(store.break_("x", token=token, reason="it hangs", operator="me"))
    assert len(sent.take()) == 3
    place = finish(store.line("x"))
    assert place is not None
    assert finish(place.turn(5.0))
    sent.take()
    finish(store.break_("x", token=broken, reason="it hangs\0 again", operator="me"))
    *packets, last = sent.take()
    assert len(packets) == 3
    assert last.startswith("KILL QUERY")
    finish(place.leave(served=False))


def test_who_is_stopped_in_a_break_keeps_the_lease_locked_for_seconds_at_most(
    store: MariaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On MySQL a session in a transaction has three seconds, until the packet that ends it."""
    token = finish(store.acquire("x", holder=holder(), ttl=TTL)).token
    sent = Sent(monkeypatch)
    with pytest.raises(TokenStale):
        finish(store.break_("x", token=token - 1, reason="it hangs", operator="me"))
    finish(store.break_("x", token=token, reason="it hangs", operator="me"))
    locking = False
    for packet in sent.take():
        if "wait_timeout = DEFAULT" in packet:
            assert any(end in packet for end in ("COMMIT", "ROLLBACK"))
        if "FOR UPDATE" in packet and store.server.address.kind == "MySQL":
            locking = True
            assert "wait_timeout = 3" in packet
    assert locking or store.server.address.kind == "MariaDB"


def test_a_limit_for_statements_of_the_whole_server_moves_nobody_in_line(database: Place) -> None:
    server = database.server
    is_mysql = isinstance(server, MySQL)
    limit, least = ("max_execution_time", 100) if is_mysql else ("max_statement_time", 0.1)
    server.run(f"SET GLOBAL {limit} = {least}")
    try:
        with closing_store(database.url()) as one, closing_store(database.url()) as other:
            first = finish(one.line("x"))
            assert first is not None
            assert finish(first.turn(5.0))
            second = finish(other.line("x"))
            assert second is not None
            began = time.monotonic()
            assert not finish(second.turn(0.5))
            assert time.monotonic() - began >= 0.5, "it was told something"
            finish(first.leave(served=True))
            assert finish(second.turn(5.0))
            finish(second.leave(served=True))
    finally:
        server.run(f"SET GLOBAL {limit} = DEFAULT")


@pytest.mark.parametrize("kind", LOGGED)
def test_a_binary_log_that_is_flushed_when_it_suits_the_server_is_a_risk(kind: str) -> None:
    server = shared(LOGGED[kind])
    with closing_store(server.database("flushed")) as store:
        finish(store.views())

        def found() -> dict[str, Symptom]:
            return {symptom.code: symptom for symptom in finish(store.examine())}

        assert "mariadb.sync_binlog" not in found()
        server.run("SET GLOBAL sync_binlog = 100")
        try:
            risk = found()["mariadb.sync_binlog"]
            assert risk.severity is Severity.RISK
            assert "sync_binlog is 100" in risk.what
            assert risk.remedy == "set sync_binlog = 1"
        finally:
            server.run("SET GLOBAL sync_binlog = 1")


@pytest.mark.parametrize("kind", LOGGED)
def test_a_binary_log_that_is_flushed_is_no_risk(kind: str) -> None:
    """Not for transactions of runs either: test_mariadb_crashes."""
    with closing_store(shared(LOGGED[kind]).database("flushed")) as store:
        finish(store.views())
        found = {symptom.code: symptom.severity for symptom in finish(store.examine())}
    assert found == {"mariadb.replicas": Severity.NOTE}


def test_the_most_careful_way_to_flush_is_no_risk(store: MariaStore, database: Place) -> None:
    finish(store.views())
    if isinstance(database.server, MySQL):  # it has no third way
        assert finish(store.examine()) == []
        return
    database.server.run("SET GLOBAL innodb_flush_log_at_trx_commit = 3")
    try:
        assert finish(store.examine()) == []
    finally:
        database.server.run("SET GLOBAL innodb_flush_log_at_trx_commit = 1")


@pytest.mark.parametrize(("scheme", "name"), [("mariadb", "MariaDB"), ("mysql", "MySQL")])
@pytest.mark.parametrize(
    "rest",
    [
        *("u:hunter2@host:port/x", "u:hunter2@/", "u:hunter2@host/x?speed=9"),
        *("u:hunter2@host/x?tls=maybe", "u:hunter2@host/x?timeout=0"),
    ],
)
def test_a_url_that_cannot_be_one_is_called_what_its_writer_calls_it(
    scheme: str, name: str, rest: str
) -> None:
    with pytest.raises(BadUrl) as caught:
        open_store(f"{scheme}://{rest}", BlockingWorld(), namespace="default")
    said = str(caught.value)
    others = {"MariaDB", "MySQL"} - {name}
    assert name in said
    assert not any(other in said or f"{other.lower()}://" in said for other in others)
    assert "hunter2" not in said
