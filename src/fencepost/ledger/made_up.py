"""Which slots of the past a lane makes up, and as which run of each."""

from __future__ import annotations

from fencepost.model.run import State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.ledger.planning import Lane
    from fencepost.model.run import RunRecord

_AGAIN = {"skip": frozenset[State](), "all": frozenset(State)}
_AGAIN["failed"] = frozenset({State.FAILED, State.TIMED_OUT, State.MISSED, State.SKIPPED})


def repeats(existing: str, run: RunRecord) -> bool:
    """Say whether a run that has ended is to be repeated."""
    return run.state.terminal and run.state in _AGAIN[existing]


def made_up_as(lane: Lane, slot: int, known: RunRecord | None, *, pruned: int) -> int | None:
    """Return which run of a slot a lane is to begin; None if none, for that was done before.

    A slot whose history is gone counts as done. To repeat it all the same takes a number that none
    of its forgotten runs can have had. What is owed is not forgotten before it was made up.
    """
    if known is not None:
        return known.key.rerun + 1 if repeats(lane.existing, known) else None
    if slot > pruned:
        return 0
    return int(lane.created_at) if lane.existing == "all" else None
