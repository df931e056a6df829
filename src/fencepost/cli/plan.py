"""``fencepost plan`` shows what these definitions would change, and changes nothing."""

from __future__ import annotations

import time

from fencepost.cli.asking import asked
from fencepost.cli.declared import add_source, done, fencepost_of, scheduling_of, url_behind
from fencepost.cli.main import FINE, WRONG
from fencepost.cli.reading import ledger_at
from fencepost.cli.showing import bold, plain, print_json
from fencepost.model.difference import difference
from fencepost.model.run import State
from fencepost.model.slot import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from fencepost.model.definition import Definition
    from fencepost.model.difference import Changed, Difference, New

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

_MOST_WAITING = 10_000
_NAMED = 5


def register(subparsers: Subparsers) -> None:
    """Add the verb ``plan``."""
    parser = subparsers.add_parser("plan", help="show what a deploy of these jobs would change")
    add_source(parser)
    parser.add_argument("--check", action="store_true", help="exit code 1 if anything would change")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what would change."""
    found = _compared(args)
    if args.json:
        print_json(_document(found))
    else:
        for line in told(found, args):
            print(line)
    return WRONG if args.check and not found.empty else FINE


def _compared(args: argparse.Namespace) -> Difference:
    fp = fencepost_of(args)
    scheduling = scheduling_of(fp)
    build = scheduling.build
    declared: list[Definition] = [job.defined(build=build) for job in scheduling.working.registry]
    args.url, args.namespace = url_behind(fp), fp._holding.namespace  # noqa: SLF001 -- as declared
    done(fp, lambda _: None)
    with ledger_at(args) as ledger:
        if ledger is None:
            return difference([], declared, now=time.time())
        jobs = asked(ledger.jobs())
        live = asked(ledger.runs(states=[State.PENDING], limit=_MOST_WAITING))
    waiting = [run for run in live if run.fresh]
    return difference(jobs, declared, now=time.time(), waiting=waiting)


def told(found: Difference, args: argparse.Namespace) -> list[str]:
    """Return a difference for people."""
    lines: list[str] = []
    for job in found.new:
        lines += [bold(f"+ {job.job}", args), *_new(job)]
    for changed in found.changed:
        lines += [bold(f"~ {changed.job}", args), *_changed(changed)]
    for name, why in found.retired:
        lines.append(bold(f"! {name}", args))
        lines.append(f"    is retired ({plain(why)}): it is not brought back, give it another name")
    for name in found.missing:
        lines.append(bold(f"- {name}", args))
        lines.append("    is not declared here: an orphan in 15 min, unless another instance")
        lines.append(f"    knows it; `fencepost retire {name} --reason …` ends it for good")
    lines += [f"? {name}: {plain(doubt)}" for name, doubt in found.doubts]
    if not args.quiet:
        counts = (
            (len(found.new), "new"),
            (len(found.changed), "changed"),
            (len(found.unchanged), "unchanged"),
            (len(found.missing), "not declared here"),
        )
        told = ", ".join(f"{count} {word}" for count, word in counts)
        lines.append(f"{told}; nothing was changed")
    return lines


def _new(job: New) -> list[str]:
    lines = [f"    schedule  {plain(job.schedule)}"]
    if job.next:
        lines.append(f"    next      {_instants(job.next)}")
    if job.was:
        lines.append(f"    renamed   from {job.was}, which stands where it is and is retired")
    return lines


def _changed(job: Changed) -> list[str]:
    width = max((len(word.name) for word in job.words), default=0)
    lines = [
        f"    {word.name:<{width}}  {plain(word.was)} -> {plain(word.now)}" for word in job.words
    ]
    if job.before != job.after:
        lines.append(f"    next slots before  {_instants(job.before)}")
        lines.append(f"    next slots after   {_instants(job.after)}")
    if job.skipped:
        named = ", ".join(shown(slot) for slot in job.skipped[:_NAMED])
        more = len(job.skipped) - _NAMED
        lines.append(f"    would be skipped   {named}" + (f" and {more} more" if more > 0 else ""))
    return lines


def _instants(instants: Iterable[float]) -> str:
    return ", ".join(shown(int(at)) for at in instants) or "none"


def _document(found: Difference) -> dict[str, object]:
    return {
        "changes": not found.empty,
        "new": [
            {
                "job": job.job,
                "schedule": job.schedule,
                "next": [shown(int(at)) for at in job.next],
                "renamed_from": job.was or None,
            }
            for job in found.new
        ],
        "changed": [
            {
                "job": job.job,
                "words": {word.name: {"was": word.was, "now": word.now} for word in job.words},
                "next_before": [shown(int(at)) for at in job.before],
                "next_after": [shown(int(at)) for at in job.after],
                "would_be_skipped": [shown(slot) for slot in job.skipped],
            }
            for job in found.changed
        ],
        "unchanged": list(found.unchanged),
        "not_declared_here": list(found.missing),
        "retired": dict(found.retired),
        "doubtful": dict(found.doubts),
    }
