"""What on a PostgreSQL server would break a promise, and what to do about it."""

from __future__ import annotations

from fencepost.errors import FencepostError, StoreUnavailable, StoreUnfit
from fencepost.model.symptom import Severity, Symptom
from fencepost.world.postgres import Statement

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from fencepost.world.postgres import Postgres

# The server's settings, its state, its clock, and what this user may do: all in one statement.
_LOOK = Statement(
    """
SELECT name, setting FROM pg_settings
 WHERE name IN ('server_version', 'fsync', 'full_page_writes', 'max_connections',
                'superuser_reserved_connections', 'synchronous_standby_names',
                'default_transaction_read_only')
 UNION ALL SELECT 'reset ' || name, reset_val FROM pg_settings
 WHERE name IN ('idle_session_timeout', 'synchronous_commit')
 UNION ALL SELECT 'in recovery', pg_is_in_recovery()::text
 UNION ALL SELECT 'connections', (SELECT count(*) FROM pg_stat_activity
                                   WHERE backend_type = 'client backend')::text
 UNION ALL SELECT 'standbys', (SELECT count(*) FROM pg_stat_replication)::text
 UNION ALL SELECT 'now', date_part('epoch', clock_timestamp())::text
 UNION ALL SELECT 'may ' || privilege,
                  has_table_privilege(format('%I.%I', :schema::text, 'fencepost_lease'),
                                      privilege)::text
             FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE']) AS privilege
 UNION ALL SELECT 'may record breaks',
                  has_table_privilege(format('%I.%I', :schema::text, 'fencepost_break'),
                                      'INSERT')::text""",
    prepared=False,
)
# A client cannot ask how much room a disk has, but it can write a little and see. A temporary table
# is gone with its transaction, files and all; and what is in it does not go through the log: a
# server that has no room for its log ends itself. Tables of this kind may have a disk of their own.
_HERE = Statement("SELECT set_config('temp_tablespaces', '', true)", prepared=False)
_WRITE = Statement(
    """
CREATE TEMPORARY TABLE fencepost_probe ON COMMIT DROP AS SELECT generate_series(1, 30000)""",
    prepared=False,
)
_MOST_CLOCK_DIFFERENCE = 5.0
_SPARE_CONNECTIONS = 10


def examined(db: Postgres, wall: Callable[[], float]) -> list[Symptom]:
    """Look at everything that the guarantees lean on; leave nothing behind."""
    before = wall()
    try:
        rows = db.ask(_LOOK, (db.address.schema,), changes=False).rows
    except FencepostError as error:
        return [
            Symptom(
                "postgres.unusable",
                Severity.BREAKS,
                str(error),
                "see what it says; until then nothing can be leased here",
            )
        ]
    found: dict[str, Any] = dict(rows)
    here = (before + wall()) / 2
    return [
        *_of_pooler(db),
        *_of_durability(found),
        *_of_privileges(found, db.address.schema),
        *_of_connections(found),
        *(() if _is_read_only(found) else _of_writes(db)),
        *_of_clock(found, here),
        *_of_timeouts(found),
    ]


def _of_pooler(db: Postgres) -> list[Symptom]:
    if db.direct is not False:
        return []
    return [
        Symptom(
            "postgres.pooler",
            Severity.NOTE,
            f"between here and {db.where} there is a connection pooler: a crashed holder's lease "
            "is free at the end of its ttl, and those who wait ask again and again",
            "connect to PostgreSQL itself to have deaths noticed within a second",
        )
    ]


def _of_durability(found: dict[str, Any]) -> list[Symptom]:
    symptoms = []
    if found["fsync"] == "off" or found["full_page_writes"] == "off":
        off = "fsync" if found["fsync"] == "off" else "full_page_writes"
        symptoms.append(
            Symptom(
                "postgres.fsync",
                Severity.BREAKS,
                f"{off} is off: a power cut may take back leases and tokens, or the whole database",
                f"set {off} = on and restart PostgreSQL",
            )
        )
    if found["reset synchronous_commit"] in ("off", "local"):
        symptoms.append(
            Symptom(
                "postgres.synchronous_commit",
                Severity.RISK,
                f"synchronous_commit is {found['reset synchronous_commit']!r} by default; our own "
                "sessions set it to on, your own transactions behind a fence do not",
                "set synchronous_commit = on for this role: ALTER ROLE … SET synchronous_commit",
            )
        )
    if _is_read_only(found):
        symptoms.append(
            Symptom(
                "postgres.read_only",
                Severity.BREAKS,
                "this server is read-only: it is a standby, or was made so",
                "name the primary in the URL",
            )
        )
    if int(found["standbys"]) and not found["synchronous_standby_names"]:
        symptoms.append(
            Symptom(
                "postgres.asynchronous_standby",
                Severity.RISK,
                f"{found['standbys']} standbys follow asynchronously: a fail-over may forget the "
                "newest leases, though their tokens still grow with the clock",
                "set synchronous_standby_names, or fence every effect",
            )
        )
    return symptoms


def _is_read_only(found: dict[str, Any]) -> bool:
    standby: bool = found["in recovery"] == "true"
    return standby or bool(found["default_transaction_read_only"] == "on")


def _of_writes(db: Postgres) -> list[Symptom]:
    try:
        db.batch([(_HERE, ()), (_WRITE, ())], changes=False)
    except StoreUnfit:
        return [
            Symptom(
                "postgres.untried",
                Severity.NOTE,
                "this user may not make temporary tables, so whether there is room on the disk was "
                "not tried",
                "watch the disk, or GRANT TEMPORARY on the database to it",
            )
        ]
    except StoreUnavailable as error:
        return [
            Symptom(
                "postgres.writes",
                Severity.BREAKS,
                f"1 MiB could not be written: {error}",
                "until it can be, leases are neither granted nor renewed here",
            )
        ]
    return []


def _of_privileges(found: dict[str, Any], schema: str) -> list[Symptom]:
    lacking = [what for what, has in found.items() if what.startswith("may ") and has != "true"]
    if not lacking:
        return []
    return [
        Symptom(
            "postgres.privileges",
            Severity.BREAKS,
            f"this user lacks privileges on the tables in schema {schema!r}: {', '.join(lacking)}",
            "GRANT SELECT, INSERT, UPDATE, DELETE on all fencepost_ tables to it",
        )
    ]


def _of_connections(found: dict[str, Any]) -> list[Symptom]:
    most = int(found["max_connections"]) - int(found["superuser_reserved_connections"])
    spare = most - int(found["connections"])
    if spare >= _SPARE_CONNECTIONS:
        return []
    return [
        Symptom(
            "postgres.connections",
            Severity.RISK,
            f"{found['connections']} of {most} connections are in use: whoever waits for a lease "
            "needs one, and so does each process",
            "raise max_connections, or put a pooler in between",
        )
    ]


def _of_clock(found: dict[str, Any], here: float) -> list[Symptom]:
    apart = float(found["now"]) - here
    if abs(apart) <= _MOST_CLOCK_DIFFERENCE:
        return []
    return [
        Symptom(
            "postgres.clock",
            Severity.NOTE,
            f"the server's clock is {abs(apart):.1f} s {'ahead of' if apart > 0 else 'behind'} "
            "this machine's: leases follow the server's, which is safe, but slots may look late",
            "let NTP set both clocks",
        )
    ]


def _of_timeouts(found: dict[str, Any]) -> list[Symptom]:
    symptoms = []
    if found.get("reset idle_session_timeout", "0") != "0":
        symptoms.append(
            Symptom(
                "postgres.idle_session_timeout",
                Severity.NOTE,
                f"idle_session_timeout is {found['reset idle_session_timeout']} ms by default; our "
                "own sessions switch it off",
                "nothing, unless a firewall or proxy cuts idle connections as well",
            )
        )
    return symptoms
