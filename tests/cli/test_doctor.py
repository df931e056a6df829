"""``fencepost doctor`` names what would break a promise here, and what to do about it."""

from __future__ import annotations

import json
import os
import sqlite3
from typing import TYPE_CHECKING

import pytest
from seeing_kit import SLOT, Desk

from fencepost import Fencepost
from fencepost.cli import doctor
from fencepost.cli.main import main
from fencepost.model.observed import Observed, misfits, outlived
from fencepost.model.run import RunEvent
from fencepost.model.slot import RunKey
from fencepost.model.symptom import Severity, Symptom
from fencepost.stores import sqlite_examined
from fencepost.stores.memory import MemoryStore
from fencepost.world import disk
from servers import MariaDB, MySQL, shared

if TYPE_CHECKING:
    from pathlib import Path

    from fencepost import Run


@pytest.fixture
def desk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Desk:
    return Desk(tmp_path, capsys)


@pytest.fixture(autouse=True)
def _new_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 53, 1))


def codes(desk: Desk) -> list[str]:
    answer = desk.ask("doctor", "--json")
    assert answer.code == 0
    return [symptom["code"] for symptom in answer.json["symptoms"]]


def test_a_sound_file_has_nothing_and_exits_with_0(desk: Desk) -> None:
    desk.ran(lambda _: None, SLOT)
    answer = desk.ask("doctor")
    assert (answer.code, answer.out, answer.err) == (0, f"{desk.url}: nothing was found\n", "")


def test_a_file_that_is_not_there_yet_is_not_made(desk: Desk) -> None:
    assert desk.ask("doctor").code == 0
    assert os.listdir(desk.path.parent) == []


def test_a_network_file_system_breaks_everything_and_exits_with_1(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_examined, "file_system", lambda _: "nfs4")
    monkeypatch.setattr(disk, "file_system", lambda _: "nfs4")
    assert desk.ask("locks").code == 2  # every other verb refuses it
    answer = desk.ask("doctor")
    assert answer.code == 1
    assert answer.lines[0].endswith(": 1 found")
    assert answer.lines[1].startswith("  breaks  ")
    assert "is on nfs4" in answer.lines[1]
    assert "keep the file on a local disk" in answer.lines[1]
    assert desk.ask("doctor", "--json").json["ok"] is False
    assert os.listdir(desk.path.parent) == []


def test_a_library_that_may_damage_a_file_is_a_risk(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 40, 1))
    answer = desk.ask("doctor", "--json")
    assert answer.code == 0
    [symptom] = answer.json["symptoms"]
    assert (symptom["code"], symptom["severity"]) == ("sqlite.version", "risk")
    assert "3.40.1" in symptom["what"]
    assert symptom["remedy"]


def test_a_damaged_file_is_found(desk: Desk) -> None:
    with sqlite3.connect(desk.path) as database:
        database.execute("CREATE TABLE t (x TEXT UNIQUE)")
        database.executemany("INSERT INTO t VALUES (?)", [("x" * 900 + str(n),) for n in range(50)])
    database.close()
    sound = desk.path.read_bytes()
    desk.path.write_bytes(sound[:8192] + b"\0" * 4096 + sound[12288:])
    answer = desk.ask("doctor")
    assert answer.code == 1
    assert "is damaged" in answer.out


def test_a_disk_without_room_is_a_risk(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        f_bavail, f_frsize = 10, 4096

    monkeypatch.setattr(os, "statvfs", lambda _: Full())
    assert codes(desk) == ["sqlite.room"]


def test_a_clock_that_the_instances_do_not_go_by_is_a_risk(desk: Desk) -> None:
    desk.ran(lambda _: None, SLOT)
    with Fencepost(desk.url) as fp:
        fp.job("nightly", every="1h")(lambda: None)
        fp.tick()
    with sqlite3.connect(desk.path) as database:
        changed = database.execute("UPDATE fencepost_clock SET ahead = ahead + 3600").rowcount
    database.close()
    assert changed == 1
    assert "sqlite.clock" in codes(desk)


def test_a_memory_store_is_seen_by_nobody_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--url", "memory://x", "--json"]) == 0
    [symptom] = json.loads(capsys.readouterr().out)["symptoms"]
    assert symptom["code"] == "store.private"


def test_a_store_that_cannot_examine_itself_is_asked_for_a_sign_of_life(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    can = MemoryStore.capabilities._replace(shared=True, exclusive=False)
    monkeypatch.setattr(MemoryStore, "capabilities", can)
    assert main(["doctor", "--url", "memory://x"]) == 0
    out = capsys.readouterr().out
    assert "[store.overlap]" in out
    assert "[store.failover]" in out


def test_a_job_whose_runs_use_up_their_timeout_is_a_risk(desk: Desk) -> None:
    def endless(run: Run) -> None:
        while True:
            run.check()

    with Fencepost(desk.url) as fp:
        fp.job("endless", every="1h", timeout="200ms")(endless)
        fp.trigger("endless", SLOT)
        fp.job("quick", every="1h", timeout="200h")(lambda: None)
        fp.trigger("quick", SLOT)
    assert codes(desk) == ["job.timed_out"]


@pytest.mark.parametrize(
    ("seen", "code"),
    [
        (Observed("j", 30, 10, [1, 2], 0, notices_death=False), None),
        (Observed("j", 30, 10, [1, 9], 0, notices_death=False), "job.timeout"),
        (Observed("j", 30, 10, [1], 2, notices_death=False), "job.timed_out"),
        (Observed("j", 30, None, [1e6], 0, notices_death=False), None),
        (Observed("j", 3600, None, [1], 0, notices_death=False), "job.lease"),
        (Observed("j", 3600, None, [1], 0, notices_death=True), None),
        (Observed("j", 3600, None, [600], 0, notices_death=False), None),
        (Observed("j", 3600, None, [], 0, notices_death=False), None),
        (Observed("j", 30, None, [1], 0, notices_death=True, outlived=1), "job.outlived"),
    ],
)
def test_times_that_do_not_fit_are_named(seen: Observed, code: str | None) -> None:
    assert [symptom.code for symptom in misfits(seen)] == ([] if code is None else [code])


def test_an_attempt_outlived_its_run_only_if_it_spoke_after_it_was_given_up() -> None:
    def event(what: str, token: int) -> RunEvent:
        return RunEvent(RunKey("j", 1), 1.0, what, token)

    assert outlived([event("attempt_lost", 1), event("stale_write", 1)])
    assert not outlived([event("attempt_lost", 1)])  # it died, as far as anybody knows
    assert not outlived([event("cancel_forced", 1), event("stale_write", 1)])
    assert not outlived([event("attempt_lost", 1), event("stale_write", 2)])


def test_the_worst_comes_first_and_quiet_shows_only_what_breaks(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [
        Symptom("a", Severity.NOTE, "n", "x"),
        Symptom("b", Severity.BREAKS, "b", "y"),
        Symptom("c", Severity.RISK, "r\x1b[31m", "z"),
    ]
    monkeypatch.setattr(doctor, "_found", lambda *_: list(found))
    answer = desk.ask("doctor")
    assert answer.code == 1
    assert [line.split()[0] for line in answer.lines[1:]] == ["breaks", "risk", "note"]
    assert "\x1b" not in answer.out
    assert desk.ask("doctor", "--quiet").lines == ["  breaks  b: y [b]"]


# What cannot be used exits with 3, whatever the verb, with one sentence that shows no secret.

_VERBS = (["doctor"], ["locks"], ["migrate"], ["lock", "break", "x", "--token=1", "--reason=r"])


@pytest.mark.parametrize("verb", _VERBS, ids=lambda words: words[0])
@pytest.mark.parametrize("wrong", ["password", "host", "database", "privilege"])
def test_a_server_that_cannot_be_used_exits_with_3(
    verb: list[str], wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server = shared(MariaDB)
    server.database("doctor")
    server.run("CREATE USER IF NOT EXISTS nobody@'127.0.0.1' IDENTIFIED BY 'hunter2'")
    server.run("GRANT SELECT ON doctor.* TO nobody@'127.0.0.1'")
    port = server.port
    url = {
        "password": f"mariadb://post:hunter2@127.0.0.1:{port}/doctor",
        "host": "mariadb://post:hunter2@127.0.0.1:1/doctor",
        "database": f"mariadb://root:hunter2@127.0.0.1:{port}/nowhere",
        "privilege": f"mariadb://nobody:hunter2@127.0.0.1:{port}/doctor",
    }[wrong]
    code = main([*verb, "--url", url])
    said = capsys.readouterr()
    assert "hunter2" not in said.out + said.err
    if wrong == "privilege" and verb == ["doctor"]:
        assert code == 0  # there is nothing to see yet, and nothing wrong
        return
    assert code == 3
    assert len(said.err.splitlines()) == 1
    assert said.out == ""


@pytest.mark.parametrize("verb", ["doctor", "locks"])
@pytest.mark.parametrize(
    "url",
    [
        "postgresql://ann:hunter2@127.0.0.1:1/x",
        "redis://ann:hunter2@127.0.0.1:1/0",
        "etcd://ann:hunter2@127.0.0.1:1",
        "zookeeper://127.0.0.1:1",
    ],
    ids=lambda url: url.partition(":")[0],
)
def test_a_server_of_any_kind_that_nobody_runs_exits_with_3(
    url: str, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, "--url", url]) == 3
    said = capsys.readouterr()
    assert "cannot be" in said.out + said.err
    assert "hunter2" not in said.out + said.err


@pytest.mark.parametrize("verb", _VERBS, ids=lambda words: words[0])
def test_a_file_that_is_no_database_exits_with_3(
    verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "leases.db").write_text("to be or not to be\n" * 500)
    assert main([*verb, "--url", f"sqlite:///{tmp_path}/leases.db"]) == 3
    assert "is not a healthy SQLite file" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [MariaDB, MySQL])
def test_a_server_is_examined(kind: type[MariaDB], capsys: pytest.CaptureFixture[str]) -> None:
    url = shared(kind).database("examined")
    assert main(["doctor", "--url", url, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert "secret" not in document["url"]
    assert [symptom["code"] for symptom in document["symptoms"]] == [
        "mariadb.tables",
        "store.failover",
    ]
