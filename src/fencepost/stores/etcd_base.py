"""A token is a revision of etcd's plus a base, which is kept in etcd and only ever rises.

The base is chosen so that tokens begin at the wall time in µs: so they stand above those of any
store that was used before, and, because no cluster commits a million times a second, below those of
any that is used after. Whoever opens a store and asks for its first lease raises a base that has
fallen behind the time: so tokens do not fall either for those who moved to another store and come
back, or whose etcd was restored from a snapshot, whose revisions begin again where they were. Every
grant compares the base that it uses, so there is only one at a time.

Who had the store open all the time cannot see that etcd was set back. But members must go down for
that, and with them go connections. So a base is good only for connections that were there before it
was read, and what was granted by a newer one is taken back.
"""

from __future__ import annotations

from fencepost.errors import StoreUnavailable
from fencepost.model.named import NamedTuple
from fencepost.stores.etcd_txn import absent, answer_of, changed, get, put
from fencepost.world.etcd import Effect

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from fencepost.stores.etcd_txn import Answer
    from fencepost.world.api import World
    from fencepost.world.etcd import EtcdDoor

_LAST_US = 2**53 - 2**50  # the year 2219: a clock beyond it is wrong, and tokens must fit JSON
_MOST_RACES = 20


class Known(NamedTuple):
    """A base, and what a grant must be compared with."""

    base: int
    above: int  # the highest token that was granted before
    newest: int  # connection that the base is good for


class TokenBase:
    """The base of one namespace, as this store object knows it."""

    def __init__(self, world: World, door: EtcdDoor, *, key: str) -> None:
        self._world, self._door, self._key = world, door, key
        self._base: int | None = None
        self._newest = 0  # connection that was there when the base was read
        self.highest = 0  # token that was granted through this object

    def known(self, *, timeout: float) -> Known:
        """Return the base; the first time, and after a new connection, it is made or raised."""
        base, newest = self._base, self._newest
        if base is None or self._door.opened > newest or not self._door.is_open():
            base, newest = self._settled(timeout)
            self._base, self._newest = base, newest
        return Known(base, self.highest, newest)

    def learn(self, value: str | None) -> None:
        """Take note of what the base is by now; None if it is gone."""
        self._base = None if value is None else int(value)

    def granted(self, token: int, known: Known, *, wire: int) -> bool:
        """Take note of a token; say whether it surely is above all others."""
        self.highest = max(self.highest, token)
        good = token > known.above and wire <= known.newest
        if not good:  # etcd was set back, or may have been
            self._base = None  # it is raised before the next grant
        return good

    def _settled(self, timeout: float) -> tuple[int, int]:
        """Return the base and the newest connection that was there before it was read."""
        for _ in range(_MOST_RACES):
            before = self._door.opened
            found = self._ask({"success": [get(self._key)]}, Effect.NONE, timeout)
            kv, newest = found.first(0), max(before, found.wire)
            current = None if kv is None else int(kv.value) + found.revision
            wanted = self._wanted(current)
            if kv is not None and wanted is None:
                return int(kv.value), newest
            base = str((wanted or 1) - found.revision)
            unchanged = absent(self._key) if kv is None else changed(self._key, revision=kv.changed)
            txn = {"compare": [unchanged], "success": [put(self._key, base)]}
            if self._ask(txn, Effect.AGAIN, timeout).done:
                return int(base), newest
        raise StoreUnavailable(f"{self._door.where}: the base of tokens changes all the time")

    def _wanted(self, current: int | None) -> int | None:
        """Return what the next token should be at least, or None if it is well as it is."""
        wall_us = int(self._world.clocks.wall() * 1e6)
        if not 0 < wall_us < _LAST_US:
            wall_us = 0
        if current is None:
            return max(wall_us, self.highest + 1)
        if current <= self.highest or current < wall_us:
            return max(wall_us, self.highest + 1, current)
        return None

    def _ask(self, txn: dict[str, Any], effect: Effect, timeout: float) -> Answer:
        return answer_of(self._door.ask("/kv/txn", txn, effect=effect, timeout=timeout))
