"""A real HTTP server on loopback, in a thread, that answers as a test tells it to."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self


class Asked(NamedTuple):
    """A request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found


class Said(NamedTuple):
    """What the endpoint answers."""

    status: int = 200
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    how: str = "whole"  # or: hang, close, tear, drip


class Endpoint:
    """One answer after another; the last one again and again."""

    def __init__(self, *answers: Said | Callable[[Asked], Said]) -> None:
        self.answers = list(answers) or [Said()]
        self.asked: list[Asked] = []
        self.over = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                """Say nothing."""

            def _serve(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                headers = {name.lower(): value for name, value in self.headers.items()}
                asked = Asked(self.command, self.path, headers, self.rfile.read(size))
                outer.asked.append(asked)
                answer = outer.answers.pop(0) if len(outer.answers) > 1 else outer.answers[0]
                outer.say(self, answer if isinstance(answer, Said) else answer(asked))

            do_POST = do_GET = do_PUT = do_DELETE = _serve  # noqa: N815 -- the server's names

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def say(self, handler: BaseHTTPRequestHandler, answer: Said) -> None:
        handler.close_connection = True
        if answer.how == "close":
            return
        if answer.how == "hang":
            self.over.wait(60)
            return
        handler.send_response(answer.status)
        for name, value in answer.headers:
            handler.send_header(name, value)
        more = 1000 if answer.how in ("tear", "drip") else 0
        handler.send_header("Content-Length", str(len(answer.body) + more))
        handler.end_headers()
        handler.wfile.write(answer.body)
        if answer.how == "drip":
            while not self.over.wait(0.05):
                try:
                    handler.wfile.write(b" ")
                except OSError:
                    return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def said_json(value: object, status: int = 200) -> Said:
    return Said(status, json.dumps(value).encode(), (("Content-Type", "application/json"),))
