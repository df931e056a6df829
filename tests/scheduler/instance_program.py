"""An instance of the cluster, for the tests that kill it.

python instance_program.py URL FOLDER MODE OPTIONS

Bodies append what they do to FOLDER/effects, events go to FOLDER/events.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Self

from fencepost import AsyncFencepost, Fencepost
from fencepost.flows import serve
from fencepost.ledger import registering
from fencepost.model import cohort

if TYPE_CHECKING:
    from fencepost import AsyncRun, Run
    from fencepost.model.event import JobEvent, LeaseEvent

URL, FOLDER, MODE, OPTIONS = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT
_EFFECTS = os.open(f"{FOLDER}/effects", _FLAGS)
_EVENTS = os.open(f"{FOLDER}/events", _FLAGS)


def done(run: Run | AsyncRun, more: object = "") -> None:
    """Have an effect, if the run is still ours.

    Who is stopped after it was told so has its effect late, and nothing but a fence could know. So
    when it asked is told as well.
    """
    asked = time.clock_gettime(time.CLOCK_BOOTTIME)
    run.check()
    slot = int(run.slot.timestamp())
    facts = f"{run.job} {slot} {run.token} {os.getpid()} {asked} {more}\n"
    os.write(_EFFECTS, facts.encode())


def heard(event: JobEvent | LeaseEvent) -> None:
    more = dict(getattr(event, "more", ()))
    facts = {"what": event.what, "job": getattr(event, "job", ""), "pid": os.getpid(), **more}
    os.write(_EVENTS, (json.dumps(facts, default=str) + "\n").encode())


def instance(**words: Any) -> Fencepost:
    return Fencepost(URL, on_event=heard, **words)


def cluster() -> None:
    """Run twenty jobs a second."""
    fp = instance()
    dice = random.Random(os.getpid())

    def body(run: Run) -> None:
        done(run)
        time.sleep(dice.random() * 0.05)

    for number in range(OPTIONS["jobs"]):
        fp.job(f"job-{number}", every="1s", lease=OPTIONS["lease"])(body)
    with fp:
        fp.run(concurrency=8, grace="2s")


def ticks() -> None:
    """Tick once a second, with a budget, as a cloud would."""
    with instance() as fp:

        @fp.job("quick", every="1s")
        def quick(run: Run) -> None:
            done(run)

        @fp.job("long", every="5s", catchup="all")
        def long(run: Run) -> None:
            for step in range(run.checkpoint or 0, OPTIONS["steps"]):
                time.sleep(0.05)
                run.save(step + 1)
                done(run, step)

        while not os.path.exists(f"{FOLDER}/enough"):
            with Lateness() as late:
                began = time.monotonic()
                fp.tick(budget=OPTIONS["budget"])
                took = time.monotonic() - began
            heard_tick(took, late.worst)
            time.sleep(max(0.0, 1 - took))


class Lateness(threading.Thread):
    """How much later than asked for this machine wakes a thread: none of fencepost's doing."""

    worst = 0.0

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            self._over.wait(0.01)
            self.worst = max(self.worst, time.monotonic() - began - 0.01)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self.join()


def heard_tick(took: float, late: float) -> None:
    os.write(_EVENTS, (json.dumps({"what": "tick", "took": took, "late": late}) + "\n").encode())


def clocked() -> None:
    """Be an instance whose wall clock may be off."""
    with instance() as fp:

        @fp.job("job", every="1s")
        def job(run: Run) -> None:
            done(run)

        if OPTIONS.get("knows"):
            fp.job("other", every="1s")(job)
        fp.run(grace="1s")


def deploy() -> None:
    """Be version A or B of a program, in a world where the dead are forgotten soon."""
    for module, name, value in (
        (cohort, "GONE_AFTER", OPTIONS["gone_after"]),
        (registering, "GONE_AFTER", OPTIONS["gone_after"]),
        (serve, "ATTEND", 0.5),
    ):
        setattr(module, name, value)
    with instance(orphan_after=OPTIONS["orphan_after"]) as fp:

        @fp.job("kept", every=OPTIONS["every"], lease="2s")
        def kept(run: Run) -> None:
            done(run, OPTIONS["version"])

        if OPTIONS["version"] == "A":

            @fp.job("removed", every="1s", lease="2s")
            def removed(run: Run) -> None:
                done(run, OPTIONS["version"])

        fp.run(grace="1s")


def stopped() -> None:
    """Be stopped in the middle of a long body."""
    with instance() as fp:

        @fp.job("steps", every="1h", lease="5s")
        def steps(run: Run) -> None:
            for step in range(run.checkpoint or 0, OPTIONS["steps"]):
                done(run, step)
                time.sleep(0.05)
                if OPTIONS["saves"]:
                    run.save(step + 1)

        fp.run(grace=OPTIONS["grace"])


def stopped_aio() -> None:
    """Be stopped in the middle of a long coroutine."""

    async def main() -> None:
        async with AsyncFencepost(URL, on_event=heard) as fp:

            @fp.job("steps", every="1h", lease="5s")
            async def steps(run: AsyncRun) -> None:
                for step in range(run.checkpoint or 0, OPTIONS["steps"]):
                    done(run, step)
                    await asyncio.sleep(0.05)
                    if OPTIONS["saves"]:
                        await run.save(step + 1)

            await fp.run(grace=OPTIONS["grace"])

    asyncio.run(main())


def poison() -> None:
    """Be killed by a job, beside others that are well."""
    with instance() as fp:

        @fp.job("deadly", every="1s", lease="2s", max_losses=2, loss_pause="100ms")
        def deadly(run: Run) -> None:
            done(run)
            os._exit(3)

        @fp.job("well", every="1s", lease="2s")
        def well(run: Run) -> None:
            done(run)

        fp.run(grace="1s")


def backfill() -> None:
    """Make up for the past, until killed."""
    with instance() as fp:

        @fp.job("past", every="1h", lease="2s")
        def past(run: Run) -> None:
            done(run)
            time.sleep(OPTIONS["pace"])

        fp.backfill("past", OPTIONS["start"], OPTIONS["end"])


if __name__ == "__main__":
    globals()[MODE]()
