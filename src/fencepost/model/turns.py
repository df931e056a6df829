"""Jobs that share a lock and are due together take turns."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from fencepost.model.definition import JobRecord
    from fencepost.model.run import RunRecord

# How many of the newest runs of a job tell when it last began one.
NEWEST = 100


def in_turn(jobs: Iterable[JobRecord], began: Mapping[str, float]) -> list[JobRecord]:
    """Return jobs that share a lock in the order in which each may claim its slot.

    The job goes first that began a run least recently (``began``, by its name), so of ``n`` jobs
    each goes first within ``n`` slots that all of them have. A job that never began goes before
    the others; what is left undecided the time when they were due decides, and then the name.
    """
    return sorted(jobs, key=lambda job: (began.get(job.job, 0.0), job.next_due or 0.0, job.job))


def by_patience(runs: Iterable[RunRecord]) -> list[RunRecord]:
    """Return runs that wait for one lock, the one first that has waited for longest."""
    return sorted(runs, key=lambda run: (run.created_at, run.key))
