"""The same commands, given to the reference and to others, have the same answers and effects."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from alarmlab import (
    Opened,
    StillClocks,
    firing_of,
    mariadb_book,
    memory_book,
    postgres_book,
    sqlite_book,
)
from hypothesis import given, settings, strategies as st

from fencepost.errors import FencepostError
from fencepost.model.alarm import AlarmState, AlarmWant, Batch, Failure, Firing, Rearm, Setting
from fencepost.model.alarm_policy import AlarmPolicy, Budget
from fencepost.model.lease import Holder
from fencepost.world.flow import finish
from marialab import MariaClocks, MySQLClocks
from pglab import ServerClocks, fresh_namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fencepost.ledger.alarm_api import AlarmBook
    from fencepost.testing.clock import SettableClocks
    from fencepost.world.api import Flow

KINDS, KEYS = ("k", "other"), ("a", "b", "ü")
# A clock that shows whole sixty-fourths is exact in microseconds, and so in every book.
INSTANT = 1 / 64

kinds, keys, who = st.sampled_from(KINDS), st.sampled_from(KEYS), st.integers(0, 7)
policies = st.tuples(
    st.sampled_from((1, 2, 5)),
    st.sampled_from((Budget(), Budget(2, 60.0))),
    st.sampled_from((0.0, 60.0)),
    st.sampled_from((20.0, 30.0)),
).map(
    lambda drawn: AlarmPolicy(max_losses=drawn[0], budget=drawn[1], grace=drawn[2], lease=drawn[3])
)
rearms = st.one_of(
    st.none(),
    st.builds(
        Rearm,
        st.sampled_from((None, "[1]")),
        at=st.sampled_from((None, 1_700_000_050.0)),
        after=st.sampled_from((0.0, 40.0)),
        every=st.sampled_from((None, 7.0)),
    ),
)
failures = st.builds(
    Failure,
    st.sampled_from(("errors", "faults", "releases")),
    pause=st.sampled_from((0.0, 40.0)),
    dead=st.sampled_from(("", "", "exhausted")),
    error=st.sampled_from((None, "Oops: it broke")),
    begun=st.sampled_from((True, True, False)),
)
generations = st.sampled_from((None, None, None, 0, "current", "current", 17))
commands = st.one_of(
    *[
        st.tuples(
            st.just("set"),
            st.tuples(kinds, keys),
            st.sampled_from((0.0, 0.0, 5.0, 100.0)),
            st.sampled_from((None, '{"n":1}')),
            generations,
            st.booleans(),
            who,
        )
    ]
    * 3,
    *[
        st.tuples(
            st.just("claim"),
            st.tuples(policies, policies),
            st.sampled_from((1, 2, 5)),
            st.booleans(),
            st.sampled_from((True, True, False)),
            who,
        )
    ]
    * 4,
    *[st.tuples(st.just("pass"), st.sampled_from((0.5, 5.0, 31.0, 90_000.0)))] * 2,
    *[st.tuples(st.just("finish"), who, rearms)] * 2,
    *[st.tuples(st.just("fail"), who, failures)] * 2,
    st.tuples(st.just("beat"), who),
    st.tuples(st.just("clear"), st.tuples(kinds, keys), generations),
    st.tuples(st.just("prune"), st.sampled_from((1, 100))),
    st.tuples(st.just("lock"), st.tuples(kinds, keys), who),
)


class Said:
    """What was asked before, which later commands refer to."""

    def __init__(self) -> None:
        self.firings: list[Firing] = []
        self.nonces: list[str] = []


class Cluster:
    """One kind of book, as two processes see it, and the time that passes for both."""

    def __init__(self, clocks: SettableClocks, *opened: Opened) -> None:
        self.clocks, self.opened = clocks, opened

    def of(self, number: int) -> AlarmBook:
        return self.opened[number % len(self.opened)].book


def obey(cluster: Cluster, said: Said, command: tuple[object, ...]) -> object:
    cluster.clocks.advance(INSTANT)
    try:
        return VERBS[str(command[0])](cluster, said, *command[1:])
    except FencepostError as error:
        return type(error).__name__, str(error)


def current(cluster: Cluster, names: tuple[str, str], expected: object) -> int | None:
    if expected != "current":
        assert expected is None or isinstance(expected, int)
        return expected
    known = finish(cluster.of(0).get(*names))
    return 0 if known is None else known.generation


def set_(
    cluster: Cluster,
    said: Said,
    names: tuple[str, str],
    after: float,
    payload: str | None,
    expected: object,
    keep: bool,  # noqa: FBT001 -- as the strategy has it
    n: int,
) -> object:
    call = f"s{len(said.nonces)}" if n else "the same call"
    asked = Setting(
        *names,
        call,
        after=after,
        payload=payload,
        if_generation=current(cluster, names, expected),
        keep=keep,
    )
    return finish(cluster.of(n).set(asked))


def claim(
    cluster: Cluster,
    said: Said,
    chosen: tuple[AlarmPolicy, AlarmPolicy],
    limit: int,
    alone: bool,  # noqa: FBT001 -- as the strategy has it
    sweep: bool,  # noqa: FBT001 -- as the strategy has it
    n: int,
) -> Batch:
    # Of eight askers most are new, and some ask again.
    nonce = said.nonces[-n] if 0 < n < 3 and n <= len(said.nonces) else f"n{len(said.nonces)}"
    known = dict(zip(KINDS, chosen, strict=True)) if n < 6 else {"k": chosen[0]}
    want = AlarmWant(Holder(nonce, "here", 1), known, limit, alone=alone, sweep=sweep)
    return finish(cluster.of(n).claim_due(want))


def by(
    cluster: Cluster, said: Said, n: int, verb: Callable[[AlarmBook, Firing], Flow[object]]
) -> object:
    """Let one of the newest handlers do something; the newest most of all."""
    if not said.firings:
        return None
    firing = said.firings[-1 - max(0, n - 4) % len(said.firings)]
    return finish(verb(cluster.of(n), firing))


def clear(cluster: Cluster, _: Said, names: tuple[str, str], expected: object) -> object:
    return finish(cluster.of(1).clear(*names, if_generation=current(cluster, names, expected)))


def lock(cluster: Cluster, said: Said, names: tuple[str, str], n: int) -> object:
    holder = Holder(f"lock {len(said.nonces)} {n}", "there", 2)
    leases = cluster.opened[0].leases
    name = "alarm:{}/{}".format(*names)
    return finish(leases.acquire(name, holder=holder, ttl=20.0))


VERBS: dict[str, Callable[..., object]] = {
    "set": set_,
    "claim": claim,
    "pass": lambda cluster, _, seconds: cluster.clocks.advance(seconds),
    "finish": lambda cluster, said, n, rearm: by(
        cluster, said, n, lambda book, firing: book.finish(firing, rearm)
    ),
    "fail": lambda cluster, said, n, failure: by(
        cluster, said, n, lambda book, firing: book.fail(firing, failure)
    ),
    "beat": lambda cluster, said, n: by(
        cluster, said, n, lambda book, firing: book.beat(firing, ttl=30.0)
    ),
    "clear": clear,
    "prune": lambda cluster, _, limit: finish(cluster.of(0).prune(limit=limit)),
    "lock": lock,
}


def contents(cluster: Cluster) -> list[object]:
    """Return all that can be read of a book and of its leases."""
    book = cluster.of(1)
    seen: list[object] = [finish(book.listed()), finish(book.listed(limit=2))]
    seen += [finish(book.listed("k")), finish(book.listed(states=(AlarmState.DEAD,)))]
    seen.append(finish(book.listed("k", states=(AlarmState.DEAD, AlarmState.ARMED))))
    seen += [finish(book.next_due(names)) for names in (KINDS, ("k",), ("other",), ())]
    views = finish(cluster.opened[0].leases.views())
    # Of a batch each has its own token, and SQLite's leases begin when their tokens say.
    seen.append([view._replace(alive=None, since=round(view.since, 3)) for view in views])
    return seen


def agree(clusters: Sequence[Cluster], program: Sequence[tuple[object, ...]]) -> list[object]:
    said, answers = Said(), []
    for command in program:
        answer, *others = (obey(cluster, said, command) for cluster in clusters)
        for other in others:
            assert other == answer, command
        answers.append(answer)
        if isinstance(answer, Batch):
            said.firings += map(firing_of, answer.claimed)
            said.nonces.append(f"n{len(said.nonces)}")
        for cluster in clusters:
            consistent(cluster)
    expected, *found = map(contents, clusters)
    for seen in found:
        assert seen == expected
    return answers


def consistent(cluster: Cluster) -> None:
    """Check what must be true of every alarm at any time."""
    for record in finish(cluster.of(0).listed()):
        ends = record.errors + record.faults + record.losses + record.releases
        firing = record.fired == record.generation
        if record.state is not AlarmState.CLEARED:
            assert record.starts == ends + firing, record
        assert (record.state is AlarmState.FIRING) <= bool(record.fired), record
        assert record.fired <= record.generation


def clusters_in(folder: str) -> list[Cluster]:
    """Return the reference, SQLite in memory, and two connections to one file."""
    clocks = [StillClocks() for _ in range(3)]
    path = Path(folder, "ledger.db")
    return [
        Cluster(clocks[0], memory_book(clocks[0])),
        Cluster(clocks[1], sqlite_book(":memory:", clocks[1])),
        Cluster(clocks[2], sqlite_book(path, clocks[2]), sqlite_book(path, clocks[2])),
    ]


def agreed(*program: tuple[object, ...]) -> list[object]:
    with tempfile.TemporaryDirectory() as folder:
        return agreed_by(clusters_in(folder), program)


def agreed_on_a_server(
    clocks: ServerClocks | MariaClocks, program: Sequence[tuple[object, ...]]
) -> list[object]:
    """Return the answers that the reference and two clients of a server agree about."""
    still, space = StillClocks(), fresh_namespace()
    if isinstance(clocks, ServerClocks):
        clients = [postgres_book(clocks.url, namespace=space) for _ in range(2)]
    else:
        clients = [mariadb_book(clocks.url, clocks=clocks, namespace=space) for _ in range(2)]
    return agreed_by([Cluster(still, memory_book(still)), Cluster(clocks, *clients)], program)


def agreed_by(clusters: Sequence[Cluster], program: Sequence[tuple[object, ...]]) -> list[object]:
    try:
        return agree(clusters, program)
    finally:
        for cluster in clusters:
            for opened in cluster.opened:
                opened.close()


@settings(max_examples=150, deadline=None)
@given(st.lists(commands, min_size=1, max_size=40))
def test_sqlite_keeps_alarms_like_the_reference(program: list[tuple[object, ...]]) -> None:
    agreed(*program)


@settings(max_examples=15, deadline=None)
@given(st.lists(commands, min_size=20, max_size=60))
def test_postgres_keeps_alarms_like_the_reference(program: list[tuple[object, ...]]) -> None:
    with closing(ServerClocks()) as clocks:
        agreed_on_a_server(clocks, program)


@settings(max_examples=15, deadline=None)
@given(st.lists(commands, min_size=20, max_size=60))
def test_mariadb_keeps_alarms_like_the_reference(program: list[tuple[object, ...]]) -> None:
    agreed_on_a_server(MariaClocks(), program)


@settings(max_examples=10, deadline=None)
@given(st.lists(commands, min_size=20, max_size=60))
def test_mysql_keeps_alarms_like_the_reference(program: list[tuple[object, ...]]) -> None:
    agreed_on_a_server(MySQLClocks(), program)
