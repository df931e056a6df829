"""What is due is claimed, and each alarm that was granted is fired, side by side with others.

Any number may fire at once: the book lets one have each alarm. One bad handler stops nobody else:
whatever it raises is recorded, and the next alarm is claimed. But one whose last handler vanished
is fired alone: while it is under way here, nothing else is claimed here.
"""

from __future__ import annotations

from fencepost.errors import FencepostError, NoThread, OutcomeUnknown
from fencepost.flows.alarm import say
from fencepost.flows.attempt import described
from fencepost.model.alarm import NOT_BEGUN, AlarmWant, Batch, Became, firing_of
from fencepost.model.named import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost.flows.alarm import AlarmDoors, Emit
    from fencepost.model.alarm import AlarmEnd, AlarmRecord, ClaimedAlarm
    from fencepost.model.alarm_policy import AlarmPolicy
    from fencepost.model.lease import Holder
    from fencepost.world.api import Flow, Lanes

# How often those who fire now are looked at: has one of them died?
SWEEP_EVERY = 0.5
# After a claim of due alarms that was granted none: somebody else is about to have them.
_BARREN_PAUSE = 0.25
# For how long claims go past alarms that cannot be had: those that were put off are due again.
_LONGEST_ROUND = 5.0
# How often tombstones are looked at.
_PRUNE_EVERY = 3600.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5
# How often, and with which pauses, what was never begun is given back.
_GIVING_BACK = (0.01, 0.1, 0.5)


class AlarmErrand(NamedTuple):
    """What firing needs of those who can: the kinds they handle, and how.

    ``holder`` makes one with a nonce of its own. ``carry_out`` fires what was claimed with a
    request sent at the given instant; None means that it was lost. ``alone`` says that nothing
    but alarms runs here.
    """

    policies: dict[str, AlarmPolicy]
    holder: Callable[[], Holder]
    carry_out: Callable[[ClaimedAlarm, float], Flow[AlarmEnd | None]]
    alone: Callable[[], bool]
    emit: Emit


class Fired(NamedTuple):
    """What one call has done: how many handlers succeeded, failed, or came too late."""

    fired: int = 0
    failed: int = 0
    stale: int = 0
    dead: int = 0

    def __bool__(self) -> bool:
        return any(self)


class _Asker(NamedTuple):
    """Who asks for what is due, and whether nothing else was under way here when it did."""

    holder: Holder
    alone: bool


class Ringer:
    """All claims of one process, and what it remembers between them; any thread may ask it."""

    def __init__(self, doors: AlarmDoors, errand: AlarmErrand) -> None:
        self.doors, self.errand = doors, errand
        self._turn = doors.world.mutex()
        self._doubtful: list[_Asker] = []  # those whose claims were never answered
        self._asking = 0  # claims that are on their way
        self._under_way = 0  # alarms that were claimed here and are not over
        self._alone = False  # whether nobody else may claim: one is alone here, or may have been
        self._sweep_at = self._prune_at = self._barren_until = 0.0
        self._expects = False  # whether something was due at the last look

    async def fire(
        self, *, limit: int | None = None, workers: int = 1, until: float | None = None
    ) -> Fired:
        """Fire what is due, ``workers`` at a time, until nothing is; no more than ``limit``.

        None begins after ``until``, an instant of the boot-time clock.
        """
        world = self.doors.world
        ended = world.signal()
        async with world.lanes("fencepost-lane") as lanes:
            beside = lanes if workers > 1 else None
            shift = Shift(self, beside, ended.set, workers=workers, limit=limit, until=until)
            while shift.error is None:
                if await shift.claim(workers - shift.under_way):
                    continue
                if not shift.under_way:
                    break
                await ended.wait(None)
                ended.clear()
        if shift.error is not None:
            raise shift.error
        await self.tidy()
        fired = Fired(*shift.counts)
        if not fired:
            self.found_none()
        return fired

    async def due_in(self) -> float | None:
        """Say in how many seconds to fire, as far as is known now; None for not at all.

        Somebody else may set an earlier alarm. To look costs one statement that reads.
        """
        due = await self.doors.book.next_due(tuple(self.errand.policies))
        now, self._expects = self.doors.world.clocks.boottime(), due.within == 0.0
        within = max(0.0, self._barren_until - now) if self._expects else due.within
        if due.firing:  # whoever has it may die
            sweep_in = max(0.0, self._sweep_at - now)
            within = sweep_in if within is None else min(within, sweep_in)
        return within

    def found_none(self) -> None:
        """Take note of a claim that was granted nothing, though something was due."""
        if self._expects:
            self._barren_until = self.doors.world.clocks.boottime() + _BARREN_PAUSE

    def room(self, workers: int) -> int:
        """Say how many alarms may be claimed by one of so many workers, who all fire here."""
        return 0 if self._is_alone() else workers - self._under_way

    async def claim(self, limit: int) -> tuple[float, Batch] | None:
        """Ask until the book's answer is known; return it and the instant the request was sent.

        None means that nothing may be claimed here now: one is under way that must be alone, or
        somebody takes long to find that out.
        """
        world = self.doors.world
        give_up = world.clocks.boottime() + _LONGEST_PAUSE
        while (asker := self._next_asker()) is None:  # another one asks, who may have to be alone
            if self._is_alone() or world.clocks.boottime() >= give_up:
                return None
            await world.sleep(_FIRST_PAUSE * (0.5 + world.dice()))
        batch: Batch | None = None
        try:
            sent, batch = await self._answered(asker, limit)
        finally:
            self._heard(asker, batch)
        return sent, batch

    async def _answered(self, asker: _Asker, limit: int) -> tuple[float, Batch]:
        world, errand, now = self.doors.world, self.errand, self.doors.world.clocks.boottime()
        sweep, alone = now >= self._sweep_at, asker.alone and errand.alone()
        want = AlarmWant(asker.holder, errand.policies, limit, alone=alone, sweep=sweep)
        give_up, pause = now + self._patience(), _FIRST_PAUSE
        while True:
            sent = world.clocks.boottime()
            try:
                batch = await self.doors.book.claim_due(want)
            except OutcomeUnknown:
                if world.clocks.boottime() >= give_up:
                    raise
                await world.sleep(pause * (0.5 + world.dice()))
                pause = min(pause * 2, _LONGEST_PAUSE)
                continue
            if sweep:
                self._sweep_at = world.clocks.boottime() + SWEEP_EVERY
            return sent, batch

    def _patience(self) -> float:
        return min(policy.lease for policy in self.errand.policies.values())

    def _next_asker(self) -> _Asker | None:
        """Return who is to ask now; None while whoever asks or fires must be alone."""
        with self._turn:
            if self._alone:
                return None
            if self._doubtful:  # it asks for what it may have been granted
                asker = self._doubtful.pop()
            else:
                asker = _Asker(self.errand.holder(), not (self._under_way or self._asking))
            self._asking += 1
            self._alone = asker.alone
            return asker

    def _heard(self, asker: _Asker, batch: Batch | None) -> None:
        """Take note of what was granted; without an answer nobody knows, until it is asked again.

        Whoever was alone when it asked is so when it asks again: in between nobody else could.
        """
        with self._turn:
            self._asking -= 1
            if batch is None:
                self._doubtful.append(asker)
            else:
                self._under_way += len(batch.claimed)
            if asker.alone:
                granted = () if batch is None else batch.claimed
                self._alone = any(one.record.solitary for one in granted)

    def _is_alone(self) -> bool:
        with self._turn:
            return self._alone and not self._asking

    def is_over(self, claimed: ClaimedAlarm) -> None:
        """Take note that an alarm is no longer under way."""
        with self._turn:
            self._under_way -= 1
            if claimed.record.solitary:
                self._alone = False

    async def give_back(self, record: AlarmRecord) -> None:
        """Release what was never begun. If nobody can be told, its lease ends by itself."""
        for pause in _GIVING_BACK:
            try:
                await self.doors.book.fail(firing_of(record), NOT_BEGUN)
            except FencepostError:
                await self.doors.world.sleep(pause)
            else:
                return

    async def tidy(self) -> None:
        """Let old tombstones go, every now and then."""
        now = self.doors.world.clocks.boottime()
        if now >= self._prune_at:
            self._prune_at = now + _PRUNE_EVERY
            try:
                await self.doors.book.prune()
            except FencepostError:
                return  # nobody depends on it, and in an hour it is tried again


class Shift:
    """Who fires alarms side by side in lanes; without lanes, here, one after the other.

    ``nudge`` is called whenever one is over. No more than ``limit`` are claimed, and none after
    ``until``.
    """

    def __init__(
        self,
        ringer: Ringer,
        lanes: Lanes | None,
        nudge: Callable[[], None],
        *,
        workers: int,
        limit: int | None = None,
        until: float | None = None,
    ) -> None:
        self._ringer, self._lanes, self._nudge, self._workers = ringer, lanes, nudge, workers
        self._left, self._until = limit, until
        self._turn = ringer.doors.world.mutex()  # lanes may be threads
        self._more = False  # whether there was more to claim than there was room for
        self._fruitless_since: float | None = None
        self.under_way = 0
        self.counts = [0, 0, 0, 0]
        self.error: FencepostError | None = None  # what a lane could not go on for

    async def go_on(self) -> float | None:
        """Begin what is due, as far as there is room; say in how many seconds to go on.

        None means that nobody knows: something is set, or something that is under way ends.
        """
        error, self.error = self.error, None
        if error is not None:
            raise error
        ringer = self._ringer
        room = ringer.room(self._workers)
        if room <= 0:
            return None
        if not self._more:
            due = await ringer.due_in()
            if due is None or due > 0:
                await ringer.tidy()
                return due
        looked, self._more = not self._more, False
        if not await self.claim(room) and looked:
            ringer.found_none()
        return 0.0

    async def claim(self, limit: int) -> bool:
        """Claim no more than so many, and begin them; say whether to claim again at once."""
        limit = limit if self._left is None else min(limit, self._left)
        if limit <= 0 or not self._ringer.errand.policies or self._is_late():
            return False
        answer = await self._ringer.claim(limit)
        if answer is None:
            return False
        sent, batch = answer
        if self._left is not None:
            self._left -= len(batch.claimed)
        with self._turn:
            self.under_way += len(batch.claimed)
        self._tell(batch)
        self._more = batch.again or (batch.more and bool(batch.claimed))
        await self._begin(list(batch.claimed), sent)
        for record in batch.stale:
            await self._ringer.give_back(record)
        return bool(batch.claimed) or (batch.again and not self._goes_in_circles())

    def _is_late(self) -> bool:
        clocks = self._ringer.doors.world.clocks
        return self._until is not None and clocks.boottime() >= self._until

    def _goes_in_circles(self) -> bool:
        """Say whether nothing was granted for so long that those come again who were put off."""
        now = self._ringer.doors.world.clocks.boottime()
        if self._fruitless_since is None:
            self._fruitless_since = now
        if now - self._fruitless_since < _LONGEST_ROUND:
            return False
        self._fruitless_since, self._more = None, False
        self._ringer.found_none()
        return True

    def _tell(self, batch: Batch) -> None:
        """Tell of what a claim found on its way."""
        emit = self._ringer.errand.emit
        for record in batch.dead:
            say(emit, "alarm_dead", record, reason=record.reason, error=record.error)
        for record in batch.stale:
            say(emit, "alarm_stale", record, reason=Became.STALE.value, newer=record.generation)
        self._count(dead=len(batch.dead), stale=len(batch.stale))
        for one in batch.claimed:
            if one.overdue:
                say(emit, "alarm_late", one.record, late=f"{one.late:.1f}s")
        if batch.claimed:
            self._fruitless_since = None

    async def _begin(self, waiting: list[ClaimedAlarm], sent: float) -> None:
        """Begin what was claimed; what cannot be begun is given back.

        Without lanes there may be several as well, if an earlier claim was never answered.
        """
        waiting.reverse()
        try:
            while waiting:
                one = waiting.pop()
                if self._lanes is None:
                    await self._lane(one, sent)
                    if self.error is not None or self._is_late():
                        return
                    continue
                try:
                    self._lanes.begin(self._lane(one, sent))
                except NoThread:
                    waiting.append(one)
                    raise
        finally:
            for one in waiting:
                await self._give_back(one)

    async def _lane(self, claimed: ClaimedAlarm, sent: float) -> None:
        """Fire one alarm. Never raises what is expected."""
        try:
            await self._fire(claimed, sent)
        except FencepostError as error:  # the store is away: whoever claims is to know
            self.error = error
        finally:
            self._is_over(claimed)

    async def _give_back(self, claimed: ClaimedAlarm) -> None:
        try:
            await self._ringer.give_back(claimed.record)
        finally:
            self._is_over(claimed)

    def _is_over(self, claimed: ClaimedAlarm) -> None:
        self._ringer.is_over(claimed)
        with self._turn:
            self.under_way -= 1
        self._nudge()

    async def _fire(self, claimed: ClaimedAlarm, sent: float) -> None:
        errand = self._ringer.errand
        try:
            end = await errand.carry_out(claimed, sent)
        except FencepostError:
            raise
        except Exception as error:  # noqa: BLE001 -- whatever was wrong with this one, others are due
            say(errand.emit, "alarm_failed", claimed.record, error=described(error))
            self._count(failed=1)
            return
        became = Became.LOST if end is None else end.became
        if became is Became.DONE:
            self._count(fired=1)
        elif became in (Became.AGAIN, Became.DEAD):
            self._count(failed=1, dead=int(became is Became.DEAD))
        else:
            self._count(stale=1)

    def _count(self, *, fired: int = 0, failed: int = 0, stale: int = 0, dead: int = 0) -> None:
        with self._turn:
            more = (fired, failed, stale, dead)
            self.counts = [old + new for old, new in zip(self.counts, more, strict=True)]
