"""A job's body can be a request to an HTTP endpoint, which says by its answer how it went.

==========================  =====================================================================
2xx                         done; JSON in the answer is the run's result, if it is small
202                         accepted: the run is handed off, and a callback ends it
423                         somebody else has it: tried again if the policy allows, else skipped
429, 503 + ``Retry-After``  failed, and not tried again any sooner
408, 425, 429, other 5xx    failed, and worth another try; so is an endpoint that is not reached
other 4xx, and redirects    failed for good: to ask again would not help
==========================  =====================================================================

A request that was sent and not answered may have been carried out, and the error says so. Each try
carries the same ``Idempotency-Key`` and a higher ``Fencing-Token``. No redirect is followed: what
was signed for one address is not told to another.
"""

from __future__ import annotations

import base64
import json
import logging
import time
from contextvars import ContextVar
from functools import lru_cache
from urllib.parse import quote, unquote, urlsplit

from fencepost.errors import BadUrl, GiveUp, MissingExtra, Misuse, RetryAfter, RunTimedOut, Said
from fencepost.executors.signing import SIGNATURE, About, sign
from fencepost.flows.attempt import NothingToDo
from fencepost.model.duration import positive
from fencepost.model.named import NamedTuple
from fencepost.model.secrets import redacted, secrets_of, without
from fencepost.model.slot import shown
from fencepost.running import AsyncRun, inside
from fencepost.version import VERSION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from typing import Any

    from fencepost.model.duration import Duration

    Body = Callable[[AsyncRun], Coroutine[Any, Any, Any]]

LARGEST_RESULT = 64 * 1024
LONGEST_PAUSE = 86_400.0
_LONGEST_EXCERPT = 300
_SHORT_PATH = 3
_CONNECT_TIMEOUT = 10.0
_METHODS = ("POST", "PUT", "PATCH", "GET", "DELETE")
_WORTH_A_TRY = (408, 425, 429)
# Set while a request of ours is under way: the client's own log lines would show its whole URL.
_ours: ContextVar[bool] = ContextVar("fencepost_http", default=False)


class EndpointFailed(Said):
    """An endpoint could not be reached, or answered that it failed. Another try may help."""


class RequestTimedOut(RunTimedOut):
    """The run's time was up before the endpoint answered. What was asked may have happened."""


class Request(NamedTuple):
    """What is to be asked, of whom, and what must never be told to anybody else."""

    url: str
    method: str
    headers: tuple[tuple[str, str], ...]
    secret: str | None
    timeout: float | None
    callback: str | None
    hidden: tuple[str, ...]

    @property
    def private(self) -> tuple[str, ...]:
        """What nobody is told of an endpoint's own words: it may well repeat its path."""
        path = urlsplit(self.url).path
        return (*self.hidden, path) if len(path) > _SHORT_PATH else self.hidden

    @property
    def where(self) -> str:
        """The endpoint, as errors and logs may show it: the path of a hook is its secret."""
        parts = urlsplit(self.url)
        host = parts.hostname or ""
        port = "" if parts.port is None else f":{parts.port}"
        return redacted(f"{parts.scheme}://{host}{port}", self.hidden)


def http_body(
    url: str,
    *,
    secret: str | None = None,
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
    timeout: Duration | None = None,
    callback: str | None = None,
) -> Body:
    """Return a job's body that asks an endpoint to do the work.

    The request has the run as JSON: ``run_id``, ``job``, ``slot``, ``window``, ``attempt``,
    ``token``, ``checkpoint``, ``payload``. With a ``secret`` it is signed; see
    ``fencepost.executors.signing``.
    ``callback`` is where ``callback_app`` is to be reached, for endpoints that answer 202.
    """
    try:
        import httpx
    except ImportError:
        raise MissingExtra("an HTTP job", extra="http") from None
    wanted = _checked(url, secret, method, headers, timeout, callback)
    _keep_client_quiet()

    async def ask_endpoint(run: AsyncRun) -> Any:
        return await _asked(httpx, wanted, run)

    return ask_endpoint


def _checked(
    url: str,
    secret: str | None,
    method: str,
    headers: Mapping[str, str] | None,
    timeout: Duration | None,
    callback: str | None,
) -> Request:
    parts = {"http": url} if callback is None else {"http": url, "callback": callback}
    for what, address in parts.items():
        split = urlsplit(address)
        if split.scheme not in ("http", "https") or not split.hostname:
            shown_url = redacted(f"{split.scheme}://{split.hostname or ''}")
            raise BadUrl(f"{what} is {shown_url!r}…: give a whole URL that begins with https://")
    if method not in _METHODS:
        raise Misuse(f"method is {method!r}: it must be one of {', '.join(_METHODS)}")
    if secret is not None and not secret:
        raise Misuse("secret is empty: anybody could sign with that; leave it out, or choose one")
    pairs = tuple((headers or {}).items())
    return Request(
        url=url,
        method=method,
        headers=pairs,
        secret=secret,
        timeout=None if timeout is None else positive(timeout, what="timeout"),
        callback=None if callback is None else callback.rstrip("/"),
        hidden=_hidden(url, secret, dict(pairs)),
    )


def _hidden(url: str, secret: str | None, headers: Mapping[str, str]) -> tuple[str, ...]:
    """Return the texts that must not appear anywhere: the secret, a password, a secret header."""
    from urllib.parse import parse_qsl

    split = urlsplit(url)
    named = {name.replace("-", "_"): value for name, value in (*headers.items(),)}
    named |= {name.replace("-", "_"): value for name, value in parse_qsl(split.query)}
    found = [*secrets_of(named), split.password or "", secret or ""]
    if split.password is not None:  # as the request's header has it
        pair = f"{unquote(split.username or '')}:{unquote(split.password)}"
        found += [unquote(split.password), base64.b64encode(pair.encode()).decode()]
    found += [value.partition(" ")[2] for value in secrets_of(named)]  # without "Bearer"
    return tuple(sorted({text for text in found if len(text) > 3}, key=len, reverse=True))


async def _asked(httpx: Any, wanted: Request, run: AsyncRun) -> Any:
    """Ask the endpoint once, and return or raise what its answer means."""
    _, course = inside(run)
    trusted = _trusted(httpx)
    body = json.dumps(_told(wanted, run), separators=(",", ":")).encode()
    headers = {**dict(wanted.headers), **_headers(wanted, run, body)}
    left = course.left()
    limits = [limit for limit in (wanted.timeout, left) if limit is not None]
    limit = min(limits, default=None)
    if left is not None and limit == left:
        # A little earlier, so that it is we who say what the silence means, and nobody else.
        limit = left - min(0.5, left * 0.1)
    timeouts = httpx.Timeout(limit, connect=min(_CONNECT_TIMEOUT, limit or _CONNECT_TIMEOUT))
    mark = _ours.set(True)
    try:
        async with httpx.AsyncClient(verify=trusted, timeout=timeouts) as client:
            answer = await _within(limit, _sent(client, wanted, headers, body))
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
        words = f"{wanted.where} could not be reached, nothing was sent: {_plain(wanted, error)}"
        raise EndpointFailed(words) from None
    except (httpx.TimeoutException, TimeoutError):
        raise _unanswered(wanted, run, limit, out_of_time=limit != wanted.timeout) from None
    except httpx.HTTPError as error:
        words = (
            f"{wanted.where} broke off, and what was asked may have happened: "
            f"{_plain(wanted, error)}"
        )
        raise EndpointFailed(words) from None
    except httpx.InvalidURL as error:
        raise GiveUp(f"{wanted.where} is no URL: {_plain(wanted, error)}") from None
    finally:
        _ours.reset(mark)
    return await _meaning(wanted, run, answer)


@lru_cache(maxsize=1)
def _trusted(httpx: Any) -> Any:
    """Return the certificates that are trusted: to read them takes longer than most requests."""
    return httpx.create_ssl_context()


async def _within(limit: float | None, work: Coroutine[Any, Any, Answer]) -> Answer:
    """Wait for the whole of an answer: an endpoint that drips one byte a second never ends."""
    import asyncio

    return await asyncio.wait_for(work, limit)


class Answer(NamedTuple):
    """What an endpoint answered: as much as is of use."""

    status: int
    retry_after: str | None
    is_json: bool
    text: bytes
    whole: bool


async def _sent(client: Any, wanted: Request, headers: dict[str, str], body: bytes) -> Answer:
    content = None if wanted.method in ("GET", "DELETE") else body
    async with client.stream(
        wanted.method, wanted.url, headers=headers, content=content, follow_redirects=False
    ) as response:
        text, whole = b"", True
        async for chunk in response.aiter_bytes():
            text += chunk
            if len(text) > LARGEST_RESULT:
                text, whole = text[:LARGEST_RESULT], False
                break
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        return Answer(
            response.status_code,
            response.headers.get("retry-after"),
            kind == "application/json" or kind.endswith("+json"),
            text,
            whole,
        )


async def _meaning(wanted: Request, run: AsyncRun, answer: Answer) -> Any:
    """Return the result that an answer brings, or raise what it means."""
    status = answer.status
    if status == 202:
        await run.hand_over()
        return None
    if 200 <= status < 300:
        return _result(wanted, answer)
    words = f"{wanted.where} answered {status}"
    if 300 <= status < 400:
        raise GiveUp(f"{words}: no redirect is followed; give the address where it leads to")
    excerpt = _excerpt(wanted, answer)
    words = f"{words}: {excerpt}" if excerpt else words
    pause = _seconds(answer.retry_after)
    if status == 423:
        _, course = inside(run)
        if run.attempt >= course.policy.retry.attempts:
            raise NothingToDo("lock_held")
        raise RetryAfter(pause or 0.0, words)
    if pause is not None and status in (429, 503):
        raise RetryAfter(pause, words)
    if status >= 500 or status in _WORTH_A_TRY:
        raise EndpointFailed(words)
    raise GiveUp(words)


def _told(wanted: Request, run: AsyncRun) -> dict[str, object]:
    """Return the run as the endpoint gets to know it."""
    window = run.window
    told: dict[str, object] = {
        "run_id": run.id,
        "job": run.job,
        "slot": shown(int(run.slot.timestamp())),
        "window": window and [shown(int(edge.timestamp())) for edge in window],
        "attempt": run.attempt,
        "token": run.token,
        "checkpoint": run.checkpoint,
        "payload": run.payload,
    }
    if wanted.callback is not None:
        told["callback"] = f"{wanted.callback}/runs/{quote(run.id, safe='')}"
    return told


def _headers(wanted: Request, run: AsyncRun, body: bytes) -> dict[str, str]:
    headers = {
        **run.headers(),
        "Fencepost-Run": quote(run.id, safe="@:!~"),
        "Fencepost-Slot": shown(int(run.slot.timestamp())),
        "Content-Type": "application/json",
        "User-Agent": f"fencepost/{VERSION}",
    }
    headers["Idempotency-Key"] = quote(headers["Idempotency-Key"], safe="@:!~/")
    if wanted.secret is not None:
        signed = b"" if wanted.method in ("GET", "DELETE") else body
        about = About(
            wanted.method, _target(wanted.url), headers["Fencepost-Run"], headers["Fencing-Token"]
        )
        headers[SIGNATURE] = sign(wanted.secret, signed, time.time(), about=about)
    return headers


def _target(url: str) -> str:
    """Return the path and query of a URL as they are sent."""
    import httpx

    try:
        return httpx.URL(url).raw_path.decode()
    except httpx.InvalidURL:
        return ""  # whatever it is, nothing will be sent there


def _unanswered(
    wanted: Request, run: AsyncRun, limit: float | None, *, out_of_time: bool
) -> BaseException:
    words = (
        f"{wanted.where} did not answer within {limit or 0.0:.3g} s, and what was asked may have "
        "happened; another try has the same Idempotency-Key"
    )
    if not out_of_time:
        return EndpointFailed(words)
    _, course = inside(run)
    error = RequestTimedOut(run.id, timeout=course.policy.timeout or 0.0)
    error.args = (f"{error}: {words}",)
    return error


def _result(wanted: Request, answer: Answer) -> Any:
    if not answer.is_json or not answer.whole or not answer.text.strip():
        return None
    try:
        return json.loads(without(answer.text.decode(), wanted.hidden))
    except ValueError:  # it said JSON, and it is none; the work is done all the same
        return None


def _excerpt(wanted: Request, answer: Answer) -> str:
    text = " ".join(answer.text.decode(errors="replace").split())
    return redacted(text, wanted.private)[:_LONGEST_EXCERPT]


def _plain(wanted: Request, error: BaseException) -> str:
    return redacted(str(error) or type(error).__name__, wanted.private)


def _seconds(retry_after: str | None) -> float | None:
    """Return what ``Retry-After`` asks for, in seconds; it may be an instant, too."""
    if not retry_after:
        return None
    if retry_after.strip().isdecimal():
        return min(float(retry_after[:12]), LONGEST_PAUSE)
    from email.utils import parsedate_to_datetime

    try:
        at = parsedate_to_datetime(retry_after).timestamp()
    except (ValueError, TypeError):
        return None
    return min(max(0.0, at - time.time()), LONGEST_PAUSE)


def _keep_client_quiet() -> None:
    """Have the client log nothing about our requests: its lines show URLs with all they have."""
    logger = logging.getLogger("httpx")
    if _is_not_ours not in logger.filters:
        logger.addFilter(_is_not_ours)


def _is_not_ours(_: logging.LogRecord) -> bool:
    return not _ours.get()
