"""Which definition is in force while two versions of a program are up at the same time.

A cohort is the live instances that share a definition of a job. The youngest cohort wins: so a new
version takes over at once, and an old instance that restarts cannot bring the old one back. After
a rollback the older definition wins as soon as the newer cohort is gone.
"""

from __future__ import annotations

from fencepost.model.named import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

# An instance that was not heard of for so long is taken for gone; restarts are quicker.
GONE_AFTER = 60.0
# And a job that nobody has known for so long is an orphan.
ORPHAN_AFTER = 900.0


class Cohort(NamedTuple):
    """The instances that share one definition, and when the newest of them was last heard of."""

    digest: str
    since: float
    seen_at: float
    build: int = 0


def joined(
    known: Cohort | None, digest: str, build: int, *, now: float, orphan_after: float
) -> Cohort:
    """Return a cohort as a new member leaves it: as old as it was, unless it had died out."""
    if known is None or now - known.seen_at >= orphan_after:
        return Cohort(digest, now, now, build)
    return known._replace(seen_at=max(now, known.seen_at), build=max(build, known.build))


def winner(cohorts: Iterable[Cohort], *, now: float) -> Cohort | None:
    """Return the cohort whose definition is in force; None if all of them are gone.

    A build number goes before age: it is what the user says is newer.
    """
    present = [cohort for cohort in cohorts if now - cohort.seen_at < GONE_AFTER]
    return max(present, key=lambda one: (one.build, one.since, one.digest), default=None)
