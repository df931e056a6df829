"""What a flow may ask of a book of alarms. Every verb is at most one transaction.

What a handler writes is conditional on its token and on the generation that fired. Every verb may
be repeated after ``OutcomeUnknown``: it then finds what it did, and where the alarm is gone by
then the answer says just that.
"""

from __future__ import annotations

from fencepost.model.named import Protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from fencepost.model.alarm import (
        AlarmEnd,
        AlarmRecord,
        AlarmState,
        AlarmWant,
        Batch,
        Failure,
        Firing,
        NextDue,
        Rearm,
        Setting,
    )


class AlarmBook(Protocol):
    """The alarms of one namespace, one for each (kind, key)."""

    async def set(self, setting: Setting) -> AlarmRecord:
        """Set an alarm, in place of what there was; ``AlarmChanged`` if it may not be."""

    async def clear(
        self, kind: str, key: str, *, keep: float = 0.0, if_generation: int | None = None
    ) -> AlarmRecord | None:
        """Clear an alarm and return the tombstone; None if there is nothing to clear."""

    async def get(self, kind: str, key: str) -> AlarmRecord | None:
        """Return an alarm, or its tombstone."""

    async def listed(
        self, kind: str | None = None, *, states: Sequence[AlarmState] = (), limit: int = 100
    ) -> list[AlarmRecord]:
        """Return alarms by kind and key, of one kind or of all."""

    async def next_due(self, kinds: Sequence[str]) -> NextDue:
        """Say when one of these kinds is due next. One look, however many alarms there are."""

    async def claim_due(self, want: AlarmWant) -> Batch:
        """Claim what is due, each with a lease, all in one transaction.

        Asked again with the same nonce it returns what that nonce has claimed, and no more.
        """

    async def beat(self, firing: Firing, *, ttl: float) -> bool:
        """Renew the lease of a handler; say whether a newer generation is there by now.

        ``LeaseLost`` if the alarm is no longer this handler's.
        """

    async def finish(self, firing: Firing, rearm: Rearm | None = None) -> AlarmEnd:
        """Commit a handler's success, and release its lease.

        The alarm goes, or is armed anew, if it is still the generation that fired. If not, the
        newer one stays as it is.
        """

    async def fail(self, firing: Firing, failure: Failure) -> AlarmEnd:
        """Record a handler's failure, and release its lease."""

    async def prune(self, *, limit: int = 1000) -> int:
        """Delete tombstones that were kept for long enough; return how many."""
