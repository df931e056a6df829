"""On PostgreSQL an instance hears of work that others make, and finds all of it without hearing."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest
from schedlab import PATIENCE, serving, until

from fencepost import AsyncFencepost, Fencepost, RunCancelled
from fencepost.flows.serve import Pace
from fencepost.ledger import ticking
from fencepost.ledger.api import Attempt
from fencepost.ledger.planning import Asked
from fencepost.ledger.postgres_rousing import channel_of
from fencepost.model.claim import Verdict
from fencepost.model.ending import Settled
from fencepost.model.run import State
from fencepost.model.slot import RunKey
from fencepost.world import postgres_ear
from fencepost.world.flow import finish
from fencepost.world.postgres_ear import Ear
from pglab import QuickPostgres, fresh_namespace
from servers import PgBouncer, shared

if TYPE_CHECKING:
    from collections.abc import Iterator

# Longer than any of these tests: what happens was heard of.
NEVER = Pace(attend=3600.0, sweep=3600.0, look=3600.0)
QUICK = Pace(attend=3600.0, sweep=0.2, look=0.2)
SET = """
import sys
from fencepost import Fencepost
url, space, key = sys.argv[1:]
with Fencepost(url, namespace=space) as fp:
    fp.alarms.set("kind", key, in_="0s")
"""
LISTENING = """
SELECT pid FROM pg_stat_activity WHERE query = %s AND state = 'idle'"""
_POOLERS: list[type[PgBouncer]] = []


class Lab:
    """One namespace of a database, and who listens there."""

    def __init__(self) -> None:
        self.space = f"{fresh_namespace()}-{time.time_ns()}"
        self.direct = shared(QuickPostgres).database("notify")
        # Without pulses nobody looks more often because others have runs.
        self.url = f"{self.direct}?advisory=off"
        self._db = psycopg.connect(self.direct, autocommit=True)

    def fencepost(self, pace: Pace = NEVER, *, url: str = "") -> Fencepost:
        fp = Fencepost(url or self.url, namespace=self.space)
        fp._scheduling.pace = pace
        return fp

    def listening(self) -> set[int]:
        """Return the sessions that listen to what is said in this namespace."""
        listen = f'LISTEN "{channel_of("public", self.space)}"'
        return {pid for (pid,) in self._db.execute(LISTENING, (listen,)).fetchall()}

    def cut(self) -> set[int]:
        """End the sessions that listen."""
        pids = self.listening()
        for pid in pids:
            self._db.execute("SELECT pg_terminate_backend(%s)", (pid,))
        return pids

    def set_elsewhere(self, key: str) -> None:
        """Have another process set an alarm that is due."""
        words = [sys.executable, "-c", SET, self.url, self.space, key]
        subprocess.run(words, check=True, timeout=PATIENCE)

    def execute(self, statement: str) -> list[tuple[object, ...]]:
        cursor = self._db.execute(statement.encode(), (self.space,))
        return cursor.fetchall() if cursor.description else []

    def close(self) -> None:
        self._db.close()


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setattr("fencepost.flows.ring.ECHO", 3600.0)
    lab = Lab()
    yield lab
    lab.close()


@contextmanager
def ringing(lab: Lab, fired: list[str], *, asyncio_face: bool) -> Iterator[None]:
    """An instance of either face that fires alarms, as soon as it listens."""

    async def run() -> None:
        async with AsyncFencepost(lab.url, namespace=lab.space) as fp:
            fp._scheduling.pace = NEVER
            fp.alarm("kind")(lambda alarm: fired.append(alarm.key))
            loop = asyncio.get_running_loop()
            stops.append(lambda: loop.call_soon_threadsafe(lambda: fp.stop(grace=0)))
            await fp.run(signals=False)

    stops: list[object] = []
    if asyncio_face:
        thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
        thread.start()
        try:
            until(lab.listening)
            yield
        finally:
            stops[0]()  # type: ignore[operator]
            thread.join(PATIENCE)
            assert not thread.is_alive()
        return
    with lab.fencepost() as fp:
        fp.alarm("kind")(lambda alarm: fired.append(alarm.key))
        with serving(fp):
            until(lab.listening)
            yield


def pending(fp: Fencepost, job: str, *, wait: bool = False) -> None:
    """Have a run of a job on record that is due, or one that waits for its lock."""
    serving, ledger = fp._scheduling.serving, fp._working.ledger
    key = RunKey(job, int(time.time()))
    want = serving.want(Asked(key, job, "nonce", "schedule", 0, ""))
    assert want is not None
    claimed = finish(ledger.claim(want))
    run = claimed.run
    assert run is not None
    if wait:
        assert claimed.verdict is Verdict.LATER
    else:
        attempt = Attempt(key, run.token, run.holder.nonce, run.lease)
        finish(ledger.finish(attempt, Settled(State.PENDING, "released")))


@pytest.mark.parametrize("asyncio_face", [False, True], ids=["blocking", "asyncio"])
def test_an_alarm_that_another_process_sets_is_fired_at_once(
    lab: Lab, *, asyncio_face: bool
) -> None:
    fired: list[str] = []
    with ringing(lab, fired, asyncio_face=asyncio_face):
        for key in ("first", "second", "third"):  # the first may still be found by looking
            lab.set_elsewhere(key)
            until(lambda key=key: key in fired)  # type: ignore[misc]
    until(lambda: not lab.listening())


def test_a_run_that_waits_begins_when_another_process_ends_what_is_in_its_way(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticking, "_LONGEST_WAIT", 3600.0)
    begun, let_go = threading.Event(), threading.Event()
    with lab.fencepost() as one, lab.fencepost() as other:

        @one.job("first", lock="shared")
        def first() -> None:
            begun.set()
            assert let_go.wait(PATIENCE)

        ran = threading.Event()
        other.job("second", lock="shared", overlap="reschedule")(ran.set)
        triggers = threading.Thread(target=lambda: one.trigger("first", manual=True))
        triggers.start()
        assert begun.wait(PATIENCE)
        pending(other, "second", wait=True)
        # It has waited for a long time, so it will not be looked at for a long time.
        lab.execute(
            "UPDATE fencepost_run SET created_at = created_at - 28800"
            " WHERE namespace = %s AND state = 'pending'"
        )
        with serving(other):
            until(lab.listening)
            until(lambda: _waiting(lab, at_least=600))
            assert not ran.is_set()
            let_go.set()
            assert ran.wait(PATIENCE)
            triggers.join(PATIENCE)
            until(lambda: other.runs("second")[0].state is State.SUCCEEDED)


def _waiting(lab: Lab, *, at_least: float) -> bool:
    later = f"extract(epoch FROM now()) + {at_least}"
    found = lab.execute(
        "SELECT 1 FROM fencepost_run"
        f" WHERE namespace = %s AND state = 'pending' AND not_before > {later}"
    )
    return bool(found)


def test_what_a_stopping_instance_gives_back_goes_on_elsewhere_at_once(lab: Lab) -> None:
    places: list[str] = []
    begun, stop = threading.Event(), threading.Event()

    def declare(fp: Fencepost, name: str) -> None:
        @fp.job("job")
        def job(run: object) -> None:
            places.append(name)
            begun.set()
            while name == "one" and not stop.is_set():
                run.check()  # type: ignore[attr-defined]
                stop.wait(0.01)

    with lab.fencepost() as one, lab.fencepost() as other:
        declare(one, "one")
        declare(other, "other")
        pending(one, "job")
        with serving(one):
            assert begun.wait(PATIENCE)
            with serving(other):
                until(lambda: len(lab.listening()) == 2)
                one.stop(grace=0)
                until(lambda: places == ["one", "other"])
                stop.set()


def test_a_run_that_is_cancelled_elsewhere_hears_of_it_at_once(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fencepost.flows.keep.LONGEST_SILENCE", 3600.0)
    begun, heard, over = threading.Event(), threading.Event(), threading.Event()
    with lab.fencepost() as fp, lab.fencepost() as operator:

        @fp.job("long", lease="1h")
        def long(run: object) -> None:
            begun.set()
            try:
                while not over.is_set():
                    run.check()  # type: ignore[attr-defined]
                    over.wait(0.01)
            except RunCancelled:
                heard.set()
                raise

        pending(fp, "long")
        with serving(fp):
            assert begun.wait(PATIENCE)
            until(lab.listening)
            operator.cancel(str(fp.runs("long")[0].key))
            assert heard.wait(PATIENCE)
            until(lambda: fp.runs("long")[0].state is State.CANCELLED)
            over.set()


def test_a_backfill_that_is_left_to_instances_begins_at_once(lab: Lab) -> None:
    ran: list[int] = []
    with lab.fencepost() as fp, lab.fencepost() as operator:
        for each in (fp, operator):
            each.job("daily", cron="0 0 * * *", catchup="none")(lambda: ran.append(1))
        with serving(fp):
            until(lab.listening)
            for days in range(1, 4):  # the first may still be found by looking
                day = datetime(2026, 1, 10 * days, tzinfo=UTC)
                operator.backfill("daily", day, day + timedelta(days=2), wait=False)
                until(lambda days=days: len(ran) == 2 * days)  # type: ignore[misc]


def test_a_session_that_was_cut_is_opened_anew_and_nothing_said_meanwhile_is_missed(
    lab: Lab,
) -> None:
    fired: list[str] = []
    with ringing(lab, fired, asyncio_face=False):
        for number in range(3):
            cut = lab.cut()
            lab.set_elsewhere(f"before {number}")  # perhaps nobody listens now
            until(lambda number=number: f"before {number}" in fired)  # type: ignore[misc]
            until(lambda cut=cut: lab.listening() - cut)  # type: ignore[misc]
            lab.set_elsewhere(f"after {number}")
            until(lambda number=number: f"after {number}" in fired)  # type: ignore[misc]


def test_an_instance_that_cannot_listen_any_more_looks(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_ear, "_FIRST_PAUSE", 3600.0)
    fired: list[str] = []
    with lab.fencepost(QUICK) as fp:
        fp.alarm("kind")(lambda alarm: fired.append(alarm.key))
        with serving(fp):
            until(lab.listening)
            lab.cut()
            until(lambda: not lab.listening())
            lab.set_elsewhere("unheard")
            until(lambda: fired == ["unheard"])
            assert not lab.listening()


def test_behind_a_pooler_nobody_listens_and_everything_is_found(lab: Lab) -> None:
    if not _POOLERS:
        _POOLERS.append(PgBouncer.before(shared(QuickPostgres).port))
    url = shared(_POOLERS[0]).url("notify")
    begun, let_go, ran = threading.Event(), threading.Event(), threading.Event()
    fired: list[str] = []
    with lab.fencepost(QUICK, url=url) as fp, lab.fencepost(QUICK, url=url) as other:

        @other.job("first", lock="shared")
        def first() -> None:
            begun.set()
            assert let_go.wait(PATIENCE)

        fp.job("second", lock="shared", overlap="reschedule")(ran.set)
        fp.alarm("kind")(lambda alarm: fired.append(alarm.key))
        triggers = threading.Thread(target=lambda: other.trigger("first", manual=True))
        triggers.start()
        assert begun.wait(PATIENCE)
        pending(fp, "second", wait=True)
        with serving(fp):
            other.alarms.set("kind", "key", in_="0s")
            until(lambda: fired == ["key"])
            let_go.set()
            assert ran.wait(PATIENCE)
            triggers.join(PATIENCE)
            assert not [each for each in threading.enumerate() if each.name == "fencepost-ear"]
            assert not lab.listening()


# The ear itself.


@contextmanager
def ear(lab: Lab, words: list[str]) -> Iterator[tuple[Ear, Fencepost]]:
    with lab.fencepost() as fp:
        ear = fp._scheduling.planner.listen(words.append)
        assert isinstance(ear, Ear)
        try:
            yield ear, fp
        finally:
            ear.close()


def test_a_forked_child_neither_hears_nor_keeps_what_its_parent_listens_with(lab: Lab) -> None:
    words: list[str] = []
    with ear(lab, words) as (ours, fp):
        until(lambda: words == [""])
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            ours.close()  # it is the parent's
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
        os.close(reader)
        try:
            fp.alarms.set("kind", "key", in_="0s")
            until(lambda: words == ["", "alarm"])
            ours.close()
            until(lambda: not lab.listening())  # though the child lives
        finally:
            os.close(writer)
            os.waitpid(child, 0)


def test_a_server_that_ends_each_session_at_once_is_asked_less_and_less(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    tried = threading.Event()

    def pause(_: Ear, seconds: float, *sockets: int) -> bool:
        if sockets:
            lab.cut()
            return True
        if seconds > postgres_ear._BREATH:
            pauses.append(seconds)
            if len(pauses) == 8:
                tried.set()
                over.wait(PATIENCE)
        return False

    over = threading.Event()
    monkeypatch.setattr(Ear, "_wait", pause)
    with ear(lab, []):
        try:
            assert tried.wait(PATIENCE)
        finally:
            over.set()
    assert pauses[-1] > 10 * pauses[0] * 0.5
    assert all(seconds <= 1.5 * postgres_ear._LONGEST_PAUSE for seconds in pauses)
