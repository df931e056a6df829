"""To attempt a run is to have its body carried out under a kept lease, and to record how it ended.

However the body ends, exactly one of these is true afterwards: the ledger has the end; or the run
was lost, and a later attempt decides; or the store is away, and the lease's end decides.
"""

from __future__ import annotations

from functools import partial

from fencepost.errors import (
    FencepostError,
    GiveUp,
    Lost,
    RetryAfter,
    RunCancelled,
    RunRecalled,
    RunTimedOut,
)
from fencepost.flows.course import insist, ready
from fencepost.flows.handoff import ended_for_us, look_back
from fencepost.model.ending import LONGEST_ERROR, Ending, settle
from fencepost.model.event import JobEvent
from fencepost.model.fault import (
    FAULT_BASE,
    STORE_FAULT,
    faults_before,
    faults_noted,
    pause_after,
)
from fencepost.model.output import OUTPUT
from fencepost.model.policy import OnLoss
from fencepost.model.run import HANDED_OFF, State
from fencepost.model.secrets import redacted
from fencepost.model.slot import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fencepost.flows.course import Course, Doors
    from fencepost.model.ending import Settled
    from fencepost.model.policy import Retry
    from fencepost.model.run import RunRecord
    from fencepost.world.api import Flow

RELEASED = Ending(State.PENDING, "released")


class NothingToDo(Exception):
    """What ``run.skip`` raises to leave the body."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


async def attempt(  # noqa: C901 -- one branch for each way to end
    doors: Doors,
    course: Course,
    body: Callable[[Course], Flow[str | None]],
    *,
    emit: Callable[[JobEvent], None],
) -> RunRecord | None:
    """Carry out one attempt and return the run as it is then; None if it was lost meanwhile.

    ``body`` returns the result as JSON text. Whoever is interrupted from outside (a signal, a
    cancelled task) gives the run back, to be resumed by the next one without blame. A forked child
    that leaves the body ends nothing: the run is its parent's. A body that has handed the run off
    ends nothing either, unless it raises.
    """
    if course.chatty() or course.run.starts > 1:
        say(emit, "lock_acquired" if course.run.starts == 1 else "resumed", course)
    try:
        await ready(doors.world, course)  # it may have waited for longer than its lease
        result = await body(course)
        del body  # for many at once may wait for their ends to be on record
    except (Exception, SystemExit) as error:
        if course.foreign():
            raise
        if not course.handed_off and course.is_lost(error):
            return await _lost(doors, course, error, emit=emit)
        ending = _ending(course, error)
    except BaseException:
        if course.foreign() or course.handed_off:
            raise
        # An interrupt that came when the body had already returned does not undo its work.
        done = [Ending(State.SUCCEEDED, result=result) for result in course.returned]
        run = await conclude(doors, course, *done or [RELEASED], emit=emit)
        await keep_output(doors, course, run)
        raise
    else:
        if course.foreign():
            return None
        if course.handed_off:
            say(emit, HANDED_OFF, course)
            return await look_back(doors, course)
        ending = Ending(State.SUCCEEDED, result=result)
    try:
        ending = await _counted(doors, course, ending)
        run = await conclude(doors, course, ending, emit=emit)
    except BaseException as interrupt:
        # One who is interrupted meanwhile records it all the same: it is over.
        if not isinstance(interrupt, Exception | GeneratorExit):
            await conclude(doors, course, ending, emit=emit)
        raise
    if course.said is not None:
        await keep_output(doors, course, run)
    return run


def _ending(course: Course, error: BaseException) -> Ending:
    """Return how an attempt ends whose body raised: a fault of the ledger is not charged to it.

    The run is given back, to be resumed after a pause: no try is used up, and no loss is counted.
    So it is where the body left because nobody could tell whether the run is still ours.
    """
    if course.is_doubt(error) and not course.handed_off:
        return RELEASED
    if course.is_fault(error) and course.policy.on_loss is not OnLoss.FAIL:
        return Ending(State.PENDING, STORE_FAULT, error=described(error), after=FAULT_BASE)
    return ended_by(error, course.policy.retry)._replace(result=course.said)


async def _counted(doors: Doors, course: Course, ending: Ending) -> Ending:
    """Return an ending with the pause that follows so many faults in a row, and keep their number.

    It is kept with the run: whoever goes on from there may be another process.
    """
    if ending.reason != STORE_FAULT or ending.state is not State.PENDING:
        return ending
    world, ledger, key = doors.world, doors.ledger, course.attempt.key
    token, checkpoint = course.attempt.token, course.checkpoint
    try:
        events = await insist(world, course, lambda: ledger.events(key))
        before = [event for event in events if event.token != token]  # nothing of ours counts twice
        faults = faults_before(before, checkpoint) + 1
        detail = faults_noted(faults, checkpoint)
        note = partial(ledger.note, key, STORE_FAULT, token=token, detail=detail)
        await insist(world, course, note)
    except FencepostError:  # also that of a ledger which is away for longer than the lease
        faults = 1
    return ending._replace(after=pause_after(faults, dice=world.dice()))


async def _lost(
    doors: Doors, course: Course, error: BaseException, *, emit: Callable[[JobEvent], None]
) -> RunRecord | None:
    """Tell that a run was lost, unless another program has ended it for us."""
    if course.children is not None:
        await tell_of_children(doors, course, emit=emit)
    ended = await ended_for_us(doors, course)
    if ended is None:
        say(emit, "lost", course, reason=str(error))
    return ended


async def keep_output(doors: Doors, course: Course, run: RunRecord | None) -> None:
    """Keep what an attempt said whose run goes on: its record has only the last one's words."""
    if run is None or run.result is not None or course.said is None:
        return
    try:
        token = course.attempt.token
        await doors.ledger.note(course.attempt.key, OUTPUT, token=token, detail=course.said)
    except FencepostError:
        return  # its end is recorded already


def ended_by(error: BaseException, retry: Retry) -> Ending:
    """Return what the error that left a body says about the attempt."""
    if isinstance(error, NothingToDo):
        return Ending(State.SKIPPED, kept_words(error.reason))
    if isinstance(error, RunRecalled):
        return RELEASED
    if isinstance(error, RunCancelled):
        return Ending(State.CANCELLED, "cancelled", error=str(error))
    again, text = retry.worth(error), described(error)
    if isinstance(error, RunTimedOut):
        return Ending(State.TIMED_OUT, "timeout", error=text, again=again)
    reason = "gave_up" if isinstance(error, GiveUp) else "error"
    after = error.seconds if isinstance(error, RetryAfter) else 0.0
    return Ending(State.FAILED, reason, error=text, again=again, after=after)


def described(error: BaseException) -> str:
    """Return an error as the ledger keeps it: its kind and words, without secrets."""
    try:
        words = str(error)
    except Exception:  # noqa: BLE001 -- whatever its class does when it is asked
        words = "(it cannot say what it is)"
    kind = type(error).__name__
    return kept_words(f"{kind}: {words}" if words else kind)


def kept_words(text: str) -> str:
    """Return a text as a ledger can keep it: without secrets, halves of characters, or an end."""
    return redacted(text).encode(errors="backslashreplace").decode()[:LONGEST_ERROR]


async def conclude(
    doors: Doors, course: Course, ending: Ending, *, emit: Callable[[JobEvent], None]
) -> RunRecord | None:
    """Record how an attempt ended; None if the run was not ours any more."""
    world = doors.world
    dice = world.dice() if ending.again else 0.0
    settled = settle(course.run, ending, course.policy, dice=dice)
    if course.children is not None:
        await tell_of_children(doors, course, emit=emit)
    course.ending, course.ended = True, settled
    course.hold.about_to_end()
    try:
        run = await insist(world, course, partial(_told, doors, course, settled))
    except Lost as lost:
        say(emit, "lost", course, reason=str(lost))
        return None
    if course.chatty() or run.state is not State.SUCCEEDED or course.doubts:
        _tell(emit, course, run)
    return run


async def tell_of_children(
    doors: Doors, course: Course, *, emit: Callable[[JobEvent], None]
) -> None:
    """Log, and keep with the run, which processes a body left behind. Kept twice does no harm."""
    children = course.children
    assert children is not None, "asked for only where a body left some behind"
    say(emit, children.event, course, count=children.total, children=str(children))
    key, token, detail = course.attempt.key, course.attempt.token, str(children)
    try:
        note = partial(doors.ledger.note, key, children.event, token=token, detail=detail)
        await insist(doors.world, course, note)
    except Lost:
        pass  # the ledger is away for longer than the lease: the log has it
    course.children = None


def _told(doors: Doors, course: Course, settled: Settled) -> Awaitable[RunRecord]:
    if doors.ends is not None:
        return doors.ends(course.attempt, settled, course.report())
    return doors.ledger.finish(course.attempt, settled, report=course.report())


def _tell(emit: Callable[[JobEvent], None], course: Course, run: RunRecord) -> None:
    # Both by the ledger's clock: ours may show something else.
    now = run.beat_at
    about: dict[str, object] = {"duration": f"{max(0.0, now - course.run.started_at):.3f}s"}
    what = run.state.value
    if run.state is State.SUCCEEDED:
        what = "completed"
        about |= {**course.counts(), "last_success_at": shown(int(now))}
    elif run.state is State.WAITING_RETRY:
        what = "failed"
        about |= {"error": run.error, "retry_in": f"{max(0.0, run.not_before - now):.1f}s"}
    elif run.state is State.PENDING:
        what = "released"
        if run.error is not None:
            pause = f"{max(0.0, run.not_before - now):.1f}s"
            about |= {"reason": run.reason, "error": run.error, "retry_in": pause}
    elif run.state is State.SKIPPED:
        about = {"reason": run.reason}
    else:
        about |= {**course.counts(), "error": run.error}
    say(emit, what, course, **about)
    if course.doubts:
        say(emit, "in_doubt", course, items=",".join(course.doubts[:10]), count=len(course.doubts))


def say(emit: Callable[[JobEvent], None], what: str, course: Course, /, **more: object) -> None:
    """Emit an event about this attempt. What belongs to it may have any name: users choose some."""
    key = course.run.key
    pairs = tuple((name, value) for name, value in more.items() if value is not None)
    emit(JobEvent(what, key.job, str(key), course.attempt.token, pairs))
