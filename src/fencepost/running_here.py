"""To be an instance in this process: the main thread serves, worker threads carry bodies out."""

from __future__ import annotations

import signal
import threading

from fencepost.errors import Misuse
from fencepost.flows.course import Doors
from fencepost.flows.ring import Bell, ring
from fencepost.flows.serve import serve
from fencepost.hearing import Hearing
from fencepost.scheduling import CLOSING, crew_here, grace_of, size_of
from fencepost.serving import ThreadCrew
from fencepost.world.flow import finish

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

    from fencepost.flows.ring import Alarms
    from fencepost.model.duration import Duration
    from fencepost.scheduling import Scheduling

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run_here(
    scheduling: Scheduling,
    *,
    concurrency: int,
    grace: Duration,
    signals: bool,
    alarms: Alarms | None,
) -> None:
    """Serve until stopped."""
    if crew_here(scheduling) is not None:
        raise Misuse("this Fencepost is running already: one instance is enough for one process")
    length, size = grace_of(grace), size_of(concurrency)
    working, world = scheduling.working, scheduling.world
    crew = scheduling.crew = ThreadCrew(scheduling.serving, working, world, size=size)
    crew.grace = length
    handled: dict[int, Any] = {}
    bells: _Bells | None = None
    hearing: Hearing | None = None
    try:
        if signals:
            _handle(crew, handled)
        if alarms is not None:
            bells = _Bells(scheduling, alarms)
        hearing = Hearing(scheduling, crew, None if bells is None else bells.bell)
        finish(serve(Doors(world, working.ledger), scheduling.office, crew))
    finally:
        if hearing is not None:
            hearing.close()
        try:
            _end(crew, bells)
        finally:
            scheduling.crew = None
            crew.gone.set()
            _restore(handled)


def _end(crew: ThreadCrew, bells: _Bells | None) -> None:
    """Wait for what was recalled, and then for what is being fired. An interrupt ends the wait."""
    if bells is not None:
        bells.stop()
    try:
        crew.dismiss()
        crew.wait()
    finally:
        if bells is not None:
            bells.join()


class _Bells:
    """The thread that fires alarms, beside the one that serves."""

    def __init__(self, scheduling: Scheduling, alarms: Alarms) -> None:
        self._scheduling, self._alarms = scheduling, alarms
        self.bell = Bell(scheduling.world)
        self._thread = threading.Thread(target=self._ring, name="fencepost-alarms", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Fire no more."""
        self.bell.stop()

    def join(self) -> None:
        """Wait for what is being fired."""
        crew = self._scheduling.crew
        left = 0.0
        if crew is not None and crew.recall_at is not None:
            left = max(0.0, crew.recall_at - self._scheduling.world.clocks.boottime())
        self._thread.join(left + 1.0)

    def _ring(self) -> None:
        emit, look = self._scheduling.emit, self._scheduling.pace.look
        finish(ring(self._alarms, self.bell, emit=emit, look=look))


def stop_here(scheduling: Scheduling, *, grace: Duration | None) -> None:
    """Ask the instance of this process to stop; without one there is nothing to do."""
    crew = crew_here(scheduling)
    if crew is not None:
        crew.stop(crew.grace if grace is None else grace_of(grace))


def end_here(scheduling: Scheduling) -> None:
    """Stop the instance of a face that is closed, and wait a while for its end."""
    crew = crew_here(scheduling)
    if isinstance(crew, ThreadCrew):
        crew.stop(0.0)
        if not crew.is_ours():  # a body that closes its own face would wait for itself
            crew.gone.wait(CLOSING)


def _handle(crew: ThreadCrew, handled: dict[int, Any]) -> None:
    """Have signals stop the crew; keep who handled them before."""
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread may say what a signal does

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        hurry = crew.stopping
        crew.stop(0.0 if hurry else crew.grace)
        if hurry:  # a third one is not ours: it ends a process whose bodies hear nothing
            _restore(handled)

    for number in _SIGNALS:
        handled[number] = signal.signal(number, stop)


def _restore(handled: dict[int, Any]) -> None:
    while handled:
        number, handler = handled.popitem()
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
