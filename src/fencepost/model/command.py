"""When a command must stop because of its lease, and which number says how it ended."""

from __future__ import annotations

import errno

from fencepost.model.lease import stop_times
from fencepost.model.named import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from fencepost.model.lease import Lean, Trust

# A command's children would still be at work under a shorter lease when others may start.
SHORTEST_TTL = 5.0
# From SIGTERM to SIGKILL when others may be waiting for the end already.
QUICK = 0.3
# How long it may take to have a command and all of its children stand still.
_TO_STAND_STILL = 0.15
# How long it may take to kill a command and all of its children before others may begin, also if
# the guardian does nothing, and the sentinel has to notice that first. Where the lease is not
# about to be renewed shorter and shorter, a fifth of the ttl is more than that.
_TO_KILL = 0.4
_NEVER = float("inf")
# How many of the children that a command left behind are told of by name.
MOST_NAMED = 10
NOT_FOUND, NOT_EXECUTABLE = 127, 126


class Until(NamedTuple):
    """When a command is asked to stop, when it is killed, and from when on it must stand still.

    It stands still (SIGSTOP) while nobody knows whether its lease is another's by now. Either it
    goes on from there, or it ends without having done anything more.
    """

    ask: float
    kill: float
    still: float = _NEVER


def still_at(lean: Lean | None) -> float:
    """Return from when on a command must stand still, unless its sign of life is proven again."""
    return _NEVER if lean is None else lean.until() - _TO_STAND_STILL


def must_end(held: Trust, *, ends: float | None, notice: float) -> tuple[float, float]:
    """Return when a command is asked to stop and when it is killed, unless the lease is renewed.

    ``ends`` is the instant at which ``max_hold`` is used up, and others may begin; the command
    hears of it ``notice`` seconds before it is killed for that.
    """
    ask, kill = stop_times(held)
    if ends is not None:
        ask, kill = min(ask, used_up_at(ends, notice=notice)), min(kill, ends - _TO_KILL)
    return ask, kill


def used_up_at(ends: float, *, notice: float) -> float:
    """Return when a command hears that ``max_hold``, which ends at ``ends``, is as good as over."""
    return ends - _TO_KILL - notice


def must_stop(
    held: Trust, *, deadline: float | None, asked_at: float | None, grace: float
) -> tuple[float, float]:
    """Return when an isolated body is asked to stop and when it is killed.

    Because its lease is not renewed, its time is up, or somebody asked for it: whatever comes
    first. Only the lease leaves it no ``grace``: others may have it soon.
    """
    ask, kill = stop_times(held)
    for instant in (deadline, asked_at):
        if instant is not None:
            ask, kill = min(ask, instant), min(kill, instant + grace)
    return min(ask, kill), kill


def notice_of(grace: float, *, max_hold: float | None) -> float:
    """Return how long before the end of ``max_hold`` a command is asked to stop."""
    return grace if max_hold is None else min(grace, max_hold / 2)


def code_of_failure(number: int) -> int:
    """Return the exit code of a shell for a command that could not be started, by its errno."""
    return NOT_FOUND if number in (errno.ENOENT, errno.ENOTDIR) else NOT_EXECUTABLE


def shell_code(code: int) -> int:
    """Return an exit code as a shell would: a death by signal n, given as -n, is 128 + n."""
    return code if code >= 0 else 128 - code


class Children(NamedTuple):
    """The processes that a command left behind, by number and program, and what became of them.

    ``fate`` is "stopped", or "left" where the job leaves them alone. Arguments are not kept: they
    may be secret.
    """

    fate: str
    total: int
    named: tuple[tuple[int, str], ...]

    @property
    def event(self) -> str:
        """What a run's record calls it."""
        return f"children_{self.fate}"

    @property
    def told_fate(self) -> str:
        """What became of them, in a sentence."""
        return "left alone" if self.fate == "left" else self.fate

    def __str__(self) -> str:
        told = ", ".join(f"{name} (pid {pid})" for pid, name in self.named)
        more = self.total - len(self.named)
        return f"{told} and {more} more" if more else told


def children_from(fate: str, total: str, words: Sequence[str]) -> Children:
    """Return what a guard told in words, each a number and the program's name in hexadecimal."""
    pairs = (word.partition(":") for word in words)
    named = tuple((int(pid), _printable(bytes.fromhex(name).decode())) for pid, _, name in pairs)
    return Children(fate, int(total), named)


def _printable(name: str) -> str:
    """Return a program's name as a terminal and a log can show it."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)
