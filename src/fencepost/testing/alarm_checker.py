"""What must be true of a history of alarms, whatever happened to those who fired them.

A generation commits at most once, by whoever claimed it last. Nobody acts under a token that was
taken over, and no handler begins without a claim, nor more of them in one process than it has
workers. What fires alone has no neighbours in its process. In the end each last generation is
committed, dead for a recorded reason, or cleared.
"""

from __future__ import annotations

from collections import Counter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from fencepost.testing.history import Event


def check_alarms(history: Sequence[Event], *, workers: int = 3) -> list[str]:
    """Return every broken promise in a history of alarms."""
    checker = _Checker(workers)
    promises = {
        "claimed": checker.claimed,
        "began": checker.began,
        "over": checker.over,
        "acted": checker.acted,
        "committed": checker.committed,
        "broken": checker.took_away,
        "error": checker.error,
    }
    for event in history:
        if event.what in promises:
            promises[event.what](event, (event.name, event.number))
    return checker.broken + _unfinished(history, checker.done)


class _Checker:
    """One method for each event that a promise is about."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.broken: list[str] = []
        self.done: set[tuple[str, int]] = set()
        self._newest: dict[str, int] = {}  # by key, the token of the newest claim
        self._excused: dict[str, int] = {}  # up to which token an operator has taken it away
        self._claims: Counter[tuple[str, int]] = Counter()
        self._begun: Counter[tuple[str, int]] = Counter()
        self._inside: dict[str, dict[str, bool]] = {}  # by process, which fire now, and if alone

    def claimed(self, event: Event, which: tuple[str, int]) -> None:
        """Check that tokens grow, and that what was committed never fires again."""
        self._refuse(event, event.token <= self._newest.get(event.name, 0), "its token fell")
        self._refuse(event, which in self.done, "it fires though it was committed")
        self._newest[event.name] = event.token
        self._claims[which] += 1

    def began(self, event: Event, which: tuple[str, int]) -> None:
        """Check that there are no more handlers than claims, and than may be in one process."""
        self._begun[which] += 1
        unclaimed = self._begun[which] > self._claims[which]
        self._refuse(event, unclaimed, "a handler began without a claim")
        inside = self._inside.setdefault(event.node, {})
        inside[event.holder] = event.detail == "alone"
        self._refuse(event, len(inside) > self._workers, "more handlers than workers")
        beside = len(inside) > 1 and any(inside.values())
        self._refuse(event, beside, "one that fires alone has a neighbour")

    def over(self, event: Event, _: tuple[str, int]) -> None:
        """Take note that a handler has ended."""
        del self._inside[event.node][event.holder]

    def acted(self, event: Event, _: tuple[str, int]) -> None:
        """Check that nobody acts who was taken over."""
        over = self._excused.get(event.name, 0) < event.token < self._newest.get(event.name, 0)
        self._refuse(event, over, "a handler acted though it was taken over")

    def committed(self, event: Event, which: tuple[str, int]) -> None:
        """Check that a generation commits once, by its last handler."""
        self._refuse(event, which in self.done, "it was committed twice")
        zombie = event.token != self._newest.get(event.name)
        self._refuse(event, zombie, "a zombie committed it")
        self.done.add(which)

    def took_away(self, event: Event, _: tuple[str, int]) -> None:
        """Take note of an operator who does not wait until the handler has heard of it."""
        key = event.name.rpartition("/")[2]
        self._excused[key] = self._newest.get(key, 0)

    def error(self, event: Event, _: tuple[str, int]) -> None:
        """Find that a flow ended with an error that nobody expects."""
        self.broken.append(event.detail)

    def _refuse(self, event: Event, wrong: bool, why: str) -> None:  # noqa: FBT001 -- the fact itself
        if wrong:
            self.broken.append(f"{event.at:.3f} {event.name}#{event.number}: {why}")


def _unfinished(history: Sequence[Event], done: set[tuple[str, int]]) -> list[str]:
    rows = {event.name: event for event in history if event.what == "row"}
    broken = [
        f"{row.name} is {row.state} at the end {row.detail}"
        for row in rows.values()
        if row.state in ("armed", "firing") or (row.detail and row.state == "dead")
    ]
    last = {event.name: event for event in history if event.what in ("set", "cleared")}
    return broken + [
        f"{key} was set to {event.number}, which is neither there nor committed"
        for key, event in last.items()
        if event.what == "set" and key not in rows and (key, event.number) not in done
    ]
