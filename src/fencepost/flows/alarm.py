"""To fire an alarm is to claim what is due, carry its handler out, and commit how it ended.

Any number may fire at once: the book lets one have each alarm. One bad handler stops nobody else:
whatever it raises is recorded, and the next alarm is claimed.
"""

from __future__ import annotations

from fencepost.errors import FencepostError, LeaseLost, Lost, OutcomeUnknown
from fencepost.flows.attempt import described
from fencepost.flows.course import Course, insist
from fencepost.model.alarm import (
    RELEASED,
    AlarmEnd,
    AlarmRecord,
    AlarmWant,
    Became,
    Failure,
    Firing,
    Rearm,
    failure_of,
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
    from fencepost.flows.ring import Beside
    from fencepost.ledger.alarm_api import AlarmBook
    from fencepost.model.alarm import Batch, ClaimedAlarm
    from fencepost.model.alarm_policy import AlarmPolicy
    from fencepost.model.lease import Holder
    from fencepost.world.api import Flow, World

    Emit = Callable[[JobEvent], None]

# How often those who fire now are looked at: has one of them died?
SWEEP_EVERY = 0.5
# After a claim of due alarms that was granted none: somebody else is about to have them.
_BARREN_PAUSE = 0.25
# How often tombstones are looked at.
_PRUNE_EVERY = 3600.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5


class AlarmDoors(NamedTuple):
    """Through which a flow reaches the machine and the alarms."""

    world: World
    book: AlarmBook


class AlarmErrand(NamedTuple):
    """What firing needs of those who can: the kinds they handle, and how.

    ``holder`` makes one with a nonce of its own. ``carry_out`` fires what was claimed with a
    request sent at the given instant; None means that it was lost. ``alone`` says that nothing
    else runs here.
    """

    policies: dict[str, AlarmPolicy]
    holder: Callable[[], Holder]
    carry_out: Callable[[ClaimedAlarm, float], Flow[AlarmEnd | None]]
    alone: Callable[[], bool]
    emit: Emit


class Fired(NamedTuple):
    """What one call has done: how many handlers succeeded, failed, or came too late."""

    fired: int = 0
    failed: int = 0
    stale: int = 0
    dead: int = 0

    def __bool__(self) -> bool:
        return any(self)


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
        chatty: Callable[[], bool] | bool = True,
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
        self.firing = Firing(
            record.kind, record.key, record.fired, record.token, record.holder.nonce, record.lease
        )
        self.superseded = False  # whether somebody has set or cleared the alarm meanwhile
        self.unheard = False  # whether its end may be on record already
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


class Ringer:
    """Fires what is due, one call after another; between them it remembers what was left open."""

    def __init__(self, doors: AlarmDoors, errand: AlarmErrand) -> None:
        self._doors, self._errand = doors, errand
        self._doubtful: list[Holder] = []  # those whose claims were never answered
        self._sweep_at = self._prune_at = self._barren_until = 0.0
        self._expects = False  # whether something was due at the last look

    async def fire(
        self,
        *,
        limit: int | None = None,
        workers: int = 1,
        until: float | None = None,
        beside: Beside | None = None,
    ) -> Fired:
        """Fire what is due, ``workers`` at a time, until nothing is; no more than ``limit``.

        None begins after ``until``, an instant of the boot-time clock. Who is ``beside`` looks for
        what comes due meanwhile.
        """
        turn = _Turn(self, limit, until, beside)
        world = self._doors.world
        while (wanted := turn.may_claim(workers)) and (first := await turn.claim(wanted)):
            lanes = turn.lanes(first)
            if len(lanes) == 1:
                await lanes[0]
            else:
                await world.together(*lanes)
            if turn.error is not None:
                raise turn.error
        await self._tidy()
        fired = Fired(*turn.counts)
        if self._expects and not fired:
            self._barren_until = world.clocks.boottime() + _BARREN_PAUSE
        return fired

    async def due_in(self) -> float | None:
        """Say in how many seconds to fire, as far as is known now; None for not at all.

        Somebody else may set an earlier alarm. To look costs one statement that reads.
        """
        due = await self._doors.book.next_due(tuple(self._errand.policies))
        now, self._expects = self._doors.world.clocks.boottime(), due.within == 0.0
        within = max(0.0, self._barren_until - now) if self._expects else due.within
        if due.firing:  # whoever has it may die
            sweep_in = max(0.0, self._sweep_at - now)
            within = sweep_in if within is None else min(within, sweep_in)
        return within

    async def claim(self, limit: int) -> tuple[float, Batch]:
        """Ask until the book's answer is known; return it and the instant the request was sent."""
        world, errand = self._doors.world, self._errand
        holder = self._doubtful.pop() if self._doubtful else errand.holder()
        now = world.clocks.boottime()
        sweep = now >= self._sweep_at
        want = AlarmWant(holder, errand.policies, limit, alone=errand.alone(), sweep=sweep)
        give_up = now + min(policy.lease for policy in errand.policies.values())
        pause, answered = _FIRST_PAUSE, False
        try:
            while True:
                sent = world.clocks.boottime()
                try:
                    batch = await self._doors.book.claim_due(want)
                except OutcomeUnknown:
                    if world.clocks.boottime() >= give_up:
                        raise
                    await world.sleep(pause * (0.5 + world.dice()))
                    pause = min(pause * 2, _LONGEST_PAUSE)
                    continue
                answered = True
                if sweep:
                    self._sweep_at = world.clocks.boottime() + SWEEP_EVERY
                return sent, batch
        finally:
            if not answered:  # the next claim asks for what this one may have been granted
                self._doubtful.append(holder)

    @property
    def doors(self) -> AlarmDoors:
        """Through which it asks."""
        return self._doors

    @property
    def errand(self) -> AlarmErrand:
        """What it is to do."""
        return self._errand

    async def _tidy(self) -> None:
        now = self._doors.world.clocks.boottime()
        if now >= self._prune_at:
            self._prune_at = now + _PRUNE_EVERY
            try:
                await self._doors.book.prune()
            except FencepostError:
                return  # nobody depends on it, and in an hour it is tried again


class _Turn:
    """One call of ``fire``: what may still be claimed, and what became of what was."""

    def __init__(
        self, ringer: Ringer, limit: int | None, until: float | None, beside: Beside | None
    ) -> None:
        self._ringer, self._left, self._until = ringer, limit, until
        self._beside, self._under_way = beside, 0
        self._turn = ringer.doors.world.mutex()  # lanes may be threads
        self.counts = [0, 0, 0, 0]
        self.error: FencepostError | None = None

    def may_claim(self, most: int) -> int:
        """Return how many may be claimed now; from then on they are spoken for."""
        over = self.error is not None or (
            self._until is not None and self._ringer.doors.world.clocks.boottime() >= self._until
        )
        over = over or (self._beside is not None and self._beside.bell.stopped)
        if over or not self._ringer.errand.policies:
            return 0
        if self._left is None:
            return most
        with self._turn:
            granted = min(most, self._left)
            self._left -= granted
        return granted

    async def claim(self, limit: int) -> list[tuple[ClaimedAlarm, float]]:
        """Claim so many of what is due, and tell of what was found on the way."""
        while True:
            sent, batch = await self._ringer.claim(limit)
            emit = self._ringer.errand.emit
            for record in batch.dead:
                self._count(dead=1)
                say(emit, "alarm_dead", record, reason=record.reason, error=record.error)
            for one in batch.claimed:
                if one.overdue:
                    say(emit, "alarm_late", one.record, late=f"{one.late:.1f}s")
            if not batch.again:
                break
        if self._left is not None and len(batch.claimed) < limit:
            with self._turn:
                self._left += limit - len(batch.claimed)
        return [(one, sent) for one in batch.claimed]

    def lanes(self, first: list[tuple[ClaimedAlarm, float]]) -> list[Flow[None]]:
        """Return what fires these alarms, and those after them; and who looks meanwhile."""
        self._under_way = len(first)
        lanes = [self._lane(one) for one in first]
        if self._beside is not None:
            lanes.append(self._beside.watch(lambda: self._under_way > 0))
        return lanes

    async def _lane(self, first: tuple[ClaimedAlarm, float]) -> None:
        """Fire one alarm after another, as long as any is due. Never raises what is expected."""
        try:
            await self._fire(*first)
            while self.may_claim(1):
                claimed = await self.claim(1)
                if not claimed:
                    return
                for one, sent in claimed:  # several, if an earlier claim was never answered
                    await self._fire(one, sent)
        except FencepostError as error:  # the store is away: every lane will find that out
            self.error = error
        finally:
            with self._turn:
                self._under_way -= 1
            if self._beside is not None:
                self._beside.bell.nudge()

    async def _fire(self, claimed: ClaimedAlarm, sent: float) -> None:
        errand = self._ringer.errand
        try:
            end = await errand.carry_out(claimed, sent)
        except FencepostError:
            raise
        except Exception as error:  # noqa: BLE001 -- whatever was wrong with this one, others are due
            say(errand.emit, "alarm_failed", claimed.record, error=described(error))
            self._count(failed=1)
            return
        became = Became.LOST if end is None else end.became
        if became is Became.DONE:
            self._count(fired=1)
        elif became in (Became.AGAIN, Became.DEAD):
            self._count(failed=1, dead=int(became is Became.DEAD))
        else:
            self._count(stale=1)

    def _count(self, *, fired: int = 0, failed: int = 0, stale: int = 0, dead: int = 0) -> None:
        with self._turn:
            more = (fired, failed, stale, dead)
            self.counts = [old + new for old, new in zip(self.counts, more, strict=True)]


async def ring(
    doors: AlarmDoors, course: AlarmCourse, body: Callable[[AlarmCourse], Flow[None]], *, emit: Emit
) -> AlarmEnd | None:
    """Carry out one handler, and commit how it ended; None if it was lost meanwhile.

    Whoever is interrupted from outside gives the alarm back, to be fired by the next one.
    """
    try:
        await body(course)
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


def _tell(emit: Emit, course: AlarmCourse, end: AlarmEnd, failure: Failure | None) -> None:
    record, became = course.alarm, end.became
    if became is Became.DONE:
        if course.chatty:
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
    pairs = tuple((name, value) for name, value in more.items() if value is not None)
    emit(JobEvent(what, record.kind, record.id, record.token, (("key", record.key), *pairs)))
