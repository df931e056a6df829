"""What the other verbs answer, and with which exit code."""

from __future__ import annotations

import json
import re
import sqlite3
from typing import TYPE_CHECKING

import pytest
from exec_kit import Kit, kit_in

from fencepost import Fencepost
from fencepost.cli.main import main
from fencepost.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    with kit_in(tmp_path) as kit:
        yield kit


def test_locks_says_when_nothing_is_held(kit: Kit) -> None:
    done = kit.fencepost("locks")
    assert (done.returncode, done.stdout) == (0, "nothing is held\n")
    assert kit.fencepost("locks", "--quiet").stdout == ""
    assert json.loads(kit.fencepost("locks", "--json").stdout) == []


def test_locks_shows_who_holds_what(kit: Kit) -> None:
    with Fencepost(kit.url) as fp, fp.lock("rebuild index", ttl="5m") as lease:
        done = kit.fencepost("locks")
    headings, row = done.stdout.splitlines()
    assert headings.split() == ["NAME", "HOLDER", "SINCE", "EXPIRES", "IN", "TOKEN", "ALIVE"]
    pattern = (
        r"rebuild index  \S+ pid \d+  \d{4}-\d\d-\d\d \d\d:\d\d:\d\d  5 min +"
        rf"{lease.token}  yes"
    )
    assert re.fullmatch(pattern, row), row


def test_locks_in_json_has_every_field(kit: Kit) -> None:
    with Fencepost(kit.url) as fp, fp.lock("job") as lease:
        (lock,) = json.loads(kit.fencepost("--json", "locks").stdout)
    assert lock.keys() == {
        *("name", "token", "held", "holder", "since", "expires_in", "alive", "ended"),
    }
    assert (lock["name"], lock["token"], lock["held"], lock["alive"]) == (
        *("job", lease.token, True, True),
    )


def test_locks_shows_what_is_no_longer_held_only_if_asked(kit: Kit) -> None:
    with Fencepost(kit.url) as fp, fp.lock("job"):
        pass
    assert "job" not in kit.fencepost("locks").stdout
    assert re.search(
        r"job .* it was released .* -$", kit.fencepost("locks", "--all").stdout, re.MULTILINE
    )


def test_a_broken_lock_shows_the_old_and_the_new_token(kit: Kit) -> None:
    with Fencepost(kit.url) as fp:
        lease = fp.lock("job").acquire()
        words = ("--token", str(lease.token), "--reason", "stuck")
        done = kit.fencepost("lock", "break", "job", *words)
    old, new = re.findall(r"token (\d+)", done.stdout)
    assert (done.returncode, int(old)) == (0, lease.token)
    assert int(new) > lease.token


def test_breaking_by_an_old_token_is_refused_with_4(kit: Kit) -> None:
    with Fencepost(kit.url) as fp, fp.lock("job") as lease:
        words = ("--token", str(lease.token - 1), "--reason", "stuck")
        done = kit.fencepost("lock", "break", "job", *words)
    assert done.returncode == 4
    (line,) = done.stderr.splitlines()
    assert f"its token is {lease.token}, not {lease.token - 1}" in line


def test_breaking_what_never_was_is_refused_with_4(kit: Kit) -> None:
    done = kit.fencepost("lock", "break", "job", "--token", "1", "--reason", "stuck")
    assert done.returncode == 4
    assert "there is no such lock" in done.stderr


def test_breaking_without_a_reason_is_a_usage_error(kit: Kit) -> None:
    assert kit.fencepost("lock", "break", "job", "--token", "1").returncode == 2
    assert kit.fencepost("lock", "break", "job", "--token", "1", "--reason", " ").returncode == 2


def test_migrate_creates_the_tables_of_the_store_again_and_again(kit: Kit) -> None:
    for _ in range(2):
        done = kit.fencepost("migrate")
        assert (done.returncode, done.stdout) == (0, f"{kit.url} is ready\n")
    assert "fencepost_lease" in tables(kit.folder / "leases.db")


def test_migrate_prints_statements_that_work(kit: Kit) -> None:
    done = kit.fencepost("migrate", "--sql")
    database = sqlite3.connect(":memory:")
    database.executescript(done.stdout)
    database.close()
    assert not (kit.folder / "leases.db").exists()


def test_migrate_prepares_an_applications_database_for_fences(kit: Kit) -> None:
    done = kit.fencepost("migrate", "--guard", f"sqlite:///{kit.folder}/app.db")
    assert done.returncode == 0
    assert tables(kit.folder / "app.db") == ["fencepost_done", "fencepost_guard"]
    assert not (kit.folder / "leases.db").exists()


def test_migrate_prints_the_statement_for_fences(kit: Kit) -> None:
    done = kit.fencepost("migrate", "--guard", "sqlite:///app.db", "--sql")
    assert "CREATE TABLE IF NOT EXISTS fencepost_guard" in done.stdout
    assert not (kit.folder / "app.db").exists()


@pytest.mark.parametrize("verb", ["locks", "migrate"])
def test_an_unreachable_store_exits_with_3(kit: Kit, verb: str) -> None:
    done = kit.fencepost(verb, "--url", f"sqlite:///{kit.folder}/nowhere/leases.db")
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("verb", ["locks", "migrate"])
def test_a_password_is_never_shown(kit: Kit, verb: str) -> None:
    done = kit.fencepost(verb, "--url", "oracle://ann:hunter2@db/leases")
    assert done.returncode == 2
    assert "hunter2" not in done.stdout + done.stderr
    assert "ann:***@db" in done.stderr


def test_an_unknown_verb_is_a_usage_error_that_names_the_known_ones(kit: Kit) -> None:
    done = kit.fencepost("lcoks")
    assert done.returncode == 2
    assert "'locks'" in done.stderr


def test_without_a_verb_it_is_a_usage_error(kit: Kit) -> None:
    assert kit.fencepost().returncode == 2


def test_help_lists_every_verb(kit: Kit) -> None:
    done = kit.fencepost("--help")
    assert done.returncode == 0
    seeing = ("status", "list", "runs", "slots", "logs", "cancel", "resume")
    scheduling = ("up", "tick", "run", "plan", "pause", "retire", "backfill", "instances", "verify")
    for verb in ("exec", *seeing, *scheduling, "locks", "lock", "migrate", "demo", "simulate"):
        assert re.search(rf"^    {verb} ", done.stdout, re.MULTILINE), verb


def test_the_version_is_told(kit: Kit) -> None:
    assert kit.fencepost("--version").stdout == f"fencepost {VERSION}\n"


def test_an_unexpected_error_is_one_line_unless_debugging(
    kit: Kit, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble(*_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("fencepost.cli.locks.opened", stumble)
    assert main(["locks"]) == 1
    assert capsys.readouterr().err == (
        "fencepost: unexpected ZeroDivisionError: oops (--debug shows where)\n"
    )
    with pytest.raises(ZeroDivisionError):
        main(["locks", "--debug"])


def tables(path: Path) -> list[str]:
    database = sqlite3.connect(path)
    try:
        names = "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
        return [name for (name,) in database.execute(names)]
    finally:
        database.close()
