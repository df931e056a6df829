"""A lease by a clock that we cannot read is over once we saw it stand still for its whole ttl."""

from __future__ import annotations

from fencepost.model.lease import comparable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.model.lease import Record


class Watch:
    """Since when each lease has not moved, by the watcher's own clock."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, int, float]] = {}

    def long_enough(self, record: Record, *, now: float, era: str) -> bool:
        """Take a look at ``now``, and say whether the lease has stood still for its whole ttl.

        Only where the holder's era or ours is unknown: an instant that another process wrote may
        then belong to another run of the clock, or to another clock.
        """
        if comparable(record, era=era):
            return False
        nonce, beat, since = self._seen.get(record.name, ("", 0, now))
        if (nonce, beat) != (record.holder.nonce, record.beat):
            self._seen[record.name] = (record.holder.nonce, record.beat, now)
            return False
        return now - since >= record.ttl
