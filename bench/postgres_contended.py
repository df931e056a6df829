"""Eight processes want one lock on PostgreSQL and hold it for 5 ms: fencepost beside a raw queue.

The floor waits in a blocking ``pg_advisory_lock`` and makes inside of it the two durable writes
that any lease comes to: an upsert that returns a token, and an update that gives it back and lets
the next one in. All on one psycopg connection, prepared. *Greedy* processes ask again at once;
*polite* ones first think for about 5 ms. A file that every holder locks without waiting tells
whether two were ever inside together.

    python bench/postgres_contended.py [--quick]
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

import harness
from contended import HOLD, PROCESSES, THINK, alone, contest, fairness, shown, summary
from fencepost import Fencepost

sys.path.append(str(Path(__file__).parent.parent / "tests" / "kit"))
from servers import Postgres

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

FASTER, FAIR = harness.Target(at_least=0.95), harness.Target(at_most=1.3)
OURS, FLOOR = "fencepost", "floor: pg_advisory_lock + two commits"
_TABLE = """
CREATE TABLE lease (name text PRIMARY KEY, owner text, until timestamptz, token bigint NOT NULL)
  WITH (fillfactor = 50)"""
_ACQUIRE = """
INSERT INTO lease (name, owner, until, token) VALUES ('x', %s, now() + interval '30 s', 1)
    ON CONFLICT (name) DO UPDATE
   SET owner = excluded.owner, until = excluded.until, token = lease.token + 1
 WHERE lease.until < now()
RETURNING token"""
_RELEASE = """
  WITH freed AS (
UPDATE lease SET until = '-infinity' WHERE name = 'x' AND owner = %s RETURNING 1)
SELECT pg_advisory_unlock(2) FROM freed"""


def main() -> None:
    quick = "--quick" in sys.argv
    rounds, seconds = (2, 1.5) if quick else (5, 3.0)
    with Postgres.own() as server, harness.workdir() as folder, contextlib.ExitStack() as after:
        server.run(_TABLE)
        crews = {
            side: harness.Crew(__file__, side, server.url(), folder, count=PROCESSES)
            for side in SIDES
        }
        for crew in crews.values():
            after.callback(crew.close)
            contest(crew, seconds=1.0, think=0.0)
        facts = {
            mode: compared(mode, crews, rounds=rounds, seconds=seconds, think=think)
            for mode, think in THINK.items()
        }
    harness.result("postgres_contended", processes=PROCESSES, hold_ms=HOLD * 1e3, **facts)


def compared(
    mode: str, crews: dict[str, harness.Crew], *, rounds: int, seconds: float, think: float
) -> harness.Row:
    """Run both sides in turn, print what came of it, and return it."""
    answers: dict[str, list[list[dict[str, Any]]]] = {side: [] for side in crews}
    order = list(crews)
    for _ in range(rounds):
        order.reverse()
        for side in order:
            answers[side].append(contest(crews[side], seconds=seconds, think=think))
    rates = {
        side: [sum(len(member["waits"]) for member in crew) / seconds for crew in rounds_of]
        for side, rounds_of in answers.items()
    }
    ratio = harness.ratios(rates[OURS], rates[FLOOR])
    rows = [summary(side, answers[side], harness.Spread.of(rates[side])) for side in crews]
    harness.table(f"{PROCESSES} {mode} processes, one lock, {HOLD * 1e3:.0f} ms hold", rows)
    worst = max(fairness(crew) for crew in answers[OURS])
    speed, fair = FASTER.judged(ratio.median), FAIR.judged(worst)
    print(f"\nacquisitions: ratio {ratio}; target {speed}")
    print(f"worst max/min of a round: {harness.shown(worst)}; target {fair}")
    return {
        "ratio": ratio._asdict(),
        "speed": speed,
        "fair": fair,
        "rows": [shown(row) for row in rows],
    }


# What a worker does.


def locking(url: str) -> Callable[[], AbstractContextManager[object]]:
    fp = Fencepost(url)
    return lambda: fp.lock("x", wait=60)


def queueing(url: str) -> Callable[[], AbstractContextManager[object]]:
    db = psycopg.connect(url, autocommit=True)

    @contextlib.contextmanager
    def lock() -> Iterator[None]:
        owner = secrets.token_hex(16)
        db.execute("SELECT pg_advisory_lock(2)", prepare=True)
        while db.execute(_ACQUIRE, (owner,), prepare=True).fetchone() is None:
            time.sleep(0.005)
        yield
        db.execute(_RELEASE, (owner,), prepare=True)

    return lock


SIDES = {FLOOR: queueing, OURS: locking}


def work(side: str, url: str, folder: str) -> Callable[..., harness.Row]:
    lock = SIDES[side](url)
    witness = os.open(os.path.join(folder, "inside"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)

    def contend(start: float, seconds: float, think: float) -> harness.Row:
        time.sleep(max(0.0, start - time.monotonic()))
        end, cpu = start + seconds, harness.cpu_seconds()
        waits: list[float] = []
        inside: list[tuple[float, float]] = []
        overlaps = 0
        while (asked := time.monotonic()) < end:
            with lock():
                entered = time.monotonic()
                overlaps += not alone(witness)
                time.sleep(HOLD)
                fcntl.flock(witness, fcntl.LOCK_UN)
                inside.append((entered, time.monotonic()))
            if entered < end:
                waits.append(entered - asked)
            if think:
                time.sleep(think * random.uniform(0.5, 1.5))
        cpu = harness.cpu_seconds() - cpu
        return {"waits": waits, "inside": inside, "overlaps": overlaps, "cpu": cpu}

    return contend


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        harness.serve(work(*sys.argv[2:]))
    else:
        main()
