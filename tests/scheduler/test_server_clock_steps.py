"""The clock of the database server steps by an hour, either way, while a cluster is at work.

Nobody waits for longer than a lease lasts, and nothing is committed twice. What a ledger tells is
put in order by this machine's time before it is proven: its own clock told some hours twice.
"""

from __future__ import annotations

import itertools
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from schedlab import (
    Books,
    Member,
    books_of,
    complaints,
    effects,
    members,
    repeated,
    told,
    until,
    url_of,
)

from fencepost import Fencepost
from fencepost.cli.verify import gathered
from fencepost.errors import RunLost
from fencepost.ledger.api import Attempt
from fencepost.model.claim import Claimed, Verdict, Want
from fencepost.model.ending import Settled
from fencepost.model.lease import Holder
from fencepost.model.policy import Policy
from fencepost.model.run import State
from fencepost.model.slot import RunKey
from fencepost.testing.ledger_checker import prove
from fencepost.world.flow import finish
from servers.mariadb import MariaDBOutOfTime
from servers.postgres import PostgresOutOfTime

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fencepost.ledger.api import Ledger
    from fencepost.model.run import RunRecord
    from fencepost.testing.evidence import Evidence

    Server = PostgresOutOfTime | MariaDBOutOfTime

HOUR, LEASE, JOBS = 3600.0, 2.0, 5
# How long a busy machine may take for what takes no time: still far less than an hour.
SLACK = 15.0
POLICY = Policy(lease=LEASE, loss_pause=0.0)
DONE = Settled(State.SUCCEEDED)
# Those of the steps below that are steps back. They lie apart: what the clock showed tells when.
BACK = (-HOUR, -HOUR / 6)


@pytest.fixture(params=[PostgresOutOfTime, MariaDBOutOfTime], scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with request.param.own() as server:
        yield server


class Phase(NamedTuple):
    """How far the server's clock was off, and from when to when by this machine's."""

    off: float
    start: float
    end: float = float("inf")


class Story:
    """A database, the steps of its server's clock, and the time at which things happened."""

    def __init__(self, server: Server, folder: Path) -> None:
        self._server = server
        server.step(0)
        url = server.database(f"clock_{folder.name}_{os.getpid()}")
        (folder / "url").write_text(url)
        self.phases = [Phase(0.0, time.time())]

    def step(self, off: float) -> None:
        """Set the server's clock."""
        now = time.time()
        self.phases[-1] = self.phases[-1]._replace(end=now)
        self.phases.append(Phase(off, now))
        self._server.step(off)

    def real(self, at: float) -> float:
        """Return the time of this machine at which the server's clock was at an instant."""
        if not at:
            return at

        def miss(phase: Phase) -> float:
            return max(phase.start - (at - phase.off), at - phase.off - phase.end, 0.0)

        nearest = min(self.phases, key=miss)
        assert miss(nearest) < 1.0, f"the server's clock was never at {at}: {self.phases}"
        return at - nearest.off

    def ordered(self, evidence: Evidence) -> Evidence:
        """Return what a ledger has on record, by the time of this machine.

        When an attempt began that was lost the checker takes from its token, which is no less than
        the microsecond of its claim. While the server's clock was behind that was so by that clock
        only; by ours it is, for every token, once they are all raised by as much as it ever was
        behind. Their order stays the same.
        """
        instants = ("created_at", "started_at", "ended_at", "beat_at", "cancel_at")
        behind_us = round(max(-phase.off for phase in self.phases) * 1e6)

        def raised(token: int) -> int:
            return token and token + behind_us  # 0 is none

        def moved(run: RunRecord) -> RunRecord:
            real: dict[str, Any] = {name: self.real(getattr(run, name)) for name in instants}
            return run._replace(token=raised(run.token), **real)

        runs = tuple(map(moved, evidence.runs))
        events = tuple(
            event._replace(at=self.real(event.at), token=raised(event.token))
            for event in evidence.events
        )
        leases = tuple(top._replace(token=raised(top.token)) for top in evidence.leases)
        return evidence._replace(runs=runs, events=events, leases=leases)

    def unproven(self, ledger: Ledger) -> list[str]:
        """Say what the checker finds broken: a step of the clock is no excuse."""
        found = prove(self.ordered(finish(gathered(ledger)))).findings
        return [str(finding) for finding in found]


@pytest.fixture
def story(server: Server, tmp_path: Path) -> Story:
    return Story(server, tmp_path)


def claim(ledger: Ledger, key: RunKey) -> Claimed:
    holder = Holder(os.urandom(8).hex(), "here", 1)
    return finish(ledger.claim(Want(key, holder, POLICY, key.job)))


def attempt_of(claimed: Claimed) -> Attempt:
    run = claimed.run
    assert run is not None
    return Attempt(run.key, run.token, run.holder.nonce, run.lease, str(run.holder))


def resumed(ledger: Ledger, key: RunKey) -> Claimed:
    """Claim a run whose attempt has vanished, as soon as that is granted."""
    found: list[Claimed] = []

    def granted() -> bool:
        found.append(claim(ledger, key))
        return found[-1].verdict is Verdict.GO

    until(granted, within=LEASE + SLACK)
    return found[-1]


@pytest.mark.parametrize("step", [-HOUR, HOUR])
def test_a_run_is_resumed_within_its_ttl_and_its_zombie_commits_nothing(
    story: Story, tmp_path: Path, step: float
) -> None:
    with Fencepost(url_of(tmp_path)) as fp:
        ledger, key = fp._working.ledger, RunKey("bills", int(time.time()))
        zombie = attempt_of(claim(ledger, key))
        story.step(step)
        began = time.monotonic()
        living = attempt_of(resumed(ledger, key))
        assert step < 0 or time.monotonic() - began < SLACK, "a step forward ends it early"
        assert living.token > zombie.token
        for late in (
            lambda: ledger.beat(zombie, ttl=LEASE),
            lambda: ledger.save(zombie, checkpoint="1"),
            lambda: ledger.begin(zombie, scope="x", items=["a"], call="c", repeat=False),
            lambda: ledger.finish(zombie, DONE),
        ):
            with pytest.raises(RunLost):
                finish(late())
        ended = finish(ledger.finish(living, DONE))
        assert (ended.state, ended.starts, ended.losses) == (State.SUCCEEDED, 2, 1)
        story.step(0)
        assert claim(ledger, key).verdict is Verdict.ENDED
        assert story.unproven(ledger) == []


@pytest.mark.parametrize("step", [-HOUR, HOUR])
def test_who_renews_keeps_its_run_through_a_step_back_and_may_lose_it_ahead(
    story: Story, tmp_path: Path, step: float
) -> None:
    with Fencepost(url_of(tmp_path)) as fp:
        ledger, key = fp._working.ledger, RunKey("bills", int(time.time()))
        first = attempt_of(claim(ledger, key))
        story.step(step)
        if step < 0:
            finish(ledger.beat(first, ttl=LEASE))
            assert claim(ledger, key).verdict is Verdict.BUSY
        else:
            second = attempt_of(claim(ledger, key))
            with pytest.raises(RunLost):
                finish(ledger.finish(first, DONE))
            first = second
        assert finish(ledger.finish(first, DONE)).state is State.SUCCEEDED
        assert story.unproven(ledger) == []


def test_a_run_that_is_lost_twice_is_proven_though_its_second_token_is_older_than_its_first_loss(
    story: Story, tmp_path: Path
) -> None:
    """While the clock is behind a token is one more than the last: it does not tell the time."""
    with Fencepost(url_of(tmp_path)) as fp:
        ledger, key = fp._working.ledger, RunKey("bills", int(time.time()))
        claim(ledger, key)
        story.step(-HOUR)
        second = resumed(ledger, key)
        story.step(0)  # which ends its lease at once
        third = claim(ledger, key)
        ended = finish(ledger.finish(attempt_of(third), DONE))
        assert (ended.state, ended.starts, ended.losses) == (State.SUCCEEDED, 3, 2)
        lost = [event for event in finish(ledger.events(key)) if event.what == "attempt_lost"]
        assert attempt_of(second).token / 1e6 < story.real(lost[0].at)
        assert story.unproven(ledger) == []


def test_a_cluster_goes_on_through_steps_of_its_servers_clock(story: Story, tmp_path: Path) -> None:
    """Here is what a cluster does: it runs what is due by the server's clock, each slot once."""
    with Fencepost(url_of(tmp_path)) as fp, members() as fleet:
        fleet += [Member(tmp_path, "cluster", jobs=JOBS, lease=LEASE) for _ in range(3)]
        until(lambda: len({effect.pid for effect in effects(tmp_path)}) == 3)
        ledger, marks = fp._working.ledger, list[int]()

        def abandoned(number: int) -> RunKey:
            """Begin a run of one of their jobs, as a process would that dies now."""
            slot, tries = int(time.time()), itertools.count(1)
            keys = (RunKey(f"job-{number}", slot, manual=n) for n in tries)
            # One that finds its lock held is over.
            return next(key for key in keys if claim(ledger, key).verdict is Verdict.GO)

        def succeeded(key: RunKey) -> bool:
            run = finish(ledger.find(key))
            return run is not None and run.state is State.SUCCEEDED and run.losses >= 1

        def newest() -> int:
            marks.append(max(job.watermark for job in finish(ledger.jobs())))
            return marks[-1]

        def newer(than: int) -> bool:
            return newest() > than

        def noticed(what: str, *, by: int) -> bool:
            return [event["what"] for event in told(tmp_path)].count(what) == by

        # Two hours ahead in the end: the hour before was decided already.
        for number, off in enumerate((-HOUR, 0.0, HOUR, -HOUR / 6, 2 * HOUR)):
            key, before = abandoned(number), newest()
            if off == -HOUR:
                fleet[0].kill()
            story.step(off)
            until(partial(succeeded, key), within=LEASE + SLACK)
            until(partial(noticed, "clock_jumped", by=2 * (number + 1)))  # each of them
            if off in BACK:
                until(partial(noticed, "clock_set_back", by=BACK.index(off) + 1))  # by one
            else:
                until(partial(newer, before))
        assert marks == sorted(marks)
        for member in fleet[1:]:
            assert member.alive
            member.ask_to_stop()
        assert [member.ended() for member in fleet[1:]] == [0, 0]
        assert story.unproven(ledger) == []
    books, done = books_of(tmp_path), effects(tmp_path)
    manual = {(run.key.job, run.token) for run in books.runs if run.key.manual}
    scheduled = Books(books.jobs, [run for run in books.runs if not run.key.manual], books.spans)
    assert repeated(scheduled, [one for one in done if (one.job, one.token) not in manual]) == []
    assert complaints(books, reasons={"coalesced", "lock_held"}) == []
    assert not [run for run in books.runs if run.state in (State.FAILED, State.RUNNING)]
    events = [event["what"] for event in told(tmp_path)]
    assert not {"orphaned", "edited", "quarantined"} & set(events)
    assert events.count("clock_set_back") == len(BACK)
