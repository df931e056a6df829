"""To be an instance in this process: the main thread serves, worker threads carry bodies out."""

from __future__ import annotations

import threading

from fencepost.errors import Misuse
from fencepost.flows.course import Doors
from fencepost.flows.ring import Bell, ring
from fencepost.flows.serve import serve
from fencepost.hearing import Hearing
from fencepost.scheduling import CLOSING, crew_here, grace_of, size_of
from fencepost.serving import ThreadCrew
from fencepost.stopping import Signals
from fencepost.world.flow import finish

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.alarming import Alarming
    from fencepost.model.duration import Duration
    from fencepost.scheduling import Scheduling


# How long an instance that ends by itself waits for handlers of alarms.
_LEAST = 1.0


def run_here(
    scheduling: Scheduling,
    *,
    concurrency: int,
    grace: Duration,
    signals: bool,
    alarms: Alarming | None,
) -> None:
    """Serve until stopped."""
    if crew_here(scheduling) is not None:
        raise Misuse("this Fencepost is running already: one instance is enough for one process")
    length, size = grace_of(grace), size_of(concurrency)
    working, world = scheduling.working, scheduling.world
    crew = scheduling.crew = ThreadCrew(scheduling.serving, working, world, size=size)
    crew.grace = length
    heard = Signals(scheduling, crew, alarms)
    bells: _Bells | None = None
    hearing: Hearing | None = None
    try:
        if signals:
            heard.listen()
        if alarms is not None:
            bells = _Bells(scheduling, alarms)
        hearing = Hearing(scheduling, crew, None if bells is None else bells.bell)
        with heard.keep_error():
            finish(serve(Doors(world, working.ledger), scheduling.office, crew))
    finally:
        if hearing is not None:
            hearing.close()
        try:
            with heard.keep_error():
                _end(crew, bells)
        finally:
            heard.close(busy=crew.busy or (bells is not None and bells.busy))
            scheduling.crew = None
            crew.gone.set()


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

    def __init__(self, scheduling: Scheduling, alarms: Alarming) -> None:
        self._scheduling, self._alarms = scheduling, alarms
        self.bell = Bell(scheduling.world)
        self._thread = threading.Thread(target=self._ring, name="fencepost-alarms", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Fire no more."""
        self.bell.stop()

    def join(self) -> None:
        """Wait for what is being fired, for as long as there is time."""
        crew = self._scheduling.crew
        left = _LEAST if crew is None or crew.recall_at is None else crew.left()
        self._thread.join(max(0.0, left))

    @property
    def busy(self) -> bool:
        """Whether something is still being fired."""
        return self._thread.is_alive()

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
