"""``fencepost instances`` shows which processes schedule here, and when each was last heard of."""

from __future__ import annotations

import time

from fencepost.cli.asking import asked
from fencepost.cli.main import FINE
from fencepost.cli.reading import ledger_at, say_there_is_none
from fencepost.cli.showing import away, print_json, print_table, when
from fencepost.model.cohort import GONE_AFTER

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

    from fencepost.ledger.planning import InstanceRecord

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

_HEADINGS = ("INSTANCE", "STATE", "HEARD OF", "STARTED", "VERSION", "BUILD", "TZDATA")
# An instance says that it lives every five seconds.
_SILENT_AFTER = 15.0


def register(subparsers: Subparsers) -> None:
    """Add the verb ``instances``."""
    parser = subparsers.add_parser("instances", help="show which processes schedule here")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the instances that were heard of lately."""
    with ledger_at(args) as ledger:
        if ledger is None:
            say_there_is_none(args, document=[])
            return FINE
        records = asked(ledger.planner.instances())
    now = time.time()
    if args.json:
        print_json([_document(record, now=now) for record in records])
    elif records:
        print_table(_HEADINGS, [_row(record, now=now) for record in records], args)
    elif not args.quiet:
        print("no instance was heard of lately: `fencepost up` starts one")
    return FINE


def standing(record: InstanceRecord, *, now: float) -> str:
    """Say how an instance is: alive, silent, gone, or ended on purpose."""
    if record.left_at:
        return "ended"
    silence = now - record.beat_at
    if silence >= GONE_AFTER:
        return "gone"
    return "silent" if silence >= _SILENT_AFTER else "alive"


def _row(record: InstanceRecord, *, now: float) -> tuple[str, ...]:
    instance = record.instance
    return (
        instance.name,
        standing(record, now=now),
        away(record.left_at or record.beat_at, now=now),
        when(record.started_at, now=now),
        instance.version,
        str(instance.build or ""),
        instance.tzdata,
    )


def _document(record: InstanceRecord, *, now: float) -> dict[str, object]:
    return record.instance._asdict() | {
        "state": standing(record, now=now),
        "started_at": record.started_at,
        "beat_at": record.beat_at,
        "left_at": record.left_at or None,
    }
