"""What the scheduling side says to its server.

Whoever ticks locks what it is going to decide about, and leaves to others what they have locked.
MariaDB has no lateral joins: what is asked of each of some jobs is asked in so many words.
"""

from __future__ import annotations

from fencepost.ledger.draft_values import (
    EVENT_FIELDS,
    INSTANCE_FIELDS,
    LANE_FIELDS,
    RUN_FIELDS,
    SAME_TIME_US,
    SPAN_FIELDS,
)
from fencepost.ledger.mariadb_columns import (
    COHORT,
    EVENT,
    INSTANCE,
    LANE,
    MEMBER,
    SPAN,
)
from fencepost.ledger.mariadb_rows import COLUMNS, JOB_COLUMNS, SEEN_JOB, SEEN_RUN, SHARE
from fencepost.ledger.mariadb_said import (
    NOW,
    assigned,
    digest,
    each_of,
    inserted,
    listed,
    moved,
    one_by_one,
    packed_row,
    said,
)

# Those who tick and claim are in the office together; who registers is there alone.
SHARE_OFFICE = said(SHARE)
HAVE_OFFICE = said("""
SELECT 1 INTO @fencepost_office
  FROM fencepost_turn
 WHERE namespace = :namespace AND place = 'office'
   FOR UPDATE""")
# What locks can be had without waiting: with whoever has another one, it is not our turn.
TRY_TURNS = said(
    f"""
INSERT IGNORE INTO fencepost_turn (namespace, place, name)
SELECT :namespace, {digest("wanted.name")}, wanted.name
  FROM JSON_TABLE(:[locks], '$[*]'
       COLUMNS (name VARCHAR(4000) CHARACTER SET utf8mb4 PATH '$')) AS wanted
 WHERE NOT EXISTS (SELECT 1 FROM fencepost_turn AS turn
                    WHERE turn.namespace = :namespace AND turn.place = {digest("wanted.name")})
 ORDER BY 2""",
    """
SELECT CONVERT(turn.name USING utf8mb4)
  FROM fencepost_turn AS turn FORCE INDEX (PRIMARY)
 WHERE turn.namespace = :namespace AND turn.place IN :#locks
   FOR UPDATE SKIP LOCKED""",
)

# One instant for the whole of a tick, on the server as well.
SET_NOW = said(f"SET @fencepost_now = {NOW}", "SELECT @fencepost_now")
_NOW = "@fencepost_now"

# The longest due first, from where the last page ended.
FIND_DUE = said(f"""
SELECT {SEEN_JOB}
  FROM fencepost_job AS known FORCE INDEX (fencepost_job_due)
 WHERE known.namespace = :namespace AND known.next_due >= :due AND known.next_due <= {_NOW}
   AND (:only IS NULL OR known.job = :only)
   AND (known.next_due > :due OR known.job > :job)
 ORDER BY known.next_due, known.job
 LIMIT :most
   FOR UPDATE SKIP LOCKED""")

FIND_UNKNOWN = said(f"""
SELECT {SEEN_JOB}
  FROM fencepost_job AS known FORCE INDEX (fencepost_job_unknown)
 WHERE known.namespace = :namespace AND known.unknown_since > 0 AND known.orphaned_at = 0
   AND known.unknown_since <= :before AND known.retired = '' AND NOT known.stored
 ORDER BY known.job
 LIMIT :most""")

# As with jobs; the index ends with the key of the run.
FIND_DUE_RUNS = said(f"""
SELECT {SEEN_RUN}
  FROM fencepost_run AS run FORCE INDEX (fencepost_run_waiting)
 WHERE run.namespace = :namespace AND run.waits >= :due AND run.waits <= {_NOW}
   AND (:only IS NULL OR run.job = :only)
   AND (run.waits, run.job, run.slot, run.manual, run.rerun)
     > (:due, CAST(:job AS BINARY), :slot, :manual, :rerun)
 ORDER BY run.waits, run.job, run.slot, run.manual, run.rerun
 LIMIT :most
   FOR UPDATE SKIP LOCKED""")

# Runs whose attempt holds no lease any more; or one from before the clock was set back, of which
# whoever reads it sees to it that it ends in time.
_LOST = f"""
  FROM fencepost_run AS run FORCE INDEX (fencepost_run_of_job)
 WHERE run.namespace = :namespace AND run.live = 'running'
   AND (:only IS NULL OR run.job = :only)
   AND NOT EXISTS (
       SELECT 1 FROM fencepost_lease AS lease
        WHERE lease.namespace = run.namespace AND lease.digest = {digest("run.lease")}
          AND lease.nonce = run.nonce AND lease.held = 1
          AND lease.expires_us > {{now}} * 1000000
          AND lease.expires_us <= {{now}} * 1000000 + lease.ttl_us + {SAME_TIME_US})"""

# Found first and locked then: of rows that are looked at to be locked those of the living stay so,
# too, and nobody could beat or end until the tick has. Whether they are lost is decided later on.
# Put in order before they are joined: MySQL would sort whole rows, checkpoints and all, which have
# to fit into its sort buffer.
FIND_LOST = said(f"""
SELECT {SEEN_RUN}
  FROM (SELECT run.job, run.slot, run.manual, run.rerun
{_LOST.format(now=_NOW)}
         LIMIT {2**63 - 1}) AS lost
  STRAIGHT_JOIN fencepost_run AS run FORCE INDEX (PRIMARY)
    ON run.namespace = :namespace AND run.job = lost.job AND run.slot = lost.slot
   AND run.manual = lost.manual AND run.rerun = lost.rerun
 WHERE run.live = 'running'
 ORDER BY lost.job, lost.slot, lost.manual, lost.rerun
   FOR UPDATE SKIP LOCKED""")

FIND_GRANTED = said(f"""
SELECT {SEEN_RUN}
  FROM fencepost_run AS run FORCE INDEX (fencepost_run_of_job)
 WHERE run.namespace = :namespace AND run.live = 'running'
   AND LEFT(run.nonce, LENGTH(:nonce)) = :nonce
 ORDER BY run.job, run.slot, run.manual, run.rerun""")

_NEVER = "1e300"
_NEXT_LOOK = f"""
    NULLIF(LEAST(
        COALESCE((SELECT MIN(next_due) FROM fencepost_job WHERE namespace = :namespace), {_NEVER}),
        COALESCE((SELECT MIN(waits) FROM fencepost_run WHERE namespace = :namespace), {_NEVER}),
        COALESCE((SELECT MIN(due) FROM fencepost_lane WHERE namespace = :namespace), {_NEVER})
    ), {_NEVER})"""

# When something is due next: a job, a run that waits, or something to make up.
NEXT_LOOK = said(f"SELECT {_NEXT_LOOK}")

# The same, what time it is, and if asked for whether any run was lost.
IDLE = said(f"SELECT {NOW}, {_NEXT_LOOK}, :sweep AND EXISTS (SELECT 1 {_LOST.format(now=NOW)})")

_OF_KEYS = f"""
SELECT {SEEN_RUN}
  FROM ({{each}}) AS wanted
  STRAIGHT_JOIN fencepost_run AS run FORCE INDEX (PRIMARY)
    ON run.namespace = :namespace AND run.job = wanted.job AND run.slot = wanted.slot
   AND run.manual = wanted.manual AND run.rerun = wanted.rerun"""

# Runs of the schedule that are newer than where their job stands: mostly there are none.
FIND_BEYOND = said(
    each_of(
        _OF_KEYS,
        """SELECT job, slot, `manual`, rerun FROM fencepost_run FORCE INDEX (PRIMARY)
 WHERE namespace = :namespace AND job = :job AND slot > :mark AND `manual` = 0""",
        job="jobs",
        mark="marks",
    )
)

_NEWEST = "ORDER BY slot DESC, `manual` DESC, rerun DESC"
_OF_JOB = f"""
SELECT {SEEN_RUN}
  FROM fencepost_run AS run FORCE INDEX (PRIMARY)
 WHERE run.namespace = :namespace AND run.job = :job"""

FIND_NEWEST = said(
    each_of(
        _OF_KEYS,
        f"""SELECT job, slot, `manual`, rerun FROM fencepost_run FORCE INDEX (PRIMARY)
 WHERE namespace = :namespace AND job = :job {_NEWEST} LIMIT 1""",
        job="jobs",
    )
)

# When one of the newest runs of a job last began.
LAST_BEGAN = said(
    each_of(
        "SELECT CONVERT(job USING utf8mb4), MAX(started_at) FROM ({each}) AS run GROUP BY job",
        f"""SELECT job, started_at FROM fencepost_run FORCE INDEX (PRIMARY)
 WHERE namespace = :namespace AND job = :job {_NEWEST} LIMIT :most""",
        job="jobs",
    )
)

# The runs of a job around a slot, both ways.
FIND_FROM = said(f"{_OF_JOB} AND run.slot >= :slot ORDER BY slot, `manual`, rerun LIMIT :most")
FIND_UP_TO = said(f"{_OF_JOB} AND run.slot <= :slot {_NEWEST} LIMIT :most")
FIND_RERUN = said(f"""{_OF_JOB} AND run.slot = :slot AND run.manual = :manual
 ORDER BY run.rerun DESC
 LIMIT 1""")

FIND_SLOT_RUNS = said(f"""
SELECT {COLUMNS} FROM (
    SELECT {listed(RUN_FIELDS)} FROM fencepost_run
     WHERE namespace = :namespace AND job = :job AND slot >= :start AND slot < :end
     {_NEWEST}
     LIMIT :limit) AS run
 ORDER BY run.slot, run.manual, run.rerun""")

_SPAN = packed_row(SPAN, SPAN_FIELDS, of="span")

FIND_SPANS = said(f"""
SELECT {_SPAN} FROM (
    SELECT {listed(SPAN_FIELDS)} FROM fencepost_span
     WHERE namespace = :namespace AND job = :job AND `last` >= :start AND `first` < :end
     ORDER BY `first` DESC
     LIMIT :limit) AS span
 ORDER BY span.`first`""")

# The last range of some jobs.
LAST_SPANS = said(
    each_of(
        f"SELECT {_SPAN} FROM ({{each}}) AS span",
        f"""SELECT {listed(SPAN_FIELDS)}
  FROM fencepost_span FORCE INDEX (PRIMARY)
 WHERE namespace = :namespace AND job = :job ORDER BY `first` DESC LIMIT 1""",
        job="jobs",
    )
)

PUT_SPANS = said(inserted("fencepost_span", SPAN_FIELDS, updates=["last", "at"]))

_LANE = packed_row(LANE, LANE_FIELDS, of="lane")
_SEEN_LANE = packed_row({**LANE, "edition": "BIGINT"}, (*LANE_FIELDS, "edition"), of="lane")

FIND_LANES = said(f"""
SELECT {_LANE}
  FROM fencepost_lane AS lane
 WHERE lane.namespace = :namespace AND (NOT :active OR lane.ended_at = 0)
 ORDER BY lane.number""")

# The longest due first, from where the last page ended.
FIND_DUE_LANES = said(f"""
SELECT {_SEEN_LANE}
  FROM fencepost_lane AS lane FORCE INDEX (fencepost_lane_open)
 WHERE lane.namespace = :namespace AND lane.due >= :due AND lane.due <= {_NOW}
   AND (lane.due > :due OR lane.number > :number)
 ORDER BY lane.due, lane.number
 LIMIT :most
   FOR UPDATE SKIP LOCKED""")

FIND_LANES_OF = said(f"""
SELECT {_SEEN_LANE}
  FROM fencepost_lane AS lane FORCE INDEX (fencepost_lane_of)
 WHERE lane.namespace = :namespace AND lane.job IN :jobs AND lane.due IS NOT NULL
 ORDER BY lane.job, lane.number
   FOR UPDATE SKIP LOCKED""")

FIND_LANE = said(f"""
SELECT {_SEEN_LANE}
  FROM fencepost_lane AS lane
 WHERE lane.namespace = :namespace AND lane.number = :number""")

HIGHEST_LANE = said(
    "SELECT COALESCE(MAX(number), 0) FROM fencepost_lane WHERE namespace = :namespace"
)

INSERT_LANES = said(inserted("fencepost_lane", LANE_FIELDS))

UPDATE_LANES = said(
    moved(f"""
UPDATE fencepost_lane
   SET {assigned(("until", "cursor", "not_before", "ended_at", "stopped"))}, edition = edition + 1
 WHERE namespace = :namespace AND number = :number AND edition = :seen""")
)

_INSTANCE_REST = [name for name in INSTANCE_FIELDS if name != "name"]

FIND_INSTANCES = said(f"""
SELECT {packed_row(INSTANCE, INSTANCE_FIELDS, of="known")}
  FROM fencepost_instance AS known
 WHERE known.namespace = :namespace
 ORDER BY known.name""")

PUT_INSTANCES = said(inserted("fencepost_instance", INSTANCE_FIELDS, updates=_INSTANCE_REST))

DROP_INSTANCES = said(
    "DELETE FROM fencepost_instance WHERE namespace = :namespace AND name IN :names"
)

# Who knows some jobs, and which definitions of them were ever shared.
FIND_MEMBERS = said(f"""
SELECT {packed_row(MEMBER, MEMBER, of="member")}
  FROM fencepost_member AS member
 WHERE member.namespace = :namespace AND member.job IN :jobs""")

_COHORT_FIELDS = ("job", "digest", "since", "seen_at", "build", "definition")
FIND_COHORTS = said(f"""
SELECT {packed_row(COHORT, _COHORT_FIELDS, of="cohort")}
  FROM fencepost_cohort AS cohort
 WHERE cohort.namespace = :namespace AND cohort.job IN :jobs""")

FIND_MEMBERS_OF = said("""
SELECT CONVERT(job USING utf8mb4)
  FROM fencepost_member
 WHERE namespace = :namespace AND instance = :instance
 ORDER BY fencepost_member.job
 LIMIT :most""")

PUT_MEMBERS = said(inserted("fencepost_member", MEMBER, updates=["digest"]))

PART = said(
    one_by_one("""
DELETE FROM fencepost_member
 WHERE namespace = :namespace AND job = :job AND instance = :instance""")
)

PUT_COHORTS = said(
    inserted("fencepost_cohort", COHORT, updates=["since", "seen_at", "build", "definition"])
)

FIND_JOB = said(f"""
SELECT {JOB_COLUMNS}
  FROM fencepost_job AS known
 WHERE known.namespace = :namespace AND known.job = :job""")

FIND_ALL_EVENTS = said(f"""
SELECT {packed_row(EVENT, EVENT_FIELDS, of="event")}
  FROM fencepost_event AS event
 WHERE event.namespace = :namespace
 ORDER BY event.job, event.slot, event.manual, event.rerun, event.id""")

# The clock was set back: what waits for a while waits for no longer than it would have.
_EDITED = "edition = edition + 1"
_SOONER = "not_before = GREATEST(not_before - :by, :now)"
SET_BACK = tuple(
    said(f"UPDATE {table} SET {change} WHERE namespace = :namespace {where}")
    for table, change, where in (
        ("fencepost_run", f"{_SOONER}, {_EDITED}", "AND waits > :now"),
        (
            "fencepost_run",
            f"cancel_at = :now, {_EDITED}",
            "AND live = 'running' AND cancel_at > :now",
        ),
        (
            "fencepost_job",
            f"next_due = GREATEST(next_due - :by, :now), {_EDITED}",
            "AND next_due > :now",
        ),
        ("fencepost_job", f"unknown_since = :now, {_EDITED}", "AND unknown_since > :now"),
        ("fencepost_lane", f"{_SOONER}, {_EDITED}", "AND due > :now"),
        ("fencepost_cohort", "since = since - :by, seen_at = LEAST(seen_at, :now)", ""),
        # From left to right: the second change sees the first.
        (
            "fencepost_alarm",
            f"{_SOONER}, wake_at = GREATEST(due_at, not_before)",
            "AND state = 'armed' AND not_before > :now",
        ),
    )
)
