"""What the MariaDB ledger does with leases inside of its own transactions."""

from __future__ import annotations

import hashlib

from fencepost.ledger.draft_values import LEASE_FIELDS
from fencepost.ledger.mariadb_columns import BREAK, LEASE, LIVE
from fencepost.ledger.mariadb_said import (
    NOW_US,
    assigned,
    digest,
    inserted,
    moved,
    one_by_one,
    packed_row,
    said,
)

COLUMNS = packed_row(LEASE, LEASE_FIELDS, of="lease")
# Whether somebody has a lease. Once the clock was set back that is for longer than its ttl, until
# somebody sees it, and has it end in time.
STANDS = f"(lease.held = 1 AND lease.expires_us > {NOW_US})"

# Every live run of some ``:locks``.
LIVE_OF_LOCKS = """fencepost_run AS run FORCE INDEX (fencepost_run_live)
 WHERE run.namespace = :namespace AND run.live_lock IN :#locks AND run.`lock` IN :locks"""
_OF_RUNS = f"""
SELECT {COLUMNS}
  FROM fencepost_run AS run FORCE INDEX ({{index}})
  STRAIGHT_JOIN fencepost_lease AS lease FORCE INDEX (PRIMARY)
    ON lease.namespace = run.namespace AND lease.digest = {digest("run.lease")}
 WHERE run.namespace = :namespace AND {{chosen}}"""

# Some leases by name, and those of the live runs of some locks and jobs.
FIND_SOME = said(
    f"""
SELECT {COLUMNS}
  FROM fencepost_lease AS lease FORCE INDEX (PRIMARY)
 WHERE lease.namespace = :namespace AND lease.digest IN :#names""",
    _OF_RUNS.format(
        index="fencepost_run_live", chosen="run.live_lock IN :#locks AND run.`lock` IN :locks"
    ),
    _OF_RUNS.format(index="fencepost_run_of_job", chosen=f"run.job IN :jobs AND run.{LIVE}"),
)

_WRITTEN = (
    *("token", "nonce", "held", "expires_us", "ttl_us", "since_us"),
    *("host", "pid", "version", "ended"),
)

# Leases that nobody ever had.
INSERT = said(
    inserted("fencepost_lease", ("name", *_WRITTEN), more={"digest": ":key", "beat": "0"})
)

# A lease becomes what was decided, unless somebody was granted it, or renewed it, since it was
# read.
UPDATE = said(
    moved(f"""
UPDATE fencepost_lease
   SET {assigned(_WRITTEN)}, beat = beat + 1
 WHERE namespace = :namespace AND digest = :key AND token = :seen_token AND beat = :seen_beat""")
)

TELL_BREAKS = said(inserted("fencepost_break", BREAK, more={"at_us": NOW_US}))

# Leases of those who have ended with them, or vanished; not of who has renewed it meanwhile.
DROP = said(
    moved("""
DELETE FROM fencepost_lease
 WHERE namespace = :namespace AND digest = :key AND token = :seen_token AND beat = :seen_beat""")
)

# The server's clock was set back: what would last for longer than its ttl begins it anew.
CLAMP = said(
    one_by_one(f"""
UPDATE fencepost_lease
   SET expires_us = {NOW_US} + ttl_us
 WHERE namespace = :namespace AND digest = :key
   AND held = 1 AND expires_us > {NOW_US} + ttl_us""")
)

# The lease of an attempt, as long as it has it; and how its end is moved.
OWNED = """lease.namespace = :namespace AND lease.digest = :#lease
   AND lease.nonce = :nonce AND lease.token = :token"""
HELD = f"{OWNED} AND {STANDS}"
EXTEND = f"""lease.expires_us = {NOW_US} + CAST(:ttl * 1000000 AS SIGNED),
       lease.ttl_us = CAST(:ttl * 1000000 AS SIGNED), lease.beat = lease.beat + 1"""


def key_of(namespace: str, name: str) -> str:  # noqa: ARG001 -- it is beside the namespace
    """Return what a lease is found by, as a row has it."""
    return hashlib.sha256(name.encode()).hexdigest()
