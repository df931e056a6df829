"""A fault is an error of the store itself: no code is to blame, and the next try may succeed.

Alarms and runs treat faults alike: a fault uses up no try, and is tried again for as long as it
takes, each time after a longer pause, up to a ceiling.
"""

from __future__ import annotations

import hashlib

from fencepost.errors import OutcomeUnknown, StoreUnavailable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fencepost.model.run import RunEvent

# Why a run is given back whose attempt met a fault of the ledger's own database. Also the event
# that tells how many attempts did so in a row, and from which checkpoint they went on.
STORE_FAULT = "store_fault"

FAULTS: tuple[type[BaseException], ...] = (OutcomeUnknown, StoreUnavailable)
# What is nobody's fault is tried again for as long as it takes, but no more often than this.
FAULT_BASE, FAULT_CEILING = 1.0, 1020.0
# How much longer than planned a pause may be, so that those who failed together part.
JITTER = 0.25


def pause_after(faults: int, *, dice: float) -> float:
    """Return how long to wait after that many faults in a row."""
    return grown(FAULT_BASE, 2.0, FAULT_CEILING, faults, dice)


def faults_noted(count: int, checkpoint: str | None) -> str:
    """Return what is kept with a run of its newest fault: number ``count`` at this checkpoint."""
    return f"{count} in a row at checkpoint {_brief(checkpoint)}"


def faults_before(events: Iterable[RunEvent], checkpoint: str | None) -> int:
    """Return how many faults a run has met since its checkpoint became this one.

    Whatever else has ended attempts meanwhile changes nothing: neither does it count.
    """
    noted = [event.detail for event in events if event.what == STORE_FAULT]
    if not noted or not noted[-1].endswith(f" {_brief(checkpoint)}"):
        return 0
    count = noted[-1].partition(" ")[0]
    return int(count) if count.isdecimal() else 0


def _brief(checkpoint: str | None) -> str:
    """Return what a checkpoint is known by, however long it is."""
    return "-" if checkpoint is None else hashlib.sha256(checkpoint.encode()).hexdigest()[:12]


def grown(base: float, factor: float, ceiling: float, count: int, dice: float) -> float:
    """Return the pause number ``count``: each by a factor longer, and up to 25 % more."""
    try:
        full = min(ceiling, base * factor ** (count - 1))
    except OverflowError:
        full = ceiling
    return full * (1.0 + JITTER * dice)


def behind(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and those that it was raised from."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
