"""What the tests of the Redis store share: stores by port, processes, and patience with a limit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from fencepost.model.lease import Holder
from fencepost.stores.redis import RedisStore, read_address
from fencepost.world.blocking import BlockingWorld

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable

    from fencepost import Fencepost, Lease

PROGRAM = Path(__file__).with_name("redis_program.py")
WORLD = BlockingWorld()


def store_at(port: int, namespace: str = "default", options: str = "") -> RedisStore:
    address = read_address(f"127.0.0.1:{port}/0{options}", tls=False)
    return RedisStore(WORLD, address, namespace=namespace)


def holder(host: str = "a") -> Holder:
    return Holder(WORLD.nonce(), host, 1)


def until(condition: Callable[[], object], *, within: float = 20.0) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within, f"not within {within} s"
        time.sleep(0.002)
    return time.monotonic() - began


class Waiter:
    """A thread that waits for a lease, and keeps it."""

    def __init__(self, fp: Fencepost, name: str = "x", *, limit: int | None = None) -> None:
        self._got: list[Lease] = []
        self.at = 0.0
        self._lock = fp.lock(name, wait=30, limit=limit)
        self._thread = threading.Thread(target=self._wait)
        self._thread.start()

    def _wait(self) -> None:
        self._got.append(self._lock.acquire())
        self.at = time.monotonic()

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()

    def lease(self) -> Lease:
        self._thread.join(20)
        return self._got[0]

    def release(self) -> bool:
        return self._lock.release(self.lease())


class Process:
    """One run of the program, in a process of its own."""

    def __init__(self, url: str, *, name: str = "x", ttl: float = 30.0, rounds: int = 0) -> None:
        words = [sys.executable, str(PROGRAM), url, name, str(ttl), str(rounds)]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        until(lambda: "ready" in self.lines)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.strip())

    @property
    def granted(self) -> bool:
        return any('"granted"' in line for line in self.lines)

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def signal(self, what: signal.Signals) -> None:
        os.kill(self.pid, what)

    def wait(self) -> None:
        self._process.wait(60)
        self._reader.join(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
