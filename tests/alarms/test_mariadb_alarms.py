"""What is particular about alarms on MariaDB: names, locks, sizes, what the server refuses."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pymysql
import pytest
from alarmlab import Opened, firing_of, mariadb_book

from fencepost import Fencepost
from fencepost.errors import LeaseLost
from fencepost.ledger import mariadb_alarm_rows as sql
from fencepost.ledger.mariadb import MariaLedger
from fencepost.ledger.mariadb_alarm_schema import ALARM
from fencepost.ledger.mariadb_said import listed
from fencepost.model.alarm import AlarmState, AlarmWant, Became, Failure, Setting
from fencepost.model.alarm_policy import AlarmPolicy
from fencepost.model.lease import Holder
from fencepost.world.flow import finish
from fencepost.world.mariadb_batch import Statement, rendered
from marialab import QUICK, fresh_namespace, numbers
from servers import MariaDB, shared

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fencepost import Alarm
    from fencepost.model.alarm import Batch

PROGRAM = Path(__file__).with_name("alarm_program.py")
DATABASE = "alarms"
COMMITS = 30  # of the crowd


@pytest.fixture(params=QUICK)
def server(request: pytest.FixtureRequest) -> MariaDB:
    return shared(QUICK[request.param])


@pytest.fixture
def opened(server: MariaDB) -> Iterator[Opened]:
    url = server.database(DATABASE)
    book = mariadb_book(url, namespace=f"{fresh_namespace()}-{time.time_ns()}")
    finish(book.book.listed())  # which makes the tables
    yield book
    book.close()


def another(server: MariaDB, opened: Opened) -> Opened:
    return mariadb_book(server.database(DATABASE), namespace=space_of(opened))


@pytest.fixture
def raw(server: MariaDB) -> Iterator[pymysql.Connection[Any]]:
    """Connect as somebody else would, with a transaction that is open from the first word."""
    settings = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"
    with closing(
        pymysql.connect(
            host="127.0.0.1",
            port=server.port,
            user="post",
            password="secret",
            database=server.database(DATABASE).rpartition("/")[2],
            charset="utf8mb4",
            ssl_disabled=True,
            init_command=settings,
        )
    ) as raw:
        yield raw


def space_of(opened: Opened) -> str:
    assert isinstance(opened.ledger, MariaLedger)
    return opened.ledger.namespace


def ask(raw: pymysql.Connection[Any], text: str) -> Any:
    with raw.cursor() as cursor:
        cursor.execute(text)
        return cursor.fetchall()


def due(raw: pymysql.Connection[Any], opened: Opened, most: int) -> list[str]:
    """Lock the first alarms that are due, as a claim does; return their keys."""
    values = {"namespace": space_of(opened), "kind": "k", "most": most}
    return [json.loads(row[0])[1] for row in ask(raw, *rendered(raw, sql.FIND_DUE, values))]


# Names.

NAMES = ["a", "a ", "A", "ä", "a\u0308", "x" * 250, "x" * 249 + "y", "🔒" * 250, "🔒", "%s", "\\"]


def test_names_are_told_apart_to_the_last_byte_and_sorted_like_pythons(opened: Opened) -> None:
    for number, name in enumerate(NAMES):
        opened.set(name, payload=json.dumps(number))
        opened.set(name, kind=name, payload=json.dumps(-number))
    for number, name in enumerate(NAMES):
        assert (opened.get(name).key, opened.get(name).payload) == (name, json.dumps(number))
        assert opened.get(name, kind=name).payload == json.dumps(-number)
        assert [one.key for one in finish(opened.book.listed(name))] == [name]
    listed = [(one.kind, one.key) for one in finish(opened.book.listed())]
    assert listed == sorted([*(("k", name) for name in NAMES), *((name, name) for name in NAMES)])
    claimed = opened.claim(limit=50).claimed
    assert sorted(one.record.key for one in claimed) == sorted(NAMES)
    for one in claimed:
        assert finish(opened.book.finish(firing_of(one))).became is Became.DONE


def test_a_kind_is_due_under_its_own_name_only(opened: Opened) -> None:
    opened.set(kind="k ")
    assert finish(opened.book.next_due(("k",))).within is None
    assert finish(opened.book.next_due(("k", "k "))).within == 0.0
    assert opened.claim().claimed == ()


# Locks.


def test_two_who_claim_at_once_have_different_alarms_and_nobody_waits(
    opened: Opened, raw: pymysql.Connection[Any]
) -> None:
    for key in "abcdef":
        opened.set(key)
    taken = due(raw, opened, 2)
    claimed = opened.claim().claimed
    assert sorted([*taken, *(one.record.key for one in claimed)]) == list("abcdef")
    raw.rollback()
    assert sorted(one.record.key for one in opened.claim().claimed) == sorted(taken)


def test_a_claim_locks_what_it_takes_and_no_more(
    opened: Opened, raw: pymysql.Connection[Any]
) -> None:
    for number in range(40):
        opened.set(str(number), after=-1.0)
    taken = due(raw, opened, 3)
    assert len(taken) == 3
    assert len(opened.claim(limit=100).claimed) == 37


def test_a_claim_that_is_under_way_stops_no_living_handler(
    opened: Opened, raw: pymysql.Connection[Any]
) -> None:
    opened.set("a")
    firing = opened.fired()
    values = {"namespace": space_of(opened), "kind": "k", "batch": "another", "sweep": True}
    assert ask(raw, *rendered(raw, sql.FIND_FIRING, values)) == ()
    assert finish(opened.book.finish(firing)).became is Became.DONE  # and raw has not committed


def test_who_took_an_alarm_over_while_another_looked_for_lost_ones_is_not_taken_for_lost(
    server: MariaDB, opened: Opened, raw: pymysql.Connection[Any]
) -> None:
    """The statement finds the alarm lost, and waits at a gate before it locks it."""
    patient, quick = another(server, opened), AlarmPolicy(lease=0.2)
    gate = f"gate{time.time_ns()}"
    (part,) = sql.FIND_FIRING.parts
    slow = part.text.replace(
        "LIMIT 9223372036854775807) AS found", f"AND GET_LOCK('{gate}', 60) LIMIT 1000) AS found"
    )
    assert slow != part.text
    words = {**vars(sql), "FIND_FIRING": Statement((part._replace(text=slow),))}
    patient.book._sql = SimpleNamespace(**words)  # type: ignore[attr-defined]
    opened.set("a")
    (dead,) = opened.claim(quick).claimed
    while finish(opened.leases.peek(dead.record.lease)).held:  # type: ignore[union-attr]
        time.sleep(0.01)
    ask(raw, f"SELECT GET_LOCK('{gate}', 60)")
    batches: list[Batch] = []
    looking = threading.Thread(target=lambda: batches.append(patient.claim()))
    looking.start()
    waits = (
        "SELECT 1 FROM information_schema.processlist"
        f" WHERE info LIKE '%{gate}%' AND state = 'User lock'"
    )
    while not ask(raw, waits):
        assert looking.is_alive()
    (living,) = opened.claim().claimed
    ask(raw, f"SELECT RELEASE_LOCK('{gate}')")
    looking.join()
    assert [(batch.claimed, batch.lost) for batch in batches] == [((), 0)]
    assert finish(opened.book.finish(firing_of(living))).became is Became.DONE
    patient.close()


def test_a_lease_that_somebody_has_locked_stops_no_claim(
    opened: Opened, raw: pymysql.Connection[Any]
) -> None:
    opened.set("a")
    opened.set("b")
    first = opened.claim(limit=1).claimed[0]
    ask(raw, f"SELECT 1 FROM fencepost_lease WHERE name = '{first.record.lease}' FOR UPDATE")
    assert [one.record.key for one in opened.claim().claimed] == ["b"]


def test_a_locked_alarm_is_not_waited_for_by_a_beat(
    opened: Opened, raw: pymysql.Connection[Any]
) -> None:
    opened.set("a")
    firing = opened.fired()
    ask(
        raw, "SELECT 1 FROM fencepost_alarm WHERE `key` = 'a' FOR UPDATE"
    )  # for as long as it takes
    assert not finish(opened.book.beat(firing, ttl=30.0))


def test_all_who_set_a_new_key_at_once_have_generations_of_their_own(
    server: MariaDB, opened: Opened
) -> None:
    books = [another(server, opened) for _ in range(8)]
    start = threading.Barrier(len(books))
    said: list[tuple[str, int]] = []

    def set_it(book: Opened, number: int) -> None:
        start.wait()
        sets = (Setting("k", key, str(number)) for key in "abcde")
        said.extend((one.key, finish(book.book.set(one)).generation) for one in sets)

    crowd = [
        threading.Thread(target=set_it, args=(book, number)) for number, book in enumerate(books)
    ]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join()
    assert len(said) == len(set(said)) == 40
    for key in "abcde":
        assert opened.get(key).generation == max(number for name, number in said if name == key)
    for book in books:
        book.close()


class Worker(threading.Thread):
    """Sets, claims, beats, ends and clears a few keys that all the others want as well."""

    def __init__(self, opened: Opened, number: int, committed: list[tuple[str, int]]) -> None:
        super().__init__()
        self.opened, self._number, self._committed = opened, number, committed
        self.problem: BaseException | None = None

    def run(self) -> None:
        try:
            for count in itertools.count():
                if len(self._committed) >= COMMITS:
                    return
                self._step(count)
        except BaseException as error:
            self.problem = error
            self._committed += [("", 0)] * COMMITS  # so that nobody waits for us
            raise

    def _step(self, count: int) -> None:
        book, nonce = self.opened.book, f"w{self._number}-{count}"
        finish(book.set(Setting("k", str(count % 7), nonce)))
        if count % 5 == self._number % 5:
            finish(book.clear("k", str((count + 3) % 7)))
        batch: Batch = finish(
            book.claim_due(AlarmWant(Holder(nonce, "here", 1), {"k": AlarmPolicy()}, 3))
        )
        for claimed in batch.claimed:
            firing = firing_of(claimed)
            try:
                finish(book.beat(firing, ttl=30.0))
            except LeaseLost:
                continue
            if count % 4 == 0:
                finish(book.fail(firing, Failure("errors", 0.0, error="it broke")))
            elif finish(book.finish(firing)).became is Became.DONE:
                self._committed.append((firing.key, firing.generation))


def test_in_a_crowd_no_generation_commits_twice_and_no_deadlock_comes_through(
    server: MariaDB, opened: Opened
) -> None:
    committed: list[tuple[str, int]] = []
    crew = [Worker(another(server, opened), number, committed) for number in range(6)]
    for worker in crew:
        worker.start()
    for worker in crew:
        worker.join()
        worker.opened.close()
    assert [worker.problem for worker in crew] == [None] * len(crew)
    assert len(committed) == len(set(committed)) >= COMMITS
    for record in finish(opened.book.listed()):
        assert record.state in (AlarmState.ARMED, AlarmState.CLEARED, AlarmState.DEAD)
        assert record.fired == 0


# Deaths.


def test_what_a_killed_process_was_firing_is_fired_by_another_under_a_higher_token(
    server: MariaDB, tmp_path: Path
) -> None:
    url = server.database(f"deaths{time.time_ns()}")
    command = [sys.executable, str(PROGRAM), url, str(tmp_path), "2s"]
    seen: list[Alarm] = []
    with Fencepost(url) as fp:

        @fp.alarm("k", lease="2s")
        def handle(alarm: Alarm) -> None:
            seen.append(alarm)

        generation = fp.alarms.set("k", "-1", in_=0)
        with subprocess.Popen(command, stdout=subprocess.PIPE) as member:
            assert member.stdout is not None
            assert [member.stdout.readline() for _ in range(2)] == [b"ready\n", b"inside\n"]
            assert not fp.alarms.run_due()
            token = finish(fp._alarming.book.listed())[0].token
            member.kill()
        give_up = time.monotonic() + 60
        while not fp.alarms.run_due():
            assert time.monotonic() < give_up
            due_in = finish(fp._alarming.due_in())
            assert due_in is not None
            time.sleep(due_in)
        assert fp.alarms.list() == []
    (alarm,) = seen
    assert (alarm.key, alarm.generation, alarm.attempt) == ("-1", generation, 1)
    assert alarm.token > token
    assert (tmp_path / "starts").read_text() == f"-1 {generation}\n"


# Size.


def test_to_look_what_is_due_costs_the_same_however_many_alarms_there_are(
    opened: Opened, raw: pymysql.Connection[Any]
) -> None:
    space = space_of(opened)
    opened.set("a", after=100.0)
    # Many more of its kind that are armed, and of another kind many that fire.
    for shelf, state, fired in (("shelf", "armed", "0"), ("lease_key", "firing", "1")):
        others = {"place": f"SHA2(CONCAT(seq, '{state}'), 256)", "shelf": shelf, "fired": fired}
        others |= {"state": f"'{state}'", "wake_at": "wake_at + seq", "key": "seq"}
        chosen = ", ".join(others.get(name, f"`{name}`") for name in ALARM)
        ask(
            raw,
            f"INSERT INTO fencepost_alarm (namespace, {listed(ALARM)})"
            f" SELECT namespace, {chosen} FROM fencepost_alarm, {numbers(3000)}"
            f" WHERE namespace = '{space}' AND `key` = 'a'",
        )
    raw.commit()
    values: dict[str, Any] = {"namespace": space, "kinds": ["k", "other"], "kind": "k"}
    values |= {"limit": 10, "most": 10, "batch": "b", "sweep": True}
    for name in ("NEXT_DUE", "FIND_DUE", "FIND_FIRING", "LIST_DEAD", "FIND_OLD", "FIND_GONE"):
        ask(raw, "FLUSH STATUS")
        ask(raw, *rendered(raw, getattr(sql, name), values))
        read = ask(raw, "SHOW STATUS LIKE 'Handler_read%'")
        assert sum(int(count) for _, count in read) < 100, name


def test_a_payload_that_stays_is_kept_and_not_sent_again(opened: Opened) -> None:
    payload = json.dumps("'\"\\🔒" * 10_000)
    opened.set("a", payload=payload)
    before = opened.get("a")
    sent = sql.row_of("default", before._replace(starts=1), read=before, gone_at=None)
    assert len(json.dumps(sent)) < 1500  # many that are claimed at once fit into one packet
    (claimed,) = opened.claim().claimed
    assert claimed.record.payload == payload == opened.get("a").payload
    finish(opened.book.fail(firing_of(claimed), Failure("errors", 0.0, error="no")))
    assert opened.get("a").payload == payload
    opened.set("a", payload="1")
    assert opened.get("a").payload == "1"


# What the server itself refuses.


@pytest.mark.parametrize("column", ["generation", "token"])
def test_the_server_refuses_what_falls(
    opened: Opened, raw: pymysql.Connection[Any], column: str
) -> None:
    opened.set()
    opened.fired()
    with pytest.raises(pymysql.OperationalError, match="never fall"):
        ask(
            raw,
            f"UPDATE fencepost_alarm SET {column} = {column} - 1"
            f" WHERE namespace = '{space_of(opened)}'",
        )
