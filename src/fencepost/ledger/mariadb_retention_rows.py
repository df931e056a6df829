"""What retention says to MariaDB: which runs are old, and that they are forgotten."""

from __future__ import annotations

from fencepost.ledger.draft_values import RUN_KEY
from fencepost.ledger.mariadb_columns import RUN, SPAN, one_of
from fencepost.ledger.mariadb_said import NOW, PACKED, each_of, one_by_one, packed_row, said
from fencepost.ledger.retention import KEPT_RUNS
from fencepost.model.run import TERMINAL

_NEWEST = "ORDER BY slot DESC, `manual` DESC, rerun DESC"

# The next jobs in turn that have runs, one look for each however many runs it has.
FIND_JOBS_THAT_RAN = said("""
SELECT CONVERT(job USING utf8mb4)
  FROM (SELECT DISTINCT job
          FROM fencepost_run FORCE INDEX (PRIMARY)
         WHERE namespace = :namespace AND job > :after
         ORDER BY job
         LIMIT :most) AS known""")

# What a retention of so many runs and so much time lets go, oldest first, by the slot: runs of one
# go together. The walk ends where the history begins that is young, or is being made up. A job of
# which there is no record could not bear the mark.
_NEWEST_KEPT = f"""
       (SELECT slot, `manual`, rerun FROM fencepost_run FORCE INDEX (PRIMARY)
         WHERE namespace = :namespace AND job = :job {_NEWEST} LIMIT 1 OFFSET {{before}})"""
_IS_OLD = f"""({{of}}.ended_at > 0 AND {{of}}.{one_of("state", TERMINAL)}
   AND CASE WHEN {{of}}.state IN ('failed', 'timed_out')
       THEN {{of}}.ended_at < {NOW} - :age * 2
            AND ({{of}}.slot, {{of}}.`manual`, {{of}}.rerun)
              < {_NEWEST_KEPT.format(before=KEPT_RUNS * 2 - 1)}
       ELSE {{of}}.ended_at < {NOW} - :age
            AND ({{of}}.slot, {{of}}.`manual`, {{of}}.rerun)
              < {_NEWEST_KEPT.format(before=KEPT_RUNS - 1)}
       END)"""
FIND_FORGOTTEN = said(
    each_of(
        f"""
SELECT {packed_row(RUN, RUN_KEY, of="old")}
  FROM ({{each}}) AS old
 ORDER BY old.job, old.slot, old.manual, old.rerun
 LIMIT :most""",
        f"""SELECT run.job, run.slot, run.`manual`, run.rerun
  FROM fencepost_run AS run FORCE INDEX (PRIMARY)
 WHERE run.namespace = :namespace AND run.job = :job AND run.slot < {NOW} - :age
   AND run.slot < COALESCE((SELECT MIN(lane.start)
                              FROM fencepost_lane AS lane FORCE INDEX (fencepost_lane_of)
                             WHERE lane.namespace = :namespace AND lane.job = :job
                               AND lane.due IS NOT NULL), {2**62})
   AND EXISTS (SELECT 1 FROM fencepost_job AS known
                WHERE known.namespace = :namespace AND known.job = :job)
   AND {_IS_OLD.format(of="run")}
   AND NOT EXISTS (SELECT 1 FROM fencepost_run AS same FORCE INDEX (PRIMARY)
                    WHERE same.namespace = :namespace AND same.job = :job
                      AND same.slot = run.slot AND same.`manual` = run.`manual`
                      AND same.rerun <> run.rerun AND {_IS_OLD.format(of="same")} IS NOT TRUE)
 ORDER BY run.slot, run.`manual`, run.rerun LIMIT :most""",
        job="jobs",
    )
)

# Lock what is to be deleted, in order. Nothing of it is read: a checkpoint may be long.
LOCK_OLD = said("""
SELECT 1
  FROM fencepost_run FORCE INDEX (PRIMARY)
 WHERE namespace = :namespace AND (job, slot, `manual`, rerun) IN :keys
   FOR UPDATE""")
FORGET = tuple(
    said(f"""
DELETE FROM {table}
 WHERE namespace = :namespace AND (job, slot, `manual`, rerun) IN :keys""")
    for table in ("fencepost_run", "fencepost_event", "fencepost_count")
)
COUNT_ITEMS = said("""
SELECT shelf, COUNT(*)
  FROM fencepost_item FORCE INDEX (fencepost_item_shelf)
 WHERE namespace = :namespace AND shelf IN :shelves
 GROUP BY shelf""")
# Items of slots of which no run is left; what is in doubt stays.
FORGET_ITEMS = said(
    one_by_one(
        """
DELETE FROM fencepost_item
 WHERE namespace = :namespace AND shelf = :shelf AND scope = :scope AND state <> 'begun'
   AND NOT EXISTS (SELECT 1 FROM fencepost_run AS run
                    WHERE run.namespace = :namespace AND run.job = :of_job
                      AND run.slot = :of_slot AND run.`manual` = :of_manual)
 LIMIT :most""",
        of_job="of_jobs",
        of_slot="of_slots",
        of_manual="of_manuals",
        shelf="shelves",
        scope="scopes",
    )
)
# The scopes of which items are left, each with the slot of its runs.
KEEP_LEFT = said(
    one_by_one(
        f"""
INSERT IGNORE INTO fencepost_item
       (namespace, place, shelf, scope, item, state, token, run, `call`, `at`)
SELECT :namespace, :place, :left_shelf, :left_scope, :scope, 'done', :of_slot, :of_job,
       :of_manual, {NOW}
  FROM DUAL
 WHERE EXISTS (SELECT 1 FROM fencepost_item AS item
                WHERE item.namespace = :namespace AND item.shelf = :shelf AND item.scope = :scope
                  AND item.state <> 'begun')""",
        of_job="of_jobs",
        of_slot="of_slots",
        of_manual="of_manuals",
        shelf="shelves",
        scope="scopes",
        place="places",
    )
)
FIND_LEFT = said(f"""
SELECT JSON_ARRAY(CONVERT(kept.item USING utf8mb4), CONVERT(kept.run USING utf8mb4), kept.token,
                  CAST(kept.`call` AS SIGNED)) AS {PACKED}
  FROM fencepost_item AS kept FORCE INDEX (fencepost_item_shelf)
 WHERE kept.namespace = :namespace AND kept.shelf = :left_shelf AND kept.scope = :left_scope
   AND NOT EXISTS (SELECT 1 FROM fencepost_run AS run FORCE INDEX (PRIMARY)
                    WHERE run.namespace = :namespace AND run.job = kept.run
                      AND run.slot = kept.token AND run.`manual` = CAST(kept.`call` AS SIGNED))
 LIMIT 1""")
FORGET_LEFT = said(
    one_by_one(
        """
DELETE kept
  FROM fencepost_item AS kept
  LEFT JOIN fencepost_item AS item
    ON item.namespace = :namespace AND item.shelf = :shelf AND item.scope = :scope
   AND item.state <> 'begun'
 WHERE kept.namespace = :namespace AND kept.place = :place AND item.place IS NULL""",
        shelf="shelves",
        scope="scopes",
        place="places",
    )
)
# Ranges that the mark has passed, oldest first; each goes unless it has become longer meanwhile.
FIND_OLD_SPANS = said(
    each_of(
        f"""
SELECT {packed_row({**SPAN, "pruned": "BIGINT"}, ("job", "first", "pruned"), of="old")}
  FROM ({{each}}) AS old
 LIMIT :most""",
        """SELECT span.job, span.`first`, known.pruned
  FROM fencepost_job AS known
  JOIN fencepost_span AS span FORCE INDEX (PRIMARY)
    ON span.namespace = :namespace AND span.job = :job
   AND span.`first` <= known.pruned AND span.`last` <= known.pruned
 WHERE known.namespace = :namespace AND known.job = :job
 ORDER BY span.`first` LIMIT :most""",
        job="jobs",
    )
)
FORGET_SPANS = said(
    one_by_one(
        """
DELETE FROM fencepost_span
 WHERE namespace = :namespace AND job = :span_job AND `first` = :first AND `last` <= :mark""",
        span_job="span_jobs",
        first="firsts",
        mark="marks",
    )
)
PRUNED = said(
    one_by_one(
        """
UPDATE fencepost_job
   SET pruned = :slot, edition = edition + 1
 WHERE namespace = :namespace AND job = :job AND pruned < :slot""",
        job="pruned_jobs",
        slot="pruned_slots",
    )
)
