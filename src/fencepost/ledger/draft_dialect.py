"""What the ledgers of SQL servers do not share: how a server is asked, and in which words.

A dialect is four files of statements. Those of one kind have equal names in every dialect, take
the same values by name, and answer with the same columns: ``tests/ledger/test_dialects.py``.
"""

from __future__ import annotations

from fencepost.model.named import NamedTuple, Protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType
    from typing import Any, TypeVar

    from fencepost.ledger.api import Attempt
    from fencepost.ledger.draft_joined import Joined
    from fencepost.ledger.draft_usual import Words

    T = TypeVar("T")

    # A statement, as the door of its server understands it, and the values that it takes by name.
    Step = tuple[Any, Mapping[str, Any]]


class Dialect(NamedTuple):
    """One kind of server, and what it is told."""

    kind: str
    runs: ModuleType
    leases: ModuleType
    plans: ModuleType
    retention: ModuleType
    # The longest name of a job in bytes: an entry of an index has its bounds.
    longest: int
    # How rows are given to a statement.
    packed: Callable[[list[dict[str, Any]]], object]
    # What says the usual by the column: where a server has no words for it, whole rows are read
    # and written.
    usual: Words | None = None
    # Where instances listen, what says something there, and what marks a run that is waited for:
    # None of it where the server carries no words.
    channel: str = ""
    rouse: Any = None
    mark_awaited: Any = None


class Answer(Protocol):
    """What one statement returned."""

    @property
    def rows(self) -> Sequence[tuple[Any, ...]]:
        """Its rows."""


class Transaction(Protocol):
    """An open transaction; it begins with the first question, in the same round trip."""

    def batch(self, steps: Sequence[Step], *, last: bool = False) -> Sequence[Answer]:
        """Send several statements in one round trip; with ``last`` that of the commit as well."""


class Doors(Protocol):
    """How a server is asked. Each question sees to it that the tables are there."""

    def read(self, statement: Any, values: dict[str, Any], /) -> Sequence[tuple[Any, ...]]:
        """Return the rows of a statement that changes nothing."""

    def changed(self, statement: Any, values: dict[str, Any], /) -> Sequence[tuple[Any, ...]]:
        """Return the rows of a statement that changes something, all or nothing."""

    def transacted(self, work: Callable[[Transaction], T], /) -> T:
        """Run ``work`` in one transaction, and again if it lost against another one."""

    def join(self, attempt: Attempt, /) -> Joined:
        """Return a transaction that statements of user code may join."""
