"""A lease ends early if the session that proves its process alive has ended.

This file keeps which leases depend on which session, and when that was last proven. One proof
serves all leases of a process, however many there are. Whoever looks at others notes since when it
knows a pulse to be silent: that never ends again, for its key was one session's only.
"""

from __future__ import annotations

import threading

from fencepost.model.lease import trust, waited_out

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# How often a process proves its pulse while any of its runs leans on it, or only locks do.
EVERY = 0.15
EVERY_FOR_LOCKS = 0.2
# And how soon after a proof that was not answered.
SOON = 0.05
# How often whoever schedules looks whether those live who have runs.
LOOK = 0.25
_MOST_SILENT = 1000  # that are kept in mind
_NEVER = float("inf")


class RunLean:
    """What the lease of one run leans on, as the process knows it that has the run."""

    __slots__ = ("grace", "lease", "nonce", "on", "proven", "token", "vouching")

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
        self.vouching = vouching
        self.lease, self.nonce, self.token = lease, nonce, token
        self.on, self.grace = on, grace  # as its row has them; 0 if it leans on nothing any more
        self.proven = sent

    @property
    def next_try(self) -> float:
        """When the pulse is to be proven again."""
        return self.vouching.prove_at

    def until(self) -> float:
        """Return until when the last proof lets the holder believe."""
        return trust(self.proven, ttl=self.grace).until if self.on else _NEVER

    def wait(self, seconds: float) -> None:
        """Wait for the next proof, at most so long."""
        self.vouching.wait(seconds)

    async def prove(self, store: Any) -> None:
        """Prove the pulse for all leases of this process."""
        await store.vouch()

    def end(self) -> None:
        """Lean no more: the run is not ours any more, or has ended."""
        self.vouching.leans.pop(self.nonce, None)


class LockLean(RunLean):
    """What a lock leans on. Each proof looks at its row as well: an operator may have broken it.

    It may lean on nothing for a while, and again after a renewal.
    """

    _ask_row = _doubtful = False  # of the class, for most are released before they change

    @property
    def next_try(self) -> float:
        """When the pulse is to be proven again; at once if the row has to be asked."""
        if self._ask_row:
            return -_NEVER
        if not self.on:
            return _NEVER
        return max(self.vouching.prove_at, self.proven + EVERY_FOR_LOCKS)

    def until(self) -> float:
        """Return until when the last proof lets the holder believe."""
        return -_NEVER if self._doubtful else super().until()

    def row_differs(self) -> None:
        """Believe nothing before a renewal has told whether the lock is still ours."""
        self._ask_row = self._doubtful = True

    def may_lean(self, on: int, *, sent: float) -> None:
        """Believe no longer than this pulse lives: a request to lean on it is about to be sent.

        Its answer may be lost, and others go by the row.
        """
        if not self.on:
            self.proven = sent
            self.on = on

    def renewed(self, on: int, *, grace: float, sent: float) -> None:
        """Take note of what the row says since a renewal, and that the pulse beat then."""
        self.grace, self.proven, self.on = grace, max(self.proven, sent), on
        self._ask_row = self._doubtful = False
        self.vouching.tell()

    async def prove(self, store: Any) -> None:
        """Prove the pulse for all leases of this process."""
        self._ask_row = False
        await super().prove(store)


class Vouching:
    """The leases of this process that lean on its pulse, and when it is to be proven again.

    The keepers of several faces may share it: each time it is due, one of them asks.
    """

    def __init__(self) -> None:
        self.leans: dict[str, RunLean] = {}  # by nonce
        self.unanswered = False  # the last question
        self.prove_at = 0.0
        self._proven = threading.Condition()
        self._turn = threading.Lock()

    def takes_turn(self, sent: float) -> bool:
        """Say whether it is time for a proof that is asked for at ``sent``, to one who asks."""
        with self._turn:
            if sent < self.prove_at:
                return False
            self.prove_at = sent + EVERY
            return True

    def heard(self, sent: float, *, answered: bool) -> None:
        """Take note of how a question ended; what other keepers heard meanwhile is not its end."""
        with self._turn:
            self.unanswered = not answered
            if not answered:
                self.prove_at = sent + SOON
        self.tell()

    def lean(self, lean: RunLean) -> None:
        """Have a lease vouched for from now on."""
        self.leans[lean.nonce] = lean
        if self.prove_at < lean.proven:  # nothing leaned on it for a while
            self.prove_at = lean.proven + EVERY

    def tell(self) -> None:
        """Let those go on who waited for a proof."""
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
