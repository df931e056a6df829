"""What on a MariaDB or MySQL server would break the promises of a lease."""

from __future__ import annotations

from fencepost.errors import StoreUnfit
from fencepost.model.symptom import Severity, Symptom
from fencepost.stores.mariadb_rows import NOW_US

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from fencepost.world.mariadb import MariaServer

# A wall clock that is this far off is somebody's mistake, although no lease depends on ours.
_MUCH = 2.0

_CLOCK = f"SELECT {NOW_US}"

_SETTINGS = """
SHOW GLOBAL VARIABLES WHERE Variable_name IN
    ('read_only', 'super_read_only', 'innodb_read_only', 'binlog_format', 'log_bin',
     'innodb_flush_log_at_trx_commit', 'sync_binlog', 'wsrep_on', 'rpl_semi_sync_master_enabled',
     'rpl_semi_sync_source_enabled', 'innodb_rollback_on_timeout')"""

_ENGINES = """
SELECT table_name, engine, table_comment
  FROM information_schema.tables
 WHERE table_schema = DATABASE() AND table_name IN ('fencepost_lease', 'fencepost_break')"""

# To explain a statement takes the rights to run it, and changes nothing.
_NEEDED = {
    "UPDATE on fencepost_lease": "EXPLAIN UPDATE fencepost_lease SET beat = 0 WHERE 1 = 0",
    "INSERT on fencepost_lease": (
        "EXPLAIN INSERT INTO fencepost_lease SELECT * FROM fencepost_lease WHERE 1 = 0"
    ),
    "INSERT on fencepost_break": (
        "EXPLAIN INSERT INTO fencepost_break SELECT * FROM fencepost_break WHERE 1 = 0"
    ),
}

# Nothing is written to see whether there is room: on a full disk MariaDB 10.11 may abort while it
# takes back what it could not finish.

# What cannot write to its binary log waits, and everybody behind it. A user sees its own threads.
_STUCK = "Waiting for someone to free space"
_WAITING = """
SELECT COUNT(*), COALESCE(MAX(time), 0)
  FROM information_schema.processlist
 WHERE state = %(state)s"""

# At each commit; the other way is MariaDB's, and flushes once more than that.
_FLUSHED = ("1", "3")

_KNOWN, _TABLES = "fencepost 1", 2


def examined(server: MariaServer, wall: Callable[[], float]) -> list[Symptom]:
    """Look at the server's settings, tables and clock; change nothing."""
    before = wall()
    [clock] = server.run(_CLOCK, {})
    after = wall()
    [settings] = server.run(_SETTINGS, {})
    [engines] = server.run(_ENGINES, {})
    found = {str(name).lower(): str(value).upper() for name, value in settings.rows}
    return [
        *_tables(engines.rows),
        *(_rights(server) if len(engines.rows) == _TABLES and not _read_only(found) else ()),
        *_stuck(server),
        *_log(found),
        *_cluster(found),
        *_clock(clock.rows[0][0] / 1e6, before, after),
    ]


def _tables(rows: tuple[tuple[Any, ...], ...]) -> Iterator[Symptom]:
    if len(rows) < _TABLES:
        yield Symptom(
            "mariadb.tables",
            Severity.NOTE,
            "the tables of fencepost are not there yet",
            "the first use makes them, or 'fencepost migrate', by a user who may create tables",
        )
    for name, engine, comment in rows:
        if str(engine).lower() != "innodb":
            yield Symptom(
                "mariadb.engine",
                Severity.BREAKS,
                f"table {name} is kept by {engine}, which forgets what it acknowledged",
                f"ALTER TABLE {name} ENGINE = InnoDB",
            )
        if comment != _KNOWN:
            yield Symptom(
                "mariadb.schema",
                Severity.RISK,
                f"table {name} is marked {comment!r}, and this version knows {_KNOWN!r}",
                "use one version of fencepost on one database, the newest of them",
            )


def _rights(server: MariaServer) -> Iterator[Symptom]:
    lacking = [what for what, statement in _NEEDED.items() if not _may(server, statement)]
    if lacking:
        yield Symptom(
            "mariadb.privileges",
            Severity.BREAKS,
            f"user {server.address.user!r} lacks privileges: {', '.join(lacking)}",
            "GRANT SELECT, INSERT, UPDATE on the fencepost_ tables to it",
        )


def _may(server: MariaServer, statement: str) -> bool:
    try:
        server.run(statement, {})
    except StoreUnfit:
        return False
    return True


def _stuck(server: MariaServer) -> Iterator[Symptom]:
    [answer] = server.run(_WAITING, {"state": _STUCK})
    count, longest = answer.rows[0]
    if count:
        yield Symptom(
            "mariadb.stuck",
            Severity.BREAKS,
            f"the server has waited for {longest} s for room on a disk, that of its binary log or "
            "of its data: no commit is answered",
            "free some space: it goes on by itself within a minute, and then does what it was "
            "asked meanwhile",
        )


def _log(found: dict[str, str]) -> Iterator[Symptom]:
    flush = found.get("innodb_flush_log_at_trx_commit", "1")
    if flush not in _FLUSHED:
        yield Symptom(
            "mariadb.flush",
            Severity.RISK,
            f"innodb_flush_log_at_trx_commit is {flush}: a grant that was acknowledged may be "
            "forgotten in a crash of the server or of its machine",
            "set innodb_flush_log_at_trx_commit = 1",
        )
    logging = found.get("log_bin") in ("ON", "1")
    if logging and found.get("binlog_format") == "STATEMENT":
        yield Symptom(
            "mariadb.binlog",
            Severity.BREAKS,
            "binlog_format is STATEMENT: the server refuses every change of a lease",
            "set binlog_format to MIXED or ROW",
        )
    sync = found.get("sync_binlog", "1")
    if logging and sync != "1":
        yield Symptom(
            "mariadb.sync_binlog",
            Severity.RISK,
            f"sync_binlog is {sync}: after a power cut the server takes back what its binary log "
            "lacks, which may be a grant that was acknowledged, and replicas may differ from it",
            "set sync_binlog = 1",
        )
    if _read_only(found):
        yield Symptom(
            "mariadb.read_only",
            Severity.BREAKS,
            f"{_read_only(found)} is on: this is a replica, or was made one",
            "give the URL of the primary",
        )


def _read_only(found: dict[str, str]) -> str:
    """Return the setting that keeps everybody from writing, if there is one."""
    names = ("read_only", "super_read_only", "innodb_read_only")
    return next((name for name in names if found.get(name) in ("ON", "1")), "")


def _cluster(found: dict[str, str]) -> Iterator[Symptom]:
    if found.get("wsrep_on") in ("ON", "1"):
        yield Symptom(
            "mariadb.cluster",
            Severity.RISK,
            "the server is a node of a Galera cluster: each node judges by its own clock",
            "send all instances to one node, and keep the clocks of all nodes together",
        )
    semi = ("rpl_semi_sync_master_enabled", "rpl_semi_sync_source_enabled")
    if found.get("log_bin") in ("ON", "1") and not any(found.get(name) == "ON" for name in semi):
        yield Symptom(
            "mariadb.replicas",
            Severity.NOTE,
            "replication is not semi-synchronous: a replica that takes over may not know the "
            "newest leases",
            "fence your writes, or let the primary wait for a replica",
        )


def _clock(theirs: float, before: float, after: float) -> Iterator[Symptom]:
    ahead = theirs - after if theirs > after else min(theirs - before, 0.0)
    if abs(ahead) > _MUCH:
        yield Symptom(
            "mariadb.clock",
            Severity.RISK,
            f"the server's clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} "
            "this machine's: one of them will be set, and a server's clock that is set forward "
            "ends leases early",
            "keep both clocks with NTP",
        )
