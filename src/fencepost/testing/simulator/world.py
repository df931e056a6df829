"""The simulated world: the same doors, but time is virtual and the process behind them may die.

A ``Machine`` outlives its processes: it has the clocks. A ``SimulatedWorld`` is one process on it.
When that has crashed, each of its doors raises ``Crashed``, so that nothing of it reaches a store.
"""

from __future__ import annotations

import select
from contextlib import nullcontext

from fencepost.testing.simulator.scheduler import SUSPENDED, Crashed, Task

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from typing import Self

    from fencepost.testing.simulator.scheduler import Scheduler
    from fencepost.world.api import Flow, T

# How long a blocking call may take, and how often a real descriptor is looked at: virtual seconds.
_LONGEST_CALL = 0.002
_LOOK_AGAIN = 0.005


class Machine:
    """The clocks of one simulated machine: one that drifts, and one that people set."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        name: str = "n",
        rate: float = 1.0,
        booted: float = 0.0,
        wall: float = 1_700_000_000.0,
    ) -> None:
        self.name, self.rate = name, rate
        self._scheduler = scheduler
        self._booted, self._wall = booted, wall

    def wall(self) -> float:
        """Return what people believe the time to be."""
        return self._wall + self._scheduler.now

    def boottime(self) -> float:
        """Return the seconds since boot, as this machine counts them."""
        return self._booted + self._scheduler.now * self.rate

    def era(self) -> str | None:
        """Return the boot id."""
        return f"boot of {self.name}"

    def namespace(self) -> str:
        """Return the only time namespace there is."""
        return "simulated"

    def step(self, seconds: float) -> None:
        """Set the wall clock forward, or back."""
        self._wall += seconds


class SimulatedSignal:
    """A flag for flows of one process."""

    def __init__(self, world: SimulatedWorld) -> None:
        self._world = world
        self._up = False
        self._waiting: list[tuple[Task, int]] = []

    def set(self) -> None:
        """Raise the flag."""
        self._up = True
        for task, ticket in self._waiting:
            self._world.scheduler.later(0.0, task.resume, ticket, None)
        self._waiting.clear()

    def clear(self) -> None:
        """Lower the flag."""
        self._up = False

    async def wait(self, timeout: float | None) -> bool:
        """Suspend until the flag is up, or ``timeout`` has passed on this machine's clock."""
        task = self._world.enter()
        if self._up:
            return True
        waiting = (task, task.ticket)
        self._waiting.append(waiting)
        if timeout is not None:
            delay = max(0.0, timeout) / self._world.clocks.rate
            self._world.scheduler.later(delay, task.resume, task.ticket, None)
        await SUSPENDED
        if waiting in self._waiting:
            self._waiting.remove(waiting)
            return self._up
        return True


class SimulatedLanes:
    """Flows of one process, beside the one that begins them. An error ends the simulation."""

    def __init__(self, world: SimulatedWorld) -> None:
        self._world, self._count = world, 0
        self._over = world.signal()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        while self._count and not self._world.crashed:
            self._over.clear()
            await self._over.wait(None)

    def begin(self, flow: Flow[None]) -> None:
        """Spawn a flow."""

        async def run() -> None:
            try:
                await flow
            finally:
                self._count -= 1
                self._over.set()

        self._count += 1
        self._world.spawn(run())


class SimulatedWorld:
    """One process on a machine: its doors, its flows, and whether it runs, rests or is gone."""

    def __init__(
        self, scheduler: Scheduler, machine: Machine | None = None, *, instance: str = "n.1"
    ) -> None:
        self.scheduler = scheduler
        self.clocks = machine or Machine(scheduler, booted=1000.0)
        self.instance = instance
        self.frozen_until = 0.0
        self.crashed = False
        self.dice = scheduler.dice  # a door like the others: a number that follows from the seed
        self._tasks: dict[Task, None] = {}
        self._nonces = 0

    # The doors.

    def nonce(self) -> str:
        """Return text that nobody else in this simulation gets, and that says whose it is."""
        self._nonces += 1
        return f"{self.instance}-{self._nonces}"

    def mutex(self) -> AbstractContextManager[object]:
        """Return a lock that is always free: flows change places only where they await."""
        return nullcontext()

    def signal(self) -> SimulatedSignal:
        """Return a lowered flag."""
        return SimulatedSignal(self)

    async def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        task = self.enter()
        delay = seconds / self.clocks.rate if seconds > 0 else 0.0
        self.scheduler.later(delay, task.resume, task.ticket, None)
        await SUSPENDED

    async def call(self, function: Callable[..., T], *args: object) -> T:
        """Run ``function`` in one piece, some time after it was asked for."""
        await self.sleep(self.dice() * _LONGEST_CALL)
        result = function(*args)
        await self.sleep(self.dice() * _LONGEST_CALL)
        return result

    async def readable(self, fd: int, timeout: float) -> bool:
        """Look at a real descriptor again and again, in virtual time."""
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        give_up = self.clocks.boottime() + timeout
        while not poll.poll(0):
            left = give_up - self.clocks.boottime()
            if left <= 0:
                return False
            await self.sleep(min(_LOOK_AGAIN, left))
        return True

    async def together(self, *flows: Flow[T]) -> list[T]:
        """Run flows side by side; raise the first error after all have ended."""
        parent = self.enter()
        tasks = [self.spawn(flow, watched=True) for flow in flows]
        for task in tasks:
            if not task.ended:
                task.when_ended(parent.resume, parent.ticket, None)
                await SUSPENDED
        for task in tasks:
            if task.error is not None:
                raise task.error
        return [task.result for task in tasks]

    def lanes(self, name: str) -> SimulatedLanes:
        """Return lanes that are flows of this process."""
        del name  # a history knows who began
        return SimulatedLanes(self)

    # What happens to a process.

    def spawn(self, flow: Flow[object], *, watched: bool = False) -> Task:
        """Start a flow in this process. An error of one that nobody watches ends the simulation."""
        task = Task(flow, self, watched=watched)
        self._tasks[task] = None
        self.scheduler.later(0.0, task.resume, task.ticket, None)
        return task

    def freeze(self, seconds: float) -> None:
        """Stop the process as SIGSTOP does: nothing of it runs, but what it sent is on its way."""
        self.frozen_until = max(self.frozen_until, self.scheduler.now + seconds)

    def crash(self) -> None:
        """End the process at once."""
        self.crashed = True
        for task in list(self._tasks):
            task.crash()
        self._tasks.clear()

    def forget(self, task: Task) -> None:
        """Take note that a flow has ended."""
        self._tasks.pop(task, None)

    def enter(self) -> Task:
        """Pass through a door: return the task that does, unless its process is gone."""
        if self.crashed:
            raise Crashed
        task = self.scheduler.current
        assert task is not None, "only a flow that the scheduler runs may suspend"
        return task


class ServerWorld(SimulatedWorld):
    """The world of a server: what it does for a request, it does in one instant."""

    async def call(self, function: Callable[..., T], *args: object) -> T:
        """Call it, here and now."""
        return function(*args)
