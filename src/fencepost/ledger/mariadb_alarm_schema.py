"""The table of alarms on MariaDB, and what the server itself refuses about them.

MariaDB has no partial indexes, so the state is a part of the index. All that decides in which order
alarms are claimed is in there too: a claim locks as many rows as it takes, and no more. Kinds,
alarms and leases are found by digests: together they would be longer than an index can bear.
"""

from __future__ import annotations

from fencepost.ledger.mariadb_columns import (
    FLAG,
    INSTANT,
    NUMBER,
    SPACE,
    TEXT,
    TITLE,
    WORD,
    WORDS,
)

# What can be long comes last, also in the JSON of a row: each column of it is looked for from the
# start. The faces see to it that kinds and keys are no longer than this.
ALARM = {
    **dict.fromkeys(("place", "shelf", "lease_key", "state", "nonce", "batch"), WORD),
    **dict.fromkeys(("generation", "fired", "token", "pid"), NUMBER),
    **dict.fromkeys(("due_at", "not_before", "wake_at", "set_at", "claimed_at"), INSTANT),
    **dict.fromkeys(("ended_at", "keep_until", "window_at"), INSTANT),
    **dict.fromkeys(("starts", "errors", "faults", "losses", "releases"), NUMBER),
    **dict.fromkeys(("streak", "strikes", "late", "stale", "fires"), NUMBER),
    "solitary": FLAG,
    "kind": "VARBINARY(1000) NOT NULL",
    "key": "VARBINARY(2000) NOT NULL",
    **dict.fromkeys(("host", "version"), TITLE),
    **dict.fromkeys(("set_by", "reason"), WORDS),
    **dict.fromkeys(("error", "payload"), TEXT),
}

_COLUMNS = "".join(f"    `{name}` {column},\n" for name, column in ALARM.items())

# What is due: of each kind that somebody can handle, the first are neighbours. What a handler has,
# or one that died had, also if it was cleared meanwhile. What died, and the tombstones in the order
# in which they may go.
_CREATE_ALARM = f"""
CREATE TABLE IF NOT EXISTS fencepost_alarm (
    namespace {SPACE},
{_COLUMNS}
    PRIMARY KEY (namespace, place),
    KEY fencepost_alarm_armed (namespace, shelf, state, wake_at, `key`),
    KEY fencepost_alarm_fired (namespace, shelf, fired),
    KEY fencepost_alarm_over (namespace, state, keep_until)
) ENGINE = InnoDB COMMENT = 'fencepost 1'"""

_NEXT_TRIGGER = """
CREATE TRIGGER IF NOT EXISTS fencepost_alarm_next BEFORE UPDATE ON fencepost_alarm FOR EACH ROW
BEGIN
    IF NEW.generation < OLD.generation
       OR (NEW.token < OLD.token AND NOT (OLD.state = 'gone' AND NEW.generation > OLD.token)) THEN
        SIGNAL SQLSTATE '45000'
           SET MESSAGE_TEXT = 'the generation and the token of an alarm never fall';
    END IF;
END"""

ALARMS = (_CREATE_ALARM, _NEXT_TRIGGER)
