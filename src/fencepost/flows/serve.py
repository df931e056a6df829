"""To serve is to make every due slot happen, as one of any number of instances without a leader.

One flow asks the ledger what is due and tells it what has ended, both in one transaction; a crew
carries the attempts out. It never iterates over a schedule of its own: whatever happened meanwhile,
sleep, deploy or crash, the next tick decides from what the ledger has.
"""

from __future__ import annotations

from fencepost.errors import FencepostError, OutcomeUnknown, RunLost, StoreUnavailable
from fencepost.ledger.planning import LOOK, Ask
from fencepost.model.event import JobEvent
from fencepost.model.named import NamedTuple, Protocol
from fencepost.model.run import State
from fencepost.model.slot import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fencepost.flows.course import Doors
    from fencepost.ledger.api import Attempt
    from fencepost.ledger.planning import Asked, Begun, End, Instance, Note, Place, Ticked
    from fencepost.model.claim import Want
    from fencepost.model.definition import Definition
    from fencepost.model.ending import Settled
    from fencepost.model.run import RunRecord

# By how much the ledger's clock must differ from what ours lets expect.
_JUMP = 5.0
_PRUNE = 60.0
_MOST_PRUNED = 500
# How many jobs are made known in one transaction.
BATCH = 1000
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0
# Who is to stop has no time for long ones.
_STOPPING_PAUSE = 0.5
# How often one who stops asks again what it was granted, if no answer comes.
_MOST_DOUBTS = 5


_UNRECORDED = (
    "the ledger has not confirmed this end: unless it is on record, the run is resumed by the next "
    "instance, or recorded as failed (lost) if its job has on_loss='fail'"
)


class Pace(NamedTuple):
    """How often an instance says that it lives, looks for those who do not, and looks at all."""

    attend: float = 5.0
    sweep: float = 1.0
    look: float = LOOK


class Telling(Protocol):
    """Who has told how an attempt ended, and waits for that to be on record."""

    @property
    def end(self) -> End:
        """What was told."""

    def answer(self, answer: RunRecord | RunLost, /) -> None:
        """Take the run as it is now, or why the end was not recorded."""


class Told(NamedTuple):
    """An end that was told, with what takes the answer."""

    end: End
    answer: Callable[[RunRecord | RunLost], None]


class Crew(Protocol):
    """Who carries attempts out: threads, tasks, or the simulator's."""

    def room(self, ending: int) -> int:
        """Say how many more attempts may be claimed, once so many of those under way have ended."""

    def free(self, ending: int) -> int:
        """Say how many of those would begin at once."""

    @property
    def busy(self) -> bool:
        """Whether any attempt has not ended."""

    @property
    def stopping(self) -> bool:
        """Whether nothing more is to begin."""

    def left(self) -> float:
        """Say how many seconds an instance that is to stop may still wait; else that has no end."""

    def begin(self, begun: Begun, sent: float) -> None:
        """Have an attempt carried out."""

    def told(self) -> Sequence[Telling]:
        """Take the ends that were told since the last time."""

    async def rest(self, seconds: float) -> None:
        """Wait until an end is told or a stop is asked for, at most so long."""


class Office(NamedTuple):
    """What an instance knows and whom it tells."""

    instance: Instance
    definitions: Callable[[], Sequence[Definition]]
    want: Callable[[Asked], Want | None]
    stirs: Callable[[], frozenset[str]]
    emit: Callable[[JobEvent], None]
    known: Callable[[], int] | None = None  # how many jobs there are by now, if that may change
    pace: Pace = Pace()
    rivals: Callable[[], Mapping[str, Sequence[str]]] = dict  # jobs that share a lock


async def serve(doors: Doors, office: Office, crew: Crew) -> None:
    """Make what is due happen until the crew is told to stop, and has."""
    await _Serving(doors, office, crew).until_stopped()


class _Serving:
    def __init__(self, doors: Doors, office: Office, crew: Crew) -> None:
        self._doors, self._office, self._crew = doors, office, crew
        self._pace = office.pace
        self._planner, self._clock = doors.ledger.planner, doors.world.clocks.boottime
        self._attend_at = self._sweep_at = self._clock()
        self._prune_at = self._clock() + _PRUNE * doors.world.dice()
        self._told: list[Telling] = []
        self._ask: Ask | None = None  # one whose answer was lost
        self._announced = 0
        self._left: Place | None = None  # how far the last tick came, if not to the end
        self._unknown = False  # whether some of our jobs are still to be announced again
        self._pause = _FIRST_PAUSE
        self._away = False  # whether the ledger did not answer when it was last asked
        self._off = 0.0
        self._ahead: tuple[float, float] | None = None  # of our clock, at least and at most

    async def until_stopped(self) -> None:
        crew = self._crew
        await self._announce()
        try:
            while not crew.stopping or (self._unfinished and crew.left() > 0):
                pause = await self._step()
                await crew.rest(min(pause, max(0.0, crew.left())))
        except BaseException:
            await self._find_granted()
            raise
        self._give_up()
        if self._away:
            return  # it will be taken for gone in a minute
        try:
            await self._planner.depart(self._office.instance)
        except FencepostError as error:
            self._say("unconfirmed", error=str(error))  # it will be taken for gone in a minute

    @property
    def _unfinished(self) -> bool:
        return self._crew.busy or bool(self._told) or self._in_doubt

    def _give_up(self) -> None:
        """Answer those whose end was not recorded in the time that there was, and tell of it."""
        left, self._told = [*self._told, *self._crew.told()], []
        for told in left:
            attempt = told.end.attempt
            self._office.emit(unrecorded(attempt, told.end.settled))
            reason = "its end was not recorded before its instance stopped"
            told.answer(RunLost(str(attempt.key), token=attempt.token, reason=reason))

    @property
    def _in_doubt(self) -> bool:
        """Whether we may have been granted what we do not know of; after some tries we give up."""
        return self._ask is not None and self._ask.again <= _MOST_DOUBTS

    async def _announce(self, *, start: int = 0) -> None:
        """Make our jobs known, from the one with that number on."""
        known = self._office.known
        count = 0 if known is None else known()  # first: one that is declared meanwhile comes later
        await announce(self._doors, self._office, start=start)
        self._announced = count

    async def _step(self) -> float:
        """Tick once; return how long to rest."""
        self._told += self._crew.told()  # also if they cannot be told yet: else it would not rest
        try:
            await self._see_to_others()
            ticked, sent = await self._tick()
        except (OutcomeUnknown, StoreUnavailable) as error:
            return self._try_again(error)
        except FencepostError as error:
            # The ledger refuses, as it does if it is an old copy: nothing runs until it is seen to.
            self._say("refused", error=str(error))
            return _LONGEST_PAUSE
        self._pause, self._ask, self._away = _FIRST_PAUSE, None, False
        if ticked.now:
            self._heed_clock(ticked.now, sent)
        self._answer(ticked)
        for begun in ticked.begun:
            self._crew.begin(begun, sent)
        for note in ticked.notes:
            self._note(note)
        if ticked.off:
            self._note_clock(ticked.off)
        return self._rest(ticked)

    async def _tick(self) -> tuple[Ticked, float]:
        crew, now = self._crew, self._clock()
        ask = self._ask
        if ask is None:
            # Whoever has told its end needs its place no more, once that is on record.
            ending = len(self._told)
            room = 0 if crew.stopping else max(0, crew.room(ending))
            sweep = now >= self._sweep_at and not crew.stopping
            ask = Ask(
                self._office.want,
                self._doors.world.nonce(),
                room,
                free=max(0, crew.free(ending)),
                ended=[told.end for told in self._told],
                sweep=sweep,
                stirs=self._office.stirs(),
                since=self._left,
                rivals=self._office.rivals(),
            )
            if sweep:
                self._sweep_at = now + self._pace.sweep
        elif crew.stopping:
            ask = ask._replace(room=0)
        self._ask = ask  # until its answer is known, it is the only one
        sent = self._clock()
        return await self._planner.tick(ask), sent

    async def _find_granted(self) -> None:
        """Leave what a tick was granted whose answer nobody hears to the crew, to be given back."""
        if self._ask is None:
            return
        ask = self._ask._replace(room=0, ended=(), again=self._ask.again + 1, sweep=False)
        try:
            sent = self._clock()
            for begun in (await self._planner.tick(ask)).begun:
                self._crew.begin(begun, sent)
        except FencepostError as error:
            self._say("unconfirmed", error=str(error))

    def _answer(self, ticked: Ticked) -> None:
        self._left = ticked.left
        answered, self._told = self._told[: len(ticked.ended)], self._told[len(ticked.ended) :]
        for told, answer in zip(answered, ticked.ended, strict=True):
            told.answer(answer)

    def _try_again(self, error: FencepostError) -> float:
        if self._ask is not None:
            unknown = isinstance(error, OutcomeUnknown)
            doubtful = unknown or self._ask.again
            self._ask = self._ask._replace(again=self._ask.again + 1) if doubtful else None
        self._say("unconfirmed", error=str(error))
        self._away = True
        pause = self._pause * (0.5 + self._doors.world.dice())
        self._pause = min(self._pause * 2, _LONGEST_PAUSE)
        return min(pause, _STOPPING_PAUSE) if self._crew.stopping else pause

    def _rest(self, ticked: Ticked) -> float:
        if ticked.full and not self._crew.room(0):
            due = self._pace.sweep  # what is due waits for room, and room makes itself heard
        else:
            due = self._pace.look if ticked.pause is None else ticked.pause
        now = self._clock()
        due = min(due, self._pace.look, ticked.soon)
        return max(0.0, min(due, self._attend_at - now, self._sweep_at - now))

    async def _see_to_others(self) -> None:
        """Say that we live, and see to instances that do not; forget what is old."""
        now = self._clock()
        if now >= self._attend_at:
            notes = await self._planner.attend(self._office.instance)
            self._attend_at = now + self._pace.attend
            if self._unknown or any(note.what == "unknown_instance" for note in notes):
                # We were away for so long that others took us for gone.
                self._unknown = True
                await self._announce()
                self._unknown = False
            for note in notes:
                if note.what == "clock":
                    self._note_clock(off_of(note))
                elif note.what != "unknown_instance":
                    self._note(note)
        known = self._office.known
        if known is not None and known() > self._announced and not self._crew.stopping:
            await self._announce(start=self._announced)
        if now >= self._prune_at and not self._crew.stopping:
            self._prune_at = now + _PRUNE
            if await self._planner.prune(most=_MOST_PRUNED) >= _MOST_PRUNED:
                self._prune_at = now + self._pace.sweep

    # What to tell.

    def _note_clock(self, off: float) -> None:
        if bool(off) != bool(self._off):
            what = "clock_disagrees" if off else "clock_agrees"
            self._say(what, off=f"{off:+.1f}s")
        self._off = off

    def _heed_clock(self, now: float, sent: float) -> None:
        """Notice that the ledger's clock jumped, and tell of us at once by the time it has now.

        So what it was is on record, and whoever looks next finds out if it is set back. How far it
        is ahead of ours is known as exactly as the answer was quick: to be paused is no jump.
        """
        before, self._ahead = self._ahead, (now - self._clock(), now - sent)
        if before is None:
            return
        least, most = self._ahead
        if least > before[1] + _JUMP or most < before[0] - _JUMP:
            self._say("clock_jumped", by=f"{least - before[0]:+.0f}s")
            self._attend_at = self._clock()

    def _say(self, what: str, **about: object) -> None:
        pairs = (("instance", self._office.instance.name), *about.items())
        self._office.emit(JobEvent(what, "", "", 0, pairs))

    def _note(self, note: Note) -> None:
        self._office.emit(event_of(note))


def off_of(note: Note) -> float:
    """Return by how much our clock disagrees, as the ledger noted when we last told of us."""
    return next((off for _, off in note.about if isinstance(off, float)), 0.0)


def event_of(note: Note) -> JobEvent:
    """Return what a tick decided as an event."""
    instants = ("first", "last")
    about = tuple(
        (name, shown(value) if name in instants and isinstance(value, int) else value)
        for name, value in note.about
    )
    return JobEvent(note.what, note.job, note.run, 0, about)


def unrecorded(attempt: Attempt, settled: Settled) -> JobEvent:
    """Return the event that tells of an end which the ledger could not be told of."""
    about = (
        ("ended", "released" if settled.state is State.PENDING else settled.state.value),
        ("note", _UNRECORDED),
    )
    return JobEvent("unrecorded", attempt.key.job, str(attempt.key), attempt.token, about)


async def announce(doors: Doors, office: Office, *, start: int = 0) -> None:
    """Make the jobs of an instance known, a batch at a time, from the given one on."""
    definitions = list(office.definitions())[start:]
    for first in range(0, max(1, len(definitions)), BATCH):
        batch = definitions[first : first + BATCH]
        pause = _FIRST_PAUSE
        while True:
            try:
                notes = await doors.ledger.planner.announce(office.instance, batch)
                break
            except (OutcomeUnknown, StoreUnavailable):
                if pause > _LONGEST_PAUSE:
                    raise
                await doors.world.sleep(pause)
                pause *= 2
        for note in notes:
            office.emit(event_of(note))
