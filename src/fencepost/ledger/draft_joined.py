"""A transaction of a server's ledger that statements of user code join.

It locks nothing of ours while user code is at work: its keeper beats, whoever wants to cancel can,
and whoever finds the lease ended takes over. The last statement before the commit, in the same
round trip, locks the run and its lease, and undoes everything unless both are still the attempt's:
so either it was committed before a later claim, or it never was. See docs/decisions/0027.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from fencepost.errors import FencepostError, LeaseLost, Misuse
from fencepost.ledger.draft_values import item_of, place_of, run_of, shelf_of
from fencepost.model.item import Found, ItemState, find
from fencepost.model.named import Protocol
from fencepost.model.run import State
from fencepost.model.slot import parsed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from fencepost.ledger.api import Attempt, Report
    from fencepost.ledger.draft_dialect import Step
    from fencepost.ledger.draft_ledger import DraftLedger

    Rows = Sequence[tuple[Any, ...]]


class Sayings(Protocol):
    """What one dialect says in such a transaction.

    ``GUARD`` answers, for a run that is the attempt's, when a cancel was asked for, whether its
    lease stands, and which transaction of which server this is. ``ONCE`` has an item done that is
    new, and answers whether the run is the attempt's and whether the item was new. ``ONCE_MORE``
    has one done that is known. ``STANDS`` answers, outside, whether the lease is the attempt's.
    """

    GUARD: Any
    ONCE: Any
    ONCE_MORE: Any
    STANDS: Any


class Joined(ABC):
    """One transaction of one attempt, on a session of its own."""

    def __init__(self, ledger: DraftLedger, attempt: Attempt, sayings: Sayings) -> None:
        self._drafts, self._attempt, self._sayings = ledger, attempt, sayings
        self._sql = ledger.dialect.runs
        self._own = {**ledger.own(attempt), "lease": attempt.lease}
        self._which: tuple[Any, ...] = ()  # transaction, should nobody hear how it ended

    @property
    @abstractmethod
    def connection(self) -> Any:
        """The driver's connection; None once the transaction was ended, by whomever."""

    def execute(self, sql: str, parameters: Any) -> Any:
        """Execute a statement of user code; return the driver's cursor."""
        return self.connection.execute(sql, parameters)

    def executemany(self, sql: str, parameters: Iterable[Any]) -> Any:
        """Execute a statement of user code for many rows; return the driver's cursor."""
        cursor = self.connection.cursor()
        cursor.executemany(sql, parameters)
        return cursor

    def begin(self, *, idle: float, longest: float) -> bool:
        """Begin, and see that the run is ours; say whether a cancel was asked for.

        The server ends a transaction in which nothing was asked for ``idle`` seconds, and a
        statement that takes ``longest``; for 0 it never does.
        """
        rows = self._begun((self._sayings.GUARD, self._own), idle=idle, longest=longest)
        if not rows:
            self._refuse()
        cancel_at, held, *which = rows[0]
        self._which = tuple(which)
        if not held:
            raise self._ran_out()
        return bool(cancel_at)

    def once(self, scope: str, item: str, *, call: str, repeat: bool) -> Found:
        """Have an item done, if it is ours to do; say what was found."""
        values = {
            **self._own,
            "place": place_of(scope, item),
            "shelf": shelf_of(scope),
            "scope": scope,
            "item": item,
            "run": str(self._attempt.key),
            "call": call,
        }
        ours, made = self._asked((self._sayings.ONCE, values))[0]
        if not ours:
            self._refuse()
        return Found.FIRST if made else self._once_more(values, repeat=repeat)

    def commit(self, checkpoint: str | None, report: Report) -> bool:
        """Commit if run and lease are still ours; say whether a cancel was asked for."""
        saved: list[Step] = []
        if checkpoint is not None:
            values = self._drafts.own(self._attempt, report)
            saved.append((self._sql.SAVE, {**values, "checkpoint": checkpoint, "order": None}))
        return self._sealed(saved)

    @abstractmethod
    def is_fault(self, error: BaseException) -> bool:
        """Say whether an error is of the driver, and about our server: not about what it was asked.

        Errors of other connections never are, and what is not known for sure is not.
        """

    @abstractmethod
    def roll_back(self) -> None:
        """Undo what was not committed; nothing is left to do after the commit."""

    @abstractmethod
    def _begun(self, guard: Step, *, idle: float, longest: float) -> Rows:
        """Begin on a session with these limits; return what the guard answers."""

    @abstractmethod
    def _asked(self, step: Step) -> Rows:
        """Ask something before the commit: whatever goes wrong, nothing has happened."""

    @abstractmethod
    def _sealed(self, saved: Sequence[Step]) -> bool:
        """Save, see that run and lease are ours with both locked, and commit."""

    def _once_more(self, values: dict[str, Any], *, repeat: bool) -> Found:
        """Have an item done that was begun before, unless that is in doubt."""
        rows = self._asked((self._sql.FIND_SOME_ITEMS, {**values, "places": [values["place"]]}))
        if not rows:  # whoever had it was undone meanwhile
            return self.once(values["scope"], values["item"], call=values["call"], repeat=repeat)
        item = item_of(rows[0])
        living = False
        if item.state is ItemState.BEGUN:
            wanted = {**self._sql.keys_of([parsed(item.run)]), "namespace": values["namespace"]}
            runs = [run_of(row) for row in self._asked((self._sql.FIND_SOME, wanted))]
            living = any(run.state is State.RUNNING and run.token == item.token for run in runs)
        token, call = self._attempt.token, values["call"]
        found = find(item, token=token, call=call, begun_by_living=living, repeat=repeat)
        if found.go:
            self._asked((self._sayings.ONCE_MORE, values))
        return found

    def _why_not_ours(self) -> FencepostError:
        """Return why the commit was refused by what it insists on."""
        rows = self._drafts.read(self._sayings.STANDS, self._own)
        if not rows:
            self._refuse()
        if not rows[0][0]:
            return self._ran_out()
        return Misuse(
            "the transaction was ended and another one begun in its place: what it wrote before is "
            "not guarded; leave BEGIN, COMMIT and ROLLBACK to run.transaction()"
        )

    def _refuse(self) -> None:
        """Have the stale writer on record, and raise."""
        self.roll_back()
        self._drafts.refuse(self._attempt, "transaction")

    def _ran_out(self) -> LeaseLost:
        return LeaseLost(self._attempt.lease, token=self._attempt.token, reason="it ran out")
