"""The table of alarms on PostgreSQL, and what the server itself refuses about them."""

from __future__ import annotations

# In the words of the partial indexes, so that the planner sees that it may use them.
ARMED, FIRED = "state = 'armed'", "fired > 0"
OVER = "state IN ('dead', 'cleared', 'gone')"

# One alarm for each (kind, key), found by a digest: both may be longer than an index can bear.
_CREATE_ALARM = """
CREATE TABLE IF NOT EXISTS fencepost_alarm (
    namespace  TEXT COLLATE "C"  NOT NULL,
    place      BYTEA             NOT NULL,
    lease_key  BYTEA             NOT NULL,
    kind       TEXT COLLATE "C"  NOT NULL,
    key        TEXT COLLATE "C"  NOT NULL,
    generation BIGINT            NOT NULL,
    state      TEXT COLLATE "C"  NOT NULL,
    due_at     DOUBLE PRECISION  NOT NULL,
    not_before DOUBLE PRECISION  NOT NULL,
    wake_at    DOUBLE PRECISION  NOT NULL,
    fired      BIGINT            NOT NULL,
    token      BIGINT            NOT NULL,
    nonce      TEXT              NOT NULL,
    host       TEXT              NOT NULL,
    pid        BIGINT            NOT NULL,
    version    TEXT              NOT NULL,
    batch      TEXT              NOT NULL,
    set_by     TEXT              NOT NULL,
    reason     TEXT              NOT NULL,
    set_at     DOUBLE PRECISION  NOT NULL,
    claimed_at DOUBLE PRECISION  NOT NULL,
    ended_at   DOUBLE PRECISION  NOT NULL,
    keep_until DOUBLE PRECISION  NOT NULL,
    starts     BIGINT            NOT NULL,
    errors     BIGINT            NOT NULL,
    faults     BIGINT            NOT NULL,
    losses     BIGINT            NOT NULL,
    releases   BIGINT            NOT NULL,
    streak     BIGINT            NOT NULL,
    strikes    BIGINT            NOT NULL,
    solitary   BOOLEAN           NOT NULL,
    late       BIGINT            NOT NULL,
    stale      BIGINT            NOT NULL,
    window_at  DOUBLE PRECISION  NOT NULL,
    fires      BIGINT            NOT NULL,
    payload    TEXT,
    error      TEXT,
    PRIMARY KEY (place)
) WITH (fillfactor = 80)"""

# What is due: of each kind that somebody can handle, the first are neighbours.
_CREATE_ARMED = f"""
CREATE INDEX IF NOT EXISTS fencepost_alarm_armed
    ON fencepost_alarm (namespace, left(kind, 300), wake_at)
 WHERE {ARMED}"""

# What a handler has, or one that died had; also if it was cleared meanwhile.
_CREATE_FIRED = f"""
CREATE INDEX IF NOT EXISTS fencepost_alarm_fired
    ON fencepost_alarm (namespace, left(kind, 300))
 WHERE {FIRED}"""

# What died, and the tombstones in the order in which they may go.
_CREATE_OVER = f"""
CREATE INDEX IF NOT EXISTS fencepost_alarm_over
    ON fencepost_alarm (namespace, state, keep_until)
 WHERE {OVER}"""

_CREATE_REFUSED = """
CREATE OR REPLACE FUNCTION fencepost_alarm_refused() RETURNS TRIGGER
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the generation and the token of an alarm never fall'
          USING ERRCODE = 'FP002';
END $$"""

_NEXT_TRIGGER = """
CREATE OR REPLACE TRIGGER fencepost_alarm_next BEFORE UPDATE ON fencepost_alarm
   FOR EACH ROW WHEN (NEW.generation < OLD.generation
                      OR (NEW.token < OLD.token AND NOT (OLD.state = 'gone'
                                                         AND NEW.generation > OLD.token)))
EXECUTE FUNCTION fencepost_alarm_refused()"""

ALARMS = (
    _CREATE_ALARM,
    _CREATE_ARMED,
    _CREATE_FIRED,
    _CREATE_OVER,
    _CREATE_REFUSED,
    _NEXT_TRIGGER,
)
