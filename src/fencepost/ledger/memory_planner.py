"""The reference of the scheduling side: dictionaries, under the lock of the store's leases."""

from __future__ import annotations

from operator import itemgetter

from fencepost.errors import RunLost
from fencepost.ledger import registering
from fencepost.ledger.planning import PAGE, InstanceRecord, Lane, Note, Slots, SpanRecord
from fencepost.ledger.retention import at_once, forgotten
from fencepost.ledger.ticking import tick
from fencepost.model.claim import Claimed, Verdict
from fencepost.model.lease import Grant
from fencepost.model.plan import Past, Span, goes_on
from fencepost.model.run import State, newest
from fencepost.model.slot import RunKey
from fencepost.model.turns import NEWEST

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import TypeVar

    from fencepost.ledger.memory import MemoryBooks, MemoryLedger
    from fencepost.ledger.planning import Ask, Due, Ear, End, Instance, JobPlace, RunPlace, Ticked
    from fencepost.model.claim import Want
    from fencepost.model.cohort import Cohort
    from fencepost.model.definition import Definition, JobRecord
    from fencepost.model.run import RunEvent, RunRecord
    from fencepost.world.api import World

    P = TypeVar("P", JobPlace, RunPlace)
    T = TypeVar("T")

_WAITING = (State.PENDING, State.WAITING_RETRY)


class MemoryPlanner:
    """Plans over what a ``MemoryLedger`` has."""

    def __init__(self, world: World, ledger: MemoryLedger) -> None:
        self._world, self._ledger, self._turn = world, ledger, ledger.leases.turn

    async def announce(
        self, instance: Instance | None, definitions: Sequence[Definition]
    ) -> list[Note]:
        """Make jobs known."""
        with self._turn:
            return registering.announce(self._desk(), instance, definitions)

    async def attend(self, instance: Instance) -> list[Note]:
        """Say that an instance lives, and see to those that do not."""
        with self._turn:
            clock = Note("clock", "", about=(("off", 0.0),))  # there is only one
            return [clock, *registering.attend(self._desk(), instance)]

    async def depart(self, instance: Instance) -> None:
        """Say that an instance has ended."""
        with self._turn:
            registering.depart(self._desk(), instance)

    async def store(self, definitions: Sequence[Definition]) -> int:
        """Keep jobs in the ledger itself."""
        with self._turn:
            return registering.store(self._desk(), definitions)

    async def tick(self, ask: Ask) -> Ticked:
        """Carry one tick out."""
        with self._turn:
            return tick(self._desk(), ask)

    async def pause(self, job: str, *, reason: str, until: float = 0.0) -> JobRecord:
        """Let the slots of a job pass."""
        with self._turn:
            return registering.pause(self._desk(), job, reason=reason, until=until)

    async def resume(self, job: str) -> JobRecord:
        """Let a job run again."""
        with self._turn:
            return registering.resume(self._desk(), job)

    async def retire(self, job: str, *, reason: str) -> JobRecord:
        """End a job for good."""
        with self._turn:
            return registering.retire(self._desk(), job, reason=reason)

    async def backfill(self, lane: Lane) -> Lane:
        """Have slots of the past made up."""
        with self._turn:
            return registering.backfill(self._desk(), lane)

    async def lanes(self, *, active: bool = True) -> list[Lane]:
        """Return what is being made up."""
        with self._turn:
            lanes = sorted(self._ledger.books.lanes.values())
            return [lane for lane in lanes if not (active and lane.ended_at)]

    async def lane(self, number: int) -> Lane | None:
        """Return one of what was ever to be made up."""
        with self._turn:
            return self._ledger.books.lanes.get(number)

    async def stop_lane(self, number: int, *, reason: str) -> None:
        """Stop making up what was not begun yet."""
        with self._turn:
            lane = self._ledger.books.lanes.get(number)
            if lane is not None and not lane.ended_at:
                now = self._world.clocks.wall()
                self._ledger.books.lanes[number] = lane._replace(ended_at=now, stopped=reason)

    async def prune(self, *, most: int) -> int:
        """Forget old runs."""
        with self._turn:
            books, now = self._ledger.books, self._world.clocks.wall()
            ran: dict[str, list[RunRecord]] = {}
            for run in books.runs.values():
                if run.key.job in books.jobs:
                    ran.setdefault(run.key.job, []).append(run)
            old: list[RunKey] = []
            for job in sorted(ran):
                lanes = (lane for lane in books.lanes.values() if lane.job == job)
                old += [run.key for run in forgotten(ran[job], now=now, lanes=lanes)]
            gone, _ = at_once(old, items=books.count_items, most=most)
            books.forget(gone)
            return len(gone) if len(gone) == len(old) else max(most, len(gone))

    async def job(self, name: str) -> JobRecord | None:
        """Return a job."""
        with self._turn:
            return self._ledger.books.jobs.get(name)

    async def slots(self, job: str, *, start: int, end: int, limit: int = 1000) -> Slots:
        """Return what became of the slots of a job."""
        with self._turn:
            books = self._ledger.books
            runs = sorted(
                (run for run in books.runs.values() if run.key.job == job),
                key=lambda run: run.key,
            )
            spans = [
                record
                for record in books.spans.get(job, [])
                if record.span.last >= start and record.span.first < end
            ]
            inside = [run for run in runs if start <= run.key.slot < end]
            return Slots(inside[-limit:], spans[-limit:])

    async def events(self) -> list[RunEvent]:
        """Return what happened to all runs."""
        with self._turn:
            return sorted(self._ledger.books.events, key=lambda event: event.key)

    def listen(self, heard: Callable[[str], None]) -> Ear | None:
        """Hear nothing: nobody says anything."""
        del heard
        return None

    async def instances(self) -> list[InstanceRecord]:
        """Return all instances."""
        with self._turn:
            return self._desk().instances()

    def _desk(self) -> _MemoryDesk:
        return _MemoryDesk(self._ledger, self._world.clocks.wall())


def _paged(due: Callable[[], list[tuple[P, T]]], last: P, most: int) -> Iterator[T]:
    """Yield what is due, page by page: those seen may be changed meanwhile."""
    size = max(1, min(most, PAGE))
    while True:
        page = sorted((found for found in due() if found[0] > last), key=itemgetter(0))[:size]
        for _, one in page:
            yield one
        if len(page) < size:
            return
        last = page[-1][0]


class _MemoryDesk:
    """What may be done while the lock is held."""

    def __init__(self, ledger: MemoryLedger, now: float) -> None:
        self._ledger, self.now = ledger, now
        self._books: MemoryBooks = ledger.books

    def due_jobs(
        self, *, most: int, only: str | None, after: JobPlace | None = None
    ) -> Iterator[JobRecord]:
        def due() -> list[tuple[JobPlace, JobRecord]]:
            return [
                ((job.next_due, job.job), job)
                for job in self._books.jobs.values()
                if job.next_due is not None and job.next_due <= self.now and only in (None, job.job)
            ]

        if only is not None:
            return iter([job for _, job in due()])
        return _paged(due, after or (float("-inf"), ""), most)

    def due_runs(
        self, *, most: int, only: str | None, after: RunPlace | None = None
    ) -> Iterator[RunRecord]:
        def due() -> list[tuple[RunPlace, RunRecord]]:
            return [
                ((run.not_before, run.key), run)
                for run in self._books.runs.values()
                if run.state in _WAITING and run.not_before <= self.now
                if only in (None, run.key.job)
            ]

        return _paged(due, after or (float("-inf"), RunKey("", 0)), most)

    def lost_runs(self, *, only: str | None) -> list[RunRecord]:
        lost = []
        for run in self._books.runs.values():
            if run.state is State.RUNNING and only in (None, run.key.job):
                seen = self._ledger.leases.look(run.lease)
                if seen is None or not seen.held or seen.holder.nonce != run.holder.nonce:
                    lost.append(run)
        return sorted(lost, key=lambda run: run.key)

    def granted(self, nonce: str) -> list[Claimed]:
        return [
            Claimed(Verdict.GO, run, Grant(run.token, seen.expires_in, adopted=True))
            for run in sorted(self._books.runs.values(), key=lambda run: run.key)
            if run.state is State.RUNNING and run.holder.nonce.startswith(nonce)
            if (seen := self._ledger.leases.look(run.lease)) is not None and seen.held
            if seen.holder.nonce == run.holder.nonce
        ]

    def due_lanes(self, *, jobs: Iterable[str]) -> list[Lane]:
        freed, lanes = set(jobs), self._open_lanes()
        first = [lane for lane in lanes if lane.job in freed]
        due = [lane for lane in lanes if lane.job not in freed and lane.not_before <= self.now]
        first.sort(key=lambda lane: (lane.job, lane.number))
        return first + sorted(due, key=lambda lane: (lane.not_before, lane.number))

    def lanes(self, job: str) -> list[Lane]:
        return [lane for lane in self._open_lanes() if lane.job == job]

    def _open_lanes(self) -> list[Lane]:
        return [lane for lane in sorted(self._books.lanes.values()) if not lane.ended_at]

    def job(self, name: str) -> JobRecord | None:
        return self._books.jobs.get(name)

    def put_job(self, job: JobRecord) -> None:
        before = self._books.jobs.get(job.job)
        assert before is None or job.watermark >= before.watermark, "a watermark never falls"
        self._books.jobs[job.job] = job

    def advance(self, job: str, watermark: int, next_due: float | None, owed: int) -> None:
        known = self._books.jobs[job]
        self.put_job(known.passed(watermark, next_due, owed))

    def move_job(self, job: JobRecord) -> None:
        self.put_job(job)

    def put_lane(self, lane: Lane) -> Lane:
        if not lane.number:
            lane = lane._replace(number=max(self._books.lanes, default=0) + 1)
        self._books.lanes[lane.number] = lane
        return lane

    def span(self, job: str, span: Span, *, apart: bool = False) -> None:
        spans = self._books.spans.setdefault(job, [])
        if spans and not apart and goes_on(spans[-1].span, span, self._books.jobs[job].watermark):
            longer = spans[-1].span._replace(last=span.last)
            spans[-1] = spans[-1]._replace(span=longer, at=self.now)
            return
        spans.append(SpanRecord(job, span, self.now))
        spans.sort(key=lambda record: record.span.first)

    def run(self, key: RunKey) -> RunRecord | None:
        return self._books.runs.get(key)

    def put_run(self, run: RunRecord, *, before: RunRecord | None) -> RunRecord:
        assert self._books.runs.get(run.key) == before, "nobody else can write while we do"
        return self._ledger.put(run)

    def waiting(self, job: str) -> list[RunRecord]:
        return [run for run in self.idle(job) if run.fresh]

    def idle(self, job: str) -> list[RunRecord]:
        ours = (run for run in self._books.runs.values() if run.key.job == job)
        return sorted((run for run in ours if run.state in _WAITING), key=lambda run: run.key)

    def made_up(self, job: str, trigger: str) -> int:
        ours = (run for run in self._books.runs.values() if run.key.job == job)
        return sum(run.trigger == trigger and not run.state.terminal for run in ours)

    def past(self, job: str) -> Past:
        ours = [run for run in self._books.runs.values() if run.key.job == job]
        if not ours:
            return Past()
        newest = max(ours, key=lambda run: (run.key.slot, run.key))
        live = any(not run.state.terminal for run in ours)
        return Past(newest.key.slot, live=live, ended_at=newest.ended_at)

    def last_began(self, jobs: Sequence[str]) -> dict[str, float]:
        runs = list(self._books.runs.values())
        found = {}
        for job in jobs:
            ours = newest(runs, job=job, limit=NEWEST, states=())
            found[job] = max((run.started_at for run in ours), default=0.0)
        return found

    def newest_rerun(self, key: RunKey) -> RunRecord | None:
        same = [run for known, run in self._books.runs.items() if known[:3] == key[:3]]
        return max(same, key=lambda run: run.key, default=None)

    def claim(self, want: Want) -> Claimed:
        return self._ledger.claim_now(want)

    def claim_all(self, slots: Sequence[Due]) -> Sequence[None]:
        return [None for _ in slots]  # each by itself: that is what batches have to agree with

    def finish_all(self, ends: Sequence[End]) -> list[RunRecord | RunLost]:
        return [self._finish(end) for end in ends]

    def _finish(self, end: End) -> RunRecord | RunLost:
        try:
            return self._ledger.finish_now(*end)
        except RunLost as lost:
            return lost

    def cancel(self, key: RunKey, *, force: bool, operator: str) -> RunRecord:
        return self._ledger.cancel_now(key, operator, force=force)

    def next_look(self) -> float | None:
        books = self._books
        due = [job.next_due for job in books.jobs.values() if job.next_due is not None]
        due += [run.not_before for run in books.runs.values() if run.state in _WAITING]
        due += [lane.not_before for lane in self._open_lanes()]
        return min(due, default=None)

    # Registration.

    def put_instance(self, record: InstanceRecord) -> None:
        self._books.instances[record.instance.name] = record

    def drop_instance(self, name: str) -> None:
        self._books.instances.pop(name, None)

    def instances(self) -> list[InstanceRecord]:
        return [self._books.instances[name] for name in sorted(self._books.instances)]

    def join(self, instance: str, definition: Definition, cohort: Cohort) -> None:
        self._books.members[instance, definition.job] = cohort.digest
        self._books.cohorts[definition.job, cohort.digest] = (cohort, definition)

    def part(self, record: InstanceRecord, *, most: int) -> list[str]:
        books, name = self._books, record.instance.name
        jobs = sorted(job for member, job in books.members if member == name)[:most]
        for job in jobs:
            digest = books.members.pop((name, job))
            cohort, definition = books.cohorts[job, digest]
            seen = max(cohort.seen_at, record.beat_at)
            books.cohorts[job, digest] = (cohort._replace(seen_at=seen), definition)
        return jobs

    def cohorts(self, job: str) -> list[Cohort]:
        books, found = self._books, []
        for (name, digest), (cohort, _) in sorted(books.cohorts.items()):
            if name == job:
                beats = [
                    books.instances[instance].beat_at
                    for (instance, known), shared in books.members.items()
                    if known == job and shared == digest and instance in books.instances
                ]
                found.append(cohort._replace(seen_at=max([cohort.seen_at, *beats])))
        return found

    def members(self, job: str) -> int:
        return sum(known == job for _, known in self._books.members)

    def definition(self, job: str, digest: str) -> Definition:
        return self._books.cohorts[job, digest][1]

    def set_back(self, by: float) -> None:
        books, now = self._books, self.now

        def sooner(instant: float) -> float:
            return max(instant - by, now) if instant > now else instant

        for key, run in books.runs.items():
            if run.state in _WAITING:
                books.runs[key] = run._replace(not_before=sooner(run.not_before))
            elif run.state is State.RUNNING:
                books.runs[key] = run._replace(cancel_at=min(run.cancel_at, now))
        for name, job in books.jobs.items():
            due = None if job.next_due is None else sooner(job.next_due)
            since = min(job.unknown_since, now)
            books.jobs[name] = job._replace(next_due=due, unknown_since=since)
        for number, lane in books.lanes.items():
            books.lanes[number] = lane._replace(not_before=sooner(lane.not_before))
        for place, (cohort, definition) in books.cohorts.items():
            seen, since = min(cohort.seen_at, now), cohort.since - by
            books.cohorts[place] = (cohort._replace(since=since, seen_at=seen), definition)

    def unknown(self, *, before: float, most: int) -> list[JobRecord]:
        found = [
            job
            for job in self._books.jobs.values()
            if job.unknown_since and job.unknown_since <= before
            if not (job.orphaned_at or job.retired or job.stored)
        ]
        return sorted(found, key=lambda job: job.job)[:most]
