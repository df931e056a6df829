"""A cluster fires alarms through a storm; ``simulate_alarms`` returns its history.

During the storm no generation may commit twice, and nobody may act under a token that was taken
over. After it every alarm must be done, dead for a recorded reason, or cleared.
"""

from __future__ import annotations

from fencepost.errors import FencepostError, GiveUp, OutcomeUnknown, StoreUnavailable
from fencepost.flows.acquire import Granted
from fencepost.flows.alarm import AlarmCourse, AlarmDoors, AlarmErrand, Ringer, ring
from fencepost.flows.keep import Charges, Hold, keep
from fencepost.ledger.alarm_memory import MemoryAlarms
from fencepost.ledger.alarm_sqlite import SqliteAlarms
from fencepost.ledger.memory import MemoryLedger
from fencepost.ledger.sqlite import SqliteLedger
from fencepost.model.alarm import AlarmState, Became, Rearm, Setting
from fencepost.model.alarm_policy import AlarmPolicy, Budget, lease_of
from fencepost.model.lease import MARGIN, Grant, Holder
from fencepost.model.named import NamedTuple
from fencepost.model.policy import Retry
from fencepost.stores.memory import MemoryShelf, MemoryStore
from fencepost.stores.sqlite import SqliteStore
from fencepost.testing.simulator import faults as knobs
from fencepost.testing.simulator.network import Network
from fencepost.testing.simulator.servers import LeaseServer, RemoteStore, instance
from fencepost.testing.simulator.storm import Node, Storm
from fencepost.testing.simulator.world import Machine, ServerWorld, SimulatedWorld
from fencepost.world.flow import finish

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from fencepost.ledger.alarm_api import AlarmBook
    from fencepost.model.alarm import (
        AlarmEnd,
        AlarmRecord,
        AlarmWant,
        Batch,
        ClaimedAlarm,
        Failure,
        Firing,
        NextDue,
    )
    from fencepost.stores.api import LeaseStore
    from fencepost.testing.history import Event
    from fencepost.testing.simulator.faults import Faults
    from fencepost.testing.simulator.servers import Recorder
    from fencepost.world.api import Flow

KIND = "k"
_KEYS = ("one", "two", "three", "four")
_TTLS = (0.5, 1.0, 2.0)
_WALL = 10_000.0
_LONGEST_STEP = 20.0
_CALM = 90.0
FAULTS = knobs.ALL._replace(crashes=2.5, pauses=4.0, breaks=0.3, cancellations=0.0, deletions=0.0)


class Interrupted(BaseException):
    """Somebody pressed Ctrl-C."""


class AlarmServer(LeaseServer):
    """A production book and its leases, observed while they work."""

    def __init__(
        self, book: AlarmBook, leases: LeaseStore, recorder: Recorder, world: SimulatedWorld
    ) -> None:
        super().__init__(leases, recorder, world.scheduler, delete=lambda _: False)
        self._book = book

    def set(self, node: str, setting: Setting) -> AlarmRecord:
        """Ask the book, and note the generation that is there now."""
        record = finish(self._book.set(setting))
        self._of("set", record, node, record.generation)
        return record

    def clear(self, node: str, key: str) -> AlarmRecord | None:
        """Ask the book, and note the tombstone."""
        record = finish(self._book.clear(KIND, key))
        if record is not None:
            self._of("cleared", record, node, record.generation)
        return record

    def claim_due(self, want: AlarmWant) -> Batch:
        """Ask the book, and note what it lets go."""
        batch = finish(self._book.claim_due(want))
        for record in batch.dead:
            self._of("died", record, instance(want.holder), record.generation, record.reason)
        for one in batch.claimed:
            what = "adopted" if one.adopted else "claimed"
            self._of(what, one.record, instance(want.holder), one.record.fired)
        return batch

    def beat(self, firing: Firing, ttl: float) -> bool:
        """Ask the book."""
        return finish(self._book.beat(firing, ttl=ttl))

    def finish(self, node: str, firing: Firing, rearm: Rearm | None) -> AlarmEnd:
        """Ask the book, and note a commit if its own records say that there was one."""
        before = self._seen(firing.key)
        end = finish(self._book.finish(firing, rearm))
        if end.became is Became.DONE and before != self._seen(firing.key):
            assert before is not None, "what was committed was there"
            by = before._replace(token=firing.token)  # as the one says who wanted it
            self._of("committed", by, node, firing.generation)
            if end.record is not None:
                self._of("set", end.record, node, end.record.generation, "rearmed")
        return end

    def fail(self, node: str, firing: Firing, failure: Failure) -> AlarmEnd:
        """Ask the book, and note what became of the alarm."""
        end = finish(self._book.fail(firing, failure))
        if end.record is not None:
            self._of(f"failed {end.became}", end.record, node, firing.generation, failure.counted)
        return end

    def next_due(self, kinds: Sequence[str]) -> NextDue:
        """Ask the book."""
        return finish(self._book.next_due(kinds))

    def prune(self) -> int:
        """Ask the book."""
        return finish(self._book.prune())

    def tell_all(self) -> None:
        """Note every alarm as the book has it."""
        for record in finish(self._book.listed(KIND)):
            ends = record.errors + record.faults + record.losses + record.releases
            detail = "" if record.starts == ends else f"{record.starts} starts, {ends} ends"
            self._of("row", record, "", record.generation, detail)

    def left(self) -> bool:
        """Say whether anything is still to be done."""
        states = (AlarmState.ARMED, AlarmState.FIRING)
        return bool(finish(self._book.listed(KIND, states=states)))

    def _seen(self, key: str) -> AlarmRecord | None:
        return finish(self._book.get(KIND, key))

    def _of(
        self, what: str, record: AlarmRecord, node: str, generation: int, detail: str = ""
    ) -> None:
        self._note(
            what,
            node,
            record.key,
            record.holder.nonce,
            record.token,
            0.0,
            detail,
            "",
            record.state.value,
            generation,
        )


class RemoteAlarms:
    """A book of alarms as a process has it: every verb is a request over the network."""

    def __init__(self, world: SimulatedWorld, network: Network, server: AlarmServer) -> None:
        self._world, self._network, self._server = world, network, server

    def set(self, setting: Setting) -> Flow[AlarmRecord]:
        """Set an alarm."""
        return self._ask(self._server.set, self._world.instance, setting)

    def clear(
        self, kind: str, key: str, *, keep: float = 0.0, if_generation: int | None = None
    ) -> Flow[AlarmRecord | None]:
        """Clear an alarm."""
        assert (kind, keep, if_generation) == (KIND, 0.0, None), "nobody here asks for more"
        return self._ask(self._server.clear, self._world.instance, key)

    def claim_due(self, want: AlarmWant) -> Flow[Batch]:
        """Ask for what is due."""
        return self._ask(self._server.claim_due, want)

    def beat(self, firing: Firing, *, ttl: float) -> Flow[bool]:
        """Ask for more time."""
        return self._ask(self._server.beat, firing, ttl)

    def finish(self, firing: Firing, rearm: Rearm | None = None) -> Flow[AlarmEnd]:
        """Commit a success."""
        return self._ask(self._server.finish, self._world.instance, firing, rearm)

    def fail(self, firing: Firing, failure: Failure) -> Flow[AlarmEnd]:
        """Record a failure."""
        return self._ask(self._server.fail, self._world.instance, firing, failure)

    def next_due(self, kinds: Sequence[str]) -> Flow[NextDue]:
        """Ask when to look again."""
        return self._ask(self._server.next_due, kinds)

    def prune(self, *, limit: int = 1000) -> Flow[int]:
        """Ask for old tombstones to go."""
        assert limit > 0, "as the port has it"
        return self._ask(self._server.prune)

    async def get(self, kind: str, key: str) -> AlarmRecord | None:
        """Look at nothing: no simulated process asks for it."""
        raise NotImplementedError(f"{kind}/{key}")

    async def listed(
        self, kind: str | None = None, *, states: Sequence[AlarmState] = (), limit: int = 100
    ) -> list[AlarmRecord]:
        """List nothing: no simulated process asks for it."""
        raise NotImplementedError(f"{kind} {states} {limit}")

    def _ask(self, verb: Callable[..., Any], *args: object) -> Flow[Any]:
        return self._network.ask(self._world, self._server, verb, *args)


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
        self._active = 0
        errand = AlarmErrand(
            {KIND: shared.policy}, self._holder, self._carry_out, self._alone, self.emit
        )
        self._ringer = Ringer(AlarmDoors(world, self.book), errand)

    async def work(self) -> None:
        """Fire, and wait until something is due, over and over."""
        world = self._world
        while True:
            try:
                await self._ringer.fire(limit=8, workers=1 + int(world.dice() * 3))
                due_in = await self._ringer.due_in()
            except (OutcomeUnknown, StoreUnavailable, Interrupted):
                due_in = 0.0
            rest = self._shared.policy.lease if due_in is None else due_in
            await world.sleep(0.01 + min(rest, self._shared.policy.lease))

    def emit(self, event: object) -> None:
        """Hear what the flows say; the server knows better."""

    def _holder(self) -> Holder:
        return Holder(self._world.nonce(), self._world.clocks.name, self._pid)

    def _alone(self) -> bool:
        return self._active == 0

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
        self._active += 1
        self.charges.add(hold)
        try:
            doors = AlarmDoors(self._world, self.book)
            ended = await ring(doors, course, self._handle, emit=self.emit)
        finally:
            self._active -= 1
            hold.released = True
            self.charges.remove(hold)
            if ended is None:
                self.charges.abandon(hold.name, hold.nonce)
        return ended

    async def _handle(self, course: AlarmCourse) -> None:
        """Be a handler: work, act while it may, and end in one of many ways."""
        world, ttl = self._world, self._shared.policy.lease
        self._note("began", course)
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

    def _note(self, what: str, course: AlarmCourse) -> None:
        firing = course.firing
        self._shared.recorder.note(
            what,
            self._world.instance,
            firing.key,
            firing.nonce,
            firing.token,
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
