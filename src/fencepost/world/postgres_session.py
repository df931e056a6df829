"""One connection to PostgreSQL that never waits for longer than it was told to.

It speaks through libpq itself, below psycopg's cursors: that is what lets every wait have an end,
and it is half the work. A session whose wait ended without an answer is closed, never used again.
"""

from __future__ import annotations

import itertools
import os
import re
import select
import time

from psycopg import Error, OperationalError, pq
from psycopg.adapt import AdaptersMap, Loader, Transformer
from psycopg.types.bool import BoolLoader
from psycopg.types.numeric import FloatLoader, IntLoader
from psycopg.types.string import ByteaLoader, TextLoader

from fencepost.model.named import NamedTuple, Protocol
from fencepost.world.postgres_told import Refusal, told_of_connecting
from fencepost.world.precedence import waiting

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from psycopg.pq.abc import PGconn, PGresult

    from fencepost.errors import FencepostError

    Values = Mapping[str, object] | Sequence[object]
    Step = tuple["Statement", Values]

_count = itertools.count(1)
_NAMED = re.compile(r"(?<![:\w]):([a-z]\w*)")
_DONE = (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK, pq.ExecStatus.EMPTY_QUERY)


class Statement:
    """A statement with ``:named`` values, and ``{schema}`` before the names of our tables.

    Values come as a mapping, or as a sequence in the order in which the names first appear. Write
    the type of a value that PostgreSQL cannot infer: ``:ttl_us::bigint``.
    """

    __slots__ = ("_texts", "name", "names", "number", "prepared", "text")

    def __init__(self, text: str, *, prepared: bool = True) -> None:
        self.names = tuple(dict.fromkeys(_NAMED.findall(text)))
        places = {name: f"${place}" for place, name in enumerate(self.names, 1)}
        self.text = _NAMED.sub(lambda found: places[found[1]], text).strip()
        self.prepared = prepared
        self.number = next(_count)
        self.name = f"fencepost_{self.number}".encode()
        self._texts: dict[str, bytes] = {}

    def within(self, schema: str) -> bytes:
        """Return it as it is sent, for the tables of a (quoted) schema."""
        found = self._texts.get(schema)
        if found is None:
            found = self._texts[schema] = self.text.replace("{schema}", schema).encode()
        return found


class Answer(NamedTuple):
    """What came back: the rows as Python values, and how many rows were touched."""

    rows: list[tuple[Any, ...]]
    count: int  # type: ignore[assignment]  # nobody counts the parts of an answer


class Cut(Exception):
    """The session broke or went silent. ``sent``: the server may have done what was asked."""

    def __init__(self, why: str, *, sent: bool) -> None:
        super().__init__(why)
        self.sent = sent


class Session:
    """One connection. Not for two threads at once."""

    def __init__(self, conn: PGconn, *, schema: str) -> None:
        self._conn, self._schema = conn, schema
        self.direct = False  # no pooler in between: what is set or prepared here stays here
        self.lent = (
            False  # others speak over it too, and may have the server forget what we prepare
        )
        self.broken = False
        self._prepared: set[int] = set()
        self._reads = _poller(conn.socket)
        self._writes = _poller(conn.socket, writes=True)

    @property
    def fd(self) -> int:
        """The socket, to wait for with ``World.readable``."""
        return self._conn.socket

    @property
    def raw(self) -> PGconn:
        """The connection itself, for those who speak over it in turns with us."""
        return self._conn

    @property
    def told_pid(self) -> int:
        """The process that the greeting spoke of; a pooler makes one up."""
        return self._conn.backend_pid

    @property
    def server_version(self) -> int:
        """Such as 180006."""
        return self._conn.server_version

    def is_stale(self) -> bool:
        """Say whether the server has closed, or is about to close, a session that was idle.

        Any thread may ask.
        """
        # An idle session has nothing to say but that it ends. (Or that a setting of the server was
        # changed: to open another one then costs nobody anything.)
        try:
            return self.broken or bool(_poller(self._conn.socket).poll(0))
        except Error:  # another thread has just closed it
            return True

    def ask(self, statement: Statement, values: Values = (), *, end: float) -> Answer:
        """Send one statement and return its answer, by ``end`` on the monotonic clock.

        Raises ``Refusal`` with the server's error, or ``Cut``. Outside of a transaction it commits.
        """
        self.send(statement, values, end=end)
        return self.collect(end=end)

    def send(self, statement: Statement, values: Values = (), *, end: float) -> None:
        """Send one statement; ``collect`` its answer once ``fd`` can be read."""
        encoded = _encoded(statement, values)
        prepared = self._prepares(statement)
        if prepared and statement.number not in self._prepared:
            self._prepare(statement, end)
        try:
            if prepared:
                self._conn.send_query_prepared(statement.name, encoded)
            else:
                self._conn.send_query_params(statement.within(self._schema), encoded)
            self._flush(end)
        except Error as error:
            raise self._cut(str(error)) from error

    def collect(self, *, end: float) -> Answer:
        """Return the answer to what was sent, waiting for it until ``end``."""
        try:
            result = self._result(end)
            while self._result(end) is not None:
                pass  # one statement has one result: what follows is the end of it
        except Error as error:
            raise self._cut(str(error)) from error
        if result is None:
            raise self._cut("the session ended before it answered")
        return self._answer(result)

    def batch(self, steps: Sequence[Step], *, end: float) -> list[Answer]:
        """Send several statements at once: one round trip, one transaction, all or nothing.

        Unless one of them is ``BEGIN``: then the transaction stays open. The first error is raised
        as a ``Refusal``, and nothing of the batch has happened.
        """
        conn = self._conn
        encoded = [_encoded(statement, values) for statement, values in steps]
        parts: list[Statement | None] = []  # of what is sent: a statement to plan, or one to do
        try:
            conn.enter_pipeline_mode()
            for (statement, _), values in zip(steps, encoded, strict=True):
                if not self._prepares(statement):
                    conn.send_query_params(statement.within(self._schema), values)
                else:
                    if statement.number not in self._prepared and statement not in parts:
                        conn.send_prepare(statement.name, statement.within(self._schema))
                        parts.append(statement)
                    conn.send_query_prepared(statement.name, values)
                parts.append(None)
            conn.pipeline_sync()
            self._flush(end)
            results = self._pipelined(len(parts), end)
            if not _is_last_word(results[-1]):
                conn.exit_pipeline_mode()
        except Error as error:
            raise self._cut(str(error)) from error
        for part, result in zip(parts, results, strict=False):
            if result.status in _DONE:
                if part is not None:
                    self._prepared.add(part.number)  # also if what it was for was refused
            elif result.status != pq.ExecStatus.PIPELINE_ABORTED:
                self._answer(result)  # raises: this one is why the rest was not done
        done = zip(parts, results, strict=True)
        return [self._answer(result) for part, result in done if part is None]

    def heard(self) -> list[str]:
        """Return what was said since the last time on a channel that this session listens to.

        It does not wait. Raises ``Cut`` if the session has ended.
        """
        words = []
        try:
            self._conn.consume_input()
            while (said := self._conn.notifies()) is not None:
                words.append(said.extra.decode(errors="replace"))
        except Error as error:
            raise self._cut(str(error), sent=False) from error
        return words

    @property
    def in_transaction(self) -> bool:
        """Say whether a transaction is open, or has failed and waits for its end."""
        return self._conn.transaction_status != pq.TransactionStatus.IDLE

    def cancel(self, *, end: float) -> None:
        """Ask the server, on a connection of its own, to give up what this session waits for."""
        try:
            asking = self._conn.cancel_conn()
            asking.start()
            wanted: int = pq.PollingStatus.WRITING
            while wanted not in (pq.PollingStatus.OK, pq.PollingStatus.FAILED):
                if not _comes(asking.socket, wanted, end):
                    break
                wanted = asking.poll()
            if wanted != pq.PollingStatus.OK:
                self.close()
        except Error:  # an old libpq cannot, or the server is gone: without us it gives up as well
            self.close()

    def close(self) -> None:
        """Say goodbye, if there is anybody to say it to."""
        self.broken = True
        self._conn.finish()

    def abandon(self) -> None:
        """Close our copy of a parent's socket, and say nothing to the server."""
        self.broken = True
        try:
            os.close(self._conn.socket)
        except (Error, OSError):
            return  # it was closed before the fork

    # Beneath.

    def _prepares(self, statement: Statement) -> bool:
        return self.direct and statement.prepared and not self.lent

    def _prepare(self, statement: Statement, end: float) -> None:
        """Have the server plan a statement once. Whatever goes wrong: nothing was done yet."""
        try:
            self._conn.send_prepare(statement.name, statement.within(self._schema))
            self._flush(end)
            result = self._result(end)
            while self._result(end) is not None:
                pass
        except (Error, Cut) as error:
            raise self._cut(str(error), sent=False) from error
        if result is None:
            raise self._cut("the session ended before it answered", sent=False)
        self._answer(result, sent=False)
        self._prepared.add(statement.number)

    def _flush(self, end: float) -> None:
        while self._conn.flush():
            self._wait(self._writes, end)
            self._conn.consume_input()  # else two full buffers would wait for each other

    def _result(self, end: float) -> PGresult | None:
        conn = self._conn
        while conn.is_busy():
            self._wait(self._reads, end)
            conn.consume_input()
        return conn.get_result()

    def _pipelined(self, count: int, end: float) -> list[PGresult]:
        results = []
        for _ in range(count):
            result = self._result(end)
            if result is None:
                raise OperationalError("the session ended before the batch did")
            results.append(result)
            if _is_last_word(result):
                return results  # nothing follows, and to look for it would lose what it says
            while self._result(end) is not None:
                pass
        synced = self._result(end)
        if synced is None or synced.status != pq.ExecStatus.PIPELINE_SYNC:
            raise OperationalError("the session ended before the batch did")
        return results

    def _wait(self, poll: Poller, end: float) -> None:
        left = end - time.monotonic()
        with waiting():
            comes = left > 0 and poll.poll(left * 1000)
        if not comes:
            raise self._cut("it did not answer in time")

    def _cut(self, why: str, *, sent: bool = True) -> Cut:
        self.close()
        return Cut(" ".join(why.split()), sent=sent)

    def _answer(self, result: PGresult, *, sent: bool = True) -> Answer:
        status = result.status
        if status == pq.ExecStatus.TUPLES_OK:
            return Answer(_decoded(result), result.command_tuples or 0)
        if status in _DONE:
            return Answer([], result.command_tuples or 0)
        code = result.error_field(pq.DiagnosticField.SQLSTATE)
        if code is None:  # libpq's own words: the connection is gone
            raise self._cut(result.error_message.decode(errors="replace"), sent=sent)
        said = result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b""
        fatal = _is_last_word(result)
        if fatal:
            self.close()
        raise Refusal(code.decode(), said.decode(errors="replace"), fatal=fatal)


def connected(attempts: Sequence[str], *, schema: str, shown: str, end: float) -> Session:
    """Return a session with the first of several hosts that can write, by ``end``.

    Each host that is left has an equal share of the time that is left.
    """
    failure: FencepostError | None = None
    for place, conninfo in enumerate(attempts):
        now = time.monotonic()
        share = now + (end - now) / (len(attempts) - place)
        conn = pq.PGconn.connect_start(conninfo.encode())
        said = _why_not_connected(conn, share)
        if said is None:
            conn.nonblocking = 1
            return Session(conn, schema=schema)
        conn.finish()
        failure = told_of_connecting(said, where=shown)
    assert failure is not None, "there is at least one host"
    raise failure


def _why_not_connected(conn: PGconn, end: float) -> str | None:
    """Drive a connection attempt to its end; None if it succeeded."""
    if conn.status == pq.ConnStatus.BAD:
        return conn.get_error_message()
    wanted: int = pq.PollingStatus.WRITING
    while wanted not in (pq.PollingStatus.OK, pq.PollingStatus.FAILED):
        if not _comes(conn.socket, wanted, end):
            return "it did not answer in time"
        wanted = conn.connect_poll()
    return None if wanted == pq.PollingStatus.OK else conn.get_error_message()


def _comes(socket: int, wanted: int, end: float) -> bool:
    """Wait until a socket, which may be another one after each step, can be used as wanted."""
    reads = wanted == pq.PollingStatus.READING
    poll = _poller(socket, reads=reads, writes=not reads)
    left = end - time.monotonic()
    return left > 0 and bool(poll.poll(left * 1000))


class Poller(Protocol):
    """Waits for one socket."""

    def poll(self, timeout_ms: float) -> Sequence[object]:
        """Wait for at most so long; return something if it can be used."""


class _Select:
    """The same where there is no poll: on Windows, whose select has no limit to its numbers."""

    def __init__(self, socket: int, *, reads: bool, writes: bool) -> None:
        self._reads, self._writes = [socket] * reads, [socket] * writes

    def poll(self, timeout_ms: float) -> Sequence[object]:
        """Wait for at most so long; return something if it can be used."""
        found = select.select(self._reads, self._writes, [], timeout_ms / 1000)
        return [*found[0], *found[1]]


def _poller(socket: int, *, reads: bool = True, writes: bool = False) -> Poller:
    if not hasattr(select, "poll"):
        return _Select(socket, reads=reads, writes=writes)
    poll = select.poll()
    poll.register(socket, select.POLLIN * reads | select.POLLOUT * writes)
    return poll


def _is_last_word(result: PGresult) -> bool:
    """Say whether the server has ended the session with this."""
    if result.status != pq.ExecStatus.FATAL_ERROR:
        return False
    severity = result.error_field(pq.DiagnosticField.SEVERITY_NONLOCALIZED)
    return severity in (b"FATAL", b"PANIC")


# Values, both ways. Everything travels as text.


def _encoded(statement: Statement, values: Values) -> list[bytes | None]:
    names = statement.names
    if hasattr(values, "keys"):
        return [_encode(values[name]) for name in names]
    assert len(values) == len(names), f"{statement.text} wants {names}"
    return [_encode(value) for value in values]


def _encode(value: object) -> bytes | None:  # noqa: PLR0911 -- one line for each type
    kind = type(value)
    if kind is str:
        return value.encode()  # type: ignore[attr-defined,no-any-return]
    if kind is int:
        return b"%d" % value  # type: ignore[str-format]
    if value is None:
        return None
    if kind is bool:
        return b"t" if value else b"f"
    if isinstance(value, bytes):
        return b"\\x" + value.hex().encode()
    if isinstance(value, list | tuple):
        return _encoded_list(value)
    return str(value).encode()


def _encoded_list(values: Sequence[Any]) -> bytes:
    """Return an array. Most are lists of names or of numbers, and can be long: made as one text."""
    kinds = set(map(type, values))
    if kinds in ({int}, {float}):
        return f"{{{','.join(map(str, values))}}}".encode()
    if kinds == {str}:
        text = '","'.join(values)
        if "\\" not in text and text.count('"') == 2 * (len(values) - 1):
            return f'{{"{text}"}}'.encode()
    return b"{" + b",".join(_element(_encode(value)) for value in values) + b"}"


def _element(text: bytes | None) -> bytes:
    if text is None:
        return b"NULL"
    return b'"' + text.replace(b"\\", b"\\\\").replace(b'"', b'\\"') + b'"'


class _Adapting:
    """How psycopg makes values of what was read: bool, bytes, int and float; all else stays text.

    It does so in C, where that is installed.
    """

    connection = None
    adapters = AdaptersMap()


_LOADERS: tuple[tuple[type[Loader], tuple[int, ...]], ...] = (
    (TextLoader, (0,)),  # whatever is not named here
    (BoolLoader, (16,)),
    (ByteaLoader, (17,)),
    (IntLoader, (20, 21, 23, 26)),
    (FloatLoader, (700, 701)),
)
for _loader, _oids in _LOADERS:
    for _oid in _oids:
        _Adapting.adapters.register_loader(_oid, _loader)


def _decoded(result: PGresult) -> list[tuple[Any, ...]]:
    count = result.ntuples
    if not count:
        return []
    values = Transformer(_Adapting)
    values.set_pgresult(result)
    return values.load_rows(0, count, tuple)
