"""``await lease.fence(conn)`` on asyncio connections to MariaDB and MySQL: the same, awaited.

And ``run.once(item, conn=conn)`` on those and on psycopg's.
"""

from __future__ import annotations

import asyncio
import gc
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiomysql
import asyncmy
import psycopg
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from fencepost import Fencepost, fence_mariadb, fence_postgres
from fencepost.aio import AsyncFencepost
from fencepost.errors import FenceMisused, TokenStale
from fencepost.fence import admit, record_item
from mariaplace import KINDS, Place, emptied
from servers import Postgres, shared

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fencepost import Lease
    from fencepost.running import AsyncRun, Run

DRIVERS = {"aiomysql": aiomysql, "asyncmy": asyncmy}
EFFECT = "CREATE TABLE effect (token BIGINT NOT NULL)"


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=KINDS)
def database(request: pytest.FixtureRequest) -> Place:
    """Return a database that has the tables of fences and one of its own."""
    place = emptied(request.param, request.node.nodeid)
    for create in (fence_mariadb.CREATE_GUARD, fence_mariadb.CREATE_DONE, EFFECT):
        place.run(create)
    return place


@asynccontextmanager
async def connected(driver: str, database: Place, **settings: Any) -> AsyncIterator[Any]:
    conn = await DRIVERS[driver].connect(
        host="127.0.0.1",
        port=database.port,
        user="post",
        password="secret",
        db=database.name,
        **settings,
    )
    try:
        yield conn
    finally:
        await conn.ensure_closed()


async def write(conn: Any, token: int) -> None:
    async with conn.cursor() as cursor:
        await cursor.execute("INSERT INTO effect VALUES (%s)", (token,))


def effects(database: Place) -> list[Any]:
    rows = database.server.run(f"SELECT token FROM `{database}`.effect ORDER BY token")
    return [token for (token,) in rows]


def test_a_newer_token_is_admitted_and_an_older_one_refused(driver: str, database: Place) -> None:
    async def transact() -> None:
        async with connected(driver, database) as conn:
            for token in (5, 5, 9):
                await admit(conn, resource="r", token=token)
                await write(conn, token)
                await conn.commit()
            with pytest.raises(TokenStale) as caught:
                await admit(conn, resource="r", token=8)
            assert caught.value.highest == 9
            await conn.rollback()
            await admit(conn, resource="other", token=1)
            await conn.commit()

    asyncio.run(transact())
    assert effects(database) == [5, 5, 9]


def test_a_lease_fences_a_transaction_of_any_driver(
    driver: str, database: Place, lease: Lease
) -> None:
    async def transact() -> None:
        async with connected(driver, database) as conn:
            await lease.fence(conn)
            await conn.commit()

    asyncio.run(transact())
    rows = database.server.run(f"SELECT token FROM `{database}`.fencepost_guard")
    assert rows == [(lease.token,)]


def test_the_older_transaction_waits_for_the_newer_one_and_is_refused(
    driver: str, database: Place
) -> None:
    async def race() -> None:
        async with connected(driver, database) as newer, connected(driver, database) as older:
            await admit(newer, resource="r", token=1)
            await newer.commit()
            await admit(newer, resource="r", token=7)  # and is still open
            await write(newer, 7)
            async with older.cursor() as cursor:
                await cursor.execute("SELECT count(*) FROM effect")  # its view is from here
            late = asyncio.ensure_future(admit(older, resource="r", token=6))
            while not await asyncio.to_thread(_blocked, database):
                assert not late.done()
            await newer.commit()
            with pytest.raises(TokenStale):
                await late

    asyncio.run(race())
    assert effects(database) == [7]


def _blocked(database: Place) -> bool:
    return bool(
        database.server.run(
            "SELECT 1 FROM information_schema.processlist"
            f" WHERE db = '{database}' AND info LIKE '%INSERT INTO fencepost_guard%'"
            " AND info NOT LIKE '%processlist%'"
        )
    )


def test_a_fence_that_nobody_awaits_closes_the_connection(driver: str, database: Place) -> None:
    async def forget() -> None:
        async with connected(driver, database) as conn:
            await write(conn, 7)
            admit(conn, resource="r", token=1)
            gc.collect()
            with pytest.raises(Exception, match=r"(?i)not connected|gone away"):
                await conn.commit()

    asyncio.run(forget())
    assert effects(database) == []


def test_where_each_statement_commits_by_itself_a_fence_is_refused(
    driver: str, database: Place
) -> None:
    async def misuse() -> None:
        async with connected(driver, database, autocommit=True) as conn:
            with pytest.raises(FenceMisused, match=r"begin with await conn\.begin\(\)"):
                admit(conn, resource="r", token=1)
            await conn.begin()
            await admit(conn, resource="r", token=1)
            await conn.commit()
            with pytest.raises(FenceMisused, match=r"would commit each statement"):
                admit(conn, resource="r", token=1)
            await conn.begin()
            fencing = admit(conn, resource="r", token=1)
            await conn.rollback()
            with pytest.raises(FenceMisused, match=r"would commit each statement"):
                await fencing
        with pytest.raises(FenceMisused, match="closed"):
            admit(conn, resource="r", token=1)

    asyncio.run(misuse())


def test_a_cursor_class_of_the_users_changes_nothing(driver: str, database: Place) -> None:
    dictionaries = DRIVERS[driver].cursors.DictCursor
    settings = {"cursorclass" if driver == "aiomysql" else "cursor_cls": dictionaries}

    async def transact() -> None:
        async with connected(driver, database, **settings) as conn:
            await admit(conn, resource="r", token=1)
            assert await record_item(conn, scope="s", item="i", token=1)
            assert not await record_item(conn, scope="s", item="i", token=1)

    asyncio.run(transact())


def test_a_database_without_the_tables_says_how_to_make_them(driver: str, database: Place) -> None:
    for table in ("guard", "done"):
        database.server.run(f"DROP TABLE `{database}`.fencepost_{table}")

    async def ask() -> None:
        async with connected(driver, database) as conn:
            with pytest.raises(FenceMisused, match="CREATE TABLE IF NOT EXISTS fencepost_guard"):
                await admit(conn, resource="r", token=1)
            with pytest.raises(FenceMisused, match="CREATE TABLE IF NOT EXISTS fencepost_done"):
                await record_item(conn, scope="s", item="i", token=1)

    asyncio.run(ask())


def test_a_connection_from_a_pool_is_guarded(database: Place, lease: Lease) -> None:
    async def transact() -> None:
        pool = await aiomysql.create_pool(
            host="127.0.0.1",
            port=database.port,
            user="post",
            password="secret",
            db=database.name,
        )
        async with pool.acquire() as conn:
            await lease.fence(conn)
            await write(conn, 1)
            await conn.commit()
        pool.close()
        await pool.wait_closed()

    asyncio.run(transact())
    assert effects(database) == [1]


def test_sqlalchemys_async_connection_is_refused_also_inside_of_run_sync(
    driver: str, database: Place, lease: Lease
) -> None:
    address = f"post:secret@127.0.0.1:{database.port}/{database}"

    async def both_ways() -> None:
        engine = create_async_engine(f"mysql+{driver}://{address}")
        async with engine.connect() as conn:
            with pytest.raises(FenceMisused, match=r"asyncio\.to_thread"):
                lease.fence(conn)
            with pytest.raises(FenceMisused, match=r"asyncio\.to_thread"):
                await conn.run_sync(lease.fence)
        await engine.dispose()

    asyncio.run(both_ways())


# Items.


@asynccontextmanager
async def kept_in(where: str, database: Place) -> AsyncIterator[Any]:
    """Connect to a database with the tables of fences, by any of the async drivers."""
    if where != "psycopg":
        async with connected(where, database) as conn:
            yield conn
        return
    url = shared(Postgres).database(database.name)
    async with await psycopg.AsyncConnection.connect(url) as conn:
        for create in (fence_postgres.CREATE_GUARD, fence_postgres.CREATE_DONE):
            await conn.execute(create)
        await conn.execute("CREATE TABLE IF NOT EXISTS effect (token BIGINT NOT NULL)")
        await conn.commit()
        yield conn


async def count(conn: Any) -> int:
    cursor = conn.cursor()
    if hasattr(cursor, "__await__") and not hasattr(cursor, "execute"):
        cursor = await cursor
    await cursor.execute("SELECT count(*) FROM effect")
    [[number]] = await cursor.fetchall()
    return int(number)


@pytest.mark.parametrize("where", [*DRIVERS, "psycopg"])
def test_effect_and_item_commit_together_or_neither_does(where: str, database: Place) -> None:
    seen: list[bool] = []

    async def run_it() -> None:
        async with (
            AsyncFencepost(f"memory://{database}") as fp,
            kept_in(where, database) as conn,
        ):

            @fp.job(f"post-{where}", retry=None)
            async def post(run: AsyncRun) -> None:
                for commits in (False, True, True):
                    async with run.once("one", conn=conn) as first:
                        seen.append(bool(first))
                        if first:
                            async with conn.cursor() as cursor:
                                await cursor.execute("INSERT INTO effect VALUES (1)")
                    await (conn.commit() if commits else conn.rollback())

            await fp.trigger(post, "2026-01-20T02:00:00Z")
            assert await count(conn) == 1

    asyncio.run(run_it())
    assert seen == [True, True, False]


def test_a_body_that_is_not_async_is_told_to_await(driver: str, database: Place) -> None:
    loop = asyncio.new_event_loop()
    conn = loop.run_until_complete(
        DRIVERS[driver].connect(
            host="127.0.0.1",
            port=database.port,
            user="post",
            password="secret",
            db=database.name,
        )
    )
    try:
        with Fencepost(f"memory://{database}") as fp:

            @fp.job(f"post-{driver}")
            def post(run: Run) -> None:
                with (
                    pytest.raises(FenceMisused, match="async with"),
                    run.once("one", conn=conn),
                ):
                    raise AssertionError("it was refused")

            assert fp.trigger(post, "2026-01-20T02:00:00Z")
    finally:
        loop.run_until_complete(conn.ensure_closed())
        loop.close()
