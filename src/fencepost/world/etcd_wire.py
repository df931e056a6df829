"""One connection to one member of etcd: a request is one write, and its answer is read whole.

The standard library's HTTP client writes head and body apart and parses each answer as if it were
mail, which is a good part of the time that an answer takes. Here a failure says what is certain:
nothing was sent, or something may have been.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
from typing import NamedTuple

_CONNECT_WITHIN = 2.0
_LONGEST_LINE = 65_536


class NotSent(Exception):
    """Nothing of the request can have arrived."""


class NotAnswered(Exception):
    """The request may have arrived."""


class Endpoint(NamedTuple):
    """Where one member listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Reply(NamedTuple):
    """What came back."""

    status: int
    content: bytes
    last: bool  # the server closes the connection after this


class Wire:
    """An open connection, for one request at a time."""

    def __init__(self, endpoint: Endpoint, *, tls: ssl.SSLContext | None, timeout: float) -> None:
        try:
            self._socket = _connected(endpoint, tls, timeout)
        except (OSError, ValueError) as error:
            raise NotSent(_words(error)) from error
        self._file = self._socket.makefile("rb")
        self._host = str(endpoint)
        self.number = 0

    def is_stale(self) -> bool:
        """Say whether something came while nobody had asked, which is the end of it."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def exchange(self, path: str, body: bytes, *, authorization: str, timeout: float) -> Reply:
        """Send a request and read the answer."""
        try:
            self._socket.settimeout(timeout)
            self._socket.sendall(self._request(path, body, authorization))
            return self._reply()
        except (OSError, ValueError, EOFError) as error:
            # Even if it was cut short: what the kernel took may have arrived.
            raise NotAnswered(_words(error)) from error

    def stream(self, path: str, body: bytes, *, authorization: str, until: bytes) -> Ear:
        """Begin a stream and read it up to ``until``. The connection is the stream's from now."""
        try:
            self._socket.sendall(self._request(path, body, authorization))
            words = self._begun(until)
        except (OSError, ValueError) as error:
            raise NotAnswered(_words(error)) from error
        self._file.close()
        return Ear(self._socket, heard=b'"events"' in words or b'"canceled"' in words)

    def close(self) -> None:
        """Close it, and tell nobody: TLS says no goodbye either."""
        with contextlib.suppress(OSError):  # a reset that came before
            self._file.close()
            self._socket.close()

    def _request(self, path: str, body: bytes, authorization: str) -> bytes:
        shown = f"Authorization: {authorization}\r\n" if authorization else ""
        head = (
            f"POST /v3{path} HTTP/1.1\r\nHost: {self._host}\r\n{shown}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def _begun(self, until: bytes) -> bytes:
        words = b""
        while until not in words:
            more = self._socket.recv(_LONGEST_LINE)
            words += more
            refused = b"\r\n" in words and b" 200 " not in words[:20]
            if not more or refused or len(words) > _LONGEST_LINE:
                raise ValueError(f"no stream but {words[:200]!r}")
        return words

    def _reply(self) -> Reply:
        status = int(self._line().split(b" ", 2)[1])
        length, chunked, last = 0, False, False
        while line := self._line():
            name, _, value = line.lower().partition(b":")
            if name == b"content-length":
                length = int(value)
            elif name == b"transfer-encoding":
                chunked = b"chunked" in value
            elif name == b"connection":
                last = b"close" in value
        content = self._chunks() if chunked else self._exactly(length)
        return Reply(status, content, last)

    def _chunks(self) -> bytes:
        content = b""
        while size := int(self._line().split(b";")[0], 16):
            content += self._exactly(size)
            self._line()
        while self._line():
            continue  # trailers
        return content

    def _line(self) -> bytes:
        line = self._file.readline(_LONGEST_LINE)
        if not line.endswith(b"\n"):
            raise EOFError("the connection ended before the answer did")
        return line.rstrip(b"\r\n")

    def _exactly(self, length: int) -> bytes:
        content = self._file.read(length)
        if len(content) != length:
            raise EOFError("the connection ended before the answer did")
        return content


class Ear:
    """A stream that says when something happened; what it was must be asked."""

    def __init__(self, wire: socket.socket, *, heard: bool) -> None:
        wire.settimeout(0.0)
        self._wire, self._heard = wire, heard
        self.deaf = False  # nothing more will come

    @property
    def fd(self) -> int:
        """What becomes readable when there is news."""
        return self._wire.fileno()

    def news(self) -> bool:
        """Say whether there was news since the last time; the end of the stream is some."""
        heard, self._heard = self._heard, False
        while not self.deaf:
            try:
                words = self._wire.recv(_LONGEST_LINE)
            except (BlockingIOError, ssl.SSLWantReadError):
                return heard
            except OSError:
                words = b""
            heard = True
            self.deaf = not words or b'"canceled"' in words
        return heard

    def close(self) -> None:
        """Stop listening."""
        self._wire.close()


def _connected(endpoint: Endpoint, tls: ssl.SSLContext | None, timeout: float) -> socket.socket:
    wire = socket.create_connection(endpoint, min(timeout, _CONNECT_WITHIN))
    try:
        wire.settimeout(timeout)
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return wire if tls is None else tls.wrap_socket(wire, server_hostname=endpoint.host)
    except BaseException:
        wire.close()
        raise


def _words(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__
