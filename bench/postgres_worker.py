"""Our worker of ``postgres_runs.py``, in a file of its own: its process has what a user's has.

What the servers of the tests need, which is more than fencepost and its driver together, would be
walked through by each full collection of garbage; the workers of peers have none of it either.

    python bench/postgres_worker.py --worker URL COUNT WORKERS
"""

from __future__ import annotations

import sys
import threading
import time

import psycopg

import harness
from fencepost import Fencepost

PATIENCE = 60.0


def work(url: str, count: int, workers: int) -> None:
    done: list[None] = []
    with Fencepost(url) as fp:
        fp.job("noop")(lambda: done.append(None))
        due = int(time.time()) + 5 + count // 500
        fp.store("noop", ({"name": f"job-{i:05}", "at": due} for i in range(count)))
        assert time.time() < due, "the machine is too slow: what is stored late is not due"
        time.sleep(max(0.0, due + 0.1 - time.time()))

        def drain(go: bool) -> harness.Row:  # noqa: FBT001 -- an order has one word
            assert go
            cpu = harness.cpu_seconds()
            thread = threading.Thread(target=lambda: fp.run(concurrency=workers, signals=False))
            thread.start()
            give_up = time.monotonic() + PATIENCE
            while len(done) < count and time.monotonic() < give_up:
                time.sleep(0.002)
            fp.stop()
            thread.join()
            return {"cpu": harness.cpu_seconds() - cpu, **recorded(url)}

        print('"stored"', flush=True)
        harness.serve(drain)


def recorded(url: str) -> harness.Row:
    """Return how many runs succeeded, and from the first claim to the last end."""
    ends = "SELECT count(*), max(ended_at) - min(started_at) FROM fencepost_run"
    with psycopg.connect(url) as db:
        found = db.execute(ends + " WHERE state = 'succeeded'").fetchone()
    assert found is not None
    return {"done": found[0], "seconds": found[1]}


if __name__ == "__main__":
    work(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
