"""A gate is a lease in another store that an attempt has beside the one in its ledger.

The ledger decides who runs and who may record an end, under its own tokens; so what is recorded
is as well guarded as without a gate. The gate keeps out whoever knows the lock only there: other
programs, other ledgers. Who loses it has lost the run.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from fencepost.errors import FencepostError, GiveUp, LeaseHeld, OutcomeUnknown, StoreUnavailable
from fencepost.flows.attempt import NothingToDo
from fencepost.flows.course import ready
from fencepost.flows.divide import Division, divide
from fencepost.holding import Wanted
from fencepost.model.claim import is_patient
from fencepost.model.lease import Phase
from fencepost.model.name import permits
from fencepost.model.policy import Overlap
from fencepost.model.rules import rules_from

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.flows.course import Course
    from fencepost.holding import Holding
    from fencepost.lease import Lease
    from fencepost.model.lease import Grant
    from fencepost.stores.api import LeaseStore
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

    async def enter(self, course: Course, *, rules: str) -> Lease:
        """Get the lease that goes with an attempt, as patiently as its policy is.

        Where others have it, a run is skipped, waits, or fails, as if they had it in the ledger. A
        run that was begun before waits in any case: it may be its own dead attempt that has it.
        ``rules`` are those of the run's job, as the ledger keeps them.
        """
        began, deadline = self._world.clocks.boottime(), course.deadline
        course.deadline = None  # a timeout is about the body, which has not begun
        try:
            patient = is_patient(course.run.trigger, rules_from(rules))
            return await self._entered(course, began, patient=patient)
        finally:
            if deadline is not None:
                course.deadline = deadline + self._world.clocks.boottime() - began

    async def _entered(self, course: Course, began: float, *, patient: bool) -> Lease:
        policy, clocks, run = course.policy, self._world.clocks, course.run
        fresh, deadline = run.starts == 1, policy.start_deadline
        if patient and run.trigger != "schedule":
            deadline = None  # a slot that makes up for the past is late already
        waits = not fresh or patient or policy.overlap in (Overlap.RESCHEDULE, Overlap.REPLACE)
        wanted = self._wanted(course, wait=_GLANCE if waits else 0.0)
        while True:
            await ready(self._world, course)
            try:
                lease = await self._acquired(wanted, course)
            except LeaseHeld as held:
                late = deadline is not None and clocks.boottime() - began >= deadline
                if fresh and not patient and policy.overlap is Overlap.FAIL:
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

    async def _acquired(self, wanted: Wanted, course: Course) -> Lease:
        """Acquire the lease; for a permit, see that nobody has the lock itself, and keep it so."""
        lease = await self._holding.acquire(wanted, owner=course)
        if lease.name == wanted.name:
            return lease
        divided = False
        try:
            limit, nonce = len(wanted.names), self._world.nonce()
            await divide(self._holding.store, wanted.name, limit=limit, nonce=nonce)
            hold, division = lease.hold, Division(self._world, wanted.name, limit=limit)
            hold.beat = partial(_renewed, division, hold.name, hold.nonce, hold.token)
            divided = True
        finally:
            if not divided:
                with suppress(FencepostError):  # it ends by itself
                    await self._holding.give_back(lease)
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


async def _renewed(
    division: Division, name: str, nonce: str, token: int, store: LeaseStore, ttl: float
) -> Grant:
    """Renew a permit, and keep the lock divided."""
    grant = await store.renew(name, nonce=nonce, token=token, ttl=ttl)
    await division.keep(store)
    return grant
