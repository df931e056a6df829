"""A transaction of the ledger's database for user code: effect, items and checkpoint commit as one.

What is common to all databases is here: the faces, and which items are whose. How a transaction is
guarded is for each database to say: ``transaction_sqlite`` and ``transaction_server``.
"""

from __future__ import annotations

import importlib
import threading
from abc import ABC, abstractmethod

from fencepost.errors import Misuse
from fencepost.model.fault import FAULTS, behind
from fencepost.model.item import Found, named
from fencepost.model.kept import encoded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType
    from typing import Any, Self, TypeVar

    from fencepost.flows.course import Course
    from fencepost.world.api import World

    T = TypeVar("T")

ENDED_OTHERWISE = (
    "the transaction was ended by other means than its block: what it wrote is not guarded; leave "
    "BEGIN, COMMIT and ROLLBACK to run.transaction(), and end the block after an error that rolls "
    "everything back"
)

# By the ledger's class, so that nothing is imported that nobody asked for.
_TRANSACTIONS = {
    "SqliteLedger": ("fencepost.transaction_sqlite", "SqliteTransaction"),
    "MariaLedger": ("fencepost.transaction_server", "ServerTransaction"),
    "PostgresLedger": ("fencepost.transaction_server", "ServerTransaction"),
}

# Between the commit of one thread and its last words another may have begun.
_turn = threading.Lock()


class Transaction(ABC):
    """``with run.transaction() as tx``: from its guard to its commit; its methods block."""

    _idled = False  # whether it was quiet for so long that the database ends it

    def __init__(self, course: Course, *, scope: str, owner: object) -> None:
        self._course, self._scope, self._owner = course, scope, owner
        self._checkpoint: str | None = None

    @property
    @abstractmethod
    def connection(self) -> Any:
        """The driver's connection, for libraries that want one. Leave begin and commit alone."""

    def execute(self, sql: str, parameters: Any = ()) -> Any:
        """Execute one statement, with the driver's own placeholders; return its cursor."""
        return self._watched(lambda: self._execute(sql, parameters))

    def executemany(self, sql: str, parameters: Iterable[Any]) -> Any:
        """Execute one statement for many rows; return the driver's cursor."""
        return self._watched(lambda: self._executemany(sql, parameters))

    def once(self, item: str | int, *, scope: str | None = None) -> bool:
        """Record an item; False if it was done before. It commits with everything else here."""
        if scope not in (None, "slot", "job"):
            raise Misuse(f"scope is {scope!r}: it must be 'slot' or 'job'")
        job, items = self._course.run.key.job, self._course.items
        where = self._scope if scope is None else job if scope == "job" else items
        name = named(item)
        repeat = self._course.policy.in_doubt.value == "repeat"
        found = self._watched(lambda: self._done(where, name, repeat=repeat))
        if found is Found.DOUBT:
            self._course.doubt(name)
        return found.go

    def save(self, checkpoint: Any) -> None:
        """Keep a checkpoint. It commits with everything else here."""
        text = encoded(checkpoint, what="checkpoint")
        self._watched(lambda: self._keep(text))
        self._checkpoint = text

    def enter(self) -> None:
        """Begin, and see that the run is ours."""
        self._watched(self.open)

    def leave(self, error: BaseException | None) -> None:
        """End with the block, which an error may have left: commit, or roll everything back."""
        for one in () if error is None else behind(error):
            if self._is_of_driver(one, ours=False):  # by way of its connection, perhaps
                self._course.met_fault(one)
        self._watched(lambda: self.close(commit=error is None))

    def _watched(self, work: Callable[[], T]) -> T:
        """Do something in the ledger's database; an error of that database is no fault of ours."""
        try:
            return work()
        except Exception as error:
            fault = isinstance(error, FAULTS) and not self._idled
            if fault or self._is_of_driver(error, ours=True):
                self._course.met_fault(error)
            raise

    def _execute(self, sql: str, parameters: Any) -> Any:
        return self.connection.execute(sql, parameters)

    def _executemany(self, sql: str, parameters: Iterable[Any]) -> Any:
        cursor = self.connection.cursor()
        cursor.executemany(sql, parameters)
        return cursor

    @abstractmethod
    def _is_of_driver(self, error: BaseException, *, ours: bool) -> bool:
        """Say whether an error of the driver is about the ledger's database, not what it was asked.

        It surely came from our own connection if it is ``ours``; else it may be of another one.
        """

    @abstractmethod
    def open(self) -> None:
        """Begin, and see that the run is ours."""

    @abstractmethod
    def close(self, *, commit: bool) -> None:
        """See that the run is still ours and commit, or roll everything back."""

    @abstractmethod
    def _done(self, scope: str, item: str, *, repeat: bool) -> Found:
        """Have an item done, if it is ours to do; say what was found."""

    @abstractmethod
    def _keep(self, checkpoint: str) -> None:
        """Keep a checkpoint (JSON text), or see to it that the commit does."""

    def _refuse_nesting(self) -> None:
        if self._owner in self._course.transacting:
            raise Misuse("a transaction of this run is already open here: they do not nest")

    def _joins(self, *, pinned: float = 0.0) -> None:
        """Have it known that this thread or task has a transaction open."""
        with _turn:
            self._course.hold.pinned = pinned
            self._course.transacting |= {self._owner}

    def _leaves(self) -> None:
        with _turn:
            if self._owner in self._course.transacting:
                self._course.transacting -= {self._owner}
                if not self._course.transacting:
                    self._course.hold.pinned = 0.0

    def __enter__(self) -> Self:
        self.enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave(error)


class AsyncTransaction:
    """``async with run.transaction() as tx``: the same, each call in a thread.

    The thread is its own: those who wait for what a transaction has locked would else have all the
    threads, and it could neither go on nor end.
    """

    def __init__(self, world: World, inner: Transaction) -> None:
        from fencepost.world.aio import AioWorld  # not for those who block

        self._world, self._inner = AioWorld(clocks=world.clocks, threads=1), inner

    async def execute(self, sql: str, parameters: Any = ()) -> list[Any]:
        """Execute one statement and return its rows."""

        def work() -> list[Any]:
            cursor = self._inner.execute(sql, parameters)
            return list(cursor.fetchall()) if cursor.description else []

        return await self._call(work)

    async def executemany(self, sql: str, parameters: Iterable[Any]) -> int:
        """Execute one statement for many rows; return how many it changed."""
        return await self._call(lambda: int(self._inner.executemany(sql, parameters).rowcount))

    async def once(self, item: str | int, *, scope: str | None = None) -> bool:
        """Record an item; False if it was done before."""
        return await self._call(lambda: self._inner.once(item, scope=scope))

    async def save(self, checkpoint: Any) -> None:
        """Keep a checkpoint."""
        await self._call(lambda: self._inner.save(checkpoint))

    async def _call(self, work: Callable[[], T]) -> T:
        return await self._world.call(work)

    async def __aenter__(self) -> Self:
        opened = False
        try:
            await self._call(self._inner.enter)
            opened = True
        finally:
            if not opened:  # cancelled meanwhile: nobody would ever end it
                self._inner.close(commit=False)
                self._world.close()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._call(lambda: self._inner.leave(error))
        finally:
            self._world.close()


def transaction_of(ledger: Any, course: Course, *, scope: str, owner: object) -> Transaction:
    """Return a transaction of the ledger's database, or say that there can be none."""
    kind = type(ledger).__name__
    if kind not in _TRANSACTIONS or not ledger.abilities.transactional:
        raise Misuse(
            f"run.transaction() needs a ledger in an SQL database, and job "
            f"{course.run.key.job!r} has its ledger in {kind}"
        )
    module, name = _TRANSACTIONS[kind]
    made: Transaction = getattr(importlib.import_module(module), name)(
        ledger, course, scope=scope, owner=owner
    )
    return made
