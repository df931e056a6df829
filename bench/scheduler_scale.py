"""What it costs to have a million jobs when ten are due each second, beside one indexed table.

The floor is a table with an index on the due time: it polls for the next one, and each of ten due
at the same whole second is claimed by a commit of its own, with ``synchronous=FULL``. It keeps no
record of ends, has no threads, and nobody to take over from. All far jobs are due in a day.
fencepost claims the ten in one commit and lets bodies begin before that is synced: their ends are
(``docs/decisions/0011-claims-settle.md``), so it may well be less late than the floor.

The first thousand jobs are stored by ``fp.store``; the others are copies of one of them, made by
SQLite itself, because this is about what they cost once they are there. How fast they are stored
is in ``scheduler_registration.py``. CPU time is that of the whole process, once it is warm. *Late*
is how long after its second a body began. Memory is what the process has resident in the end.

    python bench/scheduler_scale.py [--quick]
"""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import harness
from fencepost import Fencepost
from guarded import resident_kb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

FEW, MANY, DUE = 1_000, 1_000_000, 10
DAY = 86400
WARM_UP = 1.0
BY_NUMBER, BY_FLOOR = harness.Target(at_most=1.2), harness.Target(at_most=3.0)
MEMORY = harness.Target(at_most=1.1)
OURS, FLOOR = "fencepost", "floor: indexed table, FULL"


class Case(NamedTuple):
    """One side with so many jobs."""

    side: str
    jobs: int

    def __str__(self) -> str:
        return f"{self.side}, {self.jobs:,} jobs"


def main() -> None:
    quick = "--quick" in sys.argv
    rounds, seconds = (2, 3) if quick else (4, 5)
    many = MANY // 10 if quick else MANY
    cases = [Case(side, jobs) for jobs in (FEW, many) for side in (FLOOR, OURS)]
    with harness.workdir() as folder, contextlib.ExitStack() as after:
        crews = {}
        for case in cases:
            FILL[case.side](file_of(folder, *case), case.jobs)
            crew = harness.Crew(__file__, case.side, file_of(folder, *case), count=1)
            after.callback(crew.close)
            crews[case] = crew
        answers: dict[Case, list[dict[str, Any]]] = {case: [] for case in cases}
        for _ in range(rounds):
            cases.reverse()
            for case in cases:
                answers[case] += crews[case].ask(seconds=seconds)
    report(answers, many=many, seconds=seconds)


def report(answers: dict[Case, list[dict[str, Any]]], *, many: int, seconds: int) -> None:
    harness.table(
        f"{DUE} jobs due each second, {len(answers[Case(OURS, many)])} times {seconds} s",
        [row(case, given, seconds=seconds) for case, given in sorted(answers.items(), key=str)],
    )
    few_ours, ours = (cpu(answers[Case(OURS, jobs)]) for jobs in (FEW, many))
    few_floor, floor = (cpu(answers[Case(FLOOR, jobs)]) for jobs in (FEW, many))
    facts = {
        f"CPU with {many:,} jobs, to that with {FEW:,}": (
            harness.ratios(ours, few_ours),
            BY_NUMBER,
        ),
        f"CPU with {FEW:,} jobs, to the floor": (harness.ratios(few_ours, few_floor), BY_FLOOR),
        f"CPU with {many:,} jobs, to the floor": (harness.ratios(ours, floor), BY_FLOOR),
    }
    for jobs in (FEW, many):
        for share in (0.5, 0.99):
            what = f"late p{share * 100:.0f} with {jobs:,} jobs, to the floor"
            mine, base = (late(answers[Case(side, jobs)], share) for side in (OURS, FLOOR))
            facts[what] = (harness.ratios(mine, base), BY_FLOOR)
    sizes = [[given["kb"] for given in answers[Case(OURS, jobs)]] for jobs in (many, FEW)]
    facts[f"memory with {many:,} jobs, to that with {FEW:,}"] = (harness.ratios(*sizes), MEMORY)
    print()
    for what, (ratio, target) in facts.items():
        print(f"{what}: ratio {ratio}; target {target.judged(ratio.median)}")
    harness.result(
        "scheduler_scale",
        jobs=[FEW, many],
        ratios={what: ratio._asdict() for what, (ratio, _) in facts.items()},
        targets={what: target.judged(ratio.median) for what, (ratio, target) in facts.items()},
        cpu_ms={str(case): harness.Spread.of(cpu(given)).median for case, given in answers.items()},
    )


def row(case: Case, answers: list[dict[str, Any]], *, seconds: int) -> harness.Row:
    lateness = sorted(one * 1e3 for given in answers for one in given["late"])
    return {
        "side": case,
        "cpu ms/s": harness.Spread.of(cpu(answers)),
        "late p50 ms": harness.quantile(lateness, 0.5),
        "p99": harness.quantile(lateness, 0.99),
        "max": lateness[-1],
        "MB": max(given["kb"] for given in answers) / 1024,
        "fired": f"{len(lateness)}/{DUE * seconds * len(answers)}",
    }


def cpu(answers: list[dict[str, Any]]) -> list[float]:
    return [given["cpu"] * 1e3 for given in answers]


def late(answers: list[dict[str, Any]], share: float) -> list[float]:
    return [harness.quantile(sorted(given["late"]), share) for given in answers]


def file_of(folder: str, side: str, jobs: int) -> str:
    return os.path.join(folder, f"{'ours' if side == OURS else 'floor'}-{jobs}.db")


# How the files are filled, before anybody has them open.

COPY = """
WITH RECURSIVE number(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM number WHERE i < ?1)
INSERT INTO fencepost_job ({columns})
SELECT {copied} FROM (SELECT * FROM fencepost_job WHERE job = ?2) CROSS JOIN number"""


def fill_ours(path: str, jobs: int) -> None:
    far = int(time.time()) + DAY
    with scheduler(path, lambda: None) as fp:
        fp.store("fire", ({"name": f"due-{i}", "every": "1s"} for i in range(DUE)))
        fp.store("fire", ({"name": f"far-{i:07}", "at": far + i % 3600} for i in range(FEW - DUE)))
    db = sqlite3.connect(path, isolation_level=None)
    hurry(db)
    columns = [name for _, name, *_ in db.execute("PRAGMA table_info(fencepost_job)")]
    other = {"job": "printf('more-%07d', i)", "next_due": "next_due + i % 3600"}
    copied = ", ".join(other.get(name, name) for name in columns)
    if jobs > FEW:
        copy = COPY.format(columns=", ".join(columns), copied=copied)
        db.execute(copy, (jobs - FEW, "far-0000000"))
    settle(db)


def fill_floor(path: str, jobs: int) -> None:
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    hurry(db)
    db.execute("CREATE TABLE job (name TEXT PRIMARY KEY, due REAL, period REAL) WITHOUT ROWID")
    db.execute("CREATE INDEX job_due ON job (due)")
    now = int(time.time())
    rows = [(f"due-{i}", now, 1.0) for i in range(DUE)]
    db.executemany("INSERT INTO job VALUES (?, ?, ?)", rows)
    db.execute(
        "WITH RECURSIVE number(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM number WHERE i < ?) "
        "INSERT INTO job SELECT printf('far-%07d', i), ? + i % 3600, 86400.0 FROM number",
        (jobs - DUE, now + DAY),
    )
    settle(db)


def hurry(db: sqlite3.Connection) -> None:
    """Sync nothing, and keep much in memory, for as long as a file is filled."""
    db.execute("PRAGMA synchronous=OFF")
    db.execute("PRAGMA cache_size=-500000")


def settle(db: sqlite3.Connection) -> None:
    """Have all of it on the disk: else it would be written while others are measured."""
    db.execute("PRAGMA synchronous=FULL")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()


FILL: dict[str, Callable[[str, int], None]] = {FLOOR: fill_floor, OURS: fill_ours}


# What a worker does: it fires for a while each time that it is asked to.


def work(side: str, path: str) -> Callable[..., harness.Row]:
    log = warm_log(path)
    fires: list[float] = []
    turn = {OURS: serving, FLOOR: polling}[side](path, lambda: fires.append(time.time()))

    def measure(seconds: int) -> harness.Row:
        with turn():
            # From half a second to half a second: whatever is due is well inside.
            begin = math.ceil(time.time() + WARM_UP) + 0.5
            time.sleep(begin - time.time())
            cpu = harness.cpu_seconds()
            fires.clear()
            time.sleep(begin + seconds - time.time())
            seen, cpu = fires[:], harness.cpu_seconds() - cpu
        lateness = [at - math.floor(at) for at in seen]
        assert log.total_changes, "closed, it would take the log along"
        return {"cpu": cpu / seconds, "late": lateness, "kb": resident_kb()}

    return measure


def warm_log(path: str) -> sqlite3.Connection:
    """Have a log that no longer grows, for as long as the connection is open.

    A sync of a growing file costs more, and the floor syncs most.
    """
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA wal_autocheckpoint=0")
    db.execute("PRAGMA cache_size=10")  # of no use later, and memory is measured
    db.execute("CREATE TABLE warm (page BLOB)")
    db.execute(
        "WITH RECURSIVE number(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM number WHERE i < 1200) "
        "INSERT INTO warm SELECT zeroblob(4000) FROM number"
    )
    db.execute("DROP TABLE warm")
    db.execute("PRAGMA wal_checkpoint(RESTART)")
    return db


def serving(path: str, fire: Callable[[], None]) -> Callable[[], AbstractContextManager[None]]:
    fp = scheduler(path, fire)

    @contextlib.contextmanager
    def turn() -> Iterator[None]:
        thread = threading.Thread(target=lambda: fp.run(signals=False))
        thread.start()
        try:
            yield
        finally:
            fp.stop()
            thread.join()

    return turn


def scheduler(path: str, fire: Callable[[], None]) -> Fencepost:
    fp = Fencepost("sqlite:///" + path)
    fp.job("fire")(fire)
    return fp


def polling(path: str, fire: Callable[[], None]) -> Callable[[], AbstractContextManager[None]]:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    db.execute("PRAGMA synchronous=FULL")
    over = threading.Event()

    def poll() -> None:
        missed = (math.ceil(time.time()),)
        db.execute("UPDATE job SET due = ? WHERE name BETWEEN 'due-' AND 'due-9'", missed)
        while not over.is_set():
            due = db.execute("SELECT min(due) FROM job").fetchone()[0]
            pause = due - time.time()
            if pause > 0:
                time.sleep(min(pause, 1.0))
            elif claim_one(db):
                fire()

    @contextlib.contextmanager
    def turn() -> Iterator[None]:
        over.clear()
        thread = threading.Thread(target=poll)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    return turn


def claim_one(db: sqlite3.Connection) -> bool:
    """Claim what is due longest, with a commit of its own."""
    claimed = db.execute(
        "UPDATE job SET due = due + period"
        " WHERE name = (SELECT name FROM job WHERE due <= ? ORDER BY due LIMIT 1) RETURNING name",
        (time.time(),),
    )
    return bool(claimed.fetchall())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        harness.serve(work(sys.argv[2], sys.argv[3]))
    else:
        main()
