"""Whether a ledger is the one that was seen before, or an older copy of it.

Commits are lost from the end only: a restored backup, or a standby that lagged behind, lacks the
newest ones. So whoever remembers its newest commit need only look whether that one is there.
"""

from __future__ import annotations

from fencepost.errors import Misuse
from fencepost.model.named import NamedTuple
from fencepost.model.slot import RunKey, parsed


class Mark(NamedTuple):
    """A commit that was confirmed: the claim of a run, or the end of that attempt.

    ``starts`` counts the claims of that run: a copy on which it was claimed anew has fewer of them.
    """

    key: RunKey
    token: int
    starts: int
    ended: bool = False


class Seen(NamedTuple):
    """Which ledger was seen, since which operator's word, and the newest commit in it."""

    incarnation: str
    accepted: int
    mark: Mark | None = None


class Life(NamedTuple):
    """What a ledger says of itself. ``has``: whether it has the commit that was asked for."""

    incarnation: str
    accepted: int
    doubt: str
    empty: bool
    has: bool


def doubt(seen: Seen | None, found: Life) -> str:
    """Say why a ledger may be an older copy; nothing if there is no reason to think so.

    Whoever notices it writes it into the ledger, for all others; an operator's word ends the
    matter. A ledger without any run is one that somebody began anew.
    """
    if seen is None or found.accepted > seen.accepted:
        return found.doubt
    if seen.incarnation != found.incarnation:
        return found.doubt if found.empty else "is not the one that was here before"
    if found.accepted < seen.accepted:
        return "is older than the operator's word about it: it looks like a restored copy"
    if seen.mark is not None and not found.has:
        key, token, _, ended = seen.mark
        what = "the end of run" if ended else "run"
        return (
            f"is older than what was seen of it ({what} {key} under token {token} is not in it): "
            "it looks like a restored copy, or like a standby that took over too early"
        )
    return found.doubt


def in_a_line(seen: Seen) -> str:
    """Return what was seen of a ledger as one line, for those who come later."""
    mark = seen.mark
    if mark is None:
        return f"{seen.incarnation} {seen.accepted}"
    numbers = (seen.accepted, mark.token, mark.starts, int(mark.ended))
    return " ".join((seen.incarnation, *map(str, numbers), str(mark.key)))


def from_a_line(line: str) -> Seen | None:
    """Return what somebody saw of a ledger; None if the line is torn, or somebody else's."""
    words = line.split(" ", 5)
    if len(words) not in (2, 6) or not all(word.isdecimal() for word in words[1:5]):
        return None
    if len(words) == 2:
        return Seen(words[0], int(words[1]))
    try:
        key = parsed(words[5])
    except Misuse:
        return None
    accepted, token, starts, ended = map(int, words[1:5])
    return Seen(words[0], accepted, Mark(key, token, starts, ended=bool(ended)))
