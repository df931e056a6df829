"""What is the own of the ledger on MariaDB and MySQL: what a server refuses, what a verb costs."""

from __future__ import annotations

import re
import threading
import time
from typing import TYPE_CHECKING, Any

import pymysql
import pytest
from ledgerlab import DONE, attempt_of, claimed, every_verb, wanted
from test_postgres_ledger import KEY, WAYS, _want

from fencepost.cli.main import main
from fencepost.errors import (
    BadName,
    FencepostError,
    Misuse,
    OutcomeUnknown,
    StoreUnavailable,
    StoreUnfit,
)
from fencepost.ledger.api import NOTHING
from fencepost.ledger.mariadb import refuse_other
from fencepost.ledger.mariadb_planner_rows import FIND_LOST, SET_NOW
from fencepost.ledger.mariadb_rows import TURN
from fencepost.ledger.planning import Ask, End, Instance
from fencepost.model.claim import Verdict
from fencepost.model.definition import Definition
from fencepost.model.ending import Settled
from fencepost.model.policy import Policy
from fencepost.model.run import RunRecord, State, legal
from fencepost.model.schedule import Every, spec_of
from fencepost.model.slot import RunKey
from fencepost.world.flow import finish
from fencepost.world.mariadb_batch import Transaction, rendered
from marialab import fresh_namespace, opened_mariadb
from mariaplace import KINDS
from servers import MariaDB, shared

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fencepost.ledger.draft import Draft
    from fencepost.ledger.mariadb import MariaLedger


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest) -> MariaDB:
    return shared(KINDS[request.param])


@pytest.fixture
def url(server: MariaDB) -> str:
    return server.database("ledger")


@pytest.fixture
def ledger(url: str) -> Iterator[MariaLedger]:
    ledger = opened_mariadb(url, namespace=f"{fresh_namespace()}-{time.time_ns()}")
    finish(ledger.jobs())
    finish(ledger.leases.views())
    yield ledger
    finish(ledger.close())


@pytest.fixture
def db(server: MariaDB) -> Iterator[Any]:
    db = pymysql.connect(unix_socket=str(server.socket), user="root", database="ledger")
    with db, db.cursor() as cursor:
        yield cursor


# What the server refuses.

_ZEROS = "slot manual rerun pid created_at started_at ended_at not_before beat_at cancel_at "
_ZEROS += "starts losses releases streak strikes saves epoch"
_WORDS = "lease nonce host version reason blocker origin"
_ROW = {
    **dict.fromkeys(_ZEROS.split(), 0),
    **dict.fromkeys(_WORDS.split(), ""),
    "job": "job",
    "lock": "job",
    "token": 7,
    "solitary": 0,
}


def insert(db: Any, space: str, state: State) -> None:
    row = {**_ROW, "namespace": space, "state": state.value}
    names = ", ".join(f"`{name}`" for name in row)
    values = ", ".join(["%s"] * len(row))
    db.execute(f"INSERT INTO fencepost_run ({names}) VALUES ({values})", list(row.values()))


def change(db: Any, space: str, state: State) -> None:
    statement = "UPDATE fencepost_run SET state = %s WHERE namespace = %s"
    db.execute(statement, (state.value, space))


def in_state(db: Any, space: str, state: State) -> None:
    first, *rest = WAYS[state]
    insert(db, space, first)
    for following in rest:
        change(db, space, following)


def test_a_run_begins_only_as_the_table_says(ledger: MariaLedger, db: Any) -> None:
    for state in State:
        if legal(None, state):
            insert(db, ledger.namespace, state)
        else:
            with pytest.raises(pymysql.Error, match=f"a run cannot begin as {state.value}"):
                insert(db, ledger.namespace, state)
        db.connection.rollback()


@pytest.mark.parametrize("before", State)
def test_a_run_changes_only_as_the_table_says(ledger: MariaLedger, db: Any, before: State) -> None:
    for after in State:
        in_state(db, ledger.namespace, before)
        if legal(before, after):
            change(db, ledger.namespace, after)
        else:
            says = "never changes again" if before is after else f"cannot become {after.value}"
            with pytest.raises(pymysql.Error, match=f"a run that is {before.value} {says}"):
                change(db, ledger.namespace, after)
        db.connection.rollback()


def test_a_token_and_a_watermark_never_fall_and_an_event_never_changes(
    ledger: MariaLedger, db: Any
) -> None:
    claimed(ledger, KEY, "a")
    finish(ledger.note(KEY, "seen"))
    finish(ledger.planner.store([Definition("job", spec_of(Every(60)))]))
    for statement, says in (
        ("UPDATE fencepost_run SET token = 1", "the token of a run never falls"),
        ("UPDATE fencepost_job SET watermark = 0", "a watermark never falls"),
        ("UPDATE fencepost_event SET what = 'no'", "an event is never changed"),
    ):
        with pytest.raises(pymysql.Error, match=says):
            db.execute(f"{statement} WHERE namespace = %s", (ledger.namespace,))
        db.connection.rollback()


def test_whatever_ends_a_run_frees_its_lease_in_the_same_commit(
    ledger: MariaLedger, db: Any
) -> None:
    claimed(ledger, KEY, "a")
    change(db, ledger.namespace, State.FAILED)
    db.connection.commit()
    view = finish(ledger.leases.peek("job"))
    assert view is not None
    assert (view.held, view.ended) == (False, "it was released")


# The schema.


def test_a_ledger_of_a_newer_version_is_refused_with_a_sentence(server: MariaDB) -> None:
    url = server.database("newer")
    first, second = opened_mariadb(url), opened_mariadb(url)
    finish(first.jobs())
    server.run("UPDATE newer.fencepost_schema SET version = 99 WHERE part = 'ledger'")
    with pytest.raises(Misuse, match="upgrade this installation"):
        finish(second.claim(wanted(KEY, "a")))
    for ledger in (first, second):
        finish(ledger.close())


def test_who_may_not_make_tables_is_told_so_in_one_sentence(
    server: MariaDB, capsys: pytest.CaptureFixture[str]
) -> None:
    server.database("forbidden")
    server.run("CREATE USER IF NOT EXISTS poor@'127.0.0.1' IDENTIFIED BY 'secret'")
    server.run("GRANT SELECT, INSERT, UPDATE, DELETE ON forbidden.* TO poor@'127.0.0.1'")
    url = server.url("forbidden").replace("post:", "poor:")
    assert main(["--url", url, "migrate"]) == 3
    said = capsys.readouterr().err
    assert "run 'fencepost migrate' as a user who may create tables" in said
    assert said.count("\n") == 1
    assert "secret" not in said


def test_eight_who_open_a_new_database_at_once_find_one_ledger(server: MariaDB) -> None:
    url = server.database(f"fresh_{time.time_ns()}")
    ledgers = [opened_mariadb(url) for _ in range(8)]
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


# What a verb costs.


class Trips:
    """How often this process waited for an answer of the server, and how many commits it sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = self.commits = 0
        exchange = Transaction._exchange

        def counted(transaction: Transaction, packet: list[str]) -> object:
            self.count += 1
            self.commits += packet[-1] == "COMMIT"
            return exchange(transaction, packet)

        monkeypatch.setattr(Transaction, "_exchange", counted)

    def cost(self) -> int:
        """Return the round trips since the last call."""
        count, self.count = self.count, 0
        return count


def test_a_claim_is_two_round_trips_and_what_an_attempt_says_is_one(
    ledger: MariaLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    trips = Trips(monkeypatch)
    every_verb(ledger, 0, trips)
    trips.commits = 0
    costs = every_verb(ledger, 1, trips)
    once = dict.fromkeys(("beat", "save", "begin", "end", "finish"), 1)
    assert costs == {"claim": 2, "adopted": 2, **once}
    assert trips.commits == len(costs)


@pytest.mark.parametrize("jobs", [1, 100])
def test_a_tick_costs_three_round_trips_however_much_is_due(
    ledger: MariaLedger, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    planner, trips = ledger.planner, Trips(monkeypatch)
    names = [f"job {number}" for number in range(jobs)]
    several = [Definition(name, spec_of(Every(1))) for name in names]
    finish(planner.announce(Instance("i", "here", 1, "1.0"), several))
    ended: list[End] = []
    costs = []
    for number in range(3):
        time.sleep(1.01)
        trips.cost()
        ticked = finish(planner.tick(Ask(_want, f"ask {number} ", jobs, ended, sweep=True)))
        costs.append(trips.cost())
        assert len(ticked.begun) == jobs
        ended = [End(attempt_of(begun.claimed), DONE, NOTHING) for begun in ticked.begun]
    assert costs[-1] == 3


# Texts, names, and who is stopped.


def test_names_are_told_apart_to_the_last_byte(ledger: MariaLedger) -> None:
    names = ["a", "a ", "A", "\N{LATIN SMALL LETTER A WITH DIAERESIS}", "a'\\%s\"", "🔒"]
    for number, name in enumerate(names):
        claimed(ledger, RunKey(name, 1), f"n{number}")
    assert [run.key.job for run in finish(ledger.runs())] == sorted(names, reverse=True)
    with pytest.raises(BadName, match="a job in a MariaDB ledger has at most 1200"):
        finish(ledger.claim(wanted(RunKey("🔒" * 400, 1), "b")))


def test_what_no_server_can_keep_is_kept_as_well_as_it_can_be(ledger: MariaLedger) -> None:
    attempt = claimed(ledger, KEY, "a")
    ended = finish(ledger.finish(attempt, Settled(State.FAILED, "error", error="a\0b \ud800")))
    assert ended.error is not None
    assert ended.error.startswith("a\N{REPLACEMENT CHARACTER}b")


def test_who_looks_for_lost_runs_keeps_no_living_one_from_beating_and_ending(
    ledger: MariaLedger, db: Any
) -> None:
    """Whoever is stopped in the middle of that would cost others their leases."""
    attempt = claimed(ledger, KEY, "a")
    db.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
    values = {"namespace": ledger.namespace, "only": None}
    for text in (
        *rendered(db.connection, SET_NOW, {}),
        *rendered(db.connection, FIND_LOST, values),
    ):
        db.execute(text)
    assert db.fetchall() == ()
    assert not finish(ledger.beat(attempt, ttl=30.0))  # and the sweep is still open
    assert finish(ledger.finish(attempt, DONE)).state is State.SUCCEEDED
    db.connection.rollback()


def test_who_is_stopped_inside_of_a_claim_keeps_others_from_the_lock_for_seconds_only(
    ledger: MariaLedger, url: str
) -> None:
    stopped = opened_mariadb(url, namespace=ledger.namespace)
    inside = threading.Event()
    answers: list[object] = []
    tries: list[int] = []

    def work(draft: Draft) -> None:
        draft.begin((TURN, {"namespace": ledger.namespace, "lock": "job"}))
        tries.append(1)
        if len(tries) == 1:
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
    attempt = claimed(ledger, KEY, "a", Policy(lease=60.0))
    assert attempt.token
    frozen.join()
    assert not answers or isinstance(answers.pop(), OutcomeUnknown | StoreUnavailable)
    assert len(finish(ledger.runs())) == 1
    finish(stopped.close())


@pytest.mark.parametrize(
    "version", ["8.0.29", "8.0.9-log", "5.7.44-log", "10.5.23-MariaDB-1:10.5.23", "new"]
)
def test_a_server_without_what_the_ledger_needs_is_refused_by_name(version: str) -> None:
    with pytest.raises(StoreUnfit, match=rf"MySQL 8\.0\.30 or.*{re.escape(version)}"):
        refuse_other(version)


@pytest.mark.parametrize(
    "version",
    [
        *("10.6.0-MariaDB", "5.5.5-10.11.6-MariaDB-0+deb12u1", "11.4.2-MariaDB"),
        *("8.0.30", "8.0.36-0ubuntu0.22.04.1", "8.4.3", "9.7.4-2"),
    ],
)
def test_a_server_that_has_it_is_taken(version: str) -> None:
    refuse_other(version)
