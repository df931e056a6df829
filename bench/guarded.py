"""A guarded run that does nothing, beside two raw commits: all that once-per-slot costs.

A run is claimed (its row, its lease and its token in one durable commit) and finished (its end and
the release in another). The floor makes two commits with ``synchronous=FULL`` that insert a row and
update it. ``--growth`` runs 100,000 of them and prints how the memory of the process grows.

    python bench/guarded.py [--quick] [--growth]
"""

from __future__ import annotations

import os
import resource
import sqlite3
import sys
from typing import TYPE_CHECKING

import harness
from fencepost import Fencepost

if TYPE_CHECKING:
    from collections.abc import Callable

TARGET = harness.Target(at_most=1.4)
OURS, FLOOR = "fencepost: a guarded no-op run", "floor: two raw FULL commits"
FIRST_SLOT = 1_000_000_000


def main() -> None:
    if "--growth" in sys.argv:
        grow()
        return
    rounds, per_round = (5, 100) if "--quick" in sys.argv else (15, 200)
    with harness.workdir() as folder:
        sides = {FLOOR: committing(folder), OURS: running(folder)}
        for operation in sides.values():
            for _ in range(300):  # until the log no longer grows
                operation()
        medians = harness.in_turn(sides, rounds=rounds, per_round=per_round)
    ratio = harness.ratios(medians[OURS], medians[FLOOR])
    us = {side: [value * 1e6 for value in values] for side, values in medians.items()}
    spreads = {side: harness.Spread.of(values) for side, values in us.items()}
    harness.table(
        "A guarded no-op run on SQLite",
        [{"µs per run": side, "median (quartiles)": spread} for side, spread in spreads.items()],
    )
    judged = TARGET.judged(ratio.median)
    print(f"\nratio {ratio}; target {judged}")
    harness.result("guarded", ratio=ratio._asdict(), target=judged)


def running(folder: str) -> Callable[[], None]:
    fp = Fencepost("sqlite:///" + os.path.join(folder, "fencepost.db"))

    @fp.job("noop")
    def noop() -> None:
        return None

    slots = iter(range(FIRST_SLOT, 2 * FIRST_SLOT))

    def run() -> None:
        assert fp.trigger("noop", next(slots))

    return run


def committing(folder: str) -> Callable[[], None]:
    db = sqlite3.connect(os.path.join(folder, "floor.db"), isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=FULL")
    db.execute("CREATE TABLE run (id INTEGER PRIMARY KEY, state TEXT, token INTEGER)")
    ids = iter(range(1, FIRST_SLOT))

    def run() -> None:
        number = next(ids)
        db.execute("INSERT INTO run VALUES (?, 'running', ?)", (number, number))
        db.execute("UPDATE run SET state = 'succeeded' WHERE id = ?", (number,))

    return run


def grow() -> None:
    """Print the resident memory while 100,000 runs are made, in ten steps."""
    with harness.workdir() as folder:
        run = running(folder)
        sizes = []
        for _ in range(10):
            for _ in range(10_000):
                run()
            sizes.append(resident_kb())
            print(f"after {len(sizes) * 10_000:,} runs: {sizes[-1]:,} kB", flush=True)
    harness.result("growth", kb=sizes, grew_kb=sizes[-1] - sizes[0])


def resident_kb() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize() // 1024
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
