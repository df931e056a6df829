"""A job is a named function with a schedule and policies, all checked when it is declared."""

from __future__ import annotations

import inspect
import json

from fencepost.errors import BadSlot, Misuse, UnknownJob
from fencepost.model.lease import checked_ttl
from fencepost.model.name import checked
from fencepost.model.named import NamedTuple
from fencepost.model.policy import Overlap, Policy, checked_policy
from fencepost.model.schedule import due_slot, schedule_of
from fencepost.model.slot import RunKey, checked_job, instant, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime
    from typing import Any

    from fencepost.model.schedule import Schedule
    from fencepost.model.tier import Tier

# How far a trigger's clock may run ahead of the slot that it means.
EARLY = 1.0
_ISOLATIONS = (None, "thread", "process")
_CATCHUPS = ("latest", "all", "none")
_SCOPES = ("slot", "job")


class Job(NamedTuple):
    """A job as it was declared."""

    name: str
    function: Callable[..., Any]
    schedule: Schedule | None
    policy: Policy
    lock: str | Callable[[int], str]
    isolation: str | None
    scope: str
    needs: Tier
    idempotent: bool

    is_async: bool
    takes_run: bool  # whether the body wants to be given its run

    def lock_of(self, slot: int) -> str:
        """Return what a run of this slot must not overlap with."""
        return checked(self.lock(slot)) if callable(self.lock) else self.lock

    def definition(self) -> str:
        """Return the job as the ledger keeps it, for those who list jobs."""
        policy = self.policy
        facts = {
            "schedule": None if self.schedule is None else str(self.schedule),
            "overlap": policy.overlap.value,
            "retry": None if policy.retry.attempts == 1 else repr(policy.retry),
            "timeout": policy.timeout,
            "lease": policy.lease,
            "on_loss": policy.on_loss.value,
            "lock": "by slot" if callable(self.lock) else self.lock,
            "needs": self.needs.value,
            "idempotent": self.idempotent,
        }
        return json.dumps(facts, sort_keys=True)


class Declared(NamedTuple):
    """The words of ``@fp.job`` that are about more than policies."""

    lock: str | Callable[[int], str] | None
    isolation: str | None
    items: str
    catchup: str
    needs: Tier
    idempotent: bool


def declare(
    name: str,
    function: Callable[..., Any],
    declared: Declared,
    *,
    schedule: dict[str, Any],
    policy: dict[str, Any],
) -> Job:
    """Return the job that was declared, or say which of its words cannot be."""
    name = checked_job(name)
    for what, value, known in (
        ("isolation", declared.isolation, _ISOLATIONS),
        ("catchup", declared.catchup, _CATCHUPS),
        ("items", declared.items, _SCOPES),
    ):
        if value not in known:
            words = ", ".join(repr(word) for word in known)
            raise Misuse(f"job {name!r}: {what} is {value!r}: it must be one of {words}")
    policy["lease"] = checked_ttl(policy["lease"])
    if (
        policy["retry_until"] is None
    ):  # windowed work keeps its order; else the newest is what counts
        policy["retry_until"] = "exhausted" if declared.catchup == "all" else "next_slot"
    checked_words = checked_policy(**policy)
    stoppable = inspect.iscoroutinefunction(function) or declared.isolation == "process"
    if checked_words.overlap is Overlap.REPLACE and not stoppable:
        raise Misuse(
            f"job {name!r} has overlap='replace', but a plain function cannot be stopped: make it "
            "async def, or give it isolation='process'"
        )
    lock = name if declared.lock is None else declared.lock
    return Job(
        name=name,
        function=function,
        schedule=schedule_of(**schedule),
        policy=checked_words,
        lock=lock if callable(lock) else checked(lock),
        isolation=declared.isolation,
        scope=declared.items,
        needs=declared.needs,
        idempotent=declared.idempotent,
        is_async=inspect.iscoroutinefunction(function),
        takes_run=bool(inspect.signature(function).parameters),
    )


class Registry:
    """The jobs that one ``Fencepost`` knows, by name and by function."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}

    def add(self, job: Job) -> None:
        """Know a job from now on; the same name for two functions is a mistake."""
        known = self._jobs.get(job.name)
        if known is not None and known.function is not job.function:
            raise Misuse(f"two jobs are called {job.name!r}: a job's name is its identity")
        self._jobs[job.name] = job

    def find(self, job: str | Callable[..., Any]) -> Job:
        """Return the job with that name, or with that function."""
        if callable(job):
            for known in self._jobs.values():
                if known.function is job:
                    return known
            raise UnknownJob(getattr(job, "__name__", repr(job)), known=list(self._jobs))
        found = self._jobs.get(job)
        if found is None:
            raise UnknownJob(str(job), known=list(self._jobs))
        return found

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))


def run_key(job: Job, slot: datetime | str | float | None, *, now: float) -> RunKey:
    """Return which run a trigger means: that of the slot given, or of the newest one due."""
    if slot is not None:
        return RunKey(job.name, _produced(job, instant(slot), now=now))
    if job.schedule is None:
        raise BadSlot(
            f"job {job.name!r} has no schedule to tell the slot from: give slot=…, or manual=True "
            "for a run of its own"
        )
    due = due_slot(job.schedule, now, early=EARLY)
    if due is None:
        raise BadSlot(f"no slot of job {job.name!r} ({job.schedule}) is due yet")
    return RunKey(job.name, due)


def _produced(job: Job, slot: int, *, now: float) -> int:
    if job.schedule is not None and not job.schedule.contains(slot):
        near = job.schedule.latest(slot)
        hint = "" if near is None else f"; the one before is {shown(near)}"
        raise BadSlot(f"{shown(slot)} is no slot of job {job.name!r} ({job.schedule}){hint}")
    if slot > now + EARLY:
        raise BadSlot(
            f"slot {shown(slot)} of job {job.name!r} is not due yet (it is {shown(int(now))} now): "
            "a slot never starts early"
        )
    return slot


def window_of(job: Job, slot: int) -> tuple[int, int] | None:
    """Return what a slot's run covers: from the slot before it, up to itself."""
    before = None if job.schedule is None else job.schedule.latest(slot - 1)
    return None if before is None else (before, slot)
