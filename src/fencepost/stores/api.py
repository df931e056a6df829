"""What a lease store is: four verbs, ``break_`` for operators, and an honest list of capabilities.

A store answers in one of three ways. It did it: a value comes back. It refused: ``LeaseHeld`` or
``LeaseLost``, and nothing changed. Nobody knows: ``OutcomeUnknown``, and asking again with the same
nonce tells. ``StoreUnavailable`` means that it did not happen.
"""

from __future__ import annotations

from fencepost.model.named import NamedTuple, Protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.model.lease import Grant, Holder, View
    from fencepost.model.symptom import Symptom


class Capabilities(NamedTuple):
    """What a store can promise. The conformance suite tests each claim, and each disclaimer."""

    keeps_time: bool  # the store's own clock, read in the same atomic step, decides expiry
    durable: bool  # leases and tokens survive a restart of everything
    notices_death: bool  # a holder's crash frees its leases at once, not only at their end
    shared: bool  # processes other than this one see the same leases
    failover_safe: bool  # no acknowledged grant is forgotten when the store fails over
    fair: bool  # waiters are served in the order in which they came
    shortest_ttl: float
    longest_ttl: float
    exclusive: bool = True  # two never hold one lease at one instant of the store's clock


class Place(Protocol):
    """A place in the line of those who wait for one lease."""

    async def turn(self, patience: float) -> bool:
        """Wait for a sign that it may be our turn, at most ``patience``; say whether one came."""

    async def first(self) -> bool:
        """Say whether nobody alive stands before us."""

    async def leave(self, *, served: bool) -> None:
        """Leave the line, with the lease or without."""


class Handed(NamedTuple):
    """A grant that somebody else asked for on our behalf, and the instant of it or an earlier."""

    grant: Grant
    sent: float


class OpenPlace(Place, Protocol):
    """A place at which the lease can be handed to us. A store need not have such places."""

    def invite(self, name: str, *, holder: Holder, ttl: float) -> bool:
        """Let whoever releases the lease grant it to us; say whether that is possible.

        From here on the nonce may have been granted the lease, although nobody asked.
        """

    async def accept(self) -> Handed | None:
        """Take what was handed to us. None if nothing was, or in doubt: to ask for it tells."""

    def withdraw(self) -> None:
        """Be handed nothing any more: an acquire that is sent after this knows the last word."""


class Examined(Protocol):
    """A store that can say what would break its promises where it stands. A store need not."""

    async def examine(self) -> list[Symptom]:
        """Look at the server's settings, privileges and clock; change nothing that lasts."""


class LeaseStore(Protocol):
    """Where leases live."""

    @property
    def capabilities(self) -> Capabilities:
        """What this store can promise."""

    async def acquire(self, name: str, *, holder: Holder, ttl: float) -> Grant:
        """Grant the lease, or raise ``LeaseHeld``.

        Idempotent by nonce: whoever asks again after a lost reply adopts its own grant, with the
        same token. A nonce that has released is spent and gets ``LeaseLost``. A mark takes the
        place of another mark in one step, under a new token: see ``model.divided``.
        """

    async def renew(self, name: str, *, nonce: str, token: int, ttl: float) -> Grant:
        """Move the end of the lease to ``ttl`` from now, or raise ``LeaseLost``."""

    async def release(self, name: str, *, nonce: str, token: int | None = None) -> None:
        """Give the lease back if this nonce has it. Twice is fine; ``LeaseLost`` if others have it.

        Without a token it serves a caller who never learned what it was granted.
        """

    async def peek(self, name: str) -> View | None:
        """Return who has, or last had, the lease. Changes nothing."""

    async def views(self) -> list[View]:
        """Return all leases ever granted in this namespace, by name."""

    async def break_(self, name: str, *, token: int, reason: str, operator: str) -> int:
        """Take the lease away from the holder of ``token``; return the new token.

        ``TokenStale`` if another token is current by now. Leaves a record of who, when and why.
        """

    async def line(self, name: str) -> Place | None:
        """Stand in line for a lease; None if this store has no better way than to ask again.

        Where leases can be handed over it is an ``OpenPlace``.
        """

    def forget(self) -> None:
        """Drop, in a forked child, what belongs to the parent."""

    async def close(self) -> None:
        """Let go of files and connections. Leases are not released by this."""
