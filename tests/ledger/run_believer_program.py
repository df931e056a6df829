"""A process that has a run with a long lease, and says until when it believed in it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from fencepost import Fencepost, LeaseLost, Run
from fencepost.world.clocks import SystemClocks

_boottime = SystemClocks().boottime
SLOT = "2026-01-01T00:00:00Z"


def main(url: str, namespace: str, what: str, lease: str, path: str) -> None:
    """Have a run until it is lost, or until this process is."""
    fp = Fencepost(url, namespace=namespace)

    @fp.job(name="job", lease=lease, overlap="reschedule")
    def job(run: Run) -> None:
        print("began", run.token, flush=True)
        if what == "hand_over":
            run.hand_over()
            print("handed", flush=True)
            time.sleep(60)
        believed = _boottime()
        try:
            while True:
                run.check()
                believed = _boottime()
                time.sleep(0.002)
        except LeaseLost as lost:
            print("lost", believed, lost, flush=True)
            raise

    if what == "apart":
        os.environ["MARKS"] = path
        fp.job(name="apart", lease=lease, isolation="process")(leave_marks)
    fp.trigger("apart" if what == "apart" else job, slot=SLOT)


def leave_marks(run: Run) -> None:
    """Say, all the time, that this body is at work."""
    marks = Path(os.environ["MARKS"])
    with marks.open("a") as file:
        while True:
            file.write(f"{_boottime()} {run.token}\n")
            file.flush()
            time.sleep(0.005)


if __name__ == "__main__":
    main(*sys.argv[1:])
