"""How many commits it takes to claim ten thousand jobs that are due in the same second.

Counted, not timed: a tick is one transaction, which records the ends that were told meanwhile and
claims as many jobs as there is room for. *Claiming* commits are those in which any attempt began,
*ending* ones those in which any ended; most do both. How far ahead a crew claims depends on how
fast its bodies end, so on a slow machine there are more commits.

    python bench/scheduler_herd.py [--quick]
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

import harness
from fencepost import Fencepost
from fencepost.ledger.sqlite_planner import SqlitePlanner
from fencepost.world.sqlite import SqliteFile

if TYPE_CHECKING:
    from collections.abc import Callable
    from sqlite3 import Connection
    from typing import TypeVar

    from fencepost.ledger.planning import Ask, Ticked

    T = TypeVar("T")

HERD, WORKERS = 10_000, 16
TARGET = harness.Target(at_most=40)
PATIENCE = 120.0


class Tick(NamedTuple):
    """What one commit of a tick did."""

    begun: int
    ended: int


def main() -> None:
    quick = "--quick" in sys.argv
    runs = []
    for _ in range(1 if quick else 3):
        with harness.workdir() as folder:
            runs.append(counted(folder, HERD))
    rows = [row(ticks, writes, seconds) for ticks, writes, seconds in runs]
    harness.table(f"{HERD:,} jobs due in the same second, {WORKERS} workers", rows)
    claiming = harness.Spread.of(float(sum(1 for t in ticks if t.begun)) for ticks, *_ in runs)
    judged = TARGET.judged(claiming.median)
    print(f"\nclaiming commits: {claiming}; target {judged}")
    harness.result("scheduler_herd", herd=HERD, claiming=claiming._asdict(), target=judged)


def row(ticks: list[Tick], writes: int, seconds: float) -> harness.Row:
    claiming = [tick.begun for tick in ticks if tick.begun]
    return {
        "claiming commits": len(claiming),
        "jobs each": harness.Spread.of(claiming),
        "ending commits": sum(1 for tick in ticks if tick.ended),
        "either": sum(1 for tick in ticks if tick.begun or tick.ended),
        "all commits": writes,
        "seconds": seconds,
    }


def counted(folder: str, herd: int) -> tuple[list[Tick], int, float]:
    """Have a herd run; return what each tick did, how many commits there were, and how long."""
    over = threading.Event()
    with Fencepost("sqlite:///" + os.path.join(folder, "fencepost.db")) as fp:
        fp.job("noop")(lambda: None)
        due = int(time.time()) + 3 + herd // 5_000
        fp.store("noop", ({"name": f"job-{i:05}", "at": due} for i in range(herd)))
        assert time.time() < due, "storing took too long: they are not due at the same time"
        ticks, writes = watched(over, herd)
        thread = threading.Thread(target=lambda: fp.run(concurrency=WORKERS, signals=False))
        thread.start()
        seen = over.wait(PATIENCE)
        seconds = time.time() - due
        fp.stop()
        thread.join()
    assert seen, f"only {sum(tick.ended for tick in ticks)} of {herd} have ended"
    return ticks, len(writes), seconds


def watched(over: threading.Event, herd: int) -> tuple[list[Tick], list[bool]]:
    """Return what fills up as ticks and commits are made; say when all attempts have ended."""
    ticks: list[Tick] = []
    writes: list[bool] = []

    async def tick(self: SqlitePlanner, ask: Ask) -> Ticked:
        ticked = await TICK(self, ask)
        ticks.append(Tick(len(ticked.begun), len(ticked.ended)))
        if ticked.ended and sum(tick.ended for tick in ticks) >= herd:
            over.set()
        return ticked

    def write(
        self: SqliteFile,
        work: Callable[[Connection], T],
        *,
        durable: bool,
        patience: float = 5.0,
        committed: Callable[[], None] | None = None,
    ) -> T:
        result = WRITE(self, work, durable=durable, patience=patience, committed=committed)
        writes.append(durable)
        return result

    SqlitePlanner.tick = tick  # type: ignore[method-assign]
    SqliteFile.write = write  # type: ignore[method-assign]
    return ticks, writes


TICK, WRITE = SqlitePlanner.tick, SqliteFile.write

if __name__ == "__main__":
    main()
