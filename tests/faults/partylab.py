"""Parties to a hand-over: stores side by side on one file, and processes that stop at a step."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from fencepost.model.lease import Holder
from fencepost.stores.sqlite import SqliteStore
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish
from fencepost.world.seat import let_go

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any

    from fencepost.stores.sqlite_handover import SqlitePlace
    from fencepost.world.api import Clocks


class Party:
    """A store of its own on the shared file, and what it did with one lease."""

    def __init__(
        self, path: Path, nonce: str, *, namespace: str = "default", clocks: Clocks | None = None
    ) -> None:
        world = BlockingWorld(clocks=clocks)
        self.store = SqliteStore(world, str(path / "leases.db"), namespace=namespace)
        self.nonce, self.holder = nonce, Holder(nonce, "here", 1)
        self.place: SqlitePlace | None = None
        self.sent: list[str] = []

    def acquire(self, name: str = "x") -> int:
        return finish(self.store.acquire(name, holder=self.holder, ttl=30)).token

    def release(self, token: int, name: str = "x") -> None:
        finish(self.store.release(name, nonce=self.nonce, token=token))

    def join(self, name: str = "x") -> SqlitePlace:
        """Stand in line behind somebody who holds the lease, and be open to a hand-over."""
        place = finish(self.store.line(name))
        assert place is not None
        assert place.invite(name, holder=self.holder, ttl=20.0)
        finish(place.turn(0))  # perhaps the first in line: who would now ask, and be refused
        self.place = place
        return place

    def accept(self) -> int | None:
        """Hear the call, and return the token that was handed over with it."""
        assert self.place is not None
        finish(self.place.turn(1.0))
        handed = finish(self.place.accept())
        return None if handed is None else handed.grant.token

    def trace(self) -> None:
        finish(self.store.peek("x"))
        connection = self.store._file._connection
        assert connection is not None
        connection.set_trace_callback(self.sent.append)

    def verbs(self) -> list[str]:
        return [statement.split()[0] for statement in self.sent if "PRAGMA" not in statement]

    def close(self) -> None:
        if self.place is not None and self.place._seat is not None:
            finish(self.place.leave(served=False))
        let_go(self.nonce)
        finish(self.store.close())


class Other:
    """A process of its own that does one thing, and stops or dies when it comes to a step."""

    def __init__(self, act: Callable[[], bool], *, ready: Callable[[], object]) -> None:
        self.pid = os.fork()
        if self.pid == 0:  # pragma: no cover -- another process
            code = 2
            try:
                code = 0 if act() else 1
            finally:
                os._exit(code)
        while not ready() and not self._gone():
            os.sched_yield()

    def _gone(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def comes_to_it(self) -> int:
        """Wait until it has stopped or died; return the signal."""
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        return os.WSTOPSIG(status) if os.WIFSTOPPED(status) else os.WTERMSIG(status)

    def goes_on(self) -> bool:
        """Let it run to its end; return whether it has the lease."""
        os.kill(self.pid, signal.SIGCONT)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        assert code in (0, 1), code
        return code == 0


def before(owner: Any, step: str, what: int) -> None:
    """Send ourselves a signal before that step, the first time that we come to it."""
    do = getattr(owner, step)
    first = iter([True])

    def stopped(*args: Any, **words: Any) -> Any:
        if next(first, False):
            os.kill(os.getpid(), what)
        return do(*args, **words)

    setattr(owner, step, stopped)


def after(owner: Any, step: str, what: int) -> None:
    """Send ourselves a signal after that step, the first time that we come to it."""
    do = getattr(owner, step)
    first = iter([True])

    def stopped(*args: Any, **words: Any) -> Any:
        done = do(*args, **words)
        if next(first, False):
            os.kill(os.getpid(), what)
        return done

    setattr(owner, step, stopped)
