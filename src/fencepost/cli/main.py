"""Every verb starts and ends here: options in; out, one exit code and at most one complaint.

A verb's module has ``register(subparsers)``, which adds a parser with ``set_defaults(run=run)``;
``run(args)`` returns the exit code. Only the module of the verb that was typed is imported.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import os
import sys

from fencepost.errors import (
    FencepostError,
    Misuse,
    OutcomeUnknown,
    Refused,
    StoreUnavailable,
    StoreUnfit,
)
from fencepost.version import VERSION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

# The exit codes, apart from those of ``exec``, which are mostly its command's.
FINE, WRONG, USAGE, UNREACHABLE, REFUSED = range(5)

_VERBS = {
    "exec": "fencepost.cli.exec",
    "up": "fencepost.cli.up",
    "tick": "fencepost.cli.tick",
    "run": "fencepost.cli.tick",
    "plan": "fencepost.cli.plan",
    "status": "fencepost.cli.status",
    "list": "fencepost.cli.jobs",
    "runs": "fencepost.cli.runs",
    "slots": "fencepost.cli.slots",
    "next": "fencepost.cli.next",
    "logs": "fencepost.cli.logs",
    "cancel": "fencepost.cli.runs",
    "pause": "fencepost.cli.operate",
    "resume": "fencepost.cli.operate",
    "retire": "fencepost.cli.operate",
    "backfill": "fencepost.cli.backfill",
    "instances": "fencepost.cli.instances",
    "verify": "fencepost.cli.verify",
    "locks": "fencepost.cli.locks",
    "lock": "fencepost.cli.locks",
    "alarms": "fencepost.cli.alarms",
    "migrate": "fencepost.cli.migrate",
    "doctor": "fencepost.cli.doctor",
    "demo": "fencepost.cli.demo",
    "simulate": "fencepost.cli.simulate",
}
_WITH_VALUE = ("--url", "--namespace")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    As a program's last act it does not return but leaves at once: taking an interpreter apart
    costs a short command a tenth of its time.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    verb = _verb(words)
    code = _run(verb, words)
    if argv is None and verb == "exec":
        atexit._run_exitfuncs()  # noqa: SLF001 -- what os._exit leaves out
        if sys.stdout is not None:  # as it is for those who were started without one
            sys.stdout.flush()
        os._exit(code)
    return code


def _run(verb: str | None, words: list[str]) -> int:
    command: list[str] = []
    if verb == "exec" and "--" in words:  # what follows is not ours to parse
        cut = words.index("--")
        words, command = words[:cut], words[cut + 1 :]
    args = _parser(verb).parse_args(words)
    args.command = command
    try:
        return int(args.run(args) or FINE)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return WRONG
    except Exception as error:
        if args.debug:
            raise
        say(_sentence(error))
        return code_of(error)


def code_of(error: Exception) -> int:
    """Return the exit code that says what an error means."""
    if isinstance(error, Refused):
        return REFUSED
    if isinstance(error, (StoreUnavailable, OutcomeUnknown, StoreUnfit)):
        return UNREACHABLE
    if isinstance(error, Misuse):
        return USAGE
    return WRONG


def say(sentence: str) -> None:
    """Complain: one line on standard error."""
    print("fencepost: " + " ".join(sentence.split()), file=sys.stderr, flush=True)


class _Formatter(argparse.HelpFormatter):
    """Asks the terminal itself for its width: shutil, which argparse would ask, costs 5 ms."""

    def __init__(self, prog: str) -> None:
        try:
            width = int(os.environ.get("COLUMNS", "0")) or os.get_terminal_size(1).columns
        except (ValueError, OSError):
            width = 80
        super().__init__(prog, width=width - 2)


class Verb(argparse.ArgumentParser):
    """A parser that knows the global options, so that they may stand before or after the verb."""

    def __init__(self, *, top: bool = False, **settings: Any) -> None:
        super().__init__(
            allow_abbrev=False, conflict_handler="resolve", formatter_class=_Formatter, **settings
        )

        def default(value: object) -> object:
            return value if top else argparse.SUPPRESS

        self._everywhere = self.add_argument_group("global options")
        add = self._everywhere.add_argument
        add(
            "--url",
            default=default(None),
            help="where the leases live ($FENCEPOST_URL, else sqlite:///fencepost.db)",
        )
        add("--namespace", default=default("default"), help="keeps environments apart on one store")
        for flag, meaning in (
            ("--json", "answer in JSON"),
            ("--quiet", "say only what went wrong"),
            ("--no-color", "no colours, even on a terminal"),
            ("--debug", "show a traceback for an error"),
        ):
            add(flag, action="store_true", default=default(False), help=meaning)  # noqa: FBT003

    def format_help(self) -> str:
        """Describe what is special to this verb first."""
        self._action_groups.sort(key=lambda group: group is self._everywhere)
        return super().format_help()


def _verb(words: Sequence[str]) -> str | None:
    """Return the first word that is neither a global option nor the value of one."""
    rest = iter(words)
    for word in rest:
        if word in _WITH_VALUE:
            next(rest, None)
        elif not word.startswith("-"):
            return word
    return None


def _parser(verb: str | None) -> Verb:
    """Build the parser for one verb, or for all of them if it is not one of ours."""
    parser = Verb(top=True, prog="fencepost", description="Leases with fencing tokens.")
    parser.add_argument("--version", action="version", version=f"fencepost {VERSION}")
    subparsers = parser.add_subparsers(
        title="verbs", metavar="VERB", required=True, parser_class=Verb, prog="fencepost"
    )
    modules = [_VERBS[verb]] if verb in _VERBS else dict.fromkeys(_VERBS.values())
    for module in modules:
        try:
            importlib.import_module(module).register(subparsers)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise  # this installation has the verb, but lacks something that it needs
    return parser


def _sentence(error: Exception) -> str:
    if isinstance(error, FencepostError):
        return str(error)
    return f"unexpected {type(error).__name__}: {error} (--debug shows where)"
