"""A holder in a process of its own, to be stopped, killed and asked."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE = 30.0


class HolderProcess:
    """``with HolderProcess(url, "x", ttl="2s") as holder``: it has the lease then."""

    def __init__(self, url: str, name: str, *, ttl: str) -> None:
        program = Path(__file__).parent / "holding_program.py"
        self.process = subprocess.Popen(
            [sys.executable, str(program), url, name, ttl],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.token = int(self._line())

    def believes(self) -> str:
        """Ask whether it still has it."""
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        return self._line()

    def pause(self) -> None:
        """Stop it where it is."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait(PATIENCE)

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on()
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def until(condition: Callable[[], object], *, within: float = PATIENCE) -> None:
    """Wait for something that must happen."""
    end = time.monotonic() + within
    while not condition():
        assert time.monotonic() < end, f"did not happen within {within} s"
        time.sleep(0.02)
