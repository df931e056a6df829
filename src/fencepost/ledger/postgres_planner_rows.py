"""What the scheduling side says to its server.

Whoever ticks locks what it is going to decide about, and leaves to others what they have locked.
"""

from __future__ import annotations

from fencepost.ledger.draft_values import (
    INSTANCE_FIELDS,
    LANE_FIELDS,
    SAME_TIME_US,
    SPAN_FIELDS,
)
from fencepost.ledger.postgres_alarm_schema import ARMED
from fencepost.ledger.postgres_planner_schema import WAITING
from fencepost.ledger.postgres_rows import COLUMNS, LISTED, SEEN
from fencepost.ledger.postgres_said import (
    NO_LOITERING,
    NOW,
    at_place,
    lease_key,
    new,
    said,
    version,
)
from fencepost.model.definition import JobRecord
from fencepost.stores.postgres_rows import SERVER

_OFFICE = "hashtextextended('fencepost office ' || :namespace, 0)"
# Those who tick and claim are in the office together; who registers is there alone.
SHARE_OFFICE = said(f"SELECT pg_advisory_xact_lock_shared({_OFFICE})")
HAVE_OFFICE = said(f"SELECT pg_advisory_xact_lock({_OFFICE})")
# What locks can be had without waiting: with whoever has another one, it is not our turn.
TRY_TURNS = said("""
SELECT lock
  FROM unnest(:locks::text[]) AS wanted (lock)
 WHERE pg_try_advisory_xact_lock(
           hashtextextended('fencepost lock ' || :namespace || '/' || lock, 0))""")

# One instant for the whole of a tick, on the server as well.
SET_NOW = said(f"""
SELECT set_config('fencepost.now', ({NOW})::text, TRUE)::double precision, {NO_LOITERING}""")
_NOW = "current_setting('fencepost.now')::double precision"

_JOB_COLUMNS = ", ".join(JobRecord._fields)

# The longest due first, from where the last page ended.
FIND_DUE = said(f"""
SELECT {_JOB_COLUMNS}, {version()}
  FROM fencepost_job
 WHERE namespace = :namespace AND next_due IS NOT NULL AND next_due <= {_NOW}
   AND (:only::text IS NULL OR job = :only)
   AND (next_due, job) > (:due::double precision, :job::text)
 ORDER BY next_due, job
 LIMIT :most
   FOR NO KEY UPDATE SKIP LOCKED""")

FIND_UNKNOWN = said(f"""
SELECT {_JOB_COLUMNS}, {version()}
  FROM fencepost_job
 WHERE namespace = :namespace AND unknown_since > 0.0 AND orphaned_at = 0.0
   AND unknown_since <= :before AND retired = '' AND NOT stored
 ORDER BY job
 LIMIT :most""")

# As with jobs; the index ends with the key of the run.
FIND_DUE_RUNS = said(f"""
SELECT {SEEN}
  FROM fencepost_run
 WHERE namespace = :namespace AND {WAITING} AND not_before <= {_NOW}
   AND (:only::text IS NULL OR job = :only)
   AND (not_before, job, slot, manual, rerun)
     > (:due::double precision, :job::text, :slot::bigint, :manual::bigint, :rerun::bigint)
 ORDER BY not_before, job, slot, manual, rerun
 LIMIT :most
   FOR NO KEY UPDATE SKIP LOCKED""")

# Runs whose attempt holds no lease any more; or one from before the clock was set back, of which
# whoever reads it sees to it that it ends in time.
_LOST = f"""
  FROM fencepost_run AS run
 WHERE run.namespace = :namespace AND run.state = 'running'
   AND (:only::text IS NULL OR run.job = :only)
   AND NOT EXISTS (
       SELECT 1 FROM fencepost_lease AS lease
        WHERE lease.key = {lease_key("run.namespace", "run.lease")}
          AND lease.nonce = run.nonce AND lease.held
          AND lease.expires_us > ({{now}} * 1000000)::bigint
          AND lease.expires_us <= ({{now}} * 1000000)::bigint + lease.ttl_us
                                + {SAME_TIME_US}{{unless}})"""
# A pulse that is known to be silent vouches for nobody.
_SILENT = f"""
          AND NOT (lease.pulse = ANY(:silent::bigint[]) AND lease.pulse_nonce = lease.nonce
                   AND lease.server_us = {SERVER})"""

# Which of some pulses are silent; and at a sweep, on which ones all that runs leans.
_WATCH = f"""
    (SELECT json_agg(pulse) FROM unnest(:watched::bigint[]) AS others (pulse)
      WHERE pg_try_advisory_xact_lock_shared(pulse)),
    (SELECT json_agg(DISTINCT pulse)
       FROM (SELECT (SELECT lease.pulse
                       FROM fencepost_lease AS lease
                      WHERE lease.key = {lease_key("run.namespace", "run.lease")}
                        AND lease.nonce = run.nonce AND lease.held AND lease.pulse <> 0
                        AND lease.pulse_nonce = lease.nonce AND lease.server_us = {SERVER})
               FROM fencepost_run AS run
              WHERE :sweep::boolean AND run.namespace = :namespace AND run.state = 'running')
         AS running (pulse)
      WHERE pulse IS NOT NULL)"""
WATCH = said(f"SELECT {_WATCH}")

FIND_LOST, FIND_LOST_OR_SILENT = (
    said(f"""
SELECT {LISTED}, {version("run")}
{_LOST.format(now=_NOW, unless=unless)}
 ORDER BY run.job, run.slot, run.manual, run.rerun
   FOR NO KEY UPDATE OF run SKIP LOCKED""")
    for unless in ("", _SILENT)
)

FIND_GRANTED = said(f"""
SELECT {SEEN}
  FROM fencepost_run
 WHERE namespace = :namespace AND state = 'running' AND starts_with(nonce, :nonce)
 ORDER BY job, slot, manual, rerun""")

_NEXT_LOOK = f"""
    least((SELECT min(next_due) FROM fencepost_job
            WHERE namespace = :namespace AND next_due IS NOT NULL),
          (SELECT min(not_before) FROM fencepost_run
            WHERE namespace = :namespace AND {WAITING}),
          (SELECT min(not_before) FROM fencepost_lane
            WHERE namespace = :namespace AND ended_at = 0.0))"""

# When something is due next: a job, a run that waits, or something to make up.
NEXT_LOOK = said(f"SELECT {_NEXT_LOOK}")

# The same, what time it is, and if asked for whether any run was lost.
_IDLE = f"""
SELECT {NOW}, {_NEXT_LOOK},
       :sweep::boolean AND EXISTS (SELECT 1 {_LOST.replace("{now}", NOW)})"""
IDLE = said(_IDLE.replace("{unless}", ""))
# And who may have died.
IDLE_AND_WATCH = said(f"{_IDLE.replace('{unless}', _SILENT)}, {_WATCH}")

# Runs of the schedule that are newer than where their job stands: mostly there are none.
FIND_BEYOND = said(f"""
SELECT run.*
  FROM unnest(:jobs::text[], :marks::bigint[]) AS due (job, mark)
 CROSS JOIN LATERAL (
       SELECT {SEEN}
         FROM fencepost_run AS run
        WHERE run.namespace = :namespace AND run.job = due.job AND run.slot > due.mark
          AND run.manual = 0
       OFFSET 0) AS run""")

_ONE_BY_ONE = "unnest(:jobs::text[]) AS wanted (job) CROSS JOIN LATERAL"
_NEWEST = "ORDER BY slot DESC, manual DESC, rerun DESC"

FIND_NEWEST = said(f"""
SELECT {LISTED}, run.seen
  FROM {_ONE_BY_ONE} (
       SELECT {COLUMNS}, {version()} AS seen
         FROM fencepost_run
        WHERE namespace = :namespace AND job = wanted.job
        {_NEWEST}
        LIMIT 1) AS run""")

# When one of the newest runs of a job last began.
LAST_BEGAN = said(f"""
SELECT wanted.job, max(run.started_at)
  FROM {_ONE_BY_ONE} (
       SELECT started_at
         FROM fencepost_run
        WHERE namespace = :namespace AND job = wanted.job
        {_NEWEST}
        LIMIT :most) AS run
 GROUP BY wanted.job""")

# The runs of a job around a slot, both ways.
FIND_FROM = said(f"""
SELECT {SEEN}
  FROM fencepost_run
 WHERE namespace = :namespace AND job = :job AND slot >= :slot
 ORDER BY slot, manual, rerun
 LIMIT :most""")
FIND_UP_TO = said(f"""
SELECT {SEEN}
  FROM fencepost_run
 WHERE namespace = :namespace AND job = :job AND slot <= :slot
 {_NEWEST}
 LIMIT :most""")
FIND_RERUN = said(f"""
SELECT {SEEN}
  FROM fencepost_run
 WHERE namespace = :namespace AND job = :job AND slot = :slot AND manual = :manual
 ORDER BY rerun DESC
 LIMIT 1""")

FIND_SLOT_RUNS = said(f"""
SELECT {COLUMNS} FROM (
    SELECT * FROM fencepost_run
     WHERE namespace = :namespace AND job = :job AND slot >= :start AND slot < :end
     {_NEWEST}
     LIMIT :limit) AS run
 ORDER BY slot, manual, rerun""")

_SPAN_COLUMNS = ", ".join(SPAN_FIELDS)

FIND_SPANS = said(f"""
SELECT {_SPAN_COLUMNS} FROM (
    SELECT * FROM fencepost_span
     WHERE namespace = :namespace AND job = :job AND last >= :start AND first < :end
     ORDER BY first DESC
     LIMIT :limit) AS span
 ORDER BY first""")

# The last range of some jobs.
LAST_SPANS = said(f"""
SELECT span.job, span.first, span.last, span.state, span.reason, span.stands_in, span.at
  FROM unnest(:jobs::text[]) AS wanted (job)
 CROSS JOIN LATERAL (
       SELECT {_SPAN_COLUMNS}
         FROM fencepost_span
        WHERE namespace = :namespace AND job = wanted.job
        ORDER BY first DESC
        LIMIT 1) AS span""")

PUT_SPANS = said(f"""
INSERT INTO fencepost_span (namespace, {_SPAN_COLUMNS})
SELECT :namespace, {_SPAN_COLUMNS}
  FROM json_populate_recordset(NULL::fencepost_span, :rows::json)
    ON CONFLICT (namespace, job, first) DO UPDATE SET last = excluded.last, at = excluded.at""")

_LANE_COLUMNS = ", ".join(LANE_FIELDS)

FIND_LANES = said(f"""
SELECT {_LANE_COLUMNS}
  FROM fencepost_lane
 WHERE namespace = :namespace AND (NOT :active::boolean OR ended_at = 0.0)
 ORDER BY number""")

# The longest due first, from where the last page ended.
FIND_DUE_LANES = said(f"""
SELECT {_LANE_COLUMNS}, {version()}
  FROM fencepost_lane
 WHERE namespace = :namespace AND ended_at = 0.0 AND not_before <= {_NOW}
   AND (not_before, number) > (:due::double precision, :number::bigint)
 ORDER BY not_before, number
 LIMIT :most
   FOR NO KEY UPDATE SKIP LOCKED""")

FIND_LANES_OF = said(f"""
SELECT {_LANE_COLUMNS}, {version()}
  FROM fencepost_lane
 WHERE namespace = :namespace AND job = ANY(:jobs::text[]) AND ended_at = 0.0
 ORDER BY job, number
   FOR NO KEY UPDATE SKIP LOCKED""")

FIND_LANE = said(f"""
SELECT {_LANE_COLUMNS}, {version()}
  FROM fencepost_lane
 WHERE namespace = :namespace AND number = :number""")

HIGHEST_LANE = said(
    "SELECT coalesce(max(number), 0) FROM fencepost_lane WHERE namespace = :namespace"
)

INSERT_LANES = said(f"""
WITH made AS (
    INSERT INTO fencepost_lane (namespace, {_LANE_COLUMNS})
    SELECT :namespace, {_LANE_COLUMNS}
      FROM json_populate_recordset(NULL::fencepost_lane, :rows::json)
        ON CONFLICT DO NOTHING
    RETURNING 1)
SELECT fencepost_insist(count(*) = :count) FROM made""")

UPDATE_LANES = said(f"""
WITH new AS MATERIALIZED ({new("fencepost_lane")}),
changed AS (
    UPDATE fencepost_lane AS lane
       SET until = new.until, cursor = new.cursor, not_before = new.not_before,
           ended_at = new.ended_at, stopped = new.stopped
      FROM new
     WHERE {at_place("lane")}
    RETURNING 1)
SELECT fencepost_insist(count(*) = :count) FROM changed""")

_INSTANCE_COLUMNS = ", ".join(INSTANCE_FIELDS)

FIND_INSTANCES = said(f"""
SELECT {_INSTANCE_COLUMNS} FROM fencepost_instance WHERE namespace = :namespace ORDER BY name""")

PUT_INSTANCES = said(f"""
INSERT INTO fencepost_instance (namespace, {_INSTANCE_COLUMNS})
SELECT :namespace, {_INSTANCE_COLUMNS}
  FROM json_populate_recordset(NULL::fencepost_instance, :rows::json)
    ON CONFLICT (namespace, name) DO UPDATE
   SET {", ".join(f"{name} = excluded.{name}" for name in INSTANCE_FIELDS if name != "name")}""")

DROP_INSTANCES = said("""
DELETE FROM fencepost_instance WHERE namespace = :namespace AND name = ANY(:names::text[])""")

# Who knows some jobs, and which definitions of them were ever shared.
FIND_MEMBERS = said("""
SELECT job, instance, digest
  FROM fencepost_member
 WHERE namespace = :namespace AND job = ANY(:jobs::text[])""")

FIND_COHORTS = said("""
SELECT job, digest, since, seen_at, build, definition
  FROM fencepost_cohort
 WHERE namespace = :namespace AND job = ANY(:jobs::text[])""")

FIND_MEMBERS_OF = said("""
SELECT job
  FROM fencepost_member
 WHERE namespace = :namespace AND instance = :instance
 ORDER BY job
 LIMIT :most""")

PUT_MEMBERS = said("""
INSERT INTO fencepost_member (namespace, job, instance, digest)
SELECT :namespace, job, instance, digest
  FROM json_populate_recordset(NULL::fencepost_member, :rows::json)
    ON CONFLICT (namespace, job, instance) DO UPDATE SET digest = excluded.digest""")

PART = said("""
DELETE FROM fencepost_member AS member
 USING json_populate_recordset(NULL::fencepost_member, :rows::json) AS gone
 WHERE member.namespace = :namespace AND member.job = gone.job
   AND member.instance = gone.instance""")

PUT_COHORTS = said("""
INSERT INTO fencepost_cohort (namespace, job, digest, since, seen_at, build, definition)
SELECT :namespace, job, digest, since, seen_at, build, definition
  FROM json_populate_recordset(NULL::fencepost_cohort, :rows::json)
    ON CONFLICT (namespace, job, digest) DO UPDATE
   SET since = excluded.since, seen_at = excluded.seen_at, build = excluded.build,
       definition = excluded.definition""")

# The clock was set back: what waits for a while waits for no longer than it would have.
_TIME = ":now::double precision"
_SOONER = f"greatest({{0}} - :by::double precision, {_TIME})"
SET_BACK = tuple(
    said(f"UPDATE {table} SET {change} WHERE namespace = :namespace {where}")
    for table, change, where in (
        (
            "fencepost_run",
            f"not_before = {_SOONER.format('not_before')}",
            f"AND {WAITING} AND not_before > {_TIME}",
        ),
        (
            "fencepost_run",
            f"cancel_at = {_TIME}",
            f"AND state = 'running' AND cancel_at > {_TIME}",
        ),
        ("fencepost_job", f"next_due = {_SOONER.format('next_due')}", f"AND next_due > {_TIME}"),
        ("fencepost_job", f"unknown_since = {_TIME}", f"AND unknown_since > {_TIME}"),
        (
            "fencepost_lane",
            f"not_before = {_SOONER.format('not_before')}",
            f"AND ended_at = 0.0 AND not_before > {_TIME}",
        ),
        (
            "fencepost_cohort",
            f"since = since - :by::double precision, seen_at = least(seen_at, {_TIME})",
            "",
        ),
        (
            "fencepost_alarm",
            ", ".join(
                (
                    f"not_before = {_SOONER.format('not_before')}",
                    f"wake_at = greatest(due_at, {_SOONER.format('not_before')})",
                )
            ),
            f"AND {ARMED} AND not_before > {_TIME}",
        ),
    )
)

FIND_JOB = said(
    f"SELECT {_JOB_COLUMNS} FROM fencepost_job WHERE namespace = :namespace AND job = :job"
)

FIND_ALL_EVENTS = said("""
SELECT job, slot, manual, rerun, at, what, token, holder, detail
  FROM fencepost_event
 WHERE namespace = :namespace
 ORDER BY job, slot, manual, rerun, id""")
