"""A worker triggers slots as they come, and sees through what it claims, as the real faces do."""

from __future__ import annotations

from fencepost.errors import OutcomeUnknown, StoreUnavailable
from fencepost.flows.acquire import Granted
from fencepost.flows.attempt import attempt
from fencepost.flows.course import Course, Doors
from fencepost.flows.keep import Charges, Hold
from fencepost.flows.trigger import Errand, trigger
from fencepost.model.claim import Want
from fencepost.model.event import LeaseEvent
from fencepost.model.every import Every
from fencepost.model.lease import Holder
from fencepost.model.meant import Meant, newest_slot
from fencepost.model.named import NamedTuple
from fencepost.testing.simulator.jobs import Body, Database, Interrupted, SimulatedJob

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost.ledger.api import Ledger
    from fencepost.model.claim import Claimed
    from fencepost.model.event import JobEvent
    from fencepost.model.run import RunRecord
    from fencepost.model.slot import RunKey
    from fencepost.testing.simulator.network import Network
    from fencepost.testing.simulator.servers import Recorder
    from fencepost.testing.simulator.world import SimulatedWorld

_WORTH_NOTING = frozenset({"lost", "reclaimed"})
_ENDED = frozenset({"succeeded", "already_done", "failed", "timed_out", "cancelled"})
# How often the last trigger of a slot is repeated before that is called no progress.
_MOST_TRIGGERS = 12
# When slots are due of which callers ask for the newest.
_HOURLY = Every("1h")


class Surroundings(NamedTuple):
    """What all workers of a cluster share."""

    network: Network
    database: Database
    recorder: Recorder
    slots: tuple[tuple[SimulatedJob, RunKey], ...]
    ttl: float
    moody: bool
    patience: float  # within which each slot's last trigger must have seen it through
    idle: Callable[[], None]  # called by each who has nothing left to do
    newest: int = 0  # the newest slot by the ledger's clock, if that is what triggers ask for


class Worker:
    """One process that triggers slots, over and over until the storm is over."""

    def __init__(
        self, world: SimulatedWorld, ledger: Ledger, surroundings: Surroundings, *, pid: int
    ) -> None:
        self.calm = False
        self.idle = False
        self.charges = Charges(world)
        self._world, self._ledger, self._shared = world, ledger, surroundings
        self._pid = pid
        self._triggers = 0
        self._ended: set[RunKey] = set()
        self._active = 0

    async def work(self) -> None:
        """Trigger slots, as long as there are faults."""
        dice, shared = self._world.dice, self._shared
        chosen = shared.slots[0]  # at first everybody triggers the same, as cron does everywhere
        while not self.calm:
            patience = None if dice() < 0.7 else dice() * shared.ttl
            await self._trigger(*chosen, patience=patience)
            await self._world.sleep(dice() * shared.ttl)
            # Mostly what may still be to be done; now and then what others say has ended.
            slots = [slot for slot in shared.slots if slot[1] not in self._ended]
            slots = slots if slots and dice() < 0.9 else list(shared.slots)
            chosen = slots[int(dice() * len(slots))]
        self.idle = True
        shared.idle()

    async def see_all_through(self) -> None:
        """Trigger each slot once more, all at once, until its run has ended."""
        await self._world.together(*(self._see_through(*slot) for slot in self._shared.slots))
        self.idle = True
        self._shared.idle()

    def emit(self, event: LeaseEvent | JobEvent) -> None:
        """Note what the flows say, where the servers cannot know it."""
        if event.what in _WORTH_NOTING and isinstance(event, LeaseEvent):
            self._shared.recorder.note(
                event.what,
                self._world.instance,
                event.name,
                token=event.token,
                detail=event.detail,
            )

    async def _see_through(self, job: SimulatedJob, key: RunKey) -> None:
        for _ in range(_MOST_TRIGGERS):
            await self._trigger(job, key, patience=self._shared.patience)
            run = await self._ledger.find(key)
            if run is not None and run.state.terminal:
                return
            await self._world.sleep(self._shared.ttl / 2)

    async def _trigger(self, job: SimulatedJob, key: RunKey, *, patience: float | None) -> None:
        """Trigger a slot, and note what the answer was."""
        self._triggers += 1
        which = f"{self._world.instance}/{self._triggers}"
        note, node = self._shared.recorder.note, self._world.instance
        note("triggered", node, holder=which, run=str(key))
        doors = Doors(self._world, self._ledger)
        errand = Errand(
            lambda meant: self._want(job, meant),
            lambda claimed, sent: self._carry_out(job, claimed, sent),
            self.charges.abandon,
            patience,
            lambda now: self._newest(job, now).key,
        )
        reason, run = "", str(key)
        try:
            outcome = await trigger(doors, errand, self._meant(job, key))
            answer, reason, run = outcome.status, outcome.reason, outcome.run_id
            if answer in _ENDED:
                self._ended.add(key)
        except (OutcomeUnknown, StoreUnavailable) as error:
            answer = type(error).__name__
        except Interrupted:
            answer = "interrupted"
        note("outcome", node, holder=which, detail=reason, run=run, state=answer)

    def _meant(self, job: SimulatedJob, key: RunKey) -> Meant:
        """Return the run that is meant: the one that is named, or the newest by our clock."""
        if key.slot != self._shared.newest or self.calm:
            return Meant(key)
        return self._newest(job, self._world.clocks.wall())

    def _newest(self, job: SimulatedJob, now: float) -> Meant:
        meant = newest_slot(job.name, _HOURLY, now=now)
        assert meant is not None, "there is one in every hour"
        return meant

    def _want(self, job: SimulatedJob, meant: Meant) -> Want:
        world = self._world
        holder = Holder(world.nonce(), world.clocks.name, self._pid)
        return Want(
            meant.key,
            holder,
            job.policy,
            job.lock,
            can_be_alone=self._active == 0,
            since=meant.since,
            until=meant.until,
        )

    async def _carry_out(
        self, job: SimulatedJob, claimed: Claimed, sent: float
    ) -> RunRecord | None:
        run, grant, shared = claimed.run, claimed.grant, self._shared
        assert run is not None, "what was claimed has a record"
        assert grant is not None, "and a lease"
        hold = Hold(
            Granted(run.lease, grant, sent),
            nonce=run.holder.nonce,
            ttl=job.policy.lease,
            max_hold=None,
            emit=self.emit,
            chatty=False,
        )
        course = Course(self._world, run, hold, job.policy)
        hold.beats_by(lambda _store, ttl: course.beat(self._ledger, ttl))
        doors = Doors(self._world, self._ledger)
        outside = (shared.network, shared.database, shared.recorder)
        moody = shared.moody and not self.calm
        body = Body(job, doors, self._world, outside, moody=moody)
        ended: RunRecord | None = None
        self._active += 1
        self.charges.add(hold)
        try:
            ended = await attempt(doors, course, body, emit=self.emit)
        finally:
            self._active -= 1
            hold.released = True
            self.charges.remove(hold)
            if ended is None:  # whatever became of it, nobody here needs the lease any more
                self.charges.abandon(hold.name, hold.nonce)
        return ended
