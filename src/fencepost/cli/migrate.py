"""``fencepost migrate`` prepares a store, or an application's database for fences."""

from __future__ import annotations

from fencepost.cli.asking import asked, opened, url_of
from fencepost.cli.main import FINE
from fencepost.errors import BadUrl, StoreUnavailable
from fencepost.fence import CREATE_DONE, CREATE_GUARD
from fencepost.ledger.draft_ledger import DraftLedger
from fencepost.ledger.open import ledger_of
from fencepost.ledger.sqlite import SqliteLedger
from fencepost.stores.open import redacted
from fencepost.world.blocking import BlockingWorld

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

_SQLITE = "sqlite:///"


def register(subparsers: Subparsers) -> None:
    """Add the verb ``migrate``."""
    parser = subparsers.add_parser("migrate", help="create or upgrade the tables of a store")
    parser.add_argument(
        "--guard",
        metavar="URL",
        help="create the table for fences in an application's database instead",
    )
    parser.add_argument(
        "--accept-copy",
        action="store_true",
        help="let jobs run again on a ledger that was restored from an older copy",
    )
    parser.add_argument("--sql", action="store_true", help="print the statements, change nothing")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prepare a database, or print what would."""
    url = args.guard or url_of(args)
    if args.sql:
        for statement in _statements(url, guard=bool(args.guard)):
            text = statement.strip()
            if _is_mariadb(url) and ";" in text:  # its client would take the first one for the end
                print(f"DELIMITER //\n{text}//\nDELIMITER ;")
            else:
                print(text + ";")
        return FINE
    if args.guard:
        _create_guard(url)
    else:
        world = BlockingWorld()
        store = opened(args, world)
        asked(store.views())  # whoever opens a store brings it up to date
        if url.startswith(_SQLITE) or _is_postgres(url) or _is_mariadb(url):
            ledger = ledger_of(world, store)
            asked(ledger.jobs())  # and so does whoever asks a ledger
            if args.accept_copy and isinstance(ledger, SqliteLedger | DraftLedger):
                asked(ledger.accept_copy())
        asked(store.close())
    if not args.quiet:
        print(f"{redacted(url)} is ready")
    return FINE


def _statements(url: str, *, guard: bool) -> tuple[str, ...]:
    if _is_mariadb(url):
        return _mariadb_statements(guard=guard)
    if _is_postgres(url):
        return _postgres_statements(url, guard=guard)
    if guard:
        return (CREATE_GUARD, CREATE_DONE)
    if not url.startswith(_SQLITE):
        raise BadUrl(f"{redacted(url)!r} has no tables to create: only SQL databases do")
    from fencepost.ledger import sqlite_schema as runs
    from fencepost.stores import sqlite_schema as leases

    return leases.CREATE + runs.CREATE


def _create_guard(url: str) -> None:
    if _is_mariadb(url):
        from fencepost.stores.mariadb import open_mariadb

        server = open_mariadb(BlockingWorld(), url.partition("://")[2], namespace="default")
        asked(server.prepare(_statements(url, guard=True)))
        asked(server.close())
        return
    if _is_postgres(url):
        from fencepost.stores.postgres_schema import prepare

        prepare(url.partition("://")[2], _statements(url, guard=True))
        return
    if not url.startswith(_SQLITE) or url == _SQLITE:
        raise BadUrl(
            f"{redacted(url)!r} names no SQLite file: write sqlite:///relative.db or "
            "sqlite:////absolute/path.db, or apply the statement of 'migrate --guard URL --sql'"
        )
    import sqlite3
    from urllib.parse import unquote

    path = unquote(url.removeprefix(_SQLITE).partition("?")[0])
    try:
        database = sqlite3.connect(path)
    except sqlite3.Error as error:
        raise StoreUnavailable(f"{path!r} cannot be opened: {error}") from error
    try:
        with database:
            database.execute(CREATE_GUARD)
            database.execute(CREATE_DONE)
    except sqlite3.Error as error:
        raise StoreUnavailable(f"{path!r} cannot be prepared: {error}") from error
    finally:
        database.close()


def _is_mariadb(url: str) -> bool:
    return url.startswith(("mariadb://", "mysql://"))


def _is_postgres(url: str) -> bool:
    return url.startswith(("postgresql://", "postgres://"))


def _mariadb_statements(*, guard: bool) -> tuple[str, ...]:
    if guard:
        from fencepost import fence_mariadb

        return (fence_mariadb.CREATE_GUARD, fence_mariadb.CREATE_DONE)
    from fencepost.ledger import mariadb as runs
    from fencepost.stores import mariadb_rows as leases

    return leases.CREATE + runs.statements()


def _postgres_statements(url: str, *, guard: bool) -> tuple[str, ...]:
    if guard:
        from fencepost import fence_postgres

        return (fence_postgres.CREATE_GUARD, fence_postgres.CREATE_DONE)
    from fencepost.ledger import postgres_schema as runs
    from fencepost.stores import postgres_schema as leases
    from fencepost.world.postgres import read_address

    schema = read_address(url.partition("://")[2]).quoted_schema
    parts = ((leases.LEASES, leases.LEASE_STEPS), (runs.PART, runs.STEPS))
    made = (leases.statements(schema, part, steps) for part, steps in parts)
    return tuple(dict.fromkeys(statement for several in made for statement in several))
