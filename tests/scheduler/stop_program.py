"""An instance for the tests that stop it: its body sleeps and hears nothing, or waits for a file.

python stop_program.py URL FOLDER FACE OPTIONS
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import multiprocessing
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from fencepost import AsyncFencepost, Fencepost
from fencepost.errors import OutcomeUnknown
from fencepost.ledger.sqlite import SqliteLedger
from fencepost.serving import ThreadCrew
from fencepost.serving_aio import TaskCrew

if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost import Run
    from fencepost.ledger.api import Attempt
    from fencepost.model.event import JobEvent, LeaseEvent

if __name__ == "__main__":
    URL, FOLDER, FACE, OPTIONS = *sys.argv[1:4], json.loads(sys.argv[4])
else:  # ``fencepost up stop_program:fp``
    URL, FOLDER = os.environ["STOP_URL"], os.environ["STOP_FOLDER"]
    FACE, OPTIONS = "up", json.loads(os.environ["STOP_OPTIONS"])
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT
_MARKS = os.open(f"{FOLDER}/marks", _FLAGS)
POLICIES: dict[str, Any] = {"every": "1h", "lease": "6s", "max_losses": 2, "loss_pause": "100ms"}


def mark(what: str) -> None:
    os.write(_MARKS, f"{what} {os.getpid()} {time.clock_gettime(time.CLOCK_BOOTTIME)}\n".encode())


def body() -> str:
    """Do what the options say, and never ask whether to go on."""
    mark("began")
    if "waits" in (OPTIONS["body"], OPTIONS.get("handler")):
        while not os.path.exists(f"{FOLDER}/go"):
            time.sleep(0.01)
        mark("returns")
        return "done"
    end = time.monotonic() + OPTIONS.get("seconds", 30)
    while time.monotonic() < end:
        time.sleep(0.02)
        mark("lives")
    return "late"


def wait_in_c() -> None:
    """Wait in one call of C for a mutex that nobody unlocks: no signal interrupts it."""
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    libc.pthread_mutex_lock(mutex)
    mark("began")
    libc.pthread_mutex_lock(mutex)


def end_a_child() -> int | None:
    """Fork a child that sleeps, end it by SIGTERM, and return its exit code."""
    mark("began")
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
    child.start()
    child.terminate()
    child.join(5)
    code = child.exitcode
    child.kill()
    return code


def hear(event: JobEvent | LeaseEvent) -> None:
    """Take longer over the event ``cut`` than the process waits for that."""
    if event.what == "cut" and OPTIONS.get("hears slowly"):
        mark("cut")
        time.sleep(5)


def break_when_stopping(crew: type[Any]) -> None:
    """Have the task or thread that serves raise once a stop is ordered."""
    rest = crew.rest

    async def broken(self: Any, seconds: float) -> None:
        await rest(self, seconds)
        if self.stopping:
            raise RuntimeError("the instance broke")

    crew.rest = broken


def lose_replies() -> None:
    """Have each order to stop committed, and its reply lost."""
    commit = SqliteLedger.order_stop

    async def unheard(self: SqliteLedger, attempt: Attempt) -> bool:
        await commit(self, attempt)
        raise OutcomeUnknown("the reply was lost")

    SqliteLedger.order_stop = unheard  # type: ignore[method-assign]


def obey(stop: Callable[[float], object]) -> None:
    """Stop the instance with each grace that the test writes to a file."""

    def wait() -> None:
        while True:
            if os.path.exists(f"{FOLDER}/order"):
                with open(f"{FOLDER}/order") as file:
                    grace = float(file.read())
                os.unlink(f"{FOLDER}/order")
                stop(grace)
                mark("ordered")
            time.sleep(0.01)

    threading.Thread(target=wait, daemon=True).start()


def declared(fp: Fencepost | AsyncFencepost) -> None:
    if OPTIONS["body"] == "alarm":
        fp.alarm("ring")(body)
        fp.job("idle", every="1d")(lambda: None)  # ``fencepost up`` wants one
    elif OPTIONS["body"] == "checks":

        def checks(run: Run) -> None:
            mark("began")
            while True:
                run.check()
                time.sleep(0.01)

        fp.job("steps", **POLICIES)(checks)
    elif OPTIONS["body"] == "blocks":

        async def blocks() -> None:
            body()

        fp.job("steps", **POLICIES)(blocks)
    elif OPTIONS["body"] == "waits in C":

        async def waits() -> None:
            wait_in_c()

        fp.job("steps", **POLICIES)(waits)
    elif OPTIONS["body"] == "ends a child":
        fp.job("steps", **POLICIES)(end_a_child)
    else:
        fp.job("steps", **{**POLICIES, **OPTIONS.get("policies", {})})(body)


def blocking() -> None:
    with Fencepost(URL, on_event=hear) as fp:
        declared(fp)
        obey(lambda grace: fp.stop(grace=grace))
        fp.run(grace=OPTIONS["grace"])
        mark("returned")


async def aio() -> None:
    async with AsyncFencepost(URL, on_event=hear) as fp:
        declared(fp)
        loop = asyncio.get_running_loop()
        obey(lambda grace: loop.call_soon_threadsafe(lambda: fp.stop(grace=grace)))
        await fp.run(grace=OPTIONS["grace"])
        mark("returned")


if OPTIONS.get("breaks"):
    break_when_stopping(ThreadCrew)
    break_when_stopping(TaskCrew)
if OPTIONS.get("replies are lost"):
    lose_replies()
if FACE == "up":
    fp = Fencepost(URL)
    declared(fp)
elif __name__ == "__main__":
    blocking() if FACE == "blocking" else asyncio.run(aio())
