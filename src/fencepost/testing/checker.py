"""Five promises, and a pure function that finds where a history breaks one.

one holder   at any store time at most one lease of a name is valid; it ends by release, break,
             deletion, the crash of its holder, or at its end as renewed
tokens grow  each grant of a name has a higher token than every earlier one
fence holds  a resource never admits a lower token after a higher one
proof        nobody acts on a lease that is not valid, by the store's time, at that moment
progress     whoever wants a lease is granted it in time, and no flow fails of itself

An operator who breaks a lease, or deletes its record, takes it from a holder who cannot know yet.
So until that lease would have ended by itself its holder's acts are excused: the fence is what
protects a resource then. Give ``check`` the events of your own logs in the format of ``history``.
"""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

from fencepost.model.name import base

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from fencepost.testing.history import Event

# Stores that keep whole microseconds end a lease up to two of them early.
_GRAIN = 2e-6
# Events of a process, not of a lease: they explain much, so they are always shown.
_OF_PROCESSES = frozenset({"started", "crashed", "paused", "stepped", "away", "back", "calm"})


class Violation(NamedTuple):
    """One broken promise: which, where in the history, and what a person should read first."""

    rule: str
    says: str
    event: Event
    position: int

    def __str__(self) -> str:
        return f"{self.rule}: {self.says}"


def check(history: Iterable[Event]) -> list[Violation]:
    """Return every broken promise, in the order of time; nothing if all were kept.

    Events may come in any order, as merged logs do; those of the same instant count as given.
    """
    reader = _Reader()
    for position, event in enumerate(in_order(history)):
        reader.read(position, event)
    return reader.violations


def in_order(history: Iterable[Event]) -> list[Event]:
    """Return the history by time: the order that a ``Violation``'s position counts in."""
    return sorted(history, key=attrgetter("at"))


def relevant(history: Iterable[Event], violation: Violation, *, most: int = 40) -> list[Event]:
    """Return the last events up to the violation that have to do with it."""
    subject, run = base(violation.event.name), violation.event.run
    before = in_order(history)[: violation.position + 1]
    return [
        event
        for event in before
        if event.what in _OF_PROCESSES
        or (subject and base(event.name) == subject)
        or (run and event.run == run)
    ][-most:]


class _Lease:
    """The newest lease of a name, as far as it has been read."""

    __slots__ = ("ended", "holder", "node", "token", "until")

    def __init__(self, granted: Event) -> None:
        self.node, self.holder, self.token = granted.node, granted.holder, granted.token
        self.until = granted.until
        self.ended = ""  # why, if it ended before its end

    def valid(self, at: float) -> bool:
        return not self.ended and at < self.until


class _Reader:
    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self._leases: dict[str, _Lease] = {}
        self._highest: dict[str, int] = {}
        self._admitted: dict[str, int] = {}
        self._crashed: set[str] = set()
        self._taken_away: dict[tuple[str, str, int], float] = {}
        self._wanted: dict[tuple[str, str], Event] = {}
        self._position = 0
        self._event: Event
        self._readers = {
            "granted": self._granted,
            "claimed": self._granted,  # a run's claim is a grant of its lease
            "renewed": self._renewed,
            "adopted": self._renewed,
            "beat": self._renewed,
            "released": self._released,
            "broken": self._broken,
            "deleted": self._deleted,
            "acted": self._acted,
            "admitted": self._admitted_by_fence,
            "crashed": self._has_crashed,
            "wanted": self._is_wanted,
            "failed": self._has_failed,
        }

    def read(self, position: int, event: Event) -> None:
        self._position, self._event = position, event
        if self._wanted:
            self._miss_deadlines(event.at)
        reader = self._readers.get(event.what)
        if reader is not None:
            reader(event)

    def _found(self, rule: str, says: str, *, about: Event | None = None) -> None:
        event = about or self._event
        self.violations.append(Violation(rule, says, event, self._position))

    def _granted(self, event: Event) -> None:
        lease = self._leases.get(event.name)
        if lease is not None and (lease.holder, lease.token) == (event.holder, event.token):
            self._renewed(event)  # the same grant, told twice
            return
        if lease is not None and lease.valid(event.at + _GRAIN) and lease.node not in self._crashed:
            self._found(
                "one holder",
                f"{event.name!r} was granted to {event.holder} at {event.at:.6f}, "
                f"but {lease.holder} has it until {lease.until:.6f}",
            )
        self._raise_token(event)
        self._leases[event.name] = _Lease(event)
        if self._wanted:
            self._wanted.pop((base(event.name), event.node), None)

    def _renewed(self, event: Event) -> None:
        lease = self._leases.get(event.name)
        if lease is None:  # the log begins in the middle
            self._leases[event.name] = _Lease(event)
        elif (lease.holder, lease.token) != (event.holder, event.token):
            if lease.valid(event.at) and lease.node not in self._crashed:
                self._found(
                    "one holder",
                    f"{event.name!r} was renewed for {event.holder} at {event.at:.6f}, "
                    f"but {lease.holder} has it until {lease.until:.6f}",
                )
        elif lease.ended:
            self._found(
                "one holder",
                f"{event.name!r} was renewed for {event.holder} at {event.at:.6f}, "
                f"but {lease.ended}",
            )
        else:
            lease.until = event.until

    def _released(self, event: Event) -> None:
        lease = self._leases.get(event.name)
        if lease is None:
            return
        if lease.holder == event.holder:
            lease.ended = lease.ended or f"it was released at {event.at:.6f}"
        elif lease.valid(event.at) and lease.node not in self._crashed:
            self._found(
                "one holder",
                f"{event.name!r} was released by {event.holder} at {event.at:.6f}, "
                f"but {lease.holder} has it until {lease.until:.6f}",
            )
            lease.ended = f"{event.holder} released it at {event.at:.6f}"

    def _broken(self, event: Event) -> None:
        self._take_away(event, f"it was broken at {event.at:.6f}")
        self._raise_token(event)

    def _deleted(self, event: Event) -> None:
        self._take_away(event, f"its record was deleted at {event.at:.6f}")

    def _take_away(self, event: Event, why: str) -> None:
        lease = self._leases.get(event.name)
        if lease is not None and not lease.ended:
            lease.ended = why
            self._taken_away[event.name, lease.holder, lease.token] = lease.until

    def _raise_token(self, event: Event) -> None:
        highest = self._highest.get(event.name, 0)
        if event.token <= highest:
            self._found(
                "tokens grow",
                f"{event.name!r} was {event.what} with token {event.token} at {event.at:.6f}, "
                f"after token {highest}",
            )
        else:
            self._highest[event.name] = event.token

    def _acted(self, event: Event) -> None:
        lease = self._leases.get(event.name)
        if lease is None:  # the log begins in the middle
            return
        if (lease.holder, lease.token) == (event.holder, event.token) and lease.valid(event.at):
            return
        if event.at < self._taken_away.get((event.name, event.holder, event.token), 0.0):
            return
        if (lease.holder, lease.token) != (event.holder, event.token):
            why = f"{lease.holder} had been granted it with token {lease.token}"
        else:
            why = lease.ended or f"it had run out at {lease.until:.6f}"
        self._found(
            "proof",
            f"{event.holder} acted on {event.name!r} with token {event.token} "
            f"at {event.at:.6f}, but {why}",
        )

    def _admitted_by_fence(self, event: Event) -> None:
        highest = self._admitted.get(event.name, 0)
        if event.token < highest:
            self._found(
                "fence holds",
                f"{event.name!r} admitted token {event.token} at {event.at:.6f}, "
                f"after token {highest}",
            )
        else:
            self._admitted[event.name] = event.token

    def _has_crashed(self, event: Event) -> None:
        self._crashed.add(event.node)
        for key in [key for key in self._wanted if key[1] == event.node]:
            del self._wanted[key]

    def _is_wanted(self, event: Event) -> None:
        self._wanted[event.name, event.node] = event

    def _has_failed(self, event: Event) -> None:
        self._found("progress", f"a flow failed at {event.at:.6f}: {event.detail}")

    def _miss_deadlines(self, now: float) -> None:
        for key in [key for key, event in self._wanted.items() if event.until < now]:
            wanted = self._wanted.pop(key)
            self._found(
                "progress",
                f"{wanted.node} wanted {wanted.name!r} from {wanted.at:.6f} on "
                f"and had not been granted it by {wanted.until:.6f}",
                about=wanted,
            )
