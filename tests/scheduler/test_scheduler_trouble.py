"""A job that cannot be planned stops no other; a ledger that is away for a while stops nothing."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from schedlab import (
    NOON,
    Heard,
    Noon,
    books_of,
    complaints,
    serving,
    until,
    url_of,
)

from fencepost import AsyncFencepost, Fencepost, OutcomeUnknown, StoreUnavailable
from fencepost.ledger.sqlite_planner import SqlitePlanner
from fencepost.model.run import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fencepost import Run
    from fencepost.ledger.planning import Ask, Ticked


def spoil(folder: Path, job: str, **columns: object) -> None:
    """Write into the ledger what nobody can read, as a newer version might."""
    with closing(sqlite3.connect(folder / "ledger.db", timeout=10)) as db, db:
        for column, value in columns.items():
            db.execute(f"UPDATE fencepost_job SET {column} = ? WHERE job = ?", (value, job))


@contextmanager
def two_jobs(folder: Path, **words: Any) -> Iterator[tuple[Fencepost, Noon, Heard, list[str]]]:
    clocks, heard, ran = Noon(), Heard(), []
    with Fencepost(url_of(folder), clocks=clocks, on_event=heard) as fp:
        fp.job("bad", every="1m", **words)(lambda: ran.append("bad"))
        fp.job("good", every="1m")(lambda: ran.append("good"))
        fp.tick()
        yield fp, clocks, heard, ran


@pytest.mark.parametrize(
    "columns", [{"spec": '{"never": "heard of"}'}, {"spec": "{"}, {"rules": "[]"}]
)
def test_a_definition_that_cannot_be_read_is_told_of_and_stops_no_other(
    tmp_path: Path, columns: dict[str, object]
) -> None:
    with two_jobs(tmp_path) as (fp, clocks, heard, ran):
        spoil(tmp_path, "bad", **columns)
        clocks.advance(60)
        fp.tick()
        assert ran == ["good"]
        assert [event.job for event in heard.about("trouble")] == ["bad"]
        fp.tick()
        assert len(heard.about("trouble")) == 1  # it is left alone for a while


def test_an_instance_that_knows_better_repairs_a_definition_that_cannot_be_read(
    tmp_path: Path,
) -> None:
    with two_jobs(tmp_path) as (_, clocks, _, ran):
        spoil(tmp_path, "bad", spec='{"never": "heard of"}', digest="other")
        with Fencepost(url_of(tmp_path), clocks=clocks) as fp:
            fp.job("bad", every="1m")(lambda: ran.append("bad"))
            assert fp.tick() == []
            clocks.advance(120)
            fp.tick()
        assert "bad" in ran


def test_an_operator_may_resume_a_job_that_cannot_be_read(tmp_path: Path) -> None:
    with two_jobs(tmp_path) as (fp, _, _, _):
        fp.pause("bad")
        spoil(tmp_path, "bad", spec="{")
        assert fp.resume("bad").paused == ""


def test_a_lock_that_cannot_be_named_is_told_of_and_stops_no_other(tmp_path: Path) -> None:
    def unnamed(slot: int) -> str:
        raise KeyError(slot)

    with two_jobs(tmp_path, lock=unnamed) as (fp, clocks, heard, ran):
        clocks.advance(60)
        fp.tick()
        assert ran == ["good"]
        (event,) = heard.about("trouble")
        assert event.job == "bad"
        assert "KeyError" in str(dict(event.more)["error"])
        fp.tick()
        assert len(heard.about("trouble")) == 1


class Cable:
    """Loses the answers of ticks, or the requests, as many as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers = self.requests = 0
        self.asked: list[Ask] = []
        tick = SqlitePlanner.tick

        async def cut(planner: SqlitePlanner, ask: Ask) -> Ticked:
            self.asked.append(ask)
            if self.requests:
                self.requests -= 1
                raise StoreUnavailable("the request did not arrive")
            ticked = await tick(planner, ask)
            if self.answers and (ticked.begun or ask.ended):
                self.answers -= 1
                raise OutcomeUnknown("the answer was lost")
            return ticked

        monkeypatch.setattr(SqlitePlanner, "tick", cut)


@pytest.fixture
def cable(monkeypatch: pytest.MonkeyPatch) -> Cable:
    return Cable(monkeypatch)


@pytest.mark.parametrize("times", [1, 3])
def test_what_a_tick_was_granted_unheard_of_is_found_by_asking_again(
    tmp_path: Path, cable: Cable, times: int
) -> None:
    with two_jobs(tmp_path) as (fp, clocks, _, ran):
        clocks.advance(60)
        cable.answers = times
        assert [outcome.status for outcome in fp.tick()] == ["succeeded"] * 2
        assert sorted(ran) == ["bad", "good"]
        assert all((run.starts, run.losses) == (1, 0) for run in fp.runs())


def test_an_instance_finds_what_it_was_granted_and_tells_its_ends_once(
    tmp_path: Path, cable: Cable
) -> None:
    ran: list[str] = []
    nonces: list[str] = []
    with Fencepost(url_of(tmp_path)) as fp:

        def body(run: Run) -> None:
            ran.append(run.id)
            nonces.append(run._course.hold.nonce)

        for number in range(4):
            fp.job(f"job-{number}", every="1s")(body)
        cable.answers = 1
        with serving(fp, concurrency=2):
            for _ in range(4):
                seen = len(ran)
                until(lambda seen=seen: len(ran) > seen)  # type: ignore[misc]
                cable.answers = 1
            until(lambda: not cable.answers)
        runs = fp.runs()
        assert complaints(books_of(fp), reasons={"coalesced", "lock_held"}) == []
    assert any(ask.again for ask in cable.asked)
    assert len(ran) == len(set(ran))
    assert len(nonces) == len(set(nonces))  # a nonce is good for one attempt
    assert all(run.losses == 0 for run in runs)
    assert all(run.starts <= 1 for run in runs if not run.releases)
    assert not [run for run in runs if run.state is State.RUNNING]


def test_a_stop_waits_until_the_last_end_is_on_record(tmp_path: Path, cable: Cable) -> None:
    inside, leave = threading.Event(), threading.Event()
    with Fencepost(url_of(tmp_path)) as fp:

        @fp.job("job", every="1s")
        def job() -> None:
            inside.set()
            leave.wait(30)

        with serving(fp) as thread:
            assert inside.wait(30)
            cable.requests, cable.answers = 2, 1
            fp.stop(grace=30)
            leave.set()
            thread.join(30)
        assert [run.state for run in fp.runs("job")][-1] is State.SUCCEEDED
        assert not [run for run in fp.runs("job") if run.state is State.RUNNING]


def locked(folder: Path, until_told: threading.Event) -> Callable[[], None]:
    def hold() -> None:
        with closing(sqlite3.connect(folder / "ledger.db", isolation_level=None)) as db:
            db.execute("PRAGMA busy_timeout = 10000")
            db.execute("BEGIN IMMEDIATE")
            until_told.wait(30)
            db.execute("ROLLBACK")

    return hold


def test_an_instance_outlives_a_ledger_that_others_keep_locked(tmp_path: Path) -> None:
    heard, ran, free = Heard(), [], threading.Event()
    with Fencepost(url_of(tmp_path), on_event=heard) as fp:
        fp.job("job", every="1s", lease="30s")(lambda: ran.append(1))
        with serving(fp):
            until(lambda: ran)
            writer = threading.Thread(target=locked(tmp_path, free))
            writer.start()
            until(lambda: heard.about("unconfirmed"))
            seen = len(ran)
            free.set()
            writer.join()
            until(lambda: len(ran) > seen + 1)
        runs = fp.runs()
        assert complaints(books_of(fp), reasons={"coalesced", "lock_held"}) == []
    assert all((run.starts, run.losses) == (1, 0) for run in runs if run.state.terminal)


def test_an_instance_outlives_a_full_disk(tmp_path: Path) -> None:
    heard, ran = Heard(), []
    with Fencepost(url_of(tmp_path), on_event=heard) as fp:
        for number in range(8):
            fp.job(f"job-{number}-" + "x" * 150, every="1s")(lambda: ran.append(1))
        with serving(fp):
            until(lambda: ran)
            connection = fp._holding.store.file._connection  # type: ignore[attr-defined]
            (pages,) = connection.execute("PRAGMA page_count").fetchone()
            connection.execute(f"PRAGMA max_page_count = {pages}")
            until(lambda: any("is full" in str(event) for event in heard.about("unconfirmed")))
            connection.execute("PRAGMA max_page_count = 100000")
            seen = len(ran)
            until(lambda: len(ran) > seen + 8)
        assert complaints(books_of(fp), reasons={"coalesced", "lock_held"}) == []
        ids = [run.key for run in fp.runs(limit=1000) if run.state is State.SUCCEEDED]
    assert len(ids) == len(set(ids)) == len(ran)


def test_a_face_that_is_closed_while_it_runs_ends_its_instance(tmp_path: Path) -> None:
    ran: list[int] = []
    fp = Fencepost(url_of(tmp_path))
    fp.job("job", every="1s")(lambda: ran.append(1))
    with serving(fp) as thread:
        until(lambda: ran)
        fp.close()
        thread.join(30)
        assert not thread.is_alive()
    with Fencepost(url_of(tmp_path)) as again:
        assert not [run for run in again.runs() if run.state is State.RUNNING]


def test_an_asyncio_face_that_is_closed_while_it_runs_ends_its_instance(tmp_path: Path) -> None:
    async def main() -> None:
        ran = asyncio.Event()
        fp = AsyncFencepost(url_of(tmp_path))

        @fp.job("job", every="1s")
        async def job() -> None:
            ran.set()
            await asyncio.sleep(30)

        task = asyncio.create_task(fp.run(signals=False))
        await asyncio.wait_for(ran.wait(), 30)
        await fp.close()
        await asyncio.wait_for(task, 10)

    asyncio.run(main())
    with Fencepost(url_of(tmp_path)) as again:
        (run,) = [run for run in again.runs() if run.starts]
        assert (run.state, run.losses) == (State.PENDING, 0)


def test_counters_tell_starts_losses_and_tries_apart(tmp_path: Path) -> None:
    with two_jobs(tmp_path) as (fp, clocks, _, _):
        tokens: list[int] = []

        @fp.job("tries", every="1h", retry=3)
        def tries(run: Run) -> None:
            tokens.append(run.token)
            if len(tokens) == 1:
                fp._working.courses[run._course.hold.nonce].recall(0.0)
                run.check()
            if len(tokens) == 2:
                raise ValueError("once more")

        fp.tick()
        clocks.advance(3600)
        fp.tick()
        clocks.advance(700)
        fp.tick()
        (run,) = fp.runs("tries")
        assert (run.state, run.starts, run.releases, run.losses) == (State.SUCCEEDED, 3, 1, 0)
        assert run.attempt == 2
        assert run.key.slot == NOON + 3600
        assert tokens == sorted(set(tokens))
