"""Who knows which jobs, and which definition of each is in force.

An edit is a new epoch from now on: it never fires for a slot of the past. Nothing is deleted when
an instance starts or ends: a job that nobody knows any more becomes an orphan, and is told of.
"""

from __future__ import annotations

from fencepost.errors import Misuse, UnknownJob
from fencepost.ledger.made_up import owe, owed_lanes, owed_now
from fencepost.ledger.planning import InstanceRecord, Note, told_safely
from fencepost.model import edited as edits
from fencepost.model.cohort import GONE_AFTER, joined, winner
from fencepost.model.definition import JobRecord
from fencepost.model.plan import Span, newest_due, next_start
from fencepost.model.run import State
from fencepost.model.schedule import EveryAfter, schedule_from

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from fencepost.ledger.planning import Desk, Instance, Lane, Roll
    from fencepost.model.definition import Definition
    from fencepost.model.named import Protocol
    from fencepost.model.run import RunRecord
    from fencepost.model.schedule import Schedule

    class Office(Desk, Roll, Protocol):
        """All that registration needs."""


# How many jobs of an instance that is gone are seen to at a time.
_MOST = 1000
# If nobody at all was heard for so long, nobody could be: the ledger was away, or all slept.
_QUIET = GONE_AFTER / 4
# If somebody was heard so much later than it is now, the clock was set back.
_SET_BACK = 5.0


def announce(
    office: Office, instance: Instance | None, definitions: Sequence[Definition]
) -> list[Note]:
    """Make jobs known, and settle which definition of each is in force."""
    if instance is not None:
        known = {record.instance.name: record for record in _heard(office)}
        before = known.get(instance.name)
        since = office.now if before is None else before.started_at
        office.put_instance(InstanceRecord(instance, since, office.now))
    notes: list[Note] = []
    for definition in definitions:
        job = office.job(definition.job)
        if job is not None and job.retired:
            notes.append(Note("retired", job.job, about=(("reason", job.retired),)))
            continue
        if instance is not None:
            _join(office, instance, definition)
        if job is None or not job.epoch:
            if instance is None and any(_goes_on(office.job(was)) for was in definition.aliases):
                # It takes over from the old name once there is somebody to serve it.
                nameless = job or JobRecord(definition.job)
                office.put_job(_defined(nameless, definition, now=office.now)._replace(epoch=0))
                continue
            _begin_job(office, job, definition, notes)
        elif job.digest == definition.digest:
            _known_again(office, job, notes)
        elif _in_force(office, definition, instance):
            edit(office, job, definition, notes)
    return notes


def attend(office: Office, instance: Instance) -> list[Note]:
    """Say that an instance lives; see to those that are gone, and to jobs that nobody knows."""
    notes = _set_back(office)
    records = _heard(office)
    ours = [record for record in records if record.instance.name == instance.name]
    if not ours:
        return [*notes, Note("unknown_instance", "", about=(("instance", instance.name),))]
    office.put_instance(ours[0]._replace(beat_at=office.now, left_at=0.0))
    left = _MOST
    for record in records:
        if record.instance.name != instance.name and office.now - record.beat_at >= GONE_AFTER:
            parted = office.part(record, most=left)
            for name in parted:
                _look_again(office, name, record, notes)
            left -= len(parted)
            if left <= 0:
                return notes
            office.drop_instance(record.instance.name)
    for job in office.unknown(before=office.now - instance.orphan_after, most=_MOST):
        office.put_job(job._replace(orphaned_at=office.now))
        about = (("unknown_since", job.unknown_since),)
        notes.append(Note("orphaned", job.job, about=about))
        _end_waiting(office, job.job, State.MISSED, "orphaned")
    return notes


def _set_back(office: Office) -> list[Note]:
    """Notice that the ledger's clock was set back, and let nobody wait for that time once more.

    Who was heard in what is the future now was heard just now: so nobody lives for ever, and nobody
    is gone at once. Whoever is the first to notice moves all that waits for a while; what is due at
    an instant stays where it is, and watermarks do.
    """
    records = office.instances()
    by = max((record.beat_at for record in records), default=office.now) - office.now
    if by <= _SET_BACK:
        return []
    for record in records:
        if record.beat_at > office.now:
            office.put_instance(record._replace(beat_at=office.now))
    office.set_back(by)
    return [Note("clock_set_back", "", about=(("by", f"{by:.0f}s"),))]


def _heard(office: Office) -> list[InstanceRecord]:
    """Return all instances, and count no time against them in which nobody could be heard.

    How long each of them was silent before the others were is not forgotten.
    """
    records = office.instances()
    newest = max((record.beat_at for record in records), default=office.now)
    quiet = office.now - newest - _QUIET
    if quiet <= 0:
        return records
    moved = [record._replace(beat_at=record.beat_at + quiet) for record in records]
    for record in moved:
        office.put_instance(record)
    return moved


def depart(office: Office, instance: Instance) -> None:
    """Keep that an instance has ended; its jobs are looked at once it has not come back."""
    for record in office.instances():
        if record.instance.name == instance.name:
            office.put_instance(record._replace(left_at=office.now))


def store(office: Office, definitions: Sequence[Definition]) -> int:
    """Keep jobs that live in the ledger only; return how many are new or changed."""
    changed = 0
    for definition in definitions:
        job = office.job(definition.job)
        if job is None or job.retired:
            before = None if job is None else job._replace(retired="")
            _begin_job(office, before, definition, [], stored=True)
        elif job.digest == definition.digest:
            continue
        else:
            edit(office, job._replace(stored=True), definition, [])
        changed += 1
    return changed


def edit(office: Office, job: JobRecord, definition: Definition, notes: list[Note]) -> None:
    """Put another definition in force, from now on."""
    if job.orphaned_at and job.spec == definition.spec:
        job = _back_from_orphans(office, job)
    if job.spec != definition.spec:
        job = _after_pause(office, job)
    edited = _defined(job, definition, now=office.now)
    if job.spec != definition.spec:
        edited = _rescheduled(office, job, edited, notes)
    else:
        # The next window begins at the last slot, not in between; and what is owed stays owed.
        edited = edited._replace(effective_from=job.effective_from)
        if job.rules != definition.rules and (schedule := edited.schedule) is not None:
            due = next_start(schedule, edited.catching_up, job.job, job.watermark)
            edited = edited._replace(next_due=due, owed=owed_now(office, edited))
    office.put_job(edited)
    about = (("epoch", edited.epoch), ("was", job.spec), ("now", definition.spec))
    notes.append(Note("edited", job.job, about=about))


def _defined(job: JobRecord, definition: Definition, *, now: float) -> JobRecord:
    return job._replace(
        definition=definition.facts,
        spec=definition.spec,
        rules=definition.rules,
        template=definition.template,
        payload=definition.payload,
        digest=definition.digest,
        build=definition.build,
        epoch=job.epoch + 1,
        effective_from=now,
        orphaned_at=0.0,
        unknown_since=0.0,
    )


def _rescheduled(office: Office, job: JobRecord, edited: JobRecord, notes: list[Note]) -> JobRecord:
    """Decide what was due under the old schedule, and begin the new one now."""
    new, agenda = edited.schedule, job.agenda
    for lane in owed_lanes(office, job.job):
        _owe_both(office, lane, edited, notes)
    done = edits.edit(_schedule(job), new, edited.catching_up, agenda, now=office.now)
    _passed_between(office, job.job, done.passed, notes)
    owe(office, job.job, done.kept)
    for run in office.waiting(job.job):
        ours = run.trigger in ("schedule", "catchup")
        if ours and not (new is not None and _has(new, run.key.slot)):
            _end(office, run, State.SKIPPED, "schedule_changed")
    return _going_on(office, edited, done, notes)


def _going_on(office: Office, job: JobRecord, done: edits.Edit, notes: list[Note]) -> JobRecord:
    """Return a job as it goes on after an edit: where it stands, and when it is due next."""
    schedule, rules, mark = job.schedule, job.catching_up, max(job.watermark, done.watermark)
    due = None if schedule is None else next_start(schedule, rules, job.job, mark)
    if due is None and schedule is not None:
        notes.append(_over(job.job, schedule, now=office.now))
    gone_on = job._replace(watermark=mark, next_due=due, owed=done.owed)
    return gone_on._replace(owed=owed_now(office, gone_on))


def _owe_both(office: Office, lane: Lane, job: JobRecord, notes: list[Note]) -> None:
    """Go on owing slots of the past that the new schedule has too, and pass the others by."""
    try:
        old = schedule_from(lane.spec)
    except Exception:  # noqa: BLE001 -- a newer version wrote it, and whoever makes it up says so
        return
    first, newest = old.after(lane.cursor - 1), old.latest(lane.until - 1)
    if first is None or newest is None or first > newest:
        return
    kept = edits.common(old, job.schedule, first, newest, most=lane.until - lane.start)
    # Between two slots of a lane lie ranges that are on record: what is passed by is one by one.
    passed = [slot for slot in old.between(first, newest + 1) if slot not in set(kept)]
    alone = [Span(slot, slot, State.SKIPPED, "schedule_changed") for slot in passed]
    _passed_between(office, job.job, alone, notes)
    office.put_lane(lane._replace(ended_at=office.now, stopped="schedule_changed"))
    if job.schedule is not None:
        owe(office, job.job, tuple(edits.stretches(job.schedule, kept)))


def _passed_between(office: Office, name: str, spans: Sequence[Span], notes: list[Note]) -> None:
    """Record ranges between which slots stay due, and tell of them as of one."""
    for span in spans:
        office.span(name, span, apart=True)
    for state, reason in dict.fromkeys((span.state, span.reason) for span in spans):
        alike = [span for span in spans if (span.state, span.reason) == (state, reason)]
        about = (("reason", reason), ("first", alike[0].first), ("last", alike[-1].last))
        notes.append(Note(state.value, name, about=about))


def _over(name: str, schedule: Schedule, *, now: float) -> Note:
    """Tell of a schedule that will never be due: all of its slots were over before it began."""
    about: tuple[tuple[str, object], ...] = (("reason", "already_over"),)
    last = schedule.latest(now)
    return Note("missed", name, about=about if last is None else (*about, ("last", last)))


def _schedule(job: JobRecord) -> Schedule | None:
    """Return the schedule in force; None also if nobody here can read it."""
    try:
        return job.schedule
    except Exception:  # noqa: BLE001 -- a newer version wrote it, or somebody by hand
        return None


def _has(schedule: Schedule, slot: int) -> bool:
    return not isinstance(schedule, EveryAfter) and schedule.contains(slot)


def _join(office: Office, instance: Instance, definition: Definition) -> None:
    cohorts = {cohort.digest: cohort for cohort in office.cohorts(definition.job)}
    digest, build = definition.digest, max(definition.build, instance.build)
    cohort = joined(
        cohorts.get(digest), digest, build, now=office.now, orphan_after=instance.orphan_after
    )
    office.join(instance.name, definition, cohort)


def _in_force(office: Office, definition: Definition, instance: Instance | None) -> bool:
    """Say whether a definition that differs from the one in force is to take its place."""
    won = winner(office.cohorts(definition.job), now=office.now)
    if won is None:  # no instance knows the job: whoever triggers it says what it is
        return instance is None
    return won.digest == definition.digest


def _begin_job(
    office: Office,
    job: JobRecord | None,
    definition: Definition,
    notes: list[Note],
    *,
    stored: bool = False,
) -> None:
    """Begin a job: it owes nothing of the past, unless it only has another name now."""
    before = job or JobRecord(definition.job)
    founded = _defined(before, definition, now=office.now)
    gone_on: list[edits.Edit] = []
    for alias in definition.aliases:
        old = office.job(alias)
        if old is not None and _goes_on(old):
            if old.spec != definition.spec:
                old = _after_pause(office, old)
            if old.paused:
                founded = founded._replace(paused=old.paused, paused_until=old.paused_until)
            gone_on.append(_renamed(office, old, founded, notes, since=before.watermark + 1))
            _end_waiting(office, alias, State.SKIPPED, "renamed")
            office.put_job(old._replace(retired=f"renamed to {definition.job}", next_due=None))
            notes.append(Note("renamed", definition.job, about=(("was", alias),)))
    # Of two names the one counts that was decided up to an earlier slot.
    done = min(gone_on, key=lambda each: each.begins, default=edits.Edit(int(office.now)))
    # A name that had slots of its own before has those on record already.
    since = before.watermark + 1
    passed = [span._replace(first=max(span.first, since)) for span in done.passed]
    _passed_between(office, definition.job, [one for one in passed if one.last >= since], notes)
    owe(office, definition.job, [one for one in done.kept if one.last >= since], since=since)
    office.put_job(_going_on(office, founded._replace(stored=stored), done, notes))


def _renamed(
    office: Office, old: JobRecord, founded: JobRecord, notes: list[Note], *, since: int
) -> edits.Edit:
    """Decide where a job stands that takes the place of one with another name.

    What is owed goes along, but for slots before ``since``: the new name has those on record.
    """
    for lane in owed_lanes(office, old.job):
        left = lane._replace(start=max(lane.start, since), cursor=max(lane.cursor, since))
        if left.start < left.until and old.spec != founded.spec:
            _owe_both(office, left, founded, notes)
            continue
        office.put_lane(lane._replace(ended_at=office.now, stopped="renamed"))
        if left.start < left.until:
            office.put_lane(left._replace(number=0, job=founded.job, created_at=office.now))
    if old.spec == founded.spec:
        return edits.Edit(old.watermark, old.owed)
    agenda = old.agenda._replace(job=founded.job)
    return edits.edit(_schedule(old), founded.schedule, founded.catching_up, agenda, now=office.now)


def _goes_on(old: JobRecord | None) -> bool:
    """Say whether a job is there that another name can take over from."""
    return old is not None and not old.retired and bool(old.epoch)


def _known_again(office: Office, job: JobRecord, notes: list[Note]) -> None:
    """Let an orphan run again. What it missed meanwhile is on record, up to the last slot."""
    if not (job.orphaned_at or job.unknown_since):
        return
    if job.orphaned_at:
        job = _back_from_orphans(office, job)
        notes.append(Note("known_again", job.job))
    office.put_job(job._replace(orphaned_at=0.0, unknown_since=0.0))


def _back_from_orphans(office: Office, job: JobRecord) -> JobRecord:
    mark = max(_let_pass(office, job, State.MISSED, "orphaned"), int(office.now))
    schedule = _schedule(job)
    due = None if schedule is None else next_start(schedule, job.catching_up, job.job, mark)
    return job._replace(watermark=mark, next_due=due, owed=job.made_up_to)


def _let_pass(office: Office, job: JobRecord, state: State, reason: str) -> int:
    """Record all that is due and undecided as one range; return where the job stands then."""
    schedule = _schedule(job)
    if schedule is not None and not isinstance(schedule, EveryAfter):
        newest, first = schedule.latest(office.now), schedule.after(job.watermark)
        if newest is not None and first is not None and first <= newest:
            office.span(job.job, Span(first, newest, state, reason))
            return newest
    return job.watermark


def _look_again(office: Office, name: str, gone: InstanceRecord, notes: list[Note]) -> None:
    """Settle which definition is in force, now that one of those who knew the job is gone."""
    job = office.job(name)
    if job is None or job.retired:
        return
    won = winner(office.cohorts(name), now=office.now)
    if won is not None and won.digest != job.digest:
        try:
            edit(office, job, office.definition(name, won.digest), notes)
        except Exception as error:  # noqa: BLE001 -- those who can read it will see to it
            notes.append(Note("trouble", name, about=(("error", told_safely(error)),)))
    elif not office.members(name):
        since = max(job.unknown_since, gone.beat_at)
        office.put_job(job._replace(unknown_since=since))


# What operators ask for.


def pause(office: Office, name: str, *, reason: str, until: float) -> JobRecord:
    """Let the slots of a job pass from now on, each recorded as skipped."""
    job = job_that_must_be_there(office, name)
    paused = job._replace(paused=reason or "paused", paused_until=until)
    office.put_job(paused)
    return paused


def resume(office: Office, name: str) -> JobRecord:
    """Let a job run again: what came due meanwhile is on record, and does not fire."""
    job = job_that_must_be_there(office, name)
    if job.retired:
        raise Misuse(
            f"job {name!r} is retired ({job.retired}) and does not come back: "
            "give it another name, or store it again"
        )
    if job.paused or job.quarantined:
        ends = office.now
        if job.paused_until and not job.quarantined:  # what came due since then is owed
            ends = min(ends, job.paused_until)
        job = _passed_until(office, job, ends)
        job = job._replace(paused="", paused_until=0.0, quarantined="")
        office.put_job(job)
        for lane in office.lanes(name):  # it was to be looked at again and again meanwhile
            if lane.not_before > office.now:
                office.put_lane(lane._replace(not_before=office.now))
    return job


def _after_pause(office: Office, job: JobRecord) -> JobRecord:
    """End a pause whose time is over: what came due since then is due, and not paused."""
    if job.barred != "paused" or job.pauses(office.now):
        return job
    passed = _passed_until(office, job, job.paused_until)
    return passed._replace(paused="", paused_until=0.0)


def _passed_until(office: Office, job: JobRecord, ends: float) -> JobRecord:
    """Record what came due until an instant as skipped, for what keeps the job from running."""
    schedule = _schedule(job)
    if schedule is None or isinstance(schedule, EveryAfter):
        return job
    newest = newest_due(schedule, job.catching_up, job.job, now=ends)
    first = schedule.after(job.watermark)
    if newest is None or first is None or first > newest:
        return job
    office.span(job.job, Span(first, newest, State.SKIPPED, job.barred))
    due = next_start(schedule, job.catching_up, job.job, newest)
    return job._replace(watermark=newest, next_due=due, owed=job.made_up_to)


def retire(office: Office, name: str, *, reason: str) -> JobRecord:
    """End a job for good, but for its name; what waits of it ends, what runs may finish."""
    job = job_that_must_be_there(office, name)
    if not job.retired:
        _end_waiting(office, name, State.SKIPPED, "retired")
        for run in office.idle(name):
            _end(office, run, State.CANCELLED, "retired")
        state = State.MISSED if job.orphaned_at else State.SKIPPED
        mark = _let_pass(office, job, state, job.barred or "retired")
        job = job._replace(retired=reason or "retired", watermark=mark, next_due=None, owed=0)
        office.put_job(job)
    return job


def _end_waiting(office: Office, name: str, state: State, reason: str) -> None:
    for run in office.waiting(name):
        _end(office, run, state, reason)


def _end(office: Office, run: RunRecord, state: State, reason: str) -> None:
    ended = run._replace(state=state, reason=reason, ended_at=office.now, not_before=0.0)
    office.put_run(ended, before=run)


def backfill(office: Office, lane: Lane) -> Lane:
    """Have slots of the past made up, or go on with the same range that is under way.

    A range up to now ends later each time that it is asked for. It is the same one all the same,
    and grows: a second lane beside the first would repeat what that has repeated. One that goes
    from its newest slot back cannot grow there, so another takes what is newer.
    """
    job = job_that_must_be_there(office, lane.job)
    for known in office.lanes(lane.job):
        same = (known.job, known.start, known.existing, known.trigger)
        if (
            same == (lane.job, lane.start, lane.existing, lane.trigger)
            and known.until <= lane.until
        ):
            if known.until == lane.until:
                return known
            if not known.newest_first:
                return office.put_lane(known._replace(until=lane.until))
            lane = lane._replace(start=known.until, cursor=max(lane.cursor, known.until))
            following = schedule_from(lane.spec or job.spec).after(lane.start - 1)
            if following is None or following >= lane.until:
                return known
    return office.put_lane(lane._replace(created_at=office.now))


def job_that_must_be_there(office: Office, name: str) -> JobRecord:
    """Return a job, or raise ``UnknownJob``."""
    job = office.job(name)
    if job is None:
        raise UnknownJob(name, known=[])
    return job
