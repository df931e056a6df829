"""The one subscriber that turns events into text: logfmt lines on the logger "fencepost".

``$FENCEPOST_LOG=json`` makes each line one JSON object instead.
"""

from __future__ import annotations

import os
import sys
from functools import cache, partial

from fencepost.model.event import JobEvent

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging
    from collections.abc import Callable
    from typing import Any

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
    "lock_acquired": "INFO",
    "resumed": "WARNING",
    "completed": "INFO",
    "handed_off": "INFO",
    "skipped": "WARNING",
    "cancelled": "WARNING",
    "children_stopped": "WARNING",
    "children_left": "INFO",
    "slow_transaction": "WARNING",
    "in_doubt": "ERROR",
    "failed": "ERROR",
    "timed_out": "ERROR",
    "stuck": "ERROR",
    "quarantined": "ERROR",
    "missed": "WARNING",
    "cut": "WARNING",
    "unrecorded": "ERROR",
    "edited": "INFO",
    "renamed": "INFO",
    "known_again": "INFO",
    "backfilled": "INFO",
    "retired": "WARNING",
    "orphaned": "ERROR",
    "trouble": "ERROR",
    "refused": "ERROR",
    "clock_disagrees": "ERROR",
    "clock_agrees": "INFO",
    "clock_jumped": "ERROR",
    "clock_set_back": "ERROR",
    "alarm_fired": "INFO",
    "alarm_late": "WARNING",
    "alarm_stale": "WARNING",
    "alarm_failed": "ERROR",
    "alarm_stuck": "ERROR",
    "alarm_dead": "ERROR",
    "alarm_cut": "WARNING",
    "alarm_unrecorded": "ERROR",
}


def is_heard() -> bool:
    """Say whether anybody hears of what goes well: a program without logging does not.

    Nor does one that logs and has not asked for so much: there an event of each run that goes well
    would cost as much as the run.
    """
    return "logging" in sys.modules and _hears_of_success()()


@cache
def _hears_of_success() -> Callable[[], bool]:
    import logging  # which somebody has loaded, or is about to

    return partial(logging.getLogger("fencepost").isEnabledFor, logging.INFO)


def log(event: LeaseEvent | JobEvent) -> None:
    """Write one event."""
    import logging  # 25 ms that a quiet program need not spend

    logger = logging.getLogger("fencepost")
    number = logging.getLevelName(_LEVELS.get(event.what, "DEBUG"))
    if logger.isEnabledFor(number):
        logger.log(number, line(event))


def line(event: LeaseEvent | JobEvent) -> str:
    """Return an event as one line of ``key=value`` pairs, or as one JSON object."""
    what, pairs = facts(event)
    if os.environ.get("FENCEPOST_LOG") == "json":
        import json

        return json.dumps({"event": what, **pairs}, default=str)
    return " ".join([what, *(f"{key}={quoted(str(value))}" for key, value in pairs.items())])


def facts(event: LeaseEvent | JobEvent) -> tuple[str, dict[str, object]]:
    """Return what an event is called and what belongs to it; the run id is on every line of one."""
    if isinstance(event, JobEvent):
        known = (("job", event.job), ("run_id", event.run_id))
        about: dict[str, object] = {name: value for name, value in known if value}
        if event.token:
            about["token"] = event.token
        return event.what, {**about, **dict(event.more)}
    about = {"name": event.name}
    if event.token:
        about["token"] = event.token
    if event.detail:
        about["detail"] = event.detail
    return f"lock_{event.what}", about


def quoted(value: str) -> str:
    """Quote a value if a reader of ``key=value`` pairs, or a terminal, could misread it."""
    if value and value.isprintable() and not any(c in value for c in ' "='):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    for mark, word in (("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
        escaped = escaped.replace(mark, word)
    if not escaped.isprintable():  # a colour or a cursor movement must not reach a terminal
        escaped = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped)
    return f'"{escaped}"'


def logger_of(job: str, run_id: str) -> logging.LoggerAdapter[logging.Logger]:
    """Return a logger whose every line ends with the job and the run id."""
    import logging

    class Named(logging.LoggerAdapter[logging.Logger]):
        def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
            """Put the run on the line, for people and for programs."""
            about = f" job={quoted(job)} run_id={quoted(run_id)}"
            if args:  # then the line is still to be formatted, and our part must survive that
                about = about.replace("%", "%%")
            kwargs["extra"] = {**(kwargs.get("extra") or {}), "job": job, "run_id": run_id}
            line = f"{msg}{about}"
            self.logger.log(level, line, *args, **kwargs)

    return Named(logging.getLogger("fencepost.job"), {})
