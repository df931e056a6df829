"""A job is a named function with a schedule and policies, all checked when it is declared."""

from __future__ import annotations

import inspect
import json

from fencepost.errors import Misuse, UnknownJob
from fencepost.model.definition import Definition
from fencepost.model.lease import checked_ttl
from fencepost.model.name import checked
from fencepost.model.named import NamedTuple
from fencepost.model.policy import NEVER_AGAIN, Overlap, Policy, Retry, checked_policy
from fencepost.model.rules import CatchUp, Rules, checked_rules, text_of
from fencepost.model.schedule import EveryAfter, schedule_from, schedule_of, spec_of
from fencepost.model.slot import checked_job
from fencepost.model.tier import Tier

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

    from fencepost.ledger.planning import Begun
    from fencepost.model.run import RunRecord
    from fencepost.model.schedule import Schedule

_ISOLATIONS = (None, "thread", "process")
_PINS = (None, "epoch")
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

    rules: Rules = Rules()
    aliases: tuple[str, ...] = ()
    pin: str | None = None

    def lock_of(self, slot: int) -> str:
        """Return what a run of this slot must not overlap with."""
        return checked(self.lock(slot)) if callable(self.lock) else self.lock

    def definition(self) -> str:
        """Return the job as the ledger keeps it, for those who list jobs."""
        policy = self.policy
        facts = {
            "schedule": None if self.schedule is None else str(self.schedule),
            "spec": None if self.schedule is None else spec_of(self.schedule),
            "catchup": self.rules.catchup.value,
            "overlap": policy.overlap.value,
            "retry": None if policy.retry.attempts == 1 else repr(policy.retry),
            "retries": _parts(policy.retry),
            "timeout": policy.timeout,
            "handoff_beat": policy.handoff_beat,
            "lease": policy.lease,
            "on_loss": policy.on_loss.value,
            "lock": "by slot" if callable(self.lock) else self.lock,
            "needs": self.needs.value,
            "idempotent": self.idempotent,
        }
        if policy.leave_children:  # jobs that do not say so keep the definition that they had
            facts["leave_children"] = True
        return json.dumps(facts, sort_keys=True)

    def defined(self, *, build: int = 0) -> Definition:
        """Return the job as a ledger plans it."""
        spec = "" if self.schedule is None else spec_of(self.schedule)
        return Definition(
            self.name,
            spec,
            text_of(self.rules),
            self.name,
            self.definition(),
            aliases=self.aliases,
            build=build,
        )

    @property
    def stirs(self) -> bool:
        """Whether another run of it may wait for one that ends."""
        return (
            self.policy.overlap in (Overlap.RESCHEDULE, Overlap.REPLACE)
            or self.rules.catchup is CatchUp.ALL
            or isinstance(self.schedule, EveryAfter)
        )


def rivals_of(jobs: Iterable[Job]) -> dict[str, tuple[str, ...]]:
    """Return, for each job that shares its lock, the other jobs with that lock.

    A lock that depends on the slot is not known before the slot is, and does not count.
    """
    by_lock: dict[str, list[str]] = {}
    for job in jobs:
        if isinstance(job.lock, str):
            by_lock.setdefault(job.lock, []).append(job.name)
    return {
        name: tuple(other for other in names if other != name)
        for names in by_lock.values()
        if len(names) > 1
        for name in names
    }


def _parts(retry: Retry) -> list[float] | None:
    if retry.attempts == 1:
        return None
    return [retry.attempts, retry.base, retry.factor, retry.ceiling, retry.jitter]


class Declared(NamedTuple):
    """The words of ``@fp.job`` that are about more than time and policies."""

    lock: str | Callable[[int], str] | None
    isolation: str | None
    items: str
    needs: Tier
    idempotent: bool
    aliases: tuple[str, ...] = ()
    pin: str | None = None


class Words(NamedTuple):
    """The words of a job, sorted by what they are about."""

    declared: Declared
    schedule: dict[str, Any]
    rules: dict[str, Any]
    policy: dict[str, Any]


_SCHEDULE = ("cron", "every", "at", "tz", "second", "day_match", "dst_gap", "dst_fold")
_RULES = (
    *("catchup", "start_deadline", "jitter", "catchup_limit", "catchup_window", "catchup_pause"),
    "live_first",
)


def sorted_words(words: dict[str, Any], *, needs: Tier) -> Words:
    """Return the words of ``@fp.job``, each where it belongs: what is left are policies."""
    schedule = {word: words.pop(word) for word in _SCHEDULE}
    rules = {word: words.pop(word) for word in _RULES}
    own = {word: words.pop(word) for word in Declared._fields}
    own |= {"needs": needs, "aliases": tuple(own["aliases"])}
    return Words(Declared(**own), schedule, rules, words)


def declare(name: str, function: Callable[..., Any], words: Words) -> Job:
    """Return the job that was declared, or say which of its words cannot be."""
    name = checked_job(name)
    declared, schedule, rules = words.declared, words.schedule, words.rules
    policy = dict(words.policy)
    for what, value, known in (
        ("isolation", declared.isolation, _ISOLATIONS),
        ("items", declared.items, _SCOPES),
        ("pin", declared.pin, _PINS),
    ):
        if value not in known:
            choice = ", ".join(repr(word) for word in known)
            raise Misuse(f"job {name!r}: {what} is {value!r}: it must be one of {choice}")
    policy["lease"] = checked_ttl(policy["lease"])
    checked_time = checked_rules(**rules)
    policy["start_deadline"] = checked_time.start_deadline
    if policy["overlap"] == "reschedule" and checked_time.start_deadline is None:
        policy["start_deadline"] = checked_time.window  # nothing waits for ever
    if any(schedule.get(word) is not None for word in ("cron", "every", "at")):
        _refuse_haste(name, checked_time)
    if policy["retry_until"] is None:
        # Windowed work keeps its order; else the newest is what counts.
        policy["retry_until"] = "exhausted" if rules["catchup"] == "all" else "next_slot"
    checked_words = checked_policy(**policy)
    guarded = declared.isolation == "process" or getattr(function, "stoppable", False)  # a command
    stoppable = guarded or inspect.iscoroutinefunction(function)
    if checked_words.overlap is Overlap.REPLACE and not stoppable:
        raise Misuse(
            f"job {name!r} has overlap='replace', but a plain function cannot be stopped: make it "
            "async def, or give it isolation='process'"
        )
    if checked_words.leave_children and not guarded:
        raise Misuse(
            f"job {name!r} has leave_children=True, but nothing stops the children of a body in "
            "this process: leave the word out, or give the job isolation='process'"
        )
    lock = name if declared.lock is None else declared.lock
    job = Job(
        name=name,
        function=function,
        schedule=schedule_of(**schedule, spread=name),
        policy=checked_words,
        lock=lock if callable(lock) else checked(lock),
        isolation=declared.isolation,
        scope=declared.items,
        needs=declared.needs,
        idempotent=declared.idempotent,
        is_async=inspect.iscoroutinefunction(function),
        takes_run=bool(inspect.signature(function).parameters),
        rules=checked_time,
        aliases=tuple(checked_job(alias) for alias in declared.aliases),
        pin=declared.pin,
    )
    why = getattr(function, "why_not", _suits)(job)  # a body of ours may not suit every job
    if why is not None:
        raise Misuse(f"job {name!r} {why}")
    return job


def _refuse_haste(name: str, rules: Rules) -> None:
    """Refuse a deadline that passes before anybody looks: no slot of the job would ever start."""
    deadline = rules.start_deadline
    if deadline is not None and deadline < 1:
        raise Misuse(
            f"job {name!r}: start_deadline is {deadline:g} s: give 1 s or more, else nobody looks "
            "often enough to start anything"
        )


def _suits(_: Job) -> str | None:
    """Stand in for a body that is a plain function: it suits every job."""
    return None


def carried_by(body: Callable[..., Any], known: Job | None, run: RunRecord, policy: Policy) -> Job:
    """Return a run's job with another body: that of whoever it was handed off to."""
    job = known or Job(
        name=run.key.job,
        function=body,
        schedule=None,
        policy=policy,
        lock=run.lock,
        isolation=None,
        scope="slot",
        needs=Tier.T1,
        idempotent=False,
        is_async=False,
        takes_run=True,
    )
    return job._replace(
        function=body,
        isolation=None,
        is_async=inspect.iscoroutinefunction(body),
        takes_run=bool(inspect.signature(body).parameters),
    )


def policy_from(definition: str) -> Policy:
    """Return what a definition tells of a job's policies: enough to end its runs from afar."""
    facts = json.loads(definition)
    retries = facts.get("retries")
    names = ("attempts", "base", "factor", "ceiling", "jitter")
    retry = Retry(**dict(zip(names, retries, strict=True))) if retries else NEVER_AGAIN
    known = {name: facts[name] for name in ("timeout", "lease", "handoff_beat") if name in facts}
    return Policy(retry=retry, **known)


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

    def get(self, name: str) -> Job | None:
        """Return the job with that name, if there is one."""
        return self._jobs.get(name)

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))


def window_in_force(job: Job, slot: int, begun: Begun | None) -> tuple[int, int] | None:
    """Return what a run covers by the schedule in force, or by the one declared here."""
    if begun is None or not begun.spec:
        return window_of(job.schedule, slot)
    return window_of(schedule_from(begun.spec), slot, since=begun.since)


def window_of(
    schedule: Schedule | None, slot: int, *, since: float = 0.0
) -> tuple[int, int] | None:
    """Return what a slot's run covers: from the slot before it, up to itself.

    The first slot of a schedule that is in force ``since`` an instant covers what came after that.
    """
    before = None if schedule is None else schedule.latest(slot - 1)
    if before is None:
        return None
    return (int(since) if before < since < slot else before), slot
