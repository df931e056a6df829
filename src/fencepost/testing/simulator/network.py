"""Between a process and a server anything may be lost, late or doubled; nothing is ever made up.

The fate of a request is drawn when it is sent. What was sent arrives even if its sender is gone.
"""

from __future__ import annotations

from typing import Protocol

from fencepost.errors import FencepostError, OutcomeUnknown, StoreUnavailable
from fencepost.testing.simulator.faults import NONE
from fencepost.testing.simulator.scheduler import SUSPENDED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from fencepost.testing.simulator.faults import Faults
    from fencepost.testing.simulator.scheduler import Scheduler, Task
    from fencepost.testing.simulator.world import SimulatedWorld
    from fencepost.world.api import T

_LATENCY = 0.01
_SHORTEST_TIMEOUT = 0.05
_SILENCE = object()


class Server(Protocol):
    """Whoever answers requests. ``away`` is "" or how it is away: "refusing" or "silent"."""

    away: str


class Network:
    """The wires between all processes and all servers."""

    def __init__(self, scheduler: Scheduler, *, ttl: float) -> None:
        self._scheduler = scheduler
        self._timeout = max(_SHORTEST_TIMEOUT, ttl / 6)
        self.calm()

    def storm(self, faults: Faults, *, latest: float, ends: float) -> None:
        """Misbehave from now on; but nothing is under way for over ``latest``, or past ``ends``."""
        self._latest, self._ends = latest, ends
        self._lost = faults.lost_requests
        self._unanswered = self._lost + faults.lost_replies
        self._doubled = self._unanswered + faults.duplicates
        self._delayed = self._doubled + faults.delays

    def calm(self) -> None:
        """Behave from now on."""
        self.storm(NONE, latest=0.0, ends=0.0)

    async def ask(
        self, world: SimulatedWorld, server: Server, verb: Callable[..., T], *args: object
    ) -> T:
        """Ask ``server`` to do ``verb``; raise ``OutcomeUnknown`` if no reply came in time."""
        task, scheduler = world.enter(), self._scheduler
        request = _Request(task, server, verb, args, scheduler.now + self._timeout)
        fate = scheduler.dice()
        arrives = scheduler.now + scheduler.dice() * _LATENCY
        if fate >= self._delayed:
            scheduler.at(arrives, self._deliver, request, None)
        elif fate < self._unanswered:
            if fate >= self._lost:
                scheduler.at(arrives, self._deliver_unheard, request, None)
            self._time_out(request)
        elif fate < self._doubled:
            scheduler.at(arrives, self._deliver, request, None)
            scheduler.at(self._late(), self._deliver_unheard, request, None)
        elif (arrives := self._late()) < request.give_up:
            scheduler.at(arrives, self._deliver, request, None)
        else:
            scheduler.at(arrives, self._deliver_unheard, request, None)
            self._time_out(request)
        reply: T = await SUSPENDED
        return reply

    def _late(self) -> float:
        now = self._scheduler.now
        return min(now + self._scheduler.dice() * self._latest, max(now, self._ends))

    def _deliver(self, request: _Request, _: None) -> None:
        """Carry a request out and bring its sender the reply."""
        outcome = self._carry_out(request)
        back = self._scheduler.now + self._scheduler.dice() * _LATENCY
        if outcome is _SILENCE or back >= request.give_up:
            self._time_out(request)
        else:
            self._scheduler.at(back, request.task.resume, request.ticket, outcome)

    def _deliver_unheard(self, request: _Request, _: None) -> None:
        """Carry a request out for a sender who will never hear of it."""
        self._carry_out(request)

    def _carry_out(self, request: _Request) -> Any:
        away = request.server.away
        if away:
            return _SILENCE if away == "silent" else StoreUnavailable("the store is away")
        try:
            return request.verb(*request.args)
        except FencepostError as error:
            # Without its traceback: else it would keep this frame, and this frame the error.
            return error.with_traceback(None)

    def _time_out(self, request: _Request) -> None:
        unknown = OutcomeUnknown("no reply came in time")
        self._scheduler.at(request.give_up, request.task.resume, request.ticket, unknown)


class _Request:
    __slots__ = ("args", "give_up", "server", "task", "ticket", "verb")

    def __init__(
        self,
        task: Task,
        server: Server,
        verb: Callable[..., Any],
        args: tuple[object, ...],
        give_up: float,
    ) -> None:
        self.task, self.ticket = task, task.ticket
        self.server, self.verb, self.args = server, verb, args
        self.give_up = give_up
