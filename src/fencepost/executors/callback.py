"""Where a run that was handed off reports back to: an ASGI application to mount anywhere.

``POST …/runs/{run_id}/complete`` with ``{"token", "status", "result", "error", "retry"}`` ends it;
``POST …/runs/{run_id}/beat`` with ``{"token", "done", "total"}`` says that it goes on. Both are
signed as requests to endpoints are. Answers: 200 done, 400 malformed, 401 not signed by us, 404 no
such run, 409 the run is somebody else's by now, or has ended otherwise; all as JSON.
"""

from __future__ import annotations

import json
import time

from fencepost.errors import (
    FencepostError,
    Lost,
    Misuse,
    OutcomeUnknown,
    RunCancelled,
    RunTimedOut,
    StoreUnavailable,
    UnknownRun,
)
from fencepost.executors.signing import SIGNATURE, About, SignatureRefused, verify
from fencepost.model.kept import LARGEST
from fencepost.model.named import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping
    from typing import Any, Protocol

    Scope = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
    Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
    ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

    class Face(Protocol):
        """``Fencepost`` or ``AsyncFencepost``."""

        @property
        def complete(self) -> Callable[..., Any]:
            """Say how a run ended."""

        @property
        def beat(self) -> Callable[..., Any]:
            """Say that a run goes on."""


# A result, and a little more: what is larger is refused before it is read.
_LARGEST_BODY = LARGEST + 10_000
_WORDS = {
    "complete": {"token", "status", "result", "error", "retry"},
    "beat": {"token", "done", "total"},
}
_HINTS = {
    400: "send JSON with the token that the request had, and for `complete` a status",
    401: "sign the request with the secret of the job: fencepost.executors.signing has both sides",
    404: "the path is …/runs/{run_id}/complete or …/runs/{run_id}/beat",
    405: "use POST",
    409: "stop: whatever comes next belongs to somebody else",
    413: "keep the result elsewhere, and send a reference",
    503: "nothing is known to be wrong with the request; send the same again",
}


class Reply(NamedTuple):
    """What is answered to a callback."""

    status: int
    content: dict[str, Any]


def callback_app(fp: Face, secret: str) -> ASGIApp:
    """Return the ASGI application that ends and keeps handed-off runs of ``fp``.

    ``fp`` is a ``Fencepost`` or an ``AsyncFencepost``; ``secret`` is that of the jobs.
    """
    if not secret:
        raise Misuse("secret is empty: then anybody could end your runs; choose one")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = await _body(receive)
        headers = {name.lower(): value for name, value in scope["headers"]}
        signature = headers.get(SIGNATURE.lower().encode(), b"").decode("latin-1")
        if body is None:
            reply = _refused(413, "too_large", f"the body has more than {_LARGEST_BODY:,} bytes")
        else:
            reply = await answered(
                fp, secret, scope["method"], scope["path"], signature=signature, body=body
            )
        await _send(send, reply)

    return app


async def answered(
    fp: Face, secret: str, method: str, path: str, *, signature: str, body: bytes
) -> Reply:
    """Answer one callback, however it arrived: for servers that speak no ASGI."""
    run_id, verb = _named(path)
    if verb not in _WORDS:
        return _refused(404, "unknown_path", f"nothing is at {path[:200]!r}")
    if method != "POST":
        return _refused(405, "wrong_method", f"{method} is not for callbacks")
    try:
        about = About(method, f"/runs/{run_id}/{verb}")
        verify(secret, signature, body, time.time(), about=about)
        words = _read(body, verb)
    except SignatureRefused as refused:
        return _refused(401, "signature_refused", str(refused))
    except Misuse as misuse:
        return _refused(400, "malformed", str(misuse))
    return await _carried_out(fp, verb, run_id, words)


async def _carried_out(  # noqa: PLR0911 -- one for each answer
    fp: Face, verb: str, run_id: str, words: dict[str, Any]
) -> Reply:
    import inspect

    call = getattr(fp, verb)
    try:
        if inspect.iscoroutinefunction(call):
            done = await call(run_id, **words)
        else:
            from asyncio import to_thread  # the loop must go on while the disk is busy

            done = await to_thread(call, run_id, **words)
    except RunCancelled:  # which is kept all the same: it is asked to end, not lost
        return Reply(200, {"run_id": run_id, "cancelled": True})
    except UnknownRun as error:
        return _refused(404, "unknown_run", str(error))
    except (Lost, RunTimedOut) as error:
        return _refused(409, "lost", str(error))
    except (StoreUnavailable, OutcomeUnknown) as error:
        return _refused(503, "store_unavailable", str(error))
    except FencepostError as error:
        return _refused(400, "malformed", str(error))
    if verb == "beat":
        return Reply(200, {"run_id": run_id, "cancelled": False})
    told = {"run_id": done.run_id, "status": done.status, "reason": done.reason}
    return Reply(200, {**told, "token": done.token, "error": done.error})


def _named(path: str) -> tuple[str, str]:
    """Return the run and the verb that a path names, wherever the application is mounted."""
    head, _, verb = path.rstrip("/").rpartition("/")
    _, found, run_id = head.partition("/runs/")
    return (run_id, verb) if found and run_id else ("", "")


def _read(body: bytes, verb: str) -> dict[str, Any]:
    try:
        words = json.loads(body)
    except ValueError:
        raise Misuse("the body is no JSON") from None
    except RecursionError:
        raise Misuse("the body is nested too deeply") from None
    if not isinstance(words, dict):
        raise Misuse("the body is no JSON object")
    unknown = sorted(set(words) - _WORDS[verb])
    if unknown:
        raise Misuse(f"{unknown[0]!r} is unknown; known: {', '.join(sorted(_WORDS[verb]))}")
    if "token" not in words:
        raise Misuse("there is no token: send the one that came with the run")
    if verb == "complete" and not isinstance(words.get("status"), str):
        raise Misuse("status is missing: say 'succeeded', 'failed' or 'cancelled'")
    if not isinstance(words.get("error"), str | None):
        raise Misuse(f"error is {words['error']!r}: it must be a text")
    if not isinstance(words.get("retry", True), bool):
        raise Misuse(f"retry is {words['retry']!r}: it must be true or false")
    return words


def _refused(status: int, code: str, message: str) -> Reply:
    error = {"code": code, "message": message, "hint": _HINTS[status]}
    return Reply(status, {"error": error})


async def _body(receive: Receive) -> bytes | None:
    """Return the whole body; None if it is too large."""
    body, more, fits = b"", True, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            break
        fits = fits and len(body) + len(message.get("body", b"")) <= _LARGEST_BODY
        body = body + message.get("body", b"") if fits else b""
        more = message.get("more_body", False)
    return body if fits else None


async def _send(send: Send, reply: Reply) -> None:
    content = json.dumps(reply.content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    if reply.status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
