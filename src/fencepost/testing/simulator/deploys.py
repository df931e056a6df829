"""Instances of two versions restart in a random order while one replaces the other, and back again.

No request is lost here and no body takes time: so there can be very many orders. What must never
happen is a run that the definition in force did not ask for, or a definition that flips back.
"""

from __future__ import annotations

from fencepost.ledger.api import NOTHING, Attempt
from fencepost.ledger.planning import Ask, End
from fencepost.model.ending import Settled
from fencepost.model.run import State
from fencepost.testing.simulator.programs import draw_programs
from fencepost.testing.simulator.scheduler import Scheduler
from fencepost.testing.simulator.servers import Recorder
from fencepost.testing.simulator.serving import MEMORY, settled
from fencepost.testing.simulator.world import Machine, ServerWorld

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.ledger.planning import Begun, Instance
    from fencepost.testing.history import Event
    from fencepost.testing.simulator.programs import Program
    from fencepost.testing.simulator.serving import ServingParts

_WALL = 1_000_000.0
_PODS = 4
# Seconds: how often an instance says that it lives, and how long it may take to come back. The
# last is less than the time after which it would be taken for gone.
_ATTEND, _LONGEST_RESTART = 10.0, 25.0
# Far more than the time after which an instance is taken for gone, or a job for an orphan.
_LONGEST_OUTAGE = 300.0
# How long it takes until a version that is gone is taken for gone, and how many halves of that
# until all that it owed has run.
_CALM, _PATIENCE = 90.0, 12
_DONE = Settled(State.SUCCEEDED)


def simulate_deploys(seed: int, *, parts: ServingParts = MEMORY) -> list[Event]:
    """Restart instances in the order that ``seed`` describes; return what happened."""
    order = _Restarts(seed, parts)
    try:
        order.run()
    finally:
        order.close()
    return order.recorder.history


class _Pod:
    """Where an instance runs, one after another."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.incarnation = 0
        self.program: Program
        self.instance: Instance
        self.back_at = 0.0  # from when on there is one again, if it was stopped
        self.attend_at = 0.0
        self.ended: list[End] = []
        self.ticks = 0


class _Restarts:
    def __init__(self, seed: int, parts: ServingParts) -> None:
        self._scheduler = Scheduler(seed)
        self._dice = self._scheduler.random
        self.recorder = Recorder(self._scheduler)
        machine = Machine(self._scheduler, name="store", wall=_WALL)
        world = ServerWorld(self._scheduler, machine, instance="store")
        self._server = parts.server(world, self.recorder, lambda _: False)
        self._programs = draw_programs(self._dice, ttl=10.0)
        self._pods = [_Pod(f"p{number}") for number in range(_PODS)]
        self._program = self._programs[0]

    def run(self) -> None:
        """Deploy, perhaps roll back, and let everything come to rest."""
        self.recorder.note("clock", "store", until=_WALL)
        for program in self._programs:
            for job in program.jobs.values():
                self.recorder.note("declared", "", job.name, detail=job.described())
        for pod in self._pods:
            pod.program = self._program
            self._start(pod)
        for number in range(self._dice.choice((1, 2, 3))):
            self._pass(self._dice.random() * 40)
            self._roll_out(self._programs[1 - number % 2])
        self._pass(_CALM / 2)
        self.recorder.note("calm", until=_WALL + self._scheduler.now)
        for job in self._program.jobs.values():
            self.recorder.note("serves", "", job.name, detail=job.spec)
        ends = _WALL + self._scheduler.now
        for _ in range(_PATIENCE):
            self._pass(_CALM / 2)
            if settled(self._server, self._program, ends=ends):
                break
        for pod in self._pods:
            self._tick(pod, room=0)
        self._server.tell_all()

    def close(self) -> None:
        """Close the ledger."""
        self._server.close()

    def _roll_out(self, program: Program) -> None:
        self._program = program
        self.recorder.note("deployed", number=program.number)
        for pod in self._dice.sample(self._pods, len(self._pods)):
            self._pass(self._dice.random() * 15)
            if self._dice.random() < 0.1:
                self._go_away(self._dice.random() * _LONGEST_OUTAGE)
            pod.program = program
            self._stop(pod)

    def _go_away(self, seconds: float) -> None:
        """Be a store that nobody reaches for a while."""
        self.recorder.note("away", "store", until=self._scheduler.now + seconds)
        self._scheduler.now += seconds
        self.recorder.note("back", "store")

    def _pass(self, seconds: float) -> None:
        """Let time pass, in which some instance or other restarts, and somebody ticks."""
        end = self._scheduler.now + seconds
        while self._scheduler.now < end:
            self._scheduler.now += self._dice.random() * 8
            for pod in self._pods:
                self._live(pod)
            if self._dice.random() < 0.12:
                self._stop(self._dice.choice(self._pods))

    def _live(self, pod: _Pod) -> None:
        now = self._scheduler.now
        if pod.back_at:
            if now < pod.back_at:
                return
            self._start(pod)
        if now >= pod.attend_at:
            pod.attend_at = now + _ATTEND
            notes = self._server.attend(pod.instance)
            if any(note.what == "unknown_instance" for note in notes):
                self._server.announce(pod.instance, pod.program.definitions)
        if self._dice.random() < 0.3 or pod.ended:
            self._tick(pod, room=3)

    def _start(self, pod: _Pod) -> None:
        pod.incarnation += 1
        pod.back_at, pod.attend_at, pod.ended = 0.0, self._scheduler.now + _ATTEND, []
        pod.instance = pod.program.instance(pod.name, pod.incarnation)
        self.recorder.note("started", pod.instance.name, number=pod.program.number)
        self._server.announce(pod.instance, pod.program.definitions)

    def _stop(self, pod: _Pod) -> None:
        if not pod.back_at:
            self._tick(pod, room=0)  # what has ended is told
            self.recorder.note("crashed", pod.instance.name)
            if self._dice.random() < 0.5:
                self._server.depart(pod.instance)
            pod.back_at = self._scheduler.now + self._dice.random() * _LONGEST_RESTART

    def _tick(self, pod: _Pod, *, room: int) -> None:
        pod.ticks += 1
        instance, program = pod.instance, pod.program
        ask = Ask(
            lambda asked: program.want(asked, instance),
            f"{instance.name}-{pod.ticks}.",
            room,
            ended=pod.ended,
            sweep=True,
            stirs=program.stirs,
        )
        ticked = self._server.tick(instance.name, ask)
        pod.ended = [self._done(pod, begun) for begun in ticked.begun]

    def _done(self, pod: _Pod, begun: Begun) -> End:
        run, note = begun.claimed.run, self.recorder.note
        assert run is not None, "what was begun has a record"
        attempt = Attempt(run.key, run.token, run.holder.nonce, run.lease, str(run.holder))
        who, key = pod.instance.name, str(run.key)
        note("began", who, "", attempt.nonce, attempt.token, run=key)
        note("left", who, "", attempt.nonce, attempt.token, 0.0, "returned", key)
        return End(attempt, _DONE, NOTHING)
