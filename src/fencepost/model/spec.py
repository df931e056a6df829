"""A spec is a schedule as canonical text: equal schedules have equal specs, and nothing is lost.

It is what a ledger keeps. Whatever an older version wrote, this one reads; what it cannot read is
refused with a sentence, because to guess would be to run at another time.
"""

from __future__ import annotations

import json
from functools import lru_cache

from fencepost.errors import BadSchedule
from fencepost.model.cron import restored
from fencepost.model.every import At, Every, EveryAfter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from fencepost.model.every import Schedule


def spec_of(schedule: Schedule) -> str:
    """Return a schedule as compact JSON, in which whatever changes its slots is said once."""
    return schedule.spec


@lru_cache(maxsize=8192)
def schedule_from(spec: str) -> Schedule:
    """Return the schedule that ``spec_of`` has written, in this version or in an older one."""
    try:
        made = _made(json.loads(spec))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise BadSchedule(
            f"the schedule {spec!r} cannot be read: was it written by a newer version of fencepost?"
        ) from None
    except BadSchedule as error:
        raise BadSchedule(f"the schedule {spec!r} cannot be followed here: {error}") from None
    return made


def _made(facts: dict[str, Any]) -> Schedule:
    if "every" in facts and len(facts) == 1:
        return Every(_number(facts["every"]))
    if "every" in facts and len(facts) == 2:
        return Every(_number(facts["every"]), anchor=_number(facts["offset"]))
    if "cron" in facts:
        return restored(facts)
    ((kind, value),) = facts.items()
    return {"every_after": EveryAfter, "at": At}[kind](_number(value))


def _number(value: object) -> int:
    if type(value) is not int:
        raise TypeError(value)
    return value
