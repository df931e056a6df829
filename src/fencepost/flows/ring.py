"""To ring is to fire alarms as they come due, beside the scheduler, until told to stop."""

from __future__ import annotations

from fencepost.errors import FencepostError
from fencepost.ledger.planning import LOOK
from fencepost.model.event import JobEvent
from fencepost.model.named import NamedTuple, Protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost.world.api import World

_LONGEST_PAUSE = 5.0
# How soon after it was struck to look once more: who sets many alarms does not strike for each.
ECHO = 0.1


class Alarms(Protocol):
    """What there is to fire."""

    async def due_in(self) -> float | None:
        """Say in how many seconds to fire; None if nothing is armed, or nothing can be begun."""

    async def fire(self, *, beside: Beside) -> object:
        """Fire what is due; and have it looked, beside that, at what comes due meanwhile."""


class Bell:
    """What wakes the one who rings, from any thread: an alarm that was set, or the end."""

    def __init__(self, world: World) -> None:
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
    """Fire what is due, again and again. A ledger that is away is asked again, less and less.

    Others may set an alarm at any time, so it is asked every ``look`` seconds if nothing is heard.
    """
    await Beside(alarms, bell, emit, look).watch()


class Beside(NamedTuple):
    """Who looks for what comes due, also while handlers run: of several, only the last one rests.

    Each looks for as long as those handlers run that it stands beside, and then the one before it
    goes on.
    """

    alarms: Alarms
    bell: Bell
    emit: Callable[[JobEvent], None]
    look: float

    async def watch(self, needed: Callable[[], bool] | None = None) -> None:
        """Look until it is not needed any more, or the bell is stopped."""
        bell, alarms = self.bell, self.alarms
        # Most handlers are over before it is worth a look.
        pause, trouble = 0.0 if needed is None else min(ECHO, self.look), 0.05
        while True:
            struck = await bell.rest(pause)
            if bell.stopped or not (needed is None or needed()):
                return
            try:
                due = await alarms.due_in()
                if due is not None and due <= 0:
                    await alarms.fire(beside=self)
                    due = 0.0
                pause, trouble = self.look if due is None else min(due, self.look), 0.05
            except FencepostError as error:
                self.emit(JobEvent("unconfirmed", "", "", 0, (("error", str(error)),)))
                pause, trouble = trouble, min(trouble * 2, _LONGEST_PAUSE)
            if struck:
                pause = min(pause, ECHO)
