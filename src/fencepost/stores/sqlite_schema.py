"""The tables of the SQLite store, and whose clock the file keeps.

All instants in a file are read on one boot-time clock. A file of an earlier boot is taken over; one
that processes of another time namespace use right now is refused, for their clocks disagree.
"""

from __future__ import annotations

from fencepost.errors import Misuse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sqlite3 import Connection

SCHEMA = 1

# One row about the file itself: whose boot-time clock its instants are read on, and the highest
# token of any lease that was deleted from it.
_CREATE_FILE = """
CREATE TABLE IF NOT EXISTS fencepost_file (
    id             INTEGER PRIMARY KEY CHECK (id = 1),
    schema         INTEGER NOT NULL,
    token          INTEGER NOT NULL,
    boot_id        TEXT    NOT NULL,
    time_namespace TEXT    NOT NULL
)"""

# A lease. A released one is a tombstone that carries the last token and nonce; retention deletes it
# together with the last run that had it.
_CREATE_LEASE = """
CREATE TABLE IF NOT EXISTS fencepost_lease (
    namespace   TEXT    NOT NULL,
    name        TEXT    NOT NULL,
    token       INTEGER NOT NULL,
    nonce       TEXT    NOT NULL,
    held        INTEGER NOT NULL,
    boot_id     TEXT    NOT NULL,
    expires_us  INTEGER NOT NULL,
    ttl_us      INTEGER NOT NULL,
    beat        INTEGER NOT NULL,
    since_us    INTEGER NOT NULL,
    host        TEXT    NOT NULL,
    pid         INTEGER NOT NULL,
    version     TEXT    NOT NULL,
    pulse       TEXT    NOT NULL,
    pulse_inode TEXT    NOT NULL,
    ended       TEXT    NOT NULL,
    PRIMARY KEY (namespace, name)
) WITHOUT ROWID"""

# Retention deletes leases, and people do. The token must be remembered all the same.
_CREATE_MEMORY = """
CREATE TRIGGER IF NOT EXISTS fencepost_lease_deleted AFTER DELETE ON fencepost_lease
BEGIN
    UPDATE fencepost_file SET token = max(token, OLD.token) WHERE id = 1;
END"""

# Who took a lease away from whom, and why.
_CREATE_BREAK = """
CREATE TABLE IF NOT EXISTS fencepost_break (
    id        INTEGER PRIMARY KEY,
    namespace TEXT    NOT NULL,
    name      TEXT    NOT NULL,
    token     INTEGER NOT NULL,
    new_token INTEGER NOT NULL,
    holder    TEXT    NOT NULL,
    operator  TEXT    NOT NULL,
    reason    TEXT    NOT NULL,
    at_us     INTEGER NOT NULL
)"""

# Above this no token was ever issued whose grant a power cut may have forgotten.
CREATE_RESERVE = """
CREATE TABLE IF NOT EXISTS fencepost_reserve (
    id      INTEGER PRIMARY KEY CHECK (id = 1),
    ceiling INTEGER NOT NULL
)"""

CREATE = (_CREATE_FILE, _CREATE_LEASE, _CREATE_MEMORY, _CREATE_BREAK, CREATE_RESERVE)

_KNOWN = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'fencepost_reserve'"

_FIND_FILE = "SELECT schema, boot_id, time_namespace FROM fencepost_file WHERE id = 1"

# A file whose row was lost begins with the tokens that its leases still have.
_OWN = """
INSERT INTO fencepost_file (id, schema, token, boot_id, time_namespace)
VALUES (1, :schema, (SELECT coalesce(max(token), 0) FROM fencepost_lease), :era, :time_namespace)
    ON CONFLICT (id) DO UPDATE
   SET boot_id = excluded.boot_id, time_namespace = excluded.time_namespace"""

# In another boot there may have been a power cut, and grants that were not on the disk yet. Their
# tokens were below the ceiling: from here on all are above it. Whoever cannot tell one boot from
# another reserves nothing, and may be alive: what it holds is left alone.
_REACH_CEILING = """
UPDATE fencepost_lease
   SET token = (SELECT ceiling FROM fencepost_reserve WHERE id = 1)
 WHERE token < (SELECT ceiling FROM fencepost_reserve WHERE id = 1)
   AND :era <> '' AND boot_id <> :era AND (boot_id <> '' OR held = 0)"""

_REMEMBER_CEILING = """
UPDATE fencepost_file
   SET token = max(token, coalesce((SELECT ceiling FROM fencepost_reserve WHERE id = 1), 0))
 WHERE id = 1"""


def is_ready(db: Connection, *, era: str, time_namespace: str) -> bool:
    """Say whether the file can be used as it is; raise if it cannot be used here at all."""
    if db.execute(_KNOWN).fetchone() is None:
        return False
    found = db.execute(_FIND_FILE).fetchone()
    if found is None:
        return False
    schema, boot_id, namespace = found
    if schema > SCHEMA:
        raise Misuse(
            f"this file was written by a newer fencepost (schema {schema}, this one knows "
            f"{SCHEMA}): upgrade this installation"
        )
    if boot_id == era and namespace != time_namespace:
        raise Misuse(
            f"this file is in use by processes of another time namespace ({namespace}, here "
            f"{time_namespace}): their clocks disagree, so they cannot share it"
        )
    return bool(boot_id == era)


def prepare(db: Connection, *, era: str, time_namespace: str) -> None:
    """Create what is missing, and make this boot's clock the file's own."""
    for statement in CREATE:
        db.execute(statement)
    db.execute(_OWN, {"schema": SCHEMA, "era": era, "time_namespace": time_namespace})
    db.execute(_REACH_CEILING, {"era": era})
    db.execute(_REMEMBER_CEILING)
