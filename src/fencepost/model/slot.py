"""A slot is one job at one due instant, in whole seconds of UTC; its key is the unit of "once".

The key comes from the job and the instant only. No time zone, no expression, no attempt and no
version is in it, so nothing that changes between two triggers can make two runs of one slot.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from fencepost.errors import BadName, BadSlot
from fencepost.model.name import checked
from fencepost.model.named import NamedTuple

_KEY = re.compile(
    r"(?P<job>.+)@(?P<slot>\d{4}-\d\d-\d\dT\d\d:\d\d(?::\d\d)?Z)"
    r"(?:!manual-(?P<manual>[1-9]\d*))?(?:~(?P<rerun>[1-9]\d*))?",
    re.DOTALL | re.ASCII,
)
_INSTANT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d(\.0+)?)?(Z|[+-]\d\d:?\d\d)", re.ASCII)
# From 1970 on, and as far as four digits of a year go.
_FIRST, _LAST = 0, 253_402_300_799
_EPOCH, _SECOND = datetime(1970, 1, 1, tzinfo=UTC), timedelta(seconds=1)
_DAY = 86_400


class RunKey(NamedTuple):
    """Which run: a slot's first, a rerun of it, or one of its own that somebody asked for."""

    job: str
    slot: int
    manual: int = 0
    rerun: int = 0

    def __str__(self) -> str:
        text = f"{self.job}@{shown(self.slot)}"
        if self.manual:
            text += f"!manual-{self.manual}"
        return f"{text}~{self.rerun}" if self.rerun else text


def parsed(text: str) -> RunKey:
    """Return the key that ``text`` spells, such as ``billing@2026-01-20T02:00:00Z``."""
    found = _KEY.fullmatch(text)
    if found is None:
        raise BadSlot(
            f"{text!r} is not a run: write job@instant, such as billing@2026-01-20T02:00:00Z"
        )
    manual, rerun = (int(found[part] or 0) for part in ("manual", "rerun"))
    return RunKey(checked_job(found["job"]), instant(found["slot"]), manual, rerun)


@lru_cache(maxsize=256)
def shown(slot: int) -> str:
    """Return a slot's instant as text."""
    # By hand: slots are many and days are few, and a calendar is dear.
    day, second = divmod(slot, _DAY)
    minute, second = divmod(second, 60)
    hour, minute = divmod(minute, 60)
    return f"{_date(day)}T{hour:02}:{minute:02}:{second:02}Z"


@lru_cache(maxsize=64)
def _date(day: int) -> str:
    return datetime.fromtimestamp(day * _DAY, UTC).date().isoformat()


def instant(value: datetime | str | float) -> int:
    """Return the whole second of UTC that ``value`` names.

    A ``datetime`` must know its zone, and so must text: what is 02:00 in one place is not in
    another. A fraction of a second is cut off, never rounded up: a slot must not come early.
    """
    if isinstance(value, str):
        return _from_text(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _within(value, value)
    if not isinstance(value, datetime):
        raise BadSlot(f"slot is {value!r}: give a datetime with a time zone")
    if value.utcoffset() is None:
        raise BadSlot(
            f"slot is {value.isoformat()} without a time zone: say which, for instance "
            "with tzinfo=datetime.UTC"
        )
    return _within(_whole(value), value)


def checked_job(name: object) -> str:
    """Return the canonical name of a job, or refuse it: ``@`` would make its keys ambiguous."""
    canonical = checked(name)
    if "@" in canonical:
        raise BadName(f"job name {name!r} contains '@', which stands between a job and its slot")
    return canonical


def _from_text(text: str) -> int:
    if not _INSTANT.fullmatch(text):
        raise BadSlot(
            f"slot is {text!r}: write an instant and its zone, such as 2026-01-20T02:00:00Z"
        )
    try:
        return _within(_whole(datetime.fromisoformat(text)), text)
    except ValueError as error:
        raise BadSlot(f"slot is {text!r}: {error}") from error


def _whole(moment: datetime) -> int:
    # In whole numbers: a float of a far year would round the last microsecond up.
    return (moment - _EPOCH) // _SECOND


def _within(seconds: float, value: object) -> int:
    if not _FIRST <= seconds <= _LAST:
        raise BadSlot(f"slot is {value!r}: it must lie between the years 1970 and 9999")
    return int(seconds // 1)
