"""Time passes only from one entry of a heap to the next, so one seed gives one order of events.

A flow suspends by awaiting ``SUSPENDED`` after it has told somebody its task and ticket. Whoever
was told resumes it, once: a ticket that was used wakes nobody.
"""

from __future__ import annotations

import random
from heapq import heappop, heappush

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Any

    from fencepost.testing.simulator.world import SimulatedWorld
    from fencepost.world.api import Flow, T

    _Action = tuple[Callable[[Any, Any], None], Any, Any]


class Crashed(BaseException):
    """The process this flow ran in is gone. Nothing may catch it, and no door opens after it."""


class Suspended:
    """What a door awaits to give the turn back to the scheduler."""

    def __await__(self) -> Generator[None, Any, Any]:
        """Return whatever the task is resumed with."""
        return (yield)


SUSPENDED = Suspended()


class Scheduler:
    """Virtual time, the dice of one seed, and what is due when."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(seed)  # noqa: S311 -- the same dice for the same seed is the point
        self.dice = self.random.random
        self.current: Task | None = None
        self.failure: BaseException | None = None
        self.stopped = False
        self._due: list[tuple[float, int, Callable[[Any, Any], None], Any, Any]] = []
        self._count = 0

    def at(self, time: float, action: Callable[[Any, Any], None], one: Any, two: Any) -> None:
        """Have ``action(one, two)`` done at ``time``; what is due together is done as it came."""
        self._count += 1
        heappush(self._due, (time, self._count, action, one, two))

    def later(self, delay: float, action: Callable[[Any, Any], None], one: Any, two: Any) -> None:
        """Have ``action(one, two)`` done after ``delay`` seconds."""
        self._count += 1
        heappush(self._due, (self.now + delay, self._count, action, one, two))

    def run(self) -> None:
        """Let time pass until nothing is due any more, or somebody sets ``stopped``.

        An error of a flow that nobody waits for ends the run: it must not pass unseen.
        """
        due = self._due
        while due and not self.stopped:
            self.now, _, action, one, two = heappop(due)
            action(one, two)
        if self.failure is not None:
            raise self.failure

    def stop(self, _one: object = None, _two: object = None) -> None:
        """Let no more time pass."""
        self.stopped = True

    def fail(self, error: BaseException) -> None:
        """Stop, because of an error that nobody waits for."""
        self.failure, self.stopped = error, True


class Task:
    """One flow on its way, in one world."""

    __slots__ = ("_watchers", "ended", "error", "flow", "result", "ticket", "world")

    def __init__(self, flow: Flow[Any], world: SimulatedWorld, *, watched: bool) -> None:
        self.flow, self.world = flow, world
        self.ticket = 0
        self.ended = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._watchers: list[_Action] | None = [] if watched else None

    def when_ended(self, action: Callable[[Any, Any], None], one: Any, two: Any) -> None:
        """Have ``action(one, two)`` done at the end of a flow that is watched."""
        assert self._watchers is not None, "say so when the flow is spawned"
        self._watchers.append((action, one, two))

    def resume(self, ticket: int, outcome: Any) -> None:
        """Go on with ``outcome``, raised if it is an error; a used ticket resumes nothing."""
        if ticket != self.ticket:
            return
        world = self.world
        scheduler = world.scheduler
        if world.frozen_until > scheduler.now:
            scheduler.at(world.frozen_until, self.resume, ticket, outcome)
            return
        self.ticket = ticket + 1
        scheduler.current = self
        try:
            if isinstance(outcome, BaseException):
                self.flow.throw(outcome)
            else:
                self.flow.send(outcome)
        except StopIteration as done:
            self._end(done.value, None)
        except BaseException as error:  # noqa: BLE001 -- kept for whoever waits for this flow
            self._end(None, error)

    def crash(self) -> None:
        """End the flow where it stands. Its ``finally`` blocks run, behind closed doors."""
        if not self.ended:
            self.ticket += 1
            previous, self.world.scheduler.current = self.world.scheduler.current, self
            try:
                self.flow.throw(Crashed())
            except (Crashed, StopIteration):
                pass
            else:
                raise AssertionError("a flow went on after its process had crashed")
            finally:
                self.world.scheduler.current = previous
                self.ended = True

    def _end(self, result: object, error: BaseException | None) -> None:
        self.ended, self.result, self.error = True, result, error
        self.world.forget(self)
        if self._watchers is not None:
            for watcher in self._watchers:
                self.world.scheduler.later(0.0, *watcher)
        elif error is not None and not isinstance(error, Crashed):
            self.world.scheduler.fail(error)


def run_simulated(make_flow: Callable[[SimulatedWorld], Flow[T]], *, seed: int = 0) -> T:
    """Run the flow that ``make_flow`` makes for a simulated world; return its result.

    No time passes while it sleeps. A flow that waits for something that never comes is an error.
    """
    from fencepost.testing.simulator.world import SimulatedWorld  # which needs this module

    scheduler = Scheduler(seed)
    world = SimulatedWorld(scheduler)
    try:
        task = world.spawn(make_flow(world), watched=True)
        task.when_ended(scheduler.stop, None, None)
        scheduler.run()
        if not task.ended:
            raise AssertionError("the flow waits for something that never comes")
        if task.error is not None:
            raise task.error
        result: T = task.result
        return result
    finally:
        world.crash()
