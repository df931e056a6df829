"""``fencepost verify``: a healthy ledger is proven, and whatever was tampered with is named."""

from __future__ import annotations

import json
import sqlite3
from typing import TYPE_CHECKING

import pytest
from seeing_kit import Answer, Desk

from fencepost import Fencepost, Retry
from fencepost.model.schedule import Cron
from fencepost.testing.clock import SettableClocks
from fencepost.testing.ledger_checker import PROMISES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fencepost import Run

MINUTE = 60.0
TRIGGERS = "SELECT name FROM sqlite_master WHERE type = 'trigger'"


class Books(Desk):
    """A ledger with a job in it that is due every minute, and a clock that can be moved."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__(folder, capsys)
        self.clocks = SettableClocks()
        self.clocks.advance(MINUTE + 5 - self.clocks.wall() % MINUTE)  # no minute ends by itself
        self.fails: list[Exception] = []
        self.fp = self.declared()

    def declared(self, every: str = "1m", **words: object) -> Fencepost:
        fp = Fencepost(self.url, clocks=self.clocks)
        settings = {"retry": Retry(3, base="1s", jitter=False), "catchup": "all", **words}

        @fp.job("bills", every=every, **settings)  # type: ignore[arg-type]  # each its own
        def bills(_: Run) -> None:
            if self.fails:
                raise self.fails.pop()

        fp.tick()
        return fp

    def passed(self, minutes: int) -> None:
        """Let slots come due, and run."""
        for _ in range(minutes):
            self.clocks.advance(MINUTE)
            self.fp.tick()

    def tamper(self, *statements: str) -> None:
        """Change the file behind everybody's back."""
        database = sqlite3.connect(self.path)
        for (name,) in database.execute(TRIGGERS).fetchall():
            database.execute(f"DROP TRIGGER {name}")
        for statement in statements:
            assert database.execute(statement).rowcount != 0, statement
        database.commit()
        database.close()

    def slots(self) -> list[int]:
        database = sqlite3.connect(self.path)
        found = database.execute("SELECT slot FROM fencepost_run ORDER BY slot").fetchall()
        database.close()
        return [slot for (slot,) in found]


@pytest.fixture
def books(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Books]:
    books = Books(tmp_path, capsys)
    yield books
    books.fp.close()


def broken(answer: Answer) -> set[str]:
    """Return the promises that a document says are broken; they must be named with their rows."""
    document = answer.json
    assert document["ok"] is (answer.code == 0)
    for finding in document["findings"]:
        assert finding["says"]
        assert finding["runs"] or finding["ranges"]
    return {promise for promise, kept in document["promises"].items() if not kept}


# What is healthy.


def test_a_ledger_that_nobody_touched_is_proven_with_its_counts(books: Books) -> None:
    books.passed(5)
    answer = books.ask("verify")
    assert answer.code == 0, answer.out
    assert "1 jobs, 5 slots, 5 runs, 5 attempts, 0 ranges, 5 tokens on 1 locks" in answer.out
    assert [line for line in answer.lines if "proven" in line] == [
        f"  proven  {says}" for says in PROMISES.values()
    ]
    assert books.ask("verify", "--quiet").out == ""


def test_retries_pauses_misses_backfills_and_edits_are_all_healthy(books: Books) -> None:
    books.passed(2)
    books.fails = [ValueError("once")]
    books.passed(1)
    books.clocks.advance(2)
    books.fp.tick()  # the second try
    books.fails = [ValueError(str(number)) for number in range(3)]
    books.passed(1)
    for _ in range(2):
        books.clocks.advance(5)
        books.fp.tick()
    books.fp.pause("bills", reason="holidays")
    books.passed(3)
    books.fp.resume("bills")
    books.clocks.advance(10 * MINUTE)  # nobody is there
    books.fp.tick()
    now = books.clocks.wall()
    books.fp.backfill("bills", now - 20 * MINUTE, now, existing="failed")
    books.fp.backfill("bills", now - 3 * MINUTE, now, existing="all")
    books.fp.trigger("bills", manual=True)
    books.fp.close()
    books.clocks.advance(10 * MINUTE)
    books.fp = books.declared("2m", catchup="latest")
    books.passed(6)
    answer = books.ask("verify", "--json")
    assert (answer.code, broken(answer)) == (0, set()), answer.out
    document = answer.json
    assert document["counts"]["attempts"] > document["counts"]["slots"]
    assert document["counts"]["ranges"] > 0
    assert "earlier definitions" in document["not_checkable"][0]


def test_an_attempt_that_was_lost_and_resumed_is_healthy(books: Books) -> None:
    books.poisoned()
    answer = books.ask("verify", "--json")
    assert broken(answer) == set()
    assert answer.json["counts"]["attempts"] > 1


def test_history_that_was_pruned_is_said_to_be_unknown_and_is_no_hole(books: Books) -> None:
    books.passed(4)
    first, second, *_ = books.slots()
    books.tamper(
        f"DELETE FROM fencepost_run WHERE slot <= {second}",
        f"UPDATE fencepost_job SET pruned = {second}",
    )
    answer = books.ask("verify")
    assert answer.code == 0
    assert "not checkable  job 'bills': history up to" in answer.out
    assert first < second


def test_no_ledger_has_nothing_to_prove(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = Desk(tmp_path, capsys).ask("verify")
    assert answer.code == 0
    assert "has no ledger" in answer.out


# What was tampered with.


def test_a_second_row_that_nobody_asked_for_is_named(books: Books) -> None:
    books.passed(3)
    columns = "SELECT name FROM pragma_table_info('fencepost_run') WHERE name <> 'rerun'"
    database = sqlite3.connect(books.path)
    names = ", ".join(name for (name,) in database.execute(columns))
    database.close()
    slot = books.slots()[1]
    books.tamper(
        f"INSERT INTO fencepost_run (rerun, {names}) SELECT 1, {names} FROM fencepost_run "
        f"WHERE slot = {slot}",
        f"UPDATE fencepost_run SET token = token + 1, started_at = ended_at + 1, "
        f"ended_at = ended_at + 1.5 WHERE slot = {slot} AND rerun = 1",
    )
    answer = books.ask("verify")
    assert answer.code == 1
    assert "~1 is a second run of its slot that no backfill asked for" in answer.out
    assert broken(books.ask("verify", "--json")) == {"one run"}


def test_two_live_runs_of_one_slot_are_named(books: Books) -> None:
    books.passed(1)
    names = "namespace, job, slot, manual, lock, lease, host, pid, version, blocker, origin, epoch"
    rest = "created_at, not_before, beat_at, cancel_at, losses, releases, streak, strikes, solitary"
    row = f"{names}, {rest}, saves, starts, started_at, token, nonce"
    books.tamper(
        "DROP INDEX fencepost_run_live",
        "UPDATE fencepost_run SET state = 'pending', ended_at = 0.0, starts = 0, token = 0",
        f"INSERT INTO fencepost_run (rerun, state, reason, ended_at, {row}) "
        f"SELECT 1, 'pending', '', 0.0, {row} FROM fencepost_run",
    )
    assert "has 2 live runs" in books.ask("verify").out


def test_a_token_out_of_order_is_named(books: Books) -> None:
    books.passed(3)
    first, _, third = books.slots()
    low = f"(SELECT token - 1 FROM fencepost_run WHERE slot = {first})"
    books.tamper(f"UPDATE fencepost_run SET token = {low} WHERE slot = {third}")
    answer = books.ask("verify", "--json")
    assert broken(answer) == {"tokens"}
    assert len(answer.json["findings"][0]["runs"]) == 2


def test_a_hole_below_the_watermark_is_named(books: Books) -> None:
    books.passed(5)
    gone = books.slots()[2]
    books.tamper(f"DELETE FROM fencepost_run WHERE slot = {gone}")
    answer = books.ask("verify", "--json")
    assert broken(answer) == {"every slot"}
    assert len(answer.json["findings"][0]["runs"]) == 2  # those beside it
    assert "but nothing is on record of" in books.ask("verify").out


def test_a_range_that_covers_what_ran_is_named(books: Books) -> None:
    books.passed(2)
    books.fp.pause("bills")
    books.passed(2)
    first = books.slots()[0]
    books.tamper(f"UPDATE fencepost_span SET first = {first}")
    answer = books.ask("verify", "--json")
    assert broken(answer) == {"every slot"}
    assert answer.json["findings"][0]["ranges"]


def test_attempts_that_overlap_are_named(books: Books) -> None:
    books.passed(3)
    second, third = books.slots()[1:]
    begin = f"(SELECT started_at FROM fencepost_run WHERE slot = {third})"
    books.tamper(f"UPDATE fencepost_run SET ended_at = {begin} + 0.5 WHERE slot = {second}")
    answer = books.ask("verify", "--json")
    assert broken(answer) == {"one at once"}
    assert len(answer.json["findings"][0]["runs"]) == 2


@pytest.mark.parametrize("ahead", [0, 5], ids=["its own loss", "a later claim"])
def test_an_end_by_an_attempt_that_had_lost_its_run_is_named(books: Books, ahead: int) -> None:
    books.passed(1)
    books.tamper(
        "INSERT INTO fencepost_event (namespace, job, slot, manual, rerun, at, what, token, "
        f"holder, detail) SELECT namespace, job, slot, manual, rerun, started_at, 'attempt_lost', "
        f"token + {ahead}, 'elsewhere pid 1', '' FROM fencepost_run",
    )
    assert "no stale end" in broken(books.ask("verify", "--json"))


def test_a_life_that_cannot_be_is_named(books: Books) -> None:
    books.passed(2)
    slot = books.slots()[1]
    books.tamper(f"UPDATE fencepost_run SET starts = 0, token = 0 WHERE slot = {slot}")
    assert "lives" in broken(books.ask("verify", "--json"))
    assert "was not there and became succeeded" in books.ask("verify").out


def test_a_start_that_was_not_counted_is_named(books: Books) -> None:
    books.passed(1)
    books.tamper("UPDATE fencepost_run SET starts = 3")
    assert broken(books.ask("verify", "--json")) == {"lives"}


# Histories in files.


def test_an_exported_history_proves_the_same_elsewhere(books: Books, tmp_path: Path) -> None:
    books.passed(3)
    books.fp.pause("bills")
    books.passed(2)
    path = tmp_path / "history.jsonl"
    exported = books.ask("verify", "--export", str(path), "--json")
    assert exported.code == 0
    assert books.ask("verify", "--history", str(path), "--json").json == exported.json
    lines = [line for line in path.read_text().splitlines() if '"kind":"run"' not in line]
    path.write_text("\n".join(lines))
    assert broken_promises(books, path) == ["every slot"]


def test_a_lease_that_fell_behind_its_runs_is_named(books: Books, tmp_path: Path) -> None:
    books.passed(2)
    path = tmp_path / "history.jsonl"
    books.ask("verify", "--export", str(path))
    lines = [line for line in path.read_text().splitlines() if '"kind":"lease"' not in line]
    path.write_text("\n".join([*lines, '{"kind":"lease","name":"bills","token":7}']))
    assert broken_promises(books, path) == ["tokens"]
    assert "the lease 'bills' is at 7" in books.ask("verify", "--history", str(path)).out


def broken_promises(books: Books, path: Path) -> list[str]:
    document = books.ask("verify", "--history", str(path), "--json").json
    return [promise for promise, kept in document["promises"].items() if not kept]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("not json\n", "line 1 is no record of a ledger"),
        ('{"kind":"ledger","at":1.0}\n{"kind":"run"}\n', "line 2 is no record of a ledger"),
        ('{"kind":"lease","name":"a","token":1}\n', "a line of kind 'ledger' is missing"),
    ],
)
def test_a_history_that_is_none_is_refused_by_its_line(
    books: Books, tmp_path: Path, text: str, sentence: str
) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(text)
    answer = books.ask("verify", "--history", str(path))
    assert answer.code == 2
    assert sentence in answer.err


def test_a_history_that_is_not_there_is_one_sentence(books: Books, tmp_path: Path) -> None:
    answer = books.ask("verify", "--history", str(tmp_path / "nowhere"))
    assert answer.code == 2
    assert len(answer.err.splitlines()) == 1


def test_what_the_simulator_prints_can_be_judged_too(books: Books, tmp_path: Path) -> None:
    path = tmp_path / "simulated.jsonl"
    words = ("simulate", "--of", "runs", "--seeds", "1", "--history", "--json")
    path.write_text(books.ask(*words).out)
    assert books.ask("verify", "--history", str(path)).code == 0
    events = [json.loads(line) for line in path.read_text().splitlines()]
    claim = next(event for event in events if event["what"] == "claimed")
    path.write_text("\n".join(json.dumps(event) for event in [*events, claim | {"token": 1}]))
    assert books.ask("verify", "--history", str(path)).code == 1


# What contradicts the ledger's own rules.


def test_a_second_row_that_only_says_it_was_made_up_is_named(books: Books) -> None:
    books.passed(3)
    columns = "SELECT name FROM pragma_table_info('fencepost_run') WHERE name <> 'rerun'"
    database = sqlite3.connect(books.path)
    names = ", ".join(name for (name,) in database.execute(columns))
    database.close()
    slot = books.slots()[1]
    books.tamper(
        f"INSERT INTO fencepost_run (rerun, {names}) SELECT 1, {names} FROM fencepost_run "
        f"WHERE slot = {slot}",
        f"UPDATE fencepost_run SET token = token + 1, started_at = ended_at + 1, "
        f"created_at = ended_at + 1, ended_at = ended_at + 1.5, origin = 'backfill' "
        f"WHERE slot = {slot} AND rerun = 1",
    )
    assert broken(books.ask("verify", "--json")) == {"one run"}
    assert "says that a backfill asked for it" in books.ask("verify").out


def test_a_watermark_that_was_set_back_is_named(books: Books) -> None:
    books.passed(3)
    second = books.slots()[1]
    books.tamper(f"UPDATE fencepost_job SET watermark = {second}")
    assert broken(books.ask("verify", "--json")) == {"every slot"}
    assert "is above that" in books.ask("verify").out


def test_a_range_above_the_watermark_is_named(books: Books) -> None:
    books.passed(1)
    books.fp.pause("bills", reason="holidays")
    books.passed(3)
    (first,) = books.slots()
    books.tamper(f"UPDATE fencepost_job SET watermark = {first}")
    assert broken(books.ask("verify", "--json")) == {"every slot"}
    assert "a range reaches to" in books.ask("verify").out


def test_a_scheduled_run_above_the_watermark_is_named(books: Books) -> None:
    books.passed(3)
    books.tamper(f"UPDATE fencepost_run SET slot = slot + 60 WHERE slot = {books.slots()[-1]}")
    answer = books.ask("verify")
    assert answer.code == 1
    assert "is above that" in answer.out


def test_a_scheduled_run_of_a_slot_that_its_schedule_lacks_is_named(books: Books) -> None:
    books.passed(3)
    columns = "SELECT name FROM pragma_table_info('fencepost_run') WHERE name <> 'slot'"
    database = sqlite3.connect(books.path)
    names = ", ".join(name for (name,) in database.execute(columns))
    database.close()
    slot = books.slots()[1]
    books.tamper(
        f"INSERT INTO fencepost_run (slot, {names}) SELECT slot + 30, {names} FROM fencepost_run "
        f"WHERE slot = {slot}",
        f"UPDATE fencepost_run SET token = token + 1, started_at = ended_at + 1, "
        f"ended_at = ended_at + 1.5 WHERE slot = {slot + 30}",
    )
    assert broken(books.ask("verify", "--json")) == {"every slot"}
    assert "is no slot of" in books.ask("verify").out


def test_a_run_that_runs_for_ever_behind_later_ones_is_named(books: Books) -> None:
    books.passed(3)
    first = books.slots()[0]
    books.tamper(
        f"UPDATE fencepost_run SET state = 'running', ended_at = 0.0, beat_at = started_at "
        f"WHERE slot = {first}"
    )
    assert broken(books.ask("verify", "--json")) == {"one at once"}
    assert "still runs, and" in books.ask("verify").out


def test_a_run_that_runs_for_ever_is_named_whatever_its_lock_is_called(books: Books) -> None:
    books.passed(3)
    first, *_ = books.slots()
    books.tamper(
        f"UPDATE fencepost_run SET state = 'running', ended_at = 0.0 WHERE slot = {first}",
        "UPDATE fencepost_run SET lock = 'a#b', lease = 'a#b'",
    )
    assert "still runs, and" in books.ask("verify").out


def test_a_slot_of_a_schedule_in_a_time_zone_may_have_been_one_then(books: Books) -> None:
    """The rules of a zone change: then its slots of the past are others by those of today."""
    books.passed(3)
    slot = books.slots()[1]
    books.tamper(
        f"UPDATE fencepost_job SET spec = '{Cron('* * * * *', tz='Asia/Kathmandu').spec}'",
        f"UPDATE fencepost_run SET slot = slot + 1 WHERE slot = {slot}",
    )
    told = books.ask("verify").out
    assert "by the time zones of today" in told
    assert "is no slot of" not in told


def test_a_job_that_was_deleted_is_missed(books: Books) -> None:
    books.passed(3)
    books.tamper("DELETE FROM fencepost_job")
    assert broken(books.ask("verify", "--json")) == {"every slot"}
    assert "3 slots of job 'bills' were decided, and it is not on record" in books.ask("verify").out


def test_a_begin_that_was_moved_over_a_hole_is_named(books: Books) -> None:
    books.passed(4)
    _, second, third, _ = books.slots()
    books.tamper(
        f"DELETE FROM fencepost_run WHERE slot = {second}",
        f"UPDATE fencepost_job SET effective_from = {third}",
    )
    assert broken(books.ask("verify", "--json")) == {"every slot"}
    assert "is before that" in books.ask("verify").out


def test_an_export_of_an_older_fencepost_is_still_proven(books: Books, tmp_path: Path) -> None:
    books.passed(3)
    path = tmp_path / "history.jsonl"
    books.ask("verify", "--export", str(path))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"kind":"mark"' not in line))
    assert len(path.read_text().splitlines()) == len(lines) - 1
    assert books.ask("verify", "--history", str(path)).code == 0
