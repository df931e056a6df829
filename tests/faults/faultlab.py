"""What the fault tests share: puppets to kill and pause, clocks to set, patience with a limit."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fencepost import Fencepost
from fencepost.world.board import board_of
from fencepost.world.clocks import SystemClocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

    from fencepost.model.event import JobEvent, LeaseEvent
    from fencepost.stores.api import LeaseStore
    from fencepost.world.api import World

PROGRAM = Path(__file__).with_name("puppet_program.py")
PATIENCE = 30.0


def boottime() -> float:
    return SystemClocks().boottime()


def until(condition: Callable[[], object], *, within: float = PATIENCE) -> float:
    """Look until ``condition`` is true; return how long that took, or fail."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within, f"not within {within} s"
        time.sleep(0.002)
    return time.monotonic() - began


class SteppedClocks(SystemClocks):
    """The machine's clocks, each of which can be set by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.wall_offset = 0.0
        self.boot_offset = 0.0
        self.boot: str | None = "this boot"
        self.time_namespace = "time:[1]"

    def wall(self) -> float:
        return super().wall() + self.wall_offset

    def boottime(self) -> float:
        return super().boottime() + self.boot_offset

    def era(self) -> str | None:
        return self.boot

    def namespace(self) -> str:
        return self.time_namespace


class Puppet:
    """A process of its own, in a process group of its own, that does what it is told."""

    def __init__(self, url: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self.pid = self.process.pid
        self._heard = b""
        assert self.answer() == "ready"

    def tell(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, *, within: float = PATIENCE) -> str:
        assert self.process.stdout is not None
        deadline = time.monotonic() + within
        while b"\n" not in self._heard:
            left = deadline - time.monotonic()
            ready = select.select([self.process.stdout], [], [], max(0.0, left))[0]
            assert ready, f"no answer within {within} s"
            some = os.read(self.process.stdout.fileno(), 65536)
            assert some, "the puppet is gone"
            self._heard += some
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode()

    def ask(self, *words: object, within: float = PATIENCE) -> str:
        self.tell(*words)
        return self.answer(within=within)

    def granted(self, *words: object) -> tuple[int, float]:
        """Acquire; return the token and the boot-time instant of the grant."""
        return self.grant(self.ask("acquire", *words))

    @staticmethod
    def grant(answer: str) -> tuple[int, float]:
        word, *rest = answer.split()
        assert word == "granted", answer
        return int(rest[0]), float(rest[1])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def leave(self) -> None:
        """Let the program come to its end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def kill_group(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        until(lambda: self.state() == "T")

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def state(self) -> str:
        return Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


@contextmanager
def fencepost(
    store: str | Callable[[World, str], LeaseStore], *, clocks: SystemClocks | None = None
) -> Iterator[Fencepost]:
    """Open a Fencepost and close it again."""
    fp = Fencepost(store, clocks=clocks)
    try:
        yield fp
    finally:
        fp.close()


class Heard:
    """A subscriber that remembers what it was told, and when."""

    def __init__(self) -> None:
        self.events: list[tuple[str, float]] = []

    def __call__(self, event: JobEvent | LeaseEvent) -> None:
        self.events.append((event.what, boottime()))

    def names(self) -> list[str]:
        return [what for what, _ in self.events]

    def at(self, what: str) -> float:
        return next(at for name, at in self.events if name == what)


def url_of(folder: Path) -> str:
    return f"sqlite:///{folder}/leases.db"


def waiters(folder: Path) -> list[int]:
    """Return the tickets of those who stand in line, in their order."""
    if not (folder / "leases.db-live").exists():
        return []
    return sorted(filter(None, board_of(str(folder / "leases.db-live")).tickets()))
