"""``fencepost list`` shows the jobs that a ledger knows, and how each stands."""

from __future__ import annotations

import json
import time

from fencepost.cli.asking import asked
from fencepost.cli.main import FINE
from fencepost.cli.reading import ledger_at, say_there_is_none
from fencepost.cli.showing import brief, plain, print_json, print_table, when
from fencepost.model.run import public
from fencepost.model.slot import shown as instant

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from fencepost.model.definition import JobRecord
    from fencepost.model.run import RunRecord

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

_HEADINGS = (
    *("JOB", "SCHEDULE", "OVERLAP", "LAST RUN", "STATE", "NEXT DUE"),
    *("QUARANTINED", "PAUSED", "ORPHANED", "RETIRED"),
)


def register(subparsers: Subparsers) -> None:
    """Add the verb ``list``."""
    parser = subparsers.add_parser("list", help="show the jobs that the ledger knows")
    parser.set_defaults(run=list_)


def list_(args: argparse.Namespace) -> int:
    """Print each job with its last run."""
    with ledger_at(args) as ledger:
        if ledger is None:
            say_there_is_none(args, document=[])
            return FINE
        jobs = [(job, asked(ledger.runs(job.job, limit=1))) for job in asked(ledger.jobs())]
    now = time.time()
    if args.json:
        print_json([described(job) | {"last_run": _last(last)} for job, last in jobs])
    elif jobs:
        rows = [_row(job, last[0] if last else None, now=now) for job, last in jobs]
        print_table(_HEADINGS, rows, args)
    elif not args.quiet:
        print("the ledger knows no job yet")
    return FINE


def described(job: JobRecord) -> dict[str, Any]:
    """Return what programs may know of a job."""
    definition = json.loads(job.definition)
    return {
        "job": job.job,
        "schedule": definition.get("schedule"),
        "overlap": definition.get("overlap"),
        "quarantined": job.quarantined or None,
        "paused": job.paused or None,
        "paused_until": instant(int(job.paused_until)) if job.paused_until else None,
        "orphaned_at": job.orphaned_at or None,
        "retired": job.retired or None,
        "next_due": None if job.next_due is None else instant(int(job.next_due)),
        "epoch": job.epoch or None,
        "stored": job.stored,
        "definition": definition,
    }


def _last(found: list[RunRecord]) -> dict[str, Any] | None:
    return public(found[0]) if found else None


def _row(job: JobRecord, last: RunRecord | None, *, now: float) -> tuple[str, ...]:
    facts = described(job)
    return (
        job.job,
        facts["schedule"] or "",
        facts["overlap"] or "",
        "never" if last is None else when(last.started_at or last.created_at, now=now),
        "" if last is None else last.state.value,
        next_due(job, now=now),
        f"by {plain(job.quarantined)}" if job.quarantined else "",
        paused(job),
        when(job.orphaned_at, now=now),
        brief(job.retired),
    )


def next_due(job: JobRecord, *, now: float) -> str:
    """Return when a job is due next; nothing if that is in nobody's hands."""
    if job.next_due is None or job.retired or job.barred:
        return ""
    return when(max(job.next_due, job.paused_until), now=now)


def paused(job: JobRecord) -> str:
    """Return why a job is paused, and until when."""
    until = f" until {instant(int(job.paused_until))}" if job.paused_until else ""
    return f"{brief(job.paused)}{until}" if job.paused else ""
