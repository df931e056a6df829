"""The file that has the alarms: an older copy of it is noticed, and a power cut forgets no set."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from alarmlab import sqlite_book

from fencepost import Fencepost
from fencepost.errors import LedgerDoubtful
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from pathlib import Path


def opened(folder: Path) -> Fencepost:
    fp = Fencepost(f"sqlite:///{folder}/ledger.db")

    @fp.alarm("k")
    def handle() -> None:
        pass

    return fp


def test_nothing_fires_on_yesterdays_copy(tmp_path: Path) -> None:
    here, there = tmp_path / "ledger.db", tmp_path / "yesterday.db"
    with opened(tmp_path) as fp:
        for key in ("done", "left"):
            fp.alarms.set("k", key, in_=0)
    shutil.copyfile(here, there)
    with opened(tmp_path) as fp:
        fp.alarms.run_due(limit=1)
    here.unlink()
    shutil.copyfile(there, here)
    with opened(tmp_path) as fp:
        with pytest.raises(LedgerDoubtful, match="looks like a restored copy"):
            fp.alarms.run_due()
        assert len(fp.alarms.list()) == 2


def test_sets_and_ends_are_synced_and_claims_and_beats_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr("os.fdatasync", synced.append)
    book = sqlite_book(tmp_path / "ledger.db")
    book.set("first")
    finish(book.book.finish(book.fired()))

    def syncs() -> int:
        count = len(synced)
        synced.clear()
        return count

    syncs()
    book.set()
    assert syncs() == 1
    firing = book.fired()
    finish(book.book.beat(firing, ttl=30.0))
    assert syncs() == 0
    finish(book.book.finish(firing))
    assert syncs() == 1
    book.close()


def test_an_alarm_that_is_done_leaves_nothing_but_the_highest_generation(tmp_path: Path) -> None:
    with opened(tmp_path) as fp:
        for number in range(50):
            fp.alarms.set("k", str(number), in_=0)
        assert fp.alarms.run_due().fired == 50
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as db:
        counts = [
            db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("fencepost_alarm", "fencepost_lease")
        ]
    assert counts == [0, 0]


def test_namespaces_keep_their_alarms_apart(tmp_path: Path) -> None:
    here, there = (sqlite_book(tmp_path / "ledger.db", namespace=n) for n in ("here", "there"))
    here.set()
    assert finish(there.book.listed()) == []
    assert there.claim().claimed == ()
    there.set()
    assert len(here.claim().claimed) == len(there.claim().claimed) == 1
    for book in (here, there):
        book.close()
