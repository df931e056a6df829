"""Evidence is all that a ledger has on record, as one value that can be written down and read back.

As text it has one JSON object on a line; its ``kind`` says what it is: ledger (when it was read),
job, run, range, lane, event, lease or mark. So the proof can be had elsewhere, and by other
programs.
"""

from __future__ import annotations

import json
from math import inf
from typing import NamedTuple

from fencepost.errors import FencepostError, Misuse
from fencepost.ledger.planning import Lane, SpanRecord
from fencepost.model.definition import JobRecord
from fencepost.model.ending import UNFINISHED
from fencepost.model.fenced import LEASE_CHANGED
from fencepost.model.lease import Holder
from fencepost.model.name import base
from fencepost.model.plan import Span
from fencepost.model.run import LAPSED, STOPPING, RunEvent, RunRecord, State
from fencepost.model.slot import parsed
from fencepost.testing.history import Event

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Any

_AFTER = {what: state for state, what in UNFINISHED.items()}
_LOST, _FORCED = "attempt_lost", "cancel_forced"
# Events that tell of the end of an attempt which is not, or not only, in the record of its run.
_ENDS = frozenset({*_AFTER, _LOST, _FORCED})


class Top(NamedTuple):
    """The newest token of a lease, as its store has it."""

    name: str
    token: int


class Mark(NamedTuple):
    """The watermark of a job, as it was after everything else was read."""

    job: str
    watermark: int


class Evidence(NamedTuple):
    """Jobs, runs, ranges, lanes, events and leases, as they were at ``at`` by the ledger's clock.

    Of ``jobs`` the watermarks are from before the rest was read: so what was decided meanwhile
    does not look like a hole. ``marks`` are from after it: so it does not look like too much. An
    export of an older fencepost has none.
    """

    at: float
    jobs: tuple[JobRecord, ...] = ()
    runs: tuple[RunRecord, ...] = ()
    spans: tuple[SpanRecord, ...] = ()
    lanes: tuple[Lane, ...] = ()
    events: tuple[RunEvent, ...] = ()
    leases: tuple[Top, ...] = ()
    marks: tuple[Mark, ...] = ()


class Attempt(NamedTuple):
    """One try of a run, as far as the ledger still knows it.

    Of an attempt that was followed by others only the end is on record. That its token is no less
    than the microsecond of its claim gives an instant by which it had begun.
    """

    run: RunRecord
    token: int
    began_at: float
    until: float
    newest: bool
    end: RunEvent | None = None


def attempts_of(run: RunRecord, events: Sequence[RunEvent]) -> list[Attempt]:
    """Return the attempts of a run, oldest first."""
    ends: dict[int, RunEvent] = {}
    for event in events:
        if event.what in _ENDS and event.token:
            ends.setdefault(event.token, event)
    # Who forced a cancel took the token away; if it had gone to another, there was none to take.
    forced = any(e.what == _FORCED and e.token != run.token for e in ends.values())
    lapsed: dict[int, float] = {}
    for event in events:
        if event.what == LAPSED:
            lapsed[event.token] = min(event.at, lapsed.get(event.token, inf))
    found = [_earlier(run, end) for end in ends.values() if end.token != run.token]
    if run.starts and not forced:  # who forced a cancel took the token away: it is no attempt's
        end = ends.get(run.token)
        until = min(_until(run, end), lapsed.get(run.token, inf))
        found.append(Attempt(run, run.token, run.started_at, until, newest=True, end=end))
    elif forced and found:
        found[-1] = found[-1]._replace(newest=True, began_at=run.started_at)
    return found


def _earlier(run: RunRecord, end: RunEvent) -> Attempt:
    began = min(end.at, end.token / 1e6)
    # When a lost attempt ended nobody knows: its lease may have lapsed long before that was seen.
    until = began if _vanished(end) else end.at
    return Attempt(run, end.token, began, until, newest=False, end=end)


def _vanished(end: RunEvent) -> bool:
    """Say whether nobody saw the attempt end: it was lost, or its process was ordered to stop."""
    return end.what == _LOST or end.detail == STOPPING


def _until(run: RunRecord, end: RunEvent | None) -> float:
    """Return the last instant at which the newest attempt of a run is known to have had it."""
    if end is not None and not _vanished(end):
        return end.at
    own_end = end is None and run.state.terminal and run.state is not State.TIMED_OUT
    return run.ended_at if own_end else max(run.started_at, run.beat_at)


def history_of(evidence: Evidence) -> list[Event]:
    """Return what the records add up to, as the history that the simulator's checkers read."""
    events = grouped(evidence.events)
    names = (lease.name for lease in evidence.leases)
    shared = {base(name) for name in names if base(name) != name}
    return [
        event
        for run in evidence.runs
        for event in _life(run, events.get(str(run.key), []), permits=run.lock in shared)
    ]


def grouped(events: Iterable[RunEvent]) -> dict[str, list[RunEvent]]:
    """Return events by the run that they tell of."""
    found: dict[str, list[RunEvent]] = {}
    for event in events:
        found.setdefault(str(event.key), []).append(event)
    return found


def _life(run: RunRecord, events: list[RunEvent], *, permits: bool) -> Iterator[Event]:
    key = str(run.key)
    attempts = attempts_of(run, events)
    leases = _leases(run, attempts, events, permits=permits)
    if not run.starts and run.state is State.CANCELLED:  # it waited, or there was none to cancel
        yield Event(run.created_at, "became", run=key, state=State.PENDING.value)
    for number, (one, lease) in enumerate(zip(attempts, leases, strict=True), 1):
        nonce = run.holder.nonce if one.newest else f"token {one.token}"
        starts = run.starts if one.newest else number
        claim = (one.began_at, "claimed", _node(run, one), lease, nonce, one.token, one.until)
        yield Event(*claim, run=key, number=starts)
        if one.end is not None and one.end.what != _FORCED:
            state = _AFTER.get(one.end.what, State.PENDING)
            yield Event(one.end.at, "became", run=key, state=state.value, number=starts)
    yield from _end(run, attempts)
    yield Event(inf, "row", run=key, state=run.state.value, number=run.starts)


def _end(run: RunRecord, attempts: list[Attempt]) -> Iterator[Event]:
    """Tell of the state that a run is in now, and by whose word."""
    key, state = str(run.key), run.state
    if not attempts:
        yield Event(run.ended_at or run.created_at, "became", run=key, state=state.value)
        return
    end = attempts[-1].end
    about: dict[str, Any] = {"run": key, "state": state.value, "number": run.starts}
    own: dict[str, Any] = {"token": run.token, "holder": run.holder.nonce}
    if end is None and state is not State.RUNNING:
        yield Event(run.ended_at or attempts[-1].until, "concluded", **own, **about)
    elif end is not None:
        after = _AFTER.get(end.what, State.PENDING)
        if end.what == _FORCED or state is State.CANCELLED or _by_others(run, after):
            if state is not after or end.what == _FORCED:
                yield Event(max(run.ended_at, end.at), "became", **about)
        elif state is not after:  # an attempt that was over ended it all the same
            yield Event(max(run.ended_at, end.at), "concluded", **own, **about)


def _by_others(run: RunRecord, after: State) -> bool:
    """Say whether a run without an attempt may have been ended by whoever looked at it next."""
    reasons = {State.PENDING: ("lost", "poison"), State.WAITING_RETRY: ("superseded",)}
    waits = run.state in (State.PENDING, State.WAITING_RETRY)
    return waits or (run.state is State.FAILED and run.reason in reasons.get(after, ()))


def _leases(
    run: RunRecord, attempts: list[Attempt], events: list[RunEvent], *, permits: bool
) -> list[str]:
    """Return what each attempt held: the lease of the one after it, unless another is on record.

    Versions before this one did not record it. So where a lock has, or once had, permits, nobody
    knows which one an earlier attempt had.
    """
    changed = {event.token: event.detail for event in events if event.what == LEASE_CHANGED}
    found, lease = list[str](), run.lease
    for one in reversed(attempts):
        lease = changed.get(one.token, lease)
        unknown = permits and not one.newest and one.token not in changed
        found.append(f"a permit of {run.key}" if unknown else lease)
    return found[::-1]


def _node(run: RunRecord, attempt: Attempt) -> str:
    if attempt.newest or attempt.end is None:
        return str(run.holder) if run.holder.host else ""
    return attempt.end.holder


# As text.


def to_lines(evidence: Evidence) -> Iterator[str]:
    """Yield the evidence as text, one line for each record."""
    yield _line("ledger", {"at": evidence.at})
    for job in evidence.jobs:
        yield _line("job", job._asdict())
    for run in evidence.runs:
        fields = run._asdict() | {"key": str(run.key), "holder": list(run.holder)}
        yield _line("run", fields)
    for span in evidence.spans:
        yield _line("range", {"job": span.job, "at": span.at, **span.span._asdict()})
    for lane in evidence.lanes:
        yield _line("lane", lane._asdict())
    for event in evidence.events:
        yield _line("event", event._asdict() | {"key": str(event.key)})
    for lease in evidence.leases:
        yield _line("lease", lease._asdict())
    for mark in evidence.marks:
        yield _line("mark", mark._asdict())


def _line(kind: str, fields: dict[str, Any]) -> str:
    return json.dumps({"kind": kind, **fields}, separators=(",", ":"))


def from_lines(lines: Iterable[str]) -> Evidence:
    """Read evidence back; a line that is none is refused by its number."""
    found: dict[str, list[Any]] = {kind: [] for kind in ("ledger", *_READERS)}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            kind = fields.pop("kind")
            read = _READERS.get(kind)
            found[kind].append(float(fields["at"]) if read is None else read(fields))
        except (ValueError, TypeError, KeyError, AttributeError, FencepostError) as error:
            raise Misuse(f"line {number} is no record of a ledger: {error!r}") from error
    if not found["ledger"]:
        raise Misuse(
            "the history does not say when it was read: a line of kind 'ledger' is missing"
        )
    kinds = [tuple(found[kind]) for kind in _READERS]
    return Evidence(found["ledger"][0], *kinds)


def _read_run(fields: dict[str, Any]) -> RunRecord:
    given = fields | {
        "key": parsed(fields["key"]),
        "state": State(fields["state"]),
        "holder": Holder(*fields["holder"]),
    }
    return RunRecord(**given)


def _read_span(fields: dict[str, Any]) -> SpanRecord:
    job, at = fields.pop("job"), fields.pop("at")
    return SpanRecord(job, Span(**fields | {"state": State(fields["state"])}), at)


_READERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "job": lambda fields: JobRecord(**fields),
    "run": _read_run,
    "range": _read_span,
    "lane": lambda fields: Lane(**fields),
    "event": lambda fields: RunEvent(**fields | {"key": parsed(fields["key"])}),
    "lease": lambda fields: Top(**fields),
    "mark": lambda fields: Mark(**fields),
}
