"""The door to a Redis or Valkey server: few connections, no retries, errors that say what is true.

What could not be sent did not happen; what was sent and not answered is unknown; what the server
refused did not happen either. Who waits for a turn has a connection of its own, an ``Ear``, that
is subscribed to one channel: both worlds wait for its file descriptor.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import ssl
import time

import redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterCrossSlotError,
    InvalidResponse,
    MovedError,
    NoPermissionError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.retry import Retry

from fencepost.errors import (
    BadUrl,
    FencepostError,
    OutcomeUnknown,
    StoreUnavailable,
    StoreUnfit,
)
from fencepost.model.named import NamedTuple, Protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

# How long one request may take, unless the URL says otherwise.
PATIENCE = 2.0
_MOST_IDLE = 8
# A connection that rested for this long may have been closed by the server: it is looked at first.
_RESTED = 1.0
# What the server says when it did nothing. Since Redis 7 the word comes first; before that it
# stands in the middle of what a script failed with.
_REFUSALS = {
    "OOM": "is out of memory: raise maxmemory, or free some",
    "NOREPLICAS": "has too few replicas to write: see min-replicas-to-write",
    "MISCONF": "cannot save to its disk and refuses writes: free some space, or look into its log",
    "LOADING": "is still loading its data",
    "BUSY": "is busy with a script of somebody else",
    "MASTERDOWN": "is a replica that has lost its primary: name the primary in the URL",
    "READONLY": "is a read-only replica: name the primary in the URL",
    "CLUSTERDOWN": "is part of a cluster that is down",
    "TRYAGAIN": "is moving the key to another node",
}
# The driver takes the word away where it has a class for it.
_WORDS = {
    "OutOfMemoryError": "OOM",
    "BusyLoadingError": "LOADING",
    "ReadOnlyError": "READONLY",
    "MasterDownError": "MASTERDOWN",
    "ClusterDownError": "CLUSTERDOWN",
    "TryAgainError": "TRYAGAIN",
}
# How Redis 6, Redis 7 and Valkey say inside of a script what is NOPERM outside.
_FORBIDDEN = re.compile(r"NOPERM|ACL failure|can't run this command")
_REFUSAL = re.compile(r"\b({})\b".format("|".join(_REFUSALS)))


def refusal(text: str) -> tuple[str, str] | None:
    """Return the word by which a server refused, and what it means; None if it is no such word."""
    found = _REFUSAL.search(text)
    return None if found is None else (found[1], _REFUSALS[found[1]])


class Address(NamedTuple):
    """Where a server is, and as whom to ask it."""

    host: str
    port: int
    database: int = 0
    username: str | None = None
    password: str | None = None
    patience: float = PATIENCE
    tls: dict[str, str | bool] | None = None  # options of the driver; None for plain TCP

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}/{self.database}"


class Script:
    """A Lua script, packed so far as it can be: the keys and arguments of a call follow."""

    def __init__(self, text: str, *, keys: int, arguments: int) -> None:
        code = text.encode()
        sha = hashlib.sha1(code).hexdigest().encode()  # noqa: S324 -- by which the server knows it
        count = b"*%d\r\n" % (3 + keys + arguments)
        self.known = count + packed(b"EVALSHA", sha, b"%d" % keys)
        self.whole = count + packed(b"EVAL", code, b"%d" % keys)


def packed(*words: bytes) -> bytes:
    """Return words as the protocol has them, each after its length."""
    return b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def command(*words: bytes) -> bytes:
    """Return a whole command as the protocol has it."""
    return b"*%d\r\n%b" % (len(words), packed(*words))


class Wire(Protocol):
    """What we use of a connection of the driver's."""

    used_at: float

    def connect(self) -> None: ...  # noqa: D102 -- as in redis.connection.ConnectionInterface
    def disconnect(self) -> None: ...  # noqa: D102
    def can_read(self, timeout: float) -> bool: ...  # noqa: D102
    def read_response(self) -> Any: ...  # noqa: D102
    def send_packed_command(  # noqa: D102
        self, command: tuple[bytes, ...], *, check_health: bool
    ) -> None: ...
    def answer(self) -> Any: ...  # noqa: D102 -- from here on: what we add to it
    def fileno(self) -> int: ...  # noqa: D102
    def received(self) -> bytes | None: ...  # noqa: D102


class _Kept:
    """What we add to it: ways around the driver's parser, which takes its time."""

    _sock: Any
    used_at = 0.0

    def answer(self) -> Any:
        """Read one answer."""
        return self.read_response()  # type: ignore[attr-defined]

    def fileno(self) -> int:
        """Return the descriptor to wait for. From now on reading does not wait."""
        self._sock.settimeout(0)
        return int(self._sock.fileno())

    def received(self) -> bytes | None:
        """Return what has come in: None for nothing, and nothing for the end."""
        try:
            data: bytes = self._sock.recv(65_536)
        except BlockingIOError:
            return None
        return data


class _Plain(_Kept, redis.Connection):
    def answer(self) -> Any:
        """Read one answer, by ourselves if it is a number: that is what most scripts answer."""
        sock = self._sock
        try:
            seen = sock.recv(64, socket.MSG_PEEK)
        except TimeoutError as error:  # the driver would wait for as long once more
            self.disconnect()  # type: ignore[no-untyped-call]
            raise redis.TimeoutError("Timeout reading from socket") from error
        except OSError:
            seen = b""  # the driver finds out what it means
        if seen[:1] == b":" and seen[-2:] == b"\r\n":
            sock.recv(len(seen))
            return int(seen[1:-2])
        return self.read_response()


class _Encrypted(_Kept, redis.SSLConnection):
    def received(self) -> bytes | None:
        """Return what has come in; there may be more of it than the descriptor tells."""
        data = b""
        try:
            while some := self._sock.recv(65_536):
                data += some
        except ssl.SSLWantReadError:
            return data or None
        return data


class RedisServer:
    """A server as one process may use it, from any thread."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._idle: list[Wire] = []
        self._ears: list[Ear] = []
        self._pid = os.getpid()

    # One round trip each.

    def run(self, script: Script, rest: bytes, patience: float = 0.0) -> Any:
        """Run a script with its packed keys and arguments, and return what it returns."""
        connection = self._take()
        try:
            return self._asked(connection, script.known + rest, patience)
        except NoScriptError:
            # It was not run, so it may be sent again: this time with its text.
            return self._asked(connection, script.whole + rest, patience)

    def look(self, script: Script, rest: bytes) -> Any:
        """Run a script that only reads: what was not answered did not happen."""
        try:
            return self.run(script, rest)
        except OutcomeUnknown as unknown:
            raise StoreUnavailable(str(unknown)) from unknown

    def read(self, *words: bytes) -> Any:
        """Give a command that only reads, and return the answer."""
        return self.read_all([command(*words)])[0]

    def read_all(self, commands: Sequence[bytes]) -> list[Any]:
        """Give many commands that only read, in one go."""
        connection = self._take()
        try:
            connection.send_packed_command((b"".join(commands),), check_health=False)
            answers = [connection.read_response() for _ in commands]
        except RedisError as error:
            connection.disconnect()
            told = self._told(error)
            if isinstance(told, OutcomeUnknown):
                raise StoreUnavailable(str(told)) from error
            raise told from error
        self._put_by(connection)
        return answers

    # Waiting.

    @property
    def has_ear(self) -> bool:
        """Say whether there is an ear that nobody uses."""
        return bool(self._ears) and self._pid == os.getpid()

    def ear(self, channel: str) -> Ear:
        """Return an ear that nobody uses, or open one that hears ``channel``."""
        if self._pid != os.getpid():
            self.forget()
        try:
            return self._ears.pop()
        except IndexError:
            ear = Ear(self, channel)
            ear.open()
            return ear

    def put_by(self, ear: Ear) -> None:
        """Keep an ear for the next who waits."""
        if ear.fd >= 0 and ear.pid == os.getpid() and len(self._ears) < _MOST_IDLE:
            self._ears.append(ear)
        else:
            ear.close()

    def forget(self) -> None:
        """Begin anew in a forked child. The driver closes what is dropped, and says no goodbye."""
        self._idle, self._ears, self._pid = [], [], os.getpid()

    def close(self) -> None:
        """Close all connections that nobody uses; the next call opens another."""
        if self._pid != os.getpid():
            self.forget()
        while self._idle:
            self._idle.pop().disconnect()
        while self._ears:
            self._ears.pop().close()

    # Connections.

    def _take(self) -> Wire:
        if self._pid != os.getpid():
            self.forget()
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return self.connected()
            if time.monotonic() - connection.used_at < _RESTED or _is_open(connection):
                return connection
            connection.disconnect()

    def connected(self) -> Wire:
        """Return a new connection that the server has welcomed."""
        host, port, database, username, password, patience, tls = self.address
        options: dict[str, Any] = dict(tls or {}, host=host, port=port, db=database)
        options |= {"username": username, "password": password}
        options |= {"socket_timeout": patience, "socket_connect_timeout": patience}
        options |= {"socket_keepalive": True, "protocol": 2, "retry": Retry(NoBackoff(), 0)}
        kind = _Plain if tls is None else _Encrypted
        try:
            connection = _quiet(kind, options)
            connection.connect()
            _greet(connection)
        except RedisError as error:
            raise self._unwelcome(error) from error
        return connection

    def _asked(self, connection: Wire, text: bytes, patience: float) -> Any:
        try:
            connection.send_packed_command((text,), check_health=False)
        except RedisError as error:  # the server has not got all of it, so it can do none of it
            raise StoreUnavailable(
                f"Redis at {self.address} was not reached, its connection is gone: {error}"
            ) from error
        try:
            answer = connection.answer() if not patience else self._soon(connection, patience)
        except NoScriptError:
            raise
        except ResponseError as error:
            if isinstance(error, ReadOnlyError):
                connection.disconnect()  # by now the name may lead to another server
            else:
                self._put_by(connection)
            raise self._told(error) from error
        except RedisError as error:
            raise self._told(error) from error
        connection.used_at = time.monotonic()
        self._idle.append(connection)
        return answer

    def _soon(self, connection: Wire, patience: float) -> Any:
        """Read an answer that must come soon."""
        if not connection.can_read(patience):
            connection.disconnect()
            raise OutcomeUnknown(f"Redis at {self.address} did not answer within {patience:.2f} s")
        return connection.read_response()  # of which the driver has read the beginning

    def _put_by(self, connection: Wire) -> None:
        connection.used_at = time.monotonic()
        if len(self._idle) < _MOST_IDLE:
            self._idle.append(connection)
        else:
            connection.disconnect()

    # What an error of the driver or of the server means.

    def _unwelcome(self, error: RedisError) -> FencepostError:
        """Return what it means that a connection could not be made: nothing was asked yet."""
        told = self._told(error)
        if not isinstance(told, OutcomeUnknown):
            return told
        text = re.sub(r"^Error \S+ connecting to \S+ ", "", str(error)).rstrip(".")
        if self.address.tls and isinstance(error.__context__, FileNotFoundError):
            return BadUrl(f"a file that the URL of Redis at {self.address} names is not there")
        if "certificate" in text.lower():
            return StoreUnfit(
                f"the certificate of Redis at {self.address} is not trusted: {text}; "
                "name its authority with ?ssl_ca_certs=FILE"
            )
        return StoreUnavailable(
            f"Redis at {self.address} cannot be reached: {text}; is it running, and is this the "
            "right host and port?"
        )

    def _told(self, error: RedisError) -> FencepostError:  # noqa: PLR0911 -- a table of answers
        """Return what an answer, or the lack of one, means for the caller."""
        text, where = str(error), f"Redis at {self.address}"
        if isinstance(error, AuthenticationError) or "unauthenticated" in text:
            return StoreUnfit(
                f"{where} refused the user or the password ({text}): check them in the URL"
            )
        if isinstance(error, NoPermissionError) or _FORBIDDEN.search(text):
            return StoreUnfit(
                f"{where} does not allow what leases need ({text}): see docs/stores/redis.md for "
                "the rights, or ask `fencepost doctor`"
            )
        if type(error).__name__ in _WORDS:
            return StoreUnavailable(f"{where} {_REFUSALS[_WORDS[type(error).__name__]]}")
        if isinstance(error, MovedError | AskError | ClusterCrossSlotError):
            return StoreUnfit(f"{where} is a node of a cluster: leases need a server that is not")
        if "index is out of range" in text or "SELECT is not allowed" in text:
            return StoreUnfit(
                f"{where}: there is no database {self.address.database}: check the URL"
            )
        if isinstance(error, InvalidResponse):
            return StoreUnfit(f"what answers at {self.address} is no Redis: {text}")
        if isinstance(error, ResponseError) or "max number of clients" in text:
            found = refusal(text)
            if found is not None:
                return StoreUnavailable(f"{where} {found[1]} ({text})")
            if "FENCEPOST" in text or "WRONGTYPE" in text:
                return StoreUnfit(f"{where} holds a key of ours that we did not write: {text}")
            return StoreUnavailable(f"{where} refused: {text}")
        return OutcomeUnknown(f"{where} did not answer: {text}")


class Ear:
    """A connection that hears what is said on one channel."""

    def __init__(self, server: RedisServer, channel: str) -> None:
        self._server, self.channel = server, channel
        self._connection: Wire | None = None
        self.pid = os.getpid()
        self.fd = -1
        self._unread = b""

    def open(self) -> None:
        """Connect, and hear from now on."""
        self.close()
        connection = self._server.connected()
        words = (b"SUBSCRIBE", self.channel.encode())
        try:
            connection.send_packed_command((command(*words),), check_health=False)
            connection.read_response()
        except RedisError as error:
            connection.disconnect()
            raise self._server._unwelcome(error) from error  # noqa: SLF001 -- one door, two classes
        self._connection, self.fd, self._unread = connection, connection.fileno(), b""

    def heard(self) -> list[bytes]:
        """Return what was said since. ``StoreUnavailable`` if we have become deaf."""
        connection = self._connection
        if connection is None:
            raise StoreUnavailable(f"nobody listens to Redis at {self._server.address} any more")
        try:
            data = connection.received()
        except OSError as error:
            self.close()
            raise StoreUnavailable(f"Redis at {self._server.address} is gone: {error}") from error
        if data is None:
            return []
        if not data:
            self.close()
            raise StoreUnavailable(f"Redis at {self._server.address} closed the connection")
        # Seven lines for each: how many words, then "message", the channel and what was said, each
        # after its length. Nobody says anything with a line end in it.
        lines = (self._unread + data).split(b"\r\n")
        whole = (len(lines) - 1) // 7 * 7  # what follows the last line end is not all of a line
        self._unread = b"\r\n".join(lines[whole:])
        return lines[6:whole:7]

    def close(self) -> None:
        """Hear no more: the server finds nobody on the channel."""
        connection, self._connection, self.fd = self._connection, None, -1
        if connection is not None:
            connection.disconnect()


def _quiet(kind: type[Any], options: dict[str, Any]) -> Wire:
    """Make a connection that does not tell the server about the driver: two round trips less."""
    wire: Wire
    try:
        wire = kind(**options, driver_info=None)
    except TypeError:  # a driver from before that option
        wire = kind(**options, lib_name=None, lib_version=None)
    return wire


def _greet(connection: Wire) -> None:
    """See who is there, before anything is asked that could stay unanswered."""
    try:
        connection.send_packed_command((command(b"PING"),), check_health=False)
        connection.read_response()
    except NoPermissionError:
        pass  # a server nevertheless
    except ResponseError as error:
        if "MISCONF" not in str(error):
            raise
        # It cannot save and takes no writes, but whoever looks is answered. Only a greeting is not.


def _is_open(connection: Wire) -> bool:
    """Say whether nothing has come in: neither an end nor an answer that nobody waits for."""
    try:
        return not connection.can_read(0)
    except RedisError:
        return False
