"""``fencepost backfill`` makes up slots of the past: here, or by whichever instance knows the job.

How far it has come is in the ledger. Whoever stops it and says the same again goes on from there.
"""

from __future__ import annotations

import shlex
import sys

from fencepost.cli.declared import (
    add_source,
    done,
    face_at,
    fencepost_of,
    has_source,
    scheduling_of,
)
from fencepost.cli.instances import standing
from fencepost.cli.main import FINE, WRONG, say
from fencepost.cli.showing import print_json
from fencepost.errors import Misuse
from fencepost.model.slot import shown
from fencepost.world.flow import finish

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from fencepost.ledger.planning import Lane
    from fencepost.model.slot import RunKey
    from fencepost.scheduling import Progress

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

_BAR = 30
_INTERRUPTED = 130


def register(subparsers: Subparsers) -> None:
    """Add the verb ``backfill``."""
    parser = subparsers.add_parser("backfill", help="make up slots of the past")
    add = parser.add_argument
    add("job", metavar="JOB", nargs="?")
    add(
        "start",
        metavar="START",
        nargs="?",
        help="from this instant on, such as 2026-01-20T00:00:00Z",
    )
    add("end", metavar="END", nargs="?", help="and before this one")
    add_source(parser)
    add(
        "--existing",
        choices=("skip", "failed", "all"),
        default="skip",
        help="slots that have a run: leave them, repeat what failed, repeat all (skip)",
    )
    add("--newest-first", action="store_true", help="from the end to the start")
    add("--dry-run", action="store_true", help="say which would run, and no more")
    add("--detach", action="store_true", help="leave it to the instances, and do not wait")
    add("--stop", type=int, metavar="NUMBER", help="begin nothing more of the backfill NUMBER")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make up slots; say how to go on if it is interrupted."""
    if args.stop is not None:
        return _stop(args)
    if args.end is None:
        raise Misuse("what is to be made up: give a JOB, a START and an END")
    bar = _Bar(args)
    try:
        answer = _asked(args, bar)
    except KeyboardInterrupt:
        bar.clear()
        say(
            f"stopped after {bar.done} of {bar.total} slots: the same command goes on from there, "
            "and so does every instance that knows the job"
        )
        return _INTERRUPTED
    bar.clear()
    if isinstance(answer, list):
        return _would_run(answer, args)
    return _ended(answer, bar, args)


def _stop(args: argparse.Namespace) -> int:
    if args.job is not None:
        raise Misuse("--stop goes with the number of a backfill alone: leave out the rest")
    with face_at(args) as fp:
        lane = fp.stop_backfill(args.stop)
    if not args.quiet:
        print(f"backfill {lane.number} of {lane.job} has ended: {lane.stopped or 'all was done'}")
    return FINE


def _asked(args: argparse.Namespace, bar: _Bar) -> list[RunKey] | Lane:
    wait = not (args.detach or args.dry_run)

    def work(fp: Any) -> Any:
        return fp.backfill(
            args.job,
            args.start,
            args.end,
            existing=args.existing,
            order="newest" if args.newest_first else "oldest",
            dry_run=args.dry_run,
            wait=wait,
            progress=bar.draw if wait else None,
        )

    answer: list[RunKey] | Lane
    if has_source(args):
        answer = done(fencepost_of(args), work)
        return answer
    with face_at(args) as fp:
        now = finish(scheduling_of(fp).now())
        if wait and not any(standing(one, now=now) == "alive" for one in fp.instances()):
            raise Misuse(
                "no instance is there to make it up: name the jobs as module:fp or a file, so that "
                "it is done here, or say --detach to leave it to those that come"
            )
        answer = work(fp)
    return answer


def _would_run(keys: list[RunKey], args: argparse.Namespace) -> int:
    if args.json:
        print_json([str(key) for key in keys])
        return FINE
    for key in keys:
        print(key)
    if not args.quiet:
        print(f"{len(keys)} slots would run; nothing was changed")
    return FINE


def _ended(lane: Lane, bar: _Bar, args: argparse.Namespace) -> int:
    failed = sum(count for word, count in bar.outcomes.items() if word not in _FINE)
    if args.json:
        print_json(
            {
                "number": lane.number,
                "job": lane.job,
                "start": shown(lane.start),
                "until": shown(lane.until),
                "ended": bool(lane.ended_at),
                "stopped": lane.stopped or None,
                "slots": bar.total or None,
                "outcomes_here": bar.outcomes,
            }
        )
    elif lane.stopped:
        say(f"the backfill of {lane.job!r} was stopped: {lane.stopped}")
    elif not args.quiet:
        print(_told(lane, bar))
    return WRONG if failed or lane.stopped else FINE


_FINE = frozenset({"succeeded", "already_done", "skipped"})


def _told(lane: Lane, bar: _Bar) -> str:
    span = f"{lane.job} from {shown(lane.start)} to {shown(lane.until)}"
    if not lane.ended_at:
        return (
            f"{span} is left to the instances that know the job; "
            f"`fencepost backfill --stop {lane.number}` stops it"
        )
    here = ", ".join(f"{count} {word}" for word, count in sorted(bar.outcomes.items()))
    return f"{span}: {bar.total} slots looked at; run here: {here or 'none'}"


class _Bar:
    """How far it is, on a terminal; and what was run here."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.done = self.total = 0
        self.outcomes: dict[str, int] = {}
        self._draws = sys.stderr.isatty() and not (args.quiet or args.json)
        self._words = shlex.quote(args.job)

    def draw(self, progress: Progress) -> None:
        """Show a step."""
        self.done, self.total = progress.done, progress.total
        if progress.outcome is not None:
            status = progress.outcome.status
            self.outcomes[status] = self.outcomes.get(status, 0) + 1
        if self._draws:
            full = _BAR * self.done // max(1, self.total)
            bar = "█" * full + "░" * (_BAR - full)
            at = f"{bar} {self.done:,} of {self.total:,} slots of {self._words}"
            print(f"\r{at}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Leave the line as it was."""
        if self._draws:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
