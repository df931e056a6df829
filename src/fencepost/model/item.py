"""An item is one effect of a run. Its record says begun before the effect and done after it.

What was begun and never ended is *in doubt*: the effect may have happened, and nobody can know.
"""

from __future__ import annotations

import enum

from fencepost.errors import BadValue
from fencepost.model.named import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

LONGEST = 1000


class ItemState(enum.StrEnum):
    """What is known of an item."""

    BEGUN = "begun"
    DONE = "done"
    FAILED = "failed"


class ItemRecord(NamedTuple):
    """An item as the ledger has it. ``call`` tells two begins of one attempt apart."""

    scope: str
    item: str
    state: ItemState
    token: int
    run: str
    call: str
    at: float
    error: str | None = None


class Found(enum.Enum):
    """What a begin finds, for the body that wants to have the effect."""

    FIRST = "first"  # begun now, by us: have the effect
    AGAIN = "again"  # in doubt, but to be repeated: have the effect, with the same key
    DONE = "done"
    DOUBT = "doubt"  # in doubt: not to be repeated, but reported
    OPEN = "open"  # somebody is at it right now, perhaps we ourselves

    @property
    def go(self) -> bool:
        """Whether the effect is to be had."""
        return self in (Found.FIRST, Found.AGAIN)


def find(
    known: ItemRecord | None, *, token: int, call: str, begun_by_living: bool, repeat: bool
) -> Found:
    """Say what a begin under ``token`` finds.

    ``begun_by_living`` says that the attempt which began the item still has its run.
    """
    if known is None or known.state is ItemState.FAILED:
        return Found.FIRST
    if known.state is ItemState.DONE:
        return Found.DONE
    if known.token == token and known.call == call:
        return Found.FIRST  # the reply to an earlier begin got lost
    if known.token == token or begun_by_living:
        return Found.OPEN
    return Found.AGAIN if repeat else Found.DOUBT


def once_each(items: Sequence[str], found: dict[str, Found]) -> list[Found]:
    """Return what a begin of ``items`` found: who names one twice may have its effect once."""
    seen: set[str] = set()
    answer = []
    for item in items:
        again = item in seen and found[item].go
        answer.append(Found.OPEN if again else found[item])
        seen.add(item)
    return answer


def begun_by(known: ItemRecord, *, key: str, token: int, call: str | None = None) -> bool:
    """Say whether an item is open, and in the hands of this very attempt.

    The token alone would not tell: it is only unique among those of one lease. The attempt alone
    would not either: an end that arrives late must not end what was begun again since.
    """
    begun = known.state is ItemState.BEGUN and (known.run, known.token) == (key, token)
    return begun and call in (None, known.call)


def named(item: object) -> str:
    """Return the text an item is known by, or refuse it: text and whole numbers only."""
    if type(item) is not str and (type(item) is not int):
        raise BadValue(f"item {item!r} must be text or a whole number: something that stays")
    if isinstance(item, int) and item.bit_length() > 4 * LONGEST:
        raise BadValue(
            f"item is a number of {item.bit_length()} bits: that is no name for anything"
        )
    text = str(item)
    if not 0 < len(text) <= LONGEST:
        raise BadValue(f"item {text[:40]!r} has {len(text)} characters; 1 to {LONGEST} will do")
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise BadValue(f"item {text[:40]!r} contains half a character, which no database keeps")
    if "\0" in text:
        raise BadValue(f"item {text[:40]!r} contains a NUL, which not every database keeps")
    return text
