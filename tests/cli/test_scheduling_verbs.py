"""What ``up``, ``tick``, ``run``, ``plan`` and ``backfill`` do with declared jobs."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import time
from typing import TYPE_CHECKING

import pytest
from exec_kit import PATIENCE, Kit, kit_in, wait_for

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

MODULE = """
from fencepost import {face}
fp = {face}()

@fp.job("bills", cron="0 2 * * *")
{colour} bills(run):
    run.log.info("here")
    return "sent"

@fp.job("broken", every="1h")
{colour} broken():
    raise ValueError("no input")
"""

FILE = """
[[job]]
name = "tick"
every = "1s"
command = ["sh", "-c", "echo $FENCEPOST_SLOT >> {folder}/ticks"]

[[job]]
name = "long"
every = "1s"
overlap = "skip"
command = ["sh", "-c", "touch {folder}/long; exec sleep 600"]
"""


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    with kit_in(tmp_path) as kit:
        yield kit


@pytest.fixture(params=["Fencepost", "AsyncFencepost"])
def module(kit: Kit, request: pytest.FixtureRequest) -> str:
    colour = "def" if request.param == "Fencepost" else "async def"
    text = MODULE.format(face=request.param, colour=colour)
    (kit.folder / "program.py").write_text(text)
    return "program:fp"


def blocking(kit: Kit, text: str = "") -> str:
    whole = MODULE.format(face="Fencepost", colour="def") + text
    (kit.folder / "program.py").write_text(whole)
    return "program:fp"


# Where jobs are declared.


@pytest.mark.parametrize("verb", ["up", "tick", "plan"])
def test_without_any_jobs_it_is_one_sentence_with_2(kit: Kit, verb: str) -> None:
    done = kit.fencepost(verb)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no jobs are declared here" in done.stderr
    assert os.listdir(kit.folder) == []


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("nowhere:fp", "there is no module 'nowhere'"),
        ("nowhere.toml", "cannot be read"),
        ("nothing", "is not module:name"),
        ("program:bills", "give the name of a Fencepost"),
    ],
)
def test_a_source_that_leads_nowhere_is_one_sentence(kit: Kit, source: str, sentence: str) -> None:
    blocking(kit)
    done = kit.fencepost("tick", source)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_program_that_chose_its_store_does_not_let_another_be_forced_on_it(kit: Kit) -> None:
    text = (
        kit.folder / "program.py",
        "from fencepost import Fencepost\nfp = Fencepost('memory://')\n",
    )
    text[0].write_text(text[1])
    done = kit.fencepost("tick", "program:fp", "--url", "sqlite:///other.db")
    assert done.returncode == 2
    assert "program:fp keeps its ledger at memory://" in done.stderr


# run and tick


def test_run_triggers_a_slot_here_and_only_once(kit: Kit, module: str) -> None:
    words = ("run", "bills", module, "--slot", "2026-01-20T02:00:00Z")
    first, second = kit.fencepost(*words), kit.fencepost(*words, "--json")
    assert first.returncode == 0, first.stderr
    assert re.search(r"bills@2026-01-20T02:00:00Z +succeeded", first.stdout)
    assert second.returncode == 0, second.stderr
    assert json.loads(second.stdout)["status"] == "already_done"
    assert json.loads(second.stdout)["result"] == "sent"


def test_run_says_with_its_exit_code_what_became_of_it(kit: Kit) -> None:
    source = blocking(kit)
    assert kit.fencepost("run", "broken", source).returncode == 1
    assert kit.fencepost("run", "nope", source).returncode == 2
    assert kit.fencepost("pause", "broken").returncode == 0
    done = kit.fencepost("run", "broken", source, "--manual")
    assert (done.returncode, "paused" in done.stdout) == (4, True)


def test_tick_runs_what_is_due_and_fails_if_any_of_it_did(kit: Kit, module: str) -> None:
    assert kit.fencepost("tick", module).stdout == "nothing is due\n"
    database = sqlite3.connect(kit.folder / "leases.db")
    with database:
        due = "UPDATE fencepost_job SET watermark = watermark - 7200, next_due = next_due - 7200"
        database.execute("DROP TRIGGER fencepost_job_mark")
        database.execute(f"{due} WHERE job = 'broken'")
    database.close()
    done = kit.fencepost("tick", module, "--budget", "20s", "--most", "1")
    assert done.returncode == 1
    assert re.search(r"broken@\S+ +failed +ValueError: no input", done.stdout), done.stdout


# up


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stderr is not None
    yield from process.stderr


def test_up_serves_a_file_of_jobs_until_it_is_asked_to_stop(kit: Kit) -> None:
    (kit.folder / "jobs.toml").write_text(FILE.format(folder=kit.folder))
    process = kit.start("up", "--grace", "1s")
    lines = lines_of(process)
    first = next(lines)
    pattern = (
        rf"\d\d:\d\d:\d\d started url={re.escape(kit.url)} instance=\S+ jobs=2 next_due=\S+Z\n"
    )
    assert re.fullmatch(pattern, first), first
    assert "doubtful job=tick note=" in next(lines)
    ticks = kit.folder / "ticks"
    wait_for(lambda: ticks.exists() and len(ticks.read_text().split()) >= 2, "two slots")
    wait_for((kit.folder / "long").exists, "what is long to begin")
    instances = json.loads(kit.fencepost("instances", "--json").stdout)
    assert [instance["state"] for instance in instances] == ["alive"]
    process.terminate()
    assert process.wait(PATIENCE) == 0
    slots = ticks.read_text().split()
    assert len(slots) == len(set(slots))
    assert kit.fencepost("verify").returncode == 0
    assert "ended" in kit.fencepost("instances").stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_hurries(kit: Kit, number: int) -> None:
    (kit.folder / "jobs.toml").write_text(FILE.format(folder=kit.folder))
    process = kit.start("up", "--grace", "10m", "--quiet")
    wait_for((kit.folder / "long").exists, "what is long to begin")
    ticks = kit.folder / "ticks"
    wait_for(ticks.exists, "a slot")
    process.send_signal(number)
    wait_for(lambda: time.time() - ticks.stat().st_mtime > 2.5, "nothing more to begin")
    assert process.poll() is None
    process.send_signal(number)
    assert process.wait(PATIENCE) == 0


def test_up_in_json_has_the_time_on_every_line(kit: Kit) -> None:
    process = kit.start("up", blocking(kit), "--json")
    first = json.loads(next(lines_of(process)))
    process.terminate()
    assert process.wait(PATIENCE) == 0
    assert (first["event"], first["jobs"]) == ("started", 2)
    assert first["at"].endswith("Z")


@pytest.mark.parametrize("words", [("--grace", "soon"), ("--grace=-1s",), ("--concurrency", "0")])
def test_up_refuses_words_that_make_no_sense(kit: Kit, words: tuple[str, ...]) -> None:
    done = kit.fencepost("up", blocking(kit), *words)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_up_says_that_a_store_cannot_be_reached(kit: Kit) -> None:
    (kit.folder / "jobs.toml").write_text(FILE.format(folder=kit.folder))
    done = kit.fencepost("up", "--url", f"sqlite:///{kit.folder}/nowhere/x.db")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr


# plan


def test_plan_shows_what_is_new_and_changes_nothing(kit: Kit, module: str) -> None:
    done = kit.fencepost("plan", module)
    assert done.returncode == 0, done.stderr
    assert "+ bills\n    schedule  cron '0 2 * * *' in UTC: at 02:00 every day" in done.stdout
    assert done.stdout.endswith(
        "2 new, 0 changed, 0 unchanged, 0 not declared here; nothing was changed\n"
    )
    assert not (kit.folder / "leases.db").exists()
    assert kit.fencepost("plan", module, "--check").returncode == 1


def test_plan_shows_words_slots_and_what_is_missing_or_retired(kit: Kit) -> None:
    source = blocking(kit)
    kit.fencepost("tick", source)
    assert kit.fencepost("plan", source, "--check").returncode == 0
    kit.fencepost("retire", "broken", "--reason", "replaced")
    text = MODULE.format(face="Fencepost", colour="def")
    text = text.replace("0 2 * * *", "* 5 * * *") + "fp.job('extra', every='1h')(print)\n"
    (kit.folder / "program.py").write_text(text)
    found = json.loads(kit.fencepost("plan", source, "--json").stdout)
    (bills,) = found["changed"]
    assert bills["words"]["schedule"]["was"].startswith("cron '0 2 * * *'")
    assert bills["next_before"] != bills["next_after"]
    assert [job["job"] for job in found["new"]] == ["extra"]
    assert list(found["retired"]) == ["broken"]
    assert "bills" in found["doubtful"]
    (kit.folder / "program.py").write_text("from fencepost import Fencepost\nfp = Fencepost()\n")
    done = kit.fencepost("plan", source)
    assert "- bills\n    is not declared here: an orphan in 15 min" in done.stdout


# backfill


def test_a_backfill_is_tried_dry_then_done_and_then_there(kit: Kit) -> None:
    source = blocking(kit)
    words = ("backfill", "bills", "2026-01-20T00:00:00Z", "2026-01-23T00:00:00Z", source)
    dry = kit.fencepost(*words, "--dry-run")
    assert dry.stdout.splitlines()[0] == "bills@2026-01-20T02:00:00Z"
    assert dry.stdout.endswith("3 slots would run; nothing was changed\n")
    assert "no job is called" in kit.fencepost("slots", "bills").stderr
    done = kit.fencepost(*words, "--newest-first")
    assert done.returncode == 0, done.stderr
    assert "3 slots looked at; run here: 3 succeeded" in done.stdout
    assert kit.fencepost(*words, "--dry-run", "--quiet").stdout == ""
    again = json.loads(kit.fencepost(*words, "--existing", "all", "--dry-run", "--json").stdout)
    assert again[0] == "bills@2026-01-20T02:00:00Z~1"


def test_a_backfill_that_was_left_to_others_can_be_stopped(kit: Kit) -> None:
    source = blocking(kit)
    words = ("backfill", "bills", "2026-01-20T00:00:00Z", "2026-01-23T00:00:00Z", source)
    assert "fencepost backfill --stop 1` stops it" in kit.fencepost(*words, "--detach").stdout
    stopped = kit.fencepost("backfill", "--stop", "1")
    assert stopped.returncode == 0, stopped.stderr
    assert stopped.stdout.startswith("backfill 1 of bills has ended: stopped by ")
    for wrong in (("--stop", "9"), ("bills",), ("bills", "--stop", "1")):
        refused = kit.fencepost("backfill", *wrong)
        assert refused.returncode == 2
        assert refused.stderr.count("\n") == 1


def test_a_backfill_that_fails_says_so_with_1(kit: Kit) -> None:
    words = ("backfill", "broken", "2026-01-20T00:00:00Z", "2026-01-20T02:00:00Z", blocking(kit))
    done = kit.fencepost(*words)
    assert done.returncode == 1
    assert "2 failed" in done.stdout


def test_a_backfill_that_is_interrupted_goes_on_when_it_is_asked_for_again(kit: Kit) -> None:
    source = blocking(
        kit,
        "import os, time\n"
        "@fp.job('slow', every='1h')\n"
        "def slow(run):\n"
        f"    with open('{kit.folder}/ran', 'a') as file: file.write(run.id + '\\n')\n"
        f"    while os.path.exists('{kit.folder}/slow') and run.slot.hour == 1: time.sleep(0.01)\n",
    )
    (kit.folder / "slow").touch()
    words = ("backfill", "slow", "2026-01-20T00:00:00Z", "2026-01-20T03:00:00Z", source)
    process = kit.start(*words)
    ran = kit.folder / "ran"
    wait_for(lambda: ran.exists() and len(ran.read_text().split()) == 2, "the second slot")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "the same command goes on from there" in err
    (kit.folder / "slow").unlink()
    done = kit.fencepost(*words)
    assert done.returncode == 0, done.stderr
    keys = ran.read_text().split()
    assert [key.partition("T")[2][:2] for key in keys] == ["00", "01", "01", "02"]
    assert kit.fencepost("verify").returncode == 0


def test_a_backfill_can_be_left_to_instances_but_is_not_waited_for_without_any(kit: Kit) -> None:
    kit.fencepost("tick", blocking(kit))
    words = ("backfill", "bills", "2026-01-20T00:00:00Z", "2026-01-22T00:00:00Z")
    (kit.folder / "program.py").unlink()
    database = sqlite3.connect(kit.folder / "leases.db")
    with database:
        database.execute("DELETE FROM fencepost_instance")
    database.close()
    refused = kit.fencepost(*words)
    assert refused.returncode == 2
    assert "no instance is there" in refused.stderr
    done = kit.fencepost(*words, "--detach")
    assert done.returncode == 0
    assert "is left to the instances that know the job" in done.stdout
