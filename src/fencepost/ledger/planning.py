"""What an instance may ask of a ledger's planner: what is due, and who knows which jobs.

A tick is one transaction: it ends what has ended, decides every slot that is due, moves watermarks
and grants leases, all or nothing. Each verb may be repeated after ``OutcomeUnknown``.
"""

from __future__ import annotations

import hashlib
from types import MappingProxyType

from fencepost.model.cohort import ORPHAN_AFTER
from fencepost.model.named import NamedTuple, Protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from fencepost.errors import RunLost
    from fencepost.ledger.api import Attempt, Report
    from fencepost.model.claim import Claimed, Want
    from fencepost.model.cohort import Cohort
    from fencepost.model.definition import Definition, JobRecord
    from fencepost.model.ending import Settled
    from fencepost.model.plan import Past, Plan, Span
    from fencepost.model.run import RunEvent, RunRecord
    from fencepost.model.schedule import Schedule
    from fencepost.model.slot import RunKey

    # When something was due, and what: this is how it is put in order.
    JobPlace = tuple[float, str]
    RunPlace = tuple[float, RunKey]

# How much of what is due is fetched at a time, at most.
PAGE = 500
# How often an instance looks that has nothing to do: whoever makes work that is due before that
# says so to those who listen.
LOOK = 1.0
# How long a job is left alone that cannot be planned.
TROUBLE = 60.0
# What is said: there is something to run, an alarm to fire; and, to whoever just began to listen,
# that anything may have been said before.
DUE, ALARM, ANYTHING = "due", "alarm", ""
# And to one attempt that it is to end.
CANCEL = "cancel "
# What runs carry that a backfill made, and one that repeats all: those have their effects anew.
BACKFILL, BACKFILL_ALL = "backfill", "backfill_all"
# And what runs carry that make up slots which the schedule in force does not find any more.
OWED = "owed"


def told_safely(error: Exception) -> str:
    """Return what an error says, for others to read: without the secrets that it may quote."""
    from fencepost.model.secrets import redacted

    return redacted(f"{type(error).__name__}: {error}")


def cancel_word(nonce: str) -> str:
    """Return what is said to whoever carries an attempt out that is to end.

    Everybody in the database may listen, so it names nothing that anybody could use.
    """
    return f"{CANCEL}{hashlib.sha256(nonce.encode()).hexdigest()[:16]}"


class Ear(Protocol):
    """Hears what those say who make work."""

    def close(self) -> None:
        """Hear no more."""


class End(NamedTuple):
    """How an attempt ended, to be recorded along with the next tick."""

    attempt: Attempt
    settled: Settled
    report: Report


class Asked(NamedTuple):
    """For which run a request is to be made, and what the ledger knows of its job."""

    key: RunKey
    template: str
    nonce: str
    trigger: str
    epoch: int
    digest: str
    room: bool = True
    patient: bool = False


class Due(NamedTuple):
    """A slot that is due, its job, and where that stands once the slot is claimed."""

    want: Want
    job: JobRecord
    planned: Plan


class Place(NamedTuple):
    """How far a tick came through what is due: the last run, or once past them the last job."""

    run: RunPlace | None = None
    job: JobPlace | None = None


class Ask(NamedTuple):
    """What an instance asks of a tick.

    ``want`` makes the request for a run, or None if the instance does not know the job. ``room``
    is how many attempts may be claimed, ``free`` how many of those would begin at once: what a loss
    would end is not claimed ahead. ``nonce`` is this ask's own, and begins those of its attempts:
    so one that is asked ``again``, so many times, finds what it was granted. ``sweep`` looks for
    runs whose holder is gone. ``only`` is the one job to look at. ``stirs`` are the jobs of which
    another run may wait for the one that ends. ``since`` is where the last tick left off, if that
    did not come to the end of what is due. ``rivals`` has, for each job that shares its lock, the
    other jobs with that lock.
    """

    want: Callable[[Asked], Want | None]
    nonce: str
    room: int
    ended: Sequence[End] = ()
    again: int = 0
    sweep: bool = False
    most: int = 500
    only: str | None = None
    stirs: frozenset[str] = frozenset()
    free: int | None = None
    since: Place | None = None
    rivals: Mapping[str, Sequence[str]] = MappingProxyType({})


class Begun(NamedTuple):
    """An attempt that a tick began, and which declared job is to carry it out.

    ``spec`` is the schedule in force and ``since`` from when on. ``rerun`` is which run of the
    slot its items are known by: that of the run it repeats, unless all was to be repeated.
    ``rules`` say what becomes of slots of the job that start late.
    """

    claimed: Claimed
    template: str
    payload: str | None = None
    spec: str = ""
    since: float = 0.0
    rerun: int = 0
    rules: str = ""


class Note(NamedTuple):
    """What a tick decided that no attempt will tell: skipped, missed, or in trouble."""

    what: str
    job: str
    run: str = ""
    about: tuple[tuple[str, object], ...] = ()


def note_of_run(run: RunRecord) -> Note:
    """Return what is to be told of a run that ended without an attempt."""
    about: tuple[tuple[str, object], ...] = (("reason", run.reason),)
    if run.blocker:
        about += (("blocker", run.blocker),)
    what = "quarantined" if run.reason == "poison" else run.state.value
    return Note(what, run.key.job, str(run.key), about)


def note_of_span(job: str, span: Span) -> Note:
    """Return what is to be told of slots that were decided at once."""
    about = (("reason", span.reason), ("first", span.first), ("last", span.last))
    return Note(span.state.value, job, span.into, about)


class Ticked(NamedTuple):
    """What a tick answers.

    ``ended`` answers each end that was told, in order. ``pause`` is how long until something is
    due; None if nothing will be. ``full`` says that something due was left for want of room.
    ``off`` is how far this instance's clock is from the ledger's, if too far to go by it. ``left``
    is where it left off, if much was due of which the instance knows nothing. ``soon`` is when to
    look again at the latest: others may have died by then. ``now`` is the ledger's time at
    which it looked; 0 if that is not to be gone by.
    """

    begun: list[Begun]
    ended: list[RunRecord | RunLost]
    notes: list[Note]
    pause: float | None
    full: bool = False
    off: float = 0.0
    left: Place | None = None
    soon: float = float("inf")
    now: float = 0.0


class Instance(NamedTuple):
    """One process of the cluster, as it tells of itself."""

    name: str
    host: str
    pid: int
    version: str
    build: int = 0
    tzdata: str = ""
    orphan_after: float = ORPHAN_AFTER


class InstanceRecord(NamedTuple):
    """An instance as the ledger knows it."""

    instance: Instance
    started_at: float
    beat_at: float
    left_at: float = 0.0


class SpanRecord(NamedTuple):
    """A range of slots that was decided at once."""

    job: str
    span: Span
    at: float


class Lane(NamedTuple):
    """Slots of the past that are to be made up, oldest first, behind the live ones.

    ``until`` is the first instant that is not part of it. ``cursor`` is the next slot to look at.
    ``existing`` says which recorded runs to repeat: none, failed ones, or all. What repeats all
    has a ``trigger`` of its own, by which its runs are known to have their effects anew.
    """

    number: int
    job: str
    start: int
    until: int
    cursor: int
    existing: str = "skip"
    newest_first: bool = False
    max_active: int = 1
    trigger: str = BACKFILL
    spec: str = ""
    not_before: float = 0.0
    ended_at: float = 0.0
    created_at: float = 0.0
    operator: str = ""
    stopped: str = ""

    def next_slot(self, schedule: Schedule) -> int | None:
        """Return the next slot to look at; None if all were."""
        if self.newest_first:
            slot = schedule.latest(self.cursor)
            return slot if slot is not None and slot >= self.start else None
        slot = schedule.after(self.cursor - 1)
        return slot if slot is not None and slot < self.until else None

    def past(self, slot: int) -> Lane:
        """Return the lane as it is once a slot was looked at."""
        return self._replace(cursor=slot - 1 if self.newest_first else slot + 1)


class Slots(NamedTuple):
    """What became of the slots of a job: runs, and ranges that stand for many."""

    runs: list[RunRecord]
    spans: list[SpanRecord]


class Planner(Protocol):
    """The scheduling side of a ledger."""

    async def announce(
        self, instance: Instance | None, definitions: Sequence[Definition]
    ) -> list[Note]:
        """Make jobs known, and settle which definition of each is in force.

        Without an instance they are known, and run by whoever triggers them.
        """

    async def attend(self, instance: Instance) -> list[Note]:
        """Say that an instance lives, and see to those that do not."""

    async def depart(self, instance: Instance) -> None:
        """Say that an instance has ended on purpose."""

    async def store(self, definitions: Sequence[Definition]) -> int:
        """Keep jobs in the ledger itself, each run by a declared one; return how many changed."""

    async def tick(self, ask: Ask) -> Ticked:
        """Record what has ended, decide what is due, and begin as much as there is room for."""

    async def pause(self, job: str, *, reason: str, until: float = 0.0) -> JobRecord:
        """Let the slots of a job pass, each recorded as skipped."""

    async def resume(self, job: str) -> JobRecord:
        """Let a job run again from now on: out of a pause, and out of quarantine."""

    async def retire(self, job: str, *, reason: str) -> JobRecord:
        """End a job for good; its name stays taken, so that no stray instance brings it back."""

    async def backfill(self, lane: Lane) -> Lane:
        """Have slots of the past made up; the same range that is under way already is returned."""

    async def lanes(self, *, active: bool = True) -> list[Lane]:
        """Return what is being made up."""

    async def lane(self, number: int) -> Lane | None:
        """Return one of what was ever to be made up."""

    async def stop_lane(self, number: int, *, reason: str) -> None:
        """Stop making up what was not begun yet."""

    async def prune(self, *, most: int) -> int:
        """Forget old runs as retention has it, but never that there were any; say how many.

        About so many rows as ``most`` go at once; if that is the answer there may be others.
        """

    async def job(self, name: str) -> JobRecord | None:
        """Return a job."""

    async def slots(self, job: str, *, start: int, end: int, limit: int = 1000) -> Slots:
        """Return what became of the slots of a job from ``start`` on and before ``end``."""

    def listen(self, heard: Callable[[str], None]) -> Ear | None:
        """Have ``heard`` called, by another thread, with what is said to instances from now on.

        None where nothing can be heard. To listen is never more than a way to look sooner.
        """

    async def events(self) -> list[RunEvent]:
        """Return what happened to all runs, run by run, oldest first."""

    async def instances(self) -> list[InstanceRecord]:
        """Return all instances that were heard of lately, by name."""


class Desk(Protocol):
    """What the one who ticks may do inside of the transaction, whichever ledger it is."""

    now: float

    def due_jobs(
        self, *, most: int, only: str | None, after: JobPlace | None = None
    ) -> Iterable[JobRecord]:
        """Return jobs that are due, the longest due first, in pages of ``most``."""

    def due_runs(
        self, *, most: int, only: str | None, after: RunPlace | None = None
    ) -> Iterable[RunRecord]:
        """Return runs that wait and whose time has come, the longest due first, in pages."""

    def lost_runs(self, *, only: str | None) -> list[RunRecord]:
        """Return runs whose attempt is gone: its lease has lapsed, or its holder died."""

    def granted(self, nonce: str) -> list[Claimed]:
        """Return attempts whose nonce begins so: granted by an answer that was lost."""

    def due_lanes(self, *, jobs: Iterable[str]) -> Iterable[Lane]:
        """Return what is to be made up now: first of these jobs, then what is due the longest."""

    def lanes(self, job: str) -> list[Lane]:
        """Return what is being made up of a job."""

    def job(self, name: str) -> JobRecord | None:
        """Return a job."""

    def put_job(self, job: JobRecord) -> None:
        """Keep a job as it is now."""

    def advance(self, job: str, watermark: int, next_due: float | None, owed: int) -> None:
        """Move a job's watermark, and keep when to look at it again."""

    def move_job(self, job: JobRecord) -> None:
        """Keep what time has changed about a job: where it stands, and its pause."""

    def put_lane(self, lane: Lane) -> Lane:
        """Keep what is being made up as it is now; number it, if it is new."""

    def span(self, job: str, span: Span, *, apart: bool = False) -> None:
        """Record a range of slots; one that goes on where the last one ended makes that longer.

        That is so if the job stands there still: then nothing else was decided in between. A range
        that is to be ``apart`` does not: slots before it are still undecided.
        """

    def run(self, key: RunKey) -> RunRecord | None:
        """Return a run."""

    def put_run(self, run: RunRecord, *, before: RunRecord | None) -> RunRecord:
        """Keep a run as it is now."""

    def waiting(self, job: str) -> list[RunRecord]:
        """Return the runs of a job that never began."""

    def idle(self, job: str) -> list[RunRecord]:
        """Return the runs of a job that do not run and have not ended, begun or not."""

    def made_up(self, job: str, trigger: str) -> int:
        """Return how many runs of a job are live that make up for the past in this way."""

    def past(self, job: str) -> Past:
        """Return how the newest run of a job stands."""

    def last_began(self, jobs: Sequence[str]) -> dict[str, float]:
        """Return for each of some jobs when one of its newest runs last began; 0 if none did."""

    def newest_rerun(self, key: RunKey) -> RunRecord | None:
        """Return the newest run of a slot."""

    def claim(self, want: Want) -> Claimed:
        """Decide who may run it, and record that."""

    def claim_all(self, slots: Sequence[Due]) -> Sequence[Claimed | None]:
        """Claim slots by the batch, and have their jobs stand where they then do.

        None for each that is not as usual: nothing has changed about it, and ``claim`` decides.
        """

    def finish_all(self, ends: Sequence[End]) -> list[RunRecord | RunLost]:
        """End attempts."""

    def cancel(self, key: RunKey, *, force: bool, operator: str) -> RunRecord:
        """Cancel what does not run; ask what runs, or take it away."""

    def next_look(self) -> float | None:
        """Return the instant when something is due next."""


class Roll(Protocol):
    """What registration may do inside of the transaction, beside what a ``Desk`` can."""

    def put_instance(self, record: InstanceRecord) -> None:
        """Keep an instance as it is now."""

    def drop_instance(self, name: str) -> None:
        """Forget an instance."""

    def instances(self) -> list[InstanceRecord]:
        """Return all instances, by name."""

    def join(self, instance: str, definition: Definition, cohort: Cohort) -> None:
        """Keep that an instance shares a definition, and no other one of that job."""

    def part(self, record: InstanceRecord, *, most: int) -> list[str]:
        """Take up to so many jobs from an instance that is gone; return them.

        Their cohorts keep in mind when they last heard of it.
        """

    def cohorts(self, job: str) -> list[Cohort]:
        """Return the cohorts of a job, each as last heard of through any of its members."""

    def members(self, job: str) -> int:
        """Return how many instances know a job."""

    def definition(self, job: str, digest: str) -> Definition:
        """Return the definition that a cohort shares."""

    def set_back(self, by: float) -> None:
        """Move what waits for a while, now that the clock was set back by so many seconds.

        Runs, lanes and alarms that wait for another try do so for no longer than they would have,
        jobs are looked at no later, and whoever was asked to stop was asked now at the latest. Each
        cohort stays as young beside the others as it was, and none was seen later than now.
        """

    def unknown(self, *, before: float, most: int) -> list[JobRecord]:
        """Return jobs that nobody has known since before that instant, and are no orphans yet."""
