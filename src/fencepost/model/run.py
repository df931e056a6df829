"""A run is the one execution that a slot gets. THE TABLE below says which lives it can have.

Docs, ledgers and the simulator's checker all read this table; SQL ledgers make the database itself
refuse what is not in it. Terminal states are for ever.
"""

from __future__ import annotations

import enum

from fencepost.model.lease import Holder
from fencepost.model.named import NamedTuple
from fencepost.model.slot import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from fencepost.model.slot import RunKey


class State(enum.StrEnum):
    """What is true of a run now."""

    PENDING = "pending"  # due, or waiting for its turn
    RUNNING = "running"  # an attempt has it, under a token
    WAITING_RETRY = "waiting_retry"  # the last attempt failed, another one is due later
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"  # not run, on purpose
    MISSED = "missed"  # not run, by accident

    @property
    def terminal(self) -> bool:
        """Whether nothing can happen to the run any more."""
        return self in TERMINAL


# Why a run that runs has no process of ours that vouches for it: see ``Ledger.hand_over``.
HANDED_OFF = "handed_off"
# Why a run that runs will soon have no process: see ``Ledger.order_stop``.
STOPPING = "stopping"
# What is noted of an attempt whose permit ran out and went to another run before it had ended.
LAPSED = "lapsed"

P, R, W = State.PENDING, State.RUNNING, State.WAITING_RETRY
TERMINAL = frozenset(State) - {P, R, W}

# Where a run may begin: due and waiting, taken at once, or decided without ever running.
FIRST = frozenset({P, R, State.SKIPPED, State.FAILED, State.MISSED})

# From each state that is not terminal, what may come next, and what that means.
TABLE: dict[State, dict[State, str]] = {
    P: {
        R: "claimed",
        P: "waits on",
        State.SKIPPED: "policy",
        State.MISSED: "deadline passed",
        State.FAILED: "overlap, poison or loss",
        State.CANCELLED: "cancelled",
    },
    R: {
        R: "beats, saves, or is taken over with a higher token",
        P: "lost or given back",
        W: "error, tries left",
        State.SUCCEEDED: "done",
        State.FAILED: "error, no tries left",
        State.TIMED_OUT: "out of time",
        State.CANCELLED: "cancelled",
        State.SKIPPED: "nothing to do",
    },
    W: {
        R: "claimed again",
        W: "waits on",
        P: "retry due",
        State.FAILED: "superseded",
        State.CANCELLED: "cancelled",
    },
}


def legal(before: State | None, after: State) -> bool:
    """Say whether a run that is ``before`` (None: not there yet) may become ``after``."""
    return after in (FIRST if before is None else TABLE.get(before, {}))


class RunRecord(NamedTuple):
    """A run as the ledger has it. Instants are seconds of the ledger's wall clock.

    ``lock`` is what it must not overlap with, ``lease`` the lease of its newest attempt (the lock
    itself, or one of its permits). ``starts`` are counted in the claim, before user code. A
    *loss* is an attempt that vanished; ``streak`` counts them since the checkpoint last advanced,
    ``strikes`` only those that had nobody beside them to blame. ``saves`` is the newest of the
    attempt's saves that has arrived.
    """

    key: RunKey
    state: State
    lock: str
    lease: str = ""
    token: int = 0
    holder: Holder = Holder("", "", 0, "")
    reason: str = ""
    blocker: str = ""
    trigger: str = "trigger"
    created_at: float = 0.0
    started_at: float = 0.0
    ended_at: float = 0.0
    not_before: float = 0.0
    beat_at: float = 0.0
    cancel_at: float = 0.0
    starts: int = 0
    losses: int = 0
    releases: int = 0
    streak: int = 0
    strikes: int = 0
    solitary: bool = False
    checkpoint: str | None = None
    done: int | None = None
    total: int | None = None
    result: str | None = None
    error: str | None = None
    saves: int = 0
    epoch: int = 0

    @property
    def attempt(self) -> int:
        """Which try this is. Losses and clean releases are nobody's fault and do not count."""
        return self.starts - self.losses - self.releases

    @property
    def active(self) -> bool:
        """Whether it has begun and not ended: it is never skipped, and goes before newer slots."""
        return not self.state.terminal and (self.state is not P or self.starts > 0)

    def was_ended_by(self, token: int, nonce: str) -> bool:
        """Say whether it was that attempt itself that ended it: then nobody came too late."""
        ours = (self.token, self.holder.nonce) == (token, nonce)
        return ours and self.state is not R

    @property
    def handed_off(self) -> bool:
        """Whether its attempt is in the hands of another program, which will tell how it ended."""
        return self.state is R and self.reason == HANDED_OFF

    @property
    def ordered_to_stop(self) -> bool:
        """Whether the process of its attempt was ordered to stop: that it is gone is no loss."""
        return self.state is R and self.reason == STOPPING

    @property
    def fresh(self) -> bool:
        """Whether no attempt has ever begun."""
        return self.state is P and self.starts == 0


class RunEvent(NamedTuple):
    """Something about a run that its record alone would not tell."""

    key: RunKey
    at: float
    what: str
    token: int = 0
    holder: str = ""
    detail: str = ""


def newest(
    runs: Iterable[RunRecord], *, job: str | None, limit: int, states: Sequence[State]
) -> list[RunRecord]:
    """Return the newest of ``runs`` by slot: of one job or of all, in some states or in any."""
    chosen = [
        run for run in runs if job in (None, run.key.job) and (not states or run.state in states)
    ]
    chosen.sort(key=lambda run: (run.key.slot, *run.key), reverse=True)
    return chosen[:limit]


def why_lost(run: RunRecord) -> str:
    """Say why an attempt no longer has its run."""
    if run.state is State.RUNNING:
        return f"{run.holder} has it now with token {run.token}"
    return f"it is {run.state.value}" + (f" ({run.reason})" if run.reason else "")


def diagram() -> str:
    """Return the table as a Mermaid state diagram, for the docs."""
    lines = ["stateDiagram-v2"]
    lines += [f"    [*] --> {state}" for state in State if state in FIRST]
    lines += [
        f"    {before} --> {after}: {why}"
        for before, follows in TABLE.items()
        for after, why in follows.items()
    ]
    lines += [f"    {state} --> [*]" for state in State if state.terminal]
    return "\n".join(lines)


def public(record: RunRecord) -> dict[str, Any]:
    """Return what programs may know of a run, as JSON has it."""
    import json

    def told(text: str | None) -> Any:
        return None if text is None else json.loads(text)

    return {
        "run": str(record.key),
        "job": record.key.job,
        "slot": shown(record.key.slot),
        "state": record.state.value,
        "reason": record.reason or None,
        "attempt": record.attempt,
        "starts": record.starts,
        "losses": record.losses,
        "token": record.token or None,
        "holder": str(record.holder) if record.holder.host else None,
        "version": record.holder.version or None,
        "lock": record.lock,
        "trigger": record.trigger,
        "blocker": record.blocker or None,
        "created_at": record.created_at,
        "started_at": record.started_at or None,
        "ended_at": record.ended_at or None,
        "not_before": record.not_before or None,
        "cancel_requested_at": record.cancel_at or None,
        "progress": None if record.done is None else {"done": record.done, "total": record.total},
        "checkpoint": told(record.checkpoint),
        "result": told(record.result),
        "error": record.error,
    }
