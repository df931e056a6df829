"""What the PostgreSQL ledger does with leases inside of its own transactions."""

from __future__ import annotations

from fencepost.ledger.draft_values import LEASE_FIELDS
from fencepost.ledger.postgres_said import lease_key, said
from fencepost.ledger.postgres_schema import LIVE, LIVE_OF_LOCKS
from fencepost.model.lease import MARK
from fencepost.stores.postgres_rows import OUR_PULSE, SERVER, SILENT, lease_key as digest_of

_NOW_US = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
_KEY = lease_key(":namespace", ":lease")

# And what it leans on, for how long after that, and whether that has ended.
COLUMNS = (
    ", ".join(f"lease.{name}" for name in LEASE_FIELDS)
    + f", lease.pulse, lease.grace_us, CASE WHEN lease.held THEN {SILENT} END"
)
# Whether somebody has a lease. Once the clock was set back that is for longer than its ttl, until
# somebody sees it, and has it end in time.
STANDS = f"(lease.held AND lease.expires_us > {_NOW_US})"

# Some leases by name, and those of the live runs of some locks and jobs.
FIND_SOME = said(f"""
WITH wanted (name) AS (
    SELECT unnest(:names::text[])
     UNION
    SELECT lease FROM fencepost_run
     WHERE {LIVE_OF_LOCKS}
     UNION
    SELECT lease FROM fencepost_run
     WHERE namespace = :namespace AND job = ANY(:jobs::text[]) AND {LIVE})
SELECT {COLUMNS}
  FROM fencepost_lease AS lease
 WHERE lease.key = ANY(ARRAY(SELECT {lease_key(":namespace", "wanted.name")} FROM wanted))""")

_FIELDS = (
    "key bytea, name text, token bigint, nonce text, held boolean, expires_us bigint, "
    "ttl_us bigint, since_us bigint, host text, pid bigint, version text, ended text, "
    "seen_token bigint, seen_beat bigint"
)
_NEW = f"json_to_recordset(:rows::json) AS new ({_FIELDS})"

# Our own pulse, for runs to lean on; 0 if there is none, or it has ended, or nothing is to lean.
OUR_OWN = f"ours (ours) AS MATERIALIZED (SELECT {OUR_PULSE})"

# What stands for the permits of a lock is nobody's, and ends with nobody.
_LEANS = f"new.held AND left(new.nonce, {len(MARK)}) <> '{MARK}'"

# Leases that nobody ever had.
INSERT = said(f"""
WITH {OUR_OWN}, made AS (
    INSERT INTO fencepost_lease
           (key, namespace, name, token, nonce, held, expires_us, ttl_us, beat, since_us,
            host, pid, version, ended, pulse, pulse_nonce, server_us, grace_us)
    SELECT key, :namespace, name, token, nonce, held, expires_us, ttl_us, 0, since_us,
           host, pid, version, ended, CASE WHEN {_LEANS} THEN ours ELSE 0 END, nonce, {SERVER},
           :grace_us::bigint
      FROM {_NEW}, ours
        ON CONFLICT DO NOTHING
    RETURNING 1)
SELECT fencepost_insist((SELECT count(*) FROM made) = :count), ours FROM ours""")

# A lease becomes what was decided, unless somebody was granted it, or renewed it, since it was
# read. Unless a session vouches for it, it ends when its run does, or at its time. Each is looked
# up by itself: joined by their keys, all leases there are would be read.
UPDATE = said(f"""
WITH {OUR_OWN}, new AS MATERIALIZED (
    SELECT new.*, lease.place
      FROM {_NEW}
     CROSS JOIN LATERAL (
           SELECT lease.ctid AS place, lease.token, lease.beat
             FROM fencepost_lease AS lease
            WHERE lease.key = new.key
           OFFSET 0
              FOR NO KEY UPDATE) AS lease
     WHERE lease.token = new.seen_token AND lease.beat = new.seen_beat),
changed AS (
    UPDATE fencepost_lease AS lease
       SET token = new.token, nonce = new.nonce, held = new.held, expires_us = new.expires_us,
           ttl_us = new.ttl_us, beat = lease.beat + 1, since_us = new.since_us, host = new.host,
           pid = new.pid, version = new.version, ended = new.ended,
           pulse = CASE WHEN {_LEANS} THEN ours ELSE 0 END, pulse_nonce = new.nonce,
           server_us = {SERVER},
           grace_us = CASE WHEN lease.nonce = new.nonce
                           THEN greatest(lease.grace_us, :grace_us::bigint)
                           ELSE :grace_us::bigint END
      FROM new, ours
     WHERE lease.ctid = new.place
    RETURNING 1)
SELECT fencepost_insist((SELECT count(*) FROM changed) = :count), ours FROM ours""")

TELL_BREAKS = said(f"""
INSERT INTO fencepost_break (namespace, name, token, new_token, holder, operator, reason, at_us)
SELECT :namespace, name, token, new_token, holder, operator, reason, {_NOW_US}
  FROM json_to_recordset(:rows::json)
    AS new (name text, token bigint, new_token bigint, holder text, operator text, reason text)""")

# Said beside the join: so only these are read, whatever way is taken.
_AMONG = "lease.key = ANY(ARRAY(SELECT key FROM json_to_recordset(:rows::json) AS old (key bytea)))"

# Leases of those who have ended with them, or vanished; not of who has renewed it meanwhile.
DROP = said(f"""
WITH gone AS (
    DELETE FROM fencepost_lease AS lease
     USING json_to_recordset(:rows::json) AS old (key bytea, seen_token bigint, seen_beat bigint)
     WHERE {_AMONG} AND lease.key = old.key
       AND lease.token = old.seen_token AND lease.beat = old.seen_beat
    RETURNING 1)
SELECT fencepost_insist((SELECT count(*) FROM gone) = :count)""")

# The server's clock was set back: what would last for longer than its ttl begins it anew.
CLAMP = said(f"""
UPDATE fencepost_lease AS lease
   SET expires_us = {_NOW_US} + lease.ttl_us
  FROM json_to_recordset(:rows::json) AS old (key bytea)
 WHERE {_AMONG} AND lease.key = old.key AND lease.held
   AND lease.expires_us > {_NOW_US} + lease.ttl_us""")

# The lease of an attempt, as long as it has it.
OWNED = f"lease.key = {_KEY} AND lease.nonce = :nonce AND lease.token = :token"
HELD = f"{OWNED} AND {STANDS}"
_MOVE = f"""
    UPDATE fencepost_lease AS lease
       SET expires_us = {_NOW_US} + (:ttl::double precision * 1000000)::bigint,
           ttl_us = (:ttl::double precision * 1000000)::bigint, beat = beat + 1{{more}}
     WHERE {OWNED}"""
EXTEND, ENTRUST = _MOVE.format(more=""), _MOVE.format(more=", pulse = 0")


def key_of(namespace: str, name: str) -> str:
    """Return what a lease is found by, as a row has it."""
    return "\\x" + digest_of(namespace, name).hex()
