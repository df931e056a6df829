"""What a flow may ask of a machine: the clocks, a sleep, a call, an event. Three worlds answer.

A *blocking* world answers without ever suspending, so ``finish`` drives a flow with one send. An
*asyncio* world suspends on the running loop. A *simulated* world suspends to a seeded scheduler.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from contextlib import AbstractContextManager
    from typing import Any, Self

    Flow = Coroutine[Any, Any, "T"]

T = TypeVar("T")


class Clocks(Protocol):
    """Three clocks with three jobs; none can stand in for another."""

    def wall(self) -> float:
        """Seconds since 1970. For people and slots; it may step, so it never decides expiry."""

    def boottime(self) -> float:
        """Seconds that also pass while the machine sleeps. For a holder's trust in its lease."""

    def era(self) -> str | None:
        """Which run of ``boottime`` this is, or None if the machine does not say."""

    def namespace(self) -> str:
        """Which time namespace ``boottime`` is read in: two of them disagree about the instant."""


class Signal(Protocol):
    """A flag that one flow raises and another waits for."""

    def set(self) -> None:
        """Raise the flag; safe from any thread."""

    def clear(self) -> None:
        """Lower the flag."""

    async def wait(self, timeout: float | None) -> bool:
        """Wait until the flag is up, at most ``timeout`` seconds; say whether it is."""


class Lanes(Protocol):
    """Flows that run beside the one that begins them; whoever leaves waits until all are over."""

    async def __aenter__(self) -> Self:
        """Open the lanes."""

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait for all that was begun; whoever is cancelled has it cancelled first."""

    def begin(self, flow: Flow[None]) -> None:
        """Begin a flow; raise ``NoThread`` if nothing of it can run now."""


class World(Protocol):
    """The doors. A flow receives one and awaits nothing else of the machine."""

    @property
    def clocks(self) -> Clocks:
        """The clocks of this machine."""

    def nonce(self) -> str:
        """Return 128 random bits as text."""

    def dice(self) -> float:
        """Return a random number from 0 to 1, for jitter only."""

    def mutex(self) -> AbstractContextManager[object]:
        """Return a lock for state that several threads of this process share."""

    def signal(self) -> Signal:
        """Return a lowered flag."""

    async def sleep(self, seconds: float) -> None:
        """Let time pass."""

    async def call(self, function: Callable[..., T], *args: object) -> T:
        """Run a blocking function. It runs to its end even if the caller is cancelled meanwhile."""

    async def readable(self, fd: int, timeout: float) -> bool:
        """Wait until ``fd`` can be read, at most ``timeout`` seconds; say whether it can."""

    async def together(self, *flows: Flow[T]) -> list[T]:
        """Run flows side by side and return their results in order."""

    def lanes(self, name: str) -> Lanes:
        """Return lanes in which flows run side by side; what is begun there is known by a name."""
