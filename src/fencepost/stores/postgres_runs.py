"""The leases of runs lean on their process's pulse: proven for all of them by one statement.

The statement writes nothing and names no run. A run's row is written again only if its pulse has
to be another one, because the session has ended, or its grace a longer one.
"""

from __future__ import annotations

from fencepost.stores.postgres_rows import NOW, OUR_PULSE, SERVER, us
from fencepost.world.postgres import Statement
from fencepost.world.postgres_lean import EVERY, SOON

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.stores.postgres import PostgresStore
    from fencepost.world.postgres_lean import RunLean

PROVE_PULSE = Statement("SELECT NOT pg_try_advisory_xact_lock_shared(:pulse::bigint)")

# Runs lean on another pulse from now on. What leans on none stays so, and is told of: it was handed
# over, or that is what the last answer said, which was lost. What somebody else is writing just now
# is left to the next time.
LEAN_ANEW = Statement(f"""
  WITH ours AS (
SELECT * FROM unnest(:keys::bytea[], :nonces::text[], :tokens::bigint[]) AS run (key, nonce, token)
), known AS (
SELECT lease.key, lease.nonce, lease.pulse, lease.grace_us
  FROM {{schema}}.fencepost_lease AS lease
  JOIN ours ON ours.key = lease.key
 WHERE lease.nonce = ours.nonce AND lease.token = ours.token AND lease.held
   AND lease.expires_us > {NOW}
   FOR NO KEY UPDATE OF lease SKIP LOCKED
), written AS (
UPDATE {{schema}}.fencepost_lease AS lease
   SET pulse = {OUR_PULSE}, pulse_nonce = lease.nonce, server_us = {SERVER}, beat = lease.beat + 1,
       grace_us = greatest(lease.grace_us, :grace_us::bigint)
  FROM known
 WHERE lease.key = known.key AND known.pulse <> 0
RETURNING lease.nonce, lease.pulse, lease.grace_us)
SELECT nonce, pulse, grace_us FROM written
 UNION ALL
SELECT nonce, pulse, grace_us FROM known WHERE pulse = 0""")


def vouch(store: PostgresStore) -> None:
    """Prove the pulse of this process, if it is time; what is proven is counted from before."""
    pulse, sent = store.pulse_here, store.boottime()
    vouching = pulse.vouching
    if sent < vouching.prove_at:
        return  # another keeper has just done so
    runs = [run for run in list(vouching.runs.values()) if run.on]
    vouching.prove_at = sent + EVERY
    next_try = sent + SOON
    try:
        if runs:
            _proven(store, runs, sent)
        next_try = sent + EVERY
    finally:
        vouching.told(next_try=next_try)


def _proven(store: PostgresStore, runs: list[RunLean], sent: float) -> None:
    pulse = store.pulse_here
    grace = pulse.heed(sent - max(run.proven for run in runs), now=sent)
    patience = min(run.grace for run in runs) * 0.4
    key = pulse.beat(store.db)
    if any(run.on == key for run in runs):
        rows = store.db.ask(PROVE_PULSE, (key,), changes=False, patience=patience).rows
        if not rows[0][0]:
            pulse.end(key)  # its session has ended, and nobody told us
            key = pulse.beat(store.db)
        else:
            for run in runs:
                run.proven = max(run.proven, sent) if run.on == key else run.proven
    others = [run for run in runs if run.on != key or us(run.grace) < us(grace)]
    if others:
        _lean_anew(store, others, key, grace, sent, patience=patience)


def _lean_anew(
    store: PostgresStore,
    runs: list[RunLean],
    key: int,
    grace: float,
    sent: float,
    *,
    patience: float,
) -> None:
    values = {
        "keys": [run.lease for run in runs],
        "nonces": [run.nonce for run in runs],
        "tokens": [run.token for run in runs],
        "pulse": key,
        "grace_us": us(grace),
    }
    written = store.db.ask(LEAN_ANEW, values, patience=max(patience, 0.5)).rows
    by_nonce = {nonce: (pulse, grace_us / 1e6) for nonce, pulse, grace_us in written}
    for run in runs:
        if run.nonce in by_nonce:
            run.on, run.grace = by_nonce[run.nonce]
            run.proven = max(run.proven, sent)
