"""What both faces share of jobs: the registry, the ledger, and how a trigger is seen through."""

from __future__ import annotations

import os
from functools import partial

from fencepost.bodies import in_a_thread, kept_result, on_a_loop, supervised
from fencepost.errors import FencepostError, Misuse
from fencepost.flows.acquire import Granted
from fencepost.flows.attempt import RELEASED, attempt, conclude
from fencepost.flows.course import Course, Doors
from fencepost.flows.keep import Hold
from fencepost.flows.release import release
from fencepost.flows.trigger import Crashed, Errand, trigger
from fencepost.holding import HOST, operator_here
from fencepost.importing import refuse_while_loading
from fencepost.isolated import carried_apart, refusal
from fencepost.jobs import Registry, run_key, window_of
from fencepost.lease import Lease
from fencepost.ledger.open import ledger_of
from fencepost.model.claim import Want
from fencepost.model.duration import seconds
from fencepost.model.event import JobEvent
from fencepost.model.lease import Holder
from fencepost.model.named import NamedTuple
from fencepost.model.slot import RunKey, parsed
from fencepost.model.tier import refuse_less, tier_of
from fencepost.running import AsyncRun, Run
from fencepost.version import VERSION
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime
    from typing import Any

    from fencepost.holding import Holding
    from fencepost.jobs import Job
    from fencepost.ledger.api import Ledger
    from fencepost.model.claim import Claimed
    from fencepost.model.duration import Duration
    from fencepost.model.outcome import Outcome
    from fencepost.model.run import RunRecord
    from fencepost.model.tier import Tier
    from fencepost.stores.api import LeaseStore
    from fencepost.world.api import World

_TOLD = frozenset({"succeeded", "already_done"})


class Working:
    """The jobs of one ``Fencepost`` or ``AsyncFencepost``."""

    def __init__(self, holding: Holding, world: World) -> None:
        self._holding, self._world = holding, world
        self.registry = Registry()
        self._ledger: Ledger | None = None
        self._kept: tuple[LeaseStore, Ledger] | None = None
        self._registered: set[str] = set()
        self._active = 0

    @property
    def ledger(self) -> Ledger:
        """The ledger beside the leases; opened when it is first needed."""
        if self._ledger is None:
            self._ledger = ledger_of(self._world, self._holding.store)
        return self._ledger

    def offered(self, job: str, *, needs: str | None, idempotent: bool) -> Tier:
        """Return what a job needs, or refuse it where the store cannot promise that."""
        exclusive = self._holding.store.capabilities.exclusive
        transactional = self.ledger.abilities.transactional
        offered = tier_of(exclusive=exclusive, transactional=transactional)
        return refuse_less(job, needs=needs, idempotent=idempotent, offered=offered)

    def refuse_isolation(self, job: Job, *, bound: bool = True) -> None:
        """Raise if a job is to have a process of its own and cannot."""
        refused = refusal(job, self._holding, self._world, bound=bound)
        if refused is not None:
            raise refused

    async def trigger(
        self,
        job: str | Callable[..., Any],
        slot: datetime | str | float | None,
        *,
        manual: bool,
        wait: Duration | None,
        trigger_name: str = "trigger",
    ) -> Outcome:
        """Claim the run that is meant, see it through, and say what became of it."""
        refuse_while_loading(job)
        found = self.registry.find(job)
        if found.isolation == "process":
            self.refuse_isolation(found)
        if manual and slot is not None:
            raise Misuse("a manual run is its own: give either slot=… or manual=True")
        patience = None if wait is None else seconds(wait, what="wait")
        await self._register(found)
        now = self._world.clocks.wall()
        doors = Doors(self._world, self.ledger)
        errand = self._errand(found, trigger_name, patience, new=manual)
        if not manual:
            return self._told(await trigger(doors, errand, run_key(found, slot, now=now)))
        number = 1
        while True:  # the first number that nobody else has taken
            key = RunKey(found.name, int(now), manual=number)
            outcome = await trigger(doors, errand, key)
            if outcome.reason != "taken":
                return self._told(outcome)
            number += 1

    async def cancel(self, run_id: str | RunKey, *, force: bool) -> RunRecord:
        """Cancel a run, or ask it to end."""
        key = parsed(run_id) if isinstance(run_id, str) else run_id
        return await self.ledger.cancel(key, force=force, operator=operator_here())

    def _told(self, outcome: Outcome) -> Outcome:
        """Emit what no attempt of ours has told: that there was none, and why."""
        if outcome.status in _TOLD or not (outcome.holder or outcome.reason == "poison"):
            return outcome
        job = outcome.run_id.partition("@")[0]
        if outcome.reason == "poison":
            self._holding.emit(JobEvent("quarantined", job, outcome.run_id))
        elif outcome.status == "skipped" and outcome.held_for is not None:
            more: tuple[tuple[str, object], ...] = (
                ("reason", outcome.reason),
                ("holder", outcome.holder),
                ("held_for", f"{outcome.held_for or 0:.1f}s"),
                ("lease_left", f"{outcome.lease_left or 0:.1f}s"),
            )
            self._holding.emit(JobEvent("skipped", job, outcome.run_id, outcome.token, more))
        return outcome

    async def close(self) -> None:
        """Close the ledger, after whatever was held has been released."""
        if self._ledger is not None:
            await self._ledger.close()

    async def _register(self, job: Job) -> None:
        if job.name not in self._registered:
            await self.ledger.register(job.name, job.definition())
            self._registered.add(job.name)

    def _errand(self, job: Job, trigger_name: str, patience: float | None, *, new: bool) -> Errand:
        def want(key: RunKey) -> Want:
            holder = Holder(self._world.nonce(), HOST, os.getpid(), VERSION)
            return Want(
                key,
                holder,
                job.policy,
                job.lock_of(key.slot),
                "manual" if key.manual else trigger_name,
                can_be_alone=self._active == 0 or self._can_be_apart(job),
                new=new,
            )

        carry_out = partial(self._carry_out, job)
        return Errand(want, carry_out, self._holding.keeper.abandon, patience)

    def _can_be_apart(self, job: Job) -> bool:
        return refusal(job, self._holding, self._world) is None

    async def _carry_out(
        self, job: Job, claimed: Claimed, sent: float
    ) -> RunRecord | Crashed | None:
        """Attempt what was claimed, with its lease kept meanwhile."""
        run, grant = claimed.run, claimed.grant
        assert run is not None, "what was claimed has a record"
        assert grant is not None, "and a lease"
        hold = Hold(
            Granted(run.lease, grant, sent),
            nonce=run.holder.nonce,
            ttl=job.policy.lease,
            max_hold=None,
            emit=self._holding.emit,
            chatty=False,
        )
        course = Course(self._world, run, hold, job.policy, chatty=self._holding.chatty)
        doors = Doors(self._world, self.ledger)
        first = doors.ledger.abilities.settles
        hold.beats_by(lambda store, ttl: course.beat(self._beside(store), ttl), first=first)
        keeper = self._holding.keeper
        ended: RunRecord | None = None
        pid, emit = os.getpid(), self._holding.emit
        course.foreign = lambda: os.getpid() != pid
        self._active += 1
        try:
            try:
                keeper.add(hold)
            except RuntimeError:  # there is no thread to be had: what nobody keeps is not begun
                ended = await conclude(doors, course, RELEASED, emit=emit)
                raise
            ended = await attempt(doors, course, partial(self._body, job), emit=emit)
        finally:
            self._active -= 1
            hold.released = True
            keeper.charges.remove(hold)
            hold.beat = None  # else the two would keep each other until a collection
            # Whatever became of it, nobody here needs the lease any more.
            if ended is None and course.crashed is None and not course.foreign():
                keeper.abandon(hold.name, hold.nonce)
        if ended is None and course.crashed is not None:
            return await self._crashed(course, course.crashed)
        return ended

    async def _crashed(self, course: Course, how: str) -> Crashed:
        """Give back the lease of an attempt that is surely over: the next may be claimed."""
        try:
            token = course.attempt.token
            await self.ledger.note(course.run.key, "crashed", token=token, detail=how)
        except FencepostError:
            pass  # only a note: the loss itself is counted by the next claim
        finally:
            abandon = self._holding.keeper.abandon
            await release(self._world, self._holding.store, course.hold, abandon=abandon)
        return Crashed(how)

    async def _body(self, job: Job, course: Course) -> str | None:
        """Carry the body out, in its own colour and wherever the job wants it."""
        # A run in trouble is kept away from its neighbours, if it can be.
        if job.isolation == "process" or (course.run.solitary and self._can_be_apart(job)):
            window = window_of(job, course.run.key.slot)
            result = await carried_apart(self._world, course, job, self._holding, window=window)
        else:
            result = kept_result(await self._carried(_Bound(job, course, self._holding)))
        course.returned.append(result)
        return result

    async def _carried(self, bound: _Bound) -> Any:
        blocking = isinstance(self._world, BlockingWorld)
        here = Doors(self._world, self.ledger)
        if bound.job.is_async:
            if blocking:
                return on_a_loop(bound.course, lambda: self._elsewhere(bound))
            return await supervised(bound.course, lambda: bound.call(AsyncRun, here))
        if blocking:
            return bound.call(Run, here)
        return await in_a_thread(bound.course, lambda: self._in_thread(bound))

    async def _elsewhere(self, bound: _Bound) -> Any:
        """Run an ``async def`` body for a blocking face: on a world and ledger of its own."""
        from fencepost.world.aio import AioWorld

        world = AioWorld(clocks=self._world.clocks)
        store = self._holding.open_store(world)
        try:
            return await bound.call(AsyncRun, Doors(world, ledger_of(world, store)))
        finally:
            await store.close()
            world.close()

    def _in_thread(self, bound: _Bound) -> Any:
        """Run a ``def`` body for an asyncio face: in a blocking world, on a ledger of its own."""
        world = BlockingWorld(clocks=self._world.clocks)
        store = self._holding.open_store(world)
        try:
            return bound.call(Run, Doors(world, ledger_of(world, store)))
        finally:
            finish(store.close())

    def _beside(self, store: LeaseStore) -> Ledger:
        """Return the ledger on the keeper's own store."""
        kept = self._kept
        if kept is None or kept[0] is not store:
            kept = self._kept = (store, ledger_of(self._holding.keeper.world, store))
        return kept[1]


class _Bound(NamedTuple):
    """A body, and what it is given."""

    job: Job
    course: Course
    holding: Holding

    def call(self, colour: type[Run | AsyncRun], doors: Doors) -> Any:
        """Call the body with its run."""
        job, course = self.job, self.course
        if not job.takes_run:
            return job.function()
        space, boottime = self.holding.namespace, doors.world.clocks.boottime
        lease = Lease(course.hold, namespace=space, boottime=boottime, drop=_keep_it)
        course.lent = lease  # kept until the attempt has ended, whatever user code does with it
        window = window_of(job, course.run.key.slot)
        return job.function(colour(doors, course, lease, window=window, scope=job.scope))


def _keep_it(_: Hold) -> None:
    """Leave a run's lease to the attempt: it outlives any object that user code drops."""
