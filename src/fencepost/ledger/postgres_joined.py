"""How statements of user code join a transaction of the PostgreSQL ledger: see ``draft_joined``."""

from __future__ import annotations

from fencepost.errors import FencepostError, Misuse, OutcomeUnknown, StoreUnavailable
from fencepost.ledger import postgres_joined_rows as sql
from fencepost.ledger.draft_joined import Joined
from fencepost.world.postgres import PATIENCE, Cut, Refusal, Session, ends_after
from fencepost.world.postgres_driver import (
    LACKS,
    in_drivers_words,
    is_alive,
    is_of_server,
    is_open,
    is_whole,
    lent,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from fencepost.ledger.api import Attempt
    from fencepost.ledger.draft_dialect import Step
    from fencepost.ledger.postgres import PostgresLedger
    from fencepost.world.postgres import Answer

    Rows = Sequence[tuple[Any, ...]]

# How many sessions are kept for the next transaction: to open one costs more than to use it.
_MOST_SPARE = 8
# What the ledger's own statements are refused for that user code has no part in, or no more than
# others: nothing that they are asked is refused for anything else.
_OF_SERVER = LACKS | {"40P01", "55P03"}
# A commit that is being written takes a moment; one that never arrived takes as long as it likes.
_PAUSES = (0.0, 0.1, 0.3, 0.6, 1.0)


class PostgresJoined(Joined):
    """One transaction of one attempt, on a session of its own."""

    def __init__(self, ledger: PostgresLedger, attempt: Attempt) -> None:
        super().__init__(ledger, attempt, sql)
        self._spared, self._door = ledger.spare, ledger.leases.db
        self._session: Session | None = None
        self._patience = PATIENCE

    @property
    def connection(self) -> Any:
        """The ``psycopg.Connection``; None once the transaction was ended, by whomever."""
        session = self._session
        if session is None or (is_alive(session) and not is_open(session)):
            return None
        guest = lent(session)
        return None if guest.parted else guest

    def is_fault(self, error: BaseException) -> bool:
        """Say whether an error is of psycopg, and about our server: not about what it was asked."""
        return self._session is not None and is_of_server(error, self._session)

    def roll_back(self) -> None:
        """Undo what was not committed; nothing is left to do after the commit."""
        session = self._session
        if session is None:
            return
        try:
            if is_open(session):
                session.ask(sql.ROLLBACK, end=ends_after(PATIENCE))
        except (Cut, Refusal):
            session.close()  # which undoes it as well
        except BaseException:
            session.close()
            raise
        finally:
            self._give_back()

    # Beneath.

    def _begun(self, guard: Step, *, idle: float, longest: float) -> Rows:
        """Begin on a session that was spared, else on a new one."""
        self._patience = PATIENCE + idle
        limits = {"idle": f"{idle:.3f}s", "longest": f"{round(longest * 1000)}ms"}
        steps: list[Step] = [(sql.BEGIN, {}), (sql.LIMITS, limits), guard]
        while True:
            spare = self._spare()
            self._session = spare or self._door.connect()
            self._session.lent = True
            try:
                return self._all_asked(steps)[-1].rows
            except StoreUnavailable:
                if spare is None:
                    raise
                spare.close()  # it may have been cut while nobody looked at it

    def _asked(self, step: Step) -> Rows:
        return self._all_asked([step])[0].rows

    def _all_asked(self, steps: Sequence[Step]) -> list[Answer]:
        """Ask something before the commit.

        An item may be in the hands of an attempt that was stopped: until the server ends it.
        """
        session = self._open_session()
        try:
            return session.batch(steps, end=ends_after(self._patience))
        except Refusal as refusal:
            if refusal.fatal:
                session.close()
            raise self._why(refusal) from refusal
        except Cut as cut:
            raise self._door.told_of_cut(cut, changes=False) from cut
        except BaseException:
            session.close()  # a signal between question and answer: nobody must read the latter
            raise

    def _sealed(self, saved: Sequence[Step]) -> bool:
        session = self._open_session()
        sealed: Step = (sql.SEAL, {**self._own, "xid": self._which[0]})
        steps: list[Step] = [(sql.HURRY, {}), *saved, sealed, (sql.COMMIT, {})]
        try:
            answers = session.batch(steps, end=ends_after(PATIENCE))
        except Refusal as refusal:
            if refusal.fatal:
                self._find_out(self._door.told(refusal, changes=True))
                return False
            self.roll_back()
            raise self._why(refusal) from refusal
        except Cut as cut:
            self._find_out(self._door.told_of_cut(cut, changes=True))
            return False
        except BaseException:
            session.close()
            raise
        self._give_back()
        return bool(answers[-2].rows[0][1])

    def _spare(self) -> Session | None:
        while True:
            try:
                session = self._spared.pop()  # asked and taken in one: other threads want one too
            except IndexError:
                return None
            if session.broken:
                continue  # of a parent process, if we are a fork: it is not ours to say goodbye
            if not session.is_stale():
                return session
            session.close()

    def _give_back(self) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        if is_whole(session) and len(self._spared) < _MOST_SPARE:
            self._spared.append(session)
        else:
            session.close()

    def _open_session(self) -> Session:
        session = self._session
        if session is None or not is_alive(session):
            raise StoreUnavailable(
                f"PostgreSQL at {self._door.where} has ended the session: nothing was committed"
            )
        return session

    def _why(self, refusal: Refusal) -> Exception:
        """Return why the server has undone it."""
        code = refusal.code
        if code == "25P02":
            return Misuse(
                "a statement of the transaction has failed, and so PostgreSQL has undone it all: "
                "let the error out of the block, or try what may fail in a savepoint "
                "('with tx.connection.transaction():')"
            )
        if code == "40001":  # it was insisted in vain
            return self._why_not_ours()
        told = self._door.told(refusal, changes=False)
        if code[:2] in ("22", "23", "P0"):
            return in_drivers_words(refusal)
        if isinstance(told, StoreUnavailable) and not refusal.fatal and code not in _OF_SERVER:
            return in_drivers_words(
                refusal
            )  # of what user code has set, or wrote: checked only now
        return told

    def _find_out(self, error: FencepostError) -> None:
        """Return if a transaction was committed whose answer was lost; raise if not, or unknown.

        The server knows how each of its transactions ended, as long as it is the same server. One
        that did not hear of the commit goes on waiting for it: that is not known before its end.
        """
        self._give_back()
        fate: str | None = "in progress"
        give_up = self._drafts.boottime() + PATIENCE
        for pause in _PAUSES:
            if fate == "in progress":
                fate = self._fate(pause, give_up)
        if fate == "committed":
            return
        if fate == "aborted":
            raise StoreUnavailable(f"nothing was committed: {error}") from error
        raise OutcomeUnknown(str(error)) from error

    def _fate(self, pause: float, give_up: float) -> str | None:
        """Return how the transaction ended, after a moment; None if nobody can tell.

        Whatever cut one session may have cut others too: that is no reason not to ask again.
        """
        steps: list[Step] = [(sql.WAIT, {"pause": pause}), (sql.FATE, {"xid": self._which[0]})]
        try:
            fate, server = self._door.batch(steps, changes=False)[-1].rows[0]
        except FencepostError:
            return "in progress" if self._drafts.boottime() < give_up else None
        return str(fate) if server == self._which[1] else None
