"""``fencepost alarms`` shows alarms to people and programs, and changes one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from fencepost import Fencepost

if TYPE_CHECKING:
    from pathlib import Path

    from fencepost import Alarm

COMMAND = [sys.executable, "-c", "from fencepost.cli.main import main; raise SystemExit(main())"]


class Shell:
    """A place with a ledger in it, perhaps."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ledger.db"
        self.url = f"sqlite:///{self.path}"

    def run(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            [*COMMAND, "alarms", *words],
            env={**os.environ, "FENCEPOST_URL": self.url},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_to_look_where_nothing_is_makes_nothing(shell: Shell) -> None:
    assert "no ledger" in shell.run()
    assert json.loads(shell.run("--json")) == []
    assert not shell.path.exists()


def test_an_alarm_is_set_shown_and_cleared(shell: Shell) -> None:
    said = shell.run("set", "remind", "inv-42", "--in", "10m", "--payload", '{"n": 1}')
    assert said.startswith("alarm 'remind' of 'inv-42' is set: generation ")
    table = shell.run("remind")
    assert "inv-42" in table
    assert "armed" in table
    (shown,) = json.loads(shell.run("--json"))
    assert (shown["kind"], shown["key"], shown["payload"]) == ("remind", "inv-42", {"n": 1})
    assert "is cleared: generation" in shell.run("clear", "remind", "inv-42")
    assert shell.run() == "no alarm is set\n"
    assert "is not set" in shell.run("clear", "remind", "other")


def test_a_compare_and_set_that_is_refused_says_what_is_there(shell: Shell) -> None:
    words = ("set", "remind", "a", "--at", "2030-01-01T00:00:00Z")
    first = json.loads(shell.run(*words, "--json"))["generation"]
    said = shell.run(*words, "--if-generation", "0", code=4)
    assert f"its generation is {first}" in said
    shell.run(*words, "--if-generation", str(first))


def test_the_dead_are_shown_with_their_reason(shell: Shell) -> None:
    with Fencepost(shell.url) as fp:

        @fp.alarm("broken", retry=1)
        def broken(_: Alarm) -> None:
            raise RuntimeError("as always")

        fp.alarms.set("broken", "a", in_=0)
        fp.alarms.set("broken", "b", in_="1h")
        fp.alarms.run_due()
    table = shell.run("--dead")
    assert "RuntimeError: as always" in table
    assert len(table.splitlines()) == 2
    (dead,) = json.loads(shell.run("--dead", "--json"))
    assert (dead["state"], dead["reason"], dead["errors"]) == ("dead", "exhausted", 1)
    assert shell.run("other", "--dead") == "no alarm of kind 'other' is dead\n"


@pytest.mark.parametrize(
    "words",
    [
        ("set", "remind"),
        ("remind", "a"),
        ("set", "remind", "a"),
        ("set", "remind", "a", "--in", "soon"),
        ("set", "remind", "a", "--in", "1s", "--payload", "{"),
    ],
)
def test_what_cannot_be_meant_is_refused(shell: Shell, words: tuple[str, ...]) -> None:
    assert shell.run(*words, code=2).startswith("fencepost: ")
