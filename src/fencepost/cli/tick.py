"""``fencepost tick`` runs what is due now and ends; ``run JOB`` triggers one job here."""

from __future__ import annotations

from fencepost.cli.declared import add_source, done, fencepost_of
from fencepost.cli.main import FINE, REFUSED, WRONG
from fencepost.cli.showing import brief, print_json, print_table

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from typing import Any

    from fencepost.model.outcome import Outcome

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

_HEADINGS = ("RUN", "OUTCOME", "WHY", "ATTEMPT", "BLOCKED BY")
_WRONG = frozenset({"failed", "timed_out", "cancelled", "lost"})
_FIELDS = ("status", "reason", "run_id", "slot", "token", "holder", "error", "attempt", "result")


def register(subparsers: Subparsers) -> None:
    """Add the verbs ``tick`` and ``run``."""
    parser = subparsers.add_parser("tick", help="run what is due now, and end")
    add_source(parser)
    parser.add_argument(
        "--budget", metavar="DURATION", help="begin nothing after this long, such as 25s"
    )
    parser.add_argument("--most", type=int, metavar="N", help="run no more than N")
    parser.set_defaults(run=tick)
    parser = subparsers.add_parser("run", help="run a slot of a job here, once")
    parser.add_argument("job", metavar="JOB")
    add_source(parser)
    parser.add_argument(
        "--slot", metavar="INSTANT", help="which, such as 2026-01-20T02:00:00Z (the newest due)"
    )
    parser.add_argument("--manual", action="store_true", help="make a run of its own, of no slot")
    parser.add_argument(
        "--wait", metavar="DURATION", help="how long to wait for one that others have"
    )
    parser.set_defaults(run=run)


def tick(args: argparse.Namespace) -> int:
    """Run what is due; return 1 if any of it failed."""
    outcomes = done(fencepost_of(args), lambda fp: fp.tick(args.budget, most=args.most))
    if args.json:
        print_json([_document(outcome) for outcome in outcomes])
    elif outcomes:
        _print(outcomes, args)
    elif not args.quiet:
        print("nothing is due")
    return WRONG if any(map(_failed, outcomes)) else FINE


def run(args: argparse.Namespace) -> int:
    """Run one slot here; return 1 if it failed, 4 if it may not run."""
    outcome = done(
        fencepost_of(args),
        lambda fp: fp.trigger(args.job, args.slot, manual=args.manual, wait=args.wait),
    )
    if args.json:
        print_json(_document(outcome))
    elif not (args.quiet and outcome):
        _print([outcome], args)
    if _failed(outcome):
        return WRONG
    # A body that found nothing to do has run; whatever else was skipped was not let in.
    return REFUSED if outcome.status == "skipped" and not outcome.attempt else FINE


def _failed(outcome: Outcome) -> bool:
    """Say whether an attempt went wrong, even if another one is still to come."""
    return outcome.status in _WRONG or (outcome.error is not None and not outcome)


def _print(outcomes: Sequence[Outcome], args: argparse.Namespace) -> None:
    rows = [
        (
            outcome.run_id,
            outcome.status,
            brief(outcome.error) or outcome.reason,
            str(outcome.attempt or ""),
            outcome.blocker,
        )
        for outcome in outcomes
    ]
    print_table(_HEADINGS, rows, args)


def _document(outcome: Outcome) -> dict[str, Any]:
    return {name: getattr(outcome, name) or None for name in _FIELDS}
