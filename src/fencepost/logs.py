"""The one subscriber that turns events into text: logfmt lines on the logger "fencepost"."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.model.event import LeaseEvent

_LEVELS = {
    "acquired": "INFO",
    "adopted": "INFO",
    "released": "INFO",
    "reclaimed": "WARNING",
    "unconfirmed": "WARNING",
    "danger": "WARNING",
    "suspect": "WARNING",
    "broken": "WARNING",
    "lost": "ERROR",
}


def is_heard() -> bool:
    """Say whether anybody could hear of what goes well: a program without logging does not."""
    return "logging" in sys.modules


def log(event: LeaseEvent) -> None:
    """Write one event."""
    import logging  # 25 ms that a quiet program need not spend

    logger = logging.getLogger("fencepost")
    number = logging.getLevelName(_LEVELS.get(event.what, "DEBUG"))
    if logger.isEnabledFor(number):
        logger.log(number, line(event))


def line(event: LeaseEvent) -> str:
    """Return an event as one line of ``key=value`` pairs."""
    parts = [f"lock_{event.what}", f"name={quoted(event.name)}"]
    if event.token:
        parts.append(f"token={event.token}")
    if event.detail:
        parts.append(f"detail={quoted(event.detail)}")
    return " ".join(parts)


def quoted(value: str) -> str:
    """Quote a value if a reader of ``key=value`` pairs could misread it."""
    plain = value and not any(c in value for c in ' "=\n\r\t')
    if plain:
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t") + '"'
