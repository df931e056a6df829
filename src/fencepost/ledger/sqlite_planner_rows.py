"""What the scheduling side says to its file, and how its rows become values and back again."""

from __future__ import annotations

import json

from fencepost.ledger.alarm_sqlite_schema import ARMED
from fencepost.ledger.planning import Instance, InstanceRecord, Lane, SpanRecord
from fencepost.ledger.sqlite_planner_schema import APART, WAITING
from fencepost.ledger.sqlite_rows import COLUMNS
from fencepost.ledger.sqlite_schema import LIVE
from fencepost.model.definition import Definition, JobRecord
from fencepost.model.plan import Span
from fencepost.model.run import RunEvent, State
from fencepost.model.slot import RunKey

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_JOB = JobRecord._fields
_JOB_COLUMNS = ", ".join(_JOB)

FIND_JOB = f"SELECT {_JOB_COLUMNS} FROM fencepost_job WHERE namespace = ? AND job = ?"

# The longest due first, from where the last page ended.
FIND_DUE = f"""
SELECT {_JOB_COLUMNS}
  FROM fencepost_job INDEXED BY fencepost_job_due
 WHERE namespace = ?1 AND next_due IS NOT NULL AND next_due <= ?2
   AND (next_due, job) > (?3, ?4)
 ORDER BY next_due, job
 LIMIT ?5"""

PUT_JOB = f"""
INSERT INTO fencepost_job (namespace, {_JOB_COLUMNS})
VALUES (?, {", ".join("?" * len(_JOB))})
    ON CONFLICT DO UPDATE
   SET {", ".join(f"{name} = excluded.{name}" for name in _JOB if name != "job")}"""

# What nearly every slot changes.
ADVANCE = """
UPDATE fencepost_job
   SET watermark = ?, next_due = ?, owed = ?
 WHERE namespace = ? AND job = ?"""

# All that time alone changes.
MOVE_JOB = """
UPDATE fencepost_job
   SET watermark = ?, next_due = ?, owed = ?, paused = ?, paused_until = ?
 WHERE namespace = ? AND job = ?"""

FIND_UNKNOWN = f"""
SELECT {_JOB_COLUMNS}
  FROM fencepost_job INDEXED BY fencepost_job_unknown
 WHERE namespace = ? AND unknown_since > 0.0 AND orphaned_at = 0.0 AND unknown_since <= ?
   AND retired = '' AND stored = 0
 ORDER BY job
 LIMIT ?"""

# When something is due next: a job, a run that waits, or something to make up.
NEXT_LOOK = f"""
SELECT min(due) FROM (
    SELECT min(next_due) AS due FROM fencepost_job INDEXED BY fencepost_job_due
     WHERE namespace = ?1 AND next_due IS NOT NULL
     UNION ALL
    SELECT min(not_before) FROM fencepost_run INDEXED BY fencepost_run_waiting
     WHERE namespace = ?1 AND {WAITING}
     UNION ALL
    SELECT min(not_before) FROM fencepost_lane INDEXED BY fencepost_lane_open
     WHERE namespace = ?1 AND ended_at = 0.0)"""

# As with jobs; the index ends with the key of the run.
FIND_DUE_RUNS = f"""
SELECT {COLUMNS}
  FROM fencepost_run INDEXED BY fencepost_run_waiting
 WHERE namespace = ?1 AND {WAITING} AND not_before <= ?2 AND (?3 IS NULL OR job = ?3)
   AND (not_before, job, slot, manual, rerun) > (?4, ?5, ?6, ?7, ?8)
 ORDER BY not_before, job, slot, manual, rerun
 LIMIT ?9"""

_RUN_COLUMNS = ", ".join(f"run.{name.strip()}" for name in COLUMNS.split(","))
_RUNNING = f"run.namespace = ?1 AND run.state = 'running' AND {LIVE}"

# Every run that runs, and the lease it runs under: there are never many.
FIND_RUNNING = f"""
SELECT lease.held, lease.nonce, lease.boot_id, lease.expires_us, lease.pulse, lease.pulse_inode,
       {_RUN_COLUMNS}
  FROM fencepost_run AS run INDEXED BY fencepost_run_live
  LEFT JOIN fencepost_lease AS lease
    ON lease.namespace = run.namespace AND lease.name = run.lease
 WHERE {_RUNNING}"""

# The live runs of a job: those under a lock of its own name, and those under another one.
_LIVE_OF_JOB = f"""
    SELECT * FROM fencepost_run INDEXED BY fencepost_run_live
     WHERE namespace = ?1 AND lock = ?2 AND job = ?2 AND {LIVE}
     UNION ALL
    SELECT * FROM fencepost_run INDEXED BY fencepost_run_apart
     WHERE namespace = ?1 AND job = ?2 AND {APART}"""

# Those that wait; and whether there is any at all.
FIND_WAITING = f"""
SELECT {COLUMNS}
  FROM ({_LIVE_OF_JOB})
 WHERE {WAITING}
 ORDER BY slot, manual, rerun"""

FIND_PAST = """
SELECT slot, ended_at
  FROM fencepost_run
 WHERE namespace = ? AND job = ?
 ORDER BY slot DESC, manual DESC, rerun DESC
 LIMIT 1"""

# When one of the newest runs of a job last began; 0 if none of them did.
LAST_BEGAN = """
SELECT coalesce(max(started_at), 0.0)
  FROM (SELECT started_at
          FROM fencepost_run
         WHERE namespace = ? AND job = ?
         ORDER BY slot DESC, manual DESC, rerun DESC
         LIMIT ?)"""

IS_LIVE = f"SELECT 1 FROM ({_LIVE_OF_JOB}) LIMIT 1"

COUNT_MADE_UP = f"SELECT count(*) FROM ({_LIVE_OF_JOB}) WHERE origin = ?3"

FIND_RERUN = f"""
SELECT {COLUMNS}
  FROM fencepost_run
 WHERE namespace = ? AND job = ? AND slot = ? AND manual = ?
 ORDER BY rerun DESC
 LIMIT 1"""

FIND_SLOT_RUNS = f"""
SELECT {COLUMNS} FROM (
    SELECT * FROM fencepost_run
     WHERE namespace = ? AND job = ? AND slot >= ? AND slot < ?
     ORDER BY slot DESC, manual DESC, rerun DESC
     LIMIT ?)
 ORDER BY slot, manual, rerun"""

_SPAN_COLUMNS = "job, first, last, state, reason, stands_in, at"

FIND_SPANS = f"""
SELECT {_SPAN_COLUMNS} FROM (
    SELECT * FROM fencepost_span
     WHERE namespace = ?1 AND job = ?2 AND last >= ?3 AND first < ?4
     ORDER BY first DESC
     LIMIT ?5)
 ORDER BY first"""

# The range that ended where the job stands.
LAST_SPAN = f"""
SELECT {_SPAN_COLUMNS}
  FROM fencepost_span
 WHERE namespace = ?1 AND job = ?2
   AND last = (SELECT watermark FROM fencepost_job WHERE namespace = ?1 AND job = ?2)
 ORDER BY first DESC
 LIMIT 1"""

ADD_SPAN = """
INSERT INTO fencepost_span (namespace, job, first, last, state, reason, stands_in, at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)"""

LENGTHEN_SPAN = """
UPDATE fencepost_span
   SET last = ?, at = ?
 WHERE namespace = ? AND job = ? AND first = ?"""

_LANE_COLUMNS = (
    "number, job, start, until, cursor, existing, newest_first, max_active, origin, spec, "
    "not_before, ended_at, created_at, operator, stopped"
)

FIND_LANES = f"""
SELECT {_LANE_COLUMNS}
  FROM fencepost_lane INDEXED BY fencepost_lane_open
 WHERE namespace = ? AND ended_at = 0.0
 ORDER BY number"""

# The longest due first, from where the last page ended.
FIND_DUE_LANES = f"""
SELECT {_LANE_COLUMNS}
  FROM fencepost_lane INDEXED BY fencepost_lane_open
 WHERE namespace = ?1 AND ended_at = 0.0 AND not_before <= ?2
   AND (not_before, number) > (?3, ?4)
 ORDER BY not_before, number
 LIMIT ?5"""

FIND_LANES_OF = f"""
SELECT {_LANE_COLUMNS}
  FROM fencepost_lane INDEXED BY fencepost_lane_of
 WHERE namespace = ? AND job = ? AND ended_at = 0.0
 ORDER BY number"""

FIND_LANE = f"SELECT {_LANE_COLUMNS} FROM fencepost_lane WHERE namespace = ? AND number = ?"

ANY_LANE = """
SELECT 1 FROM fencepost_lane INDEXED BY fencepost_lane_open
 WHERE namespace = ? AND ended_at = 0.0
 LIMIT 1"""

FIND_ALL_LANES = f"SELECT {_LANE_COLUMNS} FROM fencepost_lane WHERE namespace = ? ORDER BY number"

PUT_LANE = f"""
INSERT INTO fencepost_lane (namespace, {_LANE_COLUMNS})
VALUES (?, {", ".join("?" * len(Lane._fields))})
    ON CONFLICT DO UPDATE
   SET until = excluded.until, cursor = excluded.cursor, not_before = excluded.not_before,
       ended_at = excluded.ended_at, stopped = excluded.stopped"""

_INSTANCE_COLUMNS = (
    "name, host, pid, version, build, tzdata, orphan_after, started_at, beat_at, left_at"
)

FIND_INSTANCES = f"""
SELECT {_INSTANCE_COLUMNS} FROM fencepost_instance WHERE namespace = ? ORDER BY name"""

PUT_INSTANCE = f"""
INSERT OR REPLACE INTO fencepost_instance (namespace, {_INSTANCE_COLUMNS})
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""

DROP_INSTANCE = "DELETE FROM fencepost_instance WHERE namespace = ? AND name = ?"

JOIN = """
INSERT INTO fencepost_member (namespace, job, instance, digest)
VALUES (?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET digest = excluded.digest"""

PUT_COHORT = """
INSERT INTO fencepost_cohort (namespace, job, digest, since, seen_at, build, definition)
VALUES (?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT DO UPDATE
   SET since = excluded.since, seen_at = excluded.seen_at, build = excluded.build"""

FIND_MEMBERS_OF = """
SELECT job, digest
  FROM fencepost_member INDEXED BY fencepost_member_of
 WHERE namespace = ? AND instance = ?
 ORDER BY job
 LIMIT ?"""

PART = "DELETE FROM fencepost_member WHERE namespace = ? AND job = ? AND instance = ?"

SEE_COHORT = """
UPDATE fencepost_cohort
   SET seen_at = max(seen_at, ?)
 WHERE namespace = ? AND job = ? AND digest = ?"""

# The clock was set back: what waits for a while waits for no longer than it would have.
SET_BACK = (
    f"""
UPDATE fencepost_run
   SET not_before = max(not_before - :by, :now)
 WHERE namespace = :namespace AND {WAITING} AND not_before > :now""",
    """
UPDATE fencepost_run
   SET cancel_at = :now
 WHERE namespace = :namespace AND state = 'running' AND cancel_at > :now""",
    """
UPDATE fencepost_job
   SET next_due = max(next_due - :by, :now)
 WHERE namespace = :namespace AND next_due > :now""",
    """
UPDATE fencepost_job
   SET unknown_since = :now
 WHERE namespace = :namespace AND unknown_since > :now""",
    """
UPDATE fencepost_lane
   SET not_before = max(not_before - :by, :now)
 WHERE namespace = :namespace AND ended_at = 0.0 AND not_before > :now""",
    """
UPDATE fencepost_cohort
   SET since = since - :by, seen_at = min(seen_at, :now)
 WHERE namespace = :namespace""",
    f"""
UPDATE fencepost_alarm
   SET not_before = max(not_before - :by, :now),
       wake_at    = max(due_at, not_before - :by, :now)
 WHERE namespace = :namespace AND {ARMED} AND not_before > :now""",
)

FIND_ALL_EVENTS = """
SELECT job, slot, manual, rerun, at, what, token, holder, detail
  FROM fencepost_event
 WHERE namespace = ?
 ORDER BY job, slot, manual, rerun, id"""

# Each cohort of a job, as last heard of through any of its members.
FIND_COHORTS = """
SELECT cohort.digest, cohort.since,
       max(cohort.seen_at, coalesce(
           (SELECT max(instance.beat_at)
              FROM fencepost_member AS member
              JOIN fencepost_instance AS instance
                ON instance.namespace = member.namespace AND instance.name = member.instance
             WHERE member.namespace = cohort.namespace AND member.job = cohort.job
               AND member.digest = cohort.digest), 0.0)),
       cohort.build
  FROM fencepost_cohort AS cohort
 WHERE cohort.namespace = ? AND cohort.job = ?
 ORDER BY cohort.digest"""

COUNT_MEMBERS = "SELECT count(*) FROM fencepost_member WHERE namespace = ? AND job = ?"

FIND_DEFINITION = """
SELECT definition FROM fencepost_cohort WHERE namespace = ? AND job = ? AND digest = ?"""


def row_of(job: JobRecord) -> tuple[Any, ...]:
    """Return the row of a job, but for the namespace."""
    return (*job[:-1], int(job.stored))


def span_of(row: tuple[Any, ...]) -> SpanRecord:
    """Return the range in a row."""
    job, first, last, state, reason, into, at = row
    return SpanRecord(job, Span(first, last, State(state), reason, into), at)


def lane_of(row: tuple[Any, ...]) -> Lane:
    """Return what is being made up, as a row has it."""
    lane = Lane(*row)
    return lane._replace(newest_first=bool(lane.newest_first))


def event_of(row: tuple[Any, ...]) -> RunEvent:
    """Return the event in a row."""
    return RunEvent(RunKey(*row[:4]), *row[4:])


def instance_of(row: tuple[Any, ...]) -> InstanceRecord:
    """Return the instance in a row."""
    return InstanceRecord(Instance(*row[:7]), *row[7:])


def instance_row(record: InstanceRecord) -> tuple[Any, ...]:
    """Return the row of an instance, but for the namespace."""
    return (*record.instance, *record[1:])


def definition_text(definition: Definition) -> str:
    """Return a definition as a cohort keeps it."""
    return json.dumps(definition)


def definition_from(text: str) -> Definition:
    """Return the definition that a cohort kept."""
    kept = Definition(*json.loads(text))
    return kept._replace(aliases=tuple(kept.aliases))
