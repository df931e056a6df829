"""Whoever waits is handed the lease by the very script that releases it, and told on a channel.

The line is kept by the server: first come, first served. To be told needs no request: the holder's
release grants the lease to the first in line and publishes its token, and the server says how many
have heard it. Nobody has: then that waiter is gone, and it is the next one's turn. What was granted
is in the record, whatever becomes of the message: who naps looks there too.

A waiter counts its trust from its last request that was answered with "wait": that is before the
grant, on its own clock, so no two clocks are compared. The answer names the last token so far: a
message about that one or an older one is about a grant that has ended, however late it is read.
"""

from __future__ import annotations

from fencepost.errors import FencepostError, Misuse, OutcomeUnknown, StoreUnavailable
from fencepost.model.lease import Grant
from fencepost.stores import redis_scripts as scripts
from fencepost.stores.api import Handed
from fencepost.stores.redis_rows import us
from fencepost.world.redis import packed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost.model.lease import Holder
    from fencepost.stores.redis_rows import Keys
    from fencepost.world.api import World
    from fencepost.world.redis import Ear, RedisServer

# Whoever waits says that it still does, and looks, at least this often.
_LONGEST_NAP, _PLAIN_NAP = 1.0, 0.25
_SHORTEST_NAP = 0.02
_PREFIX = "fp:turn:"


class RedisPlace:
    """A place in line, at which the lease can be handed to us."""

    def __init__(
        self,
        world: World,
        server: RedisServer,
        keys: Keys,
        *,
        places: dict[str, RedisPlace],
        who: Callable[[Holder], bytes],
    ) -> None:
        self._world, self._server, self._keys = world, server, keys
        self._places, self._who = places, who
        self._ear: Ear | None = None
        # What we want of whoever releases: nothing but to be woken, unless we say otherwise.
        self._wanted = b"", b"0", b"", keys.which
        self._nonce, self._ttl = "", 0.0
        self._came = b""  # when, as the server has it
        self._asked = False  # the lease may well be free: so ask before standing in line
        self._stands = False  # as far as we know, and whoever releases can reach us
        self._listed = False  # perhaps: something of ours may be in line
        self._doubted = False  # a request that might still put us in line was not answered
        self._sent = 0.0  # when we last asked, and were told to wait
        self._ended = 0  # the last token then
        self._nap = _PLAIN_NAP
        self._handed: Handed | None = None
        self._withdrawn = False

    @property
    def wish(self) -> bytes:
        """What stands in line for us; empty if we never stood there."""
        if self._ear is None:
            return b""
        nonce, long, who, which = self._wanted
        return b"\n".join((which, nonce, long, self._id(self._ear), who))

    @property
    def gone(self) -> bytes:
        """Whether an acquire is to take us out of the line, and to refuse what may come late."""
        return b"" if not self._withdrawn else b"2" if self._doubted else b"1"

    @staticmethod
    def _id(ear: Ear) -> bytes:
        return ear.channel.removeprefix(_PREFIX).encode()

    def invite(self, name: str, *, holder: Holder, ttl: float) -> bool:  # noqa: ARG002 -- the line's own
        """Let whoever releases the lease grant it to us."""
        long = us(ttl)
        self._wanted = holder.nonce.encode(), long, self._who(holder), self._keys.which
        self._nonce, self._ttl = holder.nonce, ttl
        self._places[holder.nonce] = self
        return True

    def withdraw(self) -> None:
        """Be handed nothing more: the next acquire takes our place out of the line, and tells."""
        self._withdrawn = True

    def was_answered(self, *, granted: bool) -> None:
        """Take note that an acquire of our nonce was answered."""
        if granted:
            self._was_served()
        elif self._withdrawn:
            self._stands = self._listed = False

    async def turn(self, patience: float) -> bool:
        """Wait until we are handed the lease, or called, at most ``patience``; say whether so."""
        if not self._asked and not self._server.has_ear:
            self._asked = True
            return True
        try:
            return await self._waited(patience)
        except OutcomeUnknown:
            return True  # to ask for it tells
        except StoreUnavailable:
            self._stands = False
            await self._world.sleep(min(patience, _PLAIN_NAP))
            return False

    async def first(self) -> bool:
        """Say whether nobody stands before us who was heard of lately."""
        rest = self._keys.three + packed(self.wish)
        try:
            return bool(await self._world.call(self._server.look, scripts.FIRST, rest))
        except StoreUnavailable:
            return False  # asked again after the next nap

    async def accept(self) -> Handed | None:
        """Take what was handed to us. None if that is long ago: then it must be asked for."""
        handed, self._handed = self._handed, None
        if handed is None or self._world.clocks.boottime() - handed.sent > self._ttl / 2:
            return None
        return handed

    async def leave(self, *, served: bool) -> None:
        """Leave the line. Who leaves without the lease lets the next one have its turn."""
        self._places.pop(self._nonce, None)
        ear = self._ear
        if ear is None:
            return
        left = not self._listed
        try:
            if self._listed:
                refused = self._nonce.encode() if self._doubted and not served else b""
                words = self.wish, self._keys.which, b"" if served else b"1", refused
                rest = self._keys.three + packed(*words)
                await self._world.call(self._server.run, scripts.LEAVE, rest)
                left = True
        except FencepostError:
            pass  # deaf as we are now, nothing can be handed to us, and the next ones look
        finally:
            self._ear = None
            if left and not self._doubted:
                self._server.put_by(ear)
            else:
                ear.close()

    async def _waited(self, patience: float) -> bool:
        clocks = self._world.clocks
        give_up = clocks.boottime() + patience
        if self._ear is None:
            self._ear = await self._world.call(self._server.ear, _PREFIX + self._world.nonce())
        ear = self._ear
        if ear.fd < 0:
            await self._world.call(ear.open)
        if not self._stands and await self._stand():
            return True
        left = give_up - clocks.boottime()
        if await self._world.readable(ear.fd, min(left, self._nap)):
            return await self._listened(ear)
        # It may be over meanwhile, or the call may have got lost. Plain waiters look by themselves.
        return await self._stand() and bool(self._nonce)

    async def _stand(self) -> bool:
        """Stand in line, or go on; say whether to ask. What is free and ours is granted at once."""
        fresh, self._stands = not self._stands, True
        self._listed = True
        sent = self._world.clocks.boottime()
        assert self._ear is not None, "who stands in line has an ear"
        mine = self.wish, self._came, self._id(self._ear)
        rest = self._keys.three + packed(*self._wanted, *mine)
        # Before it is sent: who is cancelled meanwhile learns nothing.
        doubted, self._doubted = self._doubted, True
        try:
            answer = await self._world.call(self._server.run, scripts.STAND, rest)
        except (StoreUnavailable, Misuse):
            self._doubted = doubted  # it did not happen
            raise
        self._doubted = doubted
        if type(answer) is int:
            self._was_served()
            grant = Grant(abs(answer), self._ttl, adopted=answer < 0)
            self._handed = Handed(grant, sent)
            return True
        if answer[:1] == b"S":
            return True  # to ask for it tells
        left_us, token, self._came = answer[1:].split(b" ")
        self._sent, self._ended = sent, int(token)
        if not self._nonce:
            return fresh  # a call may have come before we stood here
        ends = int(left_us) / 1e6 + 0.001 if left_us != b"0" else _PLAIN_NAP
        self._nap = max(min(ends, self._ttl / 4, _LONGEST_NAP), _SHORTEST_NAP)
        return False

    async def _listened(self, ear: Ear) -> bool:
        """Say whether we were called. What was meant for who had this ear before us is not."""
        try:
            said = await self._world.call(ear.heard)
        except StoreUnavailable:
            self._stands = False  # the server may have forgotten us, or handed us something
            return False
        for text in said:
            nonce, _, token = text.partition(b" ")
            if not token:
                return True
            if nonce == self._wanted[0] and int(token) > self._ended:
                self._was_served()
                self._handed = Handed(Grant(int(token), self._ttl), self._sent)
                return True
        return False

    def _was_served(self) -> None:
        self._stands = False
        self._listed = self._doubted  # what is still on its way may put us there again
