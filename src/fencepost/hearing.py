"""What an instance hears of those who make work for it, and whom here that wakes."""

from __future__ import annotations

from fencepost.ledger.planning import ALARM, ANYTHING, DUE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.flows.ring import Bell
    from fencepost.ledger.planning import Ear
    from fencepost.scheduling import Scheduling
    from fencepost.serving import ThreadCrew
    from fencepost.serving_aio import TaskCrew


class Hearing:
    """Wakes the one who serves, the one who rings, or the keeper of an attempt."""

    def __init__(
        self, scheduling: Scheduling, crew: ThreadCrew | TaskCrew, bell: Bell | None
    ) -> None:
        self._scheduling, self._crew, self._bell = scheduling, crew, bell
        self._ear: Ear | None = scheduling.planner.listen(self._heard)

    def close(self) -> None:
        """Hear no more."""
        if self._ear is not None:
            self._ear.close()

    def _heard(self, word: str) -> None:
        if word in (DUE, ANYTHING):
            self._crew.wake()
        if self._bell is not None and word in (ALARM, ANYTHING):
            self._bell.strike()
        self._scheduling.hurry(word)
