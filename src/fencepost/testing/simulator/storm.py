"""A storm is what happens to machines and to their store, whatever they are there for.

Each misfortune is an action of the scheduler, drawn before the storm begins. None outlasts it.
"""

from __future__ import annotations

from fencepost.testing.simulator import faults as knobs
from fencepost.testing.simulator.scheduler import Scheduler
from fencepost.testing.simulator.servers import Recorder, instance
from fencepost.testing.simulator.world import Machine, SimulatedWorld

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from fencepost.model.lease import Holder
    from fencepost.testing.simulator.faults import Faults


class Node:
    """A machine and the process that runs on it now."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.incarnation = 0
        self.world: SimulatedWorld
        self.client: Any


class Storm:
    """A few machines, a store, and all that happens to them. Subclasses say what they do."""

    _server: Any

    def __init__(
        self, seed: int, *, faults: Faults, ttls: Sequence[float], length: float, names: str
    ) -> None:
        self._scheduler = scheduler = Scheduler(seed)
        self._dice = scheduler.random
        self._faults = knobs.some_of(faults, scheduler.random)
        self._ttl = ttl = self._dice.choice(ttls)
        self._storm_ends = length * ttl
        self.recorder = Recorder(scheduler)
        self._crashed: set[str] = set()
        self._nodes = [
            Node(self._machine(name))
            for name in names[: len(names) - 1 + int(self._dice.random() * 2)]
        ]

    def _start(self, node: Node, _: None) -> None:
        """Start a process on a machine."""
        raise NotImplementedError

    def _draw(self, misfortunes: Sequence[tuple[float, Callable[[Node, None], None]]]) -> None:
        """Decide when each of these will happen, and to whom."""
        for mean, happen in misfortunes:
            for _ in range(int(self._dice.random() * 2 * mean + 0.5)):
                at = self._dice.random() * self._storm_ends
                self._scheduler.at(at, happen, self._dice.choice(self._nodes), None)

    def _new_process(self, node: Node) -> SimulatedWorld:
        node.incarnation += 1
        name = f"{node.machine.name}.{node.incarnation}"
        node.world = SimulatedWorld(self._scheduler, node.machine, instance=name)
        return node.world

    # Misfortunes.

    def _crash(self, node: Node, _: None) -> None:
        if node.world.crashed:
            return
        self.recorder.note("crashed", node.world.instance)
        self._crashed.add(node.world.instance)
        node.world.crash()
        self._scheduler.at(self._soon(2.0), self._start, node, None)

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

    def _step(self, machine: Machine, seconds: float) -> None:
        machine.step(seconds)
        self.recorder.note("stepped", machine.name, detail=f"wall clock set by {seconds:+.0f} s")

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

    def _stopped(self, holder: Holder) -> bool:
        return self._faults.deaths_noticed and instance(holder) in self._crashed
