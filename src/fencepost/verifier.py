"""The fence of an HTTP service: it refuses requests whose token is older than one it has seen.

``FenceASGI`` and ``FenceWSGI`` wrap an application. A request that carries ``Fencing-Token`` is
compared with the highest token that its resource has seen, in a table that all processes of the
service share. What is stale is answered with 412 and never reaches the application.

A request is admitted before it is handled, in a transaction of its own. So this refuses whatever
*arrives* after the successor's first request; docs/fencing.md says how to close the rest.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import NamedTuple, Protocol

from fencepost.errors import Misuse, OutcomeUnknown, StoreUnavailable, TokenStale
from fencepost.fence import (
    CREATE_GUARD,
    FENCING_FORMER,
    FENCING_RESOURCE,
    FENCING_TOKEN,
    HIGHEST_TOKEN,
    checked_token,
    find_guard,
    raise_guard,
)
from fencepost.model.fenced import Former
from fencepost.model.lease import admits
from fencepost.model.name import LONGEST
from fencepost.world.blocking import BlockingWorld
from fencepost.world.disk import LOCAL, file_system
from fencepost.world.sqlite import SqliteFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
    from sqlite3 import Connection
    from typing import Any

    Scope = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Any]]
    Send = Callable[[Any], Awaitable[None]]
    ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
    Environ = dict[str, Any]
    StartResponse = Callable[..., Any]
    WSGIApp = Callable[[Environ, StartResponse], Iterable[bytes]]

# Where the application finds what was admitted, in its scope or environ.
TOKEN_KEY = "fencepost.token"
RESOURCE_KEY = "fencepost.resource"

# Methods that change nothing by definition (RFC 9110): a token is never demanded of them.
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})

# A namespace of 100 characters, a slash and the longest name; for a run also its slot.
LONGEST_RESOURCE = 100 + 1 + LONGEST + 100

_STATUS = {
    400: "400 Bad Request",
    412: "412 Precondition Failed",
    428: "428 Precondition Required",
    503: "503 Service Unavailable",
}


class Guards(Protocol):
    """The highest token that each resource has seen, shared by all processes of a service."""

    def admit(self, resource: str, *, token: int) -> None:
        """Return if no higher token was seen, and from then on refuse lower ones.

        Raises ``TokenStale``, or ``StoreUnavailable`` where nothing can be said. What it admitted
        must survive a power cut before it returns. It is called from any thread, and may block.
        """


class SqliteGuards:
    """Guards in one SQLite file, for any number of threads and processes of one machine.

    It may be the service's own database: the table is the one that ``lease.fence(conn)`` uses.
    The file is switched to WAL, and what was admitted survives a power cut. A forked child opens
    it anew.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        name = os.path.abspath(os.fspath(path))  # a service may change its folder later on
        kind = file_system(os.path.dirname(name))
        if kind is not None and kind not in LOCAL:
            raise Misuse(
                f"{name!r} is on {kind}, which another machine might write to as well: keep the "
                "guards of a service on a local disk"
            )
        self._file = SqliteFile(BlockingWorld(), name, set_up=_create)

    def admit(self, resource: str, *, token: int) -> None:
        """Return if no higher token was seen, and from then on refuse lower ones."""
        checked_token(token)
        highest = self.highest(resource)
        if token > highest:  # the first request of a holder writes; the others only read

            def work(connection: Connection) -> int:
                return raise_guard(connection, resource=resource, token=token)

            highest = self._file.write(work, durable=True)
        if not admits(highest, token):
            raise TokenStale(resource, token=token, highest=highest)

    def highest(self, resource: str) -> int:
        """Return the highest token that ``resource`` has seen; 0 if none."""

        def work(connection: Connection) -> int:
            return find_guard(connection, resource=resource)

        return self._file.read(work)

    def close(self) -> None:
        """Close the file; the next call opens it again."""
        self._file.close()


class Refusal(NamedTuple):
    """A request that goes no further, and what its sender is told."""

    status: int
    code: str
    message: str
    hint: str
    highest: int | None = None

    def body(self) -> bytes:
        """Return the refusal as JSON, in the one shape that all of fencepost's errors have."""
        import json  # refusals are rare

        error: dict[str, object] = {"code": self.code, "message": self.message, "hint": self.hint}
        if self.highest is not None:
            error["highest"] = self.highest
        return json.dumps({"error": error}).encode()

    def headers(self, body: bytes) -> list[tuple[str, str]]:
        """Return the headers of the answer."""
        pairs = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        return [*pairs, ("Retry-After", "1")] if self.status == 503 else pairs


class Presented(NamedTuple):
    """What a request claims: to act on ``resource`` for the holder of ``token``."""

    resource: str
    token: int
    formers: tuple[Former, ...] = ()  # what earlier attempts of the same run acted on


def presented(
    method: str,
    *,
    tokens: list[str],
    resource: str | None,
    required: bool,
    formers: Sequence[str] = (),
) -> Presented | Refusal | None:
    """Read a request's claim. None if it makes none and none is required.

    A safe method need not carry a token, but one that does is held to it: a successor that reads
    with its token shuts its predecessor out before it decides anything.
    """
    if not tokens:
        return _missing(method) if required and method not in SAFE_METHODS else None
    if len(tokens) > 1 or not _is_token(tokens[0]):
        return Refusal(
            400,
            "token_malformed",
            f"{FENCING_TOKEN} is {', '.join(tokens)[:80]!r}",
            "send one whole number from 1 to 2**63 - 1, as lease.headers() gives it",
        )
    if not resource or len(resource) > LONGEST_RESOURCE:
        return Refusal(
            400,
            "resource_malformed",
            f"{FENCING_RESOURCE} is missing, too long or not percent-encoded UTF-8",
            "send both headers that lease.headers() gives",
        )
    earlier = read_formers(formers)
    if earlier is None:
        return Refusal(
            400,
            "former_malformed",
            f"{FENCING_FORMER} is {', '.join(formers)[:80]!r}",
            "send all headers that run.headers() gives",
        )
    return Presented(resource, int(tokens[0]), earlier)


def read_formers(values: Sequence[str]) -> tuple[Former, ...] | None:
    """Return the resources that ``Fencing-Former`` names; None if one is unreadable."""
    found = []
    for text in ",".join(values).split(",") if values else ():
        name, _, token = text.strip().rpartition(";")
        resource = read_resource([name])
        if not resource or len(resource) > LONGEST_RESOURCE or not _is_token(token):
            return None
        found.append(Former(resource, int(token)))
    return tuple(found)


def read_resource(values: list[str]) -> str | None:
    """Return the resource that ``Fencing-Resource`` names; None if it is missing or unreadable."""
    if len(values) != 1 or "," in values[0] or not values[0].isascii():
        return None
    if "%" not in values[0]:
        return values[0]
    from urllib.parse import unquote  # dear, and most names are plain

    try:
        return unquote(values[0], errors="strict")
    except UnicodeDecodeError:
        return None


def verdict(guards: Guards, claim: Presented) -> Refusal | None:
    """Ask the guards; None if the claim was admitted. May block."""
    try:
        for name, seen in claim.formers:
            with suppress(TokenStale):  # a later holder of it was here, so it is shut already
                guards.admit(name, token=min(seen + 1, HIGHEST_TOKEN))
        guards.admit(claim.resource, token=claim.token)
    except TokenStale as stale:
        return Refusal(
            412,
            "token_stale",
            str(stale),
            "the lease was lost: stop, and acquire it again before any other request",
            stale.highest,
        )
    except (StoreUnavailable, OutcomeUnknown) as error:
        return Refusal(
            503,
            "guards_unavailable",
            f"the token could not be compared: {error}",
            "nothing was done; send the same request again",
        )
    return None


class FenceASGI:
    """An ASGI application behind a fence. Only HTTP requests are guarded, not websockets.

    ``resource`` is the one that this service guards, or a function of the scope that names it;
    without it the request's ``Fencing-Resource`` does. ``required`` refuses requests without a
    token, except those of safe methods.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        guards: Guards,
        resource: str | Callable[[Scope], str] | None = None,
        required: bool = False,
    ) -> None:
        self._app, self._guards = app, guards
        self._resource, self._required = resource, required

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand an admitted request on, its token in the scope; answer any other here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        claim = self._claim(scope)
        if isinstance(claim, Presented):
            from asyncio import to_thread  # the loop must go on while the disk is busy

            refusal = await to_thread(verdict, self._guards, claim)
            scope = {**scope, TOKEN_KEY: claim.token, RESOURCE_KEY: claim.resource}
        else:
            refusal = claim
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await _send_refusal(refusal, send=send, method=scope["method"])

    def _claim(self, scope: Scope) -> Presented | Refusal | None:
        tokens = _asgi_values(scope, FENCING_TOKEN)
        resource = None
        if tokens:
            resource = _resource_of(scope, self._resource, _asgi_values(scope, FENCING_RESOURCE))
        # A service that names the resource itself has one name for all attempts.
        formers = _asgi_values(scope, FENCING_FORMER) if self._resource is None else ()
        return presented(
            scope["method"],
            tokens=tokens,
            resource=resource,
            required=self._required,
            formers=formers,
        )


class FenceWSGI:
    """A WSGI application behind a fence; the twin of ``FenceASGI``."""

    def __init__(
        self,
        app: WSGIApp,
        *,
        guards: Guards,
        resource: str | Callable[[Environ], str] | None = None,
        required: bool = False,
    ) -> None:
        self._app, self._guards = app, guards
        self._resource, self._required = resource, required

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Hand an admitted request on, its token in the environ; answer any other here."""
        claim = self._claim(environ)
        if isinstance(claim, Presented):
            refusal = verdict(self._guards, claim)
            environ[TOKEN_KEY], environ[RESOURCE_KEY] = claim.token, claim.resource
        else:
            refusal = claim
        if refusal is None:
            return self._app(environ, start_response)
        body = refusal.body()
        start_response(_STATUS[refusal.status], refusal.headers(body))
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def _claim(self, environ: Environ) -> Presented | Refusal | None:
        tokens = _wsgi_values(environ, FENCING_TOKEN)
        resource = None
        if tokens:
            named = _wsgi_values(environ, FENCING_RESOURCE)
            resource = _resource_of(environ, self._resource, named)
        formers = _wsgi_values(environ, FENCING_FORMER) if self._resource is None else ()
        return presented(
            environ["REQUEST_METHOD"],
            tokens=tokens,
            resource=resource,
            required=self._required,
            formers=formers,
        )


def _missing(method: str) -> Refusal:
    return Refusal(
        428,
        "token_required",
        f"a {method} needs the header {FENCING_TOKEN}",
        "acquire the lease, and send what lease.headers() gives",
    )


def _is_token(text: str) -> bool:
    """Say whether ``text`` is a token as ``str(token)`` writes it: no sign, no leading zero."""
    plain = text.isascii() and text.isdigit() and text[0] != "0" and len(text) <= 19
    return plain and int(text) <= HIGHEST_TOKEN


def _resource_of(
    request: Any, fixed: str | Callable[[Any], str] | None, named: list[str]
) -> str | None:
    """Return what the request acts on: as the service says, else as the request's header does."""
    if fixed is None:
        return read_resource(named)
    return fixed(request) if callable(fixed) else fixed


def _asgi_values(scope: Scope, name: str) -> list[str]:
    wanted = name.lower().encode()
    return [value.decode("latin-1") for key, value in scope["headers"] if key.lower() == wanted]


def _wsgi_values(environ: Environ, name: str) -> list[str]:
    value = environ.get("HTTP_" + name.upper().replace("-", "_"))
    return [] if value is None else [value]


async def _send_refusal(refusal: Refusal, *, send: Send, method: str) -> None:
    body = refusal.body()
    headers = [(name.lower().encode(), value.encode()) for name, value in refusal.headers(body)]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if method == "HEAD" else body})


def _create(connection: Connection) -> None:
    connection.execute(CREATE_GUARD)
