"""What a lost reply, a dead server, a stopped client or a set clock may not do to a lease."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pymysql
import pytest

from fencepost import Fencepost
from fencepost.errors import FencepostError, LeaseHeld, LeaseLost, OutcomeUnknown, StoreUnavailable
from fencepost.model.lease import Holder
from fencepost.stores.open import open_store
from fencepost.testing.checker import check
from fencepost.testing.history import Event
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish
from mariaplace import KINDS, Place, emptied
from proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fencepost.stores.api import LeaseStore

PROGRAM = Path(__file__).with_name("mariadb_program.py")
TTL = 30.0

# What was granted, renewed and released, by the server's own account and clock.
_HISTORY = """
CREATE TABLE history (id BIGINT AUTO_INCREMENT PRIMARY KEY, at_us BIGINT, what VARCHAR(10),
                      name VARCHAR(100), holder VARCHAR(64), token BIGINT, until_us BIGINT)"""
_TRIGGERS = [
    f"""
CREATE TRIGGER kept_{event.lower()} AFTER {event} ON fencepost_lease FOR EACH ROW
INSERT INTO history (at_us, what, name, holder, token, until_us)
VALUES (UNIX_TIMESTAMP(SYSDATE(6)) * 1000000, {what}, NEW.name, NEW.nonce, NEW.token,
        NEW.expires_us)"""
    for event, what in (
        ("INSERT", "'granted'"),
        (
            "UPDATE",
            "IF(NEW.held = 0, 'released', IF(NEW.token > OLD.token, 'granted', 'renewed'))",
        ),
    )
]


def holder() -> Holder:
    return Holder(os.urandom(16).hex(), "here", 1)


@pytest.fixture(params=KINDS)
def database(request: pytest.FixtureRequest) -> Place:
    return emptied(request.param, request.node.nodeid)


@contextmanager
def store_at(port: int, database: Place, options: str = "timeout=1") -> Iterator[LeaseStore]:
    url = database.url(port=port, options=options)
    store = open_store(url, BlockingWorld(), namespace="default")
    try:
        yield store
    finally:
        finish(store.close())


@contextmanager
def proxied(database: Place) -> Iterator[tuple[Proxy, LeaseStore]]:
    with Proxy(database.port) as proxy, store_at(proxy.port, database) as store:
        finish(store.views())  # so that the tables are there, and a connection
        yield proxy, store


def test_an_acquire_whose_reply_was_cut_is_adopted(database: Place) -> None:
    with proxied(database) as (proxy, store):
        before = holder()
        finish(store.acquire("x", holder=before, ttl=TTL))
        finish(store.release("x", nonce=before.nonce))
        asking = holder()
        proxy.lose_replies()
        with pytest.raises(OutcomeUnknown, match="did not answer"):
            finish(store.acquire("x", holder=asking, ttl=TTL))
        seen = finish(store.peek("x"))
        assert seen is not None
        assert seen.holder.nonce == asking.nonce
        again = finish(store.acquire("x", holder=asking, ttl=TTL))
        assert (again.token, again.adopted) == (seen.token, True)


def test_a_renewal_and_a_release_whose_replies_were_cut_can_be_repeated(database: Place) -> None:
    with proxied(database) as (proxy, store):
        asking = holder()
        token = finish(store.acquire("x", holder=asking, ttl=TTL)).token
        proxy.lose_replies()
        with pytest.raises(OutcomeUnknown):
            finish(store.renew("x", nonce=asking.nonce, token=token, ttl=TTL))
        assert finish(store.renew("x", nonce=asking.nonce, token=token, ttl=TTL)).token == token
        proxy.lose_replies()
        with pytest.raises(OutcomeUnknown):
            finish(store.release("x", nonce=asking.nonce, token=token))
        finish(store.release("x", nonce=asking.nonce, token=token))
        finish(store.acquire("x", holder=holder(), ttl=TTL))


def test_a_break_whose_reply_was_cut_is_unknown_and_is_not_made_twice(database: Place) -> None:
    with proxied(database) as (proxy, store):
        token = finish(store.acquire("x", holder=holder(), ttl=TTL)).token
        commits = _cut_the_commit(proxy)
        with pytest.raises(OutcomeUnknown):
            finish(store.break_("x", token=token, reason="hangs", operator="ops"))
        assert commits
        proxy.mode = "pass"
        seen = finish(store.peek("x"))
        assert seen is not None
        assert not seen.held
        assert seen.token > token
    assert database.server.run(f"SELECT count(*) FROM `{database}`.fencepost_break") == [(1,)]


def _cut_the_commit(proxy: Proxy) -> list[int]:
    """Lose the reply to the next packet with a COMMIT, and cut nothing: it comes to its end."""
    seen: list[int] = []
    kind: Any = pymysql.Connection
    whole = kind._execute_command

    def sent(self: Any, command: int, text: Any) -> None:
        if text.endswith(b"COMMIT" if isinstance(text, bytes) else "COMMIT"):
            kind._execute_command = whole
            seen.append(1)
            proxy.lose_replies(0)
        whole(self, command, text)

    kind._execute_command = sent
    return seen


def test_a_request_that_was_swallowed_is_unknown_and_left_nothing(database: Place) -> None:
    with proxied(database) as (proxy, store):
        asking = holder()
        proxy.mode = "hole_up"
        began = time.monotonic()
        with pytest.raises(OutcomeUnknown):
            finish(store.acquire("x", holder=asking, ttl=TTL))
        assert time.monotonic() - began < 3, "every call has a timeout"
        proxy.mode = "pass"
        assert finish(store.peek("x")) is None
        assert not finish(store.acquire("x", holder=asking, ttl=TTL)).adopted


def test_a_half_open_connection_is_given_up_in_time(database: Place) -> None:
    with proxied(database) as (proxy, store):
        asking = holder()
        token = finish(store.acquire("x", holder=asking, ttl=1.0)).token
        proxy.mode = "hole"
        began = time.monotonic()
        with pytest.raises(OutcomeUnknown):
            finish(store.renew("x", nonce=asking.nonce, token=token, ttl=1.0))
        assert time.monotonic() - began < 0.8, "a renewal must leave time for another"
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):  # a read changes nothing: that much is known
            finish(store.peek("x"))
        assert time.monotonic() - began < 4


def test_connections_that_ended_while_nobody_used_them_harm_nobody(database: Place) -> None:
    with proxied(database) as (proxy, store):
        asking = holder()
        token = finish(store.acquire("x", holder=asking, ttl=TTL)).token
        proxy.reset()
        finish(store.renew("x", nonce=asking.nonce, token=token, ttl=TTL))
        for (number,) in database.server.run(
            f"SELECT id FROM information_schema.processlist WHERE db = '{database}'"
        ):
            database.server.run(f"KILL {number}")
        give_up = time.monotonic() + 30
        while proxy.connections:  # until the client could know
            assert time.monotonic() < give_up
            time.sleep(0.01)
        finish(store.release("x", nonce=asking.nonce, token=token))


def test_a_refused_connection_means_that_nothing_happened(database: Place) -> None:
    with proxied(database) as (proxy, store):
        proxy.mode = "refuse"
        proxy.reset()
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            finish(store.acquire("x", holder=holder(), ttl=TTL))
        proxy.mode = "pass"
        assert finish(store.peek("x")) is None


def test_a_killed_statement_did_not_happen(database: Place) -> None:
    server = database.server
    with store_at(server.port, database, "timeout=5") as store:
        asking = holder()
        token = finish(store.acquire("x", holder=asking, ttl=TTL)).token
        with _locked(database):
            waits = "SELECT id FROM information_schema.processlist WHERE info LIKE '%%UPDATE%%'"
            caught = Beside(
                lambda: finish(store.renew("x", nonce=asking.nonce, token=token, ttl=TTL))
            )
            found: Any = []
            while not found and caught.is_alive():
                found = server.run(f"{waits} AND db = '{database}'")
            if found:  # else it had to wait for too long, which is no different
                server.run(f"KILL QUERY {found[0][0]}")
            assert isinstance(caught(), StoreUnavailable)
        finish(store.renew("x", nonce=asking.nonce, token=token, ttl=TTL))


def test_a_row_that_stays_locked_is_asked_for_again_and_then_given_up(database: Place) -> None:
    server = database.server
    with store_at(server.port, database, "timeout=1.8") as store:
        asking = holder()
        token = finish(store.acquire("x", holder=asking, ttl=TTL)).token
        with _locked(database), pytest.raises((StoreUnavailable, OutcomeUnknown)):
            finish(store.renew("x", nonce=asking.nonce, token=token, ttl=TTL))
        finish(store.renew("x", nonce=asking.nonce, token=token, ttl=TTL))


@contextmanager
def _locked(database: Place) -> Iterator[None]:
    db = pymysql.connect(
        unix_socket=str(database.server.socket), user="root", database=database.name
    )
    with db.cursor() as cursor:
        cursor.execute("SELECT * FROM fencepost_lease FOR UPDATE")
        yield
    db.close()


class Beside(threading.Thread):
    """Work that is done beside us; called, it waits for the result, or the error."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self._work, self._said = work, list[object]()
        self.start()

    def run(self) -> None:
        try:
            self._said.append(self._work())
        except FencepostError as error:
            self._said.append(error)

    def __call__(self) -> object:
        self.join(60)
        return self._said[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_lease_outlives_the_sudden_death_of_its_server(kind: str) -> None:
    with KINDS[kind].own() as server:
        server.database("test")
        with Fencepost(server.url()) as fp:
            lock = fp.lock("x", ttl="20s")
            lease = lock.acquire()
            server.restart()
            lease.check()
            with store_at(server.port, Place(server, "test")) as other, pytest.raises(LeaseHeld):
                finish(other.acquire("x", holder=holder(), ttl=TTL))
            assert lock.release(lease)
            with lock as after:
                assert after.token > lease.token


@pytest.mark.parametrize("kind", KINDS)
def test_histories_keep_their_promises_while_the_server_dies_again_and_again(kind: str) -> None:
    with KINDS[kind].own() as server:
        server.database("test")
        with store_at(server.port, Place(server, "test")) as store:
            finish(store.views())
        for statement in (_HISTORY, *_TRIGGERS):
            server.run(
                statement.replace(" fencepost_lease", " test.fencepost_lease")
                .replace("TABLE history", "TABLE test.history")
                .replace("TRIGGER kept", "TRIGGER test.kept")
                .replace("INTO history", "INTO test.history")
            )
        stop, rounds = threading.Event(), [0] * 4
        workers = [Beside(partial(_work, server.url(), stop, rounds, which)) for which in range(4)]
        for _ in range(3):
            before = sum(rounds)
            while sum(rounds) < before + 20:
                time.sleep(0.005)
            server.restart()
        stop.set()
        assert [worker() for worker in workers] == [None] * 4
        rows: Any = server.run(
            "SELECT at_us, what, name, holder, token, until_us FROM test.history ORDER BY id"
        )
        events = [
            Event(at / 1e6, what, "", name, who, token, until / 1e6)
            for at, what, name, who, token, until in rows
        ]
        assert sum(event.what == "granted" for event in events) >= 60
        assert check(events) == []


def _work(url: str, stop: threading.Event, rounds: list[int], which: int) -> None:
    store = open_store(f"{url}?timeout=1", BlockingWorld(), namespace="default")
    while not stop.is_set():
        asking, token = holder(), None
        name = f"lease {which % 2}"
        try:
            token = finish(store.acquire(name, holder=asking, ttl=0.3)).token
            if rounds[which] % 5 != 4:  # every fifth is left to lapse
                finish(store.renew(name, nonce=asking.nonce, token=token, ttl=0.3))
                finish(store.release(name, nonce=asking.nonce, token=token))
            rounds[which] += 1
        except (LeaseHeld, LeaseLost, OutcomeUnknown, StoreUnavailable):
            time.sleep(0.005)
    finish(store.close())


def test_a_client_that_was_stopped_past_its_ttl_has_lost(database: Place) -> None:
    url = database.url()
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), url, "x", "600ms"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as held:
        assert held.stdin is not None
        assert held.stdout is not None
        first = int(held.stdout.readline())
        held.send_signal(signal.SIGSTOP)
        try:
            with Fencepost(url) as fp, fp.lock("x", wait="20s") as lease:
                assert lease.token > first
                held.send_signal(signal.SIGCONT)
                print(file=held.stdin, flush=True)
                assert held.stdout.readline() == "LeaseLost\n"
                lease.check()
        finally:
            held.send_signal(signal.SIGCONT)
            held.kill()


def test_a_server_whose_clock_was_set_back_blocks_for_one_ttl_at_most(database: Place) -> None:
    with store_at(database.server.port, database) as store:
        first = finish(store.acquire("x", holder=holder(), ttl=0.5)).token
        # As if it had been granted an hour before the clock was set back.
        database.server.run(
            f"UPDATE `{database}`.fencepost_lease SET expires_us = expires_us + 3600000000"
        )
        seen = finish(store.peek("x"))
        assert seen is not None
        assert seen.expires_in <= 0.5
        with pytest.raises(LeaseHeld) as caught:
            finish(store.acquire("x", holder=holder(), ttl=TTL))
        assert caught.value.expires_in <= 0.5
        time.sleep(0.55)
        assert finish(store.acquire("x", holder=holder(), ttl=TTL)).token > first


def test_a_fork_leaves_the_connections_to_the_parent(database: Place) -> None:
    with store_at(database.server.port, database) as store:
        token = finish(store.acquire("x", holder=holder(), ttl=TTL)).token
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            seen = finish(store.peek("x"))
            os.write(writer, b"" if seen is None else str(seen.token).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        assert int(os.read(reader, 100)) == token
        os.close(reader)
        os.close(writer)
        seen = finish(store.peek("x"))
        assert seen is not None
        assert seen.token == token
