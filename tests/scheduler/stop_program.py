"""An instance for the tests that stop it: its body sleeps and hears nothing, or waits for a file.

python stop_program.py URL FOLDER FACE OPTIONS
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from fencepost import AsyncFencepost, Fencepost

if TYPE_CHECKING:
    from fencepost import Run

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
    if OPTIONS["body"] == "waits":
        while not os.path.exists(f"{FOLDER}/go"):
            time.sleep(0.01)
        mark("returns")
        return "done"
    end = time.monotonic() + OPTIONS.get("seconds", 30)
    while time.monotonic() < end:
        time.sleep(0.02)
        mark("lives")
    return "late"


def declared(fp: Fencepost | AsyncFencepost) -> None:
    if OPTIONS["body"] == "alarm":
        fp.alarm("ring")(body)
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
    else:
        fp.job("steps", **{**POLICIES, **OPTIONS.get("policies", {})})(body)


def blocking() -> None:
    with Fencepost(URL) as fp:
        declared(fp)
        fp.run(grace=OPTIONS["grace"])
        mark("returned")


async def aio() -> None:
    async with AsyncFencepost(URL) as fp:
        declared(fp)
        await fp.run(grace=OPTIONS["grace"])
        mark("returned")


if FACE == "up":
    fp = Fencepost(URL)
    declared(fp)
elif __name__ == "__main__":
    blocking() if FACE == "blocking" else asyncio.run(aio())
