"""What a trigger answers: what became of the slot, and why."""

from __future__ import annotations

import json

from fencepost.model.named import NamedTuple
from fencepost.model.run import RunRecord, State
from fencepost.model.slot import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from fencepost.model.claim import Standing

_TRUE = frozenset({"succeeded", "already_done"})


class Outcome(NamedTuple):
    """What became of a slot. True only if its work is done: ``succeeded`` or ``already_done``.

    ``status`` is one of succeeded, failed, timed_out, cancelled, skipped, already_done, lost; or
    handed_off: another program has the run, and will tell how it ended.
    ``held_for`` and ``lease_left`` are the blocking holder's, in seconds.
    """

    status: str
    reason: str = ""
    run_id: str = ""
    slot: str = ""
    token: int = 0
    holder: str = ""
    result: Any = None
    error: str | None = None
    attempt: int = 0
    blocker: str = ""
    held_for: float | None = None
    lease_left: float | None = None

    def __bool__(self) -> bool:
        return self.status in _TRUE


def of_record(run: RunRecord, *, fresh: bool) -> Outcome:
    """Return the outcome of a run that has ended; ``fresh`` if it ended in answer to us."""
    state, key, holder, result = run.state, run.key, run.holder, run.result
    status = state._value_
    if state is State.SUCCEEDED and not fresh:
        status = "already_done"
    if state is State.MISSED:
        status = "skipped"
    return Outcome(
        status,
        run.reason,
        str(key),
        shown(key.slot),
        run.token,
        str(holder) if holder.host else "",
        None if result is None else json.loads(result),
        run.error,
        run.attempt,
        run.blocker,
    )


def held(run_id: str, *, slot: int, reason: str, holder: Standing | None, now: float) -> Outcome:
    """Return the outcome of a trigger that found the slot or its lock in other hands."""
    return Outcome(
        "skipped",
        reason=reason,
        run_id=run_id,
        slot=shown(slot),
        token=holder.token if holder else 0,
        holder=str(holder.holder) if holder else "",
        held_for=max(0.0, now - holder.since) if holder else None,
        lease_left=holder.expires_in if holder else None,
    )
