"""An alarm as people and programs see it."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from fencepost.model.alarm import AlarmState
from fencepost.model.named import NamedTuple
from fencepost.model.slot import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from fencepost.model.alarm import AlarmRecord


class AlarmView(NamedTuple):
    """An alarm as those see it who ask for it."""

    kind: str
    key: str
    generation: int
    state: str
    due: datetime
    next: datetime | None
    payload: Any
    attempts: int
    losses: int
    late: int
    stale: int
    reason: str
    error: str | None


def view_of(record: AlarmRecord) -> AlarmView:
    """Return what users may know of an alarm."""
    armed = record.state is AlarmState.ARMED
    return AlarmView(
        record.kind,
        record.key,
        record.generation,
        record.state.value,
        datetime.fromtimestamp(record.due_at, UTC),
        datetime.fromtimestamp(record.wake_at, UTC) if armed else None,
        None if record.payload is None else json.loads(record.payload),
        record.attempt,
        record.losses,
        record.late,
        record.stale,
        record.reason,
        record.error,
    )


def public(record: AlarmRecord) -> dict[str, Any]:
    """Return what programs may know of an alarm, as JSON has it."""
    return {
        "kind": record.kind,
        "key": record.key,
        "generation": record.generation,
        "state": record.state.value,
        "due": shown(int(record.due_at)),
        "due_at": record.due_at,
        "not_before": record.not_before or None,
        "payload": None if record.payload is None else json.loads(record.payload),
        "firing": record.fired or None,
        "token": record.token or None,
        "holder": str(record.holder) if record.fired else None,
        "starts": record.starts,
        "errors": record.errors,
        "faults": record.faults,
        "losses": record.losses,
        "releases": record.releases,
        "late": record.late,
        "stale": record.stale,
        "reason": record.reason or None,
        "error": record.error,
        "set_at": record.set_at,
        "ended_at": record.ended_at or None,
    }
