"""The tables of the SQLite ledger, and the triggers that make the file itself obey THE TABLE.

They come into being at the first use of a ledger, by numbered migrations: whoever only takes locks
has none of this in the file.
"""

from __future__ import annotations

from fencepost.errors import Misuse
from fencepost.ledger.alarm_sqlite_schema import ALARMS
from fencepost.ledger.sqlite_planner_schema import SCHEDULES
from fencepost.ledger.sqlite_testimony import BEGIN_LIFE, CREATE_LIFE
from fencepost.model.run import FIRST, TABLE, State, legal
from fencepost.stores.sqlite_schema import CREATE_RESERVE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from sqlite3 import Connection

PART = "ledger"


def _one_of(column: str, states: Iterable[State]) -> str:
    """Return the condition that a run is in one of these states.

    Not by IN: of a list SQLite makes a table, each time that a trigger or a partial index asks.
    """
    known = set(states)
    arms = (f"{column} = '{state.value}'" for state in State if state in known)
    return f"({' OR '.join(arms)})"


# In the words of the partial index, so that SQLite sees that it may use it.
LIVE = _one_of("state", TABLE)

CREATE_MIGRATION = """
CREATE TABLE IF NOT EXISTS fencepost_migration (
    part   TEXT    NOT NULL,
    number INTEGER NOT NULL,
    at     REAL    NOT NULL,
    PRIMARY KEY (part, number)
) WITHOUT ROWID"""

# A run. Its key is the order of the table: "the last runs of a job" is one walk over neighbours,
# and to be unique costs no second page. What can be long comes last.
_CREATE_RUN = """
CREATE TABLE IF NOT EXISTS fencepost_run (
    namespace  TEXT    NOT NULL,
    job        TEXT    NOT NULL,
    slot       INTEGER NOT NULL,
    manual     INTEGER NOT NULL,
    rerun      INTEGER NOT NULL,
    state      TEXT    NOT NULL,
    lock       TEXT    NOT NULL,
    lease      TEXT    NOT NULL,
    token      INTEGER NOT NULL,
    nonce      TEXT    NOT NULL,
    host       TEXT    NOT NULL,
    pid        INTEGER NOT NULL,
    version    TEXT    NOT NULL,
    reason     TEXT    NOT NULL,
    blocker    TEXT    NOT NULL,
    origin     TEXT    NOT NULL,
    created_at REAL    NOT NULL,
    started_at REAL    NOT NULL,
    ended_at   REAL    NOT NULL,
    not_before REAL    NOT NULL,
    beat_at    REAL    NOT NULL,
    cancel_at  REAL    NOT NULL,
    starts     INTEGER NOT NULL,
    losses     INTEGER NOT NULL,
    releases   INTEGER NOT NULL,
    streak     INTEGER NOT NULL,
    strikes    INTEGER NOT NULL,
    solitary   INTEGER NOT NULL,
    saves      INTEGER NOT NULL,
    checkpoint TEXT,
    done       INTEGER,
    total      INTEGER,
    result     TEXT,
    error      TEXT,
    PRIMARY KEY (namespace, job, slot, manual, rerun)
) WITHOUT ROWID"""

# The live runs of a lock, of which a slot has at most one.
_CREATE_LIVE = f"""
CREATE UNIQUE INDEX IF NOT EXISTS fencepost_run_live
    ON fencepost_run (namespace, lock, job, slot, manual)
 WHERE {LIVE}"""

_CREATE_ITEM = """
CREATE TABLE IF NOT EXISTS fencepost_item (
    namespace TEXT    NOT NULL,
    scope     TEXT    NOT NULL,
    item      TEXT    NOT NULL,
    state     TEXT    NOT NULL,
    token     INTEGER NOT NULL,
    run       TEXT    NOT NULL,
    call      TEXT    NOT NULL,
    at        REAL    NOT NULL,
    error     TEXT,
    PRIMARY KEY (namespace, scope, item)
) WITHOUT ROWID"""

_CREATE_EVENT = """
CREATE TABLE IF NOT EXISTS fencepost_event (
    id        INTEGER PRIMARY KEY,
    namespace TEXT    NOT NULL,
    job       TEXT    NOT NULL,
    slot      INTEGER NOT NULL,
    manual    INTEGER NOT NULL,
    rerun     INTEGER NOT NULL,
    at        REAL    NOT NULL,
    what      TEXT    NOT NULL,
    token     INTEGER NOT NULL,
    holder    TEXT    NOT NULL,
    detail    TEXT    NOT NULL
)"""

_CREATE_EVENT_RUN = """
CREATE INDEX IF NOT EXISTS fencepost_event_run
    ON fencepost_event (namespace, job, slot, manual, rerun)"""

_CREATE_EVENT_KEPT = """
CREATE TRIGGER IF NOT EXISTS fencepost_event_kept BEFORE UPDATE ON fencepost_event
BEGIN
    SELECT RAISE(ABORT, 'an event is never changed');
END"""

# What each source has counted so far; a counter's value is their sum.
_CREATE_COUNT = """
CREATE TABLE IF NOT EXISTS fencepost_count (
    namespace TEXT    NOT NULL,
    job       TEXT    NOT NULL,
    slot      INTEGER NOT NULL,
    manual    INTEGER NOT NULL,
    rerun     INTEGER NOT NULL,
    name      TEXT    NOT NULL,
    source    TEXT    NOT NULL,
    value     INTEGER NOT NULL,
    PRIMARY KEY (namespace, job, slot, manual, rerun, name, source)
) WITHOUT ROWID"""

_CREATE_JOB = """
CREATE TABLE IF NOT EXISTS fencepost_job (
    namespace   TEXT NOT NULL,
    job         TEXT NOT NULL,
    definition  TEXT NOT NULL,
    quarantined TEXT NOT NULL,
    paused      TEXT NOT NULL,
    PRIMARY KEY (namespace, job)
) WITHOUT ROWID"""


def _first_trigger() -> str:
    """Return the trigger that refuses a run which begins as none can begin."""
    arms = "\n".join(
        f"           WHEN '{state.value}' THEN RAISE(ABORT, 'a run cannot begin as {state.value}')"
        for state in State
        if not legal(None, state)
    )
    return f"""
CREATE TRIGGER IF NOT EXISTS fencepost_run_first BEFORE INSERT ON fencepost_run
  WHEN NOT {_one_of("NEW.state", FIRST)}
BEGIN
    SELECT CASE NEW.state
{arms}
           ELSE RAISE(ABORT, 'a run cannot begin as what is not a state')
           END;
END"""


def _next_trigger() -> str:
    """Return the trigger that refuses every change that is not in the table.

    An ended run has no line there: whatever column of it is to change, it is refused.
    """
    allowed = "\n           OR ".join(
        f"OLD.state = '{before.value}' AND {_one_of('NEW.state', follows)}"
        for before, follows in TABLE.items()
    )
    return f"""
CREATE TRIGGER IF NOT EXISTS fencepost_run_next BEFORE UPDATE ON fencepost_run
  WHEN NEW.token < OLD.token
    OR NOT ({allowed})
BEGIN
    INSERT INTO fencepost_refusal
    VALUES (iif(NEW.token < OLD.token, 'token', OLD.state || ' ' || NEW.state));
END"""


# Nobody reads it: what is put there is refused. The many sentences are kept out of the trigger
# above, because SQLite makes room for all that a trigger could say each time that it fires.
_CREATE_REFUSAL = "CREATE VIEW IF NOT EXISTS fencepost_refusal AS SELECT '' AS what"


def _refusal_trigger() -> str:
    """Return the trigger that says what was refused. RAISE takes a constant only."""
    said = {
        f"{before.value} {after.value}": f"a run that is {before.value} "
        + ("never changes again" if before is after else f"cannot become {after.value}")
        for before in State
        for after in State
        if not legal(before, after)
    }
    said["token"] = "the token of a run never falls"
    arms = "\n".join(
        f"           WHEN '{what}' THEN RAISE(ABORT, '{sentence}')"
        for what, sentence in said.items()
    )
    return f"""
CREATE TRIGGER IF NOT EXISTS fencepost_refusal_said INSTEAD OF INSERT ON fencepost_refusal
BEGIN
    SELECT CASE NEW.what
{arms}
           ELSE RAISE(ABORT, 'a run cannot become what is not a state')
           END;
END"""


# A run that no longer runs holds no lease: whatever ends it frees what it held, in the same commit.
_LEFT_TRIGGER = """
CREATE TRIGGER IF NOT EXISTS fencepost_run_left AFTER UPDATE OF state ON fencepost_run
  WHEN OLD.state = 'running' AND NEW.state <> 'running'
BEGIN
    UPDATE fencepost_lease
       SET held = 0, ended = 'it was released'
     WHERE namespace = OLD.namespace AND name = OLD.lease AND nonce = OLD.nonce AND held = 1;
END"""

# Nobody reads it either. What is put there is a run that asks to be claimed, and the lease that it
# would have: one statement then does what else takes a transaction of four.
_CREATE_CLAIM = """
CREATE VIEW IF NOT EXISTS fencepost_claim AS
SELECT '' AS namespace, '' AS job, 0 AS slot, 0 AS manual, 0 AS rerun, '' AS lock, 0 AS token,
       '' AS nonce, '' AS host, 0 AS pid, '' AS version, '' AS origin, 0.0 AS at,
       '' AS boot_id, 0 AS expires_us, 0 AS ttl_us, '' AS pulse, '' AS pulse_inode, 0 AS epoch"""

# There is no such run yet, no live run of its lock, the job may run, and the lock's lease is free
# under a lower token, or was never granted. ``decide`` would say GO to just that.
CLAIMABLE = f"""
       NOT EXISTS (SELECT 1 FROM fencepost_run
                    WHERE namespace = NEW.namespace AND job = NEW.job AND slot = NEW.slot
                      AND manual = NEW.manual AND rerun = NEW.rerun)
   AND NOT EXISTS (SELECT 1 FROM fencepost_run INDEXED BY fencepost_run_live
                    WHERE namespace = NEW.namespace AND lock = NEW.lock AND {LIVE})
   AND NOT EXISTS (SELECT 1 FROM fencepost_job
                    WHERE namespace = NEW.namespace AND job = NEW.job
                      AND (quarantined <> '' OR paused <> '' OR retired <> ''
                           OR pruned >= NEW.slot))
   AND NOT EXISTS (SELECT 1 FROM fencepost_lease
                    WHERE namespace = NEW.namespace AND name = NEW.lock
                      AND (held = 1 OR nonce = NEW.nonce OR token >= NEW.token))
   AND NEW.token > (SELECT token FROM fencepost_file WHERE id = 1)"""

_MAKE_CLAIM = """
    INSERT INTO fencepost_run
           (namespace, job, slot, manual, rerun, state, lock, lease, token, nonce, host, pid,
            version, reason, blocker, origin, created_at, started_at, ended_at, not_before,
            beat_at, cancel_at, starts, losses, releases, streak, strikes, solitary, saves, epoch)
    VALUES (NEW.namespace, NEW.job, NEW.slot, NEW.manual, NEW.rerun, 'running', NEW.lock, NEW.lock,
            NEW.token, NEW.nonce, NEW.host, NEW.pid, NEW.version, '', '', NEW.origin, NEW.at,
            NEW.at, 0.0, 0.0, NEW.at, 0.0, 1, 0, 0, 0, 0, 0, 0, NEW.epoch);
    INSERT INTO fencepost_lease
           (namespace, name, token, nonce, held, boot_id, expires_us, ttl_us, beat, since_us,
            host, pid, version, pulse, pulse_inode, ended)
    VALUES (NEW.namespace, NEW.lock, NEW.token, NEW.nonce, 1, NEW.boot_id, NEW.expires_us,
            NEW.ttl_us, 0, NEW.token, NEW.host, NEW.pid, NEW.version, NEW.pulse, NEW.pulse_inode,
            '')
        ON CONFLICT (namespace, name) DO UPDATE
       SET token = excluded.token, since_us = excluded.since_us, nonce = excluded.nonce, held = 1,
           boot_id = excluded.boot_id, expires_us = excluded.expires_us,
           ttl_us = excluded.ttl_us, beat = 0, host = excluded.host, pid = excluded.pid,
           version = excluded.version, pulse = excluded.pulse,
           pulse_inode = excluded.pulse_inode, ended = '';"""

# Where anything else is true nothing changes, and ``decide`` is asked.
_CLAIM_TRIGGER = f"""
CREATE TRIGGER IF NOT EXISTS fencepost_claim_made INSTEAD OF INSERT ON fencepost_claim
  WHEN {CLAIMABLE}
BEGIN{_MAKE_CLAIM}
END"""

# A slot that is due: a claim, and where its job stands once that is made. Of these many are put
# there by one statement, each of which happens as a whole or not at all.
_CREATE_SLOT = f"""
{_CREATE_CLAIM.replace("fencepost_claim", "fencepost_slot").strip()},
       0 AS watermark, 0.0 AS next_due, 0 AS owed"""

_SLOT_TRIGGER = f"""
CREATE TRIGGER IF NOT EXISTS fencepost_slot_claimed INSTEAD OF INSERT ON fencepost_slot
  WHEN {CLAIMABLE}
BEGIN{_MAKE_CLAIM}
    UPDATE fencepost_job
       SET watermark = NEW.watermark, next_due = NEW.next_due, owed = NEW.owed
     WHERE namespace = NEW.namespace AND job = NEW.job;
END"""

# The end of an attempt that told nothing since its claim, likewise.
_CREATE_END = """
CREATE VIEW IF NOT EXISTS fencepost_end AS
SELECT '' AS namespace, '' AS job, 0 AS slot, 0 AS manual, 0 AS rerun, 0 AS token, '' AS nonce,
       '' AS state, '' AS reason, 0.0 AS at, '' AS result, '' AS error"""

_END_TRIGGER = """
CREATE TRIGGER IF NOT EXISTS fencepost_end_made INSTEAD OF INSERT ON fencepost_end
BEGIN
    UPDATE fencepost_run
       SET state = NEW.state, reason = NEW.reason, not_before = 0.0, ended_at = NEW.at,
           beat_at = NEW.at, result = NEW.result, error = NEW.error
     WHERE namespace = NEW.namespace AND job = NEW.job AND slot = NEW.slot
       AND manual = NEW.manual AND rerun = NEW.rerun
       AND state = 'running' AND token = NEW.token AND nonce = NEW.nonce
       AND cancel_at = 0.0 AND saves = 0 AND checkpoint IS NULL AND done IS NULL
       AND total IS NULL;
END"""

# Each is applied once, in order; what was released is never edited.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        _CREATE_RUN,
        _CREATE_REFUSAL,
        _refusal_trigger(),
        _LEFT_TRIGGER,
        _CREATE_ITEM,
        _CREATE_EVENT,
        _CREATE_EVENT_RUN,
        _CREATE_EVENT_KEPT,
        _CREATE_COUNT,
        _CREATE_JOB,
        CREATE_LIFE,
        BEGIN_LIFE,
        CREATE_RESERVE,  # which a file of an older fencepost lacks
    ),
    SCHEDULES,
    (
        # Some files have these since their first migration, in words that were slow.
        "DROP INDEX IF EXISTS fencepost_run_live",
        "DROP TRIGGER IF EXISTS fencepost_run_first",
        "DROP TRIGGER IF EXISTS fencepost_run_next",
        _CREATE_LIVE,
        _first_trigger(),
        _next_trigger(),
        _CREATE_CLAIM,
        _CLAIM_TRIGGER,
    ),
    ALARMS,
    (
        # A retired job has no new runs.
        "DROP TRIGGER IF EXISTS fencepost_claim_made",
        _CLAIM_TRIGGER,
    ),
    (_CREATE_SLOT, _SLOT_TRIGGER, _CREATE_END, _END_TRIGGER),
)

CREATE = (CREATE_MIGRATION, *(statement for step in MIGRATIONS for statement in step))

_KNOWN = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'fencepost_migration'"

_FIND_NUMBER = "SELECT coalesce(max(number), 0) FROM fencepost_migration WHERE part = :part"

_RECORD = "INSERT INTO fencepost_migration (part, number, at) VALUES (:part, :number, :at)"


def is_ready(db: Connection) -> bool:
    """Say whether the ledger's tables are there and up to date; raise if they are from later."""
    number = _number(db)
    if number > len(MIGRATIONS):
        raise Misuse(
            f"the ledger in this file was written by a newer fencepost (migration {number}, this "
            f"one knows {len(MIGRATIONS)}): upgrade this installation"
        )
    return number == len(MIGRATIONS)


def migrate(db: Connection, *, at: float) -> None:
    """Apply what is missing, inside of the open write transaction."""
    db.execute(CREATE_MIGRATION)
    for number in range(_number(db) + 1, len(MIGRATIONS) + 1):
        for statement in MIGRATIONS[number - 1]:
            db.execute(statement)
        db.execute(_RECORD, {"part": PART, "number": number, "at": at})


def _number(db: Connection) -> int:
    if db.execute(_KNOWN).fetchone() is None:
        return 0
    number: int = db.execute(_FIND_NUMBER, {"part": PART}).fetchone()[0]
    return number
