"""The usual claim and the usual end of an attempt: one statement each, one round trip, one commit.

Nearly every run is claimed once, under a lock that nobody has, and ends for good. Whatever is not
so is left alone by these statements, which then return no row: it is decided on a draft.
"""

from __future__ import annotations

from fencepost.ledger.draft_usual import CHANGEABLE, storable_end
from fencepost.ledger.draft_values import storable
from fencepost.ledger.postgres_leases import OUR_OWN
from fencepost.ledger.postgres_life import AS_SEEN
from fencepost.ledger.postgres_rows import OURS, THIS_RUN
from fencepost.ledger.postgres_said import NOW, at_place, lease_key as lease_key_of, said
from fencepost.ledger.postgres_schema import LIVE
from fencepost.model.policy import Overlap
from fencepost.stores.postgres_rows import SERVER, lease_key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from fencepost.ledger.api import Attempt
    from fencepost.model.claim import Want
    from fencepost.model.ending import Settled

# What is said of a run that begins.
_BEGUN_COLUMNS = """
            namespace, job, slot, manual, rerun, state, lock, lease, token, nonce, host, pid,
            version, reason, blocker, origin, created_at, started_at, ended_at, not_before,
            beat_at, cancel_at, starts, losses, releases, streak, strikes, solitary, saves, epoch"""

# There is no such run yet, no live run of its lock, the job may run, it is the time at which the
# asker means this run, and the lock's lease is free, or was never granted: ``decide`` would say GO
# to just that. And nothing makes it an older copy of
# the ledger. Whoever asks has the turn of the lock, from an earlier statement: so what is seen here
# is all there is. Only who takes plain locks has no turn. If that one was faster, all of it is
# undone, and asked again. A prune has no turn either: it deletes a run and raises the mark of its
# job in one commit. So one snapshot must miss the run and see no mark: the INSERT alone would wait
# for the prune, find the key free, and go by a mark from before.
CLAIM_FREE = said(f"""
WITH {OUR_OWN}, free AS MATERIALIZED (
    SELECT now, (now * 1000000)::bigint AS now_us, lease.token AS seen,
           greatest((now * 1000000)::bigint, lease.token + 1) AS token
      FROM (SELECT {NOW} AS now OFFSET 0) AS clock
      LEFT JOIN fencepost_lease AS lease ON lease.key = :key
     WHERE (lease.held OR lease.nonce = :nonce) IS NOT TRUE
       AND NOT EXISTS (SELECT 1 FROM fencepost_run WHERE {THIS_RUN})
       AND now >= :since::double precision AND now < :until::double precision
       AND NOT EXISTS (
           SELECT 1 FROM fencepost_run
            WHERE namespace = :namespace AND lock = :lock AND {LIVE}
              AND hashtextextended(lock, 0) = hashtextextended(:lock, 0))
       AND NOT EXISTS (
           SELECT 1 FROM fencepost_job
            WHERE namespace = :namespace AND job = :job
              AND (quarantined <> '' OR paused <> '' OR retired <> '' OR pruned >= :slot))
       AND EXISTS ({AS_SEEN})),
made AS (
    INSERT INTO fencepost_run ({_BEGUN_COLUMNS})
    SELECT :namespace, :job, :slot::bigint, :manual::bigint, :rerun::bigint, 'running', :lock,
           :lock, token, :nonce, :host, :pid::bigint, :version, '', '', :origin,
           now, now, 0.0, 0.0, now, 0.0, 1, 0, 0, 0, 0, FALSE, 0, :epoch::bigint
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
SELECT token, now, EXISTS (SELECT 1 FROM leased) OR fencepost_insist(FALSE), ours
  FROM free, made, ours""")

# What may have changed of a run since it was claimed, by its own attempt or by who cancels it.
_CHANGED = ", ".join(CHANGEABLE)

# The end for good of an attempt that has nothing else to report; a trigger releases the lease.
FINISH_FOR_GOOD = said(f"""
UPDATE fencepost_run
   SET state = :state, reason = :reason, not_before = 0.0, ended_at = now, beat_at = now,
       result = :result, error = :error
  FROM (SELECT {NOW} AS now) AS clock
 WHERE {OURS}
RETURNING now, {_CHANGED}""")

# The same for many, each if its attempt still has the run: those that were ended are returned, by
# their numbers. One look for each, in the order of their keys.
END_ALL = said(f"""
WITH found AS MATERIALIZED (
    SELECT asked.*, run.place
      FROM (SELECT * FROM unnest(:jobs::text[], :slots::bigint[], :manuals::bigint[],
                                 :reruns::bigint[], :tokens::bigint[], :nonces::text[],
                                 :states::text[], :reasons::text[], :results::text[],
                                 :errors::text[]) WITH ORDINALITY
                AS told (job, slot, manual, rerun, token, nonce, state, reason, result, error,
                         number)
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
RETURNING found.number, now, {", ".join(f"run.{name}" for name in CHANGEABLE)}""")

# Runs that begin, of one process.
BEGIN_ALL = said(f"""
WITH made AS (
    INSERT INTO fencepost_run ({_BEGUN_COLUMNS})
    SELECT :namespace, job, slot, manual, rerun, 'running', lock, lock, token, nonce,
           :host, :pid::bigint, :version, '', '', origin, at, at, 0.0, 0.0, at, 0.0,
           1, 0, 0, 0, 0, FALSE, 0, epoch
      FROM unnest(:jobs::text[], :slots::bigint[], :manuals::bigint[], :reruns::bigint[],
                  :locks::text[], :tokens::bigint[], :nonces::text[], :origins::text[],
                  :times::double precision[], :epochs::bigint[])
        AS new (job, slot, manual, rerun, lock, token, nonce, origin, at, epoch)
        ON CONFLICT DO NOTHING
    RETURNING 1)
SELECT fencepost_insist(count(*) = :count) FROM made""")

_GRANTED = """unnest(:names::text[], :tokens::bigint[], :nonces::text[], :ttls::bigint[],
                  :sinces::bigint[], :seen_tokens::bigint[], :seen_beats::bigint[])
        AS new (name, token, nonce, ttl_us, since_us, seen_token, seen_beat)"""
_KEY = lease_key_of(":namespace", "new.name")

# Their leases: those that nobody ever had, and those that are as they were seen.
GRANT_FIRST = said(f"""
WITH {OUR_OWN}, made AS (
    INSERT INTO fencepost_lease
           (key, namespace, name, token, nonce, held, expires_us, ttl_us, since_us, host, pid,
            version, pulse, pulse_nonce, server_us, grace_us)
    SELECT {_KEY}, :namespace, name, token, nonce, TRUE, :now_us::bigint + ttl_us, ttl_us,
           since_us, :host, :pid::bigint, :version, ours, nonce, {SERVER}, :grace_us::bigint
      FROM {_GRANTED}, ours
        ON CONFLICT DO NOTHING
    RETURNING 1)
SELECT fencepost_insist((SELECT count(*) FROM made) = :count), ours FROM ours""")
GRANT_AGAIN = said(f"""
WITH {OUR_OWN}, new AS MATERIALIZED (
    SELECT new.*, lease.place
      FROM {_GRANTED}
     CROSS JOIN LATERAL (
           SELECT lease.ctid AS place, lease.token, lease.beat
             FROM fencepost_lease AS lease
            WHERE lease.key = {_KEY}
           OFFSET 0
              FOR NO KEY UPDATE) AS lease
     WHERE lease.token = new.seen_token AND lease.beat = new.seen_beat),
changed AS (
    UPDATE fencepost_lease AS lease
       SET token = new.token, nonce = new.nonce, held = TRUE,
           expires_us = :now_us::bigint + new.ttl_us, ttl_us = new.ttl_us, beat = lease.beat + 1,
           since_us = new.since_us, host = :host, pid = :pid::bigint, version = :version,
           ended = '', pulse = ours, pulse_nonce = new.nonce, server_us = {SERVER},
           grace_us = :grace_us::bigint
      FROM new, ours
     WHERE lease.ctid = new.place
    RETURNING 1)
SELECT fencepost_insist((SELECT count(*) FROM changed) = :count), ours FROM ours""")

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
        "since": want.since,
        "until": want.until,
    }


def end_of(attempt: Attempt, settled: Settled, *, namespace: str) -> dict[str, Any]:
    """Return what ``FINISH_FOR_GOOD`` wants to know."""
    settled = storable_end(settled)
    return {
        "namespace": namespace,
        **attempt.key._asdict(),
        "token": attempt.token,
        "nonce": attempt.nonce,
        "state": settled.state.value,
        "reason": settled.reason,
        "result": settled.result,
        "error": settled.error,
    }
