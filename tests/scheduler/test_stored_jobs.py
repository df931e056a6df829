"""Jobs that live in the ledger: a declared one runs them, and each has a payload of its own."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from schedlab import NOON, Noon, books_of, complaints, until, url_of

from fencepost import AsyncFencepost, BadSchedule, Fencepost, Misuse, Retry
from fencepost.model.run import State

if TYPE_CHECKING:
    from fencepost import AsyncRun, Run

PROGRAM = Path(__file__).with_name("isolated_jobs.py")


def entries(count: int = 3) -> list[dict[str, Any]]:
    return [{"name": f"tenant-{n}", "every": "1m", "payload": {"tenant": n}} for n in range(count)]


def test_a_stored_job_is_run_by_its_template_with_its_own_payload(tmp_path: Path) -> None:
    clocks = Noon()
    ran: list[tuple[str, Any]] = []
    with Fencepost(url_of(tmp_path), clocks=clocks) as fp:

        @fp.job("template")
        def template(run: Run) -> None:
            ran.append((run.job, run.payload))

        assert fp.store(template, entries()) == 3
        assert fp.store("template", entries()) == 0  # the same again changes nothing
        assert fp.tick() == []
        clocks.advance(60)
        assert [outcome.status for outcome in fp.tick()] == ["succeeded"] * 3
        assert ran == [(f"tenant-{n}", {"tenant": n}) for n in range(3)]
        changed = entries()
        changed[1]["payload"] = None
        assert fp.store(template, changed) == 1
        clocks.advance(60)
        fp.tick()
        assert ran[4] == ("tenant-1", None)
        assert [run.key.job for run in fp.runs("tenant-2")] == ["tenant-2"] * 2
        assert complaints(books_of(fp)) == []


def test_a_declared_job_has_no_payload(tmp_path: Path) -> None:
    clocks, seen = Noon(), []
    with Fencepost(url_of(tmp_path), clocks=clocks) as fp:

        @fp.job("job", every="1m")
        def job(run: Run) -> None:
            seen.append(run.payload)

        fp.tick()
        clocks.advance(60)
        fp.tick()
    assert seen == [None]


def test_coroutines_run_stored_jobs_too(tmp_path: Path) -> None:
    async def main() -> list[Any]:
        clocks, ran = Noon(), []
        async with AsyncFencepost(url_of(tmp_path), clocks=clocks) as fp:

            @fp.job("template")
            async def template(run: AsyncRun) -> None:
                ran.append(run.payload)

            assert await fp.store(template, entries()) == 3
            clocks.advance(60)
            await fp.tick()
            return ran

    assert asyncio.run(main()) == [{"tenant": n} for n in range(3)]


def test_an_instance_without_the_template_leaves_stored_jobs_to_others(tmp_path: Path) -> None:
    clocks = Noon()
    with (
        Fencepost(url_of(tmp_path), clocks=clocks) as fp,
        Fencepost(url_of(tmp_path), clocks=clocks) as other,
    ):
        fp.job("template")(lambda run: None)
        other.job("unrelated", every="1h")(lambda: None)
        fp.store("template", entries(1))
        other.tick()
        clocks.advance(60)
        assert other.tick() == []
        assert len(fp.tick()) == 1
        clocks.advance(3600)  # nobody calls it an orphan: it lives in the ledger
        other.tick()
        clocks.advance(3600)
        other.tick()
        (job,) = [job for job in books_of(fp).jobs if job.job == "tenant-0"]
        assert (job.barred, job.stored) == ("", True)


def test_what_cannot_be_stored_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with Fencepost(url_of(tmp_path), clocks=Noon()) as fp:
        fp.job("template")(lambda run: None)
        with pytest.raises(Misuse, match="has no 'name'"):
            fp.store("template", [{"every": "1m"}])
        with pytest.raises(Misuse, match="cannot be stored with"):
            fp.store("template", [{"name": "x", "every": "1m", "retry": 3}])
        with pytest.raises(BadSchedule, match="without a schedule"):
            fp.store("template", [{"name": "x"}])
        with pytest.raises(Misuse):
            fp.store("template", [{"name": "x", "every": "1m", "payload": {1, 2}}])
        assert [job.job for job in books_of(fp).jobs if job.job == "x"] == []


def test_a_stored_job_may_be_paused_retired_and_made_up_for(tmp_path: Path) -> None:
    clocks, ran = Noon(), []
    with Fencepost(url_of(tmp_path), clocks=clocks) as fp:
        fp.job("template")(lambda run: ran.append(run.payload["tenant"]))
        fp.store("template", entries(2))
        fp.pause("tenant-0")
        clocks.advance(60)
        fp.tick()
        assert ran == [1]
        fp.resume("tenant-0")
        fp.retire("tenant-1")
        clocks.advance(60)
        fp.tick()
        assert ran == [1, 0]
        fp.backfill("tenant-0", NOON + 60, NOON + 120)  # what the pause left out
        assert ran == [1, 0, 0]


def test_a_body_in_a_process_of_its_own_has_its_payload_and_is_given_back_at_a_stop(
    tmp_path: Path,
) -> None:
    process = subprocess.Popen([sys.executable, str(PROGRAM), url_of(tmp_path), str(tmp_path)])
    try:
        until(lambda: (tmp_path / "payload").exists() and (tmp_path / "payload").read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
    assert json.loads((tmp_path / "payload").read_text()) == ["stored", {"tenant": 7}]
    with Fencepost(url_of(tmp_path)) as fp:
        run = next(run for run in fp.runs("stored") if run.starts)
    given_back = {(State.PENDING, "released"), (State.RUNNING, "stopping")}  # if it was late
    assert (run.state, run.reason) in given_back
    assert run.losses == 0


def test_a_stored_job_that_is_handed_off_has_the_policy_and_the_payload_it_was_given(
    tmp_path: Path,
) -> None:
    clocks, handed, seen = Noon(), [], []
    words: dict[str, Any] = {"retry": Retry(5, base=1, jitter=False), "every": "1d"}
    with (
        Fencepost(url_of(tmp_path), clocks=clocks) as fp,
        Fencepost(url_of(tmp_path), clocks=clocks) as elsewhere,
    ):

        @fp.job("template", **words)
        def template(run: Run) -> None:
            handed.append((run.id, run.token, run.window))
            run.hand_over()

        def body(run: Run) -> None:
            seen.append((run.payload, run.window))

        fp.store(template, entries(1))
        for face in (fp, elsewhere):
            clocks.advance(60)
            fp.tick()
            run_id, token, _ = handed[-1]
            outcome = face.complete(run_id, token=token, status="failed", error="no")
            assert (outcome.status, outcome.reason) == ("failed", "waiting_retry")
            clocks.advance(5)
            fp.tick()
            run_id, token, window = handed[-1]
            ended = face.take_over(run_id, body, token=token)
            assert ended.status == "succeeded"
            assert seen.pop() == ({"tenant": 0}, window)
            assert window is not None
            assert (window[1] - window[0]).total_seconds() <= 60  # by its own schedule


def test_slots_of_a_stored_job_begin_when_it_is_stored(tmp_path: Path) -> None:
    clocks = Noon()
    with Fencepost(url_of(tmp_path), clocks=clocks) as fp:
        fp.job("template")(lambda run: None)
        fp.store("template", entries(1))
        (job,) = [job for job in books_of(fp).jobs if job.job == "tenant-0"]
        assert (job.watermark, job.next_due) == (NOON, NOON + 60)


def test_a_stored_job_shares_the_lock_that_its_template_names(tmp_path: Path) -> None:
    clocks, held = Noon(), []
    with Fencepost(url_of(tmp_path), clocks=clocks) as fp:

        def body() -> None:
            held.append([lock.name for lock in fp.locks() if lock.held])

        fp.job("shares", lock="database")(body)
        fp.job("alone")(body)
        fp.store("shares", [{"name": "first", "every": "1m"}])
        fp.store("alone", [{"name": "second", "every": "1m"}])
        fp.tick()
        clocks.advance(60)
        fp.tick()
    assert sorted(held) == [["database"], ["second"]]


def test_a_stored_job_runs_also_where_its_template_is_pinned(tmp_path: Path) -> None:
    clocks = Noon()
    with Fencepost(url_of(tmp_path), clocks=clocks) as fp:
        fp.job("template", pin="epoch")(lambda: None)
        fp.store("template", entries(1))
        fp.tick()
        clocks.advance(60)
        assert [outcome.status for outcome in fp.tick()] == ["succeeded"]
