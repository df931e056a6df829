"""The sentinel watches over the guardian: if that is gone, it ends the command itself.

It is the guardian's parent, so that what a killed guardian had below it becomes the sentinel's. If
the guardian is only stopped, or slow, the sentinel kills at the last deadline. Otherwise it keeps
still, so that a command does not get every signal twice.
"""

from __future__ import annotations

import os
import select
import signal

from fencepost.model.command import QUICK
from fencepost.model.named import NamedTuple
from fencepost.world.clocks import SystemClocks
from fencepost.world.strays import kill_newest_children, reap_children
from fencepost.world.wire import Inbox, tell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from fencepost.world.strays import Trail

# A poll does not count the time a machine was suspended; the deadlines do. So nobody sleeps longer.
_LONGEST_NAP = 1.0
_GLANCE = 0.02
# The guardian goes first.
_AFTER_YOU = 0.1
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
    try:
        be_called("fence-sentinel")
        pipes = (orders.from_wrapper, orders.from_guardian, orders.to_guardian)
        let_go_of_all_but(*pipes, orders.lifeline)
        _Sentinel(orders).stand()
    finally:
        os._exit(0)


class _Sentinel:
    def __init__(self, orders: SentinelOrders) -> None:
        self._trail, self._guardian_pid = orders.trail, orders.guardian
        self._wrapper, self._guardian = Inbox(orders.from_wrapper), Inbox(orders.from_guardian)
        self._spare = (os.getpid(), orders.guardian)
        self._kill_at, self._still_at = orders.kill_at + _AFTER_YOU, orders.still_at + _AFTER_YOU
        self._still = self._killed = False
        self._to_guardian = orders.to_guardian

    def stand(self) -> None:
        """Watch until the guardian says that all is done, or is gone and we have done it."""
        bereft = False  # of the wrapper
        while True:
            for _, _, *until in self._wrapper.lines():
                self._kill_at, self._still_at = (float(at) + _AFTER_YOU for at in until)
            if self._wrapper.closed and not bereft:
                bereft = True
                self._kill_at = min(self._kill_at, _boottime() + QUICK + _AFTER_YOU)
            if ["done"] in self._guardian.lines():
                os.waitpid(self._guardian_pid, 0)
                return
            if self._guardian.closed:
                self._take_over()
                return
            nap = _LONGEST_NAP
            if _boottime() >= self._kill_at:  # the guardian should have, and has not
                self._kill()
                nap = 10 * _GLANCE
            else:
                self._have_it_still()
            next_at = self._kill_at if self._still else min(self._kill_at, self._still_at)
            self._wait(min(nap, max(next_at - _boottime(), _GLANCE)), bereft=bereft)

    def _kill(self) -> None:
        """Kill the command; the guardian, which will see it ended, hears of it first."""
        if not self._killed:
            self._killed = True
            tell(self._to_guardian, "killed")
        self._trail.strike(signal.SIGKILL, spare=self._spare)

    def _have_it_still(self) -> None:
        """Have the command stand still where the guardian has not, and undo what we did of it."""
        still = _boottime() >= self._still_at
        if still != self._still:
            self._still = still
            self._trail.strike(signal.SIGSTOP if still else signal.SIGCONT, spare=self._spare)

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
        kill_at = min(_boottime() + QUICK, self._kill_at, self._still_at - _AFTER_YOU)
        if _boottime() < kill_at:
            self._trail.strike(signal.SIGTERM, spare=self._spare)
        while reap_children()[1] or self._trail.find(spare=self._spare):
            late = _boottime() - kill_at
            if late >= 0:
                self._trail.strike(signal.SIGKILL, spare=self._spare)
                kill_newest_children()
            # What cannot be killed, such as another user's process, is waited for.
            select.poll().poll(min(max(_GLANCE, late / 10), _LONGEST_NAP) * 1000)


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
