"""Encrypted connections: the certificate is checked, and waiting works as it does without."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
import threading
from typing import TYPE_CHECKING

import pytest
from redis_kit import Waiter, until

from fencepost import AsyncFencepost, BadUrl, Fencepost, StoreUnfit
from servers import Valkey, shared
from servers.where import missing

if TYPE_CHECKING:
    from asyncio import StreamReader, StreamWriter
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        missing("OpenSSL", "openssl")
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
         "-keyout", folder / "key.pem", "-out", folder / "cert.pem",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def port(certificate: Path) -> Iterator[int]:
    """Where Redis speaks TLS: the wheel's server cannot, so somebody does it for it."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    upstream, loop = shared(Valkey).port, asyncio.new_event_loop()

    async def pump(reader: StreamReader, writer: StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader: StreamReader, writer: StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", upstream)
        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

    server = loop.run_until_complete(asyncio.start_server(connected, "127.0.0.1", 0, ssl=context))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield server.sockets[0].getsockname()[1]
    loop.call_soon_threadsafe(server.close)
    asyncio.run_coroutine_threadsafe(_ended(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


async def _ended() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@pytest.fixture
def url(port: int, certificate: Path) -> str:
    return f"rediss://localhost:{port}/0?ssl_ca_certs={certificate}/cert.pem"


def test_leases_are_handed_over_through_encrypted_connections(url: str, tmp_path: Path) -> None:
    space = f"s{abs(hash(str(tmp_path)))}"
    with Fencepost(url, namespace=space) as fp, shared(Valkey).client() as client:
        for _ in range(3):
            lock = fp.lock("x")
            lease = lock.acquire()
            waiter = Waiter(fp)
            until(lambda: client.zcard(f"fp:{{{space}:x}}:line") == 1)
            assert lock.release(lease)
            assert waiter.lease().token > lease.token
            assert waiter.release()


def test_tasks_wait_on_encrypted_connections(url: str, tmp_path: Path) -> None:
    async def scene() -> int:
        async with AsyncFencepost(url, namespace=f"a{abs(hash(str(tmp_path)))}") as fp:

            async def work() -> int:
                async with fp.lock("x", wait=30) as lease:
                    return lease.token

            return len(set(await asyncio.gather(*(work() for _ in range(6)))))

    assert asyncio.run(scene()) == 6


def test_a_certificate_that_nobody_vouches_for_is_refused(port: int) -> None:
    sentence = "is not trusted.*name its authority with .ssl_ca_certs=FILE"
    with (
        Fencepost(f"rediss://localhost:{port}/0") as fp,
        pytest.raises(StoreUnfit, match=sentence),
    ):
        fp.lock("x").acquire()


def test_a_file_that_is_not_there_is_a_bad_url(port: int) -> None:
    with (
        Fencepost(f"rediss://localhost:{port}/0?ssl_ca_certs=/nowhere.pem") as fp,
        pytest.raises(BadUrl, match=r"a file that the URL .* names is not there"),
    ):
        fp.lock("x").acquire()
