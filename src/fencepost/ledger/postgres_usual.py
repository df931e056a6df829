"""The usual claim and the usual end of an attempt: one statement each, one round trip, one commit.

Nearly every run is claimed once, under a lock that nobody has, and ends for good. Whatever is not
so is left alone by these statements, which then return no row: it is decided on a draft.
"""

from __future__ import annotations

from fencepost.ledger.draft_values import storable
from fencepost.ledger.postgres_leases import OUR_OWN
from fencepost.ledger.postgres_life import AS_SEEN
from fencepost.ledger.postgres_rows import COLUMNS, LISTED, OURS, THIS_RUN
from fencepost.ledger.postgres_said import NOW, at_place, said, version
from fencepost.ledger.postgres_schema import LIVE
from fencepost.model.policy import Overlap
from fencepost.stores.postgres_rows import SERVER, lease_key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from fencepost.ledger.api import Attempt
    from fencepost.model.claim import Want
    from fencepost.model.ending import Settled

# There is no such run yet, no live run of its lock, the job may run, and the lock's lease is free,
# or was never granted: ``decide`` would say GO to just that. And nothing makes it an older copy of
# the ledger. Whoever asks has the turn of the lock, from an earlier statement: so what is seen here
# is all there is. Only who takes plain locks has no turn. If that one was faster, all of it is
# undone, and asked again.
CLAIM_FREE = said(f"""
WITH {OUR_OWN}, free AS MATERIALIZED (
    SELECT now, now_us, seen, greatest(now_us, seen + 1) AS token
      FROM (SELECT now, (now * 1000000)::bigint AS now_us,
                   (SELECT token FROM fencepost_lease WHERE key = :key) AS seen
              FROM (SELECT {NOW} AS now) AS clock) AS asked
     WHERE NOT EXISTS (SELECT 1 FROM fencepost_run WHERE {THIS_RUN})
       AND NOT EXISTS (
           SELECT 1 FROM fencepost_run
            WHERE namespace = :namespace AND lock = :lock AND {LIVE}
              AND hashtextextended(lock, 0) = hashtextextended(:lock, 0))
       AND NOT EXISTS (
           SELECT 1 FROM fencepost_job
            WHERE namespace = :namespace AND job = :job
              AND (quarantined <> '' OR paused <> '' OR retired <> '' OR pruned >= :slot))
       AND NOT EXISTS (
           SELECT 1 FROM fencepost_lease WHERE key = :key AND (held OR nonce = :nonce))
       AND EXISTS ({AS_SEEN})),
made AS (
    INSERT INTO fencepost_run
           (namespace, job, slot, manual, rerun, state, lock, lease, token, nonce, host, pid,
            version, reason, blocker, origin, created_at, started_at, ended_at, not_before,
            beat_at, cancel_at, starts, losses, releases, streak, strikes, solitary, saves, epoch)
    SELECT :namespace, :job, :slot, :manual, :rerun, 'running', :lock, :lock, token, :nonce,
           :host, :pid::bigint, :version, '', '', :origin, now, now, 0.0, 0.0, now, 0.0,
           1, 0, 0, 0, 0, FALSE, 0, :epoch::bigint
      FROM free
        ON CONFLICT DO NOTHING
    RETURNING 1),
leased AS (
    INSERT INTO fencepost_lease AS lease
           (key, namespace, name, token, nonce, held, expires_us, ttl_us, since_us, host, pid,
            version, pulse, pulse_nonce, server_us, grace_us)
    SELECT :key, :namespace, :lock, token, :nonce, TRUE, now_us + :ttl_us::bigint,
           :ttl_us::bigint, now_us, :host, :pid::bigint, :version, ours, :nonce, {SERVER},
           :grace_us::bigint
      FROM free, made, ours
        ON CONFLICT (key) DO UPDATE
       SET token = excluded.token, nonce = excluded.nonce, held = TRUE,
           expires_us = excluded.expires_us, ttl_us = excluded.ttl_us, beat = lease.beat + 1,
           since_us = excluded.since_us, host = excluded.host, pid = excluded.pid,
           version = excluded.version, ended = '', pulse = excluded.pulse,
           pulse_nonce = excluded.pulse_nonce, server_us = excluded.server_us,
           grace_us = excluded.grace_us
     WHERE NOT lease.held AND lease.token = (SELECT seen FROM free)
    RETURNING 1)
SELECT token, now, fencepost_insist(EXISTS (SELECT 1 FROM leased)), ours
  FROM free, made, ours""")

# The end for good of an attempt that has nothing else to report; a trigger releases the lease.
FINISH_FOR_GOOD = said(f"""
UPDATE fencepost_run
   SET state = :state, reason = :reason, not_before = 0.0, ended_at = now, beat_at = now,
       result = :result, error = :error
  FROM (SELECT {NOW} AS now) AS clock
 WHERE {OURS}
RETURNING {COLUMNS}""")

# The same for many, each if its attempt still has the run: those that were ended are returned. One
# look for each, in the order of their keys.
END_ALL = said(f"""
WITH found AS MATERIALIZED (
    SELECT asked.*, run.place
      FROM (SELECT * FROM unnest(:jobs::text[], :slots::bigint[], :manuals::bigint[],
                                 :reruns::bigint[], :tokens::bigint[], :nonces::text[],
                                 :states::text[], :reasons::text[], :results::text[],
                                 :errors::text[])
                AS told (job, slot, manual, rerun, token, nonce, state, reason, result, error)
             ORDER BY job COLLATE "C", slot, manual, rerun) AS asked
     CROSS JOIN LATERAL (
           SELECT run.ctid AS place, run.state, run.token, run.nonce
             FROM fencepost_run AS run
            WHERE run.namespace = :namespace AND run.job = asked.job AND run.slot = asked.slot
              AND run.manual = asked.manual AND run.rerun = asked.rerun
           OFFSET 0
              FOR NO KEY UPDATE) AS run
     WHERE run.state = 'running' AND run.token = asked.token AND run.nonce = asked.nonce)
UPDATE fencepost_run AS run
   SET state = found.state, reason = found.reason, not_before = 0.0, ended_at = now,
       beat_at = now, result = found.result, error = found.error
  FROM found, (SELECT {NOW} AS now) AS clock
 WHERE run.ctid = found.place
RETURNING {LISTED}, {version("run")}""")

# Jobs pass a slot, each unless it is no longer what it was.
PASS_ALL = said(f"""
WITH new AS MATERIALIZED (
    SELECT passed.*, (split_part(seen_row, ')', 1) || ')')::tid AS seen_tid
      FROM unnest(:marks::bigint[], :due::double precision[], :owed::bigint[], :versions::text[])
        AS passed (watermark, next_due, owed, seen_row)),
changed AS (
    UPDATE fencepost_job AS known
       SET watermark = new.watermark, next_due = new.next_due, owed = new.owed
      FROM new
     WHERE {at_place("known")}
    RETURNING 1)
SELECT fencepost_insist(count(*) = :count) FROM changed""")


def is_usual(want: Want) -> bool:
    """Say whether a claim may be of the usual kind: one that begins, under the lock itself."""
    return want.room and want.policy.overlap is not Overlap.ALLOW


def claim_of(want: Want, *, namespace: str) -> dict[str, Any]:
    """Return what ``CLAIM_FREE`` wants to know."""
    holder = want.holder
    return {
        "namespace": namespace,
        **want.key._asdict(),
        "lock": want.lock,
        "key": lease_key(namespace, want.lock),
        "ttl_us": round(want.policy.lease * 1e6),
        "nonce": holder.nonce,
        "host": storable(holder.host),
        "pid": holder.pid,
        "version": storable(holder.version),
        "origin": want.trigger,
        "epoch": want.epoch,
    }


def end_of(attempt: Attempt, settled: Settled, *, namespace: str) -> dict[str, Any]:
    """Return what ``FINISH_FOR_GOOD`` wants to know."""
    return {
        "namespace": namespace,
        **attempt.key._asdict(),
        "token": attempt.token,
        "nonce": attempt.nonce,
        "state": settled.state.value,
        "reason": storable(settled.reason),
        "result": settled.result,
        "error": None if settled.error is None else storable(settled.error),
    }
