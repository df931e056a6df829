"""``fencepost verify`` proves from the ledger that each slot ran once, or shows what says no.

It reads, and changes nothing. What it cannot know, such as history that was pruned, it says.
"""

from __future__ import annotations

import json
import time

from fencepost.cli.asking import asked, url_of
from fencepost.cli.main import FINE, WRONG
from fencepost.cli.reading import ledger_at, say_there_is_none
from fencepost.cli.showing import bold, plain, print_json
from fencepost.errors import Misuse
from fencepost.model.run import public
from fencepost.model.slot import shown
from fencepost.stores.open import redacted
from fencepost.testing.evidence import Evidence, Mark, Top, from_lines, grouped, to_lines
from fencepost.testing.ledger_checker import PROMISES, Proof, prove

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from fencepost.ledger.api import Ledger
    from fencepost.ledger.planning import SpanRecord
    from fencepost.model.run import RunEvent, RunRecord
    from fencepost.testing.ledger_checker import Counts, Finding

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

_FOR_EVER, _ALL = 2**62, 2**31


def register(subparsers: Subparsers) -> None:
    """Add the verb ``verify``."""
    parser = subparsers.add_parser("verify", help="prove that each slot ran once, or name the rows")
    add = parser.add_argument
    add("--history", metavar="FILE", help="read a history instead, as --export writes it")
    add("--export", metavar="FILE", help="write all that is on record as JSON lines, too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prove, and print what was proven; return 1 if something is broken."""
    if args.history is not None:
        lines = _read(args.history)
        if _is_simulated(lines):
            return _judge_events(lines, args)
        evidence, source = from_lines(lines), args.history
    else:
        with ledger_at(args) as ledger:
            if ledger is None:
                say_there_is_none(args, document={"ok": True, "counts": {}, "findings": []})
                return FINE
            evidence = asked(gathered(ledger))
        source = redacted(url_of(args))
    if args.export is not None:
        _write(args.export, evidence)
    proof = prove(evidence)
    if args.json:
        print_json(document_of(proof))
    else:
        for line in told(proof, source, evidence.at, args):
            print(line)
    return WRONG if proof.findings else FINE


async def gathered(ledger: Ledger) -> Evidence:
    """Read all that a ledger has on record, in an order in which what happens meanwhile fits."""
    planner = ledger.planner
    jobs = await ledger.jobs()  # and with them the watermarks: what they cover is there already
    lanes = await planner.lanes(active=False)
    runs: list[RunRecord] = []
    spans: list[SpanRecord] = []
    for job in jobs:
        found = await planner.slots(job.job, start=0, end=_FOR_EVER, limit=_ALL)
        runs += found.runs
        spans += found.spans
    known = {job.job for job in jobs}
    runs += [run for run in await ledger.runs(limit=_ALL) if run.key.job not in known]
    # Of a run that has ended, all that will ever be told of it was there before we asked.
    told = grouped(await planner.events())
    events: list[RunEvent] = []
    for place, run in enumerate(runs):
        if run.state.terminal:
            events += told.get(str(run.key), [])
        else:
            runs[place] = await _settled(ledger, run, events)
    later = await ledger.jobs()
    pruned = {job.job: job.pruned for job in later}
    leases = [Top(view.name, view.token) for view in await ledger.leases.views()]
    return Evidence(
        time.time(),
        tuple(job._replace(pruned=pruned.get(job.job, job.pruned)) for job in jobs),
        tuple(runs),
        tuple(spans),
        tuple(lanes),
        tuple(events),
        tuple(leases),
        tuple(Mark(job.job, job.watermark) for job in later),
    )


async def _settled(ledger: Ledger, run: RunRecord, events: list[RunEvent]) -> RunRecord:
    """Add the events of a run that lives; return it as it was when they were read."""
    while True:
        found = await ledger.events(run.key)
        again = None if run.state.terminal else await ledger.find(run.key)
        if again is None or _same(again, run):
            events += found
            return run
        run = again  # it went on while we read


def _same(one: RunRecord, other: RunRecord) -> bool:
    return (one.state, one.token, one.starts) == (other.state, other.token, other.starts)


# What to print.


def told(proof: Proof, source: str, at: float, args: argparse.Namespace) -> list[str]:
    """Return a proof for people."""
    counts = proof.counts
    lines = []
    if not args.quiet:
        lines += [
            bold(f"{plain(source)}, as of {shown(int(at))}", args),
            "  " + ", ".join(_counted(counts)),
        ]
        lines += [f"  {sentence}" for sentence in _verdicts(proof)]
        lines += [f"  not checkable  {plain(sentence)}" for sentence in proof.unknown]
    for finding in proof.findings:
        lines.append(bold(f"{'' if args.quiet else '  '}broken  {plain(str(finding))}", args))
        lines += [f"      {plain(row)}" for row in _rows(finding)]
    return lines


def _counted(counts: Counts) -> list[str]:
    told = [f"{number} {word}" for word, number in counts._asdict().items()]
    return [*told[:-2], f"{told[-2]} on {told[-1]}"]


def _verdicts(proof: Proof) -> list[str]:
    return [
        f"{'BROKEN' if promise in proof.broken else 'proven'}  {says}"
        for promise, says in PROMISES.items()
    ]


def _rows(finding: Finding) -> list[str]:
    rows = []
    for run in finding.runs:
        words = [f"run {run.key} {run.state.value}", f"({run.reason})" if run.reason else ""]
        if run.starts:
            words += [f"token {run.token} on {run.lease!r} by {run.holder}, starts {run.starts}"]
            words += [f"from {run.started_at:.6f}"]
        words += [f"to {run.ended_at:.6f}" if run.ended_at else "", f"trigger {run.trigger}"]
        rows.append(" ".join(filter(None, words)))
    for span in finding.spans:
        first, last, state, reason, into = span.span
        rows.append(
            f"range {span.job} {shown(first)} to {shown(last)} {state.value} ({reason})"
            + (f" into {into}" if into else "")
        )
    return rows


def document_of(proof: Proof) -> dict[str, Any]:
    """Return a proof for programs."""
    return {
        "ok": not proof.findings,
        "counts": proof.counts._asdict(),
        "promises": {promise: promise not in proof.broken for promise in PROMISES},
        "findings": [
            {
                "promise": finding.promise,
                "says": finding.says,
                "runs": [public(run) for run in finding.runs],
                "ranges": [
                    span.span._asdict() | {"job": span.job, "at": span.at} for span in finding.spans
                ],
            }
            for finding in proof.findings
        ],
        "not_checkable": list(proof.unknown),
    }


# Files.


def _read(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Misuse(f"{path!r} cannot be read: {error}") from error


def _write(path: str, evidence: Evidence) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in to_lines(evidence))
    except OSError as error:
        raise Misuse(f"{path!r} cannot be written: {error}") from error


def _is_simulated(lines: list[str]) -> bool:
    """Say whether a history is one of events, as ``simulate --history --json`` prints it."""
    first = next((line for line in lines if line.strip()), "{}")
    try:
        fields = json.loads(first)
    except ValueError:
        return False
    return isinstance(fields, dict) and "what" in fields and "kind" not in fields


def _judge_events(lines: list[str], args: argparse.Namespace) -> int:
    from fencepost.testing.history import from_lines as events_from
    from fencepost.testing.run_checker import check_runs

    events = events_from(lines)
    violations = check_runs(events)
    if args.json:
        found = [{"rule": one.rule, "says": one.says} for one in violations]
        print_json({"ok": not violations, "events": len(events), "violations": found})
    else:
        for violation in violations:
            print(plain(str(violation)))
        if not args.quiet:
            print(f"{len(events)} events, {len(violations)} violations")
    return WRONG if violations else FINE
