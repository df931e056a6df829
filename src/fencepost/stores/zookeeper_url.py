"""What a ZooKeeper URL says: servers, a root for all nodes, who we are, how long a session is."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, unquote

from fencepost.errors import BadUrl
from fencepost.model.named import NamedTuple

# The longest that servers grant by default; three quarters of it are the usual ttl.
SESSION = 40.0
_PORT = 2181
_SERVER = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\[\]:@/]+)(?::(\d{1,5}))?\Z")


class Target(NamedTuple):
    """Which ensemble, and where in it."""

    hosts: str
    root: str
    credentials: tuple[str, str] | None
    session: float


def read_url(address: str) -> Target:
    """Read what follows ``zookeeper://``."""
    where, _, options = address.partition("?")
    hosts, _, root = where.partition("/")
    if "@" in root or "@" in options:  # then what stands before may be part of a password
        raise BadUrl(
            "a zookeeper:// URL has an @ after its servers: write %2F, %3F and %40 "
            "for /, ? and @ in a password, a root or an option"
        )
    user, at, hosts = hosts.rpartition("@")
    credentials = None
    if at:
        name, colon, password = user.partition(":")
        if not name or not colon:
            raise BadUrl("a zookeeper:// URL names a user as user:password@")
        credentials = unquote(name), unquote(password)
    servers = ",".join(_server(text) for text in hosts.split(","))
    given = dict(parse_qsl(options, keep_blank_values=True))
    unknown = sorted(given.keys() - {"session"})
    if unknown:
        raise BadUrl(
            f"a zookeeper:// URL has unknown options {', '.join(unknown)}: session is known"
        )
    root = unquote(root).strip("/") or "fencepost"
    if any(part in ("", ".", "..", "zookeeper") for part in root.split("/")):
        raise BadUrl(f"{root!r} cannot be the root of nodes: write zookeeper://host:port/root")
    return Target(servers, root, credentials, _session(given.get("session", str(SESSION))))


def _server(text: str) -> str:
    found = _SERVER.match(text)
    port = int(found[2] or _PORT) if found else 0
    if found is None or not 0 < port < 65_536:
        # What it says is not shown: without an @ it may be a password.
        raise BadUrl(
            "a zookeeper:// URL names what is not a ZooKeeper server: "
            "write zookeeper://[user:password@]host:port,host:port/root"
        )
    return f"{found[1]}:{port}"


def _session(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise BadUrl(f"session={text} is not a number of seconds from 0.1 to 3600")
    return seconds
