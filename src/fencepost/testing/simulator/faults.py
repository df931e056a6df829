"""Every fault is a knob of one frozen value; nothing else in the simulator invents trouble."""

from __future__ import annotations

from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from random import Random
    from typing import Any


class Faults(NamedTuple):
    """How much goes wrong: shares of all requests or acquisitions, and mean counts for one storm.

    Lengths of time are in ttls, because what is long depends on them. Skew and drift are the
    clocks': hours of difference between wall clocks, and the most by which a second may be off.
    """

    # Of a request: it never arrives; it is carried out but the reply never comes; it is carried
    # out twice, the second time perhaps much later; it arrives late, maybe after its sender left.
    lost_requests: float = 0.0
    lost_replies: float = 0.0
    duplicates: float = 0.0
    delays: float = 0.0
    lateness: float = 3.0

    # Of a caller: it loses interest while it asks for a lease, as a cancelled task does.
    cancellations: float = 0.0

    # Of a process: it dies and another one starts; it stands still, as under SIGSTOP.
    crashes: float = 0.0
    pauses: float = 0.0
    longest_pause: float = 2.5
    deaths_noticed: bool = False

    # Of the store: it says that it is away; it restarts, and says nothing at all.
    outages: float = 0.0
    restarts: float = 0.0
    longest_outage: float = 1.5

    # Of people: an operator breaks a lease; somebody deletes a row.
    breaks: float = 0.0
    deletions: float = 0.0

    # Of clocks.
    wall_steps: float = 0.0
    skew_hours: float = 0.0
    drift: float = 0.0


NONE = Faults()

ALL = Faults(
    lost_requests=0.04,
    lost_replies=0.04,
    duplicates=0.04,
    delays=0.04,
    cancellations=0.1,
    crashes=2.0,
    pauses=3.0,
    deaths_noticed=True,
    outages=0.7,
    restarts=0.5,
    breaks=0.7,
    deletions=0.4,
    wall_steps=2.0,
    skew_hours=4.0,
    drift=0.009,  # a little less than what a lease allows for
)

_KEPT = 0.75
_LENGTHS = frozenset({"lateness", "longest_pause", "longest_outage"})


def some_of(faults: Faults, dice: Random) -> Faults:
    """Return the faults of one storm: some knobs at zero, so that rare combinations meet.

    With every fault in every run each would be hidden by another.
    """
    kept: dict[str, Any] = {
        name: value if name in _LENGTHS or dice.random() < _KEPT else type(value)(0)
        for name, value in zip(Faults._fields, faults, strict=True)
    }
    return Faults(**kept)
