"""The table of alarms in the ledger's file, and what the file itself refuses about them."""

from __future__ import annotations

# In the words of the partial index, so that SQLite sees that it may use it.
ARMED = "state = 'armed'"
FIRED = "fired > 0"
OVER = "state IN ('dead', 'cleared')"

# One alarm for each (kind, key). What can be long comes last.
_CREATE_ALARM = """
CREATE TABLE IF NOT EXISTS fencepost_alarm (
    namespace  TEXT    NOT NULL,
    kind       TEXT    NOT NULL,
    key        TEXT    NOT NULL,
    generation INTEGER NOT NULL,
    state      TEXT    NOT NULL,
    due_at     REAL    NOT NULL,
    not_before REAL    NOT NULL,
    wake_at    REAL    NOT NULL,
    fired      INTEGER NOT NULL,
    token      INTEGER NOT NULL,
    nonce      TEXT    NOT NULL,
    host       TEXT    NOT NULL,
    pid        INTEGER NOT NULL,
    version    TEXT    NOT NULL,
    batch      TEXT    NOT NULL,
    set_by     TEXT    NOT NULL,
    reason     TEXT    NOT NULL,
    set_at     REAL    NOT NULL,
    claimed_at REAL    NOT NULL,
    ended_at   REAL    NOT NULL,
    keep_until REAL    NOT NULL,
    starts     INTEGER NOT NULL,
    errors     INTEGER NOT NULL,
    faults     INTEGER NOT NULL,
    losses     INTEGER NOT NULL,
    releases   INTEGER NOT NULL,
    streak     INTEGER NOT NULL,
    strikes    INTEGER NOT NULL,
    solitary   INTEGER NOT NULL,
    late       INTEGER NOT NULL,
    stale      INTEGER NOT NULL,
    window_at  REAL    NOT NULL,
    fires      INTEGER NOT NULL,
    payload    TEXT,
    error      TEXT,
    PRIMARY KEY (namespace, kind, key)
) WITHOUT ROWID"""

# What is due: of each kind that somebody can handle, the first are neighbours.
_CREATE_ARMED = f"""
CREATE INDEX IF NOT EXISTS fencepost_alarm_armed
    ON fencepost_alarm (namespace, kind, wake_at)
 WHERE {ARMED}"""

# What a handler has, or one that died had; also if it was cleared meanwhile.
_CREATE_FIRED = f"""
CREATE INDEX IF NOT EXISTS fencepost_alarm_fired
    ON fencepost_alarm (namespace, kind)
 WHERE {FIRED}"""

# What died, and the tombstones in the order in which they may go.
_CREATE_OVER = f"""
CREATE INDEX IF NOT EXISTS fencepost_alarm_over
    ON fencepost_alarm (namespace, state, keep_until)
 WHERE {OVER}"""

_CREATE_NEXT = """
CREATE TRIGGER IF NOT EXISTS fencepost_alarm_next BEFORE UPDATE ON fencepost_alarm
  WHEN NEW.generation < OLD.generation OR NEW.token < OLD.token
BEGIN
    SELECT RAISE(ABORT, 'the generation and the token of an alarm never fall');
END"""

# Whoever deletes an alarm, the next one of its key must have a higher generation.
_CREATE_DELETED = """
CREATE TRIGGER IF NOT EXISTS fencepost_alarm_deleted AFTER DELETE ON fencepost_alarm
BEGIN
    UPDATE fencepost_file SET token = max(token, OLD.generation, OLD.token) WHERE id = 1;
END"""

ALARMS = (
    _CREATE_ALARM,
    _CREATE_ARMED,
    _CREATE_FIRED,
    _CREATE_OVER,
    _CREATE_NEXT,
    _CREATE_DELETED,
)
