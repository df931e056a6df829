"""What retention says to PostgreSQL: which runs are old, and that they are forgotten."""

from __future__ import annotations

from fencepost.ledger.postgres_said import NOW, said
from fencepost.ledger.postgres_schema import LIVE

_ONE_BY_ONE = "unnest(:jobs::text[]) AS wanted (job) CROSS JOIN LATERAL"
_NEWEST = "ORDER BY slot DESC, manual DESC, rerun DESC"

# The next jobs in turn that have runs, one look for each however many runs it has.
FIND_JOBS_THAT_RAN = said("""
WITH RECURSIVE known (job, number) AS (
    (SELECT job, 1 FROM fencepost_run
      WHERE namespace = :namespace AND job > :after
      ORDER BY job LIMIT 1)
     UNION ALL
    SELECT (SELECT job FROM fencepost_run
             WHERE namespace = :namespace AND job > known.job
             ORDER BY job LIMIT 1), number + 1
      FROM known
     WHERE known.job IS NOT NULL AND number < :most
)
SELECT job FROM known WHERE job IS NOT NULL""")

# What a retention of so many runs and so much time lets go, oldest first, by the slot: runs of one
# go together. The walk ends where the history begins that is young, or is being made up. A job of
# which there is no record could not bear the mark.
_NEWEST_KEPT = f"""
       (SELECT slot, manual, rerun FROM fencepost_run
         WHERE namespace = :namespace AND job = wanted.job
         {_NEWEST}
         LIMIT 1 OFFSET :kept * {{times}} - 1)"""
_IS_OLD = f"""(ended_at > 0.0 AND NOT {LIVE}
          AND CASE WHEN state IN ('failed', 'timed_out')
              THEN ended_at < now - :age::double precision * 2
                   AND (slot, manual, rerun) < {_NEWEST_KEPT.format(times=2)}
              ELSE ended_at < now - :age::double precision
                   AND (slot, manual, rerun) < {_NEWEST_KEPT.format(times=1)}
              END)"""
FIND_FORGOTTEN = said(f"""
SELECT old.job, old.slot, old.manual, old.rerun
  FROM (SELECT {NOW} AS now) AS clock,
       {_ONE_BY_ONE} (
       SELECT job, slot, manual, rerun
         FROM fencepost_run AS run
        WHERE namespace = :namespace AND job = wanted.job AND slot < now - :age::double precision
          AND slot < coalesce((SELECT min(start) FROM fencepost_lane
                                WHERE namespace = :namespace AND job = wanted.job
                                  AND ended_at = 0.0), {2**62})
          AND EXISTS (SELECT 1 FROM fencepost_job
                       WHERE namespace = :namespace AND job = wanted.job)
          AND {_IS_OLD}
          AND NOT EXISTS (SELECT 1 FROM fencepost_run AS same
                           WHERE same.namespace = :namespace AND same.job = wanted.job
                             AND same.slot = run.slot AND same.manual = run.manual
                             AND same.rerun <> run.rerun AND {_IS_OLD} IS NOT TRUE)
        ORDER BY slot, manual, rerun
        LIMIT :most) AS old
 ORDER BY old.job, old.slot, old.manual, old.rerun
 LIMIT :most""")

_GONE = (
    "unnest(:jobs::text[], :slots::bigint[], :manuals::bigint[], :reruns::bigint[]) "
    "AS gone (job, slot, manual, rerun)"
)
# Lock what is to be deleted, in order. Nothing of it is read: a checkpoint may be long.
LOCK_OLD = said(f"""
SELECT 1
  FROM (SELECT * FROM {_GONE} ORDER BY job COLLATE "C", slot, manual, rerun) AS gone
 CROSS JOIN LATERAL (
       SELECT 1
         FROM fencepost_run AS run
        WHERE run.namespace = :namespace AND run.job = gone.job AND run.slot = gone.slot
          AND run.manual = gone.manual AND run.rerun = gone.rerun
       OFFSET 0
          FOR UPDATE) AS run""")
FORGET = tuple(
    said(f"""
DELETE FROM {table} AS old
 USING {_GONE}
 WHERE old.namespace = :namespace AND old.job = gone.job AND old.slot = gone.slot
   AND old.manual = gone.manual AND old.rerun = gone.rerun""")
    for table in ("fencepost_run", "fencepost_event", "fencepost_count")
)
COUNT_ITEMS = said("""
SELECT shelf, count(*)
  FROM fencepost_item
 WHERE namespace = :namespace AND shelf = ANY(:shelves::text[])
 GROUP BY shelf""")
# Items of slots of which no run is left; what is in doubt stays.
FORGET_ITEMS = said("""
DELETE FROM fencepost_item AS old
 USING unnest(:of_jobs::text[], :of_slots::bigint[], :of_manuals::bigint[], :shelves::text[],
              :scopes::text[]) AS gone (job, slot, manual, shelf, scope)
 CROSS JOIN LATERAL (
       SELECT item.ctid AS place
         FROM fencepost_item AS item
        WHERE item.namespace = :namespace AND item.shelf = gone.shelf AND item.scope = gone.scope
          AND item.state <> 'begun'
        LIMIT :most) AS item
 WHERE old.ctid = item.place
   AND NOT EXISTS (SELECT 1 FROM fencepost_run AS run
                    WHERE run.namespace = :namespace AND run.job = gone.job
                      AND run.slot = gone.slot AND run.manual = gone.manual)""")
# The scopes of which items are left, each with the slot of its runs.
KEEP_LEFT = said(f"""
INSERT INTO fencepost_item
       (namespace, place, shelf, scope, item, state, token, run, call, at)
SELECT :namespace, gone.place, :left_shelf::text, :left_scope::text, gone.scope, 'done',
       gone.slot, gone.job, gone.manual::text, {NOW}
  FROM unnest(:of_jobs::text[], :of_slots::bigint[], :of_manuals::bigint[], :shelves::text[],
              :scopes::text[], :places::text[]) AS gone (job, slot, manual, shelf, scope, place)
 WHERE EXISTS (SELECT 1 FROM fencepost_item AS item
                WHERE item.namespace = :namespace AND item.shelf = gone.shelf
                  AND item.scope = gone.scope AND item.state <> 'begun')
    ON CONFLICT DO NOTHING""")
FIND_LEFT = said("""
SELECT kept.item, kept.run, kept.token, kept.call::bigint
  FROM fencepost_item AS kept
 WHERE kept.namespace = :namespace AND kept.shelf = :left_shelf AND kept.scope = :left_scope
   AND NOT EXISTS (SELECT 1 FROM fencepost_run AS run
                    WHERE run.namespace = :namespace AND run.job = kept.run
                      AND run.slot = kept.token AND run.manual = kept.call::bigint)
 LIMIT 1""")
FORGET_LEFT = said("""
DELETE FROM fencepost_item AS kept
 WHERE kept.namespace = :namespace AND kept.place = ANY(:places::text[])
   AND NOT EXISTS (SELECT 1 FROM fencepost_item AS item
                    WHERE item.namespace = :namespace AND item.shelf = ANY(:shelves::text[])
                      AND item.scope = kept.item AND item.state <> 'begun')""")
# Ranges that the mark has passed, oldest first; each goes unless it has become longer meanwhile.
FIND_OLD_SPANS = said(f"""
SELECT old.job, old.first, old.pruned
  FROM {_ONE_BY_ONE} (
       SELECT span.job, span.first, known.pruned
         FROM fencepost_job AS known, fencepost_span AS span
        WHERE known.namespace = :namespace AND known.job = wanted.job
          AND span.namespace = :namespace AND span.job = wanted.job
          AND span.first <= known.pruned AND span.last <= known.pruned
        ORDER BY span.first
        LIMIT :most) AS old
 LIMIT :most""")
FORGET_SPANS = said("""
DELETE FROM fencepost_span AS old
 USING unnest(:span_jobs::text[], :firsts::bigint[], :marks::bigint[]) AS gone (job, first, mark)
 WHERE old.namespace = :namespace AND old.job = gone.job AND old.first = gone.first
   AND old.last <= gone.mark""")
PRUNED = said("""
UPDATE fencepost_job AS known
   SET pruned = greatest(known.pruned, gone.slot)
  FROM (SELECT job, max(slot) AS slot
          FROM unnest(:jobs::text[], :slots::bigint[], :manuals::bigint[])
            AS old (job, slot, manual)
         WHERE manual = 0
         GROUP BY job) AS gone
 WHERE known.namespace = :namespace AND known.job = gone.job""")
