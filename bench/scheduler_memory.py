"""Whether a scheduler's memory stays flat: over an hour of its clock, and over many runs.

The hour passes on a clock that is set by hand: each second ``fp.tick()`` runs what is due of ten
jobs, one after the other, and nothing else is waited for. The runs are herds of 2,000 that go
through the threads of ``fp.run``. Memory is what the process has resident. It is compared with
what it was after a third of the time, when caches are full. How it depends on how many jobs are
registered is in ``scheduler_scale.py``.

    python bench/scheduler_memory.py [--quick]
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

import harness
from fencepost import Fencepost
from fencepost.testing.clock import SettableClocks
from guarded import resident_kb

if TYPE_CHECKING:
    from collections.abc import Callable

FLAT = harness.Target(at_most=1.05)
HOUR, HERDS, HERD = "an hour, 10 jobs every 2 s", "herds of 2,000, 16 threads", 2_000
STEPS = 12


def main() -> None:
    quick = "--quick" in sys.argv
    facts: harness.Row = {}
    for what, step in ((HOUR, 60 if quick else 300), (HERDS, HERD // 4 if quick else HERD)):
        with harness.workdir() as folder, contextlib.ExitStack() as after:
            crew = harness.Crew(__file__, what, folder, count=1)
            after.callback(crew.close)
            said = [crew.ask(step=step)[0] for _ in range(STEPS)]
        sizes, runs = [one["kb"] for one in said], sum(one["runs"] for one in said)
        # The first steps fill what is filled once: thread stacks, and SQLite's cache of pages,
        # which has 2 MB for each connection.
        settled = sizes[STEPS // 3]
        ratio = sizes[-1] / settled
        rows: list[harness.Row] = [
            {"step": number + 1, "runs": one["runs"], "kB": one["kb"]}
            for number, one in enumerate(said)
        ]
        harness.table(f"Memory: {what}", rows)
        judged = FLAT.judged(ratio)
        print(f"\nafter {runs:,} runs: {harness.shown(ratio)} of what it was; target {judged}")
        facts[what] = {"kb": sizes, "runs": runs, "ratio": ratio, "target": judged}
    harness.result("scheduler_memory", **facts)


# What a worker does.


def passing(folder: str) -> Callable[..., harness.Row]:
    """Let so many seconds pass each time."""
    clocks = SettableClocks()
    fp = Fencepost("sqlite:///" + os.path.join(folder, "hour.db"), clocks=clocks)
    fp.job("noop")(lambda: None)
    fp.store("noop", ({"name": f"job-{i}", "every": "2s"} for i in range(10)))

    def pass_time(step: int) -> harness.Row:
        runs = 0
        for _ in range(step):
            clocks.advance(1.0)
            runs += len(fp.tick())
        return {"runs": runs, "kb": resident_kb()}

    return pass_time


def herding(folder: str) -> Callable[..., harness.Row]:
    """Have so many jobs run each time, all due at once."""
    done: list[None] = []
    fp = Fencepost("sqlite:///" + os.path.join(folder, "herds.db"))
    fp.job("noop")(lambda: done.append(None))
    herds = iter(range(1_000_000))

    def herd(step: int) -> harness.Row:
        done.clear()
        number, due = next(herds), int(time.time()) + 2
        fp.store("noop", ({"name": f"job-{number}-{i}", "at": due} for i in range(step)))
        thread = threading.Thread(target=lambda: fp.run(signals=False))
        thread.start()
        give_up = time.monotonic() + 60
        while len(done) < step and time.monotonic() < give_up:
            time.sleep(0.01)
        fp.stop()
        thread.join()
        return {"runs": len(done), "kb": resident_kb()}

    return herd


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        harness.serve({HOUR: passing, HERDS: herding}[sys.argv[2]](sys.argv[3]))
    else:
        main()
