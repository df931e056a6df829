"""When a lease is over, where no clock can be asked in the same step as the write.

*Observed*: the same etag was seen at both ends of a whole ttl of our own boot-time clock. The
holder renewed at no time in between, so it has stopped. This needs nobody else's clock, but
somebody who watches for so long.

*Stamped*: by the server's stamps the last write is older than the ttl. That helps processes that
live for seconds. A stamp is believed only if the wall clock beside it agrees: that of the holder
for the write, ours for now. So one wrong clock, whosever, never frees a lease.
"""

from __future__ import annotations

from fencepost.model.lease import DRIFT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.stores.objects_record import Entry
    from fencepost.world.objects import Version

# By how much a stamp may differ from the wall clock beside it.
AGREE = 2.0
# Stamps are whole seconds, and both may be off by as much as still agrees.
SLACK = 1.0 + 2 * AGREE
_MOST_SEEN = 10_000


class Sightings:
    """Since when each lease has been seen to stand still, by our own clock."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, float]] = {}

    def see(self, key: str, version: Version, *, now: float) -> float:
        """Take note of a look at ``now``, after the answer came; return since when it is so."""
        e_tag, since = self._seen.get(key, ("", now))
        if e_tag == version.e_tag:
            return since
        if len(self._seen) >= _MOST_SEEN:
            self._seen.pop(next(iter(self._seen)), None)
        self._seen[key] = (version.e_tag, now)
        return now


def patience(ttl: float) -> float:
    """Return for how long a lease must have stood still: clocks may differ in rate."""
    return ttl * (1 + DRIFT)


def worth_a_stamp(entry: Entry, *, wall: float) -> bool:
    """Say whether it is worth asking the server for the time: our own clock says it is over."""
    agreed = abs(entry.modified - entry.written_at) <= AGREE
    return agreed and wall + AGREE - entry.modified >= patience(entry.record.ttl) + SLACK


def over_by_stamps(entry: Entry, *, stamp: float, wall: float) -> bool:
    """Say whether the lease was over when the server stamped ``stamp``, at our ``wall``."""
    agreed = max(abs(entry.modified - entry.written_at), abs(stamp - wall)) <= AGREE
    return agreed and stamp - entry.modified >= patience(entry.record.ttl) + SLACK
