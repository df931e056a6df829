"""A commit on MariaDB is one, however large it is, and whatever the server is set to."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest
from ledgerlab import claimed
from test_postgres_ledger import _want

from fencepost.errors import LeaseHeld, OutcomeUnknown, StoreUnfit
from fencepost.ledger.api import NOTHING
from fencepost.ledger.planning import Ask, End
from fencepost.model.ending import Settled
from fencepost.model.lease import Holder
from fencepost.model.run import State
from fencepost.model.slot import RunKey
from fencepost.world import mariadb_batch
from fencepost.world.flow import finish
from fencepost.world.mariadb_batch import Transaction, said
from joinlab import until
from marialab import QUICK, fresh_namespace, opened_mariadb
from proxy import Proxy
from servers import MariaDB, MySQL, shared

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fencepost.ledger.mariadb import MariaLedger

LARGE = json.dumps("x" * 1_000_000)


@pytest.fixture(params=QUICK)
def server(request: pytest.FixtureRequest) -> MariaDB:
    return shared(QUICK[request.param])


@pytest.fixture
def ledger(server: MariaDB) -> Iterator[MariaLedger]:
    url = server.database("packets")
    ledger = opened_mariadb(url, namespace=f"{fresh_namespace()}-{time.time_ns()}")
    yield ledger
    finish(ledger.close())


def test_a_tick_ends_more_than_fits_into_one_packet(ledger: MariaLedger, server: MariaDB) -> None:
    """Else it could never be told, and with it all that is due to this instance."""
    room = server.run("SELECT @@GLOBAL.max_allowed_packet")[0][0]
    assert isinstance(room, int)
    keys = [RunKey(f"job{number}", 1000) for number in range(room // len(LARGE) + 2)]
    ends = []
    for key in keys:
        attempt = claimed(ledger, key, key.job)
        finish(ledger.save(attempt, checkpoint=LARGE))
        ends.append(End(attempt, Settled(State.SUCCEEDED), NOTHING))
    ticked = finish(ledger.planner.tick(Ask(_want, "x", 0, ends)))
    assert {getattr(end, "state", end) for end in ticked.ended} == {State.SUCCEEDED}
    for key in keys[::7]:
        run = finish(ledger.find(key))
        assert run is not None
        assert (run.state, run.checkpoint) == (State.SUCCEEDED, LARGE)


def test_a_lost_run_is_swept_however_large_its_checkpoint_is(
    ledger: MariaLedger, server: MariaDB
) -> None:
    """What is sorted as whole rows has to fit into a buffer of the server's, of 256 KiB."""
    for key in (RunKey("a", 1000), RunKey("b", 1000)):
        attempt = claimed(ledger, key, key.job)
        finish(ledger.save(attempt, checkpoint=json.dumps("x" * 900_000)))
    gone = f"UPDATE fencepost_lease SET expires_us = 1 WHERE namespace = '{ledger.namespace}'"
    server.run(gone, database="packets")
    ticked = finish(ledger.planner.tick(Ask(_want, "x", 2, [], sweep=True)))
    runs = [begun.claimed.run for begun in ticked.begun]
    assert [run and run.losses for run in runs] == [1, 1]


def test_packets_are_one_transaction_of_which_only_the_last_can_be_in_doubt(
    server: MariaDB,
) -> None:
    url = server.database("packets")
    server.run("DROP TABLE IF EXISTS kept", database="packets")
    server.run("CREATE TABLE kept (n INT PRIMARY KEY, text LONGTEXT)", database="packets")
    put = said("INSERT INTO kept VALUES (:n, :text)")
    steps = [(put, {"n": n, "text": LARGE}) for n in range(3)]
    wrong = (said("UPDATE kept SET m = :m"), {"m": 1})

    def kept() -> list[object]:
        return [n for (n,) in server.run("SELECT n FROM kept ORDER BY n", database="packets")]

    with Proxy(server.port) as proxy:
        ledger = opened_mariadb(url.replace(str(server.port), str(proxy.port)))
        door = ledger.leases.server
        with pytest.raises(StoreUnfit):
            door.transaction(lambda one: one.batch([*steps, wrong], last=True))
        assert kept() == []
        proxy.lose_replies()  # that to the first packet: so it is done again
        door.transaction(lambda one: one.batch(steps, last=True))
        assert kept() == [0, 1, 2]
        server.run("TRUNCATE kept", database="packets")
        small = [(put, {"n": 3, "text": ""}), (put, {"n": 4, "text": ""})]
        proxy.lose_replies()
        with pytest.raises(OutcomeUnknown):
            door.transaction(lambda one: one.batch(small, last=True))
        until(lambda: kept() == [3, 4])  # its first answer may be lost before it has come to an end
        finish(ledger.close())


def test_who_is_between_two_questions_of_a_transaction_has_seconds_and_later_all_the_time(
    ledger: MariaLedger,
) -> None:
    door, limit = ledger.leases.server, said("SELECT @@idle_transaction_timeout")
    wait = said("SELECT @@SESSION.wait_timeout, @@GLOBAL.wait_timeout, CONNECTION_ID()")
    is_mysql = "MariaDB" not in door.run("SELECT VERSION()", {})[0].rows[0][0]

    def work(transaction: Transaction) -> tuple[object, ...]:
        [asked] = transaction.batch([(wait, {})])
        within = asked.rows[0] if is_mysql else transaction.batch([(limit, {})])[0].rows[0]
        return (within[0], asked.rows[0][2])

    within, number = door.transaction(work)
    assert within == 3
    [[session, everybody, same]] = door.ask(wait, {})
    assert (session, same) == (everybody, number)


@pytest.mark.parametrize("asked", [False, True])
def test_whatever_takes_several_packets_is_bounded_from_its_first_to_its_commit(
    server: MariaDB, ledger: MariaLedger, monkeypatch: pytest.MonkeyPatch, *, asked: bool
) -> None:
    """MySQL has no other limit for whoever is stopped between two of them."""
    sent: list[list[str]] = []
    exchange = Transaction._exchange

    def noted(transaction: Transaction, packet: list[str]) -> object:
        sent.append(packet)
        return exchange(transaction, packet)

    monkeypatch.setattr(Transaction, "_exchange", noted)
    monkeypatch.setattr(mariadb_batch, "_PACKET", 1_000)
    door, question = ledger.leases.server, said("DO LENGTH(:text)")
    begin, end = "SET SESSION wait_timeout = 3", "SET SESSION wait_timeout = DEFAULT"
    alone = 0
    for length in range(900, 1_001):

        def work(transaction: Transaction, length: int = length) -> None:
            if asked:
                transaction.batch([(question, {"text": ""})])
            halves = ("x" * (length // 2), "x" * (length - length // 2))
            transaction.batch([(question, {"text": half}) for half in halves], last=True)

        sent.clear()
        door.transaction(work)
        alone += len(sent) == 1
        assert sent[-1][-1] == "COMMIT"
        if isinstance(server, MySQL):
            bounded = (begin in sent[0], end in sent[-1], any(end in one for one in sent[:-1]))
            assert bounded == (len(sent) > 1, len(sent) > 1, False), length
    assert (alone > 10) is not asked


class Chained(MariaDB):
    """A server whose transactions each begin another one with their commit."""

    settings = ("--completion-type=CHAIN",)


class ChainedMySQL(MySQL):
    """The same of the other one."""

    settings = Chained.settings


@pytest.mark.parametrize("kind", [Chained, ChainedMySQL])
def test_every_commit_is_the_end_whatever_the_server_has_as_completion_type(
    kind: type[MariaDB],
) -> None:
    with kind.own() as server:
        url = server.database("chained")
        ours, others = opened_mariadb(url), opened_mariadb(url)
        claimed(ours, RunKey("job", 1000), "a")
        # On the same connection: a lease that was granted is everybody's business.
        finish(ours.leases.acquire("x", holder=Holder("b", "here", 1), ttl=30.0))
        with pytest.raises(LeaseHeld):
            finish(others.leases.acquire("x", holder=Holder("c", "here", 1), ttl=30.0))
        finish(ours.close())
        finish(others.close())
