"""Durations as people type them become seconds; anything doubtful is refused with a sentence."""

from __future__ import annotations

import math
import re
from functools import lru_cache

from fencepost.errors import BadDuration

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import timedelta

    Duration = float | timedelta | str

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")


def seconds(value: Duration, *, what: str = "duration") -> float:
    """Return ``value`` in seconds: a number, a ``timedelta``, or text such as "90s" or "1h30m".

    Text without a unit is refused: "90" could mean anything.
    """
    if isinstance(value, bool) or value is None:
        raise BadDuration(f"{what} is {value!r}: give seconds, a timedelta, or text such as '30s'")
    if isinstance(value, str):
        return _from_text(value, what)
    if isinstance(value, (int, float)):
        number = float(value)
    elif hasattr(value, "total_seconds"):
        number = value.total_seconds()
    else:
        raise BadDuration(f"{what} is {value!r}: give seconds, a timedelta, or text such as '30s'")
    if not math.isfinite(number):
        raise BadDuration(f"{what} is {value!r}: it must be a finite number of seconds")
    return number


def positive(value: Duration, *, what: str) -> float:
    """Return ``value`` in seconds, refusing zero and less."""
    number = seconds(value, what=what)
    if number <= 0:
        raise BadDuration(f"{what} is {value!r}: it must be more than zero")
    return number


def shown(duration: float) -> str:
    """Return a duration as a person would say it: 0.4 s, 12 s, 3 min, 2.5 h, 3 d."""
    if duration < 10:
        return f"{duration:.1f} s"
    if duration < 120:
        return f"{duration:.0f} s"
    if duration < 7200:
        return f"{duration / 60:.0f} min"
    if duration < 172800:
        return f"{duration / 3600:.1f} h"
    return f"{duration / 86400:.0f} d"


@lru_cache(maxsize=128)  # the same few words, again and again
def _from_text(text: str, what: str) -> float:
    compact = text.replace(" ", "")
    parts = _PART.findall(compact)
    if not parts or "".join(number + unit for number, unit in parts) != compact:
        raise BadDuration(
            f"{what} is {text!r}: write a number and a unit, such as '30s' or '1h30m'"
        )
    return sum(float(number) * _UNITS[unit] for number, unit in parts)
