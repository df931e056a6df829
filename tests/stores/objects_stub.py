"""An S3 server of a few lines: sound, or with one flaw, and with misfortunes on demand.

It is no substitute for a real one: it is for what a real one cannot be made to do.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, NamedTuple, Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Callable


class Kept(NamedTuple):
    body: bytes
    e_tag: str
    generation: int
    modified: float


class Misfortune(NamedTuple):
    """What happens to the next request of a method."""

    method: str
    status: int = 500  # 0: the connection is cut
    code: str = "InternalError"
    carried_out: bool = False
    body: str = ""
    delay: float = 0.0


class StubS3:
    """``with StubS3() as server: open s3://bucket?endpoint={server.endpoint}&allow_http=true``."""

    def __init__(self, *, honest: bool = True, versioned: bool = False) -> None:
        self.objects: dict[str, Kept] = {}
        self.asked: list[str] = []  # "PUT key"
        self.misfortunes: list[Misfortune] = []
        self.skew = 0.0
        self.missing_bucket = False
        self.forgets_conditions_on: Callable[[str, bytes], bool] = lambda _key, _tag: not honest
        self.versioned = versioned
        self.lock = threading.Lock()
        self._generations = 1_000_000
        handler = type("Handler", (_Handler,), {"bucket": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.port = self._server.server_port
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def url(self, prefix: str = "", *, options: str = "") -> str:
        return (
            f"s3://bucket/{prefix}?endpoint={self.endpoint}&allow_http=true&region=x"
            f"&shortest_ttl=0.2{options}"
        )

    def fail(self, method: str, **how: object) -> None:
        self.misfortunes.append(Misfortune(method, **how))  # type: ignore[arg-type]

    def count(self, method: str) -> int:
        return sum(asked.startswith(method) for asked in self.asked)

    def put(self, key: str, body: bytes) -> Kept:
        self._generations += 1
        e_tag = f'"{hashlib.md5(body).hexdigest()}"'
        kept = Kept(body, e_tag, self._generations, time.time() + self.skew)
        self.objects[key] = kept
        return kept

    def next_misfortune(self, method: str) -> Misfortune | None:
        for misfortune in self.misfortunes:
            if misfortune.method == method:
                self.misfortunes.remove(misfortune)
                return misfortune
        return None


class _Handler(BaseHTTPRequestHandler):
    bucket: StubS3
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self._serve(lambda key: self._put(key, body))

    def do_GET(self) -> None:
        self._serve(self._get)

    def do_HEAD(self) -> None:
        self._serve(self._get)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self._serve(lambda _: (200, b"<DeleteResult></DeleteResult>", {}))

    def _serve(self, answer: Callable[[str], tuple[int, bytes, dict[str, str]]]) -> None:
        parts = urlsplit(self.path)
        key = unquote(parts.path).removeprefix("/bucket").removeprefix("/")
        with self.bucket.lock:
            self.bucket.asked.append(f"{self.command} {key}")
            trouble = self.bucket.next_misfortune(self.command)
            if trouble is None or trouble.carried_out:
                status, body, headers = answer(key)
        if trouble is not None:
            time.sleep(trouble.delay)
            if not trouble.status:
                self.close_connection = True
                self.connection.shutdown(2)
                return
            status, headers = trouble.status, {}
            body = (trouble.body or _error(trouble.code)).encode()
        with contextlib.suppress(ConnectionError):  # who asked has lost patience
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
            self.wfile.flush()

    def _put(self, key: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        bucket = self.bucket
        if bucket.missing_bucket:
            return 404, _error("NoSuchBucket").encode(), {}
        kept = bucket.objects.get(key)
        if not bucket.forgets_conditions_on(key, body):
            if "if-none-match" in self.headers and kept is not None:
                return 412, _error("PreconditionFailed").encode(), {}
            wanted = self.headers.get("if-match")
            if wanted is not None and kept is None:
                return 404, _error("NoSuchKey").encode(), {}
            if wanted is not None and kept is not None and kept.e_tag != wanted:
                return 412, _error("PreconditionFailed").encode(), {}
            generation = self.headers.get("x-goog-if-generation-match")
            current = 0 if kept is None else kept.generation
            if generation is not None and int(generation) != current:
                return 412, _error("PreconditionFailed").encode(), {}
        return 200, b"", self._headers(bucket.put(key, body))

    def _get(self, key: str) -> tuple[int, bytes, dict[str, str]]:
        if self.bucket.missing_bucket:
            return 404, _error("NoSuchBucket").encode(), {}
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" in query:
            return 200, self._listed(query.get("prefix", [""])[0]), {}
        kept = self.bucket.objects.get(key)
        if kept is None:
            return 404, _error("NoSuchKey").encode(), {}
        return 200, kept.body, self._headers(kept)

    def _headers(self, kept: Kept) -> dict[str, str]:
        headers = {"etag": kept.e_tag, "last-modified": formatdate(kept.modified, usegmt=True)}
        headers["x-goog-generation"] = str(kept.generation)
        if self.bucket.versioned:
            headers["x-amz-version-id"] = f"v{kept.generation}"
        return headers

    def _listed(self, prefix: str) -> bytes:
        found = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z"
            f"</LastModified><ETag>{escape(kept.e_tag)}</ETag><Size>{len(kept.body)}</Size>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
            for key, kept in sorted(self.bucket.objects.items())
            if key.startswith(prefix)
        )
        return (
            "<?xml version='1.0' encoding='UTF-8'?><ListBucketResult><Name>bucket</Name>"
            f"<Prefix>{escape(prefix)}</Prefix><IsTruncated>false</IsTruncated>{found}"
            "</ListBucketResult>"
        ).encode()


def _error(code: str) -> str:
    return f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code></Error>"
