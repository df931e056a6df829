"""A pulse is a file that a living process keeps locked; at its death the kernel lets go of it.

A process has one pulse file for each database file, under a name nobody else will ever use, and
takes its ``flock`` before its first lease is written. Whoever finds a lease may probe the
holder's file: if the lock can be had, every process that shared it is gone. Anything else (no
file, another inode, no link) means *unknown*, and unknown means: wait for the lease to end.

``flock`` belongs to the open file, not to the process: a forked child that closes its copy takes
nothing away from its parent. It must close it, though, or it would vouch for a dead parent.
"""

from __future__ import annotations

import atexit
import itertools
import os
import stat
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows has no flock: deaths are noticed by expiry only
    fcntl = None

_SUFFIX = ".pulse"
_count = itertools.count()
_PROBE, _WARN = os.O_RDONLY, os.O_WRONLY
for _flag in ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK"):  # what is probed may be a pipe
    _PROBE |= getattr(os, _flag, 0)
    _WARN |= getattr(os, _flag, 0)
# How long to go without looking whether somebody removed the file. A lease that leans on a removed
# one loses nothing but speed: its holder's death is noticed at its end.
_TRUSTED = 1.0
_beating: list[Pulse] = []
# Locked files that somebody removed while leases leaned on them. They stay open, for else their
# inodes could become those of new files that nobody has locked.
_removed: list[int] = []


class Pulse:
    """Our process's sign of life in one folder, and the means to feel those of others."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.possible = fcntl is not None
        self.fd = -1
        self.name = ""
        self.inode = ""
        self.leases: set[str] = set()
        self._pid = 0
        self._look_at = 0.0

    def beat(self, nonce: str) -> tuple[str, str]:
        """Make sure that this process's file exists and is locked; return its name and inode.

        Where the system has no ``flock`` both are empty, which nobody can mistake for a pulse.
        """
        if fcntl is None:
            return "", ""
        if self._pid != os.getpid():
            self.drop()
        now = time.monotonic()
        if self.fd < 0 or now >= self._look_at:
            self._look_at = now + _TRUSTED
            if not self._linked():
                self._start(nonce)
        return self.name, self.inode

    def stopped(self, name: str, inode: str) -> bool:
        """Say whether nobody has that pulse at this instant. In doubt: no."""
        proof = self.proof(name, inode)
        if proof is not None:
            os.close(proof)
        return proof is not None

    def proof(self, name: str, inode: str) -> int | None:
        """Return what proves, until it is closed, that nobody has that pulse. In doubt: nothing.

        The dead stay dead, but to the pipe of a waiter its lock may come late: whoever takes over
        a lease that leans on one has to ``claim`` it, and to keep the proof until it is changed.
        """
        if fcntl is None or not name or name == self.name:
            return None
        try:
            fd = os.open(self._path(name), _PROBE)
        except OSError:
            return None
        try:
            status = os.fstat(fd)
            if inode_of(status) == inode and status.st_nlink >= 1:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return fd
        except OSError:
            pass  # somebody has it
        os.close(fd)
        return None

    def claim(self, name: str, inode: str) -> int | None:
        """Return a proof for one who takes over what leans on that pulse. In doubt: nothing.

        To the pipe of a waiter its lock may come late, and by then our grant is history: so it is
        warned before that, while nobody else can lock the pipe.
        """
        proof = self.proof(name, inode)
        if proof is None or _warned(self._path(name), proof):
            return proof
        os.close(proof)
        return None

    def warn(self, name: str) -> None:
        """Have a waiter look twice at what was handed to it, if that is what leans on this pulse.

        For one who takes it away from whoever has it. Nobody's safety depends on it.
        """
        try:
            probe = os.open(self._path(name), _PROBE)
        except OSError:
            return  # there is nobody to warn
        _warned(self._path(name), probe)
        os.close(probe)

    def sweep(self, *, keep: set[str]) -> None:
        """Remove the files of dead processes, except those that leases still refer to."""
        for entry in os.listdir(self.folder):
            if entry.endswith(_SUFFIX) and entry not in keep and entry != self.name:
                self._sweep(self._path(entry))

    def _sweep(self, path: str) -> None:
        if fcntl is None:
            return
        try:
            fd = os.open(path, _PROBE)
        except OSError:
            return  # another sweeper was quicker
        try:
            # Removed under the lock: whoever has just made it must find that out, and begin again.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                os.unlink(path)
        except OSError:
            return  # its process lives
        finally:
            os.close(fd)

    def end(self) -> None:
        """Remove this process's file, unless a lease still leans on it.

        With leases it stays, locked, until the process is gone: closing it any earlier would tell
        everybody that their holder is dead.
        """
        if self.fd >= 0 and self._pid == os.getpid() and not self.leases:
            if self._linked():
                os.unlink(self._path(self.name))
            self.drop()

    def drop(self) -> None:
        """Close this process's copy without unlocking: what a forked child does."""
        if self.fd >= 0:
            os.close(self.fd)
            _beating.remove(self)
        self.fd, self.name, self.inode, self._pid = -1, "", "", 0
        self.leases = set()

    def _start(self, nonce: str) -> None:
        if self.leases:
            _removed.append(os.dup(self.fd))
        self.drop()
        os.makedirs(self.folder, exist_ok=True)  # somebody may have removed that too
        while True:
            # Counted too: two stores of one process that were given one nonce, as in a test, would
            # wait for each other for ever.
            name = f"{nonce}-{next(_count)}{_SUFFIX}"
            fd = os.open(self._path(name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue  # a sweeper has it, and will remove it: perhaps not soon, if it is stopped
            status = os.fstat(fd)
            if status.st_nlink >= 1:
                self.fd, self.name, self.inode = fd, name, inode_of(status)
                self._pid = os.getpid()
                _beating.append(self)
                return
            os.close(fd)

    def _linked(self) -> bool:
        """Say whether we have a file, and it is still where others look for it."""
        if self.fd < 0:
            return False
        try:
            return inode_of(os.stat(self._path(self.name))) == self.inode
        except FileNotFoundError:
            return False

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)


def _end_all() -> None:
    """Leave no file behind, but for a process that exits with leases: its file says it is dead."""
    for pulse in _beating[:]:
        pulse.end()


def _drop_all() -> None:
    """Vouch for nobody in a forked child."""
    for pulse in _beating[:]:
        pulse.drop()
    while _removed:
        os.close(_removed.pop())


atexit.register(_end_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_all)


def _warned(path: str, probe: int) -> bool:
    """Leave a byte in a pipe that we read too, so that it cannot break; say whether it is there.

    What is no pipe needs none: the dead do not come back.
    """
    if not stat.S_ISFIFO(os.fstat(probe).st_mode):
        return True
    try:
        fd = os.open(path, _WARN)
    except OSError:
        return False  # another user's, or no longer there
    try:
        if not os.path.sameopenfile(fd, probe):
            return False
        os.write(fd, b"!")
    except BlockingIOError:
        return True  # it is full of them
    finally:
        os.close(fd)
    return True


def inode_of(status: os.stat_result) -> str:
    """Return what identifies a file while anybody has it open."""
    return f"{status.st_dev}:{status.st_ino}"
