"""A server's ledger that lacks what was seen of it is noticed: nothing runs until told so."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from ledgerlab import DONE, claimed, run_through

from fencepost import Fencepost
from fencepost.errors import LedgerDoubtful
from fencepost.ledger import mariadb_schema, postgres_schema
from fencepost.ledger.planning import Ask, Instance
from fencepost.model.copied import Life, Mark, Seen, doubt, from_a_line, in_a_line
from fencepost.model.slot import RunKey
from fencepost.world.flow import finish
from joinlab import Copied, CopiedMySQL, Dumped
from pglab import opened_postgres
from proxy import Proxy
from servers import Postgres
from servers.running import give_to_nobody

if TYPE_CHECKING:
    from pathlib import Path

    from fencepost import Run

SLOT = datetime(2026, 1, 20, 2, tzinfo=UTC)
KEY = RunKey("work", 1_000)
KINDS = (Dumped, Copied, CopiedMySQL)


def opened(url: str) -> Fencepost:
    fp = Fencepost(url)

    @fp.job("work")
    def work(run: Run) -> str:
        return run.id

    return fp


def at(hours: int) -> datetime:
    return SLOT + timedelta(hours=hours)


def ran(url: str, hours: int) -> str:
    with opened(url) as fp:
        return fp.trigger("work", at(hours)).status


def elsewhere(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Be another host from now on, one that has seen nothing."""
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))


def accepted(url: str) -> None:
    program = "from fencepost.cli.main import main; raise SystemExit(main())"
    words = ["migrate", "--url", url, "--accept-copy"]
    subprocess.run([sys.executable, "-c", program, *words], check=True, capture_output=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_that_was_restored_is_noticed_by_who_saw_more(
    kind: type[Dumped | Copied], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = kind("dumped")
    ran(ledger.url, 0)
    ledger.dump()
    with opened(ledger.url) as fp:  # a process that lives through it
        assert fp.trigger("work", at(1)).status == "succeeded"
        ledger.restore()
        with pytest.raises(LedgerDoubtful, match="looks like a restored copy"):
            fp.trigger("work", at(2))
        assert len(fp.runs("work")) == 1  # and nothing was written
        elsewhere(monkeypatch, tmp_path)
        with pytest.raises(LedgerDoubtful, match="looks like a restored copy"):
            ran(ledger.url, 1)  # who has seen nothing is told by the one who has
        accepted(ledger.url)
        assert fp.trigger("work", at(1)).status == "succeeded"  # without a restart
    assert [ran(ledger.url, hours) for hours in (0, 1, 2)] == [
        *("already_done", "already_done", "succeeded")
    ]


def test_a_fresh_process_knows_what_its_host_has_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Dumped("host")
    ran(ledger.url, 0)
    ledger.dump()
    ran(ledger.url, 1)
    ledger.restore()
    with monkeypatch.context() as there:
        elsewhere(there, tmp_path)
        # What nobody who asks has seen nobody can miss.
        assert ran(ledger.url, 1) == "succeeded"
    with pytest.raises(LedgerDoubtful, match="looks like a restored copy"):
        ran(ledger.url, 2)
    accepted(ledger.url)
    assert ran(ledger.url, 2) == "succeeded"
    ledger.restore()  # a second time, to before the operator's word
    with pytest.raises(LedgerDoubtful, match="older than the operator's word"):
        ran(ledger.url, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_instances_neither_tick_nor_register_on_a_copy(kind: type[Dumped | Copied]) -> None:
    ledger = kind("ticks")
    instance = Instance("one", "here", 1, "")
    seen = ledger.opened(ledger.url)
    run_through(seen, KEY, "a")
    ledger.dump()
    run_through(seen, KEY._replace(slot=2_000), "b")
    ledger.restore()
    with pytest.raises(LedgerDoubtful):
        finish(seen.planner.attend(instance))
    other = ledger.opened(ledger.url)
    with pytest.raises(LedgerDoubtful):
        finish(other.planner.tick(Ask(lambda _: None, "n", 1, again=1)))
    for one in (seen, other):
        finish(one.close())


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_run_is_missed_as_well(
    kind: type[Dumped | Copied], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    elsewhere(monkeypatch, tmp_path)
    ledger = kind("ends")
    seen = ledger.opened(ledger.url)
    attempt = claimed(seen, KEY, "a")
    ledger.dump()
    finish(seen.finish(attempt, DONE))
    ledger.restore()
    with pytest.raises(LedgerDoubtful, match="the end of run"):
        claimed(seen, KEY._replace(slot=2_000), "b")
    finish(seen.close())


@pytest.mark.parametrize("kind", KINDS)
def test_a_ledger_that_somebody_began_anew_is_no_copy(kind: type[Dumped | Copied]) -> None:
    ledger = kind("anew")
    with opened(ledger.url) as fp:
        assert fp.trigger("work", at(0)).status == "succeeded"
        ledger.empty()
    assert ran(ledger.url, 0) == "succeeded"


def test_a_base_backup_that_was_restored_is_noticed() -> None:
    with Postgres.own() as server:
        url = server.database("backed_up")
        ran(url, 0)
        server.tool("pg_basebackup", "-D", str(server.folder / "backup"), "-c", "fast")
        with opened(url) as fp:
            assert fp.trigger("work", at(1)).status == "succeeded"
            server.stop()
            shutil.rmtree(server.data)
            (server.folder / "backup").rename(server.data)
            give_to_nobody(server.folder)
            server.start()
            with pytest.raises(LedgerDoubtful, match="looks like a restored copy"):
                fp.trigger("work", at(2))
        with pytest.raises(LedgerDoubtful):
            ran(url, 1)
        accepted(url)
        assert ran(url, 1) == "succeeded"


def test_a_standby_that_took_over_is_noticed_if_it_lacks_something() -> None:
    with Postgres.own() as server, Proxy(server.port) as proxy:
        url = server.database("followed").replace(str(server.port), str(proxy.port))
        assert ran(url, 0) == "succeeded"
        standby = server.standby()
        try:
            with opened(url) as fp:
                assert fp.trigger("work", at(1)).status == "succeeded"
                _caught_up(server, standby)
                _took_over(proxy, standby)
                assert fp.trigger("work", at(2)).status == "succeeded"  # it lacks nothing
                late = standby.standby()
                try:
                    late.stop()
                    assert fp.trigger("work", at(3)).status == "succeeded"
                    standby.kill()
                    late.start()
                    _took_over(proxy, late)
                    with pytest.raises(LedgerDoubtful, match="took over too early"):
                        fp.trigger("work", at(4))
                finally:
                    late.end()
        finally:
            standby.end()


def _caught_up(server: Postgres, standby: Postgres) -> None:
    (row,) = server.run("SELECT pg_current_wal_lsn()")
    _until(lambda: standby.run(f"SELECT pg_last_wal_replay_lsn() >= '{row[0]}'") == [(True,)])


def _took_over(proxy: Proxy, standby: Postgres) -> None:
    standby.run("SELECT pg_promote()")
    _until(lambda: standby.run("SELECT pg_is_in_recovery()") == [(False,)])
    proxy._upstream = standby.port
    proxy.reset()


def _until(condition: object) -> None:
    assert callable(condition)
    end = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("kind", "part", "steps"),
    [
        (Dumped, postgres_schema.PART, postgres_schema.STEPS),
        (Copied, mariadb_schema.PART, mariadb_schema.STEPS),
        (CopiedMySQL, mariadb_schema.PART, mariadb_schema.STEPS),
    ],
)
def test_a_ledger_from_before_there_were_lives_gets_one(
    kind: type[Dumped | Copied], part: str, steps: tuple[tuple[str, ...], ...]
) -> None:
    ledger = kind("older")
    assert ran(ledger.url, 0) == "succeeded"
    before = next(
        number
        for number, step in enumerate(steps)
        if any("fencepost_life" in text for text in step)
    )
    ledger.server.run("DROP TABLE fencepost_life", database=ledger.name)
    if kind is Copied:  # as it was there
        ledger.server.run("ALTER TABLE fencepost_run DROP COLUMN sealed", database=ledger.name)
    ledger.server.run(
        f"UPDATE fencepost_schema SET version = {before} WHERE part = '{part}'",
        database=ledger.name,
    )
    assert ran(ledger.url, 1) == "succeeded"
    found = ledger.server.run("SELECT doubt FROM fencepost_life", database=ledger.name)
    assert list(found) == [("",)]


MARK = Mark(KEY, 7, 1)
SAME = Life("a", 0, "", empty=False, has=True)


@pytest.mark.parametrize(
    ("seen", "found", "why"),
    [
        (None, SAME, ""),
        (None, SAME._replace(doubt="so it was said"), "so it was said"),
        (Seen("a", 0, MARK), SAME, ""),
        (Seen("a", 0, MARK), SAME._replace(has=False), "restored copy"),
        (Seen("a", 0), SAME._replace(has=False), ""),
        (Seen("a", 0, MARK), SAME._replace(has=False, accepted=5), ""),
        (Seen("a", 9, MARK), SAME._replace(accepted=5), "operator's word"),
        (Seen("b", 0, MARK), SAME, "not the one that was here before"),
        (Seen("b", 0, MARK), SAME._replace(empty=True, has=False), ""),
        (Seen("b", 0, MARK), SAME._replace(accepted=5), ""),
        (Seen("a", 0, MARK), SAME._replace(doubt="so it was said"), "so it was said"),
    ],
)
def test_what_is_doubted(seen: Seen | None, found: Life, why: str) -> None:
    assert (why in doubt(seen, found)) if why else doubt(seen, found) == ""


@pytest.mark.parametrize(
    "seen", [Seen("a", 3), Seen("a", 0, MARK), Seen("a", 0, Mark(KEY, 9, 2, ended=True))]
)
def test_what_is_noted_can_be_read_again(seen: Seen) -> None:
    assert from_a_line(in_a_line(seen)) == seen


@pytest.mark.parametrize(
    "line", ["", "a", "a b", "a 1 2", "a 1 2 3 x k@y", "a 1 2 3 1 nothing at all"]
)
def test_a_torn_note_is_as_good_as_none(line: str) -> None:
    assert from_a_line(line) is None


def test_many_who_look_at_what_their_host_has_seen_do_not_wait_for_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them has a session of the door, which has no more than eight."""
    elsewhere(monkeypatch, tmp_path)
    url = Dumped("many").url
    before = opened_postgres(url)
    run_through(before, KEY, "before")
    run_through(before, KEY._replace(slot=2_000), "after it was looked at")
    finish(before.close())
    ledger = opened_postgres(url)
    finish(ledger.jobs())
    keys = [RunKey(f"job {number}", 1) for number in range(8)]
    busy = ledger.leases.db
    at_once = threading.Barrier(len(keys))
    noted = ledger.testimony._noted  # type: ignore[union-attr]

    def together(incarnation: str) -> Seen | None:
        at_once.wait(20.0)
        return noted(incarnation)

    monkeypatch.setattr(ledger.testimony, "_noted", together)
    with ThreadPoolExecutor(len(keys)) as pool:
        began = time.monotonic()
        list(pool.map(lambda key: claimed(ledger, key, key.job), keys))
    assert time.monotonic() - began < 4.0
    assert len(busy.idle) == len(keys)
    finish(ledger.close())
