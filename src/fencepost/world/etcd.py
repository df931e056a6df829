"""The door to etcd: JSON over HTTP to its v3 gateway, with errors that say what is true.

A request that was sent and not answered may have been carried out. Only those that may be carried
out twice are sent again to the next endpoint; for the others the caller hears ``OutcomeUnknown``.
"""

from __future__ import annotations

import enum
import json
import ssl
import time
from typing import Any, NamedTuple

from fencepost.errors import BadUrl, OutcomeUnknown, StoreUnavailable, StoreUnfit
from fencepost.world.etcd_wire import Endpoint, NotAnswered, NotSent, Wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from fencepost.world.api import World
    from fencepost.world.etcd_wire import Ear, Reply

_MOST_IDLE = 32  # connections that are kept open to one endpoint
_OK, _FAILED = 200, 500
# The codes of gRPC that the gateway passes on.
_INVALID, _NOT_FOUND, _DENIED, _EXHAUSTED, _PRECONDITION, _UNAUTHENTICATED = 3, 5, 7, 8, 9, 16
_REFUSALS = (_INVALID, _NOT_FOUND, _DENIED, _EXHAUSTED, _PRECONDITION, _UNAUTHENTICATED)
_STALE_PASS = ("invalid auth token", "revision in header is old")


class Effect(enum.Enum):
    """What it means to send a request twice."""

    NONE = "none"  # it reads, or leaves nothing that matters: without an answer nothing happened
    AGAIN = "again"  # it changes something, and twice is as good as once
    ONCE = "once"  # whether it was carried out must be asked, not tried


class Credentials(NamedTuple):
    """Who we are. Never shown."""

    user: str
    password: str


class EtcdLeaseGone(Exception):
    """The etcd lease that a request names is no more; nothing was done."""


class EtcdRefusal(Exception):
    """The server said no, with a code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class EtcdDoor:
    """Several endpoints of one cluster, as this process may use them, from any thread."""

    def __init__(
        self,
        world: World,
        endpoints: Sequence[Endpoint],
        *,
        tls: ssl.SSLContext | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self._world, self.endpoints, self._tls = world, tuple(endpoints), tls
        self._credentials = credentials
        self.secure, self.knows_us = tls is not None, credentials is not None
        self.where = "etcd at " + ", ".join(map(str, endpoints))
        self.asked = 0  # requests that were sent, for tests that count them
        self.opened = 0  # connections so far, which are numbered
        self._idle: dict[Endpoint, list[Wire]] = {}
        self.forget()

    def forget(self) -> None:
        """Begin anew, in a forked child for example: descriptors are closed, nobody is told."""
        self._turn = self._world.mutex()
        self.close()
        self._first = 0  # the endpoint that is asked first
        self._pass = ""  # what the server gave us for our password

    def close(self) -> None:
        """Close what is open; the next request opens it again."""
        with self._turn:
            idle, self._idle = self._idle, {}
        for wires in idle.values():
            for wire in wires:
                wire.close()

    def ask(
        self, path: str, body: dict[str, Any], *, effect: Effect, timeout: float = 5.0
    ) -> dict[str, Any]:
        """Ask one endpoint after the other, as far as ``effect`` allows, and return the answer.

        Its ``_wire`` is the number of the connection that it came by.
        """
        if self._credentials is not None and not self._pass:
            self._authenticate(timeout)
        try:
            return self._ask(path, body, effect=effect, timeout=timeout)
        except EtcdRefusal as refusal:
            if self._credentials is None or not any(
                stale in refusal.message for stale in _STALE_PASS
            ):
                raise self._told(refusal) from refusal
        self._authenticate(timeout)
        try:
            return self._ask(path, body, effect=effect, timeout=timeout)
        except EtcdRefusal as refusal:
            raise self._told(refusal) from refusal

    def ask_one(self, endpoint: Endpoint, path: str, *, timeout: float = 2.0) -> dict[str, Any]:
        """Ask one endpoint about itself."""
        if self._credentials is not None and not self._pass:
            self._authenticate(timeout)
        try:
            return self._exchange(endpoint, path, b"{}", timeout)
        except (NotSent, NotAnswered) as error:
            raise StoreUnavailable(f"etcd at {endpoint} does not answer: {error}") from error
        except EtcdRefusal as refusal:
            raise self._told(refusal) from refusal

    def listen(self, path: str, body: dict[str, Any], *, until: bytes, timeout: float) -> Ear:
        """Open a stream and read it up to ``until``: from there on every word is news."""
        text = json.dumps(body).encode()
        last: Exception | None = None
        for endpoint in self._in_order():
            try:
                wire = Wire(endpoint, tls=self._tls, timeout=timeout)
                try:
                    return wire.stream(path, text, authorization=self._pass, until=until)
                except BaseException:
                    wire.close()
                    raise
            except (NotSent, NotAnswered) as error:
                last = error
                self._avoid(endpoint)
        raise StoreUnavailable(f"{self.where} cannot be watched: {last}") from last

    def is_open(self) -> bool:
        """Say whether a connection is at hand that the endpoint to be asked next has not closed."""
        endpoint = self._in_order()[0]
        wire = self._taken(endpoint)
        if wire is not None and not self._put_back(endpoint, wire):
            wire.close()
        return wire is not None

    # Behind the door.

    def _ask(
        self, path: str, body: dict[str, Any], *, effect: Effect, timeout: float
    ) -> dict[str, Any]:
        text = json.dumps(body, separators=(",", ":")).encode()
        end = time.monotonic() + timeout
        order = self._in_order()
        last: Exception | None = None
        sent = False
        for number, endpoint in enumerate(order):
            share = end - time.monotonic()
            if effect is not Effect.ONCE:  # so that one that hangs leaves time for the others
                share /= len(order) - number
            if share <= 0:
                break
            try:
                return self._exchange(endpoint, path, text, share)
            except NotSent as error:
                last = error
            except NotAnswered as error:
                last, sent = error, True
            except EtcdRefusal as refusal:
                if refusal.code in _REFUSALS:
                    raise
                last, sent = refusal, sent or "no leader" not in refusal.message
            self._avoid(endpoint)
            if sent and effect is Effect.ONCE:
                break
        if sent and effect is not Effect.NONE:
            raise OutcomeUnknown(
                f"{self.where} was asked and did not say whether it was done: {last}"
            ) from last
        raise StoreUnavailable(
            f"{self.where} cannot be reached: {last}; is it running, and has it a leader?"
        ) from last

    def _exchange(
        self, endpoint: Endpoint, path: str, text: bytes, timeout: float
    ) -> dict[str, Any]:
        wire = self._taken(endpoint) or self._connected(endpoint, timeout)
        reply: Reply | None = None
        try:
            self.asked += 1
            reply = wire.exchange(path, text, authorization=self._pass, timeout=timeout)
        finally:
            if reply is None or reply.last or not self._put_back(endpoint, wire):
                wire.close()
        return {**_understood(endpoint, reply.status, reply.content), "_wire": wire.number}

    def _connected(self, endpoint: Endpoint, timeout: float) -> Wire:
        wire = Wire(endpoint, tls=self._tls, timeout=timeout)
        with self._turn:
            self.opened += 1
            wire.number = self.opened
        return wire

    def _taken(self, endpoint: Endpoint) -> Wire | None:
        with self._turn:
            idle = self._idle.get(endpoint, [])
            while idle:
                wire = idle.pop()
                if not wire.is_stale():
                    return wire
                wire.close()
        return None

    def _put_back(self, endpoint: Endpoint, wire: Wire) -> bool:
        with self._turn:
            idle = self._idle.setdefault(endpoint, [])
            if len(idle) >= _MOST_IDLE:
                return False
            idle.append(wire)
            return True

    def _in_order(self) -> list[Endpoint]:
        first = self._first
        return [*self.endpoints[first:], *self.endpoints[:first]]

    def _avoid(self, endpoint: Endpoint) -> None:
        """Ask another endpoint first from now on."""
        with self._turn:
            if self.endpoints[self._first] == endpoint:
                self._first = (self._first + 1) % len(self.endpoints)

    def _authenticate(self, timeout: float) -> None:
        assert self._credentials is not None
        user, password = self._credentials
        self._pass = ""
        body = {"name": user, "password": password}
        try:
            answer = self._ask("/auth/authenticate", body, effect=Effect.NONE, timeout=timeout)
        except EtcdRefusal as refusal:
            if "not enabled" in refusal.message:
                return  # it lets everybody in: the doctor says so
            raise self._told(refusal) from refusal
        self._pass = str(answer.get("token", ""))

    def _told(self, refusal: EtcdRefusal) -> Exception:
        """Return what a refusal means for the caller: nothing was done."""
        said, user = refusal.message, self._credentials.user if self._credentials else ""
        if "lease not found" in said:
            return EtcdLeaseGone(said)
        if "authentication failed" in said or "user name not found" in said:
            return StoreUnfit(
                f"{self.where} refuses the password of user {user!r}: correct the URL"
            )
        if "user name is empty" in said or (refusal.code == _UNAUTHENTICATED and not user):
            return StoreUnfit(
                f"{self.where} wants to know who asks: write etcd://user:password@host:port/prefix"
            )
        if refusal.code == _DENIED:
            return StoreUnfit(
                f"{self.where} does not let user {user!r} read and write here: "
                "grant its role readwrite on the prefix of the URL"
            )
        if "space exceeded" in said:
            return StoreUnavailable(
                f"{self.where} is full and takes no writes: compact and defragment it, "
                "then disarm its NOSPACE alarm"
            )
        return StoreUnavailable(f"{self.where} refused: {said}")


def tls_context(*, ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext:
    """Return how etcd is known to us, by the authorities of ``ca``, and we to it."""
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise BadUrl(f"the certificates of an etcds:// URL cannot be read: {error}") from error
    return context


def _understood(endpoint: Endpoint, status: int, content: bytes) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = dict(json.loads(content))
    except (ValueError, TypeError) as error:
        if status == _OK:
            raise NotAnswered(f"{endpoint} answered something that is not JSON") from error
        if status >= _FAILED:  # by something in between, which may have passed the request on
            raise NotAnswered(f"{endpoint} answered HTTP {status}") from error
        raise StoreUnfit(
            f"{endpoint} answers HTTP {status} where etcd's v3 gateway should be: "
            "is this the client port of etcd 3.4 or newer?"
        ) from error
    # A stream has its errors and results inside.
    failed: Any = answer.get("error")
    if failed is None and status == _OK:
        return dict(answer.get("result", answer))
    told: dict[str, Any] = failed if isinstance(failed, dict) else answer
    code = told.get("grpc_code") or told.get("code") or 2
    message = told.get("message") or failed
    raise EtcdRefusal(int(code), str(message))
