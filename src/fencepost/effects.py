"""Effects that happen once: an item is begun before its effect and ended after it.

What happens in between, happens to one who may do it. A crash in between leaves the item in doubt.
"""

from __future__ import annotations

from fencepost.errors import FenceMisused, InDoubt
from fencepost.fence import must_await, record_item
from fencepost.flows.attempt import described, kept_words
from fencepost.flows.course import begin, end
from fencepost.model.item import Found, ItemState
from fencepost.world.flow import finish

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType
    from typing import Any, Self

    from fencepost.flows.course import Course, Doors
    from fencepost.lease import Lease

    Ends = list[tuple[str, ItemState, str | None]]


class First:
    """Whether an effect is ours to have. True if so; ``key`` is its idempotency key."""

    __slots__ = ("found", "key")

    def __init__(self, found: Found, key: str) -> None:
        self.found, self.key = found, key

    def __bool__(self) -> bool:
        return self.found.go

    @property
    def in_doubt(self) -> bool:
        """Whether an earlier attempt began it and never told how it ended."""
        return self.found in (Found.DOUBT, Found.AGAIN)

    def __repr__(self) -> str:
        return f"<First {self.found.value} {self.key!r}>"


class _Item:
    """One item of one course."""

    def __init__(self, doors: Doors, course: Course, scope: str, item: str) -> None:
        self._doors, self._course, self._scope, self._item = doors, course, scope, item
        self._found = Found.OPEN

    def _first(self, found: Found) -> First:
        self._found = found
        if found is Found.DOUBT:
            self._course.doubt(self._item)
        return First(found, f"{self._scope}/{self._item}")

    def _ends(self, error: BaseException | None) -> Ends:
        return _ends(self._found, self._item, error)


def _ends(found: Found, item: str, error: BaseException | None) -> Ends:
    """Return what is to be said of an item whose block was left.

    An error says that the effect did not happen. ``InDoubt`` says that nobody knows, and so does
    whatever is not an ``Exception``: an interrupt may come at any moment.
    """
    if not found.go:
        return []
    if error is None:
        return [(item, ItemState.DONE, None)]
    if isinstance(error, InDoubt) or not isinstance(error, Exception):
        return []
    return [(item, ItemState.FAILED, described(error))]


class Once(_Item):
    """``with run.once(item) as first``."""

    def __enter__(self) -> First:
        found = finish(begin(self._doors, self._course, self._scope, [self._item]))
        return self._first(found[0])

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        ends = self._ends(error)
        if ends:
            finish(end(self._doors, self._course, self._scope, ends))


class AsyncOnce(_Item):
    """``async with run.once(item) as first``."""

    async def __aenter__(self) -> First:
        found = await begin(self._doors, self._course, self._scope, [self._item])
        return self._first(found[0])

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        ends = self._ends(error)
        if ends:
            await end(self._doors, self._course, self._scope, ends)


class InOther:
    """``with run.once(item, conn=conn) as first``: the item lives and dies with your transaction.

    There is no doubt here: effect and item commit together, or neither does.
    """

    def __init__(self, lease: Lease, conn: object, scope: str, item: str) -> None:
        self._lease, self._conn, self._scope, self._item = lease, conn, scope, item

    def __enter__(self) -> First:
        if must_await(self._conn):
            raise FenceMisused(
                "an async connection is awaited: write 'async with run.once(…, conn=conn)', in a "
                "job whose body is async"
            )
        self._lease.fence(self._conn)
        return self._first(record_item(self._conn, **self._what()))

    def __exit__(self, *_: object) -> None:
        """Leave the end to the transaction's own."""

    async def __aenter__(self) -> First:
        if not must_await(self._conn):
            return self.__enter__()
        await self._lease.fence(self._conn)
        return self._first(await record_item(self._conn, **self._what()))

    async def __aexit__(self, *_: object) -> None:
        """Leave the end to the transaction's own."""

    def _what(self) -> dict[str, Any]:
        scope = f"{self._lease.namespace}/{self._scope}"
        return {"scope": scope, "item": self._item, "token": self._lease.token}

    def _first(self, first: bool) -> First:  # noqa: FBT001 -- what the database has answered
        return First(Found.FIRST if first else Found.DONE, f"{self._scope}/{self._item}")


class _Batch:
    """Many items of one course. Iterate over those that are yours to do.

    Leaving the block says ``done`` of all that were not said to have ``failed``; leaving it by
    an error says it only of those for which ``done`` was said.
    """

    def __init__(self, doors: Doors, course: Course, scope: str, items: Sequence[str]) -> None:
        self._doors, self._course, self._scope = doors, course, scope
        self._items = list(dict.fromkeys(items))
        self._found: dict[str, Found] = {}
        self._said: dict[str, tuple[ItemState, str | None]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter([item for item, found in self._found.items() if found.go])

    def __len__(self) -> int:
        return sum(found.go for found in self._found.values())

    def key_of(self, item: str | int) -> str:
        """Return the idempotency key of one of the items."""
        return f"{self._scope}/{item}"

    def done(self, item: str | int) -> None:
        """Say that an item's effect has happened."""
        self._said[str(item)] = (ItemState.DONE, None)

    def failed(self, item: str | int, error: BaseException | str = "") -> None:
        """Say that an item's effect did not happen; the batch goes on."""
        text = described(error) if isinstance(error, BaseException) else kept_words(error)
        self._said[str(item)] = (ItemState.FAILED, text or None)

    @property
    def report(self) -> dict[str, object]:
        """How it went: how many are done (also before) and failed, and what remains to be done."""
        done = [i for i, found in self._found.items() if self._state(i, found) == "done"]
        failed = [i for i, found in self._found.items() if self._state(i, found) == "failed"]
        remaining = [i for i in self._found if i not in {*done, *failed}]
        return {"done": len(done), "failed": len(failed), "remaining": [*failed, *remaining]}

    def _state(self, item: str, found: Found) -> str:
        if item in self._said:
            return self._said[item][0].value
        return "done" if found is Found.DONE else ""

    def _took(self, found: list[Found]) -> None:
        self._found = dict(zip(self._items, found, strict=True))
        self._course.doubt(*(i for i, what in self._found.items() if what is Found.DOUBT))

    def _ends(self, error: BaseException | None) -> Ends:
        if error is None:
            for item in self:
                self._said.setdefault(item, (ItemState.DONE, None))
        return [(item, *self._said[item]) for item in self if item in self._said]


class Batch(_Batch):
    """``with run.batch(items) as mine: for item in mine: …``."""

    def __enter__(self) -> Self:
        self._took(finish(begin(self._doors, self._course, self._scope, self._items)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        ends = self._ends(error)
        if ends:
            finish(end(self._doors, self._course, self._scope, ends))


class AsyncBatch(_Batch):
    """``async with run.batch(items) as mine: for item in mine: …``."""

    async def __aenter__(self) -> Self:
        self._took(await begin(self._doors, self._course, self._scope, self._items))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        ends = self._ends(error)
        if ends:
            await end(self._doors, self._course, self._scope, ends)
