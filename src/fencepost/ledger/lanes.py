"""How a tick makes up slots of the past, lane by lane, behind the slots that are live."""

from __future__ import annotations

from fencepost.ledger.made_up import given_up, jitter_ends, made_up_as, oldest_owed
from fencepost.ledger.planning import OWED, TROUBLE, Note, note_of_span, told_safely
from fencepost.model.claim import Verdict, is_patient
from fencepost.model.plan import WAITS, newest_due
from fencepost.model.rules import CatchUp
from fencepost.model.schedule import EveryAfter, schedule_from
from fencepost.model.slot import RunKey

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.ledger.planning import Lane
    from fencepost.ledger.ticking import Tick
    from fencepost.model.definition import JobRecord
    from fencepost.model.schedule import Schedule

# How many slots of the past one tick looks at before it lets others go, and in how many lanes.
_LOOKS, _MOST_LANES = 200, 100


def make_up(tick: Tick) -> None:
    """Begin slots of the past, as far as there is room."""
    ask, desk = tick.ask, tick.desk
    freed = {end.attempt.key.job for end in ask.ended}
    looks = 0
    # Who asks for one job has patience of its own.
    for lane in desk.due_lanes(jobs=freed) if ask.only is None else desk.lanes(ask.only):
        if tick.enough() or looks >= _MOST_LANES:
            break
        unknown = tick.unknown
        _go_on(tick, lane)
        looks += unknown == tick.unknown  # what others know must not keep us from ours


def _go_on(tick: Tick, lane: Lane) -> None:
    desk, now = tick.desk, tick.now
    job = desk.job(lane.job)
    if job is None or job.retired:
        desk.put_lane(lane._replace(ended_at=now, stopped="the job is retired"))
        return
    try:
        if job.paused_until and now >= job.paused_until:
            job = tick.unpaused(job)
        schedule, begins = schedule_from(lane.spec or job.spec), _may_go_on_at(tick, lane, job)
    except Exception as error:  # noqa: BLE001 -- whatever is wrong with it, others are not to blame
        desk.put_lane(lane._replace(not_before=now + TROUBLE))
        tick.notes.append(Note("trouble", lane.job, about=(("error", told_safely(error)),)))
        return
    if begins > now:
        desk.put_lane(lane._replace(not_before=begins))
    else:
        _walk(tick, lane, job, schedule)


def _may_go_on_at(tick: Tick, lane: Lane, job: JobRecord) -> float:
    """Return when to go on with a lane: at once, unless its job or its order keeps it waiting."""
    if job.barred or _live_waits(job, now=tick.now):
        return tick.now + WAITS
    if lane.trigger != OWED:
        return 0.0
    first = oldest_owed(tick.desk, job.job)
    if first is not None and first.number != lane.number:
        return tick.now + WAITS
    if job.schedule is None or not job.catching_up.pause:  # read here: what cannot be is told of
        return 0.0
    return lane.not_before


def _live_waits(job: JobRecord, *, now: float) -> bool:
    """Say whether a live slot of a job waits for its lock.

    Such a slot leaves no record where every slot is made up, and looks at the lock now and then:
    one slot of the past after the other would keep it waiting for as long as there are any.
    """
    rules = job.catching_up
    if rules.catchup is not CatchUp.ALL or job.made_up_to:
        return False
    schedule = job.schedule
    if schedule is None or isinstance(schedule, EveryAfter):
        return False
    newest = newest_due(schedule, rules, job.job, now=now)
    return newest is not None and newest > job.watermark


def _walk(tick: Tick, lane: Lane, job: JobRecord, schedule: Schedule) -> None:
    desk, pause = tick.desk, job.catching_up.pause if lane.trigger == OWED else 0.0
    for _ in range(_LOOKS):
        slot = lane.next_slot(schedule)
        if slot is None:
            desk.put_lane(lane._replace(ended_at=tick.now))
            tick.notes.append(Note("backfilled", lane.job, about=(("lane", lane.number),)))
            return
        waits = desk.made_up(lane.job, lane.trigger) >= lane.max_active
        done = False if waits else _make_up_slot(tick, lane, job, slot)
        if done is None:  # this instance cannot: it does not know the job, or has no room
            break
        if not done:
            lane = lane._replace(not_before=tick.now + WAITS)
            break
        lane = lane.past(slot)
        if pause:
            lane = lane._replace(not_before=tick.now + pause)
            break
    desk.put_lane(lane)


def _make_up_slot(tick: Tick, lane: Lane, job: JobRecord, slot: int) -> bool | None:
    """Begin a slot of the past; True if it is done or begun, False if it has to wait."""
    known = tick.desk.newest_rerun(RunKey(job.job, slot))
    if known is not None and not known.state.terminal:
        return known.trigger != lane.trigger or lane.existing == "skip"
    job = tick.desk.job(job.job) or job  # as it was after the slot's runs were read
    rerun = made_up_as(lane, slot, known, pruned=job.pruned)
    if rerun is None:
        return True
    if lane.trigger == OWED:
        if jitter_ends(job, slot) > tick.now:
            return False
        if (passed := given_up(lane, job, slot, now=tick.now)) is not None:
            tick.desk.span(job.job, passed, apart=True)
            tick.notes.append(note_of_span(job.job, passed))
            return True
    return _begin(tick, lane, job, RunKey(job.job, slot, rerun=rerun))


def _begin(tick: Tick, lane: Lane, job: JobRecord, key: RunKey) -> bool | None:
    patient = is_patient(lane.trigger, job.catching_up)
    want = tick.want(key, job, lane.trigger, patient=patient)
    if want is None:
        return None
    claimed = tick.desk.claim(want)
    if claimed.verdict is Verdict.GO:
        tick.begin(claimed, job)
    elif claimed.verdict is Verdict.NO_ROOM:
        tick.full = True
        return None
    return claimed.verdict in (Verdict.GO, Verdict.ENDED)
