"""``fencepost list`` shows the jobs that a ledger knows; ``resume`` lets one run again."""

from __future__ import annotations

import json
import time

from fencepost.cli.asking import asked
from fencepost.cli.main import FINE
from fencepost.cli.reading import job_called, ledger_at, say_there_is_none
from fencepost.cli.showing import plain, print_json, print_table, when
from fencepost.model.run import public

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from fencepost.ledger.api import JobRecord
    from fencepost.model.run import RunRecord

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

_HEADINGS = ("JOB", "SCHEDULE", "OVERLAP", "LAST RUN", "STATE", "QUARANTINED", "PAUSED")


def register(subparsers: Subparsers) -> None:
    """Add the verbs ``list`` and ``resume``."""
    parser = subparsers.add_parser("list", help="show the jobs that the ledger knows")
    parser.set_defaults(run=list_)
    parser = subparsers.add_parser("resume", help="release a job from quarantine")
    parser.add_argument("job", metavar="JOB")
    parser.set_defaults(run=resume)


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


def resume(args: argparse.Namespace) -> int:
    """Release a job from quarantine."""
    with ledger_at(args) as ledger:
        job = job_called(args.job, ledger)
        assert ledger is not None, "where there is a job there is a ledger"
        lifted = asked(ledger.lift(job.job))
    if args.json:
        print_json({"job": job.job, "resumed": lifted, "quarantined_by": job.quarantined or None})
    elif lifted and not args.quiet:
        print(f"job {job.job!r} is out of quarantine: its next slot runs")
    elif not args.quiet:
        print(f"job {job.job!r} was not in quarantine; nothing changed")
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
        f"by {plain(job.quarantined)}" if job.quarantined else "",
        plain(job.paused),
    )
