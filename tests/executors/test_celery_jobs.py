"""A Celery task as a job's body, over a real broker: messages get lost, come twice, come late."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from broker_kit import broker
from executor_kit import RUN, SLOT, environment, record, wait_for

from fencepost import AsyncFencepost, Fencepost, Misuse
from fencepost.executors.celery import celery_body, fencepost_task
from fencepost.model.run import State

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType

HERE = os.path.dirname(os.path.abspath(__file__))


@pytest.fixture(scope="module")
def broker_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with broker(tmp_path_factory.mktemp("broker")) as url:
        yield url


class Bench:
    """A dispatcher, an empty broker, and workers that can be killed."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.words = {"CELERY_FOLDER": str(folder), "CELERY_BROKER": url}
        os.environ.update(self.words)
        sys.modules.pop("celery_program", None)
        self.program: ModuleType = importlib.import_module("celery_program")
        self.forget()
        self.fp = Fencepost(f"sqlite:///{folder}/fp.db")
        self.program.declare(self.fp)
        self.workers: list[subprocess.Popen[bytes]] = []

    def worker(self, *, late: bool = False) -> subprocess.Popen[bytes]:
        words = {**self.words, "CELERY_LATE": "1" if late else ""}
        flags = ["--without-gossip", "--without-mingle", "--without-heartbeat", "-l", "ERROR"]
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "celery", "-A", "celery_program", "worker"),
                *("-P", "solo", *flags),
            ],
            env=environment(**words),
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.workers.append(process)
        return process

    def send_again(self, token: int) -> Any:
        """Have the broker deliver the message of an attempt once more."""
        told = {"run_id": RUN, "token": token}
        return self.program.app.send_task("tests.work", kwargs={"fencepost": told})

    def began(self) -> list[int]:
        """Return the tokens under which the body has begun, in order."""
        path = self.folder / "began"
        return (
            [int(line.split()[0]) for line in path.read_text().splitlines()]
            if path.exists()
            else []
        )

    def forget(self) -> None:
        """Have the broker forget all, also what a killed worker of another test had taken."""
        with self.program.app.connection_for_write() as connection:
            connection.default_channel.client.flushdb()

    def drained(self, *, but: int = 0) -> bool:
        """Say whether no message waits, and none is under way, ``but`` for some."""
        with self.program.app.connection_for_read() as connection:
            client = connection.default_channel.client
            return not client.llen("celery") and client.hlen("unacked") <= but

    def state(self) -> State:
        return record(self.fp).state

    def close(self) -> None:
        for process in self.workers:
            process.kill()
            process.wait()
        self.program.app.close()
        self.program.fp.close()
        self.fp.close()
        for name in self.words:
            del os.environ[name]


@pytest.fixture
def bench(tmp_path: Path, broker_url: str) -> Iterator[Bench]:
    made = Bench(tmp_path, broker_url)
    yield made
    made.close()


def test_a_worker_carries_out_what_was_handed_to_the_queue(bench: Bench) -> None:
    bench.worker()
    outcome = bench.fp.trigger("job", SLOT)
    assert outcome.status in ("handed_off", "succeeded")
    wait_for(lambda: bench.state() is State.SUCCEEDED)
    run = record(bench.fp)
    assert (run.result, run.done, bench.began()) == ('"attempt 1"', 3, [outcome.token])
    assert bench.fp.trigger("job", SLOT).status == "already_done"


def test_a_message_that_is_delivered_twice_runs_once(bench: Bench) -> None:
    (bench.folder / "wait").touch()
    token = bench.fp.trigger("job", SLOT).token
    bench.worker(late=True)  # which takes no other message while it runs
    wait_for(bench.began)
    bench.send_again(token)
    bench.worker(late=True)
    wait_for(lambda: bench.drained(but=1))
    (bench.folder / "wait").unlink()
    wait_for(lambda: bench.state() is State.SUCCEEDED)
    assert (bench.began(), record(bench.fp).starts) == ([token], 1)


def test_a_message_that_comes_after_the_end_runs_nothing(bench: Bench) -> None:
    token = bench.fp.trigger("job", SLOT).token
    bench.fp.complete(RUN, token=token, result="done elsewhere")
    bench.send_again(token)
    bench.worker()
    wait_for(bench.drained)
    time.sleep(0.3)  # for the last one, which a solo worker acknowledges before it runs
    assert (bench.began(), record(bench.fp).result) == ([], '"done elsewhere"')


def test_a_message_of_an_older_attempt_runs_nothing(bench: Bench) -> None:
    first = bench.fp.trigger("job", SLOT).token
    bench.fp.complete(RUN, token=first, status="failed", error="lost on the way")
    bench.program.app.control.purge()
    second = bench.fp.trigger("job", SLOT, wait="10s").token
    bench.send_again(first)
    bench.worker()
    wait_for(lambda: bench.state() is State.SUCCEEDED)
    wait_for(bench.drained)
    assert (bench.began(), second > first) == ([second], True)


@pytest.mark.parametrize("late", [False, True])
def test_a_worker_that_is_killed_loses_its_lease_and_the_next_claim_sends_anew(
    bench: Bench,
    late: bool,  # noqa: FBT001 -- as the parameters have it
) -> None:
    (bench.folder / "wait").touch()
    doomed = bench.worker(late=late)
    first = bench.fp.trigger("job", SLOT).token
    wait_for(bench.began)
    doomed.kill()
    doomed.wait()
    (bench.folder / "wait").unlink()
    bench.worker(late=late)  # which is given the old message again, where it was not acknowledged
    second = wait_for(lambda: _claimed_again(bench, first))
    wait_for(lambda: bench.state() is State.SUCCEEDED)
    assert bench.began() == [first, second]
    assert (record(bench.fp).starts, record(bench.fp).losses) == (2, 1)


def _claimed_again(bench: Bench, first: int) -> int:
    token = bench.fp.trigger("job", SLOT).token
    return token if token > first else 0


def test_an_error_in_the_task_is_tried_again_by_the_jobs_policy(bench: Bench) -> None:
    (bench.folder / "fail").touch()
    bench.worker()
    bench.fp.trigger("job", SLOT)
    wait_for(lambda: bench.state() is State.WAITING_RETRY)
    assert record(bench.fp).error == "ValueError: no rows today"
    bench.fp.trigger("job", SLOT, wait="10s")
    wait_for(lambda: bench.state() is State.SUCCEEDED)
    assert record(bench.fp).result == '"attempt 2"'


def test_a_cancel_reaches_the_worker(bench: Bench) -> None:
    (bench.folder / "wait").touch()
    bench.worker()
    bench.fp.trigger("job", SLOT)
    wait_for(bench.began)
    bench.fp.cancel(RUN)
    wait_for(lambda: bench.state() is State.CANCELLED)


def test_a_dispatcher_that_dies_after_sending_takes_nothing_from_the_worker(bench: Bench) -> None:
    (bench.folder / "wait").touch()
    program = os.path.join(HERE, "celery_program.py")
    dispatcher = subprocess.Popen([sys.executable, program], env=environment(**bench.words))
    wait_for((bench.folder / "sent").exists)
    bench.worker()
    (first,) = wait_for(bench.began)
    wait_for(lambda: record(bench.fp).handed_off)
    dispatcher.send_signal(signal.SIGKILL)
    dispatcher.wait()
    assert bench.fp.trigger("job", SLOT).reason == "lock_held"
    (bench.folder / "wait").unlink()
    wait_for(lambda: bench.state() is State.SUCCEEDED)
    assert (bench.began(), record(bench.fp).losses) == ([first], 0)


def test_a_broker_that_is_away_is_an_error_worth_a_retry(bench: Bench, tmp_path: Path) -> None:
    with broker(tmp_path) as gone:
        pass
    app = bench.program.Celery("away", broker=gone)
    with Fencepost(f"sqlite:///{tmp_path}/other.db") as fp:
        fp.job("job")(celery_body(app, "tests.work"))
        outcome = fp.trigger("job", SLOT)
        assert (outcome.status, outcome.reason) == ("failed", "error")
        assert record(fp).handed_off is False
    app.close()


def test_what_cannot_be_a_celery_job_is_refused(bench: Bench) -> None:
    with pytest.raises(Misuse, match="task_name"):
        celery_body(bench.program.app, "")
    with pytest.raises(Misuse, match="no AsyncFencepost"):
        fencepost_task(bench.program.app, AsyncFencepost("memory://x"), name="x")  # type: ignore[arg-type]
