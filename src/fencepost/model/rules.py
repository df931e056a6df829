"""What a job wants to happen with slots whose time has passed, checked when it is declared."""

from __future__ import annotations

import enum
import json
from functools import lru_cache

from fencepost.errors import Misuse
from fencepost.model.duration import positive, seconds
from fencepost.model.named import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from fencepost.model.duration import Duration

DAY = 86400.0
# How late a slot may start that is not to be caught up, if its job does not say.
ON_TIME = 60.0


class CatchUp(enum.StrEnum):
    """What becomes of slots that nobody was there for."""

    LATEST = "latest"  # the newest runs, the older ones are recorded as missed
    ALL = "all"  # every one, oldest first, one at a time
    NONE = "none"  # only what can still start on time


class Rules(NamedTuple):
    """A job's words about time that has passed, in seconds."""

    catchup: CatchUp = CatchUp.LATEST
    start_deadline: float | None = None
    jitter: float = 0.0
    limit: int = 1000
    window: float = 7 * DAY
    pause: float = 0.0
    live_first: bool = False

    @property
    def deadline(self) -> float | None:
        """How late a slot may start; None if as late as it likes, until a newer one is due."""
        if self.start_deadline is None and self.catchup is CatchUp.NONE:
            return ON_TIME
        return self.start_deadline


DEFAULT = Rules()


def checked_rules(
    *,
    catchup: str = "latest",
    start_deadline: Duration | None = None,
    jitter: Duration | None = None,
    catchup_limit: int = 1000,
    catchup_window: Duration = "7d",
    catchup_pause: Duration = 0,
    live_first: bool = False,
) -> Rules:
    """Return the rules that were asked for, or say which of them cannot be."""
    try:
        word = CatchUp(catchup)
    except ValueError:
        known = ", ".join(repr(kind.value) for kind in CatchUp)
        raise Misuse(f"catchup is {catchup!r}: it must be one of {known}") from None
    if type(catchup_limit) is not int or catchup_limit < 1:
        raise Misuse(f"catchup_limit is {catchup_limit!r}: it must be a whole number from 1 on")
    deadline = None if start_deadline is None else positive(start_deadline, what="start_deadline")
    pause = seconds(catchup_pause, what="catchup_pause")
    spread = 0.0 if jitter is None else seconds(jitter, what="jitter")
    for what, value, given in (("catchup_pause", pause, catchup_pause), ("jitter", spread, jitter)):
        if not 0 <= value < float("inf"):
            raise Misuse(f"{what} is {given!r}: it must not be negative")
    if live_first and word is not CatchUp.ALL:
        raise Misuse(f"live_first is for catchup='all', but catchup is {catchup!r}: leave one out")
    window = positive(catchup_window, what="catchup_window")
    return Rules(word, deadline, spread, catchup_limit, window, pause, live_first)


def text_of(rules: Rules) -> str:
    """Return rules as a ledger keeps them: what differs from the usual, as JSON."""
    told = {
        name: value
        for name, value, usual in zip(Rules._fields, rules, DEFAULT, strict=True)
        if value != usual
    }
    return json.dumps(told, sort_keys=True, separators=(",", ":")) if told else ""


@lru_cache(maxsize=1024)
def rules_from(text: str) -> Rules:
    """Return the rules that a ledger kept."""
    told: dict[str, Any] = json.loads(text) if text else {}
    if "catchup" in told:
        told["catchup"] = CatchUp(told["catchup"])
    return DEFAULT._replace(**told)
