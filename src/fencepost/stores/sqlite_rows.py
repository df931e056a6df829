"""What the SQLite store says to its file, and how a row becomes a lease."""

from __future__ import annotations

from fencepost.model.lease import Holder, Record
from fencepost.model.named import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_COLUMNS = """lease.name, lease.token, lease.nonce, lease.host, lease.pid, lease.version,
       lease.held, lease.boot_id, lease.expires_us, lease.ttl_us, lease.since_us, lease.ended,
       lease.beat, lease.pulse, lease.pulse_inode"""

FIND = f"""
SELECT {_COLUMNS}
  FROM fencepost_lease AS lease
 WHERE lease.namespace = :namespace AND lease.name = :name"""

FIND_ALL = f"""
SELECT {_COLUMNS}
  FROM fencepost_lease AS lease
 WHERE lease.namespace = :namespace
 ORDER BY lease.name"""

# Only a lease without a row may have been deleted: any other was granted above this already.
FIND_DELETED = "SELECT token FROM fencepost_file WHERE id = 1"

# The first grant of a name, unless somebody else was first or has just deleted a lease.
GRANT_FIRST = """
INSERT OR IGNORE INTO fencepost_lease
SELECT :namespace, :name, :token, :nonce, 1, :boot_id, :expires_us, :ttl_us, 0, :since_us,
       :host, :pid, :version, :pulse, :pulse_inode, ''
  FROM fencepost_file WHERE id = 1 AND token = :seen_token"""

# The usual grant, in one statement: nobody has the lease, and the clock is ahead of its token. By
# number, not by name: to look up a dozen names costs as much as to find the row.
GRANT_FREE = """
UPDATE fencepost_lease
   SET token = ?1, since_us = ?1, nonce = ?2, held = 1, boot_id = ?3, expires_us = ?4, ttl_us = ?5,
       beat = 0, host = ?6, pid = ?7, version = ?8, pulse = ?9, pulse_inode = ?10, ended = ''
 WHERE namespace = ?11 AND name = ?12 AND held = 0 AND nonce <> ?2 AND token < ?1"""

NUMBERED = (
    *("since_us", "nonce", "boot_id", "expires_us", "ttl_us", "host", "pid", "version", "pulse"),
    *("pulse_inode", "namespace", "name"),
)

# Any other grant, unless the lease is no longer what it was when the decision was made.
GRANT_AGAIN = """
UPDATE fencepost_lease
   SET token = :token, nonce = :nonce, held = 1, boot_id = :boot_id, expires_us = :expires_us,
       ttl_us = :ttl_us, beat = 0, since_us = :since_us, host = :host, pid = :pid,
       version = :version, pulse = :pulse, pulse_inode = :pulse_inode, ended = ''
 WHERE namespace = :namespace AND name = :name
   AND token = :seen_token AND held = :seen_held AND beat = :seen_beat"""

# What this nonce was granted already, by itself or by the holder before it.
ADOPT = """
UPDATE fencepost_lease
   SET expires_us = :expires_us, ttl_us = :ttl_us, beat = beat + 1, pulse = :pulse,
       pulse_inode = :pulse_inode
 WHERE namespace = :namespace AND name = :name AND nonce = :nonce AND token = :token
   AND held = 1 AND boot_id = :boot_id AND expires_us > :now_us"""

# A renewal past the end is refused even if nobody came: past means past.
RENEW = """
UPDATE fencepost_lease
   SET expires_us = :now_us + :ttl_us, ttl_us = :ttl_us, beat = beat + 1
 WHERE namespace = :namespace AND name = :name AND nonce = :nonce AND token = :token
   AND held = 1 AND boot_id = :boot_id AND expires_us > :now_us"""

# The same, and from now on the death of the process that was granted it proves nothing.
ENTRUST = """
UPDATE fencepost_lease
   SET expires_us = :now_us + :ttl_us, ttl_us = :ttl_us, beat = beat + 1, pulse = '',
       pulse_inode = ''
 WHERE namespace = :namespace AND name = :name AND nonce = :nonce AND token = :token
   AND held = 1 AND boot_id = :boot_id AND expires_us > :now_us"""

BREAK = """
UPDATE fencepost_lease
   SET token = :new_token, nonce = '', held = 0, ended = :ended
 WHERE namespace = :namespace AND name = :name"""

# A lease whose name will hardly be wanted again. A trigger remembers its token.
DROP = "DELETE FROM fencepost_lease WHERE namespace = ? AND name = ? AND nonce = ?"

RECORD_BREAK = """
INSERT INTO fencepost_break (namespace, name, token, new_token, holder, operator, reason, at_us)
VALUES (:namespace, :name, :token, :new_token, :holder, :operator, :reason, :at_us)"""

# Up to which token anything may have been granted that is not on the disk.
RESERVE = """
INSERT INTO fencepost_reserve (id, ceiling) VALUES (1, ?)
    ON CONFLICT DO UPDATE SET ceiling = max(ceiling, excluded.ceiling)"""


class Row(NamedTuple):
    """A lease as the file has it: the record, and where to feel its holder's pulse."""

    record: Record
    pulse: str
    pulse_inode: str


def row_of(columns: tuple[Any, ...]) -> Row:
    """Return what ``_COLUMNS`` selected as values. In their order: this is on everybody's way."""
    name, token, nonce, host, pid, version, held, era, expires_us, ttl_us, since_us = columns[:11]
    ended, beat, pulse, pulse_inode = columns[11:]
    holder = Holder(nonce, host, pid, version)
    instants = (era, expires_us / 1e6, ttl_us / 1e6, since_us / 1e6)
    return Row(Record(name, token, holder, held == 1, *instants, ended, beat), pulse, pulse_inode)


def us(seconds: float) -> int:
    """Return seconds as the file keeps them: in whole microseconds."""
    return int(seconds * 1e6)
