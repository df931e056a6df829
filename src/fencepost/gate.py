"""A gate is a lease in another store that an attempt has beside the one in its ledger.

The ledger decides who runs and who may record an end, under its own tokens; so what is recorded
is as well guarded as without a gate. The gate keeps out whoever knows the lock only there: other
programs, other ledgers. Who loses it has lost the run.
"""

from __future__ import annotations

from fencepost.errors import LeaseHeld, OutcomeUnknown, StoreUnavailable
from fencepost.flows.attempt import NothingToDo
from fencepost.holding import Wanted
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

        Where others have it, a run is skipped, waits, or fails, as if they had it in the ledger.
        """
        policy, clocks = course.policy, self._world.clocks
        able, began = self._holding.store.capabilities, clocks.boottime()
        ttl = min(max(policy.lease, able.shortest_ttl), able.longest_ttl)
        waits = policy.overlap in (Overlap.RESCHEDULE, Overlap.REPLACE)
        name = course.run.lease
        while True:
            course.check()
            wanted = Wanted(name, (name,), ttl, _GLANCE if waits else 0.0, None)
            passed = clocks.boottime() - began
            try:
                lease = await self._holding.acquire(wanted, owner=course)
            except LeaseHeld:
                if policy.overlap is Overlap.FAIL:
                    raise
                late = policy.start_deadline is not None and passed >= policy.start_deadline
                if late or not waits:
                    raise NothingToDo("lock_held") from None
            except (OutcomeUnknown, StoreUnavailable):
                if passed >= _OUTAGE * policy.lease:
                    raise
                await self._world.sleep(min(_GLANCE, policy.lease / 10))
            else:
                self._bind(course, lease)
                return lease

    async def leave(self, course: Course, lease: Lease) -> None:
        """Give it back. Whether it was still ours does not matter any more: the ledger decides."""
        course.gate = None
        await self._holding.give_back(lease)

    def _bind(self, course: Course, lease: Lease) -> None:
        hold = lease.hold

        def lose() -> None:
            course.hold.lose(f"its lease elsewhere is lost: {hold.why_lost}")

        hold.on_loss.append(lose)
        course.gate = hold
