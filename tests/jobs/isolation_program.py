"""An instance of its own: ``isolation_program.py URL FACE JOB ISOLATION [LEASE]`` triggers a slot.

The job is the body of that name; what became of it is printed. The face *forking* is the blocking
one, in a thread; once its body runs, it forks a bystander.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import isolation_bodies as bodies

from fencepost import AsyncFencepost, Fencepost

if TYPE_CHECKING:
    from fencepost.model.outcome import Outcome

SLOT = datetime(2026, 1, 20, 2, tzinfo=UTC)


def main(url: str, face: str, job: str, isolation: str, lease: str = "30s") -> None:
    words: dict[str, Any] = {
        "isolation": None if isolation == "none" else isolation,
        "lease": lease,
        "max_losses": 1,
        "loss_pause": "10ms",
        "cancel_grace": "20s",
    }
    bodies.note("parent", os.getpid())
    if face == "forking":
        threading.Thread(target=main, args=(url, "blocking", job, isolation, lease)).start()
        bodies.found("pid")
        if os.fork() == 0:
            os.close(1)
            os.close(2)  # whoever reads these does not wait for us
            bodies.note("bystander", os.getpid())
            signal.pause()
    elif face == "blocking":
        with Fencepost(url) as fp:
            fp.job(job, **words)(getattr(bodies, job))
            outcome = fp.trigger(job, SLOT, wait="40s")
            tell(outcome)
    else:
        tell(asyncio.run(asynchronous(url, job, words)))


def tell(outcome: Outcome) -> None:
    print(outcome.status, outcome.reason, outcome.result)


async def asynchronous(url: str, job: str, words: dict[str, Any]) -> Outcome:
    async with AsyncFencepost(url) as fp:
        fp.job(job, **words)(getattr(bodies, job))
        return await fp.trigger(job, SLOT, wait="40s")


if __name__ == "__main__":
    main(*sys.argv[1:])
