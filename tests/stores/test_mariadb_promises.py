"""What the store of MariaDB and MySQL claims holds, what it disclaims does not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
import traceback
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pymysql
import pytest

from fencepost.cli.main import main
from fencepost.errors import BadUrl, LeaseHeld, OutcomeUnknown, StoreUnavailable, StoreUnfit
from fencepost.flows.acquire import acquire
from fencepost.model.lease import Holder
from fencepost.model.symptom import Severity
from fencepost.stores.mariadb import MariaStore, open_mariadb
from fencepost.stores.mariadb_rows import NOW_US
from fencepost.stores.open import open_store
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish
from mariaplace import KINDS, Place, emptied
from proxy import Proxy
from servers import MariaDB, MySQL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PROGRAM = Path(__file__).with_name("mariadb_program.py")
TTL = 30.0


def holder() -> Holder:
    return Holder(os.urandom(16).hex(), "here", 1)


def opened(url: str) -> MariaStore:
    store = open_store(url, BlockingWorld(), namespace="default")
    assert isinstance(store, MariaStore)
    return store


@pytest.fixture(params=KINDS)
def database(request: pytest.FixtureRequest) -> Place:
    return emptied(request.param, request.node.nodeid)


@pytest.fixture
def store(database: Place) -> Iterator[MariaStore]:
    store = opened(database.url())
    yield store
    finish(store.close())


# What it costs.


class Counted:
    """What was sent, each with an answer of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[str] = []
        connection: Any = pymysql.Connection
        send = connection._execute_command

        def counted(this: Any, command: int, text: Any) -> Any:
            if isinstance(text, bytes):
                text = text.decode()
            self.sent.append(str(text).split()[0])
            return send(this, command, text)

        monkeypatch.setattr(connection, "_execute_command", counted)

    def take(self) -> list[str]:
        taken, self.sent = self.sent, []
        return taken


def test_each_verb_is_one_round_trip(store: MariaStore, monkeypatch: pytest.MonkeyPatch) -> None:
    finish(store.views())
    counted, first = Counted(monkeypatch), holder()
    token = finish(store.acquire("x", holder=first, ttl=TTL)).token
    assert counted.take() == ["UPDATE", "INSERT"]  # once in the life of a name
    with pytest.raises(LeaseHeld):
        finish(store.acquire("x", holder=holder(), ttl=TTL))
    assert counted.take() == ["UPDATE"]
    finish(store.renew("x", nonce=first.nonce, token=token, ttl=TTL))
    assert counted.take() == ["UPDATE"]
    finish(store.release("x", nonce=first.nonce, token=token))
    assert counted.take() == ["UPDATE"]
    finish(store.acquire("x", holder=holder(), ttl=TTL))
    assert counted.take() == ["UPDATE"]
    finish(store.peek("x"))
    finish(store.views())
    assert counted.take() == ["SELECT", "SELECT"]


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_changes_a_lease_is_written(kind: str) -> None:
    with KINDS[kind].own() as server, closing_store(server.database("test")) as store:
        first = holder()
        token = finish(store.acquire("x", holder=first, ttl=TTL)).token
        before = _flushes(server)
        for _ in range(5):
            with pytest.raises(LeaseHeld):
                finish(store.acquire("x", holder=holder(), ttl=TTL))
            finish(store.peek("x"))
        refused = _flushes(server)
        finish(store.renew("x", nonce=first.nonce, token=token, ttl=TTL))
        finish(store.release("x", nonce=first.nonce, token=token))
        finish(store.acquire("x", holder=holder(), ttl=TTL))
        changed = _flushes(server)
    assert refused - before == 0
    assert changed - refused == 3


def _flushes(server: MariaDB) -> int:
    """Return how many rows have been changed, each of them in a transaction of its own."""
    [(_, count)] = server.run("SHOW GLOBAL STATUS LIKE 'Handler_update'")
    return int(str(count))


class closing_store:  # noqa: N801 -- reads as a verb
    def __init__(self, url: str) -> None:
        self._store = opened(url)

    def __enter__(self) -> MariaStore:
        return self._store

    def __exit__(self, *error: object) -> None:
        finish(self._store.close())


# What it claims.


def test_waiters_are_served_in_the_order_in_which_they_came(
    store: MariaStore, database: Place
) -> None:
    assert store.capabilities.fair
    first, served = holder(), list[int]()
    token = finish(store.acquire("x", holder=first, ttl=TTL)).token

    def wait(number: int) -> None:
        mine = opened(database.url())
        asking, world = holder(), BlockingWorld()
        granted = finish(
            acquire(world, mine, ["x"], holder=asking, ttl=TTL, wait=30.0, abandon=lambda *_: None)
        )
        served.append(number)
        finish(mine.release("x", nonce=asking.nonce, token=granted.grant.token))
        finish(mine.close())

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(5)]
    for number, thread in enumerate(threads):
        thread.start()
        while _waiting(database) < number + 1:  # the first sleeps, the others stand in line
            time.sleep(0.002)
    finish(store.release("x", nonce=first.nonce, token=token))
    for thread in threads:
        thread.join(30)
    assert served == [0, 1, 2, 3, 4]
    assert _waiting(database) == 0, "who leaves the line leaves nothing behind"


def _waiting(database: Place) -> int:
    [(count,)] = database.server.run(
        "SELECT count(*) FROM information_schema.processlist"
        f" WHERE db = '{database}' AND (info LIKE 'SELECT SLEEP%' OR info LIKE 'SELECT GET_LOCK%')"
    )
    return int(str(count))


def test_whoever_is_first_in_line_is_woken_and_need_not_ask(store: MariaStore) -> None:
    place = finish(store.line("x"))
    assert place is not None
    assert finish(place.turn(5.0))  # at the head of the line: ask
    for _ in range(50):
        first = holder()
        token = finish(store.acquire("x", holder=first, ttl=TTL)).token
        finish(place.turn(5.0))  # asleep from here on: ask once more
        finish(store.release("x", nonce=first.nonce, token=token))
        if finish(place.turn(5.0)):
            break  # else the server had not begun to sleep, or was done: then the nap helps
    else:
        raise AssertionError("nobody ever woke it")
    finish(place.leave(served=True))


def test_a_release_by_another_user_of_the_server_wakes_nobody_and_harms_nobody(
    store: MariaStore, database: Place
) -> None:
    server, first = database.server, holder()
    server.run("CREATE USER IF NOT EXISTS humble@'127.0.0.1' IDENTIFIED BY 'pie'")
    token = finish(store.acquire("x", holder=first, ttl=TTL)).token
    server.run(f"GRANT SELECT, INSERT, UPDATE ON `{database}`.* TO humble@'127.0.0.1'")
    place = finish(store.line("x"))
    assert place is not None
    assert finish(place.turn(5.0))
    assert finish(place.turn(5.0))
    url = database.url(who="humble:pie")
    with closing_store(url) as other:
        finish(other.release("x", nonce=first.nonce, token=token))
    assert not finish(place.turn(5.0)), "its nap was over before anybody woke it"
    assert finish(place.first())
    finish(place.leave(served=False))


def test_a_line_whose_connection_is_cut_is_joined_again(database: Place) -> None:
    with Proxy(database.port) as proxy:
        url = database.url(port=proxy.port, options="timeout=2")
        with closing_store(url) as store:
            first = holder()
            token = finish(store.acquire("x", holder=first, ttl=TTL)).token
            threading.Timer(0.2, proxy.reset).start()
            freed = threading.Timer(
                0.6, lambda: finish(store.release("x", nonce=first.nonce, token=token))
            )
            freed.start()
            granted = finish(
                acquire(
                    BlockingWorld(), store, ["x"], holder=holder(), ttl=TTL, wait=20.0,
                    abandon=lambda *_: None,
                )
            )  # fmt: skip
            freed.join()
            assert granted.grant.token > token


def test_those_who_come_first_to_an_empty_database_do_not_collide(database: Place) -> None:
    stores = [opened(database.url()) for _ in range(8)]
    granted: list[int] = []
    start = threading.Barrier(8)

    def ask(mine: MariaStore) -> None:
        start.wait()
        try:
            granted.append(finish(mine.acquire("x", holder=holder(), ttl=TTL)).token)
        except LeaseHeld:
            granted.append(0)

    threads = [threading.Thread(target=ask, args=(mine,)) for mine in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for mine in stores:
        finish(mine.close())
    assert sorted(granted)[:7] == [0] * 7
    assert max(granted) > 0


def test_names_that_differ_in_a_space_or_a_case_are_two(store: MariaStore) -> None:
    for name in ("job", "Job", "job ", "jöb", "x" * 999 + "a", "x" * 999 + "b"):
        finish(store.acquire(name, holder=holder(), ttl=TTL))
    assert len(finish(store.views())) == 6


def test_a_trigger_on_the_table_changes_no_token(store: MariaStore, database: Place) -> None:
    finish(store.views())
    server = database.server
    server.run(f"CREATE TABLE `{database}`.seen (id INT AUTO_INCREMENT PRIMARY KEY, token BIGINT)")
    server.run(
        f"CREATE TRIGGER `{database}`.seeing AFTER UPDATE ON `{database}`.fencepost_lease"
        f" FOR EACH ROW INSERT INTO `{database}`.seen (token) VALUES (NEW.token)"
    )
    for _ in range(3):
        asking = holder()
        token = finish(store.acquire("x", holder=asking, ttl=TTL)).token
        seen = finish(store.peek("x"))
        assert seen is not None
        assert seen.token == token > 0
        finish(store.release("x", nonce=asking.nonce, token=token))


def test_the_time_zone_of_a_session_changes_nothing(database: Place) -> None:
    with (
        closing(pymysql.connect(unix_socket=str(database.server.socket), user="root")) as db,
        db.cursor() as cursor,
    ):
        read = []
        for zone in ("+00:00", "+09:00", "-11:00"):
            cursor.execute("SET time_zone = %s", (zone,))
            cursor.execute(f"SELECT {NOW_US}")
            [(now_us,)] = cursor.fetchall()
            read.append(now_us / 1e6)
    assert max(read) - min(read) < 60
    assert abs(read[0] - time.time()) < 60


# What it disclaims.


def test_the_death_of_a_holder_is_not_noticed(store: MariaStore, database: Place) -> None:
    assert not store.capabilities.notices_death
    url = database.url()
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), url, "x", "30s"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as held:
        assert held.stdout is not None
        held.stdout.readline()
        held.kill()
    seen = finish(store.peek("x"))
    assert seen is not None
    assert (seen.held, seen.alive) == (True, None)
    with pytest.raises(LeaseHeld):
        finish(store.acquire("x", holder=holder(), ttl=TTL))


class Replicated(MariaDB):
    settings = ("--log-bin=log", "--server-id=1", "--binlog-format=MIXED")


class Replica(MariaDB):
    settings: Sequence[str] = ("--server-id=2", "--log-bin=log", "--binlog-format=MIXED")
    stop_following = "STOP SLAVE"

    def follow(self, primary: MariaDB) -> None:
        self.run(
            f"CHANGE MASTER TO MASTER_HOST='127.0.0.1', MASTER_PORT={primary.port},"
            " MASTER_USER='post', MASTER_PASSWORD='secret', MASTER_USE_GTID=slave_pos"
        )
        self.run("START SLAVE")


_GTID = ("--log-bin=log", "--gtid-mode=ON", "--enforce-gtid-consistency")


class ReplicatedMySQL(MySQL):
    settings = ("--server-id=1", *_GTID)


class ReplicaMySQL(Replica, MySQL):
    settings = ("--server-id=2", *_GTID)
    stop_following = "STOP REPLICA"

    def follow(self, primary: MariaDB) -> None:
        self.run("RESET BINARY LOGS AND GTIDS")  # of what made its user
        self.run(
            f"CHANGE REPLICATION SOURCE TO SOURCE_HOST='127.0.0.1', SOURCE_PORT={primary.port},"
            " SOURCE_USER='post', SOURCE_PASSWORD='secret', SOURCE_AUTO_POSITION=1, SOURCE_SSL=1"
        )
        self.run("START REPLICA")


@pytest.mark.parametrize(
    ("first", "second"), [(Replicated, Replica), (ReplicatedMySQL, ReplicaMySQL)]
)
def test_a_replica_that_takes_over_may_not_know_the_newest_lease(
    first: type[MariaDB], second: type[Replica]
) -> None:
    with first.own() as primary, second.own() as replica:
        primary.database("test")
        replica.follow(primary)
        with closing_store(primary.url("test")) as store:
            assert not store.capabilities.failover_safe
            known = finish(store.acquire("known", holder=holder(), ttl=TTL)).token
            with closing_store(replica.url("test")) as copy:
                while not _has(copy, "known"):
                    time.sleep(0.01)
                replica.run(replica.stop_following)  # as if the network were slow
                newest = finish(store.acquire("newest", holder=holder(), ttl=TTL)).token
                primary.kill()
                seen = finish(copy.peek("known"))
                assert seen is not None
                assert seen.token == known
                assert finish(copy.peek("newest")) is None, "that is what is disclaimed"
                # But the tokens go on rising: they are never below the time.
                assert finish(copy.acquire("newest", holder=holder(), ttl=TTL)).token > newest


def _has(store: MariaStore, name: str) -> bool:
    try:
        return finish(store.peek(name)) is not None
    except StoreUnfit:  # its database has not arrived
        return False


# Mistakes.


def test_a_wrong_password_is_one_sentence_without_it(database: Place) -> None:
    with closing_store(database.url(who="post:hunter2")) as store:
        with pytest.raises(StoreUnfit, match=r"denies it to user 'post'.*check password") as caught:
            finish(store.acquire("x", holder=holder(), ttl=TTL))
        assert "hunter2" not in str(caught.value)
        assert f"127.0.0.1:{database.port}/{database}" in str(caught.value)


def test_a_host_that_nobody_listens_at_is_unavailable() -> None:
    with closing_store("mariadb://a:hunter2@127.0.0.1:1/x?timeout=1") as store:
        with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1/x cannot be reached") as caught:
            finish(store.views())
        assert "hunter2" not in str(caught.value)


def test_a_socket_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    with (
        closing_store(f"mariadb:///x?socket={tmp_path}/none") as store,
        pytest.raises(StoreUnavailable, match="cannot be reached"),
    ):
        finish(store.views())


def test_an_unknown_database_is_told(database: Place) -> None:
    with (
        closing_store(database.server.url("nowhere")) as store,
        pytest.raises(StoreUnfit, match="no such database"),
    ):
        finish(store.views())


def test_a_user_who_may_not_create_tables_is_told_to_migrate(database: Place) -> None:
    server = database.server
    server.run("CREATE USER IF NOT EXISTS humble@'127.0.0.1' IDENTIFIED BY 'pie'")
    server.run(f"GRANT SELECT, INSERT, UPDATE ON `{database}`.* TO humble@'127.0.0.1'")
    url = database.url(who="humble:pie")
    with closing_store(url) as store:
        with pytest.raises(StoreUnfit, match="run 'fencepost migrate' as a user who may"):
            finish(store.acquire("x", holder=holder(), ttl=TTL))
        with closing_store(database.url()) as other:
            finish(other.views())
        finish(store.acquire("x", holder=holder(), ttl=TTL))  # it needs no more than these three


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_only_server_is_unavailable_and_the_doctor_says_why(kind: str) -> None:
    with KINDS[kind].own() as server:
        server.database("test")
        server.run("CREATE USER humble@'127.0.0.1' IDENTIFIED BY 'pie'")
        server.run("GRANT ALL ON test.* TO humble@'127.0.0.1'")
        url = server.url("test", who="humble:pie")
        with closing_store(url) as store:
            assert [symptom.code for symptom in finish(store.examine())] == ["mariadb.tables"]
            finish(store.views())
            assert finish(store.examine()) == []
            server.run("SET GLOBAL read_only = 1")
            with pytest.raises(StoreUnavailable, match="is read-only: give the URL of the primary"):
                finish(store.acquire("x", holder=holder(), ttl=TTL))
            assert finish(store.views()) == []
            server.run("SET GLOBAL innodb_flush_log_at_trx_commit = 2")
            server.run("ALTER TABLE test.fencepost_lease ENGINE = MyISAM")
            found = {symptom.code: symptom for symptom in finish(store.examine())}
    assert found["mariadb.read_only"].severity is Severity.BREAKS
    assert found["mariadb.engine"].severity is Severity.BREAKS
    assert found["mariadb.flush"].severity is Severity.RISK
    assert all(symptom.remedy for symptom in found.values())


class LoggingStatements(MariaDB):
    settings = ("--log-bin=log", "--server-id=1", "--binlog-format=STATEMENT")


class LoggingStatementsMySQL(MySQL):
    settings = LoggingStatements.settings


@pytest.mark.parametrize("kind", [LoggingStatements, LoggingStatementsMySQL])
def test_a_log_of_statements_is_refused_with_what_to_set(kind: type[MariaDB]) -> None:
    with kind.own() as server, closing_store(server.database("test")) as store:
        with pytest.raises(StoreUnfit, match="set binlog_format to MIXED or ROW"):
            finish(store.acquire("x", holder=holder(), ttl=TTL))
        assert "mariadb.binlog" in {symptom.code for symptom in finish(store.examine())}


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_with_no_room_is_unavailable(kind: str) -> None:
    with KINDS[kind].own() as server:
        server.run("SET GLOBAL max_connections = 10")
        taken: list[pymysql.Connection[Any]] = []
        url = server.database("test")
        try:
            while len(taken) < 12:
                try:
                    taken.append(
                        pymysql.connect(
                            host="127.0.0.1", port=server.port, user="post", password="secret",
                            ssl_disabled=True,
                        )
                    )  # fmt: skip
                except pymysql.OperationalError:
                    break
            with closing_store(url) as store, pytest.raises(StoreUnavailable, match="no room"):
                finish(store.views())
        finally:
            for connection in taken:
                connection.close()


def test_migrate_makes_the_tables_and_those_for_fences(
    database: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    url = database.url()
    assert main(["migrate", "--url", url]) == 0
    assert main(["migrate", "--guard", url]) == 0
    assert "secret" not in capsys.readouterr().out
    tables = database.server.run(f"SHOW TABLES FROM `{database}`")
    names = ("fencepost_break", "fencepost_done", "fencepost_guard", "fencepost_lease")
    assert {(name,) for name in (*names, "fencepost_run", "fencepost_alarm")} <= set(tables)
    for words in (["--url", url], ["--guard", url]):
        assert main(["migrate", *words, "--sql"]) == 0
        sql = capsys.readouterr().out
        whole = re.findall(r"DELIMITER //\n(.*?)//\nDELIMITER ;\n", sql, flags=re.DOTALL)
        plain = re.sub(r"DELIMITER //\n.*?//\nDELIMITER ;\n", "", sql, flags=re.DOTALL)
        for statement in (*filter(str.strip, plain.split(";\n")), *whole):
            # As an operator would, over what is there.
            database.run(statement)


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("user:hunter2@host", "names no database"),
        ("user:hunter2@host/", "names no database"),
        ("user:hunter2@host/a/b", "names no database"),
        ("user:hunter2@host:port/x", "cannot be read"),
        ("user:hunter2/3@host/x", "cannot be read"),
        ("user:hunter2#3@host/x", "cannot be read"),
        ("user:hunter2@host/x?speed=9", "unknown options"),
        ("user:hunter2@host/x?tls=maybe", "off, prefer, require or verify"),
        ("user:hunter2@host/x?timeout=0", "0.1 to 600"),
        ("user:hunter2@host/x?timeout=soon", "cannot be read"),
    ],
)
def test_a_url_that_cannot_be_one_is_refused_without_its_password(
    address: str, complaint: str
) -> None:
    with pytest.raises(BadUrl, match=complaint) as caught:
        open_mariadb(BlockingWorld(), address, namespace="default")
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_a_url_says_it_with_escapes_where_it_must() -> None:
    from fencepost.stores.mariadb import read_address

    address = read_address("us%40er:p%2Fw@db.example:3307/my%20db?timeout=2.5&ca=/etc/ca.pem")
    assert (address.user, address.password) == ("us@er", "p/w")
    assert (address.host, address.port, address.database) == ("db.example", 3307, "my db")
    assert (address.timeout, address.tls, address.ca) == (2.5, "verify", "/etc/ca.pem")
    assert "p/w" not in str(address)


def test_a_driver_error_that_makes_no_sense_is_unknown(
    store: MariaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(store.views())

    def garbled(*_: object, **__: object) -> None:
        raise pymysql.InternalError("Packet sequence number wrong - got 3 expected 1")

    monkeypatch.setattr(pymysql.Connection, "_read_query_result", garbled)
    with pytest.raises(OutcomeUnknown, match="sequence number"):
        finish(store.acquire("x", holder=holder(), ttl=TTL))
