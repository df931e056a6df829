"""What retention says to SQLite: which runs are old, and that they are forgotten."""

from __future__ import annotations

from fencepost.ledger.sqlite_schema import LIVE

# The next jobs in turn that have runs, one look for each however many runs it has.
FIND_JOBS_THAT_RAN = """
WITH RECURSIVE known (job) AS (
    SELECT min(job) FROM fencepost_run WHERE namespace = ?1 AND job > ?2
     UNION ALL
    SELECT (SELECT min(job) FROM fencepost_run WHERE namespace = ?1 AND job > known.job)
      FROM known
     WHERE known.job IS NOT NULL
     LIMIT ?3
)
SELECT job FROM known WHERE job IS NOT NULL"""

# What a retention of so many runs and so much time lets go, oldest first, by the slot: runs of one
# go together. The walk ends where the history begins that is young, or is being made up. A job of
# which there is no record could not bear the mark.
_NEWEST_KEPT = """
       (SELECT slot, manual, rerun FROM fencepost_run
         WHERE namespace = ?1 AND job = ?2
         ORDER BY slot DESC, manual DESC, rerun DESC
         LIMIT 1 OFFSET {})"""
_IS_OLD = f"""(ended_at > 0.0 AND NOT {LIVE}
   AND CASE WHEN state = 'failed' OR state = 'timed_out'
       THEN ended_at < ?4 - ?5 * 2
            AND (slot, manual, rerun) < {_NEWEST_KEPT.format("?3 * 2 - 1")}
       ELSE ended_at < ?4 - ?5
            AND (slot, manual, rerun) < {_NEWEST_KEPT.format("?3 - 1")}
       END)"""
FIND_FORGOTTEN = f"""
SELECT job, slot, manual, rerun
  FROM fencepost_run AS run
 WHERE namespace = ?1 AND job = ?2 AND slot < ?4 - ?5
   AND slot < coalesce((SELECT min(start) FROM fencepost_lane INDEXED BY fencepost_lane_of
                         WHERE namespace = ?1 AND job = ?2 AND ended_at = 0.0), {2**62})
   AND EXISTS (SELECT 1 FROM fencepost_job WHERE namespace = ?1 AND job = ?2)
   AND {_IS_OLD}
   AND NOT EXISTS (SELECT 1 FROM fencepost_run AS same
                    WHERE same.namespace = ?1 AND same.job = ?2 AND same.slot = run.slot
                      AND same.manual = run.manual AND same.rerun <> run.rerun
                      AND {_IS_OLD} IS NOT TRUE)
 ORDER BY slot, manual, rerun
 LIMIT ?6"""

_RUN_KEY = "namespace = ? AND job = ? AND slot = ? AND manual = ? AND rerun = ?"
# The lease of a run goes with it if it was granted to nobody since: the file keeps in mind how high
# the tokens of deleted leases were. So a job with a lock for each slot does not leave all of them.
FORGET_LEASE = """
DELETE FROM fencepost_lease
 WHERE namespace = ?1 AND held = 0
   AND (name, token) IN (SELECT lease, token FROM fencepost_run
                          WHERE namespace = ?1 AND job = ?2 AND slot = ?3 AND manual = ?4
                            AND rerun = ?5)"""
FORGET = tuple(
    f"DELETE FROM {table} WHERE {_RUN_KEY}"
    for table in ("fencepost_run", "fencepost_event", "fencepost_count")
)
COUNT_ITEMS = "SELECT count(*) FROM fencepost_item WHERE namespace = ? AND scope = ?"
# Items of slots of which no run is left; what is in doubt stays.
FORGET_ITEMS = """
DELETE FROM fencepost_item
 WHERE namespace = ?1 AND scope = ?2
   AND item IN (SELECT item FROM fencepost_item
                 WHERE namespace = ?1 AND scope = ?2 AND state <> 'begun'
                 LIMIT ?3)
   AND NOT EXISTS (SELECT 1 FROM fencepost_run
                    WHERE namespace = ?1 AND job = ?4 AND slot = ?5 AND manual = ?6)"""
# A scope of which items are left, with the slot of its runs.
KEEP_LEFT = """
INSERT OR IGNORE INTO fencepost_item (namespace, scope, item, state, token, run, call, at)
SELECT ?1, ?2, ?3, 'done', ?5, ?4, ?6, ?7
 WHERE EXISTS (SELECT 1 FROM fencepost_item
                WHERE namespace = ?1 AND scope = ?3 AND state <> 'begun')"""
FIND_LEFT = """
SELECT item, run, token, CAST(call AS INTEGER)
  FROM fencepost_item AS kept
 WHERE namespace = ?1 AND scope = ?2
   AND NOT EXISTS (SELECT 1 FROM fencepost_run
                    WHERE namespace = ?1 AND job = kept.run AND slot = kept.token
                      AND manual = CAST(kept.call AS INTEGER))
 LIMIT 1"""
FORGET_LEFT = """
DELETE FROM fencepost_item
 WHERE namespace = ?1 AND scope = ?2 AND item = ?3
   AND NOT EXISTS (SELECT 1 FROM fencepost_item
                    WHERE namespace = ?1 AND scope = ?3 AND state <> 'begun')"""
# Ranges that the mark has passed, oldest first; each goes unless it has become longer meanwhile.
FIND_OLD_SPANS = """
SELECT span.job, span.first, known.pruned
  FROM fencepost_job AS known, fencepost_span AS span
 WHERE known.namespace = ?1 AND known.job = ?2 AND span.namespace = ?1 AND span.job = ?2
   AND span.first <= known.pruned AND span.last <= known.pruned
 ORDER BY span.first
 LIMIT ?3"""
FORGET_SPAN = """
DELETE FROM fencepost_span WHERE namespace = ? AND job = ? AND first = ? AND last <= ?"""
PRUNED = "UPDATE fencepost_job SET pruned = max(pruned, ?) WHERE namespace = ? AND job = ?"
