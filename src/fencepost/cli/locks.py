"""``fencepost locks`` shows what is held; ``fencepost lock break`` takes it away."""

from __future__ import annotations

import time

from fencepost.cli.asking import asked, opened, url_of
from fencepost.cli.main import FINE, REFUSED, say
from fencepost.cli.showing import print_json, print_table
from fencepost.errors import TokenStale
from fencepost.model.divided import is_mark
from fencepost.model.duration import shown
from fencepost.world.blocking import BlockingWorld

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

    from fencepost.model.lease import View

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

_HEADINGS = ("NAME", "HOLDER", "SINCE", "EXPIRES IN", "TOKEN", "ALIVE")
_ALIVE = {True: "yes", False: "no", None: "unknown"}


def register(subparsers: Subparsers) -> None:
    """Add the verbs ``locks`` and ``lock break``."""
    locks = subparsers.add_parser("locks", help="show what is held, by whom, and for how long")
    locks.add_argument("--all", action="store_true", help="show also what is no longer held")
    locks.set_defaults(run=show)
    lock = subparsers.add_parser("lock", help="act on one lock: lock break")
    verbs = lock.add_subparsers(title="verbs", metavar="VERB", required=True)
    parser = verbs.add_parser("break", help="take a lock away from its holder")
    parser.add_argument("name", metavar="NAME")
    parser.add_argument(
        "--token", type=int, required=True, help="the holder's, as 'fencepost locks' shows it"
    )
    parser.add_argument("--reason", required=True, help="the next person will want to know")
    parser.add_argument("--operator", help="who does it (the user and host of this process)")
    parser.set_defaults(run=break_)


def show(args: argparse.Namespace) -> int:
    """Print the leases of this namespace."""
    store = opened(args, BlockingWorld())
    try:
        views = [
            view
            for view in asked(store.views())
            if args.all or (view.held and not is_mark(view.holder))
        ]
    finally:
        asked(store.close())
    if args.json:
        print_json([_plain(view) for view in views])
    elif views:
        print_table(_HEADINGS, [_row(view) for view in views], args)
    elif not args.quiet:
        print("nothing is held")
    return FINE


def break_(args: argparse.Namespace) -> int:
    """Take a lease away from the holder of a token, and print the old and the new one."""
    from fencepost.blocking import Fencepost  # its rules about reasons and operators

    fp = Fencepost(url_of(args), namespace=args.namespace, on_event=None)
    try:
        fresh = fp.break_lock(
            args.name, token=args.token, reason=args.reason, operator=args.operator
        )
    except TokenStale as stale:
        if args.debug:
            raise
        found = f"its token is {stale.highest}" if stale.highest else "there is no such lock"
        say(f"lock {args.name!r} was not broken: {found}, not {args.token}; see 'fencepost locks'")
        return REFUSED
    finally:
        fp.close()
    if args.json:
        import json

        print(json.dumps({"name": args.name, "old_token": args.token, "new_token": fresh}))
    else:
        print(f"lock {args.name!r} is broken: old token {args.token}, new token {fresh}")
    return FINE


def _plain(view: View) -> dict[str, object]:
    return {
        "name": view.name,
        "token": view.token,
        "held": view.held,
        "holder": {"host": view.holder.host, "pid": view.holder.pid},
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(view.since)),
        "expires_in": round(view.expires_in, 3),
        "alive": view.alive,
        "ended": view.ended or None,
    }


def _row(view: View) -> tuple[str, ...]:
    return (
        view.name,
        str(view.holder),
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(view.since)),
        shown(view.expires_in) if view.held else view.ended or "it ran out",
        str(view.token),
        _ALIVE[view.alive] if view.held else "-",
    )
