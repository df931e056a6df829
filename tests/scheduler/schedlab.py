"""What the scheduler tests share: instances to kill, effects to count, and a ledger to audit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fencepost import Fencepost
from fencepost.cli.verify import gathered
from fencepost.model.run import State
from fencepost.model.schedule import EveryAfter
from fencepost.serving import ThreadCrew
from fencepost.testing.clock import SettableClocks
from fencepost.testing.ledger_checker import prove
from fencepost.world.flow import finish
from servers.faketime import wrong_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import pytest

    from fencepost.ledger.planning import SpanRecord
    from fencepost.model.definition import JobRecord
    from fencepost.model.event import JobEvent, LeaseEvent
    from fencepost.model.run import RunRecord

PROGRAM = Path(__file__).with_name("instance_program.py")
PATIENCE = 30.0
# A minute in which nothing else happens, for tests that set their clocks.
NOON = 1_767_614_400  # 2026-01-05T12:00:00Z, a Monday


def until(condition: Callable[[], object], *, within: float = PATIENCE) -> None:
    """Look until ``condition`` is true, or fail."""
    end = time.monotonic() + within
    while not condition():
        assert time.monotonic() < end, f"not within {within} s"
        time.sleep(0.005)


def url_of(folder: Path) -> str:
    """Return where the ledger of a folder is: beside it, unless a file there says where else."""
    named = folder / "url"
    return named.read_text() if named.exists() else f"sqlite:///{folder}/ledger.db"


class Member:
    """One process of the cluster."""

    def __init__(self, folder: Path, mode: str, *, off: float = 0.0, **options: object) -> None:
        words = [sys.executable, str(PROGRAM), url_of(folder), str(folder), mode]
        self.off = off  # by how much its wall clock is wrong
        self.process = subprocess.Popen(
            [*words, json.dumps(options)],
            env={**os.environ, **(wrong_by(off) if off else {})},
            start_new_session=True,
        )
        self.pid = self.process.pid
        self._asked = False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def ask_to_stop(self) -> None:
        """Send SIGTERM; the first time only once there is somebody who hears it."""
        if not self._asked:
            until(lambda: self.heeds or not self.alive)
        self._asked = True
        self.process.send_signal(signal.SIGTERM)

    @property
    def heeds(self) -> bool:
        """Whether it has a handler for SIGTERM by now."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
        return bool(int(caught.split()[1], 16) & 1 << (signal.SIGTERM - 1))

    def ended(self, *, within: float = PATIENCE) -> int:
        return self.process.wait(within)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


@contextmanager
def members() -> Iterator[list[Member]]:
    """A list of processes, none of which outlives the test."""
    started: list[Member] = []
    try:
        yield started
    finally:
        for member in started:
            with suppress(ProcessLookupError):
                os.killpg(member.pid, signal.SIGKILL)
        for member in started:
            member.process.wait()


class Effect(NamedTuple):
    """What a body did: it appended this line to a file, which nobody can take back."""

    job: str
    slot: int
    token: int
    pid: int
    asked: float  # when the body asked whether it may, by the machine's boot-time clock
    more: str = ""


def effects(folder: Path) -> list[Effect]:
    """Return what bodies did, in the order in which it happened."""
    path = folder / "effects"
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        job, slot, token, pid, asked, more = line.split(" ", 5)
        found.append(Effect(job, int(slot), int(token), int(pid), float(asked), more))
    return found


def told(folder: Path) -> list[dict[str, Any]]:
    """Return the events of all instances, in order."""
    path = folder / "events"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Books(NamedTuple):
    """All that a ledger has about schedules."""

    jobs: list[JobRecord]
    runs: list[RunRecord]
    spans: list[SpanRecord]


def books_of(source: Path | Fencepost) -> Books:
    """Read the whole ledger."""
    fp = source if isinstance(source, Fencepost) else Fencepost(url_of(source))
    try:
        planner = fp._scheduling.planner
        jobs = finish(fp._working.ledger.jobs())
        runs: list[RunRecord] = []
        spans: list[SpanRecord] = []
        for job in jobs:
            slots = finish(planner.slots(job.job, start=0, end=2**62, limit=10**6))
            runs += slots.runs
            spans += slots.spans
        return Books(jobs, runs, spans)
    finally:
        if fp is not source:
            fp.close()


def unproven(folder: Path) -> list[str]:
    """Say what ``fencepost verify`` finds broken in a ledger."""
    with Fencepost(url_of(folder)) as fp:
        return [str(finding) for finding in prove(finish(gathered(fp._working.ledger))).findings]


def complaints(books: Books, *, reasons: Iterable[str] = ()) -> list[str]:
    """Say what is wrong with a ledger: a slot that nobody decided, a reason no policy gives."""
    wrong: list[str] = []
    for job in books.jobs:
        runs = [run for run in books.runs if run.key.job == job.job]
        spans = [record.span for record in books.spans if record.job == job.job]
        wrong += _undecided(job, runs, [(span.first, span.last) for span in spans])
        live = Counter(run.key.slot for run in runs if not run.state.terminal)
        wrong += [f"{job.job}@{slot}: {n} live runs" for slot, n in live.items() if n > 1]
    allowed = set(reasons)
    for run in books.runs:
        passed = run.state in (State.MISSED, State.SKIPPED)
        if passed and run.reason not in allowed:
            wrong.append(f"{run.key} is {run.state}({run.reason})")
        tries = run.starts - run.losses - run.releases
        if run.state is State.SUCCEEDED and tries < 1:
            wrong.append(f"{run.key} succeeded without an attempt: {run}")
    for record in books.spans:
        if record.span.reason not in allowed:
            wrong.append(f"{record.job}: {record.span}")
    return wrong


def _undecided(
    job: JobRecord, runs: Sequence[RunRecord], ranges: Sequence[tuple[int, int]]
) -> list[str]:
    schedule = job.schedule
    if schedule is None or isinstance(schedule, EveryAfter):
        return []
    known = {run.key.slot for run in runs}
    ahead = [slot for slot in known if slot > job.watermark]
    wrong = [f"{job.job}@{slot} is later than the watermark" for slot in ahead]
    for slot in schedule.between(int(job.effective_from) + 1, job.watermark + 1):
        decided = slot in known or any(first <= slot <= last for first, last in ranges)
        wrong += [] if decided else [f"{job.job}@{slot} was never decided"]
    return wrong


def repeated(books: Books, done: Sequence[Effect]) -> list[str]:
    """Say which effects happened more often than the ledger can explain, or out of order."""
    wrong: list[str] = []
    runs = {(run.key.job, run.key.slot): run for run in books.runs if not run.key.rerun}
    counted = Counter((effect.job, effect.slot) for effect in done)
    tokens: dict[str, int] = {}
    for effect in sorted(done, key=lambda one: one.asked):
        if effect.token < tokens.get(effect.job, 0):
            wrong.append(f"{effect} came after token {tokens[effect.job]}")
        tokens[effect.job] = max(effect.token, tokens.get(effect.job, 0))
    for (job, slot), count in counted.items():
        run = runs.get((job, slot))
        if run is None:
            wrong.append(f"{job}@{slot} ran without a row")
        elif count > 1 + run.losses:
            wrong.append(f"{job}@{slot} ran {count} times, with {run.losses} losses: {run}")
    for (job, slot), run in runs.items():
        if run.state is State.SUCCEEDED and not counted[job, slot]:
            wrong.append(f"{run.key} succeeded and did nothing")
    return wrong


def early(books: Books, done: Sequence[Effect]) -> list[str]:
    """Say which slots began before their time: by the ledger's clock, and by this machine's.

    Effects are told with the boot-time clock of the machine, which nobody fakes.
    """
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    wrong = [f"{run}" for run in books.runs if run.starts and run.started_at < run.key.slot]
    return wrong + [f"{one}" for one in done if boot + one.asked < one.slot]


class Heard:
    """A subscriber that remembers what it was told."""

    def __init__(self) -> None:
        self.events: list[JobEvent | LeaseEvent] = []

    def __call__(self, event: JobEvent | LeaseEvent) -> None:
        self.events.append(event)

    def names(self) -> list[str]:
        return [event.what for event in self.events]

    def about(self, what: str) -> list[JobEvent]:
        return [event for event in self.events if event.what == what and len(event) == 5]


class Noon(SettableClocks):
    """Clocks of a machine on which it was noon when the test began."""

    def __init__(self) -> None:
        super().__init__()
        self.step_wall(NOON + 0.25 - self._system.wall())


@contextmanager
def serving(fp: Fencepost, **words: Any) -> Iterator[threading.Thread]:
    """Have an instance run in a thread; stopped, and waited for, in the end."""
    thread = threading.Thread(target=lambda: fp.run(signals=False, **words), daemon=True)
    thread.start()
    try:
        until(lambda: fp._scheduling.crew is not None or not thread.is_alive())
        yield thread
    finally:
        fp.stop(grace=0)
        thread.join(PATIENCE)
        assert not thread.is_alive()


def claims_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have crews claim ahead of what they have threads for, as they do where bodies are short."""

    def room(crew: ThreadCrew, ending: int) -> int:
        return crew.free(ending) + 4

    monkeypatch.setattr(ThreadCrew, "room", room)


def states(fp: Fencepost, job: str) -> list[tuple[int, str, str]]:
    """Return (slot, state, reason) of all runs of a job, oldest first."""
    return [(run.key.slot, run.state.value, run.reason) for run in fp.slots(job).runs]
