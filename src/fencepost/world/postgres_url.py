"""A PostgreSQL URL is read once: what is for libpq, what is for us, and what may be shown of it."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, unquote, urlencode

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fencepost.errors import BadUrl
from fencepost.model.named import NamedTuple

# A dead peer is found within half a minute, whatever the system's own settings are. The session
# must be one that can write: a standby would answer with leases of yesterday.
_DEFAULTS = {
    "application_name": "fencepost",
    "keepalives": "1",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "20000",
    "target_session_attrs": "read-write",
    "client_encoding": "utf8",
}
_OURS = ("schema", "advisory")
_CHOICES = ("auto", "on", "off")
_UNREADABLE = (
    "the postgresql:// URL cannot be read: write postgresql://user@host:5432/database, with "
    "special characters of the password %-escaped"
)


class Address(NamedTuple):
    """Where a database is. ``shown`` has no secret in it: host, port and database."""

    attempts: tuple[str, ...]  # one conninfo for each host, in order
    shown: str
    schema: str = "public"
    advisory: str = "auto"

    @property
    def quoted_schema(self) -> str:
        """The schema as it is written in a statement."""
        return '"' + self.schema.replace('"', '""') + '"'


def read_address(address: str) -> Address:
    """Read what follows ``postgresql://``; raise ``BadUrl`` if it cannot be an address."""
    place, _, query = address.partition("?")
    if _has_a_torn_password(place):
        raise BadUrl(_UNREADABLE)
    given = parse_qsl(query, keep_blank_values=True)
    ours = {name: value for name, value in given if name in _OURS}
    theirs = urlencode([(name, value) for name, value in given if name not in _OURS])
    advisory = ours.get("advisory", "auto")
    if advisory not in _CHOICES:
        raise BadUrl(f"advisory={advisory!r} is not one of {', '.join(_CHOICES)}")
    schema = ours.get("schema", "public")
    if not schema or "\0" in schema or len(schema.encode()) > 63:
        raise BadUrl(f"schema={schema!r} cannot be the name of a PostgreSQL schema")
    parts = _parts(f"postgresql://{place}" + (f"?{theirs}" if theirs else ""))
    return Address(_attempts(parts), _shown(parts), schema, advisory)


def _has_a_torn_password(place: str) -> bool:
    """Say whether a sign that should be escaped ended the password before its end.

    Then an @ comes too late, or what stands where a port should is no number.
    """
    netloc, _, database = place.partition("/")
    user, at, hosts = netloc.partition("@")
    if "@" in hosts or "@" in database:
        return True
    hosts = hosts if at else user
    ports = [host.rpartition("]")[2].partition(":")[2] for host in hosts.split(",")]
    return not all(port.isdecimal() for port in ports if port)


def _parts(url: str) -> dict[str, str]:
    try:
        found = conninfo_to_dict(url)
    except ProgrammingError as error:
        raise BadUrl(_why_unreadable(str(error), url)) from None  # the cause may quote the password
    return _DEFAULTS | {name: str(value) for name, value in found.items() if value is not None}


def _why_unreadable(said: str, url: str) -> str:
    """Return what is wrong with a URL, without a piece of it that may be one of the password."""
    unknown = re.search(r'invalid URI query parameter: "(\w+)"', said)
    if unknown and "%40" not in url.partition("?")[2]:
        return (
            f"the postgresql:// URL has an option {unknown[1]!r} that neither libpq nor fencepost "
            f"knows: ours are {' and '.join(_OURS)}"
        )
    if "percent" in said:
        return "the postgresql:// URL has a malformed %-escape: write '%25' for a percent sign"
    return _UNREADABLE


def _attempts(parts: dict[str, str]) -> tuple[str, ...]:
    """Return one conninfo per host: each gets its own share of the time to answer."""
    hosts = parts.get("host", "").split(",")
    ports = parts.get("port", "").split(",")
    if len(ports) not in (1, len(hosts)):
        raise BadUrl(f"the postgresql:// URL has {len(hosts)} hosts and {len(ports)} ports")
    if not all(port.isdecimal() for port in ports if port):
        raise BadUrl(_UNREADABLE)
    ports = ports * len(hosts) if len(ports) == 1 else ports
    rest = {name: value for name, value in parts.items() if name not in ("host", "port")}
    found = []
    for host, port in zip(hosts, ports, strict=False):
        one = rest | ({"host": host} if host else {}) | ({"port": port} if port else {})
        found.append(make_conninfo("", **one))
    return tuple(found)


def _shown(parts: dict[str, str]) -> str:
    hosts = parts.get("host", "").split(",")
    ports = parts.get("port", "5432").split(",")
    ports = ports * len(hosts) if len(ports) == 1 else ports
    where = ",".join(
        f"{unquote(host) or 'localhost'}:{port or '5432'}"
        for host, port in zip(hosts, ports, strict=False)
    )
    return f"{where}/{parts.get('dbname') or parts.get('user') or ''}"
