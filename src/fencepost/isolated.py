"""An isolated body runs in a process of its own, under guard, and can therefore be stopped.

It ends at its timeout, on request, and before others may have its lease: first it is asked, then
killed, and everything it started with it. If it dies, nobody else does: the attempt is a loss, as
if a whole instance had vanished, and the next claim decides what becomes of the run.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import weakref

from fencepost.bodies import why_stopped
from fencepost.carried import Task, read, unpacked
from fencepost.errors import LeaseLost, Misuse, RunCrashed
from fencepost.flows.isolated import attend
from fencepost.importing import reference_of, why_not
from fencepost.model.command import SHORTEST_TTL, must_stop, still_at
from fencepost.model.duration import shown
from fencepost.model.policy import Policy
from fencepost.world.apart import ROOT, letter, start_apart
from fencepost.world.clocks import SystemClocks
from fencepost.world.guardian import above_streams, marked
from fencepost.world.wire import Inbox, tell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from fencepost.carried import Became
    from fencepost.flows.course import Course
    from fencepost.flows.isolated import Body
    from fencepost.holding import Holding
    from fencepost.jobs import Job
    from fencepost.model.lease import Lean
    from fencepost.world.api import World
    from fencepost.world.guardian import Guarded

    class Forkable(Protocol):
        """A body whose guards must not take a fork of ours for us."""

        def let_go(self) -> None:
            """Close, in a forked child, the copies of what must end with the parent."""

    class Startable(Body, Protocol):
        """A body that is started here."""

        @property
        def started(self) -> bool:
            """Whether there is anything to be ended."""

        def start(self) -> None:
            """Start it under guard."""

        def hurry(self, now: float) -> None:
            """Ask it to stop; if it was asked before, kill it."""


# How often an interrupt may come before we no longer wait for what is being killed.
_MOST_INTERRUPTS = 100
_BEGIN = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from fencepost.isolated_child import main; main(int(sys.argv[2]))"
)


def refusal(job: Job, holding: Holding, world: World, *, bound: bool = True) -> Misuse | None:
    """Say why a job's body cannot have a process of its own here; None if it can.

    While the function is being decorated its name is not ``bound`` yet.
    """
    why = _machine(world) or _store(holding)
    if why is None and job.policy.lease < SHORTEST_TTL:
        why = (
            f"its lease of {shown(job.policy.lease)} is too short to be sure that it is gone "
            f"before others may start; {shown(SHORTEST_TTL)} is the least"
        )
    why = why or why_not(job.function, bound=bound)
    if why is None:
        return None
    return Misuse(f"job {job.name!r} cannot run in a process of its own: {why}")


def _machine(world: World) -> str | None:
    if not os.path.exists("/proc/self/stat") or not hasattr(os, "memfd_create"):
        return "that needs Linux, and its /proc"
    if not sys.executable:
        return "there is no interpreter that could be started"
    if not isinstance(world.clocks, SystemClocks):
        return "a clock of your own cannot be shared with it"
    return None


def _store(holding: Holding) -> str | None:
    if not holding.store.capabilities.shared:
        return "its store is in the memory of this one; use sqlite:///, for example"
    try:
        pickle.dumps(holding.source)
    except Exception:  # noqa: BLE001 -- whatever pickle says of it
        return "its store is opened by a function that cannot be imported by name"
    return None


async def carried_apart(
    world: World, course: Course, job: Job, holding: Holding, *, window: tuple[int, int] | None
) -> str | None:
    """Carry out a body in a process of its own; return its result as JSON, or raise its error.

    Whoever interrupts the wait asks the body to stop, and waits on until it is gone: before that
    the run is neither over nor free. A second interrupt kills it.
    """
    body = Apart(course, job, holding, window)
    try:
        interrupts = await until_gone(world, course, body)
        became = body.ended()
        if interrupts:
            if became is not None and became.raised is None and not became.stopped:
                course.returned += (became.result,)  # it was done all the same
            raise interrupts[0]
        if became is None or became.stopped:
            raise body.why(world.clocks.boottime())
        if became.raised is not None:
            error = unpacked(became.raised)
            if became.fault:
                course.met_fault(error)
            raise error
        return became.result
    finally:
        body.close()


async def until_gone(world: World, course: Course, body: Startable) -> list[BaseException]:
    """Start a body under guard and wait until nothing of it is left; return what interrupted us.

    The first interrupt asks the body to stop, the second one kills it; and we wait on.
    """
    interrupts: list[BaseException] = []
    while not body.gone:
        try:
            if not body.started:
                await world.call(body.start)
            await attend(world, course, body)
        except GeneratorExit:  # nobody will ever resume us; the guards see us go
            raise
        except BaseException as error:
            interrupts.append(error)
            if not body.started or len(interrupts) > _MOST_INTERRUPTS:
                raise
            body.hurry(world.clocks.boottime())
    return interrupts


class UnderGuard:
    """What runs in a process of its own, as the one who waits for its end sees it."""

    _course: Course
    _guarded: Guarded | None = None
    _still = float("inf")  # from when on it is to stand still, as its guards were told

    @property
    def started(self) -> bool:
        """Whether there is anything to be ended."""
        return self._guarded is not None

    @property
    def gone(self) -> bool:
        """Whether nothing of it is left."""
        return self._guarded is not None and self._guarded.gone

    @property
    def orphaned(self) -> bool:
        """Whether its guardian died before it."""
        return self._guards.orphaned

    @property
    def report(self) -> int:
        """What becomes readable when the guards have something to say."""
        return self._guards.report

    def hear_guards(self) -> None:
        """Take note of what the guards have reported."""
        self._guards.listen()
        self._course.children = self._guards.children

    @property
    def _guards(self) -> Guarded:
        assert self._guarded is not None, "it was started"
        return self._guarded


class Apart(UnderGuard):
    """One isolated body, as the process that holds its lease sees it."""

    def __init__(
        self, course: Course, job: Job, holding: Holding, window: tuple[int, int] | None
    ) -> None:
        self.asked_at: float | None = None  # since when it is to end, whatever its lease says
        self.until, self.grace = (0.0, 0.0), course.policy.cancel_grace
        self._course, self._job, self._holding, self._window = course, job, holding, window
        self._open: list[int] = []
        self._told: tuple[object, ...] = ()
        self._news = self._outcome = -1
        self._words: Inbox | None = None
        let_go_in_forks(self)

    def start(self) -> None:
        """Start the process. Whatever is left open by a failure is closed by ``close``."""
        course, hold = self._course, self._course.hold
        news, self._news = self._pipe()
        words, word = self._pipe()
        self._words = Inbox(words)
        self._outcome = self._keep(letter(b""))
        os.set_blocking(self._news, False)
        task = self._keep(letter(pickle.dumps(self._task(news, word))))
        grace = course.policy.cancel_grace
        self.until = must_stop(hold.trust, deadline=course.deadline, asked_at=None, grace=grace)
        self._guarded = start_apart(
            [sys.executable, *_flags(), "-c", _BEGIN, ROOT, str(task)],
            environment=marked(name=hold.name, token=hold.token, nonce=hold.nonce),
            nonce=hold.nonce,
            lifeline=course.lifeline(),
            until=self.until,
            grace=grace,
            still_at=still_at(course.lean),
            passed=(news, word, self._outcome, task),
            leave_children=course.policy.leave_children,
        )
        # The reading end of the news stays: nobody who writes to it is to be told by SIGPIPE.
        for fd in (word, task):
            self._open.remove(fd)
            os.close(fd)

    def tell(self, until: tuple[float, float], *, still: float) -> None:
        """Tell the guards until when it may run, and the body how its lease stands."""
        if (*until, still) != (*self.until, self._still):
            self._guards.extend(*until, still)
            self.until, self._still = until, still
        # Each line says all, so that it does no harm if a busy body leaves no room for some.
        hold = self._course.hold
        news = (*hold.trust, int(self._course.cancelled), believed_until(self._course.lean))
        if news != self._told:
            self._told = news
            tell(self._news, *map(repr, news))

    def listen(self) -> None:
        """Take note of what the guards and the body have said."""
        self.hear_guards()
        assert self._words is not None, "it was started"
        for line in self._words.lines()[-1:]:
            done, total, counts = json.loads(line[0])
            self._course.relay(done, total, counts)

    def mop_up(self) -> None:
        """Take one step at ending what a dead guardian left behind."""
        self._guards.mop_up()

    def hurry(self, now: float) -> None:
        """Ask it to stop; if it was asked before, kill it."""
        if self.asked_at is None:
            self.asked_at = now
        else:
            self.asked_at = now - self._course.policy.cancel_grace

    def ended(self) -> Became | None:
        """Take note of what it left; return what became of it, if it could still say so."""
        self.listen()
        became = read(self._outcome)
        if became is not None:
            self._course.relay(*became.told)
            self._course.doubt(*became.doubts)
            self._course.checkpoint = became.checkpoint
        return became

    def why(self, now: float) -> BaseException:
        """Return why it ended without saying how: we stopped it, or it crashed."""
        course, hold, guards = self._course, self._course.hold, self._guards
        hold.phase(now)  # whoever was stopped for long learns of both ends at once
        stopped = why_stopped(course)
        if stopped is not None:
            return stopped
        if guards.failed:
            return OSError(guards.failed, os.strerror(guards.failed))
        if guards.asked:
            reason = "no renewal was confirmed in time, and its process was stopped"
            return LeaseLost(hold.name, token=hold.token, reason=reason)
        course.crashed = "its guardian was killed" if guards.orphaned else _died(guards.code)
        return RunCrashed(str(course.run.key), token=hold.token, reason=course.crashed)

    def close(self) -> None:
        """Close all pipes and bury the guardian, who first ends whatever is still there."""
        need_not_let_go(self)
        for fd in self._open:
            os.close(fd)
        self._open = []
        if self._guarded is not None:
            self._guarded.close()

    def let_go(self) -> None:
        """Close, in a forked child, the copies of what must end with the parent."""
        for fd in self._open:
            os.close(fd)
        self._open = []
        if self._guarded is not None:
            self._guarded.let_go()

    def _task(self, news: int, word: int) -> Task:
        course, policy = self._course, self._course.policy
        return Task(
            path=sys.path[:],
            argv=sys.argv[:],
            function=reference_of(self._job.function),
            is_async=self._job.is_async,
            takes_run=self._job.takes_run,
            store=pickle.dumps(self._holding.source),
            namespace=self._holding.namespace,
            run=course.run,
            policy=Policy(
                timeout=policy.timeout,
                cancel_grace=policy.cancel_grace,
                lease=policy.lease,
                in_doubt=policy.in_doubt,
            ),
            trust=course.hold.trust,
            believed=None if course.lean is None else course.lean.until(),
            deadline=course.deadline,
            window=self._window,
            scope=self._job.scope,
            news=news,
            word=word,
            outcome=self._outcome,
            payload=course.payload,
            rerun=course.rerun,
            formers=course.formers,
        )

    def _pipe(self) -> tuple[int, int]:
        reads, writes = (self._keep(above_streams(end)) for end in os.pipe())
        return reads, writes

    def _keep(self, fd: int) -> int:
        self._open.append(fd)
        return fd


def believed_until(lean: Lean | None) -> float:
    """Return until when a lease may be believed in because of what it leans on."""
    return float("inf") if lean is None else lean.until()


def _flags() -> list[str]:
    """Return how this interpreter was started: its warnings, its optimisation, its isolation."""
    import subprocess

    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # noqa: SLF001 -- as multiprocessing does
    return flags


def _died(code: int) -> str:
    known = {128 + number: number.name for number in signal.Signals}
    by = f" ({known[code]})" if code in known else ""
    return f"its process ended with exit code {code}{by} and told no result"


# Whoever is forked must not keep open what tells guards and bodies that their parent lives.
_running: weakref.WeakSet[Forkable] = weakref.WeakSet()


def let_go_in_forks(body: Forkable) -> None:
    """Have a forked child close its copies of a body's pipes, for as long as the body is there."""
    _running.add(body)


def need_not_let_go(body: Forkable) -> None:
    """Forget a body whose pipes are closed."""
    _running.discard(body)


def _let_go_of_all() -> None:
    for body in list(_running):
        body.let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_of_all)
