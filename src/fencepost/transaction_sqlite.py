"""A transaction of the ledger's SQLite file for user code.

While it is open nobody else can write to the file, and so nobody can claim the run or take its
lease: not even after the lease's end. That is why the lease is valid as long as this is open, and
why it should not be open for long.
"""

from __future__ import annotations

import os
import sqlite3

from fencepost.errors import LeaseLost, Misuse, RunLost
from fencepost.ledger.sqlite_testimony import untold
from fencepost.ledger.sqlite_touches import count_of
from fencepost.model.item import ItemState
from fencepost.transaction import ENDED_OTHERWISE, Transaction
from fencepost.world.sqlite import SqliteFile, carry_over, is_of_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.flows.course import Course
    from fencepost.ledger.sqlite import SqliteLedger
    from fencepost.model.item import Found

# The lease was ours when the transaction began, and nobody could write since: it still is.
_PROLONG = """
UPDATE fencepost_lease
   SET expires_us = :now_us + :ttl_us, ttl_us = :ttl_us, beat = beat + 1
 WHERE namespace = :namespace AND name = :name AND nonce = :nonce AND token = :token AND held = 1"""

_open: set[SqliteTransaction] = set()


class SqliteTransaction(Transaction):
    """One open transaction, from its guard to its commit; its methods block."""

    def __init__(self, ledger: SqliteLedger, course: Course, *, scope: str, owner: object) -> None:
        super().__init__(course, scope=scope, owner=owner)
        desk = ledger.desk
        self._world, self._books, self._leases = desk.world, desk.books, desk.leases
        self._ledger, self._testimony = ledger, ledger.testimony
        # Connections are kept for the next transaction: to open one costs more than to use it.
        self._idle = desk.idle
        self._file: SqliteFile | None = None
        self._connection: sqlite3.Connection | None = None
        self._known = False  # whether the witness was asked about the file that this is in
        self._pid = os.getpid()

    @property
    def connection(self) -> sqlite3.Connection:
        """The driver's connection, for libraries that want one. Leave begin and commit alone."""
        if self._connection is None or self._pid != os.getpid():
            raise Misuse("this transaction is over, or belongs to another process")
        if not self._connection.in_transaction:  # each statement would commit by itself
            raise Misuse(ENDED_OTHERWISE)
        return self._connection

    def _done(self, scope: str, item: str, *, repeat: bool) -> Found:
        db, attempt, call = self.connection, self._course.attempt, self._world.nonce()
        found = self._books.begin(db, attempt, scope, [item], call, repeat=repeat)
        if isinstance(found, RunLost):
            raise found
        if found[0].go:
            lost = self._books.end(db, attempt, scope, [(item, ItemState.DONE, None)])
            if lost is not None:
                raise lost
        return found[0]

    def _keep(self, checkpoint: str) -> None:
        course = self._course
        answer = self._books.save(self.connection, course.attempt, checkpoint, course.report())
        if isinstance(answer, RunLost):
            raise answer
        course.hear(cancelled=answer)

    def _is_of_driver(self, error: BaseException, *, ours: bool) -> bool:
        if not isinstance(error, sqlite3.Error) or not is_of_file(error):
            return False
        connection = self._connection
        return ours or (connection is not None and not connection.in_transaction)

    # Begin and end.

    def open(self) -> None:
        """Begin: wait for the file, see that the run is ours, and renew its lease."""
        course = self._course
        self._refuse_nesting()
        course.check()
        # Whoever cannot begin before its lease must be doubted does not begin at all.
        patience = max(0.1, course.hold.trust.until - self._world.clocks.boottime())
        if self._testimony.place != self._leases.file.found():
            # A process of its own for this body, or a file in place of another: the ledger looks.
            self._ledger.written(_nothing, False, patience, untold)  # noqa: FBT003 -- a door takes arguments by position
        file = self._spare()
        begun = False
        try:
            self._connection, self._file = file.begin(patience=patience), file
            _open.add(self)
            known = self._testimony.place == file.place
            self._known = known and count_of(self._connection) == self._ledger.touches.count
            self._guard()
            self._joins(pinned=self._world.clocks.boottime())
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
        committed, counted = False, None
        try:
            if commit:
                self._prolong()
                if self._known:  # else it may be a copy, and come to look like the ledger
                    counted = self._testimony.count(self.connection)
            self._end(commit=commit)
            committed = commit
            if counted:
                self._testimony.synced(self._testimony.tell(counted=counted))
        finally:
            self._end(commit=False)
            if committed:
                course.hold.confirm(sent, ttl=course.policy.lease)
                if self._checkpoint is not None:
                    course.checkpoint = self._checkpoint
            self._leaves()

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


def _nothing(_: sqlite3.Connection) -> None:
    """Prepare nothing: whoever has a run has a ledger that is up to date."""


def _abandon_all() -> None:
    while _open:
        _open.pop().abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
