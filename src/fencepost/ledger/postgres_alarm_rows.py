"""What the book of alarms says to a PostgreSQL server."""

from __future__ import annotations

from fencepost.ledger.draft_alarm_values import ALARM_FIELDS, GONE, KEEP_GONE, alarm_row
from fencepost.ledger.draft_values import SAME_TIME_US
from fencepost.ledger.postgres_alarm_schema import ARMED, FIRED, OVER
from fencepost.ledger.postgres_leases import COLUMNS as LEASE_COLUMNS, EXTEND, STANDS
from fencepost.ledger.postgres_said import NOW, at_place, new, said, version
from fencepost.stores.postgres_rows import lease_key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from fencepost.model.alarm import AlarmRecord

_COLUMNS = ", ".join(f"alarm.{name}" for name in ALARM_FIELDS)
_SEEN = f"{_COLUMNS}, {version('alarm')}"
_WITH_LEASE = f"{_SEEN}, {LEASE_COLUMNS}"
_OF_LEASE = "LEFT JOIN fencepost_lease AS lease ON lease.key = alarm.lease_key"
_OF_KIND = "left(alarm.kind, 300) = left({0}, 300) AND alarm.kind = {0}"
_OF_THAT, _OF_EACH = _OF_KIND.format(":kind::text"), _OF_KIND.format("known.kind")

FIND = said(f"""
SELECT {_SEEN}
  FROM fencepost_alarm AS alarm
 WHERE place = :place AND state <> '{GONE}'""")

# To be changed: also one that is gone, for the sake of its generation.
FIND_ALONE = said(f"""
SELECT {_SEEN} FROM fencepost_alarm AS alarm WHERE place = :place FOR NO KEY UPDATE""")

_WRITTEN = (*ALARM_FIELDS, "wake_at")
INSERT = said(f"""
WITH made AS (
    INSERT INTO fencepost_alarm (namespace, place, lease_key, {", ".join(_WRITTEN)})
    SELECT :namespace, place, lease_key, {", ".join(_WRITTEN)}
      FROM json_populate_recordset(NULL::fencepost_alarm, :rows::json)
        ON CONFLICT DO NOTHING
    RETURNING 1)
SELECT fencepost_insist(count(*) = :count) FROM made""")

UPDATE = said(f"""
WITH new AS MATERIALIZED ({new("fencepost_alarm")}),
changed AS (
    UPDATE fencepost_alarm AS alarm
       SET {", ".join(f"{name} = new.{name}" for name in _WRITTEN[2:])}
      FROM new
     WHERE {at_place("alarm")}
    RETURNING 1)
SELECT fencepost_insist(count(*) = :count) FROM changed""")

# The first of a kind that are due, but for those that somebody else is claiming.
FIND_DUE = said(f"""
SELECT {_COLUMNS}, alarm.seen, {LEASE_COLUMNS}
  FROM (SELECT {_SEEN} AS seen, alarm.lease_key
          FROM fencepost_alarm AS alarm
         WHERE alarm.namespace = :namespace AND {_OF_THAT} AND alarm.wake_at <= {NOW}
           AND alarm.{ARMED}
         ORDER BY alarm.wake_at, alarm.key
         LIMIT :most
           FOR NO KEY UPDATE SKIP LOCKED) AS alarm
  {_OF_LEASE}
 ORDER BY alarm.due_at""")

# What this very request has claimed before, and what was lost; also what has a lease from before
# the clock was set back: whoever reads it has it end in time.
_IN_TIME = f"lease.expires_us <= {NOW} * 1000000 + lease.ttl_us + {SAME_TIME_US}"
FIND_FIRING = said(f"""
SELECT {_WITH_LEASE}
  FROM fencepost_alarm AS alarm
  {_OF_LEASE}
 WHERE alarm.namespace = :namespace AND {_OF_THAT} AND alarm.{FIRED}
   AND (alarm.batch = :batch
        OR (:sweep::boolean
            AND NOT coalesce({STANDS} AND {_IN_TIME} AND lease.nonce = alarm.nonce, FALSE)))
 ORDER BY alarm.key
   FOR NO KEY UPDATE OF alarm SKIP LOCKED""")

# When one of some kinds is due, if any fires, and whether a claim could find anything.
NEXT_DUE = said(f"""
SELECT {NOW},
       min((SELECT alarm.wake_at
              FROM fencepost_alarm AS alarm
             WHERE alarm.namespace = :namespace AND {_OF_EACH} AND alarm.{ARMED}
             ORDER BY alarm.wake_at
             LIMIT 1)),
       bool_or(EXISTS (SELECT 1
                         FROM fencepost_alarm AS alarm
                        WHERE alarm.namespace = :namespace AND {_OF_EACH} AND alarm.{FIRED}))
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

# Tombstones that were kept for long enough, and what is long gone.
_KEPT = f"""
  FROM fencepost_alarm
 WHERE namespace = :namespace AND state = '{{state}}' AND {OVER} AND keep_until <= {NOW}
 ORDER BY keep_until
 LIMIT :limit
   FOR {{lock}} SKIP LOCKED"""
_OLD = _KEPT.format(state="cleared", lock="NO KEY UPDATE")
FIND_OLD = said(f"SELECT place, lease_key, nonce {_OLD}")
FIND_GONE = said(f"SELECT place {_KEPT.format(state=GONE, lock='UPDATE')}")

# The former go, each with its lease; the latter are forgotten.
DROP_LEASES = said("""
DELETE FROM fencepost_lease AS lease
 USING unnest(:leases::bytea[], :nonces::text[]) AS old (key, nonce)
 WHERE lease.key = old.key AND lease.nonce = old.nonce""")
LET_GO = said(f"""
UPDATE fencepost_alarm
   SET state = '{GONE}', fired = 0, keep_until = {NOW} + {KEEP_GONE}, payload = NULL, error = NULL
 WHERE place = ANY(:old::bytea[])""")
FORGET = said("DELETE FROM fencepost_alarm WHERE place = ANY(:gone::bytea[])")


def row_of(
    namespace: str,
    record: AlarmRecord,
    *,
    read: AlarmRecord | None,  # noqa: ARG001 -- every column is written
    gone_at: float | None,
) -> dict[str, Any]:
    """Return the row of an alarm, but for the namespace."""
    place = place_of(namespace, record.kind, record.key)
    return {
        **alarm_row(record, gone_at=gone_at),
        "place": "\\x" + place.hex(),
        "lease_key": "\\x" + lease_key(namespace, record.lease).hex(),
    }


def place_of(namespace: str, kind: str, key: str) -> bytes:
    """Return what an alarm is found by: names of any length have places of one length."""
    return lease_key(namespace, f"{kind}\0{key}")
