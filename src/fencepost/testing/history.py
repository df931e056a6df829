"""A history is what happened to leases and runs, one event after another, by the store's clock.

As text it has one JSON object on a line, without the fields that are empty:

    {"at":12.5,"what":"granted","node":"b.1","name":"nightly","holder":"9f…","token":7,"until":42.5}

======== ============================================================== =======================
what     means                                                          fields beside at, node
======== ============================================================== =======================
granted  the store gave the lease to ``holder``                         name holder token until
renewed  the store moved the lease's end, or answered a repeated ask    name holder token until
released the store took the lease back from ``holder``                  name holder
broken   an operator took the lease away; ``token`` is the next one     name token
deleted  somebody removed the lease's record by hand                    name
acted    a holder that believed in its lease did something unguarded    name holder token
admitted the fence of resource ``name`` let a token through             name token
refused  that fence turned a token away                                 name token
crashed  the process ``node`` ended; what it held may be taken over
wanted   ``node`` asks for ``name`` and must be granted it by ``until`` name until
failed   a flow ended with an error that no client expects              detail
======== ============================================================== =======================

``at`` and ``until`` are seconds on one clock, the store's. ``node`` names a process, not a machine:
a restarted one is another. Any other ``what`` is for the reader and means nothing to the checker.
What happens to runs has ``run`` (its key), ``state`` and ``number`` beside these: ``run_checker``
says which events it knows.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from fencepost.errors import Misuse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any


class Event(NamedTuple):
    """One thing that happened."""

    at: float
    what: str
    node: str = ""
    name: str = ""
    holder: str = ""
    token: int = 0
    until: float = 0.0
    detail: str = ""
    run: str = ""
    state: str = ""
    number: int = 0


def to_lines(history: Iterable[Event]) -> list[str]:
    """Return the history as text, one line for each event."""
    return [json.dumps(_full(event), separators=(",", ":")) for event in history]


def from_lines(lines: Iterable[str]) -> list[Event]:
    """Read a history back. Empty lines are passed over; fields that are not ours are too."""
    return [
        _event(line, number) for number, line in enumerate(lines, 1) if line and not line.isspace()
    ]


def table(history: Iterable[Event]) -> str:
    """Return the history for people: one aligned row for each event."""
    rows = [("time", "node", "event", "lease", "holder", "token", "details")]
    rows += [
        (
            f"{event.at:.6f}",
            event.node,
            event.what,
            event.name,
            event.holder,
            str(event.token or ""),
            _details(event),
        )
        for event in history
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            # Numbers end in the same column, words begin in it.
            cell.rjust(width) if column in (0, 5) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _full(event: Event) -> dict[str, Any]:
    fields = event._asdict()
    return {key: value for key, value in fields.items() if value or key == "at"}


def _event(line: str, number: int) -> Event:
    try:
        fields = json.loads(line)
        known = {key: value for key, value in fields.items() if key in Event._fields}
        return Event(**known)._replace(at=float(fields["at"]))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Misuse(f"line {number} of the history is not an event: {error!r}") from error


def _details(event: Event) -> str:
    until = f"until {event.until:.6f}" if event.until else ""
    number = f"number {event.number}" if event.number else ""
    return ", ".join(filter(None, (event.run, event.state, number, until, event.detail)))
