"""A fault is an error of the store itself: no code is to blame, and the next try may succeed.

Alarms and runs treat faults alike: a fault uses up no try, and is tried again for as long as it
takes, each time after a longer pause, up to a ceiling.
"""

from __future__ import annotations

from fencepost.errors import OutcomeUnknown, StoreUnavailable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

FAULTS: tuple[type[BaseException], ...] = (OutcomeUnknown, StoreUnavailable)
# What is nobody's fault is tried again for as long as it takes, but no more often than this.
FAULT_BASE, FAULT_CEILING = 1.0, 1020.0
# How much longer than planned a pause may be, so that those who failed together part.
JITTER = 0.25


def pause_after(faults: int, *, dice: float) -> float:
    """Return how long to wait after that many faults in a row."""
    return grown(FAULT_BASE, 2.0, FAULT_CEILING, faults, dice)


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
