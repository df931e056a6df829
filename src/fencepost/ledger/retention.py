"""Which runs may be forgotten. That they were is never forgotten: the watermark stays."""

from __future__ import annotations

from fencepost.model.run import State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from fencepost.model.run import RunRecord

# Of each job so many of the newest runs are kept, and all that are younger than this.
KEPT_RUNS, KEPT_FOR = 100, 30 * 86400.0
# What went wrong is kept for twice as long.
_WRONG = frozenset({State.FAILED, State.TIMED_OUT})


def forgotten(runs: Iterable[RunRecord], *, now: float) -> list[RunRecord]:
    """Return those of one job's runs that retention lets go, oldest first."""
    newest_first = sorted(runs, key=lambda run: run.key[1:], reverse=True)
    old = [
        run
        for place, run in enumerate(newest_first)
        if run.state.terminal
        and run.key.slot < now - KEPT_FOR
        and place >= KEPT_RUNS * longer(run.state)
        and run.ended_at < now - KEPT_FOR * longer(run.state)
    ]
    return old[::-1]


def longer(state: State) -> int:
    """Return how many times the usual a run that ended so is kept."""
    return 2 if state in _WRONG else 1
