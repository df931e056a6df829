"""How verbs speak to people and programs: aligned text in UTC with ages, or one JSON document.

What comes from a command or from somebody's error message is shown without control characters: a
ledger must not be able to talk to a terminal.
"""

from __future__ import annotations

import os
import sys

from fencepost.model.duration import shown
from fencepost.model.slot import shown as instant

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

# Of an error, what fits beside other columns; `fencepost logs` has the rest.
_LONGEST_CELL = 60


def print_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], args: argparse.Namespace
) -> None:
    """Print rows under their headings, without the columns that nobody has anything to say in."""
    told = [n for n in range(len(headings)) if any(row[n] for row in rows)]
    table = [[plain(row[n]) or "-" for n in told] for row in rows]
    if not args.quiet:
        table.insert(0, [headings[n] for n in told])
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    for number, row in enumerate(table):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        line = "  ".join(cells).rstrip()
        print(bold(line, args) if number == 0 and not args.quiet else line)


def print_json(document: object) -> None:
    """Print the one document that a verb answers with."""
    import json

    print(json.dumps(document, indent=2, ensure_ascii=False))


def bold(line: str, args: argparse.Namespace) -> str:
    """Return a line as a heading, where that can be seen."""
    colourful = sys.stdout.isatty() and not args.no_color and "NO_COLOR" not in os.environ
    return f"\033[1m{line}\033[0m" if colourful else line


def when(at: float, *, now: float) -> str:
    """Return an instant in UTC and how far away it is; nothing for one that never was."""
    return f"{instant(int(at))} ({away(at, now=now)})" if at else ""


def away(at: float, *, now: float) -> str:
    """Return how far away an instant is: ``3 min ago``, ``in 20 s``."""
    return f"in {shown(at - now)}" if at > now else f"{shown(now - at)} ago"


def plain(text: str) -> str:
    """Return a text as one line that a terminal only shows."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in " ".join(text.split())
    )


def brief(text: str | None) -> str:
    """Return the beginning of a text, for a table."""
    line = plain(text or "")
    return line if len(line) <= _LONGEST_CELL else line[: _LONGEST_CELL - 1] + "…"


def block(text: str) -> str:
    """Return a text of several lines, indented, for a terminal to only show."""
    lines = text.replace("\r\n", "\n").split("\n")
    if lines and not lines[-1]:
        lines.pop()
    kept = (
        "".join(
            letter
            if letter.isprintable() or letter == "\t"
            else letter.encode("unicode_escape").decode()
            for letter in line
        )
        for line in lines
    )
    return "\n".join(f"  {line}".rstrip() for line in kept)
