"""The door to one database of a MariaDB or MySQL server: short statements, each its own commit.

What the server refused did not happen. What was sent and not answered may have happened; what could
not be sent did not. A connection that the server closed while nobody used it is found out before
anything is sent on it. Nothing is ever sent twice unless the first time is known to have failed.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time

import pymysql
from pymysql.constants import CLIENT, COMMAND

from fencepost.errors import FencepostError, OutcomeUnknown, StoreUnavailable
from fencepost.model.named import NamedTuple
from fencepost.world.mariadb_batch import (
    Statement,
    Transaction,
    bounds_of,
    force_close,
    is_quiet,
    rendered,
    unpacked,
)
from fencepost.world.mariadb_errors import CLOSING, Trouble, fate, kept_from_committing, told
from fencepost.world.mariadb_guest import GREETING, Guest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, TypeVar

    from fencepost.world.api import World

    Connection = pymysql.Connection[Any]
    T = TypeVar("T")

TIMEOUT = 5.0
_MOST_AT_ONCE = 8  # connections that run statements; those that wait in line are not counted
_MOST_SPARE = 4

# Strict, so that nothing is cut short or rounded in silence; and the same on every server. A lock
# is waited for one second, which is the least that can be said: less than a client's patience. Who
# is stopped inside of a transaction loses it, and its locks, after three (MySQL: ``bounds_of``). A
# commit begins no other transaction: what comes next would be answered, and never committed. Long
# lists stay lists: a join or a scan in their place would read, and lock, whatever else there is.
# And no limit of the server's ends a statement: who stands in line would lose its place, or be told
# by MySQL that it is first.
_INIT = """
SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED;
SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', innodb_lock_wait_timeout = 1,
    completion_type = 'NO_CHAIN'
    /*M!100300 , idle_transaction_timeout = 3, max_statement_time = 0 */
    /*M!100318 , in_predicate_conversion_threshold = 0 */
    /*!80000 , range_optimizer_max_mem_size = 0, max_execution_time = 0 */"""


class Address(NamedTuple):
    """Where the database is, and as whom."""

    host: str
    port: int
    user: str
    password: str
    database: str
    socket: str = ""
    tls: str = "prefer"  # or off, require, verify
    ca: str = ""
    timeout: float = TIMEOUT
    kind: str = "MariaDB"  # or MySQL: as whoever wrote the URL calls it

    def __str__(self) -> str:
        return f"{self.kind} at {self.socket or f'{self.host}:{self.port}'}/{self.database}"


class Answer(NamedTuple):
    """What one statement did: rows it found to change, the number it left, rows it returned."""

    changed: int
    number: int
    rows: tuple[tuple[Any, ...], ...]


class MariaServer:
    """One database as this process may use it, from any thread, over a few connections."""

    def __init__(self, world: World, address: Address) -> None:
        self._world, self.address = world, address
        self._tls = _tls(address)
        self._begin_anew()

    def run(
        self,
        text: str,
        values: Mapping[str, object],
        *,
        changes: bool = False,
        patience: float | None = None,
    ) -> list[Answer]:
        """Run statements in one round trip; only the first of them may change anything."""
        return self._tried(
            lambda one: _exchange(one, text, values), changes=changes, patience=patience
        )

    def ask(self, statement: Statement, values: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
        """Return the rows of a statement of one part that changes nothing."""

        def asked(connection: Connection) -> Sequence[tuple[Any, ...]]:
            texts = rendered(connection, statement, values)
            assert len(texts) <= 1, "more than one may only be asked in a transaction"
            with connection.cursor() as cursor:
                if texts:
                    cursor.execute(texts[0])
                return unpacked(cursor) if texts else ()

        return self._tried(asked, changes=False, patience=None)

    def transaction(self, work: Callable[[Transaction], T]) -> T:
        """Run ``work`` in one transaction, and again if it lost against another one.

        If ``work`` raises nothing has happened.
        """

        def whole(connection: Connection) -> T:
            transaction = Transaction(connection, bounds_of(connection))
            try:
                result = work(transaction)
                transaction.commit()
            except FencepostError:
                transaction.roll_back()
                raise
            except pymysql.Error as error:
                transaction.roll_back()
                sure = fate(error) is Trouble.PASSING or kept_from_committing(error)
                if transaction.committing and not sure:
                    raise _Unheard from error
                raise
            return result

        return self._tried(whole, changes=True, patience=None)

    def bell(self) -> Bell:
        """Return a connection for answers that may take long."""
        self._mind_forks()
        while True:
            with self._turn:
                spare = self._lounge.pop() if self._lounge else None
            if spare is None:
                return Bell(self._opened(self.address.timeout), self.address)
            if spare.is_quiet():
                return spare
            spare.drop()

    def put_by(self, bell: Bell) -> None:
        """Keep a bell that owes no answer, for the next one who waits."""
        with self._turn:
            if len(self._lounge) < _MOST_SPARE:
                self._lounge.append(bell)
                return
        bell.drop()

    def lend(self, *, fresh: bool = False) -> Guest:
        """Return a connection for user code, which may leave on it what it likes.

        It counts rows as the driver's users know it, and commits nothing by itself: not even one
        that the driver has opened anew.
        """
        self._mind_forks()
        while not fresh:
            with self._turn:
                guest = self._guests.pop() if self._guests else None
            if guest is None:
                break
            if is_quiet(guest):
                return guest
            force_close(guest)
        flags, init = CLIENT.MULTI_STATEMENTS, f"{_INIT};{GREETING}"
        patience = self.address.timeout
        return self._connected(Guest, patience, client_flag=flags, init_command=init)

    def take_back(self, connection: Guest) -> None:
        """Keep a connection for the next transaction of user code: idle, and owing no answer."""
        with self._turn:
            if connection.open and len(self._guests) < _MOST_AT_ONCE:
                self._guests.append(connection)
                return
        if connection.open:
            connection.close()

    def forget(self) -> None:
        """Start anew in a forked child. The server hears nothing of it: the parent talks to it."""
        for connection in (*self._idle, *self._guests):
            force_close(connection)
        for bell in self._lounge:
            bell.drop()
        self._begin_anew()

    def close(self) -> None:
        """Take leave of the server; the next call opens another connection."""
        if self._pid != os.getpid():
            self.forget()
        with self._turn:
            idle = [*self._idle, *self._guests, *(bell.connection for bell in self._lounge)]
            self._idle.clear()
            self._guests.clear()
            self._lounge.clear()
        for connection in idle:
            if connection.open:
                connection.close()

    def _begin_anew(self) -> None:
        self._pid = os.getpid()
        self._turn = threading.Lock()
        self._room = threading.BoundedSemaphore(_MOST_AT_ONCE)
        self._idle: list[Connection] = []
        self._guests: list[Guest] = []  # for transactions of user code, and nothing else
        self._lounge: list[Bell] = []

    def _mind_forks(self) -> None:
        if self._pid != os.getpid():
            self.forget()

    def _tried(
        self, work: Callable[[Connection], T], *, changes: bool, patience: float | None
    ) -> T:
        """Do ``work``, and again while it is known to have failed for a passing reason."""
        patience = min(patience or self.address.timeout, self.address.timeout)
        give_up, pause = time.monotonic() + patience, 0.001
        while True:
            try:
                return self._once(work, patience)
            except _Unheard as unheard:
                if changes:
                    raise OutcomeUnknown(
                        f"{self.address} did not answer: {_words(unheard.__cause__)}; it may have "
                        "done what was asked"
                    ) from unheard.__cause__
                problem: BaseException | None = unheard.__cause__
            except pymysql.Error as error:
                if fate(error) is not Trouble.PASSING:
                    raise told(error, str(self.address), self.address.user) from error
                problem = error
            left = give_up - time.monotonic()
            if left <= pause:
                raise StoreUnavailable(
                    f"{self.address} could not do it within {patience:g} s: {_words(problem)}"
                ) from problem
            time.sleep(pause * (0.5 + self._world.dice()))
            pause = min(pause * 2, 0.1)

    def _once(self, work: Callable[[Connection], T], patience: float) -> T:
        self._mind_forks()
        room = self._room
        if not room.acquire(timeout=patience):
            raise StoreUnavailable(
                f"{self.address}: all {_MOST_AT_ONCE} connections of this process were busy for "
                f"{patience:g} s"
            )
        try:
            connection, done = self._taken(patience), False
            try:
                result = work(connection)
                done = True
            except pymysql.Error as error:
                if fate(error) is Trouble.UNKNOWN:
                    raise _Unheard from error
                done = error.args[0] not in CLOSING
                raise
            except FencepostError:
                done = True
                raise
            finally:
                # Also after a signal: an answer that nobody read would be taken for the next.
                if done:
                    self._give_back(connection)
                else:
                    force_close(connection)
            return result
        finally:
            room.release()

    def _taken(self, patience: float) -> Connection:
        while True:
            with self._turn:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                connection = self._opened(patience)
            elif not is_quiet(connection):  # closed meanwhile
                force_close(connection)
                continue
            wait_at_most(connection, patience)
            return connection

    def _give_back(self, connection: Connection) -> None:
        with self._turn:
            if connection.open and len(self._idle) < _MOST_SPARE:
                self._idle.append(connection)
                return
        if connection.open:
            connection.close()

    def _opened(self, patience: float) -> Connection:
        flags = CLIENT.MULTI_STATEMENTS | CLIENT.FOUND_ROWS
        words = {"client_flag": flags, "autocommit": True, "init_command": _INIT}
        opened: Connection = self._connected(pymysql.Connection, patience, **words)
        return opened

    def _connected(self, kind: Callable[..., T], patience: float, **words: Any) -> T:
        address = self.address
        connection: Any = kind(
            host=address.host,
            port=address.port,
            unix_socket=address.socket or None,
            user=address.user,
            password=address.password,
            database=address.database,
            charset="utf8mb4",
            connect_timeout=patience,
            read_timeout=patience,
            write_timeout=patience,
            ssl_disabled=True,
            defer_connect=True,
            program_name="fencepost",
            **words,
        )
        if self._tls is not None:
            # Else the driver would load all certificates of the system for each connection.
            vars(connection).update(
                ssl=True, ctx=self._tls, _ssl_required=address.tls in ("require", "verify")
            )
        wire: socket.socket | None = None
        try:
            if address.socket:  # the driver leaves one open that it could not connect
                wire = socket.socket(socket.AF_UNIX)
                wire.settimeout(patience)
                wire.connect(address.socket)
                # MySQL asks there for the password itself, and takes a request for its key for it.
                vars(connection).update(_secure=True)
            connection.connect(wire)
        except (pymysql.Error, OSError, RuntimeError, UnicodeError) as error:
            if wire is not None:
                wire.close()
            force_close(connection)
            raise told(error, str(address), address.user, connecting=True) from error
        connected: T = connection
        return connected


class Bell:
    """A connection on which one asks now and hears later, perhaps much later."""

    def __init__(self, connection: Any, address: Address) -> None:
        self.connection, self._address = connection, address

    @property
    def number(self) -> int:
        """By which number the server knows this connection."""
        return int(self.connection.thread_id())

    @property
    def fd(self) -> int:
        """What can be read when it rings."""
        return int(_socket(self.connection).fileno())

    def ask(self, text: str, values: Mapping[str, object]) -> None:
        """Send a question and do not wait for the answer."""
        with self.connection.cursor() as cursor:
            packet = cursor.mogrify(text, values)
        try:
            self.connection._execute_command(COMMAND.COM_QUERY, packet)  # noqa: SLF001
        except pymysql.Error as error:
            raise StoreUnavailable(f"{self._address} hung up: {_words(error)}") from error

    def hear(self) -> object | None:
        """Return the first value of the answer; None if somebody interrupted the question."""
        try:
            self.connection._read_query_result()  # noqa: SLF001
        except pymysql.Error as error:
            if error.args[0] == _INTERRUPTED:
                return None
            if fate(error) is Trouble.UNKNOWN:
                raise StoreUnavailable(f"{self._address} hung up: {_words(error)}") from error
            raise told(error, str(self._address), self._address.user) from error
        result: Any = self.connection._result  # noqa: SLF001
        return result.rows[0][0] if result.rows else None

    def is_quiet(self) -> bool:
        """Say whether it is open and owes no answer."""
        return is_quiet(self.connection)

    def drop(self) -> None:
        """Close it without a word."""
        force_close(self.connection)


_INTERRUPTED = 1317


class _Unheard(Exception):
    """The statement was sent, and its answer never came; the cause says why."""


def _exchange(connection: Connection, text: str, values: Mapping[str, object]) -> list[Answer]:
    cursor = connection.cursor()
    cursor.execute(text, values)
    answers = [Answer(cursor.rowcount, cursor.lastrowid or 0, cursor.fetchall())]
    try:
        while cursor.nextset():
            answers.append(Answer(cursor.rowcount, cursor.lastrowid or 0, cursor.fetchall()))
    except pymysql.Error as error:  # the first one has been committed
        raise _Unheard from error
    return answers


def _socket(connection: Connection) -> Any:
    return connection._sock  # type: ignore[attr-defined]  # noqa: SLF001


def wait_at_most(connection: Connection, patience: float | None) -> None:
    """Have whoever uses a connection wait no longer than that for any answer."""
    vars(connection).update(_read_timeout=patience, _write_timeout=patience)


def _words(error: BaseException | None) -> str:
    return str(error.args[-1]) if error is not None and error.args else repr(error)


def _tls(address: Address) -> ssl.SSLContext | None:
    if address.tls == "off" or address.socket:
        return None
    if address.tls == "verify":
        return ssl.create_default_context(cafile=address.ca or None)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
