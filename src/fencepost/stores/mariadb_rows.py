"""What the MariaDB store says to its server, and how a row becomes a lease.

All instants are microseconds since 1970 of the server's clock, read in the statement that compares
or sets them, whatever the time zone of a session. A statement sees the instant at which it began:
one that had to wait for a row judges by an earlier instant than its own, which errs to the safe
side, as a holder counts from before it asked.
"""

from __future__ import annotations

import json

from fencepost.model.lease import Holder, Record
from fencepost.model.named import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ERA = "server"  # its clock goes on over restarts

NOW_US = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"

# A name may be longer than any key, and text may be compared with a blind eye for spaces at its
# end: so the key is a digest of the name. A lease is kept for ever, see decision 23.
_CREATE_LEASE = """
CREATE TABLE IF NOT EXISTS fencepost_lease (
    namespace  VARCHAR(100)  CHARACTER SET ascii   COLLATE ascii_bin   NOT NULL,
    digest     CHAR(64)      CHARACTER SET ascii   COLLATE ascii_bin   NOT NULL,
    name       VARCHAR(1000) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    token      BIGINT        NOT NULL,
    nonce      VARCHAR(64)   CHARACTER SET ascii   COLLATE ascii_bin   NOT NULL,
    held       TINYINT       NOT NULL,
    expires_us BIGINT        NOT NULL,
    ttl_us     BIGINT        NOT NULL,
    beat       BIGINT        NOT NULL,
    since_us   BIGINT        NOT NULL,
    host       VARCHAR(255)  CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    pid        BIGINT        NOT NULL,
    version    VARCHAR(255)  CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    ended      TEXT          CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    PRIMARY KEY (namespace, digest)
) ENGINE = InnoDB COMMENT = 'fencepost 1'"""

# Who took a lease away from whom, and why.
_CREATE_BREAK = """
CREATE TABLE IF NOT EXISTS fencepost_break (
    id        BIGINT        NOT NULL AUTO_INCREMENT PRIMARY KEY,
    namespace VARCHAR(100)  CHARACTER SET ascii   COLLATE ascii_bin   NOT NULL,
    name      VARCHAR(1000) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    token     BIGINT        NOT NULL,
    new_token BIGINT        NOT NULL,
    holder    TEXT          CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    operator  TEXT          CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    reason    TEXT          CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    at_us     BIGINT        NOT NULL
) ENGINE = InnoDB COMMENT = 'fencepost 1'"""

CREATE = (_CREATE_LEASE, _CREATE_BREAK)

_WHICH = "namespace = %(namespace)s AND digest = %(digest)s AND name = %(name)s"

# In one column: each more would be a packet more to take apart.
_ROW = f"""JSON_ARRAY(name, token, nonce, host, pid, version, held, expires_us, ttl_us, since_us,
                  ended, beat, {NOW_US})"""

FIND = f"""
SELECT {_ROW}
  FROM fencepost_lease
 WHERE {_WHICH}"""

FIND_ALL = f"""
SELECT {_ROW}
  FROM fencepost_lease
 WHERE namespace = %(namespace)s
 ORDER BY name"""

_GIVE = f"""
UPDATE fencepost_lease
   SET token = GREATEST(token + 1, {NOW_US}), nonce = %(nonce)s, held = 1,
       expires_us = {NOW_US} + %(ttl_us)s, ttl_us = %(ttl_us)s, beat = beat + 1,
       since_us = {NOW_US}, host = %(host)s, pid = %(pid)s, version = %(version)s, ended = ''
 WHERE {_WHICH}"""

# Take a lease that is free or past its end. A nonce that gave it back is spent.
_GRANT = f"""{_GIVE}
   AND (held = 0 AND nonce <> %(nonce)s OR held = 1 AND expires_us <= {NOW_US})"""

# And in the same breath what there is now: the token, or whoever has it. An UPDATE cannot return
# it; LAST_INSERT_ID(…) would, but not from a table that somebody put a trigger on.
ACQUIRE = f"{_GRANT};{FIND}"

# A mark takes the place of the mark that was seen.
TAKE_PLACE = f"{_GIVE} AND held = 1 AND token = %(token)s;{FIND}"

# The first grant of a name; somebody else may be first.
_GRANT_FIRST = f"""
INSERT INTO fencepost_lease (namespace, digest, name, token, nonce, held, expires_us, ttl_us, beat,
                             since_us, host, pid, version, ended)
VALUES (%(namespace)s, %(digest)s, %(name)s, {NOW_US}, %(nonce)s, 1,
        {NOW_US} + %(ttl_us)s, %(ttl_us)s, 1, {NOW_US}, %(host)s, %(pid)s, %(version)s, '')"""

ACQUIRE_FIRST = f"{_GRANT_FIRST};{FIND}"

# Past means past, even if nobody has taken it. The beat makes every renewal a change.
RENEW = f"""
UPDATE fencepost_lease
   SET expires_us = {NOW_US} + %(ttl_us)s, ttl_us = %(ttl_us)s, beat = beat + 1
 WHERE {_WHICH} AND nonce = %(nonce)s AND token = %(token)s AND held = 1
   AND expires_us > {NOW_US}"""

# Give it back, and leave the number of the connection that is first in line, if there is one, for
# the answer. It is marked, for a trigger may leave some other number instead.
_MARK = 2**62
RELEASE = f"""
UPDATE fencepost_lease
   SET held = 0, ended = 'it was released',
       beat = beat + 1 + 0 * LAST_INSERT_ID({_MARK} + IFNULL(IS_USED_LOCK(%(line)s), 0))
 WHERE {_WHICH} AND nonce = %(nonce)s AND held = 1 AND token = IFNULL(%(token)s, token)"""

# A server whose clock was set back would keep everybody out for as long: nobody was ever granted
# more than a ttl from now.
CLAMP = f"""
UPDATE fencepost_lease
   SET expires_us = {NOW_US} + ttl_us, beat = beat + 1
 WHERE {_WHICH} AND token = %(token)s AND expires_us > {NOW_US} + ttl_us"""

FIND_TO_BREAK = f"{FIND} FOR UPDATE"

BREAK = f"""
UPDATE fencepost_lease
   SET token = %(new_token)s, nonce = '', held = 0, ended = %(ended)s, beat = beat + 1
 WHERE {_WHICH}"""

RECORD_BREAK = f"""
INSERT INTO fencepost_break (namespace, name, token, new_token, holder, operator, reason, at_us)
VALUES (%(namespace)s, %(name)s, %(token)s, %(new_token)s, %(holder)s, %(operator)s, %(reason)s,
        {NOW_US})"""

FIRST_IN_LINE = "SELECT IS_USED_LOCK(%(line)s)"


def first_in_line(number: int) -> int:
    """Return which connection is first in line, as ``RELEASE`` left it; 0 if none is."""
    return max(0, number - _MARK)


class Row(NamedTuple):
    """A lease, and the server's time at which it was read."""

    record: Record
    now_us: int
    set_back: bool  # its end is further away than its ttl: the clock was set back

    @property
    def now(self) -> float:
        """The server's time in seconds."""
        return self.now_us / 1e6

    @property
    def left(self) -> float:
        """For how long a lease that is held may last."""
        return max(0.0, self.record.expires - self.now)


def row_of(text: Any) -> Row:
    """Return what ``_ROW`` selected as values."""
    found = json.loads(text)
    name, token, nonce, host, pid, version, held, expires_us, ttl_us, since_us = found[:10]
    ended, beat, now_us = found[10:]
    ends_us = min(expires_us, now_us + ttl_us)
    instants = (ERA, ends_us / 1e6, ttl_us / 1e6, since_us / 1e6)
    record = Record(name, token, Holder(nonce, host, pid, version), held == 1, *instants)
    return Row(record._replace(ended=ended, beat=beat), now_us, held == 1 and ends_us < expires_us)
