"""To fire an alarm that was claimed is to carry its handler out, and to commit how that ended."""

from __future__ import annotations

from fencepost.errors import LeaseLost, Lost, NoThread, OutcomeUnknown
from fencepost.flows.attempt import described
from fencepost.flows.course import Course, always, insist
from fencepost.model.alarm import (
    NOT_BEGUN,
    RELEASED,
    AlarmEnd,
    AlarmRecord,
    Became,
    Failure,
    Rearm,
    failure_of,
    firing_of,
)
from fencepost.model.event import JobEvent
from fencepost.model.lease import Grant
from fencepost.model.named import NamedTuple
from fencepost.model.policy import Policy
from fencepost.model.run import RunRecord, State
from fencepost.model.slot import RunKey

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost.flows.keep import Hold
    from fencepost.ledger.alarm_api import AlarmBook
    from fencepost.model.alarm import ClaimedAlarm
    from fencepost.model.alarm_policy import AlarmPolicy
    from fencepost.world.api import Flow, World

    Emit = Callable[[JobEvent], None]


_NOT_OURS = "its lease was lost before, and the alarm is no longer its own"
_COUNTED = (
    "a loss of it is counted and it is fired again, unless somebody sets or clears the alarm or it "
    "has had too many (max_losses)"
)


class AlarmDoors(NamedTuple):
    """Through which a flow reaches the machine and the alarms."""

    world: World
    book: AlarmBook


class AlarmCourse(Course):
    """The course of one handler. To its keeper and its body it looks like an attempt of a run."""

    def __init__(
        self,
        world: World,
        claimed: ClaimedAlarm,
        hold: Hold,
        policy: AlarmPolicy,
        *,
        emit: Emit,
        chatty: Callable[[], bool] = always,
    ) -> None:
        record = claimed.record
        run = RunRecord(
            RunKey(f"{record.kind}/{record.key}", int(record.due_at)),
            State.RUNNING,
            record.lease,
            record.lease,
            record.token,
            record.holder,
            starts=1,
        )
        words = Policy(timeout=policy.timeout, cancel_grace=policy.cancel_grace, lease=policy.lease)
        super().__init__(world, run, hold, words, chatty=chatty)
        self.alarm, self.claimed, self.kind_policy = record, claimed, policy
        self.firing = firing_of(record)
        self.superseded = False  # whether somebody has set or cleared the alarm meanwhile
        self.unheard = False  # whether its end may be on record already
        self.outcome = ""  # how its handler ended, once it has
        # What becomes of the alarm if the handler succeeds; it may say otherwise.
        every = policy.every
        self.rearm = None if every is None else Rearm(record.payload, every=every)
        self._emit = emit

    async def keep_alive(self, book: AlarmBook, ttl: float) -> Grant:
        """Renew, and hear whether a newer generation is there."""
        try:
            self.superseded = await book.beat(self.firing, ttl=ttl)
        except LeaseLost as lost:
            if not self.ending:
                raise
            # Perhaps it is our own end that came first. Only the answer to that one can tell.
            raise OutcomeUnknown(str(lost)) from lost
        late = self.deadline is not None and (
            self._boottime() >= self.deadline + self.policy.cancel_grace
        )
        if late and not self.stuck:
            self.stuck = True
            why = "it outlived its timeout and could not be stopped; its lease is kept"
            say(self._emit, "alarm_stuck", self.alarm, reason=why)
        return Grant(self.firing.token, ttl)


async def fire(
    doors: AlarmDoors, course: AlarmCourse, body: Callable[[AlarmCourse], Flow[None]], *, emit: Emit
) -> AlarmEnd | None:
    """Carry out one handler, and commit how it ended; None if it was lost meanwhile.

    Whoever is interrupted from outside gives the alarm back, to be fired by the next one; and so
    does who has no thread for a handler, and raises that.
    """
    try:
        await body(course)
    except NoThread:
        await conclude(doors, course, NOT_BEGUN, emit=emit)
        raise
    except (Exception, SystemExit) as error:
        if course.foreign():
            raise
        if course.is_lost(error):
            say(emit, "alarm_stale", course.alarm, reason=str(error))
            return None
        failure = failure_of(
            course.alarm,
            error,
            described(error),
            course.kind_policy,
            dice=doors.world.dice(),
        )
        return await _concluded(doors, course, failure, emit=emit)
    except BaseException:
        if course.foreign():
            raise
        # An interrupt that came when the handler had already returned does not undo its work.
        await conclude(doors, course, None if course.returned else RELEASED, emit=emit)
        raise
    if course.foreign():
        return None
    return await _concluded(doors, course, None, emit=emit)


async def _concluded(
    doors: AlarmDoors, course: AlarmCourse, failure: Failure | None, *, emit: Emit
) -> AlarmEnd | None:
    """Commit how a handler ended, also for one who is interrupted meanwhile: it is over."""
    try:
        return await conclude(doors, course, failure, emit=emit)
    except BaseException as interrupt:
        if not isinstance(interrupt, Exception | GeneratorExit):
            await conclude(doors, course, failure, emit=emit)
        raise


async def conclude(
    doors: AlarmDoors, course: AlarmCourse, failure: Failure | None, *, emit: Emit
) -> AlarmEnd | None:
    """Commit a success, or record a failure; None if the alarm was not ours any more."""
    course.ending = course.hold.ending = True
    course.outcome = _outcome_of(failure)
    book, firing, rearm = doors.book, course.firing, course.rearm

    async def ask() -> AlarmEnd:
        try:
            if failure is None:
                return await book.finish(firing, rearm)
            return await book.fail(firing, failure)
        except BaseException as error:
            if isinstance(error, OutcomeUnknown) or not isinstance(error, Exception):
                course.unheard = True  # an interrupt may come after the commit as well
            raise

    try:
        end = await insist(doors.world, course, ask)
    except Lost as lost:
        say(emit, "alarm_stale", course.alarm, reason=str(lost))
        return None
    if end.became is Became.GONE and course.unheard and failure is None and rearm is None:
        # It is gone because it was committed: by that earlier request, as far as one can tell.
        end = AlarmEnd(Became.DONE)
    _tell(emit, course, end, failure)
    return end


def _outcome_of(failure: Failure | None) -> str:
    if failure is None:
        return "succeeded"
    return "released" if failure.counted == "releases" else "failed"


def cut(course: AlarmCourse) -> JobEvent:
    """Return the event that tells of a handler that ends with its process."""
    lost = course.hold.why_lost is not None
    if course.outcome:
        fate = _NOT_OURS if lost else f"unless it is on record, {_COUNTED}"
        note = f"the ledger has not confirmed this end: {fate}"
        return _event("alarm_unrecorded", course.alarm, ended=course.outcome, note=note)
    note = "its handler did not end within the grace and ended with the process: "
    return _event("alarm_cut", course.alarm, note=note + (_NOT_OURS if lost else _COUNTED))


def _tell(emit: Emit, course: AlarmCourse, end: AlarmEnd, failure: Failure | None) -> None:
    record, became = course.alarm, end.became
    if became is Became.DONE:
        if course.chatty():
            again = None if end.record is None else f"{end.record.due_at:.3f}"
            say(emit, "alarm_fired", record, attempt=record.attempt, next_due_at=again)
        return
    if became in (Became.AGAIN, Became.DEAD):
        assert failure is not None, "only a failure is tried again"
        if failure.counted != "releases":
            pause = f"{failure.pause:.1f}s" if became is Became.AGAIN else None
            say(emit, "alarm_failed", record, error=failure.error, retry_in=pause)
        if became is Became.DEAD:
            say(emit, "alarm_dead", record, reason=failure.dead, error=failure.error)
        return
    newer = end.record.generation if end.record is not None else None
    say(emit, "alarm_stale", record, reason=became.value, newer=newer)


def say(emit: Emit, what: str, record: AlarmRecord, /, **more: object) -> None:
    """Emit an event about an alarm."""
    emit(_event(what, record, **more))


def _event(what: str, record: AlarmRecord, /, **more: object) -> JobEvent:
    pairs = tuple((name, value) for name, value in more.items() if value is not None)
    return JobEvent(what, record.kind, record.id, record.token, (("key", record.key), *pairs))
