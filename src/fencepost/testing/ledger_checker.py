"""Six promises that a ledger keeps, and a pure function that proves them or names what breaks one.

one run      a slot has one live run at most; another row of it is one that a backfill on record
             asked for
tokens       on each lock a later claim has a higher token, and its lease knows the highest
no stale end a run was ended by its newest attempt, or by others once that was over
one at once  no two attempts had one lock at the same time, as far as their instants are on record,
             and none still runs that another has followed
every slot   each slot up to the watermark has a row, or lies in exactly one recorded range; none
             above it, before the job began, or outside of its schedule was decided
lives        what is on record of a run is a way through THE TABLE, and each start was counted

The second, third, fourth and last are the promises of ``run_checker`` and ``checker``, which read
the history that the records add up to. Instants are those of the ledger's clock: one that was set
back by hand shows, because then its order is not that of the tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import groupby, pairwise
from typing import NamedTuple

from fencepost.ledger.planning import BACKFILL, BACKFILL_ALL
from fencepost.model.name import base
from fencepost.model.run import LAPSED, State
from fencepost.model.schedule import EveryAfter, schedule_from
from fencepost.model.slot import shown
from fencepost.testing.evidence import attempts_of, grouped, history_of
from fencepost.testing.run_checker import check_runs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fencepost.ledger.planning import Lane, SpanRecord
    from fencepost.model.definition import JobRecord
    from fencepost.model.run import RunRecord
    from fencepost.model.schedule import Schedule
    from fencepost.testing.checker import Violation
    from fencepost.testing.evidence import Attempt, Evidence

# What each promise says, in the order in which it is told.
PROMISES = {
    "one run": "a slot has one live run at most",
    "tokens": "tokens grow on every lock",
    "no stale end": "no run was ended by an attempt that had lost it",
    "one at once": "no two attempts had one lock at one time",
    "every slot": "every slot up to the watermark is decided, once",
    "lives": "every run lived by the table of states, and its starts were counted",
}
_RULES = {
    "tokens grow": "tokens",
    "newest wins": "no stale end",
    "one holder": "one at once",
    "one row": "one run",
    "lives": "lives",
    "counted": "lives",
}
_DECIDED = frozenset({"schedule", "catchup"})
# Of many holes beside each other, so many are named.
_NAMED = 5


class Finding(NamedTuple):
    """A promise that is broken: what to read first, and the rows that show it."""

    promise: str
    says: str
    runs: tuple[RunRecord, ...] = ()
    spans: tuple[SpanRecord, ...] = ()

    def __str__(self) -> str:
        return f"{self.promise}: {self.says}"


class Counts(NamedTuple):
    """How much was looked at."""

    jobs: int = 0
    slots: int = 0
    runs: int = 0
    attempts: int = 0
    ranges: int = 0
    tokens: int = 0
    locks: int = 0


class Proof(NamedTuple):
    """What was found: how much there was, what is broken, and what could not be checked."""

    counts: Counts
    findings: tuple[Finding, ...]
    unknown: tuple[str, ...]

    @property
    def broken(self) -> frozenset[str]:
        """Which promises are broken."""
        return frozenset(finding.promise for finding in self.findings)


def prove(evidence: Evidence) -> Proof:
    """Look for whatever breaks a promise, in all that a ledger has on record."""
    by_job: dict[str, list[RunRecord]] = {}
    for run in evidence.runs:
        by_job.setdefault(run.key.job, []).append(run)
    findings = [
        *_second_rows(evidence.runs),
        *_unasked(evidence),
        *_told(evidence),
        *_low_leases(evidence),
        *_left_running(evidence),
        *_jobless(evidence, by_job),
        *_mixed(evidence),
    ]
    unknown: list[str] = []
    slots = 0
    for job in evidence.jobs:
        walk = _Walk(evidence, job, by_job.get(job.job, []))
        findings += walk.findings()
        unknown += walk.unknown()
        slots += walk.seen
    return Proof(_counts(evidence, slots), tuple(findings), tuple(unknown))


def _counts(evidence: Evidence, slots: int) -> Counts:
    events = grouped(evidence.events)
    tries = [one for run in evidence.runs for one in attempts_of(run, events.get(str(run.key), []))]
    return Counts(
        jobs=len(evidence.jobs),
        slots=slots,
        runs=len(evidence.runs),
        attempts=len(tries),
        ranges=len(evidence.spans),
        tokens=len({(one.run.lease, one.token) for one in tries}),
        locks=len({one.run.lease for one in tries}),
    )


def _second_rows(runs: Iterable[RunRecord]) -> Iterator[Finding]:
    """Find slots with more rows than were asked for."""
    by_slot: dict[tuple[str, int, int], list[RunRecord]] = {}
    for run in runs:
        by_slot.setdefault(run.key[:3], []).append(run)
    for rows in by_slot.values():
        if len(rows) == 1:
            continue
        rows.sort(key=lambda run: run.key.rerun)
        shown_rows = tuple(rows)
        live = [run for run in rows if not run.state.terminal]
        if len(live) > 1:
            yield Finding("one run", f"{rows[0].key} has {len(live)} live runs", shown_rows)
        for before, after in pairwise(rows):
            if before.key == after.key:
                yield Finding("one run", f"{after.key} has two records", shown_rows)
            elif after.trigger not in (BACKFILL, BACKFILL_ALL):
                says = f"{after.key} is a second run of its slot that no backfill asked for"
                yield Finding("one run", says, shown_rows)
            elif before.state.terminal and before.ended_at > after.created_at:
                says = f"{after.key} began to be before {before.key} had ended"
                yield Finding("one run", says, shown_rows)


def _unasked(evidence: Evidence) -> Iterator[Finding]:
    """Find runs that say they were made by a backfill of which nothing is on record."""
    pruned = {job.job: job.pruned for job in evidence.jobs}
    lanes: dict[tuple[str, str], list[Lane]] = {}
    for lane in evidence.lanes:
        lanes.setdefault((lane.job, lane.trigger), []).append(lane)
    for run in evidence.runs:
        job, slot, *_ = run.key
        if run.trigger not in (BACKFILL, BACKFILL_ALL) or slot <= pruned.get(job, -1):
            continue
        asked = lanes.get((job, run.trigger), [])
        if not any(lane.start <= slot < lane.until for lane in asked):
            says = f"{run.key} says that a backfill asked for it, and none of its slot is on record"
            yield Finding("one run", says, (run,))


def _left_running(evidence: Evidence) -> Iterator[Finding]:
    """Find runs that run although another had their lock later, which nothing says they lost.

    A claim that takes a lock from a run which still runs puts that on record.
    """
    newest: dict[str, RunRecord] = {}
    for run in evidence.runs:
        if run.starts and run.token > newest.get(run.lease, run._replace(token=0)).token:
            newest[run.lease] = run
    lapsed = {(event.key, event.token) for event in evidence.events if event.what == LAPSED}
    for run in evidence.runs:
        later = newest.get(run.lease)
        if run.state is not State.RUNNING or later is None or later.token <= run.token:
            continue
        if run.lease == base(run.lease) and (run.key, run.token) not in lapsed:
            says = f"{run.key} still runs, and {later.key} had its lock {run.lease!r} after it"
            yield Finding("one at once", says, (run, later))


def _jobless(evidence: Evidence, runs: dict[str, list[RunRecord]]) -> Iterator[Finding]:
    """Find slots that were decided of jobs which are not on record: no job is ever deleted."""
    known = {mark.job for mark in evidence.marks} | {job.job for job in evidence.jobs}
    for job, rows in runs.items():
        decided = [run for run in rows if run.trigger in _DECIDED]
        complete = bool(evidence.marks) or not evidence.jobs  # as not in an older export
        if complete and job not in known and decided:
            says = f"{len(decided)} slots of job {job!r} were decided, and it is not on record"
            yield Finding("every slot", says, tuple(decided[:1]))


def _told(evidence: Evidence) -> Iterator[Finding]:
    """Have the simulator's checkers read the history that the records add up to."""
    for violation in check_runs(history_of(evidence)):
        promise = _RULES.get(violation.rule)
        if promise is not None:
            yield Finding(promise, violation.says, _concerned(evidence, violation))


def _concerned(evidence: Evidence, violation: Violation) -> tuple[RunRecord, ...]:
    """Return the rows of a violation: the run itself, and who it shared a lock with just then."""
    event = violation.event
    own = [run for run in evidence.runs if str(run.key) == event.run]
    if violation.rule not in ("one holder", "tokens grow"):
        return tuple(own)
    others = [
        run
        for run in evidence.runs
        if run.lease == event.name and run.started_at <= event.at and run not in own
    ]
    others.sort(key=lambda run: run.token if violation.rule == "tokens grow" else run.ended_at)
    return (*others[-1:], *own)


def _low_leases(evidence: Evidence) -> Iterator[Finding]:
    """Find leases that know less than the runs which had them."""
    known = {lease.name: lease.token for lease in evidence.leases}
    highest: dict[str, RunRecord] = {}
    for run in evidence.runs:
        if run.lease and run.token > highest.get(run.lease, run._replace(token=0)).token:
            highest[run.lease] = run
    for lease, run in highest.items():
        if run.token > known.get(lease, run.token):
            says = f"the lease {lease!r} is at {known[lease]}, and {run.key} had {run.token} of it"
            yield Finding("tokens", says, (run,))


def _mixed(evidence: Evidence) -> Iterator[Finding]:
    """Find runs that had a permit of a lock while another run had the whole lock."""
    events = grouped(evidence.events)
    newest = [
        one
        for run in evidence.runs
        for one in attempts_of(run, events.get(str(run.key), []))
        if one.newest and run.lease
    ]
    newest.sort(key=lambda one: (one.run.lock, one.began_at, one.token))
    for lock, attempts in groupby(newest, key=lambda one: one.run.lock):
        last: dict[bool, Attempt] = {}  # the one that lasts longest, of those with a permit or not
        for one in attempts:
            permit = one.run.lease != lock
            other = last.get(not permit)
            if other is not None and other.until > one.began_at:
                says = f"{one.run.key} had {one.run.lease!r} while {other.run.key} had "
                says += f"{other.run.lease!r}"
                yield Finding("one at once", says, (other.run, one.run))
            if permit not in last or one.until > last[permit].until:
                last[permit] = one


class _Walk:
    """A walk over the slots of one job, from where its definition begins to its watermark."""

    def __init__(self, evidence: Evidence, job: JobRecord, runs: list[RunRecord]) -> None:
        self._job = job
        self._spans = sorted(
            (span for span in evidence.spans if span.job == job.job), key=lambda one: one.span.first
        )
        lanes = [lane for lane in evidence.lanes if lane.job == job.job]
        self._owed = [lane for lane in lanes if lane.trigger == "owed"]
        self._decided = [run for run in runs if run.trigger in _DECIDED and not run.key.manual]
        marks = [mark.watermark for mark in evidence.marks if mark.job == job.job]
        self._mark = max(marks) if marks else None
        self._renamed = any(other.retired == f"renamed to {job.job}" for other in evidence.jobs)
        self._runs = {run.key.slot: run for run in runs if not run.key.manual}
        self.seen = 0
        self._since = max(int(job.effective_from), job.pruned)

    def findings(self) -> Iterator[Finding]:
        """Yield what is decided twice, or never."""
        yield from self._crossed()
        yield from self._ahead()
        yield from self._before_it_began()
        yield from self._foreign()
        holes: list[int] = []
        more = 0
        for slot in self._holes():
            holes.append(slot)
            if len(holes) > _NAMED:
                holes.pop()
                more += 1
        if holes:
            named = ", ".join(map(shown, holes)) + (f" and {more} more" if more else "")
            mark = shown(self._job.watermark)
            says = f"job {self._job.job!r} is decided up to {mark}, but nothing is on record of "
            near = (holes[0], holes[-1])
            beside = tuple(
                run for run in (self._before(near[0]), self._after(near[1])) if run is not None
            )
            yield Finding("every slot", says + named, beside)

    def unknown(self) -> Iterator[str]:
        """Say what could not be checked."""
        job = self._job
        name = f"job {job.job!r}"
        older = min((run for run in self._runs), default=self._since + 1) <= self._since
        if job.pruned >= 0:
            yield f"{name}: history up to {shown(job.pruned)} was pruned; its holes cannot be seen"
        elif older and job.epoch > 1:
            yield (
                f"{name}: slots up to {shown(self._since)} belong to earlier definitions, which "
                "the ledger does not keep; their rows were checked, holes cannot be seen"
            )
        if job.epoch and self._zoned() and self._not_in_schedule():
            yield (
                f"{name}: some of its slots are not in its schedule by the time zones of today; "
                "by those of then they may have been"
            )
        if job.spec and isinstance(schedule_from(job.spec), EveryAfter):
            yield f"{name}: its slots follow the ends of its runs; there is no calendar to check by"

    def _crossed(self) -> Iterator[Finding]:
        """Find ranges that are none, that cross each other, or that have a slot which was due."""
        for span in self._spans:
            if span.span.first > span.span.last:
                yield Finding(
                    "every slot", f"a range of {span.job!r} ends before it begins", (), (span,)
                )
        for before, after in pairwise(self._spans):
            if after.span.first <= before.span.last:
                says = f"two ranges of {after.job!r} have {shown(after.span.first)} in common"
                yield Finding("every slot", says, (), (before, after))
        for slot, run in self._runs.items():
            inside = self._span_of(slot)
            if inside is not None and run.trigger in _DECIDED and not run.key.rerun:
                why = inside.span.reason
                says = f"{run.key} was due, and lies in a range ({why}) as well"
                yield Finding("every slot", says, (run,), (inside,))

    def _ahead(self) -> Iterator[Finding]:
        """Find what was decided above the watermark, which moves with each decision, never back."""
        if self._mark is None:
            return
        name, mark = f"job {self._job.job!r}", shown(self._mark)
        above = [run for run in self._decided if run.key.slot > self._mark]
        if above:
            says = f"{name} is decided up to {mark}, and {above[0].key} is above that"
            yield Finding("every slot", says, tuple(above[:_NAMED]))
        spans = [span for span in self._spans if span.span.last > self._mark]
        if spans:
            last = shown(spans[0].span.last)
            says = f"{name} is decided up to {mark}, and a range reaches to {last}"
            yield Finding("every slot", says, (), tuple(spans[:_NAMED]))

    def _before_it_began(self) -> Iterator[Finding]:
        """Find what was decided before the first definition, unless under another name."""
        if self._job.epoch != 1 or self._renamed:
            return
        early = [run for run in self._decided if run.key.slot <= int(self._job.effective_from)]
        if early:
            begins = shown(int(self._job.effective_from))
            says = f"job {self._job.job!r} begins at {begins}, and {early[0].key} is before that"
            yield Finding("every slot", says, tuple(early[:_NAMED]))

    def _foreign(self) -> Iterator[Finding]:
        """Find slots that were decided under the definition in force, which does not have them."""
        foreign = [] if self._zoned() else self._not_in_schedule()
        if foreign:
            says = f"{foreign[0].key} is no slot of {self._job.spec}, under which it was decided"
            yield Finding("every slot", says, tuple(foreign[:_NAMED]))

    def _not_in_schedule(self) -> list[RunRecord]:
        schedule = self._job.schedule if self._job.epoch else None
        if schedule is None or isinstance(schedule, EveryAfter):
            return []
        return [
            run
            for run in self._decided
            if run.epoch == self._job.epoch and not schedule.contains(run.key.slot)
        ]

    def _zoned(self) -> bool:
        """Say whether the schedule follows a time zone, whose rules may have been others then."""
        return _zoned(self._job.schedule)

    def _holes(self) -> Iterator[int]:
        job = self._job
        schedule = job.schedule if job.epoch else None
        if schedule is None or isinstance(schedule, EveryAfter):
            return
        slot = schedule.after(self._since)
        while slot is not None and slot <= job.watermark:
            self.seen += 1
            if not (slot in self._runs or self._span_of(slot) or self._is_owed(slot)):
                yield slot
            slot = schedule.after(slot)

    def _span_of(self, slot: int) -> SpanRecord | None:
        place = bisect_right(self._spans, slot, key=lambda one: one.span.first)
        if place and self._spans[place - 1].span.last >= slot:
            return self._spans[place - 1]
        return None

    def _is_owed(self, slot: int) -> bool:
        """Say whether a slot waits behind the live ones, or was given up there for a reason."""
        return any(_waits(lane, slot) for lane in self._owed)

    def _before(self, slot: int) -> RunRecord | None:
        slots = [other for other in self._runs if other < slot]
        return self._runs[max(slots)] if slots else None

    def _after(self, slot: int) -> RunRecord | None:
        slots = [other for other in self._runs if other > slot]
        return self._runs[min(slots)] if slots else None


def _zoned(schedule: Schedule | None) -> bool:
    return getattr(schedule, "tz", "UTC") != "UTC"


def _waits(lane: Lane, slot: int) -> bool:
    inside = lane.start <= slot < lane.until
    open_ = not lane.ended_at or bool(lane.stopped)
    return inside and open_ and slot >= lane.cursor
