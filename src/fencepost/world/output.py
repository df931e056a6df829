"""A tee copies what a command says to where it would have gone anyway, and keeps an excerpt of it.

Neither side waits for the other. A reader of ours that went away is missed by nobody: the command
runs on and is recorded. And when the command is gone, all that it said is on record at once, even
if our reader is slow, and even if a stray still holds the command's end of a pipe.

The pipes are made before the command is started, and the thread begins after it: a fork would copy
the thread's locks and not the thread.
"""

from __future__ import annotations

import os
import select
import signal
import threading

from fencepost.model.output import Braid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.model.output import Excerpt

_CHUNK = 64 * 1024
# What a pipe takes without blocking when it says that it takes anything at all.
_BITE = 4096
# More than a pipe holds. Whoever fills it while it is drained was not the command.
_MOST_LEFT = 1024 * 1024


class Tee:
    """Two pipes for a command to write to, and the thread that empties them.

    ``stdout`` and ``stderr`` are the command's ends. They are for ``guardian.start`` to take over:
    as long as anybody else had them open, the thread would not see the command's end. An ``out`` or
    ``err`` of -1 is nobody: then it is only recorded.
    """

    def __init__(self, excerpt: Excerpt, *, out: int = 1, err: int = 2) -> None:
        self._braid = Braid(excerpt)
        self._lock = threading.Lock()  # held to read and to record; never to write
        self._over = False
        self._thread: threading.Thread | None = None
        reads, self.stdout = os.pipe()
        self._out = _Strand(reads, out)
        reads, self.stderr = os.pipe()
        self._err = _Strand(reads, err)
        self._hears, self._wakes = os.pipe()
        self._ours = [self._out.reads, self._err.reads, self._hears, self._wakes]

    def begin(self) -> None:
        """Begin to copy. Nothing may be forked from now on."""
        self._thread = threading.Thread(target=self._copy, name="fencepost-tee", daemon=True)
        # A signal must interrupt the main thread, which forwards it, and not this one.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def finish(self) -> None:
        """Put on record what is still in the pipes, and nothing that comes later. Never blocks."""
        with self._lock:
            if self._over:
                return
            self._over = True
            for strand in (self._out, self._err):
                left = _MOST_LEFT
                while left > 0 and (chunk := self._take(strand)):
                    left -= len(chunk)
            self._braid.end()
        os.write(self._wakes, b"\n")

    def close(self, *, patience: float | None = 5.0) -> bool:
        """Finish, and wait until our readers have got everything; say whether they have.

        The lease should be given back before this: they may be slow. What they have not taken when
        ``patience`` ends is lost to them, though not to the excerpt. None waits for ever.
        """
        self.finish()
        if self._thread is not None:
            self._thread.join(patience)
            if self._thread.is_alive():
                return False  # and its descriptors stay open, for it will use them
        while self._ours:
            os.close(self._ours.pop())
        return True

    def _copy(self) -> None:
        while True:
            poll = select.poll()
            with self._lock:
                waiting = [self._register(poll, strand) for strand in (self._out, self._err)]
                if not any(waiting):
                    return
                if not self._over:
                    poll.register(self._hears, select.POLLIN)
            ready = {fd for fd, _ in poll.poll()}
            for strand in (self._out, self._err):
                if strand.pending:
                    if strand.to in ready:
                        self._pass_on(strand)
                elif strand.reads in ready:
                    with self._lock:
                        if not self._over:
                            self._take(strand)

    def _register(self, poll: select.poll, strand: _Strand) -> bool:
        """Wait for our reader if there is something for it, else for the command."""
        if strand.pending:
            poll.register(strand.to, select.POLLOUT)
        elif strand.open and not self._over:
            poll.register(strand.reads, select.POLLIN)
        else:
            return False
        return True

    def _take(self, strand: _Strand) -> bytes:
        """Take what a pipe has, if anything, and record it."""
        if not strand.open:
            return b""
        try:
            chunk = os.read(strand.reads, _CHUNK)
        except BlockingIOError:
            return b""
        strand.open = bool(chunk)
        self._braid.feed(strand.reads, chunk)
        if strand.heard:
            strand.pending += chunk
        return chunk

    def _pass_on(self, strand: _Strand) -> None:
        with self._lock:
            bite = bytes(strand.pending[:_BITE])
        try:
            written = os.write(strand.to, bite)
        except BlockingIOError:
            return  # somebody else has filled it meanwhile
        except OSError:  # nobody reads it any more, or the disk is full
            with self._lock:
                strand.heard = False
                strand.pending.clear()
            return
        with self._lock:
            del strand.pending[:written]


class _Strand:
    """One stream: from the command's pipe to our own descriptor."""

    def __init__(self, reads: int, to: int) -> None:
        os.set_blocking(reads, False)
        self.reads, self.to = reads, to
        self.open = True  # whether the command, or a child of it, can still write
        self.heard = to >= 0  # whether anybody reads what we pass on
        self.pending = bytearray()  # read, and not yet passed on
