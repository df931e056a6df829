"""The witness of a SQLite ledger knows of every commit before anybody acts on it.

A copy that lacks a commit is refused, whenever it was made; a kill or a reboot is no reason to.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ledgerlab import DONE, StillClocks, claimed, opened, run_through

from fencepost import Fencepost
from fencepost.errors import LedgerDoubtful
from fencepost.ledger.planning import Instance
from fencepost.model.definition import Definition
from fencepost.model.item import ItemState
from fencepost.model.policy import OnLoss, Policy
from fencepost.model.schedule import Every, spec_of
from fencepost.model.slot import RunKey
from fencepost.model.witnessed import Cell, Commit, Found, Told, cell_from, commit_line, has
from fencepost.world.flow import finish
from fencepost.world.witness import Cells, Seen, Witness, Wrote

if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost import Run
    from fencepost.ledger.sqlite import SqliteLedger

SLOT = datetime(2026, 1, 20, 2, tzinfo=UTC)
FAR = datetime(2040, 1, 1, tzinfo=UTC)
PROGRAM = Path(__file__).with_name("copier_program.py")


def backed_up(folder: Path) -> None:
    with (
        closing(sqlite3.connect(folder / "ledger.db")) as source,
        closing(sqlite3.connect(folder / "copy.db")) as target,
    ):
        source.backup(target)


def moved(folder: Path, here: str, there: str) -> None:
    """Rename a database with all that belongs to it."""
    for part in ("", "-wal", "-shm"):
        if (folder / f"{here}{part}").exists():
            (folder / f"{here}{part}").rename(folder / f"{there}{part}")


def is_refused(folder: Path) -> bool:
    """Say whether a process that comes now refuses to run anything."""
    with Fencepost(f"sqlite:///{folder}/ledger.db") as fp:
        fp.job("probe")(lambda: None)
        try:
            fp.trigger("probe", SLOT)
        except LedgerDoubtful:
            return True
    return False


def judged(folder: Path) -> tuple[bool, bool]:
    """Say whether the copy is refused in place of the ledger, and then the ledger itself."""
    moved(folder, "ledger.db", "aside.db")
    shutil.copyfile(folder / "copy.db", folder / "ledger.db")
    copy = is_refused(folder)
    moved(folder, "ledger.db", "gone.db")
    moved(folder, "aside.db", "ledger.db")
    return copy, is_refused(folder)


def test_copies_from_any_moment_before_a_kill_are_refused_and_the_ledger_never_is(
    tmp_path: Path,
) -> None:
    words = [sys.executable, str(PROGRAM), str(tmp_path), "40", "10", "1"]
    told = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    rounds = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    assert len(rounds) >= 40
    assert sum(bool(one["lacks"]) for one in rounds) >= 10  # else nothing was tried
    for one in rounds:
        assert one["lost"] == [], "the log knows of what the ledger does not"
        assert one["copy"] or not one["lacks"], f"a copy without {one['lacks']} was believed"
        assert not one["live"], "the ledger was taken for a copy of itself"


def _claim(fp: Fencepost, run: Run | None) -> None:
    def other() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    fp.job("other")(other)
    fp.trigger("other", SLOT)


def _save(fp: Fencepost, run: Run | None) -> None:
    assert run is not None
    run.save({"page": 2})


def _item(fp: Fencepost, run: Run | None) -> None:
    assert run is not None
    with run.once("mail"):
        pass


def _transaction(fp: Fencepost, run: Run | None) -> None:
    assert run is not None
    with run.transaction() as tx:
        tx.once("paid")


def _set_alarm(fp: Fencepost, run: Run | None) -> None:
    fp.alarms.set("ring", "b", at=FAR)


def _clear_alarm(fp: Fencepost, run: Run | None) -> None:
    fp.alarms.clear("ring", "a")


def _pause(fp: Fencepost, run: Run | None) -> None:
    fp.pause("work", reason="for now")


def _cancel(fp: Fencepost, run: Run | None) -> None:
    assert run is not None
    fp.cancel(run.id)


@pytest.mark.parametrize(
    "step", [_claim, _save, _item, _transaction, _set_alarm, _clear_alarm, _pause, _cancel]
)
def test_a_copy_that_lacks_just_the_last_commit_is_refused(
    tmp_path: Path, step: Callable[[Fencepost, Run | None], None]
) -> None:
    script = f"""
import os, signal, sys
sys.path[:0] = {[str(Path(__file__).parent)]!r}
import test_witness as here
from pathlib import Path
from fencepost import Fencepost

fp = Fencepost("sqlite:///{tmp_path}/ledger.db")

@fp.job("work", every="1h")
def work(run):
    run.save({{"page": 1}})
    here.backed_up(Path({str(tmp_path)!r}))
    here.{step.__name__}(fp, run)
    os.kill(os.getpid(), signal.SIGKILL)

fp.alarms.set("ring", "a", at=here.FAR)
fp.trigger("work", here.SLOT)
"""
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert judged(tmp_path) == (True, False)


def test_a_copy_from_between_a_claim_and_its_end_is_refused(tmp_path: Path) -> None:
    fp = Fencepost(f"sqlite:///{tmp_path}/ledger.db")

    @fp.job("work")
    def work() -> None:
        backed_up(tmp_path)

    assert fp.trigger("work", SLOT).status == "succeeded"  # and nothing is closed
    assert judged(tmp_path) == (True, False)
    fp.close()


def test_a_copy_that_lacks_nothing_is_believed(tmp_path: Path) -> None:
    fp = Fencepost(f"sqlite:///{tmp_path}/ledger.db")
    fp.job("work")(lambda: None)
    fp.trigger("work", SLOT)
    fp.alarms.set("ring", "a", at=FAR)
    backed_up(tmp_path)
    assert judged(tmp_path)[0] is False
    fp.close()


def test_a_lock_that_was_taken_on_the_copy_first_hides_nothing(tmp_path: Path) -> None:
    fp = Fencepost(f"sqlite:///{tmp_path}/ledger.db")
    fp.job("work")(lambda: None)
    fp.trigger("work", SLOT)
    backed_up(tmp_path)
    fp.trigger("work", SLOT + timedelta(hours=1))
    moved(tmp_path, "ledger.db", "aside.db")
    shutil.copyfile(tmp_path / "copy.db", tmp_path / "ledger.db")
    with Fencepost(f"sqlite:///{tmp_path}/ledger.db") as later, later.lock("work"):
        pass
    assert is_refused(tmp_path)
    fp.close()


@pytest.mark.parametrize("rerun", [0, 1_700_000_000])
def test_a_repeat_of_a_slot_that_was_forgotten_is_missed(tmp_path: Path, rerun: int) -> None:
    """Else what an operator had repeated on purpose would be repeated once more."""
    ledger = opened(tmp_path / "ledger.db")
    job = Definition("job", spec_of(Every(60)), template="job")
    finish(ledger.planner.announce(Instance("i", "here", 1, "1.0"), [job]))
    run_through(ledger, RunKey("other", 60), "o")  # the line tells of a token once a second
    run_through(ledger, RunKey("other", 120), "p")
    backed_up(tmp_path)
    run_through(ledger, RunKey("job", 60, rerun=rerun), "a")
    moved(tmp_path, "ledger.db", "aside.db")
    shutil.copyfile(tmp_path / "copy.db", tmp_path / "ledger.db")
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as db, db:
        db.execute("UPDATE fencepost_job SET pruned = 600")  # as retention does
    assert is_refused(tmp_path) == (rerun > 0)


def test_a_process_that_is_behind_leaves_the_line_of_one_that_is_ahead(tmp_path: Path) -> None:
    ahead, behind = Witness(str(tmp_path)), Witness(str(tmp_path))
    ahead.tell(Seen("life", 7))
    behind.tell(Seen("life", 5))
    assert ahead.asked() == ("life", 7)
    behind.tell(Seen("anew", 5))
    assert ahead.asked() == ("anew", 5)
    ahead.tell(Seen("anew", 4), anew=True)  # by an operator's word
    assert ahead.asked() == ("anew", 4)


# A machine that starts anew.


def told_by(
    ledger: SqliteLedger, folder: Path, *, careful: bool = False, ended: bool = False
) -> None:
    """Have one run begin, and perhaps end, after a copy was made; nothing is closed."""
    run_before = claimed(ledger, RunKey("job", 1), "a")
    finish(ledger.finish(run_before, DONE))
    backed_up(folder)
    policy = Policy(on_loss=OnLoss.FAIL) if careful else None
    attempt = claimed(ledger, RunKey("job", 2), "b", policy)
    if ended:
        finish(ledger.finish(attempt, DONE))
        claimed(ledger, RunKey("job", 3), "c")  # along with which the end is told as synced


def after_reboot(folder: Path, clocks: StillClocks) -> str:
    """Put the copy in place of the ledger, start the machine anew, and claim."""
    moved(folder, "ledger.db", "aside.db")
    shutil.copyfile(folder / "copy.db", folder / "ledger.db")
    clocks.reboot()
    ledger = opened(folder / "ledger.db", clocks)
    try:
        claimed(ledger, RunKey("job", 9), "z")
    except LedgerDoubtful:
        return "refused"
    finally:
        finish(ledger.close())
    return "claimed"


def test_a_power_cut_that_forgets_what_was_not_synced_is_no_copy(tmp_path: Path) -> None:
    clocks = StillClocks()
    ledger = opened(tmp_path / "ledger.db", clocks)
    told_by(ledger, tmp_path)
    assert after_reboot(tmp_path, clocks) == "claimed"


@pytest.mark.parametrize("how", [{"careful": True}, {"ended": True}])
def test_what_was_synced_is_missed_after_a_reboot_too(tmp_path: Path, how: dict[str, bool]) -> None:
    clocks = StillClocks()
    ledger = opened(tmp_path / "ledger.db", clocks)
    told_by(ledger, tmp_path, **how)
    if "careful" in how:  # told as synced along with the next commit
        finish(ledger.note(RunKey("job", 2), "seen"))
    assert after_reboot(tmp_path, clocks) == "refused"


def test_a_witness_that_a_power_cut_has_set_back_is_no_reason_to_stop(tmp_path: Path) -> None:
    clocks = StillClocks()
    ledger = opened(tmp_path / "ledger.db", clocks)
    told_by(ledger, tmp_path, ended=True)
    for path in (tmp_path / "ledger.db-live").glob("*.seen"):
        path.write_bytes(b"")
    clocks.reboot()
    later = opened(tmp_path / "ledger.db", clocks)
    assert claimed(later, RunKey("other", 9), "z").token
    finish(later.close())


# Cells.


def cells(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "ledger.db-live").glob("*.seen"))


def test_the_cells_of_the_dead_are_removed_and_those_of_the_living_are_kept(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    living = Fencepost(url)
    living.job("work")(lambda: None)
    living.trigger("work", SLOT)
    (kept,) = cells(tmp_path)
    script = f"""
from fencepost import Fencepost
from datetime import datetime, UTC
fp = Fencepost({url!r})
fp.job("else")(lambda: None)
fp.trigger("else", datetime(2026, 1, 20, 2, tzinfo=UTC))
"""
    for number in range(3):
        subprocess.run([sys.executable, "-c", script], check=True)
        assert kept in cells(tmp_path)
        assert len(cells(tmp_path)) <= 2 + (number > 0)
    living.close()


def test_a_child_of_a_fork_has_a_cell_of_its_own(tmp_path: Path) -> None:
    fp = Fencepost(f"sqlite:///{tmp_path}/ledger.db")
    fp.job("work")(lambda: None)
    fp.trigger("work", SLOT)
    backed_up(tmp_path)
    before = cells(tmp_path)
    pid = os.fork()
    if not pid:
        fp.trigger("work", SLOT + timedelta(hours=1))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(cells(tmp_path)) == len(before) + 1
    assert judged(tmp_path) == (True, False)
    fp.close()


def test_a_cell_that_is_removed_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "ledger.db-live"
    own = Cells(str(folder))
    assert own.write("one") is Wrote.NEW
    (name,) = own.read()
    own.remove(own.read(), dead=True)
    assert own.read() == {name: "one"}  # for its process lives
    (folder / name).unlink()
    assert own.write("one") is Wrote.SAME
    own._look_at = 0.0  # a second later
    assert own.write("one") is Wrote.REMOVED
    own.close()
    assert own.write("two") is Wrote.NEW
    assert list(own.read().values()) == ["two"]
    own.close()


def test_a_torn_cell_says_nothing(tmp_path: Path) -> None:
    own = Cells(str(tmp_path))
    own.write("all of it")
    (name,) = own.read()
    whole = (tmp_path / name).read_bytes()
    for size in range(len(whole)):
        (tmp_path / name).write_bytes(whole[:size])
        assert own.read() == {}
    (tmp_path / name).write_bytes(whole)
    assert own.read() == {name: "all of it"}
    own.write("less")  # over what was longer
    assert own.read() == {name: "less"}
    own.close()


def test_where_no_cell_can_be_written_work_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "read-only file system")

    monkeypatch.setattr("os.pwrite", refuse)
    assert not is_refused(tmp_path)
    assert not is_refused(tmp_path)


def test_an_operator_s_word_ends_what_all_cells_say(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    fp = Fencepost(url)
    fp.job("work")(lambda: None)
    fp.trigger("work", SLOT)
    backed_up(tmp_path)
    for hours in (1, 2, 3):
        fp.alarms.set("ring", "a", at=FAR)
        fp.trigger("work", SLOT + timedelta(hours=hours))
    moved(tmp_path, "ledger.db", "aside.db")
    shutil.copyfile(tmp_path / "copy.db", tmp_path / "ledger.db")
    program = "from fencepost.cli.main import main; raise SystemExit(main())"
    words = ["migrate", "--url", url, "--accept-copy"]
    subprocess.run([sys.executable, "-c", program, *words], check=True, capture_output=True)
    assert fp.trigger("work", SLOT + timedelta(hours=1)).status == "succeeded"
    fp.alarms.set("ring", "a", at=FAR)
    assert not is_refused(tmp_path)
    fp.close()


# Beside an older fencepost, which knows the line only.


def test_the_line_of_an_older_fencepost_is_believed_and_kept_up(tmp_path: Path) -> None:
    assert not is_refused(tmp_path)
    witness = Witness(f"{tmp_path}/ledger.db-live")
    seen = witness.asked()
    assert seen is not None
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as db:
        (token,) = db.execute("SELECT max(token) FROM fencepost_run").fetchone()
    assert seen.token == token
    for name in cells(tmp_path):
        (tmp_path / "ledger.db-live" / name).unlink()
    witness.tell(Seen(seen.incarnation, seen.token + 1))
    witness.close()
    assert is_refused(tmp_path)


# What a commit leaves for good.

KEY = RunKey("job", 60, 0, 0)


@pytest.mark.parametrize(
    ("commit", "found", "there"),
    [
        (Commit("n", KEY, 5), Found(("running", 5, 0)), True),
        (Commit("n", KEY, 5), Found(("running", 4, 0)), False),
        (Commit("n", KEY, 5), Found(("pending", 6, 0)), True),
        (Commit("n", KEY, 5), Found(None), False),
        (Commit("n", KEY, 5), Found(None, forgotten=True), True),
        (Commit("n", KEY, 5, over=True), Found(("running", 5, 0)), False),
        (Commit("n", KEY, 5, over=True), Found(("waiting_retry", 5, 0)), True),
        (Commit("n", KEY, 5, over=True), Found(("running", 6, 0)), True),
        (Commit("n", KEY, 5, saves=2), Found(("running", 5, 1)), False),
        (Commit("n", KEY, 5, saves=2), Found(("running", 5, 3)), True),
        (Commit("n", KEY, 5, saves=2), Found(("running", 6, 0)), True),
        (Commit("n", KEY, 5, scope="s", item="a"), Found(("running", 5, 0)), False),
        (Commit("n", KEY, 5, scope="s", item="a"), Found(("running", 5, 0), forgotten=True), True),
        (
            Commit("n", KEY, 5, scope="s", item="a"),
            Found(("running", 5, 0), ("begun", 5, "c")),
            True,
        ),
        (
            Commit("n", KEY, 5, scope="s", call="c", item="a"),
            Found(("running", 5, 0), ("begun", 5, "c")),
            False,
        ),
        (
            Commit("n", KEY, 5, scope="s", call="c", item="a"),
            Found(("running", 5, 0), ("begun", 5, "d")),
            True,
        ),
        (
            Commit("n", KEY, 5, scope="s", call="c", item="a"),
            Found(("running", 5, 0), ("done", 5, "c")),
            True,
        ),
    ],
)
def test_whether_a_file_has_a_commit(commit: Commit, found: Found, there: bool) -> None:  # noqa: FBT001 -- a table
    assert has(commit, found) is there


def test_what_was_told_is_read_as_it_was_told() -> None:
    item = Commit("n", RunKey("a job", 1, 2, 3), 4, True, 5, "scope", "call", "a\tb\nc\x00ü")  # noqa: FBT003 -- all fields
    for told in (Told(), Told(7), Told(8, Commit("n", KEY, 5)), Told(9, item)):
        line = "" if told.commit is None else commit_line(told.commit)
        text = f"boot\nlife\n{told.counted}\n{line}\n1\n"
        assert cell_from(text) == Cell("boot", "life", told, Told(1))
    for text in ("", "a\nb", "a\nb\nc\nd\ne\nf", "a\nb\n1\nn\tjob\n1\n"):
        assert cell_from(text) is None


def test_the_end_of_an_item_is_missed(tmp_path: Path) -> None:
    ledger = opened(tmp_path / "ledger.db")
    attempt = claimed(ledger, RunKey("job", 1), "a")
    finish(ledger.begin(attempt, scope="s", items=["i"], call="c", repeat=False))
    backed_up(tmp_path)
    finish(ledger.end(attempt, scope="s", items=[("i", ItemState.DONE, None)], call="c"))
    assert judged(tmp_path) == (True, False)
    finish(ledger.close())
