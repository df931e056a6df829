"""Which resources the fence of a run names, so that one attempt of it shuts out the ones before.

Tokens are compared per resource. The attempts of an exclusive run share the resource of their lock,
and so do the runs of other slots. Runs that may overlap have permits with tokens of their own: such
a run has a resource of its own, whatever permit an attempt had. If an attempt has another lease
than the attempt before, the ledger keeps the former one, and the fence shuts it there as well.
"""

from __future__ import annotations

from fencepost.model.name import base, resource
from fencepost.model.named import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fencepost.model.run import RunEvent, RunRecord
    from fencepost.model.slot import RunKey

# What is noted when a run is claimed under another lease than its attempt before had: that lease.
LEASE_CHANGED = "lease_changed"


class Former(NamedTuple):
    """The lease of an earlier attempt of a run, and its highest token there."""

    lease: str
    token: int


class Mark(NamedTuple):
    """A token that a fence leaves at a resource.

    If it is not the holder's ``own``, it only shuts out lower ones: a higher one may be there.
    """

    resource: str
    token: int
    own: bool = True


class Fenced(NamedTuple):
    """The resources of a fence: the first is the one that other services are told.

    ``also`` are compared with as well. ``formers`` are the resources of earlier attempts.
    """

    resource: str
    also: tuple[str, ...] = ()
    formers: tuple[Former, ...] = ()

    def marks(self, token: int) -> list[Mark]:
        """Return what a fence leaves, in the one order in which every fence takes the rows."""
        own = [Mark(name, token) for name in (self.resource, *self.also)]
        return sorted([*own, *(Mark(name, seen + 1, False) for name, seen in self.formers)])  # noqa: FBT003


def moved_from(own: RunRecord, lease: str) -> bool:
    """Say whether a run that is claimed under ``lease`` had another one before."""
    return own.lease not in ("", lease)


def formers_of(events: Iterable[RunEvent]) -> tuple[Former, ...]:
    """Return the leases that earlier attempts of a run had, from what is on record of it."""
    highest: dict[str, int] = {}
    for event in events:
        if event.what == LEASE_CHANGED:
            highest[event.detail] = max(event.token, highest.get(event.detail, 0))
    return tuple(Former(*one) for one in sorted(highest.items()))


def fence_of(namespace: str, run: RunRecord, formers: Sequence[Former] = ()) -> Fenced:
    """Return the resources of a run's fence.

    A permit's own resource is compared with as well: a fence of before runs had resources of their
    own knows no other name.
    """
    name = _resource_of(namespace, run.key, run.lease)
    lease = resource(namespace, name=run.lease)
    also = () if lease == name else (lease,)
    earlier: dict[str, int] = {}
    for former in formers:
        for one in (
            _resource_of(namespace, run.key, former.lease),
            resource(namespace, name=former.lease),
        ):
            if one not in (name, *also):
                earlier[one] = max(former.token, earlier.get(one, 0))
    return Fenced(name, also, tuple(Former(*one) for one in sorted(earlier.items())))


def _resource_of(namespace: str, key: RunKey, lease: str) -> str:
    """Return the resource that attempts under this lease share.

    No lease can have the name of a run's resource: it has a slash where this has a colon.
    """
    permit = base(lease) != lease
    return f"{namespace}:{key}" if permit else resource(namespace, name=lease)
