"""What each error of a MariaDB or MySQL server means: what is true now, and what to do."""

from __future__ import annotations

import enum
import re
import ssl

import pymysql

from fencepost.errors import Misuse, OutcomeUnknown, Refused, StoreUnavailable, StoreUnfit


class RowExists(Refused):
    """Somebody else inserted the row first. Nothing was changed."""


class NoTable(StoreUnfit):
    """A table of fencepost is missing."""


class Trouble(enum.Enum):
    """What an error says about the statement it answers."""

    PASSING = "passing"  # it was rolled back, or never sent, and may succeed when asked again
    REFUSED = "refused"  # it was rolled back
    UNKNOWN = "unknown"  # it was sent, and may have been committed


class Misstep(enum.Enum):
    """What user code did that a transaction of ours does not allow."""

    ENDING = "ending"  # what would end the transaction
    UNDONE = "undone"  # going on in one that the server has undone
    TEMPORARY = "temporary"  # a temporary table
    ENDED = "ended"  # what has ended the transaction, and was noticed by its commit


_MISUSES = {
    Misstep.ENDING: (
        "a statement that would end the transaction, and so its guard, is refused: leave BEGIN, "
        "COMMIT and ROLLBACK to run.transaction(), and create, alter and drop tables outside of it"
    ),
    Misstep.UNDONE: (
        "the server has undone the transaction, as one of a deadlock: let the error out of the "
        "block, and have the whole block done again"
    ),
    Misstep.TEMPORARY: (
        "MySQL refuses temporary tables in run.transaction(), unless its xa_detach_on_prepare is "
        "OFF: have it so, or make them elsewhere"
    ),
    Misstep.ENDED: (
        "something has ended the transaction before its commit, as a procedure or a prepared "
        "statement may: what was written since is undone, but what was written before may have "
        "been committed, without the guard; leave that to run.transaction(), and create, alter and "
        "drop tables outside of it"
    ),
}


def misuse(what: Misstep) -> Misuse:
    """Return what is told to user code that did so."""
    return Misuse(_MISUSES[what])


# Numbers from 4000 on were given by each server for itself. Of those below 4031 is MySQL's and 4151
# is MariaDB's. The other one's are about a trigger that follows one that is not there, and a file
# that is loaded: none of our statements is ever answered with them. What may be an answer to a
# statement of user code is told apart by the server: see ``misstep``.

# After these the server closes the connection.
CLOSING = frozenset({1053, 1152, 1153, 1154, 1156, 1158, 1159, 1160, 1161, 1927, 3169, 4031})

# Lock waits and deadlocks, certification on other nodes of a cluster, a connection that the server
# had closed for idleness, and what could not be sent at all.
DEADLOCK = 1213
_PASSING = frozenset({1205, DEADLOCK, 3101, 4031, 2006})

# What a statement is answered that somebody has killed, alone or with its session.
INTERRUPTED = 1317
# What is answered to one that took too long, for whoever has set a limit.
TOO_LONG = frozenset({1969, 3024})
# What a server answers that has no room on its disk, no memory, or writes nothing any more.
_FULL, _LACKS = 1021, frozenset({1037, 1041, 1836})
# With which option a server runs: some that a replica does, and many that have another reason.
_OPTION, _READ_ONLY = 1290, re.compile(r"read[-_]only")
# A table is full: with its disk, or for itself, as those in memory are.
_TABLE_FULL = 1114
# Tables that a statement makes for itself: no room for them is no full disk to anybody else.
_SET_ASIDE = "#sql"

# How a transaction whose ground has moved is made to fail by a statement before its commit, without
# a function of our own on the server: a number is too large, if something is not so. Both servers
# repeat what it was, MySQL with brackets of its own.
_OUT_OF_RANGE, _MOVED = 1690, ("exp(710", "exp((710")

# Lost while waiting for the answer; and what a server may say after it has begun to commit.
_UNKNOWN = frozenset({2013, 2027, 1026, 1030, 1105, 1180, 1196, 1598, 1927, 3100})

# What the server refuses to do, and what to do about it. The sentences show no secret.
_REFUSALS: tuple[tuple[frozenset[int], type[Exception], str], ...] = (
    (
        frozenset({1049}),
        StoreUnfit,
        "{where}: the server has no such database; create it, or correct the URL",
    ),
    (
        frozenset({1044, 1045, 1142, 1143, 1227, 1251, 1370, 1698, 1820, 1862, 3118, 3159, 4151}),
        StoreUnfit,
        "{where} denies it to user {user!r}: {words}; check password and privileges",
    ),
    (frozenset({1146}), NoTable, "{where}: {words}; 'fencepost migrate' makes what is missing"),
    (frozenset({1062}), RowExists, "{where}: {words}"),
    (
        frozenset({1419}),
        StoreUnfit,
        "{where} lets {user!r} make no trigger: set log_bin_trust_function_creators = 1 ({words})",
    ),
    (
        frozenset({1153}),
        StoreUnfit,
        "{where} takes no packet of that size: raise max_allowed_packet, or write less at once",
    ),
    (
        frozenset({1665}),
        StoreUnfit,
        "{where} logs statements instead of rows: set binlog_format to MIXED or ROW",
    ),
    (
        frozenset({1054, 1064, 1136, 1264, 1265, 1305, 1364, 1366, 1406}),
        StoreUnfit,
        "the tables in {where} are not what fencepost left there: {words}",
    ),
    (
        frozenset({1036, 1290, 1792, 1836}),
        StoreUnavailable,
        "{where} is read-only: give the URL of the primary ({words})",
    ),
    (
        frozenset({1021, 1114}),
        StoreUnavailable,
        "the disk of {where} is full: free some space ({words})",
    ),
    (
        frozenset({1040, 1203, 1226}),
        StoreUnavailable,
        "{where} has no room for another connection: {words}",
    ),
)


# The driver can encrypt a password by itself, with another package; encryption of all is better.
_NEEDS_TLS = (
    "takes this user's password only over an encrypted connection: have the server offer TLS, and "
    "leave out tls=off; or pip install 'pymysql[rsa]'"
)

_FULL_LOG = 1021  # also of the binary log, to which a COMMIT writes


def is_of_server(error: pymysql.Error) -> bool:
    """Say whether a server lacks what the ledger needs as well: its disk, memory, to be primary."""
    number, words = error.args[0] if error.args else 0, str(error.args[-1:])
    if number == _FULL:
        return _SET_ASIDE not in words
    return number in _LACKS or (number == _OPTION and bool(_READ_ONLY.search(words)))


def full_table(error: pymysql.Error) -> str | None:
    """Return the name of the table that is full, if that is what an error says."""
    if error.args[:1] != (_TABLE_FULL,):
        return None
    named = re.search(r"'(.+)'|\"(.+)\"|`(.+)`", str(error.args[-1]))
    return next(filter(None, named.groups())) if named else ""


def fate(error: pymysql.Error) -> Trouble:
    """Say what became of the statement that was answered with ``error``."""
    code = error.args[0] if error.args else 0
    if isinstance(error, pymysql.InterfaceError) and code == 0:  # closed before it was sent
        return Trouble.PASSING
    if code in _PASSING or has_moved(error):
        return Trouble.PASSING
    if code in _UNKNOWN or not isinstance(code, int):  # or the answer made no sense
        return Trouble.UNKNOWN
    return Trouble.REFUSED


def has_moved(error: pymysql.Error) -> bool:
    """Say whether something was insisted on in vain: it is not as it was read."""
    words = str(error.args[-1]) if error.args else ""
    return error.args[:1] == (_OUT_OF_RANGE,) and any(moved in words for moved in _MOVED)


# In an XA transaction: what its state does not allow; that it was undone, where MySQL has a number
# for each reason; and, of MySQL only, that it takes no temporary tables. MariaDB says 4091 of a
# sequence that is not there.
_XA_STATE, _XA_UNDONE, _XA_TEMPORARY = 1399, frozenset({1402, 1613, 1614}), 4091


def misstep(error: pymysql.Error, *, of_mysql: bool) -> Misstep | None:
    """Say what user code did wrong in an XA transaction, if it was refused for that."""
    code, words = error.args[0], str(error.args[-1])
    if code in _XA_UNDONE or (code == _XA_STATE and "ROLLBACK" in words):
        return Misstep.UNDONE
    if of_mysql and code == _XA_TEMPORARY:
        return Misstep.TEMPORARY
    return Misstep.ENDING if code == _XA_STATE else None


_NO_SUCH_THING = 1305  # also of functions and procedures


def lost_savepoint(error: pymysql.Error, name: str) -> bool:
    """Say whether a savepoint was released that is not there."""
    return error.args[0] == _NO_SUCH_THING and name in str(error.args[-1])


def kept_from_committing(error: pymysql.Error) -> bool:
    """Say whether a statement was refused in words that no COMMIT is answered with.

    Statements and their COMMIT may travel together; the server stops at the first that it refuses.
    """
    code = error.args[0] if error.args else 0
    return code != _FULL_LOG and any(code in codes for codes, _, _ in _REFUSALS)


def told(error: Exception, where: str, user: str, *, connecting: bool = False) -> Exception:
    """Return what an error means for the caller."""
    code = error.args[0] if error.args else 0
    words = str(error.args[-1]) if error.args else repr(error)
    if isinstance(error, (RuntimeError, UnicodeError)):  # an extra of the driver, a host's name
        unfit = _NEEDS_TLS if "cryptography" in words else f"cannot be used: {words}"
        return StoreUnfit(f"{where} {unfit}")
    original = getattr(error, "original_exception", error)
    if isinstance(original, ssl.SSLCertVerificationError):
        return StoreUnfit(
            f"{where} shows a certificate that is not trusted: {original.verify_message}; name its "
            "authority with ?ca=FILE"
        )
    for codes, kind, sentence in _REFUSALS:
        if code in codes:
            return kind(sentence.format(where=where, user=user, words=words))
    if connecting:
        why = original if isinstance(original, OSError) else words
        return StoreUnavailable(f"{where} cannot be reached: {why}; is it running there?")
    if isinstance(error, pymysql.Error) and fate(error) is Trouble.UNKNOWN:
        return OutcomeUnknown(f"{where} failed while it was used: {words}")
    return StoreUnavailable(f"{where} refused: {words}")
