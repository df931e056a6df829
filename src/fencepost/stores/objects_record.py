"""A lease as an object: which key it has, and what is written there.

No two contents of one object are ever equal: each write has a new token or a new beat. So an etag
that is seen again means that nothing was written in between, even where etags are checksums.
"""

from __future__ import annotations

import hashlib
import json
import re

from fencepost.errors import StoreUnfit
from fencepost.model.lease import Holder, Record
from fencepost.model.named import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from fencepost.world.objects import Found, Version

ERA = "objects"  # the instants of all records are counted on the reader's own clock
_FORMAT = 1
_LONGEST_KEY = 200  # of a name; longer ones are told apart by their hash
_MOST_BREAKS = 20
_SPECIAL = re.compile(r"[^A-Za-z0-9._-]")


class Entry(NamedTuple):
    """A lease as it was read, or written by us: what, which content, when by whose stamp."""

    record: Record  # its ``expires`` is for whoever judges it to fill in
    breaks: tuple[dict[str, Any], ...]
    written_at: float  # by the wall clock of whoever wrote it
    version: Version
    modified: float  # by the server's stamp; 0 if it was written by us and not read since


def folder_of(namespace: str) -> str:
    """Return where the leases of a namespace are."""
    return f"leases.{namespace}"


def key_of(namespace: str, name: str) -> str:
    """Return the key of a lease: readable, and another one for each name."""
    readable = _SPECIAL.sub(_escaped, name)
    if len(readable) > _LONGEST_KEY:
        readable = f"=sha256={hashlib.sha256(name.encode()).hexdigest()}"
    return f"{folder_of(namespace)}/{readable}.json"


def body_of(record: Record, *, breaks: tuple[dict[str, Any], ...], written_at: float) -> bytes:
    """Return what is written for a lease."""
    nonce, host, pid, version = record.holder
    fields = {
        "fencepost": _FORMAT,
        "name": record.name,
        "token": record.token,
        "held": record.held,
        "ttl": record.ttl,
        "beat": record.beat,
        "nonce": nonce,
        "host": host,
        "pid": pid,
        "version": version,
        "since": record.since,
        "written_at": written_at,
        "ended": record.ended,
        "breaks": breaks[-_MOST_BREAKS:],
    }
    return json.dumps(fields, ensure_ascii=False).encode()


def entry_of(found: Found, *, key: str, where: str) -> Entry:
    """Read a lease back, or say that this is none."""
    try:
        fields = json.loads(found.body)
        written = fields["fencepost"]
        if written == _FORMAT:
            return _entry(fields, found)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StoreUnfit(
            f"object {key!r} of {where} is not a lease: somebody else writes there, use a prefix"
        ) from error
    raise StoreUnfit(f"lease {key!r} of {where} was written by a newer fencepost: upgrade this one")


def _entry(fields: dict[str, Any], found: Found) -> Entry:
    token = fields["token"]
    if type(token) is not int or not 0 < token < 2**53:
        raise ValueError("a token is a whole number below 2**53")
    record = Record(
        name=str(fields["name"]),
        token=token,
        holder=Holder(
            str(fields["nonce"]), str(fields["host"]), int(fields["pid"]), str(fields["version"])
        ),
        held=bool(fields["held"]),
        era=ERA,
        expires=0.0,
        ttl=float(fields["ttl"]),
        since=float(fields["since"]),
        ended=str(fields["ended"]),
        beat=int(fields["beat"]),
    )
    breaks, written_at = tuple(fields["breaks"]), float(fields["written_at"])
    return Entry(record, breaks, written_at, found.version, found.modified)


def _escaped(found: re.Match[str]) -> str:
    return "".join(f"={byte:02x}" for byte in found[0].encode())
