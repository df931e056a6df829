"""The same commands, given to all planners, have the same answers and leave the same records."""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import given, settings, strategies as st
from ledgerlab import StillClocks, opened

from fencepost.errors import FencepostError
from fencepost.ledger.api import NOTHING, Attempt
from fencepost.ledger.memory import MemoryLedger
from fencepost.ledger.planning import Ask, Asked, End, Instance, Lane, Ticked
from fencepost.model.claim import Want
from fencepost.model.definition import Definition
from fencepost.model.ending import Settled
from fencepost.model.lease import Holder
from fencepost.model.policy import OnLoss, Overlap, Policy, RetryUntil
from fencepost.model.rules import CatchUp, Rules, text_of
from fencepost.model.run import State
from fencepost.model.schedule import At, Cron, Every, EveryAfter, spec_of
from fencepost.stores.memory import MemoryStore
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish
from marialab import MariaClocks, MySQLClocks
from pglab import ServerClocks, fresh_namespace, opened_postgres

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fencepost.ledger.api import Ledger
    from fencepost.testing.clock import SettableClocks

# A clock that shows whole sixty-fourths is exact in microseconds, and so in every ledger.
INSTANT = 1 / 64
TOKENS = 10**6 // 64
TOKEN = re.compile(r"\b\d{16}\b")
NOW = 1_700_000_000
EXAMPLES = int(os.environ.get("FENCEPOST_EXAMPLES", "60"))
JOBS = ("bills", "mail", "news", "old")
SHARING = ("mail", "news")
INSTANCES = tuple(
    Instance(f"i{number}", "here", number, "1.0", build=number // 3, orphan_after=300.0)
    for number in range(4)
)
SCHEDULES = (
    Every(60),
    Every(90, phase=7),
    Cron("*/2 * * * *"),
    EveryAfter(45),
    At(NOW + 100),
)
RULES = (
    Rules(),
    Rules(CatchUp.NONE),
    Rules(CatchUp.ALL),
    Rules(CatchUp.ALL, limit=2, pause=10.0),
    Rules(CatchUp.ALL, live_first=True, window=400.0),
    Rules(start_deadline=30.0),
    Rules(jitter=40.0),
)
POLICIES = (
    Policy(),
    Policy(overlap=Overlap.ALLOW, max_concurrent=2),
    Policy(overlap=Overlap.RESCHEDULE, start_deadline=100.0),
    Policy(overlap=Overlap.REPLACE, cancel_grace=5.0, max_losses=2),
    Policy(overlap=Overlap.FAIL, on_loss=OnLoss.FAIL),
    Policy(overlap=Overlap.RESCHEDULE, max_waiting=None, retry_until=RetryUntil.EXHAUSTED),
)
ENDINGS = (
    Settled(State.SUCCEEDED),
    Settled(State.SUCCEEDED),
    Settled(State.FAILED, "error", error="Oops"),
    Settled(State.WAITING_RETRY, "error", 20.0, error="Oops"),
    Settled(State.PENDING, "released"),
)

names = st.sampled_from(JOBS)
who = st.sampled_from(INSTANCES)
definitions = st.tuples(
    names,
    st.sampled_from(("", *map(spec_of, SCHEDULES), *map(spec_of, SCHEDULES))),
    st.sampled_from(tuple(map(text_of, RULES))),
    st.sampled_from(("", "", "", "mail")),  # template
    st.just("{}"),
    st.sampled_from((None, None, '"p"')),  # payload
    st.sampled_from(((), (), (), ("old",))),  # aliases
    st.sampled_from((0, 0, 0, 1)),  # build
).map(lambda words: Definition(*words))
several = st.lists(definitions, min_size=1, max_size=3)
before = st.integers(0, 8).map(lambda minutes: NOW + 60 * minutes)


def lane_from(words: tuple[object, ...]) -> Lane:
    """Return a lane that begins at its first slot, or at its last, as a backfill makes it."""
    lane = Lane(*words)  # type: ignore[arg-type]  # each its own
    return lane._replace(cursor=lane.until - 1 if lane.newest_first else lane.start)


lanes = st.tuples(
    st.just(0),
    names,
    before,
    before,
    st.just(0),
    st.sampled_from(("skip", "failed", "all")),
    st.booleans(),
    st.just(1),
    st.just("backfill"),
    st.sampled_from(("", spec_of(Every(30)))),
).map(lane_from)
ticks = st.tuples(
    st.just("tick"),
    st.integers(0, 3),  # room
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(ENDINGS)), max_size=3),
    st.booleans(),  # sweep
    st.sampled_from((False, False, False, True)),  # again
    st.sampled_from((None, None, None, *JOBS)),  # only
    st.integers(0, len(POLICIES) - 1),
    st.sampled_from(((), ("old",), ("bills", "mail"))),  # what this instance does not know
)
commands = st.one_of(
    *[st.tuples(st.just("announce"), who, several)] * 3,
    st.tuples(st.just("announce"), st.none(), several),
    *[st.tuples(st.just("attend"), who)] * 2,
    st.tuples(st.just("depart"), who),
    st.tuples(st.just("store"), several),
    *[ticks] * 8,
    *[st.tuples(st.just("pass"), st.sampled_from((1.0, 5.0, 31.0, 61.0, 130.0, 700.0)))] * 5,
    st.tuples(st.just("pause"), names, st.sampled_from((0.0, NOW + 100.0, NOW + 500.0))),
    st.tuples(st.just("resume"), names),
    st.tuples(st.just("retire"), names),
    st.tuples(st.just("backfill"), lanes),
    st.tuples(st.just("stop_lane"), st.integers(1, 3)),
    st.tuples(st.just("prune"), st.sampled_from((1, 500))),
    st.tuples(st.just("beat"), st.integers(0, 5)),
    st.tuples(st.just("cancel"), st.integers(0, 5), st.booleans()),
)


class Cluster:
    """One kind of ledger, as two processes see it, and the time that passes for both."""

    def __init__(self, clocks: SettableClocks, *ledgers: Ledger) -> None:
        self.clocks, self.ledgers = clocks, ledgers
        self.turn = 0

    @property
    def ledger(self) -> Ledger:
        self.turn += 1
        return self.ledgers[self.turn % len(self.ledgers)]


class Said(NamedTuple):
    """What was answered before, which later commands refer to."""

    attempts: list[Attempt]
    asks: list[str]

    def attempt(self, number: int) -> Attempt | None:
        return self.attempts[-1 - number % len(self.attempts)] if self.attempts else None


def obey(cluster: Cluster, said: Said, command: tuple[object, ...]) -> object:
    """Carry a command out on one cluster; return its answer, or what it raised."""
    cluster.clocks.advance(INSTANT)
    try:
        return VERBS[str(command[0])](cluster, said, *command[1:])
    except FencepostError as error:
        return type(error).__name__, str(error)


def tick(  # noqa: PLR0917 -- as the strategy has it
    cluster: Cluster,
    said: Said,
    room: int,
    ends: list[tuple[int, Settled]],
    sweep: bool,  # noqa: FBT001 -- as the strategy has it
    again: bool,  # noqa: FBT001
    only: str | None,
    policies: int,
    unknown: tuple[str, ...],
) -> Ticked:
    nonce = said.asks[-1] if again and said.asks else f"ask {len(said.asks):04x} "

    def want(asked: Asked) -> Want | None:
        if asked.template in unknown:
            return None
        number = JOBS.index(asked.template) if asked.template in JOBS else 0
        policy = POLICIES[(policies + number) % len(POLICIES)]
        lock = "shared" if asked.template in SHARING else asked.key.job
        holder = Holder(asked.nonce, "here", 1)
        return Want(asked.key, holder, policy, lock, asked.trigger, epoch=asked.epoch)

    told = [
        End(attempt, settled, NOTHING)
        for number, settled in ends
        if (attempt := said.attempt(number)) is not None
    ]
    ask = Ask(want, nonce, room, told, again=again, sweep=sweep, only=only, stirs=frozenset(JOBS))
    ask = ask._replace(rivals={"mail": ("news",), "news": ("mail",)})
    ticked = finish(cluster.ledger.planner.tick(ask))
    answers = [(type(end).__name__, str(end)) for end in ticked.ended]
    # Errors are no values, and a file does not tell the time.
    return ticked._replace(ended=answers, now=0.0)  # type: ignore[arg-type]


def beat(cluster: Cluster, said: Said, number: int) -> object:
    attempt = said.attempt(number)
    return None if attempt is None else finish(cluster.ledger.beat(attempt, ttl=30.0))


def cancel(cluster: Cluster, said: Said, number: int, force: bool) -> object:  # noqa: FBT001
    attempt = said.attempt(number)
    if attempt is None:
        return None
    return finish(cluster.ledger.cancel(attempt.key, force=force, operator="olga"))


VERBS: dict[str, Callable[..., object]] = {
    "announce": lambda cluster, _, *what: finish(cluster.ledger.planner.announce(*what)),
    "attend": lambda cluster, _, what: finish(cluster.ledger.planner.attend(what)),
    "depart": lambda cluster, _, what: finish(cluster.ledger.planner.depart(what)),
    "store": lambda cluster, _, what: finish(cluster.ledger.planner.store(what)),
    "tick": tick,
    "pass": lambda cluster, _, seconds: cluster.clocks.advance(seconds),
    "pause": lambda cluster, _, job, until: finish(
        cluster.ledger.planner.pause(job, reason="olga", until=until)
    ),
    "resume": lambda cluster, _, job: finish(cluster.ledger.planner.resume(job)),
    "retire": lambda cluster, _, job: finish(cluster.ledger.planner.retire(job, reason="over")),
    "backfill": lambda cluster, _, lane: finish(cluster.ledger.planner.backfill(lane)),
    "stop_lane": lambda cluster, _, number: finish(
        cluster.ledger.planner.stop_lane(number, reason="enough")
    ),
    "prune": lambda cluster, _, most: finish(cluster.ledger.planner.prune(most=most)),
    "beat": beat,
    "cancel": cancel,
}


def contents(cluster: Cluster) -> list[object]:
    """Return all that can be read of a ledger."""
    ledger = cluster.ledger
    planner = ledger.planner
    seen: list[object] = [finish(ledger.runs(limit=1_000)), finish(ledger.jobs())]
    seen += [finish(planner.lanes()), finish(planner.lanes(active=False))]
    seen += [finish(planner.lane(1)), finish(planner.events())]
    seen.append(finish(planner.instances()))
    for job in JOBS:
        seen.append(finish(planner.job(job)))
        seen.append(finish(planner.slots(job, start=0, end=2**60)))
        seen.append(finish(planner.slots(job, start=NOW + 90, end=NOW + 400, limit=2)))
    seen.append([view._replace(alive=None) for view in finish(ledger.leases.views())])
    return seen


def agree(clusters: Sequence[Cluster], program: Sequence[tuple[object, ...]]) -> list[object]:
    """Give all clusters the same commands; return the answers, after comparing them."""
    saids, answers = [Said([], []) for _ in clusters], []
    for command in program:
        given = [
            obey(cluster, said, command) for cluster, said in zip(clusters, saids, strict=True)
        ]
        expected, *others = map(alike, given)
        for other in others:
            assert other == expected, command
        answers.append(given[0])
        for said, answer in zip(saids, given, strict=True):
            if isinstance(answer, Ticked):
                remember(said, answer)
        expected, *found = (alike(contents(cluster)) for cluster in clusters)
        for seen in found:
            assert seen == expected, command
    return answers


def alike(answer: object) -> object:
    """Return an answer with the instants of tokens for tokens.

    Two grants in one instant have two tokens where these are counted for all leases together,
    and may have the same where each lease has a count of its own.
    """
    if isinstance(answer, tuple | list):
        return [alike(part) for part in answer]
    if isinstance(answer, str):
        return TOKEN.sub(lambda found: str(alike(int(found[0]))), answer)
    if type(answer) is int and answer > 10**15:
        return answer // TOKENS
    return answer


def remember(said: Said, ticked: Ticked) -> None:
    said.asks.append(f"ask {len(said.asks):04x} ")
    for begun in ticked.begun:
        run = begun.claimed.run
        assert run is not None
        # Every other one knows its record: its end is written in fewer words where there are such.
        known = run if len(said.attempts) % 2 else None
        said.attempts.append(
            Attempt(run.key, run.token, run.holder.nonce, run.lease, str(run.holder), known)
        )


def agreed(*program: tuple[object, ...]) -> list[object]:
    """Return the answers to a program that the clusters of this machine agree about."""
    with tempfile.TemporaryDirectory() as folder:
        clocks = [StillClocks() for _ in range(3)]
        path = Path(folder, "ledger.db")
        clusters = [
            reference(clocks[0]),
            Cluster(clocks[1], opened(":memory:", clocks[1])),
            Cluster(clocks[2], opened(path, clocks[2]), opened(path, clocks[2])),
        ]
        return agreed_by(clusters, program)


def agreed_on_a_server(*program: tuple[object, ...]) -> list[object]:
    """Return the answers that the reference and two clients of a server agree about."""
    with closing(ServerClocks()) as clocks:
        space = fresh_namespace()
        clients = [opened_postgres(clocks.url, namespace=space) for _ in range(2)]
        for client in clients:
            # The end of a run that was waited for makes what waits due at once on this server only
            # (test_rousing.py): without the mark it comes due by its time, as everywhere.
            client.dialect = client.dialect._replace(mark_awaited=None)
        return agreed_by([reference(StillClocks()), Cluster(clocks, *clients)], program)


def agreed_on_mariadb(
    *program: tuple[object, ...], kind: type[MariaClocks] = MariaClocks
) -> list[object]:
    """Return the same of two clients of a MariaDB server."""
    clocks, space = kind(), fresh_namespace()
    clients = [clocks.opened(space) for _ in range(2)]
    return agreed_by([reference(StillClocks()), Cluster(clocks, *clients)], program)


def agreed_on_mysql(*program: tuple[object, ...]) -> list[object]:
    """Return the same of two clients of a MySQL server."""
    return agreed_on_mariadb(*program, kind=MySQLClocks)


def reference(clocks: StillClocks) -> Cluster:
    world = BlockingWorld(clocks=clocks)
    return Cluster(clocks, MemoryLedger(world, MemoryStore(world)))


def agreed_by(clusters: Sequence[Cluster], program: Sequence[tuple[object, ...]]) -> list[object]:
    try:
        return agree(clusters, program)
    finally:
        for cluster in clusters:
            for ledger in cluster.ledgers:
                finish(ledger.close())


programs = st.lists(commands, min_size=9, max_size=50)
first = st.tuples(st.just("announce"), who, several)


@settings(max_examples=EXAMPLES, deadline=None)
@given(first, programs)
def test_sqlite_plans_like_the_reference(
    first: tuple[object, ...], program: list[tuple[object, ...]]
) -> None:
    agreed(first, *program)


@settings(max_examples=EXAMPLES // 6, deadline=None)
@given(first, st.lists(commands, min_size=20, max_size=60))
def test_postgres_plans_like_the_reference(
    first: tuple[object, ...], program: list[tuple[object, ...]]
) -> None:
    agreed_on_a_server(first, *program)


def _tick(room: int, *ends: Settled, only: str | None = None) -> tuple[object, ...]:
    return "tick", room, [(0, end) for end in ends], False, False, only, 0, ()


@pytest.mark.parametrize(
    "ended",
    [
        _tick(0, Settled(State.SUCCEEDED)),
        _tick(3, Settled(State.SUCCEEDED)),
        _tick(3, Settled(State.WAITING_RETRY, "error", 20.0, error="Oops")),
        _tick(3, Settled(State.WAITING_RETRY, "error", 20.0, error="Oops"), only="old"),
        ("cancel", 0, True),
    ],
)
def test_postgres_agrees_when_a_run_ends_that_a_lane_waits_for(ended: tuple[object, ...]) -> None:
    lane = Lane(0, "old", NOW, NOW + 180, NOW, spec=spec_of(Every(30)))
    agreed_on_a_server(
        ("announce", INSTANCES[0], [Definition("old", spec_of(Every(60)))]),
        ("pass", 61.0),
        _tick(3),
        ("backfill", lane),
        _tick(3),
        ended,
        ("pass", 1.0),
        _tick(3),
    )


@settings(max_examples=EXAMPLES // 6, deadline=None)
@given(first, st.lists(commands, min_size=20, max_size=60))
def test_mariadb_plans_like_the_reference(
    first: tuple[object, ...], program: list[tuple[object, ...]]
) -> None:
    agreed_on_mariadb(first, *program)


@settings(max_examples=EXAMPLES // 9, deadline=None)
@given(first, st.lists(commands, min_size=20, max_size=60))
def test_mysql_plans_like_the_reference(
    first: tuple[object, ...], program: list[tuple[object, ...]]
) -> None:
    agreed_on_mysql(first, *program)
