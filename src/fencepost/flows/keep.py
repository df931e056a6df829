"""To keep a lease is to renew it in time and to tell its holder when that can no longer be proven.

One keeper serves all leases of a face, from a thread of its own, with a store connection of its
own. Nobody's safety depends on it: a ``Hold`` compares clocks by itself whenever it is asked.
"""

from __future__ import annotations

from fencepost.errors import LeaseLost, Lost
from fencepost.model.event import LeaseEvent
from fencepost.model.lease import (
    Phase,
    Trust,
    phase,
    renew_due,
    renewal_ttl,
    retry_pause,
    trust,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost.flows.acquire import Granted
    from fencepost.model.lease import Grant, Lean
    from fencepost.stores.api import LeaseStore
    from fencepost.world.api import Flow, World

_NEVER = float("inf")
# A run that is cancelled, or makes progress, should be seen to within this long.
LONGEST_SILENCE = 2.0
# How long an event loop may be kept waiting for a proof, and a thread that has a lock.
LOOP_PATIENCE, THREAD_PATIENCE = 1.0, 30.0
# How often one who waits for a proof looks up.
_GLANCE = 0.5
# How often a keeper that is busy with renewals looks whether any lease has ended.
_TELL_EVERY = 0.1
# When to look for a grant nobody waits for any more: now, and again while it may be on its way.
_RECLAIM_AFTER = (0.0, 0.1, 0.4, 0.8)


class Hold:
    """One granted lease as its holder knows it. The keeper writes ``trust``; anybody reads it."""

    __slots__ = (
        *("name", "token", "nonce", "ttl", "ends", "trust", "next_try", "released", "why_lost"),
        *("owner", "on_loss", "beat", "pinned", "ending", "_emit", "_chatty", "_phase", "_slow"),
        *("_max_hold", "lean", "patience", "hurried", "bound"),
    )
    name: str
    token: int
    ends: float | None
    trust: Trust
    next_try: float

    def __init__(
        self,
        granted: Granted | None,
        *,
        nonce: str,
        ttl: float,
        max_hold: float | None,
        emit: Callable[[LeaseEvent], None],
        chatty: Callable[[], bool] | bool = True,
    ) -> None:
        self.nonce, self.ttl, self._max_hold = nonce, ttl, max_hold
        self.released = granted is None  # there is nothing to give back yet
        self.why_lost: str | None = None
        self.owner: object = None  # the thread or task that must not wait for itself
        self.on_loss: tuple[Callable[[], None], ...] = ()
        # How a run renews: it has more to tell than that it lives, and hears if it is cancelled.
        self.beat: Callable[[LeaseStore, float], Flow[Grant]] | None = None
        # Since when our own write transaction keeps everybody else out: nobody can take the lease.
        self.pinned = 0.0
        self.bound = False  # whether it belongs to a body, and must outlive whoever else lets go
        self.hurried = -_NEVER  # when it was last said that there is something to hear
        self._slow = False
        self.lean: Lean | None = None  # what else is to be proven, all the time
        self.patience = _NEVER  # how long one who asks can wait for a proof
        self.ending = False  # its run is being ended: a renewal may well come too late
        # Whether anybody listens to what goes well. Asked each time: somebody may begin to.
        self._emit, self._chatty = emit, chatty
        self._phase = Phase.HELD
        if granted is not None:
            self.begin(granted)

    def begin(self, granted: Granted) -> None:
        """Hold what was granted. Made before that, a hold keeps nobody waiting after it."""
        self.name, grant, sent = granted
        self.lean = grant.lean
        self.token, self.released = grant.token, False
        self.ends = None if self._max_hold is None else sent + self._max_hold
        self.trust = trust(sent, ttl=grant.ttl, ends=self.ends)
        self.next_try = renew_due(self.trust)

    def beats_by(
        self,
        beat: Callable[[LeaseStore, float], Flow[Grant]],
        *,
        first: float = LONGEST_SILENCE,
        since: float | None = None,
    ) -> None:
        """Renew by ``beat`` from now on, often enough to hear of a cancel soon.

        ``first`` is counted from the instant ``since``, else from when it was asked for: what was
        claimed ahead begins later than that.
        """
        self.beat, self.bound = beat, True
        begins = self.trust.confirmed if since is None else since
        self.next_try = min(self.next_try, begins + (first or LONGEST_SILENCE))

    def about_to_end(self) -> None:
        """Be renewed only if it must be: the end is on its way, and tells more than a beat."""
        self.ending = True
        self.next_try = renew_due(self.trust)

    def phase(self, now: float) -> Phase:
        """Say how far the lease can be believed in; once lost, always lost.

        What is unproven is not lost yet: perhaps we were only late.
        """
        if self.released or self.why_lost is not None:
            return Phase.LOST
        if self.pinned:
            return Phase.HELD
        current = phase(self.trust, now=now)
        if current is Phase.LOST:
            self.lose(self._why_unproven(now))
        elif self.unproven(now):
            return Phase.UNPROVEN
        elif current is not self._phase:
            self._phase = current
            if current is not Phase.HELD:
                self.say(current.value, f"{self.trust.until - now:.1f} s left unless renewed")
        return current

    def doubt(self, now: float, why: str) -> None:
        """Tell, once each time, that nobody can say any more whether the lease is ours."""
        if self.unproven(now) and self._phase is not Phase.UNPROVEN:
            self._phase = Phase.UNPROVEN
            self.say("unproven", why)

    def unproven(self, now: float) -> bool:
        """Say whether what the lease leans on was not proven for too long."""
        return self.lean is not None and not self.pinned and now >= self.lean.until()

    def sure(self, boottime: Callable[[], float], *, patience: float | None = None) -> Phase:
        """Say the same once it is known: where a proof is late, wait until the keeper has it.

        That ends with the lease: what nobody can prove is not renewed. Or with ``patience``, of
        the hold if none is given: then it is still unproven.
        """
        longest = self.patience if patience is None else patience
        now = began = boottime()
        while (current := self.phase(now)) is Phase.UNPROVEN:
            assert self.lean is not None, "else there is nothing to be proven"
            if now - began >= longest:
                break
            self.lean.wait(min(_GLANCE, longest, self.trust.until - now))
            now = boottime()
        return current

    def why_not_ours(self, boottime: Callable[[], float]) -> str | None:
        """Say why the lease cannot be trusted now, or None if it can; ask where a proof is late."""
        found = self.sure(boottime)
        if found is Phase.UNPROVEN:
            return f"nobody could tell for {self.patience:g} s whether it is still ours"
        return self.why_lost or "it was released" if found is Phase.LOST else None

    def still_pinned(self, now: float) -> None:
        """Look again later; warn once of a transaction that is open for too long."""
        self.next_try = now + retry_pause(self.ttl)
        open_for = now - self.pinned
        if open_for > self.ttl / 2 and not self._slow:
            self._slow = True
            self.say("slow_transaction", f"open for {open_for:.1f} s: nobody else can write")

    def confirm(self, sent: float, *, ttl: float) -> None:
        """Take note of a renewal that the store confirmed. A lost lease stays lost."""
        self.trust = trust(sent, ttl=ttl, ends=self.ends)
        self.next_try = renew_due(self.trust)
        if self.beat is not None:
            self.next_try = min(self.next_try, sent + LONGEST_SILENCE)
        if self.hurried >= sent:  # perhaps that one was answered before it was said
            self.next_try = self.hurried
        self.mention("renewed")

    def lose(self, why: str) -> None:
        """Declare the lease lost, once, and tell everybody who asked to be told."""
        if self.released or self.why_lost is not None:
            return
        self.why_lost = why
        self.say("lost", why)
        for tell in self.on_loss:
            tell()

    def wakes(self) -> float:
        """Return when the keeper must look at this hold again."""
        if self.why_lost is not None:
            return _NEVER
        if self.pinned:
            return self.next_try
        first = min(self.next_try, self.trust.until)
        return first if self.lean is None else min(first, self.lean.next_try)

    def say(self, what: str, detail: str = "") -> None:
        """Emit an event about this lease."""
        self._emit(LeaseEvent(what, self.name, self.token, detail))

    def mention(self, what: str) -> None:
        """Emit an event that only those care about who listen to everything."""
        chatty = self._chatty
        if chatty is True or (chatty and chatty()):
            self.say(what)

    def _why_unproven(self, now: float) -> str:
        # Not even a renewal that was confirmed this instant would help.
        if trust(now, ttl=self.ttl, ends=self.ends).until <= now:
            return "max_hold is used up"
        return f"no renewal was confirmed for {now - self.trust.confirmed:.1f} s"


class Charges:
    """What a keeper has to look after, shared between it and the faces."""

    def __init__(self, world: World) -> None:
        self._holds: dict[str, Hold] = {}
        self._ghosts: dict[tuple[str, str], tuple[int, float]] = {}
        self._world = world
        self._signal = world.signal()
        self._wakes = _NEVER
        self._tell_at = 0.0
        self.stopped = False

    def add(self, hold: Hold) -> None:
        """Look after a hold from now on."""
        self._holds[hold.nonce] = hold
        leans = hold.lean is not None  # then it is to be looked at soon, whatever else it waits for
        if leans or hold.next_try < self._wakes or hold.trust.until < self._wakes:
            self._look_at(hold.wakes())

    def _look_at(self, wakes: float) -> None:
        if wakes < self._wakes:
            self._wakes = wakes
            self._signal.set()

    def remove(self, hold: Hold) -> None:
        """Forget a hold: it is released, or nobody refers to it any more."""
        self._holds.pop(hold.nonce, None)

    def abandon(self, name: str, nonce: str) -> None:
        """Give back whatever that nonce may have been granted."""
        self._ghosts[name, nonce] = (0, self._world.clocks.boottime())
        self._signal.set()

    def hurry(self, nonce: str) -> None:
        """Have a lease renewed now: somebody has said something about its run."""
        hold = self._holds.get(nonce)
        if hold is not None:
            hold.hurried = hold.next_try = self._world.clocks.boottime()
            self._look_at(hold.next_try)

    def stop(self) -> None:
        """Let the keeper end."""
        self.stopped = True
        self._signal.set()

    def holds(self) -> list[Hold]:
        """Return all that is held now."""
        return list(self._holds.values())

    def ghosts(self) -> list[tuple[tuple[str, str], tuple[int, float]]]:
        """Return the nonces that may have been granted something nobody wants."""
        return list(self._ghosts.items())

    def reclaimed(self, key: tuple[str, str], *, tries: int, found: bool, now: float) -> None:
        """Take note of one look for a ghost."""
        if found or tries >= len(_RECLAIM_AFTER):
            self._ghosts.pop(key, None)
        else:
            self._ghosts[key] = (tries, now + _RECLAIM_AFTER[tries])

    def tell_losses(self) -> None:
        """Have those told whose lease has ended while others were asked for in vain."""
        now = self._world.clocks.boottime()
        if now >= self._tell_at:
            self._tell_at = now + _TELL_EVERY
            for hold in self.holds():
                hold.phase(now)

    async def rest(self) -> None:
        """Wait until something is due, or something new came."""
        self._signal.clear()
        # From here on every add() signals, so that none falls in between.
        before, self._wakes = self._wakes, _NEVER
        due = [hold.wakes() for hold in self.holds()] + [at for _, (_, at) in self.ghosts()]
        if self._world.clocks.boottime() < before < _NEVER:
            # Set for a hold that is gone by now. To wake once for nothing beats being woken by
            # every short hold that comes until then.
            due.append(before)
        self._wakes = min(due, default=_NEVER)
        if not self.stopped and self._wakes > (now := self._world.clocks.boottime()):
            await self._signal.wait(None if self._wakes == _NEVER else self._wakes - now)


async def keep(
    world: World, store: LeaseStore, charges: Charges, *, emit: Callable[[LeaseEvent], None]
) -> None:
    """Renew what is due and reclaim what is abandoned, until stopped."""
    while not charges.stopped:
        for key, (tries, at) in charges.ghosts():
            if world.clocks.boottime() >= at:
                await _reclaim(world, store, charges, key, tries, emit)
        for hold in charges.holds():
            if world.clocks.boottime() >= hold.wakes():
                await renew(world, store, hold)
                charges.tell_losses()
        await charges.rest()
    for key, (tries, _) in charges.ghosts():  # the last chance: a whole ttl is long
        await _reclaim(world, store, charges, key, tries, emit)


async def renew(world: World, store: LeaseStore, hold: Hold) -> None:
    """Try to renew one hold once. Only the store's no is a loss; silence is one at the deadline."""
    sent = world.clocks.boottime()
    if hold.phase(sent) is Phase.LOST:
        return
    if hold.pinned:  # our own transaction keeps us out as well, and needs no renewal
        hold.still_pinned(sent)
        return
    if hold.lean is not None and sent >= hold.lean.next_try:
        sent = await _prove(world, store, hold, hold.lean)
        if sent < min(hold.next_try, hold.trust.until):
            return
    ttl = renewal_ttl(hold.ttl, now=sent, ends=hold.ends)
    if ttl is None:  # max_hold: let it run out
        hold.next_try = _NEVER
        return
    await _ask_to_renew(world, store, hold, sent, ttl)


async def _ask_to_renew(
    world: World, store: LeaseStore, hold: Hold, sent: float, ttl: float
) -> None:
    try:
        beat = hold.beat
        if beat is not None:
            grant = await beat(store, ttl)
        else:
            grant = await store.renew(hold.name, nonce=hold.nonce, token=hold.token, ttl=ttl)
    except Lost as lost:
        hold.lose(getattr(lost, "reason", str(lost)))
    except Exception as error:  # noqa: BLE001 -- whatever went wrong, the lease is not confirmed
        hold.next_try = world.clocks.boottime() + retry_pause(hold.ttl)
        # Else it was our own transaction that kept us out, or our own end that came first.
        if not hold.pinned and not hold.ending:
            hold.say("unconfirmed", str(error))
        hold.phase(world.clocks.boottime())
    else:
        if hold.why_lost is None and not hold.released:
            hold.confirm(sent, ttl=grant.ttl)


async def _prove(world: World, store: LeaseStore, hold: Hold, lean: Lean) -> float:
    """Prove what a hold leans on, for all that share it; return what time it is then.

    Only the row can tell whether what could not be proven in time is still ours.
    """
    try:
        await lean.prove(store)
    except Exception as error:  # noqa: BLE001 -- whatever went wrong, it is not proven
        now = world.clocks.boottime()
        hold.doubt(now, str(error))
        return now
    now = world.clocks.boottime()
    if hold.unproven(now):
        hold.next_try = now
    return now


async def _reclaim(
    world: World,
    store: LeaseStore,
    charges: Charges,
    key: tuple[str, str],
    tries: int,
    emit: Callable[[LeaseEvent], None],
) -> None:
    name, nonce = key
    try:
        await store.release(name, nonce=nonce)
        found = True
        emit(LeaseEvent("reclaimed", name))
    except LeaseLost:  # not there, or not there yet: it is looked for again
        found = False
    except Exception as error:  # noqa: BLE001 -- the store is away: asked again, and then expiry helps
        found = False
        emit(LeaseEvent("unconfirmed", name, detail=str(error)))
    charges.reclaimed(key, tries=tries + 1, found=found, now=world.clocks.boottime())
