"""To ring is to fire alarms as they come due, beside the scheduler, until told to stop."""

from __future__ import annotations

from fencepost.errors import FencepostError
from fencepost.model.event import JobEvent
from fencepost.model.named import Protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost.world.api import Signal

# Others may set an alarm at any time, so it is asked again every now and then.
_LOOK = 1.0
_LONGEST_PAUSE = 5.0


class Alarms(Protocol):
    """What there is to fire."""

    async def due_in(self) -> float | None:
        """Say in how many seconds to fire; None if nothing is armed."""

    async def fire(self, limit: int | None = None, budget: float | None = None) -> object:
        """Fire what is due."""


async def ring(alarms: Alarms, stop: Signal, *, emit: Callable[[JobEvent], None]) -> None:
    """Fire what is due, again and again. A ledger that is away is asked again, less and less."""
    pause, trouble = 0.0, 0.05
    while not await stop.wait(pause):
        try:
            due = await alarms.due_in()
            if due is not None and due <= 0:
                await alarms.fire()
                due = 0.0
            pause, trouble = _LOOK if due is None else min(due, _LOOK), 0.05
        except FencepostError as error:
            emit(JobEvent("unconfirmed", "", "", 0, (("error", str(error)),)))
            pause, trouble = trouble, min(trouble * 2, _LONGEST_PAUSE)
