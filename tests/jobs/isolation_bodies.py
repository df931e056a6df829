"""Bodies for processes of their own: they must be importable, and speak through files."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fencepost import GiveUp, RetryAfter

if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost import AsyncRun, Run

T = TypeVar("T")
PATIENCE = 40.0


def wait_for(condition: Callable[[], T], what: str) -> T:
    """Return the first truthy answer; the deadline is only for a broken program."""
    give_up = time.monotonic() + PATIENCE
    while time.monotonic() < give_up:
        answer = condition()
        if answer:
            return answer
        time.sleep(0.01)
    raise AssertionError(f"waited {PATIENCE:.0f} s in vain for: {what}")


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def folder() -> Path:
    return Path(os.environ["ISOLATION_FOLDER"])


def note(name: str, text: object) -> None:
    """Leave a file that is whole as soon as it is there."""
    rough = folder() / f".{name}.{os.getpid()}"
    rough.write_text(str(text))
    rough.rename(folder() / name)


def found(name: str) -> str:
    path = folder() / name
    return wait_for(lambda: path.read_text() if path.exists() else "", f"{name} to be written")


def tries() -> int:
    """Count this call, over all processes."""
    with (folder() / "tries").open("a") as file:
        file.write("x")
    return (folder() / "tries").stat().st_size


# Bodies that end.


def pid() -> int:
    return os.getpid()


async def pid_async(run: AsyncRun) -> int:
    run.check()
    await asyncio.sleep(0)
    return os.getpid()


def all_of_it(run: Run) -> dict[str, Any]:
    before = run.checkpoint
    with run.once("mail") as first:
        sent = bool(first)
    with run.once("mail") as again:
        sent_again = bool(again)
    with run.batch(["a", "b"]) as mine:
        batch = list(mine)
    run.save({"page": 2})
    run.progress(2, 5)
    run.count("emails  sent", 3)
    with closing(sqlite3.connect(folder() / "other.db", isolation_level=None)) as conn:
        conn.execute("BEGIN IMMEDIATE")
        run.fence(conn)
        conn.execute("COMMIT")
    with run.transaction() as tx:
        tx.once("paid")
    run.check()
    window = run.window
    return {
        "before": before,
        "after": run.checkpoint,
        "sent": [sent, sent_again],
        "batch": batch,
        "headers": run.headers("mail"),
        "slot": run.slot.isoformat(),
        "window": window and window[0].isoformat(),
        "lost": run.lost.is_set(),
        "token": run.token,
    }


async def all_of_it_async(run: AsyncRun) -> dict[str, Any]:
    async with run.once("mail") as first:
        sent = bool(first)
    await run.save({"page": 2})
    run.count("emails  sent", 3)
    return {"sent": sent, "after": run.checkpoint}


def slow(run: Run) -> None:
    run.progress(3, 9)
    run.count("seen", 7)
    found("go")


def outlasts_its_lease(run: Run) -> str:
    until = time.monotonic() + 7
    while time.monotonic() < until:
        run.check()
        time.sleep(0.01)
    return "still mine"


def speaks() -> None:
    print("from the body")
    print("and its errors", file=sys.stderr)


def returns_a_set() -> set[int]:
    return {1}


def skips(run: Run) -> None:
    run.skip("no mail today")


def begins_and_dies(run: Run) -> None:
    with run.once("mail") as first:
        if first:
            os._exit(9)


def fails_once() -> str:
    if tries() == 1:
        raise ConnectionError("the wire was cut")
    return "well"


def gives_up() -> None:
    tries()
    raise GiveUp("there is no such customer")


def waits_for_more() -> str:
    if tries() == 1:
        raise RetryAfter(0.01)
    return "well"


def exits() -> None:
    sys.exit(3)


class Stubborn(ValueError):
    """Cannot be pickled, and cannot be made without its word."""

    def __init__(self, *, word: str) -> None:
        super().__init__(f"the word is {word}")
        self.word, self.handle = word, lambda: None


def fails_stubbornly() -> str:
    if tries() == 1:
        raise Stubborn(word="no")
    return "well"


def fails_with_a_local_error() -> str:
    class Homemade(OSError):
        pass

    if tries() == 1:
        raise Homemade("made here")
    return "well"


def others_live() -> list[str]:
    """Return which processes of the one before are still there."""
    return [name for name in ("pid", "child") if lives(int(found(name)))]


def hidden() -> None: ...


# Bodies that are to be stopped.


def busy() -> None:
    note("pid", os.getpid())
    while True:
        pass


def stubborn() -> None:
    signal.signal(signal.SIGTERM, lambda *_: note("asked", "and declined"))
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    note("child", child.pid)
    note("pid", os.getpid())
    while True:
        time.sleep(1)


def checks(run: Run) -> None:
    note("pid", os.getpid())
    while True:
        run.check()
        time.sleep(0.01)


def cleans_up() -> None:
    try:
        note("pid", os.getpid())  # from here on somebody may have it end
        while True:
            time.sleep(0.01)
    finally:
        note("cleaned", "up")


async def sleeps() -> None:
    try:
        note("pid", os.getpid())
        await asyncio.sleep(600)
    finally:
        note("cleaned", "up")


def within_an_effect(run: Run) -> None:
    with run.once("mail"):
        note("pid", os.getpid())
        while True:
            pass


# Bodies that die.


def dies() -> None:
    tries()
    os._exit(1)


def is_killed() -> str:
    if tries() <= 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return "well"


def reads_nowhere() -> str:
    if tries() <= 2:
        ctypes.string_at(0)
    return "well"


async def exits_well() -> str:
    if tries() <= 2:
        os._exit(0)
    return "well"


def half_a_mail(run: Run) -> None:
    """Have an effect once, tell of it, and fail."""
    with run.once("mail") as first:
        note("mails", f"{(folder() / 'mails').read_text()}{run.id} {bool(first)} {run.key_of()}\n")
    raise GiveUp("half way")


def is_cut_off(run: Run) -> None:
    """Have an effect in a transaction, whose session the server ends the first time."""
    first = Path(os.environ["FENCEPOST_TEST_FOLDER"], "cut")
    cut = os.environ["FENCEPOST_TEST_CUT"]
    with run.transaction() as tx:
        tx.execute("INSERT INTO effect VALUES ('a')")
        if not first.exists():
            first.touch()
            if cut:
                tx.execute(f"SELECT {cut}")
            else:
                tx.execute(f"KILL {tx.execute('SELECT connection_id()').fetchone()[0]}")
