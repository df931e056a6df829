"""What a tick does inside of one transaction, on the desk of any ledger.

The order is part of the contract: what has ended is recorded first, so that what waited for it can
go; then runs that were begun before, then slots that are due, then the past. One job that cannot
be planned never stops the others: it is looked at again later, and told of.
"""

from __future__ import annotations

from fencepost.ledger.lanes import make_up
from fencepost.ledger.made_up import items_known_by, oldest_owed
from fencepost.ledger.planning import (
    OWED,
    TROUBLE,
    Asked,
    Begun,
    Due,
    Lane,
    Note,
    Place,
    Ticked,
    note_of_run,
    note_of_span,
    told_safely,
)
from fencepost.model.claim import Verdict, is_patient
from fencepost.model.plan import WAITS, Past, Plan, plan
from fencepost.model.policy import OnLoss, Overlap
from fencepost.model.run import RunRecord, State
from fencepost.model.schedule import EveryAfter
from fencepost.model.slot import RunKey
from fencepost.model.turns import by_patience, in_turn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.ledger.planning import Ask, Desk
    from fencepost.model.claim import Claimed, Want
    from fencepost.model.definition import JobRecord

_LONGEST_WAIT = 60.0
# How many jobs that are due a tick looks at once there is no room to begin any.
_MOST_PAST_ROOM = 100
# How many runs and jobs that the instance does not know a tick looks at, and how soon it goes on.
_MOST_UNKNOWN, _SOON = 1000, 0.1


def tick(desk: Desk, ask: Ask) -> Ticked:
    """Carry one tick out."""
    return Tick(desk, ask).carried_out()


class Tick:
    """One tick: what it was asked, what it has begun so far, and what there is to tell."""

    def __init__(self, desk: Desk, ask: Ask) -> None:
        self.desk, self.ask, self.now = desk, ask, desk.now
        self._begun: list[Begun] = []
        self.notes, self.full = list[Note](), False
        self._asked = self._past_room = self.unknown = 0
        self._left: Place | None = None
        self._batch: list[Due] = []  # to be claimed at once
        self._batch_locks: set[str] = set()
        self._plans: dict[tuple[object, ...], Plan] = {}  # of what is due alike
        self._seen: set[str] = set()  # jobs that were looked at, though it was not their place
        self._tried: set[RunKey] = set()  # and runs that waited

    def carried_out(self) -> Ticked:
        """Do all of it, in the order that is promised."""
        desk, ask = self.desk, self.ask
        ended = desk.finish_all(ask.ended)
        if ask.again:
            self._find_granted()
        if ask.sweep:
            for run in desk.lost_runs(only=ask.only):
                self._go_on(run)
        self._go_on_all()
        stirred = {end.attempt.key.job for end in ask.ended} & ask.stirs
        self._seen |= stirred
        for job in sorted(stirred):
            self._stir(job)
        self._due_all()
        make_up(self)
        pause = self._pause()
        said = (self._begun, ended, self.notes, pause, self.full)
        return Ticked(*said, left=self._left, now=self.now)

    def _go_on_all(self) -> None:
        """Go on with runs that wait, from where the last tick left off."""
        ask, since = self.ask, self.ask.since or Place()
        if since.job is not None:
            return
        due = self.desk.due_runs(most=ask.most, only=ask.only, after=since.run)
        for looks, run in enumerate(due, 1):
            if self.enough():
                return
            if run.fresh and run.key.job in ask.rivals:
                self._go_on_waiting(run.key.job)
            else:
                self._go_on(run)
            if self.unknown >= _MOST_UNKNOWN:
                self._left = Place(run=(run.not_before, run.key))
                return
            if looks - self.unknown >= ask.most:
                return

    def _due_all(self) -> None:
        """Decide what is due, from where the last tick left off."""
        ask, since = self.ask, self.ask.since or Place()
        if self._left is not None:
            return
        page = max(1, min(ask.most, ask.room - len(self._begun) + _MOST_PAST_ROOM // 4))
        for record in self.desk.due_jobs(most=page, only=ask.only, after=since.job):
            if self.enough():
                break
            if record.job not in self._seen:
                self._due_in_turn(record)
            if self.unknown >= _MOST_UNKNOWN:
                assert record.next_due is not None, "else it would not be due"
                self._left = Place(job=(record.next_due, record.job))
                break
        self._claim_batch()

    def _pause(self) -> float | None:
        """Return how long until something is due; what is due and not ours is looked at later."""
        due = self.desk.next_look()
        if due is None:
            return None
        if due > self.now:
            return due - self.now
        if self._left is not None:
            return _SOON
        return 0.0 if self._begun and not self.full else WAITS

    def enough(self) -> bool:
        """Say whether to leave the rest of what is due to the next tick, or to another instance.

        Without room only slots can be decided that are not to run. To look for them costs as much
        as to begin others, so that is done along with the sweep, and for some only.
        """
        if not self._room:
            self._claim_batch()  # perhaps not all of them can be had
        if self._room:
            return False
        self.full = True
        self._past_room += 1
        return not self.ask.sweep or self._past_room > _MOST_PAST_ROOM

    @property
    def _room(self) -> bool:
        return self._taken < self.ask.room

    @property
    def _taken(self) -> int:
        """How many places are taken: by what was begun, and by what is about to be."""
        return len(self._begun) + len(self._batch)

    def want(
        self, key: RunKey, job: JobRecord | None, trigger: str, *, patient: bool = False
    ) -> Want | None:
        """Return the request for a run; None if this instance does not know its job."""
        template = key.job if job is None else job.template or job.job
        self._asked += 1
        # Each time it is asked its attempts get nonces of their own: one is good for one attempt.
        nonce = f"{self.ask.nonce}{self.ask.again:02x}{self._asked:04x}"
        epoch, digest = (0, "") if job is None else (job.epoch, job.digest)
        try:
            want = self.ask.want(
                Asked(key, template, nonce, trigger, epoch, digest, self._room, patient)
            )
        except Exception as error:  # noqa: BLE001 -- as with a schedule: others are not to blame
            self._trouble(job, key.job, error)
            self._postpone_for(self.desk.run(key), TROUBLE)
            return None
        if want is None:
            self.unknown += 1
            return None
        room, planned = self._room_for(want), 0.0 if job is None else job.planned_start(key)
        if (want.room, want.patient, want.planned) == (room, patient, planned):
            return want
        return want._replace(room=room, patient=patient, planned=planned)

    def _room_for(self, want: Want) -> bool:
        """Say whether a run may be claimed: one that a loss would end, only if it can begin."""
        free = self.ask.free
        if free is not None and want.policy.on_loss is OnLoss.FAIL:
            return self._taken < min(free, self.ask.room)
        return self._room

    def _trouble(self, job: JobRecord | None, name: str, error: Exception) -> None:
        """Leave a job alone for a while that cannot be planned, or asked for, and tell of it."""
        if job is not None and job.next_due is not None and job.next_due <= self.now:
            self.desk.move_job(job._replace(next_due=self.now + TROUBLE))
        self.notes.append(Note("trouble", name, about=(("error", told_safely(error)),)))

    def begin(self, claimed: Claimed, job: JobRecord | None) -> None:
        """Keep an attempt that was granted, for the instance to carry out."""
        assert claimed.run is not None, "what was claimed has a record"
        rerun = items_known_by(self.desk, claimed.run)
        if job is None:
            self._begun.append(Begun(claimed, claimed.run.key.job, rerun=rerun))
        else:
            known = (job.template or job.job, job.payload, job.spec, job.effective_from)
            self._begun.append(Begun(claimed, *known, rerun, job.rules))

    def _find_granted(self) -> None:
        for claimed in self.desk.granted(self.ask.nonce):
            assert claimed.run is not None, "what was granted has a record"
            self.begin(claimed, self.desk.job(claimed.run.key.job))

    # Runs that were begun, or wait for their turn.

    def _go_on(self, run: RunRecord, *, depth: int = 0) -> None:
        """Claim a run that is there already, if this instance knows its job."""
        job = self.desk.job(run.key.job)
        if job is not None and job.retired and run.state is not State.RUNNING:
            self._retire(run)
            return
        want = self.want(run.key, job, run.trigger)
        if want is None:
            return
        claimed = self.desk.claim(want)
        verdict, found = claimed.verdict, claimed.run or run
        if verdict is Verdict.GO:
            self.begin(claimed, job)
        elif verdict is Verdict.ENDED:
            self.notes.append(note_of_run(found))
        elif verdict is Verdict.NO_ROOM:
            self.full = True
        elif not claimed.pause:
            if verdict is Verdict.REPLACE:
                self._replace(want, claimed)
            elif verdict is Verdict.AFTER and claimed.blocker is not None and depth < 3:
                self._go_on(claimed.blocker, depth=depth + 1)
            self._postpone(found)

    def _go_on_waiting(self, name: str) -> None:
        """Claim what waits of a job, and of those that share its lock: what has waited longest."""
        names = (name, *self.ask.rivals.get(name, ()))
        for run in by_patience(run for one in names for run in self.desk.waiting(one)):
            if run.key not in self._tried:
                self._tried.add(run.key)
                self._go_on(run)

    def _retire(self, run: RunRecord) -> None:
        """End what waits of a job that is retired, whoever knows it: there is no other try."""
        state = State.SKIPPED if run.fresh else State.CANCELLED
        ended = run._replace(state=state, reason="retired", ended_at=self.now, not_before=0.0)
        self.notes.append(note_of_run(self.desk.put_run(ended, before=run)))

    def _postpone(self, run: RunRecord) -> None:
        """Look at a run again that waits for others: the longer it has waited, the later."""
        waited = self.now - run.created_at
        self._postpone_for(self.desk.run(run.key), min(max(WAITS, waited / 8), _LONGEST_WAIT))

    def _postpone_for(self, run: RunRecord | None, pause: float) -> None:
        if run is not None and run.state in (State.PENDING, State.WAITING_RETRY):
            self.desk.put_run(run._replace(not_before=self.now + pause), before=run)

    def _replace(self, want: Want, claimed: Claimed) -> None:
        """Ask the run that is in the way to stop; after its grace take its token away."""
        blocker = claimed.blocker
        assert blocker is not None, "something must be in the way"
        operator = f"replaced by {want.key}"
        if not blocker.cancel_at:
            self.desk.cancel(blocker.key, force=False, operator=operator)
        elif self.now >= blocker.cancel_at + want.policy.cancel_grace:
            self.desk.cancel(blocker.key, force=True, operator=operator)

    # Slots that are due.

    def _stir(self, name: str) -> None:
        """Look at a job of which a run has just ended: something may have waited for that."""
        self._go_on_waiting(name)
        job = self.desk.job(name)
        if job is not None and job.epoch and not job.retired and not self._rests(job):
            self._due_in_turn(job)
            self._claim_batch()  # before another job is looked at that may want the same lock

    def _rests(self, job: JobRecord) -> bool:
        """Say whether a job wants a pause between the slots that it makes up."""
        if not job.owed or job.next_due is None or job.next_due <= self.now:
            return False
        return bool(job.catching_up.pause)

    def _due_in_turn(self, job: JobRecord) -> None:
        """Decide what is due of a job, and of those that share its lock, each in its turn."""
        rivals = self.ask.rivals.get(job.job)
        if not rivals or self.ask.only is not None:
            self._due(job)
            return
        names = [job.job, *(name for name in rivals if name not in self._seen)]
        began = self.desk.last_began(names)
        others = (self.desk.job(name) for name in names[1:])
        due = [one for one in others if one is not None and one.is_due(self.now)]
        for one in in_turn([job, *due], began):
            if self.enough():
                return
            self._seen.add(one.job)
            self._due(one)

    def _due(self, job: JobRecord) -> None:
        if job.made_up_to and not job.barred:
            if self._owes_older(job):
                self.desk.move_job(job._replace(next_due=self.now + WAITS))
                return
            job = job._replace(owed=0)
        try:
            if job.paused_until and self.now >= job.paused_until:
                job = self.unpaused(job)
            planned = self._planned_alike(job)
        except Exception as error:  # noqa: BLE001 -- whatever is wrong with it, others are not to blame
            self._trouble(job, job.job, error)
            return
        if planned.slot is None:
            self._decided(job, planned)
            return
        trigger = "catchup" if planned.owed else "schedule"
        patient = is_patient(trigger, job.catching_up)
        want = self.want(RunKey(job.job, planned.slot), job, trigger, patient=patient)
        if want is None:
            return  # somebody else knows the job, or it will be an orphan
        if self._is_usual(planned, want):
            self._batch.append(Due(want, job, planned))
            self._batch_locks.add(want.lock)
            return
        if want.lock in self._batch_locks:  # who was due before us has its turn before us
            self._claim_batch()
            want = want._replace(room=self._room_for(want))
        if self._claim_slot(job, want):
            self._decided(job, planned)

    def _is_usual(self, planned: Plan, want: Want) -> bool:
        """Say whether to claim a slot is all that there is to do about its job now."""
        usual = want.room and want.policy.overlap is not Overlap.ALLOW
        if not usual or want.patient or planned.spans or planned.later is not None:
            return False
        return planned.next_due is None or planned.next_due > self.now

    def _claim_batch(self) -> None:
        """Claim what was gathered; what cannot be had just so is decided one by one."""
        batch, self._batch = self._batch, []
        self._batch_locks.clear()
        claimed = self.desk.claim_all(batch) if batch else ()
        for due, one in zip(batch, claimed, strict=True):
            if one is not None:
                self.begin(one, due.job)
        for (want, job, planned), one in zip(batch, claimed, strict=True):
            if one is None:
                asked = want._replace(room=self._room_for(want))
                if self._claim_slot(job, asked):
                    self._decided(job, planned)

    def unpaused(self, job: JobRecord) -> JobRecord:
        """End a pause whose time is over; what came due until then is skipped, and on record."""
        planned = self._planned(job, now=job.paused_until)
        self._decided(job, planned)
        stands = (planned.watermark, planned.next_due, job.made_up_to)
        job = job.passed(*stands)._replace(paused="", paused_until=0.0)
        self.desk.move_job(job)
        return job

    def _planned_alike(self, job: JobRecord) -> Plan:
        """Plan a job; those that stand alike are planned alike, unless their name has a say."""
        alike = (job.spec, job.rules, job.watermark, job.owed, job.barred)
        planned = self._plans.get(alike)
        if planned is None:
            planned = self._planned(job)
            named = "jitter" in job.rules or isinstance(job.schedule, EveryAfter)
            if not named and not planned.spans:
                self._plans[alike] = planned
        return planned

    def _planned(self, job: JobRecord, *, now: float | None = None) -> Plan:
        schedule = job.schedule
        if schedule is None:  # it lost its schedule: there is nothing to look for
            return Plan(None, (), job.watermark, None)
        past = self.desk.past(job.job) if isinstance(schedule, EveryAfter) else Past()
        now = self.now if now is None else now
        return plan(schedule, job.catching_up, job.agenda, now=now, past=past)

    def _claim_slot(self, job: JobRecord, want: Want) -> bool:
        """Claim a slot; say whether it is decided, so that the watermark may pass it."""
        claimed, tried = self.desk.claim(want), {want.key}
        while (older := claimed.blocker) and claimed.verdict is Verdict.AFTER:
            if older.key in tried:
                break
            tried.add(older.key)
            self._go_on(older)
            claimed = self.desk.claim(want._replace(room=self._room_for(want)))
        verdict = claimed.verdict
        if verdict is Verdict.NO_ROOM:
            self.full = True
            return False
        if verdict is Verdict.AFTER or (verdict is Verdict.LATER and claimed.run is None):
            self.desk.move_job(job._replace(next_due=self.now + WAITS))
            return False
        if verdict is Verdict.GO:
            self.begin(claimed, job)
        elif verdict is Verdict.REPLACE:
            self._replace(want, claimed)
        elif verdict is Verdict.ENDED and claimed.fresh and claimed.run is not None:
            self.notes.append(note_of_run(claimed.run))
        return True

    def _decided(self, job: JobRecord, planned: Plan) -> None:
        for span in planned.spans:
            self.desk.span(job.job, span)
            self.notes.append(note_of_span(job.job, span))
        if planned.later is not None:
            self._owe(job, *planned.later)
        owed = planned.owed or job.made_up_to
        self.desk.advance(job.job, planned.watermark, planned.next_due, owed)

    def _owe(self, job: JobRecord, first: int, last: int) -> None:
        """Have slots made up behind the live ones, by the schedule that they came from."""
        made_up = Lane(0, job.job, first, last + 1, first, trigger=OWED, spec=job.spec)
        self.desk.put_lane(made_up._replace(created_at=self.now))

    def _owes_older(self, job: JobRecord) -> bool:
        """Say whether older slots are made up first, and not all of them have ended yet."""
        owing = oldest_owed(self.desk, job.job) is not None
        return owing or self.desk.made_up(job.job, OWED) > 0
