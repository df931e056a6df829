"""The sentinel watches over the guardian: if that is gone, it ends the command itself.

It is the guardian's parent, so that what a killed guardian had below it becomes the sentinel's. If
the guardian is only stopped, or slow, the sentinel kills at the last deadline: first what it finds,
and then a guardian that still does nothing, because what that adopts is out of reach before it is
dead. Otherwise it keeps still, so that a command does not get every signal twice.
"""

from __future__ import annotations

import os
import select
import signal

from fencepost.model.command import QUICK
from fencepost.model.named import NamedTuple
from fencepost.world.clocks import SystemClocks
from fencepost.world.strays import kill_children, reap_children
from fencepost.world.wire import Inbox, tell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from fencepost.world.strays import Trail

# A poll does not count the time a machine was suspended; the deadlines do. So nobody sleeps longer.
_LONGEST_NAP = 1.0
_GLANCE = 0.02
# The guardian goes first. The deadlines leave us time after that: ``model.command``.
_AFTER_YOU = 0.1
# How often to look and kill in a row: processes that keep forking must not outrun us.
_ROUNDS = 8
# How we leave if we have killed at a deadline, in place of the guardian. The wrapper looks at it.
STEPPED_IN = 3
_boottime = SystemClocks().boottime


class SentinelOrders(NamedTuple):
    """Which guardian a sentinel watches, and until when the command may run."""

    guardian: int
    trail: Trail
    lifeline: int | None
    kill_at: float
    still_at: float
    from_wrapper: int
    from_guardian: int
    to_guardian: int


def be_sentinel(orders: SentinelOrders) -> NoReturn:
    """Watch over the guardian, to the end of this process."""
    code = 0
    try:
        be_called("fence-sentinel")
        pipes = (orders.from_wrapper, orders.from_guardian, orders.to_guardian)
        let_go_of_all_but(*pipes, orders.lifeline)
        code = STEPPED_IN if _Sentinel(orders).stand() else 0
    finally:
        os._exit(code)


class _Sentinel:
    def __init__(self, orders: SentinelOrders) -> None:
        self._trail, self._guardian_pid = orders.trail, orders.guardian
        self._wrapper, self._guardian = Inbox(orders.from_wrapper), Inbox(orders.from_guardian)
        self._spare: tuple[int, ...] = (os.getpid(), orders.guardian)
        self._kill_at, self._still_at = orders.kill_at, orders.still_at
        self._acts_by = 0.0  # by when a guardian that kills will have told of it again
        self._still = self._killed = False
        self._to_guardian = orders.to_guardian

    def stand(self) -> bool:
        """Watch until the guardian says that all is done, or is gone and we have done it.

        Say whether we have killed at a deadline, in place of the guardian.
        """
        bereft = False  # of the wrapper
        while True:
            for _, _, *until in self._wrapper.lines():
                self._kill_at, self._still_at = map(float, until)
            if self._wrapper.closed and not bereft:
                bereft = True  # and what must end does not stand still first
                self._kill_at = min(self._kill_at, self._still_at, _boottime() + QUICK)
            for word, *values in self._guardian.lines():
                if word == "done":
                    os.waitpid(self._guardian_pid, 0)
                    return self._killed
                self._acts_by = float(values[0])
            if self._guardian.closed:
                self._take_over()
                return self._killed
            kill_at = max(self._kill_at, self._acts_by) + _AFTER_YOU
            next_at = min(kill_at, _boottime() + _LONGEST_NAP)
            if _boottime() >= kill_at:
                self._step_in()
            elif not self._have_it_still():
                next_at = min(next_at, self._still_at + _AFTER_YOU)
            self._wait(max(next_at - _boottime(), _GLANCE), bereft=bereft)

    def _step_in(self) -> None:
        """Kill what the guardian should have killed; and the guardian, if it does nothing even now.

        What loses its parents becomes a child of the guardian, and ours only once that is dead.
        """
        if self._killed:
            os.kill(self._guardian_pid, signal.SIGKILL)
            return
        self._killed = True
        tell(self._to_guardian, "killed")  # it will see the command ended, and hears of it first
        self._trail.strike(signal.SIGKILL, spare=self._spare)

    def _have_it_still(self) -> bool:
        """Have the command stand still where the guardian has not, and undo what we did of it."""
        still = _boottime() >= self._still_at + _AFTER_YOU
        if still != self._still:
            self._still = still
            self._trail.strike(signal.SIGSTOP if still else signal.SIGCONT, spare=self._spare)
        return still

    def _wait(self, seconds: float, *, bereft: bool) -> None:
        poll = select.poll()
        poll.register(self._guardian.fd, select.POLLIN)
        if not bereft:
            poll.register(self._wrapper.fd, select.POLLIN)
        poll.poll(seconds * 1000)

    def _take_over(self) -> None:
        """End the command: ask first, kill soon; until nothing is left below us.

        A command that must stand still is not asked: SIGTERM would wake it.
        """
        now = _boottime()
        kill_at = min(now + QUICK, max(now, min(self._kill_at, self._still_at)))
        self._spare = (os.getpid(),)  # the guardian's number may soon be another's
        if now < kill_at:
            self._trail.strike(signal.SIGTERM, spare=self._spare)
        while _reap() or self._trail.find(spare=self._spare):
            late = _boottime() - kill_at
            if late >= 0:
                self._kill_all()
            # What cannot be killed, such as another user's process, is waited for.
            select.poll().poll(min(max(_GLANCE, late / 10), _LONGEST_NAP) * 1000)

    def _kill_all(self) -> None:
        for _ in range(_ROUNDS):
            found = self._trail.strike(signal.SIGKILL, spare=self._spare)
            if not (_reap() or found):
                return
            kill_children(_reap)


def _reap() -> bool:
    return reap_children()[1]


def be_called(name: str) -> None:
    """Take a name of our own, so that ``killall fencepost`` leaves the guards to do their work."""
    try:
        with open("/proc/self/comm", "w", encoding="ascii") as file:
            file.write(name)
    except OSError:
        return  # only the name


def let_go_of_all_but(*keep: int | None) -> None:
    """Close what belongs to others, and keep no folder and no terminal busy."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    for entry in os.listdir("/proc/self/fd"):
        fd = int(entry)
        if fd > 2 and fd not in keep:
            try:
                os.close(fd)
            except OSError:
                continue  # it was the one that listed them
    os.chdir("/")
