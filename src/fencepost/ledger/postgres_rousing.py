"""How instances are woken on PostgreSQL: ``NOTIFY``, on a channel for each schema and namespace.

A transaction that notifies has a lock over the whole database from before its commit until after
it. ``docs/decisions/0032-notify.md`` says who does.
"""

from __future__ import annotations

from fencepost.ledger.planning import DUE
from fencepost.ledger.postgres_said import NOW, lease_key, said
from fencepost.model.plan import WAITS
from fencepost.stores.postgres_rows import lease_key as digest_of

# Where nobody reads what is said the server keeps it, and refuses commits once it has too much of
# it. So in time nothing more is said: everybody still looks.
_ROOM = "pg_notification_queue_usage() < 0.5"

ROUSE = said(f"SELECT pg_notify(:channel::text, :word::text) WHERE {_ROOM}")

# The runs that others wait for: as long as they are what they were.
MARK_AWAITED = said("""
WITH seen AS MATERIALIZED (
    SELECT run.ctid AS place, run.awaited
      FROM fencepost_run AS run,
           unnest(:jobs::text[], :slots::bigint[], :manuals::bigint[], :reruns::bigint[],
                  :states::text[], :tokens::bigint[])
        AS wanted (job, slot, manual, rerun, state, token)
     WHERE run.namespace = :namespace AND run.job = wanted.job AND run.slot = wanted.slot
       AND run.manual = wanted.manual AND run.rerun = wanted.rerun
       AND run.state = wanted.state AND run.token = wanted.token
       FOR NO KEY UPDATE OF run),
marked AS (
    UPDATE fencepost_run AS run SET awaited = TRUE
      FROM seen
     WHERE run.ctid = seen.place AND NOT seen.awaited)
SELECT fencepost_insist(count(*) = :count) FROM seen""")

_ADD_AWAITED = """
ALTER TABLE fencepost_run ADD COLUMN IF NOT EXISTS awaited BOOLEAN NOT NULL DEFAULT FALSE"""

# A run that was waited for has ended, or one was given back: now is the time of the first in line
# for its lock, and of what its job was to look at again in a moment. Who has one of them locked
# is just deciding about it, and will find that the run it waits for has ended.
_CREATE_AWAITED = f"""
CREATE OR REPLACE FUNCTION fencepost_run_awaited() RETURNS TRIGGER
LANGUAGE plpgsql AS $$
DECLARE
    this_instant DOUBLE PRECISION := {NOW};
BEGIN
    IF OLD.awaited THEN
        UPDATE fencepost_run AS run SET not_before = this_instant
          FROM (SELECT ctid AS place
                  FROM fencepost_run
                 WHERE namespace = NEW.namespace AND lock = NEW.lock
                   AND hashtextextended(lock, 0) = hashtextextended(NEW.lock, 0)
                   AND state = 'pending' AND reason IN ('lock_held', 'replacing')
                   AND not_before > this_instant
                 ORDER BY slot, job, manual, rerun
                 LIMIT 1
                   FOR NO KEY UPDATE SKIP LOCKED) AS first
         WHERE run.ctid = first.place;
        UPDATE fencepost_job AS job SET next_due = this_instant
          FROM (SELECT ctid AS place
                  FROM fencepost_job
                 WHERE namespace = NEW.namespace AND job = NEW.job AND owed > 0
                   AND next_due > this_instant AND next_due <= this_instant + {WAITS}
                   AND rules NOT LIKE '%"pause"%'
                   FOR NO KEY UPDATE SKIP LOCKED) AS owing
         WHERE job.ctid = owing.place;
        UPDATE fencepost_lane AS lane SET not_before = this_instant
          FROM (SELECT ctid AS place
                  FROM fencepost_lane
                 WHERE namespace = NEW.namespace AND job = NEW.job AND ended_at = 0.0
                   AND not_before > this_instant AND not_before <= this_instant + {WAITS}
                   FOR NO KEY UPDATE SKIP LOCKED) AS due
         WHERE lane.ctid = due.place;
    END IF;
    PERFORM pg_notify(
        'fencepost_' || encode({lease_key("TG_TABLE_SCHEMA::text", "NEW.namespace")}, 'hex'),
        '{DUE}')
      WHERE {_ROOM};
    RETURN NULL;
END $$"""

# A condition of the trigger, so that an end for which nobody waits calls no function. Whoever ends
# a run on a draft may have more to write, about the very rows that are called here, each only if
# it is what it was: so this comes last, with the commit.
_DROP_AWAITED = """
DROP TRIGGER IF EXISTS fencepost_run_awaited ON fencepost_run"""
_AWAITED_TRIGGER = """
CREATE CONSTRAINT TRIGGER fencepost_run_awaited AFTER UPDATE OF state ON fencepost_run
DEFERRABLE INITIALLY DEFERRED
   FOR EACH ROW WHEN (OLD.state = 'running' AND NEW.state <> 'running'
                      AND (OLD.awaited OR NEW.state = 'pending'))
EXECUTE FUNCTION fencepost_run_awaited()"""

ROUSING = (_ADD_AWAITED, _CREATE_AWAITED, _DROP_AWAITED, _AWAITED_TRIGGER)


def channel_of(schema: str, namespace: str) -> str:
    """Return the channel of a namespace. However long the names are, it is as long as any."""
    return f"fencepost_{digest_of(schema, namespace).hex()}"
