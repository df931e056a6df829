"""The tables of the PostgreSQL ledger, and the triggers that make the server itself obey THE TABLE.

They come into being at the first use of a ledger, by numbered migrations under one advisory lock:
whoever only takes locks has none of this in the database. Names are compared byte by byte, as
Python does it, whatever the collation of the database.
"""

from __future__ import annotations

from fencepost.ledger.postgres_alarm_schema import ALARMS
from fencepost.ledger.postgres_life import BEGIN_LIFE, CREATE_LIFE
from fencepost.ledger.postgres_planner_schema import SCHEDULES
from fencepost.ledger.postgres_rousing import ROUSING
from fencepost.ledger.postgres_said import lease_key, made
from fencepost.model.run import FIRST, TABLE, State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

PART = "ledger"
# What a statement raises that finds something changed since it was decided: the door knows it for
# a transaction that lost against another one, and does it again. And what is against THE TABLE.
_MOVED, REFUSED = "40001", "FP002"


def one_of(column: str, states: Iterable[State]) -> str:
    """Return the condition that a run is in one of these states."""
    known = set(states)
    listed = ", ".join(f"'{state.value}'" for state in State if state in known)
    return f"{column} IN ({listed})"


# In the words of the partial indexes, so that the planner sees that it may use them.
LIVE = one_of("state", TABLE)
# Every live run of some ``:locks``, by the same index.
LIVE_OF_LOCKS = f"""namespace = :namespace AND lock = ANY(:locks::text[]) AND {LIVE}
       AND hashtextextended(lock, 0)
         = ANY(ARRAY(SELECT hashtextextended(name, 0) FROM unnest(:locks::text[]) AS name))"""

# A transaction whose ground has moved is undone as a whole: its commit was sent along already.
_CREATE_INSIST = f"""
CREATE OR REPLACE FUNCTION fencepost_insist(holds BOOLEAN) RETURNS BOOLEAN
LANGUAGE plpgsql AS $$
BEGIN
    IF holds IS NOT TRUE THEN
        RAISE EXCEPTION 'what was decided about has changed' USING ERRCODE = '{_MOVED}';
    END IF;
    RETURN TRUE;
END $$"""

# A run. What can be long comes last. Pages are left some room, so that a beat, which changes no
# index, finds place for the new version of its row beside the old one.
_CREATE_RUN = """
CREATE TABLE IF NOT EXISTS fencepost_run (
    namespace  TEXT COLLATE "C"  NOT NULL,
    job        TEXT COLLATE "C"  NOT NULL,
    slot       BIGINT            NOT NULL,
    manual     BIGINT            NOT NULL,
    rerun      BIGINT            NOT NULL,
    state      TEXT COLLATE "C"  NOT NULL,
    lock       TEXT COLLATE "C"  NOT NULL,
    lease      TEXT COLLATE "C"  NOT NULL,
    token      BIGINT            NOT NULL,
    nonce      TEXT              NOT NULL,
    host       TEXT              NOT NULL,
    pid        BIGINT            NOT NULL,
    version    TEXT              NOT NULL,
    reason     TEXT              NOT NULL,
    blocker    TEXT              NOT NULL,
    origin     TEXT              NOT NULL,
    created_at DOUBLE PRECISION  NOT NULL,
    started_at DOUBLE PRECISION  NOT NULL,
    ended_at   DOUBLE PRECISION  NOT NULL,
    not_before DOUBLE PRECISION  NOT NULL,
    beat_at    DOUBLE PRECISION  NOT NULL,
    cancel_at  DOUBLE PRECISION  NOT NULL,
    starts     BIGINT            NOT NULL,
    losses     BIGINT            NOT NULL,
    releases   BIGINT            NOT NULL,
    streak     BIGINT            NOT NULL,
    strikes    BIGINT            NOT NULL,
    solitary   BOOLEAN           NOT NULL,
    checkpoint TEXT,
    done       BIGINT,
    total      BIGINT,
    result     TEXT,
    error      TEXT,
    saves      BIGINT            NOT NULL,
    epoch      BIGINT            NOT NULL,
    PRIMARY KEY (namespace, job, slot, manual, rerun)
) WITH (fillfactor = 80)"""

# The live runs of a lock, of which a slot has at most one. A name may be longer than an index can
# bear, so it is found by its hash.
_CREATE_LIVE = f"""
CREATE UNIQUE INDEX IF NOT EXISTS fencepost_run_live
    ON fencepost_run (namespace, hashtextextended(lock, 0), job, slot, manual)
 WHERE {LIVE}"""

# The live runs of a job, whichever lock they are under.
_CREATE_OF_JOB = f"""
CREATE INDEX IF NOT EXISTS fencepost_run_of_job
    ON fencepost_run (namespace, job)
 WHERE {LIVE}"""

# An item is found by a digest of its scope and name, which may be longer than an index can bear.
_CREATE_ITEM = """
CREATE TABLE IF NOT EXISTS fencepost_item (
    namespace TEXT COLLATE "C"  NOT NULL,
    place     TEXT COLLATE "C"  NOT NULL,
    shelf     TEXT COLLATE "C"  NOT NULL,
    scope     TEXT COLLATE "C"  NOT NULL,
    item      TEXT COLLATE "C"  NOT NULL,
    state     TEXT              NOT NULL,
    token     BIGINT            NOT NULL,
    run       TEXT              NOT NULL,
    call      TEXT              NOT NULL,
    at        DOUBLE PRECISION  NOT NULL,
    error     TEXT,
    PRIMARY KEY (namespace, place)
)"""

_CREATE_ITEM_SHELF = """
CREATE INDEX IF NOT EXISTS fencepost_item_shelf ON fencepost_item (namespace, shelf)"""

_CREATE_EVENT = """
CREATE TABLE IF NOT EXISTS fencepost_event (
    id        BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    namespace TEXT COLLATE "C"  NOT NULL,
    job       TEXT COLLATE "C"  NOT NULL,
    slot      BIGINT            NOT NULL,
    manual    BIGINT            NOT NULL,
    rerun     BIGINT            NOT NULL,
    at        DOUBLE PRECISION  NOT NULL,
    what      TEXT              NOT NULL,
    token     BIGINT            NOT NULL,
    holder    TEXT              NOT NULL,
    detail    TEXT              NOT NULL
)"""

_CREATE_EVENT_RUN = """
CREATE INDEX IF NOT EXISTS fencepost_event_run
    ON fencepost_event (namespace, job, slot, manual, rerun)"""

# What each source has counted so far; a counter's value is their sum.
_CREATE_COUNT = """
CREATE TABLE IF NOT EXISTS fencepost_count (
    namespace TEXT COLLATE "C"  NOT NULL,
    job       TEXT COLLATE "C"  NOT NULL,
    slot      BIGINT            NOT NULL,
    manual    BIGINT            NOT NULL,
    rerun     BIGINT            NOT NULL,
    name      TEXT COLLATE "C"  NOT NULL,
    source    TEXT COLLATE "C"  NOT NULL,
    value     BIGINT            NOT NULL,
    PRIMARY KEY (namespace, job, slot, manual, rerun, name, source)
)"""

# From each state, what may come next. Nearly every change begins with a run that runs.
_FOLLOWS = "\n        ".join(
    f"WHEN '{before.value}' THEN {one_of('NEW.state', TABLE[before])}"
    for before in sorted(TABLE, key=lambda state: state is not State.RUNNING)
)

# What is against THE TABLE is refused. A run that no longer runs holds no lease: whatever ends it
# frees what it held, in the same commit. The run's row is locked by then, so it comes first.
#
# A function, though a trigger can have conditions of its own: those are read from their text again
# for each statement, which took longer than all the rest of it.
_CREATE_OBEYS = f"""
CREATE OR REPLACE FUNCTION fencepost_run_obeys() RETURNS TRIGGER
LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        IF {one_of("NEW.state", FIRST)} THEN
            RETURN NEW;
        END IF;
        RAISE EXCEPTION 'a run cannot begin as %', NEW.state USING ERRCODE = '{REFUSED}';
    END IF;
    IF NEW.token < OLD.token THEN
        RAISE EXCEPTION 'the token of a run never falls' USING ERRCODE = '{REFUSED}';
    END IF;
    IF NOT (CASE OLD.state
        {_FOLLOWS}
        ELSE FALSE END) THEN
        IF NEW.state = OLD.state THEN
            RAISE EXCEPTION 'a run that is % never changes again', OLD.state
                  USING ERRCODE = '{REFUSED}';
        END IF;
        RAISE EXCEPTION 'a run that is % cannot become %', OLD.state, NEW.state
              USING ERRCODE = '{REFUSED}';
    END IF;
    IF OLD.state = 'running' AND NEW.state <> 'running' THEN
        UPDATE fencepost_lease
           SET held = FALSE, ended = 'it was released', pulse = 0
         WHERE key = {lease_key("OLD.namespace", "OLD.lease")} AND nonce = OLD.nonce AND held;
    END IF;
    RETURN NEW;
END $$"""

_OBEYS_TRIGGER = """
CREATE OR REPLACE TRIGGER fencepost_run_obeys BEFORE INSERT OR UPDATE ON fencepost_run
   FOR EACH ROW EXECUTE FUNCTION fencepost_run_obeys()"""

_CREATE_KEPT = f"""
CREATE OR REPLACE FUNCTION fencepost_event_refused() RETURNS TRIGGER
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'an event is never changed' USING ERRCODE = '{REFUSED}';
END $$"""

_KEPT_TRIGGER = """
CREATE OR REPLACE TRIGGER fencepost_event_kept BEFORE UPDATE ON fencepost_event
   FOR EACH ROW EXECUTE FUNCTION fencepost_event_refused()"""

# Each is applied once, in order; what was released is never edited.
_MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        _CREATE_INSIST,
        _CREATE_RUN,
        _CREATE_LIVE,
        _CREATE_OF_JOB,
        _CREATE_OBEYS,
        _OBEYS_TRIGGER,
        _CREATE_ITEM,
        _CREATE_ITEM_SHELF,
        _CREATE_EVENT,
        _CREATE_EVENT_RUN,
        _CREATE_KEPT,
        _KEPT_TRIGGER,
        _CREATE_COUNT,
        *SCHEDULES,
        *ALARMS,
    ),
    (CREATE_LIFE, BEGIN_LIFE),
    ROUSING,
)

STEPS = tuple(tuple(made(statement) for statement in step) for step in _MIGRATIONS)
