"""A client acquires, acts while it can prove its lease, writes through the fence, and releases.

It goes through the production flows as ``Holding`` does, and like it refuses a token that falls.
"""

from __future__ import annotations

from typing import NamedTuple

from fencepost.errors import LeaseHeld, OutcomeUnknown, StoreUnavailable
from fencepost.flows.acquire import acquire
from fencepost.flows.keep import Charges, Hold
from fencepost.flows.release import release
from fencepost.model.lease import MARGIN, Holder, Phase
from fencepost.model.name import base

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost.model.event import LeaseEvent
    from fencepost.stores.api import LeaseStore
    from fencepost.testing.simulator.network import Network
    from fencepost.testing.simulator.scheduler import Task
    from fencepost.testing.simulator.servers import Recorder, Resource
    from fencepost.testing.simulator.world import SimulatedWorld

_WORTH_NOTING = frozenset({"lost", "reclaimed"})


class Cancelled(Exception):
    """Whoever asked for a lease does not care any more."""


class Surroundings(NamedTuple):
    """What all clients of a cluster share."""

    network: Network
    resource: Resource
    recorder: Recorder
    groups: tuple[tuple[str, ...], ...]
    ttl: float
    cancellations: float
    patience: float  # within which everybody must be served once the storm is over
    served: Callable[[], None]  # called by each who has been


class Client:
    """One process that competes for leases until the storm is over, and then for each once more."""

    def __init__(
        self, world: SimulatedWorld, store: LeaseStore, surroundings: Surroundings, *, pid: int
    ) -> None:
        self.calm = False
        self.served = False
        self.charges = Charges(world)
        self._world, self._store, self._shared = world, store, surroundings
        self._pid = pid
        self._asking = ""  # the nonce of the acquisition that is under way
        self._highest: dict[str, int] = {}

    async def work(self) -> None:
        """Compete, as long as there are faults; then be served."""
        dice, ttl = self._world.dice, self._shared.ttl
        while not self.calm:
            group = self._shared.groups[int(dice() * len(self._shared.groups))]
            hold = await self._take(group, wait=dice() * min(ttl, 2) / 2 if dice() < 0.15 else 0.0)
            if hold is not None:
                await self._use(hold, rounds=1 + int(dice() * 4))
            await self._world.sleep(dice() * ttl)
        for group in self._shared.groups:
            await self._be_served(group)
        self.served = True
        self._shared.served()

    def emit(self, event: LeaseEvent) -> None:
        """Note what the flows say, where the servers cannot know it."""
        if event.what in _WORTH_NOTING:
            self._shared.recorder.note(
                event.what,
                self._world.instance,
                event.name,
                token=event.token,
                detail=event.detail,
            )

    async def _take(self, group: tuple[str, ...], *, wait: float) -> Hold | None:
        world = self._world
        holder = Holder(world.nonce(), world.clocks.name, self._pid)
        self._asking = holder.nonce
        if world.dice() < self._shared.cancellations and not self.calm:
            delay = world.dice() * min(0.05, self._shared.ttl / 4)
            world.scheduler.later(delay, self._cancel, world.enter(), holder.nonce)
        try:
            granted = await acquire(
                world,
                self._store,
                group,
                holder=holder,
                ttl=self._shared.ttl,
                wait=wait,
                abandon=self.charges.abandon,
            )
        except (LeaseHeld, OutcomeUnknown, StoreUnavailable):
            return None
        except Cancelled:
            self._shared.recorder.note("cancelled", world.instance, holder=holder.nonce)
            return None
        finally:
            self._asking = ""
        max_hold = world.dice() * 3 * self._shared.ttl if world.dice() < 0.3 else None
        hold = Hold(
            granted, nonce=holder.nonce, ttl=self._shared.ttl, max_hold=max_hold, emit=self.emit
        )
        if hold.token <= self._highest.get(hold.name, 0):
            self.charges.abandon(hold.name, hold.nonce)
            return None
        self._highest[hold.name] = hold.token
        self.charges.add(hold)
        return hold

    def _cancel(self, task: Task, nonce: str) -> None:
        if self._asking == nonce:
            task.resume(task.ticket, Cancelled())

    async def _use(self, hold: Hold, *, rounds: int) -> None:
        world = self._world
        for _ in range(rounds):
            await world.sleep(self._nap(hold))
            if self.calm or not await self._act(hold):
                break
            if world.dice() < 0.5 and not await self._write(hold):
                break
        if hold.why_lost is not None and world.dice() < 0.3:
            await self._write(hold)  # a careless zombie: only the fence stands in its way
        self.charges.remove(hold)
        await release(world, self._store, hold, abandon=self.charges.abandon)

    def _nap(self, hold: Hold) -> float:
        """Return when to act next: some time, or at the last moment that can be proven now."""
        if self._world.dice() < 0.8:
            return self._world.dice() * self._shared.ttl * 0.5
        left = hold.trust.until - self._world.clocks.boottime()
        return max(0.0, left - self._world.dice() * MARGIN / 5)

    async def _act(self, hold: Hold) -> bool:
        """Ask "may I?" and do it at once: an effect that follows within the margin is proven."""
        world = self._world
        asked = world.clocks.boottime()
        if hold.phase(asked) is Phase.LOST:
            return False
        await world.sleep(world.dice() * MARGIN * 0.9)
        if world.clocks.boottime() - asked < MARGIN:  # else it was paused in between: ask again
            self._shared.recorder.note("acted", world.instance, hold.name, hold.nonce, hold.token)
        return True

    async def _write(self, hold: Hold) -> bool:
        """Write to the fenced resource; whether an unanswered write arrives, and when, is open."""
        resource = self._shared.resource
        try:
            admitted: bool = await self._shared.network.ask(
                self._world, resource, resource.write, self._world.instance, hold.name, hold.token
            )
        except OutcomeUnknown:
            return True
        return admitted

    async def _be_served(self, group: tuple[str, ...]) -> None:
        """Get the lease within the patience that everybody must be served in."""
        world, shared = self._world, self._shared
        until = world.scheduler.now + shared.patience
        shared.recorder.note("wanted", world.instance, base(group[0]), until=until)
        hold = await self._take(group, wait=shared.patience + 1)
        if hold is not None:
            await self._act(hold)
            await self._write(hold)
            self.charges.remove(hold)
            await release(world, self._store, hold, abandon=self.charges.abandon)
