"""One attempt of a command: from the lease that was claimed to the record of how it ended.

The record has the exit code, the signal, how long it took, and the head and tail of what the
command said, without secrets. A cancel, or the end of its time, is SIGTERM and, after ``--grace``,
SIGKILL. A command that was stopped because nobody could say any more that the run is ours leaves
no record of its end: whoever comes next decides.
"""

from __future__ import annotations

import os

from fencepost.cli.main import WRONG, say
from fencepost.errors import RunTimedOut
from fencepost.flows.acquire import Granted
from fencepost.flows.attempt import (
    RELEASED,
    conclude,
    keep_output,
    say as tell,
    tell_of_children,
)
from fencepost.flows.command import oversee
from fencepost.flows.course import Course, Doors
from fencepost.flows.keep import Hold
from fencepost.model.command import code_of_failure, must_end, still_at
from fencepost.model.ending import Ending
from fencepost.model.kept import encoded
from fencepost.model.output import Excerpt
from fencepost.model.policy import OnLoss
from fencepost.model.run import State
from fencepost.model.secrets import redacted
from fencepost.world.exited import account_of, environment_for, why_failed
from fencepost.world.guardian import start
from fencepost.world.output import Tee

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.cli.exec_job import JobErrand
    from fencepost.model.claim import Claimed
    from fencepost.model.event import LeaseEvent
    from fencepost.model.run import RunRecord
    from fencepost.world.guardian import Guarded

_NEVER = float("inf")


class CommandAttempt:
    """One try, by this process, under the token that it was granted."""

    def __init__(self, errand: JobErrand, claimed: Claimed, sent: float) -> None:
        run, grant = claimed.run, claimed.grant
        assert run is not None, "what was claimed has a record"
        assert grant is not None, "and a lease"
        self._errand, self._policy = errand, errand.job.policy
        self._hold = hold = Hold(
            Granted(run.lease, grant, sent),
            nonce=run.holder.nonce,
            ttl=self._policy.lease,
            max_hold=None,
            emit=_say_nothing,
            chatty=False,
        )
        self._course = course = Course(errand.world, run, hold, self._policy)
        first = errand.ledger.abilities.settles
        hold.beats_by(lambda _, ttl: course.beat(errand.ledger, ttl), first=first)
        course.on_stop += (self._hear_of_cancel,)
        self._excerpt = Excerpt()
        self._began = errand.world.clocks.boottime()
        self._cancelled_at = _NEVER

    async def see_through(self) -> RunRecord | None:
        """Run the command to its end and record it; None if the run was lost meanwhile."""
        errand, course, hold = self._errand, self._course, self._hold
        tell(errand.emit, "lock_acquired" if course.run.starts == 1 else "resumed", course)
        tee = Tee(self._excerpt)
        try:
            command = self._start(tee)
        except OSError as error:  # the machine has no room for another process
            errand.ended(course.run.key, code=WRONG)
            tee.close()
            return await self._record(self._not_started(error.errno or 0), None)
        errand.began(command)
        ended = await oversee(
            errand.world, errand.ledger.leases, hold, command, notice=0.0, stop=self._stop
        )
        tee.finish()
        course.children = command.children
        code = code_of_failure(command.failed) if command.failed else ended.code
        errand.ended(course.run.key, code=code)
        if ended.why is not None and self._is_in_doubt(command):
            if course.children is not None:
                doors = Doors(errand.world, errand.ledger)
                await tell_of_children(doors, course, emit=errand.emit)
            tell(errand.emit, "lost", course, reason=ended.why)
            errand.lost(f"{ended.why}; the command was stopped")
            record = None
        else:
            record = await self._record(self._ending(command), command)
        if hold.lean is not None:
            hold.lean.end()
        command.close()  # only now: the guardian takes a moment to vanish, and others wait
        errand.drain(tee)
        return record

    def _start(self, tee: Tee) -> Guarded:
        errand, hold = self._errand, self._hold
        ask_at, kill_at = must_end(hold.trust, ends=None, notice=0.0)
        stop_at, strike_at = self._stop()
        command = start(
            errand.wanted.command,
            environment=environment_for(self._course.run),
            nonce=hold.nonce,
            lifeline=getattr(errand.ledger.leases, "lifeline", _none)(),
            until=(min(ask_at, stop_at), min(kill_at, strike_at)),
            grace=errand.wanted.grace,
            still_at=still_at(hold.lean),
            stdout=tee.stdout,
            stderr=tee.stderr,
            leave_children=self._policy.leave_children,
        )
        tee.begin()
        return command

    def _stop(self) -> tuple[float, float]:
        """Return when the command is asked to end and when it is killed, whatever its lease."""
        deadline = self._course.deadline
        at = min(self._cancelled_at, _NEVER if deadline is None else deadline)
        return at, at + self._errand.wanted.grace

    def _hear_of_cancel(self) -> None:
        self._cancelled_at = self._errand.world.clocks.boottime()

    def _is_in_doubt(self, command: Guarded) -> bool:
        """Say whether the command was stopped because of its lease, and for nothing else."""
        if self._hold.why_lost is not None:
            return command.asked or command.orphaned
        on_purpose = self._course.cancelled or self._course.late
        return command.asked and not on_purpose and command.code != 0

    def _ending(self, command: Guarded) -> Ending:
        """Return what the end of the command says about the attempt."""
        course, policy, interrupted = self._course, self._policy, self._errand.told_to_end
        if command.failed:
            return self._not_started(command.failed)
        if command.asked and course.late and not course.cancelled:
            assert policy.timeout is not None, "only what has a timeout can be late"
            timed_out = RunTimedOut(str(course.run.key), timeout=policy.timeout)
            again = policy.retry.worth(timed_out) and not interrupted
            error = f"it was stopped after its timeout of {policy.timeout:g} s"
            return Ending(State.TIMED_OUT, "timeout", error=error, again=again)
        if command.code == 0:
            return Ending(State.SUCCEEDED)
        error = why_failed(command)
        if command.asked and course.cancelled:
            return Ending(State.CANCELLED, "cancelled", error=f"it was stopped: {error}")
        if interrupted and policy.on_loss is OnLoss.RESUME:
            return RELEASED._replace(error=error)
        reason = "interrupted" if interrupted else "error"
        return Ending(State.FAILED, reason, error=error, again=not interrupted)

    def _not_started(self, number: int) -> Ending:
        """Say that there was no command to run; to try again would not bring it about."""
        error = f"{self._errand.wanted.command[0]!r} was not run: {os.strerror(number)}"
        say(error)
        return Ending(State.FAILED, "not_started", error=redacted(error, self._errand.secrets))

    async def _record(self, ending: Ending, command: Guarded | None) -> RunRecord | None:
        """Write the end of the attempt to the ledger, with what the command said."""
        errand, course = self._errand, self._course
        doors = Doors(errand.world, errand.ledger)
        duration = errand.world.clocks.boottime() - self._began
        account = account_of(command, self._excerpt, errand.secrets, duration=duration)
        course.said = encoded(account, what="result")
        if ending.state is not State.PENDING:  # which has no result yet
            ending = ending._replace(result=course.said)
        run = await conclude(doors, course, ending, emit=errand.emit)
        if run is None:
            errand.lost(f"{self._hold.why_lost or 'a later attempt has it'}; the command had ended")
        await keep_output(doors, course, run)
        return run


def _none() -> None:
    """Stand in for a store that cannot see who lives."""


def _say_nothing(event: LeaseEvent) -> None:
    """Leave it to the last line to say what happened to the lease."""
