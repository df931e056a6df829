"""What the PostgreSQL ledger says to its server.

Rows go there as one JSON text for all of a kind, so that many cost one statement. The verbs of an
attempt are one statement each: it writes all that belongs together, or nothing.
"""

from __future__ import annotations

from fencepost.ledger.draft_values import ITEM_FIELDS, RUN_FIELDS, RUN_REST
from fencepost.ledger.postgres_leases import ENTRUST, EXTEND, HELD
from fencepost.ledger.postgres_said import NO_LOITERING, NOW, at_place, new, said, version
from fencepost.ledger.postgres_schema import LIVE, LIVE_OF_LOCKS
from fencepost.model.definition import JobRecord
from fencepost.model.ending import UNFINISHED
from fencepost.model.run import HANDED_OFF, STOPPING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from fencepost.model.slot import RunKey
    from fencepost.world.postgres import Statement

CLOCK = said(f"SELECT {NOW}, {NO_LOITERING}")

# Who asks for a run waits for those who ask for one of the same lock, and for registration.
_OFFICE = "hashtextextended('fencepost office ' || :namespace, 0)"
TURN = said(f"""
SELECT pg_advisory_xact_lock_shared({_OFFICE}),
       pg_advisory_xact_lock(hashtextextended('fencepost lock ' || :namespace || '/' || :lock, 0))
""")

THIS_RUN = (
    "namespace = :namespace AND job = :job AND slot = :slot AND manual = :manual AND rerun = :rerun"
)

COLUMNS = ", ".join(RUN_FIELDS)
# With the version of the row, which is another one after every change.
SEEN = f"{COLUMNS}, {version()}"
LISTED = ", ".join(f"run.{name}" for name in RUN_FIELDS)

FIND = said(f"SELECT {COLUMNS} FROM fencepost_run WHERE {THIS_RUN}")

# Some runs, by their keys: one look for each. Whoever is going to write them has them locked, in
# order.
_SOME = f"""
SELECT run.*
  FROM (SELECT * FROM unnest(:jobs::text[], :slots::bigint[], :manuals::bigint[], :reruns::bigint[])
            AS asked (job, slot, manual, rerun)
         ORDER BY job COLLATE "C", slot, manual, rerun) AS wanted
 CROSS JOIN LATERAL (
       SELECT {SEEN}
         FROM fencepost_run AS run
        WHERE run.namespace = :namespace AND run.job = wanted.job AND run.slot = wanted.slot
          AND run.manual = wanted.manual AND run.rerun = wanted.rerun
       {{way}}) AS run"""
FIND_SOME = said(_SOME.format(way="OFFSET 0"))
FIND_SOME_ALONE = said(_SOME.format(way="OFFSET 0 FOR NO KEY UPDATE"))

# Every live run of some locks, and of some jobs.
FIND_LIVE = said(f"""
SELECT {SEEN}
  FROM fencepost_run
 WHERE {LIVE_OF_LOCKS}""")
FIND_LIVE_OF = said(f"""
SELECT {SEEN}
  FROM fencepost_run
 WHERE namespace = :namespace AND job = ANY(:jobs::text[]) AND {LIVE}""")

INSERT = said(f"""
WITH made AS (
    INSERT INTO fencepost_run (namespace, {COLUMNS})
    SELECT :namespace, {COLUMNS}
      FROM json_populate_recordset(NULL::fencepost_run, :rows::json)
        ON CONFLICT DO NOTHING
    RETURNING 1)
SELECT fencepost_insist(count(*) = :count) FROM made""")

# Runs become what was decided, unless one is no longer what it was when that was decided.
UPDATE = said(f"""
WITH new AS MATERIALIZED ({new("fencepost_run")}),
changed AS (
    UPDATE fencepost_run AS run
       SET {", ".join(f"{name} = new.{name}" for name in RUN_REST if name != "created_at")}
      FROM new
     WHERE {at_place("run")}
    RETURNING 1)
SELECT fencepost_insist(count(*) = :count) FROM changed""")

# Whoever writes for an attempt must still have the run.
OURS = f"{THIS_RUN} AND state = 'running' AND token = :token AND nonce = :nonce"

_REPORTED = "done = coalesce(:done, done), total = coalesce(:total, total)"
_COUNTED = """
    INSERT INTO fencepost_count (namespace, job, slot, manual, rerun, name, source, value)
    SELECT :namespace, :job, :slot, :manual, :rerun, name, :source::text, value
      FROM unnest(:names::text[], :values::bigint[]) AS told (name, value), ours
        ON CONFLICT (namespace, job, slot, manual, rerun, name, source)
        DO UPDATE SET value = excluded.value"""

# Renew and report, or neither: not if the lease ran out. That of a run that was handed off is only
# moved by handing it over again.
BEAT = said(f"""
WITH known AS (
    SELECT cancel_at, reason
      FROM fencepost_run
     WHERE {OURS}
       FOR NO KEY UPDATE),
held AS (
    SELECT 1
      FROM fencepost_lease AS lease
     WHERE {HELD} AND EXISTS (SELECT 1 FROM known WHERE reason <> '{HANDED_OFF}')
       FOR NO KEY UPDATE),
ours AS (
    UPDATE fencepost_run
       SET beat_at = {NOW}, {_REPORTED}
     WHERE {OURS} AND (reason = '{HANDED_OFF}' OR EXISTS (SELECT 1 FROM held))
    RETURNING 1),
moved AS ({EXTEND} AND EXISTS (SELECT 1 FROM held)),
counted AS ({_COUNTED})
SELECT cancel_at, EXISTS (SELECT 1 FROM ours) FROM known""")

# What differs from the last checkpoint is progress: losses in a row are forgotten. What arrives
# after a later save changes neither.
SAVE = said(f"""
WITH ours AS (
    UPDATE fencepost_run
       SET beat_at = {NOW}, {_REPORTED},
           streak     = CASE WHEN coalesce(saves >= :order, FALSE)
                               OR checkpoint IS NOT DISTINCT FROM :checkpoint
                             THEN streak ELSE 0 END,
           strikes    = CASE WHEN coalesce(saves >= :order, FALSE)
                               OR checkpoint IS NOT DISTINCT FROM :checkpoint
                             THEN strikes ELSE 0 END,
           checkpoint = CASE WHEN coalesce(saves >= :order, FALSE)
                             THEN checkpoint ELSE :checkpoint END,
           saves      = greatest(saves, coalesce(:order, 0))
     WHERE {OURS}
    RETURNING cancel_at),
counted AS ({_COUNTED})
SELECT cancel_at FROM ours""")

_UNFINISHED = " ".join(f"WHEN '{state.value}' THEN '{what}'" for state, what in UNFINISHED.items())

# Whether a cancel was asked for of what is to be tried again.
_STOPPED = "(cancel_at > 0.0 AND :again)"

# The end of an attempt; a trigger releases the lease. A cancelled attempt is never tried again.
FINISH = said(f"""
WITH ours AS (
    UPDATE fencepost_run
       SET state      = CASE WHEN {_STOPPED} THEN 'cancelled' ELSE :state END,
           reason     = CASE WHEN {_STOPPED} THEN 'cancelled' ELSE :reason END,
           not_before = CASE WHEN {_STOPPED} OR :pause::double precision = 0.0 THEN 0.0
                             ELSE now + :pause::double precision END,
           ended_at   = CASE WHEN {_STOPPED} OR :terminal THEN now ELSE 0.0 END,
           beat_at    = now,
           result     = CASE WHEN {_STOPPED} THEN NULL ELSE :result END,
           error      = :error,
           releases   = releases + (NOT {_STOPPED} AND :state = 'pending')::int,
           {_REPORTED}
      FROM (SELECT {NOW} AS now) AS clock
     WHERE {OURS}
    RETURNING {COLUMNS}),
counted AS ({_COUNTED}),
told AS (
    INSERT INTO fencepost_event
           (namespace, job, slot, manual, rerun, at, what, token, holder, detail)
    SELECT :namespace, job, slot, manual, rerun, beat_at,
           CASE state {_UNFINISHED} END, token, :holder::text, coalesce(error, '')
      FROM ours
     WHERE state IN ({", ".join(f"'{state.value}'" for state in UNFINISHED)}))
SELECT {COLUMNS} FROM ours""")

# Whoever knows the token will tell how it ended.
HAND_OVER = said(f"""
WITH known AS (
    SELECT {NOW} AS now, reason
      FROM fencepost_run
     WHERE {OURS}
       FOR NO KEY UPDATE),
held AS (
    SELECT 1
      FROM fencepost_lease AS lease
     WHERE {HELD} AND EXISTS (SELECT 1 FROM known)
       FOR NO KEY UPDATE),
ours AS (
    UPDATE fencepost_run
       SET beat_at = now, reason = '{HANDED_OFF}'
      FROM (SELECT now FROM known) AS clock
     WHERE {OURS} AND EXISTS (SELECT 1 FROM held)
    RETURNING 1),
moved AS ({ENTRUST} AND EXISTS (SELECT 1 FROM held)),
told AS (
    INSERT INTO fencepost_event
           (namespace, job, slot, manual, rerun, at, what, token, holder, detail)
    SELECT :namespace, :job, :slot, :manual, :rerun, now, '{HANDED_OFF}', :token, :holder::text, ''
      FROM known, ours
     WHERE reason <> '{HANDED_OFF}')
SELECT EXISTS (SELECT 1 FROM ours) FROM known""")

# Whoever finds the lease free resumes the run, and counts no loss.
ORDER_STOP = said(f"""
UPDATE fencepost_run
   SET reason = '{STOPPING}'
 WHERE {OURS} AND reason <> '{HANDED_OFF}'
RETURNING 1""")

TELL = said(f"""
INSERT INTO fencepost_event (namespace, job, slot, manual, rerun, at, what, token, holder, detail)
VALUES (:namespace, :job, :slot, :manual, :rerun, {NOW}, :what, :token, '',
        :detail)""")

# Many at once, in their order.
TELL_ALL = said("""
INSERT INTO fencepost_event (namespace, job, slot, manual, rerun, at, what, token, holder, detail)
SELECT :namespace, job, slot, manual, rerun, at, what, token, holder, detail
  FROM ROWS FROM (json_to_recordset(:rows::json)
       AS (job text, slot bigint, manual bigint, rerun bigint, at double precision, what text,
           token bigint, holder text, detail text)) WITH ORDINALITY
 ORDER BY ordinality""")

COUNT_ALL = said("""
INSERT INTO fencepost_count (namespace, job, slot, manual, rerun, name, source, value)
SELECT :namespace, job, slot, manual, rerun, name, source, value
  FROM json_populate_recordset(NULL::fencepost_count, :rows::json)
    ON CONFLICT (namespace, job, slot, manual, rerun, name, source)
    DO UPDATE SET value = excluded.value""")

FIND_COUNTS = said(f"""
SELECT name, sum(value)::bigint
  FROM fencepost_count
 WHERE {THIS_RUN}
 GROUP BY name
 ORDER BY name""")

FIND_EVENTS = said(f"""
SELECT at, what, token, holder, detail
  FROM fencepost_event
 WHERE {THIS_RUN}
 ORDER BY id""")

_ITEM_COLUMNS = ", ".join(ITEM_FIELDS)

# Begin items for the first time, if the attempt still has its run; and what is known of the others.
# A transaction that user code joins locks its items first, and the run when it commits. So two
# threads of one attempt that want one item, one of them inside of such a transaction, may wait for
# each other until the server undoes one: this statement, which is asked again, or the transaction,
# which is told that nothing was committed. Runs of others are not involved: each locks its own.
BEGIN_FIRST = said(f"""
WITH ours AS (SELECT 1 FROM fencepost_run WHERE {OURS} FOR SHARE),
begun AS (
    INSERT INTO fencepost_item
           (namespace, place, shelf, scope, item, state, token, run, call, at)
    SELECT :namespace, place, :shelf::text, :scope::text, item, 'begun', :token, :run::text,
           :call::text, {NOW}
      FROM unnest(:places::text[], :items::text[]) AS wanted (place, item), ours
     ORDER BY place
        ON CONFLICT DO NOTHING
    RETURNING {_ITEM_COLUMNS})
SELECT 'ours', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM ours
 UNION ALL
SELECT 'begun', {_ITEM_COLUMNS} FROM begun
 UNION ALL
SELECT 'known', {_ITEM_COLUMNS}
  FROM fencepost_item
 WHERE namespace = :namespace AND place = ANY(:places::text[])""")

# Those that were begun before, locked in order, by an attempt that still has its run.
HAS_ALONE = said(f"SELECT 1 FROM fencepost_run WHERE {OURS} FOR NO KEY UPDATE")

FIND_SOME_ITEMS = said(f"""
SELECT {_ITEM_COLUMNS}
  FROM fencepost_item
 WHERE namespace = :namespace AND place = ANY(:places::text[])
 ORDER BY place
   FOR NO KEY UPDATE""")

BEGIN_AGAIN = said(f"""
UPDATE fencepost_item
   SET state = 'begun', token = :token, run = :run, call = :call, at = {NOW}, error = NULL
 WHERE namespace = :namespace AND place = ANY(:places::text[])""")

# Only who began an item can end it.
END = said(f"""
WITH ours AS (SELECT 1 FROM fencepost_run WHERE {OURS} FOR SHARE),
ended AS (
    UPDATE fencepost_item AS known
       SET state = said.state, error = said.error, at = {NOW}
      FROM unnest(:places::text[], :states::text[], :errors::text[])
        AS said (place, state, error), ours
     WHERE known.namespace = :namespace AND known.place = said.place AND known.state = 'begun'
       AND known.run = :run AND known.token = :token
       AND known.call = coalesce(:call, known.call))
SELECT 1 FROM ours""")

FIND_ITEMS = said(f"""
SELECT {_ITEM_COLUMNS}
  FROM fencepost_item
 WHERE namespace = :namespace AND shelf = :shelf AND scope = :scope
 ORDER BY item""")

_JOB_COLUMNS = ", ".join(JobRecord._fields)
FIND_SOME_JOBS = said(f"""
SELECT {_JOB_COLUMNS}, {version()}
  FROM fencepost_job
 WHERE namespace = :namespace AND job = ANY(:jobs::text[])""")

FIND_NOW = said(f"SELECT {NOW}")

FIND_JOBS = said(
    f"SELECT {_JOB_COLUMNS} FROM fencepost_job WHERE namespace = :namespace ORDER BY job"
)

INSERT_JOBS = said(f"""
WITH made AS (
    INSERT INTO fencepost_job (namespace, {_JOB_COLUMNS})
    SELECT :namespace, {_JOB_COLUMNS}
      FROM json_populate_recordset(NULL::fencepost_job, :rows::json)
        ON CONFLICT DO NOTHING
    RETURNING 1)
SELECT fencepost_insist(count(*) = :count) FROM made""")

UPDATE_JOBS = said(f"""
WITH new AS MATERIALIZED ({new("fencepost_job")}),
changed AS (
    UPDATE fencepost_job AS known
       SET {", ".join(f"{name} = new.{name}" for name in JobRecord._fields if name != "job")}
      FROM new
     WHERE {at_place("known")}
    RETURNING 1)
SELECT fencepost_insist(count(*) = :count) FROM changed""")

# What instances know of a job they decide about: who only triggers it has no say in that.
DEFINE = said("""
INSERT INTO fencepost_job AS known (namespace, job, definition)
VALUES (:namespace, :job, :definition)
    ON CONFLICT (namespace, job) DO UPDATE SET definition = excluded.definition
 WHERE known.epoch = 0 AND known.definition <> excluded.definition""")

LIFT = said("""
UPDATE fencepost_job
   SET quarantined = ''
 WHERE namespace = :namespace AND job = :job AND quarantined <> ''
RETURNING 1""")

_NEWEST = "ORDER BY slot DESC, manual DESC, rerun DESC"

# The newest runs of a job, by slot: a walk from the job's newest end that stops at the limit.
_LIST_OF = f"""
SELECT {COLUMNS}
  FROM fencepost_run
 WHERE namespace = :namespace AND job = :job {{chosen}}
 {_NEWEST}
 LIMIT :limit"""

# Of all jobs: of each its newest, one look for each job however many runs it has.
_LIST_ALL = f"""
WITH RECURSIVE known (job) AS (
    (SELECT job FROM fencepost_run WHERE namespace = :namespace ORDER BY job LIMIT 1)
     UNION ALL
    SELECT (SELECT job FROM fencepost_run
             WHERE namespace = :namespace AND job > known.job
             ORDER BY job LIMIT 1)
      FROM known
     WHERE known.job IS NOT NULL
)
SELECT {LISTED}
  FROM known
 CROSS JOIN LATERAL (
       SELECT {COLUMNS}
         FROM fencepost_run
        WHERE namespace = :namespace AND job = known.job {{chosen}}
        {_NEWEST}
        LIMIT :limit) AS run
 ORDER BY slot DESC, job DESC, manual DESC, rerun DESC
 LIMIT :limit"""

# Every live run, of whatever job: there are never many.
_LIST_LIVE = f"""
SELECT {COLUMNS}
  FROM fencepost_run
 WHERE namespace = :namespace AND {LIVE} {{chosen}}
 ORDER BY slot DESC, job DESC, manual DESC, rerun DESC
 LIMIT :limit"""

_CHOSEN = "AND state = ANY(:states::text[])"

_LISTS = {
    (text, chosen): said(text.format(chosen=_CHOSEN if chosen else ""))
    for text in (_LIST_OF, _LIST_ALL, _LIST_LIVE)
    for chosen in (False, True)
}


def listing(*, of_job: bool, live: bool, chosen: bool) -> Statement:
    """Return the statement that lists the newest runs, by slot: of a job, of all, of the live."""
    return _LISTS[_LIST_OF if of_job else _LIST_LIVE if live else _LIST_ALL, chosen]


def keys_of(keys: Iterable[RunKey]) -> dict[str, list[Any]]:
    """Return what finds some runs."""
    jobs, slots, manuals, reruns = (list(part) for part in zip(*keys, strict=True))
    return {"jobs": jobs, "slots": slots, "manuals": manuals, "reruns": reruns}
