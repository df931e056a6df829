"""What passes between a run's parent and the process of its body: the task, and what became of it.

Both are written to memory that the two share, and not into a pipe: there is no reader that a
large one could wait for. What became of it counts only if it was written to its end.
"""

from __future__ import annotations

import io
import os
import pickle
import sys

from fencepost.model.named import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from fencepost.importing import Reference
    from fencepost.model.fenced import Former
    from fencepost.model.lease import Trust
    from fencepost.model.policy import Policy
    from fencepost.model.run import RunRecord

    Told = tuple[int | None, int | None, dict[str, int]]

_HEAD = 8  # bytes: how long the rest is, once it is there
_PLAIN = (str, int, float, bool, type(None))


class Task(NamedTuple):
    """All that a process needs to carry out a body under its parent's lease."""

    path: list[str]
    argv: list[str]
    function: Reference
    is_async: bool
    takes_run: bool
    store: bytes  # the URL, or a function that opens it: pickled, for it may live in __main__
    namespace: str
    run: RunRecord
    policy: Policy
    trust: Trust
    deadline: float | None
    window: tuple[int, int] | None
    scope: str
    news: int  # the descriptor by which the parent tells how the run stands
    word: int  # by which the body tells how far it has come
    outcome: int  # and how it ended
    payload: str | None = None
    rerun: int = 0
    believed: float | None = None  # until when, because of what its lease leans on; None if nothing
    formers: tuple[Former, ...] = ()  # the leases that earlier attempts of the run had


class Became(NamedTuple):
    """What became of a body. One that was told to stop, and did, leaves it to others to say why."""

    result: str | None = None
    raised: Raised | None = None
    stopped: bool = False
    told: Told = (None, None, {})
    doubts: list[str] = []  # noqa: RUF012 -- never changed
    checkpoint: str | None = None
    fault: bool = False  # whether what it raised stems from the ledger's database


class Raised(NamedTuple):
    """An error, and enough of it to make one like it where it cannot be unpickled."""

    pickled: bytes | None
    name: str
    words: str
    kinds: list[tuple[str, str]]  # the classes that it is one of, nearest first
    arguments: tuple[Any, ...]
    attributes: dict[str, Any]


def write(fd: int, became: Became) -> None:
    """Write what became of a body; the length last, which makes it count."""
    content = pickle.dumps(became)
    done = 0
    while done < len(content):
        done += os.pwrite(fd, content[done:], _HEAD + done)
    os.pwrite(fd, len(content).to_bytes(_HEAD), 0)


def read(fd: int) -> Became | None:
    """Return what became of a body; None if it never said so."""
    size = int.from_bytes(os.pread(fd, _HEAD, 0))
    content = b""
    while len(content) < size:
        more = os.pread(fd, size - len(content), _HEAD + len(content))
        if not more:
            return None
        content += more
    if not size:
        return None
    became: Became = pickle.loads(content)  # noqa: S301 -- written by our own code
    return became


def packed(error: BaseException) -> Raised:
    """Return an error as it can be passed on, whatever its class thinks of that."""
    pickled: bytes | None
    try:
        pickled = pickle.dumps(error)
        if type(pickle.loads(pickled)) is not type(error):  # noqa: S301 -- made a line above
            pickled = None
    except Exception:  # noqa: BLE001 -- whatever its class does when it is pickled
        pickled = None
    try:
        words = str(error)
    except Exception:  # noqa: BLE001 -- the same
        words = "(it cannot say what it is)"
    kind = type(error)
    kinds = [(c.__module__, c.__qualname__) for c in kind.__mro__ if issubclass(c, BaseException)]
    arguments = tuple(a for a in error.args if isinstance(a, _PLAIN))
    attributes = {k: v for k, v in vars(error).items() if isinstance(v, _PLAIN)}
    return Raised(pickled, kind.__name__, words, kinds, arguments, attributes)


def unpacked(raised: Raised) -> BaseException:
    """Return the error; or one of the same kinds, as far as they are known here."""
    if raised.pickled is not None:
        try:
            error = _Unpickler(io.BytesIO(raised.pickled)).load()
        except Exception:  # noqa: BLE001 -- then it is made by hand
            error = None
        if isinstance(error, BaseException):
            return error
    known = (_class(module, name) for module, name in raised.kinds)
    base = next((kind for kind in known if kind is not None), Exception)
    if (base.__module__, base.__qualname__) == raised.kinds[0]:
        kind = base
    else:
        kind = type(raised.name, (base,), {"__str__": lambda _: raised.words})
    made = kind.__new__(kind)
    made.args = raised.arguments
    vars(made).update(raised.attributes)
    return made


class _Unpickler(pickle.Unpickler):
    """Knows that what the other process calls ``__mp_main__`` is our ``__main__``."""

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class("__main__" if module == "__mp_main__" else module, name)


def _class(module: str, qualname: str) -> type[BaseException] | None:
    found: Any = sys.modules.get("__main__" if module == "__mp_main__" else module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None
