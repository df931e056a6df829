"""What a draft says of many rows at once, by the column, where its server has words for that.

Nearly all that a tick does is usual: runs begin under leases that are free, attempts end for good,
jobs pass a slot. Said as whole rows by name it costs both sides several times as much.
"""

from __future__ import annotations

from collections import Counter

from fencepost.ledger.api import NOTHING
from fencepost.ledger.draft_values import storable
from fencepost.model.ending import ended_record
from fencepost.model.named import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from fencepost.ledger.api import Attempt
    from fencepost.ledger.draft_dialect import Step
    from fencepost.ledger.draft_values import DraftLease
    from fencepost.ledger.planning import End
    from fencepost.model.definition import JobRecord
    from fencepost.model.ending import Settled
    from fencepost.model.lease import Holder
    from fencepost.model.run import RunRecord
    from fencepost.model.slot import RunKey

    Values = dict[str, Any]
    # A lease that is granted, by its name, and as it was before if there was one.
    Granted = tuple[str, DraftLease, DraftLease | None]

# What may change of a run while an attempt has it: by what the attempt tells, or by a cancel.
CHANGEABLE = ("cancel_at", "streak", "strikes", "checkpoint", "done", "total", "saves")


class Words(NamedTuple):
    """The statements of a server that has them."""

    end_all: Any
    pass_all: Any
    begin_all: Any
    grant_first: Any
    grant_again: Any


class Usual:
    """The usual part of one draft. Without ``words`` there is none: all is written by the row."""

    def __init__(self, words: Words | None, namespace: str) -> None:
        self._words, self._space = words, {"namespace": namespace}
        self._begun: dict[RunKey, RunRecord] = {}
        self._granted: dict[str, DraftLease] = {}
        self._by: Holder | None = None  # the process whose runs begin

    @property
    def granting(self) -> tuple[Any, ...]:
        """The statements that answer with what leases lean on."""
        return () if self._words is None else (self._words.grant_first, self._words.grant_again)

    # Ends.

    def ends_apart(self, ends: Sequence[End]) -> tuple[list[End], list[End]]:
        """Return which ends can be told in one statement, and which are to be decided about.

        Of an attempt that is said to have ended twice, the first word counts: one by one.
        """
        told = Counter(end.attempt.nonce for end in ends)
        usual: list[End] = []
        others: list[End] = []
        for end in ends:
            known = self._words is not None and end.attempt.run is not None
            short = known and end.settled.state.terminal and end.report == NOTHING
            (usual if short and told[end.attempt.nonce] == 1 else others).append(end)
        return usual, others

    def end_all(self, ends: Sequence[End]) -> Step:
        """Return what ends attempts for good, and answers of which that is true now."""
        assert self._words is not None, "without words no end is usual"
        jobs, slots, manuals, reruns = zip(*(end.attempt.key for end in ends), strict=True)
        settled = [storable_end(end.settled) for end in ends]
        return self._words.end_all, {
            **self._space,
            "jobs": jobs,
            "slots": slots,
            "manuals": manuals,
            "reruns": reruns,
            "tokens": [end.attempt.token for end in ends],
            "nonces": [end.attempt.nonce for end in ends],
            "states": [each.state.value for each in settled],
            "reasons": [each.reason for each in settled],
            "results": [each.result for each in settled],
            "errors": [each.error for each in settled],
        }

    # Beginnings.

    def begins(self, run: RunRecord, lease: DraftLease) -> None:
        """Take note of a run that has just begun, and of the lease that it was granted."""
        if self._words is None:
            return
        if self._by is None:
            self._by = run.holder
        if self._by[1:] == run.holder[1:]:
            self._begun[run.key], self._granted[run.lease] = run, lease

    def has_begun(self, run: RunRecord) -> bool:
        """Say whether a run is what it was when it began."""
        return self._begun.get(run.key) is run

    def is_granted(self, name: str, lease: DraftLease) -> bool:
        """Say whether a lease is what it was when it was granted to a run that begins."""
        return self._granted.get(name) is lease

    def begun(self, runs: Sequence[RunRecord]) -> list[Step]:
        """Return what makes runs that have just begun, if there are any."""
        if self._words is None or not runs:
            return []
        jobs, slots, manuals, reruns = zip(*(run.key for run in runs), strict=True)
        values = {
            "jobs": jobs,
            "slots": slots,
            "manuals": manuals,
            "reruns": reruns,
            "locks": [run.lock for run in runs],
            "tokens": [run.token for run in runs],
            "nonces": [run.holder.nonce for run in runs],
            "origins": [run.trigger for run in runs],
            "times": [run.started_at for run in runs],
            "epochs": [run.epoch for run in runs],
            "count": len(runs),
        }
        return [(self._words.begin_all, {**self._space, **self._process(), **values})]

    def granted(
        self, grants: Sequence[Granted], *, now: float, terms: dict[str, object]
    ) -> list[Step]:
        """Return what grants their leases, from ``now`` on."""
        if self._words is None:
            return []
        known = [one for one in grants if one[2] is not None]
        new = [one for one in grants if one[2] is None]
        return [
            (statement, {**self._space, **self._process(), **terms, **_granted(some, now=now)})
            for statement, some in (
                (self._words.grant_again, known),
                (self._words.grant_first, new),
            )
            if some
        ]

    def _process(self) -> Values:
        assert self._by is not None, "somebody has begun"
        return {
            "host": storable(self._by.host),
            "pid": self._by.pid,
            "version": storable(self._by.version),
        }

    # Jobs.

    def has_passed(self, job: JobRecord, before: JobRecord) -> bool:
        """Say whether all that has changed of a job is that slots have passed."""
        return self._words is not None and job.has_only_passed(before)

    def passed(self, jobs: Sequence[tuple[JobRecord, Any]]) -> list[Step]:
        """Return what lets jobs pass slots, if there are any."""
        if self._words is None or not jobs:
            return []
        values = {
            "marks": [job.watermark for job, _ in jobs],
            "due": [job.next_due for job, _ in jobs],
            "owed": [job.owed for job, _ in jobs],
            "versions": [version for _, version in jobs],
            "count": len(jobs),
        }
        return [(self._words.pass_all, values)]


def storable_end(settled: Settled) -> Settled:
    """Return an end as servers can keep it."""
    reason, error = storable(settled.reason), settled.error and storable(settled.error)
    if reason is settled.reason and error is settled.error:
        return settled
    return settled._replace(reason=reason, error=error)


def ended(attempt: Attempt, settled: Settled, now: float, *changed: Any) -> RunRecord:
    """Return a run as the end of its attempt has left it, with what had ``changed`` meanwhile."""
    run = attempt.run
    assert run is not None, "else the end is not of the usual kind"
    before = (run.cancel_at, run.streak, run.strikes, run.checkpoint)
    if changed != (*before, run.done, run.total, run.saves):
        run = run._replace(**dict(zip(CHANGEABLE, changed, strict=True)))
    return ended_record(run, storable_end(settled), now=now)


def _granted(grants: Sequence[Granted], *, now: float) -> Values:
    leases = [lease for _, lease, _ in grants]
    return {
        "names": [name for name, _, _ in grants],
        "tokens": [lease.token for lease in leases],
        "nonces": [lease.holder.nonce for lease in leases],
        "ttls": [round(lease.ttl * 1e6) for lease in leases],
        "sinces": [round(lease.since * 1e6) for lease in leases],
        "seen_tokens": [before and before.token for _, _, before in grants],
        "seen_beats": [before and before.beat for _, _, before in grants],
        "now_us": round(now * 1e6),
        "count": len(leases),
    }
