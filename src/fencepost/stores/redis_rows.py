"""How a lease is spelled in Redis: its keys, its record, and a holder on one line."""

from __future__ import annotations

import math
import re

from fencepost.errors import Misuse
from fencepost.model.lease import Holder, Record
from fencepost.model.name import base
from fencepost.model.named import NamedTuple
from fencepost.world.redis import packed

ERA = "the server's clock"


class Keys(NamedTuple):
    """The keys of one name, packed, and which of the permits of a semaphore it is."""

    lease: bytes
    three: bytes  # lease, line, seen
    four: bytes  # and breaks
    which: bytes  # "#2" for the second permit, else empty


def keys_of(namespace: str, name: str) -> Keys:
    """Return the keys of a name. All permits of a semaphore have one line, and one hash slot."""
    whole = base(name)
    which = name[len(whole) :]
    slot = f"fp:{{{namespace}:{whole}}}:"
    # Who wants a lock and who wants any permit of a semaphore never stand in one line.
    line = "s" if which else ""
    lease = packed(f"{slot}lease{which}".encode())
    three = lease + packed(f"{slot}line{line}".encode(), f"{slot}seen{line}".encode())
    return Keys(lease, three, three + packed(f"{slot}breaks{which}".encode()), which.encode())


def pattern_of(namespace: str) -> bytes:
    """Return what SCAN matches all records of a namespace with, and more."""
    return f"fp:{{{namespace}:*}}:lease*".encode()


def name_in(key: bytes, namespace: str) -> str | None:
    """Return the name whose record that key is, or None if it is something else."""
    found = re.fullmatch(
        rf"fp:\{{{re.escape(namespace)}:(.+)\}}:lease(#\d+)?", key.decode(errors="replace")
    )
    return None if found is None else found[1] + (found[2] or "")


def us(seconds: float) -> bytes:
    """Return a duration in whole microseconds, never less than was asked for."""
    return b"%d" % math.ceil(seconds * 1e6)


def who_of(host: str, pid: int, version: str) -> bytes:
    """Return a holder, but for its nonce, on one line."""
    version = re.sub(r"\s", "_", version)
    host = re.sub(r"[\r\n]", " ", host)
    return f"{pid} {version} {host}".encode()


def record_of(name: str, text: bytes) -> Record:
    """Read a record."""
    fields = text.decode(errors="replace").split("\n", 9)
    if len(fields) != 10 or fields[0] != "1":
        raise Misuse(f"the record of lease {name!r} has another format: is it of a newer version?")
    _, held, token, nonce, _spent, ttl_us, ends_us, since_us, who, ended = fields
    pid, version, host = who.split(" ", 2)
    return Record(
        name=name,
        token=int(token),
        holder=Holder(nonce, host, int(pid), version),
        held=held == "1",
        era=ERA,
        expires=int(ends_us) / 1e6,
        ttl=int(ttl_us) / 1e6,
        since=int(since_us) / 1e6,
        ended=ended or ("" if held == "1" else "it was released"),
    )


def read_answer(name: str, answer: bytes) -> tuple[float, Record | None]:
    """Return the server's time and the record, from what a script answered after its first word."""
    now_us, _, text = answer[1:].partition(b"\n")
    return int(now_us) / 1e6, record_of(name, text) if text else None
