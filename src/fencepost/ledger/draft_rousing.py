"""Who makes work that instances would find later than they could says so, along with its commit.

To say something costs every other such commit in the database a wait. So what comes due by its
time is left to those who look, and what is plain (a claim, a beat, an end) says nothing. An end
is not plain if somebody is known to wait for it: whoever begins to wait leaves a mark with the run
in its way, and the server speaks for the run that has one.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.ledger.draft import Draft
    from fencepost.ledger.draft_dialect import Step


def rouse(draft: Draft, word: str) -> None:
    """Say a word to all instances once the draft is committed, where they can listen."""
    dialect = draft.dialect
    if dialect.rouse is not None:
        values = {"channel": dialect.channel, "word": word}
        draft.also.append(lambda: [(dialect.rouse, values)])


def marks(draft: Draft) -> list[Step]:
    """Return what marks the runs that something begins to wait for.

    It insists that they are as the draft leaves them: with one that has ended meanwhile there is
    nothing to wait for, and all of it is decided anew.
    """
    if draft.dialect.mark_awaited is None or not draft.awaited:
        return []
    runs = [run for key in sorted(draft.awaited) if (run := draft.run(key)) is not None]
    live = [run for run in runs if not run.state.terminal]
    if not live:
        return []
    _, keys = draft.runs_by([run.key for run in live])
    states = {"states": [run.state.value for run in live], "tokens": [run.token for run in live]}
    return [(draft.dialect.mark_awaited, {**keys, **states, "count": len(live)})]
