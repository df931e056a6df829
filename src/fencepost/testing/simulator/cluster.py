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
from fencepost.testing.simulator.servers import (
    Recorder,
    RemoteStore,
    Resource,
    memory_server,
    sqlite_server,
)
from fencepost.testing.simulator.storm import Node, Storm
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


class Cluster(Storm):
    """A store, a resource, a few machines that compete for leases, and all that happens to them."""

    def __init__(self, seed: int, *, parts: Parts, faults: Faults) -> None:
        super().__init__(seed, faults=faults, ttls=_TTLS, length=_STORM, names="abcd")
        self._parts = parts
        self._store_machine = Machine(self._scheduler, name="store", wall=0.0)
        self._server = parts.server(
            ServerWorld(self._scheduler, self._store_machine, instance="store"),
            self.recorder,
            self._stopped,
        )
        groups = self._dice.choice(
            ((("nightly",),), (("nightly",), ("hourly",)), (tuple(permits("pool", limit=2)),))
        )
        self._shared = Surroundings(
            network=Network(self._scheduler, ttl=self._ttl),
            resource=parts.resource(self.recorder),
            recorder=self.recorder,
            groups=groups,
            ttl=self._ttl,
            cancellations=self._faults.cancellations,
            # A ghost may keep a lease for one more ttl; then everybody takes a turn.
            patience=1.2 * self._ttl + 1.0 * len(self._nodes),
            served=self._one_served,
        )

    def run(self) -> None:
        """Go through the storm and the calm."""
        scheduler, faults = self._scheduler, self._faults
        self._shared.network.storm(
            faults, latest=faults.lateness * self._ttl, ends=self._storm_ends
        )
        for node in self._nodes:
            self._start(node, None)
        self._draw(
            (
                (faults.crashes, self._crash),
                (faults.pauses, self._pause),
                (faults.outages, self._outage),
                (faults.restarts, self._restart_store),
                (faults.breaks, self._break),
                (faults.deletions, self._delete),
                (faults.wall_steps, self._step_wall),
            )
        )
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

    def _start(self, node: Node, _: None) -> None:
        world = self._new_process(node)
        store = self._parts.store(world, self._shared.network, self._server)
        node.client = client = Client(world, store, self._shared, pid=node.incarnation)
        client.calm = self._scheduler.now >= self._storm_ends
        world.spawn(self._parts.keep(world, store, client.charges, emit=client.emit))
        world.spawn(client.work())
        self.recorder.note("started", world.instance)

    def _break(self, _node: Node, _: None) -> None:
        self._server.break_(self._any_name())

    def _delete(self, _node: Node, _: None) -> None:
        self._server.delete(self._any_name())

    def _step_wall(self, node: Node, _: None) -> None:
        machine = self._store_machine if self._dice.random() < 0.3 else node.machine
        self._step(machine, self._hours())

    def _calm_down(self, _one: None, _two: None) -> None:
        self._shared.network.calm()
        for node in self._nodes:
            node.client.calm = True
        self.recorder.note("calm")

    def _any_name(self) -> str:
        return self._dice.choice(self._dice.choice(self._shared.groups))
