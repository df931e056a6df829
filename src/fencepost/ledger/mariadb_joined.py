"""How statements of user code join a transaction of the MariaDB ledger: see ``draft_joined``.

It is an XA transaction of one phase. Inside of one the server refuses whatever would end it: COMMIT
and ROLLBACK, and statements that commit along with what they do, as CREATE TABLE does. And one that
was undone by a deadlock can only be rolled back, whatever else is tried in it.
"""

from __future__ import annotations

import math

import pymysql

from fencepost.errors import FencepostError, Misuse, OutcomeUnknown, StoreUnavailable
from fencepost.ledger import mariadb_joined_rows as sql
from fencepost.ledger.draft_joined import Joined
from fencepost.world.mariadb import wait_at_most
from fencepost.world.mariadb_batch import (
    Bounds,
    Part,
    Statement,
    Transaction,
    drain,
    force_close,
    is_mysql,
    rendered,
)
from fencepost.world.mariadb_errors import Misstep, Trouble, fate, has_moved, misstep, told

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from fencepost.ledger.api import Attempt
    from fencepost.ledger.draft_dialect import Step
    from fencepost.ledger.mariadb import MariaLedger
    from fencepost.world.mariadb_batch import Rows as Answer

    Connection = pymysql.Connection[Any]
    Rows = Sequence[tuple[Any, ...]]

# A commit that is being written takes a moment; one that never arrived takes as long as it likes.
_PAUSES = (0.0, 0.1, 0.3, 0.6, 1.0)
_LONGEST = 31_536_000  # the server's own bound of all its limits, in seconds

_SENTENCES = {
    Misstep.ENDING: (
        "the server refuses a statement that would end the transaction, and so its guard: leave "
        "BEGIN, COMMIT and ROLLBACK to run.transaction(), and create, alter and drop tables "
        "outside of it"
    ),
    Misstep.UNDONE: (
        "the server has undone the transaction, as one of a deadlock: let the error out of the "
        "block, and have the whole block done again"
    ),
    Misstep.TEMPORARY: (
        "MySQL refuses temporary tables in run.transaction(), unless its xa_detach_on_prepare is "
        "OFF: have it so, or make them elsewhere"
    ),
}


class MariaJoined(Joined):
    """One transaction of one attempt, on a connection of its own."""

    def __init__(self, ledger: MariaLedger, attempt: Attempt) -> None:
        super().__init__(ledger, attempt, sql)
        self._server = ledger.leases.server
        self._xid = ledger.nonce()
        self._inside: Transaction | None = None
        self._of_mysql = False  # until there is a connection
        self._connection: Connection | None = None
        self._patience = self._server.address.timeout
        self._thinking: float | None = None  # how long an answer to user code may take
        name = self._server.address.database.replace("`", "``").replace("%", "%%")
        # User code may have gone to another database, and may have asked for fewer rows.
        home = (f"USE `{name}`", "SET SESSION sql_select_limit = DEFAULT")
        self._home: Step = (Statement(tuple(map(Part, home))), {})

    @property
    def connection(self) -> Connection | None:
        """The ``pymysql.Connection``; None once the transaction is over."""
        return self._connection

    def execute(self, sql: str, parameters: Any) -> Any:
        """Execute a statement of user code; return the driver's cursor."""
        cursor = self._cursor()
        try:
            cursor.execute(sql, parameters or None)  # without values a % is a %
        except pymysql.Error as error:
            if (misused := self._misused(error)) is not None:
                raise misused from error
            raise
        return cursor

    def executemany(self, sql: str, parameters: Iterable[Any]) -> Any:
        """Execute a statement of user code for many rows; return the driver's cursor."""
        cursor = self._cursor()
        try:
            cursor.executemany(sql, parameters)
        except pymysql.Error as error:
            if (misused := self._misused(error)) is not None:
                raise misused from error
            raise
        return cursor

    def roll_back(self) -> None:
        """Undo what was not committed; nothing is left to do after the commit."""
        connection, inside = self._connection, self._inside
        if connection is None:
            return
        try:
            if connection.open and inside is not None:
                wait_at_most(connection, self._server.address.timeout)
                drain(connection)
                inside.roll_back()
        except pymysql.Error:
            force_close(connection)  # which undoes it as well
        except BaseException:
            force_close(connection)
            raise
        finally:
            self._give_back()

    # Beneath.

    def _begun(self, guard: Step, *, idle: float, longest: float) -> Rows:
        """Begin on a connection that was kept, else on a new one."""
        timeout = self._server.address.timeout
        wait = min(math.ceil(idle + timeout), _LONGEST)
        limits = {
            "idle": min(math.ceil(idle), _LONGEST),
            "longest": min(longest, _LONGEST),
            "patient": wait,
        }
        self._patience = timeout + wait
        self._thinking = longest + timeout if longest else None
        kept = self._server.lend()
        try:
            return self._begun_on(kept, guard, limits)
        except StoreUnavailable:  # it may have been cut while nobody looked at it
            self.roll_back()
            self._xid = self._drafts.nonce()  # the server may still think that somebody is there
            return self._begun_on(self._server.lend(fresh=True), guard, limits)

    def _begun_on(self, connection: Connection, guard: Step, limits: dict[str, Any]) -> Rows:
        before = rendered(connection, *self._home) + rendered(connection, sql.LIMITS, limits)
        end = f"XA END '{self._xid}'"
        bounds = Bounds(
            (*before, f"XA START '{self._xid}'"),
            (end, f"XA COMMIT '{self._xid}' ONE PHASE"),
            (end, f"XA ROLLBACK '{self._xid}'"),
        )
        self._of_mysql = is_mysql(connection)
        self._connection, self._inside = connection, Transaction(connection, bounds)
        return self._all_asked([guard])[-1].rows

    def _asked(self, step: Step) -> Rows:
        return self._all_asked([self._home, step])[-1].rows

    def _all_asked(self, steps: Sequence[Step]) -> list[Answer]:
        """Ask something before the commit.

        An item may be in the hands of an attempt that was stopped: until the server ends it.
        """
        connection, inside = self._open()
        try:
            wait_at_most(connection, self._patience)
            drain(connection)
            answers = inside.batch(steps)
            wait_at_most(connection, self._thinking)
        except pymysql.Error as error:
            if fate(error) is Trouble.UNKNOWN:
                force_close(connection)
            raise self._why(error) from error
        except BaseException:
            force_close(connection)  # between question and answer: nobody must read the latter
            raise
        return answers

    def _sealed(self, saved: Sequence[Step]) -> bool:
        connection, inside = self._open()
        seal: Step = (sql.SEAL, {**self._own, "xid": self._xid})
        try:
            # The server is to give up first: it knows what became of it.
            wait_at_most(connection, self._server.address.timeout + 2 * sql.SEALED_WITHIN)
            drain(connection)
            answers = inside.batch([self._home, (sql.HURRY, {}), *saved, seal], last=True)
        except pymysql.Error as error:
            if inside.committing and fate(error) is not Trouble.PASSING:
                self._find_out(error)
                return False
            self.roll_back()
            raise self._why(error) from error
        except BaseException:
            force_close(connection)
            raise
        self._give_back()
        return bool(answers[-1].rows[0][0])

    def _give_back(self) -> None:
        connection, self._connection, self._inside = self._connection, None, None
        if connection is not None:
            self._server.take_back(connection)

    def _open(self) -> tuple[Connection, Transaction]:
        connection, inside = self._connection, self._inside
        if connection is None or inside is None or not connection.open:
            raise StoreUnavailable(
                f"{self._server.address} has ended the session: nothing was committed"
            )
        return connection, inside

    def _cursor(self) -> Any:
        connection = self.connection
        assert connection is not None, "whoever executes has looked whether it is over"
        return connection.cursor()

    def _misused(self, error: pymysql.Error) -> Misuse | None:
        """Return what user code did wrong, if that is why the server refuses."""
        what = misstep(error, of_mysql=self._of_mysql)
        return None if what is None else Misuse(_SENTENCES[what])

    def _why(self, error: pymysql.Error) -> Exception:
        """Return why the server has not done it."""
        if has_moved(error):
            return self._why_not_ours()
        words = str(error.args[-1])
        if (misused := self._misused(error)) is not None:
            return misused
        if fate(error) is not Trouble.REFUSED:
            return StoreUnavailable(f"nothing was committed to {self._server.address}: {words}")
        return told(error, str(self._server.address), self._server.address.user)

    def _find_out(self, error: pymysql.Error) -> None:
        """Return if a transaction was committed whose answer was lost; raise if not, or unknown.

        The run knows which ones were. A session that did not hear of the commit goes on waiting for
        it: that is not known before its end.
        """
        assert self._connection is not None, "it was asked just now"
        force_close(self._connection)
        self._give_back()
        why = f"{self._server.address} did not answer the commit: {error.args[-1]}"
        fated: bool | None = None
        for pause in _PAUSES:
            try:
                lives, fated = self._fate(pause)
            except FencepostError:
                break
            if not lives:
                break
            fated = None
        if fated is None:
            raise OutcomeUnknown(f"{why}; it may have been committed") from error
        if not fated:
            raise StoreUnavailable(f"{why}; nothing was committed") from error

    def _fate(self, pause: float) -> tuple[bool, bool | None]:
        """Say whether the session lives and whether it has committed; None if nobody can tell."""
        number, server, newest = self._which
        steps: list[Step] = [
            (sql.WAIT, {"pause": pause}),
            (sql.LIVES, {"number": number}),
            (sql.FATE, {**self._own, "xid": self._xid, "newest": newest}),
        ]
        # Not along with a commit: it changes nothing, so that it may be asked again.
        _, lives, fated = self._server.transaction(lambda one: one.batch(steps))
        living, here = lives.rows[0]
        known = bool(fated.rows) and here == server and fated.rows[0][0] is not None
        return bool(living), bool(fated.rows[0][0]) if known else None
