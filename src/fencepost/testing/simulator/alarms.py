"""A cluster fires alarms through a storm; ``simulate_alarms`` returns its history.

During the storm no generation may commit twice, and nobody may act under a token that was taken
over. After it every alarm must be done, dead for a recorded reason, or cleared.
"""

from __future__ import annotations

from fencepost.errors import FencepostError, GiveUp, OutcomeUnknown, StoreUnavailable
from fencepost.flows.acquire import Granted
from fencepost.flows.alarm import AlarmCourse, AlarmDoors, fire
from fencepost.flows.firing import AlarmErrand, Ringer, Shift
from fencepost.flows.keep import Charges, Hold, keep
from fencepost.flows.ring import Bell, ring
from fencepost.ledger.alarm_memory import MemoryAlarms
from fencepost.ledger.alarm_sqlite import SqliteAlarms
from fencepost.ledger.memory import MemoryLedger
from fencepost.ledger.sqlite import SqliteLedger
from fencepost.model.alarm import Rearm, Setting
from fencepost.model.alarm_policy import AlarmPolicy, Budget, lease_of
from fencepost.model.lease import MARGIN, Grant, Holder
from fencepost.model.named import NamedTuple
from fencepost.model.policy import Retry
from fencepost.stores.memory import MemoryShelf, MemoryStore
from fencepost.stores.sqlite import SqliteStore
from fencepost.testing.simulator import faults as knobs
from fencepost.testing.simulator.alarm_books import KIND, AlarmServer, RemoteAlarms
from fencepost.testing.simulator.network import Network
from fencepost.testing.simulator.servers import RemoteStore
from fencepost.testing.simulator.storm import Node, Storm
from fencepost.testing.simulator.world import Machine, ServerWorld, SimulatedWorld

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost.model.alarm import AlarmEnd, ClaimedAlarm
    from fencepost.testing.history import Event
    from fencepost.testing.simulator.faults import Faults
    from fencepost.testing.simulator.servers import Recorder
    from fencepost.world.api import Flow, Lanes

_KEYS = ("one", "two", "three", "four")
_TTLS = (0.5, 1.0, 2.0)
_WALL = 10_000.0
_LONGEST_STEP = 20.0
_CALM = 90.0
MOST_WORKERS = 3
_BY_CALLS = 0.3
FAULTS = knobs.ALL._replace(crashes=2.5, pauses=4.0, breaks=0.3, cancellations=0.0, deletions=0.0)


class Interrupted(BaseException):
    """Somebody pressed Ctrl-C."""


class Shared(NamedTuple):
    """What all processes of a cluster share."""

    network: Network
    server: AlarmServer
    recorder: Recorder
    policy: AlarmPolicy


class AlarmWorker:
    """One process that fires what is due, as the real faces do."""

    def __init__(self, world: SimulatedWorld, shared: Shared, *, pid: int) -> None:
        self.calm = False
        self._world, self._shared, self._pid = world, shared, pid
        self.charges = Charges(world)
        self.book = RemoteAlarms(world, shared.network, shared.server)
        errand = AlarmErrand(
            {KIND: shared.policy}, self._holder, self._carry_out, self._alone, self.emit
        )
        self._ringer = Ringer(AlarmDoors(world, self.book), errand)

    async def work(self) -> None:
        """Ring as an instance does; some processes fire by calls, over and over."""
        if self._world.dice() < _BY_CALLS:
            await self._call()
        bell = Bell(self._world)
        await ring(self, bell, emit=self.emit, look=self._shared.policy.lease)

    def shift(self, lanes: Lanes, nudge: Callable[[], None]) -> Shift:
        """Return what fires alarms as they come due."""
        return Shift(self._ringer, lanes, nudge, workers=self._workers())

    async def _call(self) -> None:
        world, lease = self._world, self._shared.policy.lease
        while True:
            try:
                await self._ringer.fire(limit=8, workers=self._workers())
                due_in = await self._ringer.due_in()
            except (OutcomeUnknown, StoreUnavailable):
                due_in = 0.0
            await world.sleep(0.01 + (lease if due_in is None else min(due_in, lease)))

    def _workers(self) -> int:
        return 1 + int(self._world.dice() * MOST_WORKERS)

    def emit(self, event: object) -> None:
        """Hear what the flows say; the server knows better."""

    def _holder(self) -> Holder:
        return Holder(self._world.nonce(), self._world.clocks.name, self._pid)

    def _alone(self) -> bool:
        return True  # but for alarms nothing runs here

    async def _carry_out(self, claimed: ClaimedAlarm, sent: float) -> AlarmEnd | None:
        record = claimed.record
        hold = Hold(
            Granted(record.lease, Grant(record.token, claimed.ttl), sent),
            nonce=record.holder.nonce,
            ttl=claimed.ttl,
            max_hold=None,
            emit=self.emit,
            chatty=False,
        )
        course = AlarmCourse(self._world, claimed, hold, self._shared.policy, emit=self.emit)
        hold.beats_by(lambda _store, ttl: course.keep_alive(self.book, ttl))
        ended: AlarmEnd | None = None
        self.charges.add(hold)
        try:
            doors = AlarmDoors(self._world, self.book)
            ended = await fire(doors, course, self._handle, emit=self.emit)
        except Interrupted:
            return None  # it was given back
        finally:
            hold.released = True
            self.charges.remove(hold)
            if ended is None:
                self.charges.abandon(hold.name, hold.nonce)
        return ended

    async def _handle(self, course: AlarmCourse) -> None:
        """Be a handler: work, act while it may, and end in one of many ways."""
        world = self._world
        alone = "alone" if course.alarm.solitary else ""
        self._note("began", course, alone)
        try:
            await self._go_through(course)
        finally:
            if not world.crashed:
                self._note("over", course)

    async def _go_through(self, course: AlarmCourse) -> None:
        world, ttl = self._world, self._shared.policy.lease
        mood = 1.0 if self.calm else world.dice()
        if mood > 0.5 and world.dice() < 0.4 and not self.calm:
            course.rearm = Rearm(None, after=world.dice() * ttl)
        for _ in range(1 + int(world.dice() * 2)):
            await world.sleep(world.dice() * ttl * 0.5)
            await self._act(course)
        if mood < 0.1:
            course.rearm = Rearm("1", after=0.0)
            raise RuntimeError("no luck")
        if mood < 0.15:
            raise StoreUnavailable("the other service is away")
        if mood < 0.18:
            raise GiveUp("no hope")
        if mood < 0.22:
            raise Interrupted
        if mood < 0.35:  # a careless one, that never looks at its lease again
            await world.sleep(world.dice() * 2 * ttl)
        course.returned += (None,)

    async def _act(self, course: AlarmCourse) -> None:
        """Act at most a margin after the handler was told that it may go on."""
        course.check()
        asked = self._world.clocks.boottime()
        await self._world.sleep(self._world.dice() * MARGIN * 0.9)
        if self._world.clocks.boottime() - asked < MARGIN:
            self._note("acted", course)

    def _note(self, what: str, course: AlarmCourse, detail: str = "") -> None:
        firing = course.firing
        self._shared.recorder.note(
            what,
            self._world.instance,
            firing.key,
            firing.nonce,
            firing.token,
            detail=detail,
            number=firing.generation,
        )


class AlarmCluster(Storm):
    """A book, a few processes that fire, people who set and clear, and all that happens to them."""

    def __init__(
        self,
        seed: int,
        *,
        server: Callable[..., AlarmServer],
        faults: Faults,
    ) -> None:
        super().__init__(seed, faults=faults, ttls=_TTLS, length=5.0, names="abc")
        self._store_machine = Machine(self._scheduler, name="store", wall=_WALL)
        world = ServerWorld(self._scheduler, self._store_machine, instance="store")
        self._server = server(world, self.recorder, self._stopped)
        ttl = self._ttl
        policy = AlarmPolicy(
            retry=Retry(3, base=ttl / 4, ceiling=ttl),
            timeout=self._dice.choice((None, 3 * ttl)),
            cancel_grace=ttl / 2,
            lease=ttl,
            max_losses=self._dice.choice((2, 5)),
            loss_pause=ttl / 4,
            budget=Budget(10_000, 60.0),
        )
        network = Network(self._scheduler, ttl=ttl)
        self._shared = Shared(network, self._server, self.recorder, policy)
        self._desk = SimulatedWorld(self._scheduler, self._machine("desk"), instance="operator")

    def run(self) -> None:
        """Go through the storm and the calm."""
        scheduler, faults, network = self._scheduler, self._faults, self._shared.network
        network.storm(faults, latest=faults.lateness * self._ttl, ends=self._storm_ends)
        for node in self._nodes:
            self._start(node, None)
        for key in _KEYS:
            self._desk.spawn(self._set(key, self._dice.random() * self._ttl))
        self._draw(
            (
                (faults.crashes, self._crash),
                (faults.pauses, self._pause),
                (faults.outages, self._outage),
                (faults.restarts, self._restart_store),
                (faults.breaks, self._break),
                (faults.wall_steps, self._step_wall),
                (6.0, self._meddle),
            )
        )
        scheduler.at(self._storm_ends, self._calm_down, None, None)
        scheduler.at(self._storm_ends + _CALM, scheduler.stop, None, None)
        try:
            scheduler.run()
        except FencepostError as error:
            self.recorder.note("error", detail=f"{type(error).__name__}: {error}")
        self._server.tell_all()
        self.recorder.note("ended")

    def close(self) -> None:
        """End all flows."""
        self._desk.crash()
        for node in self._nodes:
            node.world.crash()
        self._server.close()

    def _start(self, node: Node, _: None) -> None:
        world = self._new_process(node)
        node.client = worker = AlarmWorker(world, self._shared, pid=node.incarnation)
        worker.calm = self._scheduler.now >= self._storm_ends
        store = RemoteStore(world, self._shared.network, self._server)
        world.spawn(keep(world, store, worker.charges, emit=worker.emit))
        world.spawn(worker.work())
        self.recorder.note("started", world.instance)

    def _meddle(self, _node: Node, _: None) -> None:
        key = self._dice.choice(_KEYS)
        if self._dice.random() < 0.3:
            self._desk.spawn(self._ask(lambda: self._book().clear(KIND, key)))
        else:
            self._desk.spawn(self._set(key, self._dice.random() * self._ttl))

    def _set(self, key: str, after: float) -> Flow[None]:
        setting = Setting(KIND, key, self._desk.nonce(), after=after)
        return self._ask(lambda: self._book().set(setting))

    def _book(self) -> RemoteAlarms:
        return RemoteAlarms(self._desk, self._shared.network, self._server)

    async def _ask(self, ask: Callable[[], Flow[object]]) -> None:
        """Be the person who asks, and asks again if no answer comes."""
        for _ in range(20):
            try:
                await ask()
            except FencepostError:
                await self._desk.sleep(0.05)
            else:
                return

    def _break(self, _node: Node, _: None) -> None:
        self._server.break_(lease_of(KIND, self._dice.choice(_KEYS)))

    def _step_wall(self, node: Node, _: None) -> None:
        if self._dice.random() < 0.3:
            self._step(self._store_machine, (2 * self._dice.random() - 1) * _LONGEST_STEP)
        else:
            self._step(node.machine, self._hours())

    def _calm_down(self, _one: None, _two: None) -> None:
        self._shared.network.calm()
        for node in self._nodes:
            node.client.calm = True
        self.recorder.note("calm")
        self._scheduler.later(self._ttl, self._look, None, None)  # by then all has arrived

    def _look(self, _one: None, _two: None) -> None:
        """End the simulation once nothing is left to be done."""
        if self._server.left():
            self._scheduler.later(self._ttl, self._look, None, None)
        else:
            self._scheduler.stop()


def memory_alarms(
    world: SimulatedWorld,
    recorder: Recorder,
    stopped: Callable[[Holder], bool],
    kind: type[MemoryAlarms] = MemoryAlarms,
) -> AlarmServer:
    """Serve the reference book."""
    store = MemoryStore(world, shelf=MemoryShelf(world), stopped=stopped)
    return AlarmServer(kind(world, MemoryLedger(world, store)), store, recorder, world)


def sqlite_alarms(
    world: SimulatedWorld, recorder: Recorder, _stopped: Callable[[Holder], bool]
) -> AlarmServer:
    """Serve the production SQL, on a database in memory. It notices no deaths."""
    store = SqliteStore(world, ":memory:")
    return AlarmServer(SqliteAlarms(world, SqliteLedger(world, store)), store, recorder, world)


def simulate_alarms(
    seed: int,
    *,
    server: Callable[..., AlarmServer] = memory_alarms,
    faults: Faults = FAULTS,
) -> list[Event]:
    """Run the cluster that ``seed`` describes; return what happened, the same for the same seed."""
    cluster = AlarmCluster(seed, server=server, faults=faults)
    try:
        cluster.run()
    finally:
        cluster.close()
    return cluster.recorder.history
