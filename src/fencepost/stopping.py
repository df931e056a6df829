"""A signal orders an instance to stop: its process ends within the grace, whatever it waits for.

Nothing can stop a thread that is inside of a body, or one that waits for a ledger which does not
answer. What can be done is to end the process. Until then the lease of each attempt is held, so
nobody else begins; and the order is on record, so that nobody counts a loss.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from queue import Empty, SimpleQueue

from fencepost.flows.serve import unrecorded
from fencepost.model.event import JobEvent
from fencepost.serving import SETTLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, NoReturn

    from fencepost.flows.course import Course
    from fencepost.scheduling import Scheduling
    from fencepost.serving import ThreadCrew
    from fencepost.serving_aio import TaskCrew

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# How much longer than the crew the process waits: for those who come to an end by themselves.
_SPARE = 0.2
# How long it takes at most to say what was cut: a pipe that nobody reads must not keep us.
_TELLING = 0.1
_CUT = "its body did not end within the grace and ended with the process: "
_RECORDED = "the run is resumed by the next instance, and no loss is counted"
_UNKNOWN = "the ledger was away, so a loss is counted when the next instance resumes the run"


class Signals:
    """What SIGTERM and SIGINT do while an instance runs in the main thread of a process.

    The first one stops the crew, by ``stop``, within its grace; the second one at once. A third one
    is left to those who handled it before.
    """

    def __init__(
        self, scheduling: Scheduling, crew: ThreadCrew | TaskCrew, stop: Callable[[float], None]
    ) -> None:
        self._scheduling, self._crew, self._stop = scheduling, crew, stop
        self._clock = scheduling.world.clocks.boottime
        self.ordered = False  # whether one has come
        self._before: dict[int, Any] = {}
        # Of all that can wake a thread, this alone may be used by a handler of signals.
        self._orders: SimpleQueue[float | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may say what a signal does
        # Started now: when it is needed there may be no thread to be had.
        self._thread = threading.Thread(target=self._watch, name="fencepost-stop", daemon=True)
        self._thread.start()
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._heard)

    def close(self, *, busy: bool) -> None:
        """Leave signals to those who handled them before, and have the process live on.

        Not so if one has ordered a stop and bodies are still ``busy``: then the process ends here.
        """
        if self._thread is None:
            return
        if self.ordered and busy:
            self._end()
        self._orders.put(None)
        self._restore()

    def _heard(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        again, self.ordered = self.ordered or self._crew.stopping, True
        grace = 0.0 if again else self._crew.grace
        self._orders.put(self._clock() + grace)
        self._stop(grace)
        if again:
            self._restore()

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    # In a thread of its own.

    def _watch(self) -> None:
        """End the process once its time is up, unless the instance has ended by then."""
        left: float | None = None
        while True:
            try:
                order = self._orders.get(timeout=left)
            except Empty:
                self._end()
            if order is None:
                return
            self._pass_on(order)
            left = max(0.0, order + SETTLE + _SPARE - self._clock())

    def _pass_on(self, recall_at: float) -> None:
        """Have the order told to each attempt, and by its keeper to the ledger."""
        for course in self._courses():
            course.recall(recall_at)
            self._scheduling.tell_soon(course)

    def _end(self) -> NoReturn:
        """End the process, and say what ends with it."""
        teller = threading.Thread(target=self._tell, daemon=True)
        try:
            teller.start()
            teller.join(_TELLING)
        finally:
            os._exit(0)

    def _tell(self) -> None:
        for course in self._courses():
            if course.ended is not None:
                self._scheduling.emit(unrecorded(course.attempt, course.ended))
            elif not course.handed_off:
                note = _CUT + (_RECORDED if course.ordered else _UNKNOWN)
                key, about = course.run.key, (("note", note),)
                token = course.attempt.token
                self._scheduling.emit(JobEvent("cut", key.job, str(key), token, about))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()

    def _courses(self) -> list[Course]:
        return list(self._scheduling.working.courses.values())
