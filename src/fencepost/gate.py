"""A gate is a lease in another store that an attempt has beside the one in its ledger.

The ledger decides who runs and who may record an end, under its own tokens; so what is recorded
is as well guarded as without a gate. The gate keeps out whoever knows the lock only there: other
programs, other ledgers. Who loses it has lost the run.
"""

from __future__ import annotations

from contextlib import suppress

from fencepost.errors import FencepostError, GiveUp, LeaseHeld, OutcomeUnknown, StoreUnavailable
from fencepost.flows.attempt import NothingToDo
from fencepost.holding import Wanted
from fencepost.model.lease import Phase
from fencepost.model.name import permits
from fencepost.model.policy import Overlap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.flows.course import Course
    from fencepost.holding import Holding
    from fencepost.lease import Lease
    from fencepost.world.api import World

# How long to wait in one go before looking whether the run is to end.
_GLANCE = 1.0
# For how many leases' time a store that is away is asked again, before that is the error it is.
_OUTAGE = 2.0


class Gate:
    """The leases elsewhere of one ``Fencepost`` or ``AsyncFencepost``."""

    def __init__(self, holding: Holding, world: World) -> None:
        self._holding, self._world = holding, world

    @property
    def exclusive(self) -> bool:
        """Whether two never have one of these leases at once."""
        return self._holding.store.capabilities.exclusive

    async def enter(self, course: Course) -> Lease:
        """Get the lease that goes with an attempt, as patiently as its policy is.

        Where others have it, a run is skipped, waits, or fails, as if they had it in the ledger. A
        run that was begun before waits in any case: it may be its own dead attempt that has it.
        """
        began, deadline = self._world.clocks.boottime(), course.deadline
        course.deadline = None  # a timeout is about the body, which has not begun
        try:
            return await self._entered(course, began)
        finally:
            if deadline is not None:
                course.deadline = deadline + self._world.clocks.boottime() - began

    async def _entered(self, course: Course, began: float) -> Lease:
        policy, clocks, fresh = course.policy, self._world.clocks, course.run.starts == 1
        waits = not fresh or policy.overlap in (Overlap.RESCHEDULE, Overlap.REPLACE)
        wanted = self._wanted(course, wait=_GLANCE if waits else 0.0)
        while True:
            course.check()
            try:
                lease = await self._holding.acquire(wanted, owner=course)
            except LeaseHeld as held:
                late = policy.start_deadline is not None and (
                    clocks.boottime() - began >= policy.start_deadline
                )
                if fresh and policy.overlap is Overlap.FAIL:
                    raise GiveUp(str(held)) from held
                if fresh and (late or not waits):
                    raise NothingToDo("lock_held") from None
            except (OutcomeUnknown, StoreUnavailable):
                if clocks.boottime() - began >= _OUTAGE * policy.lease:
                    raise
                await self._world.sleep(min(_GLANCE, policy.lease / 10))
            else:
                self._bind(course, lease)
                return lease

    async def leave(self, course: Course, lease: Lease) -> None:
        """Give it back. Whether it was still ours does not matter any more: the ledger decides."""
        course.gate = None
        with suppress(FencepostError):  # what the body did is done; the lease ends by itself
            await self._holding.give_back(lease)

    def _wanted(self, course: Course, *, wait: float) -> Wanted:
        able, run, policy = self._holding.store.capabilities, course.run, course.policy
        ttl = min(max(policy.lease, able.shortest_ttl), able.longest_ttl)
        names: tuple[str, ...] = (run.lock,)
        if run.lease != run.lock:  # any permit will do: another ledger counts its own
            names = tuple(permits(run.lock, limit=policy.max_concurrent))
        return Wanted(run.lock, names, ttl, wait, None)

    def _bind(self, course: Course, lease: Lease) -> None:
        hold = lease.hold

        def lose() -> None:
            course.hold.lose(f"its lease elsewhere is lost: {hold.why_lost or 'it was given back'}")

        hold.on_loss += (lose,)
        hold.bound = True
        course.gate = hold
        course.hands_over = False  # whoever it were handed to would not have this lease
        if hold.phase(self._world.clocks.boottime()) is Phase.LOST:
            lose()  # it was lost before anybody could be told
