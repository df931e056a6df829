"""``fencepost next`` shows when a job is due: from the ledger, or for an expression yet to be used.

With ``--cron`` no store is asked, and JOB is only the name that ``H`` is chosen by.
"""

from __future__ import annotations

import json
import time
from datetime import datetime

from fencepost.cli.main import FINE, say
from fencepost.cli.showing import away, print_json, print_table
from fencepost.errors import BadSlot, Misuse
from fencepost.model.every import EveryAfter
from fencepost.model.named import NamedTuple
from fencepost.model.schedule import (
    described,
    doubtful,
    dst_note,
    schedule_from,
    schedule_of,
    upcoming,
)
from fencepost.model.slot import instant, shown
from fencepost.model.zone import zone_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from fencepost.model.definition import JobRecord
    from fencepost.model.schedule import Schedule

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

_MOST = 1000
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_CRON = ("tz", "second", "day_match", "dst_gap", "dst_fold")  # what only --cron can follow


class Asked(NamedTuple):
    """What to show the slots of, and from when on."""

    job: str | None
    schedule: Schedule
    after: float


def register(subparsers: Subparsers) -> None:
    """Add the verb ``next``."""
    parser = subparsers.add_parser("next", help="show the next slots of a job, or of an expression")
    parser.add_argument("job", metavar="JOB", nargs="?")
    parser.add_argument("-n", type=int, default=5, metavar="N", dest="count", help="how many (5)")
    parser.add_argument("--from", metavar="INSTANT", dest="after", help="later than this, not now")
    parser.add_argument("--cron", metavar="TEXT", help="of this expression; no store is asked")
    parser.add_argument("--every", metavar="DURATION", help="of this interval, such as 15m")
    parser.add_argument("--tz", metavar="ZONE", help="of --cron, such as Europe/Berlin (UTC)")
    parser.add_argument("--second", type=int, metavar="S", help="of --cron: the second (0)")
    parser.add_argument("--day-match", metavar="WORD", help="of --cron: or, and (or)")
    parser.add_argument("--dst-gap", metavar="WORD", help="of --cron: shift, skip (shift)")
    parser.add_argument("--dst-fold", metavar="WORD", help="of --cron: first, second, both (first)")
    parser.set_defaults(run=next_)


def next_(args: argparse.Namespace) -> int:
    """Print the next slots, in the zone of their schedule and in UTC."""
    if not 1 <= args.count <= _MOST:
        raise Misuse(f"-n is {args.count}: it must be between 1 and {_MOST}")
    now = time.time()
    asked = _asked(args, now=now if args.after is None else _instant(args.after))
    slots = upcoming(asked.schedule, after=asked.after, count=args.count)
    if args.json:
        print_json(_document(asked, slots, now=now))
        return FINE
    schedule, doubt = asked.schedule, doubtful(asked.schedule)
    if not args.quiet:
        print(f"{schedule}: {described(schedule)}")
        if isinstance(schedule, EveryAfter):
            print(f"if the last run ended at {shown(int(asked.after))}:")
    if slots:
        zone = getattr(schedule, "tz", "UTC")
        headings = (f"SLOT ({zone})", "" if zone == "UTC" else "UTC", "DUE", "NOTE")
        print_table(headings, [_row(schedule, slot, now=now) for slot in slots], args)
    elif not args.quiet:
        print(f"there is no slot after {shown(int(asked.after))}")
    if doubt is not None:
        say(f"warning: {doubt}")
    return FINE


def _asked(args: argparse.Namespace, *, now: float) -> Asked:
    words = {word: getattr(args, word) for word in _CRON if getattr(args, word) is not None}
    if args.cron is not None or args.every is not None:
        made = schedule_of(cron=args.cron, every=args.every, spread=args.job, **words)
        assert made is not None, "one of the two was given"
        return Asked(args.job, made, now)
    if words:
        given = ", ".join(f"--{word.replace('_', '-')}" for word in words)
        raise Misuse(f"{given} belongs to --cron: a job in the ledger has its own")
    if args.job is None:
        raise Misuse("give a JOB that the ledger knows, or --cron '0 2 * * *', or --every 15m")
    from fencepost.cli.asking import asked  # with stores, which an expression does not need
    from fencepost.cli.reading import job_called, ledger_at

    with ledger_at(args) as ledger:
        job = job_called(args.job, ledger)
        assert ledger is not None, "where there is a job there is a ledger"
        schedule = _schedule(job)
        if isinstance(schedule, EveryAfter) and args.after is None:
            last = asked(ledger.runs(job.job, limit=1))
            now = last[0].ended_at if last and last[0].ended_at else now
    return Asked(job.job, schedule, now)


def _schedule(job: JobRecord) -> Schedule:
    definition: dict[str, Any] = json.loads(job.definition)
    spec = job.spec or definition.get("spec")
    if isinstance(spec, str):
        return schedule_from(spec)
    if definition.get("schedule") is None:
        raise Misuse(f"job {job.job!r} has no schedule: whoever triggers it gives its slots")
    raise Misuse(
        f"the ledger has job {job.job!r} as {definition['schedule']!r}, in words only: an older "
        "version declared it; declare it with this one, or use --cron"
    )


def _instant(text: str) -> int:
    try:
        return instant(text)
    except BadSlot as error:
        raise Misuse(f"--from {str(error).removeprefix('slot ')}") from None


def _local(schedule: Schedule, slot: int) -> datetime:
    return datetime.fromtimestamp(slot, zone_of(getattr(schedule, "tz", "UTC")))


def _row(schedule: Schedule, slot: int, *, now: float) -> tuple[str, ...]:
    local = _local(schedule, slot)
    text = f"{_DAYS[local.weekday()]} {local.isoformat(sep=' ')}"
    utc = "" if getattr(schedule, "tz", "UTC") == "UTC" else shown(slot)
    return text, utc, away(slot, now=now), dst_note(schedule, slot) or ""


def _document(asked: Asked, slots: list[int], *, now: float) -> dict[str, Any]:
    schedule = asked.schedule
    return {
        "job": asked.job,
        "schedule": str(schedule),
        "described": described(schedule),
        "spec": schedule.spec,
        "tz": getattr(schedule, "tz", "UTC"),
        "doubt": doubtful(schedule),
        "after": shown(int(asked.after)),
        "slots": [
            {
                "slot": shown(slot),
                "local": _local(schedule, slot).isoformat(),
                "in": round(slot - now, 3),
                "note": dst_note(schedule, slot),
            }
            for slot in slots
        ],
    }
