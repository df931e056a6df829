"""A cluster goes through one storm of faults and then a calm; ``simulate`` returns its history.

During the storm nothing may be done twice. After it everybody must be served in time.
"""

from __future__ import annotations

from typing import NamedTuple

from fencepost.errors import FencepostError
from fencepost.flows.keep import keep
from fencepost.model.name import permits
from fencepost.testing.simulator import faults as knobs
from fencepost.testing.simulator.client import Client, Surroundings
from fencepost.testing.simulator.network import Network
from fencepost.testing.simulator.scheduler import Scheduler
from fencepost.testing.simulator.servers import (
    Recorder,
    RemoteStore,
    Resource,
    instance,
    memory_server,
    sqlite_server,
)
from fencepost.testing.simulator.world import Machine, ServerWorld, SimulatedWorld

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from fencepost.model.lease import Holder
    from fencepost.testing.history import Event
    from fencepost.testing.simulator.faults import Faults

_TTLS = (0.5, 1.0, 2.0, 6.0)
_STORM = 5  # ttls


class Parts(NamedTuple):
    """What a cluster is made of; tests put broken parts here to see that they are noticed."""

    server: Callable[[SimulatedWorld, Recorder, Callable[[Holder], bool]], Any] = memory_server
    store: Callable[[SimulatedWorld, Network, Any], Any] = RemoteStore
    keep: Callable[..., Any] = keep
    resource: Callable[[Recorder], Resource] = Resource


MEMORY = Parts()
SQLITE = Parts(server=sqlite_server)


def simulate(seed: int, *, parts: Parts = MEMORY, faults: Faults = knobs.ALL) -> list[Event]:
    """Run the cluster that ``seed`` describes; return what happened, the same for the same seed."""
    cluster = Cluster(seed, parts=parts, faults=faults)
    try:
        cluster.run()
    finally:
        cluster.close()
    return cluster.recorder.history


class Node:
    """A machine and the process that runs on it now."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.incarnation = 0
        self.world: SimulatedWorld
        self.client: Client


class Cluster:
    """A store, a resource, a few machines, and all that happens to them."""

    def __init__(self, seed: int, *, parts: Parts, faults: Faults) -> None:
        self._scheduler = scheduler = Scheduler(seed)
        self._dice = scheduler.random
        self._parts = parts
        self._faults = knobs.some_of(faults, scheduler.random)
        self._ttl = ttl = self._dice.choice(_TTLS)
        self._storm_ends = _STORM * ttl
        self.recorder = Recorder(scheduler)
        self._crashed: set[str] = set()
        self._store_machine = Machine(scheduler, name="store", wall=0.0)
        self._server = parts.server(
            ServerWorld(scheduler, self._store_machine, instance="store"),
            self.recorder,
            self._stopped,
        )
        self._nodes = [
            Node(self._machine(name)) for name in "abcd"[: 3 + int(self._dice.random() * 2)]
        ]
        groups = self._dice.choice(
            ((("nightly",),), (("nightly",), ("hourly",)), (tuple(permits("pool", limit=2)),))
        )
        self._shared = Surroundings(
            network=Network(scheduler, ttl=ttl),
            resource=parts.resource(self.recorder),
            recorder=self.recorder,
            groups=groups,
            ttl=ttl,
            cancellations=self._faults.cancellations,
            # A ghost may keep a lease for one more ttl; then everybody takes a turn.
            patience=1.2 * ttl + 1.0 * len(self._nodes),
            served=self._one_served,
        )

    def run(self) -> None:
        """Go through the storm and the calm."""
        scheduler, nodes = self._scheduler, self._nodes
        self._shared.network.storm(
            self._faults, latest=self._faults.lateness * self._ttl, ends=self._storm_ends
        )
        for node in nodes:
            self._start(node, None)
        self._draw_misfortunes()
        scheduler.at(self._storm_ends, self._calm_down, None, None)
        give_up = self._storm_ends + 3 * self._shared.patience * len(self._shared.groups)
        scheduler.at(give_up, scheduler.stop, None, None)
        try:
            scheduler.run()
        except FencepostError as error:  # no flow may end with one: clients expect what is normal
            self.recorder.note("failed", detail=f"{type(error).__name__}: {error}")
        self.recorder.note("ended")

    def close(self) -> None:
        """End all flows."""
        for node in self._nodes:
            node.world.crash()
        self._server.close()

    def _one_served(self) -> None:
        if all(node.client.served for node in self._nodes):
            self._scheduler.stop()

    # Misfortunes, each an action of the scheduler.

    def _draw_misfortunes(self) -> None:
        faults = self._faults
        for mean, happen in (
            (faults.crashes, self._crash),
            (faults.pauses, self._pause),
            (faults.outages, self._outage),
            (faults.restarts, self._restart_store),
            (faults.breaks, self._break),
            (faults.deletions, self._delete),
            (faults.wall_steps, self._step_wall),
        ):
            for _ in range(int(self._dice.random() * 2 * mean + 0.5)):
                at = self._dice.random() * self._storm_ends
                self._scheduler.at(at, happen, self._dice.choice(self._nodes), None)

    def _crash(self, node: Node, _: None) -> None:
        if node.world.crashed:
            return
        self.recorder.note("crashed", node.world.instance)
        self._crashed.add(node.world.instance)
        node.world.crash()
        self._scheduler.at(self._soon(2.0), self._start, node, None)

    def _start(self, node: Node, _: None) -> None:
        node.incarnation += 1
        name = f"{node.machine.name}.{node.incarnation}"
        node.world = SimulatedWorld(self._scheduler, node.machine, instance=name)
        store = self._parts.store(node.world, self._shared.network, self._server)
        node.client = client = Client(node.world, store, self._shared, pid=node.incarnation)
        client.calm = self._scheduler.now >= self._storm_ends
        node.world.spawn(self._parts.keep(node.world, store, client.charges, emit=client.emit))
        node.world.spawn(client.work())
        self.recorder.note("started", name)

    def _pause(self, node: Node, _: None) -> None:
        until = self._soon(self._faults.longest_pause)
        if not node.world.crashed:
            node.world.freeze(until - self._scheduler.now)
            self.recorder.note("paused", node.world.instance, until=node.world.frozen_until)

    def _outage(self, _node: Node, _: None) -> None:
        self._go_away("refusing", self._soon(self._faults.longest_outage))

    def _restart_store(self, _node: Node, _: None) -> None:
        self._go_away("silent", self._soon(self._faults.longest_outage / 4))

    def _go_away(self, how: str, until: float) -> None:
        if not self._server.away:
            self._server.away = how
            self.recorder.note("away", "store", until=until, detail=how)
            self._scheduler.at(until, self._come_back, None, None)

    def _come_back(self, _one: None, _two: None) -> None:
        self._server.away = ""
        self.recorder.note("back", "store")

    def _break(self, _node: Node, _: None) -> None:
        self._server.break_(self._any_name())

    def _delete(self, _node: Node, _: None) -> None:
        self._server.delete(self._any_name())

    def _step_wall(self, node: Node, _: None) -> None:
        machine = self._store_machine if self._dice.random() < 0.3 else node.machine
        seconds = self._hours()
        machine.step(seconds)
        self.recorder.note("stepped", machine.name, detail=f"wall clock set by {seconds:+.0f} s")

    def _calm_down(self, _one: None, _two: None) -> None:
        self._shared.network.calm()
        for node in self._nodes:
            node.client.calm = True
        self.recorder.note("calm")

    # Facts.

    def _machine(self, name: str) -> Machine:
        drift = self._faults.drift * (2 * self._dice.random() - 1)
        return Machine(
            self._scheduler,
            name=name,
            rate=1 + drift,
            booted=self._dice.random() * 1000,
            wall=self._hours(),
        )

    def _hours(self) -> float:
        return (2 * self._dice.random() - 1) * self._faults.skew_hours * 3600

    def _soon(self, ttls: float) -> float:
        """Return an instant within ``ttls``, but none after the storm."""
        now = self._scheduler.now
        return min(now + self._dice.random() * ttls * self._ttl, self._storm_ends)

    def _any_name(self) -> str:
        return self._dice.choice(self._dice.choice(self._shared.groups))

    def _stopped(self, holder: Holder) -> bool:
        return self._faults.deaths_noticed and instance(holder) in self._crashed
