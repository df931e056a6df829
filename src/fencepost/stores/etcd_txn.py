"""The words of an etcd transaction: what must be true, what is then done, what is read if not."""

from __future__ import annotations

from base64 import b64decode, b64encode

from fencepost.model.named import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Kv(NamedTuple):
    """A key as it was read."""

    key: str
    value: str
    created: int  # the revision in which it came to be; a put does not change it, a delete does
    changed: int
    lease: str  # "0" if it stays for ever


class Answer(NamedTuple):
    """What a transaction came to."""

    done: bool
    revision: int
    term: int  # of the leader that a quorum agreed on for this
    read: tuple[tuple[Kv, ...], ...]  # one for each get, in order
    wire: int = 0  # the number of the connection that it came by

    def first(self, number: int) -> Kv | None:
        """Return the only key that this get was about, if it is there."""
        return self.read[number][0] if self.read[number] else None


def absent(key: str) -> dict[str, Any]:
    """Demand that there is no such key."""
    return created(key, revision=0)


def created(key: str, *, revision: int) -> dict[str, Any]:
    """Demand that the key came to be in this revision, and was there ever since."""
    return {"key": _b64(key), "target": "CREATE", "create_revision": revision}


def changed(key: str, *, revision: int) -> dict[str, Any]:
    """Demand that nobody has written to the key since this revision."""
    return {"key": _b64(key), "target": "MOD", "mod_revision": revision}


def is_value(key: str, value: str) -> dict[str, Any]:
    """Demand that the key is there and says this."""
    return {"key": _b64(key), "target": "VALUE", "value": _b64(value)}


def is_not_value(key: str, value: str) -> dict[str, Any]:
    """Demand that the key is there and says something else."""
    return {**is_value(key, value), "result": "NOT_EQUAL"}


def put(key: str, value: str, *, lease: str | None = None) -> dict[str, Any]:
    """Write the key, for as long as the lease lives if there is one."""
    words = {"key": _b64(key), "value": _b64(value)}
    return {"request_put": words if lease is None else {**words, "lease": lease}}


def delete(key: str) -> dict[str, Any]:
    """Remove the key."""
    return {"request_delete_range": {"key": _b64(key)}}


def get(key: str) -> dict[str, Any]:
    """Read the key."""
    return {"request_range": {"key": _b64(key)}}


def get_all(prefix: str) -> dict[str, Any]:
    """Read all keys that begin with ``prefix``."""
    after = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    return {"request_range": {"key": _b64(prefix), "range_end": _b64(after)}}


def answer_of(told: dict[str, Any]) -> Answer:
    """Return what the gateway's answer to a transaction says."""
    read = tuple(
        tuple(map(_kv, response["response_range"].get("kvs", ())))
        for response in told.get("responses", ())
        if "response_range" in response
    )
    header = told["header"]
    done = bool(told.get("succeeded"))
    revision, term = int(header["revision"]), int(header["raft_term"])
    return Answer(done, revision, term, read, int(told.get("_wire", 0)))


def _kv(words: dict[str, str]) -> Kv:
    return Kv(
        b64decode(words["key"]).decode(),
        b64decode(words.get("value", "")).decode(),
        int(words["create_revision"]),
        int(words["mod_revision"]),
        words.get("lease", "0"),
    )


def _b64(text: str) -> str:
    return b64encode(text.encode()).decode()
