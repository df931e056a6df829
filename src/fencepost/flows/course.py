"""The course of one attempt: what its body, its keeper and its end have to know of one another.

The body asks ``check`` whether it may go on. The keeper beats for it from another thread, and
raises the flags. Everything that is written goes through the ledger, under the attempt's token.
"""

from __future__ import annotations

from functools import partial
from weakref import ref

from fencepost.errors import (
    LeaseLost,
    Lost,
    Misuse,
    OutcomeUnknown,
    RunCancelled,
    RunLost,
    RunRecalled,
    RunTimedOut,
    Said,
    Stopped,
    StoreUnavailable,
)
from fencepost.flows.divide import Division
from fencepost.ledger.api import Attempt, Report
from fencepost.model.fault import behind
from fencepost.model.fenced import formers_of
from fencepost.model.lease import Grant, Phase
from fencepost.model.named import NamedTuple
from fencepost.model.policy import OnLoss

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from fencepost.flows.keep import Hold
    from fencepost.ledger.api import Ledger
    from fencepost.model.command import Children
    from fencepost.model.ending import Settled
    from fencepost.model.fenced import Former
    from fencepost.model.item import Found, ItemState
    from fencepost.model.lease import Lean
    from fencepost.model.policy import Policy
    from fencepost.model.run import RunRecord
    from fencepost.stores.api import LeaseStore
    from fencepost.world.api import Flow, T, World

    Ends = Callable[[Attempt, Settled, Report], Awaitable[RunRecord]]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5
# How often a flow that waits to know whether its run is ours looks whether it is known.
_GLANCE = 0.02
# How many faults are remembered: a body may go on after one.
_MOST_FAULTS = 7
# The largest number that every database keeps.
LARGEST = 2**63 - 1


class Doors(NamedTuple):
    """Through which a flow of this colour reaches the machine and the ledger."""

    world: World
    ledger: Ledger
    ends: Ends | None = None  # who records how attempts end, if not each for itself


def always() -> bool:
    """Say yes, for one whose events somebody always listens to."""
    return True


class Course:
    """One attempt under way. What most attempts never change is of the class: there are many."""

    hands_over = True  # whether the body may leave the run to another program
    saves = 0  # so far, so that a save that arrives late is known for what it is
    ending = False  # whether the body is over and its end on the way to the ledger
    ended: Settled | None = None  # how, once it is
    cancelled = False
    recalled = False  # whether it is to be given back as soon as its checkpoint is kept
    recall_at: float | None = None  # and when at the latest, on the boot-time clock
    # Whether the ledger has it that the process of the attempt is to stop; None if not known.
    ordered: bool | None = None
    stuck = False
    settled = False  # whether the claim is on the disk, as far as we have seen to it
    transacting: frozenset[object] = frozenset()  # threads or tasks that have a transaction open
    faults: tuple[BaseException, ...] = ()  # of the ledger's database, met by transactions
    handed_off = False  # whether another program has it by now
    adopted = False  # whether it was handed off to us: only then we renew by handing over
    said: str | None = None  # what a command left to be kept, however it ended: JSON
    children: Children | None = None  # what its command or process left behind
    crashed: str | None = None  # how, if the body had a process of its own and it died
    payload: str | None = None  # what a stored job was given, as JSON
    lent: object = None  # what user code was given of the lease
    gate: Hold | None = None  # the lease that it has in another store as well
    doubts: tuple[str, ...] = ()
    formers: tuple[Former, ...] = ()  # the leases that earlier attempts of the run had
    returned: tuple[str | None, ...] = ()  # the result, once the body has returned
    on_stop: tuple[Callable[[], None], ...] = ()
    on_recall: tuple[Callable[[], None], ...] = ()
    _division: Division | None = None  # of the lock, if it has a permit
    _doubt: ref[LeaseLost] | None = None  # what was raised last where nobody could tell
    _source = ""
    _done: int | None = None
    _total: int | None = None

    def __init__(
        self,
        world: World,
        run: RunRecord,
        hold: Hold,
        policy: Policy,
        *,
        chatty: Callable[[], bool] = always,
    ) -> None:
        self.run, self.hold, self.policy = run, hold, policy
        # Says whether anybody listens to what goes well: somebody may begin to at any time.
        self.chatty = chatty
        holder = run.holder
        self.attempt = Attempt(run.key, run.token, holder.nonce, run.lease, str(holder), run)
        self.deadline = None if policy.timeout is None else hold.trust.confirmed + policy.timeout
        self.checkpoint = run.checkpoint
        self.calls: dict[tuple[str, str], str] = {}  # which begin an item was begun by
        # What vouches for us, and for children that keep it open.
        self.lifeline: Callable[[], int | None] = _none
        # How its ledger is reached from the keeper's own store.
        self.beside: Callable[[LeaseStore], Ledger] | None = None
        self.rerun = run.key.rerun  # by which run of its slot its items are known
        self.foreign: Callable[[], bool] = _never  # whether this is a fork's copy of the attempt
        self._world = world
        self._boottime = world.clocks.boottime
        if run.lease != run.lock:
            self._division = Division(world, run.lock, limit=policy.max_concurrent)
        self._turn = world.mutex()
        self._counts: dict[str, int] = {}

    def taken_over(self, left: float | None) -> None:
        """Go on with an attempt that another process began, and that has ``left`` of its time."""
        self.adopted = True
        self.deadline = None if left is None else self._boottime() + left

    @property
    def items(self) -> str:
        """The run by which its items are known: itself, or the first one that it repeats."""
        return str(self.run.key._replace(rerun=self.rerun))

    @property
    def late(self) -> bool:
        """Whether the attempt has used up its time."""
        return self.deadline is not None and self._boottime() >= self.deadline

    def left(self) -> float | None:
        """Return how many seconds the attempt has left; None if it has no timeout."""
        return None if self.deadline is None else max(0.0, self.deadline - self._boottime())

    @property
    def overdue(self) -> bool:
        """Whether it should have been given back by now."""
        return self.recall_at is not None and self._boottime() >= self.recall_at

    def to_next_limit(self) -> float | None:
        """Return how many seconds are left until its time is up or it must be given back."""
        limits = [at for at in (self.deadline, self.recall_at) if at is not None]
        return max(0.0, min(limits) - self._boottime()) if limits else None

    def recall(self, at: float) -> None:
        """Have the run given back with its next checkpoint, or when it is asked about at ``at``."""
        self.recalled, self.recall_at = True, at
        for tell in self.on_recall:
            tell()

    def check(self, *, saving: bool = False) -> None:
        """Return if the body may go on; else raise why it may not.

        What is to be given back may still save: else a step that is longer than the time there is
        would be taken for ever.
        """
        self.check_held()
        if self.cancelled:
            raise RunCancelled(str(self.run.key))
        if self.recall_at is not None and self.overdue and not saving:
            raise RunRecalled(str(self.run.key))
        if self.deadline is not None and self.late:
            assert self.policy.timeout is not None, "only what has a timeout can be late"
            raise RunTimedOut(str(self.run.key), timeout=self.policy.timeout)

    def check_held(self) -> None:
        """Return if the lease can be believed in; else raise why it cannot.

        Where nobody can tell, the run is not lost by that: the next one who asks may learn more.
        """
        hold = self.hold
        why = None if self.gate is None else self._why_not_elsewhere(self.gate)
        why = why or hold.why_not_ours(self._boottime)
        if why is None:
            return
        reason = hold.why_lost or ("the attempt has ended" if hold.released else why)
        error = LeaseLost(hold.name, token=hold.token, reason=reason)
        if hold.why_lost is None and not hold.released:
            self._doubt = ref(error)
        raise error

    def _why_not_elsewhere(self, gate: Hold) -> str | None:
        """Say why its lease elsewhere cannot be trusted; a run that loses it is lost."""
        gate.patience = self.hold.patience
        why = gate.why_not_ours(self._boottime)
        if why is None:
            return None
        if gate.phase(self._boottime()) is Phase.LOST:
            self.hold.lose(f"its lease elsewhere is lost: {why}")
        return f"its lease elsewhere: {why}"

    @property
    def unsure(self) -> bool:
        """Whether nobody can tell just now if the run is still ours."""
        if self.hold.lean is None and self.gate is None:
            return False
        now = self._boottime()
        holds = (self.hold,) if self.gate is None else (self.hold, self.gate)
        return any(hold.phase(now) is Phase.UNPROVEN for hold in holds)

    @property
    def lean(self) -> Lean | None:
        """What the run leans on; with a lease elsewhere, whichever proof ends first."""
        elsewhere = None if self.gate is None else self.gate.lean
        own = self.hold.lean
        if own is None or elsewhere is None:
            return own or elsewhere
        return min(own, elsewhere, key=lambda lean: lean.until())

    def is_doubt(self, error: BaseException) -> bool:
        """Say whether an error tells that nobody could tell if the run is ours, and it may be.

        What must not be tried twice is lost then: it could only be given back.
        """
        told = self._doubt is not None and self._doubt() is error
        return told and self.hold.why_lost is None and self.policy.on_loss is not OnLoss.FAIL

    def is_lost(self, error: BaseException) -> bool:
        """Say whether an error tells that this run is lost; it may be about something else."""
        if self.is_doubt(error):
            return False
        if isinstance(error, RunLost):
            return error.run == str(self.run.key)
        if isinstance(error, LeaseLost) and (error.name, error.token) == (
            self.hold.name,
            self.hold.token,
        ):
            return True  # also while our own clock would still believe in it
        if not isinstance(error, Lost):
            return False
        return self.crashed is not None or self.hold.phase(self._boottime()) is Phase.LOST

    def met_fault(self, error: BaseException) -> None:
        """Take note of an error of the ledger's database that a transaction of the body met."""
        with self._turn:
            self.faults = (*self.faults[-_MOST_FAULTS:], error)

    def is_fault(self, error: BaseException) -> bool:
        """Say whether an error that left the body stems from the ledger's database.

        What a body says on purpose counts, whatever led to it.
        """
        if not self.faults or isinstance(error, (Lost, Said, Stopped)):
            return False
        return any(one is fault for one in behind(error) for fault in self.faults)

    def progress(self, done: int, total: int | None) -> None:
        """Take note of how far the body has come; told with the next write."""
        with self._turn:
            self._done, self._total = done, total

    def doubt(self, *items: str) -> None:
        """Take note of items of which nobody knows whether they were done."""
        with self._turn:
            self.doubts += items

    def count(self, name: str, more: int) -> None:
        """Add to a counter; told with the next write."""
        with self._turn:
            total = self._counts.get(name, 0) + more
            if abs(total) > LARGEST:
                raise Misuse(f"counter {name!r} would become {total}: no ledger keeps that")
            self._counts[name] = total

    def relay(self, done: int | None, total: int | None, counts: dict[str, int]) -> None:
        """Take note of all that a body in another process has told, there, up to now."""
        with self._turn:
            self._done, self._total, self._counts = done, total, counts

    def told(self) -> tuple[int | None, int | None, dict[str, int]]:
        """Return all that the body has told up to now."""
        with self._turn:
            return self._done, self._total, dict(self._counts)

    def counts(self) -> dict[str, int]:
        """Return what this attempt has counted."""
        with self._turn:
            return dict(self._counts)

    def report(self) -> Report:
        """Return what is to be told with the next write."""
        with self._turn:
            if self._done is None and not self._counts:
                return _NOTHING
            self._source = self._source or self._world.nonce()
            counts = tuple(sorted(self._counts.items()))
            return Report(self._done, self._total, counts, self._source)

    def hear(self, *, cancelled: bool) -> None:
        """Take note of what the ledger answered; the first request to cancel is passed on."""
        if cancelled and not self.cancelled:
            self.cancelled = True
            for tell in self.on_stop:
                tell()

    def renewed(self, store: LeaseStore, ttl: float) -> Flow[Grant]:
        """Beat by way of the keeper's own store."""
        assert self.beside is not None, "whoever has it kept says how"
        return self.beat(self.beside(store), ttl)

    async def beat(self, ledger: Ledger, ttl: float) -> Grant:
        """Renew, report, and hear whether somebody asked for a cancel."""
        try:
            if self.adopted:
                await ledger.hand_over(self.attempt, ttl=ttl)
            self.hear(cancelled=await ledger.beat(self.attempt, ttl=ttl, report=self.report()))
        except RunLost as lost:
            if not self.ending:
                raise
            # Perhaps it is our own end that came first. Only the answer to that one can tell.
            raise OutcomeUnknown(str(lost)) from lost
        if self._division is not None:
            await self._division.keep(ledger.leases)
        if not self.settled:
            if ledger.abilities.settles:
                await ledger.sync()  # from here on not even a power cut forgets that it began
            self.settled = True
        if self.recalled and self.ordered is None and not self.handed_off:
            self.ordered = await ledger.order_stop(self.attempt)
        late = self.deadline is not None and (
            self._boottime() >= self.deadline + self.policy.cancel_grace
        )
        if late and not self.stuck:
            why = "it outlived its timeout and could not be stopped; its lease is kept"
            await ledger.note(self.attempt.key, "stuck", token=self.attempt.token, detail=why)
            self.stuck = True  # only now: a report that did not arrive is made again
        return Grant(self.attempt.token, ttl)


_NOTHING = Report()


def _never() -> bool:
    return False


def _none() -> None:
    """Stand in for a store that cannot see who lives."""


async def ready(world: World, course: Course) -> None:
    """Return once it is known that the run may go on; raise if it may not.

    Unlike ``check`` it keeps no event loop waiting. The wait ends with the lease.
    """
    while course.unsure:
        await world.sleep(_GLANCE)
    course.check()


async def save(doors: Doors, course: Course, checkpoint: str) -> None:
    """Keep a checkpoint. Raises if the run was lost, cancelled, or is out of time."""
    course.check(saving=True)
    course.saves += 1
    order = course.saves

    def ask() -> Flow[bool]:
        return doors.ledger.save(
            course.attempt, checkpoint=checkpoint, order=order, report=course.report()
        )

    course.hear(cancelled=await insist(doors.world, course, ask))
    course.checkpoint = checkpoint
    course.check()
    if course.recalled:  # it is kept: from here, whoever has the time goes on
        raise RunRecalled(str(course.run.key))


async def begin(doors: Doors, course: Course, scope: str, items: Sequence[str]) -> list[Found]:
    """Begin items, before their effects."""
    course.check()
    repeat = course.policy.in_doubt.value == "repeat"
    call = doors.world.nonce()

    def ask() -> Flow[list[Found]]:
        return doors.ledger.begin(
            course.attempt, scope=scope, items=items, call=call, repeat=repeat
        )

    found = await insist(doors.world, course, ask)
    for item, what in zip(items, found, strict=True):
        if what.go:
            course.calls[scope, item] = call
    return found


async def end(
    doors: Doors, course: Course, scope: str, items: Sequence[tuple[str, ItemState, str | None]]
) -> None:
    """Say how items ended that were begun. Said even by a body that is to stop: it is true."""
    by_call: dict[str | None, list[tuple[str, ItemState, str | None]]] = {}
    for one in items:
        by_call.setdefault(course.calls.get((scope, one[0])), []).append(one)
    for call, begun in by_call.items():
        ask = partial(doors.ledger.end, course.attempt, scope=scope, items=begun, call=call)
        await insist(doors.world, course, ask)


async def read_formers(doors: Doors, course: Course) -> None:
    """Read which leases earlier attempts of the run had: a fence shuts them out by these names."""
    key = course.run.key
    events = await insist(doors.world, course, lambda: doors.ledger.events(key))
    course.formers = formers_of(events)


async def insist(world: World, course: Course, ask: Callable[[], Awaitable[T]]) -> T:
    """Ask until the answer is known, for as long as the lease can be trusted.

    Every verb of a ledger finds what it did before, so asking again is safe. Once the lease is
    gone so is the run, whatever the answer would have been: a later attempt decides. To raise
    what the store said would make a failure of it, and the run would end as one.
    """
    pause = _FIRST_PAUSE
    while True:
        try:
            return await ask()
        except (OutcomeUnknown, StoreUnavailable) as error:
            hold = course.hold
            if hold.phase(world.clocks.boottime()) is Phase.LOST:
                reason = f"{hold.why_lost or 'the attempt has ended'}, and then: {error}"
                raise LeaseLost(hold.name, token=hold.token, reason=reason) from error
            if hold.pinned and world.clocks.boottime() - hold.pinned > hold.ttl:
                # Kept out by our own transaction; perhaps it waits for us, and would for ever.
                raise Misuse(
                    f"a transaction of run {course.run.key} is open for longer than its lease, and "
                    "nothing else can be written: inside of it use tx.once(…) and tx.save(…)"
                ) from error
            await world.sleep(pause * (0.5 + world.dice()))
            pause = min(pause * 2, _LONGEST_PAUSE)
