"""What tests share that stop an instance by signals: its process, and the run it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedlab import until, url_of

from fencepost import Fencepost

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fencepost.model.run import RunRecord

PROGRAM = Path(__file__).with_name("stop_program.py")
FACES = ["blocking", "aio", "up"]
GRACE = 2.0
# How much longer than its grace an instance may take, and how long after a second signal.
MORE, AT_ONCE = 1.0, 1.0
LOCKS = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA busy_timeout = 5000")
db.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""


class Stopped:
    """One process that is to be stopped, and what it wrote."""

    def __init__(self, folder: Path, face: str, **options: object) -> None:
        options = {"body": "deaf", "grace": GRACE, **options}
        self.errors = folder / f"stderr-{time.time_ns()}"
        words = [sys.executable, str(PROGRAM), url_of(folder), str(folder), face]
        words.append(json.dumps(options))
        environment = dict(os.environ)
        if face == "up":
            code = "import sys; from fencepost.cli.main import main; sys.exit(main())"
            words = [sys.executable, "-c", code, "up", "stop_program:fp"]
            words += ["--grace", f"{options['grace']}s"]
            environment |= {
                "STOP_URL": url_of(folder),
                "STOP_FOLDER": str(folder),
                "STOP_OPTIONS": json.dumps(options),
                "PYTHONPATH": str(PROGRAM.parent),
            }
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                words, env=environment, start_new_session=True, stderr=errors
            )
        self._folder, self.asked_at = folder, 0.0

    def marks(self, what: str) -> list[float]:
        """Return when its body did something, by the machine's boot-time clock."""
        path = self._folder / "marks"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [
            float(at) for word, pid, at in lines if (word, pid) == (what, str(self.process.pid))
        ]

    def begin(self) -> None:
        """Wait until its body has begun."""
        until(lambda: self.marks("began"))

    def ask(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.asked_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.process.send_signal(number)

    def order(self, grace: float) -> None:
        """Have the program itself call ``fp.stop(grace=…)``."""
        written = self._folder / "orders"
        written.write_text(str(grace))
        written.rename(self._folder / "order")

    def took(self) -> float:
        """Wait for the end, which is a good one; return how long after the last signal it came."""
        assert self.process.wait(25) == 0, self.said()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - self.asked_at

    def said(self) -> str:
        return self.errors.read_text()

    def told(self, event: str, about: str = "job=steps run_id=steps@") -> str:
        """Return the only line about an event."""
        start = f"{event} {about}"
        lines = [line for line in self.said().splitlines() if start in line]
        assert len(lines) == 1, self.said()
        return lines[0]


@contextmanager
def stopped(folder: Path, face: str, **options: object) -> Iterator[Stopped]:
    """A process that is to be stopped, and does not outlive the test."""
    one = Stopped(folder, face, **options)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait()


def owed(folder: Path, **policies: Any) -> None:
    """Leave one slot of the past to whichever instance comes."""
    hour = int(time.time()) // 3600 * 3600
    with Fencepost(url_of(folder)) as fp:
        fp.job("steps", every="1h", **policies)(lambda: None)
        fp.backfill("steps", hour - 3600, hour, wait=False)


def only_run(folder: Path) -> RunRecord:
    with Fencepost(url_of(folder)) as fp:
        (run,) = fp.runs("steps")
    return run


def resumed(folder: Path, **policies: Any) -> RunRecord:
    """Have another instance carry on with what is left; return the run when it has ended."""
    with Fencepost(url_of(folder)) as fp:
        fp.job("steps", every="1h", loss_pause="100ms", **policies)(lambda: "elsewhere")

        def over() -> bool:
            fp.tick()
            return fp.runs("steps")[-1].state.terminal

        until(over, within=60)
        return fp.runs("steps")[-1]  # perhaps the next hour has begun meanwhile


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Have another process keep the file for itself."""
    words = [sys.executable, "-c", LOCKS, str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        try:
            yield
        finally:
            other.kill()
