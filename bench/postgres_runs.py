"""Guarded runs that do nothing, on PostgreSQL: by one worker, by 16 at once, and by triggers.

The floor of one worker is two raw commits by psycopg for each run, which leave the same rows
behind: a run and its lease are written, and changed. Another floor writes one row only.

*By one worker* is ``fp.run(concurrency=1)``, *by 16 at once* ``fp.run(concurrency=16)``, the latter
beside the workers of pgqueuer and of procrastinate, each with 16 at once. All jobs are stored and
due before the first is begun; to store them is timed for nobody. fencepost is timed from the first
claim to the last recorded end, by the server's clock; a peer from its first body to its last.
Statements (top level) and bytes of WAL per run are counted by the server while jobs are drained.
Rounds alternate, each in a database of its own. 16 at once are measured with 1,000 jobs and with
four times as many, each beside the target: peers differ by how many there are.

*By triggers* is ``fp.trigger``, one after the other, in turns with the floor: two commits each
time, and nothing can be done by the batch. It has no target, but its cost should be known.

    python bench/postgres_runs.py [--quick]
"""

from __future__ import annotations

import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

import harness
import peers
import postgres_worker
from fencepost import Fencepost

sys.path.append(str(Path(__file__).parent.parent / "tests" / "kit"))
from servers import Postgres

if TYPE_CHECKING:
    from collections.abc import Callable

ALONE, AT_ONCE = harness.Target(at_least=0.8), harness.Target(at_least=2.0)
OURS = "fencepost"
FLOOR, ONE_ROW = "floor: two commits, run and lease", "floor: two commits of one row"
PGQUEUER, PROCRASTINATE = "pgqueuer", "procrastinate"
WORKERS, COUNT = 16, 1_000
FIRST_SLOT = 1_000_000_000

_TABLES = """
CREATE TABLE run (job text, slot bigint, owner text, token bigint, state text,
                  started timestamptz, finished timestamptz, PRIMARY KEY (job, slot));
CREATE TABLE lease (name text PRIMARY KEY, owner text, until timestamptz, token bigint NOT NULL)
  WITH (fillfactor = 50);
INSERT INTO lease VALUES ('bench', '', '-infinity', 0)"""
_CLAIM = """
WITH granted AS (
    UPDATE lease SET owner = %s, until = now() + interval '30 s', token = token + 1
     WHERE name = 'bench' AND until < now()
    RETURNING owner, token)
INSERT INTO run SELECT 'bench', %s, owner, token, 'running', now() FROM granted
    ON CONFLICT DO NOTHING
RETURNING token"""
_FINISH = """
WITH ended AS (
    UPDATE run SET state = 'done', finished = now()
     WHERE job = 'bench' AND slot = %s AND owner = %s AND state = 'running'
    RETURNING owner)
UPDATE lease SET until = '-infinity' FROM ended
 WHERE name = 'bench' AND lease.owner = ended.owner"""
_CLAIM_ROW = """
INSERT INTO run (job, slot, owner, state, started) VALUES ('row', %s, 'me', 'running', now())
    ON CONFLICT DO NOTHING
RETURNING slot"""
_FINISH_ROW = """
UPDATE run SET state = 'done', finished = now() WHERE job = 'row' AND slot = %s AND owner = 'me'"""

_DRAIN = """
import asyncio, json, os, resource, sys, time

url, count, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
ticks = []

def cpu():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime

async def drained(work):
    print(json.dumps("stored"), flush=True)
    sys.stdin.readline()
    before, task, end = cpu(), asyncio.create_task(work), time.monotonic() + 60
    while len(ticks) < count and time.monotonic() < end and not task.done():
        await asyncio.sleep(0.002)
    used = cpu() - before
    await asyncio.sleep(0.3)  # what it still has to write of those that are done
    print(json.dumps({"done": len(ticks), "seconds": max(ticks) - min(ticks), "cpu": used}))
    sys.stdout.flush()
    os._exit(0)
"""
_PGQUEUER = f"""{_DRAIN}
import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.queries import Queries

async def main():
    queries = Queries(AsyncpgDriver(await asyncpg.connect(url)))
    await queries.install()
    app = PgQueuer(AsyncpgDriver(await asyncpg.connect(url)))

    @app.entrypoint("tick", concurrency_limit=workers)
    async def tick(job):
        ticks.append(time.time())

    await queries.enqueue(["tick"] * count, [None] * count, [0] * count)
    await drained(app.qm.run(batch_size=workers))

asyncio.run(main())
"""
_PROCRASTINATE = f"""{_DRAIN}
import procrastinate

async def main():
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url))

    @app.task(name="tick")
    async def tick():
        ticks.append(time.time())

    await app.open_async()
    await app.schema_manager.apply_schema_async()
    await tick.batch_defer_async(*({{}} for _ in range(count)))
    await drained(app.run_worker_async(concurrency=workers, install_signal_handlers=False))

asyncio.run(main())
"""


class Server(Postgres):
    """A server that counts statements."""

    settings = {"shared_preload_libraries": "pg_stat_statements"}  # noqa: RUF012 -- as its parent has it


def main() -> None:
    quick = "--quick" in sys.argv
    with Server.own() as server:
        server.run("CREATE EXTENSION pg_stat_statements")
        rounds = 2 if quick else 7
        alone = by_one_worker(server, count=COUNT, rounds=rounds)
        together = at_once(server, count=COUNT, rounds=rounds)
        many = {} if quick else at_once(server, count=4 * COUNT, rounds=3)
        asked = by_triggers(server, rounds=8 if quick else 40, per_round=25 if quick else 40)
    harness.result("postgres_runs", alone=alone, at_once=together, many=many, triggers=asked)


# By one worker.


def by_one_worker(server: Postgres, *, count: int, rounds: int) -> harness.Row:
    floors: dict[str, list[float]] = {FLOOR: [], ONE_ROW: []}
    answers: list[dict[str, Any]] = []
    for number in range(rounds):
        name = f"one_worker_{number}"
        url = server.database(name)
        for statement in _TABLES.split(";"):
            server.run(statement, database=name)
        with psycopg.connect(url, autocommit=True) as db:
            for side, run in {FLOOR: committing(db), ONE_ROW: committing_a_row(db)}.items():
                for _ in range(50):
                    run()
                began = time.perf_counter()
                for _ in range(count):
                    run()
                floors[side].append(count / (time.perf_counter() - began))
        answers.append(drained(server, name, count, None, workers=1))
        server.run(f'DROP DATABASE "{name}" WITH (FORCE)')
    rates = [rate(one) for one in answers]
    rows: list[harness.Row] = [
        {"side": side, "runs/s": harness.Spread.of(got)} for side, got in floors.items()
    ]
    harness.table(f"{count:,} no-op runs on PostgreSQL, by one worker", [row(OURS, answers), *rows])
    ratio, of_row = (harness.ratios(rates, floors[base]) for base in (FLOOR, ONE_ROW))
    judged = ALONE.judged(ratio.median)
    print(f"\nrate: {ratio} of the floor; target {judged}; of two commits of one row: {of_row}")
    return {
        "ratio": ratio._asdict(),
        "target": judged,
        "ratio_to_one_row": of_row._asdict(),
    }


# One trigger after the other.


def by_triggers(server: Postgres, *, rounds: int, per_round: int) -> harness.Row:
    url = server.database("alone")
    for statement in _TABLES.split(";"):
        server.run(statement, database="alone")
    with Fencepost(url) as fp, psycopg.connect(url, autocommit=True) as db:
        sides = {FLOOR: committing(db), ONE_ROW: committing_a_row(db), OURS: triggering(fp)}
        harness.in_turn(sides, rounds=1, per_round=100)
        medians = harness.in_turn(sides, rounds=rounds, per_round=per_round)
        counted = {side: counting(server, run, "alone") for side, run in sides.items()}
    ratio, of_row = (harness.ratios(medians[base], medians[OURS]) for base in (FLOOR, ONE_ROW))
    rows: list[harness.Row] = [
        {
            "µs per run": side,
            "median (quartiles)": harness.Spread.of(value * 1e6 for value in times),
            **counted[side],
        }
        for side, times in medians.items()
    ]
    harness.table("Guarded no-op runs on PostgreSQL, one trigger after the other", rows)
    print(f"\nrate: {ratio} of the floor; of two commits of one row: {of_row}")
    return {
        "ratio": ratio._asdict(),
        "ratio_to_one_row": of_row._asdict(),
        "counted": counted,
    }


def triggering(fp: Fencepost) -> Callable[[], None]:
    @fp.job("noop")
    def noop() -> None:
        return None

    slots = iter(range(FIRST_SLOT, 2 * FIRST_SLOT))

    def run() -> None:
        assert fp.trigger("noop", next(slots))

    return run


def committing(db: psycopg.Connection) -> Callable[[], None]:
    slots = iter(range(1, FIRST_SLOT))

    def run() -> None:
        slot, owner = next(slots), secrets.token_hex(16)
        assert db.execute(_CLAIM, (owner, slot), prepare=True).fetchone() is not None
        assert db.execute(_FINISH, (slot, owner), prepare=True).rowcount == 1

    return run


def committing_a_row(db: psycopg.Connection) -> Callable[[], None]:
    slots = iter(range(1, FIRST_SLOT))

    def run() -> None:
        slot = next(slots)
        assert db.execute(_CLAIM_ROW, (slot,), prepare=True).fetchone() is not None
        assert db.execute(_FINISH_ROW, (slot,), prepare=True).rowcount == 1

    return run


def counting(server: Postgres, run: Callable[[], None], database: str) -> harness.Row:
    count, before = 100, counters(server, database)
    for _ in range(count):
        run()
    return per_run(before, counters(server, database), count)


def counters(server: Postgres, database: str) -> tuple[int, int]:
    """Return how many statements the server was sent so far, and how much WAL it wrote."""
    asked = (
        "SELECT coalesce(sum(calls), 0)::bigint, (pg_current_wal_insert_lsn() - '0/0')::bigint "
        "FROM pg_stat_statements JOIN pg_database ON dbid = pg_database.oid "
        f"WHERE datname = '{database}' AND toplevel AND queryid IS NOT NULL "
        "AND query NOT IN ('BEGIN', 'COMMIT')"
    )
    ((statements, wal),) = server.run(asked)
    assert isinstance(statements, int)
    assert isinstance(wal, int)
    return statements, wal


def per_run(before: tuple[int, int], after: tuple[int, int], count: int) -> harness.Row:
    statements, wal = ((late - early) / count for early, late in zip(before, after, strict=True))
    return {"statements": statements, "WAL bytes": wal}


# By 16 at once.


def at_once(server: Postgres, *, count: int, rounds: int) -> harness.Row:
    python = peers.interpreter(*peers.QUEUES)
    sides: dict[str, str | None] = {OURS: None}
    if python is not None:
        sides |= {PGQUEUER: _PGQUEUER, PROCRASTINATE: _PROCRASTINATE}
    answers: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for number in range(rounds):
        for side, program in sides.items():
            name = f"{side}_{number}"
            server.database(name)
            words = None if program is None else (str(python), "-c", program)
            answers[side].append(drained(server, name, count, words))
            server.run(f'DROP DATABASE "{name}" WITH (FORCE)')
    title = f"{count:,} no-op runs on PostgreSQL, {WORKERS} at once, {rounds} rounds"
    harness.table(title, [row(side, given) for side, given in answers.items()])
    rates = {side: [rate(one) for one in given] for side, given in answers.items()}
    facts: harness.Row = {
        "runs_per_second": {side: harness.Spread.of(got).median for side, got in rates.items()}
    }
    if python is not None:
        ratio = harness.ratios(rates[OURS], rates[PGQUEUER])
        judged = AT_ONCE.judged(ratio.median)
        print(f"\nrate: {ratio} times that of pgqueuer; target {judged}")
        facts |= {"ratio": ratio._asdict(), "target": judged}
    return facts


def drained(
    server: Postgres,
    database: str,
    count: int,
    words: tuple[str, ...] | None,
    *,
    workers: int = WORKERS,
) -> dict[str, Any]:
    """Have a side store its jobs, then count while it drains them."""
    url = server.url(database)
    crew = harness.Crew(
        postgres_worker.__file__, url, str(count), str(workers), count=1, words=words
    )
    crew.hear()
    before = counters(server, database)
    (answer,) = crew.ask(go=True)
    counted = per_run(before, counters(server, database), count)
    crew.close()
    return {**answer, **counted}


def row(side: str, answers: list[dict[str, Any]]) -> harness.Row:
    return {
        "side": side,
        "runs/s": harness.Spread.of(map(rate, answers)),
        "client cpu µs": harness.Spread.of(one["cpu"] / one["done"] * 1e6 for one in answers),
        "statements": harness.Spread.of(one["statements"] for one in answers).median,
        "WAL bytes": harness.Spread.of(one["WAL bytes"] for one in answers).median,
        "done": sum(one["done"] for one in answers),
    }


def rate(answer: dict[str, Any]) -> float:
    return float(answer["done"] / answer["seconds"])


if __name__ == "__main__":
    main()
