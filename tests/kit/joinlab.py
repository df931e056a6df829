"""What tests of transactions and copies share: the SQL servers whose ledgers user code can join."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING, Any

import psycopg
import pymysql

from fencepost.ledger.mariadb_joined import MariaJoined
from fencepost.ledger.postgres_joined import PostgresJoined
from fencepost.stores.mariadb import read_address
from fencepost.world.mariadb_batch import Transaction, is_quiet
from fencepost.world.postgres_session import Session
from marialab import opened_mariadb
from mariaplace import LoggedMariaDB, LoggedMySQL
from pglab import opened_postgres
from servers import MariaDB, MySQL, Postgres, shared
from servers.running import give_to_nobody

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fencepost.ledger.draft_ledger import DraftLedger


class Home:
    """One kind of server, and what tests have to know of it."""

    kind: type[Postgres | MariaDB]
    joined: type[PostgresJoined | MariaJoined]
    wrong: type[Exception]  # what its driver raises for what is no SQL
    # What says something to the server, which a transaction is measured by.
    asks: type[Any]
    options = ""  # of the ledger's URL

    @property
    def server(self) -> Postgres | MariaDB:
        return shared(self.kind)

    def database(self, name: str) -> str:
        """Return the URL of a database; the ledger's has options beside it."""
        return self.server.database(name)

    def run(self, statement: str, database: str) -> Sequence[tuple[Any, ...]]:
        return self.server.run(statement, database=database)

    def opened(self, url: str, *, namespace: str) -> DraftLedger:
        raise NotImplementedError

    def connected(self, url: str) -> Any:
        """Return a connection of its driver, with a transaction open."""
        raise NotImplementedError

    def spare(self, ledger: Any) -> list[Any]:
        """Return the sessions that are kept for the next transaction."""
        raise NotImplementedError

    def session(self, joined: Any) -> Any:
        """Return the session that a transaction is on."""
        raise NotImplementedError

    def is_cut(self, joined: Any) -> bool:
        """Say whether the server has ended the session."""
        raise NotImplementedError

    def waits(self, database: str) -> bool:
        """Say whether somebody waits for a row."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.kind.__name__


class PostgresHome(Home):
    kind, joined, asks = Postgres, PostgresJoined, Session
    wrong = psycopg.errors.SyntaxError
    options = "?advisory=off"

    def opened(self, url: str, *, namespace: str = "default") -> DraftLedger:
        return opened_postgres(url, namespace=namespace)

    def connected(self, url: str) -> Any:
        return psycopg.connect(url.partition("?")[0])

    def spare(self, ledger: Any) -> list[Any]:
        return list(ledger.spare)

    def session(self, joined: Any) -> Any:
        return joined._session

    def is_cut(self, joined: Any) -> bool:
        return bool(joined._session.is_stale())

    def waits(self, database: str) -> bool:
        waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = "
        return bool(self.run(f"{waiting}'{database}'", database))


class MariaHome(Home):
    kind, joined, asks = MariaDB, MariaJoined, Transaction
    wrong = pymysql.err.ProgrammingError

    def opened(self, url: str, *, namespace: str = "default") -> DraftLedger:
        return opened_mariadb(url, namespace=namespace)

    def connected(self, url: str) -> Any:
        address = read_address(url.partition("://")[2])
        return pymysql.connect(
            host=address.host,
            port=address.port,
            user=address.user,
            password=address.password,
            database=address.database,
        )

    def spare(self, ledger: Any) -> list[Any]:
        return list(ledger.leases.server._guests)

    def session(self, joined: Any) -> Any:
        return joined._connection

    def is_cut(self, joined: Any) -> bool:
        return not is_quiet(joined._connection)

    def waits(self, database: str) -> bool:
        # Not innodb_trx: for whoever asks often, that is as it was at the first time.
        waiting = "SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'"
        return any(int(str(count)) for _, count in self.run(waiting, database))


class LoggedMariaHome(MariaHome):
    """One whose transactions are plain ones, for the sake of its binary log."""

    kind = LoggedMariaDB


class MySQLHome(MariaHome):
    kind = MySQL


class LoggedMySQLHome(MySQLHome):
    """As most are: it writes a binary log as well."""

    kind = LoggedMySQL


HOMES = (PostgresHome(), MariaHome(), MySQLHome())


class Dumped:
    """A PostgreSQL database that can be put back to where it was when it was dumped."""

    opened = staticmethod(opened_postgres)

    def __init__(self, name: str) -> None:
        self.server, self.name = shared(Postgres), f"{name}{time.time_ns()}"
        self.url = self.server.database(self.name)

    def dump(self) -> None:
        self._file = self.server.folder / f"{self.name}.dump"
        self.server.tool("pg_dump", "-Fc", "-f", str(self._file), self.name)

    def restore(self) -> None:
        self.empty()
        self.server.tool("pg_restore", "-d", self.name, str(self._file))

    def empty(self) -> None:
        self.server.run(f'DROP DATABASE "{self.name}" WITH (FORCE)')
        self.server.run(f'CREATE DATABASE "{self.name}"')


class RestartedMariaDB(MariaDB):
    """A server for those who stop it and put its files back."""

    settings: Sequence[str] = ("--innodb-fast-shutdown=1", "--innodb-buffer-pool-size=8M")


class RestartedMySQL(MySQL):
    """The same of the other server."""

    settings: Sequence[str] = RestartedMariaDB.settings


class Copied:
    """A MariaDB database whose server's files can be put back to where they were."""

    opened = staticmethod(opened_mariadb)
    kind: type[MariaDB] = RestartedMariaDB

    def __init__(self, name: str) -> None:
        self.server, self.name = shared(self.kind), f"{name}{time.time_ns()}"
        self.url = self.server.database(self.name)

    def dump(self) -> None:
        copy = self.server.folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        self._while_stopped(lambda: shutil.copytree(self.server.data, copy))

    def restore(self) -> None:
        def put_back() -> None:
            shutil.rmtree(self.server.data)
            shutil.copytree(self.server.folder / "copy", self.server.data)
            give_to_nobody(self.server.data)

        self._while_stopped(put_back)

    def empty(self) -> None:
        self.server.run(f"DROP DATABASE `{self.name}`")
        self.server.run(f"CREATE DATABASE `{self.name}`")

    def _while_stopped(self, work: Callable[[], object]) -> None:
        self.server.stop()
        work()
        self.server.start()


class CopiedMySQL(Copied):
    """The same of MySQL."""

    kind = RestartedMySQL


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
