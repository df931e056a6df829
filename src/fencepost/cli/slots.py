"""``fencepost slots`` says what became of every slot of a job: runs and ranges, newest first."""

from __future__ import annotations

import time

from fencepost.cli.asking import asked
from fencepost.cli.main import FINE
from fencepost.cli.reading import job_called, ledger_at
from fencepost.cli.runs import counted, why
from fencepost.cli.showing import print_json, print_table, when
from fencepost.model.named import NamedTuple
from fencepost.model.run import public
from fencepost.model.schedule import EveryAfter
from fencepost.model.slot import instant, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from fencepost.ledger.planning import Slots, SpanRecord
    from fencepost.model.definition import JobRecord
    from fencepost.model.run import RunRecord

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

_HEADINGS = ("SLOT", "OUTCOME", "WHY", "BLOCKED BY", "ENDED")
_FOR_EVER = 2**62


class Range(NamedTuple):
    """Slots that were decided at once, and how many of them have no run of their own."""

    record: SpanRecord
    slots: int | None


def register(subparsers: Subparsers) -> None:
    """Add the verb ``slots``."""
    parser = subparsers.add_parser("slots", help="show what became of the slots of a job")
    parser.add_argument("job", metavar="JOB")
    parser.add_argument("--since", metavar="INSTANT", help="only from this one on")
    parser.add_argument("--until", metavar="INSTANT", help="only before this one")
    parser.add_argument("--limit", type=int, default=30, metavar="N", help="at most N lines (30)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the newest slots of a job, one line for each run or range."""
    limit = counted(args.limit)
    start = 0 if args.since is None else instant(args.since)
    end = _FOR_EVER if args.until is None else instant(args.until)
    with ledger_at(args) as ledger:
        job = job_called(args.job, ledger)
        assert ledger is not None, "where there is a job there is a ledger"
        asked_for = limit
        while True:
            found = asked(ledger.planner.slots(job.job, start=start, end=end, limit=asked_for))
            entries = merged(job, found)[:limit]
            if len(entries) == limit or max(len(found.runs), len(found.spans)) < asked_for:
                break
            asked_for *= 4  # there were manual runs and reruns in between
    if args.json:
        print_json([_document(entry) for entry in entries])
    elif entries:
        now = time.time()
        print_table(_HEADINGS, [_row(entry, now=now) for entry in entries], args)
    elif not args.quiet:
        print(f"no slot of job {job.job!r} is on record yet")
    return FINE


def merged(job: JobRecord, found: Slots) -> list[RunRecord | Range]:
    """Return the run that counts for each slot, and the ranges, newest first.

    A manual run is no slot's. A row beats a range: a slot that was made up is not counted in it.
    """
    newest: dict[int, RunRecord] = {}
    for run in found.runs:
        if not run.key.manual:
            newest[run.key.slot] = run  # by rerun, so the last one stays
    entries: list[tuple[int, RunRecord | Range]] = [*newest.items()]
    entries += [
        (record.span.last, Range(record, _count(job, record, newest))) for record in found.spans
    ]
    entries.sort(key=lambda entry: entry[0], reverse=True)
    return [entry for _, entry in entries]


def _count(job: JobRecord, record: SpanRecord, runs: dict[int, RunRecord]) -> int | None:
    """Return how many slots a range stands for; None if its schedule is no longer known."""
    schedule, span = job.schedule, record.span
    if span.first == span.last:
        return 1
    old = span.first <= job.effective_from or span.reason == "schedule_changed"
    if schedule is None or isinstance(schedule, EveryAfter) or old:
        return None
    return sum(slot not in runs for slot in schedule.between(span.first, span.last + 1))


def _row(entry: RunRecord | Range, *, now: float) -> tuple[str, ...]:
    if not isinstance(entry, Range):
        slot, ended = shown(entry.key.slot), when(entry.ended_at, now=now)
        return slot, entry.state.value, why(entry), entry.blocker, ended
    first, last, state, reason, into = entry.record.span
    slots = shown(first) if first == last else f"{shown(first)} … {shown(last)}"
    if entry.slots is not None and first != last:
        slots += f" ({entry.slots})"
    words = f"{reason} into {into}" if into else reason
    return slots, state.value, words, "", when(entry.record.at, now=now)


def _document(entry: RunRecord | Range) -> dict[str, Any]:
    if not isinstance(entry, Range):
        return public(entry)
    first, last, state, reason, into = entry.record.span
    return {
        "first": shown(first),
        "last": shown(last),
        "count": entry.slots,
        "state": state.value,
        "reason": reason,
        "into": into or None,
        "decided_at": entry.record.at,
    }
