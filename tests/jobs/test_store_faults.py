"""An error of the ledger's own database inside of ``run.transaction()`` is no failure of a job."""

from __future__ import annotations

import asyncio
import itertools
import math
import re
import sqlite3
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import isolation_bodies as bodies
import pytest

from fencepost import AsyncFencepost, Fencepost, GiveUp, Retry
from fencepost.errors import OutcomeUnknown, StoreUnavailable
from fencepost.model.alarm_policy import AlarmPolicy
from fencepost.model.fault import FAULTS, pause_after
from fencepost.model.run import State
from fencepost.testing.clock import SettableClocks
from joinlab import HOMES, Home, LoggedMariaHome, PostgresHome
from proxy import Proxy
from servers import MariaDB, Postgres

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fencepost import AsyncRun, Run
    from fencepost.transaction import Transaction

SLOT = datetime(2026, 1, 20, 2, tzinfo=UTC)
_numbers = itertools.count(1)


@pytest.fixture(params=[*HOMES, LoggedMariaHome()], ids=str)
def home(request: pytest.FixtureRequest) -> Home:
    home: Home = request.param
    return home


@pytest.fixture
def url(home: Home) -> str:
    name = f"faults{next(_numbers)}"
    url = home.database(name)
    home.run("CREATE TABLE effect (item text)", name)
    return url


@pytest.fixture
def effects(home: Home, url: str) -> Callable[[], list[str]]:
    name = url.rpartition("/")[2]
    return lambda: [row[0] for row in home.run("SELECT item FROM effect ORDER BY item", name)]


def kill(home: Home, session: int) -> None:
    """Have the server end a session, and return once it is gone."""
    postgres = isinstance(home, PostgresHome)
    words = f"SELECT pg_terminate_backend({session}, 5000)" if postgres else f"KILL {session}"
    home.run(words, "postgres" if postgres else "mysql")
    if not postgres:
        listed = f"SELECT 1 FROM information_schema.processlist WHERE id = {session}"
        give_up = time.monotonic() + 30
        while home.run(listed, "mysql"):
            assert time.monotonic() < give_up
            time.sleep(0.01)


def session_of(home: Home) -> str:
    return f"SELECT {'pg_backend_pid' if isinstance(home, PostgresHome) else 'connection_id'}()"


def by_statement(tx: Transaction) -> None:
    tx.execute("SELECT 1")


def by_its_connection(tx: Transaction) -> None:
    tx.connection.cursor().execute("SELECT 1")


def by_an_item(tx: Transaction) -> None:
    tx.once("another")


def by_the_commit(_: Transaction) -> None:
    """Notice nothing before the block ends."""


def by_an_error_of_its_own(tx: Transaction) -> None:
    try:
        tx.execute("SELECT 1")
    except Exception as error:
        raise RuntimeError("cannot go on") from error


@pytest.mark.parametrize(
    "noticed",
    [by_statement, by_its_connection, by_an_item, by_the_commit, by_an_error_of_its_own],
)
def test_a_session_that_the_server_ends_is_not_charged_to_the_job(
    home: Home, url: str, effects: Callable[[], list[str]], noticed: Callable[[Transaction], None]
) -> None:
    attempts: list[int] = []
    with Fencepost(url) as fp:

        @fp.job("work")
        def work(run: Run) -> None:
            attempts.append(run.attempt)
            with run.transaction() as tx:
                assert tx.once("a")
                tx.execute("INSERT INTO effect VALUES ('a')")
                tx.save("a")
                if len(attempts) == 1:
                    kill(home, tx.execute(session_of(home)).fetchone()[0])
                    noticed(tx)

        outcome = fp.trigger("work", SLOT)
        (run,) = fp.runs("work")
    assert outcome.status == "succeeded", outcome
    assert attempts == [1, 1], "no try was used up"
    assert (run.starts, run.losses, run.strikes, run.releases) == (2, 0, 0, 1)
    assert effects() == ["a"]


def test_a_coroutine_is_not_charged_either(
    home: Home, url: str, effects: Callable[[], list[str]]
) -> None:
    attempts: list[int] = []

    async def main() -> str:
        async with AsyncFencepost(url) as fp:

            @fp.job("work")
            async def work(run: AsyncRun) -> None:
                attempts.append(run.attempt)
                async with run.transaction() as tx:
                    await tx.execute("INSERT INTO effect VALUES ('a')")
                    if len(attempts) == 1:
                        ((session,),) = await tx.execute(session_of(home))
                        kill(home, session)
                    await tx.execute("SELECT 1")

            return (await fp.trigger("work", SLOT)).status

    assert asyncio.run(main()) == "succeeded"
    assert attempts == [1, 1]
    assert effects() == ["a"]


def test_a_body_in_a_process_of_its_own_is_not_charged_either(
    home: Home,
    url: str,
    effects: Callable[[], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FENCEPOST_TEST_FOLDER", str(tmp_path))
    postgres = isinstance(home, PostgresHome)
    words = "pg_terminate_backend(pg_backend_pid())" if postgres else ""
    monkeypatch.setenv("FENCEPOST_TEST_CUT", words)
    with Fencepost(url) as fp:
        fp.job("work", isolation="process")(bodies.is_cut_off)
        outcome = fp.trigger("work", SLOT)
        (run,) = fp.runs("work")
    assert outcome.status == "succeeded", outcome
    assert (run.starts, run.losses) == (2, 0)
    assert effects() == ["a"]


@pytest.mark.parametrize("when", ["before", "after", "unheard"])
def test_a_commit_of_unknown_fate_is_looked_up_by_the_next_attempt(
    home: Home, url: str, effects: Callable[[], list[str]], when: str
) -> None:
    """The connection is cut before the commit arrives, after it, or no answer ever comes."""
    firsts: list[bool] = []
    with Proxy(home.server.port) as proxy:
        through = url.replace(f":{home.server.port}", f":{proxy.port}")
        with Fencepost(through) as fp:

            @fp.job("work", lease="30s")
            def work(run: Run) -> None:
                try:
                    with run.transaction() as tx:
                        firsts.append(tx.once("a"))
                        if firsts[-1]:
                            tx.execute("INSERT INTO effect VALUES ('a')")
                        if len(firsts) == 1:
                            if when == "after":
                                proxy.lose_replies(1)
                            elif when == "unheard":
                                proxy.mode = "hole_down"
                            else:
                                proxy.mode = "hole_up"
                                proxy.reset()
                finally:
                    proxy.mode = "pass"

            outcome = fp.trigger("work", SLOT)
    assert outcome.status == "succeeded", outcome
    assert effects() == ["a"], "once, whatever became of the first commit"
    assert when != "unheard" or firsts == [True, False], "it was committed, and nobody heard of it"


@pytest.mark.parametrize("kind", [Postgres, MariaDB])
def test_a_server_that_crashes_and_comes_back_is_not_charged_to_the_job(
    kind: type[Postgres | MariaDB],
) -> None:
    tokens: list[int] = []
    with kind.own() as server, Fencepost(server.database("crashed")) as fp:
        server.run("CREATE TABLE effect (item text)", database="crashed")

        @fp.job("work")
        def work(run: Run) -> None:
            tokens.append(run.token)
            with run.transaction() as tx:
                tx.execute("INSERT INTO effect VALUES ('a')")
                if len(tokens) == 1:
                    server.restart()

        outcome = fp.trigger("work", SLOT, wait="60s")
        found = server.run("SELECT item FROM effect", database="crashed")
    assert outcome.status == "succeeded", outcome
    assert len(tokens) == 2
    assert [row[0] for row in found] == ["a"]


def test_errors_of_other_databases_are_the_jobs_own(home: Home, url: str, tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "other.db", timeout=0)
    rival = sqlite3.connect(tmp_path / "other.db", isolation_level=None)
    with Fencepost(url) as fp, other, rival:

        @fp.job("locked")
        def locked(run: Run) -> None:
            with run.transaction():
                rival.execute("BEGIN EXCLUSIVE")
                try:
                    other.execute("CREATE TABLE effect (item)")
                finally:
                    rival.execute("ROLLBACK")

        @fp.job("away")
        def away(run: Run) -> None:
            with run.transaction():
                raise StoreUnavailable("another store is away")

        @fp.job("wrong")
        def wrong(run: Run) -> None:
            with run.transaction() as tx:
                tx.execute("so what")

        for job in (locked, away, wrong):
            outcome = fp.trigger(job, SLOT)
            assert (outcome.status, outcome.reason) == ("failed", "error"), outcome
    other.close()
    rival.close()


def test_what_a_body_says_on_purpose_counts(home: Home, url: str) -> None:
    with Fencepost(url) as fp:

        def cut(run: Run) -> None:
            with run.transaction() as tx:
                kill(home, tx.execute(session_of(home)).fetchone()[0])
                tx.execute("SELECT 1")

        @fp.job("gives-up")
        def gives_up(run: Run) -> None:
            try:
                cut(run)
            except Exception as error:
                raise GiveUp("never again") from error

        @fp.job("goes-on")
        def goes_on(run: Run) -> str:
            with suppress(Exception):
                cut(run)
            return "without it"

        @fp.job("fails-later")
        def fails_later(run: Run) -> str:
            with suppress(Exception):
                cut(run)
            raise ValueError("for another reason")

        @fp.job("at-most-once", on_loss="fail")
        def at_most_once(run: Run) -> None:
            cut(run)

        assert fp.trigger(gives_up, SLOT).reason == "gave_up"
        assert fp.trigger(goes_on, SLOT).result == "without it"
        assert fp.trigger(fails_later, SLOT).status == "failed"
        assert fp.trigger(at_most_once, SLOT).status == "failed"


def test_a_transaction_that_is_quiet_for_too_long_is_the_jobs_own_doing() -> None:
    """Else a body that thinks inside of its transaction would be tried for ever."""
    home, clocks, tries = PostgresHome(), SettableClocks(), list[int]()
    with Fencepost(home.database("quiet"), clocks=clocks) as fp:

        @fp.job("thinks")
        def thinks(run: Run) -> None:
            tries.append(run.token)
            if len(tries) > 1:
                return
            with run.transaction() as tx:
                session = tx.execute(session_of(home)).fetchone()[0]
                clocks.advance(31.0)  # a lease, for which the server lets it idle
                kill(home, session)
                tx.execute("SELECT 1")

        outcome = fp.trigger("thinks", SLOT)
    assert len(tries) == 1
    assert outcome.status in ("failed", "lost"), outcome


def test_tries_are_not_used_up_by_faults(home: Home, url: str) -> None:
    attempts: list[int] = []
    with Fencepost(url) as fp:

        @fp.job("work", retry=Retry(2, base="10ms"))
        def work(run: Run) -> None:
            attempts.append(run.attempt)
            if len(attempts) != 2:
                raise ValueError("the job's own")
            with run.transaction() as tx:
                kill(home, tx.execute(session_of(home)).fetchone()[0])

        outcome = fp.trigger("work", SLOT)
    assert attempts == [1, 2, 2]
    assert (outcome.status, outcome.error) == ("failed", "ValueError: the job's own")


def test_a_full_disk_is_not_charged_to_the_job(tmp_path: Path) -> None:
    clocks, tries = SettableClocks(), itertools.count(1)
    with Fencepost(f"sqlite:///{tmp_path}/ledger.db", clocks=clocks) as fp:

        @fp.job("work", every="1m")
        def work(run: Run) -> None:
            with run.transaction() as tx:
                tx.execute("CREATE TABLE IF NOT EXISTS effect (item)")
                full = next(tries) == 1
                pages = tx.execute("PRAGMA page_count").fetchone()[0]
                tx.execute(f"PRAGMA max_page_count = {pages if full else 2**30}")
                tx.execute("INSERT INTO effect VALUES (zeroblob(100000))")

        fp.tick()
        clocks.advance(60)
        ((status, reason),) = ((one.status, one.reason) for one in fp.tick())
        assert (status, reason) == ("skipped", "store_fault")
        (run,) = fp.runs("work")
        assert run.state is State.PENDING
        assert "full" in str(run.error)
        assert fp.tick() == [], "not before its pause is over"
        clocks.advance(2)
        assert [one.status for one in fp.tick()] == ["succeeded"]
        (run,) = fp.runs("work")
        assert (run.starts, run.losses, run.releases) == (2, 0, 1)


def test_pauses_grow_to_a_ceiling() -> None:
    assert [pause_after(faults, dice=0.0) for faults in range(1, 5)] == [1.0, 2.0, 4.0, 8.0]
    assert pause_after(10_000, dice=0.0) == 17 * 60
    assert pause_after(1, dice=1.0) == 1.25


class Script:
    """A job whose attempts end one after the other as it is told; each pause is slept through."""

    def __init__(self, fp: Fencepost, clocks: SettableClocks) -> None:
        self.fp, self.clocks = fp, clocks
        fp.job("work", every="1h", retry=Retry(9, base="1s"))(self._work)
        fp.tick()
        clocks.advance(3600)

    def pauses(self, *plots: str) -> list[int]:
        """Return how long a run must wait after each attempt, without what was added by chance."""
        return [self._pause(plot) for plot in plots]

    def _pause(self, plot: str) -> int:
        self.plot = plot
        self.fp.tick("150ms" if "stop" in plot else None)
        (run,) = self.fp.runs("work")
        pause = max(0.0, run.not_before - run.beat_at)
        self.clocks.advance(pause)
        return 2 ** int(math.log2(pause)) if pause >= 1.0 else 0

    def _work(self, run: Run) -> None:
        if "save" in self.plot:
            run.save(self.plot)
        while "stop" in self.plot:
            run.check()
            time.sleep(0.01)
        if self.plot == "error":
            raise ValueError("the job's own")
        with run.transaction() as tx:
            tx.execute("CREATE TABLE IF NOT EXISTS effect (item)")
            if self.plot == "undone":
                tx.save(self.plot)
            pages = tx.execute("PRAGMA page_count").fetchone()[0]
            tx.execute(f"PRAGMA max_page_count = {pages}")
            try:
                tx.execute("INSERT INTO effect VALUES (zeroblob(100000))")
            finally:
                tx.execute(f"PRAGMA max_page_count = {2**30}")


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    clocks = SettableClocks()
    with Fencepost(f"sqlite:///{tmp_path}/ledger.db", clocks=clocks) as fp:
        yield Script(fp, clocks)


def test_pauses_are_counted_by_faults_alone(script: Script) -> None:
    assert script.pauses(*["stop"] * 9, "fault") == [*[0] * 9, 1], "a deploy is no fault"
    assert script.pauses("fault", "stop", "fault", "error", "fault")[::2] == [2, 4, 8]


def test_pauses_begin_anew_with_a_checkpoint(script: Script) -> None:
    assert script.pauses("fault", "fault", "fault") == [1, 2, 4]
    assert script.pauses("save here", "fault", "fault") == [1, 2, 4]
    assert script.pauses("save there") == [1]
    assert script.pauses("save there", "save here") == [2, 1], "the same place is no step forward"


def test_a_checkpoint_of_an_attempt_that_was_stopped_counts(script: Script) -> None:
    assert script.pauses("fault", "fault", "save and stop", "fault") == [1, 2, 0, 1]


def test_a_checkpoint_that_was_undone_does_not_count(script: Script) -> None:
    assert script.pauses("fault", "undone", "undone") == [1, 2, 4]


def test_pauses_are_counted_by_faults_alone_on_a_server_as_well(
    home: Home, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="fencepost")
    plots = ["stop", "stop", "fault", "stop", "fault"]
    with Fencepost(url) as fp:

        @fp.job("work")
        def work(run: Run) -> None:
            plot = plots.pop(0) if plots else "done"
            if plot == "stop":
                raise KeyboardInterrupt
            with run.transaction() as tx:
                if plot == "fault":
                    kill(home, tx.execute(session_of(home)).fetchone()[0])

        for _ in range(4):
            with suppress(KeyboardInterrupt):
                outcome = fp.trigger("work", SLOT)
    assert outcome.status == "succeeded", outcome
    assert re.findall(r"store_fault.* retry_in=(\d+)", caplog.text) == ["1", "2"]


def test_errors_that_are_faults_are_those_of_alarms() -> None:
    assert AlarmPolicy().faults == FAULTS == (OutcomeUnknown, StoreUnavailable)
