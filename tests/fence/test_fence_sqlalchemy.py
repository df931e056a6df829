"""``lease.fence(conn)`` on SQLAlchemy: the same guarantee, for connections and sessions."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from fencepost import TokenStale
from fencepost.errors import FenceMisused
from fencepost.fence import admit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fencepost import Lease

INSERT = text("INSERT INTO effect (token) VALUES (:token)")
COUNT = text("SELECT count(*) FROM effect")
HIGHEST = text("SELECT max(token) FROM fencepost_guard")


@pytest.fixture
def engine(database: str) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{database}")
    yield engine
    engine.dispose()


def outcome(engine: Engine) -> tuple[int, int | None]:
    """Return how many effects were committed, and the highest token."""
    with engine.connect() as conn:
        return conn.execute(COUNT).scalar_one(), conn.execute(HIGHEST).scalar_one()


def begin_by_itself(engine: Engine, statement: str) -> None:
    """Follow SQLAlchemy's recipe by which it emits BEGIN itself."""

    @event.listens_for(engine, "connect")
    def leave_it_to_us(driver: Any, _record: object) -> None:
        driver.isolation_level = None

    @event.listens_for(engine, "begin")
    def begin(conn: Any) -> None:
        conn.exec_driver_sql(statement)


def test_a_transaction_that_begins_immediately_is_guarded_and_committed(
    engine: Engine, lease: Lease
) -> None:
    with engine.begin() as conn:
        conn.exec_driver_sql("BEGIN IMMEDIATE")
        lease.fence(conn)
        conn.execute(INSERT, {"token": lease.token})
    assert outcome(engine) == (1, lease.token)


def test_what_is_rolled_back_takes_the_fence_with_it(engine: Engine, lease: Lease) -> None:
    with engine.connect() as conn:
        conn.exec_driver_sql("BEGIN IMMEDIATE")
        lease.fence(conn)
        conn.execute(INSERT, {"token": lease.token})
        conn.rollback()
    assert outcome(engine) == (0, None)


def test_a_stale_token_undoes_the_whole_block(engine: Engine) -> None:
    with engine.begin() as conn:
        conn.exec_driver_sql("BEGIN IMMEDIATE")
        admit(conn, resource="r", token=2)

    def zombie() -> None:
        with engine.begin() as conn:
            conn.exec_driver_sql("BEGIN IMMEDIATE")
            conn.execute(INSERT, {"token": 1})
            admit(conn, resource="r", token=1)

    with pytest.raises(TokenStale):
        zombie()
    assert outcome(engine) == (0, 2)


def test_a_successor_sees_what_its_predecessor_committed_and_then_shuts_it_out(
    engine: Engine,
) -> None:
    def transaction(token: int) -> int:
        with Session(engine) as session, session.begin():
            session.connection().exec_driver_sql("BEGIN IMMEDIATE")
            admit(session, resource="r", token=token)
            seen = session.execute(COUNT).scalar_one()
            session.execute(INSERT, {"token": token})
            return int(seen)

    assert [transaction(token) for token in (1, 1, 2)] == [0, 1, 2]
    with pytest.raises(TokenStale):
        transaction(1)
    assert outcome(engine) == (3, 2)


def test_a_session_is_guarded_and_committed(engine: Engine, lease: Lease) -> None:
    with Session(engine) as session, session.begin():
        session.connection().exec_driver_sql("BEGIN IMMEDIATE")
        lease.fence(session)
        session.execute(INSERT, {"token": lease.token})
    assert outcome(engine) == (1, lease.token)


def test_a_session_of_ones_own_class_is_guarded(engine: Engine, lease: Lease) -> None:
    class Ours(Session):
        pass

    with Ours(engine) as session, session.begin():
        session.connection().exec_driver_sql("BEGIN IMMEDIATE")
        lease.fence(session)
    assert outcome(engine) == (0, lease.token)


def test_a_scoped_session_is_guarded(engine: Engine, lease: Lease) -> None:
    session = scoped_session(sessionmaker(engine))
    session.connection().exec_driver_sql("BEGIN IMMEDIATE")
    lease.fence(session)
    session.commit()
    session.remove()
    assert outcome(engine) == (0, lease.token)


@pytest.mark.parametrize("statement", ["BEGIN", "BEGIN IMMEDIATE"])
def test_an_engine_that_begins_by_itself_is_guarded(
    engine: Engine, lease: Lease, statement: str
) -> None:
    begin_by_itself(engine, statement)
    with engine.begin() as conn:
        lease.fence(conn)
        conn.execute(INSERT, {"token": lease.token})
    with Session(engine) as session, session.begin():
        lease.fence(session)
        session.execute(INSERT, {"token": lease.token})
    assert outcome(engine) == (2, lease.token)


def test_a_read_before_the_fence_of_a_deferred_transaction_is_refused(
    engine: Engine, lease: Lease
) -> None:
    begin_by_itself(engine, "BEGIN")
    with engine.connect() as conn:
        conn.execute(COUNT).scalar_one()
        with pytest.raises(FenceMisused, match="before the first read"):
            lease.fence(conn)


@pytest.mark.since(3, 12)  # when autocommit= came
def test_an_engine_without_autocommit_fences_first(database: str, lease: Lease) -> None:
    engine = create_engine(f"sqlite:///{database}", connect_args={"autocommit": False})
    with engine.begin() as conn:
        lease.fence(conn)
        conn.execute(INSERT, {"token": lease.token})
    with Session(engine) as session, session.begin():
        lease.fence(session)
        session.execute(INSERT, {"token": lease.token})
    assert outcome(engine) == (2, lease.token)
    engine.dispose()


def test_a_transaction_that_the_driver_has_not_begun_is_refused_with_what_to_write(
    engine: Engine, lease: Lease
) -> None:
    with (
        engine.begin() as conn,
        pytest.raises(FenceMisused, match=r'with conn\.exec_driver_sql\("BEGIN IMMEDIATE"\)'),
    ):
        lease.fence(conn)


def test_a_session_is_told_what_a_session_can_write(engine: Engine, lease: Lease) -> None:
    advice = r'with session\.connection\(\)\.exec_driver_sql\("BEGIN IMMEDIATE"\)'
    with Session(engine) as session, pytest.raises(FenceMisused, match=advice):
        lease.fence(session)


def test_a_connection_in_autocommit_mode_is_refused(engine: Engine, lease: Lease) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        conn.execute(INSERT, {"token": 1})
        with pytest.raises(FenceMisused, match="needs an open transaction"):
            lease.fence(conn)


def test_a_closed_connection_is_refused(engine: Engine, lease: Lease) -> None:
    with engine.connect() as conn:
        pass
    with pytest.raises(FenceMisused, match="closed"):
        lease.fence(conn)


def test_a_transaction_that_has_ended_is_refused(engine: Engine, lease: Lease) -> None:
    with engine.connect() as conn:
        with conn.begin():
            conn.exec_driver_sql("BEGIN IMMEDIATE")
        with pytest.raises(FenceMisused, match="needs an open transaction"):
            lease.fence(conn)


def test_a_session_whose_transaction_has_ended_is_refused(engine: Engine, lease: Lease) -> None:
    with Session(engine) as session, session.begin():
        session.connection().exec_driver_sql("BEGIN IMMEDIATE")
        session.commit()
        with pytest.raises(FenceMisused, match="needs an open transaction"):
            lease.fence(session)


@pytest.mark.parametrize("module", ["engine", "session"])
def test_an_async_connection_is_refused_with_a_way_out(lease: Lease, module: str) -> None:
    kind = type("Async", (), {"__module__": f"sqlalchemy.ext.asyncio.{module}"})
    with pytest.raises(FenceMisused, match=r"asyncio\.to_thread"):
        lease.fence(kind())


def test_an_async_connection_is_recognised_from_inside_of_run_sync(
    database: str, lease: Lease
) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    async def both_ways() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{database}")
        async with engine.connect() as conn:
            with pytest.raises(FenceMisused, match=r"asyncio\.to_thread"):
                lease.fence(conn)
            with pytest.raises(FenceMisused, match=r"asyncio\.to_thread"):
                await conn.run_sync(lease.fence)
        await engine.dispose()

    asyncio.run(both_ways())


def test_an_engine_is_not_a_connection(engine: Engine, lease: Lease) -> None:
    with pytest.raises(FenceMisused, match="give it a sqlite3 or SQLAlchemy connection"):
        lease.fence(engine)
