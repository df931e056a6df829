"""What is usual is one statement on PostgreSQL; whatever is not so is decided as ever."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING

import psycopg
import pytest
from ledgerlab import DONE, attempt_of, run_through, wanted
from test_postgres_ledger import Trips, _want

from fencepost.ledger.api import NOTHING, Report
from fencepost.ledger.planning import Ask, End, Instance
from fencepost.model.claim import Verdict
from fencepost.model.definition import Definition
from fencepost.model.ending import Settled
from fencepost.model.every import At, Every
from fencepost.model.lease import Holder
from fencepost.model.run import RunRecord, State
from fencepost.model.schedule import spec_of
from fencepost.model.slot import RunKey
from fencepost.world.flow import finish
from joinlab import until
from pglab import QuickPostgres, fresh_namespace, opened_postgres
from servers import shared

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fencepost.ledger.postgres import PostgresLedger

HISTORY = """
INSERT INTO fencepost_run
SELECT namespace, job, slot + i, manual, rerun, 'succeeded', lock, lease, token, nonce, host, pid,
       version, reason, blocker, origin, created_at, started_at, ended_at, not_before, beat_at,
       cancel_at, starts, losses, releases, streak, strikes, solitary, checkpoint, done, total,
       result, error, saves, epoch
  FROM fencepost_run, generate_series(1, 20000) AS i
 WHERE namespace = %s AND slot = 1 AND job = 'old'"""
LEASES = """
INSERT INTO fencepost_lease (key, namespace, name, token, nonce, held, expires_us, ttl_us, since_us)
SELECT sha256(convert_to(i::text, 'UTF8')), namespace, i::text, token, '', FALSE, 0, 0, 0
  FROM fencepost_lease, generate_series(1, 20000) AS i
 WHERE namespace = %s AND name = 'old'"""
READ = """
SELECT coalesce(sum(seq_tup_read), 0)::bigint + coalesce(sum(idx_tup_fetch), 0)::bigint
  FROM pg_stat_user_tables WHERE relname LIKE 'fencepost_%%'"""


@pytest.fixture
def url() -> str:
    return shared(QuickPostgres).database("usual")


@pytest.fixture
def ledger(url: str) -> Iterator[PostgresLedger]:
    ledger = opened_postgres(url, namespace=f"{fresh_namespace()}-{time.time_ns()}")
    finish(ledger.jobs())
    yield ledger
    finish(ledger.close())


def test_who_finds_a_lock_taken_pays_for_it_once(
    ledger: PostgresLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    for slot in (1, 2):  # until everything is prepared
        finish(
            ledger.finish(attempt_of(finish(ledger.claim(wanted(RunKey("job", slot), "a")))), DONE)
        )
        finish(ledger.claim(wanted(RunKey("job", slot), "b")))
    finish(ledger.claim(wanted(RunKey("job", 3), "holder")))
    trips = Trips(monkeypatch)
    refused = finish(ledger.claim(wanted(RunKey("other", 1), "late", lock="job")))
    assert (refused.verdict, trips.cost()) == (Verdict.ENDED, 3)
    again = finish(ledger.claim(wanted(RunKey("other", 1), "later", lock="job")))
    assert (again.verdict, trips.cost()) == (Verdict.ENDED, 2)


def test_only_who_asks_at_another_time_pays_for_the_ledgers_clock(
    ledger: PostgresLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = attempt_of(finish(ledger.claim(wanted(RunKey("job", 1), "a"))))
    finish(ledger.finish(first, DONE))
    now = finish(ledger.now())
    usual = wanted(RunKey("job", 2), "usual")._replace(since=now - 2, until=now + 3600)
    early = wanted(RunKey("job", 3), "early")._replace(since=now + 1800)
    late = wanted(RunKey("job", 4), "late")._replace(until=now - 1800)
    trips = Trips(monkeypatch)
    claimed = finish(ledger.claim(usual))
    assert (claimed.verdict, trips.cost()) == (Verdict.GO, 1)
    assert now <= claimed.now < now + 60
    finish(ledger.finish(attempt_of(claimed), DONE))
    assert trips.cost() == 1
    for want in (early, late):
        refused = finish(ledger.claim(want))
        assert (refused.verdict, refused.run, trips.cost()) == (Verdict.OTHER_TIME, None, 3)
        assert now <= refused.now < now + 60
    assert len(finish(ledger.runs())) == 2


def test_a_plain_lock_keeps_a_run_from_being_claimed(ledger: PostgresLedger) -> None:
    finish(ledger.leases.acquire("job", holder=Holder("plain", "here", 1), ttl=30.0))
    claimed = finish(ledger.claim(wanted(RunKey("job", 1), "run")))
    assert (claimed.verdict, claimed.grant) == (Verdict.ENDED, None)
    assert claimed.run is not None
    assert claimed.run.reason == "lock_held"
    finish(ledger.leases.release("job", nonce="plain"))
    free = finish(ledger.claim(wanted(RunKey("job", 2), "next")))
    assert free.verdict is Verdict.GO


def test_ends_of_a_tick_are_told_apart(ledger: PostgresLedger) -> None:
    """A stale one is refused, a repeated one is answered as before, the others end."""
    attempts = [
        attempt_of(finish(ledger.claim(wanted(RunKey(job, 1), job)))) for job in ("a", "b", "c")
    ]
    finish(ledger.finish(attempts[0], DONE))
    stale = attempts[1]._replace(token=attempts[1].token - 1)
    ends = [End(attempt, DONE, NOTHING) for attempt in (attempts[0], stale, attempts[2])]
    told = finish(ledger.planner.tick(Ask(_want, "ends", 0, ends))).ended
    assert [getattr(one, "state", type(one).__name__) for one in told] == [
        State.SUCCEEDED,
        "RunLost",
        State.SUCCEEDED,
    ]
    running = finish(ledger.find(attempts[1].key))
    assert running is not None
    assert running.state is State.RUNNING


def test_an_end_answers_with_what_has_changed_since_the_claim(ledger: PostgresLedger) -> None:
    """By the attempt itself or by who cancels it, and however many end at once."""
    runs = {}
    for job in ("alone", "first", "second"):
        attempt = attempt_of(finish(ledger.claim(wanted(RunKey(job, 1), job))))
        finish(ledger.save(attempt, checkpoint='"half"', order=1, report=Report(3, 7)))
        finish(ledger.cancel(attempt.key, force=False, operator="me"))
        runs[job] = attempt
    failed = Settled(State.FAILED, "error", error="a \0 in it")
    alone = finish(ledger.finish(runs["alone"], failed))
    ends = [End(runs["first"], failed, NOTHING), End(runs["second"], DONE, NOTHING)]
    told = finish(ledger.planner.tick(Ask(_want, "ends", 0, ends))).ended
    for ended in (alone, *told):
        assert isinstance(ended, RunRecord)
        assert (ended.checkpoint, ended.done, ended.total, ended.saves) == ('"half"', 3, 7, 1)
        assert ended.cancel_at
        assert finish(ledger.find(ended.key)) == ended


def test_an_attempt_that_does_not_know_its_record_ends_all_the_same(ledger: PostgresLedger) -> None:
    for job in ("alone", "ticked"):
        attempt = attempt_of(finish(ledger.claim(wanted(RunKey(job, 1), job))))._replace(run=None)
        if job == "alone":
            ended = finish(ledger.finish(attempt, DONE))
        else:
            ask = Ask(_want, "ends", 0, [End(attempt, DONE, NOTHING)])
            (ended,) = finish(ledger.planner.tick(ask)).ended  # type: ignore[assignment]
        assert ended == finish(ledger.find(attempt.key))


def test_a_tick_leaves_nothing_to_the_collector_of_cycles(ledger: PostgresLedger) -> None:
    """What it has read goes at once: hundreds of runs a tick would keep the collector busy."""
    planner, names = ledger.planner, [f"job {number}" for number in range(100)]
    at = int(time.time()) + 1
    finish(planner.store([Definition(name, spec_of(At(at))) for name in names]))
    until(lambda: time.time() > at)
    gc.collect()
    gc.disable()
    try:
        begun = finish(planner.tick(Ask(_want, "tick", 100))).begun
        ended = [End(attempt_of(one.claimed), DONE, NOTHING) for one in begun]
        finish(planner.tick(Ask(_want, "end", 0, ended)))
        assert len(ended) == 100
        del begun, ended
        assert gc.collect() < 100
    finally:
        gc.enable()


def test_plans_that_were_made_while_tables_were_small_do_not_read_large_ones(
    url: str, ledger: PostgresLedger
) -> None:
    database = url.partition("?")[0]
    with psycopg.connect(database, autocommit=True) as db:
        for table in ("run", "job", "lease"):
            db.execute(f"ALTER TABLE fencepost_{table} SET (autovacuum_enabled = off)".encode())
        planner, names = ledger.planner, [f"job {number}" for number in range(50)]
        due = [Definition(name, spec_of(Every(1))) for name in names]
        finish(planner.announce(Instance("i", "here", 1, "1.0"), due))
        run_through(ledger, RunKey("old", 1), "o")
        read = 0
        for number in range(8):  # plans are kept from the sixth time on
            if number == 7:
                db.execute("SET session_replication_role = replica")  # made up, not lived
                db.execute(HISTORY, (ledger.namespace,))
                db.execute(LEASES, (ledger.namespace,))
                read = settled(db)
            finish(ledger._world.sleep(1.01))
            begun = finish(planner.tick(Ask(_want, f"tick {number} ", 50))).begun
            assert len(begun) == 50
            ended = [End(attempt_of(one.claimed), DONE, NOTHING) for one in begun]
            finish(planner.tick(Ask(_want, f"end {number} ", 0, ended)))
            run_through(ledger, RunKey("one", number), "n")
        finish(ledger.close())  # what it has counted is told when a session ends
        assert settled(db) - read < 5_000


def settled(db: psycopg.Connection) -> int:
    """Return how many rows were read, once that no longer changes."""
    before = -1
    while True:
        time.sleep(0.3)
        db.execute("SELECT pg_stat_clear_snapshot()")
        ((found,),) = db.execute(READ.replace("%%", "%")).fetchall()
        if found == before:
            return before
        before = found
