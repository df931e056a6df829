"""What is the PostgreSQL ledger's own: what the server refuses, what a verb costs, lost replies."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import psycopg
import pytest
from ledgerlab import DONE, attempt_of, claimed, every_verb, run_through, wanted

from fencepost.errors import (
    BadName,
    FencepostError,
    LeaseLost,
    Misuse,
    OutcomeUnknown,
    RunLost,
    StoreUnavailable,
)
from fencepost.ledger.api import NOTHING, Report
from fencepost.ledger.planning import Ask, Asked, End, Instance
from fencepost.ledger.postgres_rows import TURN
from fencepost.ledger.postgres_schema import PART, STEPS
from fencepost.model.claim import Verdict, Want
from fencepost.model.definition import Definition
from fencepost.model.ending import Settled
from fencepost.model.item import Found
from fencepost.model.lease import Holder
from fencepost.model.policy import Policy
from fencepost.model.run import FIRST, TABLE, RunRecord, State, legal
from fencepost.model.schedule import Every, spec_of
from fencepost.model.slot import RunKey
from fencepost.world.flow import finish
from fencepost.world.postgres_session import Session
from pglab import fresh_namespace, opened_postgres
from proxy import Proxy
from servers import Postgres, shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fencepost.ledger.draft import Draft
    from fencepost.ledger.postgres import PostgresLedger

KEY = RunKey("job", 1_000)
# The shortest way from nothing to each state.
WAYS = {state: (state,) for state in FIRST} | {
    state: (State.RUNNING, state) for state in TABLE[State.RUNNING] if state not in FIRST
}


@pytest.fixture
def url() -> str:
    return shared(Postgres).database("ledger") + "?advisory=off"


@pytest.fixture
def ledger(url: str) -> Iterator[PostgresLedger]:
    ledger = opened_postgres(url, namespace=f"{fresh_namespace()}-{time.time_ns()}")
    finish(ledger.jobs())
    yield ledger
    finish(ledger.close())


class Trips:
    """How often this process waited for an answer of the server, and what it sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = self.statements = 0
        ask, batch = Session.ask, Session.batch

        def counted_ask(session: Session, *args: object, **words: object) -> object:
            self.count, self.statements = self.count + 1, self.statements + 1
            return ask(session, *args, **words)  # type: ignore[arg-type]

        def counted_batch(session: Session, steps: list[object], **words: object) -> object:
            self.count, self.statements = self.count + 1, self.statements + len(steps)
            return batch(session, steps, **words)  # type: ignore[arg-type]

        monkeypatch.setattr(Session, "ask", counted_ask)
        monkeypatch.setattr(Session, "batch", counted_batch)

    def cost(self) -> int:
        """Return the round trips since the last call."""
        count, self.count, self.statements = self.count, 0, 0
        return count


# What the server refuses.


def in_state(db: psycopg.Connection, space: str, state: State) -> None:
    """Have a run in some state, by hand."""
    first, *rest = WAYS[state]
    db.execute(
        "INSERT INTO fencepost_run SELECT * FROM json_populate_record(NULL::fencepost_run, %s)",
        (raw(space, first),),
    )
    for following in rest:
        db.execute(
            "UPDATE fencepost_run SET state = %s WHERE namespace = %s", (following.value, space)
        )


def raw(space: str, state: State) -> str:
    zeros = "slot manual rerun pid created_at started_at ended_at not_before beat_at cancel_at "
    zeros += "starts losses releases streak strikes saves epoch"
    words = "lease nonce host version reason blocker origin"
    row = dict.fromkeys(zeros.split(), 0) | dict.fromkeys(words.split(), "")
    import json

    fixed = {"namespace": space, "job": "job", "lock": "job", "token": 7}
    fixed |= {"solitary": False, "awaited": False}
    return json.dumps({**row, **fixed, "state": state.value})


@pytest.mark.parametrize("state", State)
def test_a_run_begins_only_as_the_table_says(
    ledger: PostgresLedger, url: str, state: State
) -> None:
    with psycopg.connect(url.partition("?")[0]) as db:
        if legal(None, state):
            in_state(db, ledger.namespace, state)
        else:
            with pytest.raises(psycopg.Error, match=f"a run cannot begin as {state.value}"):
                db.execute(
                    "INSERT INTO fencepost_run "
                    "SELECT * FROM json_populate_record(NULL::fencepost_run, %s)",
                    (raw(ledger.namespace, state),),
                )
        db.rollback()


@pytest.mark.parametrize("before", State)
def test_a_run_changes_only_as_the_table_says(
    ledger: PostgresLedger, url: str, before: State
) -> None:
    change = "UPDATE fencepost_run SET state = %s WHERE namespace = %s"
    with psycopg.connect(url.partition("?")[0]) as db:
        for after in State:
            in_state(db, ledger.namespace, before)
            if legal(before, after):
                db.execute(change, (after.value, ledger.namespace))
            else:
                says = "never changes again" if before is after else f"cannot become {after.value}"
                with pytest.raises(psycopg.Error, match=f"a run that is {before.value} {says}"):
                    db.execute(change, (after.value, ledger.namespace))
            db.rollback()


def test_a_token_and_a_watermark_never_fall_and_an_event_never_changes(
    ledger: PostgresLedger, url: str
) -> None:
    claimed(ledger, KEY, "a")
    finish(ledger.note(KEY, "seen"))
    finish(ledger.planner.store([Definition("job", spec_of(Every(60)))]))
    with psycopg.connect(url.partition("?")[0]) as db:
        for statement, says in (
            ("UPDATE fencepost_run SET token = 1", "the token of a run never falls"),
            ("UPDATE fencepost_job SET watermark = 0", "a watermark never falls"),
            ("UPDATE fencepost_event SET what = 'no'", "an event is never changed"),
        ):
            with pytest.raises(psycopg.Error, match=says):
                db.execute(f"{statement} WHERE namespace = %s".encode(), (ledger.namespace,))
            db.rollback()


def test_whatever_ends_a_run_frees_its_lease_in_the_same_commit(
    ledger: PostgresLedger, url: str
) -> None:
    claimed(ledger, KEY, "a")
    with psycopg.connect(url.partition("?")[0]) as db:
        db.execute(
            "UPDATE fencepost_run SET state = 'failed' WHERE namespace = %s", (ledger.namespace,)
        )
    view = finish(ledger.leases.peek("job"))
    assert view is not None
    assert (view.held, view.ended) == (False, "it was released")


# The schema.


def test_a_ledger_of_a_newer_version_is_refused_with_a_sentence() -> None:
    url = shared(Postgres).database("newer")
    first = opened_postgres(url)
    finish(first.jobs())
    with psycopg.connect(url) as db:
        db.execute("UPDATE fencepost_schema SET version = 99 WHERE part = %s", (PART,))
    second = opened_postgres(url)
    with pytest.raises(Misuse, match="upgrade this installation"):
        finish(second.claim(wanted(KEY, "a")))
    for ledger in (first, second):
        finish(ledger.close())


def test_eight_who_open_a_new_database_at_once_find_one_ledger() -> None:
    server = shared(Postgres)
    url = server.database(f"fresh_{time.time_ns()}")
    ledgers = [opened_postgres(url) for _ in range(8)]
    answers: list[object] = []

    def work(number: int) -> None:
        answers.append(finish(ledgers[number].claim(wanted(KEY, f"n{number}"))).verdict)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, answers)) == sorted(map(str, [Verdict.GO, *[Verdict.BUSY] * 7]))
    for ledger in ledgers:
        finish(ledger.close())


def test_tables_live_in_the_schema_of_the_url() -> None:
    url = shared(Postgres).database("schemas")
    ledgers = [opened_postgres(f"{url}?advisory=off&schema={name}") for name in ('a "b"', "c")]
    for ledger in ledgers:
        run_through(ledger, KEY, "the same nonce")
        assert len(finish(ledger.runs())) == 1
        finish(ledger.close())
    with psycopg.connect(url) as db:
        found = db.execute("SELECT to_regclass('public.fencepost_run')").fetchone()
    assert found == (None,)


def test_every_statement_that_makes_the_schema_names_it() -> None:
    for step in STEPS:
        for statement in step:
            assert "{schema}.fencepost_" in statement


# What a verb costs.


def test_a_claim_that_is_free_and_what_an_attempt_says_are_one_round_trip(
    ledger: PostgresLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    for slot in range(2):  # until everything is prepared
        every_verb(ledger, slot, Trips(monkeypatch))
    costs = every_verb(ledger, 2, Trips(monkeypatch))
    assert costs == {
        "claim": 1,
        "adopted": 2,
        "beat": 1,
        "save": 1,
        "begin": 1,
        "end": 1,
        "finish": 1,
    }


@pytest.mark.parametrize("jobs", [1, 400])
def test_a_tick_costs_four_round_trips_however_much_is_due(
    ledger: PostgresLedger, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    planner, trips = ledger.planner, Trips(monkeypatch)
    instance = Instance("i", "here", 1, "1.0")
    names = [f"job {number}" for number in range(jobs)]
    finish(planner.announce(instance, [Definition(name, spec_of(Every(1))) for name in names]))
    ended: list[End] = []
    costs = []
    for number in range(4):
        finish(_passes(ledger, 1.01))
        ask = Ask(_want, f"ask {number} ", jobs, ended, sweep=number % 2 == 0)
        trips.cost()
        ticked = finish(planner.tick(ask))
        costs.append(trips.cost())
        assert len(ticked.begun) == jobs
        assert [type(end) for end in ticked.ended if isinstance(end, RunLost)] == []
        ended = [End(attempt_of(begun.claimed), DONE, NOTHING) for begun in ticked.begun]
    # Whoever tells of ends need not ask first whether anything is due at all.
    assert costs[-2:] == [3, 3]
    trips.cost()
    assert finish(planner.tick(Ask(_want, "idle", 0))).begun == []
    assert trips.cost() <= 4


def _want(asked: Asked) -> Want:
    holder = Holder(asked.nonce, "here", 1)
    return Want(asked.key, holder, Policy(), asked.key.job, asked.trigger, epoch=asked.epoch)


async def _passes(ledger: PostgresLedger, seconds: float) -> None:
    await ledger._world.sleep(seconds)


# Texts and names.


def test_what_postgres_cannot_keep_is_kept_as_well_as_it_can_be(ledger: PostgresLedger) -> None:
    attempt = claimed(ledger, KEY, "a")
    ended = finish(ledger.finish(attempt, Settled(State.FAILED, "error", error="a\0b \ud800")))
    assert ended.error is not None
    assert ended.error.startswith("a\N{REPLACEMENT CHARACTER}b")
    finish(ledger.note(KEY, "seen", detail="\0"))
    again = claimed(ledger, RunKey("job", 2_000), "b")
    settled = Settled(State.WAITING_RETRY, "error", error="c\0d")
    finish(ledger.planner.tick(Ask(_want, "x", 0, [End(again, settled, NOTHING)])))
    found = finish(ledger.find(RunKey("job", 2_000)))
    assert found is not None
    assert found.error == "c\N{REPLACEMENT CHARACTER}d"


def test_a_name_that_no_index_can_bear_is_refused_with_a_sentence(ledger: PostgresLedger) -> None:
    long, longest = "ü" * 600, "\N{PILE OF POO}" * 400
    run_through(ledger, RunKey(long, 1), "a")
    with pytest.raises(BadName, match="a job in a PostgreSQL ledger has at most 1200"):
        finish(ledger.claim(wanted(RunKey(longest, 1), "b")))
    with pytest.raises(BadName):
        finish(ledger.planner.announce(None, [Definition(longest)]))
    lock = "\N{PILE OF POO}" * 999
    assert finish(ledger.claim(wanted(RunKey("a", 1), "d", lock=lock))).verdict is Verdict.GO
    held = finish(ledger.claim(wanted(RunKey("b", 1), "e", lock=lock)))
    assert (held.verdict, held.run and held.run.reason) == (Verdict.ENDED, "lock_held")
    attempt = claimed(ledger, RunKey(long, 2), "c")
    items = ["\N{PILE OF POO}" * 999 + last for last in "ab"]
    begun = finish(ledger.begin(attempt, scope=long, items=items, call="c", repeat=False))
    assert begun == [Found.FIRST] * 2
    assert [item.item for item in finish(ledger.items(long))] == items


# Lost replies.


def test_a_claim_whose_reply_was_lost_is_adopted_with_the_same_token() -> None:
    server = shared(Postgres)
    database = server.database("lost_replies")
    with Proxy(server.port) as proxy:
        url = database.replace(str(server.port), str(proxy.port)) + "?advisory=off"
        space = f"lost-{time.time_ns()}"
        ledger, other = (opened_postgres(where, namespace=space) for where in (url, database))
        for slot in (1, 3):  # the first one is decided on a draft, as nothing was seen yet
            run_through(ledger, RunKey("job", slot), "warm")
        run_through(other, RunKey("job", 2), "warm too")
        want = wanted(KEY, "a")
        losing = threading.Thread(target=lambda: outcome.append(_caught(ledger, want)))
        outcome: list[object] = []
        with psycopg.connect(database) as db:  # the claim waits for this table at its commit
            db.execute("LOCK TABLE fencepost_run IN SHARE MODE")
            losing.start()
            _until(lambda: _waiting(server) > 0)
            proxy.mode = "hole_down"  # from here on the server does it, and nobody hears of it
        _until(lambda: finish(other.find(KEY)) is not None)
        proxy.mode = "pass"
        proxy.reset()
        losing.join()
        assert [type(error) for error in outcome] == [OutcomeUnknown]
        found = finish(ledger.claim(want))
        assert found.grant is not None
        seen = finish(other.find(KEY))
        assert seen is not None
        assert (seen.starts, seen.token) == (1, found.grant.token)
        finish(ledger.close())
        finish(other.close())


def _caught(ledger: PostgresLedger, want: Want) -> object:
    try:
        return finish(ledger.claim(want))
    except FencepostError as error:
        return error


def _waiting(server: Postgres) -> int:
    (row,) = server.run(
        "SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = database "
        "WHERE datname = 'lost_replies' AND NOT granted"
    )
    assert isinstance(row[0], int)
    return row[0]


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 4.0  # less than the patience of a client
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_finish_whose_reply_was_lost_finds_what_it_did(ledger: PostgresLedger) -> None:
    attempt = claimed(ledger, KEY, "a")
    ended = finish(ledger.finish(attempt, DONE))
    assert finish(ledger.finish(attempt, DONE)) == ended
    assert finish(ledger.events(KEY)) == []
    with pytest.raises(RunLost, match="it is succeeded"):
        finish(ledger.finish(attempt, Settled(State.FAILED)))
    assert [event.what for event in finish(ledger.events(KEY))] == ["stale_write"]


def test_a_beat_after_the_lease_ran_out_writes_nothing(ledger: PostgresLedger) -> None:
    attempt = claimed(ledger, KEY, "a", Policy(lease=0.2))
    before = finish(ledger.find(KEY))
    finish(_passes(ledger, 0.25))
    with pytest.raises(LeaseLost, match="it ran out"):
        finish(ledger.beat(attempt, ttl=0.2, report=Report(done=5)))
    assert finish(ledger.find(KEY)) == before


def test_a_server_that_was_killed_and_came_back_goes_on_with_its_runs() -> None:
    with Postgres.own() as server:
        ledger = opened_postgres(server.database("killed") + "?advisory=off")
        attempt = claimed(ledger, KEY, "a", Policy(lease=60.0))
        finish(ledger.save(attempt, checkpoint='{"page":1}'))
        server.kill()
        with pytest.raises((StoreUnavailable, OutcomeUnknown)):
            finish(ledger.beat(attempt, ttl=60.0))
        server.start()
        assert finish(ledger.beat(attempt, ttl=60.0)) is False
        ended = finish(ledger.finish(attempt, DONE))
        assert (ended.state, ended.checkpoint) == (State.SUCCEEDED, '{"page":1}')
        finish(ledger.close())


def test_who_is_stopped_inside_of_a_claim_keeps_others_from_the_lock_for_seconds_only(
    ledger: PostgresLedger, url: str
) -> None:
    stopped = opened_postgres(url, namespace=ledger.namespace)
    inside = threading.Event()
    answers: list[object] = []

    def work(draft: Draft) -> None:
        draft.begin((TURN, {"namespace": ledger.namespace, "lock": "job"}))
        inside.set()
        time.sleep(4.0)
        draft.put(RunRecord(KEY, State.PENDING, "job"))

    def claim() -> None:
        try:
            stopped.drafted(work)
        except FencepostError as error:
            answers.append(error)

    frozen = threading.Thread(target=claim)
    frozen.start()
    inside.wait(10)
    attempt = claimed(ledger, KEY, "a")
    assert attempt.token
    frozen.join()
    assert isinstance(answers.pop(), OutcomeUnknown | StoreUnavailable)
    assert len(finish(ledger.runs())) == 1
    finish(stopped.close())
