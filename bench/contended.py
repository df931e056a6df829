"""Eight processes want one lock and hold it for 5 ms each: fencepost beside the kernel's own queue.

The floor waits in ``flock`` and commits inside of it what fencepost commits: once after it got the
lock, once before it lets go, neither of them synced. A second floor syncs the first of the two, as
whoever has no reserve of tokens would have to; it is shown, not judged. *Greedy* processes
ask again at once; *polite* ones first think for about 5 ms. A side file that every holder locks
without waiting tells whether two were ever inside together. The *gap* is what passes between one
holder's last line and the next one's first: both commits and the hand-over are in it.

    python bench/contended.py [--quick]
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import random
import sqlite3
import sys
import time
from typing import TYPE_CHECKING, Any

import harness
from fencepost import Fencepost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

PROCESSES, HOLD = 8, 0.005
THINK = {"greedy": 0.0, "polite": 0.005}
FASTER, FAIR = harness.Target(at_least=0.95), harness.Target(at_most=1.5)
OURS, FLOOR = "fencepost", "floor: flock + two commits"
SYNCED = "flock + two commits, one synced"


def main() -> None:
    quick = "--quick" in sys.argv
    rounds, seconds = (2, 1.0) if quick else (6, 3.0)
    with harness.workdir() as folder, contextlib.ExitStack() as after:
        crews = {side: harness.Crew(__file__, side, folder, count=PROCESSES) for side in SIDES}
        for crew in crews.values():
            after.callback(crew.close)
            contest(crew, seconds=7.0, think=0.0)  # until neither log grows any more
        facts = {
            mode: compared(mode, crews, rounds=rounds, seconds=seconds, think=think)
            for mode, think in THINK.items()
        }
    harness.result("contended", processes=PROCESSES, hold_ms=HOLD * 1e3, **facts)


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
    beside = harness.ratios(rates[OURS], rates[SYNCED])
    print(f"\nacquisitions: ratio {ratio}; target {speed}; to the one that syncs: {beside}")
    print(f"worst max/min of a round: {harness.shown(worst)}; target {fair}")
    return {
        "ratio": ratio._asdict(),
        "ratio_to_synced": beside._asdict(),
        "speed": speed,
        "fair": fair,
        "rows": [shown(r) for r in rows],
    }


def contest(crew: harness.Crew, *, seconds: float, think: float) -> list[dict[str, Any]]:
    return crew.ask(start=time.monotonic() + 0.1, seconds=seconds, think=think)


def summary(side: str, rounds: list[list[dict[str, Any]]], rate: harness.Spread) -> harness.Row:
    members = [member for crew in rounds for member in crew]
    waits = sorted(wait * 1e3 for member in members for wait in member["waits"])
    gaps = sorted(gap * 1e3 for crew in rounds for gap in between(crew))
    return {
        "side": side,
        "acquired/s": rate,
        "max/min": harness.Spread.of(fairness(crew) for crew in rounds),
        "wait p50 ms": harness.quantile(waits, 0.5),
        "p99": harness.quantile(waits, 0.99),
        "max": waits[-1],
        "gap p50 ms": harness.quantile(gaps, 0.5),
        "gap p90": harness.quantile(gaps, 0.9),
        "cpu ms": sum(member["cpu"] for member in members) / len(waits) * 1e3,
        "overlaps": sum(member["overlaps"] for member in members),
    }


def fairness(crew: list[dict[str, Any]]) -> float:
    """Return how many times as often the luckiest was served as the unluckiest."""
    served = [len(member["waits"]) for member in crew]
    return max(served) / max(1, min(served))


def between(crew: list[dict[str, Any]]) -> list[float]:
    """Return how long nobody was inside, each time."""
    inside = sorted(span for member in crew for span in member["inside"])
    return [entered - left for (_, left), (entered, _) in itertools.pairwise(inside)]


def shown(row: harness.Row) -> harness.Row:
    return {key: v._asdict() if isinstance(v, harness.Spread) else v for key, v in row.items()}


# What a worker does.


def locking(folder: str) -> Callable[[], AbstractContextManager[object]]:
    fp = Fencepost("sqlite:///" + os.path.join(folder, "fencepost.db"))
    return lambda: fp.lock("x", wait=60)


def queueing(folder: str, first: str = "NORMAL") -> Callable[[], AbstractContextManager[object]]:
    """Wait in the kernel's queue, and commit inside; one connection for each kind of commit."""
    durable, quick = (connected(folder, level) for level in (first, "NORMAL"))
    queue = os.path.join(folder, f"queue-{first}")

    @contextlib.contextmanager
    def lock() -> Iterator[None]:
        fd = os.open(queue, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            durable.execute("UPDATE lease SET held = 1, pid = ? WHERE name = 'x'", (os.getpid(),))
            yield
            quick.execute("UPDATE lease SET held = 0 WHERE name = 'x'")
        finally:
            os.close(fd)

    return lock


def connected(folder: str, synchronous: str) -> sqlite3.Connection:
    db = sqlite3.connect(os.path.join(folder, "floor.db"), isolation_level=None, timeout=60)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute(f"PRAGMA synchronous={synchronous}")
    db.execute(
        "CREATE TABLE IF NOT EXISTS lease (name TEXT PRIMARY KEY, held INTEGER, pid INTEGER)"
        " WITHOUT ROWID"
    )
    db.execute("INSERT OR IGNORE INTO lease VALUES ('x', 0, 0)")
    return db


def syncing(folder: str) -> Callable[[], AbstractContextManager[object]]:
    return queueing(folder, "FULL")


SIDES = {FLOOR: queueing, SYNCED: syncing, OURS: locking}


def work(side: str, folder: str) -> Callable[..., harness.Row]:
    lock = SIDES[side](folder)
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


def alone(witness: int) -> bool:
    try:
        fcntl.flock(witness, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        harness.serve(work(sys.argv[2], sys.argv[3]))
    else:
        main()
