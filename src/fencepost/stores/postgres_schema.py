"""The tables of PostgreSQL are brought up to date by numbered steps, one process at a time.

Several parts (leases, runs) live in one schema and count their steps apart. A step is never changed
once it was released: what it made is somebody's table.
"""

from __future__ import annotations

from fencepost.errors import StoreUnfit
from fencepost.world.postgres import (
    PATIENCE,
    Postgres,
    Refusal,
    Statement,
    ends_after,
    read_address,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from fencepost.world.postgres import Session

_CREATE_SCHEMA = "CREATE SCHEMA IF NOT EXISTS {schema}"

_CREATE_VERSIONS = """
CREATE TABLE IF NOT EXISTS {schema}.fencepost_schema (
    part    text    PRIMARY KEY,
    version integer NOT NULL
)"""

# A lease, kept for ever: a released one is a tombstone that carries the last token and nonce. Its
# key is a hash, because an index entry is shorter than a name may be. Half of each page is left
# free, so that a lease that changes hands all day stays on its page.
_CREATE_LEASE = """
CREATE TABLE IF NOT EXISTS {schema}.fencepost_lease (
    key         bytea   PRIMARY KEY,
    namespace   text    NOT NULL,
    name        text    NOT NULL,
    token       bigint  NOT NULL,
    nonce       text    NOT NULL,
    held        boolean NOT NULL,
    expires_us  bigint  NOT NULL,
    ttl_us      bigint  NOT NULL,
    beat        bigint  NOT NULL DEFAULT 0,
    since_us    bigint  NOT NULL,
    host        text    NOT NULL DEFAULT '',
    pid         bigint  NOT NULL DEFAULT 0,
    version     text    NOT NULL DEFAULT '',
    ended       text    NOT NULL DEFAULT '',
    pulse       bigint  NOT NULL DEFAULT 0,
    pulse_nonce text    NOT NULL DEFAULT '',
    server_us   bigint  NOT NULL DEFAULT 0,
    grace_us    bigint  NOT NULL DEFAULT 0
) WITH (fillfactor = 50)"""

_CREATE_BY_NAMESPACE = """
CREATE INDEX IF NOT EXISTS fencepost_lease_by_namespace ON {schema}.fencepost_lease (namespace)"""

# Who took a lease away from whom, and why.
_CREATE_BREAK = """
CREATE TABLE IF NOT EXISTS {schema}.fencepost_break (
    id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    namespace text   NOT NULL,
    name      text   NOT NULL,
    token     bigint NOT NULL,
    new_token bigint NOT NULL,
    holder    text   NOT NULL,
    operator  text   NOT NULL,
    reason    text   NOT NULL,
    at_us     bigint NOT NULL
)"""

LEASES = "leases"
LEASE_STEPS: tuple[tuple[str, ...], ...] = ((_CREATE_LEASE, _CREATE_BY_NAMESPACE, _CREATE_BREAK),)

_FIND_VERSION = Statement(
    "SELECT version FROM {schema}.fencepost_schema WHERE part = :part", prepared=False
)
_FIND_SCHEMA = Statement("SELECT 1 FROM pg_namespace WHERE nspname = :schema", prepared=False)
# Held to the end of the transaction: the others wait, and then find everything done.
_ONE_AT_A_TIME = Statement(
    "SELECT pg_advisory_xact_lock(hashtextextended('fencepost migrate ' || :schema, 0))",
    prepared=False,
)
_SET_VERSION = Statement(
    """
INSERT INTO {schema}.fencepost_schema AS known (part, version) VALUES (:part, :version)
    ON CONFLICT (part) DO UPDATE SET version = excluded.version""",
    prepared=False,
)
_BEGIN, _COMMIT, _ROLLBACK = (
    Statement(text, prepared=False) for text in ("BEGIN", "COMMIT", "ROLLBACK")
)
_NOT_THERE = ("42P01", "3F000")


def statements(schema: str, part: str, steps: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return what an operator may run by hand instead, for a (quoted) schema."""
    made = [_CREATE_SCHEMA, _CREATE_VERSIONS, *(text for step in steps for text in step)]
    known = (
        f"INSERT INTO {{schema}}.fencepost_schema (part, version) VALUES ('{part}', {len(steps)}) "
        f"ON CONFLICT (part) DO UPDATE SET version = {len(steps)}"
    )
    return tuple(text.replace("{schema}", schema) for text in (*made, known))


def prepare(address: str, made: Sequence[str]) -> None:
    """Run statements that make tables, in one transaction."""
    db = Postgres(read_address(address))
    try:
        db.batch([(Statement(text, prepared=False), ()) for text in made])
    finally:
        db.close()


def bring_up_to_date(
    session: Session, schema: str, part: str, steps: Sequence[Sequence[str]]
) -> None:
    """Make what is missing of one part, unless it is all there or newer than this version."""
    end = ends_after(PATIENCE * 4)  # others may be at it
    if _version(session, part, end) == len(steps):
        return
    session.ask(_BEGIN, end=end)
    finished = False
    try:
        session.ask(_ONE_AT_A_TIME, (schema,), end=end)
        if not session.ask(_FIND_SCHEMA, (schema,), end=end).rows:
            session.ask(Statement(_CREATE_SCHEMA, prepared=False), end=end)
        session.ask(Statement(_CREATE_VERSIONS, prepared=False), end=end)
        found = session.ask(_FIND_VERSION, (part,), end=end).rows
        done = _checked(found[0][0] if found else 0, len(steps))
        for step in steps[done:]:
            for text in step:
                session.ask(Statement(text, prepared=False), end=end)
        session.ask(_SET_VERSION, (part, len(steps)), end=end)
        session.ask(_COMMIT, end=end)
        finished = True
    finally:
        if not finished and not session.broken:
            session.ask(_ROLLBACK, end=end)


def _version(session: Session, part: str, end: float) -> int:
    try:
        rows = session.ask(_FIND_VERSION, (part,), end=end).rows
    except Refusal as refusal:
        if refusal.code in _NOT_THERE:
            return 0
        raise
    return rows[0][0] if rows else 0


def _checked(found: int, known: int) -> int:
    if found > known:
        raise StoreUnfit(
            f"this database was prepared by a newer fencepost (schema {found}, this one knows "
            f"{known}): upgrade this installation"
        )
    return found
