"""What ``s3://bucket/prefix?options`` means: where the leases are, and how they are reached."""

from __future__ import annotations

from urllib.parse import parse_qsl, unquote, urlsplit

from fencepost.errors import BadDuration, BadUrl
from fencepost.model.duration import positive
from fencepost.model.lease import SHORTEST_TTL
from fencepost.model.named import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# What a lease may be asked for at least. Each renewal is a write that is paid for, and some clouds
# allow one write a second for an object: a ttl of 15 s renews every 5.
SHORTEST = 15.0
TIMEOUT = 5.0
_SWITCHES = {"true": True, "1": True, "false": False, "0": False}
# By kind: the options of ours, and what the client calls them.
_CONFIG = {
    "s3": {
        "endpoint": "endpoint",
        "region": "region",
        "virtual_hosted": "virtual_hosted_style_request",
    },
    "gs": {"endpoint": "base_url"},
    "az": {"endpoint": "endpoint", "account": "account_name"},
}
_EVERYWHERE = ("allow_http", "shortest_ttl", "timeout")


class Address(NamedTuple):
    """A URL, taken apart and found to be sound."""

    kind: str
    bucket: str
    prefix: str
    config: Mapping[str, object]
    client: Mapping[str, object]
    shortest: float
    timeout: float
    where: str  # for messages: no secret is in it
    endpoint: str


def address_of(kind: str, address: str, *, elsewhere: str = "") -> Address:
    """Take apart what follows ``s3://``, ``gs://`` or ``az://``, or say what is wrong with it.

    ``elsewhere`` is the endpoint that counts if the URL names none.
    """
    path, _, query = address.partition("?")
    bucket, _, prefix = path.partition("/")
    prefix = unquote(prefix).strip("/")
    if "@" in path:
        raise BadUrl(f"a {kind}:// URL has no place for credentials: they are in the environment")
    if not bucket:
        raise BadUrl(f"{kind}:// names no bucket: write {kind}://bucket or {kind}://bucket/prefix")
    if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
        raise BadUrl(f"{kind}://{bucket}/{prefix} has an empty part, '.' or '..' in its prefix")
    options = dict(parse_qsl(query, keep_blank_values=True))
    known = _CONFIG[kind]
    for name in options:
        if name not in known and name not in _EVERYWHERE:
            words = ", ".join(sorted((*known, *_EVERYWHERE)))
            raise BadUrl(f"a {kind}:// URL has no option {name!r}: it has {words}")
    endpoint = _checked_endpoint(kind, options) or _host(elsewhere)
    config: dict[str, object] = {known[name]: options[name] for name in known if name in options}
    if "virtual_hosted" in options:
        config[known["virtual_hosted"]] = _switch("virtual_hosted", options)
    client = {"allow_http": True} if _switch("allow_http", options) else {}
    name = f"{kind}://{bucket}/{prefix}".rstrip("/")
    return Address(
        kind,
        bucket,
        prefix,
        config,
        client,
        _seconds("shortest_ttl", options, default=SHORTEST, least=SHORTEST_TTL),
        _seconds("timeout", options, default=TIMEOUT, least=0.1),
        f"{name} at {endpoint}" if endpoint else name,
        endpoint,
    )


def _checked_endpoint(kind: str, options: Mapping[str, str]) -> str:
    """Return the host and port of an endpoint; "" for that of the cloud itself."""
    given = options.get("endpoint")
    if given is None:
        return ""
    try:
        parts = urlsplit(given)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.scheme not in ("http", "https"):
        raise BadUrl(f"the endpoint of a {kind}:// URL must be http://host:port or https://host")
    if parts.username or parts.password:
        raise BadUrl(f"the endpoint {host} must not have credentials: they are in the environment")
    if parts.scheme == "http" and not _switch("allow_http", options):
        raise BadUrl(f"the endpoint {host} is reached by plain http: add allow_http=true if meant")
    return host if port is None else f"{host}:{port}"


def _host(url: str) -> str:
    """Return the host and port of a URL that is none of ours to judge."""
    return urlsplit(url).netloc.rpartition("@")[2] or url.rpartition("@")[2]


def _switch(name: str, options: Mapping[str, str]) -> bool:
    given = options.get(name, "false").lower()
    if given not in _SWITCHES:
        raise BadUrl(f"{name} is {given!r}: it must be true or false")
    return _SWITCHES[given]


def _seconds(name: str, options: Mapping[str, str], *, default: float, least: float) -> float:
    given = options.get(name)
    if given is None:
        return default
    try:
        value = positive(float(given) if given.replace(".", "", 1).isdigit() else given, what=name)
    except BadDuration as error:
        raise BadUrl(str(error)) from error
    if value < least:
        raise BadUrl(f"{name} is {given!r}: it must be at least {least:g} s")
    return value
