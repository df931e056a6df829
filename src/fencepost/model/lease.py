"""A lease is a right that ends by itself; this is its arithmetic.

Two clocks meet here and are never mixed. The *store's* clock decides when a lease ends; a
``Record`` is read against it. The *holder's* boot-time clock decides how long the holder may
believe in its own lease; that is a ``Trust``, and it always ends before the record does.
"""

from __future__ import annotations

import enum

from fencepost.errors import BadDuration, LeaseHeld
from fencepost.model.duration import positive, shown
from fencepost.model.named import NamedTuple, Protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from fencepost.model.duration import Duration

# Two machines' clocks may differ in rate by this share before a holder outlives its lease.
DRIFT = 0.01
# Time between "may I?" and the effect that follows; a holder stops this long before the end.
MARGIN = 0.05

SHORTEST_TTL = 0.2
# How the nonce of a mark begins: see ``model.divided``.
MARK = "permits-"
# A lease is renewed while it is held, so its ttl need not cover the work. What it must cover
# is how long everybody waits after a holder has vanished: a day is already too long.
LONGEST_TTL = 86_400.0


class Holder(NamedTuple):
    """Who asks. Only the nonce identifies: it is new for every acquisition."""

    nonce: str
    host: str
    pid: int
    version: str = ""

    def __str__(self) -> str:
        return f"{self.host} pid {self.pid}"


class Record(NamedTuple):
    """What a store keeps of a lease. It outlives the lease, so that tokens never fall.

    ``era`` names the run of the store's clock that ``expires`` belongs to (a boot id on SQLite).
    An instant of another era says nothing but: everybody of that time is gone. An instant of an
    unknown era, which is empty, says nothing at all to others: they can only watch the lease.
    """

    name: str
    token: int
    holder: Holder
    held: bool
    era: str
    expires: float
    ttl: float
    since: float
    ended: str = ""
    beat: int = 0
    entrusted: bool = False  # to another program: its first holder's death frees nothing


class Grant(NamedTuple):
    """A store's yes: the token, and for how long from the moment the request was sent."""

    token: int
    ttl: float
    adopted: bool = False
    lean: Lean | None = None  # what it leans on, if its holder has to prove more than its row


class View(NamedTuple):
    """A lease as a bystander sees it. ``alive`` is None where the store cannot know."""

    name: str
    token: int
    held: bool
    holder: Holder
    since: float
    expires_in: float
    alive: bool | None = None
    ended: str = ""


class Verdict(enum.Enum):
    """What an acquire finds."""

    FREE = "free"  # nobody has it, or whoever had it is past its end
    OURS = "ours"  # this very nonce has it: an earlier reply was lost, so adopt
    SPENT = "spent"  # this nonce had it and gave it back: a late duplicate must not take it again
    HELD = "held"
    DIVIDED = "divided"  # it has a mark, and who asks is another one, which takes its place


class Phase(enum.Enum):
    """How far a holder may believe in its lease."""

    HELD = "held"  # confirmed recently
    DANGER = "danger"  # renewals are failing: half of the ttl has gone by
    SUSPECT = "suspect"  # almost over: begin nothing new
    UNPROVEN = "unproven"  # it may be lost, or not: whoever asks has to wait for the answer
    LOST = "lost"


class Lean(Protocol):
    """A sign of life that a lease leans on besides its row, as its holder knows it.

    Whoever sees that sign gone takes the lease after a moment's grace. So its holder believes for
    less than that after each proof of it, and does not know what is true until the next one.
    """

    @property
    def next_try(self) -> float:
        """When it is to be proven again."""

    def until(self) -> float:
        """Return until when the last proof lets the holder believe."""

    def wait(self, seconds: float) -> None:
        """Wait for the next proof, at most so long."""

    async def prove(self, store: Any) -> None:
        """Prove it, and that of all others who share it, by way of the keeper's own store."""

    def end(self) -> None:
        """Need it no more."""


class Trust(NamedTuple):
    """What a holder knows of its lease, counted from *before* the confirmed request was sent."""

    confirmed: float
    ttl: float
    until: float


def judge(record: Record | None, *, nonce: str, now: float, era: str) -> Verdict:
    """Say what an acquire by ``nonce`` finds at store time ``now`` of ``era``."""
    if record is None:
        return Verdict.FREE
    if record.holder.nonce == nonce and not record.held:
        return Verdict.SPENT
    if not record.held or left(record, now=now, era=era) <= 0:
        return Verdict.FREE
    if record.holder.nonce == nonce:
        return Verdict.OURS
    marks = nonce.startswith(MARK) and record.holder.nonce.startswith(MARK)
    return Verdict.DIVIDED if marks else Verdict.HELD


def left(record: Record, *, now: float, era: str) -> float:
    """Return for how long a held lease may still last at store time ``now`` of ``era``."""
    if not comparable(record, era=era):
        return record.ttl
    return max(0.0, record.expires - now) if record.era == era else 0.0


def refusal(record: Record, *, expires_in: float) -> LeaseHeld:
    """Return what is answered to those who ask for a lease that another has."""
    return LeaseHeld(
        record.name,
        holder=str(record.holder),
        token=record.token,
        expires_in=expires_in,
        since=record.since,
    )


def view(record: Record, *, held: bool, expires_in: float, alive: bool | None) -> View:
    """Return a record as a bystander sees it."""
    return View(
        record.name,
        record.token,
        held,
        record.holder,
        record.since,
        expires_in if held else 0.0,
        alive if held else None,
        record.ended,
    )


def comparable(record: Record, *, era: str) -> bool:
    """Say whether the record's instants mean anything to somebody in ``era``."""
    return bool(era and record.era)


def why_lost(  # noqa: PLR0911 -- one line for each way to lose
    record: Record | None, *, nonce: str, token: int, now: float, era: str
) -> str | None:
    """Say why (nonce, token) no longer holds the lease, or None if it still does.

    A lease past its end is lost even if nobody has taken it yet: past means past.
    """
    if record is None:
        return "its record is gone from the store"
    if record.holder.nonce != nonce or record.token != token:
        if record.held:
            return f"{record.holder} has it now with token {record.token}"
        return record.ended or f"token {record.token} has been granted since"
    if not record.held:
        return record.ended or "it was released"
    if record.era != era:
        return "the store's machine was restarted"
    if record.expires <= now:
        return "it ran out before it was renewed"
    return None


def next_token(highest: int, *, store_us: int) -> int:
    """Return a token above every earlier one.

    The count keeps it strict; the floor of the store's time in µs keeps it above tokens whose
    record was lost (a deleted row, a restored backup), as long as that clock went on.
    """
    return max(highest + 1, store_us)


def admits(highest_seen: int, token: int) -> bool:
    """Say whether a resource that has seen ``highest_seen`` may let ``token`` through.

    Equal tokens pass: one holder writes many times. Zero and less are never tokens.
    """
    return token > 0 and token >= highest_seen


def checked_ttl(
    value: Duration, *, shortest: float = SHORTEST_TTL, longest: float = LONGEST_TTL
) -> float:
    """Return the ttl in seconds, or refuse it with the bound it breaks."""
    if type(value) is float and shortest <= value <= longest:
        return value  # what was checked before is not taken apart again
    ttl = positive(value, what="ttl")
    if ttl < shortest:
        raise BadDuration(f"ttl is {value!r}: less than the {shown(shortest)} that can be kept")
    if ttl > longest:
        raise BadDuration(
            f"ttl is {value!r}: more than {shown(longest)}; a lease is renewed while it is held, "
            "so the ttl is only how long others wait after its holder vanished"
        )
    return ttl


def trust(sent: float, *, ttl: float, ends: float | None = None) -> Trust:
    """Return how long a holder may believe in a lease that it asked for at ``sent``.

    ``ends`` is the instant at which ``max_hold`` is used up, if there is one.
    """
    until = sent + ttl * (1 - DRIFT) - MARGIN
    if ends is not None:
        # A renewal shortened to meet ``ends`` may be carried out and never confirmed. So drift
        # and margin are kept before that instant as well.
        until = min(until, ends - ttl * DRIFT - MARGIN)
    return Trust(sent, ttl, until)


def phase(held: Trust, *, now: float) -> Phase:
    """Say how far the holder may believe in its lease at ``now``."""
    if now >= held.until:
        return Phase.LOST
    elapsed = now - held.confirmed
    if elapsed >= 0.8 * held.ttl:
        return Phase.SUSPECT
    if elapsed >= 0.5 * held.ttl:
        return Phase.DANGER
    return Phase.HELD


def renew_due(held: Trust) -> float:
    """Return when to renew: a third in, so that two tries may fail before anything is at risk."""
    return held.confirmed + held.ttl / 3


def retry_pause(ttl: float) -> float:
    """Return how long to wait after a renewal that was not confirmed."""
    return min(max(ttl / 20, 0.02), 2.0)


def renewal_ttl(ttl: float, *, now: float, ends: float | None) -> float | None:
    """Return the ttl to renew with, shortened to meet ``max_hold``; None if it is used up."""
    if ends is None:
        return ttl
    left = ends - now
    return min(ttl, left) if left >= SHORTEST_TTL else None


def waited_out(grace: float) -> float:
    """Return how long to wait, once a sign of life is seen to be gone, until its lease is free.

    The last proof came before that, and its holder believes for less than the grace after it.
    """
    return grace * (1 + DRIFT)


def stop_times(held: Trust) -> tuple[float, float]:
    """Return when a command is asked to stop and when killed: both before others may start."""
    kill = min(held.confirmed + 0.8 * held.ttl, held.until)
    return min(held.confirmed + 0.5 * held.ttl, kill), kill
