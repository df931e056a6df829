"""What is compared runs side by side: noise then hits both alike, and only ratios are read."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from fencepost.world.disk import file_system

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

Row = dict[str, object]


class Spread(NamedTuple):
    """The middle of many measurements, and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the median and quartiles of ``values``."""
        ordered = sorted(values)
        return cls(*(quantile(ordered, share) for share in (0.5, 0.25, 0.75)))

    def __str__(self) -> str:
        return f"{shown(self.median)} ({shown(self.low)} to {shown(self.high)})"


class Target(NamedTuple):
    """What a measurement must reach: one of the bounds."""

    at_most: float = math.inf
    at_least: float = -math.inf

    def judged(self, value: float) -> str:
        """Return the bound and whether ``value`` keeps it."""
        bound = f"<= {self.at_most}" if math.isfinite(self.at_most) else f">= {self.at_least}"
        return f"{bound}: {'met' if self.at_least <= value <= self.at_most else 'MISSED'}"


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` of the ordered values lie, interpolated."""
    if not ordered:
        return math.nan
    place = (len(ordered) - 1) * share
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def ratios(ours: Sequence[float], floor: Sequence[float]) -> Spread:
    """Compare two lists pair by pair: each pair was measured at about the same time."""
    return Spread.of(mine / base for mine, base in zip(ours, floor, strict=True))


def in_turn(
    sides: dict[str, Callable[[], None]], *, rounds: int, per_round: int
) -> dict[str, list[float]]:
    """Time the sides operation by operation, each first as often as last.

    Returns for each side the median seconds of one operation in each round.
    """
    medians: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides)
    for _ in range(rounds):
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(per_round):
            order.reverse()
            for name in order:
                operation = sides[name]
                begin = time.perf_counter()
                operation()
                times[name].append(time.perf_counter() - begin)
        for name, samples in times.items():
            medians[name].append(quantile(sorted(samples), 0.5))
    return medians


class Crew:
    """Processes that do the same work at the same time, each asked by one line of JSON.

    ``words`` start a member that is not this script of ours: a peer.
    """

    def __init__(
        self, script: str, *arguments: str, count: int, words: Sequence[str] | None = None
    ) -> None:
        self._members = [
            subprocess.Popen(
                [*(words or (sys.executable, script, "--worker")), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(count)
        ]

    def ask(self, **order: object) -> list[dict[str, Any]]:
        """Send an order to all, then collect what each has to say."""
        text = json.dumps(order) + "\n"
        for member in self._members:
            assert member.stdin is not None
            member.stdin.write(text)
            member.stdin.flush()
        return self.hear()

    def hear(self) -> list[Any]:
        """Collect what each has to say, unasked."""
        return [self._answer(member) for member in self._members]

    def close(self) -> None:
        """Let them end, and wait for it."""
        for member in self._members:
            assert member.stdin is not None
            member.stdin.close()
        for member in self._members:
            assert member.stdout is not None
            member.wait(timeout=30)
            member.stdout.close()

    @staticmethod
    def _answer(member: subprocess.Popen[str]) -> Any:
        assert member.stdout is not None
        text = member.stdout.readline()
        if not text:
            raise RuntimeError(f"a worker ended with code {member.wait()}: {member.args!r}")
        return json.loads(text)


def serve(work: Callable[..., Row]) -> None:
    """Be a member of a crew: answer each order until there are no more."""
    for text in sys.stdin:
        print(json.dumps(work(**json.loads(text))), flush=True)


@contextlib.contextmanager
def workdir() -> Iterator[str]:
    """Make a folder that goes away afterwards; ``BENCH_DIR`` says on which disk."""
    folder = tempfile.mkdtemp(prefix="fencepost-bench-", dir=os.environ.get("BENCH_DIR"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def cpu_seconds() -> float:
    """Return the CPU time of this process, all of its threads included."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def table(title: str, rows: Sequence[Row]) -> None:
    """Print rows as a Markdown table; the first row names the columns."""
    columns = list(rows[0])
    print(f"\n### {title}\n")
    print("| " + " | ".join(columns) + " |")
    print("|" + " --- |" * len(columns))
    for row in rows:
        print("| " + " | ".join(shown(row.get(column, "")) for column in columns) + " |")
    sys.stdout.flush()


def shown(value: object) -> str:
    """Return three significant digits of a number, and anything else as it is."""
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value) or value == 0:
        return f"{value:.0f}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 5)}f}"


def result(experiment: str, **facts: object) -> None:
    """Print all that was found as one line for programs to read."""
    machine = {
        "python": platform.python_version(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "disk": file_system(os.environ.get("BENCH_DIR", tempfile.gettempdir())),
        "load": os.getloadavg()[0],
    }
    print("\nRESULT " + json.dumps({"experiment": experiment, **facts, "machine": machine}))
    sys.stdout.flush()
