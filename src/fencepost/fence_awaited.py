"""A fence on an async connection is something to be awaited, and never passed over in silence.

The module of a driver's fence says how: ``require_transaction`` refuses, ``awaited_guard`` raises
the guard, ``awaited_item`` records an item, and ``cut`` ends a connection at once.
"""

from __future__ import annotations

from fencepost.errors import TokenStale
from fencepost.model.lease import admits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from typing import Any, Self

    from fencepost.model.fenced import Mark


def compared(mark: Mark, highest: int) -> None:
    """Raise ``TokenStale`` if a resource that stands at ``highest`` refuses the holder's mark."""
    if mark.own and not admits(highest, mark.token):
        raise TokenStale(mark.resource, token=mark.token, highest=highest)


class Fencing:
    """A fence on an async connection, to be awaited: until then nothing is guarded.

    If nobody ever awaits it the connection is closed, so that nothing unguarded can be committed.
    """

    def __init__(self, fence: Any, conn: Any, marks: Sequence[Mark]) -> None:
        self._awaited = True  # nothing to close for while the misuse is told
        fence.require_transaction(conn)
        self._fence, self._conn, self._marks = fence, conn, marks
        self._awaited = False
        self._after: Callable[[], None] = lambda: None

    def then(self, after: Callable[[], None]) -> Self:
        """Call ``after`` once the token is admitted."""
        self._after = after
        return self

    def __await__(self) -> Generator[Any, Any, None]:
        self._awaited = True
        return self._admit().__await__()

    def __del__(self) -> None:
        if not self._awaited:
            self._fence.cut(self._conn)

    async def _admit(self) -> None:
        self._fence.require_transaction(self._conn)  # it may have ended since the fence was made
        for mark in self._marks:
            resource, token = mark.resource, mark.token
            highest = await self._fence.awaited_guard(self._conn, resource=resource, token=token)
            compared(mark, highest)
        self._after()
