"""To ring is to fire alarms as they come due, beside the scheduler, until told to stop.

One flow claims, no more than there are lanes free. Each lane fires one alarm, and wakes that flow
at its end.
"""

from __future__ import annotations

from fencepost.errors import FencepostError
from fencepost.ledger.planning import LOOK
from fencepost.model.event import JobEvent
from fencepost.model.named import Protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost.flows.firing import Shift
    from fencepost.world.api import Lanes, World

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0
# How soon after it was struck to look once more: who sets many alarms does not strike for each.
ECHO = 0.1


class Alarms(Protocol):
    """What there is to fire."""

    def shift(self, lanes: Lanes, nudge: Callable[[], None]) -> Shift | None:
        """Return what fires in these lanes, and nudges at each end; None if there are no kinds."""


class Bell:
    """What wakes the one who rings, from any thread: an alarm that was set, or the end."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._signal = world.signal()
        self._struck = False
        self.stopped = False

    def strike(self) -> None:
        """Have it looked at what is due: somebody has set an alarm."""
        self._struck = True
        self._signal.set()

    def nudge(self) -> None:
        """Have whoever rests look up: something has ended."""
        self._signal.set()

    def stop(self) -> None:
        """Fire no more."""
        self.stopped = True
        self._signal.set()

    async def rest(self, seconds: float) -> bool:
        """Wait until it is struck or stopped, at most so long; say whether it was struck."""
        await self._signal.wait(seconds)
        # What is said from here on is heard at the next rest, and what was said before has
        # happened: whoever looks now sees it.
        self._signal.clear()
        struck, self._struck = self._struck, False
        return struck


async def ring(
    alarms: Alarms, bell: Bell, *, emit: Callable[[JobEvent], None], look: float = LOOK
) -> None:
    """Fire what is due, again and again; once the bell is stopped, wait for what is under way.

    A ledger that is away is asked again, less and less, and so is a machine that has no thread for
    a handler. Others may set an alarm at any time, so it is asked every ``look`` seconds if nothing
    is heard.
    """
    async with bell.world.lanes("fencepost-lane") as lanes:
        shift: Shift | None = None
        pause, trouble = 0.0, _FIRST_PAUSE
        while True:
            struck = await bell.rest(pause)
            if bell.stopped:
                return
            try:
                shift = shift or alarms.shift(lanes, bell.nudge)
                due = None if shift is None else await shift.go_on()
                pause, trouble = look if due is None else min(due, look), _FIRST_PAUSE
            except FencepostError as error:
                emit(JobEvent("unconfirmed", "", "", 0, (("error", str(error)),)))
                pause, trouble = trouble, min(trouble * 2, _LONGEST_PAUSE)
            if struck:
                pause = min(pause, ECHO)
