"""What this process, and this host, have seen of a ledger on a server, and whether it is that one.

The question is sent along with whatever begins a transaction that may have something run; the
answer is heard before anything is decided. See docs/decisions/0027.
"""

from __future__ import annotations

from fencepost.errors import FencepostError, LedgerDoubtful
from fencepost.model.copied import Life, Mark, Seen, doubt, from_a_line, in_a_line
from fencepost.model.named import Protocol
from fencepost.world.memo import Memo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from fencepost.ledger.draft import Draft
    from fencepost.model.run import RunRecord

    Rows = Sequence[tuple[Any, ...]]

# Tokens are microseconds: to write each of a thousand down would tell no more than the last.
_OFTEN_US = 1_000_000


class Asked(Protocol):
    """A ledger as its testimony asks it."""

    namespace: str

    def changed(self, statement: Any, values: dict[str, Any]) -> Rows:
        """Return the rows of a statement that changes something."""


class Sayings(Protocol):
    """The statements of one dialect: which ledger it is, that it is doubted, that it is not."""

    FIND_LIFE: Any
    DOUBT: Any
    ACCEPT: Any


class Testimony:
    """What was seen of one ledger."""

    def __init__(self, ledger: Asked, sayings: Sayings, *, where: str) -> None:
        self._ledger, self._sayings, self._where = ledger, sayings, where
        self._seen: Seen | None = None
        self._told = 0

    def ask_along(self, draft: Draft) -> None:
        """Have the next question of a draft ask for this too; raise if the answer is doubtful."""
        seen = self._seen
        draft.along(self._question(seen), lambda rows: self._hear(draft, seen, rows))

    def as_seen(self) -> dict[str, Any] | None:
        """Return what a statement must find to have no doubt; None if nothing was seen yet."""
        seen = self._seen
        if seen is None:
            return None
        _, asked = self._question(seen)
        own = {"incarnation": asked.pop("incarnation"), "accepted": seen.accepted}
        return {**own, **{f"seen_{name}": value for name, value in asked.items()}}

    def tell(self, run: RunRecord, *, ended: bool = False) -> None:
        """Remember a commit that was confirmed just now."""
        if self._seen is not None:
            mark = Mark(run.key, run.token, run.starts, ended=ended)
            self._seen = self._seen._replace(mark=mark)
            if run.token >= self._told + _OFTEN_US:
                self._write_down()

    def accept(self) -> None:
        """Take the ledger as it is from now on, by an operator's word."""
        self._ledger.changed(self._sayings.ACCEPT, {})

    def close(self) -> None:
        """Leave what was seen last to those who come later."""
        if self._seen is not None and self._seen.mark is not None:
            self._write_down()

    # Beneath.

    def _question(self, seen: Seen | None) -> tuple[Any, dict[str, Any]]:
        mark = None if seen is None else seen.mark
        key = ("", 0, 0, 0) if mark is None else mark.key
        values = dict(zip(("job", "slot", "manual", "rerun"), key, strict=True))
        return self._sayings.FIND_LIFE, {
            **values,
            "namespace": self._ledger.namespace,
            "incarnation": "" if seen is None else seen.incarnation,
            "token": 0 if mark is None else mark.token,
            "starts": 0 if mark is None else mark.starts,
            "ended": mark is not None and mark.ended,
        }

    def _hear(self, draft: Draft, seen: Seen | None, rows: Rows) -> None:
        found = Life(*rows[0])
        if seen is None:  # this process knows nothing yet; but perhaps its host does
            seen = self._noted(found.incarnation)
            if seen is not None and seen.mark is not None:
                (rows,) = draft.ask([self._question(seen)])  # not on another session: all may do so
                found = Life(*rows[0])
        why = doubt(seen, found)
        if why:
            self._refuse(why, found)
        if seen is None or seen[:2] != found[:2]:
            seen = Seen(found.incarnation, found.accepted)
        if self._seen is None or self._seen[:2] != seen[:2]:
            self._seen = seen

    def _refuse(self, why: str, found: Life) -> None:
        """Raise; and have everybody else know, who may have seen nothing of it."""
        refusal = LedgerDoubtful(
            f"the ledger at {self._where} {why}; what ran since may run again, so nothing runs "
            "until somebody has looked and says: fencepost migrate --accept-copy"
        )
        if why != found.doubt:
            try:
                values = {"why": why, "accepted": found.accepted}
                self._ledger.changed(self._sayings.DOUBT, values)
            except FencepostError as error:
                raise refusal from error
        raise refusal

    def _noted(self, incarnation: str) -> Seen | None:
        line = self._memo(incarnation).read()
        seen = None if line is None else from_a_line(line)
        return seen if seen is not None and seen.incarnation == incarnation else None

    def _write_down(self) -> None:
        seen = self._seen
        assert seen is not None, "what is written down was seen"
        assert seen.mark is not None, "and there is a commit in it"
        self._told = seen.mark.token
        self._memo(seen.incarnation).write(in_a_line(seen))

    def _memo(self, incarnation: str) -> Memo:
        return Memo(f"{incarnation}/{self._ledger.namespace}")
