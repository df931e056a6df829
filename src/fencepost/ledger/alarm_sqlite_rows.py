"""What the book of alarms says to its file, and how its rows become values and back again."""

from __future__ import annotations

from functools import lru_cache

from fencepost.ledger.alarm_sqlite_schema import ARMED, FIRED, OVER
from fencepost.model.alarm import AlarmRecord, AlarmState
from fencepost.model.lease import Holder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# In the order of ``AlarmRecord``, with its holder taken apart.
_COLUMNS = (
    *("kind", "key", "generation", "state", "due_at", "not_before", "fired", "token"),
    *("nonce", "host", "pid", "version"),
    *("batch", "set_by", "reason", "set_at", "claimed_at", "ended_at", "keep_until"),
    *("starts", "errors", "faults", "losses", "releases", "streak", "strikes", "solitary"),
    *("late", "stale", "window_at", "fires", "payload", "error"),
)
_LISTED = ", ".join(_COLUMNS)
_KEY = "namespace = ? AND kind = ? AND key = ?"
# By name, because SQLite would rather walk over all alarms of the kind.
_ARMED_ONES = "fencepost_alarm INDEXED BY fencepost_alarm_armed"
_FIRED_ONES = "fencepost_alarm INDEXED BY fencepost_alarm_fired"
_OVER_ONES = "fencepost_alarm INDEXED BY fencepost_alarm_over"

FIND = f"SELECT {_LISTED} FROM fencepost_alarm WHERE {_KEY}"

# An alarm as it was decided to be, in place of what there was.
PUT = f"""
INSERT INTO fencepost_alarm (namespace, {_LISTED}, wake_at)
VALUES (?, {", ".join("?" * len(_COLUMNS))}, ?)
    ON CONFLICT DO UPDATE
   SET {", ".join(f"{name} = excluded.{name}" for name in (*_COLUMNS[2:], "wake_at"))}"""

DELETE = f"DELETE FROM fencepost_alarm WHERE {_KEY}"

# The first that are due of one kind.
FIND_DUE = f"""
SELECT {_LISTED}
  FROM {_ARMED_ONES}
 WHERE namespace = ? AND kind = ? AND wake_at <= ? AND {ARMED}
 ORDER BY wake_at, key
 LIMIT ?"""

# Who fires now, of one kind: never many. Or only what one request has claimed.
FIND_FIRING = f"""
SELECT {_LISTED}
  FROM {_FIRED_ONES}
 WHERE namespace = ? AND kind = ? AND {FIRED} AND (? OR batch = ?)"""

FIND_DEAD = f"""
SELECT {_LISTED}
  FROM {_OVER_ONES}
 WHERE namespace = ? AND state = 'dead' AND {OVER}"""

FIND_PRUNABLE = f"""
SELECT {_LISTED}
  FROM {_OVER_ONES}
 WHERE namespace = ? AND state = 'cleared' AND keep_until <= ? AND {OVER}
 ORDER BY keep_until
 LIMIT ?"""


@lru_cache(maxsize=16)
def next_due(kinds: int) -> str:
    """Return the statement that says when one of so many kinds is due, and if any fires."""
    return f"""
WITH known (kind) AS (VALUES {", ".join("(?)" for _ in range(kinds))})
SELECT min((SELECT wake_at
              FROM {_ARMED_ONES}
             WHERE namespace = ?{kinds + 1} AND kind = known.kind AND {ARMED}
             ORDER BY wake_at
             LIMIT 1)),
       max(EXISTS (SELECT 1
                     FROM {_FIRED_ONES}
                    WHERE namespace = ?{kinds + 1} AND kind = known.kind AND {FIRED}))
  FROM known"""


@lru_cache(maxsize=16)
def listing(*, of_kind: bool, states: int) -> str:
    """Return the statement that lists alarms by kind and key."""
    kind = " AND kind = ?" if of_kind else ""
    chosen = f" AND state IN ({', '.join('?' * states)})" if states else ""
    return f"""
SELECT {_LISTED}
  FROM fencepost_alarm
 WHERE namespace = ?{kind}{chosen}
 ORDER BY kind, key
 LIMIT ?"""


_STATES = {state.value: state for state in AlarmState}


def alarm_of(columns: tuple[Any, ...]) -> AlarmRecord:
    """Return the alarm in a row."""
    fields: tuple[Any, ...] = (
        *columns[:3],
        _STATES[columns[3]],
        *columns[4:8],
        Holder(*columns[8:12]),
        *columns[12:26],
        columns[26] == 1,
        *columns[27:],
    )
    return AlarmRecord(*fields)


def row_of(record: AlarmRecord) -> tuple[Any, ...]:
    """Return the row of an alarm, but for the namespace."""
    return (
        *record[:3],
        record.state.value,
        *record[4:8],
        *record.holder,
        *record[9:23],
        int(record.solitary),
        *record[24:],
        record.wake_at,
    )
