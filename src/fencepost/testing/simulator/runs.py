"""A cluster of workers goes through a storm with its runs; ``simulate_runs`` returns its history.

During the storm no promise about a run may be broken. After it, one more trigger of each slot must
see every run through to an end.
"""

from __future__ import annotations

from fencepost.errors import FencepostError, UnknownRun
from fencepost.flows.keep import keep
from fencepost.model.named import NamedTuple
from fencepost.model.policy import Overlap
from fencepost.model.slot import RunKey
from fencepost.testing.simulator import faults as knobs
from fencepost.testing.simulator.jobs import Database, SimulatedJob, draw_job
from fencepost.testing.simulator.ledgers import RemoteLedger, memory_ledger, sqlite_ledger
from fencepost.testing.simulator.network import Network
from fencepost.testing.simulator.storm import Node, Storm
from fencepost.testing.simulator.worker import Surroundings, Worker
from fencepost.testing.simulator.world import Machine, ServerWorld, SimulatedWorld

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from fencepost.model.lease import Holder
    from fencepost.testing.history import Event
    from fencepost.testing.simulator.faults import Faults
    from fencepost.testing.simulator.servers import Recorder

_TTLS = (0.5, 1.0, 2.0)
_FIRST_SLOT, _HOUR = 1_767_225_600, 3600
# Slots have whole seconds, and a ledger says 0 for "never": so its clock begins well after that.
_WALL = 10_000.0
# Where callers choose the slot, the ledger's clock is half an hour after one, and stays near that.
_NEWEST = 1000 * _HOUR
# By how much the ledger's wall clock may be set: a run may have to wait that much longer.
_LONGEST_STEP = 20.0
_CALM = 60.0


class RunParts(NamedTuple):
    """What a cluster is made of; tests put broken parts here to see that they are noticed."""

    server: Callable[[SimulatedWorld, Recorder, Callable[[Holder], bool]], Any] = memory_ledger
    ledger: Callable[[SimulatedWorld, Network, Any], Any] = RemoteLedger
    keep: Callable[..., Any] = keep


class Shape(NamedTuple):
    """How large a cluster is, how long its storm lasts in ttls, and how often people interfere."""

    names: str = "abc"
    length: float = 4.0
    jobs: int = 2
    slots: int = 4
    cancels: float = 1.5
    moody: bool = True
    newest: bool = False  # callers do not name a slot: they mean the newest one that is due


MEMORY = RunParts()
SQLITE = RunParts(server=sqlite_ledger)
STORM = Shape()
# One run, and everybody who could end it at once.
RACE = Shape(names="ab", length=1.5, jobs=1, slots=1, cancels=3.0, moody=False)
# Callers whose clocks are hours off ask for the newest slot.
CALLERS = Shape(cancels=0.5, moody=False, newest=True)
FAULTS = knobs.ALL._replace(crashes=1.5, pauses=4.0, breaks=0.3, cancellations=0.0, deletions=0.0)
RACE_FAULTS = FAULTS._replace(
    lost_requests=0.1, lost_replies=0.15, duplicates=0.15, delays=0.1, crashes=0.3, pauses=0.7
)


def simulate_runs(
    seed: int, *, parts: RunParts = MEMORY, faults: Faults = FAULTS, shape: Shape = STORM
) -> list[Event]:
    """Run the cluster that ``seed`` describes; return what happened, the same for the same seed."""
    cluster = RunCluster(seed, parts=parts, faults=faults, shape=shape)
    try:
        cluster.run()
    finally:
        cluster.close()
    return cluster.recorder.history


def simulate_race(seed: int, *, parts: RunParts = MEMORY) -> list[Event]:
    """Let the end of one run race with those who cancel it."""
    return simulate_runs(seed, parts=parts, faults=RACE_FAULTS, shape=RACE)


def simulate_callers(seed: int, *, parts: RunParts = MEMORY) -> list[Event]:
    """Let callers with wrong clocks trigger whatever is due."""
    return simulate_runs(seed, parts=parts, shape=CALLERS)


class RunCluster(Storm):
    """A ledger, a fenced database, a few workers and an operator, and all that happens to them."""

    def __init__(self, seed: int, *, parts: RunParts, faults: Faults, shape: Shape) -> None:
        super().__init__(seed, faults=faults, ttls=_TTLS, length=shape.length, names=shape.names)
        self._parts, self._shape = parts, shape
        wall = _NEWEST + _HOUR / 2 if shape.newest else _WALL
        self._store_machine = Machine(self._scheduler, name="store", wall=wall)
        for node in self._nodes:
            self._near_the_ledger(node)
        self._server = parts.server(
            ServerWorld(self._scheduler, self._store_machine, instance="store"),
            self.recorder,
            self._stopped,
        )
        self._shared = Surroundings(
            network=Network(self._scheduler, ttl=self._ttl),
            database=Database(self.recorder),
            recorder=self.recorder,
            slots=self._draw_slots(),
            ttl=self._ttl,
            moody=shape.moody,
            patience=_CALM,
            idle=self._one_idle,
            newest=_NEWEST if shape.newest else 0,
        )
        # Operators sit at a machine of their own, which nothing happens to.
        self._desk = SimulatedWorld(self._scheduler, self._machine("desk"), instance="operator")

    def run(self) -> None:
        """Go through the storm and the calm."""
        scheduler, faults, network = self._scheduler, self._faults, self._shared.network
        for _, key in self._shared.slots:
            self.recorder.note("due", run=str(key))
        network.storm(faults, latest=faults.lateness * self._ttl, ends=self._storm_ends)
        for node in self._nodes:
            self._start(node, None)
        self._draw(
            (
                (faults.crashes, self._crash),
                (faults.pauses, self._pause),
                (faults.outages, self._outage),
                (faults.restarts, self._restart_store),
                (faults.breaks, self._break),
                (faults.wall_steps, self._step_wall),
                (self._shape.cancels, self._interfere),
            )
        )
        scheduler.at(self._storm_ends, self._calm_down, None, None)
        give_up = self._storm_ends + 5 * _CALM
        scheduler.at(give_up, scheduler.stop, None, None)
        try:
            scheduler.run()
        except FencepostError as error:  # no flow may end with one: workers expect what is normal
            self.recorder.note("failed", detail=f"{type(error).__name__}: {error}")
        self._server.tell_all()
        self.recorder.note("ended")

    def close(self) -> None:
        """End all flows."""
        self._desk.crash()
        for node in self._nodes:
            node.world.crash()
        self._server.close()

    def _draw_slots(self) -> tuple[tuple[SimulatedJob, RunKey], ...]:
        slots: list[tuple[SimulatedJob, RunKey]] = []
        shared = self._dice.random() < 0.3
        for number in range(1 + int(self._dice.random() * self._shape.jobs)):
            name = f"job{number}"
            job = draw_job(self._dice, name, ttl=self._ttl)
            if shared and job.policy.overlap is not Overlap.ALLOW:
                job = job._replace(lock="lock")
            self.recorder.note("declared", name=name, detail=job.described())
            hours = range(1 + int(self._dice.random() * self._shape.slots))
            slots += [(job, RunKey(name, self._slot(hour))) for hour in hours]
        return tuple(slots)

    def _slot(self, hour: int) -> int:
        return _NEWEST - hour * _HOUR if self._shape.newest else _FIRST_SLOT + hour * _HOUR

    def _near_the_ledger(self, node: Node) -> None:
        """Have the clock of a machine be as wrong as was drawn, counted from the ledger's."""
        if self._shape.newest:
            node.machine.step(_NEWEST + _HOUR / 2)

    def _one_idle(self) -> None:
        if all(node.client.idle for node in self._nodes):
            self._scheduler.stop()

    def _start(self, node: Node, _: None) -> None:
        worker = self._worker(node)
        worker.calm = self._scheduler.now >= self._storm_ends
        node.world.spawn(worker.work())

    def _worker(self, node: Node) -> Worker:
        world = self._new_process(node)
        ledger = self._parts.ledger(world, self._shared.network, self._server)
        node.client = worker = Worker(world, ledger, self._shared, pid=node.incarnation)
        world.spawn(self._parts.keep(world, ledger.leases, worker.charges, emit=worker.emit))
        self.recorder.note("started", world.instance)
        return worker

    def _break(self, _node: Node, _: None) -> None:
        job, _key = self._dice.choice(self._shared.slots)
        beside = job.policy.overlap is Overlap.ALLOW
        self._server.break_(f"{job.lock}#1" if beside else job.lock)

    def _step_wall(self, node: Node, _: None) -> None:
        if self._dice.random() < 0.3:
            step = (2 * self._dice.random() - 1) * _LONGEST_STEP
            self._step(self._store_machine, step)
        else:
            self._step(node.machine, self._hours())

    def _interfere(self, _node: Node, _: None) -> None:
        key = self._dice.choice(self._shared.slots)[1]
        self._desk.spawn(self._cancel(key, force=self._dice.random() < 0.4))

    async def _cancel(self, key: RunKey, *, force: bool) -> None:
        """Be the operator who cancels a run, and asks again if no answer comes."""
        ledger = RemoteLedger(self._desk, self._shared.network, self._server)
        for _ in range(3):
            try:
                await ledger.cancel(key, force=force, operator="operator")
            except UnknownRun:
                return
            except FencepostError:
                await self._desk.sleep(0.05)
            else:
                return

    def _calm_down(self, _one: None, _two: None) -> None:
        self._shared.network.calm()
        for node in self._nodes:
            node.client.calm = True
        self.recorder.note("calm")
        last = Node(self._machine("z"))
        self._near_the_ledger(last)
        self._nodes.append(last)
        worker = self._worker(last)
        worker.calm = True
        last.world.spawn(worker.see_all_through())
