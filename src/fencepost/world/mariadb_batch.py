"""Several statements in one packet, and one transaction over as few packets as there can be.

A server that fails one statement of a packet does not look at the rest: the ``COMMIT`` at the end
of the last is only reached if all went well. So a transaction that fails before that is known to
have changed nothing, whatever else is lost.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
import select

import pymysql

from fencepost.model.named import NamedTuple
from fencepost.world.mariadb_errors import Trouble, fate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    Connection = pymysql.Connection[Any]

# What the driver tells of a connection that it found closed; what the server tells a transaction
# that lost against another one, and one that inserts what is there.
_GONE, _LOST, _ROW_EXISTS = 2006, 1213, 1062
_MOST = 1.7976931348623157e308
# How many characters go into one packet, unless a single statement has more: servers refuse one
# that is larger than their ``max_allowed_packet``, which is 16 MB unless somebody has set it.
_PACKET = 1_000_000
# The name of a column that has a whole row in it, as JSON; behind it may be said which places have
# numbers that are no integers, even if they look like it.
PACKED = "packed"
_VALUE = re.compile(r":([\[#]?)(\w+)(\]?)")


class Part(NamedTuple):
    """One statement; or, with ``each``, some of it or all of it once for each element of lists.

    ``each`` names lists, and what an element of each is called; or one list of rows. What is said
    for an element takes the place of ``{each}``. Without such a place there are statements for
    every element. For no elements nothing is said at all.
    """

    text: str
    inner: tuple[str, ...] = ()
    each: tuple[tuple[str, str], ...] = ()
    glue: str = ""


class Statement(NamedTuple):
    """What is said to the server, in one or more parts; what it answers is all of their rows."""

    parts: tuple[Part, ...]


class Rows(NamedTuple):
    """What one statement returned."""

    rows: Sequence[tuple[Any, ...]]


ROWS = "rows"


def said(*parts: str | Part) -> Statement:
    """Return a statement. ``:name`` stands for a value or, after IN, for some of them.

    ``:[name]`` stands for a list as JSON, and ``:#name`` for a digest, or a list of digests.
    """
    return Statement(
        tuple(part if isinstance(part, Part) else Part(_template(part)) for part in parts)
    )


def each_of(text: str, inner: str, glue: str = "\nUNION ALL\n", **each: str) -> Part:
    """Return a statement that has ``inner`` for each element of some lists: ``one="list"``."""
    outer = _template(text).replace("{each}", "%(each)s")
    one = _template(inner)
    return Part(outer, (f"({one})" if "SELECT" in one else one,), tuple(each.items()), glue)


def one_by_one(*texts: str, **each: str) -> Part:
    """Return statements for each element of some lists; without names, for each of the rows."""
    inner = tuple(_template(text) for text in texts)
    return Part("", inner, tuple(each.items()) or ((ROWS, ROWS),))


def _template(text: str) -> str:
    return _VALUE.sub(r"%(\1\2\3)s", text.replace("%", "%%"))


class Bounds(NamedTuple):
    """What begins a transaction, what commits it, and what undoes it.

    What is ``before`` and ``after`` goes along where more than one packet does: in between the
    server waits for us.
    """

    begin: tuple[str, ...] = ("START TRANSACTION",)
    commit: tuple[str, ...] = ("COMMIT",)
    undo: tuple[str, ...] = ("ROLLBACK",)
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


_PLAIN = Bounds()

# MySQL knows no limit of its own for a session that waits inside of a transaction. So there is one
# for every session, while there is a transaction: who is stopped in it loses it, and its locks.
_MYSQL = Bounds(
    before=("SET SESSION wait_timeout = 3",), after=("SET SESSION wait_timeout = DEFAULT",)
)


def bounds_of(connection: Connection) -> Bounds:
    """Return how transactions begin and end on a server: MariaDB, or else MySQL."""
    return _MYSQL if is_mysql(connection) else _PLAIN


def is_mysql(connection: Connection) -> bool:
    """Say which of the two kinds of servers it is."""
    version: str = connection.server_version  # type: ignore[attr-defined]
    return "mariadb" not in version.lower()


class Transaction:
    """An open transaction; it begins with the first question, in the same packet."""

    def __init__(self, connection: Connection, bounds: Bounds) -> None:
        self._connection, self._bounds = connection, bounds
        self._begun = self._ended = False
        self.committing = False  # whether a commit was sent

    def batch(
        self, steps: Sequence[tuple[Statement, Mapping[str, Any]]], *, last: bool = False
    ) -> list[Rows]:
        """Send several statements in one packet; with ``last`` the commit as well."""
        assert not self._ended, "the transaction is over"
        texts = [rendered(self._connection, *step) for step in steps]
        packets, ahead = self._packed(list(itertools.chain(*texts)), last=last)
        if not packets[0]:
            return [Rows(()) for _ in steps]
        self._look_alive()
        self._begun = True
        found = self._sent(packets, last=last)
        self._ended = last
        answers, place = [], ahead
        for several in texts:
            rows = found[place : place + len(several)]
            answers.append(Rows(rows[0] if len(rows) == 1 else list(itertools.chain(*rows))))
            place += len(several)
        return answers

    def commit(self) -> None:
        """Commit, unless the last question did so already, or nothing was ever asked."""
        if self._begun and not self._ended:
            self._look_alive()
            self._sent(self._packed([], last=True)[0], last=True)
            self._ended = True

    def roll_back(self) -> None:
        """Undo what was not committed."""
        if self._begun and not self._ended:
            self._ended = True
            try:
                self._exchange([*self._bounds.undo, *self._bounds.after])
            except pymysql.Error:
                force_close(self._connection)  # which undoes it as well

    def _packed(self, texts: list[str], *, last: bool) -> tuple[list[list[str]], int]:
        """Return statements as they are sent, and how many of ours go ahead of them."""
        bounds = self._bounds
        if last and not self._begun:
            if len(texts) == 1:  # it is a transaction by itself
                return [texts], 0
            packets = _packets([*bounds.begin, *texts], bounds.commit)
            if len(packets) == 1:
                return packets, len(bounds.begin)
        ahead = () if self._begun else (*bounds.before, *bounds.begin)
        end = (*bounds.after, *bounds.commit) if last else ()
        return _packets([*ahead, *texts], end), len(ahead)

    def _sent(self, packets: list[list[str]], *, last: bool) -> list[Sequence[tuple[Any, ...]]]:
        """Send packets, the commit with the last one if it is ``last``; return all rows."""
        found: list[Sequence[tuple[Any, ...]]] = []
        *before, final = packets
        for packet in before:
            found += self._exchange(packet)
        self.committing = self.committing or last
        return found + self._exchange(final)

    def _exchange(self, packet: list[str]) -> list[Sequence[tuple[Any, ...]]]:
        found: list[Sequence[tuple[Any, ...]]] = []
        cursor = self._connection.cursor()
        try:
            cursor.execute(";".join(packet))
            found.append(unpacked(cursor))
            while cursor.nextset():
                found.append(unpacked(cursor))
        except pymysql.Error as error:
            if error.args[0] == _ROW_EXISTS:  # somebody was faster
                raise pymysql.OperationalError(_LOST, str(error.args[-1])) from error
            if fate(error) is Trouble.UNKNOWN and not self.committing:
                raise pymysql.OperationalError(_GONE, str(error.args[-1])) from error
            if fate(error) is not Trouble.UNKNOWN and len(found) < len(packet) - 1:
                self.committing = False  # it was not reached
            raise
        assert len(found) == len(packet), "each statement has one answer"
        return found

    def _look_alive(self) -> None:
        """Find out before anything is sent that the server has ended the session meanwhile."""
        if not is_quiet(self._connection):
            force_close(self._connection)
            raise pymysql.OperationalError(_GONE, "the server ended the session meanwhile")


def _packets(texts: Sequence[str], end: Sequence[str]) -> list[list[str]]:
    """Return statements as they go together, which is mostly all of them; the end always does."""
    packets: list[list[str]] = [[]]
    length = 0
    for several in (*([text] for text in texts), end):
        more = sum(map(len, several))
        length += more
        if length > _PACKET and packets[-1]:
            packets.append([])
            length = more
        packets[-1] += several
    return packets


def rendered(connection: Connection, statement: Statement, values: Mapping[str, Any]) -> list[str]:
    """Return statements as the server reads them, each value as a literal of SQL."""
    texts = []
    literals = _Literals(connection, values)
    for part in statement.parts:
        if not part.each:
            texts.append(part.text % literals)
            continue
        said = [
            inner % _Literals(connection, {**values, **element})
            for element in _elements(part, values)
            for inner in part.inner
        ]
        if part.text and said:
            texts.append(part.text % _Literals(connection, values, each=part.glue.join(said)))
        elif not part.text:
            texts += said
    return texts


def _elements(part: Part, values: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    if part.each == ((ROWS, ROWS),):
        rows: Sequence[Mapping[str, Any]] = values[ROWS]
        return rows
    names = [name for name, _ in part.each]
    lists = (values[several] for _, several in part.each)
    return [dict(zip(names, one, strict=True)) for one in zip(*lists, strict=True)]


def unpacked(cursor: Any) -> Sequence[tuple[Any, ...]]:
    """Return the rows of an answer; those that came as one column of JSON taken apart.

    To describe a column costs the driver more than to read it, and a run has 35 of them.
    """
    rows: Sequence[tuple[Any, ...]] = cursor.fetchall()
    title = cursor.description[0][0] if rows else ""
    if not title.startswith(PACKED):
        return rows
    found = [json.loads(row[0]) for row in rows]
    for place in _floats(title):
        for row in found:
            if row[place] is not None:
                row[place] = float(row[place])
    return [tuple(row) for row in found]


@functools.cache
def _floats(title: str) -> list[int]:
    return [int(place) for place in title.split()[1:]]


class _Literals(dict[str, str]):
    """Values as literals of SQL, made when they are asked for."""

    def __init__(self, connection: Connection, values: Mapping[str, Any], **known: str) -> None:
        super().__init__(known)
        self._connection, self._values = connection, values

    def __missing__(self, name: str) -> str:
        if name[0] == "[":
            value: Any = json.dumps(self._values[name[1:-1]], ensure_ascii=False)
        elif name[0] == "#":
            value = _digest(self._values[name[1:]])
        else:
            value = self._values[name]
        self[name] = literal = self._literal(value)
        return literal

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            # As other servers keep it: without NUL, and without half a character.
            if "\0" in value:
                value = value.replace("\0", "\N{REPLACEMENT CHARACTER}")
            if not value.isascii():
                value = value.encode("utf-8", "replace").decode()
        elif isinstance(value, list | tuple):
            return f"({', '.join(map(self._literal, value)) or 'NULL'})"
        elif isinstance(value, float):
            value = max(-_MOST, min(value, _MOST))  # the server knows no infinity
        return str(self._connection.escape(value))


def _digest(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_digest(one) for one in value]
    return hashlib.sha256(value.encode()).hexdigest()


def is_quiet(connection: Connection) -> bool:
    """Say whether nothing came that nobody asked for: a farewell, or the end."""
    if not connection.open:
        return False
    poll = select.poll()
    poll.register(connection._sock.fileno(), select.POLLIN)  # type: ignore[attr-defined]  # noqa: SLF001
    return not poll.poll(0)


def drain(connection: Connection) -> None:
    """Read what was answered and nobody has read, so that the next answer is the next one."""
    result: Any = connection._result  # type: ignore[attr-defined]  # noqa: SLF001
    if result is not None and result.unbuffered_active:
        result._finish_unbuffered_query()  # noqa: SLF001
    while result is not None and result.has_next:
        connection.next_result()
        result = connection._result  # type: ignore[attr-defined]  # noqa: SLF001


def force_close(connection: Connection) -> None:
    """Close the descriptor and send nothing: what is on the wire may not be ours."""
    connection._force_close()  # type: ignore[attr-defined]  # noqa: SLF001
