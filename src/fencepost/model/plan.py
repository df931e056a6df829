"""To plan is to say what is to become of every slot of a job that is due and undecided.

``plan`` reads where a job stands and returns a value; a ledger carries it out, and moves the
watermark in the same transaction. The newest due slot is found without a walk, however long nobody
looked; older ones become one recorded range, or are taken one at a time.
"""

from __future__ import annotations

from fencepost.model.named import NamedTuple
from fencepost.model.rules import CatchUp, Rules
from fencepost.model.run import State
from fencepost.model.schedule import EveryAfter, delay
from fencepost.model.slot import RunKey

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.model.schedule import Schedule

# How often a slot is looked at that has to wait for others of its job.
WAITS = 1.0


class Span(NamedTuple):
    """All slots of a job from ``first`` to ``last``, decided at once, and why."""

    first: int
    last: int
    state: State
    reason: str
    into: str = ""  # the run that stands for them


def goes_on(last: Span, span: Span, watermark: int) -> bool:
    """Say whether a range goes on where the last one of its job ended, for the same reason.

    Where the job stands beyond that end, something else was decided in between.
    """
    alike = (last.state, last.reason, last.into) == (span.state, span.reason, "")
    return alike and not span.into and last.last == watermark < span.first


class Agenda(NamedTuple):
    """Where a job stands with its schedule.

    ``watermark`` is the last instant up to which every slot is decided. ``owed`` is the newest
    slot of an outage that is being made up. ``barred`` says why nothing may run, if so.
    """

    job: str
    watermark: int
    owed: int = 0
    barred: str = ""


class Past(NamedTuple):
    """What a delay after completion is counted from: the newest run, if there was any."""

    slot: int = 0
    live: bool = False
    ended_at: float = 0.0


NEVER_RAN = Past()


class Plan(NamedTuple):
    """What is to be done about a job now.

    ``slot`` is to be claimed, ``spans`` are to be recorded; then the job stands at ``watermark``,
    and is to be looked at again at ``next_due``. ``later`` are older slots that are made up behind
    the newer ones, from the first to the last.
    """

    slot: int | None
    spans: tuple[Span, ...]
    watermark: int
    next_due: float | None
    owed: int = 0
    later: tuple[int, int] | None = None


def plan(
    schedule: Schedule, rules: Rules, agenda: Agenda, *, now: float, past: Past = NEVER_RAN
) -> Plan:
    """Decide about every slot that is due at the ledger's time ``now``."""
    if isinstance(schedule, EveryAfter):
        return _after_the_last(schedule, agenda, past, now=now)
    newest = newest_due(schedule, rules, agenda.job, now=now)
    if newest is None or newest <= agenda.watermark:
        return _nothing(schedule, rules, agenda)
    first = schedule.after(agenda.watermark)
    assert first is not None, "there is one that is due"
    if agenda.barred:
        state = State.MISSED if agenda.barred == "orphaned" else State.SKIPPED
        return _passed(schedule, rules, agenda, Span(first, newest, state, agenda.barred))
    if rules.catchup is CatchUp.ALL:
        return _every(schedule, rules, agenda, first, newest, now=now)
    return _newest(schedule, rules, agenda, first, newest, now=now)


def newest_due(schedule: Schedule, rules: Rules, job: str, *, now: float) -> int | None:
    """Return the newest slot whose time to start has come, its jitter included."""
    newest = schedule.latest(now)
    if newest is None or not rules.jitter or starts_at(schedule, rules, job, newest) <= now:
        return newest
    return schedule.latest(newest - 1)  # whose jitter ends before the next slot


def starts_at(schedule: Schedule, rules: Rules, job: str, slot: int) -> float:
    """Return when a slot is to start: at its instant, or as much later as its jitter says."""
    if not rules.jitter:
        return slot
    return slot + delay(job, slot, jitter=rules.jitter, next_slot=schedule.after(slot))


def next_start(schedule: Schedule, rules: Rules, job: str, after: float) -> float | None:
    """Return when the first slot later than ``after`` is to start; None if there is none."""
    if isinstance(schedule, EveryAfter):
        return float(schedule.after_end(after))
    slot = schedule.after(after)
    return None if slot is None else starts_at(schedule, rules, job, slot)


def _nothing(schedule: Schedule, rules: Rules, agenda: Agenda) -> Plan:
    due = next_start(schedule, rules, agenda.job, agenda.watermark)
    return Plan(None, (), agenda.watermark, due, agenda.owed)


def _passed(schedule: Schedule, rules: Rules, agenda: Agenda, *spans: Span) -> Plan:
    """Return the plan that only records spans, up to the newest slot that is due."""
    mark = spans[-1].last
    return Plan(None, spans, mark, next_start(schedule, rules, agenda.job, mark))


def _newest(
    schedule: Schedule, rules: Rules, agenda: Agenda, first: int, newest: int, *, now: float
) -> Plan:
    """Run the newest slot, if it is not too late for it; the older ones were missed."""
    if _too_late(schedule, rules, agenda.job, newest, now=now):
        return _passed(schedule, rules, agenda, Span(first, newest, State.MISSED, "start_deadline"))
    spans: tuple[Span, ...] = ()
    if first < newest:
        last = schedule.latest(newest - 1)
        assert last is not None, "the first is one"
        if rules.catchup is CatchUp.LATEST:
            into = str(RunKey(agenda.job, newest))
            spans = (Span(first, last, State.MISSED, "coalesced", into),)
        else:
            spans = (Span(first, last, State.MISSED, "start_deadline"),)
    return Plan(newest, spans, newest, next_start(schedule, rules, agenda.job, newest))


def _too_late(schedule: Schedule, rules: Rules, job: str, slot: int, *, now: float) -> bool:
    deadline = rules.deadline
    return deadline is not None and now > starts_at(schedule, rules, job, slot) + deadline


def _every(
    schedule: Schedule, rules: Rules, agenda: Agenda, first: int, newest: int, *, now: float
) -> Plan:
    """Take the oldest slot; what is beyond the limits was missed, and is counted once."""
    spans: list[Span] = []
    owed = agenda.owed if agenda.owed > agenda.watermark else 0
    oldest: int | None = first
    if not owed:
        oldest = _cut(schedule, rules, agenda.job, (first, newest), spans, now=now)
        owed = newest if first < newest else 0
    if oldest is None:
        return _passed(schedule, rules, agenda, *spans)
    if rules.live_first and oldest < newest:
        before = schedule.latest(newest - 1)
        assert before is not None, "the oldest is one"
        due = next_start(schedule, rules, agenda.job, newest)
        return Plan(newest, tuple(spans), newest, due, 0, later=(oldest, before))
    due = next_start(schedule, rules, agenda.job, oldest)
    if due is not None and due <= now + rules.pause and rules.pause:
        due = now + rules.pause
    if owed <= oldest:
        owed = 0
    return Plan(oldest, tuple(spans), oldest, due, owed)


def _cut(
    schedule: Schedule,
    rules: Rules,
    job: str,
    due: tuple[int, int],
    spans: list[Span],
    *,
    now: float,
) -> int | None:
    """Record what is too old or too much to be made up; return the oldest that is left."""
    first, newest = due
    window = rules.window if rules.start_deadline is None else rules.start_deadline
    old = newest_due(schedule, rules, job, now=now - window - 1e-6)
    if old is not None and old >= first:
        last = min(newest, old)
        spans.append(Span(first, last, State.MISSED, "window"))
        following = schedule.after(last)
        if following is None or following > newest:
            return None
        first = following
    kept = newest
    for _ in range(rules.limit - 1):
        if kept <= first:
            return first
        before = schedule.latest(kept - 1)
        assert before is not None, "the first is one"
        kept = before
    if kept > first:
        last_cut = schedule.latest(kept - 1)
        assert last_cut is not None, "the first is one"
        spans.append(Span(first, last_cut, State.MISSED, "limit"))
    return kept


def _after_the_last(schedule: EveryAfter, agenda: Agenda, past: Past, *, now: float) -> Plan:
    """Plan a delay after completion: the next slot exists once the last run has ended."""
    if past.live:
        return Plan(None, (), agenda.watermark, now + WAITS)
    slot = schedule.after_end(max(float(agenda.watermark), past.ended_at))
    if slot > now:
        return Plan(None, (), agenda.watermark, float(slot))
    if agenda.barred:
        # Counted from now on: while nothing may run, nothing is owed either.
        return Plan(None, (), int(now), float(schedule.after_end(now)))
    return Plan(slot, (), slot, float(schedule.after_end(slot)))
