"""The fence of a run shuts out its earlier attempts, whatever permit or lock each of them had."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import threading
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pymysql
import pytest

from fencepost import AsyncFencepost, Fencepost, TokenStale
from fencepost.fence import CREATE_GUARD, FENCING_FORMER, FENCING_RESOURCE, admit
from fencepost.fence_mariadb import CREATE_GUARD as CREATE_GUARD_MARIADB
from fencepost.fence_postgres import CREATE_GUARD as CREATE_GUARD_POSTGRES
from fencepost.verifier import FenceASGI, FenceWSGI, SqliteGuards
from holder import until
from mariaplace import emptied
from servers import Postgres, Valkey, shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fencepost import AsyncRun, Run

FIRST = datetime(2026, 1, 20, 2, tzinfo=UTC)
SECOND = FIRST + timedelta(hours=1)
_numbers = itertools.count()


class Place:
    """A ledger, and a database of the user's own with a table of effects, both of one kind."""

    ledger: str

    def connect(self) -> Any:
        """Return a connection that waits for a lock only for a moment."""
        raise NotImplementedError

    def begin(self, conn: Any) -> None:
        """Begin a transaction, where that is not done by the first statement."""

    def write(self, conn: Any, token: int) -> None:
        """Have an effect in the open transaction."""
        conn.execute(f"INSERT INTO effect VALUES ({token})")

    def effects(self) -> list[int]:
        """Return the effects in the order of their commits."""
        with closing(self.connect()) as conn:
            return [row[0] for row in conn.execute("SELECT token FROM effect").fetchall()]


class InFiles(Place):
    def __init__(self, folder: Path, title: str) -> None:
        del title
        self.ledger, self._path = f"sqlite:///{folder}/ledger.db", folder / "app.db"
        with closing(self.connect()) as conn:
            conn.execute("PRAGMA journal_mode=WAL")
            conn.execute(CREATE_GUARD)
            conn.execute("CREATE TABLE effect (token INTEGER)")

    def connect(self) -> Any:
        return sqlite3.connect(
            self._path, timeout=0.2, isolation_level=None, check_same_thread=False
        )

    def begin(self, conn: Any) -> None:
        conn.execute("BEGIN IMMEDIATE")


class InPostgres(Place):
    def __init__(self, folder: Path, title: str) -> None:
        del folder, title
        self.ledger = shared(Postgres).database(f"fenced_runs_{next(_numbers)}")
        with psycopg.connect(self.ledger, autocommit=True) as conn:
            conn.execute(CREATE_GUARD_POSTGRES)
            conn.execute("CREATE TABLE effect (token bigint)")

    def connect(self) -> Any:
        return psycopg.connect(self.ledger, options="-c lock_timeout=200ms")


class InMariaDB(Place):
    kind = "mariadb"

    def __init__(self, folder: Path, title: str) -> None:
        del folder
        self._place = emptied(self.kind, title)
        self.ledger = self._place.url()
        self._place.run(CREATE_GUARD_MARIADB)
        self._place.run("CREATE TABLE effect (token BIGINT) ENGINE = InnoDB")

    def connect(self) -> Any:
        return pymysql.connect(
            host="127.0.0.1",
            port=self._place.port,
            user="post",
            password="secret",
            database=self._place.name,
            ssl_disabled=True,
            init_command="SET innodb_lock_wait_timeout = 1",
        )

    def write(self, conn: Any, token: int) -> None:
        with conn.cursor() as cursor:
            cursor.execute(f"INSERT INTO effect VALUES ({token})")

    def effects(self) -> list[int]:
        return [int(str(row[0])) for row in self._place.run("SELECT token FROM effect")]


class InMySQL(InMariaDB):
    kind = "mysql"


@pytest.fixture(params=[InFiles, InPostgres, InMariaDB, InMySQL])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    made: Place = request.param(tmp_path, request.node.nodeid)
    return made


class Attempts:
    """The attempts of a body, each of which does what it is told, in its own thread."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self._leave: list[threading.Event] = []
        self._threads: list[threading.Thread] = []

    def body(self, run: Run) -> None:
        leave = threading.Event()
        self._leave.append(leave)
        self.runs.append(run)
        assert leave.wait(30)

    def begin(self, fp: Fencepost, slot: datetime, *, job: str = "job") -> Run:
        """Have an attempt begin, and return its run."""
        count = len(self.runs)
        thread = threading.Thread(target=lambda: fp.trigger(job, slot=slot))
        self._threads.append(thread)
        thread.start()
        until(lambda: len(self.runs) > count)
        return self.runs[-1]

    def end(self) -> None:
        for leave in self._leave:
            leave.set()
        for thread in self._threads:
            thread.join(30)


@contextmanager
def faces(*urls: str, **settings: Any) -> Iterator[list[Fencepost]]:
    """Return faces of several processes, which have one ledger."""
    found = [Fencepost(url, **settings) for url in urls]
    try:
        yield found
    finally:
        for one in found:
            one.close()


def lose(fp: Fencepost, run: Run, lease: str) -> None:
    """Take the lease of an attempt away, as if its process had been paused for too long."""
    fp.break_lock(lease, token=run.token, reason="it is paused")
    until(run.lost.is_set)


@contextmanager
def moved_permit(place: Place, **settings: Any) -> Iterator[tuple[Run, Run, Fencepost]]:
    """Return two attempts of one run: the second has another permit, for a run has the first."""
    attempts = Attempts()
    with faces(place.ledger, place.ledger, **settings) as (fp, other):
        for one in (fp, other):
            one.job("job", overlap="allow", max_concurrent=3)(attempts.body)
        zombie = attempts.begin(fp, FIRST)
        with faces(place.ledger, namespace=settings.get("namespace", "default")) as (ledger,):
            lose(ledger, zombie, "job#1")
        between = attempts.begin(other, SECOND)
        successor = attempts.begin(other, FIRST)
        try:
            assert (zombie.id, between.id != zombie.id) == (successor.id, True)
            yield zombie, successor, other
        finally:
            attempts.end()


@contextmanager
def moved_lock(place: Place) -> Iterator[tuple[Run, Run]]:
    """Return the first and the third attempt of a run whose lock was changed after the first.

    The second ended before it could fence anything.
    """
    attempts = Attempts()
    with faces(place.ledger, place.ledger) as (fp, deployed):
        fp.job("job", lock="A")(attempts.body)
        deployed.job("job", lock="B")(attempts.body)
        zombie = attempts.begin(fp, FIRST)
        lose(fp, zombie, "A")
        second = attempts.begin(deployed, FIRST)
        second.save("here")  # a step forward: else the next attempt would have to wait
        lose(deployed, second, "B")
        successor = attempts.begin(deployed, FIRST)
        try:
            assert zombie.id == successor.id
            yield zombie, successor
        finally:
            attempts.end()


def fenced(place: Place, run: Run, *, then: Callable[[Any], None]) -> None:
    """Fence and have an effect in a transaction; leave its end to ``then``."""
    with closing(place.connect()) as conn:
        place.begin(conn)
        run.fence(conn)
        place.write(conn, run.token)
        then(conn)


def refused(place: Place, zombie: Run, successor: Run) -> None:
    """Check that a zombie commits before its successor, or not at all."""
    assert zombie.token < successor.token
    conn = place.connect()
    with closing(conn):  # the zombie is stopped between its fence and its COMMIT
        place.begin(conn)
        old = [mark for mark in marks_of(zombie) if mark.own]
        for mark in old:
            admit(conn, resource=mark.resource, token=mark.token)
        place.write(conn, zombie.token)
        with pytest.raises(
            (sqlite3.OperationalError, psycopg.errors.LockNotAvailable, pymysql.OperationalError)
        ):
            fenced(place, successor, then=lambda conn: conn.commit())
        conn.rollback()
    fenced(place, successor, then=lambda conn: conn.commit())
    with pytest.raises(TokenStale):
        fenced(place, zombie, then=lambda conn: conn.commit())
    assert place.effects() == [successor.token]


def marks_of(run: Run) -> list[Any]:
    lease: Any = run._lease  # as it was before the zombie stopped
    marks: list[Any] = lease._resources().marks(run.token)
    return marks


# A run that has another permit.


def test_a_zombie_whose_successor_has_another_permit_does_not_commit_after_it(place: Place) -> None:
    with moved_permit(place) as (zombie, successor, _):
        refused(place, zombie, successor)


def test_both_attempts_tell_services_one_resource(place: Place, tmp_path: Path) -> None:
    with moved_permit(place) as (zombie, successor, _):
        assert zombie.headers()[FENCING_RESOURCE] == successor.headers()[FENCING_RESOURCE]
        assert sent(tmp_path, zombie.headers()) == 200
        assert sent(tmp_path, successor.headers()) == 200
        assert sent(tmp_path, zombie.headers()) == 412


def test_runs_that_may_overlap_do_not_shut_each_other_out(place: Place) -> None:
    attempts = Attempts()
    with faces(place.ledger) as (fp,):
        fp.job("job", overlap="allow", max_concurrent=3)(attempts.body)
        older, newer = attempts.begin(fp, FIRST), attempts.begin(fp, SECOND)
        fenced(place, newer, then=lambda conn: conn.commit())
        fenced(place, older, then=lambda conn: conn.commit())
        assert place.effects() == [newer.token, older.token]
        attempts.end()


def test_a_run_that_took_the_permit_over_is_not_shut_out_by_the_run_that_had_it(
    place: Place,
) -> None:
    attempts = Attempts()
    with faces(place.ledger) as (fp,):
        fp.job("job", overlap="allow", max_concurrent=3)(attempts.body)
        lose(fp, attempts.begin(fp, FIRST), "job#1")
        heir, resumed = attempts.begin(fp, SECOND), attempts.begin(fp, FIRST)
        assert heir.token < resumed.token
        fenced(place, resumed, then=lambda conn: conn.commit())
        fenced(place, heir, then=lambda conn: conn.commit())
        assert place.effects() == [resumed.token, heir.token]
        attempts.end()


def test_a_zombie_of_an_older_version_fenced_by_its_permit_alone_and_is_refused(
    place: Place, tmp_path: Path
) -> None:
    with moved_permit(place) as (zombie, successor, _):
        fenced(place, successor, then=lambda conn: conn.commit())
        with closing(place.connect()) as conn:
            place.begin(conn)
            with pytest.raises(TokenStale):
                admit(conn, resource="default/job#1", token=zombie.token)
            conn.rollback()
        old = {"Fencing-Token": str(zombie.token), "Fencing-Resource": "default/job#1"}
        assert sent(tmp_path, old) == 200
        assert sent(tmp_path, successor.headers()) == 200
        assert sent(tmp_path, old) == 412


# A run that has another lock.


def test_a_zombie_whose_successor_has_another_lock_does_not_commit_after_it(place: Place) -> None:
    with moved_lock(place) as (zombie, successor):
        refused(place, zombie, successor)


def test_a_service_refuses_a_zombie_whose_successor_has_another_lock(
    place: Place, tmp_path: Path
) -> None:
    with moved_lock(place) as (zombie, successor):
        assert sent(tmp_path, zombie.headers()) == 200
        assert successor.headers()[FENCING_FORMER] == f"default/A;{zombie.token}"
        assert sent(tmp_path, successor.headers()) == 200
        assert sent(tmp_path, zombie.headers()) == 412


def test_the_next_holder_of_the_former_lock_is_not_shut_out(place: Place) -> None:
    with moved_lock(place) as (_, successor), faces(place.ledger) as (other,):
        with other.lock("A") as lease:
            fenced(place, successor, then=lambda conn: conn.commit())
            with closing(place.connect()) as conn:
                place.begin(conn)
                lease.fence(conn)
                place.write(conn, lease.token)
                conn.commit()
        assert place.effects() == [successor.token, lease.token]


# What stays as it was.


def test_an_exclusive_run_shuts_out_the_zombie_of_an_older_slot(place: Place) -> None:
    attempts = Attempts()
    with faces(place.ledger) as (fp,):
        fp.job("job", on_loss="fail")(attempts.body)
        zombie = attempts.begin(fp, FIRST)
        assert [mark.resource for mark in marks_of(zombie)] == ["default/job"]
        lose(fp, zombie, "job")
        fp.trigger("job", slot=FIRST)  # it is found to be lost, and has failed
        later = attempts.begin(fp, SECOND)
        assert marks_of(later)[0].resource == "default/job"
        fenced(place, later, then=lambda conn: conn.commit())
        with pytest.raises(TokenStale):
            fenced(place, zombie, then=lambda conn: conn.commit())
        attempts.end()


# The other faces.


def test_an_async_body_shuts_out_the_attempt_before_it(tmp_path: Path) -> None:
    place, attempts = InFiles(tmp_path, ""), Attempts()

    async def resumed() -> tuple[dict[str, str], int]:
        async with AsyncFencepost(place.ledger) as fp:
            seen: list[tuple[dict[str, str], int]] = []

            @fp.job("job", overlap="allow", max_concurrent=3)
            async def job(run: AsyncRun) -> None:
                with closing(place.connect()) as conn:
                    place.begin(conn)
                    run.fence(conn)
                    conn.commit()
                seen.append((run.headers(), run.token))

            await fp.trigger("job", slot=FIRST)
            return seen[0]

    with faces(place.ledger, place.ledger) as (fp, other):
        for one in (fp, other):
            one.job("job", overlap="allow", max_concurrent=3)(attempts.body)
        zombie = attempts.begin(fp, FIRST)
        lose(fp, zombie, "job#1")
        attempts.begin(other, SECOND)
        headers, _ = asyncio.run(resumed())
        assert headers[FENCING_RESOURCE] == zombie.headers()[FENCING_RESOURCE]
        with pytest.raises(TokenStale):
            fenced(place, zombie, then=lambda conn: conn.commit())
        attempts.end()


def fence_apart(run: Run) -> dict[str, str]:
    """Fence in a process of its own."""
    with closing(sqlite3.connect(run.payload or "app.db", isolation_level=None)) as conn:
        conn.execute("BEGIN IMMEDIATE")
        run.fence(conn)
        conn.commit()
    return run.headers()


def test_a_body_in_a_process_of_its_own_shuts_out_the_attempt_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, attempts = InFiles(tmp_path, ""), Attempts()
    monkeypatch.chdir(tmp_path)
    with faces(place.ledger, place.ledger, place.ledger) as (fp, other, apart):
        fp.job("job", overlap="allow", max_concurrent=3)(attempts.body)
        other.job("job", overlap="allow", max_concurrent=3)(attempts.body)
        apart.job("job", lock="B", isolation="process")(fence_apart)
        zombie = attempts.begin(fp, FIRST)
        lose(fp, zombie, "job#1")
        outcome = apart.trigger("job", slot=FIRST)
        assert outcome.status == "succeeded", outcome
        assert FENCING_FORMER in outcome.result
        with pytest.raises(TokenStale):
            fenced(place, zombie, then=lambda conn: conn.commit())
        attempts.end()


def test_leases_elsewhere_leave_the_fence_as_it_is(tmp_path: Path) -> None:
    place, elsewhere = InFiles(tmp_path, ""), shared(Valkey).url()
    with moved_permit(place, leases=elsewhere, namespace=tmp_path.name) as (zombie, successor, _):
        refused(place, zombie, successor)


# A service.


def sent(folder: Path, headers: dict[str, str]) -> int:
    """Return how services of both kinds, which share their guards, answer to a request."""
    guards = SqliteGuards(folder / "service.db")
    said: list[int] = []
    environ = {"REQUEST_METHOD": "POST"} | {
        "HTTP_" + name.upper().replace("-", "_"): value for name, value in headers.items()
    }
    started: list[str] = []

    def app(environ: Any, start_response: Any) -> list[bytes]:
        del environ
        start_response("200 OK", [])
        return []

    FenceWSGI(app, guards=guards)(environ, lambda status, _: started.append(status))
    said.append(int(started[0][:3]))

    async def served(scope: Any, receive: Any, send: Any) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            said.append(message["status"])

    scope = {
        "type": "http",
        "method": "POST",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
    }
    asyncio.run(FenceASGI(served, guards=guards)(scope, None, send))  # type: ignore[arg-type]
    guards.close()
    assert said[0] == said[1]
    return said[0]
