"""The lease of an attempt as its body is given it: to ask and to fence with, not to give back."""

from __future__ import annotations

from fencepost.lease import Lease
from fencepost.model.fenced import fence_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost.flows.course import Course
    from fencepost.flows.keep import Hold
    from fencepost.model.fenced import Fenced


def lend(course: Course, *, namespace: str, boottime: Callable[[], float]) -> Lease:
    """Return the lease of an attempt. The course keeps it, whatever user code does with it."""
    run, formers = course.run, course.formers  # not the course itself: it keeps the lease

    def fenced() -> Fenced:
        return fence_of(namespace, run, formers)

    lease = Lease(course.hold, namespace=namespace, boottime=boottime, drop=_keep_it, fenced=fenced)
    course.lent = lease
    return lease


def _keep_it(_: Hold) -> None:
    """Leave the lease to the attempt: it outlives any object that user code drops."""
