"""What the PostgreSQL ledger does with leases inside of its own transactions."""

from __future__ import annotations

from fencepost.ledger.postgres_said import lease_key, said
from fencepost.ledger.postgres_schema import LIVE, LIVE_OF_LOCKS
from fencepost.model.lease import Holder
from fencepost.model.named import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_NOW_US = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
_KEY = lease_key(":namespace", ":lease")

COLUMNS = (
    "lease.name, lease.token, lease.nonce, lease.host, lease.pid, lease.version, lease.held, "
    "lease.expires_us, lease.ttl_us, lease.since_us, lease.ended, lease.beat"
)
# Whether somebody has a lease: not for longer than its ttl, whatever became of the server's clock.
STANDS = f"(lease.held AND least(lease.expires_us, {_NOW_US} + lease.ttl_us) > {_NOW_US})"

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

# Leases that nobody ever had.
INSERT = said(f"""
WITH made AS (
    INSERT INTO fencepost_lease
           (key, namespace, name, token, nonce, held, expires_us, ttl_us, beat, since_us,
            host, pid, version, ended)
    SELECT key, :namespace, name, token, nonce, held, expires_us, ttl_us, 0, since_us,
           host, pid, version, ended
      FROM {_NEW}
        ON CONFLICT DO NOTHING
    RETURNING 1)
SELECT fencepost_insist(count(*) = :count) FROM made""")

# A lease becomes what was decided, unless somebody was granted it, or renewed it, since it was
# read. No session vouches for it: it ends when its run does, or at its time.
UPDATE = said(f"""
WITH changed AS (
    UPDATE fencepost_lease AS lease
       SET token = new.token, nonce = new.nonce, held = new.held, expires_us = new.expires_us,
           ttl_us = new.ttl_us, beat = lease.beat + 1, since_us = new.since_us, host = new.host,
           pid = new.pid, version = new.version, ended = new.ended, pulse = 0
      FROM {_NEW}
     WHERE lease.key = new.key AND lease.token = new.seen_token AND lease.beat = new.seen_beat
    RETURNING 1)
SELECT fencepost_insist(count(*) = :count) FROM changed""")

TELL_BREAKS = said(f"""
INSERT INTO fencepost_break (namespace, name, token, new_token, holder, operator, reason, at_us)
SELECT :namespace, name, token, new_token, holder, operator, reason, {_NOW_US}
  FROM json_to_recordset(:rows::json)
    AS new (name text, token bigint, new_token bigint, holder text, operator text, reason text)""")

# Leases of those who have ended with them.
DROP = said("""
DELETE FROM fencepost_lease AS lease
 USING json_to_recordset(:rows::json) AS old (key bytea, nonce text)
 WHERE lease.key = old.key AND lease.nonce = old.nonce""")

# The lease of an attempt, as long as it has it.
HELD = f"lease.key = {_KEY} AND lease.nonce = :nonce AND lease.token = :token AND {STANDS}"
_MOVE = f"""
    UPDATE fencepost_lease AS lease
       SET expires_us = {_NOW_US} + (:ttl::double precision * 1000000)::bigint,
           ttl_us = (:ttl::double precision * 1000000)::bigint, beat = beat + 1{{more}}
     WHERE lease.key = {_KEY} AND lease.nonce = :nonce AND lease.token = :token"""
EXTEND, ENTRUST = _MOVE.format(more=""), _MOVE.format(more=", pulse = 0")


class DraftLease(NamedTuple):
    """A lease in a draft: ``left`` is how long it may last, if it is ``held``."""

    token: int
    holder: Holder
    held: bool
    left: float
    ttl: float
    since: float
    beat: int = 0
    ended: str = ""

    @property
    def stands(self) -> bool:
        """Whether somebody has it who may still be alive."""
        return self.held and self.left > 0


def lease_of(columns: Sequence[Any], *, now: float) -> tuple[str, DraftLease]:
    """Return the name and the lease in a row, as it stands at ``now``."""
    name, token, nonce, host, pid, version, held, expires_us, ttl_us, since_us, ended, beat = (
        columns
    )
    ttl = ttl_us / 1e6
    left = min(expires_us / 1e6 - now, ttl)
    holder = Holder(nonce, host, pid, version)
    return name, DraftLease(token, holder, held, left, ttl, since_us / 1e6, beat, ended)


def row_of(key: bytes, name: str, lease: DraftLease, *, now: float) -> dict[str, Any]:
    """Return the row of a lease."""
    return {
        "key": "\\x" + key.hex(),
        "name": name,
        "token": lease.token,
        "held": lease.held,
        "expires_us": round((now + lease.left) * 1e6),
        "ttl_us": round(lease.ttl * 1e6),
        "since_us": round(lease.since * 1e6),
        "ended": lease.ended,
        **lease.holder._asdict(),
    }
