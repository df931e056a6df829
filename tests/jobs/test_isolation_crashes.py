"""A body that dies takes nobody with it, and is the only one that is blamed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import isolation_bodies as bodies
import pytest
from isolation_bodies import found, lives

from fencepost import AsyncFencepost, Fencepost
from fencepost.caller import Asked
from fencepost.model.meant import Meant
from fencepost.model.run import State
from fencepost.model.slot import RunKey
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SLOT = datetime(2026, 1, 20, 2, tzinfo=UTC)
HERE = os.path.dirname(os.path.abspath(__file__))
KEY = RunKey("nested", int(SLOT.timestamp()))


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ISOLATION_FOLDER", str(tmp_path))
    return f"sqlite:///{tmp_path}/fp.db"


def test_a_job_that_always_dies_is_stopped_and_its_neighbours_go_on(url: str) -> None:
    with Fencepost(url) as fp, ThreadPoolExecutor(3) as threads:
        fp.job("poison", max_losses=3, loss_pause="10ms", isolation="process")(bodies.dies)
        fp.job("apart", isolation="process")(bodies.pid)

        @fp.job("here")
        def here() -> int:
            return os.getpid()

        poisoned = threads.submit(fp.trigger, "poison", SLOT)
        slots = [SLOT + timedelta(hours=hour) for hour in range(4)]
        apart = threads.submit(lambda: [fp.trigger("apart", slot).status for slot in slots])
        beside = threads.submit(lambda: [fp.trigger("here", slot).status for slot in slots])
        assert apart.result() == beside.result() == ["succeeded"] * 4
        outcome = poisoned.result()
        assert (outcome.status, outcome.reason) == ("failed", "poison")
        run = fp.runs("poison")[0]
        assert (run.strikes, run.losses, run.starts) == (3, 5, 5), "the first two had company"
        assert fp.trigger("poison", SLOT + timedelta(hours=1)).reason == "quarantined"
        jobs = finish(fp._working.ledger.jobs())
        assert [job.job for job in jobs if job.quarantined] == ["poison"]
        notes = [event.detail for event in finish(fp._working.ledger.events(run.key))]
        assert "its process ended with exit code 1 and told no result" in notes


@pytest.mark.parametrize("body", [bodies.is_killed, bodies.reads_nowhere, bodies.exits_well])
@pytest.mark.parametrize("face", ["blocking", "asyncio"])
def test_a_run_that_crashed_is_tried_again_and_can_still_succeed(
    url: str, face: str, body: Callable[..., Any]
) -> None:
    async def work() -> Any:
        async with AsyncFencepost(url) as fp:
            fp.job("job", loss_pause="10ms", isolation="process")(body)
            return await fp.trigger("job", SLOT)

    with Fencepost(url) as fp:
        if face == "blocking":
            fp.job("job", loss_pause="10ms", isolation="process")(body)
            outcome = fp.trigger("job", SLOT)
        else:
            outcome = asyncio.run(work())
        assert (outcome.status, outcome.result, outcome.attempt) == ("succeeded", "well", 1)
        run = fp.runs("job")[0]
        assert (run.starts, run.losses) == (3, 2)


def test_at_most_once_means_that_a_crash_is_the_end(url: str) -> None:
    with Fencepost(url) as fp:
        fp.job("job", isolation="process", on_loss="fail")(bodies.dies)
        outcome = fp.trigger("job", SLOT)
        assert (outcome.status, outcome.reason) == ("failed", "lost")
    assert bodies.tries() == 2


def test_after_two_losses_a_body_of_any_kind_gets_a_process_of_its_own(
    url: str, tmp_path: Path
) -> None:
    def instance() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, f"{HERE}/isolation_program.py", url, "blocking", "dies", "none"],
            capture_output=True,
            check=False,
            text=True,
            timeout=bodies.PATIENCE,
        )

    first, second, third = instance(), instance(), instance()
    assert (first.returncode, first.stdout) == (1, "")
    assert (second.returncode, second.stdout) == (1, "")
    assert (third.returncode, third.stdout) == (0, "failed poison None\n"), third
    assert bodies.tries() == 4


def test_a_suspect_that_cannot_be_imported_runs_alone_where_it_is(url: str) -> None:
    pids: list[int] = []
    with Fencepost(url) as fp:

        @fp.job("nested", loss_pause="10ms")
        def nested() -> None:
            pids.append(os.getpid())

        ledger = fp._working.ledger
        for _ in range(2):  # two instances that vanished
            errand = fp._working._errand(Asked(fp._working.registry.find("nested")), "t", None)
            claimed = finish(ledger.claim(errand.want(Meant(KEY))))
            assert claimed.run is not None
            finish(fp._holding.store.release("nested", nonce=claimed.run.holder.nonce))
        assert fp.trigger("nested", SLOT, wait="10s").status == "succeeded"
        (run,) = fp.runs("nested")
        assert (run.solitary, run.losses, run.state) == (True, 2, State.SUCCEEDED)
    assert pids == [os.getpid()]


@pytest.mark.parametrize("victim", ["guardian", "sentinel", "body"])
def test_whichever_of_its_processes_is_killed_nothing_of_an_attempt_is_left(
    url: str, victim: str, tmp_path: Path
) -> None:
    with Fencepost(url) as fp, ThreadPoolExecutor(1) as threads:
        fp.job("job", isolation="process", on_loss="fail", cancel_grace="1s")(bodies.stubborn)
        under_way = threads.submit(fp.trigger, "job", SLOT)
        pid, child = int(found("pid")), int(found("child"))
        (guardian,) = parents(pid)
        (sentinel,) = parents(guardian)
        os.kill({"guardian": guardian, "sentinel": sentinel, "body": pid}[victim], signal.SIGKILL)
        if victim == "sentinel":  # that alone harms nobody
            fp.cancel("job@2026-01-20T02:00:00Z")
        status = under_way.result(bodies.PATIENCE).status
        assert status == ("cancelled" if victim == "sentinel" else "failed")
        assert not any(map(lives, (pid, child)))


def parents(pid: int) -> list[int]:
    with open(f"/proc/{pid}/stat") as file:
        return [int(file.read().rpartition(")")[2].split()[1])]
