"""To attend to an isolated body is to tell its guards until when it may run, until it is gone.

Its lease is kept elsewhere, as every run's is. Nothing is stopped from here: the guards see to it
at the deadlines that they were last told, even if nobody tells them anything any more.
"""

from __future__ import annotations

from fencepost.model.command import QUICK, must_stop, still_at
from fencepost.model.lease import Phase

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from fencepost.flows.course import Course
    from fencepost.world.api import World

    class Body(Protocol):
        """A body under guard; ``isolated.Apart`` is the real one."""

        asked_at: float | None
        until: tuple[float, float]
        grace: float  # from being asked to being killed

        @property
        def gone(self) -> bool:
            """Whether nothing of it is left."""

        @property
        def orphaned(self) -> bool:
            """Whether its guardian died before it."""

        @property
        def report(self) -> int:
            """What becomes readable when the guards have something to say."""

        def tell(self, until: tuple[float, float], *, still: float) -> None:
            """Tell the guards until when it may run, and the body what its run has to know."""

        def listen(self) -> None:
            """Take note of what the guards and the body have said."""

        def mop_up(self) -> None:
            """Take one step at ending what a dead guardian left behind."""


# News of the lease are passed on within this share of its ttl, long before the guards would act.
_SHARE = 12
_LONGEST_NAP = 0.5
_BRIEF_NAP = 0.05  # where proofs come one after the other
_GLANCE = 0.02


async def attend(world: World, course: Course, body: Body) -> None:
    """See a body through until nothing of it is left. Whoever was interrupted may go on with it."""
    hold, grace = course.hold, body.grace
    nap = min(hold.ttl / _SHARE, _LONGEST_NAP if course.lean is None else _BRIEF_NAP)
    while not body.gone:
        now = world.clocks.boottime()
        if (course.cancelled or course.overdue) and body.asked_at is None:
            body.asked_at = now
        until = must_stop(hold.trust, deadline=course.deadline, asked_at=body.asked_at, grace=grace)
        if hold.phase(now) is Phase.LOST:
            # Others may have it already, so there is no time to lose; and this is the last word.
            until = (min(body.until[0], now), min(body.until[1], now + QUICK))
        body.tell(until, still=still_at(course.lean))
        if body.orphaned:
            await world.call(body.mop_up)
            await world.sleep(_GLANCE)
        else:
            await world.readable(body.report, nap)
            body.listen()
