"""Whether somebody may have restored a backup into a file while a connection had it open.

SQLite's backup counts one up in the header of the file that it writes into, as whoever changes a
table does. Each statement looks at that count anyway when it begins, inside of its transaction, and
is compiled again if it was moved. So where nothing was compiled, nothing was restored: to know that
costs no statement. Where something was, for whatever reason, a transaction reads the count itself.
"""

from __future__ import annotations

import sqlite3

# A SQL function: false if a statement was compiled since, for example the one that asks.
UNTOUCHED = "fencepost_untouched"


class Touches:
    """What was done to the tables of one file, as the ledger's connection sees it."""

    def __init__(self) -> None:
        self.count = -1  # as it was read last
        self.compiled = False
        self._sure = False  # while we write nobody else does

    def watch(self, db: sqlite3.Connection) -> None:
        """Watch a connection from now on."""
        db.create_function(UNTOUCHED, 0, self.untouched)
        db.set_authorizer(self._compiling)

    def untouched(self) -> bool:
        """Say whether a statement that begins now writes to the file that was looked at."""
        return self._sure or not self.compiled

    def begin(self, db: sqlite3.Connection) -> bool:
        """Say in a new write transaction whether anything was done since the last one."""
        last, self.count = self.count, count_of(db)
        self._sure = True
        return self.count != last

    def end(self) -> None:
        """Look from here on at what is done after that transaction."""
        self._sure = self.compiled = False

    def _compiling(self, action: int, *_: object) -> int:
        if action != sqlite3.SQLITE_TRANSACTION:  # to begin or to commit looks at no table
            self.compiled = True
        return sqlite3.SQLITE_OK


def count_of(db: sqlite3.Connection) -> int:
    """Return what is counted up when a table is changed, or a backup restored."""
    count: int = db.execute("PRAGMA schema_version").fetchone()[0]
    return count
