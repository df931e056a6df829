"""Instances serve schedules through a storm, while their program is deployed and rolled back.

During the storm no slot may run twice, early, or under a definition that it does not belong to.
After it everything that was due must be settled, and the newest program must be in force.
"""

from __future__ import annotations

from fencepost.errors import FencepostError
from fencepost.flows.course import Doors
from fencepost.flows.serve import Office, serve
from fencepost.ledger.planning import Lane
from fencepost.model.every import EveryAfter
from fencepost.model.named import NamedTuple
from fencepost.testing.simulator import faults as knobs
from fencepost.testing.simulator.crew import SimulatedCrew
from fencepost.testing.simulator.network import Network
from fencepost.testing.simulator.planners import ServedLedger, memory_planner, sqlite_planner
from fencepost.testing.simulator.programs import draw_programs
from fencepost.testing.simulator.storm import Node, Storm
from fencepost.testing.simulator.world import Machine, ServerWorld, SimulatedWorld

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from fencepost.model.definition import JobRecord
    from fencepost.model.event import JobEvent
    from fencepost.model.lease import Holder
    from fencepost.testing.history import Event
    from fencepost.testing.simulator.faults import Faults
    from fencepost.testing.simulator.planners import PlannerServer
    from fencepost.testing.simulator.programs import Program
    from fencepost.testing.simulator.servers import Recorder

_TTLS = (10.0, 15.0)
_STORM = 10  # ttls
# What the ledger's clock shows when a storm begins: a ledger says 0 for "never".
_WALL = 1_000_000.0
# How soon after the storm everything must be settled: retries, a lost lease, a cohort that is gone.
_PATIENCE = 400.0
_LOOK = 5.0
_KILLED_AFTER = 20.0
# How long instances like to rest: in the storm, and after it.
_PACES, _CALM_PACE = (4.0, 12.0, 20.0), 6.0


class ServingParts(NamedTuple):
    """What a cluster is made of; tests put broken parts here to see that they are noticed."""

    server: Callable[[SimulatedWorld, Recorder, Callable[[Holder], bool]], Any] = memory_planner
    ledger: Callable[[SimulatedWorld, Network, Any], Any] = ServedLedger
    serve: Callable[..., Any] = serve


# How the end of a process is told apart that was asked to stop, and did.
STOPPED = "it stopped"
MEMORY = ServingParts()
SQLITE = ServingParts(server=sqlite_planner)
FAULTS = knobs.Faults(
    lost_requests=0.03,
    lost_replies=0.03,
    duplicates=0.03,
    delays=0.03,
    lateness=1.0,
    crashes=2.0,
    pauses=2.0,
    longest_pause=3.0,
    deaths_noticed=True,
    outages=0.7,
    restarts=0.5,
    longest_outage=10.0,
    wall_steps=2.0,
    skew_hours=1 / 6,
    drift=0.009,
)


def simulate_clusters(
    seed: int, *, parts: ServingParts = MEMORY, faults: Faults = FAULTS
) -> list[Event]:
    """Run the cluster that ``seed`` describes; return what happened, the same for the same seed."""
    cluster = ServingCluster(seed, parts=parts, faults=faults)
    try:
        cluster.run()
    finally:
        cluster.close()
    return cluster.recorder.history


class ServingWorld(SimulatedWorld):
    """A process whose nonces never begin with one another."""

    def nonce(self) -> str:
        """Return text that nobody else in this simulation gets."""
        return f"{super().nonce()}."


class ServingCluster(Storm):
    """A ledger, a few instances, their operators, and all that happens to them."""

    def __init__(self, seed: int, *, parts: ServingParts, faults: Faults) -> None:
        names = "abcd" if seed % 3 else "abcde"
        super().__init__(seed, faults=faults, ttls=_TTLS, length=_STORM, names=names)
        self._parts = parts
        self._store_machine = Machine(self._scheduler, name="store", wall=_WALL)
        self._server = parts.server(
            ServerWorld(self._scheduler, self._store_machine, instance="store"),
            self.recorder,
            self._stopped,
        )
        self._network = Network(self._scheduler, ttl=self._ttl)
        self._programs = draw_programs(self._dice, ttl=self._ttl)
        self._program = self._programs[0]  # the newest that was deployed
        self._of: dict[str, Program] = {}
        self._paces = {node.machine.name: self._dice.choice(_PACES) for node in self._nodes}

    def run(self) -> None:
        """Go through the storm and the calm."""
        scheduler, faults = self._scheduler, self._faults
        self.recorder.note("clock", "store", until=_WALL)
        for program in self._programs:
            for job in program.jobs.values():
                self.recorder.note("declared", "", job.name, detail=job.described())
        self._network.storm(faults, latest=faults.lateness * self._ttl, ends=self._storm_ends)
        for node in self._nodes:
            self._of[node.machine.name] = self._program
            self._start(node, None)
        self._draw_rollouts()
        self._draw(
            (
                (faults.crashes, self._crash),
                (faults.crashes / 2, self._restart),
                (faults.pauses, self._pause),
                (faults.outages, self._outage),
                (faults.restarts, self._restart_store),
                (faults.wall_steps, self._step_wall),
                (0.7, self._pause_job),
                (0.5, self._backfill),
            )
        )
        scheduler.at(self._storm_ends, self._calm_down, None, None)
        scheduler.at(self._storm_ends + _PATIENCE, scheduler.stop, None, None)
        try:
            scheduler.run()
        except (FencepostError, AssertionError, ArithmeticError, LookupError) as error:
            self.recorder.note("failed", detail=f"{type(error).__name__}: {error}")
        self._server.tell_all()

    def close(self) -> None:
        """End all flows."""
        for node in self._nodes:
            node.world.crash()
        self._server.close()

    # Processes.

    def _new_process(self, node: Node) -> SimulatedWorld:
        node.incarnation += 1
        name = f"{node.machine.name}.{node.incarnation}"
        node.world = ServingWorld(self._scheduler, node.machine, instance=name)
        return node.world

    def _start(self, node: Node, _: None) -> None:
        if node.incarnation and not node.world.crashed:
            return
        world, program = self._new_process(node), self._of[node.machine.name]
        ledger = self._parts.ledger(world, self._network, self._server)
        calm = self._scheduler.now >= self._storm_ends
        pace = _CALM_PACE if calm else self._paces[node.machine.name]
        crew = SimulatedCrew(world, ledger, program, self.recorder, pace=pace, moody=not calm)
        node.client = crew
        instance = program.instance(node.machine.name, node.incarnation)
        office = Office(
            instance,
            lambda: program.definitions,
            lambda asked: program.want(asked, instance),
            lambda: program.stirs,
            _unheard,
        )
        self.recorder.note("started", world.instance, number=program.number)
        world.spawn(self._process(node, world, Doors(world, ledger), office, crew))

    async def _process(
        self, node: Node, world: SimulatedWorld, doors: Doors, office: Office, crew: SimulatedCrew
    ) -> None:
        try:
            await self._parts.serve(doors, office, crew)
        except FencepostError as error:  # whoever started it will start it again
            self.recorder.note("gave up", world.instance, detail=str(error))
        self._scheduler.later(0.0, self._ended, node, world)

    def _ended(self, node: Node, world: SimulatedWorld) -> None:
        """Start another process where one has ended by itself."""
        if not world.crashed:
            self.recorder.note("crashed", world.instance, detail=STOPPED)
            self._crashed.add(world.instance)
            world.crash()
            self._scheduler.at(self._soon(2.0), self._start, node, None)

    def _crash(self, node: Node, which: SimulatedWorld | None) -> None:
        if which is None or which is node.world:
            super()._crash(node, None)

    def _restart(self, node: Node, _: None) -> None:
        """Ask a process to stop, as a supervisor does: politely, and then not."""
        if not node.world.crashed:
            self.recorder.note("stopping", node.world.instance)
            node.client.stop()
            self._scheduler.later(_KILLED_AFTER, self._crash, node, node.world)

    def _soon(self, ttls: float) -> float:
        return max(self._scheduler.now, super()._soon(ttls))

    # Deploys.

    def _draw_rollouts(self) -> None:
        dice, at = self._dice, 0.0
        for number in range(dice.choice((0, 1, 1, 2, 3))):
            at += (0.1 + 0.4 * dice.random()) * self._storm_ends
            if at > 0.9 * self._storm_ends:
                return
            program = self._programs[1 - number % 2]
            self._scheduler.at(at, self._deploy, program, None)
            when, gap = at, dice.random() * 20
            for node in dice.sample(self._nodes, len(self._nodes)):
                self._scheduler.at(min(when, self._storm_ends), self._replace, node, program)
                when += gap

    def _deploy(self, program: Program, _: None) -> None:
        self._program = program
        self.recorder.note("deployed", number=program.number)

    def _replace(self, node: Node, program: Program) -> None:
        if program is not self._program:
            return  # a newer deploy has overtaken this one
        self._of[node.machine.name] = program
        if self._dice.random() < 0.6:
            self._restart(node, None)
        else:
            self._crash(node, None)

    # Operators.

    def _pause_job(self, _node: Node, _: None) -> None:
        job, ends = self._any_job(), self._soon(6.0)
        by_itself = self._dice.random() < 0.4
        self._server.pause(job, until=_WALL + ends if by_itself else 0.0)
        if not by_itself:
            self._scheduler.at(ends, self._resume_job, job, None)

    def _resume_job(self, job: str, _: None) -> None:
        self._server.resume(job)

    def _backfill(self, _node: Node, _: None) -> None:
        name, now = self._any_job(), int(_WALL + self._scheduler.now)
        record = next((job for job in self._server.jobs() if job.job == name), None)
        if record is None or record.schedule is None or isinstance(record.schedule, EveryAfter):
            return
        existing = self._dice.choice(("skip", "failed", "all"))
        self._server.backfill(Lane(0, name, now - 100, now, now - 100, existing))

    def _any_job(self) -> str:
        return self._dice.choice(sorted(self._programs[0].jobs))

    def _step_wall(self, node: Node, _: None) -> None:
        self._step(node.machine, self._hours())

    # The calm.

    def _calm_down(self, _one: None, _two: None) -> None:
        self._network.calm()
        self.recorder.note("calm", until=_WALL + self._storm_ends)
        for node in self._nodes:
            if self._of[node.machine.name] is not self._program:
                self._replace(node, self._program)
            node.client.pace, node.client.moody = _CALM_PACE, False
        for job in self._program.jobs.values():
            self.recorder.note("serves", "", job.name, detail=job.spec)
        self._look(None, None)

    def _look(self, _one: None, _two: None) -> None:
        if settled(self._server, self._program, ends=_WALL + self._storm_ends):
            self._scheduler.stop()
        else:
            self._scheduler.later(_LOOK, self._look, None, None)


def settled(server: PlannerServer, program: Program, *, ends: float) -> bool:
    """Say whether a program is in force, and all that was due until ``ends`` has ended."""
    jobs = {job.job: job for job in server.jobs()}
    for name, job in program.jobs.items():
        record = jobs.get(name)
        if record is None or record.spec != job.spec or not _caught_up(record, ends):
            return False
    return server.idle and all(
        run.state.terminal or run.key.slot > ends or run.key.job not in program.jobs
        for run in server.runs()
    )


def _caught_up(record: JobRecord, ends: float) -> bool:
    schedule = record.schedule
    if schedule is None or isinstance(schedule, EveryAfter):
        return True
    newest = schedule.latest(ends)
    return newest is None or record.watermark >= newest


def _unheard(event: JobEvent) -> None:
    del event
