"""What ``logs`` tells of one run, and what ``cancel`` does to it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from exec_kit import PATIENCE
from seeing_kit import SLOT, Desk, broken, fine, nothing

from fencepost.errors import InDoubt
from fencepost.model.run import State

if TYPE_CHECKING:
    from pathlib import Path

    from fencepost import Run


@pytest.fixture
def desk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Desk:
    return Desk(tmp_path, capsys)


def test_logs_tells_all_that_is_on_record(desk: Desk) -> None:
    desk.ran(fine, SLOT)
    answer = desk.ask("logs", f"job@{SLOT}")
    facts = dict(
        line.split(maxsplit=1) for line in answer.lines if line[:1].isalpha() and " " in line
    )
    assert answer.code == 0
    assert facts["state"] == "succeeded"
    assert facts["counts"] == "emails_sent=3"
    assert facts["items"] == "1 done"
    assert facts["result"] == '"all sent"'
    document = desk.ask("logs", f"job@{SLOT}", "--json").json
    assert document["counts"] == {"emails_sent": 3}
    assert document["items"] == {"begun": 0, "done": 1, "failed": 0}
    assert (document["in_doubt"], document["events"]) == ([], [])
    (attempt,) = document["attempts"]
    assert (attempt["ended"], attempt["token"]) == ("succeeded", document["token"])


@pytest.mark.parametrize("scope", ["slot", "job"])
def test_logs_names_the_items_in_doubt(desk: Desk, scope: str) -> None:
    def body(run: Run) -> None:
        with run.once("inv-7", scope=scope):
            raise InDoubt("the line was cut")

    desk.ran(body, SLOT)
    answer = desk.ask("logs", f"job@{SLOT}")
    assert "  inv-7: begun, and nobody knows if done" in answer.lines
    document = desk.ask("logs", f"job@{SLOT}", "--json").json
    assert document["in_doubt"] == ["inv-7"]
    assert document["items"]["begun"] == 1


def test_an_error_cannot_talk_to_the_terminal(desk: Desk) -> None:
    desk.ran(broken, SLOT)
    for words in (("runs",), ("slots", "job"), ("status",), ("logs", f"job@{SLOT}")):
        answer = desk.ask(*words)
        assert "\x1b" not in answer.out
        assert r"ValueError: no \x1b[31minput" in answer.out


# cancel


def test_what_is_over_cannot_be_cancelled(desk: Desk) -> None:
    desk.ran(nothing, SLOT)
    answer = desk.ask("cancel", f"job@{SLOT}")
    assert (answer.code, answer.out) == (4, "")
    assert f"run 'job@{SLOT}' was not cancelled: it is succeeded" in answer.err


@pytest.mark.parametrize("how", ["asked", "forced"])
def test_a_run_that_runs_is_asked_to_end_or_taken_away(desk: Desk, how: str) -> None:
    force = how == "forced"
    at_work, go_on = threading.Event(), threading.Event()

    def body(_: Run) -> None:
        at_work.set()
        assert go_on.wait(PATIENCE)

    thread = threading.Thread(target=desk.ran, args=(body, SLOT))
    thread.start()
    words = ("cancel", f"job@{SLOT}", "--reason", "not today", *(["--force"] if force else []))
    try:
        assert at_work.wait(PATIENCE)
        answer, again = desk.ask(*words), desk.ask(*words, "--json")
    finally:
        go_on.set()
        thread.join()
    assert answer.code == again.code == 0
    assert (again.json["state"] == State.CANCELLED) is force
    assert again.json["cancel_requested_at"] is not None
    assert ("is cancelled" if force else "is asked to end") in answer.out
    events = desk.ask("logs", f"job@{SLOT}", "--json").json["events"]
    assert events[0]["what"] == ("cancel_forced" if force else "cancel_requested")
    assert events[0]["detail"].endswith(": not today")
