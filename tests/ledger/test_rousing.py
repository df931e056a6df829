"""Who makes work that instances would find later than they could says so, and nobody else does."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import psycopg
import pytest
from ledgerlab import DONE, attempt_of, wanted
from test_postgres_ledger import _want

from fencepost.ledger.alarm_open import alarms_of
from fencepost.ledger.api import NOTHING, Attempt
from fencepost.ledger.planning import ALARM, DUE, Ask, End, Instance, Lane, cancel_word
from fencepost.ledger.postgres_alarm_rows import place_of
from fencepost.ledger.postgres_rousing import channel_of
from fencepost.model.alarm import Setting
from fencepost.model.claim import Verdict
from fencepost.model.definition import Definition
from fencepost.model.ending import Settled
from fencepost.model.every import Every
from fencepost.model.policy import Overlap, Policy
from fencepost.model.run import State
from fencepost.model.schedule import spec_of
from fencepost.model.slot import RunKey
from fencepost.world.flow import finish
from fencepost.world.postgres_session import Session, Statement
from joinlab import until
from pglab import QuickPostgres, fresh_namespace, opened_postgres
from servers import shared

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from fencepost.ledger.postgres import PostgresLedger
    from fencepost.model.run import RunRecord

PATIENT = Policy(overlap=Overlap.RESCHEDULE)
WAITED_FOR, WAITS = RunKey("job", 1), RunKey("job", 2)
HERE = Instance("i", "here", 1, "1.0")
SOON, LATE = spec_of(Every(1)), spec_of(Every(86_400))
GAVE_BACK = Settled(State.PENDING, "released")
BLOCKED = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = 'rousing'"
# What a set of a new key does, but for its commit.
SET_ALIKE = """
INSERT INTO fencepost_alarm
SELECT (jsonb_populate_record(alarm, jsonb_build_object('place', %s::text, 'key', %s::text))).*
  FROM fencepost_alarm AS alarm
 WHERE namespace = %s AND key = %s"""
CALLS = """
SELECT coalesce(sum(calls), 0)::bigint FROM pg_stat_user_functions WHERE funcname = %s"""


@pytest.fixture
def url() -> str:
    server = shared(QuickPostgres)
    url = server.database("rousing")
    server.run("ALTER DATABASE rousing SET track_functions = 'all'")
    return url


@pytest.fixture
def ledger(url: str) -> Iterator[PostgresLedger]:
    # Without a pulse: nobody who waits has to find out first whether somebody lives.
    space = f"{fresh_namespace()}-{time.time_ns()}"
    ledger = opened_postgres(f"{url}?advisory=off", namespace=space)
    finish(ledger.jobs())
    yield ledger
    finish(ledger.close())


class Heard:
    """What is said to the instances of a ledger; the server tells it in the order of commits."""

    def __init__(self, url: str, ledger: PostgresLedger) -> None:
        self._db = psycopg.connect(url, autocommit=True)
        self._channel = channel_of("public", ledger.namespace)
        self._db.execute(f'LISTEN "{self._channel}"'.encode())

    def words(self) -> list[str]:
        """Return all that was said since the last time: up to a word of our own."""
        self._db.execute("SELECT pg_notify(%s, 'until here')", (self._channel,))
        found = [said.payload for said in self._db.notifies(timeout=30, stop_after=1)]
        while found[-1] != "until here":
            found += [said.payload for said in self._db.notifies(timeout=30, stop_after=1)]
        return found[:-1]

    def close(self) -> None:
        self._db.close()


@pytest.fixture
def heard(url: str, ledger: PostgresLedger) -> Iterator[Heard]:
    heard = Heard(url, ledger)
    yield heard
    heard.close()


def begun(ledger: PostgresLedger, key: RunKey = WAITED_FOR, *, lock: str = "") -> RunRecord:
    claimed = finish(ledger.claim(wanted(key, f"nonce of {key}", PATIENT, lock=lock)))
    assert claimed.verdict is Verdict.GO
    assert claimed.run is not None
    return claimed.run


def waits(ledger: PostgresLedger, key: RunKey = WAITS, *, lock: str = "") -> None:
    claimed = finish(ledger.claim(wanted(key, f"nonce of {key}", PATIENT, lock=lock)))
    assert claimed.verdict is Verdict.LATER


def put_off(url: str, ledger: PostgresLedger, key: RunKey) -> None:
    """Have a run looked at again in an hour, as if it had waited for very long."""
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(
            "UPDATE fencepost_run SET not_before = extract(epoch FROM now()) + 3600"
            " WHERE namespace = %s AND job = %s AND slot = %s",
            (ledger.namespace, key.job, key.slot),
        )


def said_by(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the statements that this process sends from now on."""
    sent: list[str] = []
    send, batch = Session.send, Session.batch

    def sends(session: Session, statement: Statement, *args: Any, **words: Any) -> None:
        sent.append(statement.text)
        send(session, statement, *args, **words)

    def sends_many(session: Session, steps: list[Any], **words: Any) -> object:
        sent.extend(statement.text for statement, _ in steps)
        return batch(session, steps, **words)

    monkeypatch.setattr(Session, "send", sends)
    monkeypatch.setattr(Session, "batch", sends_many)
    return sent


def put_off_for(ledger: PostgresLedger, key: RunKey) -> float:
    run = finish(ledger.find(key))
    assert run is not None
    return run.not_before - time.time()


def end_of(run: RunRecord, settled: Settled = DONE) -> End:
    holder = run.holder
    return End(Attempt(run.key, run.token, holder.nonce, run.lease, str(holder)), settled, NOTHING)


# What is plain.


def test_a_plain_run_says_nothing_and_calls_nothing_that_would(
    url: str, ledger: PostgresLedger, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = said_by(monkeypatch)
    with psycopg.connect(url, autocommit=True) as db:
        left, roused = (calls(db, f"fencepost_run_{name}") for name in ("left", "awaited"))
    ran = 0
    for slot in range(1, 4):
        run = begun(ledger, RunKey("plain", slot))
        attempt = end_of(run).attempt
        finish(ledger.beat(attempt, ttl=30.0))
        finish(ledger.save(attempt, checkpoint="1"))
        finish(ledger.finish(attempt, DONE))
        ran += 1
    planner = ledger.planner
    finish(planner.announce(HERE, [Definition("due", SOON)]))
    assert heard.words() == [DUE]  # there it is, and so soon; from now on it is due by its time
    sent.clear()
    for number in range(2):
        until(lambda: _is_due(ledger, "due"))
        ticked = finish(planner.tick(Ask(_want, f"{number}", 9, sweep=True)))
        assert len(ticked.begun) == 1
        ends = [End(attempt_of(one.claimed), DONE, NOTHING) for one in ticked.begun]
        finish(planner.tick(Ask(_want, f"end {number}", 9, ends, stirs=frozenset({"due"}))))
        finish(planner.attend(HERE))
        ran += 1
    assert heard.words() == []
    assert not [text for text in sent if "pg_notify" in text or "awaited" in text]
    finish(ledger.close())  # what a session has counted is told at its end
    with psycopg.connect(url, autocommit=True) as db:
        until(lambda: calls(db, "fencepost_run_obeys") >= left + ran)
        assert calls(db, "fencepost_run_awaited") == roused


def calls(db: psycopg.Connection, function: str) -> int:
    """Return how often a function was called in the database."""
    found: int = db.execute(CALLS, (function,)).fetchall()[0][0]
    return found


def _is_due(ledger: PostgresLedger, job: str) -> bool:
    record = finish(ledger.planner.job(job))
    return record is not None and record.next_due is not None and record.next_due <= time.time()


# Ends that something waits for.


@pytest.mark.parametrize("by", ["itself", "a tick", "a draft", "force"])
def test_the_end_of_a_run_calls_the_first_that_waits_for_its_lock(
    url: str, ledger: PostgresLedger, heard: Heard, by: str
) -> None:
    run = begun(ledger)
    waits(ledger)
    waits(ledger, RunKey("other", 3), lock="job")
    put_off(url, ledger, WAITS)
    put_off(url, ledger, RunKey("other", 3))
    assert heard.words() == []
    end = end_of(run)
    if by == "itself":
        finish(ledger.finish(end.attempt, DONE))
    elif by == "a tick":
        finish(ledger.planner.tick(Ask(lambda _: None, "t", 0, [end])))
    elif by == "a draft":
        report = NOTHING._replace(done=1)
        finish(ledger.finish(end.attempt, DONE, report=report))
    else:
        finish(ledger.cancel(run.key, force=True, operator="olga"))
    words = heard.words()
    assert words.count(DUE) == 1
    assert put_off_for(ledger, WAITS) <= 0
    assert put_off_for(ledger, RunKey("other", 3)) > 1000


def test_one_who_waits_after_a_retry_is_called_at_the_end_all_the_same(
    url: str, ledger: PostgresLedger, heard: Heard
) -> None:
    run = begun(ledger)
    waits(ledger)
    again = Settled(State.WAITING_RETRY, "error", error="no", pause=0.0)
    finish(ledger.finish(end_of(run).attempt, again))
    heard.words()
    second = finish(ledger.claim(wanted(WAITED_FOR, "second", PATIENT)))
    put_off(url, ledger, WAITS)
    finish(ledger.finish(attempt_of(second), DONE))
    assert heard.words() == [DUE]
    assert put_off_for(ledger, WAITS) <= 0


def test_a_run_that_is_given_back_is_told_of(ledger: PostgresLedger, heard: Heard) -> None:
    finish(ledger.finish(end_of(begun(ledger)).attempt, GAVE_BACK))
    assert heard.words() == [DUE]


def test_who_is_put_off_by_a_catch_up_is_called_too(
    url: str, ledger: PostgresLedger, heard: Heard
) -> None:
    """A job that owes slots, and a range to be made up, look again in a second: or now."""
    planner = ledger.planner
    finish(planner.announce(HERE, [Definition("job", LATE)]))
    lane = finish(planner.backfill(Lane(0, "job", 0, 86_401, 0)))
    run = begun(ledger)
    waits(ledger)
    with psycopg.connect(url, autocommit=True) as db:
        soon = "extract(epoch FROM clock_timestamp()) + 0.9"
        for change in (
            f"UPDATE fencepost_job SET owed = 1, next_due = {soon} WHERE namespace = %s",
            f"UPDATE fencepost_lane SET not_before = {soon} WHERE namespace = %s",
        ):
            db.execute(change.encode(), (ledger.namespace,))
        finish(ledger.finish(end_of(run).attempt, DONE))
        at = db.execute("SELECT extract(epoch FROM clock_timestamp())::float8").fetchall()[0][0]
    job, lane = finish(planner.job("job")), finish(planner.lane(lane.number)) or lane
    assert job is not None
    assert job.next_due is not None
    ended = finish(ledger.find(run.key))
    assert ended is not None
    assert ended.ended_at - 0.1 <= job.next_due <= at
    assert ended.ended_at - 0.1 <= lane.not_before <= at


def test_who_gives_back_what_others_wait_for_may_put_them_off_in_the_same_transaction(
    ledger: PostgresLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both write about one range, and it is decided once."""
    planner, now = ledger.planner, int(time.time())
    finish(planner.announce(HERE, [Definition("made up", LATE)]))
    lane = Lane(0, "made up", now - 200_000, now, now - 200_000)
    finish(planner.backfill(lane))
    (one,) = finish(planner.tick(Ask(_want, "first", 1))).begun
    assert one.claimed.run is not None
    assert one.claimed.run.trigger == "backfill"
    key = one.claimed.run.key
    waits(ledger, RunKey("other", 1), lock=one.claimed.run.lock)
    tries: list[object] = []
    monkeypatch.setattr(
        ledger, "drafted", lambda work, *, then: decided(type(ledger), ledger, work, then, tries)
    )
    for number in range(2):  # a range that was put off is not due in its next second
        finish(planner.tick(Ask(_want, f"off {number}", 1, only="made up")))
    tries.clear()
    ends = [End(attempt_of(one.claimed), GAVE_BACK, NOTHING)]
    ticked = finish(planner.tick(Ask(_want, "back", 0, ends, sweep=True)))
    assert [getattr(run, "state", run) for run in ticked.ended] == [State.PENDING]
    assert len(tries) == 1
    found = finish(ledger.find(key))
    assert found is not None
    assert found.state is State.PENDING


def decided(kind: Any, ledger: Any, work: Any, then: Any, tries: list[object]) -> Any:
    def counted(draft: object) -> object:
        tries.append(draft)
        return work(draft)

    return kind.drafted(ledger, counted, then=then)


def test_who_begins_to_wait_for_a_run_that_is_just_ending_has_its_lock(
    url: str, ledger: PostgresLedger
) -> None:
    run = begun(ledger)
    answers: list[Verdict] = []

    def claim() -> None:
        answers.append(finish(ledger.claim(wanted(WAITS, "late", PATIENT))).verdict)

    with psycopg.connect(url) as ending, psycopg.connect(url, autocommit=True) as db:
        ending.execute(
            "UPDATE fencepost_run SET state = 'succeeded' WHERE namespace = %s AND token = %s",
            (ledger.namespace, run.token),
        )
        claimer = threading.Thread(target=claim)
        claimer.start()
        until(lambda: db.execute(BLOCKED).fetchall())
        ending.commit()
        claimer.join(30)
    assert answers == [Verdict.GO]


# What operators and others ask for.


def test_a_cancel_says_whom_it_is_for_and_gives_nothing_away(
    ledger: PostgresLedger, heard: Heard
) -> None:
    run = begun(ledger)
    finish(ledger.cancel(run.key, force=False, operator="olga"))
    (word,) = heard.words()
    assert word == cancel_word(run.holder.nonce)
    assert run.holder.nonce not in word
    waiting = RunKey("job", 2)
    waits(ledger, waiting)
    finish(ledger.cancel(waiting, force=False, operator="olga"))
    assert heard.words() == []


def test_only_work_that_is_due_before_the_next_look_is_told_of(
    ledger: PostgresLedger, heard: Heard
) -> None:
    planner = ledger.planner
    finish(planner.announce(HERE, [Definition("a", LATE), Definition("plain", LATE)]))
    assert heard.words() == []
    finish(planner.store([Definition("stored", LATE, template="plain")]))
    assert heard.words() == []
    finish(planner.store([Definition("soon", SOON, template="plain")]))
    assert heard.words() == [DUE]
    finish(planner.pause("a", reason="why not"))
    assert heard.words() == []
    lane = finish(planner.backfill(Lane(0, "a", 0, 86_401, 0)))
    assert heard.words() == [DUE]
    finish(planner.tick(Ask(_want, "t", 9)))  # it is paused, and looked at again in a second
    finish(planner.resume("a"))
    assert heard.words() == [DUE]
    finish(planner.stop_lane(lane.number, reason="enough"))
    finish(planner.retire("a", reason="enough"))
    finish(planner.attend(HERE))
    finish(planner.depart(HERE))
    assert heard.words() == []


def test_an_alarm_is_told_of_if_it_is_due_before_the_next_look(
    ledger: PostgresLedger, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = alarms_of(ledger._world, ledger)
    finish(book.set(Setting("kind", "late", "call", after=60.0)))
    assert heard.words() == []
    finish(book.set(Setting("kind", "soon", "call", after=0.5)))
    assert heard.words() == [ALARM]
    finish(book.clear("kind", "soon"))
    assert heard.words() == []
    monkeypatch.setattr("fencepost.ledger.draft_alarms._SELDOM", 3600.0)
    other = alarms_of(ledger._world, ledger)
    for number in range(5):
        finish(other.set(Setting("kind", f"many {number}", "call", after=0.0)))
    assert heard.words() == [ALARM]


def test_an_alarm_is_told_of_though_somebody_else_was_faster_to_set_it(
    url: str, ledger: PostgresLedger, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is undone and done again says what it would have said the first time."""
    monkeypatch.setattr("fencepost.ledger.draft_alarms._SELDOM", 3600.0)
    book = alarms_of(ledger._world, ledger)
    finish(book.set(Setting("kind", "late", "call", after=60.0)))
    place = "\\x" + place_of(ledger.namespace, "kind", "soon").hex()
    with psycopg.connect(url) as faster:
        faster.execute(SET_ALIKE, (place, "soon", ledger.namespace, "late"))
        asked = Setting("kind", "soon", "another call", after=0.0)
        setting = threading.Thread(target=lambda: finish(book.set(asked)))
        setting.start()
        with psycopg.connect(url, autocommit=True) as watching:
            until(lambda: watching.execute(BLOCKED).fetchall())
    setting.join()
    assert heard.words() == [ALARM]


def test_where_nobody_reads_what_is_said_nothing_more_is(
    url: str, ledger: PostgresLedger, heard: Heard
) -> None:
    """A server whose queue is full would refuse the commit."""
    shared(QuickPostgres).database("deaf")
    server = shared(QuickPostgres)
    server.run("ALTER DATABASE deaf SET search_path = deaf, public, pg_catalog")
    server.run("CREATE SCHEMA IF NOT EXISTS deaf", database="deaf")
    server.run(
        "CREATE OR REPLACE FUNCTION deaf.pg_notification_queue_usage() RETURNS double precision"
        " LANGUAGE sql AS 'SELECT 0.6::double precision'",
        database="deaf",
    )
    url = server.url("deaf")
    full = opened_postgres(f"{url}?advisory=off", namespace=ledger.namespace)
    said = Heard(url, full)
    try:
        run = begun(full)
        waits(full)
        finish(full.cancel(run.key, force=False, operator="olga"))
        finish(full.finish(end_of(run).attempt, DONE))
        assert put_off_for(full, WAITS) <= 0
        assert said.words() == []
    finally:
        said.close()
        finish(full.close())


def test_a_ledger_from_before_there_were_words_is_brought_up_to_date() -> None:
    fields = {"namespace": f"{fresh_namespace()}-{time.time_ns()}"}
    server = shared(QuickPostgres)
    url = server.database("before")
    old = opened_postgres(f"{url}?advisory=off", **fields)
    run = begun(old)
    finish(old.close())
    for change in (
        "DROP TRIGGER fencepost_run_awaited ON fencepost_run",
        "DROP FUNCTION fencepost_run_awaited",
        "ALTER TABLE fencepost_run DROP COLUMN awaited",
        "UPDATE fencepost_schema SET version = 2 WHERE part = 'ledger'",
    ):
        server.run(change, database="before")
    new = opened_postgres(f"{url}?advisory=off", **fields)
    waits(new)
    put_off(url, new, WAITS)
    finish(new.finish(end_of(run).attempt, DONE))
    assert put_off_for(new, WAITS) <= 0
    finish(new.close())


def test_the_channel_of_any_namespace_is_a_name_that_the_server_takes_as_it_is() -> None:
    names = {channel_of(schema, space) for schema in ("a", "b" * 63) for space in ("", "x" * 999)}
    assert len(names) == 4
    assert all(len(name) < 64 and name.replace("_", "").isalnum() for name in names)
