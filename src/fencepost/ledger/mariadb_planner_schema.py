"""The tables of the scheduling side: where jobs stand, ranges of slots, and who knows which job."""

from __future__ import annotations

from fencepost.ledger.mariadb_columns import (
    COHORT,
    INSTANCE,
    JOB_RECORD,
    LANE,
    MEMBER,
    SPAN,
    table,
)

# Cost follows what is due, not what is registered. A job of which nobody has heard for a while has
# ``unknown_since`` in an index with all others, which have 0 there.
_CREATE_JOB = table(
    "fencepost_job",
    JOB_RECORD,
    "edition BIGINT NOT NULL DEFAULT 0",
    "PRIMARY KEY (namespace, job)",
    "KEY fencepost_job_due (namespace, next_due, job)",
    "KEY fencepost_job_unknown (namespace, unknown_since)",
)

_JOB_TRIGGER = """
CREATE TRIGGER IF NOT EXISTS fencepost_job_mark BEFORE UPDATE ON fencepost_job FOR EACH ROW
BEGIN
    IF NEW.watermark < OLD.watermark THEN
        SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'a watermark never falls';
    END IF;
END"""

_CREATE_SPAN = table("fencepost_span", SPAN, "PRIMARY KEY (namespace, job, first)")

# Open lanes are few beside those that have ended: the latter have no ``due``.
_CREATE_LANE = table(
    "fencepost_lane",
    LANE,
    "edition BIGINT NOT NULL DEFAULT 0",
    "due DOUBLE GENERATED ALWAYS AS (IF(ended_at = 0, not_before, NULL)) STORED",
    "PRIMARY KEY (namespace, number)",
    "KEY fencepost_lane_open (namespace, due, number)",
    "KEY fencepost_lane_of (namespace, job, due, number)",
)

_CREATE_INSTANCE = table("fencepost_instance", INSTANCE, "PRIMARY KEY (namespace, name)")

_CREATE_MEMBER = table(
    "fencepost_member",
    MEMBER,
    "PRIMARY KEY (namespace, job, instance)",
    "KEY fencepost_member_of (namespace, instance, job)",
)

_CREATE_COHORT = table("fencepost_cohort", COHORT, "PRIMARY KEY (namespace, job, digest)")

SCHEDULES = (
    _CREATE_JOB,
    _JOB_TRIGGER,
    _CREATE_SPAN,
    _CREATE_LANE,
    _CREATE_INSTANCE,
    _CREATE_MEMBER,
    _CREATE_COHORT,
)
