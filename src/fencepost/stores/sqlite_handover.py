"""A lease is handed over in one commit: its holder's release is the next one's grant.

Whoever waits writes on the board what it wants. Whoever releases finds it there, grants the lease
to the first in line instead of setting it free, and calls it; the grant leans on the pipe of that
waiter, which takes the lease by locking the pipe, reading the row and syncing it. Until then the
lease is for whoever comes: so neither the dead nor the stopped nor those who gave up keep anything
that was handed to them. See docs/decisions/0007-direct-hand-over.md.
"""

from __future__ import annotations

import os
from contextlib import suppress

from fencepost.errors import FencepostError, OutcomeUnknown
from fencepost.model.lease import Grant, next_token
from fencepost.model.named import NamedTuple
from fencepost.stores.api import Handed
from fencepost.world.line import LinePlace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sqlite3 import Connection

    from fencepost.model.lease import Holder
    from fencepost.stores.sqlite_reserve import TokenReserve
    from fencepost.world.api import World
    from fencepost.world.line import Called, Line
    from fencepost.world.seat import Seat
    from fencepost.world.sqlite import SqliteFile

RELEASE = """
UPDATE fencepost_lease
   SET held = 0, ended = 'it was released'
 WHERE namespace = ? AND name = ? AND nonce = ? AND held = 1 AND token = coalesce(?, token)"""

# The release and the next grant in one, if the waiter still waits. By number, as in Wish.
_HAND_OVER = """
UPDATE fencepost_lease
   SET token = ?1, since_us = ?2, expires_us = ?3, boot_id = ?6, ttl_us = ?7, nonce = ?8,
       host = ?9, pid = ?10, version = ?11, pulse = ?12, pulse_inode = ?13, held = 1, beat = 0,
       ended = ''
 WHERE namespace = ?4 AND name = ?5 AND nonce = ?14 AND token = ?15 AND held = 1
   AND fencepost_waits()"""

# What was handed to this nonce, if it still is for it to take.
_FIND_HANDED = """
SELECT token, expires_us, ttl_us
  FROM fencepost_lease
 WHERE namespace = ? AND name = ? AND nonce = ? AND pulse = ? AND held = 1 AND boot_id = ?
   AND expires_us > ?"""


class Wish(NamedTuple):
    """What a waiter wants to be handed, and the pipe that it will lean on."""

    namespace: str
    name: str
    boot_id: str
    ttl_us: int
    nonce: str
    host: str
    pid: int
    version: str
    pulse: str
    pulse_inode: str


def read_wish(text: bytes) -> Wish | None:
    """Return what somebody wrote on the board, or None if it makes no sense."""
    try:
        where, name, era, ttl_us, nonce, host, pid, *rest = text.decode().split("\n")
        return Wish(where, name, era, int(ttl_us), nonce, host, int(pid), *rest)
    except (TypeError, ValueError):
        return None


class _Offer:
    """Whom a lease is offered. Asked again, as a busy file makes us do, it calls anew."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self.called: Called | None = None
        self.heir, self.token = "", 0

    def call(self) -> Wish | None:
        self.hang_up()
        self.called, self.token = None, 0
        # Called before the commit, the waiter is awake by the time it hears us hang up.
        self.called = self._line.call()
        return None if self.called is None else read_wish(self.called.wish)

    def hang_up(self) -> None:
        if self.called is not None:
            self.called.hang_up()


class HandOver:
    """Both ends of a hand-over, in one namespace of one file."""

    def __init__(
        self, world: World, file: SqliteFile, *, namespace: str, reserve: TokenReserve
    ) -> None:
        self._world, self._file, self._namespace = world, file, namespace
        self.reserve = reserve
        self._called: Called | None = None  # whom the statement that is being run is about
        # Without a boot id no two processes can compare their clocks. Without fdatasync whoever
        # takes a lease could not make sure that its grant survives a power cut.
        self.possible = bool(world.clocks.era()) and hasattr(os, "fdatasync")
        # To whom each nonce gave its lease, where nobody can say whether that was committed.
        self._doubtful: dict[str, str] = {}

    def set_up(self, db: Connection) -> None:
        """Let statements ask who waits, for by then they have the write lock.

        So whoever withdraws its wish and then writes to the file, as an acquire does, knows what it
        was handed, or that it never will be.
        """
        db.create_function("fencepost_waits", 0, self._waits)

    def give(self, line: Line, name: str, nonce: str, token: int) -> bool:
        """Release the lease, to the first in line if possible; say whether it was ours."""
        offer = _Offer(line)

        def work(db: Connection) -> int:
            wish = offer.call()
            if wish is not None and self._concerns(wish, name):
                self._called, offer.heir = offer.called, wish.nonce
                clocks = self._world.clocks
                wall_us = int(clocks.wall() * 1e6)
                offer.token = next_token(token, store_us=wall_us)
                # The trust of whoever takes it begins with the instant that is read here.
                expires_us = int(clocks.boottime() * 1e6) + wish.ttl_us
                values = (offer.token, wall_us, expires_us, *wish, nonce, token)
                if db.execute(_HAND_OVER, values).rowcount:
                    return 1
            offer.token = 0
            return db.execute(RELEASE, (self._namespace, name, nonce, token)).rowcount

        try:
            changed = self._file.write_one(work)
            if changed and offer.called is not None and offer.token and self._is_safe(offer):
                offer.called.confirm(offer.token)
        except OutcomeUnknown:
            self._doubtful[nonce] = offer.heir
            raise
        finally:
            offer.hang_up()
        if offer.called is None:
            line.wake()  # who has come since
        return bool(changed)

    def _is_safe(self, offer: _Offer) -> bool:
        """Say whether the token of an offer will not be issued again, whatever happens."""
        return self.reserve.covers(offer.token) or self._file.sync_early()

    def was_given(self, nonce: str, *, to: str) -> bool:
        """Say whether that is whom this nonce gave its lease, although the reply got lost."""
        return bool(to) and self._doubtful.pop(nonce, "") == to

    def take(self, name: str, nonce: str, seat: Seat) -> Handed | None:
        """Take what was handed to this nonce. None if nothing was, or it must be asked for.

        Locked before it is read, and whoever takes over what nobody has locked keeps the lock from
        us until it is done: so exactly one of us finds the lease to be its own.
        """
        if not seat.lock():
            return None  # somebody looks whether we live; to ask for it needs no lock
        clocks = self._world.clocks
        now_us = int(clocks.boottime() * 1e6)
        values = (self._namespace, name, nonce, seat.name, clocks.era(), now_us)
        taken = False
        try:
            found = self._file.read(lambda db: db.execute(_FIND_HANDED, values).fetchone())
            if found is None:
                return None
            token, expires_us, ttl_us = found
            # Whoever handed it over died, or its disk failed, or it knew of no reserve.
            if not self.reserve.covers(token) and not seat.is_confirmed(token):
                self._file.sync()
            taken = True
        finally:
            if not taken:
                seat.unlock()
        return Handed(Grant(token, ttl_us / 1e6), (expires_us - ttl_us) / 1e6)

    def wish(self, name: str, holder: Holder, ttl: float) -> bytes:
        """Return what to write on the board, but for the pipe, to be handed a lease."""
        nonce, host, pid, version = holder
        lease = f"{self._namespace}\n{name}\n{self._world.clocks.era()}\n{int(ttl * 1e6)}"
        return f"{lease}\n{nonce}\n{host}\n{pid}\n{version}".encode()

    def _concerns(self, wish: Wish, name: str) -> bool:
        whose = wish[:3] == (self._namespace, name, self._world.clocks.era())
        return whose and wish.ttl_us > 0 and bool(wish.nonce)

    def _waits(self) -> bool:
        return self._called is not None and self._called.still_waits()


class SqlitePlace(LinePlace):
    """A place in line at which a lease can be handed over."""

    def __init__(self, world: World, line: Line, hand: HandOver) -> None:
        super().__init__(world, line)
        self._hand = hand
        self._wanted = ("", "")

    def _join(self) -> None:
        # Now, while there is time: whoever is handed the lease, or hands it on, is in a hurry.
        # Where it fails the grant is synced instead, and if that fails too it is told then.
        with suppress(FencepostError):
            self._hand.reserve.ahead()
        super()._join()

    def invite(self, name: str, *, holder: Holder, ttl: float) -> bool:
        """Let the lease be handed to us by whoever releases it; say whether it can be."""
        self._wanted = name, holder.nonce
        return self._hand.possible and self.wish(self._hand.wish(name, holder, ttl))

    async def accept(self) -> Handed | None:
        """Take what was handed to us, if we were called for that."""
        if not self.seat.deaf:
            return None
        seat = self.seat
        handed = await self.world.call(self._hand.take, *self._wanted, seat)
        if handed is not None:
            self.keep(self._wanted[1])
        return handed
