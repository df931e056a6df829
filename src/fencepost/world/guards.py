"""The guardian starts a command, ends it when it must, and leaves only when nothing of it is left.

It is in a session of the guards, in which the command is a process group. It ends the command at
the deadlines that the wrapper last sent, and at once if the wrapper is gone. What the command
leaves behind when it ends by itself is asked to stop, and killed after a grace; or it is left
alone, if the job says so.

Orphans below the guardian become its children. So it knows exactly when nothing is left: when it
has no children any more. The sentinel is its parent, and adopts them should the guardian die.

It runs after a fork without exec, in a copy of a program that had files and a database open. So it
closes all of that, touches nothing of it, and leaves by ``os._exit``.
"""

from __future__ import annotations

import errno
import os
import select
import signal

from fencepost.model.command import MOST_NAMED, QUICK
from fencepost.model.named import NamedTuple
from fencepost.world.clocks import SystemClocks
from fencepost.world.sentinel import SentinelOrders, be_called, be_sentinel, let_go_of_all_but
from fencepost.world.strays import (
    Trail,
    adopt_orphans,
    kill_children,
    reap_children,
    strike_group,
)
from fencepost.world.wire import Inbox, tell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import NoReturn

    from fencepost.world.strays import Stray

_NEVER = float("inf")
# A poll does not count the time a machine was suspended; the deadlines do. So nobody sleeps longer.
_LONGEST_NAP = 1.0
# How often to look whether the processes that were told to end have ended.
_GLANCE = 0.03
# How often what stands still is looked at.
_STILL = 0.1
# What ends together with the command takes a moment to do so, and is not left behind.
_MOMENT = 0.1
# How often to look and kill in a row: processes that keep forking must not outrun us.
_ROUNDS = 8

# What a terminal, an init system or an operator may send to the whole tree: the command gets it,
# the guards wait for the command.
_DEAF_TO = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGPIPE,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
)
# What the interpreter and the guards have changed, and the command must not inherit.
_RESTORED = (*_DEAF_TO, signal.SIGCHLD, signal.SIGXFSZ)
_boottime = SystemClocks().boottime


class Orders(NamedTuple):
    """What the guards are to run, and until when."""

    argv: list[bytes]
    environment: dict[bytes, bytes]
    nonce: str
    pledge: int
    pledge_name: str
    lifeline: int | None
    ask_at: float
    kill_at: float
    grace: float
    ignored: frozenset[int]
    mask: set[int]
    stdout: int | None = None
    stderr: int | None = None
    still_at: float = _NEVER
    leave_children: bool = False


class Posts(NamedTuple):
    """The guardian's ends of the pipes."""

    guardian: int  # what the wrapper tells the guardian
    sentinel: int  # what the wrapper tells the sentinel
    report: int  # what the guardian tells the wrapper
    life: int  # silent; ends with the last of those who hold the pledge


def be_guards(orders: Orders, posts: Posts) -> NoReturn:
    """Be the sentinel, with a guardian as its child, to the end of this process."""
    try:
        if os.getsid(0) != os.getpid():
            os.setsid()
        _be_deaf(orders.mask)
        session = os.getpid()
        adopt_orphans()
        from_guardian, to_sentinel = os.pipe()
        from_sentinel, to_guardian = os.pipe()
        os.set_blocking(to_sentinel, False)  # a sentinel that is stopped reads nothing
        guardian = _fork()
        if guardian == 0:
            _be_guardian(orders, posts, session, Inbox(from_sentinel), to_sentinel)
        to_watch = SentinelOrders(
            guardian=guardian,
            trail=_trail(orders, session),
            lifeline=orders.lifeline,
            kill_at=orders.kill_at,
            still_at=orders.still_at,
            from_wrapper=posts.sentinel,
            from_guardian=from_guardian,
            to_guardian=to_guardian,
        )
        be_sentinel(to_watch)
    except _NotStarted as failure:
        tell(posts.report, "failed", failure.args[0])
    finally:  # whatever went wrong: the wrapper sees us go, and cleans up
        os._exit(0)


def _be_guardian(
    orders: Orders, posts: Posts, session: int, from_sentinel: Inbox, to_sentinel: int
) -> NoReturn:
    """Run the command and guard it, to the end of this process."""
    try:
        be_called("fence-guardian")
        _Guardian(orders, posts, session, from_sentinel, to_sentinel).stand()
    finally:  # whatever went wrong: the sentinel and the wrapper see us go, and clean up
        os._exit(0)


def _trail(orders: Orders, session: int) -> Trail:
    """Return the trail of the command, as this guard sees it."""
    root = os.getpid()
    return Trail(session=session, root=root, nonce=orders.nonce, pledge=orders.pledge_name)


class _NotStarted(Exception):
    """The machine has no room for another process."""


class _Guardian:
    def __init__(
        self, orders: Orders, posts: Posts, session: int, from_sentinel: Inbox, to_sentinel: int
    ) -> None:
        self._orders, self._report, self._life = orders, posts.report, posts.life
        self._inbox = Inbox(posts.guardian)
        self._from_sentinel, self._to_sentinel = from_sentinel, to_sentinel
        self._trail = _trail(orders, session)
        self._spare = (os.getpid(), session)  # ourselves and the sentinel
        self._ask_at, self._kill_at = orders.ask_at, orders.kill_at
        self._still_at, self._still = orders.still_at, False
        self._last_at = _NEVER  # the end that no renewal can move any more
        self._asked = self._killed = self._struck = self._ended = False
        self._stopped = False  # whether the command did not end by itself
        self._over_at = _NEVER  # when what still lives counts as left behind
        self._children = False
        self._named: dict[int, str] = {}  # what was left behind, by its number
        self._fate = ""  # and what became of it
        self._bell = _bell_for_deaths()
        self._adopts = adopt_orphans()
        tell(self._report, "guardian", os.getpid())
        self._command = self._start_command()
        keep = (self._inbox.fd, self._report, self._to_sentinel, self._life, *self._bell)
        let_go_of_all_but(*keep, self._from_sentinel.fd, orders.lifeline)

    def stand(self) -> None:
        """Guard the command until nothing of it is left."""
        while True:
            self._obey()
            if self._inbox.closed:  # the wrapper is gone
                self._end_by(_boottime() + QUICK)
            self._reap()
            if self._ended and (self._nothing_left() or self._is_to_leave_them()):
                break
            if _boottime() >= self._over_at:
                self._end_by(_boottime() + self._orders.grace)
            self._wait(self._act())
        if len(self._named) > MOST_NAMED:
            self._tell_names()
        tell(self._report, "gone")
        tell(self._to_sentinel, "done")

    def _start_command(self) -> int:
        """Start the command as a group of its own, with the signals as the wrapper found them.

        It inherits the pledge, whose end we shall see, and the pulse, which tells others that the
        lease's holder lives: from now on that means the command and its children too. Children
        that may stay must not have the pulse: the holder's next lease is not theirs. Their command
        has none then either, for it would hand it on to them.
        """
        orders = self._orders
        os.set_inheritable(orders.pledge, True)  # noqa: FBT003 -- the standard library's way
        if orders.lifeline is not None:
            os.set_inheritable(orders.lifeline, not orders.leave_children)
        streams = ((orders.stdout, 1), (orders.stderr, 2))
        become = [(os.POSIX_SPAWN_DUP2, fd, number) for fd, number in streams if fd is not None]
        try:
            return os.posix_spawnp(
                orders.argv[0],
                orders.argv,
                orders.environment,
                file_actions=become,
                setpgroup=0,
                setsigmask=orders.mask,
                setsigdef=[s for s in _RESTORED if s not in orders.ignored],
            )
        except (OSError, ValueError) as error:  # a ValueError: no name, or a NUL in an argument
            tell(self._report, "failed", getattr(error, "errno", None) or errno.EINVAL)
            self._ended, self._over_at = True, _boottime()
            return 0

    def _obey(self) -> None:
        for word, *values in self._inbox.lines():
            if word == "until":
                self._ask_at, self._kill_at, self._still_at = map(float, values)
                if self._still and self._still_at > _boottime() and self._last_at == _NEVER:
                    self._still = False
                    self._strike(signal.SIGCONT)
                if self._ask_at > _boottime() and self._last_at == _NEVER:
                    self._asked = False  # renewed after all: should it happen again, ask again
            elif word == "signal" and not self._ended:
                # A command that must stand still gets the signal when it goes on.
                wake = not self._still and _boottime() < self._still_at
                strike_group(self._command, int(values[0]), wake=wake)

    def _end_by(self, instant: float) -> None:
        """Ask all that is left to stop, now, and kill it at ``instant``, come what may."""
        self._last_at = min(self._last_at, instant)

    def _act(self) -> float:
        """Ask or kill if it is time to; return for how long nothing more is to be done."""
        now, final = _boottime(), self._last_at != _NEVER
        ask_at = now if final else self._ask_at
        kill_at = min(self._kill_at, self._last_at)
        if final:  # what must end does not stand still first
            kill_at = min(kill_at, self._still_at)
        if now >= kill_at or (self._still and final):  # it does nothing more that we could ask for
            self._killed = True
            self._strike(signal.SIGKILL)
        elif now >= self._still_at and not final:
            self._still = True
            self._strike(signal.SIGSTOP)  # and again: some may have been about to begin
            return min(kill_at - now, _STILL)
        elif now >= ask_at and not self._asked:
            self._asked = True
            if not final and not self._ended:
                tell(self._report, "asked")
            self._strike(signal.SIGTERM)
        if self._ended or now >= kill_at:
            # What cannot be killed, such as another user's process, is waited for.
            nap = min(max(_GLANCE, (now - kill_at) / 10), _LONGEST_NAP)
            if self._killed:
                tell(self._to_sentinel, "acts", repr(_boottime() + nap))
            return nap
        until = min(kill_at, self._still_at)
        if not self._asked:
            until = min(ask_at, until)
        return min(max(until - _boottime(), 0.0), _LONGEST_NAP)

    def _wait(self, seconds: float) -> None:
        """Wait for a word from the wrapper, a death, or the time to act."""
        poll = select.poll()
        poll.register(self._bell[0], select.POLLIN)
        if not self._inbox.closed:
            poll.register(self._inbox.fd, select.POLLIN)
        if self._ended and not self._life_is_over():
            poll.register(self._life, select.POLLIN)
        poll.poll(seconds * 1000)
        try:
            os.read(self._bell[0], 4096)
        except BlockingIOError:
            return

    def _strike(self, signum: int) -> None:
        self._struck = True
        for _ in range(_ROUNDS):
            if signum == signal.SIGKILL:  # a guardian that does not say so is replaced
                tell(self._to_sentinel, "acts", repr(_boottime()))
            group = 0 if self._ended else self._command
            if group:
                strike_group(group, signum)
            found = self._trail.strike(signum, spare=self._spare, told=group)
            if signum in (signal.SIGTERM, signal.SIGKILL):
                self._tell_of(found, "stopped")
            left = self._reap()
            if signum != signal.SIGKILL or not (left or found):
                return
            self._tell_of(kill_children(self._reap), "stopped")

    def _tell_of(self, found: list[Stray], fate: str) -> None:
        """Tell the wrapper which children were stopped, or left.

        Those that are in the session of a command which is stopped go without saying.
        """
        known, by_itself = len(self._named), self._ended and not self._stopped
        for stray in found:
            if by_itself or stray.session != self._trail.session:
                self._named.setdefault(stray.pid, stray.name)
        self._fate = fate
        # Later ones are only counted: a wrapper that is stopped reads nothing, and pipes fill up.
        if known < len(self._named) and known < MOST_NAMED:
            self._tell_names()

    def _tell_names(self) -> None:
        words = [f"{pid}:{name.encode().hex()}" for pid, name in self._named.items()]
        tell(self._report, self._fate, len(words), *words[:MOST_NAMED])

    def _reap(self) -> bool:
        """Reap the command, and the orphans that became our children; say if others are left."""
        statuses, self._children = reap_children()
        if self._command in statuses and not self._ended:
            self._ended = True
            now, code = _boottime(), os.waitstatus_to_exitcode(statuses[self._command])
            killed = code == -signal.SIGKILL and (self._killed or self._sentinel_killed())
            late = self._kill_at <= now or self._last_at != _NEVER
            self._stopped = self._asked or killed or late
            self._over_at = now if self._stopped else now + _MOMENT
            if killed:  # without having been asked, if it stood still or we were late
                tell(self._report, "asked")
            tell(self._report, "ended", code)
        return self._children

    def _sentinel_killed(self) -> bool:
        """Say whether the sentinel has killed the command, as it does if we are late."""
        return ["killed"] in self._from_sentinel.lines()

    def _nothing_left(self) -> bool:
        if not self._command:
            return True  # it never began
        if self._children:
            return False
        if self._adopts and not self._struck and self._life_is_over():
            return True  # what has no parent but us is our child: there are no descendants
        return not self._trail.find(spare=self._spare)

    def _is_to_leave_them(self) -> bool:
        """Say whether what outlives the command is left alone, and tell of it."""
        if not self._orders.leave_children or self._stopped or self._last_at != _NEVER:
            return False
        if _boottime() < self._over_at:
            return False
        self._tell_of(self._trail.find(spare=self._spare), "left")
        return True

    def _life_is_over(self) -> bool:
        """Say whether everybody who inherited the command's end of the life pipe is gone."""
        poll = select.poll()
        poll.register(self._life, select.POLLIN)
        return bool(poll.poll(0))


def _fork() -> int:
    try:
        return os.fork()
    except OSError as error:
        raise _NotStarted(error.errno or errno.EAGAIN) from error


def _bell_for_deaths() -> tuple[int, int]:
    """Return a pipe into which the interpreter writes a byte whenever a child has died."""
    ends = os.pipe()
    for fd in ends:
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ends[1], warn_on_full_buffer=False)
    return ends


def _be_deaf(mask: Iterable[int]) -> None:
    for signum in _DEAF_TO:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
