"""What the SQLite ledger says to its file, and how its rows become values and back again."""

from __future__ import annotations

from fencepost.ledger.sqlite_clock import CLAIM_AT, CLAIM_TOKEN
from fencepost.ledger.sqlite_schema import LIVE
from fencepost.ledger.sqlite_touches import UNTOUCHED
from fencepost.model.definition import JobRecord
from fencepost.model.item import ItemRecord, ItemState
from fencepost.model.lease import Holder
from fencepost.model.run import HANDED_OFF, STOPPING, RunRecord, State
from fencepost.model.slot import RunKey

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_KEY = "namespace = ? AND job = ? AND slot = ? AND manual = ? AND rerun = ?"

# In the order of ``RunRecord``, with its key and its holder taken apart.
_KEY_COLUMNS = ("job", "slot", "manual", "rerun")
_OTHER_COLUMNS = (
    *("state", "lock", "lease", "token", "nonce", "host", "pid", "version"),
    *("reason", "blocker", "origin", "created_at", "started_at", "ended_at", "not_before"),
    *("beat_at", "cancel_at", "starts", "losses", "releases", "streak", "strikes", "solitary"),
    *("checkpoint", "done", "total", "result", "error", "saves", "epoch"),
)
COLUMNS = _COLUMNS = ", ".join(_KEY_COLUMNS + _OTHER_COLUMNS)

# By name, because SQLite would rather walk over all that ever ran in the namespace.
_LIVE_ONES = "fencepost_run INDEXED BY fencepost_run_live"

# The usual claim, in one statement that is its own transaction: a trigger writes the run and takes
# the lease, or changes nothing. The statement itself reads the clock, once it has the file: so no
# other run of the lock can end after the time that is recorded.
CLAIM_FREE = f"""
INSERT INTO fencepost_claim
VALUES ({"?, " * 6}{CLAIM_TOKEN}(), {"?, " * 5}{CLAIM_AT}(), {"?, " * 5}?)"""

# The usual end of an attempt, likewise: a trigger releases the lease. No request to cancel changes
# an end that is final.
_END = f"""
UPDATE fencepost_run
   SET state = ?, reason = ?, not_before = 0.0, ended_at = ?, beat_at = ?, result = ?, error = ?,
       done = coalesce(?, done), total = coalesce(?, total)
 WHERE {_KEY} AND state = 'running' AND token = ? AND nonce = ? AND {UNTOUCHED}()"""

FINISH = f"{_END}\nRETURNING cancel_at, streak, strikes, checkpoint, done, total, saves"

# And of one that told nothing since its claim: there is nothing to be read again.
FINISH_SILENT = f"""{_END}
   AND cancel_at = 0.0 AND saves = 0 AND checkpoint IS NULL AND done IS NULL AND total IS NULL"""

FIND = f"SELECT {_COLUMNS} FROM fencepost_run WHERE {_KEY}"

# Every live run of a lock.
FIND_LIVE = f"SELECT {_COLUMNS} FROM {_LIVE_ONES} WHERE namespace = ? AND lock = ? AND {LIVE}"

INSERT = f"""
INSERT INTO fencepost_run (namespace, {_COLUMNS})
VALUES ({", ".join("?" * (1 + len(_KEY_COLUMNS) + len(_OTHER_COLUMNS)))})"""

# A run becomes what was decided, unless it is no longer what it was when that was decided.
UPDATE = f"""
UPDATE fencepost_run
   SET {", ".join(f"{column} = ?" for column in _OTHER_COLUMNS if column != "created_at")}
 WHERE {_KEY} AND state = ? AND token = ? AND nonce = ?"""

# Whoever writes for an attempt must still have the run.
_OURS = f"{_KEY} AND state = 'running' AND token = ? AND nonce = ?"

HAS = f"SELECT 1 FROM fencepost_run WHERE {_OURS}"

BEAT = f"""
UPDATE fencepost_run
   SET beat_at = ?, done = coalesce(?, done), total = coalesce(?, total)
 WHERE {_OURS}
RETURNING cancel_at, reason"""

# Whoever knows the token will tell how it ended.
HAND_OVER = f"""
UPDATE fencepost_run
   SET beat_at = ?, reason = '{HANDED_OFF}'
 WHERE {_OURS}"""

# Whoever finds the lease free resumes the run, and counts no loss.
ORDER_STOP = f"""
UPDATE fencepost_run
   SET reason = '{STOPPING}'
 WHERE {_OURS} AND reason <> '{HANDED_OFF}'"""

# What differs from the last checkpoint is progress: losses in a row are forgotten. What arrives
# after a later save changes neither.
SAVE = f"""
UPDATE fencepost_run
   SET beat_at = ?, done = coalesce(?, done), total = coalesce(?, total),
       streak     = iif(saves >= ? OR checkpoint IS ?, streak, 0),
       strikes    = iif(saves >= ? OR checkpoint IS ?, strikes, 0),
       checkpoint = iif(saves >= ?, checkpoint, ?),
       saves      = max(saves, coalesce(?, 0))
 WHERE {_OURS}
RETURNING cancel_at"""

COUNT = """
INSERT INTO fencepost_count (namespace, job, slot, manual, rerun, name, source, value)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET value = excluded.value"""

FIND_COUNTS = f"SELECT name, sum(value) FROM fencepost_count WHERE {_KEY} GROUP BY name"

TELL = """
INSERT INTO fencepost_event
       (namespace, job, slot, manual, rerun, at, what, token, holder, detail)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""

FIND_EVENTS = f"""
SELECT at, what, token, holder, detail
  FROM fencepost_event
 WHERE {_KEY}
 ORDER BY id"""

# The first begin of an item; nothing if it was begun before.
BEGIN_FIRST = """
INSERT OR IGNORE INTO fencepost_item (namespace, scope, item, state, token, run, call, at)
VALUES (?, ?, ?, 'begun', ?, ?, ?, ?)"""

BEGIN_AGAIN = """
UPDATE fencepost_item
   SET state = 'begun', token = ?, run = ?, call = ?, at = ?, error = NULL
 WHERE namespace = ? AND scope = ? AND item = ?"""

# Only who began an item can end it.
END = """
UPDATE fencepost_item
   SET state = ?, error = ?, at = ?
 WHERE namespace = ? AND scope = ? AND item = ? AND state = 'begun'
   AND run = ? AND token = ? AND call = coalesce(?, call)"""

_ITEM_COLUMNS = "scope, item, state, token, run, call, at, error"

FIND_ITEM = f"""
SELECT {_ITEM_COLUMNS}
  FROM fencepost_item
 WHERE namespace = ? AND scope = ? AND item = ?"""

FIND_ITEMS = f"""
SELECT {_ITEM_COLUMNS}
  FROM fencepost_item
 WHERE namespace = ? AND scope = ?
 ORDER BY item"""

FIND_JOB = """
SELECT job, definition, quarantined, paused, retired, paused_until, pruned
  FROM fencepost_job
 WHERE namespace = ? AND job = ?"""

_JOB_COLUMNS = ", ".join(JobRecord._fields)

FIND_JOBS = f"SELECT {_JOB_COLUMNS} FROM fencepost_job WHERE namespace = ? ORDER BY job"

# What instances know of a job they decide about: who only triggers it has no say in that.
DEFINE = """
INSERT INTO fencepost_job (namespace, job, definition, quarantined, paused)
VALUES (?, ?, ?, '', '')
    ON CONFLICT DO UPDATE SET definition = excluded.definition
 WHERE epoch = 0"""

QUARANTINE = """
INSERT INTO fencepost_job (namespace, job, definition, quarantined, paused)
VALUES (?, ?, '{}', ?, '')
    ON CONFLICT DO UPDATE SET quarantined = excluded.quarantined"""

LIFT = """
UPDATE fencepost_job
   SET quarantined = ''
 WHERE namespace = ? AND job = ? AND quarantined <> ''"""

_STATES = {state.value: state for state in State}


def listing(states: Sequence[State]) -> str:
    """Return the statement that lists the newest runs of a job, by slot.

    It walks the table from the job's newest end and stops at the limit. With ``states`` it walks
    until it has found enough, so what is rare costs a walk over the history that was kept.
    """
    chosen = f" AND state IN ({', '.join('?' * len(states))})" if states else ""
    return f"""
SELECT {_COLUMNS}
  FROM fencepost_run
 WHERE namespace = ? AND job = ?{chosen}
 ORDER BY slot DESC, manual DESC, rerun DESC
 LIMIT ?"""


# Every job that has ever run, one look for each however many runs it has.
FIND_RUN_JOBS = """
WITH RECURSIVE known (job) AS (
    SELECT min(job) FROM fencepost_run WHERE namespace = ?1
     UNION ALL
    SELECT (SELECT min(job) FROM fencepost_run WHERE namespace = ?1 AND job > known.job)
      FROM known
     WHERE known.job IS NOT NULL
)
SELECT job FROM known WHERE job IS NOT NULL"""

# Every live run, of whatever lock: there are never many.
FIND_ALL_LIVE = f"SELECT {_COLUMNS} FROM {_LIVE_ONES} WHERE namespace = ? AND {LIVE}"


def run_of(columns: tuple[Any, ...]) -> RunRecord:
    """Return the run in a row. By position: every verb comes through here."""
    fields = (*columns[5:8], Holder(*columns[8:12]), *columns[12:26], columns[26] == 1)
    return RunRecord(RunKey(*columns[:4]), _STATES[columns[4]], *fields, *columns[27:])


def row_of(run: RunRecord) -> tuple[Any, ...]:
    """Return the row of a run, but for the namespace."""
    return (
        *run.key,
        run.state.value,
        *(run.lock, run.lease, run.token),
        *run.holder,
        *run[6:20],
        int(run.solitary),
        *run[21:],
    )


def changes_of(run: RunRecord) -> tuple[Any, ...]:
    """Return what ``UPDATE`` sets: all but the key and the instant of creation."""
    row = row_of(run)
    return (*row[4:15], *row[16:])


def job_of(row: tuple[Any, ...]) -> JobRecord:
    """Return the job in a row."""
    return JobRecord(*row)


def item_of(columns: tuple[Any, ...]) -> ItemRecord:
    """Return the item in a row."""
    scope, item, state, *rest = columns
    return ItemRecord(scope, item, ItemState(state), *rest)
