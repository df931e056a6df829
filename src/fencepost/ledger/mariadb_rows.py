"""What the MariaDB ledger says to its server.

The verbs of an attempt are one packet each: it writes all that belongs together, or nothing. What
is read with ``FORCE INDEX`` must not wait for rows that it does not ask for, as a scan would.
"""

from __future__ import annotations

from fencepost.ledger.draft_values import (
    EVENT_FIELDS,
    ITEM_FIELDS,
    RUN_FIELDS,
    RUN_KEY,
    RUN_REST,
)
from fencepost.ledger.mariadb_columns import COUNT, ITEM, JOB_RECORD, LIVE, RUN, WORDS
from fencepost.ledger.mariadb_leases import EXTEND, HELD, LIVE_OF_LOCKS
from fencepost.ledger.mariadb_said import (
    NOW,
    PACKED,
    assigned,
    each_of,
    inserted,
    listed,
    moved,
    one_by_one,
    packed_row,
    said,
)
from fencepost.model.definition import JobRecord
from fencepost.model.ending import UNFINISHED
from fencepost.model.run import HANDED_OFF, STOPPING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from fencepost.ledger.mariadb_said import Statement
    from fencepost.model.slot import RunKey

CLOCK = said(f"SELECT {NOW}")

# Who asks for a run waits for those who ask for one of the same lock, and for registration. Rows of
# turns are locked and never changed; that of a lock is made by whoever asks for it first.
SHARE = """
SELECT 1 INTO @fencepost_office
  FROM fencepost_turn
 WHERE namespace = :namespace AND place = 'office'
  LOCK IN SHARE MODE"""
TURN = said(
    SHARE,
    """
INSERT INTO fencepost_turn (namespace, place, name)
VALUES (:namespace, :#lock, :lock)
    ON DUPLICATE KEY UPDATE place = VALUES(place)""",
)
OPEN_OFFICE = said("""
INSERT IGNORE INTO fencepost_turn (namespace, place, name) VALUES (:namespace, 'office', '')""")

KEY = """run.namespace = :namespace AND run.job = :job AND run.slot = :slot
   AND run.`manual` = :manual AND run.rerun = :rerun"""
_KEY = KEY.replace("run.", "")

COLUMNS = packed_row(RUN, RUN_FIELDS, of="run")
# With the edition of the row, which is another one after every change.
EDITED = {**RUN, "edition": "BIGINT"}
SEEN_RUN = packed_row(EDITED, (*RUN_FIELDS, "edition"), of="run")

FIND = said(f"SELECT {COLUMNS} FROM fencepost_run AS run WHERE {KEY}")

# Some runs, by their keys. Whoever is going to write them has them locked, in order.
_OF_KEYS = """fencepost_run AS run FORCE INDEX (PRIMARY)
 WHERE run.namespace = :namespace AND (run.job, run.slot, run.manual, run.rerun) IN :keys"""
FIND_SOME = said(f"SELECT {SEEN_RUN} FROM {_OF_KEYS}")
FIND_SOME_ALONE = said(f"SELECT {SEEN_RUN} FROM {_OF_KEYS} FOR UPDATE")

# Every live run of some locks, and of some jobs.
FIND_LIVE = said(f"SELECT {SEEN_RUN} FROM {LIVE_OF_LOCKS}")
FIND_LIVE_OF = said(f"""
SELECT {SEEN_RUN}
  FROM fencepost_run AS run FORCE INDEX (fencepost_run_of_job)
 WHERE run.namespace = :namespace AND run.job IN :jobs AND run.{LIVE}""")

INSERT = said(inserted("fencepost_run", RUN_FIELDS))

# Runs become what was decided, unless one is no longer what it was when that was decided.
UPDATE = said(
    moved(f"""
UPDATE fencepost_run AS run
   SET {assigned(name for name in RUN_REST if name != "created_at")}, edition = edition + 1
 WHERE {KEY} AND run.edition = :seen""")
)

# Whoever writes for an attempt must still have the run.
OURS = f"{KEY} AND run.state = 'running' AND run.token = :token AND run.nonce = :nonce"

_REPORTED = "run.done = COALESCE(:done, run.done), run.total = COALESCE(:total, run.total)"


_COUNTED = each_of(
    """
INSERT INTO fencepost_count
       (namespace, job, slot, `manual`, rerun, name, source, value) {each}
    ON DUPLICATE KEY UPDATE value = VALUES(value)""",
    """SELECT :namespace, :job, :slot, :manual, :rerun, :name, :source, :value
  FROM DUAL
 WHERE @fencepost_ours""",
    name="names",
    value="values",
)
_WERE_OURS = "SET @fencepost_ours = ROW_COUNT() > 0"

# Renew and report, or neither: not if the lease ran out. That of a run that was handed off is only
# moved by handing it over again.
BEAT = said(
    "SET @fencepost_was = NULL",
    f"""
SELECT run.reason, run.cancel_at INTO @fencepost_was, @fencepost_cancel
  FROM fencepost_run AS run
 WHERE {OURS}
   FOR UPDATE""",
    f"""
UPDATE fencepost_lease AS lease
   SET {EXTEND}
 WHERE {HELD} AND @fencepost_was <> '{HANDED_OFF}'""",
    f"SET @fencepost_ours = ROW_COUNT() > 0 OR @fencepost_was = '{HANDED_OFF}'",
    f"""
UPDATE fencepost_run AS run
   SET run.beat_at = {NOW}, {_REPORTED}, run.edition = run.edition + 1
 WHERE {OURS} AND @fencepost_ours""",
    _COUNTED,
    "SELECT @fencepost_cancel, @fencepost_ours FROM DUAL WHERE @fencepost_was IS NOT NULL",
)

# What differs from the last checkpoint is progress: losses in a row are forgotten. What arrives
# after a later save changes neither. What is set first is seen by what is set after it.
_LATE = "COALESCE(run.saves >= :order, FALSE)"
_SAME = f"({_LATE} OR run.checkpoint <=> CAST(:checkpoint AS CHAR CHARACTER SET utf8mb4))"
SAVE = said(
    f"""
UPDATE fencepost_run AS run
   SET run.beat_at = {NOW}, {_REPORTED},
       run.streak     = IF({_SAME}, run.streak, 0),
       run.strikes    = IF({_SAME}, run.strikes, 0),
       run.checkpoint = IF({_LATE}, run.checkpoint, :checkpoint),
       run.saves      = GREATEST(run.saves, COALESCE(:order, 0)),
       run.edition    = run.edition + 1
 WHERE {OURS}""",
    _WERE_OURS,
    _COUNTED,
    f"SELECT run.cancel_at FROM fencepost_run AS run WHERE {OURS}",
)

_UNFINISHED = " ".join(f"WHEN '{state.value}' THEN '{what}'" for state, what in UNFINISHED.items())

# Whether a cancel was asked for of what is to be tried again.
_STOPPED = "(run.cancel_at > 0 AND :again)"

_EVENT_COLUMNS = listed(EVENT_FIELDS)

# The end of an attempt; a trigger releases the lease. A cancelled attempt is never tried again.
FINISH = said(
    f"""
UPDATE fencepost_run AS run
   SET run.state      = IF({_STOPPED}, 'cancelled', :state),
       run.reason     = IF({_STOPPED}, 'cancelled', :reason),
       run.not_before = IF({_STOPPED} OR :pause = 0, 0, {NOW} + :pause),
       run.ended_at   = IF({_STOPPED} OR :terminal, {NOW}, 0),
       run.beat_at    = {NOW},
       run.result     = IF({_STOPPED}, NULL, :result),
       run.error      = :error,
       run.releases   = run.releases + (NOT {_STOPPED} AND :state = 'pending'),
       run.edition    = run.edition + 1,
       {_REPORTED}
 WHERE {OURS}""",
    _WERE_OURS,
    _COUNTED,
    f"""
INSERT INTO fencepost_event (namespace, {_EVENT_COLUMNS})
SELECT namespace, job, slot, `manual`, rerun, beat_at, CASE state {_UNFINISHED} END, token, :holder,
       COALESCE(error, '')
  FROM fencepost_run
 WHERE {_KEY} AND @fencepost_ours
   AND state IN ({", ".join(f"'{state.value}'" for state in UNFINISHED)})""",
    f"SELECT {COLUMNS} FROM fencepost_run AS run WHERE {KEY} AND @fencepost_ours",
)

# Whoever knows the token will tell how it ended.
HAND_OVER = said(
    "SET @fencepost_was = NULL",
    f"SELECT run.reason INTO @fencepost_was FROM fencepost_run AS run WHERE {OURS} FOR UPDATE",
    f"""
UPDATE fencepost_lease AS lease
   SET {EXTEND}
 WHERE {HELD} AND @fencepost_was IS NOT NULL""",
    _WERE_OURS,
    f"""
UPDATE fencepost_run AS run
   SET run.beat_at = {NOW}, run.reason = '{HANDED_OFF}', run.edition = run.edition + 1
 WHERE {OURS} AND @fencepost_ours""",
    f"""
INSERT INTO fencepost_event (namespace, {_EVENT_COLUMNS})
SELECT namespace, job, slot, `manual`, rerun, beat_at, '{HANDED_OFF}', token, :holder, ''
  FROM fencepost_run
 WHERE {_KEY} AND @fencepost_ours AND @fencepost_was <> '{HANDED_OFF}'""",
    f"SELECT @fencepost_ours FROM fencepost_run AS run WHERE {OURS}",
)

# Whoever finds the lease free resumes the run, and counts no loss.
ORDER_STOP = said(
    f"""
UPDATE fencepost_run AS run
   SET run.reason = '{STOPPING}', run.edition = run.edition + 1
 WHERE {OURS} AND run.reason <> '{HANDED_OFF}'""",
    f"SELECT 1 FROM fencepost_run AS run WHERE {OURS} AND run.reason = '{STOPPING}'",
)

TELL = said(f"""
INSERT INTO fencepost_event (namespace, {_EVENT_COLUMNS})
VALUES (:namespace, :job, :slot, :manual, :rerun, {NOW}, :what, :token, '', :detail)""")

# Many at once, in their order.
TELL_ALL = said(inserted("fencepost_event", EVENT_FIELDS))

COUNT_ALL = said(inserted("fencepost_count", COUNT, updates=["value"]))

FIND_COUNTS = said(f"""
SELECT CONVERT(name USING utf8mb4), CAST(SUM(value) AS SIGNED)
  FROM fencepost_count
 WHERE {_KEY}
 GROUP BY name
 ORDER BY name""")

FIND_EVENTS = said(f"""
SELECT `at`, what, token, holder, detail
  FROM fencepost_event
 WHERE {_KEY}
 ORDER BY id""")

_ITEM = packed_row(ITEM, ITEM_FIELDS, of="item")
_TAGGED = (
    _ITEM.replace("JSON_ARRAY(", "JSON_ARRAY('{tag}', ").partition(" AS ")[0] + f" AS {PACKED}"
)
_OF_PLACES = "item.namespace = :namespace AND item.place IN :places"

# Begin items for the first time, if the attempt still has its run; and what is known of the others.
BEGIN_FIRST = said(
    f"""
SELECT JSON_ARRAY('ours') AS {PACKED}
  FROM fencepost_run AS run
 WHERE {OURS}
  LOCK IN SHARE MODE""",
    f"""
SELECT {_TAGGED.format(tag="known")}
  FROM fencepost_item AS item FORCE INDEX (PRIMARY)
 WHERE {_OF_PLACES}""",
    f"SET @fencepost_at = {NOW}",
    each_of(
        """
INSERT INTO fencepost_item
       (namespace, place, shelf, scope, item, state, token, run, `call`, `at`) {each}""",
        f"""SELECT :namespace, :place, :shelf, :scope, :item, 'begun', :token, :run, :call,
       @fencepost_at
  FROM DUAL
 WHERE EXISTS (SELECT 1 FROM fencepost_run AS run WHERE {OURS})
   AND NOT EXISTS (SELECT 1 FROM fencepost_item WHERE namespace = :namespace AND place = :place)""",
        place="places",
        item="items",
    ),
    f"""
SELECT {_TAGGED.format(tag="begun")}
  FROM fencepost_item AS item FORCE INDEX (PRIMARY)
 WHERE {_OF_PLACES} AND item.run = :run AND item.token = :token AND item.`call` = :call
   AND item.`at` = @fencepost_at AND item.state = 'begun'""",
)

# Those that were begun before, locked in order, by an attempt that still has its run.
HAS_ALONE = said(f"SELECT 1 FROM fencepost_run AS run WHERE {OURS} FOR UPDATE")

FIND_SOME_ITEMS = said(f"""
SELECT {_ITEM}
  FROM fencepost_item AS item FORCE INDEX (PRIMARY)
 WHERE {_OF_PLACES}
 ORDER BY item.place
   FOR UPDATE""")

BEGIN_AGAIN = said(f"""
UPDATE fencepost_item AS item FORCE INDEX (PRIMARY)
   SET item.state = 'begun', item.token = :token, item.run = :run, item.`call` = :call,
       item.`at` = {NOW}, item.error = NULL
 WHERE {_OF_PLACES}""")

# Only who began an item can end it.
END = said(
    f"SELECT 1 FROM fencepost_run AS run WHERE {OURS} LOCK IN SHARE MODE",
    one_by_one(
        f"""
UPDATE fencepost_item AS item
   SET item.state = :state, item.error = :error, item.`at` = {NOW}
 WHERE item.namespace = :namespace AND item.place = :place AND item.state = 'begun'
   AND item.run = :run AND item.token = :token AND item.`call` = COALESCE(:call, item.`call`)
   AND EXISTS (SELECT 1 FROM fencepost_run AS run WHERE {OURS})""",
        place="places",
        state="states",
        error="errors",
    ),
)

FIND_ITEMS = said(f"""
SELECT {_ITEM}
  FROM fencepost_item AS item
 WHERE item.namespace = :namespace AND item.shelf = :shelf AND item.scope = :scope
 ORDER BY item.item""")

JOB_COLUMNS = packed_row(JOB_RECORD, JobRecord._fields, of="known")
SEEN_JOB = packed_row(
    {**JOB_RECORD, "edition": "BIGINT"}, (*JobRecord._fields, "edition"), of="known"
)
FIND_SOME_JOBS = said(f"""
SELECT {SEEN_JOB}
  FROM fencepost_job AS known FORCE INDEX (PRIMARY)
 WHERE known.namespace = :namespace AND known.job IN :jobs""")

FIND_NOW = said(f"SELECT {NOW}")

FIND_JOBS = said(f"""
SELECT {JOB_COLUMNS} FROM fencepost_job AS known WHERE namespace = :namespace ORDER BY job""")

INSERT_JOBS = said(inserted("fencepost_job", JobRecord._fields))

UPDATE_JOBS = said(
    moved(f"""
UPDATE fencepost_job
   SET {assigned(JobRecord._fields[1:])}, edition = edition + 1
 WHERE namespace = :namespace AND job = :job AND edition = :seen""")
)

# What instances know of a job they decide about: who only triggers it has no say in that.
_EMPTY = [name for name, kind in JOB_RECORD.items() if kind == WORDS and name != "definition"]
DEFINE = said(
    """
UPDATE fencepost_job
   SET definition = :definition, edition = edition + 1
 WHERE namespace = :namespace AND job = :job AND epoch = 0 AND definition <> :definition""",
    f"""
INSERT INTO fencepost_job (namespace, job, definition, {listed(_EMPTY)})
SELECT :namespace, :job, :definition, {", ".join("''" for _ in _EMPTY)}
  FROM DUAL
 WHERE NOT EXISTS (SELECT 1 FROM fencepost_job WHERE namespace = :namespace AND job = :job)""",
)

LIFT = said(
    """
UPDATE fencepost_job
   SET quarantined = '', edition = edition + 1
 WHERE namespace = :namespace AND job = :job AND quarantined <> ''""",
    "SELECT 1 FROM DUAL WHERE ROW_COUNT() > 0",
)

# The newest runs of a job, by slot: a walk from the job's newest end that stops at the limit.
_LIST_OF = f"""
SELECT {COLUMNS}
  FROM fencepost_run AS run FORCE INDEX (PRIMARY)
 WHERE run.namespace = :namespace AND run.job = :job {{chosen}}
 ORDER BY run.slot DESC, run.manual DESC, run.rerun DESC
 LIMIT :limit"""
_LIST = f"""
SELECT {COLUMNS}
  FROM fencepost_run AS run FORCE INDEX ({{index}})
 WHERE run.namespace = :namespace {{chosen}}
 ORDER BY run.slot DESC, run.job DESC, run.manual DESC, run.rerun DESC
 LIMIT :limit"""
_CHOSEN = "AND run.state IN :states"

_LISTS = {
    (kind, chosen): said(text.format(chosen=f"{more} {_CHOSEN if chosen else ''}", index=index))
    for kind, text, index, more in (
        ("of", _LIST_OF, "", ""),
        ("all", _LIST, "fencepost_run_by_slot", ""),
        # Every live run, of whatever job: there are never many.
        ("live", _LIST, "fencepost_run_of_job", f"AND run.{LIVE}"),
    )
    for chosen in (False, True)
}


def listing(*, of_job: bool, live: bool, chosen: bool) -> Statement:
    """Return the statement that lists the newest runs, by slot: of a job, of all, of the live."""
    return _LISTS["of" if of_job else "live" if live else "all", chosen]


def keys_of(keys: Iterable[RunKey]) -> dict[str, Any]:
    """Return what finds some runs, in order; and the newest slots of their jobs' schedules."""
    found = sorted(keys)
    newest = {key.job: key.slot for key in found if not key.manual}
    return {
        "keys": [tuple(key) for key in found] or [(None,) * len(RUN_KEY)],
        "pruned_jobs": list(newest),
        "pruned_slots": list(newest.values()),
    }
