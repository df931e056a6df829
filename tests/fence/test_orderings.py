"""The orderings that docs/fencing.md promises, over every way two holders' steps can interleave.

A *zombie* and its *successor* have a connection each to one real file. A schedule says whose
turn it is; a holder that finds the file busy goes back to the beginning of its transaction, or
tries again where that is allowed: at its ``BEGIN`` and its ``COMMIT``.
"""

from __future__ import annotations

import itertools
import random
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from fencepost import TokenStale
from fencepost.fence import CREATE_GUARD, admit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

ZOMBIE, SUCCESSOR = 1, 2  # their tokens
SEEDS = 1000


@dataclass
class Holder:
    """Carries out a list of steps on its own connection, and says what it saw."""

    token: int
    conn: sqlite3.Connection
    steps: list[str]
    resource: str
    done: int = 0

    def step(self, history: History) -> None:
        """Do the next step if the file is free for it."""
        if self.done == len(self.steps):
            return
        word = self.steps[self.done]
        try:
            self._do(word, history)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            history.trace.append((self.token, "busy"))
            if word == "fence":
                self.conn.execute("ROLLBACK")
                self.done -= 1
            return
        except TokenStale:
            self.conn.execute("ROLLBACK")
            history.trace.append((self.token, "stale"))
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
                "SELECT token FROM effect WHERE resource = ? ORDER BY id", (self.resource,)
            )
            history.seen.append(([row[0] for row in found], list(history.commits)))
        elif word == "write":
            self.conn.execute(
                "INSERT INTO effect (resource, token) VALUES (?, ?)", (self.resource, self.token)
            )
        else:
            self.conn.execute(word)
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


class Table:
    """A database file with two connections to it."""

    def __init__(self, path: Path, *, journal: str, leaving: ExitStack) -> None:
        self._conns = [
            leaving.enter_context(closing(sqlite3.connect(path, timeout=0, isolation_level=None)))
            for _ in range(2)
        ]
        for conn in self._conns:
            conn.execute(f"PRAGMA journal_mode={journal}")
            conn.execute("PRAGMA synchronous=OFF")  # no power is cut here
        conn.execute(CREATE_GUARD)
        conn.execute(
            "CREATE TABLE effect (id INTEGER PRIMARY KEY, resource TEXT NOT NULL, token INTEGER)"
        )
        self._plays = itertools.count()

    def play(self, zombie: list[str], successor: list[str], *, turns: Iterable[int]) -> History:
        """Let both go through their steps in the order of ``turns``, and then to their end."""
        resource, history = f"play-{next(self._plays)}", History()
        holders = {
            token: Holder(token, conn, steps, resource)
            for token, conn, steps in zip(
                (ZOMBIE, SUCCESSOR), self._conns, (zombie, successor), strict=True
            )
        }
        for turn in turns:
            holders[turn].step(history)
        for _ in range(100):
            if all(holder.done == len(holder.steps) for holder in holders.values()):
                return history
            for holder in holders.values():
                holder.step(history)
        raise AssertionError(f"nobody could go on: {history.trace}")


@pytest.fixture(params=["WAL", "DELETE"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Table]:
    with ExitStack() as leaving:
        yield Table(tmp_path / "app.db", journal=request.param, leaving=leaving)


def every_schedule(zombie_steps: int, successor_steps: int) -> Iterator[list[int]]:
    """Yield every order in which the turns of the two can come."""
    total = zombie_steps + successor_steps
    for places in itertools.combinations(range(total), zombie_steps):
        yield [ZOMBIE if place in places else SUCCESSOR for place in range(total)]


@pytest.mark.parametrize("begin", ["BEGIN IMMEDIATE", "BEGIN"])
def test_no_interleaving_lets_a_zombie_commit_after_its_successor(table: Table, begin: str) -> None:
    zombie = [begin, "fence", "write", "COMMIT"]
    successor = [begin, "fence", "read", "write", "COMMIT"]
    for turns in every_schedule(len(zombie), len(successor)):
        table.play(zombie, successor, turns=turns).check()


def transactions(dice: random.Random, *, fenced: bool = True) -> list[str]:
    """Return the steps of one to three transactions, some of which are rolled back."""
    steps: list[str] = []
    for _ in range(dice.randint(1, 3)):
        steps.append(dice.choice(["BEGIN IMMEDIATE", "BEGIN"]) if fenced else "BEGIN IMMEDIATE")
        steps += ["fence", "read", "write"] if fenced else ["write"]
        steps.append("ROLLBACK" if dice.random() < 0.2 else "COMMIT")
    return steps


def random_play(table: Table, seed: int, *, zombie_fences: bool = True) -> History:
    dice = random.Random(seed)
    zombie = transactions(dice, fenced=zombie_fences)
    successor = transactions(dice)
    eager = dice.uniform(0.2, 0.8)
    count = 2 * (len(zombie) + len(successor))
    turns = [ZOMBIE if dice.random() < eager else SUCCESSOR for _ in range(count)]
    return table.play(zombie, successor, turns=turns)


def test_the_orderings_hold_in_a_thousand_interleavings(table: Table) -> None:
    traces = set()
    for seed in range(SEEDS):
        history = random_play(table, seed)
        history.check()
        traces.add(tuple(history.trace))
    assert len(traces) > 0.9 * SEEDS


def test_without_the_zombies_fence_the_same_interleavings_break_the_promise(table: Table) -> None:
    histories = [random_play(table, seed, zombie_fences=False) for seed in range(100)]
    assert any(history.commits != sorted(history.commits) for history in histories)


PROGRAM = textwrap.dedent("""
    import sqlite3, sys
    from fencepost import TokenStale
    from fencepost.fence import admit

    path, token, most = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    conn = sqlite3.connect(path, timeout=0, isolation_level=None)

    def begin():  # SQLite's own patience sleeps so long between tries that some holders starve
        while not conn.in_transaction:
            try:
                conn.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                assert error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY

    for number in range(most):
        begin()
        try:
            admit(conn, resource="r", token=token)
        except TokenStale:
            conn.execute("ROLLBACK")
            print("stale", flush=True)
            sys.exit()
        conn.execute("INSERT INTO effect (token) VALUES (?)", (token,))
        conn.execute("COMMIT")
        if number == 0:
            print("at work", flush=True)
    print("undisturbed", flush=True)
""")


@pytest.mark.parametrize("round_number", range(3))
def test_processes_are_shut_out_by_the_first_commit_of_their_successor(
    database: str, round_number: int
) -> None:
    ending = {1: "stale", 2: "stale", 3: "stale", 4: "undisturbed"}
    holders: dict[int, subprocess.Popen[str]] = {}
    with ExitStack() as leaving:
        for token, end in ending.items():
            most = "1000000" if end == "stale" else "200"
            holders[token] = leaving.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, database, str(token), most],
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            leaving.callback(holders[token].kill)
            output = holders[token].stdout
            assert output is not None
            assert output.readline() == "at work\n"
        endings = {token: holder.communicate(timeout=60)[0] for token, holder in holders.items()}
    assert endings == {token: f"{end}\n" for token, end in ending.items()}
    with closing(sqlite3.connect(database)) as conn:
        committed = [row[0] for row in conn.execute("SELECT token FROM effect ORDER BY id")]
    assert committed == sorted(committed)
    assert set(committed) == set(ending)
