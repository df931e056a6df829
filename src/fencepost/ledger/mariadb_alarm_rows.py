"""What the book of alarms says to a MariaDB server.

Whatever is read to be changed is locked by the statement that reads it, and so cannot have changed
when it is written. Nothing else is locked: leases beside alarms are read as they were committed.
"""

from __future__ import annotations

import hashlib

from fencepost.ledger.draft_alarm_values import ALARM_FIELDS, GONE, KEEP_GONE, alarm_row
from fencepost.ledger.draft_values import LEASE_FIELDS, SAME_TIME_US
from fencepost.ledger.mariadb_alarm_schema import ALARM
from fencepost.ledger.mariadb_columns import WORD
from fencepost.ledger.mariadb_leases import EXTEND, HELD, STANDS
from fencepost.ledger.mariadb_said import (
    NOW,
    NOW_US,
    PACKED,
    assigned,
    digest,
    each_of,
    inserted,
    listed,
    one_by_one,
    said,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from fencepost.model.alarm import AlarmRecord

# A row as one column of JSON. It has no version: what is going to be written is locked.
_FIELDS = ", ".join(
    f"CONVERT(alarm.`{name}` USING utf8mb4)" if "BINARY" in ALARM[name] else f"alarm.`{name}`"
    for name in ALARM_FIELDS
)
_SEEN = f"JSON_ARRAY({_FIELDS}, '') AS {PACKED}"
_WITH_LEASE = f"JSON_ARRAY({_FIELDS}, '', {listed(LEASE_FIELDS, of='lease')}) AS {PACKED}"
_OF_LEASE = """LEFT JOIN fencepost_lease AS lease
    ON lease.namespace = :namespace AND lease.digest = alarm.lease_key"""
_PLACE = "alarm.namespace = :namespace AND alarm.place = :place"
_OF_KIND = f"alarm.namespace = :namespace AND alarm.shelf = {digest(':kind')}"
# By its key, whatever the server thinks of other ways: a row that is looked at is locked.
_OF_PLACE = """STRAIGHT_JOIN fencepost_alarm AS alarm FORCE INDEX (PRIMARY)
    ON alarm.namespace = :namespace AND alarm.place = {}"""
# A derived table with a limit is made by itself, and not merged into what is locked.
_ALL = 2**63 - 1

FIND = said(f"""
SELECT {_SEEN}
  FROM fencepost_alarm AS alarm
 WHERE {_PLACE} AND state <> '{GONE}'""")

# To be changed: also one that is gone, for the sake of its generation.
FIND_ALONE = said(f"SELECT {_SEEN} FROM fencepost_alarm AS alarm WHERE {_PLACE} FOR UPDATE")

INSERT = said(inserted("fencepost_alarm", ALARM))

# A payload that stays is not sent: many large ones would not fit into one packet.
_CHANGING = [name for name in ALARM if name not in ("place", "shelf", "kind", "key", "payload")]
UPDATE = said(
    one_by_one(f"""
UPDATE fencepost_alarm AS alarm
   SET {assigned(_CHANGING)}, payload = IF(:keeps, alarm.payload, :payload)
 WHERE {_PLACE}""")
)

# The first of a kind that are due, but for those that somebody else is claiming.
FIND_DUE = said(f"""
SELECT {_WITH_LEASE}
  FROM (SELECT alarm.*
          FROM fencepost_alarm AS alarm FORCE INDEX (fencepost_alarm_armed)
         WHERE {_OF_KIND} AND alarm.state = 'armed' AND alarm.wake_at <= {NOW}
         ORDER BY alarm.wake_at, alarm.`key`
         LIMIT :most
           FOR UPDATE SKIP LOCKED) AS alarm
  {_OF_LEASE}
 ORDER BY alarm.due_at""")

# What this very request has claimed before, and what was lost. Found first and locked then: a row
# that is looked at to be locked stays so to the end, and a living handler would wait for that. Also
# what has a lease from before the clock was set back: whoever reads it has it end in time.
_IN_TIME = f"lease.expires_us <= {NOW_US} + lease.ttl_us + {SAME_TIME_US}"
FIND_FIRING = said(f"""
SELECT {_WITH_LEASE}
  FROM (SELECT alarm.*
          FROM (SELECT alarm.place
                  FROM fencepost_alarm AS alarm FORCE INDEX (fencepost_alarm_fired)
                 WHERE {_OF_KIND} AND alarm.fired > 0
                   AND (alarm.batch = :batch
                        OR (:sweep
                            AND NOT EXISTS (SELECT 1
                                              FROM fencepost_lease AS lease
                                             WHERE lease.namespace = :namespace
                                               AND lease.digest = alarm.lease_key
                                               AND lease.nonce = alarm.nonce AND {STANDS}
                                               AND {_IN_TIME})))
                 LIMIT {_ALL}) AS found
          {_OF_PLACE.format("found.place")}
         WHERE alarm.fired > 0
         LIMIT {_ALL}
           FOR UPDATE SKIP LOCKED) AS alarm
  {_OF_LEASE}
 ORDER BY alarm.`key`""")

# When one of some kinds is due, and whether any fires: each is one end of an index. To ask whether
# there is one of ``fired > 0`` would walk over all those that are not. In so many words for each:
# of a kind that comes from a row of another table MySQL would sort all alarms.
NEXT_DUE = said(
    each_of(
        f"SELECT {NOW}, MIN(known.wake_at), MAX(known.fired) > 0 FROM ({{each}}) AS known",
        """SELECT (SELECT alarm.wake_at
          FROM fencepost_alarm AS alarm FORCE INDEX (fencepost_alarm_armed)
         WHERE alarm.namespace = :namespace AND alarm.shelf = :#kind AND alarm.state = 'armed'
         ORDER BY alarm.wake_at
         LIMIT 1) AS wake_at,
       (SELECT alarm.fired
          FROM fencepost_alarm AS alarm FORCE INDEX (fencepost_alarm_fired)
         WHERE alarm.namespace = :namespace AND alarm.shelf = :#kind
         ORDER BY alarm.fired DESC
         LIMIT 1) AS fired""",
        kind="kinds",
    )
)

_LISTED = f"""
   AND (:kind IS NULL OR alarm.shelf = {digest(":kind")})
 ORDER BY alarm.kind, alarm.`key`
 LIMIT :limit"""

LIST = said(f"""
SELECT {_SEEN}
  FROM fencepost_alarm AS alarm
 WHERE alarm.namespace = :namespace AND alarm.state <> '{GONE}'
   AND (JSON_LENGTH(:[states]) = 0 OR JSON_CONTAINS(:[states], JSON_QUOTE(state))){_LISTED}""")

# They have an index, and are few.
LIST_DEAD = said(f"""
SELECT {_SEEN}
  FROM fencepost_alarm AS alarm FORCE INDEX (fencepost_alarm_over)
 WHERE alarm.namespace = :namespace AND alarm.state = 'dead'{_LISTED}""")

# A renewal by whoever still has the alarm. Who took it took the lease as well, so that the alarm
# may be read as it was committed.
_HAS = f"""{_PLACE} AND alarm.fired = :generation AND alarm.token = :token
   AND alarm.nonce = :nonce"""
BEAT = said(
    f"""
UPDATE fencepost_lease AS lease
   SET {EXTEND}
 WHERE {HELD}
   AND EXISTS (SELECT 1 FROM fencepost_alarm AS alarm WHERE {_HAS})""",
    f"""
SELECT alarm.generation <> :generation, ROW_COUNT() > 0
  FROM fencepost_alarm AS alarm
 WHERE {_HAS}""",
)

# Tombstones that were kept for long enough, and what is long gone.
_KEPT = f"""
  FROM fencepost_alarm FORCE INDEX (fencepost_alarm_over)
 WHERE namespace = :namespace AND state = '{{state}}' AND keep_until <= {NOW}
 ORDER BY keep_until
 LIMIT :limit
   FOR UPDATE SKIP LOCKED"""
_OLD, _GONE = (_KEPT.replace("{state}", state) for state in ("cleared", GONE))
FIND_OLD = said(f"SELECT place, lease_key, nonce {_OLD}")
FIND_GONE = said(f"SELECT place {_GONE}")


def _in(name: str) -> str:
    return f"""JSON_TABLE({name}, '$[*]' COLUMNS (
         number FOR ORDINALITY, name {WORD.partition(" NOT ")[0]} PATH '$'))"""


# The former go, each with its lease; the latter are forgotten.
DROP_LEASES = said(f"""
DELETE lease
  FROM {_in(":[leases]")} AS old
  STRAIGHT_JOIN {_in(":[nonces]")} AS by_whom ON by_whom.number = old.number
  STRAIGHT_JOIN fencepost_lease AS lease FORCE INDEX (PRIMARY)
    ON lease.namespace = :namespace AND lease.digest = old.name AND lease.nonce = by_whom.name""")
LET_GO = said(f"""
UPDATE {_in(":[old]")} AS old
  {_OF_PLACE.format("old.name")}
   SET alarm.state = '{GONE}', alarm.fired = 0, alarm.keep_until = {NOW} + {KEEP_GONE},
       alarm.payload = NULL, alarm.error = NULL""")
FORGET = said(f"""
DELETE alarm
  FROM {_in(":[gone]")} AS gone
  {_OF_PLACE.format("gone.name")}""")


def row_of(
    namespace: str, record: AlarmRecord, *, read: AlarmRecord | None, gone_at: float | None
) -> dict[str, Any]:
    """Return the row of an alarm, but for the namespace."""
    row = alarm_row(record, gone_at=gone_at)
    payload = row.pop("payload")
    keeps = gone_at is None and read is not None and record.payload == read.payload
    return {
        "place": place_of(namespace, record.kind, record.key),
        "shelf": _digest_of(record.kind),
        "lease_key": _digest_of(record.lease),
        "keeps": int(keeps),
        **row,
        "payload": None if keeps else payload,
    }


def place_of(namespace: str, kind: str, key: str) -> str:  # noqa: ARG001 -- it is beside it
    """Return what an alarm is found by in its namespace."""
    return _digest_of(f"{kind}\0{key}")


def _digest_of(name: str) -> str:
    """Return what ``digest`` says, as a value."""
    return hashlib.sha256(name.encode()).hexdigest()
