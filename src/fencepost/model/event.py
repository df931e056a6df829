"""What happened to a lease, as values. Flows emit these; one subscriber turns them into text."""

from __future__ import annotations

from fencepost.model.named import NamedTuple


class LeaseEvent(NamedTuple):
    """One thing that happened to one lease.

    ``what`` is one of: acquired, adopted, renewed, unconfirmed, danger, suspect, lost, released,
    reclaimed (a grant nobody waited for any more was given back), broken.
    """

    what: str
    name: str
    token: int = 0
    detail: str = ""
