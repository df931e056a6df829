"""What the tests of the PostgreSQL store share."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

from fencepost.model.lease import Holder
from fencepost.stores.postgres import open_postgres
from fencepost.world.blocking import BlockingWorld
from fencepost.world.clocks import SystemClocks
from fencepost.world.flow import finish
from servers import PgBouncer, Postgres, shared

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fencepost.model.lease import Grant
    from fencepost.stores.postgres import PostgresStore

PROGRAM = Path(__file__).with_name("postgres_program.py")
boottime = SystemClocks().boottime
_POOLERS: list[type[PgBouncer]] = []


def pooler() -> PgBouncer:
    """Return the pooler, in transaction mode, of the server that these tests share."""
    if not _POOLERS:
        _POOLERS.append(PgBouncer.before(shared(Postgres).port))
    return shared(_POOLERS[0])


def fresh() -> str:
    """Return a name that no other test uses."""
    return f"t{secrets.token_hex(6)}"


def store_at(url: str, *, namespace: str = "") -> PostgresStore:
    """Open a store in the blocking world."""
    address = url.partition("://")[2]
    return open_postgres(BlockingWorld(), address, namespace=namespace or fresh())


def somebody(host: str = "a") -> Holder:
    """Return a new holder."""
    return Holder(secrets.token_hex(16), host, 1, "test")


def granted(store: PostgresStore, name: str = "job", *, ttl: float = 30.0) -> tuple[Holder, Grant]:
    """Acquire a lease for somebody."""
    holder = somebody()
    return holder, finish(store.acquire(name, holder=holder, ttl=ttl))


def free(store: PostgresStore, holder: Holder, grant: Grant, name: str = "job") -> None:
    """Give a lease back."""
    finish(store.release(name, nonce=holder.nonce, token=grant.token))


class Believer:
    """A process that has a lease and believes in it for as long as it may."""

    def __init__(self, url: str, name: str, *, ttl: str = "10m") -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), url, name, ttl], stdout=subprocess.PIPE, text=True
        )
        first, _, token = self._line().partition(" ")
        assert first == "granted"
        self.token = int(token)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def last_belief(self) -> tuple[float, str]:
        """Wait for its loss; return the last instant at which it believed, and why no longer."""
        word, instant, *why = self._line().split()
        assert word == "lost"
        return float(instant), " ".join(why)

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


def servers() -> Iterator[str]:
    """Return the ways to the shared server: by itself, and through its pooler."""
    yield shared(Postgres).url()
    yield pooler().url()
