"""``fencepost demo`` shows on real processes what is promised, beside a lock that promises less.

First a lock, a crash and a zombie; then a cluster: a job that is due every second, instances of
which one is killed and one is paused, and the same job behind a plain lock with a time to live.
"""

from __future__ import annotations

import tempfile

from fencepost.cli import demo_cluster, demo_lock
from fencepost.cli.main import FINE, WRONG
from fencepost.cli.showing import bold

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001


def register(subparsers: Subparsers) -> None:
    """Add the verb ``demo``."""
    parser = subparsers.add_parser("demo", help="crashes and zombies, on real processes (30 s)")
    parser.add_argument(
        "--act",
        type=int,
        choices=(1, 2),
        help="only one of its acts: 1 a lock and its fence, 2 a cluster and its schedule",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Tell both stories; return 0 only if they ended as promised."""
    kept = True
    with tempfile.TemporaryDirectory(prefix="fencepost-demo-") as folder:
        if args.act != 2:
            print(bold("A lock, a crash and a zombie", args))
            kept = demo_lock.act(folder) and kept
            print()
        if args.act != 1:
            print(bold("A cluster without a leader, beside a plain lock", args))
            kept = demo_cluster.act(folder, args) and kept
    return FINE if kept else WRONG
