"""To be an instance on the running event loop: one task serves, others carry bodies out."""

from __future__ import annotations

import asyncio
import signal
import threading
from contextlib import suppress

from fencepost.errors import Misuse
from fencepost.flows.course import Doors
from fencepost.flows.ring import Bell, ring
from fencepost.flows.serve import serve
from fencepost.hearing import Hearing
from fencepost.scheduling import CLOSING, crew_here, grace_of, size_of
from fencepost.serving_aio import TaskCrew

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from fencepost.flows.ring import Alarms
    from fencepost.model.duration import Duration
    from fencepost.scheduling import Scheduling

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def run_here(
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
    crew = scheduling.crew = TaskCrew(scheduling.serving, working, world, size=size)
    crew.grace = length
    handled: dict[int, Any] = {}
    bell, hearing = Bell(world), None
    bells: asyncio.Task[None] | None = None
    try:
        if signals and threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                before = signal.getsignal(number)
                asyncio.get_running_loop().add_signal_handler(number, _stop, crew, handled)
                handled[number] = before
        if alarms is not None:
            flow = ring(alarms, bell, emit=scheduling.emit, look=scheduling.pace.look)
            bells = asyncio.create_task(flow)
        hearing = Hearing(scheduling, crew, bell)
        await serve(Doors(world, working.ledger), scheduling.office, crew)
    finally:
        bell.stop()
        if hearing is not None:
            hearing.close()
        try:
            await _ended(crew, bells)
        finally:
            scheduling.crew = None
            crew.gone.set()
            _restore(handled)


async def _ended(crew: TaskCrew, bells: asyncio.Task[None] | None) -> None:
    """Wait for what runs, and then for what is being fired; a second cancel cancels that too."""
    try:
        await crew.dismiss()
    except asyncio.CancelledError:
        if bells is not None:
            bells.cancel()
        raise
    finally:
        if bells is not None:
            await bells


def stop_here(scheduling: Scheduling, *, grace: Duration | None) -> None:
    """Ask the instance of this process to stop; without one there is nothing to do."""
    crew = crew_here(scheduling)
    if crew is not None:
        crew.stop(crew.grace if grace is None else grace_of(grace))


async def end_here(scheduling: Scheduling) -> None:
    """Stop the instance of a face that is closed, and wait a while for its end."""
    crew = crew_here(scheduling)
    if isinstance(crew, TaskCrew):
        crew.stop(0.0)
        if not crew.is_ours():  # a body that closes its own face would wait for itself
            with suppress(TimeoutError):
                await asyncio.wait_for(crew.gone.wait(), CLOSING)


def _stop(crew: TaskCrew, handled: dict[int, Any]) -> None:
    hurry = crew.stopping
    crew.stop(0.0 if hurry else crew.grace)
    if hurry:  # a third one is not ours: it ends a process whose bodies hear nothing
        _restore(handled)


def _restore(handled: dict[int, Any]) -> None:
    """Leave signals to those who handled them before."""
    loop = asyncio.get_running_loop()
    while handled:
        number, handler = handled.popitem()
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
