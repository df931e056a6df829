"""Which runs of a job are deleted, and when. The job's `pruned` keeps the newest slot that was.

A run is deleted once it is old, and there are many newer ones. The runs of one slot go together:
of a run that failed and the one that repeated it with success, the former must not remain alone.
With them go their events, counters and items, but not what is in doubt, nor what the whole job has
done once for all its slots. Ranges go once the mark has passed them: up to there nothing is made.
As long as slots are being made up, all runs from there on stay: whether a slot was done is then
known from its runs, and never from the mark alone.

Runs go before their items: without its runs a slot counts as done, and is not repeated; with its
runs and without its items it would repeat effects. A slot may have more items than are deleted at
once. Then the commit that deletes its runs records the scopes of those items in the ledger, and
any process deletes them later.
"""

from __future__ import annotations

from math import inf

from fencepost.model.run import State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from fencepost.ledger.planning import Lane
    from fencepost.model.run import RunRecord
    from fencepost.model.slot import RunKey

    Slot = tuple[str, int, int]  # of a job; and which run of its own, if it is one

# Of each job so many of the newest runs are kept, and all that are younger than this.
KEPT_RUNS, KEPT_FOR = 100, 30 * 86400.0
# The scopes whose items are yet to be deleted are recorded as items of this scope, which no job can
# have, each with the slot of its runs.
LEFT = ""
# What went wrong is kept for twice as long.
_WRONG = frozenset({State.FAILED, State.TIMED_OUT})


def forgotten(
    runs: Iterable[RunRecord], *, now: float, lanes: Iterable[Lane] = ()
) -> list[RunRecord]:
    """Return those of one job's runs that retention lets go, oldest first.

    ``lanes`` are all that the job ever had to make up.
    """
    newest_first = sorted(runs, key=lambda run: run.key[1:], reverse=True)
    made_up_from = min((lane.start for lane in lanes if not lane.ended_at), default=inf)
    kept = {
        run.key[:3]
        for place, run in enumerate(newest_first)
        if not _is_old(run, place, now=now) or run.key.slot >= made_up_from
    }
    return [run for run in reversed(newest_first) if run.key[:3] not in kept]


def _is_old(run: RunRecord, place: int, *, now: float) -> bool:
    """Say whether a run may go that has so many newer ones, as far as it goes by itself."""
    return (
        run.state.terminal
        and run.key.slot < now - KEPT_FOR
        and place >= KEPT_RUNS * longer(run.state)
        and run.ended_at < now - KEPT_FOR * longer(run.state)
    )


def longer(state: State) -> int:
    """Return how many times the usual a run that ended so is kept."""
    return 2 if state in _WRONG else 1


def at_once(
    old: Sequence[RunKey], *, items: Callable[[Slot], int], most: int
) -> tuple[list[RunKey], bool]:
    """Return which of some old runs to delete in one transaction, and whether they are too many.

    They and their items are ``most`` at most, and no slot is deleted in parts. A slot that has more
    runs and items is too much: its runs are deleted alone, and its items later.
    """
    slots: dict[Slot, list[RunKey]] = {}
    for key in old:
        slots.setdefault(key[:3], []).append(key)
    chosen: list[RunKey] = []
    cost = 0
    for slot, keys in slots.items():
        cost += len(keys) + items(slot)
        if cost > most:
            return (chosen, False) if chosen else (keys, True)
        chosen += keys
    return chosen, False


def scopes_of(keys: Iterable[RunKey]) -> dict[str, Slot]:
    """Return the scopes of the items that runs may have had, each with its slot."""
    return {str(each): key[:3] for key in keys for each in (key._replace(rerun=0), key)}
