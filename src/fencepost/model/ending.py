"""How the end of an attempt becomes the state of its run."""

from __future__ import annotations

from fencepost.model.named import NamedTuple
from fencepost.model.run import RunRecord, State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.model.policy import Policy

# What is kept of an error: enough to know it by, and never a whole page of somebody's data.
LONGEST_ERROR = 2000

# The event that tells of an attempt which the record will tell no more, once another has begun.
UNFINISHED = {State.WAITING_RETRY: "attempt_failed", State.PENDING: "attempt_released"}


class Ending(NamedTuple):
    """How an attempt ended, as the one who ran it saw it.

    ``again`` says that another try could help, ``after`` how long it must wait at least.
    """

    state: State
    reason: str = ""
    result: str | None = None
    error: str | None = None
    again: bool = False
    after: float = 0.0


class Settled(NamedTuple):
    """What is written to the ledger when an attempt ends.

    ``pause`` is how long the next try must wait. It is a length and no instant: by which clock
    the ledger tells the time, the one who ran the attempt cannot know.
    """

    state: State
    reason: str = ""
    pause: float = 0.0
    result: str | None = None
    error: str | None = None


def settle(run: RunRecord, ending: Ending, policy: Policy, *, dice: float) -> Settled:
    """Decide what becomes of a run whose attempt ended: over, or another try later."""
    error = None if ending.error is None else ending.error[:LONGEST_ERROR]
    tries_left = run.attempt < policy.retry.attempts
    if ending.state in (State.FAILED, State.TIMED_OUT) and ending.again and tries_left:
        pause = max(policy.retry.pause(run.attempt, dice=dice), ending.after)
        return Settled(State.WAITING_RETRY, ending.reason, pause, None, error)
    pause = ending.after if ending.state is State.PENDING else 0.0
    return Settled(ending.state, ending.reason, pause, ending.result, error)


def in_view_of(run: RunRecord, settled: Settled) -> Settled:
    """Return what a run ends as, now that its newest record is known.

    A cancelled attempt is never retried. One that was done all the same is done: to hide that
    would be a lie, so only the request stays on record.
    """
    if run.cancel_at and settled.state in (State.WAITING_RETRY, State.PENDING):
        return Settled(State.CANCELLED, "cancelled", error=settled.error)
    return settled


def ended_record(run: RunRecord, settled: Settled, *, now: float) -> RunRecord:
    """Return a run as the end of its attempt leaves it."""
    over = settled.state.terminal
    # By position and in full, a third of what a replacement by name costs: every run ends once.
    return RunRecord(
        run.key,
        settled.state,
        run.lock,
        run.lease,
        run.token,
        run.holder,
        settled.reason,
        run.blocker,
        run.trigger,
        run.created_at,
        run.started_at,
        now if over else 0.0,
        now + settled.pause if settled.pause and not over else 0.0,
        now,
        run.cancel_at,
        run.starts,
        run.losses,
        run.releases + (settled.state is State.PENDING),
        run.streak,
        run.strikes,
        run.solitary,
        run.checkpoint,
        run.done,
        run.total,
        settled.result,
        settled.error,
        run.saves,
        run.epoch,
    )


def recorded(run: RunRecord, settled: Settled, *, token: int, nonce: str) -> bool:
    """Say whether this very end was recorded before, and only the reply got lost."""
    ours = (run.token, run.holder.nonce) == (token, nonce)
    return ours and run.state is not State.RUNNING and run.state is in_view_of(run, settled).state
