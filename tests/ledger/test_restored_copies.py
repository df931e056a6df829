"""A ledger replaced by an older copy is noticed, and nothing runs until somebody says so."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from fencepost import Fencepost
from fencepost.errors import LedgerDoubtful, RunLost
from fencepost.world.blocking import BlockingWorld
from fencepost.world.sqlite import SqliteFile

if TYPE_CHECKING:
    from pathlib import Path

    from fencepost import Run

SLOT = datetime(2026, 1, 20, 2, tzinfo=UTC)


def opened(folder: Path) -> Fencepost:
    fp = Fencepost(f"sqlite:///{folder}/ledger.db")

    @fp.job("work")
    def work(run: Run) -> str:
        return run.id

    return fp


def ran(folder: Path, hours: int) -> str:
    with opened(folder) as fp:
        return fp.trigger("work", SLOT + timedelta(hours=hours)).status


def copied(folder: Path, *, back: bool) -> None:
    """Copy the database away, or the copy back; nobody has it open, so it is one file."""
    here, there = folder / "ledger.db", folder / "yesterday.db"
    assert not (folder / "ledger.db-wal").exists()
    if back:
        here.unlink()
        shutil.copyfile(there, here)
    else:
        shutil.copyfile(here, there)


def restored(folder: Path) -> None:
    ran(folder, 0)
    copied(folder, back=False)
    ran(folder, 1)
    copied(folder, back=True)


def test_nothing_runs_on_yesterdays_copy(tmp_path: Path) -> None:
    restored(tmp_path)
    with opened(tmp_path) as fp:
        for hours in (1, 2):
            with pytest.raises(LedgerDoubtful, match="looks like a restored copy"):
                fp.trigger("work", SLOT + timedelta(hours=hours))
        assert len(fp.runs("work")) == 1  # and nothing was written


def test_it_runs_again_after_an_operator_has_said_so(tmp_path: Path) -> None:
    restored(tmp_path)
    url = f"sqlite:///{tmp_path}/ledger.db"
    refusing = opened(tmp_path)
    with pytest.raises(LedgerDoubtful):
        refusing.trigger("work", SLOT + timedelta(hours=1))
    program = "from fencepost.cli.main import main; raise SystemExit(main())"
    words = ["migrate", "--url", url, "--accept-copy"]
    subprocess.run([sys.executable, "-c", program, *words], check=True, capture_output=True)
    with refusing as fp:  # which need not be restarted for that
        assert fp.trigger("work", SLOT + timedelta(hours=1)).status == "succeeded"
    assert [ran(tmp_path, hours) for hours in (0, 1)] == ["already_done", "already_done"]


def test_a_file_that_is_replaced_under_a_running_instance_is_noticed(tmp_path: Path) -> None:
    ran(tmp_path, 0)
    copied(tmp_path, back=False)
    with opened(tmp_path) as fp:
        assert fp.trigger("work", SLOT + timedelta(hours=1)).status == "succeeded"
        _replaced(tmp_path)
        with pytest.raises(LedgerDoubtful):
            fp.trigger("work", SLOT + timedelta(hours=2))


def test_a_run_whose_ledger_is_replaced_beneath_it_is_lost(tmp_path: Path) -> None:
    ran(tmp_path, 0)
    copied(tmp_path, back=False)
    with Fencepost(f"sqlite:///{tmp_path}/ledger.db") as fp:

        @fp.job("work")
        def work(run: Run) -> None:
            _replaced(tmp_path)
            with pytest.raises(RunLost, match="no record"):
                run.save("half")

        assert fp.trigger("work", SLOT + timedelta(hours=1)).status == "lost"


def test_a_body_that_is_over_at_once_is_lost_with_its_ledger(tmp_path: Path) -> None:
    for hours in range(10):
        with Fencepost(f"sqlite:///{tmp_path}/ledger.db") as fp:
            fp.job("before")(lambda: None)
            fp.trigger("before", SLOT + timedelta(hours=hours))  # all is open and ready by then
            fp.job("work")((tmp_path / "ledger.db").unlink)
            assert fp.trigger("work", SLOT).status == "lost"


def test_a_file_that_is_replaced_while_it_is_opened_is_noticed(tmp_path: Path) -> None:
    for name, version in (("ledger.db", 1), ("yesterday.db", 2)):
        with closing(sqlite3.connect(tmp_path / name)) as db:
            db.execute(f"PRAGMA user_version = {version}")

    def set_up(_: sqlite3.Connection) -> None:
        if not opened_by:
            _replaced(tmp_path)
        opened_by.append("somebody")

    opened_by: list[str] = []
    file = SqliteFile(BlockingWorld(), f"{tmp_path}/ledger.db", set_up=set_up)
    file.read(lambda db: db)
    file.follow()
    assert file.read(lambda db: db.execute("PRAGMA user_version").fetchone()) == (2,)
    file.close()


def _replaced(folder: Path) -> None:
    """Put the copy in place as a restore would: a new file, and no log of the old one."""
    shutil.copyfile(folder / "yesterday.db", folder / "new.db")
    for name in ("ledger.db-wal", "ledger.db-shm"):
        (folder / name).unlink(missing_ok=True)
    (folder / "new.db").rename(folder / "ledger.db")


def test_another_ledger_with_runs_in_it_is_not_taken_for_this_one(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    ran(elsewhere, 0)
    ran(tmp_path, 0)
    (tmp_path / "ledger.db").unlink()
    shutil.copyfile(elsewhere / "ledger.db", tmp_path / "ledger.db")
    with pytest.raises(LedgerDoubtful, match="not the one that was here before"):
        ran(tmp_path, 1)


def test_a_ledger_that_somebody_began_anew_is_no_copy(tmp_path: Path) -> None:
    ran(tmp_path, 0)
    (tmp_path / "ledger.db").unlink()
    assert [ran(tmp_path, 0), ran(tmp_path, 1)] == ["succeeded", "succeeded"]


def test_a_lost_witness_is_no_reason_to_stop(tmp_path: Path) -> None:
    ran(tmp_path, 0)
    shutil.rmtree(tmp_path / "ledger.db-live")
    assert ran(tmp_path, 1) == "succeeded"


def test_locks_go_on_without_a_witness(tmp_path: Path) -> None:
    restored(tmp_path)
    with opened(tmp_path) as fp, fp.lock("x") as lease:
        assert lease.token > 0


def test_what_is_reserved_in_a_file_says_nothing_about_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as fp:
        fp.trigger("work", SLOT)
        for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm"):
            (tmp_path / name).unlink(missing_ok=True)
        synced: list[int] = []
        monkeypatch.setattr("os.fdatasync", synced.append)
        assert fp.trigger("work", SLOT).status == "succeeded"  # begun anew, in an empty ledger
        assert len(synced) >= 2  # the claim, of which nothing is reserved yet, and the end
        assert fp.trigger("work", SLOT + timedelta(hours=1)).status == "succeeded"
        with closing(sqlite3.connect(tmp_path / "ledger.db")) as db:
            (token,) = db.execute("SELECT max(token) FROM fencepost_run").fetchone()
            (ceiling,) = db.execute("SELECT ceiling FROM fencepost_reserve").fetchone()
    assert token < ceiling
