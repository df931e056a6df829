"""``finish`` is the whole blocking driver: a flow whose doors never suspend ends in one send."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any, TypeVar

    T = TypeVar("T")


def finish(flow: Coroutine[Any, Any, T]) -> T:
    """Run a flow of a blocking world to its end and return its result."""
    try:
        flow.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    flow.close()
    raise AssertionError("a flow suspended in a blocking world")
