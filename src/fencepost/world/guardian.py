"""A command runs under guard, so that nothing of it is alive when others may have its lease.

``start`` forks a sentinel, which forks a guardian, which starts the command (``guards.py``,
``sentinel.py``).
This side is the wrapper's, which holds the lease. Each of them can die at any time: whoever is
left ends the command and all of its children. The guards end them at the deadlines that they were
last told, too, so a wrapper that is merely stopped does no harm. The sentinel replaces a guardian
that does nothing at a deadline, and the wrapper wakes both of them then: one of the three that can
act is enough.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
from functools import partial

from fencepost.model.command import QUICK, children_from, shell_code
from fencepost.model.named import NamedTuple
from fencepost.world.clocks import SystemClocks
from fencepost.world.guards import Orders, Posts, be_guards
from fencepost.world.sentinel import STEPPED_IN
from fencepost.world.strays import Trail
from fencepost.world.wire import Inbox, tell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fencepost.model.command import Children

# What is passed on to the command, rather than obeyed.
FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
# What the command ignores if the wrapper was started so, as under nohup. The interpreter ignores
# some others on its own account, whatever they were before.
_INHERITED = (*FORWARDED, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
_KILLED = -signal.SIGKILL
_NEVER = float("inf")


class Guarded:
    """A command under guard, as the process that holds its lease sees it."""

    def __init__(
        self,
        trail: Trail,
        lines: Lines,
        *,
        kill_at: float,
        still_at: float,
        bury: Callable[[], object],
    ) -> None:
        self.report = lines.report
        self.failed = 0  # why it could not be started: an errno
        self.asked = False  # whether a deadline came before a renewal did
        self.orphaned = False  # whether the guardian died before the command
        self.gone = False
        self._code: int | None = None
        self.children: Children | None = None  # what the command left behind, if anything
        self._sentinel, self._guardian = trail.session, 0
        self._inbox = Inbox(lines.report)
        self._to_guardian, self._to_sentinel = lines.to_guardian, lines.to_sentinel
        self._trail, self._bury = trail, bury
        self._mop_at: float | None = None
        self._kill_at, self._still_at = kill_at, still_at

    @property
    def code(self) -> int:
        """How the command ended, as a shell would say it."""
        return shell_code(_KILLED if self._code is None else self._code)

    @property
    def signal(self) -> int:
        """The number of the signal that ended the command; 0 if none did."""
        raw = _KILLED if self._code is None else self._code
        return max(0, -raw)

    def extend(self, ask_at: float, kill_at: float, still_at: float = _NEVER) -> None:
        """Tell both guards until when the command may run, and from when on it stands still."""
        self._kill_at, self._still_at = kill_at, still_at
        for post in (self._to_guardian, self._to_sentinel):
            tell(post, "until", repr(ask_at), repr(kill_at), repr(still_at))

    def forward(self, signum: int) -> None:
        """Have the command's process group get a signal. Safe in a signal handler."""
        tell(self._to_guardian, "signal", int(signum))

    def listen(self) -> None:
        """Take note of what the guardian has reported, and of its death.

        From a deadline on the guards are woken, should somebody have stopped them.
        """
        for word, *values in self._inbox.lines():
            if word == "guardian":
                self._guardian = int(values[0])
            elif word == "failed":
                self.failed = int(values[0])
            elif word == "asked":
                self.asked = True
            elif word == "ended":
                self._code = int(values[0])
            elif word in ("stopped", "left"):
                self.children = children_from(word, values[0], values[1:])
            elif word == "gone":
                self.gone = True
        if self._inbox.closed and not self.gone:
            self.orphaned = True
        elif not self.gone and SystemClocks().boottime() >= min(self._kill_at, self._still_at):
            self._wake_guards()

    def mop_up(self) -> None:
        """Do what a dead guardian no longer can, one step at a time, until all is ``gone``.

        A sentinel that lives ends the command, and leaves when nothing is left: only a parent knows
        that for certain. It is not reaped before: its number is that of the command's session.
        A command that must stand still is not asked: SIGTERM would wake it.
        """
        now = SystemClocks().boottime()
        spare = (os.getpid(), self._guardian, self._sentinel)
        sentinel_lives = tell(self._to_sentinel)
        if sentinel_lives:
            self._wake_sentinel()
        if self._mop_at is None:
            self._mop_at = now + QUICK
            if not sentinel_lives and now < self._still_at:
                self._trail.strike(signal.SIGTERM, spare=spare)
        if now >= min(self._mop_at, self._still_at):
            self._trail.strike(signal.SIGKILL, spare=spare)
        self.gone = not sentinel_lives and not self._trail.find(spare=spare)
        self.asked = self.asked or (self.gone and self._sentinel_stepped_in())

    def _wake_guards(self) -> None:
        self._wake_sentinel()
        if not self._guardian:
            return
        with contextlib.suppress(OSError):  # it has just ended
            handle = os.pidfd_open(self._guardian)
            try:
                poll = select.poll()
                poll.register(self.report, 0)
                if not poll.poll(0):  # only the guardian has the other end: this is its number
                    signal.pidfd_send_signal(handle, signal.SIGCONT)
            finally:
                os.close(handle)

    def _wake_sentinel(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(self._sentinel, signal.SIGCONT)  # should somebody have stopped it

    def _sentinel_stepped_in(self) -> bool:
        """Say whether the sentinel, which is leaving, has killed at a deadline."""
        try:
            left = os.waitid(os.P_PID, self._sentinel, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # somebody else in this process has reaped it
            return False
        return left is not None and (left.si_code, left.si_status) == (os.CLD_EXITED, STEPPED_IN)

    def close(self) -> None:
        """Close the pipes and bury the sentinel, which buries the guardian."""
        self.let_go()
        self._bury()

    def let_go(self) -> None:
        """Close the pipes: to the guards it is our death. In a forked child, only its copies."""
        for fd in (self._to_guardian, self._to_sentinel, self.report):
            os.close(fd)


class Lines(NamedTuple):
    """The pipes between a wrapper and its guards: its own ends, and theirs."""

    to_guardian: int
    to_sentinel: int
    report: int
    posts: Posts
    pledge: int
    pledge_name: str

    @property
    def theirs(self) -> tuple[int, ...]:
        """What only the guards and the command keep open."""
        return (*self.posts, self.pledge)


def lay_lines() -> Lines:
    """Lay the pipes between a wrapper and its guards."""
    made: list[int] = []
    try:
        while len(made) < 8:
            made += [above_streams(end) for end in os.pipe()]
    except OSError:
        for fd in made:
            os.close(fd)
        raise
    guardian, to_guardian, sentinel, to_sentinel, report, reports, life, pledge = made
    os.set_blocking(to_guardian, False)
    os.set_blocking(to_sentinel, False)
    posts = Posts(guardian, sentinel, reports, life)
    name = os.readlink(f"/proc/self/fd/{pledge}")
    return Lines(to_guardian, to_sentinel, report, posts, pledge, name)


def above_streams(fd: int) -> int:
    """Return a descriptor that nobody mistakes for a standard stream that happened to be closed."""
    if fd > 2:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def start(  # noqa: PLR0913 -- one for each thing that a command inherits
    argv: Sequence[str],
    *,
    environment: dict[str, str],
    nonce: str,
    lifeline: int | None,
    until: tuple[float, float],
    grace: float,
    still_at: float = _NEVER,
    stdout: int | None = None,
    stderr: int | None = None,
    leave_children: bool = False,
) -> Guarded:
    """Start a command under guard.

    ``lifeline`` is a descriptor that everything started here keeps open. What outlives the command
    by itself is asked to stop, and killed ``grace`` seconds later, unless the command may
    ``leave_children``. ``stdout`` and ``stderr`` become
    the command's own and are closed here: with nobody but the command and its children to hold
    them, whoever reads the other end of a pipe sees the last of them go.
    """
    streams = {fd for fd in (stdout, stderr) if fd is not None}
    assert streams.isdisjoint((0, 1, 2)), "our own streams are not to be given away"
    words, variables = encoded(argv, environment)
    lines = lay_lines()
    if lifeline is not None:
        lifeline = os.dup(lifeline)  # the store's own descriptor is closed in whatever is forked
    ignored = ignored_here()
    # Where deaths are ignored nobody could wait for them, and a session's number would be free.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # No handler of ours may run in the copy before it has done away with them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        pid = os.fork()
        if pid == 0:
            for fd in (lines.to_guardian, lines.to_sentinel, lines.report):
                os.close(fd)
            orders = Orders(
                argv=words,
                environment=variables,
                nonce=nonce,
                pledge=lines.pledge,
                pledge_name=lines.pledge_name,
                lifeline=lifeline,
                ask_at=until[0],
                kill_at=until[1],
                still_at=still_at,
                grace=grace,
                ignored=ignored,
                mask={int(s) for s in mask},
                stdout=stdout,
                stderr=stderr,
                leave_children=leave_children,
            )
            be_guards(orders, lines.posts)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for fd in (*lines.theirs, *streams):
            os.close(fd)
        if lifeline is not None:
            os.close(lifeline)
    trail = Trail(session=pid, root=pid, nonce=nonce, pledge=lines.pledge_name)
    bury = partial(os.waitpid, pid, 0)
    return Guarded(trail, lines, kill_at=until[1], still_at=still_at, bury=bury)


def encoded(
    argv: Sequence[str], environment: dict[str, str]
) -> tuple[list[bytes], dict[bytes, bytes]]:
    """Return a command's words and variables as the kernel has them."""
    variables = {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}
    return [os.fsencode(word) for word in argv], variables


def ignored_here() -> frozenset[int]:
    """Return the signals that this process was told to ignore, and its command with it."""
    return frozenset(s for s in _INHERITED if signal.getsignal(s) is signal.SIG_IGN)


def marked(*, name: str, token: int, nonce: str) -> dict[str, str]:
    """Return our environment, and in it the mark by which a command's children are recognised."""
    environment = dict(os.environ)
    outer = environment.get("FENCEPOST_NONCE")
    if outer:  # a command within a command answers to both guards
        within = environment.get("FENCEPOST_WITHIN")
        environment["FENCEPOST_WITHIN"] = f"{within},{outer}" if within else outer
    environment["FENCEPOST_NAME"] = name
    environment["FENCEPOST_TOKEN"] = str(token)
    environment["FENCEPOST_NONCE"] = nonce
    return environment
