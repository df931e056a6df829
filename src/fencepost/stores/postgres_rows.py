"""What the PostgreSQL store says to its server, and how a row becomes a lease.

The server's clock is read by each statement, after whatever row lock it had to wait for; that is
``clock_timestamp()``, for ``now()`` is the beginning of the transaction. Instants are whole
microseconds: no time zone can change them.

``pulse`` is the sign of life that a lease leans on: the key of a lock that one session of its
holder has for as long as it lives. Whoever extends a lease and does not prove its pulse must set it
to 0. Whoever believes in a lease with a pulse must prove it again and again: it believes for less
than ``grace_us`` at a time, and others wait for as long once the pulse is gone.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache

from fencepost.model.lease import Holder, Record
from fencepost.model.named import NamedTuple
from fencepost.world.postgres import Statement

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

ERA = "server"
NOW = "(date_part('epoch', clock_timestamp()) * 1000000)::bigint"
# Which run of which server: a session's locks end with it, and do not follow a fail-over.
SERVER = "(date_part('epoch', pg_postmaster_start_time()) * 1000000)::bigint"

# Whether the session that vouches for a lease is gone: its lock can be had if nobody has it. NULL
# if none vouches: a pulse is good for the nonce it was given for, on the server it was given on.
SILENT = f"""CASE WHEN lease.pulse <> 0 AND lease.pulse_nonce = lease.nonce
             AND lease.server_us = {SERVER}
            THEN pg_try_advisory_xact_lock_shared(lease.pulse) END"""

# Our own pulse, for a lease to lean on: 0 if there is none, or if its session ended unnoticed.
OUR_PULSE = """CASE WHEN :pulse::bigint = 0 OR pg_try_advisory_xact_lock_shared(:pulse::bigint)
            THEN 0 ELSE :pulse::bigint END"""

_COLUMNS = f"""lease.name, lease.token, lease.nonce, lease.host, lease.pid, lease.version,
       lease.held, lease.expires_us, lease.ttl_us, lease.since_us, lease.ended, lease.beat,
       lease.grace_us, {NOW}, {SILENT}"""

FIND = Statement(f"""
SELECT {_COLUMNS}
  FROM {{schema}}.fencepost_lease AS lease
 WHERE lease.key = :key""")

FIND_ALL = Statement(f"""
SELECT {_COLUMNS}
  FROM {{schema}}.fencepost_lease AS lease
 WHERE lease.namespace = :namespace
 ORDER BY lease.name COLLATE "C" """)

_GIVE = f"""
INSERT INTO {{schema}}.fencepost_lease AS lease
       (key, namespace, name, token, nonce, held, expires_us, ttl_us, beat, since_us,
        host, pid, version, ended, pulse, pulse_nonce, server_us, grace_us)
SELECT :key, :namespace, :name, {NOW}, :nonce, true, {NOW} + :ttl_us::bigint, :ttl_us::bigint, 0,
       {NOW}, :host, :pid::bigint, :version, '', {OUR_PULSE}, :nonce, {SERVER},
       :grace_us::bigint"""

_TO_THE_NEXT = f"""
    ON CONFLICT (key) DO UPDATE
   SET token = greatest(lease.token + 1, {NOW}), nonce = excluded.nonce, held = true,
       expires_us = {NOW} + excluded.ttl_us, ttl_us = excluded.ttl_us, beat = 0,
       since_us = {NOW}, host = excluded.host, pid = excluded.pid, version = excluded.version,
       ended = '', pulse = excluded.pulse, pulse_nonce = excluded.pulse_nonce,
       server_us = excluded.server_us, grace_us = excluded.grace_us
 WHERE (NOT lease.held AND lease.nonce <> excluded.nonce)
    OR (lease.held AND lease.expires_us <= {NOW})
RETURNING lease.token, lease.pulse, lease.grace_us"""

# What was granted; or, if nothing was, the lease as it was seen (in one column: twelve empty ones
# cost as much as to find the row). Whoever sees it held writes and locks nothing. In a race it may
# be neither held nor granted: then it is asked for again.
GRANT = Statement(f"""
  WITH granted AS ({_GIVE}
 WHERE NOT EXISTS (
       SELECT FROM {{schema}}.fencepost_lease AS lease
        WHERE lease.key = :key AND CASE WHEN lease.held THEN lease.expires_us > {NOW}
                                        ELSE lease.nonce = :nonce END)
{_TO_THE_NEXT})
SELECT token, pulse, grace_us, NULL
  FROM granted
 UNION ALL
SELECT NULL, NULL, NULL, json_build_array({_COLUMNS})::text
  FROM {{schema}}.fencepost_lease AS lease
 WHERE lease.key = :key AND NOT EXISTS (SELECT FROM granted)""")

# The same for whoever's turn it is. It waits for the release that is about to commit.
GRANT_IN_TURN = Statement(f"{_GIVE}{_TO_THE_NEXT}")

# What this nonce was granted already: its end moves, as it does when it is renewed. Its grace never
# shrinks before the next grant: its holder may still go by the longer one, and a renewal may arrive
# after a later one.
ADOPT = RENEW = Statement(f"""
UPDATE {{schema}}.fencepost_lease AS lease
   SET expires_us = {NOW} + :ttl_us::bigint, ttl_us = :ttl_us::bigint, beat = lease.beat + 1,
       pulse = {OUR_PULSE}, pulse_nonce = lease.nonce, server_us = {SERVER},
       grace_us = greatest(lease.grace_us, :grace_us::bigint)
 WHERE lease.key = :key AND lease.nonce = :nonce AND lease.token = :token AND lease.held
   AND lease.expires_us > {NOW}
RETURNING lease.token, lease.pulse, lease.grace_us""")

RELEASE = Statement("""
UPDATE {schema}.fencepost_lease
   SET held = false, ended = 'it was released', pulse = 0
 WHERE key = :key AND nonce = :nonce AND held AND token = coalesce(:token::bigint, token)""")

# The same by whoever stands in line no more. The next one is called before the commit, and waits
# for it at the row.
RELEASE_IN_TURN = Statement("""
  WITH released AS (
UPDATE {schema}.fencepost_lease
   SET held = false, ended = 'it was released', pulse = 0
 WHERE key = :key AND nonce = :nonce AND held AND token = coalesce(:token::bigint, token)
RETURNING 1)
SELECT (SELECT count(*) FROM released), pg_advisory_unlock(:line::bigint)""")

_TAKE = f"""
UPDATE {{schema}}.fencepost_lease AS lease
   SET token = greatest(lease.token + 1, {NOW}), nonce = :nonce, held = true,
       expires_us = {NOW} + :ttl_us::bigint, ttl_us = :ttl_us::bigint, beat = 0,
       since_us = {NOW}, host = :host, pid = :pid::bigint, version = :version,
       ended = '', pulse = {OUR_PULSE}, pulse_nonce = :nonce, server_us = {SERVER},
       grace_us = :grace_us::bigint
 WHERE lease.key = :key AND lease.token = :seen_token AND lease.beat = :seen_beat
   AND lease.held"""

_TAKEN = "RETURNING lease.token, lease.pulse, lease.grace_us"

# Take a lease whose pulse is silent and was silent all the while, if it is what it was.
TAKE = Statement(f"{_TAKE} AND {SILENT}\n{_TAKEN}")

# The same for a mark that takes the place of the mark that was seen: it leans on no pulse.
TAKE_PLACE = Statement(f"{_TAKE}\n{_TAKEN}")

# The server's clock was set back: what would last for longer than its ttl begins it anew.
CLAMP = Statement(f"""
UPDATE {{schema}}.fencepost_lease AS lease
   SET expires_us = {NOW} + lease.ttl_us
 WHERE lease.key = :key AND lease.token = :token AND lease.held
   AND lease.expires_us > {NOW} + lease.ttl_us""")

BREAK = Statement(f"""
  WITH seen AS (
SELECT * FROM {{schema}}.fencepost_lease WHERE key = :key AND token = :token FOR UPDATE
), broken AS (
UPDATE {{schema}}.fencepost_lease AS lease
   SET token = greatest(lease.token + 1, {NOW}), nonce = '', held = false, pulse = 0,
       ended = 'it was broken by ' || :operator || ': ' || :reason
  FROM seen
 WHERE lease.key = seen.key AND lease.token = seen.token
RETURNING lease.token
), recorded AS (
INSERT INTO {{schema}}.fencepost_break
       (namespace, name, token, new_token, holder, operator, reason, at_us)
SELECT seen.namespace, seen.name, seen.token, broken.token, seen.host || ' pid ' || seen.pid,
       :operator, :reason, {NOW}
  FROM seen, broken)
SELECT token FROM broken""")


class Row(NamedTuple):
    """A lease as the server has it: the record, the server's time, and whether its pulse ended."""

    record: Record
    now: float
    silent: bool | None  # None if it has none
    grace: float  # for how long its holder may still believe in it once the pulse is gone
    set_back: bool  # it would last for longer than its ttl: the server's clock was set back


def row_seen(text: str) -> Row:
    """Return the lease that ``GRANT`` has seen instead of granting it."""
    return row_of(json.loads(text))


def row_of(columns: Sequence[Any]) -> Row:
    """Return what ``_COLUMNS`` selected as values."""
    name, token, nonce, host, pid, version, held, expires_us, ttl_us, since_us = columns[:10]
    ended, beat, grace_us, now_us, silent = columns[10:]
    holder = Holder(nonce, host, pid, version)
    latest_us = now_us + ttl_us
    expires = min(expires_us, latest_us) / 1e6
    record = Record(
        name, token, holder, held, ERA, expires, ttl_us / 1e6, since_us / 1e6, ended, beat
    )
    set_back = held and expires_us > latest_us
    return Row(record, now_us / 1e6, silent if held else None, grace_us / 1e6, set_back)


@lru_cache(maxsize=1024)
def lease_key(namespace: str, name: str) -> bytes:
    """Return what a lease is found by: names of any length have keys of one length."""
    return hashlib.sha256(f"{namespace}\0{name}".encode()).digest()[:20]


@lru_cache(maxsize=1024)
def line_key(schema: str, namespace: str, name: str) -> int:
    """Return the lock that is the head of a line: 64 bits, apart from those of other programs."""
    text = f"fencepost line\0{schema}\0{namespace}\0{name}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], signed=True)


def us(seconds: float) -> int:
    """Return seconds as the server keeps them: in whole microseconds."""
    return round(seconds * 1e6)
