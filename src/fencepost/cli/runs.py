"""``fencepost runs`` shows the newest runs; ``cancel`` ends one of them."""

from __future__ import annotations

import time

from fencepost.cli.asking import asked
from fencepost.cli.main import FINE, REFUSED, say
from fencepost.cli.reading import job_called, ledger_at, say_there_is_none
from fencepost.cli.showing import brief, print_json, print_table, when
from fencepost.errors import Misuse, UnknownRun
from fencepost.model.duration import shown
from fencepost.model.run import State, public
from fencepost.model.slot import parsed

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

    from fencepost.model.run import RunRecord

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

_RUNS = ("RUN", "STATE", "WHY", "STARTED", "TOOK", "ATTEMPT", "LOSSES", "HOLDER")
# Reasons to which an error adds all that there is to say.
_SAID_BY_ERROR = ("", "error", "timeout", "not_started", "cancelled")


def register(subparsers: Subparsers) -> None:
    """Add the verbs ``runs`` and ``cancel``."""
    parser = subparsers.add_parser("runs", help="show the newest runs, of one job or of all")
    parser.add_argument("job", metavar="JOB", nargs="?")
    parser.add_argument("--limit", type=int, default=30, metavar="N", help="at most N (30)")
    parser.add_argument(
        "--state",
        action="append",
        default=[],
        metavar="STATE",
        help="only those that are in it, such as failed; may be given more than once",
    )
    parser.set_defaults(run=runs)
    parser = subparsers.add_parser("cancel", help="cancel a run, or ask it to end if it runs")
    parser.add_argument("id", metavar="RUN", help="such as billing@2026-01-20T02:00:00Z")
    parser.add_argument("--force", action="store_true", help="end it now and take its token away")
    parser.add_argument("--reason", default="", help="the next person will want to know")
    parser.set_defaults(run=cancel)


def runs(args: argparse.Namespace) -> int:
    """Print the newest runs."""
    limit, states = counted(args.limit), [_state(word) for word in args.state]
    with ledger_at(args) as ledger:
        if ledger is None and args.job is None:
            say_there_is_none(args, document=[])
            return FINE
        job = None if args.job is None else job_called(args.job, ledger).job
        assert ledger is not None, "where there is a job there is a ledger"
        found = asked(ledger.runs(job, limit=limit, states=states))
    if args.json:
        print_json([public(run) for run in found])
    elif found:
        now = time.time()
        print_table(_RUNS, [_run_row(run, now=now) for run in found], args)
    elif not args.quiet:
        of_job = "" if job is None else f" of job {job!r}"
        which = f" that is {' or '.join(states)}" if states else ""
        print(f"there is no run{of_job}{which} yet")
    return FINE


def cancel(args: argparse.Namespace) -> int:
    """Cancel a run, or ask it to end, and print what is true now."""
    from fencepost.holding import operator_here

    key = parsed(args.id)
    operator = operator_here() + (f": {args.reason}" if args.reason.strip() else "")
    with ledger_at(args) as ledger:
        before = None if ledger is None else asked(ledger.find(key))
        if ledger is None or before is None:
            raise UnknownRun(str(key))
        run = asked(ledger.cancel(key, force=args.force, operator=operator))
    if run.state.terminal and run.state is not State.CANCELLED:
        ended = when(run.ended_at, now=time.time())
        say(f"run {str(key)!r} was not cancelled: it is {run.state.value} since {ended}")
        return REFUSED
    if args.json:
        print_json(public(run))
    elif not args.quiet:
        print(_cancelled(run, before))
    return FINE


def why(run: RunRecord) -> str:
    """Return why a run is as it is, as far as its record tells."""
    if run.error and run.reason in _SAID_BY_ERROR:
        return brief(run.error)
    return brief(f"{run.reason}: {run.error}") if run.error else run.reason


def _cancelled(run: RunRecord, before: RunRecord) -> str:
    if before.state is State.CANCELLED:
        return f"run {str(run.key)!r} was cancelled before; nothing changed"
    if run.state is State.CANCELLED:
        return f"run {str(run.key)!r} is cancelled"
    return (
        f"run {str(run.key)!r} is asked to end: {run.holder} hears of it with its next beat; "
        "--force takes the run away at once"
    )


def _run_row(run: RunRecord, *, now: float) -> tuple[str, ...]:
    took = (run.ended_at or now) - run.started_at
    return (
        str(run.key),
        run.state.value,
        why(run),
        when(run.started_at, now=now),
        shown(max(0.0, took)) if run.started_at else "",
        str(run.attempt) if run.starts else "",
        str(run.losses) if run.losses else "",
        str(run.holder) if run.holder.host else "",
    )


def counted(limit: int) -> int:
    """Return how many are wanted, or refuse a number that makes no sense."""
    if limit < 1:
        raise Misuse(f"limit is {limit}: it must be at least 1")
    return limit


def _state(word: str) -> State:
    try:
        return State(word.lower())
    except ValueError:
        known = ", ".join(state.value for state in State)
        raise Misuse(f"state is {word!r}: it must be one of {known}") from None
