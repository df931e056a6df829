"""What ZooKeeper keeps of a lease: a lock that ends with a session, a record that does not end.

Both say the same. The record's version is what every change compares, so the token in it is above
all earlier ones, and a nonce that has released is known for as long as it was the last.
"""

from __future__ import annotations

import hashlib
import json
from urllib.parse import quote

from fencepost.model.lease import Holder, Record
from fencepost.model.named import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from fencepost.world.zookeeper import Node

ERA = "zookeeper"  # there is no instant but now, before and after
NOW, _PAST, _FUTURE = 1.0, 0.0, 2.0
_LONGEST = 200  # characters of a node's name; what is longer is known by its hash


class Paths:
    """Where nodes are. Slashes and the like in names are escaped."""

    def __init__(self, root: str, namespace: str) -> None:
        self.top = f"/{root}/{namespace}"
        self.locks, self.records = f"{self.top}/lock", f"{self.top}/record"
        self.audits = f"{self.top}/audit"
        parts = root.split("/")
        above = ["/" + "/".join(parts[: number + 1]) for number in range(len(parts))]
        self.all = (*above, self.top, self.locks, self.records, self.audits)

    def lock(self, name: str) -> str:
        """Return the path of what is there while somebody has the lease."""
        return f"{self.locks}/{_escaped(name)}"

    def record(self, name: str) -> str:
        """Return the path of what says who has, or last had, the lease."""
        return f"{self.records}/{_escaped(name)}"

    def audit(self, name: str, *, token: int) -> str:
        """Return the path of what says who broke the lease of this token, and why."""
        return f"{self.audits}/{token}-{_escaped(name)}"


class Text(NamedTuple):
    """What a lock or a record says."""

    name: str
    holder: Holder
    token: int
    since: float
    ttl: float
    ended: str = ""

    def __str__(self) -> str:
        words = {**self._asdict(), "holder": self.holder._asdict(), "version": 1}
        return json.dumps(words, separators=(",", ":"), ensure_ascii=False)


def text_of(node: Node) -> Text:
    """Read what ``Text`` wrote."""
    words: dict[str, Any] = json.loads(node.text)
    holder = words["holder"]
    return Text(
        words["name"],
        Holder(holder["nonce"], holder["host"], holder["pid"], holder["version"]),
        *(words[field] for field in Text._fields[2:]),
    )


def record_of(*, lock: Node | None, record: Node | None) -> Record | None:
    """Return what the two nodes of a lease say, for the arithmetic of leases."""
    node = lock or record
    if node is None:
        return None
    text = text_of(node)
    return Record(
        name=text.name,
        token=text.token,
        holder=text.holder,
        held=not text.ended,
        era=ERA,
        expires=_PAST if lock is None else _FUTURE,
        ttl=text.ttl,
        since=text.since,
        ended=text.ended,
        beat=node.changed,
    )


def agree(lock: Node, record: Node) -> bool:
    """Say whether both are of the same grant."""
    ours, kept = text_of(lock), text_of(record)
    return (ours.holder.nonce, ours.token) == (kept.holder.nonce, kept.token)


def _escaped(name: str) -> str:
    plain = "n-" + quote(name, safe="")
    if len(plain) <= _LONGEST:
        return plain
    return "h-" + hashlib.sha256(name.encode()).hexdigest()
