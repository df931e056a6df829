"""What both faces share of alarms: the handlers, the book, and how what is due is fired."""

from __future__ import annotations

import inspect
import os
from functools import partial

from fencepost.alarm_ringing import Alarm
from fencepost.bodies import called_here, in_a_thread, on_a_loop, supervised
from fencepost.errors import Misuse, NoThread
from fencepost.flows.acquire import Granted
from fencepost.flows.alarm import AlarmCourse, AlarmDoors, conclude, fire
from fencepost.flows.firing import AlarmErrand, Fired, Ringer, Shift
from fencepost.flows.keep import Hold
from fencepost.holding import HOST
from fencepost.lease import Lease
from fencepost.ledger.alarm_open import alarms_of
from fencepost.ledger.open import ledger_of
from fencepost.model.alarm import NOT_BEGUN
from fencepost.model.lease import Grant, Holder
from fencepost.model.named import NamedTuple
from fencepost.version import VERSION
from fencepost.world.blocking import BlockingWorld

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from fencepost.holding import Holding
    from fencepost.ledger.alarm_api import AlarmBook
    from fencepost.model.alarm import AlarmEnd, ClaimedAlarm
    from fencepost.model.alarm_policy import AlarmPolicy
    from fencepost.stores.api import LeaseStore
    from fencepost.working import Working
    from fencepost.world.api import Lanes, World

# How many handlers an instance runs at once.
WORKERS = 16


class Handler(NamedTuple):
    """What handles a kind of alarm, as it was declared."""

    kind: str
    function: Callable[..., Any]
    policy: AlarmPolicy
    is_async: bool
    takes_alarm: bool


def handler_of(kind: str, function: Callable[..., Any], policy: AlarmPolicy) -> Handler:
    """Return the handler that a function is."""
    takes = bool(inspect.signature(function).parameters)
    return Handler(kind, function, policy, inspect.iscoroutinefunction(function), takes)


class Alarming:
    """The alarms of one ``Fencepost`` or ``AsyncFencepost``.

    Whoever rings has a ``shift`` of them; a loop of its own asks ``due_in`` when to look, and then
    lets ``fire``.
    """

    def __init__(self, holding: Holding, world: World, working: Working) -> None:
        self._holding, self._world, self._working = holding, world, working
        self.handlers: dict[str, Handler] = {}
        self._policies: dict[str, AlarmPolicy] = {}
        self._book: AlarmBook | None = None
        self._ringer: Ringer | None = None
        self._kept: tuple[LeaseStore, AlarmBook] | None = None
        self.courses: set[AlarmCourse] = set()  # what fires here now

    @property
    def book(self) -> AlarmBook:
        """The book of alarms in the ledger; opened when it is first needed."""
        if self._book is None:
            self._book = alarms_of(self._world, self._working.ledger)
        return self._book

    @property
    def world(self) -> World:
        """The world of this face."""
        return self._world

    def add(self, handler: Handler) -> None:
        """Know a handler from now on; two functions for one kind are a mistake."""
        known = self.handlers.get(handler.kind)
        if known is not None and known.function is not handler.function:
            raise Misuse(f"two handlers are declared for alarms of kind {handler.kind!r}")
        self.handlers[handler.kind] = handler
        self._policies[handler.kind] = handler.policy

    async def due_in(self) -> float | None:
        """Say in how many seconds to ``fire``, as far as is known now; None if nothing is armed.

        Others may set an earlier one at any time: whoever waits asks again every now and then.
        """
        return await self._ringing().due_in() if self.handlers else None

    async def fire(
        self, limit: int | None = None, budget: float | None = None, *, workers: int = 1
    ) -> Fired:
        """Fire what is due, ``workers`` at a time; begin none after ``budget`` seconds."""
        if not self.handlers or workers <= 0:
            return Fired()
        until = None if budget is None else self._world.clocks.boottime() + budget
        return await self._ringing().fire(limit=limit, workers=workers, until=until)

    def shift(self, lanes: Lanes, nudge: Callable[[], None]) -> Shift | None:
        """Return what fires alarms as they come due; None as long as nobody handles any."""
        if not self.handlers:
            return None
        return Shift(self._ringing(), lanes, nudge, workers=WORKERS)

    def _ringing(self) -> Ringer:
        if self._ringer is None:
            doors = AlarmDoors(self._world, self.book)
            self._ringer = Ringer(
                doors,
                AlarmErrand(
                    self._policies, self._holder, self._carry_out, self._alone, self._holding.emit
                ),
            )
        return self._ringer

    def _holder(self) -> Holder:
        return Holder(self._world.nonce(), HOST, os.getpid(), VERSION)

    def _alone(self) -> bool:
        return self._working.active == 0

    async def _carry_out(self, claimed: ClaimedAlarm, sent: float) -> AlarmEnd | None:
        """Fire what was claimed, with its lease kept meanwhile."""
        record, handler = claimed.record, self.handlers[claimed.record.kind]
        emit, keeper = self._holding.emit, self._holding.keeper
        hold = Hold(
            Granted(record.lease, Grant(record.token, claimed.ttl), sent),
            nonce=record.holder.nonce,
            ttl=claimed.ttl,
            max_hold=None,
            emit=emit,
            chatty=False,
        )
        chatty = self._holding.chatty
        course = AlarmCourse(self._world, claimed, hold, handler.policy, emit=emit, chatty=chatty)
        hold.beats_by(lambda store, ttl: course.keep_alive(self._beside(store), ttl))
        doors = AlarmDoors(self._world, self.book)
        pid, ended = os.getpid(), None
        course.foreign = lambda: os.getpid() != pid
        self.courses.add(course)
        try:
            try:
                keeper.add(hold)
            except RuntimeError as error:  # what nobody keeps is not begun
                ended = await conclude(doors, course, NOT_BEGUN, emit=emit)
                raise NoThread(f"no thread is to be had: {error}") from error
            ended = await fire(doors, course, partial(self._body, handler), emit=emit)
        finally:
            self.courses.discard(course)
            hold.released = True
            keeper.charges.remove(hold)
            hold.beat = None  # else the two would keep each other until a collection
            if ended is None and not course.foreign():
                keeper.abandon(hold.name, hold.nonce)
        return ended

    async def _body(self, handler: Handler, course: AlarmCourse) -> None:
        """Carry the handler out, in its own colour."""
        space, boottime = self._holding.namespace, self._world.clocks.boottime
        lease = Lease(course.hold, namespace=space, boottime=boottime, drop=_keep_it)
        course.lent = lease  # kept until the end, whatever user code does with it
        alarm = Alarm(course, lease)

        def call() -> Any:
            return handler.function(alarm) if handler.takes_alarm else handler.function()

        blocking = isinstance(self._world, BlockingWorld)
        if handler.is_async:
            if blocking:
                called_here(lambda: on_a_loop(course, call))
            else:
                await supervised(course, call)
        elif blocking:
            called_here(call)
        else:
            await in_a_thread(course, call)
        course.returned += (None,)

    def _beside(self, store: LeaseStore) -> AlarmBook:
        """Return the book on the keeper's own store."""
        kept = self._kept
        if kept is None or kept[0] is not store:
            world = self._holding.keeper.world
            kept = self._kept = (store, alarms_of(world, ledger_of(world, store)))
        return kept[1]


def _keep_it(_: Hold) -> None:
    """Leave the lease to the attempt: it outlives any object that user code drops."""
