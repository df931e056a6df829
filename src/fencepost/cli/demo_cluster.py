"""The second act of the demo: a cluster without a leader, and beside it a plain lock.

Four processes run the same job in two ways: as fencepost instances on one ledger, and behind a lock
with a time to live. One process is killed, one is paused for longer than any lease lasts. Then the
lines in the book are counted, and the ledger is asked for a proof.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import NamedTuple

from fencepost.cli.asking import asked
from fencepost.cli.demo_instance import CREATE, JOB, NAIVE_TTL, opened
from fencepost.cli.verify import gathered
from fencepost.ledger.open import ledger_of
from fencepost.model.run import State
from fencepost.stores.open import open_store
from fencepost.testing.ledger_checker import prove
from fencepost.world.blocking import BlockingWorld

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    import sqlite3
    from collections.abc import Callable

    from fencepost.ledger.api import Ledger
    from fencepost.testing.ledger_checker import Proof

NAMES = ("ann", "bob", "cem", "dee")
CALM, PAUSE, AFTER = 2.0, 7.5, 2.5
_PATIENCE = 20.0
_RED, _GREEN, _YELLOW = "31", "32", "33"
_TOLD = {
    "resumed": "takes over what was left behind",
    "lost": "learns that its run is not its own any more",
}


class Count(NamedTuple):
    """What became of the slots: how many lines there are, and which are too many or missing."""

    slots: int
    lines: int
    duplicates: int
    lost: int


def act(folder: str, args: argparse.Namespace) -> bool:
    """Tell the story; say whether fencepost kept its word."""
    return _Story(folder, args).tell()


class _Instance:
    """A process of the cluster, and what it tells."""

    def __init__(self, name: str, folder: str, hear: Callable[[str, list[str]], None]) -> None:
        self.name, self._hear = name, hear
        program = "import sys; from fencepost.cli.demo_instance import be; be(*sys.argv[1:])"
        self.process = subprocess.Popen(  # noqa: S603 -- this very program
            [sys.executable, "-c", program, name, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.ready = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Let it start to work."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Ask it to stop, and leave no process behind."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._thread.join(1)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            words = line.rstrip("\n").split("\t")
            if words[0] == "ready":
                self.ready.set()
            else:
                self._hear(self.name, words)


class _Story:
    def __init__(self, folder: str, args: argparse.Namespace) -> None:
        self._folder, self._began = folder, time.monotonic()
        self._colours = sys.stdout.isatty() and not args.no_color and "NO_COLOR" not in os.environ
        self._book: sqlite3.Connection = opened(folder)
        self._book.execute("PRAGMA journal_mode = WAL")
        for statement in CREATE:
            self._book.execute(statement)
        self._instances: dict[str, _Instance] = {}
        self._printing = threading.Lock()
        self._seen = 0
        self._lines: dict[str, set[int]] = {"fencepost": set(), "naive": set()}
        world = BlockingWorld()
        store = open_store(f"sqlite:///{folder}/cluster.db", world, namespace="default")
        self._ledger: Ledger = ledger_of(world, store)

    def tell(self) -> bool:
        try:
            first = self._start()
            self._watch(CALM)
            self._kill()
            self._watch(NAIVE_TTL + 0.5)
            self._pause()
            last = self._finish()
            counts = {who: self._counted(who, first, last) for who in ("fencepost", "naive")}
            return self._reckon(counts, prove(asked(gathered(self._ledger))))
        finally:
            for instance in self._instances.values():
                instance.end()
            asked(self._ledger.close())
            self._book.close()

    def _start(self) -> int:
        names = ", ".join(NAMES)
        self._say(f"{names}: four processes, one SQLite file, a job that is due every second")
        self._say(
            f"each also has the job behind a plain lock (SET if absent, ttl {NAIVE_TTL:.0f} s)"
        )
        for name in NAMES:
            self._instances[name] = _Instance(name, self._folder, self._hear)
        for instance in self._instances.values():
            if not instance.ready.wait(_PATIENCE):
                raise TimeoutError(f"{instance.name} did not start")
        for instance in self._instances.values():
            instance.begin()
        self._wait_for(lambda: all(self._lines.values()))
        return max(min(slots) for slots in self._lines.values()) + 1

    def _kill(self) -> None:
        victim = self._at_work()
        victim.process.kill()
        self._say(f"{victim.name} is killed with -9, in the middle of its work", _YELLOW)

    def _pause(self) -> None:
        victim = self._at_work()
        victim.process.send_signal(signal.SIGSTOP)
        self._say(f"{victim.name} is paused in the middle of its work, for {PAUSE} s", _YELLOW)
        self._watch(PAUSE)
        victim.process.send_signal(signal.SIGCONT)
        self._say(f"{victim.name} goes on, as if no time had passed", _YELLOW)

    def _at_work(self) -> _Instance:
        """Return an instance that is in the middle of both: the run, and the plain lock."""
        give_up = time.monotonic() + 5.0
        while True:
            pids, owners = self._holders()
            alive = {one.process.pid: one for one in self._living()}
            patient = time.monotonic() < give_up
            for pid in pids & alive.keys():
                if not patient or alive[pid].name in owners:
                    return alive[pid]
            self._look()
            time.sleep(0.01)

    def _holders(self) -> tuple[set[int], set[str]]:
        """Return which process is in the middle of a run, and who has the plain lock."""
        runs = asked(self._ledger.runs(JOB, states=[State.RUNNING]))
        # Just begun: so it is surely in the middle when the signal comes.
        young = {run.holder.pid for run in runs if time.time() - run.started_at < 0.25}
        owners = {owner for (owner,) in self._book.execute("SELECT owner FROM naive_lock")}
        return young, owners

    def _living(self) -> list[_Instance]:
        return [one for one in self._instances.values() if one.process.poll() is None]

    def _finish(self) -> int:
        """Let it be calm for a while, and the backlog be made up; return the last slot to count."""
        self._watch(AFTER)
        last = int(time.time()) - 1
        self._wait_for(lambda: max(self._lines["fencepost"]) >= last)
        for instance in self._instances.values():
            instance.end()
        self._look()
        return last

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        give_up = time.monotonic() + _PATIENCE
        while not condition() and time.monotonic() < give_up:
            self._look()
            time.sleep(0.02)

    # What is seen.

    def _watch(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._look()
            time.sleep(0.05)

    def _look(self) -> None:
        """Tell of the lines that were written since the last look."""
        found = "SELECT rowid, who, slot, writer FROM line WHERE rowid > ? ORDER BY rowid"
        for row, who, slot, writer in self._book.execute(found, (self._seen,)).fetchall():
            self._seen = row
            again = slot in self._lines[who]
            self._lines[who].add(slot)
            at = time.strftime("%H:%M:%S", time.gmtime(slot))
            column = "" if who == "fencepost" else " " * 30
            words = f"{at}  {column}{who}: {writer}" + (" AGAIN" if again else "")
            self._say(words, _RED if again else "")

    def _hear(self, name: str, words: list[str]) -> None:
        what, run_id, _ = (*words, "", "", "")[:3]
        if what in _TOLD:
            slot = run_id.partition("@")[2][11:19]
            colour = _GREEN if what == "resumed" else _YELLOW
            self._say(f"{name} {_TOLD[what]}" + (f": {slot}" if slot else ""), colour)

    def _counted(self, who: str, first: int, last: int) -> Count:
        chosen = "SELECT slot FROM line WHERE who = ? AND slot BETWEEN ? AND ?"
        slots = [slot for (slot,) in self._book.execute(chosen, (who, first, last))]
        expected = last - first + 1
        once = len(set(slots))
        return Count(expected, len(slots), len(slots) - once, expected - once)

    def _reckon(self, counts: dict[str, Count], proof: Proof) -> bool:
        print()
        print("                    slots   lines   twice   never")
        for title, who in (("fencepost", "fencepost"), ("plain lock", "naive")):
            print(f"  {title:<18}" + "".join(f"{number:<8}" for number in counts[who]).rstrip())
        kept = (counts["fencepost"].duplicates, counts["fencepost"].lost) == (0, 0)
        print()
        print(
            f"  verify: {proof.counts.slots} slots, {proof.counts.runs} runs, "
            f"{proof.counts.attempts} attempts, {proof.counts.tokens} tokens: "
            + ("every promise is proven" if not proof.findings else "BROKEN")
        )
        for finding in proof.findings:
            print(f"    {finding}")
        kept = kept and not proof.findings
        print(
            "  Each slot once, through a kill and a zombie."
            if kept
            else "  This is not how it should end: please report it."
        )
        return kept

    def _say(self, line: str, colour: str = "") -> None:
        text = f"  {time.monotonic() - self._began:5.1f} s  {line}"
        if colour and self._colours:
            text = f"\033[{colour}m{text}\033[0m"
        with self._printing:
            print(text, flush=True)
