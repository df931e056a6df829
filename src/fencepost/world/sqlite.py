"""The door to one SQLite file: one connection, short transactions, errors that say what is true.

SQLite's own busy handler sleeps up to 100 ms between tries, which starves some writers for a
second. Here a busy file is tried again every few hundred microseconds until ``patience`` is used
up. What came too late is then known not to have happened.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import time
import weakref

from fencepost.errors import BadUrl, Misuse, OutcomeUnknown, StoreUnavailable, StoreUnfit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from typing import TypeVar

    from fencepost.world.api import World

    T = TypeVar("T")

OLDEST = (3, 35, 0)
PATIENCE = 5.0
# A file as it was found: its device and inode, and when somebody last wrote to it. While there is
# a log those are checkpoints, and whoever copies something over it.
Place = tuple[int, int, int]
_NO_FILE: Place = (0, 0, 0)

# Connections that a fork carried into this process although nobody announced it to Python. Using
# them would corrupt the file, and even closing them runs SQLite code on locks that belong to the
# parent: so they are kept, untouched.
_carried_over: list[sqlite3.Connection] = []


class SqliteFile:
    """A database file as this process may use it, from any thread, one at a time."""

    def __init__(
        self, world: World, path: str, *, set_up: Callable[[sqlite3.Connection], None]
    ) -> None:
        self.path = path
        self._world, self._set_up = world, set_up
        self._turn = world.mutex()
        self._connection: sqlite3.Connection | None = None
        self._log: int | None = None  # the write-ahead log, once commits no longer sync it
        self.place = _NO_FILE  # which file was opened last, as it was looked at last
        self.generation = 0  # and how many files there have been under this name
        refuse_old(sqlite3.sqlite_version_info)
        _files.add(self)

    def found(self) -> Place:
        """Return which file is there now."""
        try:
            status = os.stat(self.path)
        except OSError:
            return _NO_FILE
        return status.st_dev, status.st_ino, status.st_mtime_ns

    def read(self, work: Callable[[sqlite3.Connection], T], *, patience: float = PATIENCE) -> T:
        """Run ``work`` outside of any transaction: for a single statement that reads."""
        with self._turn:
            connection = self._connection
            if connection is None or connection.in_transaction:
                connection = self._open(patience)
            return self._until_free(connection, work, patience)

    def write(
        self,
        work: Callable[[sqlite3.Connection], T],
        *,
        durable: bool,
        patience: float = PATIENCE,
        committed: Callable[[], None] | None = None,
    ) -> T:
        """Run ``work`` inside of one write transaction and commit it.

        ``durable`` commits survive a power cut; the others survive any crash of a process. The
        clock is for ``work`` to read: the wait for the file may have taken seconds. ``committed``
        is called at once after the commit, in its order, and before the disk has it.
        """
        with self._turn:
            connection = self._open(patience)
            if not durable:
                self._relax(connection)
            try:
                self._until_free(connection, _begin, patience)
                result = work(connection)
                self._commit(connection, patience)
                if committed is not None:
                    committed()
            except (sqlite3.Error, OSError) as error:
                raise self._told(error) from error
            finally:
                # Also after a signal: an open transaction would lock everybody out.
                _roll_back(connection)
            if durable:
                self._sync()
            return result

    def write_one(
        self,
        work: Callable[[sqlite3.Connection], T],
        *,
        durable: bool = False,
        patience: float = PATIENCE,
    ) -> T:
        """Run ``work``, of which only the last statement writes: it is its own transaction.

        Cheaper than ``write`` by two statements. If the file is busy all of ``work`` is done again.
        It returns None if it wrote nothing: then there is nothing to sync.
        """
        with self._turn:
            connection = self._connection
            if connection is None or connection.in_transaction:
                connection = self._open(patience)
            if self._log is None and not durable:
                self._relax(connection)
            try:  # at once, as it mostly goes: others wait for what is written here
                result = work(connection)
            except (sqlite3.Error, OSError) as error:
                self._unless_busy(connection, error)
                result = self._until_free(connection, work, patience)
            if durable and result is not None and self._log is not None:
                self._sync()
            return result

    def begin(self, *, patience: float) -> sqlite3.Connection:
        """Begin a write transaction that stays open, with the turn taken, until ``finish``.

        This file no longer closes its connection for a fork meanwhile: it cannot. Whoever forks
        now must leave the copy alone, see ``carry_over``.
        """
        turn = self._turn
        turn.__enter__()
        begun = False
        try:
            connection = self._open(patience)
            self._until_free(connection, _begin, patience)
            _files.discard(self)
            begun = True
        finally:
            if not begun:
                if self._connection is not None:  # a signal came when it had begun
                    _roll_back(self._connection)
                    _files.add(self)
                turn.__exit__(None, None, None)
        return connection

    def finish(self, connection: sqlite3.Connection, *, commit: bool) -> None:
        """End what ``begin`` began."""
        try:
            if commit:
                self._commit(connection, PATIENCE)
        finally:
            _roll_back(connection)
            _files.add(self)
            self._turn.__exit__(None, None, None)

    def sync(self) -> None:
        """Make sure that all that was committed, by whomever, survives a power cut."""
        with self._turn:
            try:
                self._relax(self._open(PATIENCE))
            except (StoreUnavailable, OSError) as error:  # it is committed, but is it on the disk?
                raise OutcomeUnknown(f"{self.path!r} was not synced: {error}") from error
            self._sync()

    def sync_early(self) -> bool:
        """Make it durable for somebody else, who will do so if we do not; say whether it is."""
        with self._turn:
            if self._log is None or self._log < 0:
                return False
            try:
                os.fdatasync(self._log)
            except OSError:
                return False
            return True

    def forget(self) -> None:
        """Start anew in a forked child, without touching what belongs to the parent."""
        if self._connection is not None:
            _carried_over.append(self._connection)
        self._connection = self._log = None
        self._turn = self._world.mutex()

    def stay_open(self) -> None:
        """Keep the connection over a fork, for a process whose children never use SQLite."""
        _files.discard(self)

    def settle(self) -> AbstractContextManager[object]:
        """Close the connection, so that a fork finds nothing to copy; return the turn, taken."""
        turn = self._turn
        turn.__enter__()
        self._let_go()
        return turn

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        with self._turn:
            self._let_go()

    def _open(self, patience: float) -> sqlite3.Connection:
        if self._connection is not None:
            _roll_back(self._connection)  # what two signals in a row may have left open
            return self._connection
        # Looked at before it is opened: a file that is replaced meanwhile must not pass for ours.
        found = self.found()
        try:
            connection = sqlite3.connect(
                self.path, timeout=0, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise self._told(error) from error
        try:
            self._until_free(connection, _configure, patience)
            self._until_free(connection, self._set_up, patience)
        except BaseException:
            connection.close()
            raise
        if found == _NO_FILE:
            found = self.found()
        if found[:2] != self.place[:2]:
            self.generation += 1
        self.place, self._connection = found, connection
        return connection

    def follow(self) -> None:
        """Let go of a file that somebody has replaced: the next use opens what is there now."""
        if self._connection is None:
            return
        found = self.found()
        if found == self.place:
            return
        if found[:2] == self.place[:2]:
            self.place = found
        else:
            self.close()
            self.generation += 1

    def _relax(self, connection: sqlite3.Connection) -> None:
        """Let commits from now on survive crashes only; whoever needs more calls ``_sync``.

        A connection begins with ``synchronous=FULL``, so that SQLite itself makes a new log and its
        folder durable. Later it is cheaper to sync the log by hand than to change the setting
        twice for each lease. Where there is no fdatasync everything stays as durable as it began.
        """
        if self._log is None and hasattr(os, "fdatasync"):
            # In this order: a signal in between must leave us with too many syncs, not too few.
            if self.path == ":memory:":
                self._log = -1
            else:
                self._log = os.open(self.path + "-wal", os.O_RDONLY | os.O_CLOEXEC)
            connection.execute("PRAGMA synchronous=NORMAL")

    def _sync(self) -> None:
        """Make sure that what was committed survives a power cut."""
        if self._log is not None and self._log >= 0:
            try:
                os.fdatasync(self._log)
            except OSError as error:
                raise OutcomeUnknown(f"the log of {self.path!r} was not synced: {error}") from error

    def _let_go(self) -> None:
        """Close the connection, if there is one."""
        if self._log is not None and self._log >= 0:
            os.close(self._log)
        self._log = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _until_free(
        self,
        connection: sqlite3.Connection,
        work: Callable[[sqlite3.Connection], T],
        patience: float,
    ) -> T:
        """Run ``work``, and again while others keep the file busy and ``patience`` lasts."""
        give_up, pause = 0.0, 0.0002
        while True:
            try:
                return work(connection)
            except (sqlite3.Error, OSError) as error:
                self._unless_busy(connection, error)
                give_up = give_up or time.monotonic() + patience
                if time.monotonic() >= give_up:
                    raise self._told(error) from error
            time.sleep(pause * (0.5 + self._world.dice()))
            pause = min(pause * 1.5, 0.005)

    def _unless_busy(self, connection: sqlite3.Connection, error: sqlite3.Error | OSError) -> None:
        """Undo what was begun; return if it may be tried again, else say what went wrong."""
        if isinstance(error, sqlite3.OperationalError):
            if connection.in_transaction:
                _roll_back(connection)
            if _busy(error):
                return
        raise self._told(error) from error

    def _commit(self, connection: sqlite3.Connection, patience: float) -> None:
        give_up = time.monotonic() + patience
        while True:
            try:
                connection.execute("COMMIT")
            except sqlite3.Error as error:
                if _busy(error) and connection.in_transaction and time.monotonic() < give_up:
                    time.sleep(0.001)  # still open and nothing decided: ask again
                    continue
                # Open still, or without room for what it had to write: now it will never be.
                if connection.in_transaction or _code(error) == sqlite3.SQLITE_FULL:
                    _roll_back(connection)
                    raise self._told(error) from error
                raise OutcomeUnknown(f"{self.path!r} failed while committing: {error}") from error
            return

    def _told(self, error: sqlite3.Error | OSError) -> Exception:  # noqa: C901, PLR0911 -- a table of codes
        """Return what an error of the driver or of the system means for the caller."""
        if isinstance(error, OSError):
            return self._told_of_system(error)
        code = _code(error)
        if _busy(error):
            return StoreUnavailable(f"{self.path!r} is busy: another process keeps it locked")
        if code == sqlite3.SQLITE_FULL:
            return StoreUnavailable(f"the disk of {self.path!r} is full: free some space")
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
            return StoreUnfit(f"{self.path!r} cannot be written: {error}; check its permissions")
        if code == sqlite3.SQLITE_CANTOPEN:
            if os.path.isdir(self.path):
                return BadUrl(f"{self.path!r} is a folder: name a file in it")
            return BadUrl(
                f"{self.path!r} cannot be opened: does its folder exist, and may you write there?"
            )
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            return StoreUnfit(f"{self.path!r} is not a healthy SQLite file: {error}")
        if code in (sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_TOOBIG):
            return StoreUnfit(f"{self.path!r} refused what was to be written: {error}")
        if code == sqlite3.SQLITE_ERROR:
            return StoreUnfit(
                f"the tables in {self.path!r} are not what fencepost left there: {error}"
            )
        if code == sqlite3.SQLITE_IOERR:  # perhaps only the sync failed, and the log has it all
            return OutcomeUnknown(f"{self.path!r} failed while it was used: {error}")
        return StoreUnavailable(f"{self.path!r}: {error}")

    def _told_of_system(self, error: OSError) -> Exception:
        if error.errno == errno.ENOSPC:
            return StoreUnavailable(f"the disk of {self.path!r} is full: free some space")
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR):
            return StoreUnfit(f"what belongs to {self.path!r} cannot be written: {error}")
        return StoreUnavailable(f"{self.path!r}: {error}")


# Every file of this process, so that none is open while it forks. SQLite keeps account of its
# locks per process: a child that opened the file beside a copied connection would believe in
# locks that only its parent has, and write to a log that others feel free to delete.
_files: weakref.WeakSet[SqliteFile] = weakref.WeakSet()
_fork_turn = threading.Lock()
_turns_taken: list[AbstractContextManager[object]] = []


def _before_fork() -> None:
    _fork_turn.acquire()
    _turns_taken.extend(file.settle() for file in list(_files))


def _after_fork() -> None:
    while _turns_taken:
        _turns_taken.pop().__exit__(None, None, None)
    _fork_turn.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork
    )


def refuse_old(version: tuple[int, ...]) -> None:
    """Raise if this SQLite lacks what the store relies on."""
    if version < OLDEST:
        found, needed = (".".join(map(str, v)) for v in (version, OLDEST))
        raise Misuse(
            f"SQLite {found} is too old: {needed} or newer is needed; use a newer Python build"
        )


def _configure(connection: sqlite3.Connection) -> None:
    mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
    if mode not in ("wal", "memory"):
        connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA trusted_schema=OFF")


def carry_over(connection: sqlite3.Connection) -> None:
    """Keep a connection that a fork has copied, so that nothing ever uses or closes it here."""
    _carried_over.append(connection)


def _begin(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")


def _roll_back(connection: sqlite3.Connection) -> None:
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def _busy(error: sqlite3.Error) -> bool:
    # PROTOCOL is what a reader is told who lost the race for a snapshot too often.
    busy = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
    return _code(error) in busy


def is_of_file(error: sqlite3.Error) -> bool:
    """Say whether an error is about the file or its disk, and not about what was asked."""
    return _busy(error) or _code(error) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


def _code(error: sqlite3.Error) -> int:
    code: int = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code
