"""A copy that is written into the live file of a SQLite ledger is refused like any other.

The file keeps its inode, and processes that have it open see what is in the copy.
"""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from ledgerlab import StillClocks, claimed, opened, run_through
from test_witness import backed_up, cells, is_refused

from fencepost import Fencepost
from fencepost.errors import LedgerDoubtful
from fencepost.ledger.alarm_sqlite import SqliteAlarms
from fencepost.ledger.sqlite_testimony import untold
from fencepost.model.alarm import AlarmWant, Setting, firing_of
from fencepost.model.alarm_policy import AlarmPolicy
from fencepost.model.lease import Holder
from fencepost.model.slot import RunKey
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish
from fencepost.world.witness import Cells

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fencepost import Run

SLOT = datetime(2026, 1, 20, 2, tzinfo=UTC)
NEXT = SLOT + timedelta(hours=1)
FAR = datetime(2040, 1, 1, tzinfo=UTC)


def restored(folder: Path) -> None:
    """Put the copy into the live file, as ``.restore`` of SQLite's shell does."""
    with (
        closing(sqlite3.connect(folder / "copy.db")) as source,
        closing(sqlite3.connect(folder / "ledger.db")) as target,
    ):
        source.backup(target)


def overwritten(folder: Path) -> None:
    """Put the copy over the live file, once its log is empty."""
    with closing(sqlite3.connect(folder / "ledger.db")) as db:
        assert db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
    # By another process: what closes the file here would drop SQLite's locks.
    subprocess.run(["cp", folder / "copy.db", folder / "ledger.db"], check=True)


def accepted(folder: Path) -> None:
    """Have an operator take the file for the ledger."""
    program = "from fencepost.cli.main import main; raise SystemExit(main())"
    words = ["migrate", "--url", f"sqlite:///{folder}/ledger.db", "--accept-copy"]
    subprocess.run([sys.executable, "-c", program, *words], check=True, capture_output=True)


def begun(folder: Path) -> Fencepost:
    fp = Fencepost(f"sqlite:///{folder}/ledger.db")
    fp.job("work")(lambda: None)
    fp.job("other")(lambda: None)
    return fp


@pytest.mark.parametrize("restore", [restored, overwritten])
def test_every_living_process_and_every_later_one_refuses_it(
    tmp_path: Path, restore: Callable[[Path], None]
) -> None:
    one, another = begun(tmp_path), begun(tmp_path)
    for fp in (another, one, another, one):
        fp.trigger("other", SLOT)
        fp.trigger("work", SLOT)
    backed_up(tmp_path)
    one.trigger("work", NEXT)
    restore(tmp_path)
    for fp in (another, one, another, one):  # of which one lacks nothing of its own
        with pytest.raises(LedgerDoubtful, match="looks like a restored copy"):
            fp.trigger("work", NEXT)
    assert is_refused(tmp_path)
    for fp in (one, another):
        fp.close()
    assert is_refused(tmp_path)


def _end(fp: Fencepost, run: Run) -> None:
    """Do no more than to end."""


def _save(fp: Fencepost, run: Run) -> None:
    run.save({"page": 1})


def _item(fp: Fencepost, run: Run) -> None:
    with run.once("mail"):
        pass


def _transaction(fp: Fencepost, run: Run) -> None:
    with run.transaction() as tx:
        tx.once("paid")


def _set_alarm(fp: Fencepost, run: Run) -> None:
    for key in ("b", "c"):
        fp.alarms.set("ring", key, at=FAR)


@pytest.mark.parametrize("before", ["other", "alarm"])
@pytest.mark.parametrize("step", [_end, _save, _item, _transaction, _set_alarm])
def test_what_is_written_into_it_does_not_make_it_look_like_the_ledger(
    tmp_path: Path, step: Callable[[Fencepost, Run], None], before: str
) -> None:
    fp = begun(tmp_path)

    @fp.job("long")
    def long(run: Run) -> None:
        if run.slot == SLOT:
            step(fp, run)  # so that all that it needs is open and ready
            return
        backed_up(tmp_path)
        if before == "other":
            fp.trigger("other", SLOT)
        else:
            fp.alarms.set("ring", "a", at=FAR)
        restored(tmp_path)
        step(fp, run)

    fp.trigger("long", SLOT)
    fp.trigger("long", NEXT)
    assert is_refused(tmp_path)
    with pytest.raises(LedgerDoubtful):
        fp.trigger("other", SLOT)
    fp.close()


@pytest.mark.parametrize("restore", [restored, overwritten])
def test_a_copy_that_lacks_nothing_is_believed(
    tmp_path: Path, restore: Callable[[Path], None]
) -> None:
    fp = begun(tmp_path)
    fp.trigger("work", SLOT)
    backed_up(tmp_path)
    restore(tmp_path)
    assert fp.trigger("work", SLOT).status == "already_done"
    assert fp.trigger("work", NEXT).status == "succeeded"
    assert not is_refused(tmp_path)
    fp.close()


@pytest.mark.parametrize("restore", [restored, overwritten])
@pytest.mark.parametrize("refused", [True, False])
def test_an_operator_s_word_holds_whoever_lives(
    tmp_path: Path,
    refused: bool,  # noqa: FBT001 -- a table
    restore: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fencepost.world.witness._TRUSTED", 0.0)
    fp = begun(tmp_path)
    fp.trigger("work", SLOT)
    backed_up(tmp_path)
    fp.trigger("work", NEXT)
    fp.alarms.set("ring", "a", at=FAR)
    restore(tmp_path)
    if refused:
        with pytest.raises(LedgerDoubtful):
            fp.trigger("work", NEXT)
    accepted(tmp_path)
    assert not is_refused(tmp_path)
    fp.alarms.set("ring", "b", at=FAR)
    assert not is_refused(tmp_path)
    assert fp.trigger("work", NEXT).status == "succeeded"
    assert not is_refused(tmp_path)
    fp.close()
    assert not is_refused(tmp_path)


def test_who_was_paused_before_it_told_does_not_undo_an_operator_s_word(tmp_path: Path) -> None:
    ledger = opened(tmp_path / "ledger.db")
    run_through(ledger, RunKey("job", 1), "a")
    backed_up(tmp_path)
    run_through(ledger, RunKey("job", 2), "b")
    counted = ledger.written(ledger.testimony.count, vouch=untold)
    restored(tmp_path)
    accepted(tmp_path)
    assert ledger.testimony._cells is not None
    ledger.testimony._cells._look_at = 0.0  # a second later
    ledger.testimony.synced(ledger.testimony.tell(counted=counted))
    assert not is_refused(tmp_path)
    run_through(ledger, RunKey("job", 2), "c")
    finish(ledger.close())
    assert not is_refused(tmp_path)


def test_the_cell_of_a_dead_process_that_told_since_it_was_read_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "ledger.db-live"
    own, dead = Cells(str(folder)), Cells(str(folder))
    dead.write("one")
    read = own.read()
    dead.write("two")
    dead.close()
    own.write("three")
    own.remove(read, dead=True)
    assert sorted(own.read().values()) == ["three", "two"]
    own.remove(own.read(), dead=True)
    assert list(own.read().values()) == ["three"]
    own.close()
    assert len(cells(tmp_path)) == 1


def test_an_alarm_does_not_end_on_a_copy(tmp_path: Path) -> None:
    clocks = StillClocks()
    ledger = opened(tmp_path / "ledger.db", clocks)
    alarms = SqliteAlarms(BlockingWorld(clocks=clocks), ledger)
    finish(alarms.set(Setting("ring", "a", "call", after=0.0)))
    clocks.advance(1.0)
    want = AlarmWant(Holder("n", "here", 1), {"ring": AlarmPolicy()}, limit=1)
    (one,) = finish(alarms.claim_due(want)).claimed
    backed_up(tmp_path)
    finish(alarms.set(Setting("ring", "b", "another", after=60.0)))
    restored(tmp_path)
    with pytest.raises(LedgerDoubtful):
        finish(alarms.finish(firing_of(one.record)))
    with pytest.raises(LedgerDoubtful):
        claimed(ledger, RunKey("job", 1), "a")
    finish(ledger.close())
