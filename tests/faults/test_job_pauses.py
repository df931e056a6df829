"""A worker that comes too late writes nothing, and never runs beside its successor."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from faultlab import fencepost, until

from fencepost import AsyncFencepost, Fencepost
from fencepost.cli.main import main
from fencepost.errors import Misuse
from fencepost.fence import CREATE_DONE, CREATE_GUARD
from fencepost.ledger.open import ledger_of
from fencepost.model.run import State
from fencepost.model.slot import parsed
from fencepost.stores.open import open_store
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from fencepost import AsyncRun, Run
    from fencepost.model.run import RunEvent

SLOT = datetime(2026, 1, 20, 2, tzinfo=UTC)
RUN = "work@2026-01-20T02:00:00Z"
ZOMBIE = Path(__file__).with_name("zombie_program.py")


def events(url: str) -> list[RunEvent]:
    world = BlockingWorld()
    ledger = ledger_of(world, open_store(url, world, namespace="default"))
    try:
        return finish(ledger.events(parsed(RUN)))
    finally:
        finish(ledger.close())


def test_a_worker_that_wakes_up_too_late_can_write_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    with closing(sqlite3.connect(tmp_path / "other.db")) as conn:
        conn.executescript(f"{CREATE_GUARD}; {CREATE_DONE}; CREATE TABLE effect (item TEXT);")
    zombie = subprocess.Popen(
        [sys.executable, str(ZOMBIE), url, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert zombie.stdin is not None
    assert zombie.stdout is not None
    try:
        token = int(zombie.stdout.readline())
        os.kill(zombie.pid, signal.SIGSTOP)
        with Fencepost(url) as fp:

            @fp.job("work", lease="600ms")
            def work(run: Run) -> int:
                with closing(sqlite3.connect(tmp_path / "other.db", isolation_level=None)) as conn:
                    conn.execute("BEGIN IMMEDIATE")
                    run.fence(conn)
                    conn.execute("INSERT INTO effect VALUES ('successor')")
                    conn.execute("COMMIT")
                run.save("successor")
                return run.token

            outcomes: list[Any] = []

            def taken_over() -> bool:
                outcomes.append(fp.trigger("work", SLOT))
                return bool(outcomes[-1])

            until(taken_over)
            assert outcomes[0].reason == "lock_held"  # a stopped process is not a dead one
            assert outcomes[-1].result > token
            os.kill(zombie.pid, signal.SIGCONT)
            zombie.stdin.write("go on\n")
            zombie.stdin.flush()
            said = json.loads(zombie.stdout.readline())
            (run,) = fp.runs("work")
    finally:
        zombie.kill()
        zombie.communicate()
    assert set(said) == {"check", "save", "once", "batch", "transaction", "fence", "other", "end"}
    assert set(said.values()) <= {"LeaseLost", "RunLost", "TokenStale", "lost"}, said
    assert (run.state, run.result, run.losses) == (State.SUCCEEDED, str(outcomes[-1].result), 1)
    assert json.loads(str(run.checkpoint)) == "successor"
    stale = [event for event in events(url) if event.what == "stale_write"]
    assert stale
    assert {(event.token, event.holder.split()[-1]) for event in stale} == {
        (token, str(zombie.pid))
    }
    with closing(sqlite3.connect(tmp_path / "other.db")) as conn:
        assert conn.execute("SELECT item FROM effect").fetchall() == [("successor",)]
    main(["doctor", "--url", url])
    assert "1 of the newest runs of job 'work' were taken over" in capsys.readouterr().out


def test_a_thread_that_outlives_its_timeout_keeps_its_lease_and_is_reported(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    inside, leave = threading.Event(), threading.Event()
    running: list[int] = []
    with fencepost(url) as fp:

        @fp.job("work", timeout=0.2, cancel_grace=0.1, lease="600ms")
        def work(run: Run) -> int:
            running.append(1)
            assert len(running) == 1, "two at once"
            if run.slot == SLOT:
                inside.set()
                assert leave.wait(30)  # deaf to every check
            running.pop()
            return run.token

        outcomes: list[Any] = []
        worker = threading.Thread(target=lambda: outcomes.append(fp.trigger("work", SLOT)))
        worker.start()
        assert inside.wait(30)
        until(lambda: "stuck" in [event.what for event in events(url)])
        (lease,) = fp.locks()
        until(lambda: fp.locks()[0].expires_in > lease.expires_in)  # it is still renewed
        later = fp.trigger("work", SLOT + timedelta(hours=1))
        assert (later.status, later.reason) == ("skipped", "lock_held")
        leave.set()
        worker.join()
    assert outcomes[0].status == "succeeded"  # its work was done: to hide that would be a lie
    assert [event.what for event in events(url)].count("stuck") == 1


def test_a_thread_that_asks_hears_that_its_time_is_up(tmp_path: Path) -> None:
    with fencepost(f"sqlite:///{tmp_path}/ledger.db") as fp:

        @fp.job("work", timeout=0.05)
        def work(run: Run) -> None:
            while True:
                run.check()

        outcome = fp.trigger("work", SLOT)
    assert (outcome.status, outcome.reason) == ("timed_out", "timeout")


def test_a_transaction_that_is_open_for_three_leases_loses_nothing_and_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leave = threading.Event()
    with fencepost(f"sqlite:///{tmp_path}/ledger.db") as fp:

        @fp.job("work", lease="400ms")
        def work(run: Run) -> str:
            with run.transaction() as tx:
                tx.execute("CREATE TABLE effect (item TEXT)")
                tx.execute("INSERT INTO effect VALUES ('one')")
                leave.wait(1.2)
                run.check()
                tx.save("long")
            run.check()
            return "fine"

        outcome = fp.trigger("work", SLOT)
    assert outcome.result == "fine"
    assert any("slow_transaction" in line for line in caplog.messages)
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as conn:
        assert conn.execute("SELECT item FROM effect").fetchall() == [("one",)]


def test_a_transaction_is_undone_as_a_whole(tmp_path: Path) -> None:
    with fencepost(f"sqlite:///{tmp_path}/ledger.db") as fp:

        @fp.job("work")
        def work(run: Run) -> list[Any]:
            with run.transaction() as tx:
                tx.execute("CREATE TABLE effect (item TEXT)")
                assert tx.once("a")
                assert not tx.once("a")
            with suppress(ValueError), run.transaction() as tx:
                tx.execute("INSERT INTO effect VALUES ('half')")
                assert tx.once("b")
                tx.save("half")
                raise ValueError("half way")
            with run.transaction() as tx:
                assert not tx.once("a")
                assert tx.once("b")
                rows = tx.execute("SELECT count(*) FROM effect").fetchone()
            return [run.checkpoint, *rows]

        assert fp.trigger("work", SLOT).result == [None, 0]


def test_what_a_transaction_cannot_be_used_for_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with fencepost(f"sqlite:///{tmp_path}/ledger.db") as fp:

        @fp.job("work")
        def work(run: Run) -> None:
            with run.transaction() as tx:
                with pytest.raises(Misuse, match=r"use tx\.once"):
                    run.save(1)
                with pytest.raises(Misuse, match=r"use tx\.once"):
                    run.once("x")
                with pytest.raises(Misuse, match="do not nest"), run.transaction():
                    pass
            with pytest.raises(Misuse, match="over"):
                tx.execute("SELECT 1")
            with pytest.raises(Misuse, match="other means"), run.transaction() as tx:
                tx.execute("COMMIT")

        outcome = fp.trigger("work", SLOT)
    assert outcome.status == "succeeded", outcome
    with Fencepost(f"memory://{tmp_path}") as fp:

        @fp.job("nowhere")
        def nowhere(run: Run) -> None:
            run.transaction()

        outcome = fp.trigger("nowhere", SLOT)
        assert "needs a ledger in an SQL database" in str(outcome.error)
        with pytest.raises(Misuse, match=r"needs T3 \(transactional\)"):
            fp.job("picky", needs="T3")


def test_a_coroutine_has_transactions_too(tmp_path: Path) -> None:
    import asyncio

    async def main() -> Any:
        async with AsyncFencepost(f"sqlite:///{tmp_path}/ledger.db") as fp:

            @fp.job("work")
            async def work(run: AsyncRun) -> list[Any]:
                async with run.transaction() as tx:
                    await tx.execute("CREATE TABLE effect (item TEXT)")
                    assert await tx.once("a")
                    await tx.executemany("INSERT INTO effect VALUES (?)", [("x",), ("y",)])
                    await tx.save(7)
                    with pytest.raises(Misuse, match=r"use tx\.once"):
                        await run.save(1)
                async with run.transaction() as tx:
                    rows = await tx.execute("SELECT item FROM effect ORDER BY item")
                return [run.checkpoint, *rows]

            return await fp.trigger("work", SLOT)

    assert asyncio.run(main()).result == [7, ["x"], ["y"]]
