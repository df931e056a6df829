"""To trigger a slot is to claim it, see its run through to an end, and say what became of it.

Any number may trigger one slot at once: the ledger lets one go, and tells the others who has it.
Which slot is due the caller's clock can only guess; the ledger's clock decides.
"""

from __future__ import annotations

from fencepost.errors import BadSlot, OutcomeUnknown, StoreUnavailable
from fencepost.flows.handoff import outcome_of
from fencepost.model.claim import Verdict, Want, leases_of
from fencepost.model.fault import STORE_FAULT
from fencepost.model.meant import Meant, by_ledger, comes_in
from fencepost.model.named import NamedTuple
from fencepost.model.outcome import Outcome, held, of_record
from fencepost.model.run import State
from fencepost.model.slot import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost.flows.course import Doors
    from fencepost.model.claim import Claimed
    from fencepost.model.run import RunRecord
    from fencepost.model.slot import RunKey
    from fencepost.world.api import Flow, World

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0
# How long whoever waits for a lock goes without asking for it: as long as one who schedules.
_LONGEST_WAIT = 1.0
# Lost runs that one trigger resumes before its own turn comes, at the most.
_MOST_RESUMED = 100


class Crashed(NamedTuple):
    """An attempt that ended without a word, and is known to be over: its lease was given back."""

    reason: str


class Errand(NamedTuple):
    """What a trigger needs of the job: how to ask for one of its runs, and how to run it.

    ``want`` makes a request with a nonce of its own. ``carry_out`` attempts what was claimed with
    a request sent at the given instant; None means that it was lost. ``abandon`` gives back
    whatever a nonce may have been granted. ``meant_at`` returns which run is meant at a time of the
    ledger's clock, or raises ``BadSlot``. ``compare_clocks`` hears what the ledger's clock showed,
    and what the caller's had shown before the ledger was asked.
    """

    want: Callable[[Meant], Want]
    carry_out: Callable[[Claimed, float], Flow[RunRecord | Crashed | None]]
    abandon: Callable[[str, str], None]
    patience: float | None = None  # how long to wait for what others have; None: as policy says
    meant_at: Callable[[float], RunKey] | None = None
    compare_clocks: Callable[[float, float], None] | None = None


async def trigger(doors: Doors, errand: Errand, meant: Meant) -> Outcome:
    """See the run that is meant through to an end, or say who else does."""
    seeing = _Seeing(doors, errand, meant)
    while True:
        outcome = await seeing.step()
        if outcome is not None:
            return outcome


class _Seeing:
    """One trigger, from its first claim to its outcome."""

    def __init__(self, doors: Doors, errand: Errand, meant: Meant) -> None:
        self._doors, self._errand, self._meant = doors, errand, meant
        self._began = doors.world.clocks.boottime()
        self._pause = _FIRST_PAUSE
        self._ours = False  # whether the last attempt of it was ours
        self._waits = False  # whether its record says that it waits for us
        self._made = False  # whether that record is there because of us
        self._resumed = 0
        self._asked_to_stop: RunKey | None = None
        self._force_at = 0.0

    async def step(self) -> Outcome | None:
        """Claim once and do what the answer asks for; return the outcome once there is one."""
        key, want = self._meant.key, self._errand.want(self._meant)
        if self._ours or self._waits:
            want = want._replace(new=False)  # by now it is, and it may be claimed again
        asked = self._doors.world.clocks.wall()
        sent, claimed = await claim(self._doors, want, abandon=self._errand.abandon)
        if self._errand.compare_clocks is not None:
            self._errand.compare_clocks(claimed.now, asked)
        if claimed.verdict is Verdict.OTHER_TIME:
            await self._choose_again(claimed.now)
            return None
        if claimed.verdict is Verdict.GO:
            outcome = await self._go(claimed, sent)
        else:
            outcome = await self._not_now(want, claimed)
        if outcome is None:
            self._meant = Meant(key)  # it is settled which run is meant, however long it takes
        return outcome

    async def _not_now(self, want: Want, claimed: Claimed) -> Outcome | None:
        """Do what an answer asks for that lets no attempt begin."""
        key, verdict, run = want.key, claimed.verdict, claimed.run
        if run is not None and run.fresh and run.holder.nonce == want.holder.nonce:
            self._made = True
        if verdict is Verdict.ENDED:
            if claimed.run is None:  # it is so old that nobody remembers how it ended
                slot = shown(key.slot)
                return Outcome("already_done", "pruned", run_id=str(key), slot=slot)
            return self._ended(claimed.run, claimed)
        if verdict is Verdict.AFTER:
            return await self._resume(claimed)
        if verdict is Verdict.REPLACE:
            return await self._replace(want, claimed)
        return await self._wait(want, claimed)

    async def _choose_again(self, now: float) -> None:
        """Wait for a slot that is about to come; else choose the run by the ledger's clock."""
        wait = comes_in(self._meant, now=now)
        if wait:
            await self._doors.world.sleep(wait)
            return
        key, meant_at = self._meant.key, self._errand.meant_at
        assert meant_at is not None, "only a run that was chosen by a clock is meant at some times"
        try:
            key = meant_at(now)
        except BadSlot:
            # A run of it may be there all the same, if the ledger's clock was set back since.
            if await self._doors.ledger.find(key) is None:
                raise
            self._meant = Meant(key)
        else:
            self._meant = by_ledger(key, now=now)

    async def _go(self, claimed: Claimed, sent: float) -> Outcome | None:
        self._ours, self._pause = True, _FIRST_PAUSE
        run = await self._errand.carry_out(claimed, sent)
        if run is None:
            return self._lost(claimed)
        if isinstance(run, Crashed):  # the next claim counts the loss, and decides
            return None
        if run.state.terminal:
            return of_record(run, fresh=True)
        if run.handed_off:
            return outcome_of(run)
        if run.state is State.WAITING_RETRY or run.reason == STORE_FAULT:
            await self._pass(run.not_before - run.beat_at)
            return None
        return Outcome("skipped", reason=run.reason, run_id=str(run.key))

    def _lost(self, claimed: Claimed) -> Outcome:
        assert claimed.run is not None, "what was claimed has a record"
        return of_record(claimed.run, fresh=True)._replace(status="lost", reason="lost")

    def _ended(self, run: RunRecord, claimed: Claimed) -> Outcome:
        outcome = of_record(run, fresh=claimed.fresh)
        holder = claimed.holder
        if holder is None or not claimed.fresh:
            return outcome
        return outcome._replace(
            holder=str(holder.holder),
            token=holder.token,
            held_for=max(0.0, claimed.now - holder.since),
            lease_left=holder.expires_in,
        )

    async def _resume(self, claimed: Claimed) -> Outcome | None:
        """See an older run through first: it was begun, so it goes before newer slots."""
        assert claimed.blocker is not None, "something must be in the way"
        self._resumed += 1
        if self._resumed > _MOST_RESUMED:
            return self._in_others_hands(claimed, "too_many_before")
        older = self._errand._replace(want=self._not_new)  # it is nobody's own but the slot's
        await trigger(self._doors, older, Meant(claimed.blocker.key))
        return None

    def _not_new(self, meant: Meant) -> Want:
        return self._errand.want(meant)._replace(new=False)

    async def _replace(self, want: Want, claimed: Claimed) -> Outcome | None:
        """Ask the run in our way to stop; after its grace take its token away."""
        assert claimed.blocker is not None, "something must be in the way"
        world, key = self._doors.world, claimed.blocker.key
        now, operator = world.clocks.boottime(), f"replaced by {self._meant.key}"
        self._waits = True
        try:
            if self._asked_to_stop != key:
                await self._doors.ledger.cancel(key, force=False, operator=operator)
                self._asked_to_stop, self._force_at = key, now + want.policy.cancel_grace
            elif now >= self._force_at:
                await self._doors.ledger.cancel(key, force=True, operator=operator)
                return None
        except (OutcomeUnknown, StoreUnavailable):
            pass  # asked again after the pause
        await world.sleep(min(self._next_pause(), max(0.01, self._force_at - now)))
        return None

    async def _wait(self, want: Want, claimed: Claimed) -> Outcome | None:
        """Wait if it is our turn later; else say who has it."""
        if claimed.verdict is Verdict.BUSY:
            self._ours = False
            if want.new:
                return self._in_others_hands(claimed, "taken")
            if not self._waits and not self._may_wait():
                return self._in_others_hands(claimed, "lock_held")
        elif claimed.pause:
            if not self._ours and not self._may_wait():
                failed = claimed.run is not None and claimed.run.state is State.WAITING_RETRY
                return self._in_others_hands(claimed, "waiting_retry" if failed else "backing_off")
            await self._pass(claimed.pause)
            return None
        self._waits = True
        if not self._may_wait(want.policy.start_deadline):
            # Somebody else's is not ours to give up: they may have more patience.
            if self._made and claimed.run is not None and claimed.run.fresh:
                await self._give_up_waiting(want)
            return self._in_others_hands(claimed, "lock_held")
        await self._doors.world.sleep(self._next_pause())
        return None

    async def _give_up_waiting(self, want: Want) -> None:
        operator = f"{want.holder} stopped waiting"
        cancel = self._doors.ledger.cancel
        await cancel(self._meant.key, force=False, operator=operator, only_waiting=True)

    def _in_others_hands(self, claimed: Claimed, reason: str) -> Outcome:
        key, now = self._meant.key, claimed.now
        return held(str(key), slot=key.slot, reason=reason, holder=claimed.holder, now=now)

    def _may_wait(self, otherwise: float | None = 0.0) -> bool:
        """Say whether there is patience left; without any of our own, as the policy has it."""
        patience = self._errand.patience
        if patience is None:
            patience = otherwise
        if patience is None:
            return True
        return self._doors.world.clocks.boottime() - self._began < patience

    def _next_pause(self) -> float:
        pause = self._pause * (0.5 + self._doors.world.dice())
        self._pause = min(self._pause * 1.6, _LONGEST_WAIT)
        return pause

    async def _pass(self, seconds: float) -> None:
        """Let that much time pass, unless somebody ends the run meanwhile.

        Should the ledger's clock see it otherwise, the next claim tells how much is left.
        """
        world = self._doors.world
        until = world.clocks.boottime() + seconds
        while (left := until - world.clocks.boottime()) > 0:
            await world.sleep(min(left, _LONGEST_PAUSE))
            if left > _LONGEST_PAUSE and await self._is_over():
                return

    async def _is_over(self) -> bool:
        """Say whether somebody has ended the run while it waits for its retry."""
        try:
            run = await self._doors.ledger.find(self._meant.key)
        except (OutcomeUnknown, StoreUnavailable):
            return False  # asked again after the next nap
        return run is None or run.state not in (State.WAITING_RETRY, State.PENDING)


async def claim(
    doors: Doors, want: Want, *, abandon: Callable[[str, str], None]
) -> tuple[float, Claimed]:
    """Ask until the ledger's answer is known; return it and the instant the request was sent."""
    world: World = doors.world
    give_up = world.clocks.boottime() + want.policy.lease
    pause = 0.01
    settled, doubtful = False, False
    try:
        while True:
            sent = world.clocks.boottime()
            try:
                claimed = await doors.ledger.claim(want)
            except OutcomeUnknown:
                doubtful = True
                if world.clocks.boottime() >= give_up:
                    raise
                await world.sleep(pause * (0.5 + world.dice()))
                pause = min(pause * 2, 0.5)
                continue
            except Exception:
                settled = not doubtful  # an earlier request may have been granted unheard of
                raise
            # Or it is still on its way, and would be granted once nobody is in its way.
            settled = not doubtful or claimed.verdict is Verdict.GO
            return sent, claimed
    finally:
        if not settled:  # a grant that nobody waits for must not keep others out for a whole ttl
            for name in leases_of(want):
                abandon(name, want.holder.nonce)
