"""How the rows of an SQL server become values and back again, in whatever dialect they were asked.

Rows are read by position, in the order of the fields named here, and written by name. Some servers
have no truth values: to them it is 0 or 1.
"""

from __future__ import annotations

import hashlib
import json

from fencepost.ledger.planning import Instance, InstanceRecord, Lane, SpanRecord
from fencepost.model.definition import Definition, JobRecord
from fencepost.model.item import ItemRecord, ItemState
from fencepost.model.lease import Holder
from fencepost.model.named import NamedTuple
from fencepost.model.plan import Span
from fencepost.model.run import RunEvent, RunRecord, State
from fencepost.model.slot import RunKey

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

# In the order of ``RunRecord``, with its key and its holder taken apart.
RUN_KEY = ("job", "slot", "manual", "rerun")
RUN_REST = (
    *("state", "lock", "lease", "token", "nonce", "host", "pid", "version"),
    *("reason", "blocker", "origin", "created_at", "started_at", "ended_at", "not_before"),
    *("beat_at", "cancel_at", "starts", "losses", "releases", "streak", "strikes", "solitary"),
    *("checkpoint", "done", "total", "result", "error", "saves", "epoch"),
)
RUN_FIELDS = RUN_KEY + RUN_REST
_SOLITARY = RUN_FIELDS.index("solitary")

ITEM_FIELDS = ("scope", "item", "state", "token", "run", "call", "at", "error")
EVENT_FIELDS = (*RUN_KEY, "at", "what", "token", "holder", "detail")
SPAN_FIELDS = ("job", "first", "last", "state", "reason", "stands_in", "at")
LANE_FIELDS = (
    *("number", "job", "start", "until", "cursor", "existing", "newest_first", "max_active"),
    *("origin", "spec", "not_before", "ended_at", "created_at", "operator", "stopped"),
)
INSTANCE_FIELDS = (*Instance._fields, "started_at", "beat_at", "left_at")
LEASE_FIELDS = (
    *("name", "token", "nonce", "host", "pid", "version"),
    *("held", "expires_us", "ttl_us", "since_us", "ended", "beat"),
)

# What ends so much later than its ttl from now was granted before the clock was set back.
SAME_TIME_US = 1_000_000

_STORED, _WHOLE_JOB = JobRecord._fields.index("stored"), len(JobRecord._fields)
_STATES = {state.value: state for state in State}


class DraftLease(NamedTuple):
    """A lease in a draft: ``left`` is how long it may last, if it is ``held``."""

    token: int
    holder: Holder
    held: bool
    left: float
    ttl: float
    since: float
    beat: int = 0
    ended: str = ""
    set_back: bool = False  # it would last for longer than its ttl

    @property
    def stands(self) -> bool:
        """Whether somebody has it who may still be alive."""
        return self.held and self.left > 0


def lease_of(columns: Sequence[Any], *, now: float) -> tuple[str, DraftLease]:
    """Return the name and the lease in a row, as it stands at ``now``."""
    name, token, nonce, host, pid, version, held, expires_us, ttl_us, since_us, ended, beat = (
        columns[: len(LEASE_FIELDS)]
    )
    ttl, left = ttl_us / 1e6, expires_us / 1e6 - now
    holder = Holder(nonce, host, pid, version)
    late = bool(held) and left > ttl + SAME_TIME_US / 1e6
    fields = (min(left, ttl), ttl, since_us / 1e6, beat, ended, late)
    return name, DraftLease(token, holder, bool(held), *fields)


def lease_row(name: str, lease: DraftLease, *, now: float) -> dict[str, Any]:
    """Return the row of a lease, but for what it is found by."""
    return {
        "name": name,
        "token": lease.token,
        "held": lease.held,
        "expires_us": round((now + lease.left) * 1e6),
        "ttl_us": round(lease.ttl * 1e6),
        "since_us": round(lease.since * 1e6),
        "ended": lease.ended,
        **lease.holder._asdict(),
    }


def run_of(columns: Sequence[Any]) -> RunRecord:
    """Return the run in a row. By position: every verb comes through here."""
    fields: tuple[Any, ...] = (
        *columns[5:8],
        Holder(*columns[8:12]),
        *columns[12:_SOLITARY],
        bool(columns[_SOLITARY]),
        *columns[_SOLITARY + 1 : len(RUN_FIELDS)],
    )
    return RunRecord(RunKey(*columns[:4]), _STATES[columns[4]], *fields)


def run_row(run: RunRecord) -> dict[str, Any]:
    """Return the row of a run, but for the namespace."""
    values = (*run.key, run.state.value, run.lock, run.lease, run.token, *run.holder, *run[6:])
    return dict(zip(RUN_FIELDS, values, strict=True))


def job_of(columns: Sequence[Any]) -> JobRecord:
    """Return the job in a row."""
    fields: tuple[Any, ...] = (*columns[:_STORED], bool(columns[_STORED]), *columns[_STORED + 1 :])
    return JobRecord(*fields[:_WHOLE_JOB])


def item_of(columns: Sequence[Any]) -> ItemRecord:
    """Return the item in a row."""
    scope, item, state, *rest = columns
    return ItemRecord(scope, item, ItemState(state), *rest)


def event_of(columns: Sequence[Any]) -> RunEvent:
    """Return the event in a row."""
    return RunEvent(RunKey(*columns[:4]), *columns[4:])


def event_row(event: RunEvent) -> dict[str, Any]:
    """Return the row of an event, but for the namespace."""
    return {**event.key._asdict(), **dict(zip(RunEvent._fields[1:], event[1:], strict=True))}


def span_of(columns: Sequence[Any]) -> SpanRecord:
    """Return the range in a row."""
    job, first, last, state, reason, into, at = columns
    return SpanRecord(job, Span(first, last, State(state), reason, into), at)


def span_row(record: SpanRecord) -> dict[str, Any]:
    """Return the row of a range, but for the namespace."""
    first, last, state, reason, into = record.span
    values = (record.job, first, last, state.value, reason, into, record.at)
    return dict(zip(SPAN_FIELDS, values, strict=True))


def lane_of(columns: Sequence[Any]) -> Lane:
    """Return what is being made up, as a row has it."""
    lane = Lane(*columns[: len(LANE_FIELDS)])
    return lane._replace(newest_first=bool(lane.newest_first))


def lane_row(lane: Lane) -> dict[str, Any]:
    """Return the row of what is being made up, but for the namespace."""
    return dict(zip(LANE_FIELDS, lane, strict=True))


def instance_of(columns: Sequence[Any]) -> InstanceRecord:
    """Return the instance in a row."""
    return InstanceRecord(Instance(*columns[:7]), *columns[7:])


def instance_row(record: InstanceRecord) -> dict[str, Any]:
    """Return the row of an instance, but for the namespace."""
    return dict(zip(INSTANCE_FIELDS, (*record.instance, *record[1:]), strict=True))


def definition_text(definition: Definition) -> str:
    """Return a definition as a cohort keeps it."""
    return json.dumps(definition)


def definition_from(text: str) -> Definition:
    """Return the definition that a cohort kept."""
    kept = Definition(*json.loads(text))
    return kept._replace(aliases=tuple(kept.aliases))


def storable(text: str) -> str:
    """Return a text as servers can keep it: without NUL, and without half a character."""
    if "\0" in text:
        text = text.replace("\0", "\N{REPLACEMENT CHARACTER}")
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def packed(rows: Sequence[object]) -> str:
    """Return rows as one text that servers can take apart."""
    text = json.dumps(rows, ensure_ascii=False, separators=(",", ":"))
    if "\\u0000" in text:  # or the text of such an escape: a look at each will tell
        text = json.dumps(_without_nul(rows), ensure_ascii=False, separators=(",", ":"))
    return storable(text)


def _without_nul(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("\0", "\N{REPLACEMENT CHARACTER}")
    if isinstance(value, dict):
        return {name: _without_nul(inner) for name, inner in value.items()}
    return [_without_nul(inner) for inner in value] if isinstance(value, list | tuple) else value


def shelf_of(scope: str) -> str:
    """Return what the items of a scope are found by."""
    return hashlib.blake2b(scope.encode(), digest_size=12).hexdigest()


def place_of(scope: str, item: str) -> str:
    """Return what an item is found by."""
    return hashlib.blake2b(f"{scope}\0{item}".encode(), digest_size=20).hexdigest()
