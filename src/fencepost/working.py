"""What both faces share of jobs: the registry, the ledger, and how a trigger is seen through."""

from __future__ import annotations

import os
from functools import partial

from fencepost.bodies import called_here, in_a_thread, kept_result, on_a_loop, supervised
from fencepost.caller import Asked, CallersClock, trigger_next
from fencepost.errors import FencepostError, Misuse, RunCancelled
from fencepost.flows.acquire import Granted
from fencepost.flows.attempt import RELEASED, attempt, conclude, kept_words
from fencepost.flows.course import Course, Doors, read_formers
from fencepost.flows.handoff import (
    beat,
    complete,
    ended_afar,
    held_by,
    job_of,
    outcome_of,
    repeated,
    take,
)
from fencepost.flows.keep import LOOP_PATIENCE, Hold
from fencepost.flows.release import release
from fencepost.flows.trigger import Crashed, Errand, trigger
from fencepost.gate import Gate
from fencepost.holding import HOST, operator_here
from fencepost.importing import refuse_while_loading
from fencepost.isolated import carried_apart, refusal
from fencepost.jobs import Registry, carried_by, policy_from, window_in_force
from fencepost.ledger.api import Report
from fencepost.ledger.open import ledger_of
from fencepost.ledger.planning import Begun
from fencepost.lent import lend
from fencepost.model.claim import Claimed, Verdict, Want
from fencepost.model.definition import JobRecord
from fencepost.model.duration import seconds
from fencepost.model.event import JobEvent
from fencepost.model.handoff import time_left
from fencepost.model.kept import encoded
from fencepost.model.lease import Grant, Holder
from fencepost.model.named import NamedTuple
from fencepost.model.outcome import of_record
from fencepost.model.policy import Policy
from fencepost.model.run import State
from fencepost.model.slot import RunKey, parsed
from fencepost.model.tier import refuse_less, tier_of
from fencepost.running import AsyncRun, Run, whole
from fencepost.version import VERSION
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime
    from typing import Any

    from fencepost.flows.course import Ends
    from fencepost.flows.handoff import Held
    from fencepost.holding import Holding
    from fencepost.jobs import Job
    from fencepost.ledger.api import Ledger
    from fencepost.model.duration import Duration
    from fencepost.model.meant import Meant
    from fencepost.model.outcome import Outcome
    from fencepost.model.run import RunRecord
    from fencepost.model.tier import Tier
    from fencepost.stores.api import LeaseStore
    from fencepost.world.api import World

_TOLD = frozenset({"succeeded", "already_done"})


class Terms(NamedTuple):
    """How a scheduler has an attempt carried out: who records its end, and when to give it back.

    ``recall_at`` is when its time is up, ``stopped`` tells whether that was brought forward by a
    stop. What a stop finds not begun is given back as it is.
    """

    ends: Ends | None = None
    recall_at: float | None = None
    begun: Begun | None = None
    stopped: Callable[[], float | None] | None = None


ALONE = Terms()


class Working:
    """The jobs of one ``Fencepost`` or ``AsyncFencepost``."""

    def __init__(self, holding: Holding, world: World, *, elsewhere: Holding | None = None) -> None:
        self._holding, self._world = holding, world
        self._patience = float("inf") if isinstance(world, BlockingWorld) else LOOP_PATIENCE
        self._gate = None if elsewhere is None else Gate(elsewhere, world)
        self.registry = Registry()
        self._doors: Doors | None = None
        self._kept: tuple[LeaseStore, Ledger] | None = None
        self._registered: set[str] = set()
        self._active = 0
        self.clock = CallersClock(world.clocks, holding.emit, host=HOST)
        self._ending: Doors | None = None
        self._foreign: tuple[int, Callable[[], bool]] = (0, bool)
        self._lifeline = partial(_pulse_of, holding.store)
        # Bound once, and not for each of many runs.
        self._emit, self._chatty, self._beats_beside = holding.emit, holding.chatty, self._beside
        self.courses: dict[str, Course] = {}  # what runs here now, by nonce

    @property
    def doors(self) -> Doors:
        """What flows of this face go through; the ledger is opened when it is first needed."""
        if self._doors is None:
            self._doors = Doors(self._world, ledger_of(self._world, self._holding.store))
        return self._doors

    @property
    def ledger(self) -> Ledger:
        """The ledger beside the leases."""
        return self.doors.ledger

    @property
    def active(self) -> int:
        """How many bodies run right now."""
        return self._active

    def offered(self, job: str, *, needs: str | None, idempotent: bool) -> Tier:
        """Return what a job needs, or refuse it where the store cannot promise that."""
        gate = self._gate
        exclusive = self._holding.store.capabilities.exclusive and (gate is None or gate.exclusive)
        transactional = self.ledger.abilities.transactional
        offered = tier_of(exclusive=exclusive, transactional=transactional)
        return refuse_less(job, needs=needs, idempotent=idempotent, offered=offered)

    def refuse_isolation(self, job: Job, *, bound: bool = True) -> None:
        """Raise if a job is to have a process of its own and cannot."""
        if self._gate is not None:
            raise Misuse(
                f"job {job.name!r} cannot run in a process of its own beside leases elsewhere: the "
                "guards that end it in time know the ledger's lease only"
            )
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
        if found.name not in self._registered:
            await self.ledger.register(found.name, found.definition())
            self._registered.add(found.name)
        asked, wall = Asked(found, slot, manual), self._world.clocks.wall()
        meant = asked.meant(now=wall) or await asked.meant_there(self.ledger, self.clock)
        errand = self._errand(asked, trigger_name, patience)
        outcome = await trigger(self.doors, errand, meant)
        if outcome.reason == "taken":
            outcome = await trigger_next(self.doors, errand, outcome)
        return self._told(outcome)

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

    async def complete(
        self,
        run_id: str | RunKey,
        *,
        token: int,
        status: str,
        result: Any,
        error: str | None,
        retry: bool,
    ) -> Outcome:
        """Record how a run ended that was handed off."""
        words = None if error is None else kept_words(error)
        text = None if result is None else encoded(result, what="result")
        ending = ended_afar(status, result=text, error=words, retry=retry)
        doors, held = await self._held(run_id, token)
        run = await complete(doors, held, ending)
        if held.run.state is State.RUNNING:
            what = "completed" if run.state is State.SUCCEEDED else run.state.value
            more = () if run.error is None else (("error", run.error),)
            self._holding.emit(JobEvent(what, run.key.job, str(run.key), token, more))
        return outcome_of(run)

    async def beat(
        self, run_id: str | RunKey, *, token: int, done: int | None, total: int | None
    ) -> None:
        """Keep a run that was handed off; raise if it is to end."""
        doors, held = await self._held(run_id, token)
        if await beat(doors, held, Report(_count(done, "done"), _count(total, "total"))):
            raise RunCancelled(str(held.run.key))

    async def take_over(
        self, run_id: str | RunKey, body: Callable[..., Any], *, token: int
    ) -> Outcome:
        """Carry out here a run that was handed off, once, and say what became of it."""
        doors, held = await self._held(run_id, token)
        key = held.run.key
        known = await job_of(doors, key.job) or JobRecord(key.job)
        template = known.template or key.job
        job = carried_by(body, self.registry.get(template), held.run, held.policy)
        rerun, now = await repeated(doors, key), await self.clock.ask(doors.ledger)
        sent = await take(doors, held)
        claimed = Claimed(Verdict.GO, held.run, Grant(token, held.policy.lease))
        begun = Begun(claimed, template, known.payload, known.spec, known.effective_from, rerun)
        ended = await self.carry_out(job, claimed, sent, taken_at=now, terms=Terms(begun=begun))
        assert not isinstance(ended, Crashed), "only what is isolated can crash by itself"
        if ended is None:
            return of_record(held.run, fresh=True)._replace(status="lost", reason="lost")
        return outcome_of(ended)

    async def _held(self, run_id: str | RunKey, token: int) -> tuple[Doors, Held]:
        key = parsed(run_id) if isinstance(run_id, str) else run_id
        doors = Doors(self._world, self.ledger)
        policy = await self._policy_of(doors, key.job)
        return doors, await held_by(doors, key, token=token, policy=policy)

    async def _policy_of(self, doors: Doors, name: str) -> Policy:
        """Return the policies of a job: as it is declared here, or as the ledger knows it.

        A job that lives in the ledger has those of its template.
        """
        for _ in range(2):
            declared = self.registry.get(name)
            if declared is not None:
                return declared.policy
            known = await job_of(doors, name)
            if known is None:
                break
            if known.template in ("", name):
                return policy_from(known.definition)
            name = known.template
        return Policy()

    async def close(self) -> None:
        """Close the ledger, after whatever was held has been released."""
        if self._doors is not None:
            await self._doors.ledger.close()

    def _errand(self, asked: Asked, trigger_name: str, patience: float | None) -> Errand:
        job = asked.job

        def want(meant: Meant) -> Want:
            key, since, until = meant
            holder = Holder(self._world.nonce(), HOST, os.getpid(), VERSION)
            return Want(
                key,
                holder,
                job.policy,
                job.lock_of(key.slot),
                "manual" if key.manual else trigger_name,
                self._active == 0 or self.can_be_apart(job),
                asked.manual,
                since=since,
                until=until,
            )

        carry_out = partial(self.carry_out, job)
        abandon = self._holding.keeper.abandon
        return Errand(want, carry_out, abandon, patience, asked.meant_at, self.clock.compare)

    def can_be_apart(self, job: Job) -> bool:
        """Say whether a job can have a process of its own."""
        return self._gate is None and refusal(job, self._holding, self._world) is None

    async def carry_out(
        self,
        job: Job,
        claimed: Claimed,
        sent: float,
        *,
        taken_at: float | None = None,
        terms: Terms = ALONE,
    ) -> RunRecord | Crashed | None:
        """Attempt what was claimed, or taken over, with its lease kept meanwhile."""
        run, grant = claimed.run, claimed.grant
        assert run is not None, "what was claimed has a record"
        assert grant is not None, "and a lease"
        hold = Hold(
            Granted(run.lease, grant, sent),
            nonce=run.holder.nonce,
            # As long as it was granted for: who has little time left asks for a short one.
            ttl=job.policy.lease if grant.adopted else min(grant.ttl, job.policy.lease),
            max_hold=None,
            emit=self._emit,
            chatty=False,
        )
        hold.patience = self._patience  # until a body says from where it asks
        course = Course(self._world, run, hold, job.policy, chatty=self._chatty)
        if taken_at is not None:
            course.taken_over(time_left(run, job.policy, now=taken_at))
        if terms.recall_at is not None:
            course.recall_at = terms.recall_at
        if terms.begun is not None:
            course.payload, course.rerun = terms.begun.payload, terms.begun.rerun
        doors = self._doors_by(terms.ends)
        course.beside = self._beats_beside
        first, now = doors.ledger.abilities.settles, self._world.clocks.boottime()
        hold.beats_by(course.renewed, first=first, since=now)
        keeper, emit = self._holding.keeper, self._emit
        ended: RunRecord | None = None
        course.foreign, course.lifeline = self._foreign_here(), self._lifeline
        self._active += 1
        self.courses[hold.nonce] = course
        try:
            try:
                keeper.add(hold)
            except RuntimeError:  # there is no thread to be had: what nobody keeps is not begun
                ended = await conclude(doors, course, RELEASED, emit=emit)
                raise
            # Asked only now: a stop that comes from here on finds the course, and recalls it.
            if terms.stopped is not None and terms.stopped() is not None:
                ended = await conclude(doors, course, RELEASED, emit=emit)
            else:
                body = self._body if self._gate is None else self._gated
                ended = await attempt(doors, course, partial(body, job, terms.begun), emit=emit)
        finally:
            self._active -= 1
            self.courses.pop(hold.nonce, None)
            if course.handed_off:
                _leave(self._holding.store, hold.nonce)
            hold.released = True
            keeper.charges.remove(hold)
            if hold.lean is not None:
                hold.lean.end()
            hold.beat = None  # else the two would keep each other until a collection
            # Whatever became of it, nobody here needs the lease any more.
            if ended is None and course.crashed is None and not _is_elsewhere(course):
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

    def _doors_by(self, ends: Ends | None) -> Doors:
        """Return the doors of an attempt whose end that records; mostly it is one for all."""
        doors = self._ending
        if doors is None or doors.ends != ends:
            doors = self._ending = self.doors._replace(ends=ends)
        return doors

    def _foreign_here(self) -> Callable[[], bool]:
        """Return what says, in a forked child, that it is not in this process."""
        pid, known = os.getpid(), self._foreign
        if known[0] != pid:
            known = self._foreign = (pid, lambda: os.getpid() != pid)
        return known[1]

    async def _gated(self, job: Job, begun: Begun | None, course: Course) -> str | None:
        """Carry the body out while its lease elsewhere is held as well."""
        assert self._gate is not None, "asked for only where there is one"
        lease = await self._gate.enter(course, rules="" if begun is None else begun.rules)
        try:
            return await self._body(job, begun, course)
        finally:
            if not course.foreign():
                await self._gate.leave(course, lease)

    async def _body(self, job: Job, begun: Begun | None, course: Course) -> str | None:
        """Carry the body out, in its own colour and wherever the job wants it."""
        if course.run.starts > 1:
            await read_formers(self.doors, course)
        # A run in trouble is kept away from its neighbours, if it can be.
        if job.isolation == "process" or (course.run.solitary and self.can_be_apart(job)):
            window = window_in_force(job, course.run.key.slot, begun)
            result = await carried_apart(self._world, course, job, self._holding, window=window)
        else:
            returned = await self._carried(_Bound(job, begun, course, self._holding))
            if course.handed_off:
                return None  # whatever it returned: the result is for others to tell
            result = kept_result(returned)
        course.returned += (result,)
        return result

    async def _carried(self, bound: _Bound) -> Any:
        blocking = isinstance(self._world, BlockingWorld)
        if bound.job.is_async:
            if blocking:
                return called_here(lambda: on_a_loop(bound.course, lambda: self._elsewhere(bound)))
            return await supervised(bound.course, lambda: bound.call(AsyncRun, self.doors))
        if blocking:
            return called_here(lambda: bound.call(Run, self.doors))
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
    begun: Begun | None
    course: Course
    holding: Holding

    def call(self, colour: type[Run | AsyncRun], doors: Doors) -> Any:
        """Call the body with its run."""
        job, course = self.job, self.course
        if not job.takes_run:
            return job.function()
        space, boottime = self.holding.namespace, doors.world.clocks.boottime
        lease = lend(course, namespace=space, boottime=boottime)
        window = window_in_force(job, course.run.key.slot, self.begun)
        return job.function(colour(doors, course, lease, window=window, scope=job.scope))


def _count(value: int | None, what: str) -> int | None:
    return None if value is None else whole(value, what)


def _pulse_of(store: LeaseStore) -> int | None:
    """Return what vouches for this process, for children that keep a copy; None if nothing does."""
    pulse = getattr(getattr(store, "pulse", None), "fd", -1)
    return pulse if pulse >= 0 else None


def _is_elsewhere(course: Course) -> bool:
    """Say whether another process has the run by now, or this one is a fork's copy."""
    return course.handed_off or course.foreign()


def _leave(store: LeaseStore, nonce: str) -> None:
    """Vouch no more for a run that was handed off, perhaps by way of another connection."""
    pulse = getattr(store, "pulse", None)
    if pulse is not None:
        pulse.leases.discard(nonce)
