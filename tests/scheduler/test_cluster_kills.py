"""However its instances die and freeze, a cluster runs every slot once, and forgets none."""

from __future__ import annotations

import os
import random
import time
from typing import TYPE_CHECKING

import pytest
from schedlab import (
    Member,
    books_of,
    complaints,
    early,
    effects,
    members,
    repeated,
    unproven,
    until,
)

from fencepost.model.run import State
from servers import MariaDB, MySQL, Postgres, shared

if TYPE_CHECKING:
    from pathlib import Path

JOBS, LEASE = 20, 2.0
# Half a minute in every run of the tests; FENCEPOST_SOAK_SECONDS=120 in `make soak`.
SECONDS = float(os.environ.get("FENCEPOST_SOAK_SECONDS", "30"))
EVERY = 10.0 if SECONDS > 60 else 3.0
# Whoever is late passes slots over, and a slot finds its job's last run not resumed yet.
REASONS = {"coalesced", "lock_held"}


# Where a server tells the time the clocks of instances may be ten minutes ahead, or behind.
SERVERS: dict[str, type[Postgres | MariaDB]] = {
    "postgres": Postgres,
    "mariadb": MariaDB,
    "mysql": MySQL,
}
CLOCKS = {"sqlite": (0, 0, 0, 0), **dict.fromkeys(SERVERS, (0, +600, -600, 0))}


@pytest.mark.parametrize("kind", ["sqlite", *SERVERS])
def test_instances_that_die_and_freeze_run_nothing_twice_and_leave_nothing_out(
    tmp_path: Path, kind: str
) -> None:
    if kind in SERVERS:
        name = f"kills_{time.time_ns()}"  # MariaDB's have at most 64 characters
        (tmp_path / "url").write_text(shared(SERVERS[kind]).database(name))
    dice = random.Random(SECONDS)
    with members() as fleet:

        def start(off: float) -> Member:
            member = Member(tmp_path, "cluster", off=off, jobs=JOBS, lease=LEASE)
            fleet.append(member)
            return member

        alive = [start(off) for off in CLOCKS[kind]]
        until(lambda: len({effect.pid for effect in effects(tmp_path)}) == 4)
        end = time.monotonic() + SECONDS
        kills = 0
        while time.monotonic() < end:
            frozen = dice.choice(alive)
            frozen.pause()
            time.sleep(EVERY / 2)
            victim = dice.choice([member for member in alive if member is not frozen])
            victim.kill()
            kills += 1
            alive.remove(victim)
            alive.append(start(victim.off))
            time.sleep(max(EVERY / 2, LEASE + 0.5 - EVERY / 2))
            frozen.go_on()
        # Whoever was started last must be up, or there is nobody yet to hear the signal.
        until(lambda: {member.pid for member in alive} <= {e.pid for e in effects(tmp_path)})
        for member in alive:
            assert member.alive
            member.ask_to_stop()
        assert [member.ended() for member in alive] == [0] * 4
    books, done = books_of(tmp_path), effects(tmp_path)
    assert kills >= 2
    assert repeated(books, done) == []
    assert unproven(tmp_path) == []
    assert complaints(books, reasons=REASONS) == []
    assert early(books, done) == []
    assert {member.off for member in fleet if member.pid in {one.pid for one in done}} == set(
        CLOCKS[kind]
    )
    succeeded = [run for run in books.runs if run.state is State.SUCCEEDED]
    assert len(succeeded) > JOBS * SECONDS * 0.2  # as many as a busy machine has time for
    assert not [run for run in books.runs if run.state is State.FAILED]
    # What the stop left behind was given back: nothing is said to run that nobody runs.
    assert not [run for run in books.runs if run.state is State.RUNNING]
