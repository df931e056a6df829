"""How the rows of alarms on an SQL server become values and back again, in whatever dialect.

An alarm that was fired for good leaves its row behind for a day, as *gone*: the next one of its key
must have a higher generation, whatever became of the server's clock.
"""

from __future__ import annotations

from fencepost.model.alarm import AlarmRecord, AlarmState
from fencepost.model.lease import Holder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

GONE = "gone"
KEEP_GONE = 86_400.0

# In the order of ``AlarmRecord``, with its holder taken apart.
ALARM_FIELDS = (
    *("kind", "key", "generation", "state", "due_at", "not_before", "fired", "token"),
    *("nonce", "host", "pid", "version"),
    *("batch", "set_by", "reason", "set_at", "claimed_at", "ended_at", "keep_until"),
    *("starts", "errors", "faults", "losses", "releases", "streak", "strikes", "solitary"),
    *("late", "stale", "window_at", "fires", "payload", "error"),
)
# How many columns of a row are the alarm's, with its version.
ALARM_WIDTH = len(ALARM_FIELDS) + 1
_SOLITARY = ALARM_FIELDS.index("solitary")

_STATES = {state.value: state for state in AlarmState}


def alarm_of(columns: Sequence[Any]) -> AlarmRecord | None:
    """Return the alarm in a row; None if it is gone."""
    if columns[3] == GONE:
        return None
    fields: tuple[Any, ...] = (
        *columns[:3],
        _STATES[columns[3]],
        *columns[4:8],
        Holder(*columns[8:12]),
        *columns[12:_SOLITARY],
        bool(columns[_SOLITARY]),
        *columns[_SOLITARY + 1 : ALARM_WIDTH - 1],
    )
    return AlarmRecord(*fields)


def alarm_row(record: AlarmRecord, *, gone_at: float | None = None) -> dict[str, Any]:
    """Return the row of an alarm, but for what it is found by; or of one that has gone by now."""
    values = (*record[:3], record.state.value, *record[4:8], *record.holder, *record[9:])
    row = dict(zip(ALARM_FIELDS, values, strict=True))
    row["wake_at"] = record.wake_at
    if gone_at is not None:
        row |= {"state": GONE, "fired": 0, "payload": None, "keep_until": gone_at + KEEP_GONE}
    return row
