"""Many clients at once, on one server, doing whatever they can: the records prove what they did."""

from __future__ import annotations

import os
import random
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from test_planners_agree import JOBS

from fencepost.cli.verify import gathered
from fencepost.errors import LeaseLost, RunLost, UnknownRun
from fencepost.ledger.api import NOTHING, Attempt
from fencepost.ledger.planning import Ask, Asked, End, Instance, Lane
from fencepost.model.claim import Claimed, Verdict, Want
from fencepost.model.definition import Definition
from fencepost.model.ending import Settled
from fencepost.model.lease import Holder
from fencepost.model.policy import OnLoss, Overlap, Policy
from fencepost.model.rules import CatchUp, Rules, text_of
from fencepost.model.run import State
from fencepost.model.schedule import Every, EveryAfter, spec_of
from fencepost.model.slot import RunKey
from fencepost.testing.ledger_checker import prove
from fencepost.world.flow import finish
from marialab import opened_mariadb
from pglab import opened_postgres
from servers import MariaDB, MySQL, Postgres, shared

if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost.ledger.draft_ledger import DraftLedger

# Six seconds in every run of the tests; FENCEPOST_SOAK_SECONDS for longer storms.
SECONDS = min(float(os.environ.get("FENCEPOST_SOAK_SECONDS", "6")), 120.0)
CLIENTS, LEASE, TRUST = 6, 1.0, 0.5
POLICIES = (
    Policy(lease=LEASE, loss_pause=0.0),
    Policy(lease=LEASE, overlap=Overlap.ALLOW, max_concurrent=2, loss_pause=0.0),
    Policy(lease=LEASE, overlap=Overlap.RESCHEDULE, max_waiting=None, loss_pause=0.0),
    Policy(lease=LEASE, overlap=Overlap.REPLACE, cancel_grace=0.2, on_loss=OnLoss.FAIL),
)
SPECS = (spec_of(Every(1)), spec_of(Every(2)), spec_of(EveryAfter(1)), spec_of(Every(1)))
RULES = (Rules(), Rules(CatchUp.ALL), Rules(), Rules(CatchUp.ALL, live_first=True))
ENDINGS = (
    Settled(State.SUCCEEDED),
    Settled(State.SUCCEEDED),
    Settled(State.FAILED, "error", error="Oops"),
    Settled(State.WAITING_RETRY, "error", 0.2, error="Oops"),
    Settled(State.PENDING, "released"),
)
# What may be answered to somebody who comes too late. All else is a failure of the test.
ANSWERS = (RunLost, LeaseLost, UnknownRun)


class Client(threading.Thread):
    """One process of a cluster, as far as the server can tell."""

    def __init__(self, number: int, ledger: DraftLedger) -> None:
        super().__init__(daemon=True)
        self.number, self.ledger, self.dice = number, ledger, random.Random(number)
        self.attempts: list[Attempt] = []
        self.until: dict[str, float] = {}  # how long each may believe in its lease, by nonce
        self.asked = self.begun = 0
        self.sent = 0.0
        self.failed: BaseException | None = None
        self.instance = Instance(f"i{number}", "here", number, "1.0")

    def run(self) -> None:
        verbs = (
            *[self.tick] * 8,
            *[self.claim] * 4,
            *[self.beat, self.save] * 2,
            self.end,
            *(self.cancel, self.forget, self.attend, self.pause, self.backfill, self.prune),
        )
        end = time.monotonic() + SECONDS
        try:
            finish(self.ledger.planner.announce(self.instance, definitions()))
            while time.monotonic() < end:
                now = time.monotonic()
                self.attempts = [own for own in self.attempts if self.until[own.nonce] > now]
                self.sent = now
                with suppress(*ANSWERS):
                    self.dice.choice(verbs)()
        except BaseException as error:  # noqa: BLE001 -- whoever waits for us tells of it
            self.failed = error

    def want(self, asked: Asked) -> Want:
        number = JOBS.index(asked.template)
        lock = "shared" if asked.template in JOBS[2:] else asked.key.job
        holder = Holder(asked.nonce, "here", self.number)
        policy = POLICIES[number]
        return Want(asked.key, holder, policy, lock, asked.trigger, epoch=asked.epoch)

    def nonce(self) -> str:
        self.asked += 1
        return f"client {self.number} ask {self.asked:05} "

    def tick(self) -> None:
        ended = [
            End(self.attempts.pop(), self.dice.choice(ENDINGS), NOTHING)
            for _ in range(self.dice.randrange(3))
            if self.attempts
        ]
        sweep, room = self.dice.random() < 0.5, self.dice.randrange(4)
        ask = Ask(self.want, self.nonce(), room, ended, sweep=sweep, stirs=frozenset(JOBS))
        ticked = finish(self.ledger.planner.tick(ask))
        for begun in ticked.begun:
            self.took(begun.claimed)

    def claim(self) -> None:
        job = self.dice.choice(JOBS)
        slot = int(time.time()) - self.dice.randrange(3)
        key = RunKey(job, slot, manual=self.dice.randrange(20))
        asked = Asked(key, job, self.nonce(), "trigger", 0, "")
        want = self.want(asked)
        claimed = finish(self.ledger.claim(want))
        if self.dice.random() < 0.3:  # as if the first answer had been lost
            again = finish(self.ledger.claim(want))
            if claimed.grant is not None and again.grant is not None:
                assert again.grant.token == claimed.grant.token
        if claimed.verdict is Verdict.GO:
            self.took(claimed)

    def took(self, claimed: Claimed) -> None:
        run = claimed.run
        assert run is not None
        self.begun += 1
        holder, self.until[run.holder.nonce] = str(run.holder), self.sent + TRUST
        self.attempts.append(Attempt(run.key, run.token, run.holder.nonce, run.lease, holder, run))

    def beat(self) -> None:
        for attempt in self.attempts[-3:]:
            finish(self.ledger.beat(attempt, ttl=LEASE))
            self.until[attempt.nonce] = self.sent + TRUST

    def save(self) -> None:
        if self.attempts:
            text = f'{{"page":{self.dice.randrange(9)}}}'
            finish(self.ledger.save(self.dice.choice(self.attempts), checkpoint=text))

    def end(self) -> None:
        if self.attempts:
            finish(self.ledger.finish(self.attempts.pop(0), self.dice.choice(ENDINGS)))

    def cancel(self) -> None:
        runs = finish(self.ledger.runs(limit=5, states=(State.RUNNING, State.PENDING)))
        if runs and self.dice.random() < 0.2:
            key, force = self.dice.choice(runs).key, self.dice.random() < 0.3
            finish(self.ledger.cancel(key, force=force, operator="olga"))

    def forget(self) -> None:
        """Be as dead, to those that it has, as a process that crashed."""
        if self.dice.random() < 0.5:
            self.attempts.clear()

    def attend(self) -> None:
        finish(self.ledger.planner.attend(self.instance))

    def pause(self) -> None:
        if self.dice.random() < 0.1:
            job = self.dice.choice(JOBS)
            finish(self.ledger.planner.pause(job, reason="storm"))
            finish(self.ledger.planner.resume(job))

    def backfill(self) -> None:
        if self.dice.random() < 0.1:
            end = int(time.time()) - 2
            job = self.dice.choice(JOBS[:2])
            finish(self.ledger.planner.backfill(Lane(0, job, end - 5, end, end - 5, "skip")))

    def prune(self) -> None:
        finish(self.ledger.planner.prune(most=10))


def definitions() -> list[Definition]:
    return [
        Definition(job, spec, text_of(rules))
        for job, spec, rules in zip(JOBS, SPECS, RULES, strict=True)
    ]


def deadlocks_of_postgres() -> int:
    statement = "SELECT deadlocks FROM pg_stat_database WHERE datname = 'storms'"
    return int(str(shared(Postgres).run(statement)[0][0]))


def deadlocks_of_mariadb() -> int:
    return int(str(shared(MariaDB).run("SHOW GLOBAL STATUS LIKE 'Innodb_deadlocks'")[0][1]))


def deadlocks_of_mysql() -> int:
    counted = "SELECT count FROM information_schema.innodb_metrics WHERE name = 'lock_deadlocks'"
    return int(str(shared(MySQL).run(counted)[0][0]))


@pytest.mark.parametrize(
    ("kind", "opened", "deadlocks"),
    [
        (Postgres, opened_postgres, deadlocks_of_postgres),
        (MariaDB, opened_mariadb, deadlocks_of_mariadb),
        (MySQL, opened_mariadb, deadlocks_of_mysql),
    ],
)
def test_what_many_clients_do_at_once_keeps_every_promise(
    kind: type[Postgres | MariaDB],
    opened: Callable[..., DraftLedger],
    deadlocks: Callable[[], int],
) -> None:
    url = shared(kind).database("storms")
    space = f"storm-{time.time_ns()}"
    before = deadlocks()
    clients = [Client(number, opened(url, namespace=space)) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(SECONDS + 60)
    for client in clients:
        if client.failed is not None:
            raise client.failed
    ledger = clients[0].ledger
    assert [str(finding) for finding in prove(finish(gathered(ledger))).findings] == []
    begun = sum(client.begun for client in clients)
    assert begun > CLIENTS * SECONDS / 2, "a storm in which little happens proves little"
    # Where two wait for each other the server ends one, and that is done again: but it takes time.
    assert (deadlocks() - before) * 50 < sum(client.asked for client in clients)
    for client in clients:
        finish(client.ledger.close())
