"""How a verb asks a ledger that may not be there: to look at it must not bring it into being."""

from __future__ import annotations

import os
from contextlib import contextmanager

from fencepost.cli.asking import asked, opened, url_of
from fencepost.cli.showing import print_json
from fencepost.errors import StoreUnavailable, UnknownJob
from fencepost.ledger.open import ledger_of
from fencepost.stores.open import redacted
from fencepost.world.blocking import BlockingWorld

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from fencepost.ledger.api import Ledger
    from fencepost.model.definition import JobRecord
    from fencepost.stores.api import LeaseStore

_KNOWN = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'fencepost_run'"


@contextmanager
def ledger_at(args: argparse.Namespace) -> Iterator[Ledger | None]:
    """Open the ledger that ``--url`` names, for as long as it takes; None if there is none yet."""
    world = BlockingWorld()
    store = opened(args, world)
    if not _has_ledger(store):
        yield None
        return
    try:
        yield ledger_of(world, store)
    finally:
        asked(store.close())


def say_there_is_none(args: argparse.Namespace, *, document: object) -> None:
    """Answer for a ledger that is not there, which is nothing wrong."""
    if args.json:
        print_json(document)
    elif not args.quiet:
        print(f"no job has run here yet: {redacted(url_of(args))} has no ledger")


def job_called(name: str, ledger: Ledger | None) -> JobRecord:
    """Return the job with that name, or say which there are."""
    jobs = [] if ledger is None else asked(ledger.jobs())
    for job in jobs:
        if job.job == name:
            return job
    raise UnknownJob(name, known=[job.job for job in jobs])


def _has_ledger(store: LeaseStore) -> bool:
    """Say whether the store has a ledger already, without changing anything."""
    path = getattr(getattr(store, "file", None), "path", None)
    if path is None:
        return True  # what is not a file cannot be left behind
    if not os.path.exists(path):
        if not os.path.isdir(os.path.dirname(path)):
            raise StoreUnavailable(f"{path!r} cannot be opened: does its folder exist?")
        return False
    import sqlite3
    from urllib.parse import quote

    try:
        database = sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True)
        try:
            return database.execute(_KNOWN).fetchone() is not None
        finally:
            database.close()
    except sqlite3.Error:
        return True  # whatever is wrong with it, the store has the better words
