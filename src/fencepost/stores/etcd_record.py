"""What etcd keeps of a lease: a lock that ends with an etcd lease, a record that does not end.

Both are written in one transaction and say the same. The token is not in them: it is the base they
were written with plus the revision of that transaction, which etcd puts beside each key. Who
changes a record later writes the token into it.
"""

from __future__ import annotations

import json
import math

from fencepost.model.lease import Holder, Record
from fencepost.model.named import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from fencepost.stores.etcd_txn import Kv

ERA = "etcd"  # its leader's clock decides; we never see an instant of it
NOW, _PAST, _FUTURE = 1.0, 0.0, 2.0
NOBODY = "-"  # where a nonce would be, if one had released the lease


class Keys:
    """The names of keys. A lease's own name stands last, so that it may contain anything."""

    def __init__(self, prefix: str, namespace: str) -> None:
        self._root = f"{prefix}/{namespace}/"
        self.base = self._root + "base"
        self.locks, self.records = self._root + "lock/", self._root + "record/"

    def lock(self, name: str) -> str:
        """Name what is there while somebody has the lease."""
        return self.locks + name

    def record(self, name: str) -> str:
        """Name what says who has, or last had, the lease."""
        return self.records + name

    def spent(self, name: str) -> str:
        """Name the nonce that last gave the lease back: it must not be granted it again."""
        return f"{self._root}spent/{name}"

    def audit(self, name: str, *, token: int) -> str:
        """Name what says who broke the lease of this token, and why."""
        return f"{self._root}audit/{token}/{name}"


class Text(NamedTuple):
    """What a lock or a record says."""

    holder: Holder
    base: int
    since: float
    ttl: float
    seconds: int  # what etcd was asked to keep
    token: int = 0  # 0: of the transaction that wrote it
    ended: str = ""

    def __str__(self) -> str:
        words = {**self._asdict(), "holder": self.holder._asdict(), "version": 1}
        return json.dumps(words, separators=(",", ":"), ensure_ascii=False)


def text_of(value: str) -> Text:
    """Read what ``Text`` wrote."""
    words: dict[str, Any] = json.loads(value)
    holder = words["holder"]
    return Text(
        Holder(holder["nonce"], holder["host"], holder["pid"], holder["version"]),
        *(words[field] for field in Text._fields[1:]),
    )


def record_of(name: str, *, lock: Kv | None, record: Kv | None) -> Record | None:
    """Return what the two keys of a lease say, for the arithmetic of leases.

    etcd removes the lock when its time is over: there is no instant but now, before and after.
    """
    kv = lock or record
    if kv is None:
        return None
    text = text_of(kv.value)
    token = text.token or text.base + (kv.created if lock is not None else kv.changed)
    return Record(
        name=name,
        token=token,
        holder=text.holder,
        held=not text.ended,
        era=ERA,
        expires=_PAST if lock is None else _FUTURE,
        ttl=text.ttl,
        since=text.since,
        ended=text.ended,
    )


def whole_seconds(ttl: float) -> int:
    """Return the ttl as etcd counts: never less than was asked for."""
    return max(1, math.ceil(ttl))
