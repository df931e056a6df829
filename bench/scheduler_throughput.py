"""How many jobs that do nothing get through in a second, beside huey's SQLite queue.

Both use 16 threads, on a file with ``synchronous=FULL``, and have all jobs stored and due before
the first is begun. fencepost claims each run under a lease and a token, and records its end: it is
timed from the first claim to the last recorded end. The peer takes a job off its queue and forgets
it: it is timed from its first body to its last. Rounds alternate.

    python bench/scheduler_throughput.py [--quick]
"""

from __future__ import annotations

import os
import sqlite3
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import harness
import peers
from fencepost import Fencepost

if TYPE_CHECKING:
    from collections.abc import Callable

WORKERS = 16
PATIENCE = 60.0
TARGET = harness.Target(at_least=3.0)
OURS, PEER = "fencepost: fp.run", "huey SqliteHuey, fsync"

HUEY = """
import json, os, resource, sys, time
from huey import SqliteHuey

file, count, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
ticks = []
queue = SqliteHuey("bench", filename=file, fsync=True)
task = queue.task(name="tick")(lambda: ticks.append(time.time()))
for _ in range(count):
    task()
usage = resource.getrusage(resource.RUSAGE_SELF)
before = usage.ru_utime + usage.ru_stime
queue.create_consumer(workers=workers, periodic=False).start()
end = time.monotonic() + 60
while len(ticks) < count and time.monotonic() < end:
    time.sleep(0.002)
usage = resource.getrusage(resource.RUSAGE_SELF)
cpu = usage.ru_utime + usage.ru_stime - before
print(json.dumps({"done": len(ticks), "seconds": max(ticks) - min(ticks), "cpu": cpu}), flush=True)
os._exit(0)
"""


def main() -> None:
    quick = "--quick" in sys.argv
    rounds, count = (2, 1_000) if quick else (7, 4_000)
    python = peers.interpreter(*peers.SCHEDULERS)
    answers: dict[str, list[dict[str, Any]]] = {OURS: [], PEER: []}
    with harness.workdir() as folder:
        for number in range(rounds):
            path = os.path.join(folder, f"{number}.db")
            crew = harness.Crew(__file__, path, count=1)
            answers[OURS] += crew.ask(count=count)
            crew.close()
            if python is not None:
                peer_path = path + "-peer"
                told = peers.answer(python, HUEY, peer_path, count, WORKERS)
                answers[PEER].append(told)
    rows = [row(side, given) for side, given in answers.items() if given]
    harness.table(f"{count:,} jobs that do nothing, {WORKERS} workers, {rounds} rounds", rows)
    rates = {side: [rate(one) for one in given] for side, given in answers.items()}
    facts: harness.Row = {"jobs_per_second": harness.Spread.of(rates[OURS])._asdict()}
    if python is not None:
        ratio = harness.ratios(rates[OURS], rates[PEER])
        judged = TARGET.judged(ratio.median)
        print(f"\nratio {ratio}; target {judged}")
        facts |= {"ratio": ratio._asdict(), "target": judged}
    harness.result("scheduler_throughput", **facts)


def row(side: str, answers: list[dict[str, Any]]) -> harness.Row:
    return {
        "side": side,
        "jobs/s": harness.Spread.of(map(rate, answers)),
        "cpu µs each": harness.Spread.of(one["cpu"] / one["done"] * 1e6 for one in answers),
        "done": sum(one["done"] for one in answers),
    }


def rate(answer: dict[str, Any]) -> float:
    return float(answer["done"] / answer["seconds"])


# What a worker does.


def work(path: str) -> Callable[..., harness.Row]:
    done: list[None] = []

    def drain(count: int) -> harness.Row:
        with Fencepost("sqlite:///" + path) as fp:
            fp.job("noop")(lambda: done.append(None))
            due = int(time.time()) + 2 + count // 2_000
            fp.store("noop", ({"name": f"job-{i:05}", "at": due} for i in range(count)))
            time.sleep(max(0.0, due + 0.1 - time.time()))
            cpu = harness.cpu_seconds()
            thread = threading.Thread(target=lambda: fp.run(concurrency=WORKERS, signals=False))
            thread.start()
            give_up = time.monotonic() + PATIENCE
            while len(done) < count and time.monotonic() < give_up:
                time.sleep(0.002)
            fp.stop()
            thread.join()
            cpu = harness.cpu_seconds() - cpu
        return {"cpu": cpu, **recorded(path)}

    return drain


def recorded(path: str) -> harness.Row:
    """Return how many runs succeeded, and from the first claim to the last end."""
    db = sqlite3.connect(path)
    ends = "SELECT count(*), max(ended_at) - min(started_at) FROM fencepost_run"
    done, seconds = db.execute(ends + " WHERE state = 'succeeded'").fetchone()
    db.close()
    return {"done": done, "seconds": seconds}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        harness.serve(work(sys.argv[2]))
    else:
        main()
