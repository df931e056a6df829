"""The tables of the scheduling side: where jobs stand, ranges of slots, and who knows which job."""

from __future__ import annotations

_GROW_JOB = tuple(
    f"ALTER TABLE fencepost_job ADD COLUMN {column}"
    for column in (
        "spec TEXT NOT NULL DEFAULT ''",
        "rules TEXT NOT NULL DEFAULT ''",
        "template TEXT NOT NULL DEFAULT ''",
        "payload TEXT",
        "digest TEXT NOT NULL DEFAULT ''",
        "build INTEGER NOT NULL DEFAULT 0",
        "epoch INTEGER NOT NULL DEFAULT 0",
        "effective_from REAL NOT NULL DEFAULT 0.0",
        "watermark INTEGER NOT NULL DEFAULT 0",
        "next_due REAL",
        "owed INTEGER NOT NULL DEFAULT 0",
        "paused_until REAL NOT NULL DEFAULT 0.0",
        "retired TEXT NOT NULL DEFAULT ''",
        "orphaned_at REAL NOT NULL DEFAULT 0.0",
        "unknown_since REAL NOT NULL DEFAULT 0.0",
        "pruned INTEGER NOT NULL DEFAULT -1",
        "stored INTEGER NOT NULL DEFAULT 0",
    )
)

# Cost follows what is due, not what is registered.
_CREATE_DUE = """
CREATE INDEX IF NOT EXISTS fencepost_job_due
    ON fencepost_job (namespace, next_due, job)
 WHERE next_due IS NOT NULL"""

_CREATE_UNKNOWN = """
CREATE INDEX IF NOT EXISTS fencepost_job_unknown
    ON fencepost_job (namespace, unknown_since)
 WHERE unknown_since > 0.0 AND orphaned_at = 0.0"""

_MARK_TRIGGER = """
CREATE TRIGGER IF NOT EXISTS fencepost_job_mark BEFORE UPDATE OF watermark ON fencepost_job
  WHEN NEW.watermark < OLD.watermark
BEGIN
    SELECT RAISE(ABORT, 'a watermark never falls');
END"""

# Runs that wait for their time or their turn. In these words, so that SQLite sees that it may use
# the index.
WAITING = "(state = 'pending' OR state = 'waiting_retry')"
_CREATE_WAITING = f"""
CREATE INDEX IF NOT EXISTS fencepost_run_waiting
    ON fencepost_run (namespace, not_before)
 WHERE {WAITING}"""

# Live runs under a lock that is not named after their job. Those that are, as most are, the index
# by lock finds as well by job; so to begin and to end them changes no page more.
APART = f"({WAITING} OR state = 'running') AND lock <> job"
_CREATE_APART = f"""
CREATE INDEX IF NOT EXISTS fencepost_run_apart
    ON fencepost_run (namespace, job)
 WHERE {APART}"""

_CREATE_SPAN = """
CREATE TABLE IF NOT EXISTS fencepost_span (
    namespace TEXT    NOT NULL,
    job       TEXT    NOT NULL,
    first     INTEGER NOT NULL,
    last      INTEGER NOT NULL,
    state     TEXT    NOT NULL,
    reason    TEXT    NOT NULL,
    stands_in TEXT    NOT NULL,
    at        REAL    NOT NULL,
    PRIMARY KEY (namespace, job, first)
) WITHOUT ROWID"""

_CREATE_LANE = """
CREATE TABLE IF NOT EXISTS fencepost_lane (
    number       INTEGER PRIMARY KEY,
    namespace    TEXT    NOT NULL,
    job          TEXT    NOT NULL,
    start        INTEGER NOT NULL,
    until        INTEGER NOT NULL,
    cursor       INTEGER NOT NULL,
    existing     TEXT    NOT NULL,
    newest_first INTEGER NOT NULL,
    max_active   INTEGER NOT NULL,
    origin       TEXT    NOT NULL,
    spec         TEXT    NOT NULL,
    not_before   REAL    NOT NULL,
    ended_at     REAL    NOT NULL,
    created_at   REAL    NOT NULL,
    operator     TEXT    NOT NULL,
    stopped      TEXT    NOT NULL
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
    namespace    TEXT    NOT NULL,
    name         TEXT    NOT NULL,
    host         TEXT    NOT NULL,
    pid          INTEGER NOT NULL,
    version      TEXT    NOT NULL,
    build        INTEGER NOT NULL,
    tzdata       TEXT    NOT NULL,
    orphan_after REAL    NOT NULL,
    started_at   REAL    NOT NULL,
    beat_at      REAL    NOT NULL,
    left_at      REAL    NOT NULL,
    PRIMARY KEY (namespace, name)
) WITHOUT ROWID"""

_CREATE_MEMBER = """
CREATE TABLE IF NOT EXISTS fencepost_member (
    namespace TEXT NOT NULL,
    job       TEXT NOT NULL,
    instance  TEXT NOT NULL,
    digest    TEXT NOT NULL,
    PRIMARY KEY (namespace, job, instance)
) WITHOUT ROWID"""

_CREATE_MEMBER_OF = """
CREATE INDEX IF NOT EXISTS fencepost_member_of ON fencepost_member (namespace, instance, job)"""

_CREATE_COHORT = """
CREATE TABLE IF NOT EXISTS fencepost_cohort (
    namespace  TEXT    NOT NULL,
    job        TEXT    NOT NULL,
    digest     TEXT    NOT NULL,
    since      REAL    NOT NULL,
    seen_at    REAL    NOT NULL,
    build      INTEGER NOT NULL,
    definition TEXT    NOT NULL,
    PRIMARY KEY (namespace, job, digest)
) WITHOUT ROWID"""

# How far the wall clock is from the boot clock, as those who agreed about it saw it last.
_CREATE_CLOCK = """
CREATE TABLE IF NOT EXISTS fencepost_clock (
    id           INTEGER PRIMARY KEY CHECK (id = 1),
    era          TEXT NOT NULL,
    ahead        REAL NOT NULL,
    confirmed_at REAL NOT NULL
)"""

SCHEDULES = (
    *_GROW_JOB,
    "ALTER TABLE fencepost_run ADD COLUMN epoch INTEGER NOT NULL DEFAULT 0",
    _CREATE_DUE,
    _CREATE_UNKNOWN,
    _MARK_TRIGGER,
    _CREATE_WAITING,
    _CREATE_APART,
    _CREATE_SPAN,
    _CREATE_LANE,
    _CREATE_LANE_OPEN,
    _CREATE_LANE_OF,
    _CREATE_INSTANCE,
    _CREATE_MEMBER,
    _CREATE_MEMBER_OF,
    _CREATE_COHORT,
    _CREATE_CLOCK,
)
