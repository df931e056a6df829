"""``lease.fence(conn)`` on a real PostgreSQL: misuse, and every order of two holders' steps."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import errors
from sqlalchemy import create_engine, text

from fencepost import Fencepost, TokenStale
from fencepost.cli.main import main
from fencepost.errors import FenceMisused
from fencepost.fence import admit, record_item
from fencepost.fence_postgres import CREATE_DONE, CREATE_GUARD
from servers import Postgres, shared

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ZOMBIE, SUCCESSOR = 1, 2  # their tokens
SEEDS = 150
_plays = itertools.count()


@pytest.fixture(scope="module")
def url() -> str:
    """Return a database with the tables that fences need."""
    found = shared(Postgres).database("fences")
    with psycopg.connect(found, autocommit=True) as db:
        db.execute(CREATE_GUARD)
        db.execute(CREATE_DONE)
        db.execute(
            "CREATE TABLE IF NOT EXISTS effect (id bigserial PRIMARY KEY, resource text, token int)"
        )
    return found


@pytest.fixture
def conn(url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(url) as conn:
        yield conn


@pytest.fixture
def resource() -> str:
    return f"resource-{next(_plays)}"


# What it does.


def test_a_zombie_is_refused_once_its_successor_has_been_there(
    conn: psycopg.Connection, resource: str
) -> None:
    admit(conn, resource=resource, token=SUCCESSOR)
    conn.commit()
    with pytest.raises(TokenStale) as caught:
        admit(conn, resource=resource, token=ZOMBIE)
    assert (caught.value.token, caught.value.highest) == (ZOMBIE, SUCCESSOR)


def test_a_lease_guards_a_transaction_and_the_same_holder_may_come_again(
    url: str, conn: psycopg.Connection
) -> None:
    with Fencepost("memory://fences") as fp, fp.lock("job") as lease:
        for _ in range(2):
            with conn.transaction():
                lease.fence(conn)
                conn.execute("INSERT INTO effect (resource) VALUES ('x')")
    found = conn.execute("SELECT token FROM fencepost_guard WHERE resource LIKE '%job'").fetchall()
    assert found == [(lease.token,)]


def test_a_rolled_back_fence_has_never_been(conn: psycopg.Connection, resource: str) -> None:
    admit(conn, resource=resource, token=SUCCESSOR)
    conn.rollback()
    admit(conn, resource=resource, token=ZOMBIE)


def test_a_zombie_that_came_first_makes_its_successor_wait(url: str, resource: str) -> None:
    with psycopg.connect(url) as zombie, psycopg.connect(url) as successor:
        admit(zombie, resource=resource, token=ZOMBIE)
        zombie.execute("INSERT INTO effect (resource, token) VALUES (%s, 1)", (resource,))
        seen: list[object] = []

        def follow() -> None:
            admit(successor, resource=resource, token=SUCCESSOR)
            found = successor.execute("SELECT token FROM effect WHERE resource = %s", (resource,))
            seen.extend(found.fetchall())

        following = threading.Thread(target=follow)
        following.start()
        _until_somebody_waits(url)
        assert not seen
        zombie.commit()
        following.join(10)
        assert seen == [(1,)], "what it committed before is there for its successor to see"


def _until_somebody_waits(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as db:
        question = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        while db.execute(question).fetchone() == (0,):
            time.sleep(0.002)


def test_items_live_and_die_with_the_transaction(conn: psycopg.Connection, resource: str) -> None:
    admit(conn, resource=resource, token=1)
    assert record_item(conn, scope=resource, item="a", token=1)
    assert not record_item(conn, scope=resource, item="a", token=1)
    conn.rollback()
    assert record_item(conn, scope=resource, item="a", token=1)


def test_names_longer_than_an_index_entry_are_told_apart(conn: psycopg.Connection) -> None:
    for end in ("a", "b"):
        admit(conn, resource="💾" * 1000 + end, token=1 if end == "b" else 2)


def test_sqlalchemy_connections_and_sessions_are_guarded(url: str, resource: str) -> None:
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as conn:
        admit(conn, resource=resource, token=SUCCESSOR)
        conn.execute(text("INSERT INTO effect (token) VALUES (2)"))
    with engine.connect() as conn, pytest.raises(TokenStale):
        admit(conn, resource=resource, token=ZOMBIE)
    apart = engine.execution_options(isolation_level="AUTOCOMMIT")
    with apart.connect() as conn, pytest.raises(FenceMisused, match="would commit each statement"):
        admit(conn, resource=resource, token=SUCCESSOR)
    engine.dispose()


# Async connections.


def test_an_async_connection_is_guarded_by_an_awaited_fence(url: str, resource: str) -> None:
    async def transact() -> None:
        with Fencepost("memory://fences") as fp, fp.lock("async") as lease:
            async with await psycopg.AsyncConnection.connect(url) as conn:
                async with conn.transaction():
                    await lease.fence(conn, resource=resource)
                    await conn.execute("INSERT INTO effect (token) VALUES (1)")
                async with conn.transaction():
                    with pytest.raises(TokenStale):
                        await admit(conn, resource=resource, token=ZOMBIE)
                await conn.execute("SELECT count(*) FROM effect")
                with pytest.raises(FenceMisused, match="before the first read"):
                    await lease.fence(conn, resource=resource + " late")

    asyncio.run(transact())


def test_two_tasks_that_fence_one_resource_do_not_stop_each_others_loop(
    url: str, resource: str
) -> None:
    order: list[int] = []

    async def hold(token: int, fenced: asyncio.Event) -> None:
        async with await psycopg.AsyncConnection.connect(url) as conn:
            await admit(conn, resource=resource, token=token)
            order.append(token)
            fenced.set()
            await asyncio.sleep(0.05)

    async def both() -> None:
        first = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(hold(ZOMBIE, first))
            await first.wait()
            tasks.create_task(hold(SUCCESSOR, asyncio.Event()))

    asyncio.run(both())
    assert order == [ZOMBIE, SUCCESSOR]


def test_a_fence_that_nobody_awaits_closes_the_connection(url: str, resource: str) -> None:
    async def forget() -> None:
        conn = await psycopg.AsyncConnection.connect(url)
        await conn.execute("INSERT INTO effect (token) VALUES (7)")
        admit(conn, resource=resource, token=1)
        with pytest.raises(psycopg.OperationalError):
            await conn.commit()

    asyncio.run(forget())


def test_an_async_connection_in_autocommit_is_refused(url: str, resource: str) -> None:
    async def refuse() -> None:
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
            with pytest.raises(FenceMisused, match="would commit each statement"):
                await admit(conn, resource=resource, token=1)

    asyncio.run(refuse())


# Misuse.


def test_autocommit_is_refused_outside_of_a_transaction(url: str, resource: str) -> None:
    with psycopg.connect(url, autocommit=True) as conn:
        with pytest.raises(FenceMisused, match="would commit each statement by itself"):
            admit(conn, resource=resource, token=1)
        with conn.transaction():
            admit(conn, resource=resource, token=1)


def test_a_failed_transaction_is_refused(conn: psycopg.Connection, resource: str) -> None:
    with pytest.raises(errors.DivisionByZero):
        conn.execute("SELECT 1/0")
    with pytest.raises(FenceMisused, match="has failed"):
        admit(conn, resource=resource, token=1)


def test_a_closed_connection_is_refused(url: str, resource: str) -> None:
    conn = psycopg.connect(url)
    conn.close()
    with pytest.raises(FenceMisused, match="closed"):
        admit(conn, resource=resource, token=1)


def test_a_fence_after_a_plain_read_is_refused(conn: psycopg.Connection, resource: str) -> None:
    conn.execute("SELECT count(*) FROM effect")
    with pytest.raises(FenceMisused, match="before the first read"):
        admit(conn, resource=resource, token=1)


def test_a_fence_after_a_locking_read_a_write_or_a_fence_is_fine(
    conn: psycopg.Connection, resource: str
) -> None:
    conn.execute("SELECT id FROM effect FOR UPDATE")
    admit(conn, resource=resource, token=1)
    conn.rollback()
    conn.execute("INSERT INTO effect (token) VALUES (1)")
    admit(conn, resource=resource, token=1)
    conn.execute("SELECT count(*) FROM effect")
    admit(conn, resource=resource, token=1)


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_at_higher_levels_a_read_before_the_fence_is_judged_by_the_server(
    url: str, resource: str, level: str
) -> None:
    with psycopg.connect(url) as zombie, psycopg.connect(url) as successor:
        zombie.execute(f"SET TRANSACTION ISOLATION LEVEL {level}".encode())
        zombie.execute("SELECT count(*) FROM effect")
        admit(successor, resource=resource, token=SUCCESSOR)
        successor.commit()
        with pytest.raises((errors.SerializationFailure, TokenStale)):
            admit(zombie, resource=resource, token=ZOMBIE)


def test_a_missing_table_is_told_with_the_statement_that_makes_it() -> None:
    told = pytest.raises(FenceMisused, match="CREATE TABLE IF NOT EXISTS fencepost_guard")
    with psycopg.connect(shared(Postgres).url()) as conn, told:
        admit(conn, resource="x", token=1)


def test_migrate_makes_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    url = shared(Postgres).database("guarded")
    assert main(["migrate", "--guard", url, "--sql"]) == 0
    assert "bytea" in capsys.readouterr().out
    assert main(["migrate", "--guard", url]) == 0
    with psycopg.connect(url) as conn:
        admit(conn, resource="x", token=1)
        assert record_item(conn, scope="x", item="y", token=1)


# Interleavings.


@dataclass
class Holder:
    """Carries out a list of steps on its own connection, and says what it saw."""

    token: int
    conn: psycopg.Connection
    steps: list[str]
    resource: str
    done: int = 0

    def step(self, history: History) -> None:
        """Do the next step; whoever finds a row locked begins its transaction anew."""
        if self.done == len(self.steps):
            return
        word = self.steps[self.done]
        try:
            self._do(word, history)
        except (errors.LockNotAvailable, errors.SerializationFailure):
            history.trace.append((self.token, "again"))
            self.conn.rollback()
            while not self.steps[self.done].startswith("BEGIN"):
                self.done -= 1
            return
        except TokenStale:
            history.trace.append((self.token, "stale"))
            self.conn.rollback()
            while self.steps[self.done] not in ("COMMIT", "ROLLBACK"):
                self.done += 1
        else:
            history.trace.append((self.token, word))
        self.done += 1

    def _do(self, word: str, history: History) -> None:
        if word == "fence":
            admit(self.conn, resource=self.resource, token=self.token)
        elif word == "read":
            found = self.conn.execute(
                "SELECT token FROM effect WHERE resource = %s ORDER BY id", (self.resource,)
            )
            history.seen.append(([row[0] for row in found], list(history.commits)))
        elif word == "write":
            self.conn.execute(
                "INSERT INTO effect (resource, token) VALUES (%s, %s)", (self.resource, self.token)
            )
        else:
            self.conn.execute(word.encode())
            if word == "COMMIT":
                history.commits.append(self.token)


@dataclass
class History:
    trace: list[tuple[int, str]] = field(default_factory=list)
    commits: list[int] = field(default_factory=list)
    seen: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def check(self) -> None:
        """Assert the two promises."""
        assert self.commits == sorted(self.commits), self.trace
        for found, committed in self.seen:
            assert found == committed, self.trace


@pytest.fixture
def pair(url: str) -> Iterator[list[psycopg.Connection]]:
    with ExitStack() as stack:
        pair = [stack.enter_context(psycopg.connect(url, autocommit=True)) for _ in range(2)]
        for conn in pair:
            conn.execute("SET lock_timeout = '4ms'")
            conn.execute("SET synchronous_commit = off")  # no power is cut here
        yield pair


def play(
    pair: list[psycopg.Connection], zombie: list[str], successor: list[str], turns: Iterable[int]
) -> History:
    """Let both go through their steps in the order of ``turns``, and then to their end."""
    resource, history = f"play-{next(_plays)}", History()
    holders = {
        token: Holder(token, conn, steps, resource)
        for token, conn, steps in zip((ZOMBIE, SUCCESSOR), pair, (zombie, successor), strict=True)
    }
    for turn in turns:
        holders[turn].step(history)
    for _ in range(100):
        if all(holder.done == len(holder.steps) for holder in holders.values()):
            return history
        for holder in holders.values():
            holder.step(history)
    raise AssertionError(f"nobody could go on: {history.trace}")


LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]


@pytest.mark.parametrize("level", LEVELS)
def test_no_interleaving_lets_a_zombie_commit_after_its_successor(
    pair: list[psycopg.Connection], level: str
) -> None:
    begin = f"BEGIN ISOLATION LEVEL {level}"
    zombie = [begin, "fence", "write", "COMMIT"]
    successor = [begin, "fence", "read", "write", "COMMIT"]
    total = len(zombie) + len(successor)
    for places in itertools.combinations(range(total), len(zombie)):
        turns = [ZOMBIE if place in places else SUCCESSOR for place in range(total)]
        play(pair, zombie, successor, turns).check()


def transactions(dice: random.Random, *, fenced: bool = True) -> list[str]:
    """Return the steps of one to three transactions, some of which are rolled back."""
    steps: list[str] = []
    for _ in range(dice.randint(1, 3)):
        steps.append(f"BEGIN ISOLATION LEVEL {dice.choice(LEVELS)}")
        steps += ["fence", "read", "write"] if fenced else ["write"]
        steps.append("ROLLBACK" if dice.random() < 0.2 else "COMMIT")
    return steps


def random_play(pair: list[psycopg.Connection], seed: int, *, zombie_fences: bool) -> History:
    dice = random.Random(seed)
    zombie, successor = transactions(dice, fenced=zombie_fences), transactions(dice)
    eager = dice.uniform(0.2, 0.8)
    count = 2 * (len(zombie) + len(successor))
    turns = [ZOMBIE if dice.random() < eager else SUCCESSOR for _ in range(count)]
    return play(pair, zombie, successor, turns)


def test_the_orderings_hold_in_many_random_interleavings(pair: list[psycopg.Connection]) -> None:
    traces = set()
    for seed in range(SEEDS):
        history = random_play(pair, seed, zombie_fences=True)
        history.check()
        traces.add(tuple(history.trace))
    assert len(traces) > 0.9 * SEEDS


def test_without_the_zombies_fence_the_same_interleavings_break_the_promise(
    pair: list[psycopg.Connection],
) -> None:
    histories = [random_play(pair, seed, zombie_fences=False) for seed in range(60)]
    assert any(history.commits != sorted(history.commits) for history in histories)
