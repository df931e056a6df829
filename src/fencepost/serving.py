"""A scheduler instance in this process: what it knows, and the threads that do the work."""

from __future__ import annotations

import os
import threading
from collections import deque
from queue import Empty, SimpleQueue

from fencepost.errors import FencepostError, RunLost
from fencepost.flows.serve import Office, unrecorded
from fencepost.hands import STUCK, Hands
from fencepost.holding import HOST
from fencepost.jobs import rivals_of
from fencepost.ledger.api import Attempt, Report
from fencepost.ledger.planning import End, Instance
from fencepost.model.claim import Want
from fencepost.model.command import SHORTEST_TTL
from fencepost.model.ending import Settled
from fencepost.model.event import JobEvent
from fencepost.model.lease import Holder
from fencepost.model.run import State
from fencepost.version import VERSION
from fencepost.working import Terms
from fencepost.world.flow import finish
from fencepost.world.precedence import Precedence

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator
    from typing import Any

    from fencepost.holding import Holding
    from fencepost.jobs import Job
    from fencepost.ledger.planning import Asked, Begun
    from fencepost.model.definition import Definition
    from fencepost.model.run import RunRecord
    from fencepost.working import Working
    from fencepost.world.api import World

    # How many jobs there are, which may be waited for, and which share a lock with which.
    Sharing = tuple[int, frozenset[str], dict[str, tuple[str, ...]]]

# How long ahead work is claimed, where it is short: a crew should not wait for each commit.
_AHEAD = 0.4
# In two halves, each of which the ledger finds on one page.
_MOST_AHEAD = 900
_NEVER = float("inf")
_REMEMBERED = 10.0
# What has waited for a thread for this part of its lease is left to others, while it still is ours.
_STALE = 1 / 3
# How long after its grace an instance waits for bodies to leave and for ends to be recorded.
SETTLE = 0.4
_RELEASED = Settled(State.PENDING, "released")
_NOTHING = Report()


class Serving:
    """What one instance knows, for the flows that plan."""

    def __init__(
        self,
        working: Working,
        holding: Holding,
        world: World,
        *,
        build: int = 0,
        orphan_after: float,
    ) -> None:
        self._working, self._holding, self._world, self._build = working, holding, world, build
        self._apart: dict[str, tuple[float, bool]] = {}
        self._sharing: Sharing = (-1, frozenset(), {})
        name = f"{HOST}/{os.getpid()}/{world.nonce()[:8]}"
        self.instance = Instance(name, HOST, os.getpid(), VERSION, build, _tzdata(), orphan_after)

    @property
    def office(self) -> Office:
        """Return what the flows ask of an instance."""
        return Office(
            self.instance,
            self._definitions,
            self.want,
            self._stirring,
            self._holding.emit,
            self._working.registry.__len__,
            rivals=self.rivals,
        )

    def job_of(self, begun: Begun) -> Job:
        """Return the declared job that carries an attempt out."""
        job = self._working.registry.get(begun.template)
        assert job is not None, "only what is known was asked for"
        return job

    def _can_be_apart(self, job: Job) -> bool:
        """Say whether a job can have a process of its own; asked of the machine now and then."""
        now = self._world.clocks.boottime()
        known = self._apart.get(job.name)
        if known is None or now - known[0] > _REMEMBERED:
            known = self._apart[job.name] = (now, self._working.can_be_apart(job))
        return known[1]

    def recall(self, at: float) -> None:
        """Have each attempt give its run back at ``at``, and its keeper tell the ledger now."""
        for course in list(self._working.courses.values()):
            course.recall(at)
            self._holding.keeper.charges.hurry(course.hold.nonce)

    def tell(self, event: JobEvent) -> None:
        """Tell whoever listens."""
        self._holding.emit(event)

    def tell_trouble(self, error: BaseException) -> None:
        """Tell of what no attempt should ever raise."""
        about = (("instance", self.instance.name), ("error", f"{type(error).__name__}: {error}"))
        self._holding.emit(JobEvent("trouble", "", "", 0, about))

    def tell_given_back(self, attempt: Attempt, what: str) -> None:
        """Tell of an attempt that waited for a thread for too long, and never began."""
        key, about = attempt.key, (("reason", "no thread was free"),)
        self._holding.emit(JobEvent(what, key.job, str(key), attempt.token, about))

    def _definitions(self) -> list[Definition]:
        return [job.defined(build=self._build) for job in self._working.registry]

    def rivals(self) -> dict[str, tuple[str, ...]]:
        """Return, for each job that shares its lock, the other jobs with that lock."""
        return self._shared()[2]

    def _stirring(self) -> frozenset[str]:
        return self._shared()[1]

    def _shared(self) -> Sharing:
        """Return how many jobs there are, which may be waited for, and which share a lock."""
        registry = self._working.registry
        if self._sharing[0] != len(registry):
            rivals = rivals_of(registry)
            stirring = {job.name for job in registry if job.stirs}
            stirring |= {name for job in stirring for name in rivals.get(job, ())}
            self._sharing = (len(registry), frozenset(stirring), rivals)
        return self._sharing

    def want(self, asked: Asked, *, lease: float | None = None) -> Want | None:
        """Return the request for a run, with a lease no longer than that; None if not known."""
        job = self._working.registry.get(asked.template)
        if job is None:
            return None
        same = asked.key.job == job.name  # else it is stored, and has no definitions to choose from
        if same and job.pin == "epoch" and asked.digest not in ("", job.defined().digest):
            return None
        policy = job.policy
        if lease is not None and lease < policy.lease:
            policy = policy._replace(lease=min(policy.lease, max(lease, _least(job))))
        return Want(
            asked.key,
            Holder(asked.nonce, HOST, os.getpid(), VERSION),
            policy,
            job.lock_of(asked.key.slot) if same or job.lock != job.name else asked.key.job,
            asked.trigger,
            can_be_alone=not self._working.courses or self._can_be_apart(job),
            patient=asked.patient,
            room=asked.room,
            epoch=asked.epoch,
        )


def _least(job: Job) -> float:
    """Return the shortest lease under which a body is surely gone before others may start."""
    apart = job.isolation == "process" or getattr(job.function, "stoppable", False)
    return SHORTEST_TTL if apart else 0.0


def _tzdata() -> str:
    """Return which rules about time zones this process goes by."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tzdata")
    except PackageNotFoundError:
        return ""


class Parked:
    """Where the flow of an attempt waits, at the cost of nothing, until its end is recorded."""

    __slots__ = ("crew", "end", "flow")
    crew: ThreadCrew  # which drives it
    flow: Coroutine[Any, Any, Any]  # the one that waits here

    def __init__(self, attempt: Attempt, settled: Settled, report: Report) -> None:
        self.end = End(attempt, settled, report)

    def answer(self, answer: RunRecord | RunLost) -> None:
        """Let the flow go on."""
        self.crew.go_on(self, answer)

    def __await__(self) -> Generator[Parked, RunRecord | RunLost, RunRecord]:
        answer = yield self
        if isinstance(answer, RunLost):
            raise answer
        return answer


class ThreadCrew:
    """Threads that carry bodies out. What comes after a body, the one who serves does."""

    def __init__(self, serving: Serving, working: Working, world: World, *, size: int) -> None:
        self._serving, self._working, self._world, self._size = serving, working, world, size
        self._precedence = Precedence()  # of the one who serves
        self._hands = Hands(size, self._work, self._precedence.stand_back)
        self._asks = self._stopped  # bound once, and not for each of many runs
        self._ends: SimpleQueue[Parked | None] = SimpleQueue()
        self._parked: deque[Parked] = deque()
        self._begun = self._over = 0
        self._stale_at = _NEVER  # when to look for what has waited on the pile for too long
        self._turn = threading.Lock()
        self._open: dict[str, Parked] = {}  # told, not yet recorded
        self._dismissed = False
        self._server = threading.get_ident()
        self._moved = False  # whether the one who serves has seen an attempt to its end
        self.gone = threading.Event()  # once nobody serves any more
        self.pid = os.getpid()
        self._pace = 0.0  # attempts that end in a second, of late
        self._paced_at = world.clocks.boottime()
        self.grace = 0.0  # how long what runs may go on once a stop is asked for
        self.stopping = False
        self._ordering = threading.RLock()  # a handler of signals may stop us, too
        self.recall_at: float | None = None
        self._wait_until = _NEVER  # how long others wait for it, once it is to stop

    @property
    def busy(self) -> bool:
        """Whether any attempt has not ended."""
        return self._begun > self._over

    def room(self, ending: int) -> int:
        """Say how many more attempts may be claimed, once so many of those under way have ended.

        One for each thread, and more if they are short. What is claimed ahead comes in two halves:
        one is carried out while the ledger is asked for the other.
        """
        ahead = min(int(self._pace * _AHEAD), _MOST_AHEAD)
        if ahead <= self._size:
            return self.free(ending)
        half = (self._size + ahead) // 2
        return half if self._begun - self._over - ending <= half else 0

    def free(self, ending: int) -> int:
        """Say how many attempts would begin at once."""
        return self._size - (self._begun - self._over) + ending

    def begin(self, begun: Begun, sent: float) -> None:
        """Have an attempt carried out by the next thread that is free."""
        self._begun += 1
        self._stale_at = min(self._stale_at, _stale_at((begun, sent)))
        self._hands.give(begun.template, (begun, sent))

    def told(self) -> list[Parked]:
        """Take the ends that were told since the last time."""
        self._precedence.take()
        given_back = self._give_back()
        self._take(0.0)
        taken = list(self._parked)
        self._parked.clear()
        now = self._world.clocks.boottime()
        passed = max(now - self._paced_at, 1e-4)
        if given_back:
            self._pace, self._paced_at = 0.0, now  # it was wrong to claim ahead
        elif taken or passed > 1:
            pace = len(taken) / passed
            if pace > self._pace:  # step by step: a few that were short prove little
                self._pace = min(pace, 16 * (self._pace + self._size))
            else:
                self._pace += (pace - self._pace) * min(1.0, passed / 0.5)
            self._paced_at = now
        return taken

    def _give_back(self) -> int:
        """Give back what has waited for too long, and at a stop all that waits; say how much."""
        if not self.stopping and self._world.clocks.boottime() < self._stale_at:
            return 0
        now = _NEVER if self.stopping else self._world.clocks.boottime()
        stale, left = self._hands.withdraw(lambda given: _stale_at(given) <= now)
        for begun, _ in stale:
            self._step(self._given_back(begun), None)
        self._stale_at = min(map(_stale_at, left), default=_NEVER)
        return len(stale)

    async def _given_back(self, begun: Begun) -> None:
        run = begun.claimed.run
        assert run is not None, "what was begun has a record"
        attempt = Attempt(run.key, run.token, run.holder.nonce, run.lease, str(run.holder))
        try:
            ended = await Parked(attempt, _RELEASED, _NOTHING)
        except RunLost:
            self._serving.tell_given_back(attempt, "lost")
        else:
            released = ended.state is State.PENDING
            self._serving.tell_given_back(attempt, "released" if released else ended.state.value)

    async def rest(self, seconds: float) -> None:
        """Wait until an end is told or a stop is asked for."""
        self._precedence.leave()
        if self._moved:  # there is room that was not there before
            self._moved, seconds = False, 0.0
        if self._hands.waits():
            self._hands.look()
            seconds = min(seconds, STUCK)
        if not self._parked and seconds > 0:
            self._take(seconds)

    def _take(self, seconds: float) -> None:
        """Take what workers have told, waiting at most so long for the first of it."""
        try:
            given = self._ends.get(timeout=seconds) if seconds else self._ends.get_nowait()
            while True:
                if given is not None:
                    self._parked.append(given)
                given = self._ends.get_nowait()
        except Empty:
            return

    def wake(self) -> None:
        """Have the one who serves look now, whatever it waits for."""
        self._ends.put(None)

    def stop(self, grace: float, *, shorten: bool = True) -> None:
        """Begin nothing more, and give back what has not ended after ``grace``; from any thread.

        Without ``shorten``, an end that is ordered already and later stays.
        """
        with self._ordering:
            at = self._world.clocks.boottime() + grace
            if self.recall_at is not None and not shorten:
                at = max(at, self.recall_at)
            self.recall_at, self._wait_until = at, at + SETTLE
            self.stopping = True
            self._serving.recall(at)
        self.wake()

    def left(self) -> float:
        """Say how many seconds an instance that is to stop may still wait."""
        return self._wait_until - self._world.clocks.boottime()

    def is_ours(self) -> bool:
        """Say whether this thread is one of those that an end has to wait for.

        A forked child has none of them, and would wait in vain.
        """
        here = threading.current_thread()
        forked = os.getpid() != self.pid
        return forked or here in self._hands.threads or here.ident == self._server

    def dismiss(self) -> None:
        """Let the threads end. What still runs, as nobody serves any more, is recalled.

        A body that a stop could not end in time goes on; its lease is kept, and its end recorded.
        """
        self._precedence.leave()
        with self._turn:
            self._dismissed = True
            left = list(self._open.values())
            self._open.clear()
        if self.busy and self.left() > 0:
            self.stop(0.0)
            self._wait_until = max(self._wait_until, self._world.clocks.boottime() + self.grace)
        for parked in left:
            self._record(parked)
        self._give_back()
        self._hands.dismiss()

    def wait(self) -> None:
        """Wait, within the grace, until all that was recalled has told its end."""
        while self.busy and (left := self.left()) > 0:
            self._take(left)

    def _work(self, given: tuple[Begun, float]) -> None:
        begun, sent = given
        terms = Terms(Parked, None, begun, self._asks)
        job = self._serving.job_of(begun)
        self._step(self._working.carry_out(job, begun.claimed, sent, terms=terms), None)

    def _stopped(self) -> float | None:
        return self.recall_at

    def _step(self, flow: Coroutine[Any, Any, Any], answer: RunRecord | RunLost | None) -> None:
        """Drive the flow of an attempt to its end, or to where it waits for its end to be kept."""
        parked: Parked | None = None
        error: BaseException | None = None
        try:
            parked = flow.send(answer)
        except StopIteration:
            pass
        except BaseException as raised:  # noqa: BLE001 -- it is told, and others go on
            error = raised
        if os.getpid() != self.pid:  # a body has forked, and its child came back here
            os._exit(0 if error is None else 1)
        if parked is not None:
            parked.crew, parked.flow = self, flow
            self._told_of(parked)
            return
        if error is not None:
            self._serving.tell_trouble(error)
        with self._turn:
            self._over += 1
        if threading.get_ident() == self._server:
            self._moved = True
        else:
            self._ends.put(None)

    def _told_of(self, parked: Parked) -> None:
        """Leave the record of an end to the one who serves; if nobody does, make it here."""
        with self._turn:
            alone = self._dismissed
            if not alone:
                self._open[parked.end.attempt.nonce] = parked
        if alone:
            self._record(parked)
        else:
            self._ends.put(parked)

    def go_on(self, parked: Parked, answer: RunRecord | RunLost) -> None:
        """Let the flow go on of an attempt whose end is on record; once."""
        with self._turn:
            if self._open.pop(parked.end.attempt.nonce, None) is None:
                return
        self._step(parked.flow, answer)

    def _record(self, parked: Parked) -> None:
        answer: RunRecord | RunLost
        end = parked.end
        try:
            answer = finish(self._working.ledger.finish(*end[:2], report=end.report))
        except RunLost as lost:
            answer = lost
        except FencepostError as error:  # the store is away: the end of its lease decides
            self._serving.tell(unrecorded(end.attempt, end.settled))
            answer = RunLost(str(end.attempt.key), token=end.attempt.token, reason=str(error))
        self._step(parked.flow, answer)


def _stale_at(given: tuple[Begun, float]) -> float:
    """Return until when an attempt may wait for a thread."""
    begun, sent = given
    assert begun.claimed.grant is not None, "what was begun has a lease"
    return sent + begun.claimed.grant.ttl * _STALE
