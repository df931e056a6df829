"""``fencepost simulate`` runs the production flows through storms of faults, one for each seed.

There are six: of leases, of whole runs, of a run's end that races with those who cancel it, of
callers whose clocks are wrong, of clusters that serve schedules, and of deploys whose instances
restart in any order.
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
    # Some seeds of one simulation: of what, on which store, the first, and how many.
    Stretch = tuple[str, str, int, int]
    # How many events there were, and which seeds broke which promise first.
    Found = tuple[Stretch, int, list[tuple[int, Violation]]]

SIMULATIONS = ("leases", "runs", "races", "callers", "clusters", "deploys")
_STRETCH = 100
_BAR = 30


def register(subparsers: Subparsers) -> None:
    """Add the verb ``simulate``."""
    parser = subparsers.add_parser(
        "simulate", help="storms of faults in virtual time, checked against every promise"
    )
    add = parser.add_argument
    add("--of", choices=(*SIMULATIONS, "all"), default="all", help="which simulation (all)")
    add("--seeds", type=_positive, default=1000, metavar="N", help="how many of each (1000)")
    add("--first", type=int, default=0, metavar="SEED", help="the first of them (0)")
    add("--store", choices=("memory", "sqlite"), default="memory", help="which store serves")
    add("--jobs", type=_positive, default=2, metavar="J", help="how many processes (2)")
    add("--history", action="store_true", help="print all that happens, as JSON lines with --json")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the seeds; return 1 if one of them broke a promise."""
    args.of = SIMULATIONS if args.of == "all" else (args.of,)
    if args.history:
        return _tell(args)
    from time import monotonic  # with the simulator: not before it is asked for

    began = monotonic()
    done = 0
    events = dict.fromkeys(args.of, 0)
    violations: dict[str, list[tuple[int, Violation]]] = {of: [] for of in args.of}
    draws = sys.stderr.isatty() and not (args.quiet or args.json)
    for (of, _, _, seeds), events_seen, found in _search(args):
        done, events[of] = done + seeds, events[of] + events_seen
        violations[of] += found
        if draws:
            _draw(done, args.seeds * len(args.of), sum(map(len, violations.values())))
    if draws:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    for found in violations.values():
        found.sort(key=lambda one: (one[0], one[1].position))
    seconds = monotonic() - began
    failed = any(violations.values())
    if args.json:
        _print_json(args, events, seconds, violations)
    elif failed or not args.quiet:
        for of, found in violations.items():
            if found:
                _explain(args, of, *found[0], others=found[1:])
        broken, seen = sum(map(len, violations.values())), sum(events.values())
        print(
            f"{args.seeds} seeds of {', '.join(args.of)}: {broken} violations, {seen:,} events, "
            f"{seconds:.1f} s"
        )
    return 1 if failed else 0


def _search(args: argparse.Namespace) -> Iterator[Found]:
    stretches = [
        (of, args.store, seed, min(_STRETCH, args.first + args.seeds - seed))
        for of in args.of
        for seed in range(args.first, args.first + args.seeds, _STRETCH)
    ]
    jobs = min(args.jobs, len(stretches))
    if jobs == 1:
        yield from map(_try, stretches)
        return
    import multiprocessing

    with multiprocessing.Pool(jobs) as pool:
        yield from pool.imap_unordered(_try, stretches)


def _try(stretch: Stretch) -> Found:
    """Run some seeds, perhaps in a process of their own."""
    of, store, first, count = stretch
    events, violations = 0, []
    for seed in range(first, first + count):
        history = _history(of, seed, store)
        events += len(history)
        broken = _check(of, history)
        if broken:
            violations.append((seed, broken[0]))
    return stretch, events, violations


def _history(of: str, seed: int, store: str) -> list[Event]:
    if of == "leases":
        from fencepost.testing.simulator.cluster import MEMORY, SQLITE, simulate

        return simulate(seed, parts=SQLITE if store == "sqlite" else MEMORY)
    if of in ("clusters", "deploys"):
        from fencepost.testing.simulator import deploys, serving

        served = serving.SQLITE if store == "sqlite" else serving.MEMORY
        serve = serving.simulate_clusters if of == "clusters" else deploys.simulate_deploys
        return serve(seed, parts=served)
    from fencepost.testing.simulator import runs

    parts = runs.SQLITE if store == "sqlite" else runs.MEMORY
    simulated = {
        "runs": runs.simulate_runs,
        "races": runs.simulate_race,
        "callers": runs.simulate_callers,
    }
    return simulated[of](seed, parts=parts)


def _check(of: str, history: list[Event]) -> list[Violation]:
    if of == "leases":
        from fencepost.testing.checker import check

        return check(history)
    if of in ("clusters", "deploys"):
        from fencepost.testing.cluster_checker import check_cluster

        return check_cluster(history)
    from fencepost.testing.run_checker import check_runs

    return check_runs(history)


def _tell(args: argparse.Namespace) -> int:
    """Print whole histories, and what is wrong with them."""
    from fencepost.testing.history import table, to_lines

    failed = False
    for of in args.of:
        for seed in range(args.first, args.first + args.seeds):
            history = _history(of, seed, args.store)
            text = to_lines(history) if args.json else [f"seed {seed} of {of}", table(history)]
            print("\n".join(text))
            for violation in _check(of, history):
                failed = True
                out = sys.stderr if args.json else sys.stdout
                print(f"seed {seed} of {of}: {violation}", file=out)
    return 1 if failed else 0


def _explain(
    args: argparse.Namespace,
    of: str,
    seed: int,
    violation: Violation,
    *,
    others: list[tuple[int, Violation]],
) -> None:
    from fencepost.testing.checker import relevant
    from fencepost.testing.history import table

    print(f"seed {seed} of {of}: {violation}\n")
    print(table(relevant(_history(of, seed, args.store), violation)))
    print(f"\nreplay: {_replay(args, of, seed)}")
    if others:
        print("also violated by: " + ", ".join(str(other) for other, _ in others[:20]))


def _print_json(
    args: argparse.Namespace,
    events: dict[str, int],
    seconds: float,
    violations: dict[str, list[tuple[int, Violation]]],
) -> None:
    import json

    answer = {
        "first": args.first,
        "seeds": args.seeds,
        "store": args.store,
        "events": events,
        "seconds": round(seconds, 3),
        "violations": [
            {
                "of": of,
                "seed": seed,
                "rule": one.rule,
                "says": one.says,
                "replay": _replay(args, of, seed),
            }
            for of, found in violations.items()
            for seed, one in found
        ],
    }
    print(json.dumps(answer))


def _replay(args: argparse.Namespace, of: str, seed: int) -> str:
    return f"fencepost simulate --of {of} --first {seed} --seeds 1 --store {args.store} --history"


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
