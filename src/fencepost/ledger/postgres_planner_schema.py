"""The tables of the scheduling side: where jobs stand, ranges of slots, and who knows which job."""

from __future__ import annotations

# Pages are left some room: what nearly every slot changes of its job should stay where it is.
_CREATE_JOB = """
CREATE TABLE IF NOT EXISTS fencepost_job (
    namespace      TEXT COLLATE "C"  NOT NULL,
    job            TEXT COLLATE "C"  NOT NULL,
    definition     TEXT              NOT NULL DEFAULT '{}',
    quarantined    TEXT              NOT NULL DEFAULT '',
    paused         TEXT              NOT NULL DEFAULT '',
    spec           TEXT              NOT NULL DEFAULT '',
    rules          TEXT              NOT NULL DEFAULT '',
    template       TEXT              NOT NULL DEFAULT '',
    payload        TEXT,
    digest         TEXT              NOT NULL DEFAULT '',
    build          BIGINT            NOT NULL DEFAULT 0,
    epoch          BIGINT            NOT NULL DEFAULT 0,
    effective_from DOUBLE PRECISION  NOT NULL DEFAULT 0.0,
    watermark      BIGINT            NOT NULL DEFAULT 0,
    next_due       DOUBLE PRECISION,
    owed           BIGINT            NOT NULL DEFAULT 0,
    paused_until   DOUBLE PRECISION  NOT NULL DEFAULT 0.0,
    retired        TEXT              NOT NULL DEFAULT '',
    orphaned_at    DOUBLE PRECISION  NOT NULL DEFAULT 0.0,
    unknown_since  DOUBLE PRECISION  NOT NULL DEFAULT 0.0,
    pruned         BIGINT            NOT NULL DEFAULT -1,
    stored         BOOLEAN           NOT NULL DEFAULT FALSE,
    PRIMARY KEY (namespace, job)
) WITH (fillfactor = 70)"""

# Cost follows what is due, not what is registered.
_CREATE_DUE = """
CREATE INDEX IF NOT EXISTS fencepost_job_due
    ON fencepost_job (namespace, next_due, job)
 WHERE next_due IS NOT NULL"""

_CREATE_UNKNOWN = """
CREATE INDEX IF NOT EXISTS fencepost_job_unknown
    ON fencepost_job (namespace, unknown_since)
 WHERE unknown_since > 0.0 AND orphaned_at = 0.0"""

_CREATE_MARK = """
CREATE OR REPLACE FUNCTION fencepost_job_refused() RETURNS TRIGGER
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'a watermark never falls' USING ERRCODE = 'FP002';
END $$"""

_MARK_TRIGGER = """
CREATE OR REPLACE TRIGGER fencepost_job_mark BEFORE UPDATE OF watermark ON fencepost_job
   FOR EACH ROW WHEN (NEW.watermark < OLD.watermark)
EXECUTE FUNCTION fencepost_job_refused()"""

# Runs that wait for their time or their turn. In these words, so that the planner sees that it
# may use the index.
WAITING = "state IN ('pending', 'waiting_retry')"
_CREATE_WAITING = f"""
CREATE INDEX IF NOT EXISTS fencepost_run_waiting
    ON fencepost_run (namespace, not_before, job, slot, manual, rerun)
 WHERE {WAITING}"""

_CREATE_RUNNING = """
CREATE INDEX IF NOT EXISTS fencepost_run_running
    ON fencepost_run (namespace)
 WHERE state = 'running'"""

_CREATE_SPAN = """
CREATE TABLE IF NOT EXISTS fencepost_span (
    namespace TEXT COLLATE "C"  NOT NULL,
    job       TEXT COLLATE "C"  NOT NULL,
    first     BIGINT            NOT NULL,
    last      BIGINT            NOT NULL,
    state     TEXT              NOT NULL,
    reason    TEXT              NOT NULL,
    stands_in TEXT              NOT NULL,
    at        DOUBLE PRECISION  NOT NULL,
    PRIMARY KEY (namespace, job, first)
)"""

_CREATE_LANE = """
CREATE TABLE IF NOT EXISTS fencepost_lane (
    namespace    TEXT COLLATE "C"  NOT NULL,
    number       BIGINT            NOT NULL,
    job          TEXT COLLATE "C"  NOT NULL,
    start        BIGINT            NOT NULL,
    until        BIGINT            NOT NULL,
    cursor       BIGINT            NOT NULL,
    existing     TEXT              NOT NULL,
    newest_first BOOLEAN           NOT NULL,
    max_active   BIGINT            NOT NULL,
    origin       TEXT              NOT NULL,
    spec         TEXT              NOT NULL,
    not_before   DOUBLE PRECISION  NOT NULL,
    ended_at     DOUBLE PRECISION  NOT NULL,
    created_at   DOUBLE PRECISION  NOT NULL,
    operator     TEXT              NOT NULL,
    stopped      TEXT              NOT NULL,
    PRIMARY KEY (namespace, number)
)"""

_CREATE_LANE_OPEN = """
CREATE INDEX IF NOT EXISTS fencepost_lane_open
    ON fencepost_lane (namespace, not_before, number)
 WHERE ended_at = 0.0"""

_CREATE_LANE_OF = """
CREATE INDEX IF NOT EXISTS fencepost_lane_of
    ON fencepost_lane (namespace, job, number)
 WHERE ended_at = 0.0"""

_CREATE_INSTANCE = """
CREATE TABLE IF NOT EXISTS fencepost_instance (
    namespace    TEXT COLLATE "C"  NOT NULL,
    name         TEXT COLLATE "C"  NOT NULL,
    host         TEXT              NOT NULL,
    pid          BIGINT            NOT NULL,
    version      TEXT              NOT NULL,
    build        BIGINT            NOT NULL,
    tzdata       TEXT              NOT NULL,
    orphan_after DOUBLE PRECISION  NOT NULL,
    started_at   DOUBLE PRECISION  NOT NULL,
    beat_at      DOUBLE PRECISION  NOT NULL,
    left_at      DOUBLE PRECISION  NOT NULL,
    PRIMARY KEY (namespace, name)
)"""

_CREATE_MEMBER = """
CREATE TABLE IF NOT EXISTS fencepost_member (
    namespace TEXT COLLATE "C"  NOT NULL,
    job       TEXT COLLATE "C"  NOT NULL,
    instance  TEXT COLLATE "C"  NOT NULL,
    digest    TEXT COLLATE "C"  NOT NULL,
    PRIMARY KEY (namespace, job, instance)
)"""

_CREATE_MEMBER_OF = """
CREATE INDEX IF NOT EXISTS fencepost_member_of ON fencepost_member (namespace, instance, job)"""

_CREATE_COHORT = """
CREATE TABLE IF NOT EXISTS fencepost_cohort (
    namespace  TEXT COLLATE "C"  NOT NULL,
    job        TEXT COLLATE "C"  NOT NULL,
    digest     TEXT COLLATE "C"  NOT NULL,
    since      DOUBLE PRECISION  NOT NULL,
    seen_at    DOUBLE PRECISION  NOT NULL,
    build      BIGINT            NOT NULL,
    definition TEXT              NOT NULL,
    PRIMARY KEY (namespace, job, digest)
)"""

SCHEDULES = (
    _CREATE_JOB,
    _CREATE_DUE,
    _CREATE_UNKNOWN,
    _CREATE_MARK,
    _MARK_TRIGGER,
    _CREATE_WAITING,
    _CREATE_RUNNING,
    _CREATE_SPAN,
    _CREATE_LANE,
    _CREATE_LANE_OPEN,
    _CREATE_LANE_OF,
    _CREATE_INSTANCE,
    _CREATE_MEMBER,
    _CREATE_MEMBER_OF,
    _CREATE_COHORT,
)
