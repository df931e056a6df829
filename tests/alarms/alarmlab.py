"""What the tests of alarms share: books on clocks that stand still, and short ways to ask."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fencepost.ledger.alarm_memory import MemoryAlarms
from fencepost.ledger.alarm_sqlite import SqliteAlarms
from fencepost.ledger.mariadb_alarms import MariaAlarms
from fencepost.ledger.memory import MemoryLedger
from fencepost.ledger.postgres_alarms import PostgresAlarms
from fencepost.ledger.sqlite import SqliteLedger
from fencepost.model.alarm import AlarmWant, Firing, Setting
from fencepost.model.alarm_policy import AlarmPolicy
from fencepost.model.lease import Holder
from fencepost.stores.memory import MemoryStore
from fencepost.stores.sqlite import SqliteStore
from fencepost.testing.clock import SettableClocks
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish
from marialab import MariaClocks, MySQLClocks, opened_mariadb
from pglab import ServerClocks, fresh_namespace, opened_postgres

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fencepost import Fencepost
    from fencepost.ledger.alarm_api import AlarmBook
    from fencepost.ledger.mariadb import MariaLedger
    from fencepost.ledger.postgres import PostgresLedger
    from fencepost.model.alarm import AlarmRecord, Batch, ClaimedAlarm

START = 1_700_000_000.0


class StillClocks(SettableClocks):
    """Clocks that only move when they are told to."""

    def __init__(self) -> None:
        super().__init__()
        self._system = self  # type: ignore[assignment]  # what it adds its offsets to

    def wall(self) -> float:
        return START + self._wall_offset

    def boottime(self) -> float:
        return 1_000.0 + self._boot_offset


class FileClocks(StillClocks):
    """Those that go with a file."""


CLOCKS: dict[str, Callable[[], Any]] = {
    "memory": StillClocks,
    "sqlite": FileClocks,
    "postgres": ServerClocks,
    "mariadb": MariaClocks,
    "mysql": MySQLClocks,
}


class Opened:
    """A book, its leases, and whoever asks them."""

    def __init__(
        self, book: AlarmBook, ledger: MemoryLedger | SqliteLedger | PostgresLedger | MariaLedger
    ) -> None:
        self.book, self.ledger = book, ledger
        self.leases = ledger.leases
        self._count = 0

    def nonce(self) -> str:
        self._count += 1
        return f"n{self._count}"

    def set(
        self,
        key: str = "a",
        *,
        after: float = 0.0,
        kind: str = "k",
        payload: str | None = None,
        if_generation: int | None = None,
    ) -> int:
        setting = Setting(
            kind,
            key,
            self.nonce(),
            after=after,
            payload=payload,
            if_generation=if_generation,
        )
        return finish(self.book.set(setting)).generation

    def get(self, key: str = "a", *, kind: str = "k") -> AlarmRecord:
        record = finish(self.book.get(kind, key))
        assert record is not None
        return record

    def claim(
        self,
        policy: AlarmPolicy | None = None,
        *,
        limit: int = 10,
        nonce: str = "",
        alone: bool = True,
        sweep: bool = True,
    ) -> Batch:
        holder = Holder(nonce or self.nonce(), "here", 1)
        policies = {"k": policy or AlarmPolicy()}
        return finish(
            self.book.claim_due(AlarmWant(holder, policies, limit, alone=alone, sweep=sweep))
        )

    def fired(self, policy: AlarmPolicy | None = None) -> Firing:
        """Claim the one alarm that is due."""
        (one,) = self.claim(policy).claimed
        return firing_of(one)

    def close(self) -> None:
        finish(self.ledger.close())


def firing_of(claimed: ClaimedAlarm) -> Firing:
    record = claimed.record
    return Firing(
        record.kind, record.key, record.fired, record.token, record.holder.nonce, record.lease
    )


def memory_book(clocks: SettableClocks | None = None) -> Opened:
    world = BlockingWorld(clocks=clocks)
    ledger = MemoryLedger(world, MemoryStore(world))
    return Opened(MemoryAlarms(world, ledger), ledger)


def sqlite_book(
    path: Path | str, clocks: SettableClocks | None = None, *, namespace: str = "default"
) -> Opened:
    world = BlockingWorld(clocks=clocks)
    ledger = SqliteLedger(world, SqliteStore(world, str(path), namespace=namespace))
    return Opened(SqliteAlarms(world, ledger), ledger)


def postgres_book(url: str, *, namespace: str) -> Opened:
    ledger = opened_postgres(url, namespace=namespace)
    return Opened(PostgresAlarms(BlockingWorld(), ledger), ledger)


def mariadb_book(url: str, *, namespace: str, clocks: MariaClocks | None = None) -> Opened:
    if clocks is None:
        ledger = opened_mariadb(url, namespace=namespace)
    else:
        ledger = clocks.opened(namespace)
    return Opened(MariaAlarms(BlockingWorld(), ledger), ledger)


def book_by(clocks: SettableClocks, folder: Path) -> Opened:
    """Return a book of the kind that goes by such clocks."""
    if isinstance(clocks, ServerClocks):
        return postgres_book(clocks.url, namespace=fresh_namespace())
    if isinstance(clocks, MariaClocks):
        return mariadb_book(clocks.url, clocks=clocks, namespace=fresh_namespace())
    if isinstance(clocks, FileClocks):
        return sqlite_book(folder / "ledger.db", clocks)
    return memory_book(clocks)


@contextmanager
def running(fp: Fencepost) -> Iterator[None]:
    """Have an instance of this face, in a thread."""
    thread = threading.Thread(target=lambda: fp.run(signals=False), daemon=True)
    thread.start()
    try:
        yield
    finally:
        fp.stop(grace=0)
        thread.join(10)
        assert not thread.is_alive()
