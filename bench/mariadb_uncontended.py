"""What a free lock costs on MariaDB: ``with fp.lock("x"): pass`` beside two raw statements.

The floor is PyMySQL with two UPDATEs of one row, each its own transaction: one that takes the lease
and counts a token, one that gives it back. One server flushes its log at each commit, as it should;
for that one there is a target. The other does so once a second, to show what we add.

    python bench/mariadb_uncontended.py [--quick]
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import harness
from fencepost import Fencepost

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "tests", "kit"))
import pymysql

from servers import MariaDB

if TYPE_CHECKING:
    from collections.abc import Callable

TARGET = harness.Target(at_most=1.15)
OURS, FLOOR = "fencepost: with lock", "floor: two raw UPDATEs"


class Relaxed(MariaDB):
    """A server that flushes its log once a second: what is left is what we add."""

    settings = ("--innodb-flush-log-at-trx-commit=2",)


def main() -> None:
    quick = "--quick" in sys.argv
    facts = {
        title: compared(title, kind, rounds=8 if quick else 40, per_round=25 if quick else 50)
        for title, kind in {"flushed at each commit": MariaDB, "flushed later": Relaxed}.items()
    }
    harness.result("mariadb_uncontended", **facts)


def compared(title: str, kind: type[MariaDB], *, rounds: int, per_round: int) -> harness.Row:
    with kind.own() as server:
        url = server.database("bench")
        client: pymysql.Connection[Any] = pymysql.connect(
            host="127.0.0.1",
            port=server.port,
            user="post",
            password="secret",
            database="bench",
            autocommit=True,
            ssl_disabled=True,
        )
        with Fencepost(url) as fp:
            sides = {FLOOR: raw(client), OURS: locking(fp)}
            harness.in_turn(sides, rounds=1, per_round=100)
            medians = harness.in_turn(sides, rounds=rounds, per_round=per_round)
        client.close()
    rows: list[harness.Row] = [
        {
            "µs per operation": side,
            "median (quartiles)": harness.Spread.of(value * 1e6 for value in times),
        }
        for side, times in medians.items()
    ]
    harness.table(f"Uncontended: acquire + release, {title}", rows)
    ratio = harness.ratios(medians[OURS], medians[FLOOR])
    judged = TARGET.judged(ratio.median) if kind is MariaDB else "none"
    print(f"\nratio {ratio}; target {judged}")
    return {"ratio": ratio._asdict(), "target": judged}


def raw(client: pymysql.Connection[Any]) -> Callable[[], None]:
    with client.cursor() as cursor:
        cursor.execute("CREATE TABLE raw (name VARCHAR(50) PRIMARY KEY, held INT, token BIGINT)")
        cursor.execute("INSERT INTO raw VALUES ('x', 0, 0)")

    def cycle() -> None:
        with client.cursor() as cursor:
            cursor.execute(
                "UPDATE raw SET held = 1, token = LAST_INSERT_ID(token + 1)"
                " WHERE name = %s AND held = 0",
                ("x",),
            )
            assert cursor.lastrowid
            cursor.execute("UPDATE raw SET held = 0 WHERE name = %s AND held = 1", ("x",))

    return cycle


def locking(fp: Fencepost) -> Callable[[], None]:
    def cycle() -> None:
        with fp.lock("x"):
            pass

    return cycle


if __name__ == "__main__":
    main()
