"""What is promised about schedules, and a pure function that finds where a history breaks it.

watermark   it never falls
one row     at no time two runs of one slot are live
belongs     a slot is one of the definition in force, and later than that definition, unless the
            one before it had the slot too; none starts early, or too soon after the last one
covered     every slot up to the watermark has a run, or lies in a recorded range
reasons     what was skipped or missed was so for a reason that the job's policy knows
ranges      no two recorded ranges of a job overlap
in order    what is made up for a job with catchup="all" is begun oldest first, but for live_first
one version the definition in force changes once for each deploy, unless its instances were silent
in force    after the storm the newest program's definitions are in force
settled     after the storm every slot that was due has ended, and everything is made up

The promises of ``run_checker`` hold as well, and are checked along. These events are known beside
its own: clock (``until``: what the ledger's clock shows at 0), heard, deployed, stands (of a job:
``token`` is its epoch, ``until`` since when, ``number`` its watermark, ``detail`` its schedule,
``holder`` its rules, ``state`` why it is barred), planned (a run that is new), pausing; at the end
calm, serves, span, lane.
"""

from __future__ import annotations

from itertools import pairwise

from fencepost.model.every import EveryAfter
from fencepost.model.named import NamedTuple
from fencepost.model.plan import starts_at
from fencepost.model.rules import CatchUp, rules_from
from fencepost.model.run import State
from fencepost.model.schedule import schedule_from
from fencepost.model.slot import parsed
from fencepost.testing.checker import Violation, in_order
from fencepost.testing.run_checker import check_runs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from fencepost.model.rules import Rules
    from fencepost.model.schedule import Schedule
    from fencepost.model.slot import RunKey
    from fencepost.testing.history import Event

# A version whose instances were silent for so long may be replaced by another one, if that was
# heard meanwhile, for a while.
_SILENT, _ALONE = 55.0, 30.0
_TICKED = frozenset({"schedule", "catchup"})
# Slots of these kinds are begun oldest first where every one is made up.
_IN_ORDER = _TICKED | {"owed"}
# Why an owed slot is recorded in place of being made up.
_GIVEN_UP = frozenset({"coalesced", "start_deadline"})
# By which word of its policy a run may have ended so: the word, and the values that allow it.
_ENDS: dict[tuple[str, str], tuple[str, frozenset[str]]] = {
    ("skipped", "lock_held"): ("overlap", frozenset({"skip", "allow"})),
    ("skipped", "waiting_full"): ("overlap", frozenset({"reschedule", "replace"})),
    ("failed", "lock_held"): ("overlap", frozenset({"fail"})),
    ("failed", "superseded"): ("retry_until", frozenset({"next_slot"})),
    ("failed", "lost"): ("on_loss", frozenset({"fail"})),
    ("cancelled", "cancelled"): ("overlap", frozenset({"replace"})),
}
_ALWAYS = frozenset({("failed", "error"), ("failed", "gave_up"), ("succeeded", "")})


def check_cluster(history: Iterable[Event]) -> list[Violation]:
    """Return every broken promise about schedules, runs and leases, in the order of time."""
    ordered = in_order(history)
    reader = _Reader()
    for position, event in enumerate(ordered):
        reader.read(position, event)
    reader.conclude()
    found = [*reader.violations, *check_runs(ordered)]
    return sorted(found, key=lambda violation: violation.position)


class _Epoch(NamedTuple):
    """One definition of a job, from when it was in force."""

    number: int
    since: float
    mark: int
    schedule: Schedule | None
    rules: Rules
    event: Event

    def has(self, slot: int) -> bool:
        """Say whether a slot is one of it."""
        return self.schedule is not None and self.schedule.contains(slot)


class _Job:
    """A job, as far as it has been read."""

    def __init__(self) -> None:
        self.epochs: list[_Epoch] = []
        self.mark = 0
        self.barred: set[str] = set()  # why it ever was
        self.slots: set[int] = set()  # which have a run
        self.newest = 0  # slot that a tick has begun
        self.live: dict[int, set[str]] = {}
        self.ends: dict[int, float] = {}  # when the newest run of a slot ended
        self.spans: list[Event] = []
        self.lanes: list[Event] = []
        self.serves: Event | None = None

    def covers(self, slot: int) -> bool:
        """Say whether something is on record about a slot."""
        return (
            slot in self.slots
            or any(span.token <= slot <= span.until for span in self.spans)
            or any(lane.state == "open" and lane.token <= slot < lane.until for lane in self.lanes)
        )

    def gave_up(self, slot: int) -> bool:
        """Say whether a slot was to be made up, until a newer one was due or it was too late."""
        return any(
            span.detail in _GIVEN_UP and span.token <= slot <= span.until for span in self.spans
        )

    @property
    def ordered(self) -> bool:
        """Whether its slots are begun in their order, whichever of its definitions is in force."""
        rules = [epoch.rules for epoch in self.epochs]
        return all(one.catchup is CatchUp.ALL and not one.live_first for one in rules)


class _Reader:
    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self._jobs: dict[str, _Job] = {}
        self._policies: dict[str, dict[str, str]] = {}
        self._clock = 0.0
        self._calm: Event | None = None
        self._deploys: list[Event] = []
        self._heard: dict[int, list[float]] = {}
        self._paused: set[str] = set()
        self._rows: list[Event] = []
        self._keys: dict[str, RunKey] = {}
        self._position = 0
        self._event: Event
        self._readers = {
            "clock": self._clock_shows,
            "declared": self._declared,
            "deployed": self._deployed,
            "heard": self._was_heard,
            "stands": self._stands,
            "pausing": self._pausing,
            "planned": self._planned,
            "claimed": self._claimed,
            "settled": self._changed,
            "became": self._changed,
            "calm": self._calms,
            "serves": self._serves,
            "row": self._row,
            "span": self._span,
            "lane": self._lane,
        }

    def read(self, position: int, event: Event) -> None:
        self._position, self._event = position, event
        reader = self._readers.get(event.what)
        if reader is not None:
            reader(event)

    def conclude(self) -> None:
        """Look at what there is in the end."""
        allowed = len(self._deploys) + 2 * self._silences()
        for name, job in self._jobs.items():
            changes = len(job.epochs) - 1
            if changes > allowed:
                says = f"the definition of {name} changed {changes} times, with {allowed} reasons"
                self._found("one version", says, about=job.epochs[-1].event)
            self._conclude_slots(name, job)
            self._conclude_spans(name, job)
            if self._calm is not None and job.serves is not None:
                self._conclude_calm(name, job, job.serves)
        for row in self._rows:
            self._conclude_row(row)

    # Of the cluster.

    def _clock_shows(self, event: Event) -> None:
        self._clock = event.until

    def _declared(self, event: Event) -> None:
        words = (word.partition("=") for word in event.detail.split())
        self._policies[event.name] = {name: value for name, _, value in words}

    def _deployed(self, event: Event) -> None:
        self._deploys.append(event)

    def _was_heard(self, event: Event) -> None:
        self._heard.setdefault(event.number, []).append(event.at)

    def _pausing(self, event: Event) -> None:
        self._paused.add(event.name)

    def _calms(self, event: Event) -> None:
        self._calm = event

    def _serves(self, event: Event) -> None:
        self._job(event.name).serves = event

    # Of jobs and runs.

    def _stands(self, event: Event) -> None:
        job = self._job(event.name)
        if event.number < job.mark:
            says = f"the watermark of {event.name} fell from {job.mark} to {event.number}"
            self._found("watermark", says)
        job.mark = max(job.mark, event.number)
        if event.state:
            job.barred.add(event.state)
        if not job.epochs or job.epochs[-1].number != event.token:
            schedule = schedule_from(event.detail) if event.detail else None
            rules = rules_from(event.holder)
            epoch = _Epoch(event.token, event.until, event.number, schedule, rules, event)
            job.epochs.append(epoch)

    def _planned(self, event: Event) -> None:
        key = self._key(event.run)
        job, now = self._job(key.job), event.at + self._clock
        job.slots.add(key.slot)
        if event.detail in _IN_ORDER:
            if key.slot < job.newest and job.ordered:
                self._found("in order", f"{event.run} was begun after {job.newest}")
            job.newest = max(job.newest, key.slot)
        if key.slot > now:
            self._found("belongs", f"{event.run} was planned at {now:.3f}, before it was due")
            return
        if event.detail not in _TICKED:
            if not any(epoch.has(key.slot) for epoch in job.epochs):
                self._found("belongs", f"{event.run} is a slot of no definition of {key.job}")
            return
        epochs = [epoch for epoch in job.epochs if epoch.number == event.number]
        if not epochs or epochs[-1] is not job.epochs[-1]:
            says = f"{event.run} was planned under epoch {event.number}, which is not in force"
            self._found("belongs", says)
        elif not self._due_under(job.epochs, key):
            since, spec = epochs[-1].since, epochs[-1].event.detail
            says = f"{event.run} is no slot of {spec}, which is in force since {since:.3f}"
            self._found("belongs", says)
        elif self._too_early(epochs[-1], key, now):
            self._found("belongs", f"{event.run} was planned at {now:.3f}, before its jitter ended")
        elif isinstance(epochs[-1].schedule, EveryAfter):
            self._compare_end(job, key, epochs[-1].schedule)

    def _due_under(self, epochs: list[_Epoch], key: RunKey) -> bool:
        """Say whether a slot is due under the last definition, or was under all since its own."""
        for place in range(len(epochs) - 1, -1, -1):
            epoch = epochs[place]
            if not epoch.has(key.slot):
                return False
            if key.slot > (epoch.since if place else epoch.mark):
                return True
        return False

    def _too_early(self, epoch: _Epoch, key: RunKey, now: float) -> bool:
        schedule = epoch.schedule
        if schedule is None or isinstance(schedule, EveryAfter):
            return False
        return now < starts_at(schedule, epoch.rules, key.job, key.slot) - 1e-6

    def _compare_end(self, job: _Job, key: RunKey, schedule: EveryAfter) -> None:
        """See that a slot which follows the last run does so, and as late as it should."""
        others = [run for slot, runs in job.live.items() if slot != key.slot for run in runs]
        if others:
            self._found("belongs", f"{key} was planned while {others[0]} was live")
        elif job.ends and key.slot < schedule.after_end(job.ends[max(job.ends)]):
            self._found("belongs", f"{key} comes too soon after the run before it")

    def _claimed(self, event: Event) -> None:
        self._lives(event, live=True)

    def _changed(self, event: Event) -> None:
        self._lives(event, live=not State(event.state).terminal)

    def _lives(self, event: Event, *, live: bool) -> None:
        key = self._key(event.run)
        runs = self._job(key.job).live.setdefault(key.slot, set())
        if not live:
            runs.discard(event.run)
            self._job(key.job).ends[key.slot] = event.at + self._clock
            return
        runs.add(event.run)
        if len(runs) > 1:
            self._found("one row", f"{' and '.join(sorted(runs))} are live at the same time")

    # At the end.

    def _row(self, event: Event) -> None:
        self._rows.append(event)
        key = self._key(event.run)
        self._job(key.job).slots.add(key.slot)

    def _span(self, event: Event) -> None:
        self._job(event.name).spans.append(event)

    def _lane(self, event: Event) -> None:
        self._job(event.name).lanes.append(event)

    def _conclude_slots(self, name: str, job: _Job) -> None:
        ends = [epoch.since for epoch in job.epochs[1:]] + [float(job.mark)]
        for place, (epoch, end) in enumerate(zip(job.epochs, ends, strict=True)):
            schedule = epoch.schedule
            if schedule is None or isinstance(schedule, EveryAfter):
                continue
            start = epoch.since if place else float(epoch.mark)
            for slot in schedule.between(int(start) + 1, int(min(end, job.mark)) + 1):
                if not job.covers(slot):
                    says = f"nothing is on record about {name} at {slot}, of epoch {epoch.number}"
                    self._found("covered", says, about=epoch.event)
        for lane in job.lanes:
            spec = lane.detail or (job.epochs[0].event.detail if len(job.epochs) == 1 else "")
            if lane.state != "ended" or not spec:
                continue
            for slot in schedule_from(spec).between(lane.token, lane.until):
                if slot not in job.slots and not job.gave_up(slot):
                    self._found("covered", f"{name} at {slot} was not made up", about=lane)

    def _conclude_spans(self, name: str, job: _Job) -> None:
        spans = sorted(job.spans, key=lambda span: span.token)
        for one, other in pairwise(spans):
            if other.token <= one.until:
                says = f"two ranges of {name} overlap, at {other.token} and until {one.until:.0f}"
                self._found("ranges", says, about=other)
        for span in spans:
            allowed = self._may_pass(name, job, span)
            if not allowed:
                says = f"{name} from {span.token} on was {span.state} ({span.detail})"
                self._found("reasons", says, about=span)

    def _may_pass(self, name: str, job: _Job, span: Event) -> bool:
        """Say whether a range could be recorded so, under the definition that was in force then."""
        if span.detail in ("orphaned", "quarantined"):
            return span.detail in job.barred
        if span.state == "skipped":
            edited = span.detail == "schedule_changed" and len(job.epochs) > 1
            return edited or (span.detail == "paused" and name in self._paused)
        at = float(span.number)
        # Epochs that differ in their rules only share the instant since which time goes on.
        since = [epoch.since for epoch in job.epochs] + [float("inf")]
        later = [min(end for end in since if end > epoch.since) for epoch in job.epochs]
        rules = [
            epoch.rules
            for epoch, end in zip(job.epochs, later, strict=True)
            if epoch.since <= at + 1 and at <= end
        ]
        if span.detail == "coalesced":
            slot = self._key(span.run).slot
            return slot in job.slots and any(one.catchup is CatchUp.LATEST for one in rules)
        if span.detail == "start_deadline":
            return any(one.deadline is not None for one in rules)
        known = span.detail in ("limit", "window")
        return known and any(one.catchup is CatchUp.ALL for one in rules)

    def _conclude_row(self, row: Event) -> None:
        name, state = self._key(row.run).job, State(row.state)
        ended = (row.state, row.detail)
        if not state.terminal or ended in _ALWAYS:
            return
        policy = self._policies.get(name, {})
        word, values = _ENDS.get(ended, ("", frozenset[str]()))
        if word and policy.get(word) in values:
            return
        if ended == ("missed", "start_deadline") and policy.get("start_deadline"):
            return
        if ended == ("skipped", "paused") and name in self._paused:
            return
        if ended == ("skipped", "schedule_changed") and len(self._job(name).epochs) > 1:
            return
        if ended == ("missed", "orphaned") and "orphaned" in self._job(name).barred:
            return
        self._found("reasons", f"{row.run} ended as {row.state} ({row.detail})", about=row)

    def _conclude_calm(self, name: str, job: _Job, serves: Event) -> None:
        assert self._calm is not None, "nothing is promised before it"
        if not job.epochs or job.epochs[-1].event.detail != serves.detail:
            now = job.epochs[-1].event.detail if job.epochs else "nothing"
            says = f"{name} is {now}, but the newest program has {serves.detail}"
            self._found("in force", says, about=serves)
            return
        schedule, ends = job.epochs[-1].schedule, self._calm.until
        if schedule is not None and not isinstance(schedule, EveryAfter):
            newest = schedule.latest(ends)
            if newest is not None and newest > job.mark:
                says = f"{name} was due at {newest}, and is decided up to {job.mark} only"
                self._found("settled", says, about=serves)
        for row in self._rows:
            key = self._key(row.run)
            if key.job == name and key.slot <= ends and not State(row.state).terminal:
                self._found("settled", f"{row.run} is still {row.state}", about=row)
        for lane in job.lanes:
            if lane.state == "open":
                self._found("settled", f"lane {lane.number} of {name} is still open", about=lane)

    def _silences(self) -> int:
        """Count how often a version fell silent and came back, though nobody had deployed it.

        While the ledger is away everybody is silent: that is no reason for anything.
        """
        count = 0
        for version, times in self._heard.items():
            others = [at for other, ats in self._heard.items() if other != version for at in ats]
            for before, after in pairwise(times):
                if after - before >= _SILENT:
                    between = [at for at in others if before < at < after]
                    alone = max(between, default=0.0) - min(between, default=0.0)
                    count += alone >= _ALONE and not self._deployed_between(version, before, after)
        return count

    def _deployed_between(self, version: int, before: float, after: float) -> bool:
        return any(
            deploy.number == version and before < deploy.at <= after for deploy in self._deploys
        )

    def _job(self, name: str) -> _Job:
        job = self._jobs.get(name)
        if job is None:
            job = self._jobs[name] = _Job()
        return job

    def _key(self, run: str) -> RunKey:
        key = self._keys.get(run)
        if key is None:
            key = self._keys[run] = parsed(run)
        return key

    def _found(self, rule: str, says: str, *, about: Event | None = None) -> None:
        self.violations.append(Violation(rule, says, about or self._event, self._position))
