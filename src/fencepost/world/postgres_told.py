"""What PostgreSQL says, as an answer to the only question that counts: whether it happened.

An ERROR means that the transaction is rolled back: it did not. A FATAL, or silence, in reply to
something that changes rows means that nobody knows.
"""

from __future__ import annotations

from fencepost.errors import (
    FencepostError,
    Misuse,
    OutcomeUnknown,
    StoreUnavailable,
    StoreUnfit,
)

# Of a transaction that lost against another one: asked again, it may well succeed.
CONFLICTS = frozenset({"40001", "40P01"})
# What ends a session: a shutdown, a crash elsewhere, a start or a standby that follows, a timeout.
ENDS = frozenset({"57P01", "57P02", "57P03", "57P05", "25P03", "25P04", "57P04"})
MISSING = frozenset({"42P01", "42703", "3F000", "42883", "42704"})

_REMEDIES = {
    "25006": "is read-only (is it a standby?): name its primary in the URL",
    "53100": "has no room left on its disk: free some space",
    "53200": "has run out of memory",
    "53300": "has no connection left to give: raise max_connections or use fewer processes",
    "55P03": "keeps a row locked for somebody else for too long",
    "57014": "was too slow and gave up on the statement",
    "57P03": "is starting up or shutting down",
}


class Refusal(Exception):
    """The server's own error, for those who ask what it was. It never leaves the stores."""

    def __init__(self, code: str, said: str, *, fatal: bool = False) -> None:
        super().__init__(said)
        self.code, self.said, self.fatal = code, said, fatal


def told(  # noqa: PLR0911 -- a table of codes
    refusal: Refusal, *, where: str, schema: str, changes: bool
) -> FencepostError:
    """Return what a server's error means to whoever asked for something."""
    code, said = refusal.code, refusal.said
    if code in ENDS or refusal.fatal:
        if changes:
            return OutcomeUnknown(f"PostgreSQL at {where} ended the session meanwhile: {said}")
        return StoreUnavailable(f"PostgreSQL at {where} ended the session: {said}")
    if code in _REMEDIES:
        return StoreUnavailable(f"PostgreSQL at {where} {_REMEDIES[code]} ({said})")
    if code == "42501":
        return StoreUnfit(
            f"PostgreSQL at {where} does not allow it: {said}; have the owner of schema "
            f"{schema!r} run 'fencepost migrate', and grant USAGE on the schema and SELECT, "
            "INSERT, UPDATE, DELETE on its fencepost_ tables"
        )
    if code in MISSING:
        return StoreUnfit(
            f"PostgreSQL at {where} lacks what fencepost needs in schema {schema!r}: {said}; "
            "run 'fencepost migrate'"
        )
    if code[:2] in ("22", "23"):
        return Misuse(f"PostgreSQL at {where} refused what was to be written: {said}")
    return StoreUnavailable(f"PostgreSQL at {where} answered with {code}: {said}")


def told_of_connecting(said: str, *, where: str) -> FencepostError:
    """Return why no session could be had: nothing was asked of anybody yet."""
    said = " ".join(said.split()) or "it did not answer in time"
    # libpq hands on the words of the server, not their code.
    if "password" in said or "authentication failed" in said or "pg_hba" in said:
        return StoreUnfit(
            f"PostgreSQL at {where} does not let this user in: check the user and password in the "
            "URL, and the server's pg_hba.conf"
        )
    if 'role "' in said and "does not exist" in said:
        return StoreUnfit(
            f"PostgreSQL at {where} knows no such user: check the URL ({_tail(said)})"
        )
    if 'database "' in said and "does not exist" in said:
        return StoreUnfit(f"PostgreSQL at {where} has no such database: create it or check the URL")
    if "session is read-only" in said or "hot standby" in said:
        return StoreUnavailable(
            f"PostgreSQL at {where} is read-only (is it a standby?): name its primary in the URL"
        )
    if "too many clients" in said or "remaining connection slots" in said:
        return StoreUnavailable(f"PostgreSQL at {where} {_REMEDIES['53300']}")
    return StoreUnavailable(f"PostgreSQL at {where} cannot be reached: {_tail(said)}")


def _tail(said: str) -> str:
    """Return the last thing that was said, which is why; what comes before is where."""
    return said.rsplit("failed: ", 1)[-1].removeprefix("FATAL: ").strip()
