"""To run a command under a lease is to renew it until nothing of the command is left.

The wrapper of a command has one thread, and this loop is its keeper. It stops nothing by itself:
after each renewal it tells the guards until when the command may run, and they see to it.
"""

from __future__ import annotations

from fencepost.flows.keep import renew
from fencepost.model.command import QUICK, Until, must_end, still_at, used_up_at
from fencepost.model.lease import Phase
from fencepost.model.named import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from fencepost.flows.keep import Hold
    from fencepost.stores.api import LeaseStore
    from fencepost.world.api import World

    class Command(Protocol):
        """A command under guard; ``world.guardian.Guarded`` is the real one."""

        report: int
        asked: bool
        orphaned: bool
        gone: bool

        @property
        def code(self) -> int:
            """How the command ended, as a shell would say it."""

        def extend(self, ask_at: float, kill_at: float, still_at: float) -> None:
            """Tell the guards until when the command may run."""

        def listen(self) -> None:
            """Take note of what the guards reported, and wake them if they are late."""

        def mop_up(self) -> None:
            """Take one step at ending what a dead guardian left behind."""


# A wait does not count the time a machine was suspended, and a lease does.
_LONGEST_NAP = 1.0
_GLANCE = 0.02


class Ended(NamedTuple):
    """How a command ended, and what befell its lease meanwhile."""

    code: int
    why: str | None
    stopped: bool


async def oversee(
    world: World,
    store: LeaseStore,
    hold: Hold,
    command: Command,
    *,
    notice: float,
    stop: Callable[[], tuple[float, float]] | None = None,
) -> Ended:
    """Keep the lease while the command runs; return once nothing of it is left.

    ``stop`` says when it is to be asked and killed for other reasons than its lease.
    """
    told = Until(*must_end(hold.trust, ends=hold.ends, notice=notice))
    while not command.gone:
        now = world.clocks.boottime()
        if now >= hold.wakes():
            await renew(world, store, hold)
            now = world.clocks.boottime()
        until = Until(*must_end(hold.trust, ends=hold.ends, notice=notice), still_at(hold.lean))
        if stop is not None:
            ask_at, kill_at = stop()
            until = until._replace(ask=min(until.ask, ask_at), kill=min(until.kill, kill_at))
        if hold.phase(now) is Phase.LOST:
            # Others may have it already, so there is no time to lose; and this is the last word.
            until = Until(min(told.ask, now), min(told.kill, now + QUICK), until.still)
        if until != told:
            command.extend(*until)
            told = until
        if command.orphaned:
            await world.call(command.mop_up)
            await world.sleep(_GLANCE)
        else:
            deadlines = [at - now for at in (until.kill, until.still) if at > now]
            nap = min(hold.wakes() - now, _LONGEST_NAP, *deadlines)
            await world.readable(command.report, nap)
            command.listen()
    now = world.clocks.boottime()
    hold.phase(now)  # whoever was stopped for long learns of both ends at once
    used_up = hold.ends is not None and now >= used_up_at(hold.ends, notice=notice)
    stopped = command.asked or command.orphaned
    return Ended(command.code, _why(hold, command, used_up=used_up), stopped)


def _why(hold: Hold, command: Command, *, used_up: bool) -> str | None:
    if hold.why_lost is not None:
        return hold.why_lost
    if not command.asked:
        return "its guardian was killed" if command.orphaned else None
    return "max_hold is used up" if used_up else "no renewal was confirmed in time"
