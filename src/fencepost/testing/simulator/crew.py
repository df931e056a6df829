"""A crew of a simulated instance: bodies that take virtual time, fail, or are lost with it."""

from __future__ import annotations

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
        self._under_way = 0
        self._ends: list[Told] = []
        self._news = world.signal()

    def room(self, ending: int) -> int:
        """Say how many more attempts may begin, once so many have ended."""
        return self._size - self._under_way + ending

    free = room

    @property
    def busy(self) -> bool:
        """Whether any attempt has not ended."""
        return self._under_way > 0

    def begin(self, begun: Begun, sent: float) -> None:
        """Have an attempt carried out."""
        self._under_way += 1
        self._world.spawn(self._carry_out(begun, sent))

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
        """Begin nothing more, and give back what runs."""
        self.stopping = True
        self._news.set()

    async def _carry_out(self, begun: Begun, sent: float) -> None:
        run, grant = begun.claimed.run, begun.claimed.grant
        assert run is not None, "what was begun has a record"
        assert grant is not None, "and a lease"
        attempt = Attempt(run.key, run.token, run.holder.nonce, run.lease, str(run.holder))
        job = self._program.jobs[begun.template]
        self._note("began", attempt)
        ending = await self._worked(job, attempt, sent + _TRUSTED * grant.ttl)
        if ending is None:
            self._note("left", attempt, "lost")
            self._is_over()
            return
        self._note("left", attempt, _LEFT.get(ending, "failed"))
        settled = settle(run, ending, job.policy, dice=self._world.dice())
        self._ends.append(Told(End(attempt, settled, NOTHING), self._answered))
        self._news.set()

    async def _worked(self, job: ServedJob, attempt: Attempt, trusted: float) -> Ending | None:
        """Do what a body does; None if the lease was lost or can be believed in no longer."""
        world, ttl, clock = self._world, job.policy.lease, self._world.clocks.boottime
        mood = world.dice() if self.moody else 1.0
        left = world.dice() * job.longest * (4 if mood < 0.1 else 1)
        while left > 0:
            step = min(left, ttl / 3)
            await world.sleep(step)
            left -= step
            if clock() >= trusted:
                return None
            self._act(attempt, trusted)
            if self.stopping:
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

    def _answered(self, answer: RunRecord | RunLost) -> None:
        del answer  # whichever it is, the attempt is over
        self._is_over()

    def _is_over(self) -> None:
        self._under_way -= 1
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
