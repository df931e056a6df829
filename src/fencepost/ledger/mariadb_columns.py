"""The columns of the MariaDB ledger: what its tables are made of, and what statements write.

Names are bytes, because a collation would take some that differ for equal. A key has at most 3,072
bytes: what may be longer than that is found by a digest.
"""

from __future__ import annotations

from fencepost.model.run import TABLE, State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SPACE = "VARCHAR(100) CHARACTER SET ascii COLLATE ascii_bin NOT NULL"
WORD = "VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL"
JOB = "VARBINARY(1200) NOT NULL"
NAME = "VARBINARY(4000) NOT NULL"
TEXT = "LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
WORDS = f"{TEXT} NOT NULL"
TITLE = "VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL"
NUMBER, INSTANT, FLAG = "BIGINT NOT NULL", "DOUBLE NOT NULL", "TINYINT NOT NULL"

_KEY = {"job": JOB, "slot": NUMBER, "manual": NUMBER, "rerun": NUMBER}
RUN = {
    **_KEY,
    "state": WORD,
    "lock": NAME,
    "lease": NAME,
    "token": NUMBER,
    "nonce": "VARBINARY(255) NOT NULL",
    "host": TITLE,
    "pid": NUMBER,
    "version": TITLE,
    "reason": WORDS,
    "blocker": WORDS,
    "origin": WORDS,
    **dict.fromkeys(("created_at", "started_at", "ended_at", "not_before"), INSTANT),
    **dict.fromkeys(("beat_at", "cancel_at"), INSTANT),
    **dict.fromkeys(("starts", "losses", "releases", "streak", "strikes"), NUMBER),
    "solitary": FLAG,
    "checkpoint": TEXT,
    "done": "BIGINT",
    "total": "BIGINT",
    "result": TEXT,
    "error": TEXT,
    "saves": NUMBER,
    "epoch": NUMBER,
}
ITEM = {
    "scope": NAME,
    "item": NAME,
    "state": WORD,
    "token": NUMBER,
    "run": NAME,
    "call": NAME,
    "at": INSTANT,
    "error": TEXT,
}
EVENT = {
    **_KEY,
    "at": INSTANT,
    "what": WORD,
    "token": NUMBER,
    "holder": WORDS,
    "detail": WORDS,
}
COUNT = {
    **_KEY,
    "name": "VARBINARY(1000) NOT NULL",
    "source": "VARBINARY(255) NOT NULL",
    "value": NUMBER,
}
JOB_RECORD = {
    "job": JOB,
    "definition": WORDS,
    "quarantined": WORDS,
    "paused": WORDS,
    "spec": WORDS,
    "rules": WORDS,
    "template": WORDS,
    "payload": TEXT,
    "digest": "VARBINARY(255) NOT NULL DEFAULT ''",
    "build": "BIGINT NOT NULL DEFAULT 0",
    "epoch": "BIGINT NOT NULL DEFAULT 0",
    "effective_from": "DOUBLE NOT NULL DEFAULT 0",
    "watermark": "BIGINT NOT NULL DEFAULT 0",
    "next_due": "DOUBLE",
    "owed": "BIGINT NOT NULL DEFAULT 0",
    "paused_until": "DOUBLE NOT NULL DEFAULT 0",
    "retired": WORDS,
    "orphaned_at": "DOUBLE NOT NULL DEFAULT 0",
    "unknown_since": "DOUBLE NOT NULL DEFAULT 0",
    "pruned": "BIGINT NOT NULL DEFAULT -1",
    "stored": "TINYINT NOT NULL DEFAULT 0",
}
SPAN = {
    "job": JOB,
    "first": NUMBER,
    "last": NUMBER,
    "state": WORD,
    "reason": WORDS,
    "stands_in": WORDS,
    "at": INSTANT,
}
LANE = {
    "number": NUMBER,
    "job": JOB,
    **dict.fromkeys(("start", "until", "cursor"), NUMBER),
    "existing": WORD,
    "newest_first": FLAG,
    "max_active": NUMBER,
    "origin": WORDS,
    "spec": WORDS,
    **dict.fromkeys(("not_before", "ended_at", "created_at"), INSTANT),
    "operator": WORDS,
    "stopped": WORDS,
}
INSTANCE = {
    "name": "VARBINARY(1000) NOT NULL",
    "host": TITLE,
    "pid": NUMBER,
    "version": TITLE,
    "build": NUMBER,
    "tzdata": TITLE,
    **dict.fromkeys(("orphan_after", "started_at", "beat_at", "left_at"), INSTANT),
}
MEMBER = {"job": JOB, "instance": "VARBINARY(1000) NOT NULL", "digest": "VARBINARY(255) NOT NULL"}
COHORT = {
    "job": JOB,
    "digest": "VARBINARY(255) NOT NULL",
    "since": INSTANT,
    "seen_at": INSTANT,
    "build": NUMBER,
    "definition": WORDS,
}
LEASE = {
    "key": WORD,
    "name": "VARCHAR(1000) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL",
    "token": NUMBER,
    "nonce": WORD,
    "held": FLAG,
    **dict.fromkeys(("expires_us", "ttl_us", "since_us"), NUMBER),
    "host": TITLE,
    "pid": NUMBER,
    "version": TITLE,
    "ended": WORDS,
    **dict.fromkeys(("beat", "seen_token", "seen_beat"), NUMBER),
}
BREAK = {
    "name": LEASE["name"],
    "token": NUMBER,
    "new_token": NUMBER,
    "holder": WORDS,
    "operator": WORDS,
    "reason": WORDS,
}
SEEN = {"seen": NUMBER}  # which edition of a row was read
WAITING = (State.PENDING, State.WAITING_RETRY)


def one_of(column: str, states: Iterable[State]) -> str:
    """Return the condition that a run is in one of these states."""
    known = set(states)
    names = ", ".join(f"'{state.value}'" for state in State if state in known)
    return f"{column} IN ({names})"


def table(name: str, columns: Mapping[str, str], *more: str) -> str:
    """Return what makes a table of a namespace, if it is not there."""
    lines = [f"`{column}` {kind}" for column, kind in {"namespace": SPACE, **columns}.items()]
    body = ",\n    ".join([*lines, *more])
    return f"""
CREATE TABLE IF NOT EXISTS {name} (
    {body}
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC"""


# The names of the states of a run that has not ended: ``live`` is one of them, or NULL.
LIVE = one_of("live", TABLE)
