"""What ``fencepost exec`` says of a run on standard error: one line, and log lines if asked to."""

from __future__ import annotations

import os
import sys
import time

from fencepost.cli.showing import plain, when
from fencepost.logs import facts, line
from fencepost.model.duration import shown
from fencepost.model.event import JobEvent
from fencepost.model.slot import shown as instant

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.model.event import LeaseEvent
    from fencepost.model.outcome import Outcome
    from fencepost.model.run import RunRecord

_REASONS = {
    "lock_held": "another run was active",
    "waiting_full": "another one waits already",
    "quarantined": "its job is in quarantine, and `fencepost resume` releases it",
    "paused": "its job is paused",
    "waiting_retry": "it failed, and waits for its next try",
    "backing_off": "its last attempt vanished, and it waits for its next one",
    "too_many_before": "too many older runs had to be resumed first",
}


def log_line(event: LeaseEvent | JobEvent) -> None:
    """Write one event to standard error, with the time in UTC."""
    now = time.gmtime()
    if os.environ.get("FENCEPOST_LOG") == "json":
        import json

        what, pairs = facts(event)
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", now)
        text = json.dumps({"at": at, "event": what, **pairs}, default=str)
    else:
        text = f"{time.strftime('%H:%M:%S', now)} {line(event)}"
    print(text, file=sys.stderr, flush=True)


def event_of(outcome: Outcome) -> JobEvent | None:
    """Return the event for what no attempt of ours has told: that there was none, and why."""
    job = outcome.run_id.partition("@")[0]
    if outcome.reason == "poison":
        return JobEvent("quarantined", job, outcome.run_id)
    if outcome.status != "skipped":
        return None
    more: list[tuple[str, object]] = [("reason", outcome.reason)]
    if outcome.holder:
        more += [
            ("holder", outcome.holder),
            ("held_for", f"{outcome.held_for or 0:.1f}s"),
            ("lease_left", f"{outcome.lease_left or 0:.1f}s"),
        ]
    return JobEvent("skipped", job, outcome.run_id, outcome.token, tuple(more))


def why_not_run(outcome: Outcome, run: RunRecord | None, *, now: float) -> str:
    """Return the sentence for a run that this command line did not run."""
    name = f"run {outcome.run_id!r}"
    if run is not None and run.state.terminal and outcome.status != "skipped":
        error = f" ({plain(run.error or run.reason)})" if run.error or run.reason else ""
        by = f" by {run.holder}" if run.holder.host else ""
        at = when(run.ended_at, now=now)
        told = f"{name} is {run.state.value}{error} since {at}"
        if outcome.status == "already_done":
            told = f"{name} was already done{by} at {at}"
    elif outcome.holder:
        since = instant(int(now - (outcome.held_for or 0.0)))
        held = f"held by {outcome.holder} since {since} ({shown(outcome.held_for or 0.0)})"
        other = outcome.blocker and outcome.blocker != outcome.run_id
        told = f"{name} was skipped: {outcome.blocker} is {held}" if other else f"{name} is {held}"
    else:
        reason = _REASONS.get(outcome.reason, outcome.reason)
        told = f"{name} is not due here: {reason}"
        if outcome.status == "skipped" and run is not None and run.state.terminal:
            told = f"{name} was skipped {when(run.ended_at, now=now)}: {reason}"
    return f"{told}; the command was not run"
