"""The door to one PostgreSQL database: a few sessions for all threads, errors that tell the truth.

Each ``ask`` is one statement, one round trip and one transaction. ``batch`` is several statements
in one round trip and one transaction. ``transaction`` is for what must look before it decides.
Whatever is asked has an end: after ``patience`` the session is closed, and the answer is
``OutcomeUnknown`` (it may have happened) or, for what only reads, ``StoreUnavailable``.

Behind a pooler in transaction mode no session is ours: nothing is set, prepared or locked on it
then. ``direct`` tells.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from contextlib import contextmanager, suppress

from fencepost.errors import FencepostError, OutcomeUnknown, StoreUnavailable, StoreUnfit
from fencepost.world.postgres_session import Answer, Cut, Session, Statement, connected
from fencepost.world.postgres_told import CONFLICTS, Refusal, told
from fencepost.world.postgres_url import Address, read_address

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeVar

    from fencepost.world.postgres_session import Step, Values

    T = TypeVar("T")

__all__ = [
    "PATIENCE",
    "Address",
    "Answer",
    "Cut",
    "Postgres",
    "Refusal",
    "Session",
    "Statement",
    "Transaction",
    "ends_after",
    "read_address",
]

PATIENCE = 5.0
_MOST_SESSIONS = 8
_MOST_CONFLICTS = 10
OLDEST = 140_000

_BEGIN = Statement("BEGIN", prepared=False)
_COMMIT = Statement("COMMIT", prepared=False)
_ROLLBACK = Statement("ROLLBACK", prepared=False)

_INTRODUCE = Statement(
    """
SELECT pg_backend_pid(), current_setting('synchronous_commit')""",
    prepared=False,
)

# What a session of ours must have, whatever the server's defaults are: commits that wait for the
# disk (or for more than that), an end to every statement, no end to an idle session, and a death
# that the server notices.
_SETTLE = Statement(
    """
SELECT set_config('synchronous_commit', CASE :commit WHEN 'remote_apply' THEN :commit ELSE 'on' END,
                  false),
       set_config('statement_timeout', :patience_ms, false),
       set_config('lock_timeout', '0', false),
       set_config('default_transaction_isolation', 'read committed', false),
       set_config('idle_in_transaction_session_timeout', '60s', false),
       set_config('tcp_keepalives_idle', '10', false),
       set_config('tcp_keepalives_interval', '5', false),
       set_config('tcp_keepalives_count', '3', false),
       set_config('tcp_user_timeout', '20000', false)""",
    prepared=False,
)
# Where only our own statements are sent, all of which find rows by their keys: a plan is kept for
# as long as the session, and one made while a table was small would go on to read all of it.
# To PostgreSQL before 18 what is switched off looks so expensive that it would compile such plans,
# which takes a hundred times as long as to carry them out.
_BY_KEY = Statement(
    "SELECT set_config('enable_seqscan', 'off', false), set_config('jit', 'off', false)",
    prepared=False,
)
# By the first version that knows it.
_STAY = {
    140_000: Statement("SELECT set_config('idle_session_timeout', '0', false)", prepared=False),
    170_000: Statement("SELECT set_config('transaction_timeout', '0', false)", prepared=False),
}


class Postgres:
    """A database as this process may use it, from any thread.

    ``set_up`` is run once with the first session, before anything else is asked; if it raises,
    the next call runs it again.
    """

    def __init__(
        self, address: Address, *, set_up: Callable[[Session], None] | None = None
    ) -> None:
        self.address = address
        self.where = address.shown
        self.direct: bool | None = None  # unknown before the first session
        self._set_up = set_up
        self._idle: list[Session] = []
        self._start_anew()
        _doors.add(self)

    # Asking.

    def ask(
        self,
        statement: Statement,
        values: Values = (),
        *,
        changes: bool = True,
        patience: float = PATIENCE,
    ) -> Answer:
        """Send one statement, which commits by itself. ``changes=False``: it only reads."""
        return self._conflict_free(
            lambda session, end: session.ask(statement, values, end=end),
            changes=changes,
            patience=patience,
        )

    def batch(
        self, steps: Sequence[Step], *, changes: bool = True, patience: float = PATIENCE
    ) -> list[Answer]:
        """Send several statements in one round trip and one transaction: all or nothing."""
        return self._conflict_free(
            lambda session, end: session.batch(steps, end=end),
            changes=changes,
            patience=patience,
        )

    def transaction(self, work: Callable[[Transaction], T], *, patience: float = PATIENCE) -> T:
        """Run ``work`` in one transaction, and again if it lost against another one.

        Read committed. If ``work`` raises nothing has happened. ``Transaction.ask(…, last=True)``
        commits in the same round trip.
        """

        def worked(session: Session, end: float) -> T:
            transaction = Transaction(session, end)
            try:
                result = work(transaction)
                transaction.commit()
            finally:
                transaction.roll_back()
            return result

        return self._conflict_free(worked, changes=True, patience=patience)

    @property
    def idle(self) -> list[Session]:
        """The sessions that nobody uses at the moment."""
        return list(self._idle)

    def told(self, refusal: Refusal, *, changes: bool) -> FencepostError:
        """Return what a server's error means to whoever asked."""
        return told(refusal, where=self.where, schema=self.address.schema, changes=changes)

    # Sessions.

    @contextmanager
    def session(self, *, changes: bool, patience: float = PATIENCE) -> Iterator[Session]:
        """Lend a session, and tell what becomes of it in our own words.

        A session that comes back inside of a transaction, or broken, is not lent again.
        """
        end = time.monotonic() + patience
        session = self._taken(end, patience)
        try:
            yield session
        except Refusal as refusal:
            raise self.told(refusal, changes=changes) from refusal
        except Cut as cut:
            raise self.told_of_cut(cut, changes=changes) from cut
        except FencepostError:
            raise  # of the borrower itself: the session is whole
        except BaseException:
            # A signal may have come between question and answer: nobody else must read the latter.
            session.close()
            raise
        finally:
            self._give_back(session)

    def connect(self, *, patience: float = PATIENCE, by_key: bool = False) -> Session:
        """Open a session that is nobody else's; the caller closes it.

        ``by_key`` says that nothing will be asked on it that wants the whole of a table. It is
        asked for in vain behind a pooler, where sessions are only ever lent: see ``direct``.
        """
        session = connected(
            self.address.attempts,
            schema=self.address.quoted_schema,
            shown=self.where,
            end=time.monotonic() + patience,
        )
        settled = False
        try:
            self._settle(session, time.monotonic() + patience, by_key=by_key)
            settled = True
        except Refusal as refusal:
            raise self.told(refusal, changes=False) from refusal
        except Cut as cut:
            raise self.told_of_cut(cut, changes=False) from cut
        finally:
            if not settled:
                session.close()
        _sessions.add(session)
        return session

    def told_of_cut(self, cut: Cut, *, changes: bool) -> FencepostError:
        """Return what the end of a session means to whoever waited for its answer."""
        if changes and cut.sent:
            return OutcomeUnknown(f"PostgreSQL at {self.where} was asked, and then: {cut}")
        return StoreUnavailable(f"PostgreSQL at {self.where} is not available: {cut}")

    def forget(self) -> None:
        """Begin anew in a forked child; ``_after_fork`` has closed our copies of the sockets."""
        self._start_anew()

    def close(self) -> None:
        """Close the idle sessions; the next call opens another."""
        idle, self._idle = self._idle, []
        for session in idle:
            self._drop(session)

    # Beneath.

    def _start_anew(self) -> None:
        self._room = threading.BoundedSemaphore(_MOST_SESSIONS)
        self._idle = []
        self._is_set_up = self._set_up is None
        self._setting_up = threading.Lock()

    def _conflict_free(
        self, work: Callable[[Session, float], T], *, changes: bool, patience: float
    ) -> T:
        end = time.monotonic() + patience
        for last in range(_MOST_CONFLICTS):
            session = self._taken(end, patience)
            try:
                return work(session, end)
            except Refusal as refusal:
                if refusal.code not in CONFLICTS or last == _MOST_CONFLICTS - 1:
                    raise self.told(refusal, changes=changes) from refusal
            except Cut as cut:
                # Cut before it was asked: asked again, on another session, it can only happen once.
                if cut.sent or last == _MOST_CONFLICTS - 1 or time.monotonic() >= end:
                    raise self.told_of_cut(cut, changes=changes) from cut
            except FencepostError:
                raise  # of the work itself: the session is whole
            except BaseException:
                session.close()
                raise
            finally:
                self._give_back(session)
        raise AssertionError("the last conflict is raised")

    def _taken(self, end: float, patience: float) -> Session:
        while True:
            session = self._idle_one()
            if session is None and self._room.acquire(blocking=False):
                session = self._opened(end)
            if session is not None:
                if not self._is_set_up:
                    self._set_up_with(session)
                return session
            if time.monotonic() >= end:
                raise StoreUnavailable(
                    f"all {_MOST_SESSIONS} sessions with PostgreSQL at {self.where} were busy for "
                    f"{patience:g} s"
                )
            time.sleep(0.001)  # until one of them is free

    def _opened(self, end: float) -> Session:
        opened = False
        try:
            session = self.connect(patience=end - time.monotonic(), by_key=True)
            opened = True
        finally:
            if not opened:
                self._room.release()
        return session

    def _idle_one(self) -> Session | None:
        while True:
            try:
                session = self._idle.pop()
            except IndexError:
                return None
            if not session.is_stale():
                return session
            self._drop(session)

    def _give_back(self, session: Session) -> None:
        if session.broken or session.in_transaction:
            self._drop(session)
        else:
            self._idle.append(session)

    def _drop(self, session: Session) -> None:
        session.close()
        with suppress(ValueError):  # it was opened before a fork, or before a close
            self._room.release()

    def _set_up_with(self, session: Session) -> None:
        assert self._set_up is not None, "there is something to set up"
        done = False
        try:
            with self._setting_up:
                if not self._is_set_up:
                    self._set_up(session)
                    self._is_set_up = True
            done = True
        except Refusal as refusal:
            raise self.told(refusal, changes=False) from refusal
        except Cut as cut:
            raise self.told_of_cut(cut, changes=False) from cut
        finally:
            if not done:
                self._drop(session)

    def _settle(self, session: Session, end: float, *, by_key: bool) -> None:
        """Make a session what it must be, or refuse it."""
        if session.server_version < OLDEST:
            raise StoreUnfit(
                f"PostgreSQL at {self.where} is of version {session.server_version // 10_000}: "
                f"fencepost needs {OLDEST // 10_000} or newer"
            )
        pid, commit = session.ask(_INTRODUCE, end=end).rows[0]
        self.direct = session.direct = pid == session.told_pid
        if session.direct:
            values = {"commit": commit, "patience_ms": str(int(PATIENCE * 1000))}
            steps: list[Step] = [(_SETTLE, values), *([(_BY_KEY, ())] if by_key else [])]
            steps += [
                (stay, ()) for since, stay in _STAY.items() if session.server_version >= since
            ]
            session.batch(steps, end=end)
        elif commit in ("off", "local"):
            raise StoreUnfit(
                f"behind the pooler at {self.where} synchronous_commit is {commit!r}, and nobody "
                "can set it for one session there: ALTER ROLE … SET synchronous_commit = on"
            )


class Transaction:
    """An open transaction; it begins with the first question, in the same round trip."""

    def __init__(self, session: Session, end: float) -> None:
        self._session, self._end = session, end
        self._begun = self._ended = False

    def ask(self, statement: Statement, values: Values = (), *, last: bool = False) -> Answer:
        """Send one statement; with ``last`` the transaction commits in the same round trip."""
        return self.batch([(statement, values)], last=last)[0]

    def batch(self, steps: Sequence[Step], *, last: bool = False) -> list[Answer]:
        """Send several statements in one round trip."""
        assert not self._ended, "the transaction is over"
        before: list[Step] = [] if self._begun else [(_BEGIN, ())]
        self._begun = True
        after: list[Step] = [(_COMMIT, ())] if last else []
        if before or after or len(steps) > 1:
            answers = self._session.batch([*before, *steps, *after], end=self._end)
        else:
            statement, values = steps[0]
            answers = [self._session.ask(statement, values, end=self._end)]
        self._ended = last
        return answers[len(before) : len(before) + len(steps)]

    def commit(self) -> None:
        """Commit, unless the last question did so already, or nothing was ever asked."""
        if self._begun and not self._ended:
            self._session.ask(_COMMIT, end=self._end)
            self._ended = True

    def roll_back(self) -> None:
        """Undo what was not committed."""
        if self._begun and not self._ended and not self._session.broken:
            self._ended = True
            try:
                self._session.ask(_ROLLBACK, end=self._end)
            except (Cut, Refusal):
                self._session.close()  # which undoes it as well


def ends_after(patience: float) -> float:
    """Return until when somebody with that much patience waits, on the monotonic clock."""
    return time.monotonic() + patience


_doors: weakref.WeakSet[Postgres] = weakref.WeakSet()
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
# Sessions of a parent process. libpq must never say goodbye on their behalf.
_carried_over: list[Session] = []


def _after_fork() -> None:
    """Close our copies of a parent's sockets, so that its death is seen though we live on."""
    for session in list(_sessions):
        session.abandon()
        _carried_over.append(session)
    _sessions.clear()
    for door in list(_doors):
        door.forget()


if hasattr(os, "register_at_fork"):  # not on Windows, where there is no fork
    os.register_at_fork(after_in_child=_after_fork)
