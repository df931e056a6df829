"""What is true at etcd when a client is stopped, a gateway gives up, or a copy is put back."""

from __future__ import annotations

import shutil
import threading
import urllib.request
import uuid
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

import pytest

from fencepost.errors import BadUrl, LeaseHeld, LeaseLost, OutcomeUnknown, StoreUnavailable
from fencepost.model.lease import Grant, Holder
from fencepost.stores.etcd import EtcdStore
from fencepost.stores.open import open_store
from fencepost.world.blocking import BlockingWorld
from fencepost.world.etcd import Effect
from fencepost.world.flow import finish
from servers import Etcd, shared

if TYPE_CHECKING:
    from collections.abc import Iterator

TTL = 30.0


def someone() -> Holder:
    return Holder(uuid.uuid4().hex, "a", 1)


@contextmanager
def opened(port: int, *, prefix: str = "") -> Iterator[EtcdStore]:
    url = f"etcd://127.0.0.1:{port}/{prefix or uuid.uuid4().hex}"
    store = open_store(url, BlockingWorld(), namespace="default")
    assert isinstance(store, EtcdStore)
    try:
        yield store
    finally:
        finish(store.close())


def acquire(store: EtcdStore, holder: Holder, *, ttl: float = TTL) -> Grant:
    return finish(store.acquire("x", holder=holder, ttl=ttl))


def renew(store: EtcdStore, holder: Holder, grant: Grant, *, ttl: float = TTL) -> Grant:
    return finish(store.renew("x", nonce=holder.nonce, token=grant.token, ttl=ttl))


def once(store: EtcdStore) -> int:
    """Acquire and release, and return the token."""
    holder = someone()
    grant = acquire(store, holder)
    finish(store.release("x", nonce=holder.nonce, token=grant.token))
    return grant.token


# A gateway between us and etcd.


class Gateway:
    """Passes requests on; if it ``fails``, says so in HTML although etcd did what was asked."""

    def __init__(self, upstream: int) -> None:
        self.fails = 0  # the status that it answers to what writes
        gateway = self

        class Passing(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                """Say nothing."""

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                url = f"http://127.0.0.1:{upstream}{self.path}"
                with urllib.request.urlopen(url, data=body) as told:
                    status, content = 200, told.read()
                if gateway.fails and b"request_put" in body:
                    status, content = gateway.fails, b"<html>try again later</html>"
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Passing)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_gateway_that_gives_up_leaves_the_outcome_unknown(status: int) -> None:
    with Gateway(shared(Etcd).port) as gateway, opened(gateway.port) as store:
        once(store)
        gateway.fails = status
        holder = someone()
        with pytest.raises(OutcomeUnknown, match=f"HTTP {status}"):
            acquire(store, holder)
        assert store._spares._idle == [], "what may have a key is no spare"
        gateway.fails = 0
        assert acquire(store, holder).adopted
        finish(store.close())  # before the gateway, which waits for its connections


def test_what_breaks_off_an_acquire_makes_no_spare_of_what_may_have_a_key(monkeypatch: Any) -> None:
    with opened(shared(Etcd).port) as store:
        once(store)

        def broken(*_: object, **__: object) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setattr(store, "_txn", broken)
        with pytest.raises(KeyboardInterrupt):
            acquire(store, someone())
        assert store._spares._idle == []


def test_what_was_surely_not_done_leaves_its_spare(monkeypatch: Any) -> None:
    with opened(shared(Etcd).port) as store:
        once(store)

        def away(*_: object, **__: object) -> Any:
            raise StoreUnavailable("nothing was sent")

        monkeypatch.setattr(store, "_txn", away)
        with pytest.raises(StoreUnavailable):
            acquire(store, someone())
        assert len(store._spares._idle) == 1


# An older copy is put back.


def test_tokens_do_not_fall_for_one_that_was_open_while_etcd_was_set_back() -> None:
    with (
        Etcd.own() as server,
        opened(server.port, prefix="p") as store,
        opened(server.port, prefix="p") as other,
    ):
        once(store)
        once(other)
        server.kill()
        shutil.copytree(server.folder / "data", server.folder / "copy")
        server.start()
        top = max(once(store) for _ in range(20))
        server.kill()
        shutil.rmtree(server.folder / "data")
        shutil.move(server.folder / "copy", server.folder / "data")
        server.start()
        assert once(other) > top


def test_a_grant_by_a_connection_that_is_newer_than_the_base_is_taken_back() -> None:
    with opened(shared(Etcd).port) as store:
        once(store)
        real, wire = store._spare, store.door.opened

        def later(*args: Any) -> Any:
            spare = real(*args)
            if store.door.opened == wire:
                store.door.close()  # as if etcd had gone down just then
            return spare

        store._spare = later  # type: ignore[method-assign, assignment]
        before = store._base.known(timeout=5).base
        grant = acquire(store, someone())
        assert store._base.known(timeout=5).base > before, "it was raised to the time"
        seen = finish(store.peek("x"))
        assert seen is not None
        assert (seen.token, seen.held) == (grant.token, True)


def test_connections_that_many_threads_open_do_not_keep_raising_the_base() -> None:
    with opened(shared(Etcd).port) as store:
        failed: list[BaseException] = []

        def work(name: str) -> None:
            try:
                for _ in range(10):
                    holder = someone()
                    grant = finish(store.acquire(name, holder=holder, ttl=TTL))
                    finish(store.release(name, nonce=holder.nonce, token=grant.token))
            except BaseException as error:
                failed.append(error)
                raise

        threads = [threading.Thread(target=work, args=(f"n{number}",)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failed
        once(store)
        base, before = store._base.known(timeout=5), store.door.asked
        once(store)
        assert store._base.known(timeout=5).base == base.base
        assert store.door.asked - before == 2


def test_a_release_after_a_set_back_leaves_a_lock_of_the_same_revision_alone() -> None:
    with opened(shared(Etcd).port) as store:
        holder, rival = someone(), someone()
        once(store)
        acquire(store, holder)
        own = store._own[holder.nonce]
        finish(store.release("x", nonce=holder.nonce))
        grant = acquire(store, rival)
        # After a set back another lock may have come to be in the revision of ours.
        store._own[holder.nonce] = own._replace(created=grant.token - own.text.base)
        with pytest.raises(LeaseLost):
            finish(store.release("x", nonce=holder.nonce))
        seen = finish(store.peek("x"))
        assert seen is not None
        assert (seen.holder.nonce, seen.held) == (rival.nonce, True)


# A renewal with another ttl.


def test_a_renewal_whose_new_etcd_lease_has_ended_asks_for_another() -> None:
    with opened(shared(Etcd).port) as store:
        holder = someone()
        grant = acquire(store, holder)
        real, ended = store._spares.grant, [True]

        def grant_once(*args: Any, **options: Any) -> Any:
            spare = real(*args, **options)
            if ended and ended.pop():
                store.door.ask("/lease/revoke", {"ID": spare.id}, effect=Effect.ONCE)
            return spare

        store._spares.grant = grant_once  # type: ignore[method-assign]
        assert renew(store, holder, grant, ttl=5.0).ttl == 5.0


def test_a_renewal_whose_etcd_leases_always_end_says_that_nothing_was_done() -> None:
    with opened(shared(Etcd).port) as store:
        holder = someone()
        grant = acquire(store, holder)
        real = store._spares.grant

        def ended(*args: Any, **options: Any) -> Any:
            spare = real(*args, **options)
            store.door.ask("/lease/revoke", {"ID": spare.id}, effect=Effect.ONCE)
            return spare

        store._spares.grant = ended  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailable, match="'x'"):
            renew(store, holder, grant, ttl=5.0)
        with pytest.raises(LeaseHeld):
            acquire(store, someone())


def test_a_late_move_to_a_short_etcd_lease_does_not_undo_a_later_one() -> None:
    prefix = uuid.uuid4().hex
    port = shared(Etcd).port
    with opened(port, prefix=prefix) as store, opened(port, prefix=prefix) as keeper:
        holder = someone()
        grant = acquire(store, holder)
        seen: list[Any] = []
        real = store._spares.grant

        def slow(*args: Any, **options: Any) -> Any:
            spare = real(*args, **options)
            if not seen:
                renew(keeper, holder, grant, ttl=60.0)
                found = store._look("x").lock
                assert found is not None
                seen.append(found)
            return spare

        store._spares.grant = slow  # type: ignore[method-assign]
        words = []
        ask = store.door.ask

        def noted(path: str, body: dict[str, Any], **options: Any) -> Any:
            told = ask(path, body, **options)
            if path == "/kv/txn" and "compare" in body:
                words.append(bool(told.get("succeeded")))
            return told

        store.door.ask = noted  # type: ignore[method-assign]
        assert renew(store, holder, grant, ttl=5.0).ttl == 5.0
        assert words == [False, True], "the first move was late, and looked again"


# Passwords.


@pytest.mark.parametrize("scheme", ["etcd", "etcds"])
@pytest.mark.parametrize("piece", ["/", "?", "#", "[", "@", ",", ":", "/1@h:1/", "?1@h:1?"])
def test_no_piece_of_a_password_is_shown(scheme: str, piece: str) -> None:
    secret = f"s3cr{piece}et"
    for user in (f"me:{secret}@", f"me:{secret}"):
        words = shown(f"{scheme}://{user}127.0.0.1:1/prefix")
        assert "s3cr" not in words
        assert "et@" not in words


def shown(url: str) -> str:
    """Return all that is said of a URL, with where it came from."""
    try:
        store = open_store(url, BlockingWorld(), namespace="default")
    except BadUrl as no:
        return f"{no} {no.__cause__} {no.__context__}"
    assert isinstance(store, EtcdStore)
    return store.door.where


@pytest.mark.parametrize("address", ["me:12/34@h:1/prefix", "me:12?34@h:1/prefix"])
def test_a_password_is_not_mistaken_for_a_port(address: str) -> None:
    with pytest.raises(BadUrl, match="%2F") as no:
        open_store(f"etcd://{address}", BlockingWorld(), namespace="default")
    assert "12" not in str(no.value)
