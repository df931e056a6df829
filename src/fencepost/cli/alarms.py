"""``fencepost alarms`` shows what is armed, fires or is dead; ``set`` and ``clear`` change one."""

from __future__ import annotations

import time

from fencepost.cli.asking import asked, url_of
from fencepost.cli.main import FINE, REFUSED, say
from fencepost.cli.reading import ledger_at, say_there_is_none
from fencepost.cli.showing import brief, print_json, print_table, when
from fencepost.errors import AlarmChanged, BadValue, Misuse
from fencepost.model.alarm import AlarmState
from fencepost.model.alarm_policy import checked_kind
from fencepost.model.alarm_view import public

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from fencepost.model.alarm import AlarmRecord

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

_HEADINGS = ("KIND", "KEY", "STATE", "WHY", "DUE", "NEXT TRY", "TRIES", "LOSSES", "LATE", "HOLDER")
_THERE = (AlarmState.ARMED, AlarmState.FIRING, AlarmState.DEAD)
_CHANGES = ("set", "clear")


def register(subparsers: Subparsers) -> None:
    """Add the verb ``alarms``."""
    parser = subparsers.add_parser(
        "alarms",
        help="show the alarms, or change one: alarms set, alarms clear",
        usage="%(prog)s [KIND] [--dead] | set KIND KEY (--in D | --at T) | clear KIND KEY",
    )
    parser.add_argument("words", nargs="*", metavar="KIND", help="only this kind; or as above")
    parser.add_argument("--dead", action="store_true", help="only those that were given up")
    parser.add_argument("--limit", type=int, default=100, metavar="N", help="at most N (100)")
    parser.add_argument("--in", dest="after", metavar="D", help="set: how long from now, as in 10m")
    parser.add_argument("--at", metavar="T", help="set: when, such as 2026-01-20T02:00:00Z")
    parser.add_argument("--payload", metavar="JSON", help="set: what its handler is given")
    parser.add_argument(
        "--if-generation", type=int, metavar="G", help="only if it still is; 0: if there is none"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show alarms, or change one."""
    words = args.words
    if words and words[0] in _CHANGES:
        if len(words) != 3:
            raise Misuse(f"say which alarm: fencepost alarms {words[0]} KIND KEY")
        return _changed(args, *words)
    if len(words) > 1:
        raise Misuse(f"give at most one kind, or set KIND KEY, or clear KIND KEY: not {words}")
    return _show(args, checked_kind(words[0]) if words else None)


def _show(args: argparse.Namespace, kind: str | None) -> int:
    from fencepost.ledger.alarm_open import alarms_of
    from fencepost.world.blocking import BlockingWorld

    states = (AlarmState.DEAD,) if args.dead else _THERE
    with ledger_at(args) as ledger:
        if ledger is None:
            say_there_is_none(args, document=[])
            return FINE
        book = alarms_of(BlockingWorld(), ledger)
        found = asked(book.listed(kind, states=states, limit=max(1, args.limit)))
    if args.json:
        print_json([public(record) for record in found])
    elif found:
        now = time.time()
        print_table(_HEADINGS, [_row(record, now=now) for record in found], args)
    elif not args.quiet:
        which = f" of kind {kind!r}" if kind else ""
        print(f"no alarm{which} is {'dead' if args.dead else 'set'}")
    return FINE


def _changed(args: argparse.Namespace, verb: str, kind: str, key: str) -> int:
    from fencepost.blocking import Fencepost  # its rules about names, instants and payloads

    fp = Fencepost(url_of(args), namespace=args.namespace)
    try:
        if verb == "set":
            payload, at = _payload(args.payload), args.at
            generation = fp.alarms.set(
                kind, key, at, payload, in_=args.after, if_generation=args.if_generation
            )
        else:
            generation = fp.alarms.clear(kind, key, if_generation=args.if_generation)
    except AlarmChanged as changed:
        if args.debug:
            raise
        say(str(changed))
        return REFUSED
    finally:
        fp.close()
    if args.json:
        print_json({"kind": kind, "key": key, "generation": generation or None})
    elif not args.quiet:
        done = "set" if verb == "set" else "cleared"
        there = f"is {done}: generation {generation}" if generation else "is not set"
        print(f"alarm {kind!r} of {key!r} {there}")
    return FINE


def _payload(text: str | None) -> Any:
    if text is None:
        return None
    import json

    try:
        return json.loads(text)
    except ValueError as error:
        raise BadValue(f"--payload is no JSON: {error}") from error


def _row(record: AlarmRecord, *, now: float) -> tuple[str, ...]:
    retries = record.state is AlarmState.ARMED and record.not_before > record.due_at
    return (
        record.kind,
        record.key,
        record.state.value,
        brief(record.error or record.reason),
        when(record.due_at, now=now),
        when(record.not_before, now=now) if retries else "",
        str(record.attempt or ""),
        str(record.losses or ""),
        str(record.late or ""),
        str(record.holder) if record.fired else "",
    )
