"""A signal orders an instance to stop: its process ends within the grace, whatever it waits for.

Nothing can stop a thread that is inside of a body, or one that waits for a ledger which does not
answer. What can be done is to end the process. Until then the lease of each attempt is held, so
nobody else begins; and the order is on record, so that nobody counts a loss.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections import Counter
from contextlib import contextmanager, suppress
from functools import partial

from fencepost.flows.alarm import cut
from fencepost.flows.serve import unrecorded
from fencepost.model.event import JobEvent
from fencepost.model.policy import OnLoss
from fencepost.serving import SETTLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType
    from typing import Any

    from fencepost.alarming import Alarming
    from fencepost.flows.course import Course
    from fencepost.scheduling import Scheduling
    from fencepost.serving import ThreadCrew
    from fencepost.serving_aio import TaskCrew

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# How much longer than the crew the process waits: for those who come to an end by themselves.
_SPARE = 0.2
_MORE = SETTLE + _SPARE
# How long it takes at most to say what was cut: a pipe that nobody reads must not keep us.
_TELLING = 0.25
# Our handler adds this to the number of a signal; the interpreter sends the number as it is.
_HANDLED = 0x80
_CUT = "its body did not end within the grace and ended with the process: "
_LOST = "its lease was lost before, and the run is no longer its own"
_CANCELLED = "the run is recorded as cancelled"
_FAILED = "the next instance records the run as failed (lost), because its job has on_loss='fail'"
_RECORDED = "the run is resumed by the next instance, and no loss is counted"
_UNKNOWN = (
    "the run is resumed by the next instance, and it may be counted as lost, because the ledger "
    "has not confirmed the order to stop"
)


class Signals:
    """What SIGTERM and SIGINT do while an instance runs in the main thread of a process.

    The first one stops the crew within its grace; the second one at once. A third one is left to
    the handler that was there before. Only signals are counted: a program that stops its instance
    itself (``fp.stop``) may give it more time than the first one does, before it comes or after. A
    second one ends that as well.

    Python calls a handler only between two instructions of the main thread, which may be inside of
    a long call. So the interpreter also writes each signal to a socket, the moment it arrives, and
    a thread of our own reads it. Another part of the program may want that for itself
    (``signal.set_wakeup_fd``): then our handler alone tells the thread.
    """

    def __init__(
        self, scheduling: Scheduling, crew: ThreadCrew | TaskCrew, alarms: Alarming | None
    ) -> None:
        self._scheduling, self._crew, self._alarms = scheduling, crew, alarms
        self._clock = scheduling.world.clocks.boottime
        self._ordered = False  # whether a signal has come
        self._handled = False  # whether our handler was called
        self._error: Exception | None = None
        self._before: dict[int, Any] = {}
        self._count = 0  # how many signals there were
        self._limit: float | None = None  # when the last of them has the process end
        self._ending = threading.Lock()
        self._closed = False  # whether the process lives on
        self._pipe: tuple[socket.socket, socket.socket] | None = None

    def listen(self) -> None:
        """Handle signals from now on; only the main thread of a process can."""
        if threading.current_thread() is not threading.main_thread():
            return
        reader, writer = self._pipe = socket.socketpair()
        _listening.append(self)
        writer.settimeout(0)
        # Started now: when it is needed there may be no thread to be had.
        watch = partial(self._watch, reader)
        threading.Thread(target=watch, name="fencepost-stop", daemon=True).start()
        former = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        if former != -1:
            signal.set_wakeup_fd(former)
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._handle)

    @contextmanager
    def keep_error(self) -> Iterator[None]:
        """Keep the error that ends the instance: should the process end first, it is printed."""
        try:
            yield
        except Exception as error:
            self._error = error
            raise

    def close(self, *, busy: bool) -> None:
        """Leave signals to the handlers that were there before, and have the process live on.

        Not so if one has ordered a stop and bodies are still ``busy``: then the process ends here.
        """
        if self._pipe is None:
            return
        if self._ordered and busy:
            self._end()
        with self._ending:  # who is about to end the process has it; from here on nobody does
            self._closed = True
        _listening.remove(self)
        self.leave()

    def leave(self) -> None:
        """Handle no more signals. A forked child has only copies, and its parent goes on."""
        if self._pipe is None:
            return
        self._restore()
        reader, writer = self._pipe
        self._pipe = None
        current = signal.set_wakeup_fd(-1)
        if current not in (-1, writer.fileno()):
            signal.set_wakeup_fd(current)
        writer.close()  # the thread reads the end of it, and ends
        if os.getpid() != self._crew.pid:
            reader.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        again, self._handled, self._ordered = self._handled, True, True
        if self._pipe is not None:
            with suppress(BlockingIOError):  # it is full of signals, and one more changes nothing
                self._pipe[1].send(bytes([number + _HANDLED]))
        if again:
            self._restore()

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    # In a thread of its own.

    def _watch(self, reader: socket.socket) -> None:
        """End the process once its time is up, unless the instance has ended by then."""
        # The interpreter and our handler both tell of a signal, in any order; or only one of them.
        raw, handled = Counter[int](), Counter[int]()
        with reader:
            while True:
                left = self._left()
                if left is not None and left <= 0:
                    self._end()
                    return
                reader.settimeout(left)
                try:
                    told = reader.recv(1)
                except TimeoutError:
                    continue  # meanwhile the program may have made the end later
                if not told:
                    return
                number = told[0] % _HANDLED
                if number in _SIGNALS:
                    (handled if told[0] >= _HANDLED else raw)[number] += 1
                    count = sum(max(raw[one], handled[one]) for one in _SIGNALS)
                    if count > self._count:
                        self._order_stop(count)

    def _left(self) -> float | None:
        """Return for how long the process may live on; None as long as no signal has come."""
        limit, ordered = self._limit, self._crew.recall_at
        if limit is None:
            return None
        if self._count == 1 and ordered is not None:  # the program may have ordered a later end
            limit = max(limit, ordered + _MORE)
        return limit - self._clock()

    def _order_stop(self, count: int) -> None:
        """Stop the crew, as the first or as a further signal does."""
        self._ordered = True
        grace, left = self._crew.grace if count == 1 else 0.0, self._left()
        more = grace + _MORE if left is None else min(left, grace + _MORE)
        self._count, self._limit = count, self._clock() + more
        self._crew.stop(grace, shorten=count > 1)

    def _end(self) -> None:
        """End the process, and say what ends with it; the first thread that comes here does.

        Nothing happens if the instance has ended before.
        """
        with self._ending:
            if self._closed:
                return
            teller = threading.Thread(target=self._tell, daemon=True)
            try:
                teller.start()
                teller.join(_TELLING)
            finally:
                os._exit(0 if self._error is None else 1)

    def _tell(self) -> None:
        error = self._error
        if error is not None:
            sys.excepthook(type(error), error, error.__traceback__)
        for course in list(self._scheduling.working.courses.values()):
            if course.ended is not None:
                self._scheduling.emit(unrecorded(course.attempt, course.ended))
            elif not course.handed_off:
                key, about = course.run.key, (("note", _CUT + _fate(course)),)
                token = course.attempt.token
                self._scheduling.emit(JobEvent("cut", key.job, str(key), token, about))
        for firing in () if self._alarms is None else list(self._alarms.courses):
            self._scheduling.emit(cut(firing))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()


def _fate(course: Course) -> str:
    """Say what becomes of the run of an attempt that ends with its process."""
    if course.hold.why_lost is not None or course.ordered is False:
        return _LOST
    if course.cancelled:
        return _CANCELLED
    if course.policy.on_loss is OnLoss.FAIL:
        return _FAILED
    return _RECORDED if course.ordered else _UNKNOWN


# A forked child has our handlers, no thread of ours, and the same socket: a signal to the child
# would order its parent to stop. So it leaves the signals before it can receive one.

_listening: list[Signals] = []
_masks = threading.local()


def _before_fork() -> None:
    if _listening:
        _masks.former = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _after_fork() -> None:
    former = _masks.__dict__.pop("former", None)
    if former is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _after_fork_in_child() -> None:
    while _listening:
        _listening.pop().leave()
    _after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows, where there is no fork
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
    )
