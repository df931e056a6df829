"""A caller asks for a run: which one it means, and how its clock stands to the ledger's."""

from __future__ import annotations

import os

from fencepost.errors import BadSlot
from fencepost.flows.trigger import trigger
from fencepost.model.event import JobEvent
from fencepost.model.meant import (
    SLACK,
    Meant,
    by_ledger,
    clock_off,
    given_slot,
    manual_run,
    newest_slot,
)
from fencepost.model.named import NamedTuple
from fencepost.model.slot import instant, parsed, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from fencepost.flows.course import Doors
    from fencepost.flows.trigger import Errand
    from fencepost.jobs import Job
    from fencepost.ledger.api import Ledger
    from fencepost.model.outcome import Outcome
    from fencepost.model.schedule import Schedule
    from fencepost.model.slot import RunKey
    from fencepost.world.api import Clocks


class CallersClock:
    """The clock of this process, compared with the ledger's whenever that answers.

    A caller whose clock is wrong is told so when that is found out, and again when it is right.
    """

    def __init__(self, clocks: Clocks, emit: Callable[[JobEvent], None], *, host: str) -> None:
        self._clocks, self._emit, self._host = clocks, emit, host
        self._off = 0.0

    def compare(self, now: float, asked: float) -> None:
        """Compare our clock with the ledger's, which showed ``now`` after we had ``asked``."""
        if not -SLACK <= asked - now <= SLACK:
            self._note(clock_off(now, asked=asked, answered=self._clocks.wall()))
        elif self._off:
            self._note(0.0)

    def _note(self, off: float) -> None:
        """Take note how far our clock is ahead of the ledger's; 0 if the two agree."""
        if bool(off) != bool(self._off):
            what = "clock_disagrees" if off else "clock_agrees"
            about = (("instance", f"{self._host}:{os.getpid()}"), ("off", f"{off:+.1f}s"))
            self._emit(JobEvent(what, "", "", 0, about))
        self._off = off

    def now(self) -> float:
        """Return the time of the ledger's clock, as far as is known here."""
        return self._clocks.wall() - self._off

    async def ask(self, ledger: Ledger) -> float:
        """Return the time of the ledger's clock."""
        asked = self._clocks.wall()
        now = await ledger.now()
        self.compare(now, asked)
        return now


class Asked(NamedTuple):
    """What a trigger asks for: a slot of a job, the newest one that is due, or a manual run."""

    job: Job
    slot: datetime | str | float | None = None
    manual: bool = False

    def meant(self, *, now: float) -> Meant | None:
        """Return the run that is meant if the caller's clock is right; None if no slot is due."""
        job, slot = self.job, self.slot
        if self.manual:
            return manual_run(job.name, now=now)
        if slot is not None:
            whole = instant(slot)
            if job.schedule is not None:
                _refuse_unproduced(job, job.schedule, whole)
            return given_slot(job.name, whole)
        if job.schedule is None:
            raise BadSlot(
                f"job {job.name!r} has no schedule to tell the slot from: give slot=…, or "
                "manual=True for a run of its own"
            )
        return newest_slot(job.name, job.schedule, now=now)

    async def meant_there(self, ledger: Ledger, clock: CallersClock) -> Meant:
        """Return the run that is meant by the ledger's clock, where none is due by ours."""
        now = await clock.ask(ledger)
        return by_ledger(self.meant_at(now), now=now)

    def meant_at(self, now: float) -> RunKey:
        """Return the run that is meant at a time of the ledger's clock; raise if none is due."""
        meant = self.meant(now=now)
        if meant is None:
            raise BadSlot(f"no slot of job {self.job.name!r} ({self.job.schedule}) is due yet")
        key = meant.key
        if not key.manual and key.slot > now + SLACK:
            raise BadSlot(
                f"slot {shown(key.slot)} of job {key.job!r} is not due yet (it is "
                f"{shown(int(now))} by the ledger's clock): a slot never starts early"
            )
        return key


def _refuse_unproduced(job: Job, schedule: Schedule, slot: int) -> None:
    if not schedule.contains(slot):
        near = schedule.latest(slot)
        hint = "" if near is None else f"; the one before is {shown(near)}"
        raise BadSlot(f"{shown(slot)} is no slot of job {job.name!r} ({schedule}){hint}")


async def trigger_next(doors: Doors, errand: Errand, outcome: Outcome) -> Outcome:
    """Trigger a manual run whose number is taken under the first number that is free."""
    while outcome.reason == "taken":
        key = parsed(outcome.run_id)
        outcome = await trigger(doors, errand, Meant(key._replace(manual=key.manual + 1)))
    return outcome
