"""What the ledgers of SQL servers do not share: what is said to the server, in which words.

A dialect is three files of statements. Those of one kind have equal names in every dialect, take
the same values by name, and answer with the same columns: ``tests/ledger/test_dialects.py``.
"""

from __future__ import annotations

from fencepost.model.named import NamedTuple, Protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType
    from typing import Any

    from fencepost.ledger.draft_usual import Words

    # A statement, as the door of its server understands it, and the values that it takes by name.
    Step = tuple[Any, Mapping[str, Any]]


class Dialect(NamedTuple):
    """One kind of server, and what it is told."""

    kind: str
    runs: ModuleType
    leases: ModuleType
    plans: ModuleType
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
