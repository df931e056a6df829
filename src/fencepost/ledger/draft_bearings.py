"""What a ledger on an SQL server can know of who lives: nothing, unless its server can tell.

Here are the bearings of one that cannot. A lease there is its holder's until it ends by itself.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import ModuleType
    from typing import Any

    from fencepost.ledger.draft_dialect import Step
    from fencepost.ledger.draft_values import DraftLease
    from fencepost.model.claim import Claimed


class Bearings:
    """What one transaction knows of who lives."""

    def __init__(self) -> None:
        self.hushed: dict[str, float] = {}  # leases of who may be dead, and how long to wait
        self.presumed: set[str] = set()  # those of who is taken for dead, though they still last

    @property
    def terms(self) -> dict[str, object]:
        """What is to be said along with the leases that are granted."""
        return {}

    def judged(self, name: str, lease: DraftLease, row: Sequence[Any]) -> DraftLease:
        """Return the lease ``name`` in a row as it stands: the dead hold nothing."""
        del name, row
        return lease

    def granted(self, answer: Sequence[Any]) -> None:
        """Take note of what the server answered to leases that were granted."""

    def leaning(self, claimed: Claimed) -> Claimed:
        """Return what was claimed, and what its holder has to prove from now on."""
        return claimed

    def doubt(self, names: Iterable[str]) -> float:
        """Return how long to wait until it is known how some leases stand; 0 if it is."""
        return max((self.hushed.get(name, 0.0) for name in names), default=0.0)


class Watch:
    """How an instance finds out that others have died whose runs it may take over."""

    def is_ripe(self) -> bool:
        """Say whether some may be taken over by now that were seen to be silent before."""
        return False

    def idle(self, plans: ModuleType, values: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return what asks whether there is anything to do."""
        return plans.IDLE, values

    def lost(self, plans: ModuleType, values: dict[str, Any]) -> list[Step]:
        """Return what finds lost runs, and then what else is to be asked at a sweep."""
        return [(plans.FIND_LOST, values)]

    def saw(self, seen: Sequence[Any], *, sweep: bool) -> None:
        """Take note of what was answered besides."""

    def soon(self) -> float:
        """Return how soon to look again at the latest."""
        return float("inf")
