"""A job's body can be a command: it runs under guard, and nothing of it outlives its lease.

It leads a session of its own. If no renewal is confirmed it gets SIGTERM after half of the lease
and SIGKILL after four fifths; at its timeout or on a cancel it gets SIGTERM, and SIGKILL after
``cancel_grace``; and if the process that started it dies, so does the whole command. Exit code 0 is
a success, 75 (EX_TEMPFAIL) says that it is worth another try, and any other is a failure, which the
job's retry policy judges. The head and tail of what it said are kept, without secrets.

It finds its run in the environment: FENCEPOST_RUN_ID, FENCEPOST_JOB, FENCEPOST_SLOT,
FENCEPOST_ATTEMPT, FENCEPOST_TOKEN and FENCEPOST_IDEMPOTENCY_KEY; a stored one also has
FENCEPOST_PAYLOAD, as JSON.
"""

from __future__ import annotations

import os

from fencepost.bodies import why_stopped
from fencepost.errors import GiveUp, LeaseLost, Misuse, RetryAfter, RunTimedOut, Said
from fencepost.flows.keep import LONGEST_SILENCE
from fencepost.isolated import UnderGuard, let_go_in_forks, need_not_let_go, until_gone
from fencepost.model.command import SHORTEST_TTL, must_stop, still_at
from fencepost.model.duration import shown
from fencepost.model.kept import encoded
from fencepost.model.named import NamedTuple
from fencepost.model.output import Excerpt
from fencepost.model.policy import Overlap
from fencepost.model.secrets import redacted
from fencepost.running import inside
from fencepost.world.apart import start_apart
from fencepost.world.clocks import SystemClocks
from fencepost.world.exited import (
    TEMPFAIL,
    account_of,
    environment_for,
    known_secrets,
    why_failed,
)
from fencepost.world.flow import finish
from fencepost.world.output import Tee

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from fencepost.flows.course import Course
    from fencepost.jobs import Job
    from fencepost.model.policy import Policy
    from fencepost.running import Run
    from fencepost.world.api import World


# A command that is to give way hears of it with a beat, and takes a moment to vanish.
_HEARING = 2 * LONGEST_SILENCE
_PAYLOAD = "FENCEPOST_PAYLOAD"


class CommandFailed(Said):
    """A command ended with another exit code than 0, or by a signal."""


class Words(NamedTuple):
    """What is to be run, and where."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    cwd: str | None


def command_body(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> Callable[[Run], Any]:
    """Return a job's body that runs a command, and no shell.

    ``env`` is added to the environment of this process. The result is what is known of the
    command's end: exit code, signal, duration, and an excerpt of its output.
    """
    if isinstance(argv, str | bytes) or not argv:
        raise Misuse(
            f"argv is {argv!r}: give the command and its arguments as a list, such as "
            "['pg_dump', 'shop']"
        )
    for word in argv:
        if not _is_text(word):
            raise Misuse(f"argv has {word!r}: each argument is a text without NUL")
    pairs = tuple((env or {}).items())
    for name, value in pairs:
        if not (_is_text(name) and _is_text(value)) or "=" in name:
            raise Misuse(f"env has {name!r}: both a variable and its value are texts")
    return CommandBody(Words(tuple(argv), pairs, None if cwd is None else os.fspath(cwd)))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


class CommandBody:
    """A body that runs a command; see ``command_body``."""

    stoppable = True

    def __init__(self, words: Words) -> None:
        self._words = words

    def __call__(self, run: Run) -> dict[str, object]:
        """Run the command to its end; return what is known of it, or raise how it failed."""
        doors, course = inside(run)
        if not isinstance(doors.world.clocks, SystemClocks):
            raise GiveUp("a command cannot be guarded by a clock of your own: leave out clocks=")
        if course.gate is not None:
            raise GiveUp(
                "a command cannot run beside leases elsewhere: the guards that end it in time know "
                "the ledger's lease only; leave out leases="
            )
        return finish(_carried(doors.world, course, self._words))

    def why_not(self, job: Job) -> str | None:
        """Say why this cannot be the body of a job; None if it can."""
        if not os.path.exists("/proc/self/stat") or not hasattr(os, "memfd_create"):
            return "runs a command, and that needs Linux, and its /proc"
        if job.isolation is not None:
            return "runs a command, which is a process of its own already: leave out isolation"
        if job.policy.lease < SHORTEST_TTL:
            return (
                f"has a lease of {shown(job.policy.lease)}, too short to be sure that its command "
                f"is gone before others may start; {shown(SHORTEST_TTL)} is the least"
            )
        if job.policy.overlap is Overlap.REPLACE and job.policy.cancel_grace < _HEARING + 1:
            return (
                f"has overlap='replace' and a cancel_grace of {shown(job.policy.cancel_grace)}: a "
                f"command needs {shown(_HEARING + 1)} to hear of it and to be gone"
            )
        return None

    def __repr__(self) -> str:
        return f"<command {self._words.argv[0]!r}>"


def _grace_of(policy: Policy) -> float:
    """Return how long a command may take to end. Whoever replaces it waits no longer than that."""
    waited_for = policy.overlap is Overlap.REPLACE
    return policy.cancel_grace - _HEARING if waited_for else policy.cancel_grace


async def _carried(world: World, course: Course, words: Words) -> dict[str, object]:
    command = _Command(course, words)
    try:
        try:
            interrupts = await until_gone(world, course, command)
        except OSError as error:  # no such folder, or the machine has no room for another process
            raise command.not_started(error) from error
        account = command.account()
        if interrupts:
            if command.succeeded:
                course.returned += (course.said,)  # it was done all the same
            raise interrupts[0]
        why = command.why(world.clocks.boottime())
        if why is not None:
            raise why
        return account
    finally:
        command.close()


class _Command(UnderGuard):
    """One command, as the process that holds its lease sees it."""

    def __init__(self, course: Course, words: Words) -> None:
        self.asked_at: float | None = None  # since when it is to end, whatever its lease says
        self.until, self.grace = (0.0, 0.0), _grace_of(course.policy)
        self._course, self._words = course, words
        ours = environment_for(course.run) | {"FENCEPOST_IDEMPOTENCY_KEY": course.items}
        ours.pop(_PAYLOAD, None)  # one of ours may have started us
        if course.payload is not None:
            ours[_PAYLOAD] = course.payload
        more = {name: value for name, value in words.env if not name.startswith("FENCEPOST_")}
        self._environment = ours | more  # and nobody is lied to about their run
        self._secrets = known_secrets(self._environment)
        self._excerpt = Excerpt()
        self._tee: Tee | None = None
        self._clock = SystemClocks().boottime
        self._began = self._clock()
        let_go_in_forks(self)

    @property
    def succeeded(self) -> bool:
        """Whether it ended well, and by itself."""
        return not self._guards.failed and self._guards.code == 0

    def start(self) -> None:
        """Start the command under guard."""
        course, hold, grace = self._course, self._course.hold, self.grace
        self.until = must_stop(hold.trust, deadline=course.deadline, asked_at=None, grace=grace)
        self._tee = tee = Tee(self._excerpt, out=-1, err=-1)
        self._guarded = start_apart(
            self._words.argv,
            environment=self._environment,
            nonce=hold.nonce,
            lifeline=course.lifeline(),
            until=self.until,
            grace=grace,
            still_at=still_at(course.lean),
            stdout=tee.stdout,
            stderr=tee.stderr,
            cwd=self._words.cwd,
            leave_children=course.policy.leave_children,
        )
        tee.begin()

    def tell(self, until: tuple[float, float], *, still: float) -> None:
        """Tell the guards until when it may run."""
        if (*until, still) != (*self.until, self._still):
            self._guards.extend(*until, still)
            self.until, self._still = until, still

    def listen(self) -> None:
        """Take note of what the guards have reported."""
        self.hear_guards()

    def mop_up(self) -> None:
        """Take one step at ending what a dead guardian left behind."""
        self._guards.mop_up()

    def hurry(self, now: float) -> None:
        """Ask it to stop; if it was asked before, kill it."""
        self.asked_at = now if self.asked_at is None else now - self.grace

    def account(self) -> dict[str, object]:
        """Return what is known of its end, and have that kept however the attempt ends."""
        assert self._tee is not None, "it was started"
        self._tee.finish()
        duration = self._clock() - self._began
        account = account_of(self._guards, self._excerpt, self._secrets, duration=duration)
        self._course.said = encoded(account, what="result")
        return account

    def why(  # noqa: PLR0911 -- one line for each way a command can end
        self, now: float
    ) -> BaseException | None:
        """Return why the attempt is no success: it was stopped, or it failed; None if it is one."""
        course, hold, guards = self._course, self._course.hold, self._guards
        hold.phase(now)  # whoever was stopped for long learns of both ends at once
        if guards.failed:
            return self.not_started(OSError(guards.failed, os.strerror(guards.failed)))
        if hold.why_lost is not None and (guards.asked or guards.orphaned):
            return why_stopped(course)
        if guards.asked and course.late and not course.cancelled:
            return RunTimedOut(str(course.run.key), timeout=course.policy.timeout or 0.0)
        if guards.code == 0:
            return None
        if guards.asked:
            reason = "no renewal was confirmed in time, and the command was stopped"
            lost = LeaseLost(hold.name, token=hold.token, reason=reason)
            return why_stopped(course) or lost
        if guards.code == TEMPFAIL and not guards.signal:
            return RetryAfter(0.0, f"exit code {TEMPFAIL}: it says that another try may help")
        return CommandFailed(why_failed(guards))

    def not_started(self, error: OSError) -> GiveUp:
        """Say that there was no command to run; to try again would not bring it about."""
        what = self._words.argv[0] if error.filename is None else error.filename
        words = f"{self._words.argv[0]!r} was not run: {error.strerror}"
        if what != self._words.argv[0]:
            words += f": {what!r}"
        return GiveUp(redacted(words, self._secrets))

    def close(self) -> None:
        """Close all pipes and bury the guardian, who first ends whatever is still there."""
        need_not_let_go(self)
        if self._guarded is not None:
            self._guarded.close()
        if self._tee is not None:
            self._tee.close()

    def let_go(self) -> None:
        """Close, in a forked child, the copies of what must end with the parent."""
        if self._guarded is not None:
            self._guarded.let_go()
