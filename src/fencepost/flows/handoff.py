"""A run can be handed off: another program has it from then on, and tells how it ended.

Who has the token has the run. It may beat and complete from any process and any machine; the
process that handed it off may die. The lease ends by itself if nothing is heard in time, and then
the next claim decides, as it does about every run that was lost.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from fencepost.errors import (
    LeaseHeld,
    Misuse,
    OutcomeUnknown,
    RunLost,
    RunTimedOut,
    StoreUnavailable,
    UnknownRun,
)
from fencepost.flows.course import LARGEST, insist
from fencepost.flows.divide import divide
from fencepost.ledger.api import Attempt, Report
from fencepost.ledger.planning import BACKFILL_ALL
from fencepost.model.ending import Ending, settle
from fencepost.model.handoff import handed_ttl, time_left
from fencepost.model.named import NamedTuple
from fencepost.model.outcome import Outcome, of_record
from fencepost.model.run import HANDED_OFF, State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.flows.course import Course, Doors
    from fencepost.model.definition import JobRecord
    from fencepost.model.item import Found
    from fencepost.model.policy import Policy
    from fencepost.model.run import RunRecord
    from fencepost.model.slot import RunKey
    from fencepost.world.api import Flow

_FIRST_PAUSE, _LONGEST_PAUSE, _TRIES = 0.02, 0.5, 8


class Held(NamedTuple):
    """A run, the attempt of it that some token stands for, and the policy of its job."""

    run: RunRecord
    attempt: Attempt
    policy: Policy


async def hand_over(doors: Doors, course: Course) -> None:
    """Entrust this attempt to whoever was given its token. Raises if the run was lost."""
    if not course.hands_over:
        raise Misuse(
            f"run {course.run.key} cannot be handed off from a process of its own, or beside "
            "leases elsewhere: leave out isolation='process', the other program is another process "
            "in any case; and leases=, for it would not have that lease"
        )
    course.check(saving=True)  # also at the end of a budget: it costs no more of our time
    # A beat may come too late from here on: the other side can end the run at any time.
    course.ending = course.hold.ending = True

    def ask() -> Flow[None]:
        ttl = handed_ttl(course.policy, left=course.left())
        return doors.ledger.hand_over(course.attempt, ttl=ttl)

    await insist(doors.world, course, ask)
    course.handed_off = True


async def look_back(doors: Doors, course: Course) -> RunRecord:
    """Return a run that was handed off as it is now; it may have ended already."""
    try:
        found = await doors.ledger.find(course.run.key)
    except (OutcomeUnknown, StoreUnavailable):
        found = None  # it was handed off, which is all that is known here
    return found or course.run._replace(reason=HANDED_OFF)


async def ended_for_us(doors: Doors, course: Course) -> RunRecord | None:
    """Return a run that another program has ended for this attempt, though we did not know yet.

    Its answer may be quicker than the news that it has the run: that is no loss.
    """
    try:
        run = await doors.ledger.find(course.run.key)
    except (OutcomeUnknown, StoreUnavailable):
        return None
    by = course.attempt
    ours = run is not None and run.state.terminal and run.was_ended_by(by.token, by.nonce)
    return run if ours else None


async def held_by(doors: Doors, key: RunKey, *, token: int, policy: Policy) -> Held:
    """Return the run that is to be written to. Whether the token is good, each write finds out."""
    if isinstance(token, bool) or not isinstance(token, int):
        raise Misuse(f"token is {token!r}: give the number that came with run {str(key)!r}")
    if not 0 <= token <= LARGEST:
        raise Misuse(f"token is none that was ever given: give the one of run {str(key)!r}")
    run = await _asked(doors, lambda: doors.ledger.find(key))
    if run is None:
        raise UnknownRun(str(key))
    by = Attempt(key, token, run.holder.nonce, run.lease, f"whoever has token {token}")
    return Held(run, by, policy)


async def job_of(doors: Doors, name: str) -> JobRecord | None:
    """Return a job as the ledger knows it."""
    return await _asked(doors, lambda: doors.ledger.planner.job(name))


async def repeated(doors: Doors, key: RunKey) -> int:
    """Return by which run of its slot the items of a run are known."""
    for rerun in range(key.rerun, 0, -1):
        known = await _asked(doors, partial(doors.ledger.find, key._replace(rerun=rerun)))
        if known is not None and known.trigger == BACKFILL_ALL:
            return rerun
    return 0


async def beat(doors: Doors, held: Held, report: Report) -> bool:
    """Keep a handed-off run for its next beat's time; say whether a cancel was asked for."""
    left = time_left(held.run, held.policy, now=await _asked(doors, doors.ledger.now))
    if left is not None and left <= 0 and held.run.state is State.RUNNING:
        assert held.policy.timeout is not None, "only what has a timeout can use it up"
        raise RunTimedOut(str(held.run.key), timeout=held.policy.timeout)
    ttl = handed_ttl(held.policy, left=left)
    if held.run.state is State.RUNNING:
        await _asked(doors, lambda: doors.ledger.hand_over(held.attempt, ttl=ttl))
        await _asked(doors, lambda: _stay_divided(doors, held))
    return await _asked(doors, lambda: doors.ledger.beat(held.attempt, ttl=ttl, report=report))


async def _stay_divided(doors: Doors, held: Held) -> None:
    """Leave another mark at the lock if the run has a permit of it."""
    lock, limit = held.run.lock, held.policy.max_concurrent
    if held.run.lease != lock:
        with suppress(LeaseHeld):  # somebody broke the mark by force, and has the lock
            await divide(doors.ledger.leases, lock, limit=limit, nonce=doors.world.nonce())


async def take(doors: Doors, held: Held) -> float:
    """Begin a handed-off run here; return when its lease was asked for. Raises if others have it.

    Only the first who asks with this token begins it: a message may well be delivered twice.
    """
    key, token, clock = held.run.key, held.attempt.token, doors.world.clocks.boottime
    call, scope = doors.world.nonce(), f"{HANDED_OFF}/{key}"

    def begin() -> Flow[list[Found]]:
        items = [str(token)]
        return doors.ledger.begin(held.attempt, scope=scope, items=items, call=call, repeat=False)

    (found,) = await _asked(doors, begin)
    if not found.go:
        raise RunLost(str(key), token=token, reason="it was begun before, under this very token")
    ttl = held.policy.lease
    give_up = clock() + ttl
    while True:
        sent = clock()
        try:
            await doors.ledger.hand_over(held.attempt, ttl=ttl)
        except (OutcomeUnknown, StoreUnavailable):
            await doors.world.sleep(_LONGEST_PAUSE)
            if clock() >= give_up:
                raise
        else:
            return sent


async def complete(doors: Doors, held: Held, ending: Ending) -> RunRecord:
    """Record how a handed-off run ended; told twice, the second is answered as the first."""
    settled = settle(held.run, ending, held.policy, dice=doors.world.dice())
    return await _asked(doors, lambda: doors.ledger.finish(held.attempt, settled))


def outcome_of(run: RunRecord) -> Outcome:
    """Return what became of a run that was completed, or that is in other hands."""
    outcome = of_record(run, fresh=True)
    if run.handed_off:
        return outcome._replace(status=HANDED_OFF, reason="")
    if run.state in (State.WAITING_RETRY, State.PENDING):  # this attempt is over, the run is not
        return outcome._replace(status="failed", reason=run.state.value)
    return outcome


def ended_afar(status: str, *, result: str | None, error: str | None, retry: bool) -> Ending:
    """Return what another program says about the attempt that it was given."""
    if status == "succeeded":
        return Ending(State.SUCCEEDED, result=result)
    if status == "cancelled":
        return Ending(State.CANCELLED, "cancelled", error=error)
    if status == "failed":
        reason = "error" if retry else "gave_up"
        return Ending(State.FAILED, reason, result=result, error=error, again=retry)
    raise Misuse(f"status is {status!r}: it must be 'succeeded', 'failed' or 'cancelled'")


async def _asked(doors: Doors, ask: _Ask[T]) -> T:
    """Ask until the answer is known, some times: every verb finds what it did before."""
    pause = _FIRST_PAUSE
    for _ in range(_TRIES - 1):
        try:
            return await ask()
        except (OutcomeUnknown, StoreUnavailable):
            await doors.world.sleep(pause * (0.5 + doors.world.dice()))
            pause = min(pause * 2, _LONGEST_PAUSE)
    return await ask()


if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")
    _Ask = Callable[[], Flow[T]]
