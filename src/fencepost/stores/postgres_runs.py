"""Leases lean on their process's pulse: proven for all of them by one statement.

The statement writes nothing and names no run, but each lock. A row is written again only if its
pulse has to be another one, because the session has ended, or its grace a longer one.
"""

from __future__ import annotations

import json

from fencepost.stores.postgres_rows import NOW, OUR_PULSE, SERVER, us
from fencepost.world.postgres import Statement
from fencepost.world.postgres_lean import LockLean

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from fencepost.stores.postgres import PostgresStore
    from fencepost.world.postgres_lean import RunLean

# A session needs this long to be opened.
_ANEW = 0.5

_OURS = """
SELECT *
  FROM unnest(:keys::bytea[], :nonces::text[], :tokens::bigint[]) AS named (key, nonce, token)"""

PROVE_PULSE = Statement("SELECT NOT pg_try_advisory_xact_lock_shared(:pulse::bigint)")

# The same, and which locks were broken, have run out, or lean on another pulse: a request that was
# long on its way may have written one that has ended.
PROVE_LOCKS = Statement(f"""
SELECT NOT pg_try_advisory_xact_lock_shared(:pulse::bigint),
       (SELECT coalesce(json_agg(ours.nonce), '[]')::text
          FROM ({_OURS}) AS ours
         WHERE NOT EXISTS (
               SELECT FROM {{schema}}.fencepost_lease AS lease
                WHERE lease.key = ours.key AND lease.nonce = ours.nonce AND lease.held
                  AND lease.token = ours.token AND lease.expires_us > {NOW}
                  AND lease.pulse IN (0, :pulse::bigint)))""")

# Leases lean on another pulse from now on. What leans on none stays so, and is told of: it was
# handed over, or that is what the last answer said, which was lost. What somebody else is writing
# just now is left to the next time.
LEAN_ANEW = Statement(f"""
  WITH ours AS ({_OURS}
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
    vouching, answered = pulse.vouching, False
    if not vouching.takes_turn(sent):
        return  # another keeper has just done so, or does
    leans = [lean for lean in list(vouching.leans.values()) if lean.on]
    unanswered, vouching.unanswered = vouching.unanswered, True
    try:
        if leans:
            patience = min(lean.grace for lean in leans) * 0.4
            # Not too brief to open a session anew.
            _prove(store, leans, sent, patience=max(patience, _ANEW) if unanswered else patience)
        answered = True
    finally:
        vouching.heard(sent, answered=answered)


def _prove(store: PostgresStore, leans: list[RunLean], sent: float, *, patience: float) -> None:
    pulse = store.pulse_here
    grace = pulse.heed(sent - max(lean.proven for lean in leans), now=sent)
    key = pulse.beat(store.db)
    on_key = [lean for lean in leans if lean.on == key]
    if on_key:
        beats, differing = _asked(store, key, on_key, patience=patience)
        if not beats:
            pulse.end(key)  # its session has ended, and nobody told us
            key = pulse.beat(store.db)
        else:
            for lean in on_key:
                if isinstance(lean, LockLean) and lean.nonce in differing:
                    lean.row_differs()
                else:
                    lean.proven = max(lean.proven, sent)
    others = [lean for lean in leans if lean.on != key or us(lean.grace) < us(grace)]
    if others:
        _lean_anew(store, others, key, grace, sent, patience=patience)


def _asked(
    store: PostgresStore, key: int, leans: list[RunLean], *, patience: float
) -> tuple[bool, list[str]]:
    """Ask whether somebody has the key; and which locks do not lean on it, or are not ours."""
    locks = [lean for lean in leans if isinstance(lean, LockLean)]
    if not locks:
        rows = store.db.ask(PROVE_PULSE, (key,), changes=False, patience=patience).rows
        return rows[0][0], []
    values = {"pulse": key, **_named(locks)}
    rows = store.db.ask(PROVE_LOCKS, values, changes=False, patience=patience).rows
    beats, differing = rows[0]
    return beats, json.loads(differing)


def _lean_anew(
    store: PostgresStore,
    leans: list[RunLean],
    key: int,
    grace: float,
    sent: float,
    *,
    patience: float,
) -> None:
    values = {**_named(leans), "pulse": key, "grace_us": us(grace)}
    written = store.db.ask(LEAN_ANEW, values, patience=max(patience, _ANEW)).rows
    by_nonce = {nonce: (pulse, grace_us / 1e6) for nonce, pulse, grace_us in written}
    for lean in leans:
        if lean.nonce in by_nonce:
            lean.on, lean.grace = by_nonce[lean.nonce]
            lean.proven = max(lean.proven, sent)
        elif isinstance(lean, LockLean):
            lean.row_differs()


def _named(leans: Sequence[RunLean]) -> dict[str, list[Any]]:
    return {
        "keys": [lean.lease for lean in leans],
        "nonces": [lean.nonce for lean in leans],
        "tokens": [lean.token for lean in leans],
    }
