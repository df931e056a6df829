"""A transaction of the ledger's database for user code: effect, items and checkpoint commit as one.

While it is open nobody else can write to the file, and so nobody can claim the run or take its
lease: not even after the lease's end. That is why the lease is valid as long as this is open, and
why it should not be open for long.
"""

from __future__ import annotations

import os
import threading

from fencepost.errors import LeaseLost, Misuse, RunLost
from fencepost.model.item import Found, ItemState, named
from fencepost.model.kept import encoded
from fencepost.world.sqlite import SqliteFile, carry_over

TYPE_CHECKING = False
if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterable
    from types import TracebackType
    from typing import Any, Self, TypeVar

    from fencepost.flows.course import Course
    from fencepost.ledger.sqlite import Desk
    from fencepost.world.api import World

    T = TypeVar("T")

# The lease was ours when the transaction began, and nobody could write since: it still is.
_PROLONG = """
UPDATE fencepost_lease
   SET expires_us = :now_us + :ttl_us, ttl_us = :ttl_us, beat = beat + 1
 WHERE namespace = :namespace AND name = :name AND nonce = :nonce AND token = :token AND held = 1"""

_ENDED_OTHERWISE = (
    "the transaction was ended by other means than its block: what it wrote is not guarded; leave "
    "BEGIN, COMMIT and ROLLBACK to run.transaction(), and end the block after an error that rolls "
    "everything back"
)

_open: set[Ledgered] = set()
# Between the commit of one thread and its last words another may have begun.
_pinning = threading.Lock()


class Ledgered:
    """One open transaction, from its guard to its commit; its methods block."""

    def __init__(self, desk: Desk, course: Course, *, scope: str, owner: object) -> None:
        self._world, self._books, self._leases = desk.world, desk.books, desk.leases
        self._course, self._scope, self._owner = course, scope, owner
        # Connections are kept for the next transaction: to open one costs more than to use it.
        self._idle = desk.idle
        self._file: SqliteFile | None = None
        self._connection: sqlite3.Connection | None = None
        self._pid = os.getpid()
        self._checkpoint: str | None = None

    @property
    def connection(self) -> sqlite3.Connection:
        """The driver's connection, for libraries that want one. Leave begin and commit alone."""
        if self._connection is None or self._pid != os.getpid():
            raise Misuse("this transaction is over, or belongs to another process")
        if not self._connection.in_transaction:  # each statement would commit by itself
            raise Misuse(_ENDED_OTHERWISE)
        return self._connection

    def execute(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
        """Execute one statement."""
        return self.connection.execute(sql, parameters)

    def executemany(self, sql: str, parameters: Iterable[Any]) -> sqlite3.Cursor:
        """Execute one statement for many rows."""
        return self.connection.executemany(sql, parameters)

    def once(self, item: str | int, *, scope: str | None = None) -> bool:
        """Record an item; False if it was done before. It commits with everything else here."""
        if scope not in (None, "slot", "job"):
            raise Misuse(f"scope is {scope!r}: it must be 'slot' or 'job'")
        key = self._course.run.key
        where = self._scope if scope is None else key.job if scope == "job" else self._course.items
        db, name, call = self.connection, named(item), self._world.nonce()
        repeat = self._course.policy.in_doubt.value == "repeat"
        found = self._books.begin(db, self._course.attempt, where, [name], call, repeat=repeat)
        if isinstance(found, RunLost):
            raise found
        if found[0] is Found.DOUBT:
            self._course.doubts.append(name)
        if found[0].go:
            done = [(name, ItemState.DONE, None)]
            lost = self._books.end(db, self._course.attempt, where, done)
            if lost is not None:
                raise lost
        return found[0].go

    def save(self, checkpoint: Any) -> None:
        """Keep a checkpoint. It commits with everything else here."""
        text = encoded(checkpoint, what="checkpoint")
        course = self._course
        answer = self._books.save(self.connection, course.attempt, text, course.report())
        if isinstance(answer, RunLost):
            raise answer
        self._checkpoint = text
        course.hear(cancelled=answer)

    # Begin and end.

    def open(self) -> None:
        """Begin: wait for the file, see that the run is ours, and renew its lease."""
        course = self._course
        if course.transaction_of == self._owner:
            raise Misuse("a transaction of this run is already open here: they do not nest")
        course.check()
        # Whoever cannot begin before its lease must be doubted does not begin at all.
        patience = max(0.1, course.hold.trust.until - self._world.clocks.boottime())
        file = self._spare()
        begun = False
        try:
            self._connection, self._file = file.begin(patience=patience), file
            _open.add(self)
            self._guard()
            with _pinning:
                course.hold.pinned = self._world.clocks.boottime()
                course.transaction_of = self._owner
            begun = True
        finally:
            if not begun:
                self._end(commit=False)

    def _spare(self) -> SqliteFile:
        """Return a connection that no other transaction uses, to the file that is there now."""
        try:
            file = self._idle.pop()  # asked and taken in one: other threads want one too
        except IndexError:
            return SqliteFile(self._world, self._leases.file.path, set_up=_nothing)
        file.follow()
        return file

    def _guard(self) -> None:
        db, attempt = self.connection, self._course.attempt
        if not self._books.has(db, attempt):
            lost = self._books.stale(db, attempt, "transaction")
            self._end(commit=True)  # so that the stale writer is on record
            raise lost
        ttl = self._course.policy.lease
        if not self._leases.extend(db, attempt.lease, attempt.nonce, attempt.token, ttl):
            raise LeaseLost(attempt.lease, token=attempt.token, reason="it ran out")

    def close(self, *, commit: bool) -> None:
        """End: renew once more and commit, or roll everything back."""
        if self._connection is None:
            return
        if self._pid != os.getpid():
            raise Misuse("this transaction belongs to another process")
        course, sent = self._course, self._world.clocks.boottime()
        committed = False
        try:
            if commit:
                self._prolong()
            self._end(commit=commit)
            committed = commit
        finally:
            self._end(commit=False)
            if committed:
                course.hold.confirm(sent, ttl=course.policy.lease)
                if self._checkpoint is not None:
                    course.checkpoint = self._checkpoint
            with _pinning:
                if course.transaction_of == self._owner:
                    course.transaction_of, course.hold.pinned = None, 0.0

    def _prolong(self) -> None:
        attempt, ttl_us = self._course.attempt, round(self._course.policy.lease * 1e6)
        values = {
            "namespace": self._leases.namespace,
            "name": attempt.lease,
            "nonce": attempt.nonce,
            "token": attempt.token,
            "now_us": round(self._world.clocks.boottime() * 1e6),
            "ttl_us": ttl_us,
        }
        if self.connection.execute(_PROLONG, values).rowcount != 1:
            raise LeaseLost(attempt.lease, token=attempt.token, reason="its row was changed")

    def _end(self, *, commit: bool) -> None:
        if self._connection is not None and self._file is not None:
            connection = self._connection
            try:
                self._file.finish(connection, commit=commit)
            finally:
                # A signal may come before it begins: then whoever ends this must ask once more.
                if not connection.in_transaction:
                    self._connection = None
                    _open.discard(self)
            self._idle.append(self._file)

    def abandon(self) -> None:
        """Forget, in a forked child, what is the parent's; and never close it here."""
        if self._connection is not None:
            carry_over(self._connection)
            self._connection = None


class Transaction(Ledgered):
    """``with run.transaction() as tx``."""

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(commit=error is None)


class AsyncTransaction:
    """``async with run.transaction() as tx``: the same, each call in a thread."""

    def __init__(self, world: World, inner: Ledgered) -> None:
        self._world, self._inner = world, inner

    async def execute(self, sql: str, parameters: Any = ()) -> list[Any]:
        """Execute one statement and return its rows."""
        return await self._call(lambda: self._inner.execute(sql, parameters).fetchall())

    async def executemany(self, sql: str, parameters: Iterable[Any]) -> int:
        """Execute one statement for many rows; return how many it changed."""
        return await self._call(lambda: self._inner.executemany(sql, parameters).rowcount)

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
            await self._call(self._inner.open)
            opened = True
        finally:
            if not opened:  # cancelled meanwhile: nobody would ever end it
                self._inner.close(commit=False)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._call(lambda: self._inner.close(commit=error is None))


def _nothing(_: sqlite3.Connection) -> None:
    """Prepare nothing: whoever has a run has a ledger that is up to date."""


def _abandon_all() -> None:
    while _open:
        _open.pop().abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
