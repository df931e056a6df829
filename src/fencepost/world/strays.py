"""What is left of a command: every process in its session, with its mark, or with its pledge.

The session is the guardian's. The mark is the lease's nonce, which the command finds in its
environment and hands down to its children; the pledge is one end of a pipe, which they inherit
too. So a daemon that left its group, its session and its parents is still found in ``/proc``,
unless it has rid itself of all three. A process that was never ours is never found: it has neither
mark nor pledge, and the session's number cannot come to mean another while whoever asks keeps it
in use. The guardian leads the session, the sentinel is in it, and the wrapper does not reap a dead
guardian before it is done.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

    Stray = tuple[int, int, int]  # a living process of a command: its number, group and session


class Trail:
    """How to recognise what a command has started."""

    def __init__(self, *, session: int, nonce: str, pledge: str) -> None:
        self.session = session
        self._mark, self._pledge = nonce.encode(), pledge
        # Whoever asks was there before the command was, so anything older is none of its children.
        # This spares us from reading the environment of every daemon of the machine.
        self._oldest = int(_stat(os.getpid())[19])

    def find(self, *, spare: Collection[int]) -> list[Stray]:
        """Return the living processes of the command, without those to ``spare``."""
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdecimal()]
        found = (self._recognise(pid) for pid in pids if pid not in spare)
        return [stray for stray in found if stray is not None]

    def strike(self, signum: int, *, spare: Collection[int], told: int = 0) -> None:
        """Send a signal to all that is left, except to the process group that was ``told``."""
        groups: set[int] = set()
        for pid, group, session in self.find(spare=spare):
            if session != self.session or group == self.session:
                self._send(pid, signum)
            elif group != told:
                groups.add(group)
        for group in groups:  # as a whole, so that none of them can fork its way out
            strike_group(group, signum)

    def _recognise(self, pid: int) -> Stray | None:
        try:
            state, _, group, session, *others = _stat(pid)
            threads, born = int(others[13]), int(others[15])
            if born < self._oldest or (state in (b"Z", b"X") and threads <= 1):
                return None
            if int(session) == self.session or self._is_marked(pid):
                return pid, int(group), int(session)
        except OSError:  # it has just ended, or belongs to somebody else
            return None
        return None

    def _is_marked(self, pid: int) -> bool:
        if self._mark in _environment(pid):
            return True
        fds = f"/proc/{pid}/fd"
        return any(os.readlink(f"{fds}/{fd}") == self._pledge for fd in os.listdir(fds))

    def _send(self, pid: int, signum: int) -> None:
        """Signal one process, and none that got its number in the meantime."""
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            return  # gone by itself
        try:
            if self._recognise(pid) is not None:
                signal.pidfd_send_signal(handle, signum)
                if signum == signal.SIGTERM:
                    signal.pidfd_send_signal(handle, signal.SIGCONT)
        except OSError:
            return  # gone, or not ours to signal
        finally:
            os.close(handle)


def strike_group(group: int, signum: int) -> None:
    """Send a signal to a process group; one that is stopped must wake up to obey SIGTERM."""
    try:
        os.killpg(group, signum)
        if signum == signal.SIGTERM:
            os.killpg(group, signal.SIGCONT)
    except (ProcessLookupError, PermissionError):
        return  # nobody there, or only such as changed their user: those are beyond our reach


def group_exists(group: int) -> bool:
    """Say whether anybody is in a process group, the dead and not yet buried included."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _stat(pid: int) -> list[bytes]:
    """Return what the kernel says of a process from its state on; its name may contain anything."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        line = file.read()
    return line[line.rindex(b")") + 2 :].split()


def _environment(pid: int) -> bytes:
    with open(f"/proc/{pid}/environ", "rb") as file:
        return file.read()
