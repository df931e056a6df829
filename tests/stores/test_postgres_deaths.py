"""A crashed holder's lease is for others within a second, and a living holder never shares it."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest
from postgres_kit import Believer, boottime, fresh, granted, pooler, store_at

from fencepost import Fencepost, LeaseHeld, LeaseLost, OutcomeUnknown
from fencepost.model.divided import MARK_TTL, mark_holder
from fencepost.model.lease import Phase
from fencepost.stores.postgres_rows import RENEW, lease_key
from fencepost.world.flow import finish
from fencepost.world.postgres_pulse import GRACE
from proxy import Proxy
from servers import Postgres, shared

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fencepost.stores.postgres import PostgresStore

CROWD = Path(__file__).with_name("postgres_crowd_program.py")


def grace_of(name: str) -> float:
    """Return how long others wait once the holder's pulse is gone."""
    rows = shared(Postgres).run(f"SELECT grace_us FROM fencepost_lease WHERE name = '{name}'")
    [(grace_us,)] = rows
    assert isinstance(grace_us, int)
    return grace_us / 1e6


def test_a_killed_holder_of_ten_minutes_is_followed_within_a_second() -> None:
    url, name = shared(Postgres).url(), fresh()
    with Fencepost(url) as fp, Believer(url, name, ttl="10m") as holder:
        with pytest.raises(LeaseHeld):
            fp.lock(name).acquire()
        holder.kill()
        began = time.monotonic()
        grace = grace_of(name)
        with fp.lock(name, wait="20s") as lease:
            took = time.monotonic() - began
            assert lease.token > holder.token
        # On a machine that is short of time the holder may have asked for more grace.
        assert took < grace + 0.4


def test_a_killed_holder_is_followed_even_by_those_who_do_not_wait() -> None:
    url, name = shared(Postgres).url(), fresh()
    with Fencepost(url) as fp, Believer(url, name, ttl="10m") as holder:
        holder.kill()
        holder.process.wait()
        began = time.monotonic()
        while True:
            try:
                lease = fp.lock(name).acquire()
                break
            except LeaseHeld:  # the server has not noticed yet
                assert time.monotonic() - began < 5
        assert lease.token > holder.token


def test_behind_a_pooler_a_killed_holder_is_followed_at_the_end_of_its_ttl() -> None:
    url, name = pooler().url(), fresh()
    with Fencepost(url) as fp, Believer(url, name, ttl="2s") as holder:
        holder.kill()
        began = time.monotonic()
        with fp.lock(name, wait="20s"):
            took = time.monotonic() - began
        assert 0.5 < took < 3.0


def test_a_holder_whose_sessions_are_cut_keeps_its_lease() -> None:
    with Postgres.own() as server:
        url, name = server.url(), fresh()
        store = store_at(url, namespace="default")
        with Believer(url, name) as holder:
            view = finish(store.peek(name))
            assert view is not None
            for _ in range(3):
                assert server.terminate() >= 2
                time.sleep(GRACE)
                seen = finish(store.peek(name))
                assert seen is not None
                assert (seen.held, seen.alive, seen.token) == (True, True, holder.token)
            with pytest.raises(LeaseHeld):
                granted(store, name)
        finish(store.close())


def test_a_holder_that_is_cut_off_stops_to_believe_before_it_is_followed() -> None:
    name = fresh()
    server = shared(Postgres)
    with Proxy(server.port) as proxy, ExitStack() as stack:
        through = server.url().replace(str(server.port), str(proxy.port))
        holder = stack.enter_context(Believer(through, name))
        fp = stack.enter_context(Fencepost(server.url()))
        proxy.mode = "refuse"
        proxy.reset()
        with fp.lock(name, wait="20s"):
            followed = boottime()
            time.sleep(0.5)  # it cannot know yet that it was followed, and does not believe
            proxy.mode = "pass"
            believed, _ = holder.last_belief()
        assert believed < followed


@pytest.mark.parametrize("option", ["", "&advisory=off"])
def test_a_holder_in_a_hole_stops_to_believe_before_it_is_followed(option: str) -> None:
    """Nobody tells it that its packets go nowhere, and nobody tells the server that it is gone."""
    name, server = fresh(), shared(Postgres)
    with Proxy(server.port) as proxy, ExitStack() as stack:
        through = (
            server.url().replace(str(server.port), str(proxy.port)) + "?schema=public" + option
        )
        holder = stack.enter_context(Believer(through, name, ttl="3s"))
        fp = stack.enter_context(Fencepost(server.url()))
        proxy.mode = "hole"
        with fp.lock(name, wait="20s"):
            followed = boottime()
            believed, _ = holder.last_belief()
        assert believed < followed


@pytest.mark.parametrize("cut", [True, False])
def test_a_holder_that_is_stopped_for_a_second_never_believes_beside_another(cut: bool) -> None:  # noqa: FBT001
    with Postgres.own() as server, ExitStack() as stack:
        name = fresh()
        holder = stack.enter_context(Believer(server.url(), name))
        other = "?application_name=other"
        fp = stack.enter_context(Fencepost(server.url() + other))
        with pytest.raises(LeaseHeld):
            fp.lock(name).acquire()
        holder.pause()
        began = time.monotonic()
        if cut:
            assert server.terminate() >= 2
            with fp.lock(name, wait="20s"):
                followed = boottime()
                time.sleep(max(0.0, 1.0 - (time.monotonic() - began)))
                holder.go_on()
                believed, _ = holder.last_belief()
            assert believed < followed
        else:  # its session lives: nobody follows, and it goes on
            time.sleep(1.0)
            with pytest.raises(LeaseHeld):
                fp.lock(name).acquire()
            holder.go_on()
            time.sleep(0.5)
            holder.kill()
            assert holder.process.communicate()[0] == "", "it was never lost"


def test_a_stopped_holder_of_a_plain_row_stops_to_believe_before_it_is_followed() -> None:
    url, name = shared(Postgres).url() + "?advisory=off", fresh()
    with Fencepost(url) as fp, Believer(url, name, ttl="1s") as holder:
        holder.pause()
        with fp.lock(name, wait="20s"):
            followed = boottime()
            holder.go_on()
            believed, _ = holder.last_belief()
        assert believed < followed


def test_leases_do_not_change_hands_early_after_a_restart_of_the_server() -> None:
    """The locks of all sessions are gone then, and say nothing about anybody's death."""
    with Postgres.own() as server:
        store = store_at(server.url())
        granted(store, ttl=60.0)
        finish(store.close())
        server.restart()
        again = store_at(server.url(), namespace=store.namespace)
        with pytest.raises(LeaseHeld):
            granted(again)
        finish(again.close())


def test_a_holder_that_is_late_to_prove_itself_asks_for_more_grace() -> None:
    store = store_at(shared(Postgres).url())
    store.pulse_here.grace = GRACE
    holder, grant = granted(store, name := fresh(), ttl=60.0)
    assert grace_of(name) == store.pulse_here.vouching.leans[holder.nonce].grace == GRACE
    time.sleep(GRACE * 0.7)  # as if the machine was short of time
    finish(store.vouch())
    assert GRACE * 2 < store.pulse_here.vouching.leans[holder.nonce].grace == grace_of(name)
    finish(store.release(name, nonce=holder.nonce, token=grant.token))
    finish(store.close())
    store.pulse_here.grace = GRACE  # for the tests that follow


def test_others_wait_for_as_long_as_the_holder_has_asked_for() -> None:
    store = store_at(shared(Postgres).url())
    pulse = store.pulse_here
    pulse.grace = 1.5
    granted(store, ttl=60.0)
    pulse.grace = GRACE
    pulse.vouching.leans.clear()
    pulse.let_go()  # as if its process had died
    other = store_at(shared(Postgres).url(), namespace=store.namespace)
    began = time.monotonic()
    granted(other)
    assert time.monotonic() - began > 1.5
    for one in (store, other):
        finish(one.close())


def pulse_of(name: str) -> object:
    """Return what a lease leans on, as its row says."""
    [(pulse,)] = shared(Postgres).run(f"SELECT pulse FROM fencepost_lease WHERE name = '{name}'")
    return pulse


def test_a_mark_leans_on_nothing_and_keeps_no_session_open() -> None:
    store = store_at(shared(Postgres).url())
    before, name = set(store.pulse_here.vouching.leans), fresh()
    for nonce in ("one", "two", "three"):
        grant = finish(store.acquire(name, holder=mark_holder(nonce, limit=1), ttl=MARK_TTL))
        assert grant.lean is None
        assert pulse_of(name) == 0
    assert set(store.pulse_here.vouching.leans) == before
    finish(store.close())


def test_a_mark_that_is_taken_from_the_dead_leans_on_nothing() -> None:
    url, name = shared(Postgres).url(), fresh()
    store = store_at(url, namespace="default")
    with Believer(url, name, ttl="10m") as holder:
        holder.kill()
        holder.process.wait()
        began = time.monotonic()
        while True:
            try:
                mark = mark_holder("one", limit=1)
                grant = finish(store.acquire(name, holder=mark, ttl=MARK_TTL))
                break
            except LeaseHeld:  # the server has not noticed yet
                assert time.monotonic() - began < 5
    assert grant.lean is None
    assert pulse_of(name) == 0
    finish(store.close())


def test_a_crowd_that_is_killed_stopped_and_cut_off_never_acts_out_of_order(tmp_path: Path) -> None:
    """Whoever acts after a successor did would show a lower token at a later instant."""
    dice = random.Random(11)
    with Postgres.own() as server, ExitStack() as stack:
        crowd = [stack.enter_context(Member(server.url(), tmp_path)) for _ in range(4)]
        end = time.monotonic() + 8.0
        while time.monotonic() < end:
            time.sleep(dice.uniform(0.1, 0.6))
            one = dice.choice(crowd)
            what = dice.choice(["kill", "stop", "cut"])
            if what == "cut":
                server.terminate()
            elif what == "stop":
                one.process.send_signal(signal.SIGSTOP)
                server.terminate()
                time.sleep(1.0)
                one.process.send_signal(signal.SIGCONT)
            else:
                one.end()
                crowd[crowd.index(one)] = stack.enter_context(Member(server.url(), tmp_path))
    lines = [line for path in tmp_path.iterdir() for line in path.read_text().splitlines()]
    acts = sorted((float(at), int(token)) for at, token in map(str.split, lines))
    tokens = [token for _, token in acts]
    assert tokens == sorted(tokens)
    assert len(set(tokens)) > 10


class Member:
    """One process of the crowd."""

    def __init__(self, url: str, folder: Path) -> None:
        path = folder / fresh()
        self.process = subprocess.Popen(
            [sys.executable, str(CROWD), url, "wanted", str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


# The grace of a row is what its holder goes by.


@pytest.fixture
def store() -> Iterator[PostgresStore]:
    """Return a store whose pulse no other test shares."""
    store = store_at(f"{shared(Postgres).url()}?application_name={fresh()}")
    yield store
    finish(store.close())


def test_the_grace_of_a_lease_shrinks_only_when_it_is_granted_anew(store: PostgresStore) -> None:
    name, pulse = fresh(), store.pulse_here
    holder, grant = granted(store, name)
    lean = pulse.vouching.leans[holder.nonce]

    def renewed() -> float:
        finish(store.renew(name, nonce=holder.nonce, token=grant.token, ttl=30.0))
        return lean.grace

    late = {
        "key": lease_key(store.namespace, name),
        "nonce": holder.nonce,
        "token": grant.token,
        "ttl_us": 30_000_000,
        "pulse": pulse.key,
        "grace_us": int(GRACE * 1e6),
    }
    pulse.heed(1.0, now=boottime())
    assert renewed() == grace_of(name) == 4.0
    assert store.db.ask(RENEW, late).count == 1  # a renewal from before was on its way for long
    assert grace_of(name) == 4.0
    pulse.grace = GRACE  # as after a minute of calm
    assert renewed() == grace_of(name) == 4.0
    finish(store.release(name, nonce=holder.nonce, token=grant.token))
    granted(store, name)
    assert grace_of(name) == pytest.approx(GRACE)


def test_a_lock_whose_grace_is_no_whole_microsecond_is_proven_and_not_written(
    store: PostgresStore,
) -> None:
    name = fresh()
    store.pulse_here.heed(0.40430652, now=boottime())  # four times that is no whole microsecond
    granted(store, name)
    for _ in range(3):
        store.pulse_here.vouching.prove_at = 0.0
        finish(store.vouch())
    assert shared(Postgres).run(f"SELECT beat FROM fencepost_lease WHERE name = '{name}'") == [(0,)]


# What a proof tells about the row.


def proven(store: PostgresStore) -> None:
    store.pulse_here.vouching.prove_at = 0.0
    finish(store.vouch())


def test_a_lock_that_was_broken_is_not_believed_in_after_the_next_proof(
    store: PostgresStore,
) -> None:
    holder, grant = granted(store, name := fresh())
    lean = store.pulse_here.vouching.leans[holder.nonce]
    proven(store)
    assert lean.until() > boottime()
    finish(store.break_(name, token=grant.token, reason="it hangs", operator="ops"))
    proven(store)
    assert lean.until() < boottime() > lean.next_try
    with pytest.raises(LeaseLost, match="it was broken by ops: it hangs"):
        finish(store.renew(name, nonce=holder.nonce, token=grant.token, ttl=30.0))


def test_a_row_that_names_a_pulse_that_has_ended_is_written_anew(store: PostgresStore) -> None:
    """A renewal that was on its way for long may write what was true when it was sent."""
    holder, grant = granted(store, name := fresh())
    lean = store.pulse_here.vouching.leans[holder.nonce]
    shared(Postgres).run(f"UPDATE fencepost_lease SET pulse = 7 WHERE name = '{name}'")
    proven(store)
    assert lean.until() < boottime() > lean.next_try
    finish(store.renew(name, nonce=holder.nonce, token=grant.token, ttl=30.0))
    assert lean.until() > boottime()
    proven(store)
    assert lean.until() > boottime()


def test_a_lock_may_lean_on_a_pulse_from_the_moment_this_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer may be lost: its row is believed to name the pulse, as others may read there."""
    server = shared(Postgres)
    with Proxy(server.port) as proxy:
        url = server.url().replace(str(server.port), str(proxy.port))
        store = store_at(f"{url}?application_name={fresh()}")
        holder, grant = granted(store, name := fresh())
        lean = store.pulse_here.vouching.leans[holder.nonce]

        def renew() -> None:
            finish(store.renew(name, nonce=holder.nonce, token=grant.token, ttl=30.0))

        with monkeypatch.context() as patch:
            patch.setattr(store.pulse_here, "beat", lambda _: 0)  # no session can be had for one
            renew()
        assert lean.until() == lean.next_try == float("inf")
        proxy.lose_replies()
        with pytest.raises(OutcomeUnknown):
            renew()
        assert GRACE / 2 < lean.until() - boottime() < GRACE
        [(pulse,)] = server.run(f"SELECT pulse FROM fencepost_lease WHERE name = '{name}'")
        assert pulse == lean.on != 0
        finish(store.release(name, nonce=holder.nonce))
        finish(store.close())


def test_locks_of_two_schemas_in_one_process_are_both_proven() -> None:
    """Who proves a pulse looks at the rows of its own schema."""
    url, names = shared(Postgres).url(), [fresh(), fresh()]
    shared(Postgres).run(f"CREATE SCHEMA {names[1]}")
    with Fencepost(url) as one, Fencepost(f"{url}?schema={names[1]}") as other:
        leases = [face.lock(name).acquire() for face, name in zip((one, other), names, strict=True)]
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            for lease in leases:
                assert lease.phase is Phase.HELD
            time.sleep(0.01)
        for face, lease in zip((one, other), leases, strict=True):
            assert face.lock(lease.name).release(lease)
