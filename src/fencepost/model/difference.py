"""What registering some definitions would change, told before it is done.

It follows the rules of registration: an edit is in force from now on, never fires for a slot of the
past, and keeps what waits only if the new schedule has that slot too.
"""

from __future__ import annotations

import json
from itertools import islice

from fencepost.model.edited import edit
from fencepost.model.named import NamedTuple
from fencepost.model.plan import next_start
from fencepost.model.rules import rules_from
from fencepost.model.schedule import EveryAfter, described, doubtful, schedule_from, upcoming

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from fencepost.model.definition import Definition, JobRecord
    from fencepost.model.rules import Rules
    from fencepost.model.run import RunRecord
    from fencepost.model.schedule import Schedule

# How many slots to come are shown, and how many of the past are named one by one.
SHOWN, _NAMED = 3, 1000
_OURS = frozenset({"schedule", "catchup"})


class Word(NamedTuple):
    """One thing that a definition says, as it is and as it would be."""

    name: str
    was: str
    now: str


class New(NamedTuple):
    """A job that the ledger does not know yet; ``was`` is its old name, if it only has another."""

    job: str
    schedule: str
    next: tuple[float, ...]
    was: str = ""


class Changed(NamedTuple):
    """A job that would get another definition.

    ``skipped`` are its slots that are due or wait, and would be skipped as ``schedule_changed``.
    """

    job: str
    words: tuple[Word, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]
    skipped: tuple[int, ...] = ()


class Difference(NamedTuple):
    """All that would change, and what to think about first."""

    new: tuple[New, ...] = ()
    changed: tuple[Changed, ...] = ()
    unchanged: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()  # known to the ledger, not declared here
    retired: tuple[tuple[str, str], ...] = ()  # declared here, but retired: the name, and why
    doubts: tuple[tuple[str, str], ...] = ()

    @property
    def empty(self) -> bool:
        """Whether registration would change nothing."""
        return not (self.new or self.changed)


def difference(
    known: Iterable[JobRecord],
    declared: Sequence[Definition],
    *,
    now: float,
    waiting: Sequence[RunRecord] = (),
) -> Difference:
    """Compare what a ledger knows with what is declared. ``waiting`` are runs that never began."""
    records = {record.job: record for record in known}
    names = {definition.job for definition in declared}
    new, changed, unchanged, retired, renamed = [], [], [], [], set()
    for definition in sorted(declared):
        record = records.get(definition.job)
        if record is not None and record.retired:
            retired.append((record.job, record.retired))
        elif record is None or not record.epoch:
            found = _new(definition, records, now=now)
            renamed.add(found.was)
            new.append(found)
        elif record.digest == definition.digest:
            unchanged.append(record.job)
        else:
            ours = [run for run in waiting if run.key.job == record.job]
            changed.append(_changed(record, definition, ours, now=now))
    missing = [
        record.job
        for record in records.values()
        if record.epoch and not (record.retired or record.stored)
        if record.job not in names | renamed
    ]
    doubts = [
        (definition.job, doubt)
        for definition in sorted(declared)
        if definition.spec and (doubt := doubtful(schedule_from(definition.spec))) is not None
    ]
    return Difference(
        *map(tuple, (new, changed, unchanged, sorted(missing), retired, doubts))  # type: ignore[arg-type]
    )


def _new(definition: Definition, records: Mapping[str, JobRecord], *, now: float) -> New:
    old = [records[alias] for alias in definition.aliases if alias in records]
    was = next((record.job for record in old if record.epoch and not record.retired), "")
    schedule = _schedule(definition.spec)
    rules = rules_from(definition.rules)
    return New(definition.job, _meant(schedule), _next(schedule, rules, definition.job, now), was)


def _changed(
    record: JobRecord, definition: Definition, waiting: Sequence[RunRecord], *, now: float
) -> Changed:
    old, new = record.schedule, _schedule(definition.spec)
    name, rules = record.job, rules_from(definition.rules)
    before = _next(old, record.catching_up, name, now)
    skipped: tuple[int, ...] = ()
    if record.spec != definition.spec:
        skipped = _skipped(record, old, new, rules, waiting, now=now)
    return Changed(name, _words(record, definition), before, _next(new, rules, name, now), skipped)


def _skipped(
    record: JobRecord,
    old: Schedule | None,
    new: Schedule | None,
    rules: Rules,
    waiting: Sequence[RunRecord],
    *,
    now: float,
) -> tuple[int, ...]:
    """Return the slots of the old schedule that the new one would not run any more."""
    slots = [
        run.key.slot
        for run in waiting
        if run.trigger in _OURS and not (new is not None and _has(new, run.key.slot))
    ]
    passed = edit(old, new, rules, record.agenda, now=now).passed
    due = (slot for span in passed if old for slot in old.between(span.first, span.last + 1))
    slots += islice(due, max(0, _NAMED - len(slots)))
    return tuple(sorted(slots))


def _has(schedule: Schedule, slot: int) -> bool:
    return not isinstance(schedule, EveryAfter) and schedule.contains(slot)


def _words(record: JobRecord, definition: Definition) -> tuple[Word, ...]:
    was, now = _said(record.definition, record.rules), _said(definition.facts, definition.rules)
    was["schedule"] = _meant(_schedule(record.spec))
    now["schedule"] = _meant(_schedule(definition.spec))
    was["payload"], now["payload"] = record.payload, definition.payload
    was["run by"], now["run by"] = record.template, definition.template
    return tuple(
        Word(name, _shown(was.get(name)), _shown(now.get(name)))
        for name in sorted({*was, *now})
        if was.get(name) != now.get(name)
    )


def _said(facts: str, rules: str) -> dict[str, Any]:
    """Return what a definition says, each thing once."""
    said: dict[str, Any] = json.loads(facts)
    for twice in ("spec", "retries", "catchup"):
        said.pop(twice, None)
    return said | rules_from(rules)._asdict()


def _shown(value: object) -> str:
    return "none" if value is None else str(value)


def _schedule(spec: str) -> Schedule | None:
    return schedule_from(spec) if spec else None


def _meant(schedule: Schedule | None) -> str:
    return "when it is triggered" if schedule is None else f"{schedule}: {described(schedule)}"


def _next(schedule: Schedule | None, rules: Rules, job: str, now: float) -> tuple[float, ...]:
    if schedule is None:
        return ()
    slots = upcoming(schedule, after=now, count=SHOWN)
    starts = (next_start(schedule, rules, job, slot - 1) for slot in slots)
    return tuple(start for start in starts if start is not None)
