"""What the tests of executors share: a slot, a way to look at the ledger, and patience."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from fencepost import AsyncFencepost, Fencepost
from fencepost.model.slot import parsed
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fencepost.model.outcome import Outcome
    from fencepost.model.run import RunEvent, RunRecord

SLOT = datetime(2026, 1, 20, 2, tzinfo=UTC)
LATER = datetime(2026, 1, 20, 3, tzinfo=UTC)
RUN = "job@2026-01-20T02:00:00Z"
PATIENCE = 30.0
PYTHON = sys.executable


def wait_for(what: Callable[[], Any], *, patience: float = PATIENCE) -> Any:
    """Return the first truth that ``what`` tells."""
    give_up = time.monotonic() + patience
    while True:
        found = what()
        if found:
            return found
        assert time.monotonic() < give_up, f"{what} never came true"
        time.sleep(0.02)


def lives(pid: int) -> bool:
    """Say whether a process is there, and no mere corpse."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter: it ended while we read
        return False


def number_in(path: Path) -> int:
    """Wait for a file with a number in it."""

    def read() -> int:
        with contextlib.suppress(OSError, ValueError):
            return int(path.read_text())
        return 0

    number: int = wait_for(read)
    return number


def record(fp: Fencepost, run: str = RUN) -> RunRecord:
    found = finish(fp._working.ledger.find(parsed(run)))
    assert found is not None
    return found


def events(fp: Fencepost, run: str = RUN) -> list[RunEvent]:
    return finish(fp._working.ledger.events(parsed(run)))


def triggered(
    face: str, url: str, declare: Callable[[Any], None], slot: datetime = SLOT
) -> Outcome:
    """Declare a job called ``job`` on either face, trigger it, and return what became of it."""
    if face == "blocking":
        with Fencepost(url) as fp:
            declare(fp)
            return fp.trigger("job", slot)

    async def work() -> Outcome:
        async with AsyncFencepost(url) as afp:
            declare(afp)
            return await afp.trigger("job", slot)

    return asyncio.run(work())


class Triggered(threading.Thread):
    """A trigger under way in another thread."""

    def __init__(self, face: str, url: str, declare: Callable[[Any], None]) -> None:
        super().__init__(daemon=True)
        self._asked = (face, url, declare)
        self.outcomes: list[Outcome] = []
        self.start()

    def run(self) -> None:
        self.outcomes.append(triggered(*self._asked))

    def outcome(self) -> Outcome:
        self.join(PATIENCE)
        return self.outcomes[0]


def environment(**more: str) -> dict[str, str]:
    """Return an environment for a program of the tests."""
    return {**os.environ, "PYTHONPATH": os.path.dirname(os.path.abspath(__file__)), **more}
