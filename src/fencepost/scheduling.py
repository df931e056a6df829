"""What both faces share of the scheduler: ticking, making up, and what operators ask for."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from functools import partial

from fencepost.errors import BadSchedule, BadSlot, Misuse, OutcomeUnknown, StoreUnavailable
from fencepost.flows.course import Doors
from fencepost.flows.handoff import outcome_of
from fencepost.flows.serve import Pace, announce, event_of, off_of
from fencepost.flows.trigger import Crashed
from fencepost.holding import operator_here
from fencepost.ledger.planning import BACKFILL, BACKFILL_ALL, CANCEL, Ask, Lane, cancel_word
from fencepost.model.cohort import ORPHAN_AFTER
from fencepost.model.definition import Definition, JobRecord
from fencepost.model.duration import positive, seconds
from fencepost.model.event import JobEvent
from fencepost.model.kept import encoded
from fencepost.model.named import NamedTuple
from fencepost.model.outcome import of_record
from fencepost.model.plan import next_start, starts_at
from fencepost.model.rules import text_of
from fencepost.model.run import State
from fencepost.model.schedule import EveryAfter, schedule_of, spec_of, upcoming
from fencepost.model.slot import RunKey, checked_job, instant
from fencepost.serving import Serving
from fencepost.working import Terms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    from fencepost.flows.serve import Office
    from fencepost.holding import Holding
    from fencepost.jobs import Job
    from fencepost.ledger.planning import Begun, Place, Planner, Slots, Ticked
    from fencepost.model.duration import Duration
    from fencepost.model.event import JobEvent
    from fencepost.model.outcome import Outcome
    from fencepost.model.schedule import Schedule
    from fencepost.serving import ThreadCrew
    from fencepost.serving_aio import TaskCrew
    from fencepost.working import Working
    from fencepost.world.api import World

    Instant = datetime | str | float

GRACE, CONCURRENCY = "30s", 16
# How long a face that is closed waits for its instance to end.
CLOSING = 5.0
_EXISTING = ("skip", "failed", "all")
_STORED = 1000
# A lease that is sized to the time that is left is never shorter than this.
_SHORTEST_LEASE = 2.0
# How long a tick without a budget asks whether it was granted something.
_PATIENCE = 30.0


class Progress(NamedTuple):
    """How far a backfill has come: slots looked at, and of how many, if that is known."""

    lane: Lane
    done: int
    total: int
    outcome: Outcome | None = None


class Scheduling:
    """The scheduler of one ``Fencepost`` or ``AsyncFencepost``."""

    def __init__(
        self,
        working: Working,
        holding: Holding,
        world: World,
        *,
        build: int = 0,
        orphan_after: float = ORPHAN_AFTER,
    ) -> None:
        self.working, self._holding, self.world = working, holding, world
        self.crew: ThreadCrew | TaskCrew | None = None
        self._serving: Serving | None = None
        self._announced = -1
        self.build, self.orphan_after = build, orphan_after
        self.pace = Pace()

    @property
    def serving(self) -> Serving:
        """What this process is as an instance; a forked child is another one."""
        if self._serving is None or self._serving.instance.pid != os.getpid():
            self._announced = -1
            self._serving = Serving(
                self.working,
                self._holding,
                self.world,
                build=self.build,
                orphan_after=self.orphan_after,
            )
        return self._serving

    @property
    def office(self) -> Office:
        """What the flow of an instance asks of it."""
        return self.serving.office._replace(pace=self.pace)

    def hurry(self, word: str) -> None:
        """Have an attempt of ours hear at once that it is to end, if the word is about one."""
        if not word.startswith(CANCEL):
            return
        for nonce in list(self.working.courses):
            if cancel_word(nonce) == word:
                self._holding.keeper.charges.hurry(nonce)

    def emit(self, event: JobEvent) -> None:
        """Tell whoever listens."""
        self._holding.emit(event)

    async def now(self) -> float:
        """Return the time of the ledger's clock."""
        return await self.working.clock.ask(self.working.ledger)

    @property
    def planner(self) -> Planner:
        """The scheduling side of the ledger."""
        return self.working.ledger.planner

    # Serverless: whatever is due now.

    async def tick(self, budget: Duration | None, *, most: int | None) -> list[Outcome]:
        """Run what is due, one after the other, until nothing is or the budget is used up."""
        limit = None if budget is None else positive(budget, what="budget")
        if most is not None and (type(most) is not int or most < 1):
            raise Misuse(f"most is {most!r}: it must be a whole number from 1 on")
        await self._attend()
        clock = self.world.clocks.boottime
        end = None if limit is None else clock() + limit
        outcomes: list[Outcome] = []
        sweep, since = True, None
        while (end is None or clock() < end) and (most is None or len(outcomes) < most):
            ticked, sent = await self._ticked(end, sweep=sweep, since=since)
            sweep, since = False, ticked.left
            if not ticked.begun and since is None:
                break
            outcomes += [await self._carry_out(one, sent, end) for one in ticked.begun]
        return outcomes

    async def _attend(self) -> None:
        """Make this process known as an instance, and see to those that are gone."""
        doors, office = Doors(self.world, self.working.ledger), self.serving.office
        if self._announced != len(self.working.registry):
            await announce(doors, office)
            self._announced = len(self.working.registry)
        notes = await self.planner.attend(self.serving.instance)
        if any(note.what == "unknown_instance" for note in notes):
            await announce(doors, office)
        for note in notes:
            if note.what == "clock":
                if off := off_of(note):
                    about = (("instance", self.serving.instance.name), ("off", f"{off:+.1f}s"))
                    office.emit(JobEvent("clock_disagrees", "", "", 0, about))
            elif note.what != "unknown_instance":
                office.emit(event_of(note))

    async def _ticked(
        self,
        end: float | None,
        *,
        sweep: bool,
        only: str | None = None,
        since: Place | None = None,
    ) -> tuple[Ticked, float]:
        """Begin one attempt of what is due; its lease is no longer than the time that is left."""
        clock, emit = self.world.clocks.boottime, self.serving.office.emit
        left = None if end is None else max(_SHORTEST_LEASE, end - clock() + 1.0)
        want = partial(self.serving.want, lease=left)
        ask = Ask(want, self.world.nonce(), 1, sweep=sweep, only=only, since=since)
        ask = ask._replace(rivals=self.serving.rivals())
        give_up, pause = clock() + (left or _PATIENCE), 0.01
        while True:
            sent = clock()
            try:
                ticked = await self.planner.tick(ask)
                break
            except (OutcomeUnknown, StoreUnavailable) as error:
                doubtful = ask.again or isinstance(error, OutcomeUnknown)
                if not doubtful or clock() >= give_up:
                    raise
                ask = ask._replace(again=ask.again + 1)  # what was granted unheard of is ours
                await self.world.sleep(pause * (0.5 + self.world.dice()))
                pause = min(pause * 2, 0.5)
        for note in ticked.notes:
            emit(event_of(note))
        return ticked, sent

    async def _carry_out(self, begun: Begun, sent: float, end: float | None) -> Outcome:
        terms = Terms(None, end, begun)
        job = self.serving.job_of(begun)
        ended = await self.working.carry_out(job, begun.claimed, sent, terms=terms)
        claimed = begun.claimed.run
        assert claimed is not None, "what was begun has a record"
        if ended is None or isinstance(ended, Crashed):
            return of_record(claimed, fresh=True)._replace(status="lost", reason="lost")
        outcome = outcome_of(ended)
        if ended.state is State.PENDING:  # given back as it was: nobody's failure
            outcome = outcome._replace(status="skipped", reason=ended.reason or ended.state.value)
        return outcome

    # What operators ask for.

    async def pause(
        self, job: str | Callable[..., Any], *, until: Instant | None, reason: str
    ) -> JobRecord:
        """Let the slots of a job pass, each recorded as skipped."""
        name = await self._known(job)
        at = 0.0 if until is None else float(instant(until))
        if at and at <= await self.now():
            raise BadSlot(f"until is {until!r}, which is over: give an instant to come")
        return await self.planner.pause(name, reason=reason or operator_here(), until=at)

    async def resume(self, job: str | Callable[..., Any]) -> JobRecord:
        """Let a job run again from now on."""
        return await self.planner.resume(await self._known(job))

    async def retire(self, job: str | Callable[..., Any], *, reason: str) -> JobRecord:
        """End a job for good."""
        name = job if isinstance(job, str) else self.working.registry.find(job).name
        return await self.planner.retire(name, reason=reason or f"by {operator_here()}")

    async def _known(self, job: str | Callable[..., Any]) -> str:
        """Return a job's name, and make sure that the ledger knows it."""
        if callable(job):
            job = self.working.registry.find(job).name
        declared = self.working.registry.get(job)
        if declared is None:
            return job
        record = await self.planner.job(job)
        if record is None or not record.epoch:
            await self._refuse_renaming(declared)
            await self.planner.announce(None, [declared.defined(build=self.build)])
        return job

    async def _refuse_renaming(self, declared: Job) -> None:
        """Refuse a job that still has its old name: an instance renames it when it starts."""
        for alias in declared.aliases:
            old = await self.planner.job(alias)
            if old is not None and old.epoch and not old.retired:
                raise Misuse(
                    f"job {declared.name!r} is still {alias!r} in the ledger: use that name, or "
                    "start an instance first, which renames it"
                )

    async def _read(self, job: str | Callable[..., Any]) -> JobRecord:
        """Return a job as the ledger knows it, or as it would be known; nothing is changed."""
        name = job if isinstance(job, str) else self.working.registry.find(job).name
        declared, record = self.working.registry.get(name), await self.planner.job(name)
        if declared is None or (record is not None and (record.epoch or record.retired)):
            return record or JobRecord(name)
        known, now = declared.defined(), int(await self.now())
        schedule = declared.schedule
        due = None if schedule is None else next_start(schedule, declared.rules, name, now)
        found = JobRecord(name, spec=known.spec, rules=known.rules, template=name)
        return found._replace(watermark=now, next_due=due)

    async def next(
        self, job: str | Callable[..., Any], count: int, *, after: Instant | None
    ) -> list[datetime]:
        """Return when a job is due next, jitter included."""
        record = await self._read(job)
        name, schedule = record.job, record.schedule
        if schedule is None:
            raise BadSchedule(f"job {name!r} has no schedule: it runs when it is triggered")
        start = await self.now() if after is None else float(instant(after))
        if isinstance(schedule, EveryAfter):
            due = [] if record.next_due is None else [record.next_due]
        else:
            rules = record.catching_up
            slots = upcoming(schedule, after=start, count=count)
            newest = schedule.latest(start)  # its time may have come, and its start not yet
            if newest is not None and (after is not None or newest > record.watermark):
                slots = [newest, *slots]
            due = [starts_at(schedule, rules, name, slot) for slot in slots]
            due = [at for at in due if at > start][:count]
        return [datetime.fromtimestamp(at, UTC) for at in due]

    async def slots(
        self, job: str | Callable[..., Any], *, start: Instant | None, end: Instant | None
    ) -> Slots:
        """Return what became of the slots of a job."""
        name = job if isinstance(job, str) else self.working.registry.find(job).name
        first = 0 if start is None else instant(start)
        last = 2**62 if end is None else instant(end)
        return await self.planner.slots(name, start=first, end=last)

    async def store(
        self,
        template: str | Callable[..., Any],
        entries: Iterable[Mapping[str, Any]],
    ) -> int:
        """Keep jobs in the ledger that a declared one runs; return how many are new or changed."""
        job = self.working.registry.find(template)
        rules, batch, changed = text_of(job.rules), [], 0
        for entry in entries:
            batch.append(_stored(job, rules, dict(entry)))
            if len(batch) == _STORED:
                changed += await self.planner.store(batch)
                batch = []
        return changed + (await self.planner.store(batch) if batch else 0)

    # The past.

    async def backfill(  # noqa: PLR0913 -- one for each word that an operator may say
        self,
        job: str | Callable[..., Any],
        start: Instant,
        end: Instant,
        *,
        existing: str,
        order: str,
        max_active: int,
        dry_run: bool,
        wait: bool,
        progress: Callable[[Progress], None] | None,
    ) -> list[RunKey] | Lane:
        """Have slots of the past made up, here or by whichever instance knows the job."""
        lane, schedule = await self._lane(
            job, start, end, existing=existing, order=order, max_active=max_active
        )
        if dry_run:
            return await self._would_run(lane, schedule)
        await self._known(job)
        if wait:
            await self._refuse_waiting(lane.job)
        lane = await self.planner.backfill(lane)
        if wait:
            lane = await self._make_up(lane, schedule, progress)
        return lane

    async def _refuse_waiting(self, job: str) -> None:
        """Refuse to wait for a job of which nothing may run."""
        record = await self.planner.job(job)
        if record is None:
            return
        if record.pauses(await self.now()) or record.quarantined:
            raise Misuse(
                f"job {job!r} is {'quarantined' if record.quarantined else 'paused'}, and nothing "
                "of it is made up: resume it first, or do not wait"
            )

    async def stop_backfill(self, number: int) -> Lane:
        """Stop a backfill: what it has begun goes on, and nothing more of it begins."""
        await self.planner.stop_lane(number, reason=f"stopped by {operator_here()}")
        for lane in await self.planner.lanes(active=False):
            if lane.number == number:
                return lane
        raise Misuse(f"there is no backfill number {number!r}")

    async def _lane(
        self,
        job: str | Callable[..., Any],
        start: Instant,
        end: Instant,
        *,
        existing: str,
        order: str,
        max_active: int,
    ) -> tuple[Lane, Schedule]:
        if existing not in _EXISTING:
            raise Misuse(f"existing is {existing!r}: it must be one of 'skip', 'failed', 'all'")
        if order not in ("oldest", "newest"):
            raise Misuse(f"order is {order!r}: it must be 'oldest' or 'newest'")
        if type(max_active) is not int or max_active < 1:
            raise Misuse(f"max_active is {max_active!r}: it must be a whole number from 1 on")
        first, until = instant(start), instant(end)
        if until <= first:
            raise BadSlot(f"end {end!r} is not after start {start!r}: nothing lies between them")
        until = min(until, int(await self.now()) + 1)  # the future is not to be made up
        record = await self._read(job)
        name, schedule = record.job, record.schedule
        if schedule is None or isinstance(schedule, EveryAfter):
            raise BadSchedule(f"job {name!r} has no slots in the past that could be made up")
        newest = order == "newest"
        return (
            Lane(
                0,
                name,
                first,
                until,
                until - 1 if newest else first,
                existing,
                newest_first=newest,
                max_active=max_active,
                trigger=BACKFILL_ALL if existing == "all" else BACKFILL,
                operator=operator_here(),
            ),
            schedule,
        )

    async def _would_run(self, lane: Lane, schedule: Schedule) -> list[RunKey]:
        """Return the runs that a backfill would begin, in its order."""
        from fencepost.ledger.made_up import made_up_as

        known = {}
        found = await self.planner.slots(lane.job, start=lane.start, end=lane.until, limit=10**6)
        for run in found.runs:
            if not run.key.manual:
                known[run.key.slot] = run  # in order, so the newest rerun stays
        keys, lane = [], lane._replace(created_at=self.working.clock.now())
        job = await self.planner.job(lane.job)
        pruned = -1 if job is None else job.pruned
        for slot in schedule.between(lane.start, lane.until):
            before = known.get(slot)
            if before is not None and not before.state.terminal:
                continue
            rerun = made_up_as(lane, slot, before, pruned=pruned)
            if rerun is not None:
                keys.append(RunKey(lane.job, slot, rerun=rerun))
        return keys[::-1] if lane.newest_first else keys

    async def _make_up(
        self, lane: Lane, schedule: Schedule, progress: Callable[[Progress], None] | None
    ) -> Lane:
        """Work on a backfill until it has ended, together with whoever else does."""
        await self._attend()
        total = sum(1 for _ in schedule.between(lane.start, lane.until)) if progress else 0
        job = await self.planner.job(lane.job)
        template = lane.job if job is None else job.template or lane.job  # a stored job has another
        ours = self.working.registry.get(template) is not None
        while True:
            outcome, pause = None, 1.0
            if ours:
                ticked, sent = await self._ticked(None, sweep=True, only=lane.job)
                for one in ticked.begun:
                    outcome, pause = await self._carry_out(one, sent, None), 0.0
            lane = await self.planner.lane(lane.number) or lane
            if progress is not None:
                progress(Progress(lane, _looked_at(lane, schedule), total, outcome))
            if lane.ended_at:
                return lane
            if pause:
                await self.world.sleep(min(pause, 0.2))


def _looked_at(lane: Lane, schedule: Schedule) -> int:
    if lane.newest_first:
        return sum(1 for _ in schedule.between(lane.cursor + 1, lane.until))
    return sum(1 for _ in schedule.between(lane.start, min(lane.cursor, lane.until)))


def _stored(job: Job, rules: str, entry: dict[str, Any]) -> Definition:
    """Return the definition of a job that lives in the ledger."""
    try:
        name = checked_job(entry.pop("name"))
    except KeyError:
        raise Misuse(f"a job to be stored has no 'name' among {sorted(entry)}: give one") from None
    payload = entry.pop("payload", None)
    wrong = set(entry) - {"cron", "every", "at", "tz", "second", "day_match", "dst_gap", "dst_fold"}
    if wrong:
        raise Misuse(
            f"job {name!r} cannot be stored with {sorted(wrong)}: its policies are those of "
            f"{job.name!r}; give it a schedule and a payload"
        )
    schedule = schedule_of(**entry, spread=name)
    if schedule is None:
        raise BadSchedule(
            f"job {name!r} would be stored without a schedule: give cron, every or at"
        )
    kept = None if payload is None else encoded(payload, what="payload")
    return Definition(name, spec_of(schedule), rules, job.name, payload=kept)


def crew_here(scheduling: Scheduling) -> ThreadCrew | TaskCrew | None:
    """Return who carries attempts out in this process; a forked child has its parent's not."""
    crew = scheduling.crew
    if crew is not None and crew.pid != os.getpid():
        crew = scheduling.crew = None
        scheduling.working.courses.clear()
    return crew


def grace_of(grace: Duration) -> float:
    """Return how long what runs may go on once a stop was asked for."""
    length = seconds(grace, what="grace")
    if length < 0:
        raise Misuse(f"grace is {grace!r}: it must not be negative")
    return length


def size_of(concurrency: int) -> int:
    """Return how many attempts may run at the same time."""
    if type(concurrency) is not int or concurrency < 1:
        raise Misuse(f"concurrency is {concurrency!r}: it must be a whole number from 1 on")
    return concurrency
