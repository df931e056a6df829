"""After a signal an instance ends within its grace, whatever a body or the ledger does."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from schedlab import unproven, until, url_of
from stoplab import (
    AT_ONCE,
    FACES,
    GRACE,
    MORE,
    locked,
    only_run,
    owed,
    resumed,
    stopped,
)

from fencepost import Fencepost
from fencepost.model.run import State
from servers import MariaDB, Postgres, shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SERVERS: dict[str, type[Postgres | MariaDB]] = {"postgres": Postgres, "mariadb": MariaDB}


@pytest.fixture(params=["sqlite", *SERVERS])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder that says where a ledger is that answers."""
    if request.param in SERVERS:
        name = f"stops_{time.time_ns()}"
        (tmp_path / "url").write_text(shared(SERVERS[request.param]).database(name))
    return tmp_path


@pytest.mark.parametrize("face", FACES)
def test_a_body_that_hears_nothing_ends_with_its_process_and_is_no_loss(
    ledger: Path, face: str
) -> None:
    owed(ledger)
    with stopped(ledger, face) as one:
        one.begin()
        one.ask()
        assert one.took() < GRACE + MORE
        assert one.marks("lives")[-1] - one.asked_at > GRACE - 0.1  # it had its grace
        assert "resumed by the next instance, and no loss is counted" in one.told("cut")
    run = only_run(ledger)
    assert (run.state, run.reason) == (State.RUNNING, "stopping")
    run = resumed(ledger)
    assert (run.state, run.starts, run.losses, run.releases) == (State.SUCCEEDED, 2, 0, 1)
    assert (run.streak, run.strikes, run.attempt) == (0, 0, 1)


@pytest.mark.parametrize("face", ["blocking", "aio"])
def test_a_second_signal_ends_a_process_at_once(ledger: Path, face: str) -> None:
    owed(ledger)
    with stopped(ledger, face, grace=600) as one:
        one.begin()
        one.ask()
        seen = len(one.marks("lives"))
        until(lambda: len(one.marks("lives")) > seen + 5)  # it goes on, for now
        one.ask(signal.SIGINT)
        assert one.took() < AT_ONCE
    run = resumed(ledger)
    assert (run.state, run.losses, run.releases) == (State.SUCCEEDED, 0, 1)


def test_no_number_of_deploys_makes_poison_of_a_body_that_hears_nothing(ledger: Path) -> None:
    owed(ledger, max_losses=2)
    deploys = 5
    for number in range(deploys):
        # Where a server does not notice that a process is gone, its lease has to run out.
        with stopped(ledger, FACES[number % 2], grace=0, policies={"lease": "2s"}) as one:
            one.begin()
            one.ask()
            assert one.took() < AT_ONCE
    run = resumed(ledger, max_losses=2)
    assert (run.state, run.losses, run.releases) == (State.SUCCEEDED, 0, deploys)
    assert unproven(ledger) == []


@pytest.mark.parametrize("face", ["blocking", "aio"])
def test_a_body_that_ends_within_the_grace_is_recorded_as_ever(ledger: Path, face: str) -> None:
    owed(ledger)
    with stopped(ledger, face, body="waits", grace=30) as one:
        one.begin()
        one.ask()
        until(lambda: only_run(ledger).reason == "stopping")
        (ledger / "go").touch()
        assert one.took() < 20  # and not the whole grace
        assert one.marks("returned")  # and the program went on after its instance
    run = only_run(ledger)
    assert (run.state, run.reason, run.result) == (State.SUCCEEDED, "", '"done"')
    assert (run.starts, run.losses, run.releases) == (1, 0, 0)


def test_nobody_else_begins_before_the_process_is_gone(ledger: Path) -> None:
    owed(ledger)
    with stopped(ledger, "blocking", grace=GRACE) as one:
        one.begin()
        one.ask()
        until(lambda: only_run(ledger).reason == "stopping")
        with Fencepost(url_of(ledger)) as fp:
            began: list[float] = []

            @fp.job("steps", every="1h")
            def steps() -> None:
                began.append(time.clock_gettime(time.CLOCK_BOOTTIME))

            while one.process.poll() is None:
                fp.tick()
                time.sleep(0.05)
            until(lambda: fp.tick() or began)
        assert began[0] > one.marks("lives")[-1]


def test_a_job_that_must_not_be_tried_twice_is_failed_if_it_was_cut(ledger: Path) -> None:
    owed(ledger, on_loss="fail")
    with stopped(ledger, "blocking", grace=0, policies={"on_loss": "fail"}) as one:
        one.begin()
        one.ask()
        assert one.took() < AT_ONCE
        assert "records the run as failed (lost), because" in one.told("cut")
    run = resumed(ledger, on_loss="fail")
    assert (run.state, run.reason, run.starts) == (State.FAILED, "lost", 1)
    assert unproven(ledger) == []


# A ledger that is away.


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[Postgres]:
    with Postgres.own() as server:
        yield server


@pytest.fixture(scope="module")
def own_mariadb() -> Iterator[MariaDB]:
    with MariaDB.own() as server:
        yield server


@pytest.fixture(params=["postgres killed", "postgres paused", "mariadb paused", "sqlite locked"])
def away(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    """What makes the ledger of a folder go away for as long as a block lasts."""
    kind, how = request.param.split()
    if kind == "sqlite":
        return lambda: locked(tmp_path / "ledger.db")
    server: Postgres | MariaDB = request.getfixturevalue(f"own_{kind}")
    (tmp_path / "url").write_text(server.database(f"away_{time.time_ns()}"))
    return lambda: _gone(server, kill=how == "killed")


@contextmanager
def _gone(server: Postgres | MariaDB, *, kill: bool) -> Iterator[None]:
    if not kill:
        server.pause()
        if isinstance(server, Postgres):
            _each_backend(server, signal.SIGSTOP)
        try:
            yield
        finally:
            if isinstance(server, Postgres):
                _each_backend(server, signal.SIGCONT)
            server.go_on()
        return
    server.kill()
    try:
        yield
    finally:
        server.start()


def _each_backend(server: Postgres, what: signal.Signals) -> None:
    """Send a signal to every process of a server: each has a session of its own."""
    assert server.process is not None
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    for child in children.split():
        os.kill(int(child), what)


@pytest.mark.parametrize(
    ("face", "body"),
    [*((face, "deaf") for face in FACES), ("blocking", "checks"), ("aio", "checks")],
)
def test_a_ledger_that_is_away_keeps_no_process_alive(
    tmp_path: Path, away: Callable[[], Any], face: str, body: str
) -> None:
    owed(tmp_path)
    with stopped(tmp_path, face, body=body) as one:
        one.begin()
        with away():
            one.ask()
            assert one.took() < GRACE + MORE
            if body == "deaf" or "cut job=" in one.said():  # PostgreSQL is asked by ``check``
                assert "it may be counted as lost, because" in one.told("cut")
            else:
                assert "ended=released" in one.told("unrecorded")
    run = resumed(tmp_path)
    assert (run.state, run.losses, run.releases) == (State.SUCCEEDED, 1, 0)


@pytest.mark.parametrize("face", ["blocking", "aio"])
def test_a_second_signal_waits_for_no_ledger(
    tmp_path: Path, away: Callable[[], Any], face: str
) -> None:
    owed(tmp_path)
    with stopped(tmp_path, face, grace=600) as one:
        one.begin()
        with away():
            one.ask()
            time.sleep(0.3)
            one.ask(signal.SIGINT)
            assert one.took() < AT_ONCE


@pytest.mark.parametrize("face", ["blocking", "aio"])
def test_an_end_that_could_not_be_recorded_is_told_and_the_run_is_resumed(
    tmp_path: Path, away: Callable[[], Any], face: str
) -> None:
    owed(tmp_path)
    with stopped(tmp_path, face, body="waits") as one:
        one.begin()
        with away():
            (tmp_path / "go").touch()
            until(lambda: one.marks("returns"))
            one.ask()
            assert one.took() < GRACE + MORE
            assert "ended=succeeded" in one.told("unrecorded")
    run = resumed(tmp_path)
    assert (run.state, run.result) == (State.SUCCEEDED, '"elsewhere"')


@pytest.mark.parametrize("face", ["blocking", "aio"])
def test_a_handler_of_alarms_that_hears_nothing_ends_with_its_process(
    ledger: Path, face: str
) -> None:
    with Fencepost(url_of(ledger)) as fp:
        fp.alarms.set("ring", "key", in_="0s")
    with stopped(ledger, face, body="alarm") as one:
        one.begin()
        one.ask()
        assert one.took() < GRACE + MORE


def test_a_coroutine_that_blocks_its_loop_ends_with_its_process(ledger: Path) -> None:
    owed(ledger)
    with stopped(ledger, "aio", body="blocks") as one:
        one.begin()
        one.ask()
        assert one.took() < GRACE + MORE
    run = resumed(ledger)
    assert (run.state, run.losses, run.releases) == (State.SUCCEEDED, 0, 1)


@pytest.mark.parametrize("face", ["blocking", "aio"])
def test_one_long_call_of_c_keeps_no_process_alive(ledger: Path, face: str) -> None:
    owed(ledger)
    with stopped(ledger, face, body="waits in C") as one:
        one.begin()
        one.ask()
        assert one.took() < GRACE + MORE
        assert "no loss is counted" in one.told("cut")
    run = resumed(ledger)
    assert (run.state, run.losses, run.releases) == (State.SUCCEEDED, 0, 1)


@pytest.mark.parametrize("face", ["blocking", "aio"])
def test_a_second_signal_ends_a_process_inside_of_one_long_call_of_c(
    tmp_path: Path, face: str
) -> None:
    owed(tmp_path)
    with stopped(tmp_path, face, body="waits in C", grace=600) as one:
        one.begin()
        one.ask()
        until(lambda: only_run(tmp_path).reason == "stopping")
        one.ask(signal.SIGINT)
        assert one.took() < AT_ONCE


@pytest.mark.parametrize("face", ["blocking", "aio"])
def test_a_child_that_a_body_forks_ends_at_its_own_signal_and_its_parent_goes_on(
    tmp_path: Path, face: str
) -> None:
    hour = int(time.time()) // 3600 * 3600
    with (
        stopped(tmp_path, face, body="ends a child") as one,
        Fencepost(url_of(tmp_path)) as fp,
    ):
        fp.job("steps", every="1h")(lambda: None)
        for number in range(1, 6):  # an instance that its child has stopped begins no other run
            fp.backfill("steps", hour - 3600 * number, hour - 3600 * (number - 1), wait=False)

            def ended(number: int = number) -> bool:
                return sum(run.state.terminal for run in fp.runs("steps")) == number

            until(ended)
        assert {run.result for run in fp.runs("steps")} == {str(-signal.SIGTERM)}
        one.ask()
        assert one.took() < AT_ONCE
        assert one.marks("returned")


@pytest.mark.parametrize("face", ["blocking", "aio"])
def test_a_run_that_is_no_longer_its_own_is_told_as_such(tmp_path: Path, face: str) -> None:
    owed(tmp_path)
    with stopped(tmp_path, face) as one:
        one.begin()
        with Fencepost(url_of(tmp_path)) as fp:
            fp.cancel(str(only_run(tmp_path).key), force=True)
        one.ask()
        assert one.took() < GRACE + MORE
        assert "the run is no longer its own" in one.told("cut")


@pytest.mark.parametrize("face", ["blocking", "aio"])
def test_an_error_that_ends_an_instance_is_not_hidden_by_a_stop(tmp_path: Path, face: str) -> None:
    owed(tmp_path)
    with stopped(tmp_path, face, breaks=True) as one:
        one.begin()
        one.ask()
        assert one.process.wait(25) == 1, one.said()
        assert "RuntimeError: the instance broke" in one.said()


def test_the_end_of_a_process_is_told_once(tmp_path: Path) -> None:
    owed(tmp_path)
    with stopped(tmp_path, "blocking", **{"hears slowly": True}) as one:
        one.begin()
        one.ask()
        assert one.took() < GRACE + MORE
        assert len(one.marks("cut")) == 1


def test_signals_wake_whatever_they_woke_before(tmp_path: Path) -> None:
    reader, writer = socket.socketpair()
    reader.settimeout(0)
    writer.settimeout(0)
    before = signal.set_wakeup_fd(writer.fileno())
    try:
        with Fencepost(url_of(tmp_path)) as fp:
            for _ in range(2):
                stopper = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM))
                stopper.start()
                fp.run()
                stopper.join()
                assert reader.recv(9) == bytes([signal.SIGTERM])
        assert signal.set_wakeup_fd(-1) == writer.fileno()
        with Fencepost(url_of(tmp_path)) as fp:
            stopper = threading.Timer(0.2, fp.stop)
            stopper.start()
            fp.run()
            stopper.join()
        assert signal.set_wakeup_fd(before) == -1  # ours is not left behind
    finally:
        signal.set_wakeup_fd(before)
        reader.close()
        writer.close()
