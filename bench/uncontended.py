"""What a free lock costs: ``with fp.lock("x"): pass`` beside two raw commits, one by one.

The floor is one connection that commits two single-row updates, both with ``synchronous=FULL``.
Below it, what one acquire and release asks of the file and of the kernel is counted, not timed.

    python bench/uncontended.py [--quick]
"""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import struct
import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple

import harness
from fencepost import Fencepost

if TYPE_CHECKING:
    from collections.abc import Callable

TARGET = harness.Target(at_most=0.85)
OURS, FLOOR = "fencepost: with lock", "floor: two raw FULL commits"
_WAL_HEADER, _FRAME_HEADER = 32, 24


class Counted(NamedTuple):
    """What one acquire and release comes to, on average."""

    commits: float
    pages: float
    syncs: float | None
    calls: dict[str, float]


def main() -> None:
    quick = "--quick" in sys.argv
    with harness.workdir() as folder:
        medians = measured(folder, rounds=10 if quick else 60, per_round=20 if quick else 40)
        counted = count(folder)
    ratio = harness.ratios(medians[OURS], medians[FLOOR])
    rows: list[harness.Row] = [
        {"µs per operation": name, "median (quartiles)": harness.Spread.of(us(times))}
        for name, times in medians.items()
    ]
    harness.table("Uncontended: acquire + release on SQLite", rows)
    print(f"\nratio {ratio}; target {TARGET.judged(ratio.median)}")
    report(counted)
    harness.result(
        "uncontended",
        ratio=ratio._asdict(),
        target=TARGET.judged(ratio.median),
        us={name: harness.Spread.of(us(times)).median for name, times in medians.items()},
        counted=counted._asdict(),
    )


def measured(folder: str, *, rounds: int, per_round: int) -> dict[str, list[float]]:
    with Fencepost(url(folder)) as fp:
        sides = {FLOOR: raw_commits(folder), OURS: locking(fp)}
        # A log that still grows makes each sync dearer, the floor's two most of all: so both
        # logs reach their 1,000 pages and begin anew before anything is timed.
        harness.in_turn(sides, rounds=1, per_round=600)
        return harness.in_turn(sides, rounds=rounds, per_round=per_round)


def locking(fp: Fencepost) -> Callable[[], None]:
    def operation() -> None:
        with fp.lock("x"):
            pass

    return operation


def raw_commits(folder: str) -> Callable[[], None]:
    db = sqlite3.connect(os.path.join(folder, "raw.db"), isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=FULL")
    db.execute("CREATE TABLE lease (name TEXT PRIMARY KEY, held INTEGER) WITHOUT ROWID")
    db.execute("INSERT INTO lease VALUES ('x', 0)")

    def operation() -> None:
        db.execute("UPDATE lease SET held = 1 WHERE name = 'x'")
        db.execute("UPDATE lease SET held = 0 WHERE name = 'x'")

    return operation


def count(folder: str, *, cycles: int = 100) -> Counted:
    """Count commits in the file itself, and system calls where strace is installed."""
    with Fencepost(url(folder)) as fp:
        operation = locking(fp)
        operation()
        fp_path = os.path.join(folder, "fencepost.db")
        checkpoint(fp_path)  # so that the log begins anew and does not wrap meanwhile
        for _ in range(cycles):
            operation()
        commits, pages = in_log(fp_path + "-wal")
    calls = traced(folder, cycles=cycles)
    syncs = sum(calls.get(call, 0.0) for call in ("fsync", "fdatasync")) if calls else None
    return Counted(commits / cycles, pages / cycles, syncs, calls)


def in_log(path: str) -> tuple[int, int]:
    """Return how many commits and pages a write-ahead log holds since it last began anew."""
    with open(path, "rb") as file:
        log = file.read()
    page_size = struct.unpack(">I", log[8:12])[0]
    salt, commits, pages = log[16:24], 0, 0
    for start in range(_WAL_HEADER, len(log), _FRAME_HEADER + page_size):
        frame = log[start : start + _FRAME_HEADER]
        if frame[8:16] != salt:
            break  # the rest is older
        pages += 1
        commits += frame[4:8] != bytes(4)  # only a commit says how large the file is now
    return commits, pages


def checkpoint(path: str) -> None:
    db = sqlite3.connect(path)
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()


def traced(folder: str, *, cycles: int) -> dict[str, float]:
    """Return the system calls of one acquire and release: those of many less those of none."""
    if shutil.which("strace") is None:
        return {}
    many, none = (calls_of(folder, cycles=n) for n in (cycles + 1, 1))
    return {
        call: (times - none.get(call, 0)) / cycles
        for call, times in sorted(many.items(), key=lambda item: -item[1])
        if times - none.get(call, 0) >= cycles / 10
    }


def calls_of(folder: str, *, cycles: int) -> dict[str, int]:
    summary = os.path.join(folder, "calls")
    ourselves = [sys.executable, __file__, "--cycle", folder, str(cycles)]
    subprocess.run(["strace", "-f", "-c", "-o", summary, *ourselves], check=True)
    with open(summary, encoding="utf-8") as file:
        lines = file.read()
    # share of time, seconds, µs a call, calls, errors if any, name
    found = re.findall(r"^ *[\d.]+ +[\d.]+ +\d+ +(\d+) +(?:\d+ +)?(\w+)$", lines, re.MULTILINE)
    return {call: int(times) for times, call in found if call != "total"}


def cycle(folder: str, times: int) -> None:
    with Fencepost(url(folder)) as fp:
        operation = locking(fp)
        for _ in range(times):
            operation()


def report(counted: Counted) -> None:
    asked = {"commits": counted.commits, "pages written": counted.pages}
    if counted.syncs is not None:
        asked |= {"syncs": counted.syncs, "system calls": sum(counted.calls.values())}
    harness.table(
        "Counted for one acquire + release",
        [{"what": what, "times": times} for what, times in {**asked, **counted.calls}.items()],
    )
    if counted.syncs is None:
        print("\nstrace is not installed: syncs were not counted")


def url(folder: str) -> str:
    return "sqlite:///" + os.path.join(folder, "fencepost.db")


def us(seconds: list[float]) -> list[float]:
    return [value * 1e6 for value in seconds]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--cycle"]:
        cycle(sys.argv[2], int(sys.argv[3]))
    else:
        main()
