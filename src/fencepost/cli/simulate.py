"""``fencepost simulate`` runs the production flows through storms of faults, one for each seed.

A seed that breaks a promise is shown with what led to it, and with the command that replays it.
What is found does not depend on how many processes look for it.
"""

from __future__ import annotations

import argparse
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from fencepost.testing.checker import Violation
    from fencepost.testing.history import Event

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001
    # How many seeds, how many events, and which seeds broke which promise first.
    Found = tuple[int, int, list[tuple[int, Violation]]]

_STRETCH = 100
_BAR = 30


def register(subparsers: Subparsers) -> None:
    """Add the verb ``simulate``."""
    parser = subparsers.add_parser(
        "simulate", help="storms of faults in virtual time, checked against every promise"
    )
    add = parser.add_argument
    add("--seeds", type=_positive, default=1000, metavar="N", help="how many (1000)")
    add("--first", type=int, default=0, metavar="SEED", help="the first of them (0)")
    add("--store", choices=("memory", "sqlite"), default="memory", help="which store serves")
    add("--jobs", type=_positive, default=2, metavar="J", help="how many processes (2)")
    add("--history", action="store_true", help="print all that happens, as JSON lines with --json")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the seeds; return 1 if one of them broke a promise."""
    if args.history:
        return _tell(args)
    from time import monotonic  # with the simulator: not before it is asked for

    began = monotonic()
    seeds = events = 0
    violations: list[tuple[int, Violation]] = []
    draws = sys.stderr.isatty() and not (args.quiet or args.json)
    for found in _search(args):
        seeds, events = seeds + found[0], events + found[1]
        violations += found[2]
        if draws:
            _draw(seeds, args.seeds, len(violations))
    if draws:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    violations.sort(key=lambda one: (one[0], one[1].position))
    seconds = monotonic() - began
    if args.json:
        _print_json(args, events, seconds, violations)
    else:
        if violations:
            _explain(args, *violations[0], others=violations[1:])
        if violations or not args.quiet:
            print(
                f"{seeds} seeds, {len(violations)} violations, {events:,} events, {seconds:.1f} s"
            )
    return 1 if violations else 0


def _search(args: argparse.Namespace) -> Iterator[Found]:
    stretches = [
        (args.store, seed, min(_STRETCH, args.first + args.seeds - seed))
        for seed in range(args.first, args.first + args.seeds, _STRETCH)
    ]
    jobs = min(args.jobs, len(stretches))
    if jobs == 1:
        yield from map(_try, stretches)
        return
    import multiprocessing

    with multiprocessing.Pool(jobs) as pool:
        yield from pool.imap_unordered(_try, stretches)


def _try(stretch: tuple[str, int, int]) -> Found:
    """Run some seeds, perhaps in a process of their own."""
    from fencepost.testing.checker import check

    store, first, count = stretch
    events, violations = 0, []
    for seed in range(first, first + count):
        history = _history(seed, store)
        events += len(history)
        broken = check(history)
        if broken:
            violations.append((seed, broken[0]))
    return count, events, violations


def _history(seed: int, store: str) -> list[Event]:
    from fencepost.testing.simulator.cluster import MEMORY, SQLITE, simulate

    return simulate(seed, parts=SQLITE if store == "sqlite" else MEMORY)


def _tell(args: argparse.Namespace) -> int:
    """Print whole histories, and what is wrong with them."""
    from fencepost.testing.checker import check
    from fencepost.testing.history import table, to_lines

    failed = False
    for seed in range(args.first, args.first + args.seeds):
        history = _history(seed, args.store)
        print("\n".join(to_lines(history)) if args.json else f"seed {seed}\n{table(history)}")
        for violation in check(history):
            failed = True
            print(f"seed {seed}: {violation}", file=sys.stderr if args.json else sys.stdout)
    return 1 if failed else 0


def _explain(
    args: argparse.Namespace,
    seed: int,
    violation: Violation,
    *,
    others: list[tuple[int, Violation]],
) -> None:
    from fencepost.testing.checker import relevant
    from fencepost.testing.history import table

    print(f"seed {seed}: {violation}\n")
    print(table(relevant(_history(seed, args.store), violation)))
    print(f"\nreplay: {_replay(args, seed)}")
    if others:
        print("also violated by: " + ", ".join(str(other) for other, _ in others[:20]))


def _print_json(
    args: argparse.Namespace,
    events: int,
    seconds: float,
    violations: list[tuple[int, Violation]],
) -> None:
    import json

    answer = {
        "first": args.first,
        "seeds": args.seeds,
        "store": args.store,
        "events": events,
        "seconds": round(seconds, 3),
        "violations": [
            {"seed": seed, "rule": one.rule, "says": one.says, "replay": _replay(args, seed)}
            for seed, one in violations
        ],
    }
    print(json.dumps(answer))


def _replay(args: argparse.Namespace, seed: int) -> str:
    return f"fencepost simulate --first {seed} --seeds 1 --store {args.store} --history"


def _draw(done: int, of: int, violations: int) -> None:
    full = _BAR * done // of
    bar = "█" * full + "░" * (_BAR - full)
    print(
        f"\r{bar} {done:,} of {of:,} seeds, {violations} violations",
        end="",
        file=sys.stderr,
        flush=True,
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number
