"""A lock is divided while runs that may overlap have permits of it, and then nobody has it whole.

Permits are leases with names of their own. So that a plain lock of the name is refused as well,
each claim of a permit leaves a mark: the lease of the name itself, held by its permits. The mark
outlives the permits. A plain lock that finds it looks at each permit, and takes the mark away if
none is held, by its token: each claim of a permit leaves a mark with a new token, so a permit that
was claimed meanwhile is never overlooked. A mark takes the place of another mark in one step of the
store, so the lock is never free in between. An older version takes a mark for a holder like others.
"""

from __future__ import annotations

from fencepost.model.lease import LONGEST_TTL, MARK, Holder

# How long a mark lasts; who has a permit for longer leaves another one in time.
MARK_TTL = LONGEST_TTL

_HOST = "permits"


def mark_holder(nonce: str, *, limit: int) -> Holder:
    """Return the holder that stands for the permits of a lock: ``pid`` is how many there may be."""
    return Holder(MARK + nonce, _HOST, limit, "")


def in_place_of(before: Holder, holder: Holder) -> Holder:
    """Return the holder as it is granted a lease after the holder ``before``.

    Where both are marks, there may still be as many permits as the mark before has said.
    """
    if not (is_mark(before) and is_mark(holder)):
        return holder
    return holder._replace(pid=max(before.pid, holder.pid))


def is_mark(holder: Holder) -> bool:
    """Say whether this is no holder, but stands for the permits of a lock."""
    return holder.nonce.startswith(MARK)


def may_be_mark(shown: str) -> bool:
    """Say whether a holder that is known only as it is shown may be a mark."""
    return shown.startswith(f"{_HOST} pid ")
