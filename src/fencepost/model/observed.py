"""Whether the times that a job was given fit the times that its runs take."""

from __future__ import annotations

from fencepost.model.duration import shown
from fencepost.model.named import NamedTuple
from fencepost.model.symptom import Severity, Symptom

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from fencepost.model.run import RunEvent

# A run may well take this much of its timeout; with more, the next slow day ends it.
_CLOSE = 0.8
# A lease may be this many times as long as the longest run, or this long: then nobody minds.
_MANY_TIMES, _SHORT = 20, 60.0


class Observed(NamedTuple):
    """What a job was given, and how its newest runs went. Seconds; None if it has no timeout."""

    job: str
    lease: float
    timeout: float | None
    took: Sequence[float]  # those that succeeded
    timed_out: int
    notices_death: bool
    outlived: int = 0  # how many were taken over from an attempt that lived on


def outlived(events: Iterable[RunEvent]) -> bool:
    """Say whether an attempt of this run was given up for lost, and wrote something after that.

    It may also have lost its lease to an operator: that is not on record here.
    """
    told = [(event.what, event.token) for event in events]
    lost = {token for what, token in told if what == "attempt_lost"}
    return any(what == "stale_write" and token in lost for what, token in told)


def misfits(seen: Observed) -> Iterator[Symptom]:
    """Say which of a job's times do not fit what was observed."""
    longest = max(seen.took, default=0.0)
    if seen.timeout is not None and seen.timed_out:
        yield Symptom(
            "job.timed_out",
            Severity.RISK,
            f"{seen.timed_out} of the newest runs of job {seen.job!r} used up their timeout of "
            f"{shown(seen.timeout)}",
            "give it more time, or find out what it waits for",
        )
    elif seen.timeout is not None and longest > _CLOSE * seen.timeout:
        yield Symptom(
            "job.timeout",
            Severity.RISK,
            f"job {seen.job!r} may take {shown(seen.timeout)}, and has taken {shown(longest)}",
            f"give it a timeout of {shown(longest * 2)} or more",
        )
    if seen.outlived:
        yield Symptom(
            "job.outlived",
            Severity.RISK,
            f"{seen.outlived} of the newest runs of job {seen.job!r} were taken over while the "
            f"attempt before was still at work: its signs of life came too late for a lease of "
            f"{shown(seen.lease)}, unless somebody broke it",
            "give it a longer lease, or find out what held it up (a machine that slept, a busy "
            "process, a slow way to the store), and fence what must not be written twice",
        )
    if not seen.notices_death and seen.took and seen.lease > max(_SHORT, longest * _MANY_TIMES):
        yield Symptom(
            "job.lease",
            Severity.NOTE,
            f"job {seen.job!r} has a lease of {shown(seen.lease)}, and its runs take "
            f"{shown(longest)} at most: if its process vanishes, everybody waits for that long",
            "a lease is renewed while it is held: a shorter one does no harm",
        )
