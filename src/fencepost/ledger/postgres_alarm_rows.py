"""What the book of alarms says to its server, and how its rows become values and back again."""

from __future__ import annotations

from fencepost.ledger.postgres_alarm_schema import ARMED, FIRED, GONE, OVER
from fencepost.ledger.postgres_leases import COLUMNS as LEASE_COLUMNS, EXTEND, STANDS
from fencepost.ledger.postgres_said import NOW, said
from fencepost.model.alarm import AlarmRecord, AlarmState
from fencepost.model.lease import Holder
from fencepost.stores.postgres_rows import lease_key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

# In the order of ``AlarmRecord``, with its holder taken apart.
_FIELDS = (
    *("kind", "key", "generation", "state", "due_at", "not_before", "fired", "token"),
    *("nonce", "host", "pid", "version"),
    *("batch", "set_by", "reason", "set_at", "claimed_at", "ended_at", "keep_until"),
    *("starts", "errors", "faults", "losses", "releases", "streak", "strikes", "solitary"),
    *("late", "stale", "window_at", "fires", "payload", "error"),
)
_COLUMNS = ", ".join(f"alarm.{name}" for name in _FIELDS)
_SEEN = f"{_COLUMNS}, alarm.xmin::text"
_WITH_LEASE = f"{_SEEN}, {LEASE_COLUMNS}"
_OF_LEASE = "LEFT JOIN fencepost_lease AS lease ON lease.key = alarm.lease_key"
_OF_KIND = "left(alarm.kind, 300) = left(known.kind, 300) AND alarm.kind = known.kind"
# How many columns of a row are the alarm's, with its version.
WIDTH = len(_FIELDS) + 1

FIND = said(f"""
SELECT {_SEEN}
  FROM fencepost_alarm AS alarm
 WHERE place = :place AND state <> '{GONE}'""")

# To be changed: also one that is gone, for the sake of its generation.
FIND_ALONE = said(f"""
SELECT {_SEEN} FROM fencepost_alarm AS alarm WHERE place = :place FOR NO KEY UPDATE""")

_WRITTEN = (*_FIELDS, "wake_at")
INSERT = said(f"""
WITH made AS (
    INSERT INTO fencepost_alarm (namespace, place, lease_key, {", ".join(_WRITTEN)})
    SELECT :namespace, place, lease_key, {", ".join(_WRITTEN)}
      FROM json_populate_recordset(NULL::fencepost_alarm, :rows::json)
        ON CONFLICT DO NOTHING
    RETURNING 1)
SELECT fencepost_insist(count(*) = :count) FROM made""")

UPDATE = said(f"""
WITH new AS MATERIALIZED (
    SELECT * FROM ROWS FROM (json_populate_recordset(NULL::fencepost_alarm, :rows::json),
                             unnest(:versions::text[])) AS new),
changed AS (
    UPDATE fencepost_alarm AS alarm
       SET {", ".join(f"{name} = new.{name}" for name in _WRITTEN[2:])}
      FROM new
     WHERE alarm.place = ANY(ARRAY(SELECT place FROM new)) AND alarm.place = new.place
       AND alarm.xmin::text = new.unnest
    RETURNING 1)
SELECT fencepost_insist(count(*) = :count) FROM changed""")

# The first that are due of each kind, but for those that somebody else is claiming.
FIND_DUE = said(f"""
SELECT {_COLUMNS}, alarm.seen, {LEASE_COLUMNS}
  FROM unnest(:kinds::text[]) WITH ORDINALITY AS known (kind, number)
 CROSS JOIN LATERAL (
       SELECT {_SEEN} AS seen, alarm.lease_key
         FROM fencepost_alarm AS alarm
        WHERE alarm.namespace = :namespace AND {_OF_KIND} AND alarm.wake_at <= {NOW}
          AND alarm.{ARMED}
        ORDER BY alarm.wake_at, alarm.key
        LIMIT :most
          FOR NO KEY UPDATE SKIP LOCKED) AS alarm
  {_OF_LEASE}
 ORDER BY known.number, alarm.due_at""")

# What this very request has claimed before, and what was lost.
FIND_FIRING = said(f"""
SELECT {_WITH_LEASE}
  FROM unnest(:kinds::text[]) AS known (kind)
  JOIN fencepost_alarm AS alarm
    ON alarm.namespace = :namespace AND {_OF_KIND} AND alarm.{FIRED}
  {_OF_LEASE}
 WHERE alarm.batch = :batch
    OR (:sweep::boolean AND NOT coalesce({STANDS} AND lease.nonce = alarm.nonce, FALSE))
 ORDER BY alarm.kind, alarm.key
   FOR NO KEY UPDATE OF alarm SKIP LOCKED""")

# When one of some kinds is due, if any fires, and whether a claim could find anything.
NEXT_DUE = said(f"""
SELECT {NOW},
       min((SELECT alarm.wake_at
              FROM fencepost_alarm AS alarm
             WHERE alarm.namespace = :namespace AND {_OF_KIND} AND alarm.{ARMED}
             ORDER BY alarm.wake_at
             LIMIT 1)),
       bool_or(EXISTS (SELECT 1
                         FROM fencepost_alarm AS alarm
                        WHERE alarm.namespace = :namespace AND {_OF_KIND} AND alarm.{FIRED}))
  FROM unnest(:kinds::text[]) AS known (kind)""")

LIST = said(f"""
SELECT {_COLUMNS}
  FROM fencepost_alarm AS alarm
 WHERE namespace = :namespace AND state <> '{GONE}'
   AND (:kind::text IS NULL OR kind = :kind)
   AND (cardinality(:states::text[]) = 0 OR state = ANY(:states::text[]))
 ORDER BY kind, key
 LIMIT :limit""")

# They have an index, and are few.
LIST_DEAD = said(f"""
SELECT {_COLUMNS}
  FROM fencepost_alarm AS alarm
 WHERE namespace = :namespace AND state = 'dead' AND {OVER}
   AND (:kind::text IS NULL OR kind = :kind)
 ORDER BY kind, key
 LIMIT :limit""")

# A renewal by whoever still has the alarm.
BEAT = said(f"""
WITH known AS (
    SELECT generation
      FROM fencepost_alarm
     WHERE place = :place AND fired = :generation AND token = :token AND nonce = :nonce),
moved AS ({EXTEND} AND {STANDS} AND EXISTS (SELECT 1 FROM known)
    RETURNING 1)
SELECT generation <> :generation, EXISTS (SELECT 1 FROM moved) FROM known""")

# Tombstones that were kept for long enough, each with its lease; and what is long gone.
PRUNE = said(f"""
WITH old AS (
    SELECT place, lease_key, nonce
      FROM fencepost_alarm
     WHERE namespace = :namespace AND state = 'cleared' AND {OVER} AND keep_until <= {NOW}
     ORDER BY keep_until
     LIMIT :limit
       FOR NO KEY UPDATE SKIP LOCKED),
dropped AS (
    DELETE FROM fencepost_lease AS lease
     USING old
     WHERE lease.key = old.lease_key AND lease.nonce = old.nonce),
gone AS (
    UPDATE fencepost_alarm AS alarm
       SET state = '{GONE}', fired = 0, keep_until = {NOW} + 86400, payload = NULL, error = NULL
      FROM old
     WHERE alarm.place = old.place
    RETURNING 1),
forgotten AS (
    DELETE FROM fencepost_alarm
     WHERE place = ANY(ARRAY(
           SELECT place
             FROM fencepost_alarm
            WHERE namespace = :namespace AND state = '{GONE}' AND {OVER} AND keep_until <= {NOW}
            ORDER BY keep_until
            LIMIT :limit
              FOR UPDATE SKIP LOCKED)))
SELECT count(*) FROM gone""")

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
        *columns[12 : WIDTH - 1],
    )
    return AlarmRecord(*fields)


def row_of(namespace: str, record: AlarmRecord, *, gone_at: float | None = None) -> dict[str, Any]:
    """Return the row of an alarm, but for the namespace; or of one that has gone by now."""
    values = (*record[:3], record.state.value, *record[4:8], *record.holder, *record[9:])
    row = dict(zip(_FIELDS, values, strict=True))
    row["place"] = "\\x" + place_of(namespace, record.kind, record.key).hex()
    row["lease_key"] = "\\x" + lease_key(namespace, record.lease).hex()
    row["wake_at"] = record.wake_at
    if gone_at is not None:
        row |= {"state": GONE, "fired": 0, "payload": None, "keep_until": gone_at + 86_400.0}
    return row


def place_of(namespace: str, kind: str, key: str) -> bytes:
    """Return what an alarm is found by: names of any length have places of one length."""
    return lease_key(namespace, f"{kind}\0{key}")
