"""What an etcd URL says: endpoints, a prefix for all keys, who we are, and which certificates."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, unquote

from fencepost.errors import BadUrl
from fencepost.model.named import NamedTuple
from fencepost.world.etcd import Credentials
from fencepost.world.etcd_wire import Endpoint

_PORT = 2379
_ENDPOINT = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\[\]:@/]+))(?::(\d{1,5}))?\Z")


class Target(NamedTuple):
    """Which cluster, and where in it."""

    endpoints: list[Endpoint]
    prefix: str
    credentials: Credentials | None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None


def read_url(scheme: str, address: str) -> Target:
    """Read what follows ``etcd://`` or ``etcds://``."""
    where, _, options = address.partition("?")
    hosts, _, prefix = where.partition("/")
    if "@" in prefix or "@" in options:  # then what stands before may be part of a password
        raise BadUrl(
            f"an {scheme}:// URL has an @ after its endpoints: write %2F, %3F and %40 "
            "for /, ? and @ in a password, a prefix or an option"
        )
    user, at, hosts = hosts.rpartition("@")
    credentials = None
    if at:
        name, colon, password = user.partition(":")
        if not name or not colon:
            raise BadUrl(f"an {scheme}:// URL names a user as user:password@")
        credentials = Credentials(unquote(name), unquote(password))
    endpoints = [_endpoint(scheme, text) for text in hosts.split(",")]
    given = dict(parse_qsl(options, keep_blank_values=True))
    known = {"ca", "cert", "key"} if scheme == "etcds" else set()
    unknown = sorted(given.keys() - known)
    if unknown:
        hint = "ca, cert and key are known" if known else "only etcds:// has options"
        raise BadUrl(f"an {scheme}:// URL has unknown options {', '.join(unknown)}: {hint}")
    root = unquote(prefix).strip("/") or "fencepost"
    return Target(
        endpoints, root, credentials, given.get("ca"), given.get("cert"), given.get("key")
    )


def _endpoint(scheme: str, text: str) -> Endpoint:
    found = _ENDPOINT.match(text)
    port = int(found[3] or _PORT) if found else 0
    if found is None or not 0 < port < 65_536:
        # What it says is not shown: without an @ it may be a password.
        raise BadUrl(
            f"an {scheme}:// URL names what is not an endpoint of etcd: "
            f"write {scheme}://[user:password@]host:port,host:port/prefix"
        )
    return Endpoint(found[1] or found[2], port)
