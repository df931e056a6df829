"""A prune looks at 200 jobs and deletes at most `most` runs and items in one transaction.

Only a slot that has more runs than that is deleted at once all the same. What is old is found
without a lock, and once more when it is locked: a run that has ended never changes again, but
a backfill may have begun to repeat it.
"""

from __future__ import annotations

from fencepost.ledger.draft_values import place_of, shelf_of
from fencepost.ledger.retention import KEPT_FOR, KEPT_RUNS, LEFT, at_once, scopes_of
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
    """Deletes what is old, of some jobs after the others."""

    def __init__(self, ledger: DraftLedger) -> None:
        self._ledger, self._sql = ledger, ledger.dialect.retention
        self._space = {"namespace": ledger.namespace}
        self._left = {**self._space, "left_scope": LEFT, "left_shelf": shelf_of(LEFT)}
        self._after = ""  # the last job that was looked at

    def prune(self, most: int) -> int:
        """Forget what is old of the next jobs in turn; again of the same ones, if there is more."""
        left = self._ledger.read(self._sql.FIND_LEFT, self._left)
        if left:
            self._forget_left({scope: (job, slot, own) for scope, job, slot, own in left}, most)
            return most
        page = {**self._space, "after": self._after, "most": _JOBS_PRUNED}
        jobs = [row[0] for row in self._ledger.read(self._sql.FIND_JOBS_THAT_RAN, page)]
        if not jobs:
            self._after = ""
            return 0
        wanted = {**self._space, "jobs": jobs, "kept": KEPT_RUNS, "age": KEPT_FOR, "most": most + 1}
        old = [RunKey(*row) for row in self._ledger.read(self._sql.FIND_FORGOTTEN, wanted)]
        spans = self._ledger.read(self._sql.FIND_OLD_SPANS, {**wanted, "most": most})
        chosen, too_many = at_once(old, items=self._items_of(old), most=most)
        if chosen or spans:
            self._forget(chosen, spans, wanted, 0 if too_many else most)
        if too_many or len(chosen) < len(old) or len(spans) == most:
            return max(most, len(chosen))
        self._after = jobs[-1] if len(jobs) == _JOBS_PRUNED else ""
        return len(chosen)

    def _forget_left(self, scopes: dict[str, Slot], most: int) -> None:
        """Delete items whose runs are gone, and what records that they are left."""
        values = {**self._items_in(scopes), "most": most}
        steps = [(each, values) for each in (self._sql.FORGET_ITEMS, self._sql.FORGET_LEFT)]
        self._ledger.drafted(lambda draft: draft.commit(*steps))

    def _forget(
        self, chosen: Sequence[RunKey], spans: Sequence[tuple[Any, ...]], wanted: Values, items: int
    ) -> None:
        def inside(draft: Draft) -> None:
            keys: list[RunKey] = []
            if chosen:
                values = {**self._space, **self._ledger.dialect.runs.keys_of(chosen)}
                still = (self._sql.FIND_FORGOTTEN, wanted)
                _, rows = draft.ask([(self._sql.LOCK_OLD, values), still])
                here = {RunKey(*row) for row in rows}
                keys = [key for key in chosen if key in here]
            steps = [*self._runs_gone(keys, items), *self._spans_gone(spans)]
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

    def _runs_gone(self, keys: Sequence[RunKey], items: int) -> list[Step]:
        """Return what deletes runs, has their jobs remember it, and deletes so many items."""
        if not keys:
            return []
        values = {**self._space, **self._ledger.dialect.runs.keys_of(keys)}
        steps = [(each, values) for each in (*self._sql.FORGET, self._sql.PRUNED)]
        found = {**self._items_in(scopes_of(keys)), "most": items}
        return [*steps, (self._sql.FORGET_ITEMS, found), (self._sql.KEEP_LEFT, found)]

    def _items_in(self, scopes: dict[str, Slot]) -> Values:
        """Return what finds the items of scopes, and what records that some are left."""
        jobs, slots, manuals = (list(part) for part in zip(*scopes.values(), strict=True))
        return {
            **self._left,
            "of_jobs": jobs,
            "of_slots": slots,
            "of_manuals": manuals,
            "scopes": list(scopes),
            "shelves": [shelf_of(scope) for scope in scopes],
            "places": [place_of(LEFT, scope) for scope in scopes],
        }

    def _spans_gone(self, spans: Sequence[tuple[Any, ...]]) -> list[Step]:
        if not spans:
            return []
        jobs, firsts, marks = (list(part) for part in zip(*spans, strict=True))
        values = {**self._space, "span_jobs": jobs, "firsts": firsts, "marks": marks}
        return [(self._sql.FORGET_SPANS, values)]
