"""How fast jobs become known: 100,000 stored at once, beside APScheduler's SQLite store.

``fp.store`` takes them from one iterable and commits each thousand, durably. The peer has no way
to add many at once: each ``add_job`` is a commit of its own, so 2,000 of them tell its rate. Both
write new files, and all jobs are due in a day. Also shown: how fast as many rows get into a plain
table with an index, a thousand to a commit, which is the least that it could cost.

    python bench/scheduler_registration.py [--quick]
"""

from __future__ import annotations

import os
import sqlite3
import sys
import time
from typing import TYPE_CHECKING

import harness
import peers
from fencepost import Fencepost

if TYPE_CHECKING:
    from collections.abc import Iterator

COUNT, PEER_COUNT, BATCH = 100_000, 2_000, 1_000
DAY = 86400
TARGET = harness.Target(at_least=20.0)
OURS, PEER, FLOOR = "fencepost: fp.store", "APScheduler 3, SQLite", "plain indexed table"

APSCHEDULER = """
import datetime, json, sys, time
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.background import BackgroundScheduler

file, count = sys.argv[1], int(sys.argv[2])
scheduler = BackgroundScheduler(timezone="UTC")
scheduler.add_jobstore(SQLAlchemyJobStore(url="sqlite:///" + file))
scheduler.start(paused=True)
first = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
begin = time.perf_counter()
for i in range(count):
    scheduler.add_job("builtins:print", "interval", days=1, start_date=first, id=f"far-{i}")
print(json.dumps({"rate": count / (time.perf_counter() - begin)}))
"""


def main() -> None:
    quick = "--quick" in sys.argv
    rounds, count, peer_count = (2, COUNT // 5, 500) if quick else (5, COUNT, PEER_COUNT)
    python = peers.interpreter(*peers.SCHEDULERS)
    rates: dict[str, list[float]] = {OURS: [], FLOOR: [], PEER: []}
    with harness.workdir() as folder:
        for number in range(rounds):
            path = os.path.join(folder, f"{number}.db")
            rates[FLOOR].append(inserted(path + "-floor", count))
            rates[OURS].append(stored(path, count))
            if python is not None:
                told = peers.answer(python, APSCHEDULER, path + "-peer", peer_count)
                rates[PEER].append(told["rate"])
    spreads = {side: harness.Spread.of(values) for side, values in rates.items() if values}
    harness.table(
        f"{count:,} jobs registered ({peer_count:,} by the peer), {rounds} rounds",
        [{"side": side, "jobs/s": spread} for side, spread in spreads.items()],
    )
    beside = harness.ratios(rates[OURS], rates[FLOOR])
    print(f"\nto a plain indexed table: {beside}")
    facts: harness.Row = {"ratio_to_table": beside._asdict()}
    if python is not None:
        ratio = harness.ratios(rates[OURS], rates[PEER])
        judged = TARGET.judged(ratio.median)
        print(f"to the peer: ratio {ratio}; target {judged}")
        facts |= {"ratio": ratio._asdict(), "target": judged}
    per_second = {side: spread.median for side, spread in spreads.items()}
    harness.result("scheduler_registration", jobs_per_second=per_second, **facts)


def stored(path: str, count: int) -> float:
    with Fencepost("sqlite:///" + path) as fp:
        fp.job("fire")(lambda: None)
        fp.store("fire", [{"name": "first", "every": "1d"}])  # which makes the tables
        begin = time.perf_counter()
        assert fp.store("fire", far(count)) == count
        return count / (time.perf_counter() - begin)


def far(count: int) -> Iterator[dict[str, object]]:
    tomorrow = int(time.time()) + DAY
    for i in range(count):
        yield {"name": f"far-{i:07}", "at": tomorrow + i % 3600}


def inserted(path: str, count: int) -> float:
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=FULL")
    db.execute("CREATE TABLE job (name TEXT PRIMARY KEY, spec TEXT, due REAL) WITHOUT ROWID")
    db.execute("CREATE INDEX job_due ON job (due)")
    begin, tomorrow = time.perf_counter(), time.time() + DAY
    for start in range(0, count, BATCH):
        db.execute("BEGIN IMMEDIATE")
        for i in range(start, min(start + BATCH, count)):
            row = (f"far-{i:07}", '{"every":86400}', tomorrow + i % 3600)
            db.execute("INSERT INTO job VALUES (?, ?, ?)", row)
        db.execute("COMMIT")
    rate = count / (time.perf_counter() - begin)
    db.close()
    return rate


if __name__ == "__main__":
    main()
