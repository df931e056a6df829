"""The tables of the MariaDB ledger, and the triggers that make the server itself obey THE TABLE.

They come into being at the first use of a ledger. A definition that ends a transaction cannot be
undone with it: so each may be repeated, and those who do so at the same time do no harm.
"""

from __future__ import annotations

from fencepost.ledger.mariadb_alarm_schema import ALARMS
from fencepost.ledger.mariadb_columns import (
    COUNT,
    EVENT,
    ITEM,
    NAME,
    RUN,
    WAITING,
    WORD,
    one_of,
    table,
)
from fencepost.ledger.mariadb_life import BEGIN_LIFE, CREATE_LIFE
from fencepost.ledger.mariadb_planner_schema import SCHEDULES
from fencepost.ledger.mariadb_said import digest
from fencepost.model.run import FIRST, TABLE

PART = "ledger"
# Whose turn it is with a lock, and who is in the office: rows that are locked and never change.
_CREATE_TURN = table(
    "fencepost_turn", {"place": WORD, "name": NAME}, "PRIMARY KEY (namespace, place)"
)

# A run. ``edition`` is another one after every change of ours. Indexes are over all rows here, so
# what only some runs have is in columns that are NULL for all others: whether a run lives, under
# which lock (by its digest: a name may be longer than an index can bear), from when on it waits.
_LIVE = one_of("state", TABLE)
# The newest transactions of user code that were committed for a run, should one not hear of it.
_SEALED = "sealed VARCHAR(255) CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT ''"
_CREATE_RUN = table(
    "fencepost_run",
    RUN,
    "edition BIGINT NOT NULL DEFAULT 0",
    _SEALED,
    f"""live VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin
        GENERATED ALWAYS AS (IF({_LIVE}, state, NULL)) STORED""",
    f"""live_lock CHAR(64) CHARACTER SET ascii COLLATE ascii_bin
        GENERATED ALWAYS AS (IF({_LIVE}, {digest("`lock`")}, NULL)) STORED""",
    f"""waits DOUBLE
        GENERATED ALWAYS AS (IF({one_of("state", WAITING)}, not_before, NULL)) STORED""",
    "PRIMARY KEY (namespace, job, slot, `manual`, rerun)",
    # The live runs of a lock, of which a slot has at most one.
    "UNIQUE KEY fencepost_run_live (namespace, live_lock, job, slot, `manual`)",
    "KEY fencepost_run_of_job (namespace, live, job, slot)",
    "KEY fencepost_run_waiting (namespace, waits, job, slot, `manual`, rerun)",
    "KEY fencepost_run_by_slot (namespace, slot, job, `manual`, rerun)",
)

# An item is found by a digest of its scope and name, which may be longer than an index can bear.
_CREATE_ITEM = table(
    "fencepost_item",
    {"place": WORD, "shelf": WORD, **ITEM},
    *("PRIMARY KEY (namespace, place)", "KEY fencepost_item_shelf (namespace, shelf)"),
)

_CREATE_EVENT = table(
    "fencepost_event",
    {"id": "BIGINT NOT NULL AUTO_INCREMENT", **EVENT},
    *("PRIMARY KEY (id)", "KEY fencepost_event_run (namespace, job, slot, `manual`, rerun)"),
)

# What each source has counted so far; a counter's value is their sum.
_CREATE_COUNT = table(
    "fencepost_count",
    COUNT,
    "PRIMARY KEY (namespace, job, slot, `manual`, rerun, name, source)",
)

_ALLOWED = "\n        OR ".join(
    f"(OLD.state = '{before.value}' AND {one_of('NEW.state', follows)})"
    for before, follows in TABLE.items()
)
_REFUSE = "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = sentence"

_FIRST_TRIGGER = f"""
CREATE TRIGGER IF NOT EXISTS fencepost_run_first BEFORE INSERT ON fencepost_run FOR EACH ROW
BEGIN
    DECLARE sentence VARCHAR(128);
    IF NOT {one_of("NEW.state", FIRST)} THEN
        SET sentence = CONCAT('a run cannot begin as ', NEW.state);
        {_REFUSE};
    END IF;
END"""

# In one go, because each step of a trigger costs as much as the row. A run that no longer runs
# holds no lease: whatever ends it frees what it held, in the same commit.
_NEXT_TRIGGER = f"""
CREATE TRIGGER IF NOT EXISTS fencepost_run_next BEFORE UPDATE ON fencepost_run FOR EACH ROW
BEGIN
    DECLARE sentence VARCHAR(128);
    IF NEW.token < OLD.token OR NOT (
           {_ALLOWED}) THEN
        SET sentence = CASE
            WHEN NEW.token < OLD.token THEN 'the token of a run never falls'
            WHEN NEW.state = OLD.state THEN
                CONCAT('a run that is ', OLD.state, ' never changes again')
            ELSE CONCAT('a run that is ', OLD.state, ' cannot become ', NEW.state) END;
        {_REFUSE};
    ELSEIF OLD.state = 'running' AND NEW.state <> 'running' THEN
        UPDATE fencepost_lease
           SET held = 0, ended = 'it was released'
         WHERE namespace = OLD.namespace AND digest = {digest("OLD.lease")}
           AND nonce = OLD.nonce AND held = 1;
    END IF;
END"""

_KEPT_TRIGGER = """
CREATE TRIGGER IF NOT EXISTS fencepost_event_kept BEFORE UPDATE ON fencepost_event FOR EACH ROW
BEGIN
    SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'an event is never changed';
END"""

# For tables from before there was such a column. MySQL never had them, and cannot say it like that.
_ADD_SEALED = f"""
ALTER TABLE fencepost_run /*M!100600 ADD COLUMN IF NOT EXISTS {_SEALED} */"""

# Each is applied once, in order; what was released is never edited.
STEPS: tuple[tuple[str, ...], ...] = (
    (
        _CREATE_TURN,
        _CREATE_RUN,
        _FIRST_TRIGGER,
        _NEXT_TRIGGER,
        _CREATE_ITEM,
        _CREATE_EVENT,
        _KEPT_TRIGGER,
        _CREATE_COUNT,
        *SCHEDULES,
        *ALARMS,
    ),
    (_ADD_SEALED, CREATE_LIFE, BEGIN_LIFE),
)
