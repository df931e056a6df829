"""However often those who fire alarms are killed, each generation commits once.

The database itself keeps the count: triggers of this test write down every claim, loss, error and
commit, in the transaction in which it happens, and a second commit would break a primary key.
"""

from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fencepost import Fencepost
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fencepost import Alarm

PROGRAM = Path(__file__).with_name("alarm_program.py")
# 400 in every run of the tests; FENCEPOST_ALARMS=10000 in `make soak`.
KEYS = int(os.environ.get("FENCEPOST_ALARMS", "400"))
KILLS = max(10, KEYS // 50)
PROCESSES = 4

WITNESS = """
CREATE TABLE committed (key TEXT, generation INTEGER, PRIMARY KEY (key, generation));
CREATE TABLE happened (what TEXT, key TEXT, generation INTEGER);

CREATE TRIGGER witness_deleted AFTER DELETE ON fencepost_alarm
  WHEN OLD.state = 'firing' AND OLD.fired = OLD.generation
BEGIN
    INSERT INTO committed VALUES (OLD.key, OLD.generation);
END;
CREATE TRIGGER witness_rearmed AFTER UPDATE ON fencepost_alarm
  WHEN OLD.fired = OLD.generation AND OLD.fired > 0 AND NEW.fired = 0 AND NEW.set_by = OLD.nonce
BEGIN
    INSERT INTO committed VALUES (OLD.key, OLD.generation);
    INSERT INTO happened VALUES ('set', NEW.key, NEW.generation);
END;
CREATE TRIGGER witness_claimed AFTER UPDATE ON fencepost_alarm
  WHEN NEW.generation = OLD.generation AND NEW.starts > OLD.starts
BEGIN
    INSERT INTO happened VALUES ('claimed', NEW.key, NEW.generation);
END;
CREATE TRIGGER witness_lost AFTER UPDATE ON fencepost_alarm
  WHEN NEW.generation = OLD.generation AND NEW.losses > OLD.losses
BEGIN
    INSERT INTO happened VALUES ('lost', NEW.key, NEW.generation);
END;
CREATE TRIGGER witness_failed AFTER UPDATE ON fencepost_alarm
  WHEN NEW.generation = OLD.generation AND NEW.errors > OLD.errors
BEGIN
    INSERT INTO happened VALUES ('failed', NEW.key, NEW.generation);
END;
CREATE TRIGGER witness_replaced AFTER UPDATE ON fencepost_alarm
  WHEN NEW.generation > OLD.generation AND OLD.fired = OLD.generation AND NEW.fired = OLD.fired
   AND OLD.fired > 0
BEGIN
    INSERT INTO happened VALUES ('replaced', OLD.key, OLD.generation);
END;
"""


class Crew:
    """Processes that fire alarms, each started again when it was killed."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.url = folder, f"sqlite:///{folder}/ledger.db"
        self.members = [self.started() for _ in range(PROCESSES)]
        for member in self.members:
            assert member.stdout is not None
            assert member.stdout.readline() == b"ready\n"

    def started(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(PROGRAM), self.url, str(self._folder)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def kill_one(self, dice: random.Random) -> None:
        victim = self.members.pop(dice.randrange(2))  # the young ones have hardly begun
        assert victim.poll() is None, victim.communicate()
        victim.kill()
        victim.communicate()
        self.members.append(self.started())

    def dismiss(self) -> None:
        (self._folder / "stop").touch()
        for member in self.members:
            _, said = member.communicate(timeout=60)
            assert (member.returncode, said) == (0, b"")

    def end(self) -> None:
        for member in self.members:
            if member.poll() is None:
                member.kill()
                member.communicate()


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    with Fencepost(f"sqlite:///{tmp_path}/ledger.db") as fp:
        fp.alarms.list()  # which makes the tables
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as db:
        db.executescript(WITNESS)
    crew = Crew(tmp_path)
    yield crew
    crew.end()


def meddle(fp: Fencepost, crew: Crew, dice: random.Random) -> dict[str, int]:
    """Set every key, and some again, and clear some, while processes are killed.

    Return each key's last generation that was set from here; 0 for those that were cleared last.
    """
    last: dict[str, int] = {}
    acts = [str(key) for key in range(KEYS)]
    acts += [dice.choice(acts) for _ in range(KEYS // 2)]
    dice.shuffle(acts)
    every = len(acts) // KILLS
    for number, key in enumerate(acts):
        if number % every == every - 1:
            crew.kill_one(dice)
        if key in last and dice.random() < 0.3:
            fp.alarms.clear("k", key)
            last[key] = 0
        else:
            again = dice.choice((0, 0, 1, 2))
            last[key] = fp.alarms.set("k", key, in_=dice.random() * 0.1, payload=again)
    return last


def wait_until_quiet(fp: Fencepost, crew: Crew, dice: random.Random) -> None:
    give_up = time.monotonic() + 60 + KEYS / 50
    kills = KILLS // 2
    book = fp._alarming.book
    while (left := fp.alarms.list(limit=1)) or finish(book.next_due(("k",))).firing:
        assert not left or left[0].state != "dead", left
        assert time.monotonic() < give_up, fp.alarms.list()
        if kills:
            kills -= 1
            crew.kill_one(dice)
        time.sleep(0.1)


def test_each_generation_commits_at_most_once_and_each_final_one_exactly_once(
    crew: Crew, tmp_path: Path
) -> None:
    dice = random.Random(KEYS)
    with Fencepost(crew.url) as fp:
        last = meddle(fp, crew, dice)
        wait_until_quiet(fp, crew, dice)
    crew.dismiss()
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as db:
        committed = set(db.execute("SELECT key, generation FROM committed"))
        happened: dict[str, Counter[Any]] = {
            what: Counter(
                db.execute("SELECT key, generation FROM happened WHERE what = ?", (what,))
            )
            for what in ("set", "claimed", "lost", "failed", "replaced")
        }
        held = db.execute("SELECT count(*) FROM fencepost_lease WHERE held").fetchone()
    assert held == (0,)
    for key, generation in last.items():
        assert not generation or (key, generation) in committed
    # What a handler set is final unless somebody has set or cleared the key since.
    for key, generation in happened["set"]:
        newest = max(g for k, g in committed | set(last.items()) if k == key)
        assert (key, generation) in committed or generation < newest or not last[key]
    check_starts(tmp_path, committed, happened)


def check_starts(folder: Path, committed: set[Any], happened: dict[str, Counter[Any]]) -> None:
    """Check that starts are one, and one for each loss and retry that is on record."""
    claimed = happened["claimed"]
    lost, failed, replaced = (happened[what] for what in ("lost", "failed", "replaced"))
    for which, claims in claimed.items():
        ends = lost[which] + failed[which] + replaced[which] + (which in committed)
        assert claims == ends, which
    assert all(claimed[which] for which in committed)
    starts = Counter(
        (key, int(generation))
        for key, generation in map(str.split, (folder / "starts").read_text().splitlines())
    )
    for which, count in starts.items():
        # Who was killed between its claim and its first line is on record as lost all the same.
        assert claimed[which] - lost[which] <= count <= claimed[which], which
    assert set(committed) <= set(starts)
    if KILLS >= 100:  # of a few kills none may come at a bad moment
        assert sum(lost.values()) >= 1


def test_a_death_is_noticed_within_a_second_though_the_lease_is_longer(
    crew: Crew, tmp_path: Path
) -> None:
    crew.end()
    with Fencepost(crew.url) as fp:
        seen = []

        @fp.alarm("k")
        def handle(alarm: Alarm) -> None:
            seen.append((alarm.key, alarm.generation, alarm.attempt))

        generation = fp.alarms.set("k", "-1", in_=0)
        crew.members = [member] = [crew.started()]
        assert member.stdout is not None
        assert [member.stdout.readline() for _ in range(2)] == [b"ready\n", b"inside\n"]
        assert not fp.alarms.run_due()
        crew.end()
        killed = time.monotonic()
        while not fp.alarms.run_due():
            due_in = finish(fp._alarming.due_in())
            assert due_in is not None
            time.sleep(due_in)
        assert time.monotonic() - killed < 1.0
        assert seen == [("-1", generation, 1)]


def test_an_instance_fires_what_a_dead_one_had_though_nothing_else_is_due(crew: Crew) -> None:
    crew.end()
    with Fencepost(crew.url) as fp:
        fired = threading.Event()
        fp.alarm("k")(fired.set)
        fp.alarms.set("k", "-1", in_=0)
        crew.members = [member] = [crew.started()]
        assert member.stdout is not None
        assert [member.stdout.readline() for _ in range(2)] == [b"ready\n", b"inside\n"]
        instance = threading.Thread(target=lambda: fp.run(signals=False), daemon=True)
        instance.start()
        crew.end()
        try:
            assert fired.wait(10)
        finally:
            fp.stop(grace=0)
            instance.join(10)
