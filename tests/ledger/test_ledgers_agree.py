"""The same commands, given to the reference and to others, have the same answers and effects."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import given, settings, strategies as st
from ledgerlab import StillClocks, opened, wanted

from fencepost.errors import FencepostError
from fencepost.ledger.api import Attempt, Report
from fencepost.ledger.memory import MemoryLedger
from fencepost.model.claim import Claimed, Verdict
from fencepost.model.ending import UNFINISHED, Settled
from fencepost.model.item import ItemState
from fencepost.model.lease import Holder, View
from fencepost.model.policy import OnLoss, Overlap, Policy, Retry, RetryUntil
from fencepost.model.run import TABLE, State
from fencepost.model.slot import RunKey
from fencepost.stores.memory import MemoryStore
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish
from marialab import MariaClocks, MySQLClocks
from pglab import ServerClocks, fresh_namespace, opened_postgres

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fencepost.ledger.api import Ledger
    from fencepost.testing.clock import SettableClocks
    from fencepost.world.api import Flow

JOBS = ("bills", "mail")
LOCKS = ("bills", "mail", "shared")
SCOPES = ("job", "slot")
ITEMS = ("1", "2", "ü")
CALLS = (None, "call 1", "call 2")
OPERATOR = "olga"
# A clock that shows whole sixty-fourths is exact in microseconds, and so in every ledger.
INSTANT = 1 / 64

keys = st.builds(
    RunKey,
    st.sampled_from(JOBS),
    st.sampled_from((1_000, 2_000, 3_000)),
    st.sampled_from((0, 0, 0, 1)),
    st.sampled_from((0, 0, 0, 1)),
)
policies = st.fixed_dictionaries(
    {
        "overlap": st.sampled_from(Overlap),
        "max_concurrent": st.sampled_from((1, 2)),
        "max_waiting": st.sampled_from((1, None)),
        "retry_until": st.sampled_from(RetryUntil),
        "on_loss": st.sampled_from((OnLoss.RESUME, OnLoss.RESUME, OnLoss.FAIL)),
        "max_losses": st.sampled_from((1, 5)),
        "loss_pause": st.sampled_from((1.0, 64.0)),
        "start_deadline": st.sampled_from((None, 10.0)),
        "timeout": st.sampled_from((None, 30.0, 3600.0)),
        "retry": st.sampled_from((Retry(1), Retry(2, base=8.0, jitter=False))),
    }
).map(lambda words: Policy(**words))
reports = st.builds(
    Report,
    done=st.sampled_from((None, 1, 2)),
    total=st.sampled_from((None, 9)),
    counts=st.sampled_from(((), (("rows", 1),), (("rows", 2), ("bytes", 7)))),
    source=st.sampled_from(("a", "b")),
)
LEGAL = set(TABLE[State.RUNNING]) - {State.RUNNING}
endings = st.builds(
    Settled,
    st.sampled_from((*UNFINISHED, *UNFINISHED, *sorted(LEGAL))),
    reason=st.sampled_from(("", "because")),
    pause=st.sampled_from((0.0, 40.0)),
    result=st.sampled_from((None, "[1]")),
    error=st.sampled_from((None, "Oops: it broke")),
)
texts = st.sampled_from(('{"page": 1}', '{"page": 2}'))
some_items = st.lists(st.sampled_from(ITEMS), min_size=1, max_size=3)
ends = st.lists(
    st.tuples(
        st.sampled_from(ITEMS),
        st.sampled_from((ItemState.DONE, ItemState.FAILED)),
        st.sampled_from((None, "no")),
    ),
    min_size=1,
    max_size=2,
)
who = st.integers(0, 7)  # which of the attempts or nonces so far
commands = st.one_of(
    *[st.tuples(st.just("claim"), keys, policies, st.sampled_from((*LOCKS, "")), who)] * 4,
    *[st.tuples(st.just("pass"), st.sampled_from((0.5, 5.0, 31.0, 70.0)))] * 2,
    st.tuples(st.just("beat"), who, reports),
    st.tuples(st.just("hand_over"), who, st.sampled_from((20.0, 60.0))),
    st.tuples(st.just("order_stop"), who),
    st.tuples(st.just("save"), who, texts, st.sampled_from((None, 1, 2)), reports),
    st.tuples(st.just("begin"), who, st.sampled_from(SCOPES), some_items, st.booleans()),
    st.tuples(st.just("end"), who, st.sampled_from(SCOPES), ends, st.sampled_from(CALLS)),
    *[st.tuples(st.just("finish"), who, endings, reports)] * 2,
    st.tuples(st.just("cancel"), keys, st.booleans()),
    st.tuples(st.just("note"), keys),
    st.tuples(st.just("register"), st.sampled_from(JOBS), texts),
    st.tuples(st.just("lift"), st.sampled_from(JOBS)),
    st.tuples(st.just("lock"), st.sampled_from((*LOCKS, "shared#1"))),
    st.tuples(st.just("unlock"), st.sampled_from((*LOCKS, "shared#1"))),
)


class Cluster:
    """One kind of ledger, as two processes see it, and the time that passes for both."""

    def __init__(self, clocks: SettableClocks, *ledgers: Ledger) -> None:
        self.clocks, self.ledgers = clocks, ledgers

    def of(self, number: int) -> Ledger:
        return self.ledgers[number % len(self.ledgers)]


class Said(NamedTuple):
    """What was asked before, which later commands refer to."""

    attempts: list[Attempt]
    nonces: list[str]


def obey(cluster: Cluster, said: Said, command: tuple[object, ...]) -> object:
    """Carry a command out on one cluster; return its answer, or what it raised."""
    cluster.clocks.advance(INSTANT)
    try:
        return VERBS[str(command[0])](cluster, said, *command[1:])
    except FencepostError as error:
        return type(error).__name__, str(error)


def claim(
    cluster: Cluster, said: Said, key: RunKey, policy: Policy, lock: str, n: int
) -> Claimed | None:
    if has_twin_elsewhere(cluster.of(n), key, lock or key.job):
        return None  # planners ask for another run of a slot only after the one before has ended
    # Of eight askers most are new, some ask again, and one wants a run of its own.
    nonce = said.nonces[-n] if 0 < n < 3 and n <= len(said.nonces) else f"n{len(said.nonces)}"
    want = wanted(key, nonce, policy, lock=lock, alone=n % 2 == 0)
    return finish(cluster.of(n).claim(want._replace(new=n == 7)))


def has_twin_elsewhere(ledger: Ledger, key: RunKey, lock: str) -> bool:
    """Say whether another run of the slot lives, under another lock."""
    twin = finish(ledger.find(key._replace(rerun=1 - key.rerun)))
    return twin is not None and not twin.state.terminal and twin.lock != lock


def beat(cluster: Cluster, said: Said, n: int, report: Report) -> object:
    return by(cluster, said, n, lambda ledger, own: ledger.beat(own, ttl=30.0, report=report))


def hand_over(cluster: Cluster, said: Said, n: int, ttl: float) -> object:
    return by(cluster, said, n, lambda ledger, own: ledger.hand_over(own, ttl=ttl))


def order_stop(cluster: Cluster, said: Said, n: int) -> object:
    return by(cluster, said, n, lambda ledger, own: ledger.order_stop(own))


def save(
    cluster: Cluster, said: Said, n: int, text: str, order: int | None, report: Report
) -> object:
    def verb(ledger: Ledger, own: Attempt) -> Flow[object]:
        return ledger.save(own, checkpoint=text, order=order, report=report)

    return by(cluster, said, n, verb)


def begin(
    cluster: Cluster,
    said: Said,
    n: int,
    scope: str,
    items: list[str],
    repeat: bool,  # noqa: FBT001 -- as the strategy has it
) -> object:
    def verb(ledger: Ledger, own: Attempt) -> Flow[object]:
        call = f"call {len(items)}"
        return ledger.begin(own, scope=scope, items=items, call=call, repeat=repeat)

    return by(cluster, said, n, verb)


def end(
    cluster: Cluster,
    said: Said,
    n: int,
    scope: str,
    items: list[tuple[str, ItemState, str | None]],
    call: str | None,
) -> object:
    def verb(ledger: Ledger, own: Attempt) -> Flow[object]:
        return ledger.end(own, scope=scope, items=items, call=call)

    return by(cluster, said, n, verb)


def finish_run(cluster: Cluster, said: Said, n: int, settled: Settled, report: Report) -> object:
    return by(cluster, said, n, lambda ledger, own: ledger.finish(own, settled, report=report))


def by(
    cluster: Cluster,
    said: Said,
    n: int,
    verb: Callable[[Ledger, Attempt], Flow[object]],
) -> object:
    """Let one of the newest attempts do something; the newest most of all."""
    if not said.attempts:
        return None
    attempt = said.attempts[-1 - max(0, n - 4) % len(said.attempts)]
    return finish(verb(cluster.of(n), attempt))


def cancel(
    cluster: Cluster,
    _: Said,
    key: RunKey,
    force: bool,  # noqa: FBT001 -- as the strategy has it
) -> object:
    return finish(cluster.of(0).cancel(key, force=force, operator=OPERATOR))


def note(cluster: Cluster, _: Said, key: RunKey) -> object:
    return finish(cluster.of(1).note(key, "seen", token=3, detail="by the test"))


def lock(cluster: Cluster, said: Said, name: str) -> object:
    holder = Holder(f"lock {name} {len(said.nonces)}", "there", 2)
    return finish(cluster.of(0).leases.acquire(name, holder=holder, ttl=20.0))


def unlock(cluster: Cluster, said: Said, name: str) -> object:
    nonce = f"lock {name} {len(said.nonces)}"
    return finish(cluster.of(1).leases.release(name, nonce=nonce))


VERBS: dict[str, Callable[..., object]] = {
    "claim": claim,
    "pass": lambda cluster, _, seconds: cluster.clocks.advance(seconds),
    "beat": beat,
    "hand_over": hand_over,
    "order_stop": order_stop,
    "save": save,
    "begin": begin,
    "end": end,
    "finish": finish_run,
    "cancel": cancel,
    "note": note,
    "register": lambda cluster, _, job, text: finish(cluster.of(0).register(job, text)),
    "lift": lambda cluster, _, job: finish(cluster.of(1).lift(job)),
    "lock": lock,
    "unlock": unlock,
}


def contents(cluster: Cluster) -> list[object]:
    """Return all that can be read of a ledger and of its leases."""
    ledger = cluster.of(1)
    runs = finish(ledger.runs(limit=1_000))
    seen: list[object] = [runs, finish(ledger.jobs())]
    for job in JOBS:
        seen.append(finish(ledger.runs(job, limit=3)))
        seen.append(finish(ledger.runs(job, states=(State.FAILED, State.PENDING))))
    seen.append(finish(ledger.runs(limit=2, states=(State.RUNNING, State.SUCCEEDED))))
    for key in {run.key for run in runs} | {RunKey("bills", 1_000)}:
        seen += [finish(ledger.find(key)), finish(ledger.events(key)), finish(ledger.counts(key))]
    for scope in SCOPES:
        seen.append(finish(ledger.items(scope)))
        seen.append(finish(ledger.items(scope, states=(ItemState.DONE,))))
    views = finish(ledger.leases.views())
    seen.append([settled_view(view) for view in views])
    return seen


def settled_view(view: View) -> View:
    return view._replace(alive=None)  # which a dictionary cannot know


def agree(clusters: Sequence[Cluster], program: Sequence[tuple[object, ...]]) -> list[object]:
    """Give all clusters the same commands; return the answers, after comparing them."""
    said, answers = Said([], []), []
    for command in program:
        answer, *others = (obey(cluster, said, command) for cluster in clusters)
        for other in others:
            assert other == answer, command
        answers.append(answer)
        if isinstance(answer, Claimed):
            remember(said, answer)
    expected, *found = map(contents, clusters)
    for seen in found:
        assert seen == expected
    return answers


def remember(said: Said, answer: Claimed) -> None:
    run = answer.run
    if answer.verdict is Verdict.GO and run is not None:
        # Every other one knows its record: its end is written in fewer words where there are such.
        known = run if len(said.attempts) % 2 else None
        said.attempts.append(
            Attempt(run.key, run.token, run.holder.nonce, run.lease, str(run.holder), known)
        )
    said.nonces.append(f"n{len(said.nonces)}")


def clusters_in(folder: str) -> list[Cluster]:
    """Return the reference, SQLite in memory, and two connections to one file."""
    clocks = [StillClocks() for _ in range(3)]
    world = BlockingWorld(clocks=clocks[0])
    path = Path(folder, "ledger.db")
    return [
        Cluster(clocks[0], MemoryLedger(world, MemoryStore(world))),
        Cluster(clocks[1], opened(":memory:", clocks[1])),
        Cluster(clocks[2], opened(path, clocks[2]), opened(path, clocks[2])),
    ]


def agreed(*program: tuple[object, ...]) -> list[object]:
    """Return the answers to a program that the clusters of this machine agree about."""
    with tempfile.TemporaryDirectory() as folder:
        return agreed_by(clusters_in(folder), program)


def agreed_on_a_server(*program: tuple[object, ...]) -> list[object]:
    """Return the answers that the reference and two clients of a server agree about."""
    with closing(ServerClocks()) as clocks:
        space = fresh_namespace()
        clients = [opened_postgres(clocks.url, namespace=space) for _ in range(2)]
        return agreed_by([reference(), Cluster(clocks, *clients)], program)


def agreed_on_mariadb(
    *program: tuple[object, ...], kind: type[MariaClocks] = MariaClocks
) -> list[object]:
    """Return the same of two clients of a MariaDB server."""
    clocks, space = kind(), fresh_namespace()
    clients = [clocks.opened(space) for _ in range(2)]
    return agreed_by([reference(), Cluster(clocks, *clients)], program)


def agreed_on_mysql(*program: tuple[object, ...]) -> list[object]:
    """Return the same of two clients of a MySQL server."""
    return agreed_on_mariadb(*program, kind=MySQLClocks)


def reference() -> Cluster:
    still = StillClocks()
    world = BlockingWorld(clocks=still)
    return Cluster(still, MemoryLedger(world, MemoryStore(world)))


def agreed_by(clusters: Sequence[Cluster], program: Sequence[tuple[object, ...]]) -> list[object]:
    try:
        return agree(clusters, program)
    finally:
        for cluster in clusters:
            for ledger in cluster.ledgers:
                finish(ledger.close())


EVERYWHERE = [agreed, agreed_on_a_server, agreed_on_mariadb, agreed_on_mysql]
everywhere = pytest.mark.parametrize("agreed", EVERYWHERE)


@settings(max_examples=150, deadline=None)
@given(st.lists(commands, min_size=1, max_size=40))
def test_sqlite_answers_like_the_reference(program: list[tuple[object, ...]]) -> None:
    agreed(*program)


@settings(max_examples=15, deadline=None)
@given(st.lists(commands, min_size=20, max_size=60))
def test_postgres_answers_like_the_reference(program: list[tuple[object, ...]]) -> None:
    agreed_on_a_server(*program)


@settings(max_examples=15, deadline=None)
@given(st.lists(commands, min_size=20, max_size=60))
def test_mariadb_answers_like_the_reference(program: list[tuple[object, ...]]) -> None:
    agreed_on_mariadb(*program)


@settings(max_examples=10, deadline=None)
@given(st.lists(commands, min_size=20, max_size=60))
def test_mysql_answers_like_the_reference(program: list[tuple[object, ...]]) -> None:
    agreed_on_mysql(*program)


@everywhere
def test_ledgers_agree_about_a_run_that_is_poison_and_its_job(
    agreed: Callable[..., list[object]],
) -> None:
    key, policy = RunKey("bills", 1_000), Policy(max_losses=1)
    ask, wait = ("claim", key, policy, "", 4), ("pass", 31.0)
    later = ("claim", RunKey("bills", 2_000), policy, "", 4)
    lifts = ("lift", "bills")
    *_, poison, skipped, lifted, again = agreed(*[ask, wait] * 3, ask, later, lifts, lifts)
    reasons = [answer.run.reason for answer in (poison, skipped) if answer.run]  # type: ignore[attr-defined]
    assert reasons == ["poison", "quarantined"]
    assert (lifted, again) == (True, False)


@everywhere
def test_ledgers_agree_that_a_run_which_was_ordered_to_stop_is_no_loss(
    agreed: Callable[..., list[object]],
) -> None:
    key, policy = RunKey("bills", 1_000), Policy(max_losses=1)
    ask, wait, order = ("claim", key, policy, "", 4), ("pass", 31.0), ("order_stop", 0)
    _, _, busy, _, again = agreed(ask, order, ask, wait, ask)
    assert busy.verdict is Verdict.BUSY  # type: ignore[attr-defined]
    assert (again.run.losses, again.run.releases, again.run.reason) == (0, 1, "")  # type: ignore[attr-defined]


@everywhere
def test_ledgers_agree_whether_an_order_to_stop_is_on_record(
    agreed: Callable[..., list[object]],
) -> None:
    key, policy, order = RunKey("bills", 1_000), Policy(), ("order_stop", 0)
    ask, older = ("claim", key, policy, "", 4), ("order_stop", 5)
    _, first, again, _, _, taken = agreed(ask, order, order, ("pass", 31.0), ask, older)
    assert (first, again, taken) == (True, True, False)
    _, _, handed_off = agreed(ask, ("hand_over", 0, 20.0), order)
    assert handed_off is False
    done = ("finish", 0, Settled(State.SUCCEEDED, ""), Report())
    _, _, ended = agreed(ask, done, order)
    assert ended is False


def test_a_run_that_goes_on_under_another_permit_has_a_higher_token_though_the_clock_fell() -> None:
    policy, one = Policy(overlap=Overlap.ALLOW, max_concurrent=2), RunKey("bills", 1_000)
    clocks = StillClocks()
    ledger = opened(":memory:", clocks)
    first = finish(ledger.claim(wanted(RunKey("bills", 2_000), "a", policy)))
    second = finish(ledger.claim(wanted(one, "b", policy)))
    assert first.run is not None
    assert second.run is not None
    assert (first.run.lease, second.run.lease) == ("bills#1", "bills#2")
    clocks.advance(31.0)
    clocks.step_wall(-3_600.0)
    again = finish(ledger.claim(wanted(one, "c", policy)))
    assert again.run is not None
    assert again.run.lease == "bills#1"
    assert again.run.token > second.run.token
    finish(ledger.close())
