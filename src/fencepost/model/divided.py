"""A lock is divided while runs that may overlap have permits of it, and then nobody has it whole.

Permits are leases with names of their own. So that a plain lock of the name is refused as well,
each claim of a permit leaves a mark: the lease of the name itself, held by its permits. The mark
outlives the permits. A plain lock that finds it looks at each permit, and takes the mark away if
none is held, by its token: each claim of a permit leaves a mark with a new token, so a permit that
was claimed meanwhile is never overlooked. An older version takes the mark for a holder like others.
"""

from __future__ import annotations

from fencepost.model.lease import LONGEST_TTL, Holder

# How long a mark lasts; who has a permit for longer leaves another one in time.
MARK_TTL = LONGEST_TTL

# How the nonce of a mark begins.
MARK = "permits-"
_HOST = "permits"


def mark_holder(nonce: str, *, limit: int, before: Holder | None = None) -> Holder:
    """Return the holder that stands for the permits of a lock: ``pid`` is how many there may be.

    There may still be as many as the mark ``before`` has said.
    """
    most = limit if before is None or not is_mark(before) else max(limit, before.pid)
    return Holder(MARK + nonce, _HOST, most, "")


def is_mark(holder: Holder) -> bool:
    """Say whether this is no holder, but stands for the permits of a lock."""
    return holder.nonce.startswith(MARK)


def may_be_mark(shown: str) -> bool:
    """Say whether a holder that is known only as it is shown may be a mark."""
    return shown.startswith(f"{_HOST} pid ")
