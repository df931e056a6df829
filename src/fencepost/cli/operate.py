"""``fencepost pause``, ``resume`` and ``retire``: what an operator may say about a job.

The ledger is told; every instance hears of it with its next look. What runs goes on.
"""

from __future__ import annotations

from fencepost.cli.asking import asked
from fencepost.cli.main import FINE, REFUSED, say
from fencepost.cli.reading import job_called, ledger_at
from fencepost.cli.showing import plain, print_json, when
from fencepost.errors import BadSlot, Misuse
from fencepost.holding import operator_here
from fencepost.model.slot import instant, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

    from fencepost.model.definition import JobRecord

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001


def register(subparsers: Subparsers) -> None:
    """Add the verbs ``pause``, ``resume`` and ``retire``."""
    parser = subparsers.add_parser("pause", help="let the slots of a job pass, each on record")
    parser.add_argument("job", metavar="JOB")
    parser.add_argument("--until", metavar="INSTANT", help="go on by itself from then on")
    parser.add_argument("--reason", default="", help="the next person will want to know")
    parser.set_defaults(run=pause)
    parser = subparsers.add_parser("resume", help="end a pause, or release a job from quarantine")
    parser.add_argument("job", metavar="JOB")
    parser.set_defaults(run=resume)
    parser = subparsers.add_parser("retire", help="end a job for good; its name stays taken")
    parser.add_argument("job", metavar="JOB")
    parser.add_argument("--reason", required=True, help="the next person will want to know")
    parser.set_defaults(run=retire)


def pause(args: argparse.Namespace) -> int:
    """Pause a job."""
    until = 0.0 if args.until is None else float(instant(args.until))
    reason = f"{args.reason.strip()} ({operator_here()})" if args.reason.strip() else ""
    with ledger_at(args) as ledger:
        job = job_called(args.job, ledger)
        assert ledger is not None, "where there is a job there is a ledger"
        if job.retired:
            return _refuse_retired(job)
        now = asked(ledger.now())
        if args.until is not None and until <= now:
            raise BadSlot(f"until is {args.until!r}, which is over: give an instant to come")
        reason = reason or f"by {operator_here()}"
        paused = asked(ledger.planner.pause(job.job, reason=reason, until=until))
    if args.json:
        print_json(_document(paused))
    elif not args.quiet:
        how_long = f"until {when(until, now=now)}" if until else "until somebody resumes it"
        print(f"job {job.job!r} is paused {how_long}: its slots are recorded as skipped")
    return FINE


def resume(args: argparse.Namespace) -> int:
    """Let a job run again: out of a pause, out of quarantine, or both."""
    with ledger_at(args) as ledger:
        job = job_called(args.job, ledger)
        assert ledger is not None, "where there is a job there is a ledger"
        if job.retired:
            return _refuse_retired(job)
        resumed = asked(ledger.planner.resume(job.job))
    if args.json:
        document = {"job": job.job, "resumed": bool(job.paused or job.quarantined)}
        document |= {"quarantined_by": job.quarantined or None, "paused": job.paused or None}
        print_json(document)
    elif not args.quiet:
        for line in _resumed(job, resumed):
            print(line)
    return FINE


def _resumed(before: JobRecord, job: JobRecord) -> list[str]:
    name = f"job {job.job!r}"
    lines = []
    if before.quarantined:
        lines.append(f"{name} is out of quarantine: its next slot runs")
    if before.paused:
        due = "" if job.next_due is None else f", next at {shown(int(job.next_due))}"
        why = plain(before.paused)
        lines.append(f"{name} is no longer paused ({why}){due}; what passed does not fire")
    return lines or [f"{name} was neither paused nor in quarantine; nothing changed"]


def retire(args: argparse.Namespace) -> int:
    """End a job for good."""
    if not args.reason.strip():
        raise Misuse("a reason is needed to retire a job: the next person will want to know")
    with ledger_at(args) as ledger:
        job = job_called(args.job, ledger)
        assert ledger is not None, "where there is a job there is a ledger"
        if job.retired:
            return _refuse_retired(job)
        reason = f"{args.reason.strip()} ({operator_here()})"
        retired = asked(ledger.planner.retire(job.job, reason=reason))
    if args.json:
        print_json(_document(retired))
    elif not args.quiet:
        print(f"job {job.job!r} is retired: nothing of it begins any more, its name stays taken")
    return FINE


def _refuse_retired(job: JobRecord) -> int:
    say(f"job {job.job!r} is retired ({plain(job.retired)}), and that is for good")
    return REFUSED


def _document(job: JobRecord) -> dict[str, object]:
    return {
        "job": job.job,
        "paused": job.paused or None,
        "paused_until": shown(int(job.paused_until)) if job.paused_until else None,
        "quarantined": job.quarantined or None,
        "retired": job.retired or None,
        "next_due": None if job.next_due is None else shown(int(job.next_due)),
    }
