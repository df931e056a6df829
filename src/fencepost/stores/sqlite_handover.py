"""A lease is handed over in one commit: its holder's release is the next one's grant.

Whoever waits writes on the board what it wants. Whoever releases finds it there, grants the lease
to the first in line instead of setting it free, says so on the board, and calls it; the grant leans
on the pipe of that waiter, which takes the lease by locking the pipe, if nobody was there before.
Until then the lease is for whoever comes: so neither the dead nor the stopped nor those who gave up
keep anything that was handed to them. See docs/decisions/0007-direct-hand-over.md.
"""

from __future__ import annotations

import os
from contextlib import suppress

from fencepost.errors import FencepostError, OutcomeUnknown, StoreUnavailable
from fencepost.model.lease import Grant, next_token
from fencepost.stores.api import Handed
from fencepost.world.line import LinePlace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
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

# The release and the next grant in one, if the waiter still waits. By number, as in a wish.
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


# Linux may wake whom we call on our core although another one is idle: it would have the lease, and
# wait until we sleep. So it is let run.
_let_run: Callable[[], None] = getattr(os, "sched_yield", lambda: None)

# What a waiter wants to be handed, and the pipe that it will lean on: namespace, name and boot id;
# ttl in us, nonce, host, pid and version; pulse and its inode. Plain: it is made in a hurry.
Wish = tuple[str, str, str, int, str, str, int, str, str, str]


def read_wish(text: bytes) -> Wish | None:
    """Return what somebody wrote on the board, or None if it makes no sense."""
    try:
        where, name, era, ttl_us, nonce, host, pid, version, *on = text.decode().split("\n")
        pulse, inode = on
        wish = where, name, era, int(ttl_us), nonce, host, int(pid), version, pulse, inode
    except ValueError:
        return None
    return wish if nonce and wish[3] > 0 else None


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
        self._era = world.clocks.era()
        self.possible = bool(self._era) and hasattr(os, "fdatasync")
        # To whom each nonce gave its lease, where nobody can say whether that was committed.
        self._doubtful: dict[str, str] = {}

    def set_up(self, db: Connection) -> None:
        """Let statements ask who waits, for by then they have the write lock.

        So whoever withdraws its wish and then writes to the file, as an acquire does, knows what it
        was handed, or that it never will be.
        """
        db.create_function("fencepost_waits", 0, self._waits)

    def give(self, line: Line, called: Called, name: str, nonce: str, token: int) -> bool:
        """Release the lease, to the one who is called if possible; say whether it was ours."""
        # No object and no function more than it takes: everybody waits for this.
        offered: Called | None = called
        heir, handed, expires_us, again = "", 0, 0, False

        def work(db: Connection) -> int:
            nonlocal offered, heir, handed, expires_us, again
            if again:  # the file was busy: who waits by now?
                offered, handed = _called_anew(line, offered), 0
            again = True
            self._called = offered
            wish = None if offered is None else read_wish(offered.wish)
            if wish is not None and wish[:3] == (self._namespace, name, self._era):
                clocks = self._world.clocks
                ttl_us, heir = wish[3:5]
                wall_us = int(clocks.wall() * 1e6)
                handed = next_token(token, store_us=wall_us)
                # The trust of whoever takes it begins with the instant that is read here.
                expires_us = int(clocks.boottime() * 1e6) + ttl_us
                values = (handed, wall_us, expires_us, *wish, nonce, token)
                if db.execute(_HAND_OVER, values).rowcount:
                    return 1
            handed = 0
            return db.execute(RELEASE, (self._namespace, name, nonce, token)).rowcount

        try:
            changed = self._file.write_one(work)
            # Told only what will not be issued again, whatever happens.
            if (changed and handed and offered is not None) and (
                self.reserve.covers(handed) or self._file.sync_early()
            ):
                offered.board.hand(offered.slot, offered.ticket, handed, expires_us)
        except OutcomeUnknown:
            self._doubtful[nonce] = heir
            raise
        finally:
            if offered is not None:
                offered.hang_up()
        if offered is None:
            line.wake()  # who has come since
        elif handed:
            _let_run()
        return bool(changed)

    def was_given(self, nonce: str, *, to: str) -> bool:
        """Say whether that is whom this nonce gave its lease, although the reply got lost."""
        return bool(to) and self._doubtful.pop(nonce, "") == to

    def take_told(self, seat: Seat, ticket: int, ttl_us: int) -> Handed | None:
        """Take what the board says was handed to us. None if the row must be read.

        It was committed before it was written there. Who takes it over before its end warns us
        first, and keeps the lock from us until it is done: unwarned, we know what the row says.
        """
        if not seat.lock_unwarned():
            return None
        token, expires_us = seat.board.handed(seat.slot, ticket)
        if expires_us <= self._world.clocks.boottime() * 1e6:
            return None
        return Handed(Grant(token, ttl_us / 1e6), (expires_us - ttl_us) / 1e6)

    def take(self, name: str, nonce: str, seat: Seat, ticket: int) -> Handed | None:
        """Take what was handed to this nonce. None if nothing was, or it must be asked for.

        Locked before it is read, and whoever takes over what nobody has locked keeps the lock from
        us until it is done: so exactly one of us finds the lease to be its own.
        """
        if not seat.lock():
            return None  # somebody looks whether we live; to ask for it needs no lock
        now_us = int(self._world.clocks.boottime() * 1e6)
        values = (self._namespace, name, nonce, seat.name, self._era, now_us)
        taken = False
        try:
            found = self._file.read(lambda db: db.execute(_FIND_HANDED, values).fetchone())
            if found is None:
                return None
            token, expires_us, ttl_us = found
            # Whoever handed it over died, or its disk failed, or it knew of no reserve.
            told, _ = seat.board.handed(seat.slot, ticket)
            if token != told and not self.reserve.covers(token):
                self._file.sync()
            taken = True
        finally:
            if not taken:
                seat.unlock()
        return Handed(Grant(token, ttl_us / 1e6), (expires_us - ttl_us) / 1e6)

    def wish(self, name: str, holder: Holder, ttl: float) -> bytes:
        """Return what to write on the board, but for the pipe, to be handed a lease."""
        nonce, host, pid, version = holder
        lease = f"{self._namespace}\n{name}\n{self._era}\n{int(ttl * 1e6)}"
        return f"{lease}\n{nonce}\n{host}\n{pid}\n{version}".encode()

    def _waits(self) -> bool:
        return self._called is not None and self._called.still_waits()


def _called_anew(line: Line, called: Called | None) -> Called | None:
    if called is not None:
        called.hang_up()
    return line.call()


class SqlitePlace(LinePlace):
    """A place in line at which a lease can be handed over."""

    def __init__(self, world: World, line: Line, hand: HandOver) -> None:
        super().__init__(world, line)
        self._hand = hand
        self._wanted, self._ttl_us = ("", ""), 0

    def _join(self) -> None:
        # Now, while there is time: whoever is handed the lease, or hands it on, is in a hurry.
        # Where it fails the grant is synced instead, and if that fails too it is told then.
        with suppress(FencepostError):
            self._hand.reserve.ahead()
        super()._join()

    def invite(self, name: str, *, holder: Holder, ttl: float) -> bool:
        """Let the lease be handed to us by whoever releases it; say whether it can be."""
        self._wanted, self._ttl_us = (name, holder.nonce), int(ttl * 1e6)
        return self._hand.possible and self.wish(self._hand.wish(name, holder, ttl))

    async def accept(self) -> Handed | None:
        """Take what was handed to us, if we were called for that."""
        seat = self._seat
        if seat is None or not seat.deaf:
            return None
        handed = self._hand.take_told(seat, self._ticket, self._ttl_us)  # which needs no door
        if handed is None:
            try:
                handed = await self.world.call(self._hand.take, *self._wanted, seat, self._ticket)
            except (OutcomeUnknown, StoreUnavailable):
                return None  # to ask for it tells
        if handed is not None:
            self.keep(seat, self._wanted[1])
        return handed
