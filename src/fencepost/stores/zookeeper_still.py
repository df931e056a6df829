"""A lease whose clock nobody keeps is over once it was seen to stand still for its whole ttl.

A look takes time, and whoever looks may be stopped at any point of it. So it is certain only that a
lease stood still from after the first look at it until before the latest.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.model.lease import Record


class Still:
    """Since when each lease has not moved, by the watcher's own clock."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, int, float]] = {}

    def long_enough(self, record: Record, *, before: float, after: float) -> bool:
        """Take note of a look between two instants; say whether it stood still for its ttl."""
        nonce, beat, since = self._seen.get(record.name, ("", 0, after))
        if (nonce, beat) != (record.holder.nonce, record.beat):
            self._seen[record.name] = (record.holder.nonce, record.beat, after)
            return False
        return before - since >= record.ttl
