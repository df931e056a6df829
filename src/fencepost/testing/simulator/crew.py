"""A crew of a simulated instance: bodies that take virtual time, fail, or are lost with it."""

from __future__ import annotations

from functools import partial

from fencepost.errors import GiveUp, Lost, OutcomeUnknown, StoreUnavailable
from fencepost.flows.attempt import ended_by
from fencepost.flows.serve import Told
from fencepost.ledger.api import NOTHING, Attempt
from fencepost.ledger.planning import End
from fencepost.model.ending import Ending, settle
from fencepost.model.lease import MARGIN
from fencepost.model.run import State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.errors import RunLost
    from fencepost.ledger.api import Ledger
    from fencepost.ledger.planning import Begun
    from fencepost.model.run import RunRecord
    from fencepost.testing.simulator.programs import Program, ServedJob
    from fencepost.testing.simulator.servers import Recorder
    from fencepost.testing.simulator.world import SimulatedWorld

_RELEASED = Ending(State.PENDING, "released")
_CANCELLED = Ending(State.CANCELLED, "cancelled")
_SUCCEEDED = Ending(State.SUCCEEDED)
_LEFT = {_RELEASED: "interrupted", _CANCELLED: "cancelled", _SUCCEEDED: "returned"}
# So short a rest is one before another try: nobody sleeps through that.
_SHORTLY = 0.5
# How long bodies may go on once a stop is asked for; those that hear of it leave before that.
_GRACE = 2.0
# Of how many bodies none hears of a stop, by their mood: they end with their process.
_DEAF = (0.25, 0.6)
# How much of a lease a body believes in: enough is left for a clock that drifts.
_TRUSTED = 0.9


class SimulatedCrew:
    """Carries attempts out as flows of one simulated process.

    ``pace`` is how long it likes to rest: one that looks seldom must be served all the same.
    """

    def __init__(
        self,
        world: SimulatedWorld,
        ledger: Ledger,
        program: Program,
        recorder: Recorder,
        *,
        pace: float,
        moody: bool,
    ) -> None:
        self.stopping = False
        self.pace, self.moody = pace, moody
        self._world, self._ledger, self._program = world, ledger, program
        self._recorder = recorder
        self._size = 4
        self._under_way: dict[str, Attempt] = {}  # by nonce
        self._wait_until = float("inf")
        self._ends: list[Told] = []
        self._news = world.signal()

    def room(self, ending: int) -> int:
        """Say how many more attempts may begin, once so many have ended."""
        return self._size - len(self._under_way) + ending

    free = room

    @property
    def busy(self) -> bool:
        """Whether any attempt has not ended."""
        return bool(self._under_way)

    def begin(self, begun: Begun, sent: float) -> None:
        """Have an attempt carried out."""
        run = begun.claimed.run
        assert run is not None, "what was begun has a record"
        attempt = Attempt(run.key, run.token, run.holder.nonce, run.lease, str(run.holder))
        self._under_way[attempt.nonce] = attempt
        self._world.spawn(self._carry_out(begun, run, attempt, sent))

    def told(self) -> list[Told]:
        """Take the ends that were told since the last time."""
        taken, self._ends = self._ends, []
        return taken

    async def rest(self, seconds: float) -> None:
        """Wait until an end is told or a stop is asked for."""
        if not self._ends:
            lazily = self._world.dice() * self.pace if seconds > _SHORTLY else 0.0
            await self._news.wait(max(seconds, lazily))
        self._news.clear()

    def stop(self) -> None:
        """Begin nothing more, and give back what runs; the ledger is told of the order."""
        if not self.stopping:
            self._wait_until = self._world.clocks.boottime() + _GRACE
            for attempt in self._under_way.values():
                self._world.spawn(self._order(attempt))
        self.stopping = True
        self._news.set()

    def left(self) -> float:
        """Say how many seconds an instance that is to stop may still wait."""
        return self._wait_until - self._world.clocks.boottime()

    async def _order(self, attempt: Attempt) -> None:
        try:
            ordered = await self._ledger.order_stop(attempt)
        except (OutcomeUnknown, StoreUnavailable):
            return  # if its process ends now, that is a loss
        if ordered:
            self._note("ordered", attempt)

    async def _carry_out(self, begun: Begun, run: RunRecord, attempt: Attempt, sent: float) -> None:
        grant = begun.claimed.grant
        assert grant is not None, "what was begun has a lease"
        job = self._program.jobs[begun.template]
        self._note("began", attempt)
        ending = await self._worked(job, attempt, sent + _TRUSTED * grant.ttl)
        if ending is None:
            self._note("left", attempt, "lost")
            self._is_over(attempt)
            return
        self._note("left", attempt, _LEFT.get(ending, "failed"))
        settled = settle(run, ending, job.policy, dice=self._world.dice())
        self._ends.append(Told(End(attempt, settled, NOTHING), partial(self._answered, attempt)))
        self._news.set()

    async def _worked(self, job: ServedJob, attempt: Attempt, trusted: float) -> Ending | None:
        """Do what a body does; None if the lease was lost or can be believed in no longer."""
        world, ttl, clock = self._world, job.policy.lease, self._world.clocks.boottime
        mood = world.dice() if self.moody else 1.0
        deaf = _DEAF[0] <= mood < _DEAF[1]
        left = world.dice() * job.longest * (4 if mood < 0.1 else 1)
        while left > 0:
            step = min(left, ttl / 3)
            await world.sleep(step)
            left -= step
            if clock() >= trusted:
                return None
            self._act(attempt, trusted)
            if self.stopping and not deaf:
                return _RELEASED
            if left <= 0:
                break
            sent = clock()
            try:
                cancelled = await self._ledger.beat(attempt, ttl=ttl)
            except Lost:
                return None
            except (OutcomeUnknown, StoreUnavailable):
                continue
            trusted = sent + _TRUSTED * ttl
            if cancelled:
                return _CANCELLED
        if 0.1 <= mood < 0.25:
            error = GiveUp("no hope") if mood < 0.12 else RuntimeError("no luck")
            return ended_by(error, job.policy.retry)
        return _SUCCEEDED

    def _act(self, attempt: Attempt, trusted: float) -> None:
        if trusted - self._world.clocks.boottime() > MARGIN:
            self._note("acted", attempt, name=attempt.lease)

    def _answered(self, attempt: Attempt, answer: RunRecord | RunLost) -> None:
        del answer  # whichever it is, the attempt is over
        self._is_over(attempt)

    def _is_over(self, attempt: Attempt) -> None:
        del self._under_way[attempt.nonce]
        self._news.set()

    def _note(self, what: str, attempt: Attempt, detail: str = "", *, name: str = "") -> None:
        self._recorder.note(
            what,
            self._world.instance,
            name,
            attempt.nonce,
            attempt.token,
            0.0,
            detail,
            str(attempt.key),
        )
