"""How statements of user code join a transaction of the MariaDB ledger: see ``draft_joined``.

It is an XA transaction of one phase. Inside of one the server refuses whatever would end it: COMMIT
and ROLLBACK, and statements that commit along with what they do, as CREATE TABLE does. And one that
was undone by a deadlock can only be rolled back, whatever else is tried in it.

But MariaDB with a binary log acknowledges an XA transaction before it is safe, and leaves it
prepared if it crashes. There it is a plain one. Its connection refuses what by its text would end
it; and it begins with a savepoint, which nothing outlives that ends it. Unless that is still there,
whatever took its place is not committed.
"""

from __future__ import annotations

import math

import pymysql
from pymysql.cursors import Cursor

from fencepost.errors import FencepostError, OutcomeUnknown, StoreUnavailable
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
from fencepost.world.mariadb_errors import (
    CLOSING,
    INTERRUPTED,
    TOO_LONG,
    Misstep,
    Trouble,
    fate,
    full_table,
    has_moved,
    is_of_server,
    lost_savepoint,
    misstep,
    misuse,
    told,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from fencepost.errors import Misuse
    from fencepost.ledger.api import Attempt
    from fencepost.ledger.draft_dialect import Step
    from fencepost.ledger.mariadb import MariaLedger
    from fencepost.world.mariadb_batch import Rows as Answer
    from fencepost.world.mariadb_guest import Guest

    Rows = Sequence[tuple[Any, ...]]

# A commit that is being written takes a moment; one that never arrived takes as long as it likes.
_PAUSES = (0.0, 0.1, 0.3, 0.6, 1.0)
_LONGEST = 31_536_000  # the server's own bound of all its limits, in seconds

_TOO_LARGE = 1153
# What a server may answer last of all, unless it was only the statement that somebody has killed.
_FAREWELLS = {(number,) for number in (*CLOSING, INTERRUPTED)}

# Whatever a session has as its completion_type.
_UNDO = "ROLLBACK AND NO CHAIN NO RELEASE"


class MariaJoined(Joined):
    """One transaction of one attempt, on a connection of its own."""

    def __init__(self, ledger: MariaLedger, attempt: Attempt) -> None:
        super().__init__(ledger, attempt, sql)
        self._server = ledger.leases.server
        self._xid = ledger.nonce()
        self._inside: Transaction | None = None
        self._of_mysql = self._plain = False  # until there is a connection
        self._connection: Guest | None = None
        self._patience = self._server.address.timeout
        self._thinking: float | None = None  # how long an answer to user code may take
        name = self._server.address.database.replace("`", "``").replace("%", "%%")
        # User code may have gone to another database, and may have asked for fewer rows.
        home = (f"USE `{name}`", "SET SESSION sql_select_limit = DEFAULT")
        self._home: Step = (Statement(tuple(map(Part, home))), {})

    @property
    def connection(self) -> Guest | None:
        """The ``pymysql.Connection``; None once the transaction was ended, by whomever."""
        connection = self._connection
        return None if connection is None or connection.parted else connection

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

    def is_fault(self, error: BaseException) -> bool:
        """Say whether an error is of PyMySQL, and about our server: not about what it was asked.

        Either the session is over, and nobody here has ended it; or this very error came by way of
        it, and says that the server lacks what the ledger needs as well.
        """
        connection = self.connection
        if not isinstance(error, pymysql.Error) or connection is None or connection.oversized:
            return False
        if not connection.open:
            return True
        if error not in connection.met:
            return False
        if error.args[:1] in _FAREWELLS:  # or words of a server that ours has asked
            return not self._answers(connection)
        full = full_table(error)
        return is_of_server(error) if full is None else self._is_on_disk(connection, full)

    def roll_back(self) -> None:
        """Undo what was not committed; nothing is left to do after the commit."""
        connection, inside = self._connection, self._inside
        if connection is None:
            return
        try:
            if connection.open and inside is not None:
                wait_at_most(connection, self._server.address.timeout)
                drain(connection)
                with connection.ours():
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

    def _begun_on(self, connection: Guest, guard: Step, limits: dict[str, Any]) -> Rows:
        self._of_mysql = is_mysql(connection)
        self._plain = connection.logs and not self._of_mysql
        connection.guarded, connection.undone = self._plain, False
        connection.oversized = False
        before = rendered(connection, *self._home) + rendered(connection, sql.LIMITS, limits)
        bounds = self._plain_bounds(before) if self._plain else self._xa_bounds(before)
        self._connection, self._inside = connection, Transaction(connection, bounds)
        return self._all_asked([guard])[-1].rows

    def _xa_bounds(self, before: Sequence[str]) -> Bounds:
        end = f"XA END '{self._xid}'"
        return Bounds(
            (*before, f"XA START '{self._xid}'"),
            (end, f"XA COMMIT '{self._xid}' ONE PHASE"),
            (end, f"XA ROLLBACK '{self._xid}'"),
        )

    def _plain_bounds(self, before: Sequence[str]) -> Bounds:
        """Return the same for a plain one.

        Whoever kept the connection may have gone on with it: to begin would commit what it wrote.
        """
        mark = f"SAVEPOINT {self._mark}"
        return Bounds(
            (_UNDO, "SET SESSION autocommit = 0", *before, "START TRANSACTION", mark),
            (f"RELEASE {mark}", "COMMIT AND NO CHAIN NO RELEASE"),
            (_UNDO,),
        )

    @property
    def _mark(self) -> str:
        return f"fencepost_{self._xid}"

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
            with connection.ours():
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
        steps = [self._home, (sql.HURRY, {}), *saved, seal]
        if self._plain:
            # Also first of all: what follows may commit by itself where something has ended it.
            still = (f"RELEASE SAVEPOINT {self._mark}", f"SAVEPOINT {self._mark}")
            steps.insert(0, (Statement(tuple(map(Part, still))), {}))
        try:
            # The server is to give up first: it knows what became of it.
            wait_at_most(connection, self._server.address.timeout + 2 * sql.SEALED_WITHIN)
            drain(connection)
            with connection.ours():
                answers = inside.batch(steps, last=True)
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

    def _open(self) -> tuple[Guest, Transaction]:
        connection, inside = self._connection, self._inside
        if connection is not None and connection.oversized:
            raise self._told(pymysql.OperationalError(_TOO_LARGE, "a statement was larger"))
        if connection is None or inside is None or not connection.open:
            raise StoreUnavailable(
                f"{self._server.address} has ended the session: nothing was committed"
            )
        if self._plain and connection.undone:  # the next statement would begin another one
            raise misuse(Misstep.UNDONE)
        return connection, inside

    def _answers(self, connection: Guest) -> bool:
        """Say whether a session lives of which a statement was killed, or perhaps all of it."""
        try:
            with connection.ours():
                connection.ping(reconnect=False)
        except pymysql.Error:
            return False
        return True

    def _is_on_disk(self, connection: Guest, table: str) -> bool:
        """Say whether all tables of a name are where the ledger's are: then the disk is full."""
        try:
            with connection.ours(), connection.cursor(Cursor) as cursor:
                cursor.execute(sql.ENGINES, (table,))
                engines = {str(engine).upper() for (engine,) in cursor.fetchall()}
        except pymysql.Error:
            return not connection.open
        return engines == {"INNODB"}

    def _cursor(self) -> Any:
        connection = self.connection
        assert connection is not None, "whoever executes has looked whether it is over"
        return connection.cursor()

    def _misused(self, error: pymysql.Error) -> Misuse | None:
        """Return what user code did wrong, if that is why the server refuses."""
        if not self._plain:
            what = misstep(error, of_mysql=self._of_mysql)
        else:
            what = Misstep.ENDED if lost_savepoint(error, self._mark) else None
        return None if what is None else misuse(what)

    def _why(self, error: pymysql.Error) -> Exception:
        """Return why the server has not done it."""
        if has_moved(error):
            return self._why_not_ours()
        words = str(error.args[-1])
        if (misused := self._misused(error)) is not None:
            return misused
        if fate(error) is not Trouble.REFUSED:
            return StoreUnavailable(f"nothing was committed to {self._server.address}: {words}")
        connection = self.connection
        if error.args[0] in TOO_LONG or (
            error.args[0] == INTERRUPTED and connection is not None and self._answers(connection)
        ):
            return type(error)(*error.args)
        return self._told(error)

    def _told(self, error: pymysql.Error) -> Exception:
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
        give_up = self._drafts.boottime() + self._server.address.timeout
        for pause in _PAUSES:
            try:
                lives, fated = self._fate(pause)
            except FencepostError:  # whatever cut one session may have cut others too
                if self._drafts.boottime() >= give_up:
                    break
                continue
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
