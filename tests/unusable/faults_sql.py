"""PostgreSQL, MariaDB and MySQL that cannot be used."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

import psycopg

from servers import MariaDB, MySQL, Postgres, shared
from small_disk import SmallBinlog, SmallMariaDB, SmallPostgres
from unusable import SECRET, Unusable, fault, fresh, nothing, restarted, until_refused, used

if TYPE_CHECKING:
    from collections.abc import Iterator

# PostgreSQL.


@fault
def postgres_password() -> Iterator[Unusable]:
    server, name = shared(Postgres), fresh()
    server.run("DROP ROLE IF EXISTS locked")
    server.run("CREATE ROLE locked LOGIN SUPERUSER PASSWORD 'right'")
    server.database(name)
    url = f"postgresql://locked:{SECRET}@127.0.0.1:{server.port}/{name}"
    yield Unusable(url, "check the user and password", nothing, server.url(name))


@fault
def postgres_host() -> Iterator[Unusable]:
    url = f"postgresql://ann:{SECRET}@127.0.0.1:1/x"
    yield Unusable(url, "cannot be reached", nothing, shared(Postgres).database(fresh()))


@fault
def postgres_database() -> Iterator[Unusable]:
    server, name = shared(Postgres), fresh()
    yield Unusable(server.url(name), "no such database", lambda: server.database(name))


@fault
def postgres_table() -> Iterator[Unusable]:
    server, name = shared(Postgres), fresh()
    url = server.database(name)
    used(url)
    tables = ("fencepost_lease", "fencepost_run")
    for table in tables:
        server.run(f"ALTER TABLE {table} RENAME TO away_{table}", database=name)

    def bring_back() -> None:
        for table in tables:
            server.run(f"ALTER TABLE away_{table} RENAME TO {table}", database=name)

    yield Unusable(url, "run 'fencepost migrate'", bring_back)


@fault
def postgres_rights() -> Iterator[Unusable]:
    server, name = shared(Postgres), fresh()
    url = server.database(name)
    used(url)
    server.run(f"CREATE ROLE {name} LOGIN", database=name)
    server.run(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {name}", database=name)

    def grant() -> None:
        server.run(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {name}", database=name)
        server.run(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {name}", database=name)

    yield Unusable(
        url.replace("postgres@", f"{name}@"),
        "permission denied",
        grant,
        looks=0,
        doctor=1,
        finds="postgres.privileges",
    )


@fault
def postgres_standby() -> Iterator[Unusable]:
    server, name = shared(Postgres), fresh()
    url = server.database(name)
    used(url)
    standby = server.standby()
    try:
        yield Unusable(standby.url(name), "is read-only", standby.promote)
    finally:
        standby.end()


@fault
def postgres_full() -> Iterator[Unusable]:
    with SmallPostgres.own() as server:
        url = server.database("test")
        used(url)
        server.disk.fill()
        until_refused(url)
        yield Unusable(
            url,
            "no room left on its disk",
            server.disk.clear,
            looks=0,
            breaking=4,
            doctor=1,
            finds="postgres.writes",
        )


@fault
def postgres_full_log() -> Iterator[Unusable]:
    """Without room for its log PostgreSQL ends itself, and does not begin until there is some."""
    with SmallPostgres.own() as server:
        url = server.database("test")
        used(url)
        server.disk.fill()
        with suppress(psycopg.Error):
            for _ in range(8):
                server.run("SELECT pg_switch_wal()")
                server.run("CREATE TABLE ballast AS SELECT 1; DROP TABLE ballast")
        yield Unusable(url, "cannot be reached|starting up", lambda: restarted(server), gone=True)


# MariaDB.


@fault
def mariadb_password() -> Iterator[Unusable]:
    server, name = shared(MariaDB), fresh()
    url = server.database(name)
    yield Unusable(url.replace("secret", SECRET), "check password", nothing, url)


@fault
def mariadb_host() -> Iterator[Unusable]:
    url = f"mariadb://ann:{SECRET}@127.0.0.1:1/x"
    yield Unusable(url, "cannot be reached", nothing, shared(MariaDB).database(fresh()))


@fault
def mariadb_database() -> Iterator[Unusable]:
    server, name = shared(MariaDB), fresh()
    yield Unusable(server.url(name), "no such database", lambda: server.database(name))


@fault
def mysql_password() -> Iterator[Unusable]:
    server, name = shared(MySQL), fresh()
    url = server.database(name)
    yield Unusable(url.replace("secret", SECRET), "check password", nothing, url)


@fault
def mysql_database() -> Iterator[Unusable]:
    server, name = shared(MySQL), fresh()
    yield Unusable(server.url(name), "no such database", lambda: server.database(name))


@fault
def mariadb_rights() -> Iterator[Unusable]:
    yield from _rights(shared(MariaDB))


@fault
def mysql_rights() -> Iterator[Unusable]:
    yield from _rights(shared(MySQL), breaking=3)  # who may only read may lock nothing there


def _rights(server: MariaDB, *, breaking: int = 4) -> Iterator[Unusable]:
    name = fresh()
    url = server.database(name)
    used(url)
    server.run(f"CREATE USER {name}@'127.0.0.1' IDENTIFIED BY '{SECRET}'")
    server.run(f"GRANT SELECT ON {name}.* TO {name}@'127.0.0.1'")

    def grant() -> None:
        server.run(f"GRANT ALL ON {name}.* TO {name}@'127.0.0.1'")

    url = url.replace("post:secret", f"{name}:{SECRET}")
    yield Unusable(
        url,
        "check password and privileges",
        grant,
        looks=0,
        breaking=breaking,
        doctor=1,
        finds="mariadb.privileges",
    )


@fault
def mariadb_replica() -> Iterator[Unusable]:
    with Replicated.own() as primary, Replica.own() as replica:
        url = primary.database("test")
        primary.run(f"GRANT ALL ON test.* TO humble@'127.0.0.1' IDENTIFIED BY '{SECRET}'")
        used(url)
        replica.run(
            f"CHANGE MASTER TO MASTER_HOST='127.0.0.1', MASTER_PORT={primary.port},"
            " MASTER_USER='post', MASTER_PASSWORD='secret', MASTER_USE_GTID=slave_pos"
        )
        replica.run("START SLAVE")
        while not replica.run("SELECT 1 FROM information_schema.tables WHERE table_schema='test'"):
            time.sleep(0.02)
        replica.run("SET GLOBAL read_only = 1")

        def promote() -> None:
            replica.run("STOP SLAVE")
            replica.run("SET GLOBAL read_only = 0")

        copy = f"mariadb://humble:{SECRET}@127.0.0.1:{replica.port}/test"
        yield Unusable(
            copy,
            "is read-only: give the URL of the primary",
            promote,
            looks=0,
            doctor=1,
            finds="mariadb.read_only",
        )


class Replicated(MariaDB):
    """A server that others follow."""

    settings = ("--log-bin=log", "--server-id=1", "--binlog-format=MIXED")


class Replica(MariaDB):
    """A server that follows."""

    settings = ("--server-id=2", "--log-bin=log", "--binlog-format=MIXED")


@fault
def mariadb_full() -> Iterator[Unusable]:
    with SmallMariaDB.own() as server:
        url = server.database("test")
        used(url)
        server.disk.fill()
        until_refused(url)
        yield Unusable(
            url,
            "is full: free some space",
            server.disk.clear,
            looks=0,
            breaking=4,
            doctor=0,  # it writes nothing there: see docs/doctor.md
        )


@fault
def mariadb_full_log() -> Iterator[Unusable]:
    """It answers to no commit until there is room, and looks for some once a minute.

    Whoever does not want to wait for that starts it again. What nobody was told of is then undone.
    """
    with SmallBinlog.own() as server:
        url = f"{server.database('test')}?timeout=1"
        used(url)
        server.disk.fill()
        until_refused(url, times=1)  # the last page of a log may have room for some
        yield Unusable(
            url,
            "did not answer|could not do it within 1 s|was lost",
            lambda: restarted(server),
            looks=0,
            doctor=1,
            finds="mariadb.stuck",
        )
