"""What the PostgreSQL ledger says to its server in a transaction that user code joins."""

from __future__ import annotations

from fencepost.ledger.postgres_leases import HELD, OWNED
from fencepost.ledger.postgres_rows import OURS
from fencepost.ledger.postgres_said import NOW, said
from fencepost.world.postgres import Statement

# Shorter than our own patience: whoever gives up first must be the server, which then knows.
_SEALED_WITHIN = "4000ms"

BEGIN = Statement("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE", prepared=False)
COMMIT = Statement("COMMIT", prepared=False)
ROLLBACK = Statement("ROLLBACK", prepared=False)
LIMITS = said("""
SELECT set_config('idle_in_transaction_session_timeout', :idle, TRUE),
       set_config('statement_timeout', :longest, TRUE),
       set_config('lock_timeout', '0', TRUE)""")
HURRY = said(f"SELECT set_config('statement_timeout', '{_SEALED_WITHIN}', TRUE)")

# Whether the run is the attempt's, and whether it may begin something; and which transaction this
# is, of which server, should nobody hear how it ended.
GUARD = said(f"""
SELECT cancel_at, EXISTS (SELECT 1 FROM fencepost_lease AS lease WHERE {HELD}),
       txid_current(), pg_postmaster_start_time()::text
  FROM fencepost_run
 WHERE {OURS}""")

# A lease that ended, and that nobody has taken, is still ours to commit under: whoever takes it
# from now on waits for us.
SEAL = said(f"""
WITH ours AS (
    SELECT cancel_at
      FROM fencepost_run
     WHERE {OURS}
       FOR NO KEY UPDATE),
held AS (
    SELECT 1
      FROM fencepost_lease AS lease
     WHERE {OWNED} AND lease.held AND EXISTS (SELECT 1 FROM ours)
       FOR NO KEY UPDATE)
SELECT fencepost_insist(EXISTS (SELECT 1 FROM held) AND txid_current() = :xid::bigint),
       (SELECT cancel_at FROM ours)""")

STANDS = said(f"""
SELECT EXISTS (SELECT 1 FROM fencepost_lease AS lease WHERE {OWNED} AND lease.held)
  FROM fencepost_run
 WHERE {OURS}""")

FATE = said("SELECT txid_status(:xid::bigint), pg_postmaster_start_time()::text")
WAIT = said("SELECT pg_sleep(:pause::double precision)")

# Done at once: begin and end commit together. What is known of it, if it is not new.
ONCE = said(f"""
WITH ours AS (SELECT 1 FROM fencepost_run WHERE {OURS}),
made AS (
    INSERT INTO fencepost_item
           (namespace, place, shelf, scope, item, state, token, run, call, at)
    SELECT :namespace, :place::text, :shelf::text, :scope::text, :item::text, 'done', :token,
           :run::text, :call::text, {NOW}
      FROM ours
        ON CONFLICT DO NOTHING
    RETURNING 1)
SELECT EXISTS (SELECT 1 FROM ours), EXISTS (SELECT 1 FROM made)""")

ONCE_MORE = said(f"""
UPDATE fencepost_item
   SET state = 'done', token = :token, run = :run, call = :call, at = {NOW}, error = NULL
 WHERE namespace = :namespace AND place = :place""")
