"""Waiters stand in line for a lock of the server's; only the first of them asks for the lease.

``GET_LOCK`` keeps the line: it is asked for on a connection of the waiter's own, and waited for
without a thread. Who is first sleeps on that connection, and is woken by whoever releases the
lease, who interrupts the sleep. All of this is a hint: the lease is decided by its row.
"""

from __future__ import annotations

from fencepost.errors import FencepostError, StoreUnavailable
from fencepost.stores.mariadb_rows import FIRST_IN_LINE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self

    from fencepost.world.api import World
    from fencepost.world.mariadb import Bell, MariaServer

# How long the first in line sleeps before it looks whether the holder has vanished, and how long
# the others wait before they look whether the first has.
_NAP, _LONG_NAP = 0.2, 1.0
_LONGEST_WAIT = 86_400

_STAND = f"SELECT GET_LOCK(%(line)s, {_LONGEST_WAIT})"
_SLEEP = f"SELECT SLEEP({_NAP})"
_LEAVE = "SELECT RELEASE_LOCK(%(line)s)"
_WAKE = "KILL QUERY %(number)s"


def wake(server: MariaServer, number: int) -> None:
    """Wake the one who is first in line; it finds out by itself if this fails."""
    try:
        server.run(_WAKE, {"number": number})
    except FencepostError:  # it has gone, or belongs to another user of the server
        return


class MariaPlace:
    """One waiter's place in a line."""

    _bell: Bell | None = None

    def __init__(self, world: World, server: MariaServer, line: str) -> None:
        self._world, self._server, self._values = world, server, {"line": line}
        self._is_first = False
        self._asked = False  # something on this connection whose answer is still to come

    @classmethod
    async def joined(cls, world: World, server: MariaServer, line: str) -> Self:
        """Stand at the end of the line."""
        place = cls(world, server, line)
        joined = False
        try:
            await world.call(place._stand)
            joined = True
        finally:
            if not joined:  # cancelled meanwhile: nobody must wait behind a place without a waiter
                place._lose()
        return place

    async def turn(self, patience: float) -> bool:
        """Wait until we are first, or are woken as the first; say whether that is so."""
        bell = self._bell
        if bell is None:  # the connection was lost, and the place with it
            await self._world.sleep(min(patience, _NAP))
            await self._world.call(self._stand_again)
            return True
        if self._is_first and not self._asked:
            # While we asked for the lease we could not be woken: so ask once more.
            await self._world.call(self._ask, _SLEEP)
            return True
        nap = 2 * _NAP if self._is_first else _LONG_NAP
        if not await self._world.readable(bell.fd, min(patience, nap)):
            return False
        return await self._world.call(self._heard)

    async def first(self) -> bool:
        """Say whether nobody alive stands before us."""
        return self._is_first or await self._world.call(self._nobody_is_first)

    async def leave(self, *, served: bool) -> None:  # noqa: ARG002 -- the next is woken either way
        """Leave the line; whoever is next hears of it from the server."""
        await self._world.call(self._leave)

    def _stand(self) -> None:
        self._bell = self._server.bell()
        self._is_first = False
        self._ask(_STAND)

    def _stand_again(self) -> None:
        try:
            self._stand()
        except StoreUnavailable:
            self._lose()

    def _ask(self, text: str) -> None:
        assert self._bell is not None, "who has left the line does not ask"
        try:
            self._bell.ask(text, self._values)
            self._asked = True
        except StoreUnavailable:
            self._lose()

    def _heard(self) -> bool:
        """Take the answer: we are first, or we were woken, or the nap is over."""
        assert self._bell is not None, "who has left the line hears nothing"
        try:
            answer = self._bell.hear()
        except FencepostError:
            self._lose()
            return True  # to ask tells more
        self._asked = False
        if self._is_first:
            return answer != 0  # None or 1 if the sleep was interrupted
        if answer != 1:  # interrupted in line, by whomever: stand again, at the end
            self._ask(_STAND)
            return False
        self._is_first = True
        return True

    def _nobody_is_first(self) -> bool:
        try:
            [found] = self._server.run(FIRST_IN_LINE, self._values)
        except StoreUnavailable:
            return False  # nor can anybody else be told
        return found.rows[0][0] is None

    def _leave(self) -> None:
        bell, self._bell = self._bell, None
        if bell is None:
            return
        try:
            if self._asked:
                self._server.run(_WAKE, {"number": bell.number})
                self._is_first = bell.hear() == 1 or self._is_first
            if self._is_first:
                bell.ask(_LEAVE, self._values)
                bell.hear()
        except BaseException as error:
            bell.drop()  # the server notices
            if not isinstance(error, FencepostError):
                raise
        else:
            self._server.put_by(bell)

    def _lose(self) -> None:
        if self._bell is not None:
            self._bell.drop()
        self._bell, self._is_first, self._asked = None, False, False

    def __del__(self) -> None:
        self._lose()  # a signal came before we could leave
