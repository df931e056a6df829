"""A body in a process of its own has the same run, and ends in the same ways."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sqlite3
import subprocess
import sys
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import isolation_bodies as bodies
import pytest
from isolation_bodies import wait_for

from fencepost import AsyncFencepost, Fencepost, Retry
from fencepost.errors import GiveUp, Misuse
from fencepost.fence import CREATE_GUARD
from fencepost.model.run import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fencepost.model.event import JobEvent, LeaseEvent
    from fencepost.model.outcome import Outcome

SLOT = datetime(2026, 1, 20, 2, tzinfo=UTC)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ISOLATION_FOLDER", str(tmp_path))
    return f"sqlite:///{tmp_path}/fp.db"


@pytest.fixture
def fp(url: str) -> Iterator[Fencepost]:
    with Fencepost(url) as fencepost:
        yield fencepost


def triggered(face: str, url: str, body: Callable[..., Any], **words: Any) -> Outcome:
    """Declare the body as a job of either face, and see its slot through."""
    if face == "blocking":
        with Fencepost(url) as fp:
            fp.job("job", isolation="process", **words)(body)
            return fp.trigger("job", SLOT)

    async def work() -> Outcome:
        async with AsyncFencepost(url) as fp:
            fp.job("job", isolation="process", **words)(body)
            return await fp.trigger("job", SLOT)

    return asyncio.run(work())


both_faces = pytest.mark.parametrize("face", ["blocking", "asyncio"])


@both_faces
@pytest.mark.parametrize("body", [bodies.pid, bodies.pid_async])
def test_a_body_runs_in_another_process_than_its_trigger(
    url: str, face: str, body: Callable[..., Any]
) -> None:
    outcome = triggered(face, url, body)
    assert outcome.status == "succeeded", outcome
    assert outcome.result != os.getpid()
    assert not bodies.lives(outcome.result)


@both_faces
def test_the_run_of_an_isolated_body_can_do_all_that_runs_can(
    url: str, face: str, tmp_path: Path
) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "other.db")) as conn:
        conn.execute(CREATE_GUARD)
    outcome = triggered(face, url, bodies.all_of_it, cron="0 2 * * *")
    assert outcome.status == "succeeded", outcome
    token = outcome.token
    assert outcome.result == {
        "before": None,
        "after": {"page": 2},
        "sent": [True, False],
        "batch": ["a", "b"],
        "headers": {
            "Fencing-Token": str(token),
            "Fencing-Resource": "default/job",
            "Idempotency-Key": "job@2026-01-20T02:00:00Z/mail",
        },
        "slot": SLOT.isoformat(),
        "window": "2026-01-19T02:00:00+00:00",
        "lost": False,
        "token": token,
    }
    with Fencepost(url) as fp:
        run = fp.runs("job")[0]
        assert (run.state, run.done, run.total) == (State.SUCCEEDED, 2, 5)
        assert run.checkpoint == '{"page":2}'
        assert asyncio.run(counts(url, "job")) == {"emails  sent": 3}
    with contextlib.closing(sqlite3.connect(tmp_path / "other.db")) as conn:
        assert conn.execute("SELECT max(token) FROM fencepost_guard").fetchone() == (token,)


async def counts(url: str, job: str) -> dict[str, int]:
    async with AsyncFencepost(url) as fp:
        run = (await fp.runs(job))[0]
        return await fp._working.ledger.counts(run.key)


@both_faces
def test_the_run_of_an_isolated_coroutine_is_awaited(url: str, face: str) -> None:
    outcome = triggered(face, url, bodies.all_of_it_async)
    assert outcome.result == {"sent": True, "after": {"page": 2}}, outcome
    assert asyncio.run(counts(url, "job")) == {"emails  sent": 3}


def test_progress_is_seen_while_the_body_runs(fp: Fencepost) -> None:
    fp.job("slow", isolation="process")(bodies.slow)
    thread = threading.Thread(target=fp.trigger, args=("slow", SLOT))
    thread.start()
    try:
        wait_for(lambda: fp.runs("slow") and fp.runs("slow")[0].done == 3, "progress")
        assert fp.runs("slow")[0].total == 9
    finally:
        bodies.note("go", "on")
        thread.join()
    assert fp.runs("slow")[0].state is State.SUCCEEDED


@both_faces
def test_a_long_body_keeps_its_lease_beyond_the_ttl(url: str, face: str) -> None:
    outcome = triggered(face, url, bodies.outlasts_its_lease, lease="5s")
    assert outcome.result == "still mine", outcome


def test_nothing_is_left_open_by_a_body_that_has_ended(fp: Fencepost) -> None:
    fp.job("job", isolation="process", loss_pause="10ms")(bodies.is_killed)
    fp.job("other", isolation="process")(bodies.pid)
    assert fp.trigger("other", SLOT)
    before = pipes_and_letters()
    assert fp.trigger("job", SLOT)
    assert pipes_and_letters() == before


def pipes_and_letters() -> list[str]:
    """Return what this process has open besides files: the keeper opens those when it likes."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(name for name in found if name.startswith(("pipe:", "/memfd:")))


def test_what_a_body_prints_is_printed(fp: Fencepost, capfd: pytest.CaptureFixture[str]) -> None:
    fp.job("speaks", isolation="process")(bodies.speaks)
    assert fp.trigger("speaks", SLOT)
    printed = capfd.readouterr()
    assert "from the body" in printed.out
    assert "and its errors" in printed.err


@both_faces
@pytest.mark.parametrize(
    ("body", "on"),
    [
        (bodies.fails_once, ConnectionError),
        (bodies.fails_stubbornly, bodies.Stubborn),
        (bodies.fails_with_a_local_error, OSError),
        (bodies.waits_for_more, ()),
    ],
    ids=lambda value: getattr(value, "__name__", "nothing"),
)
def test_an_error_worth_another_try_gets_one(
    url: str, face: str, body: Callable[..., Any], on: type[BaseException]
) -> None:
    retry = Retry(3, base="10ms", on=on)
    outcome = triggered(face, url, body, retry=retry)
    assert (outcome.status, outcome.result, outcome.attempt) == ("succeeded", "well", 2), outcome


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (bodies.fails_once, "ConnectionError: the wire was cut"),
        (bodies.fails_stubbornly, "Stubborn: the word is no"),
        (bodies.fails_with_a_local_error, "Homemade: made here"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_error_that_is_never_worth_it_is_recorded_in_its_own_words(
    url: str, body: Callable[..., Any], error: str
) -> None:
    outcome = triggered("blocking", url, body, retry=Retry(3, base="10ms", never=OSError, on=()))
    assert (outcome.status, outcome.reason, outcome.error) == ("failed", "error", error)


def test_whoever_gives_up_is_not_tried_again(url: str) -> None:
    outcome = triggered("blocking", url, bodies.gives_up, retry=3)
    assert (outcome.status, outcome.reason) == ("failed", "gave_up")
    assert outcome.error == "GiveUp: there is no such customer"
    assert bodies.tries() == 2


def test_skipping_and_exiting_mean_what_they_mean_elsewhere(url: str) -> None:
    skipped = triggered("blocking", url, bodies.skips)
    assert (skipped.status, skipped.reason) == ("skipped", "no mail today")
    with Fencepost(url) as fp:
        fp.job("exits", isolation="process")(bodies.exits)
        exited = fp.trigger("exits", SLOT)
    assert (exited.status, exited.error) == ("failed", "SystemExit: 3")


def test_a_result_that_cannot_be_kept_is_a_failure_for_good(url: str) -> None:
    outcome = triggered("blocking", url, bodies.returns_a_set, retry=3)
    assert outcome.reason == "gave_up", outcome
    assert outcome.error is not None
    assert "cannot be kept as JSON" in outcome.error


def test_items_in_doubt_come_back_to_the_parent(url: str) -> None:
    events: list[LeaseEvent | JobEvent] = []
    with Fencepost(url, on_event=events.append) as fp:
        fp.job("job", isolation="process")(bodies.begins_and_dies)
        assert fp.trigger("job", SLOT).status == "succeeded"
    doubts = [event for event in events if event.what == "in_doubt"]
    assert len(doubts) == 1
    assert "mail" in str(doubts[0])


# What cannot be isolated is refused before anything is done.


def nested() -> Callable[..., Any]:
    def body() -> None: ...

    return body


def test_a_store_in_memory_cannot_be_shared_with_a_process() -> None:
    with Fencepost("memory://") as fp, pytest.raises(Misuse, match="store is in the memory"):
        fp.job("job", isolation="process")(bodies.pid)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (lambda: None, "a lambda has no name"),
        (nested(), "'nested.body' is defined inside of a function"),
        (functools.partial(bodies.pid), "has no name by which it could be imported"),
    ],
    ids=["lambda", "nested", "nameless"],
)
def test_what_cannot_be_imported_is_refused_when_it_is_declared(
    fp: Fencepost, body: Callable[..., Any], why: str
) -> None:
    with pytest.raises(Misuse, match=why):
        fp.job("job", isolation="process")(body)
    assert list(fp._working.registry) == []


def test_a_lease_that_is_too_short_to_stop_a_process_in_time_is_refused(fp: Fencepost) -> None:
    with pytest.raises(Misuse, match=r"5\.0 s is the least"):
        fp.job("job", isolation="process", lease="2s")(bodies.pid)


def test_a_function_that_its_name_does_not_lead_to_is_refused_when_it_is_triggered(
    fp: Fencepost, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp.job("job", isolation="process")(bodies.hidden)
    monkeypatch.setattr(bodies, "hidden", lambda: None)
    with pytest.raises(Misuse, match="a decorator may have hidden it"):
        fp.trigger("job", SLOT)
    assert fp.runs() == []


SCRIPT = """
import os, sys
from fencepost import Fencepost

class Homemade(ValueError):
    pass

fp = Fencepost(sys.argv[1])

@fp.job("good", isolation="process")
def good():
    return [__name__, sys.argv[2]]

@fp.job("bad", isolation="process", retry=2)
def bad(run):
    raise Homemade("in a script")
"""
GUARDED = """
if __name__ == "__main__":
    print(fp.trigger("good", manual=True).result)
    print(fp.trigger("bad", manual=True).error)
"""
UNGUARDED = """
print(fp.trigger("good", manual=True).error)
"""


def script(url: str, text: str, *, typed: bool, folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(text)
    program = ["-c", text] if typed else [str(path)]
    return subprocess.run(
        [sys.executable, *program, url, "a word"],
        capture_output=True,
        check=False,
        text=True,
        timeout=bodies.PATIENCE,
    )


def test_a_script_is_imported_under_another_name(url: str, tmp_path: Path) -> None:
    text = SCRIPT.replace("retry=2", "retry=1") + GUARDED
    ran = script(url, text, typed=False, folder=tmp_path)
    assert ran.stdout.splitlines() == ["['__mp_main__', 'a word']", "Homemade: in a script"], ran


def test_a_script_that_triggers_when_it_is_imported_is_told_so(url: str, tmp_path: Path) -> None:
    ran = script(url, SCRIPT + UNGUARDED, typed=False, folder=tmp_path)
    assert 'put what the script does under `if __name__ == "__main__":`' in ran.stdout, ran


def test_what_was_typed_into_an_interpreter_is_refused(url: str, tmp_path: Path) -> None:
    ran = script(url, SCRIPT + GUARDED, typed=True, folder=tmp_path)
    assert "what was typed into an interpreter is in no file" in ran.stderr, ran


def test_the_errors_of_fencepost_itself_survive_the_way_back() -> None:
    from fencepost.carried import packed, unpacked
    from fencepost.errors import LeaseLost, RunTimedOut

    for error in (
        LeaseLost("job", token=7, reason="it ran out"),
        RunTimedOut("job@x", timeout=3.0),
        GiveUp("no"),
        FileNotFoundError(2, "No such file or directory", "x"),
    ):
        back = unpacked(packed(error))
        assert type(back) is type(error)
        assert (str(back), vars(back)) == (str(error), vars(error))


def test_what_is_repeated_apart_goes_on_with_the_items_of_what_failed(
    fp: Fencepost, tmp_path: Path
) -> None:
    (tmp_path / "mails").touch()
    fp.job("job", every="1h", isolation="process")(bodies.half_a_mail)
    run = "job@2026-01-20T02:00:00Z"
    for existing in ("skip", "failed", "all"):
        fp.backfill("job", SLOT, SLOT.timestamp() + 3600, existing=existing)
    assert (tmp_path / "mails").read_text().splitlines() == [
        f"{run} True {run}",
        f"{run}~1 False {run}",
        f"{run}~2 True {run}~2",
    ]
