"""What is left of a command: its descendants, its session, and the bearers of its mark or pledge.

A guard adopts the orphans below it (``adopt_orphans``), so a daemon that left its parents is still
a descendant, whatever else it gave up. The session is that of the guards. The mark is the lease's
nonce, which the command finds in its environment and hands down to its children; the pledge is one
end of a pipe, which they inherit too. Mark and pledge are for the time after a guard was killed.

A process that was never ours is never found. It has neither mark nor pledge, and it descends from
no guard: the guards begin without children. The numbers of the session and of ``root`` cannot come
to mean other processes: a guard asks about itself, and the wrapper does not reap the sentinel
before it is done.
"""

from __future__ import annotations

import os
import signal

from fencepost.model.named import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

_SET_CHILD_SUBREAPER = 36  # of prctl(2)
_MOST_PIDS = 1 << 22
_NEWEST = 32
_LOOKS = 100  # in a row, for children that are there for a moment


class Stray(NamedTuple):
    """A living process of a command; ``born`` tells it from a later one with its number."""

    pid: int
    group: int
    session: int
    born: int
    name: str  # of the program, as the kernel has it: 15 bytes at most, and no arguments
    descends: bool  # from the ``root`` of the trail


class Trail:
    """How to recognise what a command has started."""

    def __init__(self, *, session: int, root: int, nonce: str, pledge: str) -> None:
        self.session, self._root = session, root
        self._mark, self._pledge = nonce.encode(), pledge
        # The process that asks is older than the command: no child of the command is older still.
        # This spares us from reading the environment of every daemon of the machine.
        self._oldest = _seen(os.getpid()).born

    def find(self, *, spare: Collection[int]) -> list[Stray]:
        """Return the living processes of the command, without those to ``spare``.

        The processes of a machine are read one after the other. One that is begun meanwhile can be
        overlooked: a guard that has children looks again.
        """
        seen = {one.pid: one for one in _all_seen()}
        below = _descendants(self._root, seen.values())
        return [
            _as_stray(one, descends=one.pid in below)
            for one in seen.values()
            if one.pid not in spare and one.lives and self._is_ours(one, below)
        ]

    def strike(self, signum: int, *, spare: Collection[int], told: int = 0) -> list[Stray]:
        """Send a signal to all that is left, and return it.

        The process group that was ``told`` gets no second signal.
        """
        found = self.find(spare=spare)
        groups: dict[int, list[Stray]] = {}
        for stray in found:
            # A session that a descendant began has only descendants in it, and so have its groups.
            whole = stray.descends or stray.session == self.session
            if not whole or stray.group == self.session:
                _send(stray, signum)
            elif stray.group != told:
                groups.setdefault(stray.group, []).append(stray)
        for group, members in groups.items():  # as a whole: none of them can fork its way out
            if any(map(_is_still, members)):  # else the number may be another group's by now
                strike_group(group, signum)
        return found

    def _is_ours(self, one: _Seen, below: Collection[int]) -> bool:
        if one.pid in below or one.session == self.session:
            return True
        try:
            return one.born >= self._oldest and self._is_marked(one.pid)
        except OSError:  # it has just ended, or belongs to another user
            return False

    def _is_marked(self, pid: int) -> bool:
        if self._mark in _environment(pid):
            return True
        fds = f"/proc/{pid}/fd"
        return any(_target(f"{fds}/{fd}") == self._pledge for fd in os.listdir(fds))


def adopt_orphans() -> bool:
    """Become the parent of descendants that lose theirs; say whether the kernel lets us.

    Then no child of a command can leave us behind: without children we have no descendants.
    """
    try:
        import ctypes  # only the guards need it

        return not ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (ImportError, OSError, AttributeError):  # a Python without it, or no such function
        return False


def reap_children() -> tuple[dict[int, int], bool]:
    """Reap the children that have ended; return their statuses, and whether others are left."""
    statuses: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return statuses, False
        if not pid:
            return statuses, True
        statuses[pid] = status


def strike_group(group: int, signum: int, *, wake: bool = True) -> None:
    """Send a signal to a process group; one that is stopped must wake up to obey SIGTERM."""
    try:
        os.killpg(group, signum)
        if wake and signum == signal.SIGTERM:
            os.killpg(group, signal.SIGCONT)
    except (ProcessLookupError, PermissionError):
        return  # nobody there, or only such as changed their user: those are beyond our reach


def kill_children(reap: Callable[[], bool]) -> list[Stray]:
    """Kill the children of this process as soon as they are seen, and return them.

    ``reap`` reaps those that have ended, and says whether any are left.

    Each process of a chain that keeps forking lives for a moment only, too short for a look at the
    whole machine. A child has its number until its parent reaps it: none is killed for another.
    """
    killed: list[Stray] = []
    for _ in range(_LOOKS):
        children = _children()
        if children is None:
            return killed + _kill_among_newest()
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)  # first of all: it may be gone in a moment
                killed.append(_as_stray(_seen(pid), descends=True))
            except OSError:  # it belongs to another user
                continue
        if not reap():
            break
    return killed


def _children() -> list[int] | None:
    """Return the children of this process, which has one thread; None if the kernel has no list."""
    ours = os.getpid()
    try:
        with open(f"/proc/{ours}/task/{ours}/children", "rb") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return None


def _kill_among_newest() -> list[Stray]:
    ours = os.getpid()
    try:
        with open("/proc/loadavg", "rb") as file:
            latest = int(file.read().split()[-1])  # the number that was given out last
    except OSError:
        latest = 0  # then the highest numbers count as the newest
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdecimal()]
    killed: list[Stray] = []
    for pid in sorted(pids, key=lambda pid: (latest - pid) % _MOST_PIDS)[:_NEWEST]:
        try:
            one = _seen(pid)
            if one.parent == ours and one.lives:
                os.kill(pid, signal.SIGKILL)
                killed.append(_as_stray(one, descends=True))
        except OSError:  # it has just ended, or belongs to another user
            continue
    return killed


class _Seen(NamedTuple):
    """What the kernel tells everybody of a process."""

    pid: int
    parent: int
    group: int
    session: int
    born: int  # in ticks since the machine began
    name: str
    lives: bool


def _as_stray(one: _Seen, *, descends: bool) -> Stray:
    return Stray(one.pid, one.group, one.session, one.born, one.name, descends)


def _all_seen() -> Iterable[_Seen]:
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                yield _seen(int(entry))
            except OSError:  # it has just ended
                continue


def _seen(pid: int) -> _Seen:
    with open(f"/proc/{pid}/stat", "rb") as file:
        line = file.read()
    end = line.rindex(b")")  # a program's name may contain anything
    name = line[line.index(b"(") + 1 : end].decode(errors="replace")
    state, *others = line[end + 2 :].split()
    parent, group, session = map(int, others[:3])
    threads, born = int(others[16]), int(others[18])
    # A process whose first thread has ended lives on in its others.
    lives = state not in (b"Z", b"X") or threads > 1
    return _Seen(pid, parent, group, session, born, name, lives)


def _descendants(root: int, seen: Iterable[_Seen]) -> set[int]:
    children: dict[int, list[int]] = {}
    for one in seen:
        children.setdefault(one.parent, []).append(one.pid)
    found: set[int] = set()
    parents = [root]
    while parents:
        below = [pid for pid in children.get(parents.pop(), ()) if pid not in found]
        found.update(below)
        parents += below
    return found


def _send(stray: Stray, signum: int) -> None:
    """Signal one process, and none that got its number in the meantime."""
    try:
        handle = os.pidfd_open(stray.pid)
    except OSError:
        return  # gone by itself
    try:
        if _is_still(stray):
            signal.pidfd_send_signal(handle, signum)
            if signum == signal.SIGTERM:
                signal.pidfd_send_signal(handle, signal.SIGCONT)
    except OSError:
        return  # gone, or another user's
    finally:
        os.close(handle)


def _is_still(stray: Stray) -> bool:
    """Say whether a process is the one that was found, in the group that it was found in."""
    try:
        one = _seen(stray.pid)
    except OSError:
        return False
    return (one.born, one.group) == (stray.born, stray.group)


def _target(link: str) -> str:
    """Return what a process has open under a descriptor; nothing if it has just closed it."""
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _environment(pid: int) -> bytes:
    with open(f"/proc/{pid}/environ", "rb") as file:
        return file.read()
