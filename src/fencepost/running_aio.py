"""To be an instance on the running event loop: one task serves, others carry bodies out."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from fencepost.errors import Misuse
from fencepost.flows.course import Doors
from fencepost.flows.ring import Bell, ring
from fencepost.flows.serve import serve
from fencepost.hearing import Hearing
from fencepost.scheduling import CLOSING, crew_here, grace_of, size_of
from fencepost.serving_aio import TaskCrew
from fencepost.stopping import Signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.alarming import Alarming
    from fencepost.model.duration import Duration
    from fencepost.scheduling import Scheduling


async def run_here(
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
    crew = scheduling.crew = TaskCrew(scheduling.serving, working, world, size=size)
    crew.grace = length
    heard = Signals(scheduling, crew, alarms)
    bell, hearing = Bell(world), None
    bells: asyncio.Task[None] | None = None
    try:
        if signals:
            heard.listen()  # and not the loop, which a body may block
        if alarms is not None:
            flow = ring(alarms, bell, emit=scheduling.emit, look=scheduling.pace.look)
            bells = asyncio.create_task(flow)
        hearing = Hearing(scheduling, crew, bell)
        with heard.keep_error():
            await serve(Doors(world, working.ledger), scheduling.office, crew)
    finally:
        bell.stop()
        if hearing is not None:
            hearing.close()
        try:
            with heard.keep_error():
                await _ended(crew, bells)
        finally:
            heard.close(busy=crew.busy or (bells is not None and not bells.done()))
            scheduling.crew = None
            crew.gone.set()


async def _ended(crew: TaskCrew, bells: asyncio.Task[None] | None) -> None:
    """Wait for what runs, and then for what is being fired; a second cancel cancels that too.

    A stop that was asked for waits for neither longer than there is time.
    """
    stopping = crew.stopping
    try:
        await crew.dismiss()
    except asyncio.CancelledError:
        if bells is not None:
            bells.cancel()
        raise
    finally:
        if bells is not None and stopping:
            await asyncio.wait([bells], timeout=max(0.0, crew.left()))
            if bells.done():
                await bells
        elif bells is not None:
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
