"""An etcd lease that lost its key is as good as new, for as long as it surely lives.

A grant of etcd's costs a commit of its cluster. So whoever releases keeps the etcd lease for the
next acquire, which then trusts it for what is left of it; one that is not quite new any more is
kept alive first, which costs a round trip and no commit. Nobody renews spares: what is not used
ends by itself. Only the store object that was granted one ever keeps it as a spare, and none is
revoked: it may have got a key by a request that was thought to be lost.

A leader that was deposed while it slept answers a keep-alive before it knows. So each comes with
its term, and counts only if a quorum is seen to be of the same term afterwards.
"""

from __future__ import annotations

from fencepost.model.lease import DRIFT
from fencepost.model.named import NamedTuple
from fencepost.world.etcd import Effect

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.world.api import World
    from fencepost.world.etcd import EtcdDoor

_NEW, _USABLE = 0.1, 0.7  # shares of its time
_MOST = 16


class Spare(NamedTuple):
    """An etcd lease without a key. ``confirmed`` is an instant before it was last renewed."""

    id: str
    seconds: int  # what was asked for
    granted: float  # what is kept, which may be more
    confirmed: float
    term: int = 0  # of the leader that renewed it; 0: a quorum has granted it

    def left(self, at: float) -> float:
        """Return for how long it surely lives at ``at``, by a clock that may drift."""
        return self.granted - max(0.0, at - self.confirmed) * (1 + DRIFT)

    def is_new(self, at: float) -> bool:
        """Say whether what is gone of its time is not worth a round trip."""
        return at - self.confirmed <= _NEW * self.granted


class Kept(NamedTuple):
    """A leader's answer to a keep-alive."""

    seconds: float  # from now on; 0 if there is no such lease
    term: int


class Spares:
    """The etcd leases of one store object that have no key now."""

    def __init__(self, world: World, door: EtcdDoor) -> None:
        self._world, self._door = world, door
        self.forget()

    def forget(self) -> None:
        """Have none."""
        self._turn = self._world.mutex()
        self._idle: list[Spare] = []

    def take(self, seconds: int, *, timeout: float) -> Spare:
        """Return one of ``seconds`` that lives, be it with a new grant."""
        now = self._world.clocks.boottime()
        with self._turn:
            self._idle = [one for one in self._idle if _usable(one, now)]
            for number in range(len(self._idle) - 1, -1, -1):
                if self._idle[number].seconds == seconds:
                    return self._idle.pop(number)
        return self.grant(seconds, timeout=timeout)

    def grant(self, seconds: int, *, timeout: float) -> Spare:
        """Return a new one. If the reply is lost nothing is: it has no key, and ends by itself."""
        sent = self._world.clocks.boottime()
        told = self._door.ask("/lease/grant", {"TTL": seconds}, effect=Effect.NONE, timeout=timeout)
        return Spare(str(told["ID"]), seconds, float(told["TTL"]), sent)

    def keep_alive(self, lease: str, *, timeout: float) -> Kept:
        """Renew an etcd lease, as far as the leader that was asked is one."""
        told = self._door.ask(
            "/lease/keepalive", {"ID": lease}, effect=Effect.AGAIN, timeout=timeout
        )
        return Kept(float(told.get("TTL", 0)), int(told["header"]["raft_term"]))

    def refreshed(self, spare: Spare, *, timeout: float) -> Spare | None:
        """Renew one that is not new any more; None if it ended. Look at ``term`` afterwards."""
        sent = self._world.clocks.boottime()
        kept = self.keep_alive(spare.id, timeout=timeout)
        if kept.seconds <= 0:
            return None
        return spare._replace(granted=kept.seconds, confirmed=sent, term=kept.term)

    def left(self, lease: str) -> float:
        """Return how long an etcd lease lasts at most if nobody renews it; 0 if it is no more."""
        told = self._door.ask("/lease/timetolive", {"ID": lease}, effect=Effect.NONE)
        whole = float(told.get("TTL", 0))  # rounded down; -1 if there is none
        return max(0.0, min(whole + 1, float(told.get("grantedTTL", 0))))

    def put_back(self, spare: Spare) -> None:
        """Keep one that has no key."""
        with self._turn:
            self._idle.append(spare._replace(term=0))
            del self._idle[:-_MOST]


def _usable(spare: Spare, now: float) -> bool:
    return now - spare.confirmed <= _USABLE * spare.granted
