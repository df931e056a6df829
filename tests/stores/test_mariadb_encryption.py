"""Connections to MariaDB and MySQL are as encrypted as they are asked to be."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from fencepost.errors import StoreUnavailable, StoreUnfit
from fencepost.model.lease import Holder
from fencepost.stores.mariadb import MariaStore
from fencepost.stores.open import open_store
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish
from servers import MariaDB, MySQL, shared

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TTL = 30.0


def holder() -> Holder:
    return Holder(os.urandom(16).hex(), "here", 1)


@contextmanager
def closing_store(url: str) -> Iterator[MariaStore]:
    store = open_store(url, BlockingWorld(), namespace="default")
    assert isinstance(store, MariaStore)
    try:
        yield store
    finally:
        finish(store.close())


class Certified(MariaDB):
    """A server that shows a certificate of ours."""

    @property
    def certificate(self) -> Path:
        return self.folder / "cert.pem"

    def prepare(self) -> None:
        words = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-batch", "-subj", "/CN=here"]
        names = ["-addext", "subjectAltName=IP:127.0.0.1"]
        files = ["-keyout", str(self.folder / "key.pem"), "-out", str(self.certificate)]
        subprocess.run(["openssl", *words, *names, *files], check=True, capture_output=True)
        super().prepare()

    @property
    def settings(self) -> tuple[str, ...]:  # type: ignore[override]
        return (f"--ssl-cert={self.certificate}", f"--ssl-key={self.folder}/key.pem")


class CertifiedMySQL(Certified, MySQL):
    """The same; it would show one of its own if it had none of ours."""


class Unencrypted(MySQL):
    settings = ("--tls-version=",)
    encrypts = False


@pytest.mark.parametrize("kind", [Certified, CertifiedMySQL])
def test_a_connection_is_as_encrypted_as_it_is_asked_to_be(kind: type[Certified]) -> None:
    with kind.own() as server:
        url = server.database("test")
        for option, encrypted in (
            ("tls=off", False),
            ("tls=prefer", True),
            ("tls=require", True),
            (f"ca={server.certificate}", True),
        ):
            with closing_store(f"{url}?{option}") as store:
                first = holder()
                for _ in range(3):  # also on a connection that was idle
                    token = finish(store.acquire(option, holder=first, ttl=TTL)).token
                place = finish(store.line(option))
                assert place is not None
                assert finish(place.turn(5.0))
                assert finish(place.turn(5.0))
                [found] = store.server.run("SHOW STATUS LIKE 'Ssl_cipher'", {})
                assert bool(found.rows[0][1]) is encrypted
                finish(place.leave(served=True))
                finish(store.release(option, nonce=first.nonce, token=token))
        with (
            closing_store(f"{url}?tls=verify") as store,
            pytest.raises(StoreUnfit, match=r"not trusted: .*name its authority with \?ca="),
        ):
            finish(store.views())


@pytest.mark.parametrize("kind", [MariaDB, Unencrypted])
def test_a_server_without_encryption_is_refused_where_it_is_required(kind: type[MariaDB]) -> None:
    url = shared(kind).database("plain")
    with (
        closing_store(f"{url}?tls=require") as store,
        pytest.raises(StoreUnavailable, match=r"cannot be reached: .*SSL"),
    ):
        finish(store.views())


def test_a_password_that_mysql_takes_only_if_encrypted_is_one_sentence() -> None:
    url = shared(Unencrypted).database("plain")
    for option in ("tls=prefer", "tls=off"):
        with (
            closing_store(f"{url}?{option}") as store,
            pytest.raises(StoreUnfit, match=r"MySQL at .* only over an encrypted") as no,
        ):
            finish(store.views())
        assert "secret" not in str(no.value)


@pytest.mark.parametrize("kind", [MariaDB, MySQL, Unencrypted])
def test_a_socket_of_the_machine_needs_no_encryption_for_a_password(kind: type[MariaDB]) -> None:
    server = shared(kind)
    server.database("plain")
    server.run("CREATE USER IF NOT EXISTS near@localhost IDENTIFIED BY 'pie'")
    server.run("GRANT ALL ON plain.* TO near@localhost")
    with closing_store(f"{server.scheme}://near:pie@/plain?socket={server.socket}") as store:
        finish(store.views())
