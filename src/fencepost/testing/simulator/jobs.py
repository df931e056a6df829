"""Simulated jobs: what a body does to the outside, and where it can be caught doing it twice.

Of a job's items every other one is an effect outside of any database, had within ``once``. The
rest are rows of a fenced database, which admits by token and has each row once.
"""

from __future__ import annotations

import enum

from fencepost.effects import AsyncOnce
from fencepost.errors import (
    GiveUp,
    InDoubt,
    Lost,
    OutcomeUnknown,
    RetryAfter,
    RunCancelled,
    RunTimedOut,
    StoreUnavailable,
    TokenStale,
)
from fencepost.flows.attempt import NothingToDo
from fencepost.flows.course import insist, save
from fencepost.model.fenced import fence_of
from fencepost.model.lease import MARGIN, admits
from fencepost.model.named import NamedTuple
from fencepost.model.policy import InDoubtPolicy, OnLoss, Overlap, Policy, Retry, RetryUntil

TYPE_CHECKING = False
if TYPE_CHECKING:
    from random import Random

    from fencepost.flows.course import Course, Doors
    from fencepost.model.slot import RunKey
    from fencepost.testing.simulator.network import Network
    from fencepost.testing.simulator.servers import Recorder
    from fencepost.testing.simulator.world import SimulatedWorld
    from fencepost.world.api import Flow


class Interrupted(BaseException):
    """Somebody pressed Ctrl-C."""


class Mood(enum.Enum):
    """What a body will do this time, however often it promised to behave."""

    WORK = "work"
    FAIL = "fail"
    RETRY_AFTER = "retry after"
    GIVE_UP = "give up"
    SKIP = "skip"
    DAWDLE = "dawdle"
    INTERRUPT = "interrupt"
    CARELESS = "careless"


_MOODS = (
    *(Mood.WORK,) * 10,
    *(Mood.CARELESS,) * 4,
    *(Mood.FAIL,) * 3,
    *(Mood.DAWDLE,) * 4,
    *(Mood.RETRY_AFTER, Mood.GIVE_UP, Mood.SKIP, Mood.INTERRUPT),
)


class SimulatedJob(NamedTuple):
    """A job of a simulated cluster."""

    name: str
    lock: str
    scope: str  # of its items: "slot" or "job"
    items: int
    policy: Policy

    def described(self) -> str:
        """Return what the checker must know of it, in words."""
        policy = self.policy
        return (
            f"overlap={policy.overlap} limit={policy.max_concurrent} on_loss={policy.on_loss} "
            f"in_doubt={policy.in_doubt} attempts={policy.retry.attempts} "
            f"scope={self.scope} items={self.items}"
        )

    def scope_of(self, key: RunKey) -> str:
        """Return under which name items of a run are known."""
        return self.name if self.scope == "job" else str(key)

    def guard_of(self, course: Course) -> str:
        """Return the name of the database's fence: runs side by side have one each."""
        return f"rows of {fence_of('default', course.run).resource}"


def draw_job(dice: Random, name: str, *, ttl: float) -> SimulatedJob:
    """Return a job with policies as the dice have it."""
    pick = dice.choice
    policy = Policy(
        overlap=pick(tuple(Overlap)),
        max_concurrent=2,
        max_waiting=pick((1, 2, None)),
        retry=Retry(pick((1, 1, 2, 3)), base=ttl / 3, ceiling=ttl),
        retry_until=pick(tuple(RetryUntil)),
        timeout=pick((None, ttl, 3 * ttl)),
        cancel_grace=ttl / 2,
        lease=ttl,
        on_loss=pick((OnLoss.RESUME, OnLoss.RESUME, OnLoss.FAIL)),
        max_losses=pick((1, 2, 5)),
        loss_pause=ttl / 4,
        start_deadline=pick((None, None, 2 * ttl)),
        in_doubt=pick(tuple(InDoubtPolicy)),
    )
    scope = pick(("slot", "slot", "job"))
    return SimulatedJob(name, name, scope, pick((2, 3, 4)), policy)


class Database:
    """Rows that are there or not, behind a fence that admits by token, in one transaction."""

    def __init__(self, recorder: Recorder) -> None:
        self.away = ""
        self._note = recorder.note
        self._highest: dict[str, int] = {}
        self._rows: set[str] = set()

    def write(self, node: str, guard: str, token: int, row: str, run: str) -> bool:
        """Write a row that is not there yet; say whether the token was admitted."""
        if not admits(self._highest.get(guard, 0), token):
            self._note("refused", node, guard, "", token, run=run)
            return False
        self._highest[guard] = token
        self._note("admitted", node, guard, "", token, run=run)
        if row not in self._rows:
            self._rows.add(row)
            self._note("wrote", node, row, "", token, run=run)
        return True


class Body:
    """The user code of one attempt."""

    def __init__(
        self,
        job: SimulatedJob,
        doors: Doors,
        world: SimulatedWorld,
        outside: tuple[Network, Database, Recorder],
        *,
        moody: bool,
    ) -> None:
        self._job, self._doors, self._world = job, doors, world
        self._network, self._database, self._recorder = outside
        self._moody = moody

    async def __call__(self, course: Course) -> str | None:
        """Do what a body does, and note how it was left."""
        began = int(course.checkpoint or 0)
        self._note("began", course, number=began)
        left = "returned"
        try:
            return await self._work(course, began)
        except BaseException as error:
            left = _left_by(error)
            raise
        finally:
            if not self._world.crashed:
                self._note("left", course, detail=left)

    async def _work(self, course: Course, began: int) -> str:
        world, job = self._world, self._job
        mood = _MOODS[int(world.dice() * len(_MOODS))] if self._moody else Mood.WORK
        # Most who dawdle do so at the very end: they return without a last look at their lease.
        late = mood is Mood.DAWDLE and world.dice() < 0.7
        gives_way_at = job.items if late else int(world.dice() * (job.items + 1))
        for number in range(began, job.items + 1):
            if mood not in (Mood.WORK, Mood.CARELESS) and number >= gives_way_at:
                await self._give_way(mood)
            if number == job.items:
                break
            await world.sleep(world.dice() * job.policy.lease * 0.5)
            course.check()
            item = f"i{number}"
            if number % 2:
                await self._write_row(course, item)
            else:
                await self._have_effect(course, item)
            try:
                await save(self._doors, course, str(number + 1))
            except Lost:
                # "except Exception: log.warning(…)", and on as if all were well: a zombie's end.
                if mood is not Mood.CARELESS or number + 1 < job.items:
                    raise
        return "null"

    async def _give_way(self, mood: Mood) -> None:
        ttl = self._job.policy.lease
        if mood is Mood.FAIL:
            raise RuntimeError("no luck")
        if mood is Mood.RETRY_AFTER:
            raise RetryAfter(self._world.dice() * ttl)
        if mood is Mood.GIVE_UP:
            raise GiveUp("no hope")
        if mood is Mood.SKIP:
            raise NothingToDo("nothing to do")
        if mood is Mood.INTERRUPT:
            raise Interrupted
        await self._world.sleep(self._world.dice() * 2 * ttl)

    async def _have_effect(self, course: Course, item: str) -> None:
        """Have an effect once; one that was refused outside may be tried again at once."""
        for luck in (self._world.dice(), 1.0):
            try:
                scope = self._job.scope_of(course.run.key)
                async with AsyncOnce(self._doors, course, scope, item) as first:
                    if first:
                        await self._ask_outside(course, first.key, luck=luck)
            except ConnectionRefusedError:
                continue
            except InDoubt:
                pass
            return

    async def _ask_outside(self, course: Course, key: str, *, luck: float) -> None:
        course.check()
        if luck < 0.15:
            raise ConnectionRefusedError("it did not happen")
        await self._act(course, key)
        if luck < 0.2:
            raise InDoubt("no answer")

    async def _act(self, course: Course, key: str) -> None:
        """Have the effect, at most a margin after the body was told that it may go on.

        One that was paused in between has it all the same, and nothing but the item protects it.
        """
        world = self._world
        asked = world.clocks.boottime()
        await world.sleep(world.dice() * MARGIN * 0.9)
        if world.clocks.boottime() - asked < MARGIN:
            self._note("acted", course, course.attempt.lease)
        self._note("effect", course, key)

    async def _write_row(self, course: Course, item: str) -> None:
        row = f"{self._job.scope_of(course.run.key)}/{item}"
        guard, node = self._job.guard_of(course), self._world.instance
        token, run = course.attempt.token, str(course.run.key)

        def ask() -> Flow[bool]:
            database = self._database
            return self._network.ask(
                self._world, database, database.write, node, guard, token, row, run
            )

        if not await insist(self._world, course, ask):
            raise TokenStale(guard, token=token, highest=0)

    def _note(
        self, what: str, course: Course, name: str = "", *, detail: str = "", number: int = 0
    ) -> None:
        attempt = course.attempt
        self._recorder.note(
            what,
            self._world.instance,
            name,
            attempt.nonce,
            attempt.token,
            0.0,
            detail,
            str(attempt.key),
            "",
            number,
        )


# In this order: some are relatives of others.
_LEFT_BY: tuple[tuple[type[BaseException], str], ...] = (
    (NothingToDo, "skipped"),
    (RunCancelled, "cancelled"),
    (RunTimedOut, "timed out"),
    (Lost, "lost"),
    (OutcomeUnknown, "cut off"),
    (StoreUnavailable, "cut off"),
    (Exception, "failed"),
)


def _left_by(error: BaseException) -> str:
    return next((word for kind, word in _LEFT_BY if isinstance(error, kind)), "interrupted")
