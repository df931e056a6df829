"""Several threads and connections of one process use the witness of a SQLite ledger.

A copy is refused and the ledger is not, whoever tells what while another one looks at the file.
"""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING

import pytest
from ledgerlab import DONE, StillClocks, claimed, opened, run_through
from test_witness import after_reboot, backed_up, is_refused, judged, moved

from fencepost import Fencepost
from fencepost.errors import LedgerDoubtful
from fencepost.ledger.alarm_sqlite import SqliteAlarms
from fencepost.ledger.sqlite_testimony import untold
from fencepost.model.alarm import Setting
from fencepost.model.slot import RunKey
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from fencepost import Run

SLOT = datetime(2026, 1, 20, 2, tzinfo=UTC)
FAR = datetime(2040, 1, 1, tzinfo=UTC)


def replaced(folder: Path) -> None:
    """Put the copy in place of the ledger, which stays aside."""
    moved(folder, "ledger.db", "aside.db")
    shutil.copyfile(folder / "copy.db", folder / "ledger.db")


class Turn:
    """A lock that says when somebody has to wait for it."""

    def __init__(self, awaited: Event) -> None:
        self._lock, self._awaited = Lock(), awaited

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._awaited.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_cell_is_not_closed_while_another_thread_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = opened(tmp_path / "ledger.db")
    run_through(ledger, RunKey("job", 1), "a")
    counted = ledger.written(ledger.testimony.count, vouch=untold)
    for path in (tmp_path / "ledger.db-live").glob("*.seen"):
        path.unlink()  # so that whoever looks next begins another
    gone_on, pwrite = Event(), os.pwrite
    ledger.testimony._turn = Turn(gone_on)

    def look() -> None:
        try:
            ledger.leases.file.close()
            ledger.written(lambda _: None, vouch=untold)  # on another connection
        finally:
            gone_on.set()

    looking = Thread(target=look)
    bystander = tmp_path / "bystander"

    def late(fd: int, data: bytes, offset: int) -> int:
        monkeypatch.setattr("os.pwrite", pwrite)
        looking.start()
        assert gone_on.wait(60)
        with ExitStack() as others:  # which get the numbers that are free
            for _ in range(20):
                others.enter_context(bystander.open("wb"))
            return pwrite(fd, data, offset)

    monkeypatch.setattr("os.pwrite", late)
    ledger.testimony.tell(counted=counted)
    looking.join(60)
    assert bystander.read_bytes() == b""
    finish(ledger.close())


def test_a_ledger_that_is_begun_anew_beneath_a_transaction_is_no_copy(tmp_path: Path) -> None:
    fp = Fencepost(f"sqlite:///{tmp_path}/ledger.db")
    fp.job("other")(lambda: None)

    @fp.job("work")
    def work(run: Run) -> None:
        for key in ("a", "b", "c"):
            fp.alarms.set("ring", key, at=FAR)
        with run.transaction():
            moved(tmp_path, "ledger.db", "gone.db")
            assert fp.trigger("other", SLOT).status == "succeeded"

    assert fp.trigger("work", SLOT).status == "lost"
    assert not is_refused(tmp_path)
    fp.close()


def test_a_transaction_in_a_copy_does_not_make_it_look_like_the_ledger(tmp_path: Path) -> None:
    fp = Fencepost(f"sqlite:///{tmp_path}/ledger.db")
    fp.job("other")(lambda: None)

    @fp.job("work")
    def work(run: Run) -> None:
        backed_up(tmp_path)
        fp.alarms.set("ring", "a", at=FAR)
        replaced(tmp_path)
        with run.transaction():
            pass

    fp.trigger("work", SLOT)
    with pytest.raises(LedgerDoubtful):
        fp.trigger("other", SLOT)
    assert is_refused(tmp_path)
    fp.close()


def copied_before_a_transaction(run: Run) -> list[bool]:
    folder = Path(os.environ["FOLDER"])
    backed_up(folder)
    with run.transaction():
        pass
    return list(judged(folder))


def test_a_transaction_of_a_body_in_a_process_of_its_own_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOLDER", str(tmp_path))
    with Fencepost(f"sqlite:///{tmp_path}/ledger.db") as fp:
        fp.job("work", isolation="process")(copied_before_a_transaction)
        outcome = fp.trigger("work", SLOT)
    assert outcome.result == [True, False]


def test_nothing_is_claimed_on_a_copy_that_another_thread_came_upon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = opened(tmp_path / "ledger.db")
    run_through(ledger, RunKey("job", 1), "a")
    backed_up(tmp_path)
    run_through(ledger, RunKey("job", 2), "b")
    file = ledger.leases.file
    follow = file.follow

    def late() -> None:
        monkeypatch.setattr(file, "follow", follow)
        replaced(tmp_path)
        with pytest.raises(LedgerDoubtful):
            claimed(ledger, RunKey("job", 2), "c")

    monkeypatch.setattr(file, "follow", late)
    with pytest.raises(LedgerDoubtful):
        claimed(ledger, RunKey("job", 2), "d")
    finish(ledger.close())


def test_whoever_saw_another_ledger_does_not_vouch_for_it(tmp_path: Path) -> None:
    fp = Fencepost(f"sqlite:///{tmp_path}/ledger.db")
    fp.job("work")(lambda: None)
    for hours in (0, 1):
        fp.trigger("work", SLOT + timedelta(hours=hours))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert not is_refused(elsewhere)
    shutil.copyfile(elsewhere / "ledger.db", tmp_path / "copy.db")
    replaced(tmp_path)
    with pytest.raises(LedgerDoubtful):
        fp.trigger("work", SLOT)
    fp.close()
    assert is_refused(tmp_path)


def test_tombstones_are_not_removed_from_a_copy(tmp_path: Path) -> None:
    clocks = StillClocks()
    ledger = opened(tmp_path / "ledger.db", clocks)
    alarms = SqliteAlarms(BlockingWorld(clocks=clocks), ledger)
    finish(alarms.set(Setting("ring", "a", "call", after=60.0)))
    finish(alarms.clear("ring", "a"))
    backed_up(tmp_path)
    finish(alarms.set(Setting("ring", "b", "another", after=60.0)))
    replaced(tmp_path)
    clocks.advance(100_000.0)
    with pytest.raises(LedgerDoubtful):
        finish(alarms.prune())
    with pytest.raises(LedgerDoubtful):
        claimed(ledger, RunKey("job", 1), "a")
    finish(ledger.close())


def test_what_ended_on_a_copy_is_not_missed_in_the_ledger(tmp_path: Path) -> None:
    ledger = opened(tmp_path / "ledger.db")
    attempt = claimed(ledger, RunKey("job", 1), "a")
    backed_up(tmp_path)
    run_through(ledger, RunKey("other", 2), "b")
    replaced(tmp_path)
    finish(ledger.note(RunKey("job", 1), "seen"))
    finish(ledger.finish(attempt, DONE))
    moved(tmp_path, "ledger.db", "gone.db")
    moved(tmp_path, "aside.db", "ledger.db")
    finish(ledger.note(RunKey("job", 1), "seen"))
    assert not is_refused(tmp_path)
    finish(ledger.close())


def test_a_transaction_does_not_vouch_for_what_was_committed_after_it(tmp_path: Path) -> None:
    clocks = StillClocks()
    ledger = opened(tmp_path / "ledger.db", clocks)
    run_through(ledger, RunKey("job", 1), "a")
    counted = ledger.written(ledger.testimony.count, vouch=untold)
    backed_up(tmp_path)
    claimed(ledger, RunKey("job", 2), "b")  # which is not synced by itself
    ledger.testimony.synced(ledger.testimony.tell(counted=counted))
    finish(ledger.note(RunKey("job", 1), "seen"))
    assert after_reboot(tmp_path, clocks) == "claimed"
    finish(ledger.close())
