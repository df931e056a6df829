"""What a free lock costs on PostgreSQL: ``with fp.lock("x"): pass`` beside two raw statements.

The floor is one psycopg connection that executes, prepared and in autocommit, what any lease comes
to: an upsert that returns a token, and an update that gives it back. Both commit, with fsync. The
peer that there is, tooz, takes an advisory lock of its session: it writes nothing, keeps no token,
and is shown, not judged.

    python bench/postgres_uncontended.py [--quick]
"""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

import harness
import lock_peers
import peers
from fencepost import Fencepost

sys.path.append(str(Path(__file__).parent.parent / "tests" / "kit"))
from servers import PgBouncer, Postgres

if TYPE_CHECKING:
    from collections.abc import Callable

TARGET = harness.Target(at_most=1.15)
FLOOR, OURS = "floor: two raw statements", "fencepost: with lock"
ROWS, POOLED = "fencepost, advisory=off", "fencepost, behind PgBouncer"
POOLED_FLOOR = "two raw statements, unprepared, behind PgBouncer"

_TABLE = """
CREATE TABLE lease (name text PRIMARY KEY, owner text, until timestamptz, token bigint NOT NULL)
  WITH (fillfactor = 50)"""
_ACQUIRE = """
INSERT INTO lease (name, owner, until, token) VALUES (%s, %s, now() + interval '30 s', 1)
    ON CONFLICT (name) DO UPDATE
   SET owner = excluded.owner, until = excluded.until, token = lease.token + 1
 WHERE lease.until < now()
RETURNING token"""
_RELEASE = "UPDATE lease SET until = '-infinity' WHERE name = %s AND owner = %s"


def main() -> None:
    quick = "--quick" in sys.argv
    rounds, per_round = (10, 20) if quick else (40, 40)
    with Postgres.own() as server, PgBouncer.before(server.port).own() as pooler:
        server.run(_TABLE)
        with (
            Fencepost(server.url()) as fp,
            Fencepost(server.url() + "?advisory=off") as rows,
            Fencepost(pooler.url()) as pooled,
        ):
            sides = {
                FLOOR: raw(server.url(), "a", prepare=True),
                OURS: locking(fp, "b"),
                ROWS: locking(rows, "c"),
                POOLED_FLOOR: raw(pooler.url(), "d", prepare=False),
                POOLED: locking(pooled, "e"),
            }
            harness.in_turn(sides, rounds=1, per_round=100)
            medians = harness.in_turn(sides, rounds=rounds, per_round=per_round)
            with lock_peers.crews(server.port, (lock_peers.POSTGRES, peers.LOCKS)) as others:
                beside = lock_peers.compared(sides[OURS], others, rounds=rounds * 2, per_round=8)
    report(medians, beside)


def report(medians: dict[str, list[float]], beside: dict[str, harness.Spread]) -> None:
    pairs = {OURS: FLOOR, ROWS: FLOOR, POOLED: POOLED_FLOOR}
    ratios = {side: harness.ratios(medians[side], medians[base]) for side, base in pairs.items()}
    harness.table(
        "Uncontended: acquire + release on PostgreSQL",
        [
            {
                "µs per operation": side,
                "median (quartiles)": harness.Spread.of(value * 1e6 for value in times),
                "of its floor": ratios.get(side, ""),
            }
            for side, times in medians.items()
        ],
    )
    print(f"\nratio {ratios[OURS]}; target {TARGET.judged(ratios[OURS].median)}")
    for name, spread in beside.items():
        print(f"our time in parts of that of {name}, which writes nothing: {spread}")
    harness.result(
        "postgres_uncontended",
        peers={name: spread._asdict() for name, spread in beside.items()},
        ratios={side: ratio._asdict() for side, ratio in ratios.items()},
        target=TARGET.judged(ratios[OURS].median),
        us={side: harness.quantile(sorted(times), 0.5) * 1e6 for side, times in medians.items()},
    )


def locking(fp: Fencepost, name: str) -> Callable[[], None]:
    def operation() -> None:
        with fp.lock(name):
            pass

    return operation


def raw(url: str, name: str, *, prepare: bool) -> Callable[[], None]:
    db = psycopg.connect(url, autocommit=True, prepare_threshold=5 if prepare else None)

    def operation() -> None:
        owner = secrets.token_hex(16)
        granted = db.execute(_ACQUIRE, (name, owner), prepare=prepare).fetchone()
        assert granted is not None, "it was not free"
        assert db.execute(_RELEASE, (name, owner), prepare=prepare).rowcount == 1

    return operation


if __name__ == "__main__":
    main()
