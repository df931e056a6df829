"""A run that is handed off has so long to be heard of: until its next beat, or its timeout."""

from __future__ import annotations

from fencepost.model.lease import LONGEST_TTL, SHORTEST_TTL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.model.policy import Policy
    from fencepost.model.run import RunRecord

# The lease of a handed-off run ends by one clock, its timeout by another, and the claim that
# granted it took a moment.
_SLACK = 1.0


def handed_ttl(policy: Policy, *, left: float | None) -> float:
    """Return how long a handed-off run keeps its lease from now on.

    ``left`` is what is left of its timeout. Where it is to be heard of more often, until then;
    where it has neither a timeout nor beats, a day.
    """
    limits = [limit for limit in (left, policy.handoff_beat) if limit is not None]
    return max(SHORTEST_TTL, min(limits, default=LONGEST_TTL))


def time_left(run: RunRecord, policy: Policy, *, now: float) -> float | None:
    """Return what is left of an attempt's timeout at the ledger's time ``now``; None if all is."""
    return None if policy.timeout is None else run.started_at + policy.timeout - now


def out_of_time(run: RunRecord, policy: Policy, *, now: float) -> bool:
    """Say whether an attempt has used up its timeout."""
    left = time_left(run, policy, now=now)
    return left is not None and left <= _SLACK
