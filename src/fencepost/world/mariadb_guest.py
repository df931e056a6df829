"""A connection on which user code speaks, inside of a transaction that is not its own to end."""

from __future__ import annotations

import contextlib
import weakref

import pymysql
from pymysql.constants import COMMAND, SERVER_STATUS

from fencepost.world.mariadb_errors import DEADLOCK, Misstep, misuse
from fencepost.world.mariadb_screen import ends_transaction

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    _Connection = pymysql.Connection[Any]
else:
    _Connection = pymysql.Connection

# Said last of all that a session is opened with, each time that it is. The driver's own word for
# not to commit would take a round trip, and the answer with it.
GREETING = "SET SESSION autocommit = 0; SELECT @@log_bin, @@max_allowed_packet"


class Guest(_Connection):
    """The driver's connection, which may be guarded.

    A guarded one refuses statements of user code that would end the transaction before they are
    sent, and all of them after a deadlock, which has ended it. It knows its errors from those of
    other connections.
    """

    logs = False  # whether the server writes a binary log
    guarded = False
    undone = False  # by a deadlock
    oversized = False  # whether it was sent more at once than the server takes, which ends it
    _largest = 0  # what the server takes at once, in bytes; none is known before the greeting

    def __init__(self, *args: Any, **options: Any) -> None:
        self.met: weakref.WeakSet[pymysql.Error] = weakref.WeakSet()
        super().__init__(*args, **options)

    @property
    def parted(self) -> bool:
        """Whether user code itself has closed it."""
        return bool(vars(self)["_closed"])

    def connect(self, sock: Any = None) -> None:
        """Open a session, and learn what there is to know of it; also if a library does so."""
        with self.ours():
            super().connect(sock)
        result: Any = vars(self)["_result"]
        logs, largest = result.rows[0]
        self.logs, self._largest, self.oversized = bool(logs), int(largest), False

    @contextlib.contextmanager
    def ours(self) -> Iterator[None]:
        """Let pass what is said in the block: it is not user code that says it."""
        guarded, self.guarded = self.guarded, False
        try:
            yield
        finally:
            self.guarded = guarded

    def _execute_command(self, command: int, sql: str | bytes | bytearray) -> None:
        """Send a command: the one door for all that is said, by whichever method."""
        if self.guarded and command == COMMAND.COM_QUERY:
            if self.undone:
                raise misuse(Misstep.UNDONE)
            text = sql if isinstance(sql, str) else sql.decode("latin-1")
            status: int = vars(self)["server_status"]
            literal = status & SERVER_STATUS.SERVER_STATUS_NO_BACKSLASH_ESCAPES
            if ends_transaction(text, backslashes=not literal):
                raise misuse(Misstep.ENDING)
        if len(sql) >= self._largest > 0:
            self.oversized = True
        super()._execute_command(command, sql)  # type: ignore[misc]

    def _read_packet(self, *args: Any) -> Any:
        try:
            return super()._read_packet(*args)  # type: ignore[no-untyped-call]
        except pymysql.Error as error:
            self.met.add(error)
            self.undone = self.undone or error.args[:1] == (DEADLOCK,)
            raise
