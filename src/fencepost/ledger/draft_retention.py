"""Old runs are forgotten a few jobs at a time, and so much of each in one transaction.

What is old is found without a lock, and once more when it is locked: a run that has ended never
changes again, but somebody may have begun to repeat it.
"""

from __future__ import annotations

from fencepost.ledger.draft_values import shelf_of
from fencepost.ledger.retention import KEPT_FOR, KEPT_RUNS, at_once, scopes_of
from fencepost.model.slot import RunKey

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from fencepost.ledger.draft import Draft
    from fencepost.ledger.draft_dialect import Step
    from fencepost.ledger.draft_ledger import DraftLedger
    from fencepost.ledger.retention import Slot

    Values = dict[str, Any]

# How many jobs one prune looks at: it goes on from there the next time.
_JOBS_PRUNED = 200


class DraftRetention:
    """What one process has yet to look at, and to delete."""

    def __init__(self, ledger: DraftLedger) -> None:
        self._ledger, self._sql = ledger, ledger.dialect.retention
        self._space = {"namespace": ledger.namespace}
        self._after = ""  # the last job that was looked at
        self._left: Values = {}  # what finds items of a slot that has more than go at once
        self._over = 0  # and how many those are

    def prune(self, most: int) -> int:
        """Forget what is old of the next jobs in turn; again of the same ones, if there is more."""
        if self._over > 0:
            self._ledger.changed(self._sql.FORGET_ITEMS, {**self._left, "most": most})
            self._over -= most
            return most
        page = {**self._space, "after": self._after, "most": _JOBS_PRUNED}
        jobs = [row[0] for row in self._ledger.read(self._sql.FIND_JOBS_THAT_RAN, page)]
        if not jobs:
            self._after = ""
            return 0
        wanted = {**self._space, "jobs": jobs, "kept": KEPT_RUNS, "age": KEPT_FOR}
        found = self._ledger.read(self._sql.FIND_FORGOTTEN, {**wanted, "most": most + 1})
        old = [RunKey(*row) for row in found]
        spans = self._ledger.read(self._sql.FIND_OLD_SPANS, {**wanted, "most": most})
        chosen, self._over = at_once(old, items=self._items_of(old), most=most)
        if chosen or spans:
            self._forget(chosen, spans, wanted, most)
        if self._over or len(chosen) < len(old) or len(spans) == most:
            return max(most, len(chosen))
        self._after = jobs[-1] if len(jobs) == _JOBS_PRUNED else ""
        return len(chosen)

    def _forget(
        self, chosen: Sequence[RunKey], spans: Sequence[tuple[Any, ...]], wanted: Values, most: int
    ) -> None:
        def inside(draft: Draft) -> None:
            keys: list[RunKey] = []
            if chosen:
                values = {**self._space, **self._ledger.dialect.runs.keys_of(chosen)}
                still = (self._sql.FIND_FORGOTTEN, {**wanted, "most": most + 1})
                _, rows = draft.ask([(self._sql.LOCK_OLD, values), still])
                here = {RunKey(*row) for row in rows}
                keys = [key for key in chosen if key in here]
            steps = [*self._runs_gone(keys, most), *self._spans_gone(spans)]
            draft.commit(*steps)

        self._ledger.drafted(inside)

    def _items_of(self, old: Sequence[RunKey]) -> Callable[[Slot], int]:
        """Return how many items the slots of some runs have."""
        scopes = scopes_of(old)
        shelves = {shelf_of(scope): slot for scope, slot in scopes.items()}
        counts: dict[Slot, int] = {}
        if shelves:
            asked = {**self._space, "shelves": list(shelves)}
            for shelf, count in self._ledger.read(self._sql.COUNT_ITEMS, asked):
                counts[shelves[shelf]] = counts.get(shelves[shelf], 0) + count
        return lambda slot: counts.get(slot, 0)

    def _runs_gone(self, keys: Sequence[RunKey], most: int) -> list[Step]:
        """Return what deletes runs, has their jobs remember it, and deletes their items."""
        if not keys:
            self._over = 0
            return []
        values = {**self._space, **self._ledger.dialect.runs.keys_of(keys)}
        steps = [(each, values) for each in (*self._sql.FORGET, self._sql.PRUNED)]
        scopes = scopes_of(keys)
        jobs, slots, manuals = (list(part) for part in zip(*scopes.values(), strict=True))
        self._left = {
            **self._space,
            "of_jobs": jobs,
            "of_slots": slots,
            "of_manuals": manuals,
            "scopes": list(scopes),
            "shelves": [shelf_of(scope) for scope in scopes],
        }
        return [*steps, (self._sql.FORGET_ITEMS, {**self._left, "most": most})]

    def _spans_gone(self, spans: Sequence[tuple[Any, ...]]) -> list[Step]:
        if not spans:
            return []
        jobs, firsts, marks = (list(part) for part in zip(*spans, strict=True))
        values = {**self._space, "span_jobs": jobs, "firsts": firsts, "marks": marks}
        return [(self._sql.FORGET_SPANS, values)]
