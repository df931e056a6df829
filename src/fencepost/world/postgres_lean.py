"""How runs lean on the pulse of their process, and how others find out that it has ended.

One proof serves all runs of a process, however many there are. Whoever looks at others notes since
when it knows a pulse to be silent: that never ends again, for its key was one session's alone.
"""

from __future__ import annotations

import threading

from fencepost.model.lease import trust, waited_out

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# How often a process proves its pulse while any of its runs leans on it.
EVERY = 0.15
# And how soon after a proof that was not answered.
SOON = 0.05
# How often whoever schedules looks whether those live who have runs.
LOOK = 0.25
_MOST_SILENT = 1000  # that are kept in mind
_NEVER = float("inf")


class RunLean:
    """What the lease of one run leans on, as the process knows it that has the run."""

    __slots__ = ("_vouching", "grace", "lease", "nonce", "on", "proven", "token")

    def __init__(
        self,
        vouching: Vouching,
        *,
        lease: bytes,
        nonce: str,
        token: int,
        on: int,
        grace: float,
        sent: float,
    ) -> None:
        self._vouching = vouching
        self.lease, self.nonce, self.token = lease, nonce, token
        self.on, self.grace = on, grace  # as its row has them; 0 if it leans on nothing any more
        self.proven = sent

    @property
    def next_try(self) -> float:
        """When the pulse is to be proven again."""
        return self._vouching.prove_at

    def until(self) -> float:
        """Return until when the last proof lets the holder believe."""
        return trust(self.proven, ttl=self.grace).until if self.on else _NEVER

    def wait(self, seconds: float) -> None:
        """Wait for the next proof, at most so long."""
        self._vouching.wait(seconds)

    async def prove(self, store: Any) -> None:
        """Prove the pulse for all runs of this process."""
        await store.vouch()

    def end(self) -> None:
        """Lean no more: the run is not ours any more, or has ended."""
        self._vouching.runs.pop(self.nonce, None)


class Vouching:
    """The runs of this process that lean on its pulse, and when it is to be proven again."""

    def __init__(self) -> None:
        self.runs: dict[str, RunLean] = {}  # by nonce
        self.prove_at = 0.0
        self._proven = threading.Condition()

    def lean(self, run: RunLean) -> RunLean:
        """Have a run vouched for from now on."""
        self.runs[run.nonce] = run
        if self.prove_at < run.proven:  # nothing leaned on it for a while
            self.prove_at = run.proven + EVERY
        return run

    def told(self, *, next_try: float) -> None:
        """Take note that a proof was asked for, and let those go on who waited for it."""
        self.prove_at = next_try
        with self._proven:
            self._proven.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until a proof was asked for, at most so long."""
        with self._proven:
            self._proven.wait(max(0.0, seconds))


class Silences:
    """Since when this process knows that the pulses of others are silent, by its own clock.

    A row that names a silent pulse did so before it became silent: nobody writes one down that
    does not beat. So it is for others once its grace has passed since it was first seen.
    """

    def __init__(self) -> None:
        self.watched: list[int] = []  # the pulses of those who have runs, as of the last sweep
        self.sweep_at = _NEVER  # when some of them will have been silent for long enough
        self._since: dict[int, float] = {}

    def note(self, pulse: int, *, grace: float, now: float) -> None:
        """Take note of a pulse that was seen to be silent by ``now``."""
        since = self._since.setdefault(pulse, now)
        ripe = since + waited_out(grace)
        if ripe > now:
            self.sweep_at = min(self.sweep_at, ripe)
        while len(self._since) > _MOST_SILENT:
            del self._since[next(iter(self._since))]

    def left(self, pulse: int, *, grace: float, asked: float) -> float:
        """Return how long to wait for a lease that leans on a pulse seen to be silent again.

        ``asked`` is an instant before it was looked at.
        """
        return max(0.0, self._since.get(pulse, asked) + waited_out(grace) - asked)

    def silent(self) -> list[int]:
        """Return all pulses that are known to be silent."""
        return list(self._since)

    def unheard(self) -> list[int]:
        """Return those that are watched and were not seen to be silent yet."""
        return [pulse for pulse in self.watched if pulse not in self._since]

    def soon(self, *, now: float) -> float:
        """Return how soon to look again: sooner if somebody else has runs, or may have died."""
        return min(LOOK if self.unheard() else _NEVER, max(0.0, self.sweep_at - now))
